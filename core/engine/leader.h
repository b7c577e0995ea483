// SPDX-License-Identifier: Apache-2.0
//
// The leader's role. All it knows are the inventories that the members told it, whole, each the newest of its
// node; so a new leader knows everything as soon as every member has spoken. From them, as functions:
//
//  * a step is producible when every rank's shard can be put together from good chunks on living members;
//  * a step is committed when every rank of its life has 1 + R good copies on different members, now or (as
//    the marks on the copies say) once;
//  * kept are the newest K steps committed and producible, the pin, and what is newest of all producible;
//  * a shard of a kept step with fewer than 1 + R copies is to be copied to where it should lie.
//
// The life of the world (which incarnation is current, which rank is whose) is decided here too, and told to
// every node, whose inventories repeat it to the next leader.

#ifndef ROPETEAM_CORE_ENGINE_LEADER_H_
#define ROPETEAM_CORE_ENGINE_LEADER_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {

struct Parts;

class Leader {
 public:
  explicit Leader(Parts* parts) : parts_(*parts) {}

  void OnView(const View& before);
  void OnInventory(NodeId from, Inventory inventory);
  void OnStateAck(NodeId from, const LeaderStateAck& ack);
  void OnQuestion(NodeId from, const Question& question);
  void OnVerifyResult(NodeId from, const VerifyResult& result);
  void Flush();  // at the end of an input: judge and announce what has changed
  void OnTimer();
  void OnLease() { dirty_ = true; }  // there is one again
  TimeUs NextTimer() const;
  bool leading() const { return leading_; }

 private:
  // Orders outstanding at one source: restoring redundancy is paced by its slowest resource, the source's
  // link.
  static constexpr size_t kOrdersPerSourceMax = 2;
  static constexpr size_t kCommittedListedMax = 16;  // beyond K, for waits that are behind

  struct MemberState {
    bool heard = false;
    Inventory inventory;
    uint64_t acked = 0;
    TimeUs next_send = 0;
  };
  struct Order {
    NodeId source = kNoNode;
    NodeId target = kNoNode;
    TimeUs until = 0;
  };
  struct VerifyJob {
    uint64_t number = 0;  // the leader's own, in its orders
    VerifyReport report;
    std::set<NodeId> missing;
    TimeUs next_send = 0;
    TimeUs touched = 0;
  };
  // One rank of the current life.
  struct Admitted {
    uint64_t token = 0;
    NodeId node = kNoNode;
    uint64_t question = 0;  // of the node, by which it was admitted
    bool present = false;   // its session is in the node's inventory
    bool left = false;      // it was there, and is not any more
  };

  void LearnLife(const Inventory& inventory);
  void UpdateRanks(NodeId node, const std::vector<SessionReport>& sessions, uint64_t asking_from);
  bool complete() const;  // every member's inventory is known
  std::string Missing() const;
  void Announce();
  // Steps of the current life that some rank has passed without a shard of them, or that were given up.
  std::vector<StepKey> DeadSteps() const;
  void GiveUpOlderSteps();
  void RestoreRedundancy();
  void OrderCopies(const StepId& id, const StepTable::StepState& step, std::map<NodeId, size_t>* load);
  std::vector<StepId> CommittedNewestFirst(size_t count) const;

  void Reply(NodeId to, uint64_t number, const Status& status, std::string payload = {});
  void AnswerJoin(NodeId from, uint64_t number, const JoinQuestion& join);
  Status Admit(NodeId from, uint64_t number, const JoinQuestion& join);
  void BeginLife(const JoinQuestion& join);
  void AnswerLatest(NodeId from, uint64_t number, const LatestQuestion& latest);
  std::optional<StepId> NewestProducible(Incarnation only) const;
  Result<StepId> ResolveLatest(Incarnation asking);
  // Every member knows what this life restores: no leader that comes later can decide otherwise.
  bool PinIsKnown() const;
  void AnswerLocate(NodeId from, uint64_t number, const LocateQuestion& locate);
  Result<StepId> ResolveStep(const LocateQuestion& locate) const;
  void AnswerReport(NodeId from, uint64_t number);
  void AnswerVerify(NodeId from, uint64_t number, const VerifyQuestion& verify);
  StepReport Describe(const StepId& id, const StepTable::StepState& step) const;
  uint32_t ranks_present() const;

  Parts& parts_;
  bool leading_ = false;
  std::map<NodeId, MemberState> members_;
  StepTable table_;
  Life life_;
  std::map<Rank, Admitted> ranks_;
  bool dirty_ = false;
  LeaderState state_;
  uint64_t sequence_ = 0;
  uint64_t pin_sequence_ = 0;  // of the first state that told this life's pin
  std::map<std::pair<NodeId, uint64_t>, LatestQuestion> waiting_for_pin_;
  uint64_t replications_ = 0;  // of the table, when last looked at
  TimeUs progress_at_ = 0;     // when that changed
  std::map<ShardId, std::vector<Order>> orders_;
  TimeUs next_restore_ = kNever;
  std::map<std::pair<NodeId, uint64_t>, VerifyJob> verifying_;
  uint64_t next_verify_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LEADER_H_
