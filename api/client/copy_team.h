// SPDX-License-Identifier: Apache-2.0
//
// A CopyTeam copies the parts of one put with several threads: the caller's and up to 15 helpers. A put is cut into
// pieces. An idle thread copies the next piece, with its checksum. The caller receives the pieces in their order and
// joins the checksums. So chunks still fill in order.
//
// The caller never waits for a helper to begin. It copies from the first piece on, and a helper joins when it has woken
// up. Without helpers the caller copies everything. At the end it waits for pieces that a helper has begun, at most one
// per helper.
//
// Only one thread at a time uses the team (Turn). A second save that puts meanwhile copies alone: two callers are
// already two threads.
//
// Helpers start at the first turn and end with the team. They take no signals. After its last piece a helper looks for
// work for some microseconds, because the next put of a save follows soon. Then it sleeps. Nothing is allocated after
// the first turn. A forked child has no helpers and must not use the team: the C API refuses its calls.

#ifndef ROPETEAM_API_CLIENT_COPY_TEAM_H_
#define ROPETEAM_API_CLIENT_COPY_TEAM_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "api/include/ropeteam/ropeteam.h"

namespace ropeteam::client {

inline constexpr uint32_t kCopyThreadsMax = 16;

class CopyTeam {
 public:
  // The caller alone copies a smaller put: that takes some 15 microseconds, as long as a helper needs to wake up.
  static constexpr uint64_t kShareBytesMin = 256 << 10;
  // Pieces are large first and smaller towards the end of a put, so that all threads end at about the same time. The
  // minimum is what one core copies in 4 microseconds, many times the cost of handing a piece over.
  static constexpr uint64_t kPieceBytesMax = 1 << 20;
  static constexpr uint64_t kPieceBytesMin = 64 << 10;

  struct Piece {
    uint64_t bytes = 0;
    bool checksum = false;
    uint32_t crc = 0;  // of this piece only, if `checksum`
  };

  // `threads` includes the caller, 1 to kCopyThreadsMax. With 1 there are never helpers.
  explicit CopyTeam(uint32_t threads);
  // No turn may be open.
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  uint32_t threads() const { return threads_; }

  // One put. The parts, all in host memory, must stay valid until the end of the turn.
  class Turn {
   public:
    // Takes the team, unless `bytes` (of all parts) are too few to share, or another turn has the team.
    Turn(CopyTeam* team, std::span<const ropeteam_part_t> parts, uint64_t bytes);
    // Drops the pieces that no thread has begun, and waits for those of helpers. After that no thread reads the parts
    // or writes to a target.
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Whether this turn has the team. If not, no other call is allowed.
    bool taken() const { return lock_.owns_lock(); }
    // Whether bytes are left to hand out, and not too many are handed out already. Each thread has at most one piece
    // and the next one. So copying what is handed out takes no longer than a chunk of 4 MiB with one thread.
    bool HasRoom() const;
    // Hands out the next bytes of the parts, at most `bytes_max`, to be copied to `target`. Returns their number.
    // HasRoom() must be true and `bytes_max` not 0.
    uint64_t HandOut(std::byte* target, uint64_t bytes_max, bool checksum);
    // Copies until the oldest handed-out piece is done, and returns it. There must be one.
    Piece Take();

   private:
    CopyTeam* const team_;
    std::unique_lock<std::mutex> lock_;
    // The rest that was not handed out:
    const ropeteam_part_t* part_;
    uint64_t offset_ = 0;  // in *part_
    uint64_t left_;
  };

 private:
  // On a separate cache line: two threads work on neighbouring slots.
  struct alignas(64) Slot {
    std::byte* target = nullptr;
    // The part with the first bytes; they may continue in the following parts.
    const ropeteam_part_t* part = nullptr;
    uint64_t offset = 0;
    Piece piece;
    std::atomic<bool> done = false;
  };

  void StartHelpers();
  void Run();
  // Copies the next piece that no thread has begun. Returns false if there is none.
  bool CopyNext();
  bool HasWork() const;
  void WakeHelpers();
  void Await(Slot& slot);
  Slot& SlotOf(uint64_t number) { return slots_[number % slots_.size()]; }

  const uint32_t threads_;
  std::mutex turn_;
  uint64_t taken_ = 0;                // pieces that their caller has taken; guarded by turn_
  bool started_ = false;              // guarded by turn_
  std::vector<std::thread> helpers_;  // guarded by turn_

  // Pieces are numbered from the first turn on. taken_ <= begun_ <= handed_out_ <= taken_ + slots. The slot of a piece
  // belongs to the caller before the piece is handed out, to the copying thread until it is done, and then to the
  // caller again.
  std::array<Slot, 2 * kCopyThreadsMax> slots_;
  alignas(64) std::atomic<uint64_t> handed_out_ = 0;
  alignas(64) std::atomic<uint64_t> begun_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  // Set under mutex_; also read without it, so that only sleeping helpers are woken:
  std::atomic<bool> helpers_sleep_ = false;
  std::atomic<bool> caller_sleeps_ = false;
  bool stop_ = false;  // guarded by mutex_
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_COPY_TEAM_H_
