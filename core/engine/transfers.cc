// SPDX-License-Identifier: Apache-2.0
#include "core/engine/transfers.h"

#include <algorithm>
#include <utility>

namespace ropeteam::engine {

uint64_t Transfers::Start(Priority priority, StartTransfer transfer, Done done) {
  const uint64_t tag = transfer.tag = next_tag_++;
  ROPETEAM_CHECK(transfer.get == (priority == Priority::kFetch));
  ROPETEAM_CHECK(transfer.peer != kNoNode && transfer.peer != context_.config.self && transfer.length != 0);
  ROPETEAM_CHECK(!transfer.get || transfer.buffer == 0);  // gets land in the arena
  waiting_[static_cast<size_t>(priority)].push_back({transfer, std::move(done)});
  Pump();
  return tag;
}

bool Transfers::Withdraw(uint64_t tag) {
  for (std::deque<Waiting>& queue : waiting_)
    if (std::erase_if(queue, [tag](const Waiting& each) { return each.transfer.tag == tag; }) != 0)
      return true;
  ROPETEAM_CHECK(running_.contains(tag));
  return false;
}

void Transfers::Pump() {
  for (size_t p = 0; p < kPriorities; ++p) {
    while (!waiting_[p].empty() && running_.size() < kOutstandingMax) {
      // Behind it wait puts only: fetches have a queue of their own.
      if (!waiting_[p].front().transfer.get && !context_.has_lease()) break;
      const bool background = static_cast<Priority>(p) == Priority::kBackground;
      if (background && running_background_ >= kBackgroundOutstandingMax) break;
      Waiting next = std::move(waiting_[p].front());
      waiting_[p].pop_front();
      running_background_ += background ? 1 : 0;
      // The one place where a put leaves.
      ROPETEAM_CHECK(next.transfer.get || context_.has_lease());
      const bool fresh =
          running_.emplace(next.transfer.tag, Running{static_cast<Priority>(p), std::move(next.done)}).second;
      ROPETEAM_CHECK(fresh && running_background_ <= running_.size());
      context_.out.transfers.push_back(next.transfer);
    }
  }
}

void Transfers::OnDone(uint64_t tag, Code code) {
  const auto running = running_.find(tag);
  ROPETEAM_CHECK(running != running_.end());  // each completes once
  Running finished = std::move(running->second);
  running_.erase(running);
  if (finished.priority == Priority::kBackground) {
    ROPETEAM_CHECK(running_background_ > 0);
    --running_background_;
  }
  finished.done(code);
  Pump();
}

void Transfers::Check(std::vector<StartCheck::Range> ranges, Checked checked) {
  const uint64_t tag = next_tag_++;
  ROPETEAM_CHECK(!ranges.empty());
  for (const StartCheck::Range& range : ranges) ROPETEAM_CHECK(range.length != 0);
  checking_.emplace(tag, Checking{ranges.size(), std::move(checked)});
  context_.out.checks.push_back({tag, std::move(ranges)});
}

void Transfers::OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad) {
  const auto checking = checking_.find(tag);
  ROPETEAM_CHECK(checking != checking_.end());  // each is answered once
  const Checking finished = std::move(checking->second);
  checking_.erase(checking);
  for (const uint32_t index : bad) ROPETEAM_CHECK(index < finished.ranges);
  finished.checked(bad);
}

StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc) {
  ROPETEAM_CHECK(index < ChunksFor(stream_bytes, store.chunk_bytes()));
  return {store.chunk_offset(ChunkAt(extents, index)), ChunkLength(stream_bytes, store.chunk_bytes(), index),
          crc};
}

}  // namespace ropeteam::engine
