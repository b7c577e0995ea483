// SPDX-License-Identifier: Apache-2.0
#include "storage/retention/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ropeteam::storage {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kNow = 1'800'000'000;

RetainedStep Step(uint64_t step, const std::string& user = "{}") {
  RetainedStep made;
  made.name = {step, 1};
  made.time_s = kNow - 1000 + step;
  made.user = user;
  return made;
}

// The numbers of the kept steps, in the given order.
std::vector<uint64_t> Kept(const RetentionRules& rules, const std::vector<RetainedStep>& steps) {
  const std::vector<unsigned> kept = ChooseKept(rules, steps, kNow);
  std::vector<uint64_t> numbers;
  for (size_t i = 0; i < steps.size(); ++i)
    if (kept[i] != kKeptNot) numbers.push_back(steps[i].name.step);
  return numbers;
}

RetentionRules Newest(uint64_t count) {
  RetentionRules rules;
  rules.keep_newest = count;
  return rules;
}

TEST(Retention, WithoutARuleEverythingStays) {
  const std::vector<RetainedStep> steps = {Step(1), Step(2), Step(3)};
  EXPECT_THAT(Kept({}, steps), ElementsAre(1, 2, 3));
  EXPECT_EQ(ChooseKept({}, steps, kNow)[0], kKeptNoRule);
}

TEST(Retention, NothingOutOfNothing) { EXPECT_THAT(Kept(Newest(2), {}), IsEmpty()); }

TEST(Retention, TheNewestStayInWhateverOrderTheyCome) {
  EXPECT_THAT(Kept(Newest(2), {Step(30), Step(10), Step(40), Step(20)}), ElementsAre(30, 40));
  EXPECT_THAT(Kept(Newest(9), {Step(1), Step(2)}), ElementsAre(1, 2));
}

TEST(Retention, ALaterIncarnationIsNewerThanAHigherStep) {
  std::vector<RetainedStep> steps = {Step(90), Step(50), Step(40)};
  steps[1].name.incarnation = 2;
  EXPECT_THAT(Kept(Newest(1), steps), ElementsAre(50));
  EXPECT_THAT(Kept(Newest(2), steps), ElementsAre(90, 50));
}

TEST(Retention, EveryKeepsMultiplesAndTheLastGood) {
  RetentionRules rules;
  rules.keep_every = 100;
  EXPECT_THAT(Kept(rules, {Step(50), Step(100), Step(150), Step(200), Step(250)}),
              ElementsAre(100, 200, 250));
}

TEST(Retention, BestByLargestAndSmallestOfEqualOnesTheNewest) {
  const std::vector<RetainedStep> steps = {Step(1, R"({"loss": 0.5})"), Step(2, R"({"loss": 2})"),
                                           Step(3, R"({"loss": 0.5})"), Step(4, R"({"loss": -1e300})"),
                                           Step(5, R"({"loss": 1})")};
  RetentionRules rules;
  rules.keep_best = KeepBest{"loss", true};
  EXPECT_THAT(Kept(rules, steps), ElementsAre(2, 5));
  rules.keep_best->max = false;
  EXPECT_THAT(Kept(rules, steps), ElementsAre(4, 5));
  EXPECT_THAT(Kept(rules, {steps[0], steps[2], steps[4]}), ElementsAre(3, 5));
}

TEST(Retention, ValuesThatAreNoNumbersAreNeverTheBest) {
  RetentionRules rules;
  rules.keep_best = KeepBest{"loss", false};
  EXPECT_THAT(
      Kept(rules, {Step(1, R"({"loss": 7})"), Step(2, R"({"loss": "0"})"), Step(3, R"({"loss": null})"),
                   Step(4, R"({"x": {"loss": 1}})"), Step(5, "not JSON"), Step(6, "[1]"), Step(7)}),
      ElementsAre(1, 7));
  EXPECT_THAT(Kept(rules, {Step(1), Step(2)}), ElementsAre(2));
}

TEST(Retention, WithinCountsFromNowAndTheFutureStays) {
  std::vector<RetainedStep> steps = {Step(1), Step(2), Step(3), Step(4)};
  steps[0].time_s = kNow - 100;
  steps[1].time_s = kNow - 99;
  steps[2].time_s = kNow + 1'000'000;  // a wrong clock
  steps[3].time_s = 0;
  RetentionRules rules;
  rules.keep_within_s = 100;
  EXPECT_THAT(Kept(rules, steps), ElementsAre(2, 3, 4));
  EXPECT_EQ(ChooseKept(rules, steps, kNow)[3], kKeptLastGood);
}

TEST(Retention, OneRuleIsEnoughToStay) {
  RetentionRules rules = Newest(1);
  rules.keep_every = 2;
  rules.keep_best = KeepBest{"loss", false};
  const std::vector<RetainedStep> steps = {Step(1, R"({"loss": 0})"), Step(2), Step(3), Step(5)};
  EXPECT_THAT(Kept(rules, steps), ElementsAre(1, 2, 5));
  EXPECT_THAT(ChooseKept(rules, steps, kNow),
              ElementsAre(kKeptBest, kKeptEvery, kKeptNot, kKeptNewest | kKeptLastGood));
}

TEST(Retention, DamagedStepsNeitherCountNorHideTheLastGoodOne) {
  std::vector<RetainedStep> steps = {Step(1), Step(2), Step(3), Step(4), Step(5)};
  steps[1].good = steps[3].good = steps[4].good = false;
  const std::vector<unsigned> kept = ChooseKept(Newest(1), steps, kNow);
  // Steps 4 and 5 are newer than the last good one, and may be repaired or read in part.
  EXPECT_THAT(kept,
              ElementsAre(kKeptNot, kKeptNot, kKeptNewest | kKeptLastGood, kKeptLastGood, kKeptLastGood));
  RetentionRules every;
  every.keep_every = 2;
  EXPECT_THAT(Kept(every, steps), ElementsAre(3, 4, 5));
}

TEST(Retention, WhereNoStepIsGoodAllStay) {
  std::vector<RetainedStep> steps = {Step(1), Step(2), Step(3)};
  for (RetainedStep& step : steps) step.good = false;
  EXPECT_THAT(Kept(Newest(1), steps), ElementsAre(1, 2, 3));
}

TEST(Retention, AStepThatIsBeingReadStays) {
  std::vector<RetainedStep> steps = {Step(1), Step(2), Step(3)};
  steps[0].being_read = true;
  EXPECT_THAT(ChooseKept(Newest(1), steps, kNow),
              ElementsAre(kKeptBeingRead, kKeptNot, kKeptNewest | kKeptLastGood));
}

TEST(Retention, ReasonsAsText) {
  EXPECT_EQ(KeptText(kKeptNot), "");
  EXPECT_EQ(KeptText(kKeptNewest | kKeptLastGood | kKeptBest), "last good, newest, best");
  EXPECT_EQ(KeptText(kKeptNoRule), "no rule");
}

TEST(Retention, ParsesKeepBest) {
  EXPECT_EQ(*ParseKeepBest("loss:min"), (KeepBest{"loss", false}));
  EXPECT_EQ(*ParseKeepBest("eval:top1:max"), (KeepBest{"eval:top1", true}));
  for (const char* text : {"", "loss", "loss:", ":max", "loss:best", "loss:max "}) {
    const auto parsed = ParseKeepBest(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(parsed.status().message(), HasSubstr("\"" + std::string(text) + "\""));
  }
  EXPECT_TRUE(ParseKeepBest(std::string(kMetadataKeyBytesMax, 'k') + ":max").ok());
  EXPECT_FALSE(ParseKeepBest(std::string(kMetadataKeyBytesMax + 1, 'k') + ":max").ok());
}

TEST(Retention, ParsesDurations) {
  EXPECT_EQ(*ParseDuration("90s"), 90u);
  EXPECT_EQ(*ParseDuration("30m"), 1800u);
  EXPECT_EQ(*ParseDuration("12h"), 43200u);
  EXPECT_EQ(*ParseDuration("7d"), 604800u);
  EXPECT_EQ(*ParseDuration("2w"), 1209600u);
  EXPECT_EQ(*ParseDuration("3153600000s"), kKeepWithinSecondsMax);
  for (const char* text : {"", "7", "d", "0d", "-1d", "1.5d", "7 d", "7dd", "7y", "3153600001s", "36501d",
                           "99999999999999999999s"})
    EXPECT_EQ(ParseDuration(text).status().code(), Code::kInvalidArgument) << text;
}

TEST(Retention, RulesAreNamedByTheFlagsThatGiveThem) {
  EXPECT_EQ(FlagsOf({}), "");
  EXPECT_EQ(FlagsOf(Newest(3)), "--keep-on-storage 3");
  EXPECT_EQ(FlagsOf({3, 50, KeepBest{"a:b", true}, 5400}),
            "--keep-on-storage 3 --keep-every 50 --keep-best a:b:max --keep-within 5400s");
}

}  // namespace
}  // namespace ropeteam::storage
