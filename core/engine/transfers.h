// SPDX-License-Identifier: Apache-2.0
//
// The one place where transfers and checks leave the engine, so that they can be held back: what is wanted
// first goes first, and no more is outstanding than keeps a link busy.

#ifndef ROPETEAM_CORE_ENGINE_TRANSFERS_H_
#define ROPETEAM_CORE_ENGINE_TRANSFERS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

class Transfers {
 public:
  explicit Transfers(Context* context) : context_(*context) {}

  enum class Priority : uint8_t { kFetch = 0, kSave = 1, kBackground = 2 };
  static constexpr size_t kPriorities = 3;
  // 32 chunks of 4 MiB are 128 MiB: 2.5 ms of a 400 Gbit/s link, more than a round trip and a completion's
  // handling.
  static constexpr size_t kOutstandingMax = 32;
  // Restoring redundancy may take its time; saves and fetches should not notice it.
  static constexpr size_t kBackgroundOutstandingMax = 4;

  using Done = std::function<void(Code)>;
  // Returns the transfer's tag, which is filled in here.
  uint64_t Start(Priority priority, StartTransfer transfer, Done done);
  // Of a transfer whose `done` has not been called. True: it had not left the engine yet; it is cancelled, and its
  // `done` is never called.
  bool Withdraw(uint64_t tag);
  // Call when the lease is valid again: waiting puts start.
  void Resume() { Pump(); }
  void OnDone(uint64_t tag, Code code);

  size_t waiting(Priority priority) const { return waiting_[static_cast<size_t>(priority)].size(); }
  size_t running() const { return running_.size(); }
  size_t checking() const { return checking_.size(); }

  using Checked = std::function<void(const std::vector<uint32_t>& bad)>;
  void Check(std::vector<StartCheck::Range> ranges, Checked checked);
  void OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad);

 private:
  struct Waiting {
    StartTransfer transfer;
    Done done;
  };
  struct Running {
    Priority priority;
    Done done;
  };
  struct Checking {
    size_t ranges;
    Checked checked;
  };
  void Pump();
  Context& context_;
  uint64_t next_tag_ = 1;
  std::deque<Waiting> waiting_[kPriorities];
  size_t running_background_ = 0;
  std::map<uint64_t, Running> running_;
  std::map<uint64_t, Checking> checking_;
};

// The range of the arena's memory in which the stream's chunk `index` lies.
StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_TRANSFERS_H_
