// SPDX-License-Identifier: Apache-2.0
//
// A CopyTeam copies the parts of one put with several threads: the caller's and up to 15 helpers. A put is cut
// into pieces. Whoever is free copies the next piece, with its checksum; the caller gets the pieces back in
// their order and joins the checksums. So chunks still fill in order, one behind the other.
//
// The caller never waits for a helper to begin. It copies from the first piece on, and a helper joins when it
// has woken up; without any helper the caller copies everything. At the end it waits for pieces that a helper
// has begun, which is one piece a helper.
//
// One thread at a time has the team (Turn). A second save that puts meanwhile copies alone: two callers are two
// threads already.
//
// Helpers are started at the first turn and end with the team. They take no signals. After its last piece a
// helper looks for work for some microseconds, because the next put of a save follows soon. Then it sleeps.
// Nothing is allocated after the first turn. A forked child has no helpers and must not touch the team: the C
// API refuses its calls.

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
  // A smaller put is copied by its caller alone: that takes some 15 microseconds, as long as a helper needs to
  // wake up.
  static constexpr uint64_t kShareBytesMin = 256 << 10;
  // Large pieces first, and smaller ones towards the end of a put, so that all threads end at about the same
  // time. The least is what one core copies in 4 microseconds, many times what it costs to hand a piece over.
  static constexpr uint64_t kPieceBytesMax = 1 << 20;
  static constexpr uint64_t kPieceBytesMin = 64 << 10;

  struct Piece {
    uint64_t bytes = 0;
    bool checksum = false;
    uint32_t crc = 0;  // of the piece alone, if `checksum`
  };

  // `threads` counts the caller, 1 to kCopyThreadsMax. With 1 there are no helpers, ever.
  explicit CopyTeam(uint32_t threads);
  // No turn is left.
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  uint32_t threads() const { return threads_; }

  // One put. The parts, which are all host memory, must stay until the turn's end.
  class Turn {
   public:
    // Takes the team, unless `bytes` (of all parts) are too few to share, or another turn has it.
    Turn(CopyTeam* team, std::span<const ropeteam_part_t> parts, uint64_t bytes);
    // Drops the pieces that nobody has begun and waits for those that helpers have: nobody reads the parts or
    // writes to a target after it.
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Whether the team was taken. Nothing else may be called if not.
    bool taken() const { return lock_.owns_lock(); }
    // Whether there are bytes left to hand out, and not too many are handed out already: each thread has one
    // piece and the next. So what is handed out takes no longer to copy than a chunk of 4 MiB with one thread.
    bool HasRoom() const;
    // Hands out the next bytes of the parts, at most `bytes_max` of them, to be copied to `target`. Returns
    // their number. HasRoom() is true, and `bytes_max` is not 0.
    uint64_t HandOut(std::byte* target, uint64_t bytes_max, bool checksum);
    // Copies until the oldest piece that was handed out is done, and takes it. There is one.
    Piece Take();

   private:
    CopyTeam* const team_;
    std::unique_lock<std::mutex> lock_;
    // What has not been handed out:
    const ropeteam_part_t* part_;
    uint64_t offset_ = 0;  // in *part_
    uint64_t left_;
  };

 private:
  // On a cache line of its own: two threads work on neighbours.
  struct alignas(64) Slot {
    std::byte* target = nullptr;
    const ropeteam_part_t* part = nullptr;  // where its bytes begin; they go on in the parts behind it
    uint64_t offset = 0;
    Piece piece;
    std::atomic<bool> done = false;
  };

  void StartHelpers();
  void Run();
  // Copies the next piece that nobody has begun. False: there is none.
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

  // Pieces are numbered from the first turn on. taken_ <= begun_ <= handed_out_ <= taken_ + slots: the slot of
  // a piece is its caller's before it is handed out, its copier's from its beginning until it is done, and
  // then its caller's again.
  std::array<Slot, 2 * kCopyThreadsMax> slots_;
  alignas(64) std::atomic<uint64_t> handed_out_ = 0;
  alignas(64) std::atomic<uint64_t> begun_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  // Set under mutex_; read without it too, so that nobody is called who does not sleep:
  std::atomic<bool> helpers_sleep_ = false;
  std::atomic<bool> caller_sleeps_ = false;
  bool stop_ = false;  // guarded by mutex_
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_COPY_TEAM_H_
