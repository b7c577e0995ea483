// SPDX-License-Identifier: Apache-2.0
//
// While a job key is being replaced (docs/security.md), a node has two keys. It encrypts its copies of the old one
// again with the new one, which is its first key, so that the old one can be removed. It begins when all members have
// the same first key. Before that, one node would undo what another did. One copy is encrypted at a time, the newest
// step first, at a limited rate, and only while no save or replica is being filled here: it needs free chunks for the
// copy, and evicts nothing for them.
//
// A kill leaves each copy under one of the two keys (Store::Replace()), and the next daemon goes on.

#ifndef ROPETEAM_CORE_ENGINE_REKEYER_H_
#define ROPETEAM_CORE_ENGINE_REKEYER_H_

#include <cstdint>
#include <optional>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Rekeyer {
 public:
  explicit Rekeyer(Parts* parts) : parts_(*parts) {}

  // Warns of copies whose keys are not here.
  void Begin() const;
  void OnTimer();
  TimeUs NextTimer() const;
  uint64_t reencrypted() const { return reencrypted_; }  // copies, since the daemon's start
  uint64_t left() const { return CountCopies().left; }   // copies to be encrypted again
  uint64_t unreadable() const { return CountCopies().unreadable; }

  // About a tenth of what one check thread can do.
  static constexpr uint64_t kBytesPerUs = 200;
  static constexpr TimeUs kLookUs = 1'000'000;
  // The time until copies that could not be encrypted are tried again.
  static constexpr TimeUs kAgainUs = 10'000'000;
  static constexpr TimeUs kToldEveryUs = 10'000'000;

 private:
  struct Copies {
    uint64_t left = 0;
    uint64_t unreadable = 0;
  };
  bool IsLeft(const SealedShard& shard) const;
  const Copies& CountCopies() const;
  void OnDone(const ShardId& shard, uint64_t bytes, const Status& status);

  Parts& parts_;
  bool running_ = false;
  bool failed_ = false;            // a copy of this pass
  std::optional<ShardId> cursor_;  // the last copy of this pass; a pass goes from the newest to the oldest
  TimeUs next_ = 0;
  TimeUs told_ = 0;
  uint64_t reencrypted_ = 0;
  mutable uint64_t counted_at_ = UINT64_MAX;  // Store::changes() at the last count
  mutable Copies counted_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_REKEYER_H_
