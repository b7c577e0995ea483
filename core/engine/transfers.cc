// SPDX-License-Identifier: Apache-2.0
#include "core/engine/transfers.h"

#include <algorithm>
#include <utility>

namespace ropeteam::engine {

uint64_t Transfers::Start(Priority priority, StartTransfer transfer, Done done) {
  const uint64_t tag = transfer.tag = next_tag_++;
  ROPETEAM_CHECK(transfer.get == (priority == Priority::kFetch));
  waiting_[static_cast<size_t>(priority)].push_back({transfer, std::move(done)});
  Pump();
  return tag;
}

bool Transfers::Withdraw(uint64_t tag) {
  for (std::deque<Waiting>& queue : waiting_)
    if (std::erase_if(queue, [tag](const Waiting& each) { return each.transfer.tag == tag; }) != 0)
      return true;
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
      running_.emplace(next.transfer.tag, Running{static_cast<Priority>(p), std::move(next.done)});
      context_.out.transfers.push_back(next.transfer);
    }
  }
}

void Transfers::OnDone(uint64_t tag, Code code) {
  const auto running = running_.find(tag);
  ROPETEAM_CHECK(running != running_.end());  // each completes once
  Running finished = std::move(running->second);
  running_.erase(running);
  if (finished.priority == Priority::kBackground) --running_background_;
  finished.done(code);
  Pump();
}

void Transfers::Check(std::vector<StartCheck::Range> ranges, Checked checked) {
  const uint64_t tag = next_tag_++;
  checking_.emplace(tag, std::move(checked));
  context_.out.checks.push_back({tag, std::move(ranges)});
}

void Transfers::OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad) {
  const auto checking = checking_.find(tag);
  ROPETEAM_CHECK(checking != checking_.end());
  const Checked checked = std::move(checking->second);
  checking_.erase(checking);
  checked(bad);
}

StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc) {
  return {store.chunk_offset(ChunkAt(extents, index)), ChunkLength(stream_bytes, store.chunk_bytes(), index),
          crc};
}

}  // namespace ropeteam::engine
