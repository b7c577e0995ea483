// SPDX-License-Identifier: Apache-2.0
//
// Puts of chunks from device memory to a replica: two engines, one thread. Messages and checks are carried
// out at once; a test decides when and how each transfer ends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/engine/engine.h"
#include "core/shard/manifest.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunk = 4096;
constexpr uint64_t kChunks = 256;
constexpr DeviceBufferId kBuffer = 77;
constexpr NodeId kSource = 1;
constexpr NodeId kHolder = 2;

struct Node {
  Node(NodeId node_id, const std::string& name) : id(node_id), bytes(Store::MemoryFor(kChunks, kChunk)) {
    memory = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    store = Store::Format({memory, bytes}, kChunk, {"job", name}).value();
    EngineConfig config;
    config.self = id;
    config.job = "job";
    config.node = name;
    engine = std::make_unique<Engine>(config, store.get());
    engine->OnLease(0, UINT64_MAX);
  }
  ~Node() {
    engine.reset();
    store.reset();
    munmap(memory, bytes);
  }
  const NodeId id;
  const size_t bytes;
  std::byte* memory = nullptr;
  std::unique_ptr<Store> store;
  std::unique_ptr<Engine> engine;
  size_t ranges_checked = 0;
};

// What a rank saves: one object of `chunks` whole chunks, and the manifest in one more chunk.
struct Shard {
  Shard() = default;
  Shard(uint32_t chunks, char seed) {
    for (uint64_t i = 0; i < chunks * kChunk; ++i)
      stream.push_back(static_cast<char>(i * 7 / 3 + i / 999 + seed));
    Manifest manifest;
    (void)manifest.Add("x", stream.size());
    manifest_offset = manifest.manifest_offset();
    stream += manifest.Encode();
    for (uint64_t at = 0; at < stream.size(); at += kChunk)
      crcs.push_back(Crc32c(stream.data() + at, std::min(kChunk, stream.size() - at)));
  }
  std::string stream;
  uint64_t manifest_offset = 0;
  std::vector<uint32_t> crcs;
};

// The two engines and the network between them.
class World {
 protected:
  World() : source_(kSource, "source"), holder_(kHolder, "holder") {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    View view;
    view.epoch = 1;
    view.leader = kSource;
    for (const Node* node : {&source_, &holder_}) {
      Member member;
      member.id = node->id;
      member.name = node->id == kSource ? "source" : "holder";
      member.ordinal = static_cast<uint32_t>(node->id);
      view.members.push_back(member);
    }
    source_.engine->OnView(now_, view);
    holder_.engine->OnView(now_, view);
    Carry();
    for (const SessionId session : {1u, 2u}) {
      HelloInput hello;
      hello.rank = static_cast<Rank>(session - 1);
      hello.world_size = 2;
      hello.token = 100 + session;
      hello.incarnation_token = "run";
      hello.timeout_us = 1'000'000;
      source_.engine->OnSessionOpened(now_, session);
      source_.engine->OnHello(now_, session, ++request_, hello);
      Carry();
      EXPECT_TRUE(std::holds_alternative<AnswerHello>(answers_.at(request_).body));
    }
  }
  ~World() {
    source_.engine->CheckInvariants();
    holder_.engine->CheckInvariants();
    SetLogSink(nullptr, LogLevel::kWarning);
  }

  // Carries out everything but transfers, until both engines have no more outputs.
  void Carry() {
    for (;;) {
      bool quiet = true;
      for (Node* node : {&source_, &holder_}) {
        const Outbox out = std::exchange(node->engine->outbox(), Outbox());
        quiet = quiet && out.empty();
        for (const StartTransfer& transfer : out.transfers) {
          EXPECT_EQ(node->id, kSource);
          table_.push_back(transfer);
        }
        for (const StartCheck& check : out.checks) DoCheck(node, check);
        for (const SendMessage& message : out.messages) {
          Node& to = message.to == kSource ? source_ : holder_;
          to.engine->OnMessage(now_, node->id, message.envelope);
        }
        for (const Answer& answer : out.answers) answers_.emplace(answer.request, answer);
        for (const LevelEvent& event : out.events) {
          levels_[event.shard.step] = event.level;
          if (event.level == Level::kReplicated) replicated_.push_back(event.shard);
        }
        suspicions_ += out.suspicions.size();
      }
      if (quiet) return;
    }
  }
  void DoCheck(Node* node, const StartCheck& check) {
    std::vector<uint32_t> bad;
    for (uint32_t i = 0; i < check.ranges.size(); ++i) {
      const StartCheck::Range& range = check.ranges[i];
      ++node->ranges_checked;
      if (Crc32c(node->memory + range.offset, range.length) != range.crc) bad.push_back(i);
    }
    node->engine->OnCheckDone(now_, check.tag, bad);
  }
  // Ends one transfer. `landed`: its bytes have reached the holder, which is possible even if it fails.
  void EndTransfer(size_t index, Code code, bool landed) {
    const StartTransfer transfer = table_[index];
    table_.erase(table_.begin() + static_cast<ptrdiff_t>(index));
    const std::byte* from = source_.memory + transfer.local_offset;
    if (transfer.buffer != 0) {
      const std::string& memory = device_.at(transfer.buffer);
      EXPECT_LE(transfer.local_offset + transfer.length, memory.size());
      from = reinterpret_cast<const std::byte*>(memory.data()) + transfer.local_offset;
    }
    ++(transfer.buffer != 0 ? device_puts_ : arena_puts_);
    if (landed) std::memcpy(holder_.store->chunk(0) + transfer.remote_offset, from, transfer.length);
    source_.engine->OnTransferDone(now_, transfer.tag, code);
  }
  // Ends the transfers that are outstanding now.
  void EndTransfers(Code code = Code::kOk) {
    for (size_t count = table_.size(); count != 0; --count) EndTransfer(0, code, code == Code::kOk);
    Carry();
  }
  void EndAllTransfers() {
    while (!table_.empty()) EndTransfers();
  }
  void PassTime(TimeUs time) {
    for (const TimeUs end = now_ + time; now_ < end;) {
      now_ = std::min(end,
                      std::max(now_ + 1, std::min(source_.engine->NextTimer(), holder_.engine->NextTimer())));
      source_.engine->OnTimer(now_);
      holder_.engine->OnTimer(now_);
      Carry();
    }
  }

  SaveId Begin(Step step, const Shard& shard, SessionId session = 1) {
    source_.engine->OnSaveBegin(now_, session, ++request_, step, shard.stream.size());
    Carry();
    const auto* grant = std::get_if<AnswerGrant>(&answers_.at(request_).body);
    if (grant == nullptr) {
      ADD_FAILURE() << std::get<AnswerStatus>(answers_.at(request_).body).status.ToString();
      return 0;
    }
    extents_[grant->save] = grant->extents;
    return grant->save;
  }
  // Announces these chunks in device memory, where the object begins at `offset`.
  void Direct(SaveId save, const Shard& shard, uint64_t offset, uint32_t first, uint32_t count,
              SessionId session = 1, DeviceBufferId buffer = kBuffer) {
    std::string& memory = device_[buffer];
    memory.resize(std::max(memory.size(), offset + shard.crcs.size() * kChunk));
    memory.replace(offset, shard.stream.size(), shard.stream);
    source_.engine->OnSaveDirect(now_, session, {save, buffer, offset + first * kChunk, first, count});
    Carry();
  }
  void Write(SaveId save, const Shard& shard, uint32_t chunk) {
    std::memcpy(source_.store->chunk(ChunkAt(extents_[save], chunk)), shard.stream.data() + chunk * kChunk,
                std::min(kChunk, shard.stream.size() - chunk * kChunk));
  }
  void Fill(SaveId save, const Shard& shard, uint32_t first, uint32_t count, SessionId session = 1) {
    for (uint32_t chunk = first; chunk < first + count; ++chunk) Write(save, shard, chunk);
    source_.engine->OnSaveFilled(now_, session, save, first,
                                 {shard.crcs.begin() + first, shard.crcs.begin() + first + count});
    Carry();
  }
  RequestId Settle(SaveId save, TimeUs timeout = 1'000'000, SessionId session = 1) {
    source_.engine->OnSaveSettle(now_, session, ++request_, save, timeout);
    Carry();
    return request_;
  }
  // Only the commit reports the manifest's chunk.
  Status Commit(SaveId save, const Shard& shard, SessionId session = 1) {
    Write(save, shard, static_cast<uint32_t>(shard.crcs.size() - 1));
    source_.engine->OnSaveCommit(now_, session, ++request_,
                                 {save, shard.stream.size(), shard.manifest_offset, 1, shard.crcs});
    Carry();
    return StatusOf(request_);
  }
  Status StatusOf(RequestId request) {
    if (!answers_.contains(request)) return Error(Code::kInternal, "not answered");
    return std::get<AnswerStatus>(answers_.at(request).body).status;
  }
  bool Answered(RequestId request) const { return answers_.contains(request); }
  size_t FromDevice() const {
    return static_cast<size_t>(std::count_if(table_.begin(), table_.end(),
                                             [](const StartTransfer& each) { return each.buffer != 0; }));
  }
  // The bytes that the holder has sealed.
  std::string Replica(const ShardId& shard) const {
    const SealedShard* copy = holder_.store->Find(shard);
    if (copy == nullptr) return "none";
    std::string bytes;
    for (uint32_t chunk = 0; chunk < copy->crcs.size(); ++chunk)
      bytes.append(reinterpret_cast<const char*>(holder_.store->chunk(ChunkAt(copy->extents, chunk))),
                   kChunk);
    bytes.resize(copy->meta.stream_bytes);
    return bytes;
  }
  void ExpectReplicated(Step step, const Shard& shard, Rank rank = 0) {
    EXPECT_GE(levels_[step], Level::kReplicated);
    EXPECT_TRUE(Replica({source_.engine->incarnation(), step, rank}) == shard.stream);
  }

  TimeUs now_ = 1000;
  Node source_;
  Node holder_;
  RequestId request_ = 0;
  std::map<RequestId, Answer> answers_;
  std::map<SaveId, std::vector<Extent>> extents_;
  std::map<Step, Level> levels_;
  std::vector<ShardId> replicated_;  // in order of the events
  std::map<DeviceBufferId, std::string> device_;
  std::deque<StartTransfer> table_;
  size_t suspicions_ = 0;
  int device_puts_ = 0;
  int arena_puts_ = 0;
};

class DevicePut : public ::testing::Test, protected World {};

// The commit has 30 bytes; what it claims to be a manifest may be terabytes.
TEST_F(DevicePut, AManifestThatIsLongerThanItsObjectsNeedIsNotRead) {
  Shard shard(6, 'a');
  const SaveId save = Begin(1, shard);
  Fill(save, shard, 0, 6);
  shard.manifest_offset = 0;
  const Status refused = Commit(save, shard);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("for 1 objects, limit 307 bytes"));
}

TEST_F(DevicePut, ChunksLeaveTheDeviceBeforeTheyAreInTheArenaAndAreCheckedAgainstItsSums) {
  const Shard shard(6, 'a');
  const SaveId save = Begin(1, shard);
  EXPECT_TRUE(table_.empty());
  Direct(save, shard, 3 * kChunk + 8, 0, 6);
  EXPECT_EQ(FromDevice(), 6u);
  EndTransfers();
  EXPECT_EQ(holder_.ranges_checked, 0u);  // the checksums are not known yet
  Fill(save, shard, 0, 6);
  EXPECT_EQ(holder_.ranges_checked, 6u);
  EXPECT_TRUE(Commit(save, shard).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard);
  EXPECT_EQ(device_puts_, 6);
  EXPECT_EQ(arena_puts_, 1);
}

TEST_F(DevicePut, WhatIsInTheArenaIsPutFromThere) {
  const Shard shard(4, 'b');
  const SaveId save = Begin(1, shard);
  Fill(save, shard, 0, 2);
  Direct(save, shard, 0, 0, 4);
  EXPECT_EQ(table_.size(), 4u);
  EXPECT_EQ(FromDevice(), 2u);
  Fill(save, shard, 2, 2);
  EXPECT_TRUE(Commit(save, shard).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard);
}

TEST_F(DevicePut, AFullLinkLeavesWhatWaitsToTheArenaWhenTheSaveSettles) {
  // Four saves of eight chunks fill the engine's queue; the fifth waits.
  const Shard shard(8, 'c');
  std::vector<SaveId> saves;
  for (Step step = 1; step <= 4; ++step) {
    saves.push_back(Begin(step, shard));
    Direct(saves.back(), shard, 0, 0, 8);
  }
  EXPECT_EQ(FromDevice(), 32u);
  const SaveId late = Begin(1, shard, 2);
  Direct(late, shard, 0, 0, 8, 2);
  EXPECT_EQ(FromDevice(), 32u);

  EXPECT_TRUE(StatusOf(Settle(late, 1'000'000, 2)).ok());
  const RequestId running = Settle(saves[0]);
  EXPECT_FALSE(Answered(running));
  EndTransfers();
  EXPECT_TRUE(StatusOf(running).ok());
  EXPECT_TRUE(table_.empty());  // no put from the late save's device memory, which it has settled
  Fill(late, shard, 0, 8, 2);
  EXPECT_EQ(table_.size(), 8u);
  EXPECT_EQ(FromDevice(), 0u);
  EXPECT_TRUE(Commit(late, shard, 2).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard, 1);
}

TEST_F(DevicePut, SettlingEndsAtItsDeadlineWhileAPutGoesOn) {
  const Shard shard(2, 'd');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 0, 2);
  const RequestId settle = Settle(save, 1000);
  PassTime(2000);
  EXPECT_EQ(StatusOf(settle).code(), Code::kDeadlineExceeded);
  EXPECT_THAT(StatusOf(settle).message(), HasSubstr("device memory"));
  EndTransfers();
  Fill(save, shard, 0, 2);
  EXPECT_TRUE(Commit(save, shard).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard);
}

TEST_F(DevicePut, MemoryThatHasChangedIsPutAgainFromTheArena) {
  const Shard shard(5, 'e');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 0, 5);
  device_[kBuffer].replace(0, 3 * kChunk, std::string(3 * kChunk, 'X'));
  EndTransfers();
  Fill(save, shard, 0, 5);
  EXPECT_TRUE(Commit(save, shard).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard);
  EXPECT_EQ(arena_puts_, 1 + 3);
  EXPECT_EQ(source_.ranges_checked, 0u);  // only device puts mismatched, so the arena is not checked
  EXPECT_EQ(suspicions_, 0u);
}

TEST_F(DevicePut, MemoryThatIsGoneLeavesThePlaceAtTheHolderToTheArena) {
  const Shard shard(4, 'f');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 0, 2);
  const uint64_t held = holder_.store->chunks_free();
  const StartTransfer first = table_.front();
  EndTransfers(Code::kNotFound);
  EXPECT_TRUE(table_.empty());
  Direct(save, shard, 0, 2, 2);
  EXPECT_TRUE(table_.empty());  // not tried again for this save
  Fill(save, shard, 0, 4);
  ASSERT_EQ(table_.size(), 4u);
  EXPECT_EQ(table_.front().remote_offset, first.remote_offset);
  EXPECT_EQ(holder_.store->chunks_free(), held);
  EXPECT_TRUE(Commit(save, shard).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard);
  EXPECT_EQ(suspicions_, 0u);
}

TEST_F(DevicePut, APutThatFailsGivesUpTheCopyAndTheNextComesFromTheArena) {
  const Shard shard(4, 'g');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 0, 4);
  const RequestId settle = Settle(save);
  EndTransfers(Code::kIo);
  EXPECT_TRUE(StatusOf(settle).ok());
  EXPECT_EQ(suspicions_, 0u);  // this node's card could not read
  Fill(save, shard, 0, 4);
  EXPECT_TRUE(Commit(save, shard).ok());
  PassTime(1'000'000);
  EXPECT_EQ(FromDevice(), 0u);
  EndAllTransfers();
  ExpectReplicated(1, shard);
}

TEST_F(DevicePut, APeerThatDoesNotAnswerIsSuspectedAsWithAnyPut) {
  const Shard shard(1, 'h');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 0, 1);
  EndTransfers(Code::kPeerGone);
  EXPECT_EQ(suspicions_, 1u);
}

TEST_F(DevicePut, ASessionThatEndsKeepsItsChunksUntilThePutsAreOver) {
  const Shard shard(3, 'i');
  const uint64_t free_before = source_.store->chunks_free();
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 0, 3);
  Settle(save);
  source_.engine->OnSessionClosed(now_, 1);
  Carry();
  EXPECT_LT(source_.store->chunks_free(), free_before);
  EndTransfers();
  EXPECT_EQ(source_.store->chunks_free(), free_before);
  EXPECT_EQ(holder_.store->chunks_free(), kChunks);
}

TEST_F(DevicePut, AnAbortTakesBackWhatWaits) {
  const Shard shard(8, 'j');
  for (Step step = 1; step <= 4; ++step) Direct(Begin(step, shard), shard, 0, 0, 8);
  const SaveId late = Begin(1, shard, 2);
  Direct(late, shard, 0, 0, 8, 2);
  source_.engine->OnSaveAbort(now_, 2, ++request_, late);
  Carry();
  EXPECT_TRUE(StatusOf(request_).ok());
  EndTransfers();
  EXPECT_TRUE(table_.empty());
}

TEST_F(DevicePut, AnAbortDoesNotWaitForPutsThatNeverLeft) {
  // Without a lease no put leaves. Waiting puts must not keep the memory of a save that has ended.
  const Shard shard(8, 'j');
  const uint64_t free_before = source_.store->chunks_free();
  const SaveId save = Begin(1, shard);
  source_.engine->OnLease(now_, 0);
  Fill(save, shard, 0, 8);
  EXPECT_TRUE(table_.empty());
  source_.engine->OnSaveAbort(now_, 1, ++request_, save);
  Carry();
  EXPECT_EQ(source_.store->chunks_free(), free_before);
  EXPECT_EQ(holder_.store->chunks_free(), kChunks);
  source_.engine->OnLease(now_, UINT64_MAX);
  Carry();
  EXPECT_TRUE(table_.empty());  // nor with the next lease
}

TEST_F(DevicePut, ACopyThatIsDroppedDoesNotWaitForTheLink) {
  // Four saves of eight chunks fill the link, so the fifth waits. Then the link to the holder fails, and the
  // copies are dropped.
  const Shard shard(8, 'q');
  std::vector<SaveId> saves;
  for (Step step = 1; step <= 4; ++step) {
    saves.push_back(Begin(step, shard));
    Fill(saves.back(), shard, 0, 8);
  }
  const SaveId late = Begin(1, shard, 2);
  Fill(late, shard, 0, 8, 2);
  EXPECT_EQ(table_.size(), 32u);
  source_.engine->OnPeerLink(now_, kHolder, false, "cable");
  Carry();
  // The holder has released the fifth copy's chunks, because none of its puts is on the way.
  const uint64_t held = 4 * (shard.crcs.size());
  EXPECT_EQ(holder_.store->chunks_free(), kChunks - held);
  EndTransfers();
  EXPECT_TRUE(table_.empty());
  EXPECT_EQ(holder_.store->chunks_free(), kChunks);
  source_.engine->OnPeerLink(now_, kHolder, true, "");
  Carry();
  EXPECT_TRUE(Commit(late, shard, 2).ok());
  for (const SaveId save : saves) EXPECT_TRUE(Commit(save, shard).ok());
  EndAllTransfers();
  ExpectReplicated(1, shard, 1);
  ExpectReplicated(4, shard);
}

TEST_F(DevicePut, AStreamThatEndsBeforeItsDeviceChunksIsRefused) {
  const Shard shard(3, 'k');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 3, 1);  // the manifest's chunk is not a whole chunk
  Fill(save, shard, 0, 3);
  const Status status = Commit(save, shard);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("4 whole chunks were announced in device memory"));
  EndAllTransfers();
}

TEST_F(DevicePut, PlacesThatMakeNoSenseAreIgnored) {
  const Shard shard(6, 'l');
  const SaveId save = Begin(1, shard);
  Direct(save, shard, 0, 2, 2);
  EXPECT_EQ(table_.size(), 2u);
  Direct(save, shard, 0, 3, 2);  // overlaps at the end
  Direct(save, shard, 0, 0, 3);  // at the beginning
  Direct(save, shard, 0, 1, 4);  // on both sides
  Direct(save, shard, 0, 0, 0);  // no chunk
  Direct(save, shard, 0, 6, 2);  // beyond the save
  Direct(save, shard, 0, 8, UINT32_MAX);
  Direct(save, shard, 0, 0, 1, 2);   // another rank's save
  Direct(save + 1, shard, 0, 0, 1);  // no such save
  EXPECT_EQ(table_.size(), 2u);
  EXPECT_EQ(StatusOf(Settle(save, 1000, 2)).code(), Code::kNotFound);
  EndTransfers();
  EXPECT_TRUE(StatusOf(Settle(save)).ok());
  Direct(save, shard, 0, 0, 1);  // after it was settled
  EXPECT_TRUE(table_.empty());
}

// Two ranks save in pieces in random order. Puts end in random order and with random results. Device memory
// is overwritten as soon as the caller may reuse it.
class RandomRanks : private World {
 public:
  explicit RandomRanks(uint64_t seed) : random_(seed) {}

  void Run() {
    for (int turn = 0; turn < 600; ++turn) {
      Turn();
      Look();
    }
    while (!saves_.empty()) End(0, Below(4) == 0);
    for (int i = 0; i < 100 && !Quiet(); ++i) {
      EndAllTransfers();
      PassTime(100'000);
      Look();
    }
    EXPECT_TRUE(Quiet());
    source_.engine->CheckInvariants();
    holder_.engine->CheckInvariants();
  }
  static int device_puts() { return all_device_puts_; }
  static int put_again() { return all_put_again_; }
  ~RandomRanks() {
    all_device_puts_ += device_puts_;
    all_put_again_ += static_cast<int>(source_.engine->Report().counters.chunks_bad);
  }

 private:
  struct Saving {
    SaveId id = 0;
    SessionId session = 0;
    Shard shard;
    std::vector<bool> filled;
    RequestId settle = 0;
    bool scrambled = false;
  };

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  DeviceBufferId BufferOf(const Saving& save) const { return 1000 + save.id; }

  void Turn() {
    const size_t any = saves_.empty() ? 0 : Below(saves_.size());
    switch (Below(12)) {
      case 0:
        return Start();
      case 1:
      case 2:
      case 3: {
        if (saves_.empty() || saves_[any].settle != 0) return;
        const Saving& save = saves_[any];
        const auto chunks = static_cast<uint32_t>(save.filled.size());
        const auto first = static_cast<uint32_t>(Below(chunks));
        return Direct(save.id, save.shard, 100 * save.id, first,
                      static_cast<uint32_t>(Below(chunks - first + 1)), save.session, BufferOf(save));
      }
      case 4:
      case 5: {
        if (saves_.empty()) return;
        Saving& save = saves_[any];
        const auto chunk = static_cast<uint32_t>(Below(save.filled.size()));
        if (save.filled[chunk]) return;
        save.filled[chunk] = true;
        return Fill(save.id, save.shard, chunk, 1, save.session);
      }
      case 6:
        if (!saves_.empty() && saves_[any].settle == 0)
          saves_[any].settle = Settle(saves_[any].id, Below(2) * 100'000, saves_[any].session);
        return;
      case 7:
        if (!saves_.empty() && Below(3) == 0) End(any, Below(4) == 0);
        return;
      case 8:
        return PassTime(Below(60'000));
      default:
        if (table_.empty()) return;
        const size_t index = Below(table_.size());
        const bool device = table_[index].buffer != 0;
        const Code code = Below(12) != 0 ? Code::kOk : Below(2) != 0 ? Code::kLinkFailed : Code::kIo;
        if (device && Below(20) == 0) {
          EndTransfer(index, Code::kNotFound, false);
        } else {
          EndTransfer(index, code, code == Code::kOk || Below(2) != 0);
        }
        return Carry();
    }
  }

  void Start() {
    if (saves_.size() >= 3) return;
    const SessionId session = 1 + Below(2);
    Saving save;
    save.session = session;
    save.shard = Shard(1 + static_cast<uint32_t>(Below(12)), static_cast<char>(Below(256)));
    save.filled.resize(save.shard.crcs.size() - 1);
    const Step step = ++steps_[session];
    save.id = Begin(step, save.shard, session);
    streams_[{source_.engine->incarnation(), step, static_cast<Rank>(session - 1)}] = save.shard.stream;
    saves_.push_back(std::move(save));
  }
  void End(size_t index, bool abort) {
    Saving save = std::move(saves_[index]);
    saves_.erase(saves_.begin() + static_cast<ptrdiff_t>(index));
    if (abort) {
      source_.engine->OnSaveAbort(now_, save.session, ++request_, save.id);
      Carry();
    } else {
      for (uint32_t chunk = 0; chunk < save.filled.size(); ++chunk)
        if (!save.filled[chunk]) Write(save.id, save.shard, chunk);
      const Status status = Commit(save.id, save.shard, save.session);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    Scramble(save);
    ended_.insert(BufferOf(save));
  }
  void Scramble(const Saving& save) {
    const auto memory = device_.find(BufferOf(save));
    if (memory != device_.end()) std::fill(memory->second.begin(), memory->second.end(), '#');
  }

  // Checks what must hold after every input.
  void Look() {
    for (Saving& save : saves_) {
      if (save.settle == 0 || save.scrambled || !Answered(save.settle)) continue;
      save.scrambled = true;
      Scramble(save);
      if (StatusOf(save.settle).ok()) ended_.insert(BufferOf(save));
    }
    for (const StartTransfer& transfer : table_) {
      // A running put may outlive a settle that timed out, or a save that was never settled; no new put may
      // begin.
      if (begun_.insert(transfer.tag).second) {
        EXPECT_FALSE(ended_.contains(transfer.buffer)) << "put from memory that is not ours";
      }
    }
    for (const ShardId& shard : std::exchange(replicated_, {})) {
      if (source_.store->Find(shard) == nullptr) continue;  // released meanwhile
      EXPECT_TRUE(Replica(shard) == streams_.at(shard)) << shard.ToString();
    }
  }
  bool Quiet() {
    if (!table_.empty()) return false;
    for (const auto& [id, shard] : source_.store->shards())
      if (holder_.store->Find(id) == nullptr) return false;
    return true;
  }

  static int all_device_puts_;
  static int all_put_again_;
  std::mt19937_64 random_;
  std::vector<Saving> saves_;
  std::map<SessionId, Step> steps_;
  std::map<ShardId, std::string> streams_;
  std::set<DeviceBufferId> ended_;
  std::set<uint64_t> begun_;  // transfers
};
int RandomRanks::all_device_puts_ = 0;
int RandomRanks::all_put_again_ = 0;

TEST(DevicePutAtRandom, EveryReplicaIsWhatTheArenaHeldAndNothingIsReadThatIsNotOurs) {
  for (uint64_t seed = 1; seed <= 150 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomRanks(seed).Run();
  }
  // The runs covered both cases.
  EXPECT_GT(RandomRanks::device_puts(), 1000);
  EXPECT_GT(RandomRanks::put_again(), 100);
}

}  // namespace
}  // namespace ropeteam
