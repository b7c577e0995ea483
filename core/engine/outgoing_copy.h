// SPDX-License-Identifier: Apache-2.0
//
// One attempt at one copy of a shard on another node, at its source: an explicit state machine. It uses no store,
// network or clock. Events come in as calls, effects go out through CopyEffects. The replicator connects both with the
// rest of the engine. docs/save-and-commit.md has the same tables.
//
// clang-format off
//   state       event           what holds before                       effect                        next
//   ---------   -------------   -------------------------------------   ---------------------------   --------
//   reserving   granted         the holder has given chunks             put what is there             sending
//   reserving   holder has it   the shard is sealed at the holder       nothing to put                sending
//   sending     granted         the reservation was extended            put what is there             sending
//   sending     holder has it   sealed there in another way meanwhile   start no more puts            sending
//   sending     complete        the source is sealed; every chunk has   send seal                     sealing
//                               arrived, or the holder has the shard;
//                               no put is on its way
//   sealing     matched         all chunks have the right checksum      it counts (replicator)        gone
//   sealing     mismatched      some chunks have not; at most           put those again, in the       sending
//                               kRoundsBadMax rounds with chunks from   next attempt
//                               the arena
//   reserving   dropped         refused, failed, not wanted any more,   withdraw the puts that are    dropping
//   sending                     or the holder has left the view         still in the queue
//   sealing
//   dropping    quiet           no put is on its way                    send abort                    gone
//
//   a chunk       event                                             next
//   -----------   -----------------------------------------------   -----------
//   waiting       a put from the arena starts                       from arena
//   waiting       a put from device memory starts                   from device
//   from arena    arrived                                           unreported
//   from device   arrived, its checksum is known                    unreported
//   from device   arrived, its checksum is not known yet            unsummed
//   from arena    withdrawn, did not leave this node, or failed     waiting
//   from device   the same                                          waiting
//   unsummed      its checksum is known                             unreported
//   unreported    the holder is told                                reported
//   unsummed      the seal tells the holder of all chunks           reported
//   unreported    the same                                          reported
//   reported      did not match                                     waiting
// clang-format on
//
// Reserve and seal are repeated every kRepeatUs until they are answered. The fabric may read a chunk of the source
// until every put from it has completed or was withdrawn. So the chunk stays allocated until then, and a copy is gone
// only when it has no put on its way.

#ifndef ROPETEAM_CORE_ENGINE_OUTGOING_COPY_H_
#define ROPETEAM_CORE_ENGINE_OUTGOING_COPY_H_

#include <cstdint>
#include <map>
#include <vector>

#include "core/engine/engine.h"
#include "core/engine/limits.h"
#include "core/engine/messages.h"

namespace ropeteam::engine {

// The source's state that the copies of a shard read.
struct CopySource {
  std::vector<bool> ready;                     // the arena has the chunk's bytes, and its checksum is known
  std::map<uint32_t, SaveDirectInput> device;  // by first chunk; ranges do not overlap
  bool sealed = false;
  bool puts_wait = false;  // no put from the arena starts

  // The chunk's place in device memory; null if it has none.
  const SaveDirectInput* FindDevice(uint32_t chunk) const;
};

// Effects of a copy on the rest of the engine. None of these functions calls the copy back.
class CopyEffects {
 public:
  virtual void SendReserve(uint64_t chunks) = 0;
  // Starts a put of the chunk, from `device` or, if that is null, from the arena. Returns the number of the transfer.
  virtual uint64_t StartPut(uint32_t chunk, const SaveDirectInput* device) = 0;
  // Returns true if the transfer was still queued. It is then cancelled and will not complete.
  virtual bool Withdraw(uint64_t transfer) = 0;
  virtual void SendArrived(const std::vector<uint32_t>& chunks) = 0;
  virtual void SendSeal(uint32_t attempt) = 0;
  virtual void SendAbort(bool put_failed) = 0;

 protected:
  ~CopyEffects() = default;
};

class OutgoingCopy {
 public:
  enum class State : uint8_t { kReserving, kSending, kSealing, kDropping, kGone };
  enum class Chunk : uint8_t { kWaiting, kFromArena, kFromDevice, kUnsummed, kUnreported, kReported };

  // Outstanding puts of one copy: enough to keep its link busy, few enough to leave room for other copies.
  static constexpr uint32_t kOutstandingMax = 8;
  // Arrived chunks per hint to the holder. At 4 MiB it is a check of 16 MiB, about a millisecond of work.
  static constexpr size_t kArrivedBatch = 4;
  // How many times chunks from the arena may fail the holder's check before the copy is dropped. A single failure is a
  // bit that flipped on the way.
  static constexpr uint32_t kRoundsBadMax = 3;

  OutgoingCopy(CopyId id, NodeId target) : id_(id), target_(target) {}

  // ---- events. The caller calls Advance() afterwards.

  // Only while reserving or sending. A repeat of an earlier grant, with fewer chunks, changes nothing.
  void Granted(uint64_t reservation, uint64_t chunks_begin, const std::vector<Extent>& extents);
  void HolderHasIt();
  // The checksums of these chunks have become known.
  void ChecksumsKnown(uint32_t first, uint32_t count);
  // A put has ended. PutArrived: its bytes are at the holder. PutNotSent: no byte of it has left this node. PutFailed:
  // bytes may still be on their way, and the copy must be dropped.
  void PutArrived(uint32_t chunk, bool checksum_known);
  void PutNotSent(uint32_t chunk);
  void PutFailed(uint32_t chunk);
  // The source's device memory is no longer usable: withdraws the puts from it that are still queued.
  void WithdrawDevicePuts(CopyEffects* effects);
  // While sealing: the holder has checked all chunks of this attempt. `bad` comes from the holder and is not trusted.
  // Returns how many chunks are put again and, in `from_arena`, those of them whose last put was from the arena. 0:
  // nothing has changed, and the copy must be dropped.
  void Matched();
  size_t Mismatched(const std::vector<uint32_t>& bad, std::vector<uint32_t>* from_arena);
  void Drop(CopyEffects* effects);
  // Repeats unanswered messages at the next Advance().
  void RepeatNow() { next_send_ = 0; }

  // Does everything that is possible now. The copy may be gone afterwards.
  void Advance(TimeUs now, const CopySource& source, CopyEffects* effects);

  // ---- state
  const CopyId& id() const { return id_; }
  NodeId target() const { return target_; }
  State state() const { return state_; }
  bool active() const { return state_ != State::kDropping && state_ != State::kGone; }
  Chunk chunk(uint32_t index) const;
  uint32_t attempt() const { return attempt_; }
  uint32_t on_way() const { return on_way_; }
  uint32_t device_on_way() const { return device_on_way_; }
  uint64_t chunks_begin() const { return chunks_begin_; }
  uint64_t reservation() const { return reservation_; }  // 0: nothing has been granted
  const std::vector<Extent>& extents() const { return extents_; }
  // The time of the next repeat by Advance(); kNever: nothing is unanswered.
  TimeUs NextSend() const;
  // Recomputes the counters and compares them. For tests and the simulation.
  void CheckInvariants() const;

 private:
  enum class Event : uint8_t {
    kGranted,
    kHolderHasIt,
    kComplete,
    kMatched,
    kMismatched,
    kDropped,
    kQuiet,
  };
  struct Transition {
    State from;
    Event event;
    State to;
  };
  static const Transition kTransitions[];
  struct ChunkOnWay {
    Chunk state = Chunk::kWaiting;
    bool device = false;    // its last put was from device memory
    uint64_t transfer = 0;  // while it is on its way
  };

  // The one place where state_ changes.
  void On(Event event);
  void CheckState() const;
  // The one place where a chunk's state changes.
  void Move(uint32_t chunk, Chunk to);
  static bool Legal(Chunk from, Chunk to);
  static bool OnWay(Chunk state) { return state == Chunk::kFromArena || state == Chunk::kFromDevice; }
  static bool HasArrived(Chunk state) { return state >= Chunk::kUnsummed; }
  void Resize(size_t chunks);
  void StartPuts(const CopySource& source, CopyEffects* effects);
  void Withdraw(bool device_only, CopyEffects* effects);
  void Report(CopyEffects* effects);
  void TellAllBySeal();

  const CopyId id_;
  const NodeId target_;
  State state_ = State::kReserving;
  std::vector<ChunkOnWay> chunks_;
  uint32_t cursor_ = 0;  // no chunk before it is waiting
  uint32_t on_way_ = 0;
  uint32_t device_on_way_ = 0;
  uint32_t arrived_ = 0;
  std::vector<uint32_t> unreported_;  // in the order of their arrival
  uint64_t reservation_ = 0;          // the holder's number of the memory that it granted
  uint64_t chunks_begin_ = 0;         // as in ReplicaGrant
  std::vector<Extent> extents_;       // granted by the holder
  uint64_t granted_ = 0;              // chunks in them
  uint64_t asked_for_ = 0;            // chunks, by the last reserve
  bool holder_has_it_ = false;
  bool put_failed_ = false;
  uint32_t attempt_ = 0;
  uint32_t rounds_bad_ = 0;
  TimeUs next_send_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_OUTGOING_COPY_H_
