// SPDX-License-Identifier: Apache-2.0
//
// The holder's side of ranged reads. It packs parts of a shard sealed here into bounce chunks of this arena; the
// reader's node gets them from there. The chunks that a part touches are checked against the shard's checksums during
// packing.
//
//     queued ──a bounce chunk is free──> packing ──all chunks match──> packed ──RangesClose──> gone
//                                           └──some do not──> refused (and repaired); gone
//
// When a reader leaves the view, all its parts end. Its gets may still read a bounce chunk, but their bytes are never
// used.

#ifndef ROPETEAM_CORE_ENGINE_RANGE_HOLDER_H_
#define ROPETEAM_CORE_ENGINE_RANGE_HOLDER_H_

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class RangeHolder {
 public:
  explicit RangeHolder(Parts* parts) : parts_(*parts) {}

  void OnOpen(NodeId from, RangesOpen open);
  void OnClose(NodeId from, const RangesClose& close);
  void OnView();
  void OnTimer();
  TimeUs NextTimer() const;
  uint64_t allocated_chunks() const { return bounces_; }

 private:
  // Bounce chunks: 128 MiB with the default chunk size, as much as is in transfer at once; and only a small part of the
  // arena.
  static constexpr uint64_t kBouncesMax = 32;
  static constexpr uint64_t kBouncePartMax = 16;
  static constexpr size_t kPackedMax = 1024;  // waiting parts included

  using Key = std::pair<NodeId, uint64_t>;  // the reader and its number for the part
  struct Packed {
    enum class State : uint8_t { kQueued, kPacking, kPacked } state = State::kQueued;
    RangesOpen open;
    RangesGrant grant;
    std::vector<Extent> bounce;
    Store::LeaseToken lease = 0;  // kPacking
    bool closed = false;          // kPacking: release it when the packing ends
    TimeUs heard = 0;
  };
  // The answer for a copy that is here; it packs nothing yet.
  RangesGrant Describe(const RangesOpen& open) const;
  void Refuse(const Key& key, Status why);
  void Pump();
  void Pack(const Key& key, Packed* packed);
  void OnPacked(const Key& key, const std::vector<uint32_t>& bad, const std::vector<EncryptedChunk>& packed);
  void Forget(const Key& key);
  void Release(const Key& key);

  Parts& parts_;
  std::map<Key, Packed> packed_;
  std::deque<Key> queue_;  // may contain keys that are gone
  uint64_t bounces_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_RANGE_HOLDER_H_
