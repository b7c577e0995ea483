// SPDX-License-Identifier: Apache-2.0
#include "api/client/cuda_lane.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "api/client/signals_blocked.h"
#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::client {

Result<std::shared_ptr<CudaLane>> CudaLane::Make(const CudaDriver& driver, const DevicePointer& pointer) {
  CuContext context = pointer.context;
  const bool retain = context == nullptr;
  CuDevice device = 0;
  if (const CuResult result = driver.device_get(&device, pointer.device); result != kCuSuccess) {
    return driver.ErrorOf(result, "cuDeviceGet");
  }
  if (retain) {
    const CuResult result = driver.device_primary_ctx_retain(&context, device);
    if (result != kCuSuccess) return driver.ErrorOf(result, "cuDevicePrimaryCtxRetain");
  }
  std::shared_ptr<CudaLane> lane(new CudaLane(driver, context, device, retain));
  ROPETEAM_RETURN_IF_ERROR(lane->SetUp());
  return lane;
}

CudaLane::CudaLane(const CudaDriver& driver, CuContext context, CuDevice device, bool retained)
    : driver_(driver), context_(context), device_(device), retained_(retained) {
  for (Batch& batch : batches_) {
    batch.pieces.reserve(kBatchPiecesMax);
    free_.push_back(&batch);
  }
}

Status CudaLane::SetUp() {
  const CudaScope scope(driver_, context_);
  if (scope.result() == kCuContextIsDestroyed || scope.result() == kCuInvalidContext) {
    return Error(Code::kInvalidArgument, "a pointer into memory of a CUDA context that is gone: %s",
                 driver_.ErrorOf(scope.result(), "cuCtxPushCurrent").message().c_str());
  }
  ROPETEAM_RETURN_IF_ERROR(CheckCall(scope.result(), "cuCtxPushCurrent"));
  ROPETEAM_RETURN_IF_ERROR(CheckCall(driver_.stream_create(&out_, kCuStreamNonBlocking), "cuStreamCreate"));
  return CheckCall(driver_.stream_create(&in_, kCuStreamNonBlocking), "cuStreamCreate");
}

CudaLane::~CudaLane() {
  {
    const std::lock_guard lock(mutex_);
    ROPETEAM_CHECK(jobs_.empty() && issued_.empty());
    stop_ = true;
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  {
    const CudaScope scope(driver_, context_);
    // Ignore all these errors: an object that cannot be destroyed has ended with its context.
    for (const CuEvent event : events_) (void)driver_.event_destroy(event);
    for (const Batch& batch : batches_) {
      if (batch.done != nullptr) (void)driver_.event_destroy(batch.done);
    }
    if (out_ != nullptr) (void)driver_.stream_destroy(out_);
    if (in_ != nullptr) (void)driver_.stream_destroy(in_);
  }
  if (retained_) (void)driver_.device_primary_ctx_release(device_);
}

Status CudaLane::CheckCall(CuResult result, const char* what) {
  if (result == kCuSuccess) return OkStatus();
  // It is unknown which errors a context survives. The streams of a new lane cost some microseconds.
  broken_ = true;
  if (result == kCuContextIsDestroyed || result == kCuInvalidContext || result == kCuInvalidHandle)
    lost_ = true;
  Status status = driver_.ErrorOf(result, what);
  LOG_WARNING("cuda device %d %s", device_, status.message().c_str());
  return status;
}

Result<CuEvent> CudaLane::TakeEvent() {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      const CuEvent event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  CuEvent event = nullptr;
  ROPETEAM_RETURN_IF_ERROR(
      CheckCall(driver_.event_create(&event, kCuEventBlockingSync | kCuEventDisableTiming), "cuEventCreate"));
  return event;
}

void CudaLane::ReturnEvent(CuEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

Result<CuEvent> CudaLane::Record(CuStream stream) {
  const CudaScope scope(driver_, context_);
  ROPETEAM_RETURN_IF_ERROR(CheckCall(scope.result(), "cuCtxPushCurrent"));
  Result<CuEvent> event = TakeEvent();
  if (!event.ok()) return event;
  // Not CheckCall(): an invalid stream is the caller's mistake and does not break the lane.
  if (const CuResult result = driver_.event_record(*event, stream); result != kCuSuccess) {
    ReturnEvent(*event);
    return driver_.ErrorOf(result, "cuEventRecord on the caller's stream");
  }
  return event;
}

Status CudaLane::WaitFor(CuEvent event, Deadline deadline) {
  auto pause = kPauseMin;
  for (;;) {
    const CuResult result = driver_.event_query(event);
    if (result != kCuNotReady) return CheckCall(result, "cuEventQuery");
    if (deadline.Passed()) {
      return Error(Code::kDeadlineExceeded, "the caller's CUDA stream has not reached this call in time");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kPauseMax);
  }
}

void CudaLane::StartThreads() {
  const unsigned count = std::clamp(std::thread::hardware_concurrency() / kCoresPerThread, 1u, kThreadsMax);
  const SignalsBlocked blocked;
  try {
    while (threads_.size() < count) threads_.emplace_back(&CudaLane::Run, this);
  } catch (const std::system_error& error) {
    LOG_WARNING("threads for copies from device %d %zu of %u %s", device_, threads_.size(), count,
                error.what());
  }
}

void CudaLane::Queue(CudaFill* fill, std::span<const CudaPiece> pieces, CudaLane* ready_lane, CuEvent ready,
                     const CudaDirect& direct) {
  {
    const std::lock_guard lock(mutex_);
    if (threads_.empty()) StartThreads();
    if (!threads_.empty()) {
      for (const CudaPiece& piece : pieces) pieces_.push_back(piece);
      jobs_.push_back({fill, pieces.size(), ready, ready_lane, direct});
      wake_.notify_all();
      return;
    }
  }
  ready_lane->ReturnEvent(ready);
  fill->Finished(pieces,
                 Error(Code::kIo, "no thread for copies from CUDA device %d can be started", device_));
}

void CudaLane::Drop(CudaFill* fill) {
  uint64_t dropped = 0;
  std::vector<std::pair<CudaLane*, CuEvent>> events;
  {
    const std::lock_guard lock(mutex_);
    // A thread may be handling the head now. It sees the mark and ends the job. The other jobs leave the
    // queue here, so that they do not wait until earlier ones are ready.
    const size_t jobs = jobs_.size();
    for (size_t i = 0; i < jobs; ++i) {
      Job job = jobs_.pop_front();
      const bool in_hand = i == 0 && issuing_;
      if (job.fill == fill && in_hand) job.dropped = true;
      const bool leaves = job.fill == fill && !in_hand;
      for (uint64_t k = 0; k < job.pieces; ++k) {
        const CudaPiece piece = pieces_.pop_front();
        if (!leaves) pieces_.push_back(piece);
      }
      if (!leaves) {
        jobs_.push_back(job);
        continue;
      }
      dropped += job.pieces;
      events.emplace_back(job.ready_lane, job.ready);
    }
    wake_.notify_all();
  }
  for (const auto& [lane, event] : events) lane->ReturnEvent(event);
  if (dropped > 0) fill->Dropped(dropped);
}

void CudaLane::Run() {
  std::unique_lock lock(mutex_);
  auto pause = kPauseMin;
  while (!stop_) {
    if (!issuing_ && !free_.empty() && !jobs_.empty()) {
      issuing_ = true;
      const bool issued = Issue(lock);
      if (issued) {
        pause = kPauseMin;
      } else if (issued_.empty()) {
        wake_.wait_for(lock, pause);
        pause = std::min(pause * 2, kPauseMax);
      }
      issuing_ = false;
      wake_.notify_all();
      if (issued) continue;
    }
    if (!issued_.empty()) {
      Batch* batch = issued_.pop_front();
      lock.unlock();
      Finish(batch);
      lock.lock();
      free_.push_back(batch);
      wake_.notify_all();
    } else if (jobs_.empty() || issuing_ || free_.empty()) {
      wake_.wait(lock);
    }
  }
}

// Removes the head and its remaining pieces from the queue. Its save is told that they were dropped, or why
// they failed.
void CudaLane::EndHead(std::unique_lock<std::mutex>& lock, const Status& status) {
  const Job gone = jobs_.pop_front();
  std::vector<CudaPiece> pieces;
  for (uint64_t i = 0; i < gone.pieces; ++i) pieces.push_back(pieces_.pop_front());
  lock.unlock();  // the event's lane may be this one
  gone.ready_lane->ReturnEvent(gone.ready);
  if (status.ok()) {
    gone.fill->Dropped(pieces.size());
  } else {
    gone.fill->Finished(pieces, status);
  }
  lock.lock();
}

// Only the issuing thread removes from the front, so the head does not change while the lock is released.
CudaLane::Head CudaLane::LookAtHead(std::unique_lock<std::mutex>& lock) {
  Status status;
  if (!jobs_.front().dropped && !jobs_.front().fired) {
    const CuEvent ready = jobs_.front().ready;
    const CudaDirect direct = jobs_.front().direct;
    CudaFill* fill = jobs_.front().fill;
    lock.unlock();
    const CuResult result = driver_.event_query(ready);
    if (result == kCuSuccess && direct.count > 0) fill->TellDirect(direct);
    if (result != kCuNotReady) status = CheckCall(result, "work before a save in the caller's stream");
    lock.lock();
    if (result == kCuNotReady && !jobs_.front().dropped) return Head::kNotReady;
    jobs_.front().fired = result == kCuSuccess;
  }
  if (!jobs_.front().dropped && status.ok()) return Head::kReady;
  EndHead(lock, jobs_.front().dropped ? OkStatus() : status);
  return Head::kGone;
}

bool CudaLane::Issue(std::unique_lock<std::mutex>& lock) {
  Batch* batch = free_.back();
  free_.pop_back();
  batch->fill = nullptr;
  batch->pieces.clear();
  uint64_t bytes = 0;
  bool taken = false;
  while (!jobs_.empty() && bytes < kBatchBytes && batch->pieces.size() < kBatchPiecesMax) {
    // A batch has pieces of one save only, so that a failed copy affects no other save.
    if (batch->fill != nullptr && jobs_.front().fill != batch->fill) break;
    const Head look = LookAtHead(lock);
    if (look == Head::kNotReady) break;
    taken = true;
    if (look == Head::kGone) continue;
    Job& head = jobs_.front();
    batch->fill = head.fill;
    while (head.pieces > 0 && bytes < kBatchBytes && batch->pieces.size() < kBatchPiecesMax) {
      bytes += pieces_.front().bytes;
      batch->pieces.push_back(pieces_.pop_front());
      --head.pieces;
    }
    if (head.pieces > 0) continue;
    const Job done = jobs_.pop_front();
    lock.unlock();  // as in EndHead()
    done.ready_lane->ReturnEvent(done.ready);
    lock.lock();
  }
  if (batch->pieces.empty()) {
    free_.push_back(batch);
    return taken;
  }
  lock.unlock();
  GiveToDevice(batch);
  lock.lock();
  issued_.push_back(batch);
  return true;
}

void CudaLane::GiveToDevice(Batch* batch) {
  batch->recorded = false;
  batch->status = OkStatus();
  if (!batch->fill->Wanted()) return;  // cancelled or failed
  const CudaScope scope(driver_, context_);
  batch->status = CheckCall(scope.result(), "cuCtxPushCurrent");
  if (batch->status.ok() && batch->done == nullptr) {
    Result<CuEvent> event = TakeEvent();
    if (event.ok()) batch->done = *event;
    batch->status = event.status();
  }
  if (!batch->status.ok()) return;
  for (const CudaPiece& piece : batch->pieces) {
    batch->status = CheckCall(driver_.memcpy_dtoh_async(piece.target, piece.source, piece.bytes, out_),
                              "cuMemcpyDtoHAsync");
    if (!batch->status.ok()) break;
  }
  // Recorded also after a failed copy: earlier copies of the batch may be running.
  const Status recorded = CheckCall(driver_.event_record(batch->done, out_), "cuEventRecord");
  batch->recorded = recorded.ok();
  if (batch->status.ok()) batch->status = recorded;
}

void CudaLane::Finish(Batch* batch) {
  if (batch->recorded) {
    const Status status = CheckCall(driver_.event_synchronize(batch->done), "copy from the device");
    if (batch->status.ok()) batch->status = status;
  } else if (batch->status.ok()) {
    // Nothing was passed to the device, because the save did not want it. So no checksum is needed.
    batch->fill->Dropped(batch->pieces.size());
    return;
  }
  batch->fill->Finished(batch->pieces, batch->status);
}

Status CudaLane::CopyIn(CuDevicePtr target, const std::byte* source, uint64_t bytes) {
  const CudaScope scope(driver_, context_);
  ROPETEAM_RETURN_IF_ERROR(CheckCall(scope.result(), "cuCtxPushCurrent"));
  return CheckCall(driver_.memcpy_htod_async(target, source, bytes, in_), "cuMemcpyHtoDAsync");
}

Status CudaLane::WaitCopiesIn() {
  const CudaScope scope(driver_, context_);
  ROPETEAM_RETURN_IF_ERROR(CheckCall(scope.result(), "cuCtxPushCurrent"));
  return CheckCall(driver_.stream_synchronize(in_), "copy to the device");
}

}  // namespace ropeteam::client
