// SPDX-License-Identifier: Apache-2.0
//
// A CudaLane moves bytes between the arena and the memory of one CUDA context. It has a stream of its own in each
// direction, events that order these after the caller's streams, and a few threads. The threads give the device its
// copies and checksum what has arrived. The streams are non-blocking: the caller's work never waits for ours.
//
// A copy is given to the device only when the caller's event has fired, and only kBatchesMax batches at a time. So a
// copy never waits inside the device. After an aborted save or the death of its daemon, the device still writes at most
// a few tens of megabytes into the arena. That takes milliseconds, so a save can wait for it.
//
// Safe from any thread. All references to a lane must be dropped before the arena is unmapped.

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
  // Retains the pointer's context if it is a primary one that had to be requested. kInvalidArgument: the context is
  // gone. kIo: the driver refuses; the message has its text.
  static Result<std::shared_ptr<CudaLane>> Make(const CudaDriver& driver, const DevicePointer& pointer);
  // Waits for the device's copies. There are none when all saves and reads have ended.
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  CuContext context() const { return context_; }
  CuDevice device() const { return device_; }
  const CudaDriver& driver() const { return driver_; }
  // A call failed for an unknown reason: make another lane.
  bool broken() const { return broken_; }
  // It failed because the context is gone or was reset, and with it the page-locked memory.
  bool lost() const { return lost_; }

  // An event after everything given to `stream` until now. The stream belongs to this lane's context.
  Result<CuEvent> Record(CuStream stream);
  void ReturnEvent(CuEvent event);
  // Waits until the event has fired. kDeadlineExceeded: it has not fired.
  Status WaitFor(CuEvent event, Deadline deadline);

  // Copies `pieces` to the arena in this order, once `ready` has fired (an event of `ready_lane`, which is returned to
  // it). They have been added to the fill, which gets exactly one report per piece. The fill and both lanes must live
  // until then. `direct` is announced to the daemon when `ready` has fired.
  void Queue(CudaFill* fill, std::span<const CudaPiece> pieces, CudaLane* ready_lane, CuEvent ready,
             const CudaDirect& direct);
  // Withdraws this fill's pieces that the device has not been given yet. Does not wait.
  void Drop(CudaFill* fill);

  // Copies from the arena, on the calling thread. The first call begins a copy; the other waits for all copies of this
  // thread. Only one thread at a time may be between them: see reads().
  Status CopyIn(CuDevicePtr target, const std::byte* source, uint64_t bytes);
  Status WaitCopiesIn();
  std::mutex& reads() { return reads_; }

 private:
  // Batches that the device has and has not finished. 16 chunks of 4 MiB take 2.5 ms on a PCIe 4 link: enough that the
  // link never waits for a thread to be scheduled, and little enough for the reason above.
  static constexpr size_t kBatchesMax = 16;
  // A batch is closed at this size: an event for every 4 MiB is cheap, one for every small tensor is not.
  static constexpr uint64_t kBatchBytes = 4ull << 20;
  static constexpr size_t kBatchPiecesMax = 256;
  // One core checksums 10 to 20 GB/s of memory that a device has just written; a PCIe 5 link delivers 55 GB/s.
  static constexpr unsigned kThreadsMax = 4;
  // A node runs a rank for each GPU, commonly 8, beside the data loaders.
  static constexpr unsigned kCoresPerThread = 16;
  // The pauses between checks of a caller's event that has not fired: from the latency of a copy up to a time that is
  // negligible for a save and for an idle core.
  static constexpr std::chrono::microseconds kPauseMin{20};
  static constexpr std::chrono::microseconds kPauseMax{1000};

  struct Job {
    CudaFill* fill = nullptr;
    uint64_t pieces = 0;  // pieces of it left in pieces_
    CuEvent ready = nullptr;
    CudaLane* ready_lane = nullptr;
    CudaDirect direct;
    bool fired = false;
    bool dropped = false;
  };
  // Copies of one save, and the event after them.
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
  // Returns true if something was taken off the queue, false if its head is not ready.
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
