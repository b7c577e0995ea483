// SPDX-License-Identifier: Apache-2.0
//
// Reads all sealed shards again and again, so that a damaged copy is found while the others are good. One pass
// reads every chunk of every sealed shard once, in the shards' order, in pieces: a piece is read by
// the driver's check threads, and the next one begins when the configured rate allows it. A chunk that does not match
// its checksum is repaired by the Fetcher, in place, from another node's copy. A chunk that is known to be bad is
// not read; its repair is tried again once a minute, because another node may hold a good copy by then.
//
// The tables of the arena are compared along the way (Store::HealTable), all of them every ten seconds: they are
// small, and a daemon that is killed while they are damaged loses shards.
//
// It never delays other work: one piece at a time, no lease on the shard (it may be released meanwhile, and the
// result is then ignored), no memory, no messages except those of a repair. A piece is one chunk at least, so
// with chunks of 64 MiB and more a piece occupies one check thread for some milliseconds.

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

  // Between two pieces at least, and so much of the rate in one: 25 wake-ups a second, and 4 MB at 100 MB/s.
  static constexpr TimeUs kPieceIntervalUs = 40'000;
  // Of one piece: many small shards must not become one long input.
  static constexpr size_t kPieceRangesMax = 256;
  // From the beginning of a pass to that of the next, where there is little to read.
  static constexpr TimeUs kPassIntervalUs = 10'000'000;
  // For the whole table, in steps of kTableStepChunks: 140 KB, some 30 us of the engine's thread.
  static constexpr TimeUs kTablePassUs = 10'000'000;
  static constexpr uint32_t kTableStepChunks = 1024;
  static constexpr uint64_t kTableBytesPerChunk = 136;
  static constexpr TimeUs kRepairAgainUs = 60'000'000;
  // The leader is told of a pass within this time; a small arena has many passes, not worth a report each.
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
  // Appends places from cursor_ on, and moves it behind them. Returns their bytes; 0 at the end of the pass.
  uint64_t NextPlaces(std::vector<Place>* places, std::vector<StartCheck::Range>* ranges,
                      std::vector<ShardId>* known_bad);
  void OnRead(const std::vector<Place>& places, uint64_t bytes, const std::vector<uint32_t>& bad);
  void EndPass();
  void HealTableStep();

  Parts& parts_;
  bool passing_ = false;
  bool reading_ = false;  // a piece is out
  Place cursor_;          // the next to read
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
