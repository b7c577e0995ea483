// SPDX-License-Identifier: Apache-2.0
//
// Saves from and reads into device memory on the GPU of the program's rig: what must hold on the fake driver
// and on a real one.

#include "tests/api/api_fixture.h"
#include "tests/api/cuda_rig.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kChunk = 64 * 1024;

class CudaSuite : public ApiTest {
 protected:
  CudaSuite() : ApiTest(kChunk, 512) {}

  void SetUp() override {
    std::string why;
    rig_ = TheRig(&why);
    if (rig_ == nullptr) GTEST_SKIP() << why;
    handle_ = Open();
    ASSERT_NE(handle_, nullptr);
  }
  void TearDown() override {
    handle_.reset();
    for (const auto& [pointer, kind] : allocated_) rig_->Free(pointer, kind);
    ExpectNoProblems();
  }

  char* Alloc(uint64_t bytes, int device = 0, CudaRig::Kind kind = CudaRig::Kind::kDevice) {
    void* pointer = rig_->Alloc(device, bytes, kind);
    if (pointer != nullptr) allocated_.emplace_back(pointer, kind);
    return static_cast<char*>(pointer);
  }
  char* Upload(const std::string& bytes, int device = 0, CudaRig::Kind kind = CudaRig::Kind::kDevice) {
    char* pointer = Alloc(bytes.size(), device, kind);
    if (pointer != nullptr) rig_->Write(pointer, bytes);
    return pointer;
  }
  void PutCuda(ropeteam_save_t* save, const std::string& name, const void* data, uint64_t length,
               void* stream = nullptr) {
    EXPECT_OK(ropeteam_save_put_cuda(save, name.c_str(), data, length, stream));
  }

  CudaRig* rig_ = nullptr;
  Handle handle_;
  std::vector<std::pair<void*, CudaRig::Kind>> allocated_;
};

TEST_F(CudaSuite, ObjectsOfAllSizesAndOffsetsComeAcross) {
  const std::string bytes = RandomBytes(1 << 20, 1);
  const char* device = Upload(bytes);
  const std::vector<std::pair<uint64_t, uint64_t>> parts = {{0, 1},
                                                            {1, 63},
                                                            {3, 64},
                                                            {0, 65},
                                                            {77, 4095},
                                                            {0, kChunk - 1},
                                                            {0, kChunk},
                                                            {5, kChunk + 1},
                                                            {64, 3 * kChunk},
                                                            {9, 200001},
                                                            {0, uint64_t{1} << 20},
                                                            {11, 0}};
  for (uint64_t step = 1; step <= 2; ++step) {
    SaveHandle save = Begin(handle_.get(), step, 3 << 20, parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      const std::string name = "part" + std::to_string(i);
      const char* source = device + parts[i].first;
      if (step == 1) {
        PutCuda(save.get(), name, source, parts[i].second);
      } else {
        EXPECT_OK(ropeteam_save_put(save.get(), name.c_str(), source, parts[i].second));
      }
    }
    ASSERT_OK(ropeteam_save_commit(save.get()));
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "part" + std::to_string(i)),
                bytes.substr(parts[i].first, parts[i].second))
          << i << " of step " << step;
    }
  }
}

TEST_F(CudaSuite, AThousandSmallTensorsBetweenHostObjects) {
  const std::string bytes = RandomBytes(1 << 20, 2);
  const char* device = Upload(bytes);
  SaveHandle save = Begin(handle_.get(), 1, 4 << 20, 2000);
  for (uint64_t i = 0; i < 1000; ++i) {
    PutCuda(save.get(), "device" + std::to_string(i), device + i * 1000, i % 999 + 1);
    Put(save.get(), "host" + std::to_string(i), RandomBytes(i % 300, i));
  }
  ASSERT_OK(ropeteam_save_commit(save.get()));
  for (uint64_t i = 0; i < 1000; i += 7) {
    EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "device" + std::to_string(i)),
              bytes.substr(i * 1000, i % 999 + 1));
    EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "host" + std::to_string(i)), RandomBytes(i % 300, i));
  }
}

TEST_F(CudaSuite, ReservedHostAndDeviceObjectsShareChunks) {
  const std::string bytes = RandomBytes(5 * kChunk / 2, 3);
  const char* device = Upload(bytes);
  SaveHandle save = Begin(handle_.get(), 1, 16 * kChunk, 8);
  void* reserved = nullptr;
  PutCuda(save.get(), "d0", device, 1000);
  ASSERT_OK(ropeteam_save_reserve(save.get(), "r0", 100, &reserved));
  PutCuda(save.get(), "d1", device, bytes.size());
  Put(save.get(), "h0", RandomBytes(kChunk, 4));
  PutCuda(save.get(), "d2", device + 1, 2 * kChunk);
  void* last = nullptr;
  ASSERT_OK(ropeteam_save_reserve(save.get(), "r1", 2 * kChunk, &last));
  PutCuda(save.get(), "d3", device + 2, 10);
  std::memset(reserved, 'r', 100);
  std::memset(last, 's', 2 * kChunk);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "d0"), bytes.substr(0, 1000));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "r0"), std::string(100, 'r'));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "d1"), bytes);
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "h0"), RandomBytes(kChunk, 4));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "d2"), bytes.substr(1, 2 * kChunk));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "r1"), std::string(2 * kChunk, 's'));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "d3"), bytes.substr(2, 10));
}

TEST_F(CudaSuite, PartsOfHostsAndDevicesShareChunks) {
  const std::string bytes = RandomBytes(5 * kChunk / 2, 3);
  const std::string header = RandomBytes(64, 4);
  const std::string tail = RandomBytes(kChunk + 1, 5);
  char* device = Upload(bytes);
  void* stream = rig_->MakeStream(0, /*non_blocking=*/true);
  char* late = Upload(std::string(3 * kChunk, 'x'));
  for (uint64_t step = 1; step <= 2; ++step) {
    const uint64_t flags = step == 1 ? ROPETEAM_PART_BACKGROUND : 0;
    std::vector<ropeteam_part_t> parts = {{header.data(), header.size(), nullptr, 0},
                                          {device + 1, 1000, nullptr, flags},
                                          {device, 0, stream, flags},
                                          {header.data(), header.size(), nullptr, 0},
                                          {device, bytes.size(), nullptr, flags},
                                          {tail.data(), tail.size(), nullptr, 0},
                                          {late, 3 * kChunk, stream, flags}};
    rig_->FillLater(stream, late, static_cast<uint8_t>('a' + step), 3 * kChunk);
    if (flags == 0) rig_->Synchronize(stream);
    SaveHandle save = Begin(handle_.get(), step, 16 * kChunk, 2);
    EXPECT_OK(ropeteam_save_put_parts(save.get(), "parts", parts.data(), parts.size()));
    Put(save.get(), "after", tail);
    ASSERT_OK(ropeteam_save_commit(save.get()));
    const std::string filled(3 * kChunk, static_cast<char>('a' + step));
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "parts"),
              header + bytes.substr(1, 1000) + header + bytes + tail + filled);
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "after"), tail);
  }
  rig_->DestroyStream(stream);
}

TEST_F(CudaSuite, ABadPartLeavesTheSaveAsItWas) {
  const std::string bytes = RandomBytes(1000, 6);
  char* device = Upload(bytes);
  SaveHandle save = Begin(handle_.get(), 1, 4 * kChunk, 2);
  const std::vector<ropeteam_part_t> parts = {
      {device, bytes.size(), nullptr, ROPETEAM_PART_BACKGROUND},
      {bytes.data(), bytes.size(), nullptr, ROPETEAM_PART_BACKGROUND}};
  EXPECT_FAILS(ropeteam_save_put_parts(save.get(), "x", parts.data(), parts.size()),
               ROPETEAM_INVALID_ARGUMENT, "is no device memory");
  EXPECT_OK(ropeteam_save_put_parts(save.get(), "x", parts.data(), 1));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), bytes);
}

TEST_F(CudaSuite, EveryKindOfMemory) {
  const std::string bytes = RandomBytes(100000, 5);
  const std::vector<std::pair<std::string, CudaRig::Kind>> kinds = {{"device", CudaRig::Kind::kDevice},
                                                                    {"pool", CudaRig::Kind::kPool},
                                                                    {"managed", CudaRig::Kind::kManaged},
                                                                    {"host", CudaRig::Kind::kHost}};
  SaveHandle save = Begin(handle_.get(), 1, 1 << 20, 8);
  for (const auto& [name, kind] : kinds) {
    char* pointer = Upload(bytes, 0, kind);
    if (pointer == nullptr) {
      std::printf("this device has no %s memory\n", name.c_str());
      continue;
    }
    EXPECT_OK(ropeteam_save_put(save.get(), name.c_str(), pointer, bytes.size())) << name;
    if (kind == CudaRig::Kind::kHost) {
      EXPECT_FAILS(ropeteam_save_put_cuda(save.get(), "claimed", pointer, bytes.size(), nullptr),
                   ROPETEAM_INVALID_ARGUMENT, "no device memory");
    } else {
      PutCuda(save.get(), "cuda." + name, pointer, bytes.size());
    }
  }
  ASSERT_OK(ropeteam_save_commit(save.get()));
  const ViewHandle view = OpenView(handle_.get(), 1);
  for (uint64_t i = 0; i < ropeteam_view_count(view.get()); ++i) {
    ropeteam_object_t object{sizeof(object), nullptr, 0};
    ASSERT_OK(ropeteam_view_object(view.get(), i, &object));
    EXPECT_EQ(daemon_.ObjectBytes(1, kRank, object.name), bytes) << object.name;
  }
}

TEST_F(CudaSuite, ACopyComesBehindTheCallersStream) {
  for (const bool non_blocking : {true, false}) {
    void* stream = rig_->MakeStream(0, non_blocking);
    const uint64_t length = 10 * kChunk;
    char* device = Upload(std::string(length, '0'));
    const uint64_t step = non_blocking ? 1 : 2;
    SaveHandle save = Begin(handle_.get(), step, length, 1);
    rig_->FillLater(stream, device, 'a', length);
    rig_->FillLater(stream, device, 'b', length);
    PutCuda(save.get(), "x", device, length, stream);
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "x"), std::string(length, 'b'));
    rig_->DestroyStream(stream);
  }
}

TEST_F(CudaSuite, APlainPutComesBehindTheDefaultStreamsWork) {
  void* stream = rig_->MakeStream(0, /*non_blocking=*/false);
  const uint64_t length = 10 * kChunk;
  char* device = Upload(std::string(length, '0'));
  SaveHandle save = Begin(handle_.get(), 1, length, 1);
  rig_->FillLater(stream, device, 'b', length);
  EXPECT_OK(ropeteam_save_put(save.get(), "x", device, length));
  // The caller may change the source after the put, before the commit.
  rig_->FillLater(stream, device, 'c', length);
  rig_->Synchronize(stream);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), std::string(length, 'b'));
  rig_->DestroyStream(stream);
}

TEST_F(CudaSuite, AllDevicesIntoOneSave) {
  const int devices = rig_->devices();
  SaveHandle save = Begin(handle_.get(), 1, 4 << 20, 8);
  for (int device = 0; device < devices; ++device) {
    const std::string bytes = RandomBytes(3 * kChunk + 17, static_cast<uint64_t>(device));
    void* stream = rig_->MakeStream(device, true);
    PutCuda(save.get(), "gpu" + std::to_string(device), Upload(bytes, device), bytes.size(), stream);
    rig_->DestroyStream(stream);
  }
  // On a stream of another device than the memory's.
  void* other = rig_->MakeStream(devices - 1, true);
  PutCuda(save.get(), "crossed", Upload("crossed", 0), 7, other);
  rig_->DestroyStream(other);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  for (int device = 0; device < devices; ++device) {
    EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "gpu" + std::to_string(device)),
              RandomBytes(3 * kChunk + 17, static_cast<uint64_t>(device)));
  }
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "crossed"), "crossed");
}

TEST_F(CudaSuite, ReadsFillDeviceMemory) {
  const uint64_t length = 6 * kChunk + 100;
  const std::string bytes = RandomBytes(length, 6);
  SaveOne(handle_.get(), 1, bytes);
  const ViewHandle view = OpenView(handle_.get(), 1);
  char* device = Upload(std::string(length, '0'));
  ASSERT_OK(ropeteam_view_read(view.get(), "x", 0, device, length, kTimeoutMs));
  EXPECT_EQ(rig_->Read(device, length), bytes);

  void* stream = rig_->MakeStream(0, true);
  rig_->FillLater(stream, device, '1', length);
  ASSERT_OK(ropeteam_view_read_cuda(view.get(), "x", 77, device + 3, 2 * kChunk, stream, kTimeoutMs));
  EXPECT_EQ(rig_->Read(device, length),
            "111" + bytes.substr(77, 2 * kChunk) + std::string(length - 2 * kChunk - 3, '1'));
  rig_->DestroyStream(stream);
  std::string here(100 * 10, '#');
  const ropeteam_range_t ranges[] = {{"x", 5, 10, 100, 1000, device, 64},
                                     {"x", 5, 10, 100, 1000, here.data(), 10}};
  ASSERT_OK(ropeteam_view_read_ranges(view.get(), ranges, 2, kTimeoutMs));
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(rig_->Read(device + i * 64, 10), bytes.substr(5 + i * 1000, 10));
    EXPECT_EQ(here.substr(i * 10, 10), bytes.substr(5 + i * 1000, 10));
  }
  EXPECT_FAILS(ropeteam_view_read_cuda(view.get(), "x", 1, device, length, nullptr, kTimeoutMs),
               ROPETEAM_INVALID_ARGUMENT, "of object x");
  EXPECT_OK(ropeteam_view_read_cuda(view.get(), "x", length, nullptr, 0, nullptr, kTimeoutMs));
}

TEST_F(CudaSuite, AReadRepairsABadChunkOnItsWayToTheDevice) {
  const uint64_t length = 4 * kChunk;
  const std::string bytes = RandomBytes(length, 7);
  SaveOne(handle_.get(), 1, bytes);
  daemon_.Flip(1, kRank, 2 * kChunk + 5);
  const ViewHandle view = OpenView(handle_.get(), 1);
  char* device = Upload(std::string(length, '0'));
  ASSERT_OK(ropeteam_view_read(view.get(), "x", 0, device, length, kTimeoutMs));
  EXPECT_EQ(rig_->Read(device, length), bytes);
  EXPECT_EQ(daemon_.counts().repairs, 1);
}

TEST_F(CudaSuite, WhatIsNoDeviceMemoryIsRefusedAndTheSaveGoesOn) {
  const std::string bytes = RandomBytes(100, 8);
  SaveHandle save = Begin(handle_.get(), 1, 1000, 2);
  EXPECT_FAILS(ropeteam_save_put_cuda(save.get(), "x", bytes.data(), bytes.size(), nullptr),
               ROPETEAM_INVALID_ARGUMENT, "no device memory");
  void* freed = rig_->Alloc(0, 1 << 20, CudaRig::Kind::kDevice);
  rig_->Free(freed, CudaRig::Kind::kDevice);
  EXPECT_FAILS(ropeteam_save_put_cuda(save.get(), "x", freed, 100, nullptr), ROPETEAM_INVALID_ARGUMENT,
               "no device memory");
  Put(save.get(), "x", bytes);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "x"), bytes);
  const ViewHandle view = OpenView(handle_.get(), 1);
  std::string target(100, '\0');
  EXPECT_FAILS(ropeteam_view_read_cuda(view.get(), "x", 0, target.data(), 100, nullptr, kTimeoutMs),
               ROPETEAM_INVALID_ARGUMENT, "no device memory");
  EXPECT_EQ(ReadAll(view.get(), "x"), bytes);
}

TEST_F(CudaSuite, AbortedAndClosedSavesLeaveTheDeviceAndTheArenaUsable) {
  const std::string bytes = RandomBytes(20 * kChunk, 9);
  const char* device = Upload(bytes);
  {
    SaveHandle save = Begin(handle_.get(), 1, bytes.size(), 1);
    PutCuda(save.get(), "x", device, bytes.size());
    EXPECT_OK(ropeteam_save_abort(save.get()));
  }
  {
    SaveHandle save = Begin(handle_.get(), 2, bytes.size(), 1);
    PutCuda(save.get(), "x", device, bytes.size());
  }
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.aborts == 2; }));
  EXPECT_EQ(daemon_.chunks_free(), 512u);
  SaveHandle save = Begin(handle_.get(), 3, bytes.size(), 1);
  PutCuda(save.get(), "x", device, bytes.size());
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(3, kRank, "x"), bytes);
}

}  // namespace
}  // namespace ropeteam::test
