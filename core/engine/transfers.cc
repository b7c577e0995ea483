// SPDX-License-Identifier: Apache-2.0
#include "core/engine/transfers.h"

#include <algorithm>
#include <utility>

namespace ropeteam::engine {

Transfers::Transfers(Context* context) : context_(*context) {
  if (!context_.config.encrypts()) return;
  const Store& store = context_.store;
  const uint64_t chunks = std::min(
      {kBounceBytes / store.chunk_bytes(), store.chunks_total() / kBouncePartMax, uint64_t{kOutstandingMax}});
  AddBounces(std::max<uint64_t>(chunks, 2));
}

// An adopted arena has room for them: the previous engine had as many bounce chunks and did not seal them.
void Transfers::AddBounces(size_t count) {
  while (bounces_.size() < count) {
    const Result<std::vector<Extent>> extents = context_.store.Allocate(1);
    if (!extents.ok()) return;
    bounces_.push_back({extents->front().first, {}, false, {}, 0, 0});
  }
}

uint64_t Transfers::Start(Priority priority, StartTransfer transfer, Done done,
                          std::optional<Plaintext> plaintext) {
  const uint64_t tag = transfer.tag = next_tag_++;
  ROPETEAM_CHECK(transfer.get == (priority == Priority::kFetch));
  ROPETEAM_CHECK(transfer.peer != kNoNode && transfer.peer != context_.config.self && transfer.length != 0);
  ROPETEAM_CHECK(!transfer.get || transfer.buffer == 0);  // gets land in the arena
  ROPETEAM_CHECK(!plaintext || (!transfer.get && transfer.buffer == 0 && context_.config.encrypts()));
  waiting_[static_cast<size_t>(priority)].push_back({transfer, std::move(done), plaintext, nullptr});
  Pump();
  return tag;
}

bool Transfers::Withdraw(uint64_t tag) {
  for (std::deque<Waiting>& queue : waiting_) {
    const auto at = std::find_if(queue.begin(), queue.end(),
                                 [tag](const Waiting& each) { return each.transfer.tag == tag; });
    if (at == queue.end()) continue;
    if (at->bounce != nullptr) --at->bounce->users;
    queue.erase(at);
    return true;
  }
  ROPETEAM_CHECK(running_.contains(tag));
  return false;
}

// Returns a bounce chunk that already has this content, or else the least recently used one that no transfer uses.
Transfers::Bounce* Transfers::BounceFor(const Plaintext& plaintext) {
  Bounce* place = nullptr;
  for (Bounce& bounce : bounces_) {
    if (bounce.holds && bounce.holds->shard == plaintext.shard && bounce.holds->chunk == plaintext.chunk &&
        bounce.holds->salt == plaintext.salt && bounce.holds->crc == plaintext.crc)
      return &bounce;
    if (bounce.users == 0 && !bounce.encrypting && (place == nullptr || bounce.wanted < place->wanted))
      place = &bounce;
  }
  if (place != nullptr) place->holds.reset();
  return place;
}

void Transfers::Prepare(Priority priority) {
  if (bounces_.empty()) AddBounces(1);
  size_t looked_at = 0;
  const size_t looked_at_max =
      priority == Priority::kBackground ? kBackgroundOutstandingMax : kOutstandingMax;
  for (Waiting& waiting : waiting_[static_cast<size_t>(priority)]) {
    if (looked_at++ == looked_at_max) return;
    if (!waiting.plaintext || waiting.bounce != nullptr) continue;
    const Plaintext& plaintext = *waiting.plaintext;
    Bounce* bounce = BounceFor(plaintext);
    if (bounce == nullptr) return;
    waiting.bounce = bounce;
    ++bounce->users;
    bounce->wanted = ++wanted_;
    const uint64_t from =
        std::exchange(waiting.transfer.local_offset, context_.store.chunk_offset(bounce->place));
    if (bounce->holds) continue;
    bounce->holds = plaintext;
    bounce->encrypting = true;
    StartCheck::Range range{from, waiting.transfer.length, plaintext.crc, ChunkCipher()};
    *range.cipher = {kPlaintext,
                     context_.config.key(),
                     waiting.transfer.local_offset,
                     plaintext.shard,
                     plaintext.chunk,
                     plaintext.salt,
                     {}};
    Encrypt({range},
            [this, bounce](const std::vector<uint32_t>& bad, const std::vector<EncryptedChunk>& encrypted) {
              OnBounced(bounce, bad.empty() && encrypted.size() == 1,
                        encrypted.empty() ? EncryptedChunk() : encrypted[0]);
            });
  }
}

void Transfers::OnBounced(Bounce* bounce, bool good, const EncryptedChunk& encrypted) {
  ROPETEAM_CHECK(bounce->encrypting);
  bounce->encrypting = false;
  bounce->encrypted = encrypted;
  std::vector<Done> failed;
  if (!good) {
    bounce->holds.reset();
    for (std::deque<Waiting>& queue : waiting_)
      std::erase_if(queue, [&](Waiting& waiting) {
        if (waiting.bounce != bounce) return false;
        failed.push_back(std::move(waiting.done));
        return true;
      });
    bounce->users = 0;  // no transfer runs from a bounce chunk without content
  }
  for (const Done& done : failed) done(Code::kCorrupt, nullptr);
  Pump();
}

void Transfers::Pump() {
  for (size_t p = 0; p < kPriorities; ++p) {
    if (context_.config.encrypts()) Prepare(static_cast<Priority>(p));
    while (!waiting_[p].empty() && running_.size() < kOutstandingMax) {
      const Waiting& front = waiting_[p].front();
      // Only puts wait behind it: fetches have a queue of their own.
      if (!front.transfer.get && !context_.has_lease()) break;
      if (front.plaintext && (front.bounce == nullptr || front.bounce->encrypting)) break;
      const bool background = static_cast<Priority>(p) == Priority::kBackground;
      if (background && running_background_ >= kBackgroundOutstandingMax) break;
      Waiting next = std::move(waiting_[p].front());
      waiting_[p].pop_front();
      running_background_ += background ? 1 : 0;
      // The only place where a put is started.
      ROPETEAM_CHECK(next.transfer.get || context_.has_lease());
      ROPETEAM_CHECK(next.plaintext.has_value() == (next.bounce != nullptr));
      const bool fresh = running_
                             .emplace(next.transfer.tag,
                                      Running{static_cast<Priority>(p), std::move(next.done), next.bounce})
                             .second;
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
  if (finished.bounce != nullptr) {
    ROPETEAM_CHECK(finished.bounce->users > 0 && !finished.bounce->encrypting);
    --finished.bounce->users;
    const EncryptedChunk encrypted = finished.bounce->encrypted;
    finished.done(code, &encrypted);
  } else {
    finished.done(code, nullptr);
  }
  Pump();
}

void Transfers::Check(std::vector<StartCheck::Range> ranges, Checked checked) {
  Encrypt(std::move(ranges),
          [checked = std::move(checked)](const std::vector<uint32_t>& bad, const auto&) { checked(bad); });
}

void Transfers::Encrypt(std::vector<StartCheck::Range> ranges, Encrypted encrypted) {
  const uint64_t tag = next_tag_++;
  ROPETEAM_CHECK(!ranges.empty());
  for (const StartCheck::Range& range : ranges) ROPETEAM_CHECK(range.length != 0);
  checking_.emplace(tag, Checking{ranges.size(), std::move(encrypted)});
  context_.out.checks.push_back({tag, std::move(ranges)});
}

void Transfers::OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad,
                            const std::vector<EncryptedChunk>& encrypted) {
  const auto checking = checking_.find(tag);
  ROPETEAM_CHECK(checking != checking_.end());  // each is answered once
  const Checking finished = std::move(checking->second);
  checking_.erase(checking);
  for (const uint32_t index : bad) ROPETEAM_CHECK(index < finished.ranges);
  ROPETEAM_CHECK(encrypted.empty() || encrypted.size() == finished.ranges);
  finished.checked(bad, encrypted);
}

StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc) {
  ROPETEAM_CHECK(index < ChunksFor(stream_bytes, store.chunk_bytes()));
  return {store.chunk_offset(ChunkAt(extents, index)), ChunkLength(stream_bytes, store.chunk_bytes(), index),
          crc};
}

}  // namespace ropeteam::engine
