// SPDX-License-Identifier: Apache-2.0
//
// The leader's record of the current incarnation, and the admission of its ranks. A new leader learns both from the
// members' inventories.
//
// A seat is the place of one rank in the current incarnation:
//
//     admitted ── its session is in its node's inventory ──> present ── it is no longer there ──> left
//         └── its node neither lists it nor waits for the answer to its question ──> the seat is free again

#ifndef ROPETEAM_CORE_ENGINE_INCARNATIONS_H_
#define ROPETEAM_CORE_ENGINE_INCARNATIONS_H_

#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

class Incarnations {
 public:
  explicit Incarnations(const Context* context) : context_(*context) {}

  // A new leader begins with the state of its own node.
  void Begin(const IncarnationState& known);
  // Takes over what a member's inventory says about the incarnation and about the ranks of that member.
  void Learn(const Inventory& inventory);
  void LearnRanks(NodeId node, const std::vector<SessionReport>& sessions, uint64_t asking_from);
  // The node has left the view, so its ranks have left, too.
  void Forget(NodeId node) { LearnRanks(node, {}, UINT64_MAX); }

  // Gives the asking rank its seat, in the current incarnation or in a new one. An error has the reason; kUnavailable:
  // not yet. `question`: the number of the node's question. `saved`: there is a shard that the rank has saved in this
  // incarnation.
  Status Admit(NodeId from, uint64_t question, const JoinQuestion& join, bool saved);

  // Sets the step that this incarnation restores; {0, 0}: none. Called again only as long as no rank was told (Latest).
  void Pin(const StepId& step);

  // Incarnations up to this one are used on storage: the next one gets a higher number.
  void SetFloor(Incarnation floor) { floor_ = floor; }

  const IncarnationState& current() const { return current_; }
  uint32_t ranks_present() const { return ranks_present_; }  // ranks that have a seat and have not left it
  uint64_t version() const { return version_; }              // grows whenever current() changes
  void CheckInvariants() const;

 private:
  struct Seat {
    uint64_t token = 0;
    NodeId node = kNoNode;  // kNoNode: the seat is free
    uint64_t question = 0;  // the number of the node's question that admitted the rank
    bool present = false;   // its session is in the node's inventory
    bool left = false;      // its session was in the inventory, and is not any more
    bool taken() const { return node != kNoNode; }
  };
  const Seat* Find(Rank rank) const;  // null if the seat is free
  void Put(Rank rank, const Seat& seat);
  void Free(Rank rank);
  void FreeAll();
  void Change(IncarnationState state);
  void KeepPin(const IncarnationState& known);
  Status CheckWorld(const JoinQuestion& join) const;
  Status Unconfirmed(const JoinQuestion& join) const;
  Status AdmitNamed(NodeId from, const JoinQuestion& join, bool returns, bool saved);
  Status AdmitUnnamed(const JoinQuestion& join);
  void BeginNext(const JoinQuestion& join);

  const Context& context_;
  IncarnationState current_;
  Incarnation floor_ = 0;
  uint64_t version_ = 0;
  std::vector<Seat> seats_;                              // by rank
  std::unordered_map<NodeId, std::set<Rank>> ranks_of_;  // the ranks of each node that have a seat
  uint32_t ranks_present_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_INCARNATIONS_H_
