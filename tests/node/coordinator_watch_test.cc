// SPDX-License-Identifier: Apache-2.0
#include "node/coordinator_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace ropeteam {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr TimeUs kSecond = 1'000'000;
constexpr char kOwn[] = "10.0.0.1:29600";
constexpr char kOther[] = "10.0.0.9:29600";

// A view of members with these ordinals. Ordinal 3, for example, has id 4 and name node-3.
View ViewOf(Epoch epoch, const std::vector<uint32_t>& ordinals, uint32_t nodes) {
  View view;
  view.epoch = epoch;
  view.settings.nodes = nodes;
  for (const uint32_t ordinal : ordinals) {
    Member member;
    member.id = ordinal + 1;
    member.name = "node-" + std::to_string(ordinal);
    member.ordinal = ordinal;
    view.members.push_back(member);
  }
  return view;
}

Contact Registered(const std::string& address, TimeUs since) { return {address, true, since, ""}; }
Contact Lost(const std::string& address, TimeUs since) {
  return {address, false, since, "connection refused"};
}

TEST(CoordinatorWatch, ARegisteredNodeAsksNobodyAndTellsWhereItIs) {
  CoordinatorWatch watch("", 0);
  EXPECT_EQ(watch.Answer(), "");
  watch.OnContact(Registered(kOther, kSecond));
  watch.OnView(kSecond, 2, ViewOf(1, {0, 1, 2}, 3));
  EXPECT_THAT(watch.ToAsk(), IsEmpty());
  EXPECT_EQ(watch.Answer(), kOther);
  const MembershipReport report = watch.Report(2 * kSecond, {});
  EXPECT_TRUE(report.registered);
  EXPECT_EQ(report.missing_total, 0u);
  EXPECT_EQ(report.blocked + report.advice, "");
}

TEST(CoordinatorWatch, ANodeWithoutACoordinatorAsksTheOthersAndFollows) {
  CoordinatorWatch watch("", 0);
  watch.OnContact(Registered(kOwn, kSecond));
  View view = ViewOf(1, {0, 1, 2}, 3);
  view.leader = 1;
  watch.OnView(kSecond, 2, view);
  watch.OnContact(Lost(kOwn, 5 * kSecond));
  EXPECT_EQ(watch.Answer(), "") << "what it had is of no use to others";
  EXPECT_EQ(watch.ToAsk().size(), 2u);
  bool now = true;
  EXPECT_TRUE(watch.Follows(kOther, &now));
  EXPECT_FALSE(now);

  const MembershipReport report = watch.Report(47 * kSecond, {{1, 5 * kSecond}});
  EXPECT_FALSE(report.registered);
  EXPECT_EQ(report.for_us, 42 * kSecond);
  ASSERT_EQ(report.missing.size(), 1u);
  EXPECT_EQ(report.missing[0].node, "node-0");
  EXPECT_EQ(report.missing[0].for_us, 42 * kSecond);
  EXPECT_TRUE(report.missing[0].in_view);
  ASSERT_EQ(report.tried.size(), 1u);
  EXPECT_EQ(report.tried[0].reason, "connection refused");
  EXPECT_THAT(report.blocked, AllOf(HasSubstr("nothing is committed"), HasSubstr("the leader is lost, too")));
  EXPECT_THAT(watch.Report(47 * kSecond, {{3, 5 * kSecond}}).blocked, HasSubstr("reads go on"));
  EXPECT_THAT(report.advice, HasSubstr("ropeteam rejoin"));
}

// etcd does not answer from the start, so no address is known and there was no contact.
TEST(CoordinatorWatch, OverEtcdTheReportSaysWhatEtcdDoes) {
  CoordinatorWatch watch("", 0, /*moves=*/true);
  watch.OnContact({"", false, 2 * kSecond, "", "etcd at h:1 does not answer"});
  MembershipReport report = watch.Report(5 * kSecond, {});
  EXPECT_STREQ(report.kind, "etcd");
  EXPECT_EQ(report.coordinator, "");
  EXPECT_EQ(report.for_us, 3 * kSecond);
  EXPECT_THAT(report.tried, IsEmpty()) << "an empty address is not an address";
  EXPECT_THAT(report.blocked, AllOf(HasSubstr("etcd at h:1 does not answer"), HasSubstr("has not joined")));
  EXPECT_THAT(report.advice, HasSubstr("etcd"));
  watch.OnContact({kOther, true, 6 * kSecond, "", ""});
  watch.OnView(6 * kSecond, 1, ViewOf(1, {0}, 1));
  EXPECT_EQ(watch.Report(7 * kSecond, {}).blocked, "");
  watch.OnContact({kOther, true, 6 * kSecond, "", "etcd at h:1 does not answer"});
  EXPECT_EQ(watch.Report(8 * kSecond, {}).blocked, "etcd at h:1 does not answer");
}

TEST(CoordinatorWatch, InALargeViewFewAreAskedAndAllAreReached) {
  constexpr uint32_t kNodes = 1000;
  std::vector<uint32_t> ordinals;
  for (uint32_t i = 0; i < kNodes; ++i) ordinals.push_back(i);
  const View view = ViewOf(1, ordinals, kNodes);
  std::set<NodeId> know = {1};
  int rounds = 0;
  for (; know.size() < kNodes; ++rounds) {
    ASSERT_LT(rounds, 12);
    std::set<NodeId> next = know;
    for (const Member& member : view.members) {
      CoordinatorWatch watch("", 0);
      watch.OnView(0, member.id, view);
      const std::vector<Member> asked = watch.ToAsk();
      EXPECT_LE(asked.size(), 10u);
      for (const Member& other : asked)
        if (know.contains(other.id)) next.insert(member.id);
    }
    know = std::move(next);
  }
}

TEST(CoordinatorWatch, TheNodeOfACoordinatorLeavesItOnlyIfItIsAloneUnderIt) {
  CoordinatorWatch watch(kOwn, 0);
  watch.OnContact(Registered(kOwn, kSecond));
  watch.OnView(kSecond, 1, ViewOf(1, {0, 1, 2}, 3));
  bool now = false;
  (void)watch.Follows(kOther, &now);
  EXPECT_FALSE(now) << "others depend on it";
  EXPECT_THAT(watch.ToAsk(), IsEmpty());
  EXPECT_EQ(watch.Answer(), kOwn);
  watch.OnView(9 * kSecond, 1, ViewOf(2, {0}, 3));
  EXPECT_EQ(watch.ToAsk().size(), 2u) << "those that it has lost";
  EXPECT_EQ(watch.Answer(), "") << "or two that are alone would go to each other";
  EXPECT_TRUE(watch.Follows(kOther, &now));
  EXPECT_TRUE(now);
  EXPECT_FALSE(watch.Follows(kOwn, &now));
}

TEST(CoordinatorWatch, MissingAreThoseThatNobodyHasReplaced) {
  CoordinatorWatch watch("", 0);
  watch.OnContact(Registered(kOwn, kSecond));
  watch.OnView(1 * kSecond, 1, ViewOf(1, {0, 1, 2}, 4));
  watch.OnView(3 * kSecond, 1, ViewOf(2, {0, 2}, 4));
  MembershipReport report = watch.Report(4 * kSecond, {});
  ASSERT_EQ(report.missing_total, 2u);
  EXPECT_EQ(report.missing[0].node, "node-1");
  EXPECT_EQ(report.missing[0].for_us, 1 * kSecond);
  EXPECT_FALSE(report.missing[0].in_view);
  EXPECT_EQ(report.missing[1].node, "ordinal 3") << "it was never there";
  EXPECT_THAT(report.advice, HasSubstr(kOwn));
  View view = ViewOf(3, {0, 1, 2, 3}, 4);
  view.members[1].id = 77;
  view.members[1].name = "another-name";
  watch.OnView(5 * kSecond, 1, view);
  EXPECT_EQ(watch.Report(6 * kSecond, {}).missing_total, 0u);
}

}  // namespace
}  // namespace ropeteam
