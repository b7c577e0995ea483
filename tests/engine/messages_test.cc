// SPDX-License-Identifier: Apache-2.0
//
// Any bytes from a peer must be harmless to an engine. It drops what it cannot decode or what is addressed to
// another node.
#include "core/engine/messages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "core/engine/engine.h"
#include "core/engine/trace.h"

namespace ropeteam {
namespace {

constexpr uint64_t kChunk = 4096;

class LoneEngine : public ::testing::Test {
 protected:
  LoneEngine() : size_(Store::MemoryFor(16, kChunk)) {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    store_ = Store::Format({static_cast<std::byte*>(memory_), size_}, kChunk, {"job", "node"}).value();
    EngineConfig config;
    config.self = 1;
    engine_ = std::make_unique<Engine>(config, store_.get());
    engine_->OnLease(0, UINT64_MAX);
    View view;
    view.epoch = 5;
    view.leader = 1;
    view.settings.replicas = 0;
    for (const NodeId id : {NodeId{1}, NodeId{2}}) {
      Member member;
      member.id = id;
      member.name = "n" + std::to_string(id);
      member.ordinal = static_cast<uint32_t>(id);
      view.members.push_back(member);
    }
    engine_->OnView(1, view);
    engine_->outbox().clear();
  }
  ~LoneEngine() override {
    engine_.reset();
    store_.reset();
    munmap(memory_, size_);
    SetLogSink(nullptr, LogLevel::kWarning);
  }

  std::string Reserve(Epoch epoch, NodeId to) {
    const ReplicaReserve reserve{{2, 1}, {1, 1, 0}, 2, kChunk};
    return Encode(Envelope{epoch, 2, to, Kind::kReplicaReserve, Encode(reserve)});
  }

  size_t size_;
  void* memory_ = nullptr;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(LoneEngine, AnswersAReservation) {
  engine_->OnMessage(2, 2, Reserve(5, 1));
  ASSERT_EQ(engine_->outbox().messages.size(), 1u);
  EXPECT_EQ(engine_->outbox().messages[0].to, 2u);
  EXPECT_EQ(store_->chunks_free(), 14u);
  engine_->CheckInvariants();
}

TEST_F(LoneEngine, RefusesAnOlderEpochAndAnotherInstance) {
  engine_->OnMessage(2, 2, Reserve(4, 1));
  engine_->OnMessage(2, 2, Reserve(5, 99));
  EXPECT_TRUE(engine_->outbox().messages.empty());
  EXPECT_EQ(store_->chunks_free(), 16u);
  EXPECT_EQ(engine_->Report().counters.messages_stale, 2u);
}

TEST_F(LoneEngine, KeepsANewerEpochUntilTheViewHasCome) {
  engine_->OnMessage(2, 2, Reserve(6, 1));
  EXPECT_EQ(store_->chunks_free(), 16u);
  View next = engine_->view();
  next.epoch = 6;
  engine_->OnView(3, next);
  EXPECT_EQ(store_->chunks_free(), 14u);
}

TEST_F(LoneEngine, DropsWhatCannotBeRead) {
  const std::string whole = Reserve(5, 1);
  for (size_t cut = 0; cut < whole.size(); ++cut) engine_->OnMessage(2, 2, whole.substr(0, cut));
  for (uint16_t kind = 0; kind < 40; ++kind)
    engine_->OnMessage(2, 2, Encode(Envelope{5, 2, 1, static_cast<Kind>(kind), "garbage"}));
  EXPECT_EQ(store_->chunks_free(), 16u);
  engine_->CheckInvariants();
}

TEST_F(LoneEngine, ATraceIsTakenFromTheNodeThatWasAskedAndOnce) {
  engine_->OnSessionOpened(2, 7);
  engine_->OnTrace(2, 7, 1, 99, true, 12, 1'000'000);
  ASSERT_EQ(engine_->outbox().answers.size(), 1u);
  EXPECT_EQ(std::get<AnswerStatus>(engine_->outbox().answers[0].body).status.code(), Code::kNotFound);
  engine_->outbox().clear();

  engine_->OnTrace(1'000, 7, 2, 2, true, 12, 1'000'000);
  ASSERT_EQ(engine_->outbox().messages.size(), 1u);
  Envelope sent;
  TraceQuestion question;
  ASSERT_TRUE(Decode(engine_->outbox().messages[0].envelope, sent) && Decode(sent.payload, question));
  EXPECT_EQ(question.step, 12u);
  engine_->outbox().clear();

  TraceEvent event;
  event.shard.step = 12;
  const auto answer = [&](uint64_t number, NodeId from) {
    const TraceAnswer said{number, question.asked_at, 50, {event}};
    engine_->OnMessage(3'000, from, Encode(Envelope{5, from, 1, Kind::kTraceAnswer, Encode(said)}));
  };
  answer(question.number + 1, 2);
  answer(question.number, 1);  // this node was not asked
  EXPECT_TRUE(engine_->outbox().answers.empty());
  answer(question.number, 2);
  answer(question.number, 2);
  ASSERT_EQ(engine_->outbox().answers.size(), 1u);
  const auto& trace = std::get<AnswerTrace>(engine_->outbox().answers[0].body);
  EXPECT_EQ(trace.asked_at, 1'000u);
  EXPECT_EQ(trace.node_at, 50u);
  EXPECT_EQ(trace.answered_at, 3'000u);
  EXPECT_EQ(trace.events.size(), 1u);
}

TEST(Trace, KeepsTheNewestEvents) {
  engine::Trace trace;
  TraceEvent event;
  for (uint32_t i = 0; i < kTraceEventsMax + 10; ++i) {
    event.shard.step = i < 12 ? 1 : 2;
    event.first = i;
    trace.Add(event);
  }
  ASSERT_EQ(trace.Of(1).size(), 2u);
  EXPECT_EQ(trace.Of(1)[0].first, 10u);
  EXPECT_EQ(trace.Of(2).size(), kTraceEventsMax - 2);
  EXPECT_EQ(trace.Of(2).back().first, kTraceEventsMax + 9);
  EXPECT_TRUE(trace.Of(3).empty());
  std::string encoded;
  Encoder(&encoded).Put(event);
  EXPECT_EQ(encoded.size(), kTraceEventBytes);
}

TEST_F(LoneEngine, TheChunksOfADepartedSourceAreNotUsedBeforeTheQuarantineEnds) {
  engine_->OnMessage(2, 2, Reserve(5, 1));
  View alone = engine_->view();
  alone.epoch = 6;
  alone.members.pop_back();
  engine_->OnView(1'000, alone);
  EXPECT_EQ(store_->chunks_free(), 14u);
  engine_->CheckInvariants();
  EXPECT_LE(engine_->NextTimer(), 1'000 + EngineConfig().quarantine_us);
  engine_->OnTimer(1'000 + EngineConfig().quarantine_us);
  EXPECT_EQ(store_->chunks_free(), 16u);
}

// An engine that another node leads.
class LedEngine : public LoneEngine {
 protected:
  static constexpr Incarnation kOld = NextIncarnation(0, 3);
  static constexpr Incarnation kNew = NextIncarnation(kOld, 6);

  // A replica of the old incarnation fills half of the arena.
  LedEngine() {
    ShardMeta meta;
    meta.id = {kOld, 1, 0};
    meta.world_size = 1;
    meta.replicas = 1;
    meta.chunk_bytes = kChunk;
    meta.stream_bytes = 8 * kChunk;
    meta.manifest_offset = 7 * kChunk;
    EXPECT_TRUE(
        store_->Seal(meta, Role::kReplica, store_->Allocate(8).value(), std::vector<uint32_t>(8)).ok());
    View led = engine_->view();
    led.epoch = 6;
    led.leader = 2;
    engine_->OnView(2, led);
  }
  void Hear(Kind kind, std::string payload) {
    engine_->OnMessage(3, 2, Encode(Envelope{engine_->view().epoch, 2, 1, kind, std::move(payload)}));
  }
  void HearState(uint64_t sequence, Incarnation incarnation, bool evictable = true) {
    LeaderState state;
    state.sequence = sequence;
    state.incarnation.number = incarnation;
    if (evictable) state.evictable = {{kOld, 1}};
    Hear(Kind::kLeaderState, Encode(state));
  }
  bool GrantsAReplicaOfTenChunks() {
    Hear(Kind::kReplicaReserve, Encode(ReplicaReserve{{2, 1}, {kNew, 1, 0}, 10, kChunk}));
    const bool granted = store_->chunks_free() < 8;
    EXPECT_EQ(granted, store_->Find({kOld, 1, 0}) == nullptr);
    return granted;
  }
};

TEST_F(LedEngine, EvictsAFormerIncarnationsCopyOnlyWhenTheLeaderNamesIt) {
  EXPECT_FALSE(GrantsAReplicaOfTenChunks());
  HearState(1, kNew, false);
  EXPECT_FALSE(GrantsAReplicaOfTenChunks());
  HearState(2, kNew);
  EXPECT_TRUE(GrantsAReplicaOfTenChunks());
}

TEST_F(LedEngine, EvictsNothingByTheAnnouncementOfAFormerEpoch) {
  HearState(1, kNew);
  View next = engine_->view();
  next.epoch = 7;
  engine_->OnView(4, next);
  EXPECT_FALSE(GrantsAReplicaOfTenChunks());
  HearState(1, kNew);
  EXPECT_TRUE(GrantsAReplicaOfTenChunks());
}

// Without a lease this node may have been declared dead, and so may the leader that it hears.
TEST_F(LedEngine, BelievesNoLeaderWithoutALease) {
  engine_->OnLease(2, 3);
  HearState(1, kNew);
  EXPECT_FALSE(GrantsAReplicaOfTenChunks());
  EXPECT_EQ(engine_->incarnation(), 0u);
  engine_->OnLease(3, 4);
  HearState(1, kNew);
  EXPECT_TRUE(GrantsAReplicaOfTenChunks());
}

TEST_F(LedEngine, NotesTheEndOfItsLeaseAlsoIfAnotherInputComesFirst) {
  engine_->OnLease(2, 3);
  EXPECT_LE(engine_->NextTimer(), 3u);
  engine_->OnSessionOpened(4, 1);
  ASSERT_LE(engine_->NextTimer(), 4u);
  engine_->OnTimer(4);
  EXPECT_EQ(engine_->Metrics().local.leases_lost, 1u);
}

// Its pin belongs to the incarnation itself, but must be older.
TEST_F(LedEngine, BelievesNoIncarnationThatCannotBe) {
  LeaderState state;
  state.sequence = 1;
  state.incarnation.number = state.incarnation.pinned_by = kNew;
  state.incarnation.pin = {kNew, 1};
  Hear(Kind::kLeaderState, Encode(state));
  EXPECT_EQ(engine_->incarnation(), 0u);
  engine_->OnSessionOpened(3, 1);
  engine_->OnHello(3, 1, 1, HelloInput{0, 1, 77, "", 1'000'000, 0});
  JoinReply joined;
  joined.incarnation = state.incarnation;
  joined.incarnation.world_size = 1;
  Hear(Kind::kReply, Encode(Reply{1, Code::kOk, "", Encode(joined)}));
  EXPECT_EQ(engine_->incarnation(), 0u);
}

// No higher incarnation number would be left.
TEST_F(LedEngine, BelievesNoIncarnationBeyondTheLimit) {
  for (const Incarnation beyond : {kIncarnationMax, ~Incarnation{0}}) {
    HearState(1, beyond);
    EXPECT_EQ(engine_->incarnation(), 0u);
    EXPECT_EQ(store_->incarnation_max(), 0u);
  }
  HearState(1, kIncarnationMax - 1);
  EXPECT_EQ(engine_->incarnation(), kIncarnationMax - 1);
}

// The incarnation has begun, but the announcement of what the leader keeps for it is still on its way.
TEST_F(LedEngine, EvictsNothingByTheAnnouncementOfAFormerIncarnation) {
  HearState(1, kOld);
  engine_->OnSessionOpened(3, 1);
  engine_->OnHello(3, 1, 1, HelloInput{0, 1, 77, "", 1'000'000, 0});
  JoinReply joined;
  joined.incarnation.number = kNew;
  joined.incarnation.world_size = 1;
  Hear(Kind::kReply, Encode(Reply{1, Code::kOk, "", Encode(joined)}));
  ASSERT_EQ(engine_->incarnation(), kNew);
  EXPECT_FALSE(GrantsAReplicaOfTenChunks());
  HearState(2, kOld);  // sent before the answer, and overtaken by it
  EXPECT_FALSE(GrantsAReplicaOfTenChunks());
  HearState(3, kNew);
  EXPECT_TRUE(GrantsAReplicaOfTenChunks());
}

TEST_F(LoneEngine, AFencedPeerEndsTheQuarantineAtOnce) {
  engine_->OnMessage(2, 2, Reserve(5, 1));
  View alone = engine_->view();
  alone.epoch = 6;
  alone.members.pop_back();
  engine_->OnView(1'000, alone);
  engine_->OnPeerFenced(1'001, 2);
  EXPECT_EQ(store_->chunks_free(), 16u);
}

}  // namespace
}  // namespace ropeteam
