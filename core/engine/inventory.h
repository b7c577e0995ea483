// SPDX-License-Identifier: Apache-2.0
//
// How a node reports to the leader what it has. It sends the whole inventory once, then only the changes since the last
// acknowledged inventory, with a digest of the whole. The digest is a sum over the parts (copies, sessions,
// incarnation, policy, roster, standing), so the leader can update it with the changes. If the digest does not match, or the
// leader lacks the inventory that the changes are based on, the leader asks for a whole one.
//
//     idle ── changed, a new view, or counters after a second ──> in flight ── acknowledged ──> idle
//                                                      repeated, with growing pauses
//                                                      refused ──> in flight, whole
//
// One message is in flight at a time, so the leader's queue is bounded by the number of nodes. Changes made meanwhile
// go out together in the next message.

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
// The digest of a normalized inventory in this version of the protocol. It leaves out what changes constantly and decides
// nothing: counters, free chunks, and how long links have been lost.
uint64_t DigestOf(const Inventory& inventory, uint32_t protocol = kProtocolVersion);
// The changes from `before` to `after`, both normalized. They include the node's report without its lists if more than
// counters has changed in it, or if `with_counters`.
InventoryDelta Difference(const Inventory& before, const Inventory& after, bool with_counters,
                          uint32_t protocol = kProtocolVersion);

// What has changed in a member's inventory, for the leader.
struct InventoryChange {
  std::vector<CopyReport> before;  // copies that are gone, and the old state of changed ones
  std::vector<CopyReport> after;   // new copies, and the new state of changed ones
  bool incarnation = false;
  std::vector<SessionReport> sessions;  // new or changed
  bool seats = false;                   // sessions came or went, or `asking_from` has changed
  bool standing = false;                // the report itself has changed, apart from its lists
};

// The newest inventory of one member.
class HeldInventory {
 public:
  const Inventory& inventory() const { return inventory_; }
  uint64_t sequence() const { return inventory_.sequence; }  // 0: nothing received yet
  // `protocol`: of the epoch. After a change of the version the first changes do not fit, and a whole inventory is
  // requested.
  InventoryChange Replace(Inventory whole, uint32_t protocol = kProtocolVersion);
  // Returns nothing and changes nothing if `delta` is not based on this inventory, or if its digest does not match.
  std::optional<InventoryChange> Apply(const InventoryDelta& delta, uint32_t protocol = kProtocolVersion);

 private:
  const CopyReport* Find(const ShardId& id) const;
  Inventory inventory_;
  // The sum of these and the digest of the scalars is the inventory's digest.
  uint64_t copies_digest_ = 0;
  uint64_t sessions_digest_ = 0;
  uint64_t incarnation_digest_ = 0;
  uint64_t policy_digest_ = 0;
  uint64_t roster_digest_ = 0;
  uint64_t standing_digest_ = 0;
};

class InventorySender {
 public:
  // A new epoch: reports to its leader. Sends only the changes if this leader instance sent the last acknowledgement,
  // else the whole inventory.
  void OnView(NodeId leader);
  // There is a lease again: repeats the unanswered message at once, and the pauses start at kRepeatUs again.
  void OnLease();
  // The inventory for the leader has changed.
  void OnChange() { changed_ = true; }
  void OnAck(NodeId from, const InventoryAck& ack);

  // The time at which a message is due. `more_soon`: copies are being made here, so changes are collected for a window;
  // otherwise they are sent at once. `counters`: they have changed.
  TimeUs Due(bool more_soon, bool counters) const;
  bool in_flight() const { return in_flight_; }
  // The leader has acknowledged the current inventory.
  bool known() const { return !changed_ && !in_flight_ && !due_now_; }
  uint64_t sequence() const { return sequence_; }  // of the newest that was sent
  // The first inventory that had this copy with this content; UINT64_MAX: none yet.
  uint64_t FirstWith(const ShardId& shard, uint64_t content) const;
  struct Message {
    Kind kind = Kind::kInventory;
    std::string payload;
  };
  TimeUs counters_at() const { return counters_at_; }  // when they were sent last
  // The message that is due: a repeat of the unanswered one, or a new one for `current`.
  const Message& Repeat(TimeUs now);
  const Message& Send(TimeUs now, Inventory current, uint32_t protocol = kProtocolVersion);

 private:
  void NoteListed(const std::vector<CopyReport>& copies);
  void AwaitAck(TimeUs now);

  NodeId leader_ = kNoNode;
  bool due_now_ = false;  // nothing was sent in this epoch yet, or a whole inventory was requested
  bool changed_ = false;
  uint64_t sequence_ = 0;
  struct Listed {
    uint64_t content = 0;
    uint64_t first = 0;  // the first inventory that had it
  };
  std::map<ShardId, Listed> listed_;  // the copies of the newest inventory
  // What the leader has acknowledged, and the leader that did.
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
