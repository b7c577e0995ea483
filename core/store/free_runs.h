// SPDX-License-Identifier: Apache-2.0
//
// The free chunks of an arena, as runs. It is a tree over the chunks. Each node has the length of the free run at its
// left end, at its right end, and of the longest run within. Every call takes O(log chunks), whatever the
// fragmentation, and no call after the constructor allocates. A node takes 12 bytes, and there are two nodes per chunk,
// rounded up to a power of two.
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

  // The lowest chunk that begins a run of `count` free chunks; 1 ≤ count ≤ longest().
  uint32_t FirstFit(uint32_t count) const;

  // Marks [first, first + count). Every chunk in it must have been in the other state. This is checked, because
  // allocating or freeing a chunk twice is a bug.
  void Take(uint32_t first, uint32_t count);
  void Give(uint32_t first, uint32_t count);

  bool IsFree(uint32_t chunk) const;

 private:
  struct Node {
    uint32_t left = 0;   // free chunks from the left end on
    uint32_t right = 0;  // free chunks up to the right end
    uint32_t longest = 0;
  };
  // Sets the part of [first, last) that is in node `index`, which spans [begin, begin + span). If a node is entirely
  // free or entirely taken, this holds for all nodes below it, and those may be out of date. Spread() updates them when
  // needed.
  void Set(uint32_t index, uint32_t begin, uint32_t span, uint32_t first, uint32_t last, bool free);
  void Spread(uint32_t index, uint32_t span);
  void Gather(uint32_t index, uint32_t span);

  uint32_t chunks_;
  uint32_t leaves_;  // chunks_ rounded up to a power of two; the additional ones are never free
  uint32_t free_ = 0;
  std::vector<Node> nodes_;  // a heap: node 1 is the root, 2i and 2i+1 the halves of i
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_STORE_FREE_RUNS_H_
