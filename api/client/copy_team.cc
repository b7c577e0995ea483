// SPDX-License-Identifier: Apache-2.0
#include "api/client/copy_team.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>

#include "api/client/signals_blocked.h"
#include "core/base/check.h"
#include "core/base/checksum.h"
#include "core/base/log.h"

namespace ropeteam::client {
namespace {

// How long a thread spins before it sleeps: a helper for the next put, the caller for a helper's last piece.
// A Python program needs 10 to 20 microseconds between two puts of a save. A sleeping helper needs about as
// long to wake up.
constexpr std::chrono::microseconds kLook{60};
// If possible, a piece ends at a page boundary of its target, so that only whole lines bypass the cache.
constexpr uint64_t kPieceAlignment = 4096;

inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Condition>
bool LookFor(Condition&& holds) {
  constexpr int kLooksPerClock = 32;
  const auto end = std::chrono::steady_clock::now() + kLook;
  do {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (holds()) return true;
      Relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void Copy(std::byte* target, const ropeteam_part_t* part, uint64_t offset, CopyTeam::Piece* piece) {
  uint32_t crc = 0;
  for (uint64_t left = piece->bytes; left > 0; ++part, offset = 0) {
    const uint64_t length = std::min(left, part->length - offset);
    const std::byte* source = static_cast<const std::byte*>(part->data) + offset;
    if (piece->checksum) {
      crc = CopyCrc32c(target, source, length, crc);
    } else {
      CopyNonTemporal(target, source, length);
    }
    target += length;
    left -= length;
  }
  piece->crc = crc;
}

}  // namespace

CopyTeam::CopyTeam(uint32_t threads) : threads_(threads) {
  ROPETEAM_CHECK(threads >= 1 && threads <= kCopyThreadsMax);
}

CopyTeam::~CopyTeam() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  for (std::thread& helper : helpers_) helper.join();
}

void CopyTeam::StartHelpers() {
  const SignalsBlocked blocked;
  started_ = true;
  try {
    helpers_.reserve(threads_ - 1);
    while (helpers_.size() + 1 < threads_) {
      helpers_.emplace_back(&CopyTeam::Run, this);
      pthread_setname_np(helpers_.back().native_handle(), "ropeteam-copy");  // for top and the tests
    }
  } catch (const std::exception& error) {
    // The helpers that have started do the work, and without any the caller does it alone.
    LOG_WARNING("threads for copies %zu of %u %s", helpers_.size() + 1, threads_, error.what());
  }
}

bool CopyTeam::HasWork() const { return begun_.load() != handed_out_.load(); }

void CopyTeam::Run() {
  for (;;) {
    while (CopyNext()) {
    }
    if (LookFor([this] { return HasWork(); })) continue;
    std::unique_lock lock(mutex_);
    while (!stop_) {
      // Set before the last check: if a piece is handed out after the check, its caller sees the mark.
      helpers_sleep_ = true;
      if (HasWork()) break;
      wake_.wait(lock);
    }
    if (stop_) return;
  }
}

bool CopyTeam::CopyNext() {
  uint64_t number = begun_.load();
  do {
    if (number == handed_out_.load()) return false;
  } while (!begun_.compare_exchange_weak(number, number + 1));
  Slot& slot = SlotOf(number);
  Copy(slot.target, slot.part, slot.offset, &slot.piece);
  slot.done = true;
  if (caller_sleeps_) {
    const std::lock_guard lock(mutex_);
    done_.notify_one();
  }
  return true;
}

void CopyTeam::WakeHelpers() {
  if (!helpers_sleep_) return;
  const std::lock_guard lock(mutex_);
  helpers_sleep_ = false;
  wake_.notify_all();
}

// Waits until the piece is done. A helper has begun it.
void CopyTeam::Await(Slot& slot) {
  if (LookFor([&] { return slot.done.load(); })) return;
  std::unique_lock lock(mutex_);
  caller_sleeps_ = true;
  done_.wait(lock, [&] { return slot.done.load(); });
  caller_sleeps_ = false;
}

CopyTeam::Turn::Turn(CopyTeam* team, std::span<const ropeteam_part_t> parts, uint64_t bytes)
    : team_(team), part_(parts.data()), left_(bytes) {
  if (team->threads_ == 1 || bytes < kShareBytesMin) return;
  lock_ = std::unique_lock(team->turn_, std::try_to_lock);
  if (taken() && !team->started_) team->StartHelpers();
}

CopyTeam::Turn::~Turn() {
  if (!taken()) return;
  const uint64_t end = team_->handed_out_.load();
  uint64_t begun = team_->begun_.load();
  while (begun != end && !team_->begun_.compare_exchange_weak(begun, end)) {
  }
  for (; team_->taken_ < begun; ++team_->taken_) team_->Await(team_->SlotOf(team_->taken_));
  team_->taken_ = end;
}

bool CopyTeam::Turn::HasRoom() const {
  return left_ > 0 &&
         team_->handed_out_.load(std::memory_order_relaxed) - team_->taken_ < 2 * team_->threads_;
}

uint64_t CopyTeam::Turn::HandOut(std::byte* target, uint64_t bytes_max, bool checksum) {
  const uint64_t number = team_->handed_out_.load(std::memory_order_relaxed);
  ROPETEAM_CHECK(HasRoom() && bytes_max > 0);
  uint64_t bytes = std::clamp(left_ / (2 * team_->threads_), kPieceBytesMin, kPieceBytesMax);
  bytes -= (reinterpret_cast<uintptr_t>(target) + bytes) % kPieceAlignment;
  bytes = std::min({bytes, bytes_max, left_});
  Slot& slot = team_->SlotOf(number);
  while (offset_ == part_->length) {
    ++part_;
    offset_ = 0;
  }
  slot.target = target;
  slot.part = part_;
  slot.offset = offset_;
  slot.piece = {bytes, checksum, 0};
  slot.done = false;
  left_ -= bytes;
  for (uint64_t skip = bytes; skip > 0;) {
    const uint64_t step = std::min(skip, part_->length - offset_);
    skip -= step;
    offset_ += step;
    if (skip == 0) break;
    ++part_;
    offset_ = 0;
  }
  team_->handed_out_ = number + 1;
  team_->WakeHelpers();
  return bytes;
}

CopyTeam::Piece CopyTeam::Turn::Take() {
  ROPETEAM_CHECK(team_->taken_ != team_->handed_out_.load(std::memory_order_relaxed));
  Slot& slot = team_->SlotOf(team_->taken_);
  while (!slot.done && team_->CopyNext()) {
  }
  team_->Await(slot);
  ++team_->taken_;
  return slot.piece;
}

}  // namespace ropeteam::client
