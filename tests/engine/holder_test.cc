// SPDX-License-Identifier: Apache-2.0
//
// The holder's side of a copy, one message at a time, as a network may delay and reorder them.

#include <gtest/gtest.h>

#include "core/base/bytes.h"
#include "core/engine/messages.h"
#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

constexpr NodeId kSource = 1;
constexpr NodeId kHolder = 2;

class HolderTest : public ::testing::Test, protected Engines {
 protected:
  HolderTest() : Engines(2, 64, 0) {}

  template <typename Message>
  Outbox Tell(NodeId to, const Message& message) {
    Engine& engine = *node(to).engine;
    const NodeId from = to == kHolder ? kSource : kHolder;
    engine.OnMessage(now_, from, Encode(Envelope{1, from, to, Message::kKind, Encode(message)}));
    engine.CheckInvariants();
    return std::exchange(engine.outbox(), Outbox());
  }
  Outbox EndCheck(uint64_t tag, const std::vector<uint32_t>& bad) {
    node(kHolder).engine->OnCheckDone(now_, tag, bad);
    node(kHolder).engine->CheckInvariants();
    return std::exchange(node(kHolder).engine->outbox(), Outbox());
  }
  static size_t Ranges(const Outbox& out) {
    size_t ranges = 0;
    for (const StartCheck& check : out.checks) ranges += check.ranges.size();
    return ranges;
  }
  template <typename Message>
  static Message Sent(const Outbox& out) {
    for (const SendMessage& sent : out.messages) {
      Envelope envelope;
      Message message;
      if (Decode(sent.envelope, envelope) && envelope.kind == Message::kKind &&
          Decode(envelope.payload, message))
        return message;
    }
    ADD_FAILURE() << "not sent";
    return {};
  }
  ReplicaReserve Reserve(uint64_t chunks) { return {copy_, {Id(1, 0)}, chunks, kTestChunk}; }

  const CopyId copy_{kSource, 1'000};
};

TEST_F(HolderTest, ACheckOfAnAbortedCopySaysNothingOfOneThatADelayedReservationMakes) {
  Tell(kHolder, Reserve(3));
  const Outbox arrived = Tell(kHolder, ReplicaArrived{copy_, {0, 2}, {11, 22}});
  ASSERT_EQ(Ranges(arrived), 2u);
  Tell(kHolder, ReplicaAbort{copy_, false});
  // A repeated reservation, sent before the abort, arrives late.
  const auto grant = Sent<ReplicaGrant>(Tell(kHolder, Reserve(1)));
  EXPECT_EQ(ChunkCount(grant.extents), 1u);
  EndCheck(arrived.checks.front().tag, {});
  // Chunk 0 has never been checked for this copy.
  ShardMeta meta{Id(1, 0), 2, 1, kTestChunk, kTestChunk, 64, 0};
  const Outbox sealing = Tell(kHolder, ReplicaSeal{copy_, 0, meta, {11}, false, grant.reservation});
  ASSERT_EQ(Ranges(sealing), 1u);
  const auto sealed = Sent<ReplicaSealed>(EndCheck(sealing.checks.front().tag, {0}));
  EXPECT_EQ(sealed.code, Code::kCorrupt);
  Tell(kHolder, ReplicaAbort{copy_, false});
  EXPECT_EQ(node(kHolder).store->chunks_free(), node(kHolder).store->chunks_total());
}

// The copy was sealed and released, and its chunks were reused. A repeat of its reservation arrives late and
// gets other memory under the same copy number. The source has not heard of the seal and asks for it again.
// It must not be told that chunks are bad, or it would put them into the reused memory.
TEST_F(HolderTest, ASealOfMemoryThatHasBeenReusedIsUnknown) {
  const auto first = Sent<ReplicaGrant>(Tell(kHolder, Reserve(1)));
  Tell(kHolder, ReplicaAbort{copy_, false});
  const auto late = Sent<ReplicaGrant>(Tell(kHolder, Reserve(1)));
  ASSERT_NE(first.reservation, late.reservation);
  ShardMeta meta{Id(1, 0), 2, 1, kTestChunk, kTestChunk, 64, 0};
  const Outbox answer = Tell(kHolder, ReplicaSeal{copy_, 0, meta, {11}, false, first.reservation});
  EXPECT_EQ(Ranges(answer), 0u);
  EXPECT_EQ(Sent<ReplicaSealed>(answer).code, Code::kNotFound);
}

TEST_F(HolderTest, ACopyStaysWithTheShardThatItWasReservedFor) {
  Tell(kHolder, Reserve(3));
  ReplicaReserve other = Reserve(5);
  other.shard.step = 9;
  const auto grant = Sent<ReplicaGrant>(Tell(kHolder, other));
  EXPECT_EQ(grant.code, Code::kInvalidArgument);
  EXPECT_EQ(ChunkCount(Sent<ReplicaGrant>(Tell(kHolder, Reserve(3))).extents), 3u);
}

TEST_F(HolderTest, MessagesThatDoNotFitTheirCopyAreRefused) {
  const auto grant = Sent<ReplicaGrant>(Tell(kHolder, Reserve(2)));
  EXPECT_EQ(Ranges(Tell(kHolder, ReplicaArrived{copy_, {0, 2}, {1, 2}})), 0u);  // there is no chunk 2
  EXPECT_EQ(Ranges(Tell(kHolder, ReplicaArrived{copy_, {0, 1}, {1}})), 0u);     // one checksum is missing
  EXPECT_EQ(Ranges(Tell(kHolder, ReplicaArrived{copy_, {1, 1, 1}, {1, 2, 3}})), 1u);
  ShardMeta meta{Id(1, 0), 2, 1, kTestChunk, 3 * kTestChunk, 64, 0};
  const ReplicaSeal seal{copy_, 0, meta, {1, 2, 3}, false, grant.reservation};
  const auto sealed = Sent<ReplicaSealed>(Tell(kHolder, seal));
  EXPECT_EQ(sealed.code, Code::kInvalidArgument);
}

TEST_F(HolderTest, NoNodeIsOrderedToCopyAShardToItself) {
  Save(kSource, 1, TestShard(2, 'a'));
  PassTime(1'000'000);
  ASSERT_FALSE(node(kHolder).Copy(Id(1, 0)).empty());
  node(kHolder).store->Remove(Id(1, 0));  // so that a copy is wanted
  Engine& source = *node(kSource).engine;
  const CopyOrder order{{Id(1, 0)}, kSource};
  source.OnMessage(now_, kSource, Encode(Envelope{1, kSource, kSource, CopyOrder::kKind, Encode(order)}));
  EXPECT_TRUE(source.outbox().transfers.empty());
  source.CheckInvariants();
}

// The leader repeats an order to verify until it is answered.
TEST_F(HolderTest, AStepIsReadOnceHoweverOftenItsVerifyIsOrdered) {
  Save(kHolder, 1, TestShard(2, 'b'));
  const VerifyOrder order{7, {Id(1, 0).incarnation, 1}};
  const Outbox reading = Tell(kHolder, order);
  ASSERT_EQ(Ranges(reading), 3u);
  EXPECT_EQ(Ranges(Tell(kHolder, order)), 0u);
  EXPECT_EQ(Sent<VerifyResult>(EndCheck(reading.checks.front().tag, {})).number, 7u);
  EXPECT_EQ(Ranges(Tell(kHolder, order)), 3u) << "the result may have been lost";
}

// The two nodes have lost their link, and the leader does not know it yet. The ordered copy must end: if it
// waited for the link, the shard could not be released.
TEST_F(HolderTest, AnOrderedCopyToAMemberThatCannotBeReachedEnds) {
  Save(kSource, 1, TestShard(2, 'a'));
  PassTime(1'000'000);
  node(kHolder).store->Remove(Id(1, 0));  // so that a copy is wanted
  Engine& source = *node(kSource).engine;
  source.OnPeerLink(now_, kHolder, false, "cut");
  Tell(kSource, CopyOrder{{Id(1, 0)}, kHolder});
  EXPECT_EQ(node(kSource).store->Find(Id(1, 0))->leases, 0u);
}

class RangeHolderTest : public ::testing::Test, protected Engines {
 protected:
  RangeHolderTest() : Engines(3, 32, 0) {}
  void Open(NodeId reader, uint64_t read) {
    RangesOpen open{read, {Id(1, 1)}, 0, {{{0, 0, 100, 1, 0}}}};
    node(kHolder).engine->OnMessage(now_, reader,
                                    Encode(Envelope{1, reader, kHolder, RangesOpen::kKind, Encode(open)}));
    Carry();
  }
};

// Each freed chunk lets a waiting part begin. The last part waits in vain, since the shard has been released.
TEST_F(RangeHolderTest, TwoReadersLeaveAtOnceWhileAPartThatCannotBeReadWaits) {
  Save(kHolder, 1, TestShard(2, 'r'));
  PassTime(1'000'000);
  HoldMessages({Kind::kRangesGrant});  // or the readers would say that they do not want the bytes
  const uint64_t free_before = node(kHolder).store->chunks_free();
  for (uint64_t read = 1; read <= 2; ++read) Open(1, read);
  EXPECT_EQ(node(kHolder).store->chunks_free(), free_before - 2);
  Open(3, 1);
  EXPECT_EQ(node(kHolder).store->chunks_free(), free_before - 2) << "the third part does not wait";
  node(kHolder).store->Remove(Id(1, 1));
  View alone;
  alone.epoch = 2;
  alone.leader = kHolder;
  alone.members.emplace_back().id = kHolder;
  node(kHolder).engine->OnView(now_, alone);
  node(kHolder).engine->CheckInvariants();
  EXPECT_EQ(node(kHolder).store->chunks_free(), node(kHolder).store->chunks_total());
}

}  // namespace
}  // namespace ropeteam
