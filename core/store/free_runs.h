// SPDX-License-Identifier: Apache-2.0
//
// Which chunks of an arena are free, as runs. A tree over the chunks, each node knowing the free run at its
// left end, at its right end, and the longest within: every call takes O(log chunks) whatever the
// fragmentation, and none allocates after the constructor. 12 bytes a node, two nodes a chunk rounded up to a
// power of two.
//
// One thread at a time.

#ifndef ROPETEAM_CORE_STORE_FREE_RUNS_H_
#define ROPETEAM_CORE_STORE_FREE_RUNS_H_

#include <cstdint>
#include <vector>

namespace ropeteam {

class FreeRuns {
 public:
  // All chunks free; at most arena::kChunksMax.
  explicit FreeRuns(uint32_t chunks);

  uint32_t free() const { return free_; }
  uint32_t longest() const { return nodes_[1].longest; }  // chunks of the longest free run

  // The lowest chunk at which a run of `count` free ones begins; 1 ≤ count ≤ longest().
  uint32_t FirstFit(uint32_t count) const;

  // Marks [first, first + count). Every chunk of it must have been in the other state, which is checked: allocating or
  // freeing a chunk twice is a bug.
  void Take(uint32_t first, uint32_t count);
  void Give(uint32_t first, uint32_t count);

  bool IsFree(uint32_t chunk) const;

 private:
  struct Node {
    uint32_t left = 0;   // free chunks from the left end on
    uint32_t right = 0;  // free chunks up to the right end
    uint32_t longest = 0;
  };
  // Sets the part of [first, last) that is in node `index`, which spans [begin, begin + span). If a node is
  // entirely free or entirely taken, that is valid for everything below it, and the nodes below may be out of date:
  // Spread() updates them when needed.
  void Set(uint32_t index, uint32_t begin, uint32_t span, uint32_t first, uint32_t last, bool free);
  void Spread(uint32_t index, uint32_t span);
  void Gather(uint32_t index, uint32_t span);

  uint32_t chunks_;
  uint32_t leaves_;  // chunks_ rounded up to a power of two; those beyond are never free
  uint32_t free_ = 0;
  std::vector<Node> nodes_;  // a heap: node 1 is the root, 2i and 2i+1 the halves of i
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_STORE_FREE_RUNS_H_
