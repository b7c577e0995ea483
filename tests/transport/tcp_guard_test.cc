// SPDX-License-Identifier: Apache-2.0
//
// The tcp transport's guard of the chunks of its region.

#include <cstring>

#include "tests/transport/tcp_fixture.h"

namespace ropeteam::tcp {
namespace {

// A table says what peers may do with each chunk of the region.
class TcpGuardTest : public TcpTest {
 protected:
  static constexpr uint64_t kChunk = 64 << 10;

  TcpGuardTest() {
    EXPECT_TRUE(transport_->capabilities().guards_chunks);
    transport_->GuardRegion(region_, &access_);
    access_.Set(kReadable, 1, PeerAccess::Kind::kRead);
    access_.Set(kWritable, 2, PeerAccess::Kind::kWrite);
    EXPECT_TRUE(raw_.Enter(Valid()));
  }
  ReplyCode PutTo(uint64_t offset, uint64_t length) {
    raw_.Send(Put(offset, length));
    const std::vector<char> zeros(length);
    raw_.SendBytes(zeros.data(), length);
    return static_cast<ReplyCode>(raw_.Answer().code);
  }
  ReplyCode GetFrom(uint64_t offset, uint64_t length, uint64_t sent) {
    Request get = Put(offset, length);
    get.op = static_cast<uint32_t>(Op::kGet);
    raw_.Send(get);
    const Reply reply = raw_.Answer();
    EXPECT_EQ(reply.length, sent);
    std::vector<char> bytes(reply.length);
    EXPECT_TRUE(raw_.ReadBytes(bytes.data(), bytes.size()));
    EXPECT_EQ(std::memcmp(bytes.data(), memory_.data() + offset, bytes.size()), 0);
    return static_cast<ReplyCode>(reply.code);
  }

  static constexpr uint32_t kReadable = 3, kWritable = 5;
  PeerAccess access_{kLength / kChunk, kChunk};
  Raw raw_{this};
};

TEST_F(TcpGuardTest, APeerReachesWhatTheTableSaysAndNothingElse) {
  EXPECT_EQ(GetFrom(kReadable * kChunk, kChunk, kChunk), ReplyCode::kOk);
  EXPECT_EQ(PutTo(kReadable * kChunk, 8), ReplyCode::kRefused);
  EXPECT_EQ(GetFrom(kWritable * kChunk, 8, 0), ReplyCode::kRefused);
  for (const uint64_t chunk : {uint64_t{0}, uint64_t{4}, kLength / kChunk - 1}) {
    EXPECT_EQ(GetFrom(chunk * kChunk, kChunk, 0), ReplyCode::kRefused);
    EXPECT_EQ(PutTo(chunk * kChunk, 8), ReplyCode::kRefused);
  }
  // A range that has a byte of another chunk.
  EXPECT_EQ(GetFrom(kReadable * kChunk - 1, 2, 0), ReplyCode::kRefused);
  EXPECT_EQ(GetFrom(kReadable * kChunk, kChunk + 1, 0), ReplyCode::kRefused);
  EXPECT_EQ(PutTo(kWritable * kChunk + kChunk, kChunk + 1), ReplyCode::kRefused);
  EXPECT_TRUE(Untouched());
  EXPECT_EQ(PutTo(kWritable * kChunk, 2 * kChunk), ReplyCode::kOk);
  EXPECT_TRUE(memory_.HoldsOutside(kTarget, kWritable * kChunk, 2 * kChunk));
  EXPECT_FALSE(Untouched());
  EXPECT_TRUE(raw_.Open());
}

// Gets that were accepted, and whose bytes were not sent yet.
TEST_F(TcpGuardTest, AChunkIsRevokedForARequestThatWaits) {
  const std::vector<char> before(memory_.data(), memory_.data() + kLength);
  access_.Set(0, kLength / kChunk, PeerAccess::Kind::kRead);
  constexpr int kGets = 64;  // more than the connection takes while its other end does not read
  Request get = Put(0, kLength);
  get.op = static_cast<uint32_t>(Op::kGet);
  for (int i = 0; i < kGets; i++) raw_.Send(get);
  int rounds = 0;
  Drive([&] { return ++rounds > 100; });
  access_.Set(kReadable, 1, PeerAccess::Kind::kNone);
  std::memset(memory_.data() + kReadable * kChunk, 0x77, kChunk);
  // The rest is refused, or the connection was closed in the middle of a get.
  uint64_t whole = 0;
  for (;; whole++) {
    Reply reply;
    if (!raw_.Read(&reply) || reply.code != 0) break;
    std::vector<char> bytes(kLength);
    if (!raw_.ReadBytes(bytes.data(), bytes.size())) break;
    ASSERT_TRUE(bytes == before) << "get " << whole << " has bytes of the chunk's next owner";
  }
  EXPECT_LT(whole, uint64_t{kGets});
}

TEST_F(TcpHalfPutTest, ARevokedChunkEndsItAndTheConnectionGoesOn) {
  PeerAccess access(1, kLength);
  transport_->GuardRegion(region_, &access);
  SendHalf();
  EXPECT_EQ(raw_.Answer().code, static_cast<uint32_t>(ReplyCode::kRefused));
  EXPECT_TRUE(Untouched());
  EXPECT_TRUE(raw_.Open());
}

}  // namespace
}  // namespace ropeteam::tcp
