// SPDX-License-Identifier: Apache-2.0
#include "core/engine/outgoing_copy.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "core/base/check.h"

namespace ropeteam::engine {

const SaveDirectInput* CopySource::FindDevice(uint32_t chunk) const {
  const auto behind = device.upper_bound(chunk);
  if (behind == device.begin()) return nullptr;
  const SaveDirectInput& before = std::prev(behind)->second;
  return chunk - before.first < before.count ? &before : nullptr;
}

// The table in the header.
constexpr OutgoingCopy::Transition OutgoingCopy::kTransitions[] = {
    {State::kReserving, Event::kGranted, State::kSending},
    {State::kReserving, Event::kHolderHasIt, State::kSending},
    {State::kSending, Event::kGranted, State::kSending},
    {State::kSending, Event::kHolderHasIt, State::kSending},
    {State::kSending, Event::kComplete, State::kSealing},
    {State::kSealing, Event::kMatched, State::kGone},
    {State::kSealing, Event::kMismatched, State::kSending},
    {State::kReserving, Event::kDropped, State::kDropping},
    {State::kSending, Event::kDropped, State::kDropping},
    {State::kSealing, Event::kDropped, State::kDropping},
    {State::kDropping, Event::kQuiet, State::kGone},
};

void OutgoingCopy::On(Event event) {
  CheckState();
  const auto legal = std::find_if(std::begin(kTransitions), std::end(kTransitions), [&](const auto& each) {
    return each.from == state_ && each.event == event;
  });
  ROPETEAM_CHECK(legal != std::end(kTransitions));
  state_ = legal->to;
  CheckState();
}

void OutgoingCopy::CheckState() const {
  ROPETEAM_CHECK(device_on_way_ <= on_way_ && on_way_ <= kOutstandingMax);
  ROPETEAM_CHECK(on_way_ + arrived_ <= chunks_.size());
  ROPETEAM_CHECK(unreported_.size() <= arrived_);
  switch (state_) {
    case State::kReserving:
      // No byte leaves this node before the holder has granted chunks for it.
      ROPETEAM_CHECK(on_way_ == 0 && arrived_ == 0 && attempt_ == 0);
      break;
    case State::kSending:
      ROPETEAM_CHECK(holder_has_it_ || on_way_ + arrived_ <= granted_);
      break;
    case State::kSealing:
      ROPETEAM_CHECK(on_way_ == 0 && unreported_.empty());
      break;
    case State::kDropping:
      break;
    case State::kGone:
      ROPETEAM_CHECK(on_way_ == 0);
      break;
  }
}

bool OutgoingCopy::Legal(Chunk from, Chunk to) {
  switch (from) {
    case Chunk::kWaiting:
      return to == Chunk::kFromArena || to == Chunk::kFromDevice;
    case Chunk::kFromArena:
      return to == Chunk::kUnreported || to == Chunk::kWaiting;
    case Chunk::kFromDevice:
      return to == Chunk::kUnreported || to == Chunk::kUnsummed || to == Chunk::kWaiting;
    case Chunk::kUnsummed:
      return to == Chunk::kUnreported || to == Chunk::kReported;
    case Chunk::kUnreported:
      return to == Chunk::kReported;
    case Chunk::kReported:
      return to == Chunk::kWaiting;
  }
  return false;
}

void OutgoingCopy::Move(uint32_t index, Chunk to) {
  ROPETEAM_CHECK(index < chunks_.size());
  ChunkOnWay& chunk = chunks_[index];
  const Chunk from = chunk.state;
  ROPETEAM_CHECK(Legal(from, to));
  on_way_ = on_way_ + OnWay(to) - OnWay(from);
  device_on_way_ = device_on_way_ + (to == Chunk::kFromDevice) - (from == Chunk::kFromDevice);
  arrived_ = arrived_ + HasArrived(to) - HasArrived(from);
  if (!OnWay(to)) chunk.transfer = 0;
  if (OnWay(to)) chunk.device = to == Chunk::kFromDevice;
  if (to == Chunk::kUnreported) unreported_.push_back(index);
  if (to == Chunk::kWaiting) cursor_ = std::min(cursor_, index);
  chunk.state = to;
}

void OutgoingCopy::Resize(size_t chunks) {
  ROPETEAM_CHECK(chunks != 0);
  // A sealed stream may be shorter than the save's reservation. No chunk after its end was ever put.
  for (size_t index = chunks; index < chunks_.size(); ++index)
    ROPETEAM_CHECK(chunks_[index].state == Chunk::kWaiting);
  chunks_.resize(chunks);
}

void OutgoingCopy::Granted(uint64_t reservation, uint64_t chunks_begin, const std::vector<Extent>& extents) {
  ROPETEAM_CHECK(state_ == State::kReserving || state_ == State::kSending);
  ROPETEAM_CHECK(reservation_ == 0 || reservation_ == reservation);
  reservation_ = reservation;
  const uint64_t chunks = ChunkCount(extents);
  if (chunks < granted_) return;
  chunks_begin_ = chunks_begin;
  extents_ = extents;
  granted_ = chunks;
  On(Event::kGranted);
}

void OutgoingCopy::HolderHasIt() {
  holder_has_it_ = true;
  On(Event::kHolderHasIt);
}

void OutgoingCopy::ChecksumsKnown(uint32_t first, uint32_t count) {
  const size_t end = std::min<size_t>(chunks_.size(), size_t{first} + count);
  for (size_t chunk = first; chunk < end; ++chunk)
    if (chunks_[chunk].state == Chunk::kUnsummed) Move(static_cast<uint32_t>(chunk), Chunk::kUnreported);
}

void OutgoingCopy::PutArrived(uint32_t chunk, bool checksum_known) {
  // A chunk put from the arena already has its checksum.
  ROPETEAM_CHECK(OnWay(this->chunk(chunk)));
  ROPETEAM_CHECK(checksum_known || this->chunk(chunk) == Chunk::kFromDevice);
  Move(chunk, checksum_known ? Chunk::kUnreported : Chunk::kUnsummed);
}

void OutgoingCopy::PutNotSent(uint32_t chunk) {
  ROPETEAM_CHECK(OnWay(this->chunk(chunk)));
  Move(chunk, Chunk::kWaiting);
}

void OutgoingCopy::PutFailed(uint32_t chunk) {
  ROPETEAM_CHECK(OnWay(this->chunk(chunk)));
  put_failed_ = true;
  Move(chunk, Chunk::kWaiting);
}

void OutgoingCopy::Withdraw(bool device_only, CopyEffects* effects) {
  for (uint32_t index = 0; index < chunks_.size() && on_way_ != 0; ++index) {
    const ChunkOnWay& chunk = chunks_[index];
    if (!OnWay(chunk.state) || (device_only && chunk.state != Chunk::kFromDevice)) continue;
    ROPETEAM_CHECK(chunk.transfer != 0);
    if (effects->Withdraw(chunk.transfer)) Move(index, Chunk::kWaiting);
  }
}

void OutgoingCopy::WithdrawDevicePuts(CopyEffects* effects) {
  if (device_on_way_ != 0) Withdraw(true, effects);
}

void OutgoingCopy::Drop(CopyEffects* effects) {
  ROPETEAM_CHECK(active());
  Withdraw(false, effects);
  On(Event::kDropped);
}

void OutgoingCopy::Matched() {
  ROPETEAM_CHECK(holder_has_it_ || arrived_ == chunks_.size());
  On(Event::kMatched);
}

size_t OutgoingCopy::Mismatched(const std::vector<uint32_t>& bad, std::vector<uint32_t>* from_arena) {
  ROPETEAM_CHECK(state_ == State::kSealing);
  if (holder_has_it_) return 0;  // the bytes there are not from this copy
  std::set<uint32_t> again;
  for (const uint32_t index : bad)
    if (index < chunks_.size()) again.insert(index);
  if (again.empty()) return 0;
  from_arena->clear();
  for (const uint32_t index : again)
    if (!chunks_[index].device) from_arena->push_back(index);
  // A program may have written to device memory after its put, if nothing waited for the put. The arena's bytes do not
  // change.
  if (!from_arena->empty() && rounds_bad_ == kRoundsBadMax) return 0;
  rounds_bad_ += from_arena->empty() ? 0 : 1;
  for (const uint32_t index : again) Move(index, Chunk::kWaiting);
  ROPETEAM_CHECK(arrived_ + again.size() == chunks_.size());
  ++attempt_;
  On(Event::kMismatched);
  return again.size();
}

void OutgoingCopy::Advance(TimeUs now, const CopySource& source, CopyEffects* effects) {
  ROPETEAM_CHECK(state_ != State::kGone);
  if (state_ == State::kDropping) {
    if (on_way_ != 0) return;
    effects->SendAbort(put_failed_);
    return On(Event::kQuiet);
  }
  ROPETEAM_CHECK(!put_failed_);  // the caller drops a copy whose put has failed
  Resize(source.ready.size());
  const bool enough = holder_has_it_ || granted_ >= chunks_.size();
  if (!enough && (asked_for_ < chunks_.size() || next_send_ <= now)) {
    asked_for_ = chunks_.size();
    next_send_ = now + kRepeatUs;
    effects->SendReserve(asked_for_);
  }
  if (state_ == State::kSending) {
    Report(effects);
    if (!holder_has_it_) StartPuts(source, effects);
    const bool all_there = holder_has_it_ || arrived_ == chunks_.size();
    if (source.sealed && enough && all_there && on_way_ == 0) {
      TellAllBySeal();
      On(Event::kComplete);
      next_send_ = 0;
    }
  }
  if (state_ == State::kSealing && next_send_ <= now) {
    next_send_ = now + kRepeatUs;
    effects->SendSeal(attempt_);
  }
  CheckState();
}

void OutgoingCopy::StartPuts(const CopySource& source, CopyEffects* effects) {
  while (cursor_ < chunks_.size() && chunks_[cursor_].state != Chunk::kWaiting) ++cursor_;
  for (uint32_t index = cursor_; index < chunks_.size() && index < granted_; ++index) {
    if (on_way_ == kOutstandingMax) return;
    if (chunks_[index].state != Chunk::kWaiting) continue;
    // Prefer the arena if it has the bytes: the checksum is of those.
    const SaveDirectInput* device = source.ready[index] ? nullptr : source.FindDevice(index);
    if (device == nullptr && (source.puts_wait || !source.ready[index])) continue;
    Move(index, device != nullptr ? Chunk::kFromDevice : Chunk::kFromArena);
    chunks_[index].transfer = effects->StartPut(index, device);
    ROPETEAM_CHECK(chunks_[index].transfer != 0);
  }
}

// Only a hint, so that a save is checked as it arrives. The rest is checked at the seal.
void OutgoingCopy::Report(CopyEffects* effects) {
  if (unreported_.size() < kArrivedBatch) return;
  for (const uint32_t index : unreported_) Move(index, Chunk::kReported);
  effects->SendArrived(unreported_);
  unreported_.clear();
}

void OutgoingCopy::TellAllBySeal() {
  for (uint32_t index = 0; index < chunks_.size(); ++index) {
    const Chunk state = chunks_[index].state;
    if (state == Chunk::kUnsummed || state == Chunk::kUnreported) Move(index, Chunk::kReported);
  }
  unreported_.clear();
}

OutgoingCopy::Chunk OutgoingCopy::chunk(uint32_t index) const {
  ROPETEAM_CHECK(index < chunks_.size());
  return chunks_[index].state;
}

TimeUs OutgoingCopy::NextSend() const {
  switch (state_) {
    case State::kReserving:
    case State::kSealing:
      return next_send_;
    case State::kSending:
      return holder_has_it_ || granted_ >= chunks_.size() ? kNever : next_send_;
    case State::kDropping:
    case State::kGone:
      return kNever;
  }
  return kNever;
}

void OutgoingCopy::CheckInvariants() const {
  CheckState();
  uint32_t on_way = 0;
  uint32_t device_on_way = 0;
  uint32_t arrived = 0;
  size_t unreported = 0;
  for (uint32_t index = 0; index < chunks_.size(); ++index) {
    const ChunkOnWay& chunk = chunks_[index];
    on_way += OnWay(chunk.state) ? 1 : 0;
    device_on_way += chunk.state == Chunk::kFromDevice ? 1 : 0;
    arrived += HasArrived(chunk.state) ? 1 : 0;
    unreported += chunk.state == Chunk::kUnreported ? 1 : 0;
    ROPETEAM_CHECK(OnWay(chunk.state) == (chunk.transfer != 0));
    ROPETEAM_CHECK(chunk.state == Chunk::kWaiting || index < granted_);
    ROPETEAM_CHECK(index >= cursor_ || chunk.state != Chunk::kWaiting);
  }
  ROPETEAM_CHECK(on_way == on_way_ && device_on_way == device_on_way_ && arrived == arrived_);
  ROPETEAM_CHECK(unreported == unreported_.size());
  for (const uint32_t index : unreported_) ROPETEAM_CHECK(chunk(index) == Chunk::kUnreported);
}

}  // namespace ropeteam::engine
