// SPDX-License-Identifier: Apache-2.0
//
// Which rails are paired, which link the next piece takes, and which ports are chosen: all without a device.

#include <gmock/gmock.h>

#include <errno.h>
#include <sys/resource.h>

#include "transport/rails.h"
#include "transport/verbs/device.h"

namespace ropeteam::verbs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(VerbsRails, EveryRailOfBothHasAPartner) {
  EXPECT_THAT(PairRails(1, 1), ElementsAre(RailPair{0, 0}));
  EXPECT_THAT(PairRails(2, 2), ElementsAre(RailPair{0, 0}, RailPair{1, 1}));
  EXPECT_THAT(PairRails(3, 2), ElementsAre(RailPair{0, 0}, RailPair{1, 1}, RailPair{2, 0}));
  EXPECT_THAT(PairRails(1, 2), ElementsAre(RailPair{0, 0}, RailPair{0, 1}));
}

TEST(VerbsRails, TheLinkThatWouldBeDoneFirstIsChosen) {
  constexpr uint64_t kMiB = 1 << 20;
  // With equal speeds, the link with less work; of equal links, the first.
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{true, 100, 2 * kMiB}, {true, 100, kMiB}}, kMiB), 1);
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{true, 100, kMiB}, {true, 100, kMiB}}, kMiB), 0);
  // Three pieces at speed 400 end before one at 100 …
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{true, 400, 2 * kMiB}, {true, 100, 0}}, kMiB), 0);
  // … but five do not.
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{true, 400, 4 * kMiB}, {true, 100, 0}}, kMiB), 1);
}

TEST(VerbsRails, SharesFollowTheSpeeds) {
  std::vector<LinkLoad> links = {{true, 300, 0}, {true, 100, 0}};
  for (int i = 0; i < 400; i++) links[static_cast<size_t>(ChooseLink(links, 1000))].bytes += 1000;
  EXPECT_NEAR(static_cast<double>(links[0].bytes), 300'000, 2'000);
}

TEST(VerbsRails, ALinkThatIsDownOrFullIsNotChosen) {
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{false, 100, 0}, {true, 100, 1 << 30}}, 1), 1);
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{false, 100, 0}}, 1), -1);
  EXPECT_EQ(ChooseLink({}, 1), -1);
}

TEST(VerbsRails, AnUnknownSpeedIsTakenForTheFastest) {
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{true, 0, 100}, {true, 100, 150}}, 10), 0);
  EXPECT_EQ(ChooseLink(std::vector<LinkLoad>{{true, 0, 200}, {true, 0, 100}}, 10), 1);
}

TEST(VerbsPorts, SpeedsByTheSpecification) {
  EXPECT_EQ(LinkMbps(2, 32), 100'000u);   // EDR
  EXPECT_EQ(LinkMbps(2, 64), 200'000u);   // HDR
  EXPECT_EQ(LinkMbps(2, 128), 400'000u);  // NDR
  EXPECT_EQ(LinkMbps(1, 32), 25'000u);
  EXPECT_EQ(LinkMbps(3, 32), 0u);
}

Port SomePort(const std::string& name, const std::string& unusable = "") {
  Port port;
  port.device = port.name = name;
  port.unusable = unusable;
  return port;
}

TEST(VerbsPorts, WithoutANameAllThatCanBeUsedAre) {
  const auto chosen = ChoosePorts({}, {SomePort("a"), SomePort("b", "port 1 is down"), SomePort("c")});
  ASSERT_TRUE(chosen.ok());
  ASSERT_EQ(chosen->size(), 2u);
  EXPECT_EQ((*chosen)[1].name, "c");
}

TEST(VerbsPorts, WithoutAUsableOneEachReasonIsGiven) {
  const auto none = ChoosePorts({}, {SomePort("a", "port 1 is down"), SomePort("b", "it has no GID")});
  EXPECT_EQ(none.status().code(), Code::kUnsupported);
  EXPECT_THAT(none.status().message(), HasSubstr("a: port 1 is down; b: it has no GID"));
  EXPECT_THAT(ChoosePorts({}, {}).status().message(), HasSubstr("no RDMA device"));
}

TEST(VerbsPorts, NamesAreFoundInTheirOrderAndThePortNumberOneMayStand) {
  const auto chosen = ChoosePorts({{"b", "a:1"}, -1}, {SomePort("a"), SomePort("a:2"), SomePort("b")});
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ((*chosen)[0].name, "b");
  EXPECT_EQ((*chosen)[1].name, "a");
}

TEST(VerbsPorts, ANameThatIsNotThereIsAnsweredWithThoseThatAre) {
  const auto refused = ChoosePorts({{"x"}, -1}, {SomePort("a"), SomePort("b", "port 1 is down")});
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("no device \"x\": a: usable; b: port 1 is down"));
}

TEST(VerbsPorts, WhatCannotBeUsedOrStandsTwiceIsRefused) {
  const auto down = ChoosePorts({{"b"}, -1}, {SomePort("a"), SomePort("b", "port 1 is down")});
  EXPECT_EQ(down.status().code(), Code::kUnsupported);
  EXPECT_THAT(down.status().message(), HasSubstr("port 1 is down"));
  const auto twice = ChoosePorts({{"a", "a:1"}, -1}, {SomePort("a")});
  EXPECT_EQ(twice.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(twice.status().message(), HasSubstr("named twice"));
}

TEST(VerbsPorts, OfMoreThanTheLimitTheFirstAreTakenUnlessTheyAreNamed) {
  std::vector<Port> many;
  VerbsConfig config;
  for (size_t i = 0; i <= kRailsMax; i++) {
    many.push_back(SomePort("d" + std::to_string(i)));
    config.devices.push_back(many.back().name);
  }
  const auto chosen = ChoosePorts({}, many);
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(chosen->size(), kRailsMax);
  EXPECT_THAT(ChoosePorts(config, many).status().message(), HasSubstr("17 devices, limit 16"));
}

TEST(VerbsPorts, ALockedMemoryLimitIsNamedWithWhatToSet) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &old), 0);
  rlimit low = old;
  low.rlim_cur = std::min<rlim_t>(old.rlim_max, 65536);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &low), 0);
  const Status refused = RegistrationError(ENOMEM, "mlx5_0", 1 << 30);
  setrlimit(RLIMIT_MEMLOCK, &old);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_THAT(refused.message(), HasSubstr("1073741824 bytes with device mlx5_0"));
  EXPECT_THAT(refused.message(), HasSubstr(std::to_string(low.rlim_cur)));
  EXPECT_THAT(refused.message(), HasSubstr("ulimit -l"));
  EXPECT_EQ(RegistrationError(EFAULT, "mlx5_0", 1).code(), Code::kIo);
}

}  // namespace
}  // namespace ropeteam::verbs
