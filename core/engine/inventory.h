// SPDX-License-Identifier: Apache-2.0
//
// How a node tells the leader what it has: the whole inventory once, then only what has changed since the
// inventory that the leader acknowledged last, with a digest of everything. The digest is a sum over the parts
// (copies, sessions, incarnation, policy, standing), so the leader updates it with what has changed. If it does not fit,
// or the leader does not hold the inventory that the changes are based on, the leader asks for a whole one.
//
//     idle ── changed, a new view, or counters after a second ──> in flight ── acknowledged ──> idle
//                                                      repeated, ever more seldom
//                                                      refused ──> in flight, whole
//
// One message is in flight at a time, so the leader's queue is bounded by the nodes. What changes meanwhile goes
// out together with the next one.

#ifndef ROPETEAM_CORE_ENGINE_INVENTORY_H_
#define ROPETEAM_CORE_ENGINE_INVENTORY_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/engine/limits.h"
#include "core/engine/messages.h"

namespace ropeteam::engine {

// Sorts copies and sessions by their keys and removes duplicates. Both ends compare inventories in this form.
void Normalize(Inventory* inventory);
// Of a normalized inventory, as this version of the protocol has it. Not of what changes all the time and decides nothing: counters, free chunks, and
// for how long links have been lost.
uint64_t DigestOf(const Inventory& inventory, uint32_t protocol = kProtocolVersion);
// The changes from `before` to `after`, both normalized. The node's report without its lists goes along if it has
// changed beyond its counters, or `with_counters`.
InventoryDelta Difference(const Inventory& before, const Inventory& after, bool with_counters,
                          uint32_t protocol = kProtocolVersion);

// What a member's inventory changed, as the leader sees it.
struct InventoryChange {
  std::vector<CopyReport> before;  // copies that are gone, or as they were
  std::vector<CopyReport> after;   // new copies, and the others as they are now
  bool incarnation = false;
  std::vector<SessionReport> sessions;  // new or changed
  bool seats = false;                   // sessions came or went, or the node asks from another question
  bool standing = false;                // the report itself, beyond its lists
};

// The newest inventory of one member.
class HeldInventory {
 public:
  const Inventory& inventory() const { return inventory_; }
  uint64_t sequence() const { return inventory_.sequence; }  // 0: nothing received yet
  // `protocol`: of the epoch. In an epoch of another one the first changes do not fit, and a whole one is asked for.
  InventoryChange Replace(Inventory whole, uint32_t protocol = kProtocolVersion);
  // Nothing, and no change, if `delta` is not based on this inventory or its digest does not fit.
  std::optional<InventoryChange> Apply(const InventoryDelta& delta, uint32_t protocol = kProtocolVersion);

 private:
  const CopyReport* Find(const ShardId& id) const;
  Inventory inventory_;
  // Their sum plus the digest of the scalars is the inventory's digest.
  uint64_t copies_digest_ = 0;
  uint64_t sessions_digest_ = 0;
  uint64_t incarnation_digest_ = 0;
  uint64_t policy_digest_ = 0;
  uint64_t standing_digest_ = 0;
};

class InventorySender {
 public:
  // A new epoch: tells its leader again. Only the changes if the last acknowledgement came from that instance,
  // else everything.
  void OnView(NodeId leader);
  // Messages may pass again: the unanswered one is repeated at once, and the pauses begin with kRepeatUs again.
  void OnLease();
  // Something that the leader should know has changed.
  void OnChange() { changed_ = true; }
  void OnAck(NodeId from, const InventoryAck& ack);

  // When a message is due. `more_soon`: copies are being made here, so what has changed waits for more within a
  // window; else it goes out at once. `counters`: they have changed.
  TimeUs Due(bool more_soon, bool counters) const;
  bool in_flight() const { return in_flight_; }
  // The leader has acknowledged what there is now.
  bool known() const { return !changed_ && !in_flight_ && !due_now_; }
  uint64_t sequence() const { return sequence_; }  // of the newest that was sent
  // The first inventory that had this copy, of these bytes; UINT64_MAX: none has yet.
  uint64_t FirstWith(const ShardId& shard, uint64_t content) const;
  struct Message {
    Kind kind = Kind::kInventory;
    std::string payload;
  };
  TimeUs counters_at() const { return counters_at_; }  // when they were sent last
  // The message that is due: a repeat of the unanswered one, or one that makes `current` known.
  const Message& Repeat(TimeUs now);
  const Message& Send(TimeUs now, Inventory current, uint32_t protocol = kProtocolVersion);

 private:
  void NoteListed(const std::vector<CopyReport>& copies);
  void AwaitAck(TimeUs now);

  NodeId leader_ = kNoNode;
  bool due_now_ = false;  // in this epoch nothing has been sent yet, or a whole one was asked for
  bool changed_ = false;
  uint64_t sequence_ = 0;
  struct Listed {
    uint64_t content = 0;
    uint64_t first = 0;  // the inventory that had it first
  };
  std::map<ShardId, Listed> listed_;  // the copies of the newest inventory
  // What the leader has acknowledged, and which leader that was.
  NodeId known_by_ = kNoNode;
  Inventory known_;
  bool in_flight_ = false;
  Inventory sent_;
  Message message_;
  TimeUs sent_at_ = 0;
  TimeUs counters_at_ = 0;
  TimeUs repeat_at_ = kNever;
  TimeUs repeat_after_ = kRepeatUs;  // the pause before the next repeat
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_INVENTORY_H_
