// SPDX-License-Identifier: Apache-2.0
//
// Pairs the rails of two nodes, and chooses the link of a peer for the next piece. Pure functions.

#ifndef ROPETEAM_TRANSPORT_RAILS_H_
#define ROPETEAM_TRANSPORT_RAILS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ropeteam {

struct RailPair {
  uint8_t local = 0, remote = 0;
  friend bool operator==(const RailPair&, const RailPair&) = default;
};

// The links between a node with `local` rails and one with `remote` rails, each at least 1: as many as the
// larger number, rail i with rail i modulo the other's number, so that every rail of either has one.
std::vector<RailPair> PairRails(size_t local, size_t remote);

// The input of the choice: one link.
struct LinkLoad {
  bool usable = false;  // up, and with room for another piece
  uint64_t mbps = 0;    // of the slower end; 0: unknown
  uint64_t bytes = 0;   // outstanding on its local rail, of all peers
};

// The link that would finish first with `length` more bytes: the least (bytes + length) / mbps. The first of
// equals; -1 when none is usable. A link of unknown speed counts as fast as the fastest of the others.
int ChooseLink(std::span<const LinkLoad> links, uint64_t length);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_RAILS_H_
