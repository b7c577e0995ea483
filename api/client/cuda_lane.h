// SPDX-License-Identifier: Apache-2.0
//
// A CudaLane is the way between the arena and the memory of one CUDA context: a stream of our own in each
// direction, the events that order them behind the caller's streams, and a few threads that give the device
// its copies and checksum what has arrived. Streams are non-blocking: no work of the caller's ever waits for
// ours.
//
// A copy is given to the device only when the caller's event has fired, and only kBatchesMax batches at a
// time. So a copy never waits inside the device: what the device still writes into the arena after a save was
// given up, or after its daemon died, is a few tens of megabytes, milliseconds, and a save can wait for it.
//
// Safe from any thread. All who hold a lane must be gone before the arena is unmapped.

#ifndef ROPETEAM_API_CLIENT_CUDA_LANE_H_
#define ROPETEAM_API_CLIENT_CUDA_LANE_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "api/client/cuda_driver.h"
#include "api/client/cuda_fill.h"
#include "api/client/deadline.h"
#include "api/client/ring.h"
#include "core/base/status.h"

namespace ropeteam::client {

class CudaLane {
 public:
  // The pointer's context is retained if it is a primary one that had to be asked for. kInvalidArgument: the
  // context is gone. kIo: the driver refuses, with its words.
  static Result<std::shared_ptr<CudaLane>> Make(const CudaDriver& driver, const DevicePointer& pointer);
  // Waits for the copies that the device has; there are none when all saves and reads have ended.
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  CuContext context() const { return context_; }
  CuDevice device() const { return device_; }
  const CudaDriver& driver() const { return driver_; }
  // A call failed, and nobody can tell what of: make another lane.
  bool broken() const { return broken_; }
  // It failed because the context is gone or was reset, and with it what it had page-locked.
  bool lost() const { return lost_; }

  // An event behind all that has been given to `stream`, which belongs to this lane's context, until now.
  Result<CuEvent> Record(CuStream stream);
  void ReturnEvent(CuEvent event);
  // Waits until the event has fired. kDeadlineExceeded: it has not.
  Status WaitFor(CuEvent event, Deadline deadline);

  // Copies to the arena: `pieces`, in this order, once `ready` (an event of `ready_lane`, which is given back
  // to it) has fired. They have been added to the fill, which hears of every piece exactly once; it and both
  // lanes must stay until then. `direct` is told of to the daemon when `ready` has fired.
  void Queue(CudaFill* fill, std::span<const CudaPiece> pieces, CudaLane* ready_lane, CuEvent ready,
             const CudaDirect& direct);
  // Takes back what the device has not been given yet of this fill's. Does not wait.
  void Drop(CudaFill* fill);

  // Copies from the arena, by the calling thread: begins one; and waits for all that this thread began. One
  // thread at a time may be between the first and the wait: see reads().
  Status CopyIn(CuDevicePtr target, const std::byte* source, uint64_t bytes);
  Status WaitCopiesIn();
  std::mutex& reads() { return reads_; }

 private:
  // Batches given to the device and not finished. 16 chunks of 4 MiB take a PCIe 4 link 2.5 ms: enough that
  // the link never waits for a thread to be scheduled, little enough for the reason above.
  static constexpr size_t kBatchesMax = 16;
  // A batch is closed when it has so much: an event for every 4 MiB costs nothing, one for every small tensor
  // would.
  static constexpr uint64_t kBatchBytes = 4ull << 20;
  static constexpr size_t kBatchPiecesMax = 256;
  // One core checksums 10 to 20 GB/s of memory that a device has just written; a PCIe 5 link brings 55.
  static constexpr unsigned kThreadsMax = 4;
  // A node runs a rank for each GPU, commonly 8, beside the data loaders.
  static constexpr unsigned kCoresPerThread = 16;
  // Between looks at an event of the caller's that has not fired: from a copy's latency up to what a save
  // does not notice and an otherwise idle core does not either.
  static constexpr std::chrono::microseconds kPauseMin{20};
  static constexpr std::chrono::microseconds kPauseMax{1000};

  struct Job {
    CudaFill* fill = nullptr;
    uint64_t pieces = 0;  // left in pieces_
    CuEvent ready = nullptr;
    CudaLane* ready_lane = nullptr;
    CudaDirect direct;
    bool fired = false;
    bool dropped = false;
  };
  // Copies of one save, and the event behind them.
  struct Batch {
    CudaFill* fill = nullptr;
    CuEvent done = nullptr;
    bool recorded = false;
    Status status;
    std::vector<CudaPiece> pieces;
  };

  CudaLane(const CudaDriver& driver, CuContext context, CuDevice device, bool retained);
  Status SetUp();
  Status CheckCall(CuResult result, const char* what);
  Result<CuEvent> TakeEvent();
  void StartThreads();
  void Run();
  // True: something was taken off the queue; false: its head is not ready.
  bool Issue(std::unique_lock<std::mutex>& lock);
  // Whether the head of the queue may be copied; kGone: it was dropped or failed, and is no longer the head.
  enum class Head { kReady, kNotReady, kGone };
  Head LookAtHead(std::unique_lock<std::mutex>& lock);
  void EndHead(std::unique_lock<std::mutex>& lock, const Status& status);
  void GiveToDevice(Batch* batch);
  void Finish(Batch* batch);

  const CudaDriver& driver_;
  const CuContext context_;
  const CuDevice device_;
  const bool retained_;
  CuStream out_ = nullptr;  // device to arena
  CuStream in_ = nullptr;   // arena to device
  std::atomic<bool> broken_ = false;
  std::atomic<bool> lost_ = false;
  std::mutex reads_;

  std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_:
  bool stop_ = false;
  bool issuing_ = false;
  std::vector<CuEvent> events_;  // not in use
  Ring<Job> jobs_;
  Ring<CudaPiece> pieces_;  // of jobs_, in their order
  std::array<Batch, kBatchesMax> batches_;
  std::vector<Batch*> free_;
  Ring<Batch*> issued_;
  std::vector<std::thread> threads_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CUDA_LANE_H_
