// SPDX-License-Identifier: Apache-2.0
#include "api/client/cuda_lanes.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace ropeteam::client {

Result<std::optional<CudaTicket>> CudaLanes::Unclaimed(const void* pointer, Arena* arena) {
  const CudaDriver* driver = CudaDriver::IfLoaded();
  if (driver == nullptr) return std::optional<CudaTicket>();
  const Result<std::optional<DevicePointer>> found = driver->Classify(pointer);
  if (!found.ok()) return found.status();
  if (!found->has_value()) return std::optional<CudaTicket>();
  ROPETEAM_RETURN_IF_ERROR(driver->CheckVersion());
  Result<CudaTicket> ticket = Make(*driver, **found, kCuStreamLegacy, arena);
  if (!ticket.ok()) return ticket.status();
  return std::optional<CudaTicket>(std::move(ticket).value());
}

Result<CudaTicket> CudaLanes::Claimed(const void* pointer, CuStream stream, Arena* arena) {
  const Result<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  const Result<std::optional<DevicePointer>> found = (*driver)->Classify(pointer);
  if (!found.ok()) return found.status();
  if (!found->has_value()) {
    return Error(Code::kInvalidArgument, "%p is no device memory that the CUDA driver knows in this process",
                 pointer);
  }
  return Make(**driver, **found, stream, arena);
}

Result<CudaTicket> CudaLanes::Make(const CudaDriver& driver, const DevicePointer& pointer, CuStream stream,
                                   Arena* arena) {
  CudaTicket ticket;
  ticket.pointer = pointer;
  Result<std::shared_ptr<CudaLane>> lane = Get(driver, pointer, arena);
  if (!lane.ok()) return lane.status();
  ticket.lane = std::move(lane).value();
  ticket.ready_lane = ticket.lane;
  if (reinterpret_cast<uintptr_t>(stream) >= kCuStreamNamesEnd) {
    // An event can be recorded only in a stream of its own context. That may differ from the memory's
    // context.
    DevicePointer home = pointer;
    if (const CuResult result = driver.stream_get_ctx(stream, &home.context); result != kCuSuccess) {
      return Error(Code::kInvalidArgument, "the CUDA stream %p: %s", static_cast<void*>(stream),
                   driver.ErrorOf(result, "cuStreamGetCtx").message().c_str());
    }
    if (home.context != ticket.lane->context()) {
      Result<std::shared_ptr<CudaLane>> other = Get(driver, home, arena);
      if (!other.ok()) return other.status();
      ticket.ready_lane = std::move(other).value();
    }
  }
  Result<CuEvent> ready = ticket.ready_lane->Record(stream);
  if (!ready.ok()) return Status(Code::kInvalidArgument, ready.status().message());
  ticket.ready = *ready;
  return ticket;
}

Result<std::shared_ptr<CudaLane>> CudaLanes::Get(const CudaDriver& driver, const DevicePointer& pointer,
                                                 Arena* arena) {
  const std::lock_guard lock(mutex_);
  const auto same = [&](const Entry& entry) {
    return entry.asked == pointer.context && (pointer.context != nullptr || entry.device == pointer.device);
  };
  auto entry = std::find_if(lanes_.begin(), lanes_.end(), same);
  if (entry != lanes_.end() && !entry->lane->broken()) {
    arena->Pin(driver, entry->lane->context());  // the arena may be another daemon's by now
    return entry->lane;
  }
  // Saves that still use a lane keep it alive. If a context is gone, its lane and the memory that was
  // page-locked through it are useless.
  std::erase_if(lanes_, [&](const Entry& old) {
    const CudaScope scope(driver, old.lane->context());
    const bool lost = scope.result() != kCuSuccess || old.lane->lost();
    if (lost) arena->Unpin(old.lane->context());
    return lost || old.lane->broken();
  });
  Result<std::shared_ptr<CudaLane>> lane = CudaLane::Make(driver, pointer);
  if (!lane.ok()) return Status(Code::kInvalidArgument, lane.status().message());
  LOG_INFO("copies from CUDA device %d go through the arena, staged", (*lane)->device());
  lanes_.push_back({pointer.context, pointer.device, *lane});
  arena->Pin(driver, (*lane)->context());
  return lane;
}

}  // namespace ropeteam::client
