// SPDX-License-Identifier: Apache-2.0
#include "node/device_buffers.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/base/log.h"

namespace ropeteam {

DeviceBufferId DeviceBuffers::Add(UniqueFd descriptor, uint64_t bytes, Added added) {
  const std::lock_guard lock(mutex_);
  const DeviceBufferId id = next_++;
  Buffer& buffer = buffers_[id];
  buffer.bytes = bytes;
  buffer.descriptor = std::move(descriptor);
  buffer.added = std::move(added);
  work_.push_back(id);
  if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { Run(); });
  wake_.notify_one();
  return id;
}

void DeviceBuffers::Remove(DeviceBufferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end() || found->second.removed) return;  // refused a moment ago, or removed before
  found->second.removed = true;
  DeregisterIfUnused(id, found->second);
}

Result<RegionId> DeviceBuffers::Use(DeviceBufferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = buffers_.find(id);
  if (found == buffers_.end() || !found->second.registered || found->second.removed ||
      found->second.unreadable)
    return Error(Code::kNotFound, "device memory %llu is not there", static_cast<unsigned long long>(id));
  ++found->second.uses;
  return found->second.region;
}

void DeviceBuffers::EndUse(DeviceBufferId id, Code code) {
  const std::lock_guard lock(mutex_);
  Buffer& buffer = buffers_.at(id);
  // Only this failure is on our side of the link. If it were tried again, each save would take the link down.
  if (code == Code::kIo && !buffer.unreadable) {
    buffer.unreadable = true;
    LOG_WARNING("device memory of %llu bytes cannot be read by the transport, it goes through the arena",
                static_cast<unsigned long long>(buffer.bytes));
  }
  --buffer.uses;
  DeregisterIfUnused(id, buffer);
}

size_t DeviceBuffers::registered() const {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [id, buffer] : buffers_) count += buffer.registered ? 1 : 0;
  return count;
}

void DeviceBuffers::Stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    thread = std::move(thread_);
  }
  wake_.notify_one();
  if (thread.joinable()) thread.join();
  std::map<DeviceBufferId, Buffer> buffers;
  {
    const std::lock_guard lock(mutex_);
    buffers = std::exchange(buffers_, {});
  }
  // A refusal would mean that a buffer is in use. It is ignored, because the transport is destroyed next.
  for (const auto& [id, buffer] : buffers)
    if (buffer.registered) (void)transport_.DeregisterRegion(buffer.region);
}

// The caller holds the mutex.
void DeviceBuffers::DeregisterIfUnused(DeviceBufferId id, const Buffer& buffer) {
  if (!buffer.removed || !buffer.registered || buffer.uses != 0) return;
  work_.push_back(id);
  wake_.notify_one();
}

void DeviceBuffers::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !work_.empty(); });
    if (stop_) return;
    const DeviceBufferId id = work_.front();
    work_.pop_front();
    if (buffers_.at(id).registered) {
      Deregister(id, lock);
    } else {
      Register(id, lock);
    }
  }
}

void DeviceBuffers::Register(DeviceBufferId id, std::unique_lock<std::mutex>& lock) {
  Buffer& buffer = buffers_.at(id);  // stays valid: only this thread erases it
  const UniqueFd descriptor = std::move(buffer.descriptor);
  const Added added = std::move(buffer.added);
  Status status = Error(Code::kAborted, "the memory was revoked");
  if (!buffer.removed) {
    lock.unlock();
    const Result<RegionId> region = RegisterDescriptor(descriptor.get(), buffer.bytes);
    lock.lock();
    status = region.status();
    if (region.ok()) {
      buffer.registered = true;
      buffer.region = *region;
      if (buffer.removed) {
        status = Error(Code::kAborted, "the memory was revoked");
        DeregisterIfUnused(id, buffer);
      }
    }
  }
  if (!buffer.registered) buffers_.erase(id);
  if (stop_) return;
  lock.unlock();
  added(status);
  lock.lock();
}

void DeviceBuffers::Deregister(DeviceBufferId id, std::unique_lock<std::mutex>& lock) {
  const RegionId region = buffers_.at(id).region;
  buffers_.erase(id);
  lock.unlock();
  const Status status = transport_.DeregisterRegion(region);
  if (!status.ok()) LOG_WARNING("device memory not deregistered: %s", status.ToString().c_str());
  lock.lock();
}

Result<RegionId> DeviceBuffers::RegisterDescriptor(int descriptor, uint64_t bytes) {
  // lseek() returns the size of a dmabuf. A descriptor of another kind may have no size.
  const off_t size = lseek(descriptor, 0, SEEK_END);
  if (size < 0) return Error(Code::kInvalidArgument, "the descriptor has no size: it is no dmabuf");
  if (static_cast<uint64_t>(size) < bytes)
    return Error(Code::kInvalidArgument, "device memory of %llu bytes in a dmabuf of %llu",
                 static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(size));
  return transport_.RegisterDmabuf(descriptor, 0, bytes);
}

}  // namespace ropeteam
