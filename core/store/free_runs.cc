// SPDX-License-Identifier: Apache-2.0
#include "core/store/free_runs.h"

#include <algorithm>
#include <bit>

#include "core/base/check.h"

namespace ropeteam {

FreeRuns::FreeRuns(uint32_t chunks)
    : chunks_(chunks), leaves_(std::bit_ceil(chunks)), nodes_(2 * size_t{leaves_}) {
  ROPETEAM_CHECK(chunks > 0);
  Give(0, chunks);
}

void FreeRuns::Spread(uint32_t index, uint32_t span) {
  const uint32_t half = span / 2;
  if (nodes_[index].longest == span) {
    nodes_[2 * index] = nodes_[2 * index + 1] = {half, half, half};
  } else if (nodes_[index].longest == 0) {
    nodes_[2 * index] = nodes_[2 * index + 1] = {};
  }
}

void FreeRuns::Gather(uint32_t index, uint32_t span) {
  const Node& low = nodes_[2 * index];
  const Node& high = nodes_[2 * index + 1];
  const uint32_t half = span / 2;
  Node& node = nodes_[index];
  node.left = low.left == half ? half + high.left : low.left;
  node.right = high.right == half ? half + low.right : high.right;
  node.longest = std::max({low.longest, high.longest, low.right + high.left});
}

void FreeRuns::Set(uint32_t index, uint32_t begin, uint32_t span, uint32_t first, uint32_t last, bool free) {
  const uint32_t end = begin + span;
  if (last <= begin || end <= first) return;
  Node& node = nodes_[index];
  if (first <= begin && end <= last) {
    ROPETEAM_CHECK(node.longest == (free ? 0 : span));
    node = free ? Node{span, span, span} : Node{};
    return;
  }
  Spread(index, span);
  Set(2 * index, begin, span / 2, first, last, free);
  Set(2 * index + 1, begin + span / 2, span / 2, first, last, free);
  Gather(index, span);
}

void FreeRuns::Take(uint32_t first, uint32_t count) {
  ROPETEAM_CHECK(count > 0 && first < chunks_ && count <= chunks_ - first);
  Set(1, 0, leaves_, first, first + count, false);
  free_ -= count;
}

void FreeRuns::Give(uint32_t first, uint32_t count) {
  ROPETEAM_CHECK(count > 0 && first < chunks_ && count <= chunks_ - first);
  Set(1, 0, leaves_, first, first + count, true);
  free_ += count;
}

uint32_t FreeRuns::FirstFit(uint32_t count) const {
  ROPETEAM_CHECK(count > 0 && count <= longest());
  uint32_t index = 1;
  uint32_t begin = 0;
  for (uint32_t span = leaves_; nodes_[index].longest != span; span /= 2) {
    const Node& low = nodes_[2 * index];
    const Node& high = nodes_[2 * index + 1];
    const uint32_t half = span / 2;
    if (low.longest >= count) {
      index = 2 * index;
    } else if (low.right + high.left >= count) {
      return begin + half - low.right;
    } else {
      index = 2 * index + 1;
      begin += half;
    }
  }
  return begin;
}

bool FreeRuns::IsFree(uint32_t chunk) const {
  ROPETEAM_CHECK(chunk < chunks_);
  uint32_t index = 1;
  uint32_t begin = 0;
  uint32_t span = leaves_;
  while (nodes_[index].longest != 0 && nodes_[index].longest != span) {
    span /= 2;
    index = 2 * index;
    if (chunk >= begin + span) {
      ++index;
      begin += span;
    }
  }
  return nodes_[index].longest != 0;
}

}  // namespace ropeteam
