// SPDX-License-Identifier: Apache-2.0
//
// The timing of the engine's protocol in microseconds. Each constant has its reason. The static_asserts are the
// relations between them that the protocol relies on.

#ifndef ROPETEAM_CORE_ENGINE_LIMITS_H_
#define ROPETEAM_CORE_ENGINE_LIMITS_H_

#include <cstddef>

#include "core/base/ids.h"
#include "core/base/view.h"

namespace ropeteam::engine {

inline constexpr TimeUs kNever = UINT64_MAX;

inline constexpr uint32_t kWorldMax = 131072;  // ROPETEAM_WORLD_MAX: 16,384 nodes of 8 ranks
static_assert(kWorldMax >= 8 * kNodesMax);

// Where a node's chunk 0 is in the memory that it exports to peers. The tables before the chunks are not exported. A
// grant contains it, because earlier daemons export the whole arena.
inline constexpr uint64_t kExportedChunksBegin = 0;

// A message that is not answered is repeated after this time. A message takes well under a millisecond between two
// hosts, and the leader needs a few milliseconds for a thousand inventories. This is ten times as long, and short
// enough that nobody notices a lost message.
inline constexpr TimeUs kRepeatUs = 100'000;

// Each further pause is twice as long, up to this. So a leader that is behind gets fewer messages, not more.
inline constexpr TimeUs kRepeatMaxUs = 800'000;
static_assert(kRepeatMaxUs >= 4 * kRepeatUs);

// While copies are being made on a node, its inventories are at least this far apart, so the seals of 8 ranks and their
// replicas need only a few messages. This is short compared with the time for a shard (100 ms for 1 GB at 10 GB/s). The
// last change of a burst is sent at once, so COMMITTED is not delayed.
inline constexpr TimeUs kInventoryWindowUs = 20'000;
static_assert(kInventoryWindowUs < kRepeatUs);

// A member that leaves requests unanswered is asked for its time this often: well above a round trip on a busy host.
inline constexpr TimeUs kAskAgainUs = 500'000;
// A member that has answered nothing for this time is not reached. Single lost messages and a busy peer are over by
// then: the request has been repeated, and the question for the time was asked several times.
inline constexpr TimeUs kUnansweredUs = 3'000'000;
static_assert(kUnansweredUs > 3 * kRepeatMaxUs && kUnansweredUs >= 5 * kAskAgainUs);

// Counters are informational and may lag by this much.
inline constexpr TimeUs kCountersEveryUs = 1'000'000;

// ---- copies

// A holder that refused or failed is not asked again within this time.
inline constexpr TimeUs kAvoidUs = 500'000;
// For this time after a refusal a holder assumes that the source still wants the copy.
inline constexpr TimeUs kRefusedForUs = 1'000'000;
static_assert(kRefusedForUs >= 2 * kAvoidUs, "the source asks again in time, also if one message is lost");
// The chunks of a released dead step are reserved for replicas for this time.
inline constexpr TimeUs kKeptForReplicasUs = 1'000'000;
static_assert(kKeptForReplicasUs >= 2 * kAvoidUs);
// If a holder gets no message from the source for this time, it asks whether the copy is still wanted. This is longer
// than any pause of a working source.
inline constexpr TimeUs kSilenceUs = 10'000'000;
static_assert(kSilenceUs > 10 * kRepeatUs);

// ---- the leader

// An ordered copy that is in no inventory after this time is ordered again. It is the time for 64 GiB at 10 GB/s.
inline constexpr TimeUs kOrderTimeoutUs = 10'000'000;
inline constexpr TimeUs kRestoreEveryUs = 500'000;
// The next orders are given within this time after one is done. One pass serves all orders that end meanwhile.
inline constexpr TimeUs kRestoreSoonUs = 20'000;
static_assert(kRestoreSoonUs < kRestoreEveryUs);
// A holder may report its copy before the owner reports the shard: both collect changes for a window, and a message may
// be lost. The owner's copy is assumed lost only after this time.
inline constexpr TimeUs kOrphanAfterUs = 300'000;
static_assert(kOrphanAfterUs >= kInventoryWindowUs + 2 * kRepeatUs);
static_assert(kRestoreEveryUs < kOrderTimeoutUs);
// If no shard gets its copies for this time while a node has no room for a replica, more waiting does not help. It is
// the time for 64 GiB at 10 GB/s, as above.
inline constexpr TimeUs kStuckUs = 10'000'000;
static_assert(kStuckUs >= kOrderTimeoutUs, "an order has had its time before a step is released");
// Refusals closer together than this are one shortage. A refused order ends after kOrderTimeoutUs, and the next one may
// go to a node that takes as long to refuse it.
inline constexpr TimeUs kShortageGapUs = 25'000'000;
static_assert(kShortageGapUs > 2 * kOrderTimeoutUs + kRestoreEveryUs);
// The pause before an order to verify is repeated. A node reads its copies in seconds, and answers at the end.
inline constexpr TimeUs kVerifyRepeatUs = 10'000'000;
inline constexpr TimeUs kVerifyForgetUs = 60'000'000;  // after the asker's last question
static_assert(kVerifyForgetUs > 2 * kVerifyRepeatUs);

// Steps with disagreeing ranks in an announcement. A rank waits only for its last few steps.
inline constexpr size_t kDisagreementsMax = 16;

// Dropped steps that a leader remembers. Programs drop steps rarely.
inline constexpr size_t kDroppedMax = 16;

// ---- fetching

// A fetch waits this long for a holder that the data path has lost. A switch that converges again, or a link that is
// retrained, is usually back within a second. A caller's deadline may end the wait earlier.
inline constexpr TimeUs kLostHolderUs = 10'000'000;
static_assert(kLostHolderUs > 10 * kRepeatUs);

// A fetch without a leader fails after this time. Its callers have earlier deadlines of their own.
inline constexpr TimeUs kLocateTimeoutUs = 30'000'000;
// With storage, the answer may have to wait for another node that reads the shard from there: 256 GiB at 0.5 GB/s.
inline constexpr TimeUs kStorageLocateTimeoutUs = 600'000'000;

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LIMITS_H_
