// SPDX-License-Identifier: Apache-2.0
//
// The timing of the engine's protocol, each constant with its reason, and the relations between them that the
// protocol rests on. Microseconds.

#ifndef ROPETEAM_CORE_ENGINE_LIMITS_H_
#define ROPETEAM_CORE_ENGINE_LIMITS_H_

#include <cstddef>

#include "core/base/ids.h"
#include "core/base/view.h"

namespace ropeteam::engine {

inline constexpr TimeUs kNever = UINT64_MAX;

inline constexpr uint32_t kWorldMax = 131072;  // ROPETEAM_WORLD_MAX: 16,384 nodes of 8 ranks
static_assert(kWorldMax >= 8 * kNodesMax);

// A message that is not answered is repeated after this time. A message takes well under a millisecond between
// two hosts, and the leader needs a few milliseconds for a thousand inventories. This is ten times that, and short
// enough that a lost message is not noticed.
inline constexpr TimeUs kRepeatUs = 100'000;

// The next repeat comes after twice as long, up to this. A leader that is behind gets less to do, not more.
inline constexpr TimeUs kRepeatMaxUs = 800'000;
static_assert(kRepeatMaxUs >= 4 * kRepeatUs);

// While copies are being made on a node, its inventories are at least so far apart: the seals of 8 ranks and
// their replicas travel in a few messages. This is short compared with the time of a shard (100 ms for 1 GB at
// 10 GB/s). The last change of a burst is sent at once, so COMMITTED is not delayed.
inline constexpr TimeUs kInventoryWindowUs = 20'000;
static_assert(kInventoryWindowUs < kRepeatUs);

// Counters are informational and may lag by this much.
inline constexpr TimeUs kCountersEveryUs = 1'000'000;

// ---- copies

// A holder that refused or failed is not asked again within this time.
inline constexpr TimeUs kAvoidUs = 500'000;
// For this time after a refusal a holder assumes that the source still wants the copy.
inline constexpr TimeUs kRefusedForUs = 1'000'000;
static_assert(kRefusedForUs >= 2 * kAvoidUs, "the source asks again in time, also if one message is lost");
// For this time the chunks of a dead step, once released, are kept for replicas.
inline constexpr TimeUs kKeptForReplicasUs = 1'000'000;
static_assert(kKeptForReplicasUs >= 2 * kAvoidUs);
// A holder that has no message from the source for this time asks whether the copy is still wanted. Longer than
// any pause of a working source.
inline constexpr TimeUs kSilenceUs = 10'000'000;
static_assert(kSilenceUs > 10 * kRepeatUs);

// ---- the leader

// A copy that was ordered and has not shown up in an inventory is ordered again after this: time for 64 GiB
// at 10 GB/s.
inline constexpr TimeUs kOrderTimeoutUs = 10'000'000;
inline constexpr TimeUs kRestoreEveryUs = 500'000;
// After an order is done, the next is given within this time: one pass serves all orders that end meanwhile.
inline constexpr TimeUs kRestoreSoonUs = 20'000;
static_assert(kRestoreSoonUs < kRestoreEveryUs);
// A holder may report its copy before the owner reports the shard: both wait for a window, and a message may be
// lost. Only after this time is the owner's copy assumed lost.
inline constexpr TimeUs kOrphanAfterUs = 300'000;
static_assert(kOrphanAfterUs >= kInventoryWindowUs + 2 * kRepeatUs);
static_assert(kRestoreEveryUs < kOrderTimeoutUs);
// If no shard gets its copies for this time while a node has no room for a replica, waiting longer does not
// help. It is the time for 64 GiB at 10 GB/s, as above.
inline constexpr TimeUs kStuckUs = 10'000'000;
static_assert(kStuckUs >= kOrderTimeoutUs, "an order has had its time before a step is released");
// Refusals that are no further apart than this are one shortage. A refused order ends after kOrderTimeoutUs, and its target
// gets no other for as long again.
inline constexpr TimeUs kShortageGapUs = 25'000'000;
static_assert(kShortageGapUs > 2 * kOrderTimeoutUs + kRestoreEveryUs);
// A node reads its copies in seconds, and answers when it has read all.
inline constexpr TimeUs kVerifyRepeatUs = 10'000'000;
inline constexpr TimeUs kVerifyForgetUs = 60'000'000;  // after the asker's last question
static_assert(kVerifyForgetUs > 2 * kVerifyRepeatUs);

// Steps whose ranks do not agree, in an announcement: a rank waits for its last few steps.
inline constexpr size_t kDisagreementsMax = 16;

// Dropped steps that a leader remembers. A program drops a step now and then.
inline constexpr size_t kDroppedMax = 16;

// ---- fetching

// A fetch waits this long for a holder that the data path has lost: a switch that converges again or a link that
// is retrained is mostly back within a second. A caller's deadline may end earlier.
inline constexpr TimeUs kLostHolderUs = 10'000'000;
static_assert(kLostHolderUs > 10 * kRepeatUs);

// A fetch that finds no leader fails after this. Its callers have earlier deadlines of their own.
inline constexpr TimeUs kLocateTimeoutUs = 30'000'000;
// Where there is storage, the answer may have to wait for another node that reads the shard from there: 256 GiB at
// 0.5 GB/s.
inline constexpr TimeUs kStorageLocateTimeoutUs = 600'000'000;

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LIMITS_H_
