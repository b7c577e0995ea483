// SPDX-License-Identifier: Apache-2.0
//
// A set of ranks as a bitmap: 131,072 ranks take 16 KiB, and a scan of an empty one takes a microsecond.

#ifndef ROPETEAM_CORE_ENGINE_RANK_SET_H_
#define ROPETEAM_CORE_ENGINE_RANK_SET_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/check.h"
#include "core/base/ids.h"

namespace ropeteam::engine {

class RankSet {
 public:
  void Resize(uint32_t world_size) {
    words_.clear();
    count_ = 0;
    world_size_ = world_size;
  }
  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }
  bool contains(Rank rank) const { return !words_.empty() && (words_[rank / 64] >> (rank % 64) & 1) != 0; }

  void Set(Rank rank, bool in) {
    ROPETEAM_CHECK(rank < world_size_);
    if (contains(rank) == in) return;
    if (words_.empty()) words_.resize((size_t{world_size_} + 63) / 64);
    words_[rank / 64] ^= uint64_t{1} << (rank % 64);
    count_ += in ? 1 : static_cast<size_t>(-1);
  }

  template <typename Visit>
  void ForEach(Visit visit) const {
    if (empty()) return;
    for (size_t word = 0; word < words_.size(); ++word)
      for (uint64_t bits = words_[word]; bits != 0; bits &= bits - 1)
        visit(static_cast<Rank>(word * 64 + static_cast<size_t>(std::countr_zero(bits))));
  }

 private:
  std::vector<uint64_t> words_;  // empty until a rank is in the set
  uint32_t world_size_ = 0;
  size_t count_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_RANK_SET_H_
