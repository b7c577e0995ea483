// SPDX-License-Identifier: Apache-2.0
//
// What only the fake driver can show: copies and the caller's work held back on demand, failing calls,
// destroyed contexts, counted registrations.

#include <atomic>
#include <thread>

#include "tests/api/count_allocations.h"
#include "tests/api/fake_cuda_fixture.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr int kOutOfMemory = 2;
constexpr int kIllegalAddress = 700;
constexpr int kContextIsDestroyed = 709;

// Chunks of 1 MiB. Four chunks are one batch of copies; 80 chunks are two slabs of the arena.
class CudaDriverTest : public FakeCudaTest {
 protected:
  CudaDriverTest() : FakeCudaTest(kMiB, 80) {}

  void TearDown() override {
    FakeCudaTest::TearDown();
    // The library leaves nothing in the driver.
    EXPECT_EQ(fake_cuda_count(FAKE_CUDA_STREAMS), 0u);
    EXPECT_EQ(fake_cuda_count(FAKE_CUDA_EVENTS), 0u);
    EXPECT_EQ(fake_cuda_count(FAKE_CUDA_REGISTERED), 0u);
    EXPECT_EQ(fake_cuda_count(FAKE_CUDA_RETAINED), 0u);
  }

  ropeteam_status_t PutCuda(const SaveHandle& save, const char* name, const void* data, uint64_t length,
                            void* stream = nullptr) {
    return ropeteam_save_put_cuda(save.get(), name, data, length, stream);
  }
  bool WaitForFilled(int chunks) {
    return daemon_.WaitFor([&](const FakeCounts& counts) { return counts.filled_chunks >= chunks; });
  }
  // Saves this object and checks the bytes.
  void ExpectSaves(uint64_t step, const char* device, const std::string& bytes) {
    const SaveHandle save = Begin(handle_.get(), step, bytes.size(), 1);
    ASSERT_NE(save, nullptr);
    EXPECT_OK(PutCuda(save, "x", device, bytes.size()));
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "x"), bytes);
  }
  void PinAll() {
    ExpectSaves(1000, Upload("p"), "p");
    ASSERT_TRUE(fake_cuda_wait_for(FAKE_CUDA_REGISTERED, 2));
  }
};

TEST_F(CudaDriverTest, AChunkIsToldOfOnlyBehindItsCopy) {
  PinAll();
  const int before = daemon_.counts().filled_chunks;
  const std::string bytes = RandomBytes(12 * kMiB, 1);
  char* device = Upload(bytes);
  const SaveHandle save = Begin(handle_.get(), 1, bytes.size(), 1);
  fake_cuda_hold_copies(1);
  ASSERT_OK(PutCuda(save, "x", device, bytes.size()));
  // When a checksum arrives, the fake daemon compares it with the bytes in the arena.
  for (int batch = 1; batch <= 3; ++batch) {
    ASSERT_TRUE(fake_cuda_wait_for(FAKE_CUDA_COPIES_HELD, static_cast<uint64_t>(batch)));
    EXPECT_EQ(daemon_.counts().filled_chunks, before + 4 * (batch - 1));
    fake_cuda_allow_copies(4);
    ASSERT_TRUE(WaitForFilled(before + 4 * batch));
  }
  fake_cuda_hold_copies(0);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), bytes);
}

TEST_F(CudaDriverTest, ThePutReturnsAndTheCommitWaitsWhileTheCallersKernelRuns) {
  const uint64_t length = 3 * kMiB + 5;
  char* device = Upload(std::string(length, 'o'));
  void* stream = fake_cuda_stream_create(0, 1);
  const int gate = fake_cuda_gate();
  const std::string bytes = RandomBytes(length, 2);
  fake_cuda_write_later(stream, device, bytes.data(), length, gate);
  const SaveHandle save = Begin(handle_.get(), 1, length, 1);
  ASSERT_OK(PutCuda(save, "x", device, length, stream));
  // Changed after the put, so the change is not saved.
  std::atomic<bool> committed = false;
  std::thread committer([&] {
    EXPECT_OK(ropeteam_save_commit(save.get()));
    committed = true;
  });
  // It does not delay the save of another handle.
  const Handle other = Open(kRank + 1);
  const SaveHandle quick = Begin(other.get(), 1, kMiB, 1);
  ASSERT_OK(PutCuda(quick, "y", Upload("yy"), 2));
  ASSERT_OK(ropeteam_save_commit(quick.get()));
  EXPECT_FALSE(committed);
  EXPECT_EQ(daemon_.Received(local::Type::kSaveCommit), 1);
  fake_cuda_open(gate);
  committer.join();
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), bytes);
  fake_cuda_stream_destroy(stream);
}

TEST_F(CudaDriverTest, OneDevicesStreamDoesNotHoldUpAnothers) {
  PinAll();
  const int before = daemon_.counts().filled_chunks;
  char* slow = Upload(std::string(4 * kMiB, 'o'), 0);
  const std::string bytes = RandomBytes(4 * kMiB, 3);
  void* stream = fake_cuda_stream_create(0, 1);
  const int gate = fake_cuda_gate();
  fake_cuda_write_later(stream, slow, bytes.data(), bytes.size(), gate);
  const SaveHandle save = Begin(handle_.get(), 1, 16 * kMiB, 2);
  ASSERT_OK(PutCuda(save, "slow", slow, bytes.size(), stream));
  ASSERT_OK(PutCuda(save, "quick", Upload(bytes, 1), bytes.size()));
  EXPECT_TRUE(WaitForFilled(before + 4));
  fake_cuda_open(gate);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "slow"), bytes);
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "quick"), bytes);
  fake_cuda_stream_destroy(stream);
}

TEST_F(CudaDriverTest, AnAbortWaitsForTheCopiesThatTheDeviceHas) {
  PinAll();
  char* device = Upload(RandomBytes(30 * kMiB, 4));
  const SaveHandle save = Begin(handle_.get(), 1, 30 * kMiB, 1);
  fake_cuda_hold_copies(1);
  ASSERT_OK(PutCuda(save, "x", device, 30 * kMiB));
  ASSERT_TRUE(fake_cuda_wait_for(FAKE_CUDA_COPIES_HELD, 1));
  std::thread aborter([&] { EXPECT_OK(ropeteam_save_abort(save.get())); });
  // A round trip to the daemon: an abort that did not wait would have arrived before it.
  SaveOne(Open(kRank + 1).get(), 1, "z");
  EXPECT_EQ(daemon_.Received(local::Type::kSaveAbort), 0);
  fake_cuda_hold_copies(0);
  aborter.join();
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.aborts == 1; }));
}

TEST_F(CudaDriverTest, AnAbortDoesNotWaitForTheCallersStream) {
  char* device = Upload(std::string(4 * kMiB, 'o'));
  void* stream = fake_cuda_stream_create(0, 1);
  const int gate = fake_cuda_gate();
  fake_cuda_write_later(stream, device, "n", 1, gate);
  {
    const SaveHandle save = Begin(handle_.get(), 1, 16 * kMiB, 2);
    ASSERT_OK(PutCuda(save, "x", device, 4 * kMiB, stream));
    ASSERT_OK(PutCuda(save, "y", device, 4 * kMiB, stream));
    ASSERT_OK(ropeteam_save_abort(save.get()));
  }
  // Nor does the stream of one save delay the end of another, although both are in one queue.
  const SaveHandle first = Begin(handle_.get(), 2, 4 * kMiB, 1);
  ASSERT_OK(PutCuda(first, "x", device, 4 * kMiB, stream));
  {
    const SaveHandle second = Begin(handle_.get(), 3, 4 * kMiB, 1);
    ASSERT_OK(PutCuda(second, "x", device, 4 * kMiB, stream));
  }
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.aborts == 2; }));
  fake_cuda_open(gate);
  ASSERT_OK(ropeteam_save_commit(first.get()));
  EXPECT_EQ(daemon_.ObjectBytes(2, kRank, "x"), "n" + std::string(4 * kMiB - 1, 'o'));
  fake_cuda_stream_destroy(stream);
}

TEST_F(CudaDriverTest, TheArenaIsPageLockedOnceAndBehindTheSaves) {
  const std::string bytes = RandomBytes(4 * kMiB, 5);
  char* device = Upload(bytes);
  fake_cuda_hold_registering(1);
  ExpectSaves(1, device, bytes);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_COPIES_PAGEABLE), 4u);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_REGISTERED), 0u);
  fake_cuda_hold_registering(0);
  ASSERT_TRUE(fake_cuda_wait_for(FAKE_CUDA_REGISTERED, 2));
  for (uint64_t step = 2; step < 12; ++step) ExpectSaves(step, device, bytes);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_COPIES_PAGEABLE), 4u);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_REGISTER_CALLS), 2u);  // 80 MiB in slabs of 64 MiB
  // It is page-locked for another device's copies, too.
  ExpectSaves(12, Upload(bytes, 1), bytes);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_REGISTER_CALLS), 2u);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_COPIES_PAGEABLE), 4u);
}

TEST_F(CudaDriverTest, SavesGoOnWhereTheArenaCannotBePageLocked) {
  fake_cuda_fail("cuMemHostRegister_v2", 1, kOutOfMemory, 1);
  const std::string bytes = RandomBytes(3 * kMiB, 6);
  char* device = Upload(bytes);
  ExpectSaves(1, device, bytes);
  ExpectSaves(2, device, bytes);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_REGISTER_CALLS), 1u);  // not tried again after a refusal
}

TEST_F(CudaDriverTest, ACopyThatTheDriverRefusesEndsItsSaveAndNoOther) {
  const std::string bytes = RandomBytes(5 * kMiB, 7);
  char* device = Upload(bytes);
  for (const char* call : {"cuMemcpyDtoHAsync_v2", "copy", "cuEventSynchronize"}) {
    SCOPED_TRACE(call);
    const uint64_t step = fake_cuda_count(FAKE_CUDA_COPIES_OUT) + 1;
    const SaveHandle save = Begin(handle_.get(), step, 8 * kMiB, 2);
    fake_cuda_fail(call, 1, kIllegalAddress, 0);
    EXPECT_FAILS(ropeteam_save_put(save.get(), "x", device, bytes.size()), ROPETEAM_IO,
                 "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    // The save has ended: every later call returns the same error.
    EXPECT_FAILS(ropeteam_save_put(save.get(), "h", "h", 1), ROPETEAM_IO, "(700)");
    EXPECT_FAILS(ropeteam_save_abort(save.get()), ROPETEAM_IO, "(700)");
    ExpectSaves(step + 1000, device, bytes);
  }
  EXPECT_EQ(daemon_.counts().aborts, 3);
}

TEST_F(CudaDriverTest, ACopyThatFailsBehindThePutIsFoundAtTheNextCallOrTheCommit) {
  const std::string bytes = RandomBytes(5 * kMiB, 8);
  char* device = Upload(bytes);
  {
    const SaveHandle save = Begin(handle_.get(), 1, 8 * kMiB, 2);
    fake_cuda_fail("copy", 2, kIllegalAddress, 0);
    ASSERT_OK(PutCuda(save, "x", device, bytes.size()));
    EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_IO, "(700)");
    EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_IO, "(700)");
  }
  {
    const SaveHandle save = Begin(handle_.get(), 2, 8 * kMiB, 2);
    void* stream = fake_cuda_stream_create(0, 1);
    fake_cuda_fail("copy", 1, kIllegalAddress, 0);
    ASSERT_OK(PutCuda(save, "x", device, bytes.size(), stream));
    ASSERT_TRUE(daemon_.WaitFor([&](const FakeCounts&) {
      // The failure is not announced. A later put returns it, and so do all puts after that.
      const ropeteam_status_t status = ropeteam_save_put(save.get(), "h", "h", 1);
      return status == ROPETEAM_IO;
    }));
    fake_cuda_stream_destroy(stream);
  }
  ExpectSaves(3, device, bytes);
}

TEST_F(CudaDriverTest, CallsThatFailBeforeAnythingIsCopiedLeaveTheSaveAsItWas) {
  const std::string bytes = RandomBytes(1000, 9);
  char* device = Upload(bytes);
  const SaveHandle save = Begin(handle_.get(), 1, 8 * kMiB, 4);
  for (const char* call : {"cuPointerGetAttributes", "cuDeviceGet", "cuCtxPushCurrent_v2", "cuStreamCreate",
                           "cuEventCreate", "cuEventRecord"}) {
    SCOPED_TRACE(call);
    fake_cuda_fail(call, 1, kOutOfMemory, 0);
    EXPECT_FAILS(PutCuda(save, "x", device, bytes.size()), ROPETEAM_INVALID_ARGUMENT,
                 "CUDA_ERROR_OUT_OF_MEMORY (2)");
  }
  EXPECT_FAILS(PutCuda(save, "x", device, bytes.size(), &allocated_), ROPETEAM_INVALID_ARGUMENT,
               "the CUDA stream");
  ASSERT_OK(PutCuda(save, "x", device, bytes.size()));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), bytes);
}

TEST_F(CudaDriverTest, ADriverThatIsTooOldIsNamedAndHostMemoryIsSavedAllTheSame) {
  const std::string bytes = RandomBytes(1000, 10);
  char* device = Upload(bytes);
  fake_cuda_set_version(10020);
  const SaveHandle save = Begin(handle_.get(), 1, 8 * kMiB, 4);
  EXPECT_FAILS(PutCuda(save, "x", device, bytes.size()), ROPETEAM_UNSUPPORTED, "CUDA 10.2, needed is 11.0");
  EXPECT_FAILS(ropeteam_save_put(save.get(), "x", device, bytes.size()), ROPETEAM_UNSUPPORTED, "CUDA 10.2");
  Put(save.get(), "x", bytes);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), bytes);
}

TEST_F(CudaDriverTest, ADriverThatNobodyInitialisedHasNoMemory) {
  fake_cuda_set_initialised(0);
  const std::string bytes = RandomBytes(1000, 11);
  const SaveHandle save = Begin(handle_.get(), 1, 8 * kMiB, 4);
  EXPECT_FAILS(PutCuda(save, "x", bytes.data(), bytes.size()), ROPETEAM_INVALID_ARGUMENT, "no device memory");
  Put(save.get(), "x", bytes);
  ASSERT_OK(ropeteam_save_commit(save.get()));
}

TEST_F(CudaDriverTest, APointerOfADeadContextIsRefused) {
  void* context = fake_cuda_context_create(0);
  void* device = fake_cuda_alloc_in(context, kMiB);
  allocated_.push_back(device);
  const std::string bytes = RandomBytes(100, 12);
  fake_cuda_write(device, bytes.data(), bytes.size());
  const SaveHandle save = Begin(handle_.get(), 1, 8 * kMiB, 4);
  ASSERT_OK(ropeteam_save_put(save.get(), "alive", device, bytes.size()));
  fake_cuda_context_kill(context);
  EXPECT_FAILS(PutCuda(save, "x", device, bytes.size()), ROPETEAM_INVALID_ARGUMENT, "context that is gone");
  EXPECT_FAILS(ropeteam_save_put(save.get(), "x", device, bytes.size()), ROPETEAM_INVALID_ARGUMENT,
               "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)");
  ASSERT_OK(PutCuda(save, "y", Upload(bytes), bytes.size()));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "alive"), bytes);
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "y"), bytes);
}

TEST_F(CudaDriverTest, AContextThatDiesUnderASaveEndsIt) {
  void* context = fake_cuda_context_create(1);
  void* device = fake_cuda_alloc_in(context, 12 * kMiB);
  allocated_.push_back(device);
  const SaveHandle save = Begin(handle_.get(), 1, 16 * kMiB, 4);
  fake_cuda_hold_copies(1);
  ASSERT_OK(PutCuda(save, "x", device, 12 * kMiB));
  ASSERT_TRUE(fake_cuda_wait_for(FAKE_CUDA_COPIES_HELD, 1));
  fake_cuda_context_kill(context);
  fake_cuda_hold_copies(0);
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_IO, "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)");
  const std::string bytes = RandomBytes(3 * kMiB, 13);
  ExpectSaves(2, Upload(bytes, 1), bytes);
}

TEST_F(CudaDriverTest, AfterADeviceResetTheArenaIsPageLockedAgain) {
  PinAll();
  void* old_memory = Upload("old");
  fake_cuda_primary_reset(0);
  const SaveHandle save = Begin(handle_.get(), 1, 8 * kMiB, 1);
  EXPECT_FAILS(PutCuda(save, "x", old_memory, 3), ROPETEAM_INVALID_ARGUMENT, "context that is gone");
  const std::string bytes = RandomBytes(3 * kMiB, 14);
  char* device = Upload(bytes);
  ExpectSaves(2, device, bytes);
  ASSERT_TRUE(fake_cuda_wait_for(FAKE_CUDA_REGISTERED, 2));
}

TEST_F(CudaDriverTest, ADaemonsDeathEndsTheCopies) {
  const uint64_t length = 40 * kMiB;
  char* device = Upload(std::string(length, 'o'));
  void* stream = fake_cuda_stream_create(0, 1);
  const int gate = fake_cuda_gate();
  fake_cuda_write_later(stream, device, "n", 1, gate);
  const SaveHandle save = Begin(handle_.get(), 1, length, 1);
  ASSERT_OK(PutCuda(save, "x", device, length, stream));
  daemon_.Kill();
  fake_cuda_open(gate);
  EXPECT_EQ(ropeteam_save_commit(save.get()), ROPETEAM_UNAVAILABLE) << ropeteam_last_error();
  // No copy was made into chunks that may belong to another save by now.
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_COPIES_OUT), 0u);
  daemon_.Start();
  fake_cuda_stream_destroy(stream);
  ExpectSaves(2, device, "n" + std::string(kMiB, 'o'));
}

TEST_F(CudaDriverTest, AReadWaitsForTheCallersStreamUntilItsDeadline) {
  const std::string bytes = RandomBytes(3 * kMiB, 15);
  SaveOne(handle_.get(), 1, bytes);
  const ViewHandle view = OpenView(handle_.get(), 1);
  char* device = Upload(std::string(bytes.size(), 'o'));
  void* stream = fake_cuda_stream_create(0, 1);
  const int gate = fake_cuda_gate();
  fake_cuda_write_later(stream, device, "n", 1, gate);
  EXPECT_FAILS(ropeteam_view_read_cuda(view.get(), "x", 0, device, bytes.size(), stream, 20),
               ROPETEAM_DEADLINE_EXCEEDED, "stream");
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_COPIES_IN), 0u);
  fake_cuda_open(gate);
  ASSERT_OK(ropeteam_view_read_cuda(view.get(), "x", 0, device, bytes.size(), stream, kTimeoutMs));
  std::string read(bytes.size(), '\0');
  fake_cuda_read(device, read.data(), read.size());
  EXPECT_EQ(read, bytes);
  fake_cuda_fail("cuMemcpyHtoDAsync_v2", 2, kIllegalAddress, 0);
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", 0, device, bytes.size(), kTimeoutMs), ROPETEAM_IO,
               "(700)");
  EXPECT_OK(ropeteam_view_read(view.get(), "x", 0, device, bytes.size(), kTimeoutMs));
  fake_cuda_stream_destroy(stream);
}

TEST_F(CudaDriverTest, ASaveLikeTheOneBeforeAllocatesNothing) {
  PinAll();
  char* device = Upload(RandomBytes(8 * kMiB, 16));
  const auto save_all = [&](uint64_t step) {
    const uint64_t before = AllocationsOfThisThread();
    const ropeteam_save_options_t options{sizeof(options), 8 * kMiB, 64, 0};
    ropeteam_save_t* save = nullptr;
    EXPECT_OK(ropeteam_save_begin(handle_.get(), step, &options, &save));
    static const char* const kNames[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    for (uint64_t i = 0; i < 8; ++i) {
      EXPECT_OK(ropeteam_save_put_cuda(save, kNames[i], device + i * kMiB, kMiB, nullptr));
    }
    EXPECT_OK(ropeteam_save_commit(save));
    ropeteam_save_close(save);
    return AllocationsOfThisThread() - before;
  };
  save_all(1);
#ifdef ROPETEAM_SANITIZED
  GTEST_SKIP() << "in this build the fake driver allocates through the operator that is counted";
#endif
  EXPECT_EQ(save_all(2), 0u);
  EXPECT_EQ(save_all(3), 0u);
}

TEST_F(CudaDriverTest, ThreadsSaveAtOnceFromOneDevice) {
  const std::string bytes = RandomBytes(2 * kMiB + 77, 17);
  char* device = Upload(bytes);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t step = 100 * t + 1; step < 100 * t + 6; ++step) {
        const SaveHandle save = Begin(handle_.get(), step, bytes.size(), 2);
        ASSERT_NE(save, nullptr);
        EXPECT_OK(PutCuda(save, "x", device, bytes.size()));
        if (step % 2 == 0) continue;  // closed, and so aborted
        EXPECT_OK(ropeteam_save_put(save.get(), "y", device + 1, 5));
        EXPECT_OK(ropeteam_save_commit(save.get()));
        EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "x"), bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace ropeteam::test
