// SPDX-License-Identifier: Apache-2.0

#include "transport/rails.h"

#include <algorithm>

namespace ropeteam {

std::vector<RailPair> PairRails(size_t local, size_t remote) {
  std::vector<RailPair> pairs;
  for (size_t i = 0; i < std::max(local, remote); i++)
    pairs.push_back({static_cast<uint8_t>(i % local), static_cast<uint8_t>(i % remote)});
  return pairs;
}

int ChooseLink(std::span<const LinkLoad> links, uint64_t length) {
  uint64_t fastest = 1;
  for (const LinkLoad& link : links) fastest = std::max(fastest, link.mbps);
  int best = -1;
  double best_time = 0;
  for (size_t i = 0; i < links.size(); i++) {
    const LinkLoad& link = links[i];
    if (!link.usable) continue;
    const double mbps = static_cast<double>(link.mbps != 0 ? link.mbps : fastest);
    const double time = static_cast<double>(link.bytes + length) / mbps;
    if (best >= 0 && time >= best_time) continue;
    best = static_cast<int>(i);
    best_time = time;
  }
  return best;
}

}  // namespace ropeteam
