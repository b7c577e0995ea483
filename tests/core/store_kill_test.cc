// SPDX-License-Identifier: Apache-2.0
//
// A process that saves and removes in shared memory is killed with SIGKILL at a random point, and this
// process adopts the memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <random>

#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

using ::testing::SizeIs;

constexpr uint64_t kChunks = 40;
constexpr uint64_t kStepsKept = 3;

// Progress that the process to be killed reports outside the arena.
struct Progress {
  std::atomic<uint64_t> sealed{0};    // steps up to this one were sealed
  std::atomic<uint64_t> removing{0};  // steps up to this one may be removed
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "it is shared between processes");

uint64_t StreamBytesOf(Step step) { return kManifestHeaderBytes + step * 977 % (6 * kSmallChunk); }

// Never returns.
[[noreturn]] void SaveForever(std::span<std::byte> memory, Progress* progress, int pipe) {
  auto store = std::move(Store::Format(memory, kSmallChunk, kIdentity)).value();
  for (Step step = 1;; ++step) {
    ROPETEAM_CHECK(SaveForTest(store.get(), {1, step, 0}, StreamBytesOf(step)).ok());
    store->SetCommitted({1, step, 0});
    progress->sealed = step;
    if (step > kStepsKept) {
      progress->removing = step - kStepsKept;
      store->Remove({1, step - kStepsKept, 0});
    }
    const char byte = 0;
    if (step <= 64 && write(pipe, &byte, 1) != 1) _exit(1);
  }
}

TEST(StoreKill, ARealProcessKilledAnywhereLeavesWholeShards) {
  std::mt19937_64 random(8);
  for (int round = 0; round < 40; ++round) {
    const uint64_t bytes = Store::MemoryFor(kChunks, kSmallChunk);
    void* mapped =
        mmap(nullptr, bytes + arena::kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    const std::span<std::byte> memory(static_cast<std::byte*>(mapped), bytes);
    auto* progress = new (static_cast<std::byte*>(mapped) + bytes) Progress;
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) SaveForever(memory, progress, pipe[1]);
    // The pipe shows that the child is running. The signal arrives at a random point of its work.
    for (uint64_t i = 1 + random() % 64; i > 0; --i) {
      char byte;
      ASSERT_EQ(read(pipe[0], &byte, 1), 1);
    }
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);

    Store::AdoptReport report;
    const auto store = Store::Adopt(memory, kSmallChunk, kIdentity, &report);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    (*store)->CheckInvariants();
    EXPECT_THAT(report.rejected, SizeIs(0));
    for (const auto& [id, shard] : (*store)->shards()) {
      EXPECT_TRUE(HoldsItsBytes(**store, *shard));
      EXPECT_EQ(shard->meta, MetaForTest(id, StreamBytesOf(id.step)));
      EXPECT_LE(id.step, progress->sealed + 1);
    }
    for (Step step = progress->removing + 1; step <= progress->sealed; ++step) {
      const SealedShard* shard = (*store)->Find({1, step, 0});
      ASSERT_NE(shard, nullptr) << "round " << round << " step " << step << " of " << progress->sealed;
      EXPECT_TRUE(shard->committed);
    }
    close(pipe[0]);
    close(pipe[1]);
    munmap(mapped, bytes + arena::kPageBytes);
  }
}

}  // namespace
}  // namespace ropeteam
