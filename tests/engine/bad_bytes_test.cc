// SPDX-License-Identifier: Apache-2.0
//
// Bit flips before a shard is sealed: on the wire, and in the saver's memory after the checksum was computed.

#include <gtest/gtest.h>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

class BadBytes : public ::testing::Test, protected Engines {
 protected:
  BadBytes() : Engines(2, 256, 0) {}
};

TEST_F(BadBytes, ABitThatFlipsOnTheWireIsFoundByTheHolderAndThatChunkIsPutAgain) {
  const TestShard shard(9, 'a');
  int puts = 0;
  on_wire_ = [&](TestNode& to, std::string* bytes) {
    EXPECT_EQ(to.id, 2u);
    if (++puts == 4) (*bytes)[99] ^= 0x20;
  };
  Save(1, 1, shard);
  EXPECT_EQ(puts, 11);  // ten chunks, and one of them twice
  EXPECT_TRUE(Replicated(Id(1, 0)));
  EXPECT_TRUE(node(2).Copy(Id(1, 0)) == shard.stream);
  EXPECT_GE(node(2).counters().chunks_bad, 1u);
}

TEST_F(BadBytes, ABitThatFlipsOnTheWireOfAFetchIsFoundByTheReader) {
  const TestShard shard(9, 'b');
  Save(1, 1, shard);
  Save(2, 1, shard);
  node(1).Flip(Id(1, 0), 3);
  int gets = 0;
  on_wire_ = [&](TestNode&, std::string* bytes) {
    if (++gets == 1) (*bytes)[0] ^= 1;
  };
  node(1).engine->OnVerify(now_, kSession, 1000, nullptr, 5'000'000);
  Carry();
  PassTime(1'000'000);
  // The bytes are refused, and the only other holder has been tried: the chunk stays marked as bad.
  EXPECT_EQ(gets, 1);
  EXPECT_EQ(node(1).store->Find(Id(1, 0))->bad, std::vector<uint32_t>{3});
  // The next repair reads it again.
  node(1).engine->OnVerify(now_, kSession, 1001, nullptr, 5'000'000);
  Carry();
  PassTime(1'000'000);
  EXPECT_EQ(gets, 2);
  EXPECT_TRUE(node(1).Copy(Id(1, 0)) == shard.stream);
  EXPECT_TRUE(node(1).store->Find(Id(1, 0))->bad.empty());
}

// The get lands its bytes but fails, because the holder has gone. If the bytes are right, the last copy must
// not stay marked as bad.
TEST_F(BadBytes, AChunkIsRepairedByBytesThatLandedThoughTheirGetFailed) {
  const TestShard shard(9, 'e');
  Save(1, 1, shard);
  Save(2, 1, shard);
  node(1).Flip(Id(1, 0), 3);
  get_code_ = Code::kPeerGone;
  node(1).engine->OnVerify(now_, kSession, 1000, nullptr, 5'000'000);
  Carry();
  PassTime(15'000'000);  // a fetch waits this long for a holder that the data path has lost
  EXPECT_TRUE(node(1).Copy(Id(1, 0)) == shard.stream);
  EXPECT_TRUE(node(1).store->Find(Id(1, 0))->bad.empty());
}

// The connection to the only holder fails during a read and is re-established a second later.
TEST_F(BadBytes, AReadOutlivesALostConnectionToItsHolder) {
  const TestShard shard(9, 'f');
  Save(1, 1, shard);
  Save(2, 1, shard);
  node(1).Flip(Id(1, 0), 3);
  get_code_ = Code::kPeerGone;
  on_wire_ = [](TestNode&, std::string* bytes) { bytes->assign(bytes->size(), '?'); };
  node(1).engine->OnVerify(now_, kSession, 1000, nullptr, 5'000'000);
  Carry();
  node(1).engine->OnPeerLink(now_, 2, false, "cut");
  size_t gets = 0;
  on_wire_ = [&](TestNode& to, std::string*) { gets += to.id == 1 ? 1 : 0; };
  PassTime(1'000'000);
  EXPECT_EQ(gets, 0u) << "no get is started while the connection is lost";
  EXPECT_FALSE(node(1).store->Find(Id(1, 0))->bad.empty());
  get_code_ = Code::kOk;
  node(1).engine->OnPeerLink(now_, 2, true, "");
  Carry();
  PassTime(200'000);
  EXPECT_TRUE(node(1).Copy(Id(1, 0)) == shard.stream);
  EXPECT_TRUE(node(1).store->Find(Id(1, 0))->bad.empty());
}

// Two copies have the same bad chunk. Each node reads it from the other and reports it, but not for ever.
TEST_F(BadBytes, TwoNodesWithBadCopiesDoNotComplainToEachOtherForEver) {
  const TestShard shard(9, 'g');
  Save(1, 1, shard);
  Save(2, 1, shard);
  node(1).Flip(Id(1, 0), 3);
  node(2).Flip(Id(1, 0), 3);
  size_t gets = 0;
  on_wire_ = [&](TestNode&, std::string*) { ASSERT_LT(++gets, 100u); };
  node(1).engine->OnVerify(now_, kSession, 1000, nullptr, 5'000'000);
  Carry();
  PassTime(5'000'000);
  EXPECT_GE(gets, 1u);
  EXPECT_EQ(node(1).store->Find(Id(1, 0))->bad, std::vector<uint32_t>{3});
  EXPECT_EQ(node(2).store->Find(Id(1, 0))->bad, std::vector<uint32_t>{3});
}

// No node has the right bytes any more, so the shard must never count as replicated.
TEST_F(BadBytes, ABitThatFlipsInAnUnsealedChunkIsFoundByTheHolder) {
  const TestShard shard(9, 'c');
  const SaveId save = BeginSave(1, 1, shard);
  node(1).store->chunk(ChunkAt(extents_, 4))[7] ^= std::byte{1};
  CommitSave(1, save, shard);
  PassTime(60'000'000);
  EXPECT_FALSE(Replicated(Id(1, 0)));
  EXPECT_EQ(node(2).store->Find(Id(1, 0)), nullptr);
  EXPECT_GE(node(2).counters().chunks_bad, 1u);
  EXPECT_EQ(node(1).store->Find(Id(1, 0))->bad, std::vector<uint32_t>{4});
}

// A bit flips in a chunk that is granted to a copy and not sealed yet.
TEST_F(BadBytes, ABitThatFlipsInTheHoldersUnsealedChunkIsFoundBeforeTheSeal) {
  const TestShard shard(9, 'd');
  int arrived = 0;
  on_wire_ = [&](TestNode&, std::string*) { ++arrived; };
  hold_checks_ = true;
  const SaveId save = BeginSave(1, 1, shard);
  CommitSave(1, save, shard);
  ASSERT_EQ(arrived, 10);
  ASSERT_FALSE(checks_.empty());
  const StartCheck::Range range = checks_.front().second.ranges.front();
  node(2).memory[range.offset + 5] ^= std::byte{2};
  hold_checks_ = false;
  Carry();
  EXPECT_TRUE(Replicated(Id(1, 0)));
  EXPECT_TRUE(node(2).Copy(Id(1, 0)) == shard.stream);
  EXPECT_GE(node(2).counters().chunks_bad, 1u);
}

}  // namespace
}  // namespace ropeteam
