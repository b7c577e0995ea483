// SPDX-License-Identifier: Apache-2.0
//
// Reads all sealed shards repeatedly, so that a damaged copy is found while other copies are still good. One pass reads
// every chunk of every sealed shard once, in the order of the shards, in pieces. The driver's check threads read a
// piece; the next piece begins when the configured rate allows it. If a chunk does not match its checksum, the Fetcher
// repairs it in place from another node's copy. A chunk that is known to be bad is not read. Its repair is tried again
// once a minute, because another node may hold a good copy by then.
//
// The tables of the arena are compared as well (Store::HealTable), all of them every ten seconds. They are small, and a
// daemon that is killed while they are damaged loses shards.
//
// The scrubber never delays other work. It reads one piece at a time and uses no memory. It takes no lease on the
// shard: if the shard is released meanwhile, the result is ignored. It sends no messages except those of a repair. A
// piece is at least one chunk, so chunks of 64 MiB and more occupy one check thread for some milliseconds.

#ifndef ROPETEAM_CORE_ENGINE_SCRUBBER_H_
#define ROPETEAM_CORE_ENGINE_SCRUBBER_H_

#include <cstdint>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Scrubber {
 public:
  // EngineConfig::scrub_bytes_per_s is the rate; 0: it does nothing.
  explicit Scrubber(Parts* parts) : parts_(*parts) {}

  void OnTimer();
  TimeUs NextTimer() const;
  ScrubReport Report() const;

  // The least time between two pieces; a piece has the bytes that the rate allows in it. That is 25 wake-ups a second,
  // and 4 MB per piece at 100 MB/s.
  static constexpr TimeUs kPieceIntervalUs = 40'000;
  // The most ranges in one piece: many small shards must not make one input long.
  static constexpr size_t kPieceRangesMax = 256;
  // The least time from the beginning of a pass to that of the next, for arenas with little to read.
  static constexpr TimeUs kPassIntervalUs = 10'000'000;
  // The time for the whole table, in steps of kTableStepChunks. A step reads 140 KB in some 30 us of the engine's
  // thread.
  static constexpr TimeUs kTablePassUs = 10'000'000;
  static constexpr uint32_t kTableStepChunks = 1024;
  static constexpr uint64_t kTableBytesPerChunk = 136;
  static constexpr TimeUs kRepairAgainUs = 60'000'000;
  // The leader gets a report of a pass within this time. A small arena has many passes, and they need no report each.
  static constexpr TimeUs kToldEveryUs = 60'000'000;
  static_assert(kPieceIntervalUs * 10 <= kPassIntervalUs);

 private:
  // A chunk of a shard that was sealed in this generation.
  struct Place {
    ShardId shard;
    uint64_t generation = 0;
    uint32_t chunk = 0;
  };

  TimeUs TimeFor(uint64_t bytes) const;
  void BeginPass();
  void ReadPiece();
  // Appends places from cursor_ on, and advances it past them. Returns their bytes; 0 at the end of the pass.
  uint64_t NextPlaces(std::vector<Place>* places, std::vector<StartCheck::Range>* ranges,
                      std::vector<ShardId>* known_bad);
  void OnRead(const std::vector<Place>& places, uint64_t bytes, const std::vector<uint32_t>& bad);
  void EndPass();
  void HealTableStep();

  Parts& parts_;
  bool passing_ = false;
  bool reading_ = false;  // a piece is being read
  Place cursor_;          // the next place to read
  TimeUs next_piece_ = 0;
  TimeUs pass_began_ = 0;
  uint64_t pass_bytes_ = 0;
  bool repair_again_ = false;  // in this pass
  TimeUs repaired_again_ = 0;
  uint32_t table_at_ = 0;
  TimeUs next_table_ = 0;
  TimeUs told_ = 0;

  uint64_t passes_ = 0;
  TimeUs last_ended_ = 0;
  TimeUs last_us_ = 0;
  uint64_t last_bytes_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_SCRUBBER_H_
