// SPDX-License-Identifier: Apache-2.0
//
// Device memory that ranks hand over: raw frames with descriptors at one end, a transport that maps them at
// the other. gpu_direct_test.cc covers its use in a save.

#include <sys/mman.h>

#include <filesystem>

#include "tests/node/dmabuf_transport.h"
#include "tests/node/local_server_fixture.h"
#include "transport/inproc/inproc_transport.h"

namespace ropeteam {
namespace {

constexpr uint64_t kBytes = 4 * kChunk;

class LocalDeviceTest : public LocalServerTest {
 protected:
  LocalDeviceTest()
      : transport_(InprocFabric::Create()->CreateTransport("a").value(), control_), buffers_(&transport_) {
    device_buffers_ = &buffers_;
  }
  void SetUp() override {
    LocalServerTest::SetUp();
    memory_file_.reset(memfd_create("device", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(memory_file_.get(), kBytes), 0);
  }
  void TearDown() override {
    LocalServerTest::TearDown();
    buffers_.Stop();
    EXPECT_EQ(control_->registered(), 0u);
  }

  UniqueFd ConnectRank(uint32_t rank = 0) {
    UniqueFd client = Connect();
    Send(client, Type::kHello, 1, RankHello(rank, 4));
    EXPECT_EQ(Receive(client).type, Type::kHelloReply);
    return client;
  }
  local::Reply Hand(const UniqueFd& client, uint64_t name, uint64_t bytes = kBytes) {
    Send(client, Type::kGpuBuffer, 100 + name, Encode(local::GpuBuffer{name, bytes}), memory_file_.get());
    return ReceiveReply(client);
  }
  void TurnUntilRegistered(size_t count) {
    const TimeUs give_up = EventLoop::Now() + kGiveUpUs;
    while (control_->registered() != count && EventLoop::Now() < give_up) Turn();
    EXPECT_EQ(control_->registered(), count);
  }
  // Checks that the session still answers.
  void ExpectAlive(const UniqueFd& client) {
    Send(client, Type::kSaveSettle, 7, Encode(local::SaveSettle{12345, 0}));
    EXPECT_EQ(ReceiveReply(client).code, Code::kNotFound);
  }
  static size_t OpenDescriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  }

  const std::shared_ptr<DmabufControl> control_ = std::make_shared<DmabufControl>();
  DmabufTransport transport_;
  DeviceBuffers buffers_;
  UniqueFd memory_file_;
};

TEST_F(LocalDeviceTest, MemoryIsRegisteredAndLetGoAsItsRankSays) {
  const UniqueFd rank = ConnectRank();
  const size_t descriptors = OpenDescriptors();
  EXPECT_EQ(Hand(rank, 1).code, Code::kOk);
  EXPECT_EQ(Hand(rank, 2).code, Code::kOk);
  EXPECT_EQ(control_->registered(), 2u);
  EXPECT_EQ(OpenDescriptors(), descriptors);  // the registration keeps the memory without a descriptor
  Send(rank, Type::kGpuBufferEnd, 9, Encode(local::GpuBufferEnd{1}));
  TurnUntilRegistered(1);
  Send(rank, Type::kGpuBufferEnd, 10, Encode(local::GpuBufferEnd{1}));  // no such buffer
  ExpectAlive(rank);
}

TEST_F(LocalDeviceTest, MemoryGoesWithItsSession) {
  UniqueFd rank = ConnectRank();
  const UniqueFd other = ConnectRank(1);
  const size_t descriptors = OpenDescriptors();
  EXPECT_EQ(Hand(rank, 1).code, Code::kOk);
  EXPECT_EQ(Hand(rank, 2).code, Code::kOk);
  EXPECT_EQ(Hand(other, 1).code, Code::kOk);
  rank.reset();
  TurnUntilRegistered(1);
  EXPECT_LT(OpenDescriptors(), descriptors);
}

TEST_F(LocalDeviceTest, WhatCannotBeIsRefusedWithTheValueAndTheLimit) {
  const UniqueFd rank = ConnectRank();
  const auto refused = [&](const local::Reply& reply, Code code, const char* words) {
    EXPECT_EQ(reply.code, code) << reply.message;
    EXPECT_THAT(reply.message, HasSubstr(words));
  };
  Send(rank, Type::kGpuBuffer, 2, Encode(local::GpuBuffer{1, kBytes}));
  refused(ReceiveReply(rank), Code::kInvalidArgument, "16384 bytes came without a descriptor");
  refused(Hand(rank, 1, 0), Code::kInvalidArgument, "0 bytes, limit");
  refused(Hand(rank, 1, local::kGpuBufferBytesMax + 1), Code::kInvalidArgument, "limit 281474976710656");
  refused(Hand(rank, 1, kBytes + 1), Code::kInvalidArgument, "16385 bytes in a dmabuf of 16384");
  for (uint64_t name = 2; name < 2 + local::kGpuBuffersMax; ++name)
    EXPECT_EQ(Hand(rank, name).code, Code::kOk);
  refused(Hand(rank, 20), Code::kAlreadyExists, "count up");
  refused(Hand(rank, 99), Code::kNoSpace, "32 allocations of device memory are handed over, limit 32");
  Send(rank, Type::kGpuBufferEnd, 3, Encode(local::GpuBufferEnd{5}));
  EXPECT_EQ(Hand(rank, 99).code, Code::kOk);
}

TEST_F(LocalDeviceTest, WhatTheCardRefusesIsToldInItsWords) {
  const UniqueFd rank = ConnectRank();
  control_->Refuse(Error(Code::kIo, "device mlx5_0 refuses the dmabuf: Operation not supported"));
  const local::Reply reply = Hand(rank, 1);
  EXPECT_EQ(reply.code, Code::kIo);
  EXPECT_THAT(reply.message, HasSubstr("mlx5_0 refuses the dmabuf"));
  control_->Refuse(OkStatus());
  EXPECT_EQ(Hand(rank, 2).code, Code::kOk);  // other memory may work
}

TEST_F(LocalDeviceTest, NobodyWaitsForARegistration) {
  const UniqueFd rank = ConnectRank();
  control_->HoldRegistrations(true);
  Send(rank, Type::kGpuBuffer, 2, Encode(local::GpuBuffer{1, kBytes}), memory_file_.get());
  ExpectAlive(rank);
  ASSERT_TRUE(control_->WaitForHeld());
  // Chunks in memory that is not registered yet are put from the arena.
  Send(rank, Type::kSaveDirect, 3, Encode(local::SaveDirect{1, 1, UINT64_MAX, 0, 9}));
  ExpectAlive(rank);
  control_->HoldRegistrations(false);
  const Received answer = Receive(rank);
  EXPECT_EQ(answer.request, 2u);
  EXPECT_EQ(control_->registered(), 1u);
}

TEST_F(LocalDeviceTest, MemoryThatIsRevokedOrAbandonedMeanwhileIsLetGo) {
  const UniqueFd rank = ConnectRank();
  UniqueFd dying = ConnectRank(1);
  control_->HoldRegistrations(true);
  Send(rank, Type::kGpuBuffer, 2, Encode(local::GpuBuffer{1, kBytes}), memory_file_.get());
  Send(rank, Type::kGpuBufferEnd, 3, Encode(local::GpuBufferEnd{1}));
  Send(dying, Type::kGpuBuffer, 2, Encode(local::GpuBuffer{1, kBytes}), memory_file_.get());
  ExpectAlive(rank);
  ExpectAlive(dying);
  dying.reset();
  Turn();
  control_->HoldRegistrations(false);
  EXPECT_EQ(ReceiveReply(rank).code, Code::kAborted);
  TurnUntilRegistered(0);
  EXPECT_EQ(Hand(rank, 2).code, Code::kOk);
}

TEST_F(LocalDeviceTest, ChunksOutsideOfTheMemoryEndTheSession) {
  for (const local::SaveDirect& direct :
       {local::SaveDirect{1, 1, 1, 0, 4}, local::SaveDirect{1, 1, 0, 0, 5},
        local::SaveDirect{1, 1, kBytes, 0, 1}, local::SaveDirect{1, 1, UINT64_MAX, 0, 1},
        local::SaveDirect{1, 1, 0, 0, UINT32_MAX}}) {
    const UniqueFd rank = ConnectRank();
    EXPECT_EQ(Hand(rank, 1).code, Code::kOk);
    Send(rank, Type::kSaveDirect, 2, Encode(local::SaveDirect{1, 1, kBytes - kChunk, 0, 1}));
    Send(rank, Type::kSaveDirect, 3, Encode(local::SaveDirect{1, 2, UINT64_MAX, 0, 1}));  // unknown buffer
    ExpectAlive(rank);
    Send(rank, Type::kSaveDirect, 4, Encode(direct));
    EXPECT_EQ(Receive(rank).type, Type{});
  }
  TurnUntilRegistered(0);
}

TEST_F(LocalDeviceTest, FramesThatAreNotAsDeclaredEndTheSession) {
  for (const Type type : {Type::kGpuBuffer, Type::kGpuBufferEnd, Type::kSaveDirect, Type::kSaveSettle}) {
    const UniqueFd rank = ConnectRank();
    Send(rank, type, 2, "short", type == Type::kGpuBuffer ? memory_file_.get() : -1);
    EXPECT_EQ(Receive(rank).type, Type{}) << static_cast<int>(type);
  }
  const UniqueFd rank = ConnectRank();
  Send(rank, Type::kSaveSettle, 2, Encode(local::SaveSettle{1, 0}), memory_file_.get());
  EXPECT_EQ(ReceiveReply(rank).code, Code::kNotFound);
  EXPECT_EQ(Receive(rank).type, Type{}) << "a frame with a descriptor that it does not take";
}

TEST_F(LocalServerTest, ADaemonWhoseTransportReadsNoDeviceMemorySaysSo) {
  UniqueFd rank = Connect();
  Send(rank, Type::kHello, 1, RankHello());
  local::HelloReply hello;
  ASSERT_TRUE(Decode(Receive(rank).payload, hello));
  EXPECT_FALSE(hello.dmabuf);
  const UniqueFd file(memfd_create("device", MFD_CLOEXEC));
  Send(rank, Type::kGpuBuffer, 2, Encode(local::GpuBuffer{1, 1}), file.get());
  const local::Reply reply = ReceiveReply(rank);
  EXPECT_EQ(reply.code, Code::kUnsupported);
  EXPECT_THAT(reply.message, HasSubstr("transport test reads no device memory"));
  Send(rank, Type::kGpuBufferEnd, 3, Encode(local::GpuBufferEnd{1}));
  Send(rank, Type::kSaveDirect, 4, Encode(local::SaveDirect{1, 1, 0, 0, 1}));
  Send(rank, Type::kSaveSettle, 5, Encode(local::SaveSettle{1, 0}));
  EXPECT_EQ(ReceiveReply(rank).code, Code::kNotFound);
}

}  // namespace
}  // namespace ropeteam
