// SPDX-License-Identifier: Apache-2.0
#include "api/client/cuda_exports.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "api/client/deadline.h"
#include "api/client/unique_fd.h"
#include "core/base/log.h"

namespace ropeteam::client {
namespace {

// A network card registers 80 GB of a GPU's memory in some hundred milliseconds. If the daemon does not
// answer within this time, the save goes through the arena.
constexpr int64_t kRegisterMs = 2000;

uint64_t PageBytes() {
  static const uint64_t bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

bool CudaExports::Describe(const CudaDriver& driver, CuDevicePtr address, Allocation* allocation) const {
  CuDevicePtr begin = 0;
  size_t bytes = 0;
  int attributes[] = {kCuPointerBufferId, kCuPointerRangeStart, kCuPointerRangeSize};
  void* values[] = {&allocation->id, &begin, &bytes};
  if (driver.pointer_get_attributes(3, attributes, values, address) != kCuSuccess) return false;
  if (begin == 0 || bytes == 0 || begin > address || address - begin >= bytes) return false;
  // A dmabuf consists of whole pages. The driver refuses if a page belongs only partly to the allocation.
  allocation->begin = begin / PageBytes() * PageBytes();
  allocation->bytes = (begin + bytes - allocation->begin + PageBytes() - 1) / PageBytes() * PageBytes();
  return true;
}

CudaExports::Place CudaExports::Find(const CudaDriver& driver, CuDevicePtr address, uint64_t bytes,
                                     const local::HelloReply& hello, Channel* channel) {
  const std::lock_guard lock(mutex_);
  if (unsupported_) return {};
  if (!hello.dmabuf || driver.mem_get_handle_for_address_range == nullptr) {
    unsupported_ = true;
    const std::string transport = "the daemon's transport " + hello.transport + " reads no device memory";
    SayStaged(hello.dmabuf ? "the driver is older than CUDA 11.7" : transport.c_str());
    return {};
  }
  Allocation allocation;
  if (!Describe(driver, address, &allocation)) return {};
  auto known = std::find_if(allocations_.begin(), allocations_.end(), [&](const Allocation& other) {
    return other.id == allocation.id && other.begin == allocation.begin && other.bytes == allocation.bytes;
  });
  if (known == allocations_.end()) {
    const auto given = std::count_if(allocations_.begin(), allocations_.end(),
                                     [](const Allocation& other) { return other.buffer != 0; });
    Status status;
    if (static_cast<size_t>(given) >= local::kGpuBuffersMax) {
      status = Error(Code::kNoSpace, "%zu allocations are handed over, limit %zu", static_cast<size_t>(given),
                     local::kGpuBuffersMax);
    } else {
      status = Export(driver, &allocation, channel);
    }
    if (!status.ok()) {
      SayStaged(status.message().c_str());
      unsupported_ = status.code() == Code::kUnsupported;
    }
    allocations_.push_back(allocation);
    known = allocations_.end() - 1;
  }
  if (known->buffer == 0 || address - known->begin > known->bytes ||
      bytes > known->bytes - (address - known->begin)) {
    return {};
  }
  ++known->users;
  known->used_at = saves_ended_;
  return {known->buffer, address - known->begin};
}

Status CudaExports::Export(const CudaDriver& driver, Allocation* allocation, Channel* channel) {
  int descriptor = -1;
  const CuResult result = driver.mem_get_handle_for_address_range(
      &descriptor, allocation->begin, allocation->bytes, kCuMemRangeHandleTypeDmaBufFd, 0);
  if (result != kCuSuccess) {
    const Status status = driver.ErrorOf(result, "cuMemGetHandleForAddressRange");
    return result == kCuNotSupported ? Status(Code::kUnsupported, status.message()) : status;
  }
  const UniqueFd owned(descriptor);  // the daemon has its own copy after the call
  const uint64_t buffer = next_buffer_++;
  Status status = channel->Call(local::Type::kGpuBuffer, local::GpuBuffer{buffer, allocation->bytes},
                                Deadline::In(kRegisterMs), &frames_, owned.get());
  if (status.code() == Code::kDeadlineExceeded) {
    // The daemon may still register it later. Ignore errors: all buffers end with the connection.
    (void)channel->Post(local::Type::kGpuBufferEnd, local::GpuBufferEnd{buffer}, Deadline::In(kRegisterMs),
                        &frames_);
  }
  ROPETEAM_RETURN_IF_ERROR(status);
  allocation->buffer = buffer;
  if (!said_direct_) LOG_INFO("device memory goes to replicas directly, and through the arena to this node");
  said_direct_ = true;
  return OkStatus();
}

void CudaExports::SayStaged(const char* why) {
  if (!said_staged_) LOG_INFO("device memory goes through the arena, staged: %s", why);
  said_staged_ = true;
}

void CudaExports::Release(const std::vector<uint64_t>& buffers, Channel* channel) {
  const std::lock_guard lock(mutex_);
  ++saves_ended_;
  for (const uint64_t buffer : buffers) {
    for (Allocation& allocation : allocations_) {
      if (allocation.buffer != buffer) continue;
      --allocation.users;
      allocation.used_at = saves_ended_;
    }
  }
  std::erase_if(allocations_, [&](const Allocation& allocation) {
    if (allocation.users != 0 || saves_ended_ - allocation.used_at < kSavesUnusedMax) return false;
    if (allocation.buffer != 0) {
      // Ignore errors: all buffers end with the connection.
      (void)channel->Post(local::Type::kGpuBufferEnd, local::GpuBufferEnd{allocation.buffer},
                          Deadline::In(kRegisterMs), &frames_);
    }
    return true;
  });
}

}  // namespace ropeteam::client
