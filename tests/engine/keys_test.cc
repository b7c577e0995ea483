// SPDX-License-Identifier: Apache-2.0
//
// Engines of a job that encrypts, while its key is replaced, or with a key that some node lacks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

constexpr KeyId kOld = kTestKey;
constexpr KeyId kNew = 0x77777777'00000002;

class Keys : public ::testing::Test, protected Engines {
 protected:
  explicit Keys(uint32_t nodes = 2) : Engines(nodes, 256, 0, true) {
    on_check_ = [](TestNode& node, const StartCheck& check) {
      for (const StartCheck::Range& range : check.ranges) {
        if (!range.cipher) continue;
        for (const KeyId key : {range.cipher->from_key, range.cipher->to_key})
          EXPECT_TRUE(key == kPlaintext || Has(node, key)) << "node " << node.id << " lacks " << KeyName(key);
      }
    };
    Save(1, 1, shard_);
    Save(2, 1, TestShard(3, 'b'));
    if (nodes == 3) Save(3, 1, TestShard(3, 'c'));
    PassTime(1'000'000);
  }
  static bool Has(const TestNode& node, KeyId key) {
    const std::vector<KeyId>& keys = node.config.keys;
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  }
  // Its daemon is killed, and the next one adopts the arena and has these keys.
  void Restart(NodeId id, const std::vector<KeyId>& keys) {
    TestNode& at = node(id);
    std::erase_if(checks_, [&](const auto& check) { return check.first == &at; });
    ShowView(++epoch_, &at);
    at.engine.reset();
    at.store.reset();
    at.store =
        Store::Adopt({at.memory, at.bytes}, kTestChunk, {"job", at.config.node, true}, nullptr).value();
    at.config.keys = keys;
    ++at.config.salt.instance[0];
    at.Start();
    at.engine->OnLease(now_, UINT64_MAX);
    at.engine->OnSessionOpened(now_, kSession);  // an operator's
    ShowView(++epoch_, nullptr);
    PassTime(1'000'000);
  }
  void RestartAll(const std::vector<KeyId>& keys) {
    for (NodeId id = 1; id <= nodes_.size(); ++id) Restart(id, keys);
  }
  void Lose(NodeId id) {
    ShowView(++epoch_, &node(id));
    PassTime(1'000'000);
  }
  // The stream of rank 0's shard as an operator on node `id` reads it, or the error.
  std::string Read(NodeId id) {
    node(id).engine->OnViewOpen(now_, kSession, ++request_, 1, 0, 8'000'000);
    const RequestId request = request_;
    Carry();
    PassTime(10'000'000);
    const auto* view = std::get_if<AnswerView>(&answers_.at(request).body);
    if (view == nullptr) return std::get<AnswerStatus>(answers_.at(request).body).status.ToString();
    std::string stream;
    for (uint32_t chunk = 0; chunk < view->crcs.size(); ++chunk)
      stream.append(reinterpret_cast<const char*>(node(id).store->chunk(ChunkAt(view->extents, chunk))),
                    kTestChunk);
    stream.resize(view->meta.stream_bytes);
    return stream;
  }
  ClusterReport Report(NodeId id = 2) {
    node(id).engine->OnReport(now_, kSession, ++request_, 5'000'000);
    const RequestId request = request_;
    Carry();
    return std::get<AnswerReport>(answers_.at(request).body).report;
  }
  StepReport StepOne() {
    for (const StepReport& step : Report().steps)
      if (step.step == 1) return step;
    return {};
  }
  // The number of copies on all nodes with this key.
  size_t CopiesOf(KeyId key) {
    size_t copies = 0;
    for (const auto& at : nodes_)
      for (const auto& [id, shard] : at->store->shards()) copies += shard->encryption.key == key ? 1 : 0;
    return copies;
  }
  // As a Rekeyer that has finished.
  void Reencrypt(NodeId id, KeyId to) {
    TestNode& at = node(id);
    const SealedShard before = *At(id);
    const std::vector<Extent> extents = at.store->Allocate(before.crcs.size()).value();
    std::vector<uint32_t> crcs;
    Encryption encryption{before.encryption.salt, {}, to};
    for (uint32_t chunk = 0; chunk < before.crcs.size(); ++chunk) {
      StartCheck::Range range{at.store->chunk_offset(ChunkAt(before.extents, chunk)),
                              ChunkLength(before.meta.stream_bytes, kTestChunk, chunk),
                              before.encryption.tags[chunk].crc};
      range.cipher = ChunkCipher{before.encryption.key,
                                 to,
                                 at.store->chunk_offset(ChunkAt(extents, chunk)),
                                 before.meta.id,
                                 chunk,
                                 before.encryption.salt,
                                 before.encryption.tags[chunk]};
      EncryptedChunk encrypted;
      ASSERT_TRUE(ToyCheck(at.memory, range, &encrypted));
      crcs.push_back(encrypted.crc);
      encryption.tags.push_back(encrypted.tag);
    }
    at.store->Replace(before.meta.id, extents, crcs, encryption);
  }
  const SealedShard* At(NodeId id) { return node(id).store->Find(Id(1, 0)); }
  ShardId Id(Step step, Rank rank) const { return {incarnation_, step, rank}; }

  const TestShard shard_{9, 'a'};
  const Incarnation incarnation_ = node(1).engine->incarnation();
  Epoch epoch_ = 1;
};

// Copies of a lost node are made again on the third one.
class KeysOfThree : public Keys {
 protected:
  KeysOfThree() : Keys(3) {}
};

TEST_F(Keys, EachCopySaysWhichKeyEncryptedIt) {
  EXPECT_EQ(At(1)->encryption.key, kPlaintext);
  EXPECT_EQ(At(2)->encryption.key, kOld);
  for (const NodeReport& at : Report().nodes) {
    EXPECT_EQ(at.keys, std::vector<KeyId>{kOld});
    for (const CopyReport& copy : at.copies) EXPECT_EQ(copy.key, copy.role == Role::kOwn ? kPlaintext : kOld);
  }
}

TEST_F(Keys, ACopyWhoseKeyIsAbsentDoesNotCountUntilTheKeyIsBack) {
  EXPECT_EQ(StepOne().copies_min, 2u);
  Restart(2, {kNew});
  EXPECT_EQ(StepOne().copies_min, 1u);
  for (const NodeReport& at : Report().nodes)
    for (const CopyReport& copy : at.copies) {
      EXPECT_EQ(copy.readable, at.id != 2 || copy.key != kOld);
    }
  PassTime(20'000'000);
  EXPECT_EQ(StepOne().copies_min, 1u);  // node 2 lacks the owner's key, too
  Restart(2, {kNew, kOld});
  EXPECT_EQ(StepOne().copies_min, 2u);
  Lose(1);
  EXPECT_TRUE(Read(2) == shard_.stream);
}

TEST_F(Keys, AStepWhoseKeyIsAbsentIsKnownAndCannotBeProduced) {
  Restart(2, {kNew});
  Lose(1);
  EXPECT_TRUE(StepOne().committed);
  EXPECT_FALSE(StepOne().producible);
  EXPECT_THAT(Read(2), HasSubstr("on node-2 are encrypted with keys that are not there"));
}

TEST_F(Keys, AnUnreadableCopyIsReplacedInItsPlaceByOneThatIsReadable) {
  Restart(2, {kNew});
  Restart(1, {kNew});  // the owner encrypts with the new key
  PassTime(20'000'000);
  EXPECT_EQ(StepOne().copies_min, 2u);
  EXPECT_EQ(At(2)->encryption.key, kNew);
  EXPECT_EQ(At(2)->role, Role::kReplica);
  EXPECT_TRUE(At(2)->committed);
  Lose(1);
  EXPECT_TRUE(Read(2) == shard_.stream);
}

TEST_F(KeysOfThree, AReaderWithoutTheKeySaysWhichKeyAndNode) {
  Restart(3, {kNew});
  Lose(1);
  const std::string error = Read(3);
  EXPECT_THAT(error, HasSubstr("key 1a2b3c4d of this copy is not among the keys of node-3"));
  EXPECT_THAT(error, ::testing::Not(HasSubstr("CORRUPT")));
}

TEST_F(KeysOfThree, AHolderWithBothKeysEncryptsItsCopyForAReaderWithOne) {
  Restart(2, {kOld, kNew});
  Restart(3, {kNew});
  Lose(1);
  EXPECT_TRUE(Read(3) == shard_.stream);
  EXPECT_EQ(At(2)->encryption.key, kNew);
}

TEST_F(KeysOfThree, ACopyOfOneKeyIsRepairedFromACopyOfTheOther) {
  Lose(2);
  PassTime(5'000'000);  // node 3 gets a copy, too
  Restart(2, {kOld, kNew});
  Restart(3, {kOld, kNew});
  ASSERT_NE(At(3), nullptr);
  ASSERT_EQ(At(3)->encryption.key, kOld);
  const std::string before = node(3).Copy(Id(1, 0));
  ShowView(++epoch_, &node(1));
  Reencrypt(2, kNew);
  node(3).Flip(Id(1, 0), 4);
  EXPECT_FALSE(node(3).Copy(Id(1, 0)) == before);
  node(3).engine->OnVerify(now_, kSession, ++request_, nullptr, 5'000'000);
  Carry();
  EXPECT_EQ(At(2)->encryption.key, kNew);
  EXPECT_EQ(At(3)->encryption.key, kOld);
  EXPECT_TRUE(node(3).Copy(Id(1, 0)) == before);
  EXPECT_TRUE(At(3)->bad.empty());
}

TEST_F(Keys, AReplacementEncryptsEveryCopyAgainOnceAllNodesHaveTheNewKeyFirst) {
  const size_t copies = CopiesOf(kOld);
  EXPECT_EQ(copies, 2u);
  RestartAll({kOld, kNew});
  Restart(1, {kNew, kOld});
  PassTime(30'000'000);
  EXPECT_EQ(CopiesOf(kOld), copies);  // node 2 would encrypt its copy with the old key again
  Restart(2, {kNew, kOld});
  PassTime(30'000'000);
  EXPECT_EQ(CopiesOf(kOld), 0u);
  EXPECT_EQ(CopiesOf(kNew), copies);
  uint64_t reencrypted = 0;
  for (const NodeReport& at : Report().nodes) reencrypted += at.reencrypted;
  EXPECT_EQ(reencrypted, copies);
  EXPECT_EQ(StepOne().copies_min, 2u);
  RestartAll({kNew});
  EXPECT_EQ(StepOne().copies_min, 2u);
  Lose(1);
  EXPECT_TRUE(Read(2) == shard_.stream);
}

TEST_F(Keys, ADaemonThatIsKilledInTheMiddleLeavesAGoodCopyAndTheNextOneGoesOn) {
  RestartAll({kOld, kNew});
  Restart(1, {kNew, kOld});
  hold_checks_ = true;
  Restart(2, {kNew, kOld});
  PassTime(5'000'000);
  EXPECT_FALSE(checks_.empty());
  hold_checks_ = false;
  Restart(2, {kNew, kOld});
  ASSERT_NE(At(2), nullptr);
  PassTime(30'000'000);
  EXPECT_EQ(CopiesOf(kOld), 0u);
  EXPECT_EQ(CopiesOf(kNew), 2u);
  Lose(1);
  EXPECT_TRUE(Read(2) == shard_.stream);
}

}  // namespace
}  // namespace ropeteam
