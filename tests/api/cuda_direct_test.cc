// SPDX-License-Identifier: Apache-2.0
//
// Device memory that the daemon reads itself: what it gets, when, and what happens if it cannot read it. The
// fake daemon maps the fake driver's dmabufs and compares their bytes with the checksums that come later.

#include <atomic>
#include <thread>

#include "tests/api/fake_cuda_fixture.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kChunk = 64 * 1024;

class CudaDirectTest : public FakeCudaTest {
 protected:
  CudaDirectTest() : FakeCudaTest(kChunk, 400) {
    daemon_.Configure([](FakeConfig& config) { config.dmabuf = true; });
  }
  // Saves one object "x" with these bytes, from `offset` of the device memory.
  void SaveFrom(uint64_t step, const char* device, const std::string& bytes, uint64_t offset = 0) {
    const SaveHandle save = Begin(handle_.get(), step, bytes.size(), 2);
    ASSERT_NE(save, nullptr);
    Put(save.get(), "before", "0123456789");
    EXPECT_OK(ropeteam_save_put_cuda(save.get(), "x", device + offset, bytes.size() - offset, nullptr));
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "x"), bytes.substr(offset));
  }
};

TEST_F(CudaDirectTest, WholeChunksOfAnObjectAreToldOfAndTheMemoryIsHandedOverOnce) {
  const std::string bytes = RandomBytes(10 * kChunk + 100, 1);
  char* device = Upload(bytes);
  SaveFrom(1, device, bytes);
  // The object begins 64 bytes into the first chunk, so it shares the first and the last chunk with other
  // data.
  EXPECT_EQ(daemon_.counts().direct_chunks, 9);
  EXPECT_EQ(daemon_.counts().settles, 1);
  for (uint64_t step = 2; step < 8; ++step) SaveFrom(step, device, bytes, step * 1000 + 1);
  EXPECT_EQ(daemon_.counts().gpu_buffers, 1);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_EXPORTS), 1u);
  EXPECT_EQ(daemon_.counts().settles, 7);
}

TEST_F(CudaDirectTest, TheDaemonIsToldOnlyWhenTheCallersKernelHasWrittenTheBytes) {
  const uint64_t length = 6 * kChunk;
  char* device = Upload(std::string(length, 'o'));
  void* stream = fake_cuda_stream_create(0, 1);
  const int gate = fake_cuda_gate();
  const std::string bytes = RandomBytes(length, 2);
  fake_cuda_write_later(stream, device, bytes.data(), length, gate);
  const SaveHandle save = Begin(handle_.get(), 1, length, 1);
  ASSERT_OK(ropeteam_save_put_cuda(save.get(), "x", device, length, stream));
  SaveOne(Open(kRank + 1).get(), 1, "z");  // a round trip: an announcement would have arrived before it
  EXPECT_EQ(daemon_.counts().direct_chunks, 0);
  fake_cuda_open(gate);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.counts().direct_chunks, 6);
  fake_cuda_stream_destroy(stream);
}

TEST_F(CudaDirectTest, TheDaemonHearsOfThemBeforeTheCopies) {
  const std::string bytes = RandomBytes(6 * kChunk, 3);
  char* device = Upload(bytes);
  const SaveHandle save = Begin(handle_.get(), 1, bytes.size(), 1);
  fake_cuda_hold_copies(1);
  ASSERT_OK(ropeteam_save_put_cuda(save.get(), "x", device, bytes.size(), nullptr));
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.direct_chunks == 6; }));
  EXPECT_EQ(daemon_.counts().filled_chunks, 0);
  fake_cuda_hold_copies(0);
  ASSERT_OK(ropeteam_save_commit(save.get()));
}

TEST_F(CudaDirectTest, ThePlainPutStaysInThisNode) {
  const std::string bytes = RandomBytes(6 * kChunk, 4);
  char* device = Upload(bytes);
  const SaveHandle save = Begin(handle_.get(), 1, bytes.size(), 1);
  ASSERT_OK(ropeteam_save_put(save.get(), "x", device, bytes.size()));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.counts().direct_chunks, 0);
  EXPECT_EQ(daemon_.counts().settles, 0);
}

TEST_F(CudaDirectTest, AnAbortSettlesFirst) {
  const std::string bytes = RandomBytes(6 * kChunk, 5);
  char* device = Upload(bytes);
  {
    const SaveHandle save = Begin(handle_.get(), 1, bytes.size(), 1);
    ASSERT_OK(ropeteam_save_put_cuda(save.get(), "x", device, bytes.size(), nullptr));
    EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.direct_chunks == 6; }));
    ASSERT_OK(ropeteam_save_abort(save.get()));
  }
  EXPECT_EQ(daemon_.counts().settles, 1);
}

TEST_F(CudaDirectTest, MemoryThatNoSaveUsesAnyMoreIsRevoked) {
  const std::string bytes = RandomBytes(4 * kChunk, 6);
  char* old_memory = Upload(bytes);
  char* device = Upload(bytes);
  SaveFrom(1, old_memory, bytes);
  SaveFrom(2, device, bytes);
  for (uint64_t step = 3; step < 10; ++step) SaveFrom(step, device, bytes);
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.gpu_buffer_ends == 1; }));
  EXPECT_EQ(daemon_.counts().gpu_buffers, 2);
  // The memory is handed over again when it is used again.
  SaveFrom(20, old_memory, bytes);
  EXPECT_EQ(daemon_.counts().gpu_buffers, 3);
}

TEST_F(CudaDirectTest, ARefusedBufferIsSavedThroughTheArena) {
  const std::string bytes = RandomBytes(6 * kChunk, 7);
  char* device = Upload(bytes);
  daemon_.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kGpuBuffer] = {Code::kIo, "ibv_reg_dmabuf_mr: Operation not supported (95)"};
  });
  SaveFrom(1, device, bytes);
  SaveFrom(2, device, bytes);
  EXPECT_EQ(daemon_.counts().direct_chunks, 0);
  EXPECT_EQ(daemon_.Received(local::Type::kGpuBuffer), 1);  // not once per save
  // Another allocation may work.
  daemon_.Configure([](FakeConfig& config) { config.refuse.clear(); });
  SaveFrom(3, Upload(bytes), bytes);
  EXPECT_EQ(daemon_.counts().direct_chunks, 5);
}

TEST_F(CudaDirectTest, ADaemonThatCannotAtAllIsAskedOnce) {
  const std::string bytes = RandomBytes(6 * kChunk, 8);
  daemon_.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kGpuBuffer] = {Code::kUnsupported, "no device in use can"};
  });
  SaveFrom(1, Upload(bytes), bytes);
  SaveFrom(2, Upload(bytes), bytes);
  EXPECT_EQ(daemon_.Received(local::Type::kGpuBuffer), 1);
}

TEST_F(CudaDirectTest, ADriverThatExportsNothingIsSavedThroughTheArena) {
  const std::string bytes = RandomBytes(6 * kChunk, 9);
  char* device = Upload(bytes);
  fake_cuda_fail("cuMemGetHandleForAddressRange", 1, 801, 0);
  SaveFrom(1, device, bytes);
  EXPECT_EQ(daemon_.Received(local::Type::kGpuBuffer), 0);
  EXPECT_EQ(daemon_.counts().direct_chunks, 0);
}

TEST_F(CudaDirectTest, ADaemonThatReadsNoDeviceMemoryIsGivenNone) {
  handle_.reset();
  daemon_.Configure([](FakeConfig& config) { config.dmabuf = false; });
  handle_ = Open();
  const std::string bytes = RandomBytes(6 * kChunk, 10);
  SaveFrom(1, Upload(bytes), bytes);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_EXPORTS), 0u);
}

TEST_F(CudaDirectTest, NoMoreIsHandedOverThanTheLimit) {
  const std::string bytes = RandomBytes(2 * kChunk, 11);
  const SaveHandle save = Begin(handle_.get(), 1, 100 * kChunk, 40);
  for (int i = 0; i < 40; ++i) {
    EXPECT_OK(ropeteam_save_put_cuda(save.get(), ("x" + std::to_string(i)).c_str(), Upload(bytes),
                                     bytes.size(), nullptr));
  }
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.counts().gpu_buffers, static_cast<int>(local::kGpuBuffersMax));
  for (int i = 0; i < 40; ++i) EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x" + std::to_string(i)), bytes);
}

TEST_F(CudaDirectTest, ADaemonThatComesBackIsGivenTheMemoryAgain) {
  const std::string bytes = RandomBytes(6 * kChunk, 12);
  char* device = Upload(bytes);
  SaveFrom(1, device, bytes);
  daemon_.Kill();
  daemon_.Start();
  SaveFrom(2, device, bytes);
  EXPECT_EQ(daemon_.counts().gpu_buffers, 2);
  EXPECT_EQ(daemon_.counts().direct_chunks, 10);
}

}  // namespace
}  // namespace ropeteam::test
