// SPDX-License-Identifier: Apache-2.0
//
// What a fetch does if another copy of its shard is sealed on this node before it ends.

#include <gtest/gtest.h>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

class FetcherTest : public ::testing::Test, protected Engines {
 protected:
  FetcherTest() : Engines(3, 64, 0) {
    for (const auto& node : nodes_) Save(node->id, 1, node->id == 1 ? committed_ : TestShard(2, 'b'));
    PassTime(1'000'000);
    if (node(2).store->Find(Id(1, 0)) == nullptr) std::swap(reader_, holder_);
  }

  // The reader opens a view of rank 0's shard. Before the last chunk is checked, this shard is sealed there.
  Answer ReadWhile(const TestShard& sealed) {
    EXPECT_EQ(node(reader_).store->Find(Id(1, 0)), nullptr);
    EXPECT_TRUE(node(holder_).store->Find(Id(1, 0))->committed);
    hold_checks_ = true;
    node(reader_).engine->OnViewOpen(now_, kSession, ++request_, 1, 0, 5'000'000, false);
    Carry();
    Store& store = *node(reader_).store;
    const std::vector<Extent> extents = store.Allocate(sealed.crcs.size()).value();
    for (uint64_t chunk = 0; chunk < sealed.crcs.size(); ++chunk)
      std::memcpy(store.chunk(ChunkAt(extents, chunk)), sealed.stream.data() + chunk * kTestChunk,
                  std::min<uint64_t>(kTestChunk, sealed.stream.size() - chunk * kTestChunk));
    ShardMeta meta = node(holder_).store->Find(Id(1, 0))->meta;
    meta.stream_bytes = sealed.stream.size();
    meta.manifest_offset = sealed.manifest_offset;
    EXPECT_TRUE(store.Seal(meta, Role::kReplica, extents, sealed.crcs, {}).ok());
    hold_checks_ = false;
    Carry();
    return answers_.at(request_);
  }

  const TestShard committed_{2, 'a'};
  NodeId reader_ = 3;  // has no copy of rank 0's shard
  NodeId holder_ = 2;  // has a replica of it
};

TEST_F(FetcherTest, OtherBytesThatWereSealedMeanwhileGetNoMark) {
  const Answer answer = ReadWhile(TestShard(2, 'c'));
  const SealedShard* here = node(reader_).store->Find(Id(1, 0));
  EXPECT_TRUE(here == nullptr || !here->committed);
  const auto* refused = std::get_if<AnswerStatus>(&answer.body);
  ASSERT_NE(refused, nullptr) << "bytes were served that were never committed";
  EXPECT_EQ(refused->status.code(), Code::kUnavailable) << refused->status.ToString();
  // The leader has the other bytes dropped. The next read gets the committed ones.
  PassTime(1'000'000);
  node(reader_).engine->OnViewOpen(now_, kSession, ++request_, 1, 0, 5'000'000, false);
  Carry();
  EXPECT_TRUE(std::holds_alternative<AnswerView>(answers_.at(request_).body));
  EXPECT_TRUE(node(reader_).Copy(Id(1, 0)) == committed_.stream);
}

TEST_F(FetcherTest, TheSameBytesThatWereSealedMeanwhileGetTheMark) {
  const Answer answer = ReadWhile(committed_);
  EXPECT_TRUE(std::holds_alternative<AnswerView>(answer.body));
  EXPECT_TRUE(node(reader_).store->Find(Id(1, 0))->committed);
}

}  // namespace
}  // namespace ropeteam
