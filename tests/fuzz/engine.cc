// SPDX-License-Identifier: Apache-2.0
//
// Three engines save, replicate and read. They also receive forged messages: anything that can be decoded,
// with the numbers of existing copies, questions and steps. No engine's state may break, and no transfer or
// check may leave the arena's chunks.

#include "core/base/bytes.h"
#include "tests/engine/engines_for_test.h"
#include "tests/fuzz/engine_messages.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {
namespace {

enum Op : uint8_t { kMessage, kPayload, kQuestion, kReply, kSave, kTime, kRequest, kView, kPeer, kOps };

class World : Engines {
 public:
  explicit World(bool encrypts) : Engines(kNodes, kChunks, 0, encrypts) {
    for (NodeId id = 1; id <= kNodes; ++id) ROPETEAM_CHECK(Find(id) != nullptr);
  }
  void Run(std::string_view input) {
    FromBytes in(input);
    // Limited, so that even the longest inputs end soon.
    for (int i = 0; i < kOpsMax && !in.done(); ++i) Step(&in);
    PassTime(kEndUs);
  }

 private:
  static constexpr uint32_t kNodes = 3;
  static constexpr uint64_t kChunks = 48;
  static constexpr int kOpsMax = 64;
  static constexpr TimeUs kEndUs = 6'000'000;  // longer than the quarantine
  static constexpr TimeUs kTimeout = 1'000'000;

  void Step(FromBytes* in) {
    const uint8_t op = in->Byte() % kOps;
    const uint8_t who = in->Byte();
    const NodeId to = 1 + who % kNodes;
    const NodeId from = 1 + (to + who / kNodes % 2) % kNodes;
    Engine& engine = *node(to).engine;
    switch (op) {
      case kMessage:
        WithType<EngineMessages>(in->Byte(), [&](auto message) {
          in->Get(message);
          Inject(from, to, message.kKind, Encode(message));
        });
        break;
      case kPayload: {
        const auto kind = static_cast<Kind>(in->Byte());
        Inject(from, to, kind, in->Text());
        break;
      }
      case kQuestion: {
        ropeteam::Question question;
        question.number = in->Number();
        question.topic =
            static_cast<ropeteam::Question::Topic>(1 + in->Byte() % std::tuple_size_v<EngineQuestions>);
        WithType<EngineQuestions>(static_cast<size_t>(question.topic) - 1, [&](auto asked) {
          in->Get(asked);
          question.payload = Encode(asked);
        });
        Inject(from, to, question.kKind, Encode(question));
        break;
      }
      case kReply: {
        ropeteam::Reply reply;
        reply.number = in->Number();
        reply.code = static_cast<Code>(in->Number());
        WithType<EngineReplies>(in->Byte(), [&](auto answer) {
          in->Get(answer);
          reply.payload = Encode(answer);
        });
        Inject(from, to, reply.kKind, Encode(reply));
        break;
      }
      case kSave:
        SaveOne(to, in->Byte() % 8, 1 + in->Byte() % 3);
        break;
      case kTime:
        PassTime(std::min<uint64_t>(in->Number(), 6000) * 1000 + 1);
        break;
      case kRequest:
        Request(&engine, in);
        break;
      case kView:
        NextView(in->Byte());
        break;
      default:
        ChangePeer(&engine, from, in->Byte());
        break;
    }
    Carry();
    for (const auto& each : nodes_) each->engine->CheckInvariants();
  }

  void Inject(NodeId from, NodeId to, Kind kind, std::string payload) {
    const Envelope envelope{node(to).engine->view().epoch, from, to, kind, std::move(payload)};
    node(to).engine->OnMessage(now_, from, Encode(envelope));
  }

  void SaveOne(NodeId id, ropeteam::Step step, uint64_t chunks) {
    const TestShard shard(chunks, static_cast<char>(id));
    Engine& engine = *node(id).engine;
    engine.OnSaveBegin(now_, kSession, ++request_, step, shard.stream.size());
    Carry();
    const auto answer = answers_.find(request_);
    if (answer == answers_.end()) return;
    const auto* grant = std::get_if<AnswerGrant>(&answer->second.body);
    if (grant == nullptr) return;
    const SaveId save = grant->save;
    for (uint64_t chunk = 0; chunk < shard.crcs.size(); ++chunk)
      std::memcpy(node(id).store->chunk(ChunkAt(grant->extents, chunk)),
                  shard.stream.data() + chunk * kTestChunk,
                  std::min<uint64_t>(kTestChunk, shard.stream.size() - chunk * kTestChunk));
    engine.OnSaveCommit(now_, kSession, ++request_,
                        {save, shard.stream.size(), shard.manifest_offset, 1, shard.crcs});
  }

  void Request(Engine* engine, FromBytes* in) {
    const uint8_t what = in->Byte() % 8;
    const ropeteam::Step step = in->Byte();
    const RequestId request = ++request_;
    switch (what) {
      case 0:
        return engine->OnWait(now_, kSession, request, step, Level::kCommitted, kTimeout);
      case 1:
        if (step >= 128) return engine->OnDrop(now_, kSession, request, step % 8, kTimeout);
        return engine->OnLatest(now_, kSession, request, Level::kCommitted, kTimeout);
      case 2: {
        const uint8_t rank = in->Byte();
        return engine->OnViewOpen(now_, kSession, request, step, rank % kNodes, kTimeout, rank >= 128);
      }
      case 3:
        return engine->OnViewRepair(now_, kSession, request, step, in->Get<std::vector<uint32_t>>(),
                                    kTimeout);
      case 4:
        return engine->OnReport(now_, kSession, request, kTimeout);
      case 5:
        return engine->OnVerify(now_, kSession, request, &step, kTimeout);
      case 6:
        if (step >= 128)
          return engine->OnSetPolicy(now_, kSession, request, {step % 4, static_cast<uint32_t>(step % 8 / 4)},
                                     kTimeout);
        return engine->OnPersist(now_, kSession, request, step, kTimeout);
      default:
        if (step < 128) return engine->OnViewClose(now_, kSession, step);
        return engine->OnViewRead(now_, kSession, request, step - 128, in->Get<std::vector<PackedPart>>(),
                                  kTimeout);
    }
  }

  // A view without the nodes whose bits are set in `without`. If all three bits are set, no node is left out.
  void NextView(uint8_t without) {
    View view = node(1).engine->view();
    for (const auto& each : nodes_)
      if (each->engine->view().epoch > view.epoch) view = each->engine->view();
    ++view.epoch;
    view.members.clear();
    for (const auto& each : nodes_) {
      if ((without >> (each->id - 1) & 1) != 0 && without % 8 != 7) continue;
      Member member;
      member.id = each->id;
      member.name = "node-" + std::to_string(each->id);
      member.ordinal = static_cast<uint32_t>(each->id);
      view.members.push_back(member);
    }
    view.leader = view.members[without / 8 % view.members.size()].id;
    for (const Member& member : view.members) node(member.id).engine->OnView(now_, view);
  }

  void ChangePeer(Engine* engine, NodeId peer, uint8_t how) {
    switch (how % 6) {
      case 0:
        return engine->OnPeerLink(now_, peer, false, "cut");
      case 1:
        return engine->OnPeerLink(now_, peer, true, "");
      case 2:
        return engine->OnLease(now_, now_);
      case 3:
        return engine->OnLease(now_, UINT64_MAX);
      case 4:
        return engine->OnPeerFenced(now_, peer);
      default:
        hold_checks_ = !hold_checks_;
        return;
    }
  }
};

void RunEngine(std::string_view input) { World(input.size() % 2 != 0).Run(input); }

std::string At(Op op, NodeId to) { return ToBytes().Byte(op).Byte(to - 1).bytes(); }

// Saves on all nodes, then one request, message or other event, with numbers that may match existing objects.
std::vector<std::string> EngineSeeds() {
  std::string saved;
  for (NodeId id = 1; id <= 3; ++id) saved += At(kSave, id) + ToBytes().Byte(1).Byte(1).bytes();
  std::vector<std::string> seeds = {saved + saved};
  for (size_t what = 0; what < 8; ++what)
    seeds.push_back(saved + At(kRequest, 2) + ToBytes().Byte(what).Byte(1).Byte(0).bytes());
  for (size_t type = 0; type < std::tuple_size_v<EngineMessages>; ++type) {
    for (NodeId to = 1; to <= 2; ++to) {
      std::string seed = saved + At(kMessage, to) + ToBytes().Byte(type).bytes();
      seeds.push_back(seed + std::string(40, '\1'));
      // CopyId{1, 1} or a shard of the first incarnation.
      seeds.push_back(seed + std::string("\xb1\1\1\1\1\1\1\1", 8) + std::string(32, '\1'));
    }
  }
  seeds.push_back(saved + At(kView, 1) + ToBytes().Byte(4).bytes() + At(kTime, 1) + "\xa0");
  seeds.push_back(At(kPeer, 1) + '\0' + saved + At(kPeer, 1) + '\1');
  for (size_t topic = 0; topic < 6; ++topic)
    seeds.push_back(saved + At(kQuestion, 1) + '\1' + ToBytes().Byte(topic).bytes() + std::string(12, '\1'));
  for (size_t answer = 0; answer < std::tuple_size_v<EngineReplies>; ++answer)
    seeds.push_back(saved + At(kRequest, 2) + "\1\1" + At(kReply, 2) + std::string("\1\0", 2) +
                    ToBytes().Byte(answer).bytes() + std::string(24, '\1'));
  return seeds;
}

const Target kEngine("engine", RunEngine, EngineSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
