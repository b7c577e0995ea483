// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace ropeteam::bench {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(Median, IsTheMiddleOrTheMeanOfTheTwoInTheMiddle) {
  EXPECT_DOUBLE_EQ(Median({7}), 7);
  EXPECT_DOUBLE_EQ(Median({9, 1, 5}), 5);
  EXPECT_DOUBLE_EQ(Median({9, 1, 5, 7}), 6);
}

// A slow pass slows both parts equally and does not change the ratio.
TEST(Ratio, PairsEachPassWithItsBaselineFirst) {
  EXPECT_DOUBLE_EQ(Ratio({20, 2, 22, 21, 1}, {10, 1, 11, 10.5, 0.5}), 2);
  EXPECT_DOUBLE_EQ(Ratio({3, 8, 5}, {1, 2, 5}), 3);
}

TEST(JsonLine, HasTheNineFieldsInOrder) {
  EXPECT_EQ(JsonLine({"copy/x", "GB/s", {4, 2, 3}, "memcpy", {2, 1, 2}}),
            R"({"name":"copy/x","unit":"GB/s","median":3.0,"min":2.0,"max":4.0,"runs":3,)"
            R"("baseline_name":"memcpy","baseline_median":2.0,"ratio":2.0})");
}

TEST(JsonLine, HasNullsWithoutABaseline) {
  EXPECT_EQ(JsonLine({"idle/cpu", "percent", {0.5}, "", {}}),
            R"({"name":"idle/cpu","unit":"percent","median":0.5,"min":0.5,"max":0.5,"runs":1,)"
            R"("baseline_name":null,"baseline_median":null,"ratio":null})");
}

TEST(Report, WritesTitlesOnceAndALinePerRow) {
  std::ostringstream out;
  Report report(out, false);
  report.Add({"copy/memcpy", "GB/s", {13.7}, "", {}});
  report.Add({"copy/fused_vs_memcpy", "GB/s", {17.9}, "memcpy", {13.7}});
  std::istringstream lines(out.str());
  std::string titles, plain, compared, end;
  std::getline(lines, titles);
  std::getline(lines, plain);
  std::getline(lines, compared);
  EXPECT_THAT(titles, StartsWith("name "));
  EXPECT_THAT(plain, StartsWith("copy/memcpy "));
  EXPECT_THAT(plain, HasSubstr("13.700"));
  EXPECT_THAT(compared, HasSubstr("1.307  memcpy"));
  EXPECT_FALSE(std::getline(lines, end));
}

TEST(Report, WritesOnlyJsonWhenAskedTo) {
  std::ostringstream out;
  Report report(out, true);
  const Row row = {"copy/memcpy", "GB/s", {13.7}, "", {}};
  report.Add(row);
  report.Add(row);
  EXPECT_EQ(out.str(), JsonLine(row) + "\n" + JsonLine(row) + "\n");
}

TEST(Header, NamesTheMachineTheDateAndTheSettings) {
  const std::string header = Header("size 7, runs 3");
  for (const char* part : {"cpu ", ", cores ", ", kernel ", ", load ", ", date 20", ", size 7, runs 3"})
    EXPECT_THAT(header, HasSubstr(part));
  EXPECT_EQ(header.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace ropeteam::bench
