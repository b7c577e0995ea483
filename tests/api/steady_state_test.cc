// SPDX-License-Identifier: Apache-2.0
//
// The cost of a save besides its copy, in the steady state: page faults and allocations are counted.

#include <sys/resource.h>

#include "tests/api/api_fixture.h"
#include "tests/api/count_allocations.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kMiB = 1 << 20;
// Small: the counts do not depend on it, and the first touch of memory is slow.
constexpr uint64_t kChunk = 64 * 1024;

long MinorFaults() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

// A sanitizer's shadow memory is touched for the first time too, and its faults cannot be told apart.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_IF_FAULTS_ARE_NOT_OURS() GTEST_SKIP() << "page faults of a sanitizer's shadow memory count here"
#else
#define SKIP_IF_FAULTS_ARE_NOT_OURS() static_cast<void>(0)
#endif

class SteadyStateTest : public ApiTest {
 protected:
  SteadyStateTest() : ApiTest(kChunk, 512), handle_(Open()), source_(8 * kMiB, 's') {}

  struct Cost {
    long faults;
    uint64_t allocations;
  };
  // `objects` objects of `bytes` in total.
  Cost SaveAndCount(uint64_t step, uint64_t bytes, uint64_t objects) {
    std::vector<std::string> names;
    for (uint64_t i = 0; i < objects; ++i)
      names.push_back("model.a_name_that_no_string_holds_in_place." + std::to_string(i));
    const uint64_t allocations_before = AllocationsOfThisThread();
    const long faults_before = MinorFaults();
    {
      const ropeteam_save_options_t options{sizeof(options), bytes, objects, 0};
      ropeteam_save_t* save = nullptr;
      EXPECT_OK(ropeteam_save_begin(handle_.get(), step, &options, &save));
      for (const std::string& name : names) {
        EXPECT_OK(ropeteam_save_put(save, name.c_str(), source_.data(), bytes / objects));
      }
      EXPECT_OK(ropeteam_save_commit(save));
      ropeteam_save_close(save);
    }
    return {MinorFaults() - faults_before, AllocationsOfThisThread() - allocations_before};
  }

  Handle handle_;
  const std::string source_;
};

TEST_F(SteadyStateTest, LaterSavesTakeNoPageFault) {
  SKIP_IF_FAULTS_ARE_NOT_OURS();
  // Grants every chunk once, in case the background thread has not reached it yet.
  const ropeteam_save_options_t all{sizeof(all), 510 * kChunk, 1, 0};
  ropeteam_save_t* save = nullptr;
  ASSERT_OK(ropeteam_save_begin(handle_.get(), 1, &all, &save));
  ropeteam_save_close(save);
  SaveAndCount(2, 8 * kMiB, 16);
  // Each of these uses chunks into which no save has copied before.
  EXPECT_EQ(SaveAndCount(3, 8 * kMiB, 16).faults, 0);
  EXPECT_EQ(SaveAndCount(4, 8 * kMiB, 16).faults, 0);
}

// Too large to create all page-table entries in advance: they are created when chunks are granted, so that no
// put needs to.
class BigArenaTest : public ApiTest {
 protected:
  BigArenaTest() : ApiTest(kChunk, 64, 40ull << 30), handle_(Open()) {}
  Handle handle_;
};

TEST_F(BigArenaTest, APutTakesNoPageFaultEvenInTheFirstSave) {
  SKIP_IF_FAULTS_ARE_NOT_OURS();
  const std::string source(40 * kChunk, 's');
  for (uint64_t step = 1; step < 3; ++step) {
    const SaveHandle save = Begin(handle_.get(), step, source.size(), 1);
    Put(save.get(), "warm", "x");  // first touches of the code
    const long before = MinorFaults();
    EXPECT_OK(ropeteam_save_put(save.get(), "x", source.data(), source.size()));
    const long faults = MinorFaults() - before;
    // The first put also causes faults by growing buffers and in kernel code, but not one for each of 640
    // pages.
    EXPECT_LE(faults, step == 1 ? 20 : 0);
  }
}

TEST_F(SteadyStateTest, ASaveLikeTheOneBeforeAllocatesNothing) {
  SaveAndCount(1, 8 * kMiB, 64);
  EXPECT_EQ(SaveAndCount(2, 8 * kMiB, 64).allocations, 0u);
  EXPECT_EQ(SaveAndCount(3, 8 * kMiB, 64).allocations, 0u);
  EXPECT_THAT(daemon_.Problems(), ::testing::IsEmpty());
}

TEST_F(SteadyStateTest, AllocationsOfAnUnlikeSaveDoNotGrowWithItsBytes) {
  SaveAndCount(1, 8 * kMiB, 8);
  SaveAndCount(2, 1 * kMiB, 8);
  const Cost small = SaveAndCount(3, 2 * kMiB, 8);
  const Cost big = SaveAndCount(4, 4 * kMiB, 8);
  EXPECT_GT(small.allocations, 0u);
  EXPECT_EQ(small.allocations, big.allocations);
}

TEST_F(SteadyStateTest, ReadsIntoAnOwnBufferAllocateNothing) {
  SaveAndCount(1, 8 * kMiB, 1);
  const ViewHandle view = OpenView(handle_.get(), 1);
  std::string target(8 * kMiB, '\0');
  ASSERT_OK(ropeteam_view_read(view.get(), "model.a_name_that_no_string_holds_in_place.0", 0, target.data(),
                               target.size(), kTimeoutMs));
  const uint64_t before = AllocationsOfThisThread();
  ASSERT_OK(ropeteam_view_read(view.get(), "model.a_name_that_no_string_holds_in_place.0", 1, target.data(),
                               target.size() - 1, kTimeoutMs));
  EXPECT_EQ(AllocationsOfThisThread() - before, 0u);
}

}  // namespace
}  // namespace ropeteam::test
