// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

#include "bench/command.h"

namespace ropeteam::bench {
namespace {

using testing::ElementsAre;
using testing::Pair;

TEST(MeasureInTurns, DiscardsTheFirstRoundAndBeginsEachWithAnotherCandidate) {
  std::string order;
  double figure = 0;
  const auto candidate = [&](const std::string& name) {
    return Candidate{name, [&, name] {
                       order += name;
                       return ++figure;
                     }};
  };
  const auto samples = MeasureInTurns({candidate("a"), candidate("b"), candidate("c")}, 3);
  EXPECT_EQ(order,
            "abc"
            "bca"
            "cab"
            "abc");
  EXPECT_THAT(samples, ElementsAre(Pair("a", ElementsAre(6, 8, 10)), Pair("b", ElementsAre(4, 9, 11)),
                                   Pair("c", ElementsAre(5, 7, 12))));
}

TEST(BandwidthOf, IsBytesOverTheTimeOfTheWork) {
  int calls = 0;
  const Candidate candidate = BandwidthOf("spin", 1'000'000, [&] {
    ++calls;
    const double end = SecondsNow() + 0.01;
    while (SecondsNow() < end) {
    }
  });
  const double figure = candidate.pass();  // 1 MB in at least 10 ms
  EXPECT_EQ(calls, 1);
  EXPECT_GT(figure, 0);
  EXPECT_LE(figure, 0.1);
}

TEST(Buffer, IsResidentBeforeItIsUsed) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const Buffer buffer(64 * page + 1, 1, false);
  ASSERT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % page, 0U);
  std::vector<unsigned char> resident(65);
  ASSERT_EQ(mincore(buffer.data(), buffer.size(), resident.data()), 0);
  for (const unsigned char flag : resident) EXPECT_TRUE(flag & 1);
}

TEST(Buffer, HasBytesThatItsSeedFixes) {
  const Buffer one(4096, 1, false);
  const Buffer same(4096, 1, false);
  const Buffer other(4096, 2, false);
  const auto bytes = [](const Buffer& buffer) {
    return std::string(reinterpret_cast<const char*>(buffer.data()), buffer.size());
  };
  EXPECT_EQ(bytes(one), bytes(same));
  EXPECT_NE(bytes(one), bytes(other));
  const std::string text = bytes(one);
  EXPECT_GT(std::set<char>(text.begin(), text.end()).size(), 200U);
}

TEST(Buffer, ThatCannotBeHadIsAnErrorInWords) { EXPECT_THROW(Buffer(size_t{1} << 62, 1, false), BenchError); }

}  // namespace
}  // namespace ropeteam::bench
