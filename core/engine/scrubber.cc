// SPDX-License-Identifier: Apache-2.0
#include "core/engine/scrubber.h"

#include <algorithm>
#include <map>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

TimeUs Scrubber::TimeFor(uint64_t bytes) const {
  const uint64_t rate = parts_.context.config.scrub_bytes_per_s;
  ROPETEAM_CHECK(rate != 0);
  return static_cast<TimeUs>(static_cast<double>(bytes) * 1e6 / static_cast<double>(rate));
}

void Scrubber::OnTimer() {
  const Context& context = parts_.context;
  if (context.config.scrub_bytes_per_s == 0) return;
  if (next_table_ <= context.now) HealTableStep();
  if (reading_ || context.now < next_piece_) return;
  if (!passing_) BeginPass();
  ReadPiece();
}

TimeUs Scrubber::NextTimer() const {
  if (parts_.context.config.scrub_bytes_per_s == 0) return kNever;
  return reading_ ? next_table_ : std::min(next_table_, next_piece_);
}

void Scrubber::BeginPass() {
  ROPETEAM_CHECK(!passing_ && !reading_);
  passing_ = true;
  cursor_ = Place();
  pass_began_ = parts_.context.now;
  pass_bytes_ = 0;
  repair_again_ = repaired_again_ + kRepairAgainUs <= pass_began_;
  if (repair_again_) repaired_again_ = pass_began_;
}

void Scrubber::ReadPiece() {
  ROPETEAM_CHECK(passing_ && !reading_);
  std::vector<Place> places;
  std::vector<StartCheck::Range> ranges;
  std::vector<ShardId> known_bad;
  const uint64_t bytes = NextPlaces(&places, &ranges, &known_bad);
  ROPETEAM_CHECK(places.size() == ranges.size());
  if (places.empty()) {
    EndPass();
  } else {
    reading_ = true;
    next_piece_ = parts_.context.now + std::max(kPieceIntervalUs, TimeFor(bytes));
    parts_.transfers.Check(std::move(ranges),
                           [this, places = std::move(places), bytes](const std::vector<uint32_t>& bad) {
                             OnRead(places, bytes, bad);
                           });
  }
  // After the loop over the shards, because a repair may change them.
  for (const ShardId& id : known_bad) parts_.fetcher.Repair(id, {}, [](const Status&) {});
}

uint64_t Scrubber::NextPlaces(std::vector<Place>* places, std::vector<StartCheck::Range>* ranges,
                              std::vector<ShardId>* known_bad) {
  const Store& store = parts_.context.store;
  const uint64_t wanted = parts_.context.config.scrub_bytes_per_s * kPieceIntervalUs / 1'000'000;
  uint64_t bytes = 0;
  for (auto it = store.shards().lower_bound(cursor_.shard); it != store.shards().end(); ++it) {
    const auto& [id, shard] = *it;
    if (cursor_.shard != id || cursor_.generation != shard->generation) {
      cursor_ = {id, shard->generation, 0};
      if (repair_again_ && !shard->bad.empty()) known_bad->push_back(id);
    }
    for (; cursor_.chunk < shard->crcs.size(); ++cursor_.chunk) {
      if (std::binary_search(shard->bad.begin(), shard->bad.end(), cursor_.chunk)) continue;
      const StartCheck::Range range =
          RangeOf(store, shard->extents, shard->meta.stream_bytes, cursor_.chunk, shard->crcs[cursor_.chunk]);
      if (!places->empty() && (bytes + range.length > wanted || places->size() == kPieceRangesMax))
        return bytes;
      places->push_back(cursor_);
      ranges->push_back(range);
      bytes += range.length;
    }
  }
  return bytes;
}

void Scrubber::OnRead(const std::vector<Place>& places, uint64_t bytes, const std::vector<uint32_t>& bad) {
  ROPETEAM_CHECK(reading_ && passing_);
  reading_ = false;
  pass_bytes_ += bytes;
  std::map<ShardId, std::vector<uint32_t>> suspects;
  for (const uint32_t index : bad) {
    ROPETEAM_CHECK(index < places.size());
    const Place& place = places[index];
    const SealedShard* shard = parts_.context.store.Find(place.shard);
    // The shard was released meanwhile, so its chunks may hold anything.
    if (shard == nullptr || shard->generation != place.generation) continue;
    suspects[place.shard].push_back(place.chunk);
  }
  for (const auto& [id, chunks] : suspects) {
    LOG_WARNING("scrub found chunks that do not match their checksums, %zu of %s", chunks.size(),
                id.ToString().c_str());
    parts_.fetcher.Repair(id, chunks, [](const Status&) {});
  }
}

void Scrubber::EndPass() {
  ROPETEAM_CHECK(passing_ && !reading_);
  Context& context = parts_.context;
  passing_ = false;
  ++passes_;
  last_ended_ = context.now;
  last_us_ = context.now - pass_began_;
  last_bytes_ = pass_bytes_;
  next_piece_ = std::max(context.now + kPieceIntervalUs, pass_began_ + kPassIntervalUs);
  if (passes_ == 1 || told_ + kToldEveryUs <= context.now) {
    told_ = context.now;
    context.counters_dirty = true;
  }
  LOG_DEBUG("scrub pass %llu ended bytes %llu ms %llu", static_cast<unsigned long long>(passes_),
            static_cast<unsigned long long>(last_bytes_), static_cast<unsigned long long>(last_us_ / 1000));
}

void Scrubber::HealTableStep() {
  Context& context = parts_.context;
  const uint64_t chunks = context.store.chunks_total();
  const uint64_t steps = (chunks + kTableStepChunks - 1) / kTableStepChunks;
  ROPETEAM_CHECK(steps != 0 && table_at_ < chunks);
  if (context.store.HealTable(table_at_, kTableStepChunks) != 0) context.counters_dirty = true;
  table_at_ = chunks - table_at_ > kTableStepChunks ? table_at_ + kTableStepChunks : 0;
  next_table_ = context.now + std::max(kTablePassUs / steps, TimeFor(kTableStepChunks * kTableBytesPerChunk));
}

ScrubReport Scrubber::Report() const {
  ScrubReport report;
  report.bytes_per_s = parts_.context.config.scrub_bytes_per_s;
  report.passes = passes_;
  if (passes_ == 0) return report;
  report.pass_ended_us_ago = parts_.context.now - last_ended_;
  report.pass_us = last_us_;
  report.pass_bytes = last_bytes_;
  return report;
}

}  // namespace ropeteam::engine
