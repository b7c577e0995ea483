// SPDX-License-Identifier: Apache-2.0
//
// The operation table. Each operation is accepted once, finished once and returned once by Poll(), and counted in the
// transport's counters.

#ifndef ROPETEAM_TRANSPORT_FRONT_OPERATION_TABLE_H_
#define ROPETEAM_TRANSPORT_FRONT_OPERATION_TABLE_H_

#include <atomic>
#include <cstdint>

#include "core/base/check.h"
#include "transport/front/list.h"
#include "transport/front/regions.h"
#include "transport/transport.h"

namespace ropeteam::front {

enum class Stage : uint8_t { kFree, kAccepted, kFinished };

// The base of a fabric's operation: `struct Operation : Accepted<Operation, Region, Remote> { … }`, a Put(), Get() or
// Disconnect(). It is in exactly one list, or in none while all of it is at the device.
template <typename Operation, typename RegionOf, typename RemoteOf>
struct Accepted {
  using Region = RegionOf;
  using Remote = RemoteOf;
  Operation* next = nullptr;
  OperationKind kind = OperationKind::kPut;
  Code code = Code::kOk;
  Stage stage = Stage::kFree;
  bool queued = false;  // in its peer's queue: not completely cut into pieces
  PeerId peer = 0;
  uint64_t context = 0;
  Region* region = nullptr;  // null: kDisconnect
  Remote* remote = nullptr;  // valid until the peer is dropped; the operation ends before
  uint64_t local_offset = 0, remote_offset = 0;
  uint64_t length = 0;
  uint64_t cut = 0;  // bytes that are cut into pieces
};

// A peer's operations that are not completely cut into pieces. Only the head may be partly cut. [loop]
template <typename Operation>
class Queue {
 public:
  bool empty() const { return list_.empty(); }
  Operation* head() const { return list_.head(); }
  void Push(Operation* operation) {
    operation->queued = true;
    list_.Push(operation);
  }
  void Pop() { list_.Pop()->queued = false; }
  // `length` more bytes of the head are in a piece.
  void Cut(uint64_t length) {
    Operation* operation = head();
    operation->cut += length;
    if (operation->cut == operation->length) Pop();
  }
  // The operation has failed: its rest, if any, is not cut into pieces any more.
  void Abandon(Operation* operation) {
    if (!operation->queued) return;
    ROPETEAM_CHECK(head() == operation);  // pieces are cut only from the head, so only the head can fail
    Pop();
  }

 private:
  List<Operation> list_;
};

// Written by the loop, read by any thread.
class Counts {
 public:
  void Add(OperationKind kind, Code code, uint64_t bytes) {
    const bool put = kind == OperationKind::kPut;
    (put ? puts_ : gets_).fetch_add(1, std::memory_order_relaxed);
    if (code != Code::kOk)
      failures_.fetch_add(1, std::memory_order_relaxed);
    else
      (put ? put_bytes_ : get_bytes_).fetch_add(bytes, std::memory_order_relaxed);
  }
  Transport::Counters Read(uint64_t registrations) const {
    Transport::Counters counters;
    counters.registrations = registrations;
    counters.put_bytes = put_bytes_.load(std::memory_order_relaxed);
    counters.get_bytes = get_bytes_.load(std::memory_order_relaxed);
    counters.puts = puts_.load(std::memory_order_relaxed);
    counters.gets = gets_.load(std::memory_order_relaxed);
    counters.failures = failures_.load(std::memory_order_relaxed);
    return counters;
  }

 private:
  std::atomic<uint64_t> put_bytes_{0}, get_bytes_{0}, puts_{0}, gets_{0}, failures_{0};
};

// Owns the operations. [loop], except counts().
template <typename Operation>
class OperationTable {
 public:
  using Region = typename Operation::Region;

  // Accepted operations that were not taken yet, without disconnects.
  size_t accepted() const { return accepted_; }
  // Whether there is a finished operation to take.
  bool finished() const { return !finished_.empty(); }
  const Counts& counts() const { return counts_; }

  // The region is acquired. It is released when the operation is taken.
  Operation* Accept(Region* region) {
    ROPETEAM_CHECK(accepted_ < kOperationsOutstandingMax);
    Operation* operation = pool_.New();
    operation->stage = Stage::kAccepted;
    operation->region = region;
    accepted_++;
    return operation;
  }
  // The device no longer uses any part of the operation. To finish it twice is a bug and ends the process.
  void Finish(Operation* operation, Code code) {
    ROPETEAM_CHECK(operation->stage == Stage::kAccepted && !operation->queued);
    operation->stage = Stage::kFinished;
    operation->code = code;
    counts_.Add(operation->kind, code, operation->length);
    finished_.Push(operation);
  }
  // All of the peer's operations are finished.
  void FinishDisconnect(PeerId peer) {
    Operation* operation = pool_.New();
    operation->stage = Stage::kFinished;
    operation->kind = OperationKind::kDisconnect;
    operation->peer = peer;
    finished_.Push(operation);
  }
  // Returns up to `capacity` completions in the order of finishing, and their number.
  size_t Take(Completion* out, size_t capacity) {
    size_t count = 0;
    for (; count < capacity && !finished_.empty(); count++) {
      Operation* operation = finished_.Pop();
      ROPETEAM_CHECK(operation->stage == Stage::kFinished);
      out[count] = {operation->kind, operation->peer, operation->context, operation->code};
      if (operation->region != nullptr) {
        RegionTable<Region>::Release(operation->region);
        accepted_--;
      }
      operation->stage = Stage::kFree;
      pool_.Free(operation);
    }
    return count;
  }

 private:
  Pool<Operation> pool_;
  List<Operation> finished_;
  size_t accepted_ = 0;
  Counts counts_;
};

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_OPERATION_TABLE_H_
