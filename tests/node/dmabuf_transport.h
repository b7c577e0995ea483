// SPDX-License-Identifier: Apache-2.0
//
// The in-process transport with a card that reads device memory. A "dmabuf" is any descriptor that can be
// mapped, such as the memfds of the fake CUDA driver. A test can make registrations and puts from it fail or
// wait.

#ifndef ROPETEAM_TESTS_NODE_DMABUF_TRANSPORT_H_
#define ROPETEAM_TESTS_NODE_DMABUF_TRANSPORT_H_

#include <sys/mman.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/node/forwarding_transport.h"

namespace ropeteam {

// Shared by a test and its transport, and outlives both. Safe from any thread.
class DmabufControl {
 public:
  // From now on every registration ends with this status.
  void Refuse(Status status) {
    Change([&] { refusal_ = std::move(status); });
  }
  // Registrations wait while `held`.
  void HoldRegistrations(bool held) {
    Change([&] { held_ = held; });
  }
  // From now on every put from device memory completes with this code and moves nothing; kOk ends that.
  void FailPuts(Code code) {
    Change([&] { put_code_ = code; });
  }

  uint64_t registered() const { return Look(registered_); }
  uint64_t registrations() const { return Look(registrations_); }
  // Puts from device memory that have begun.
  uint64_t puts() const { return Look(puts_); }
  // Waits for a registration that is being held.
  bool WaitForHeld() const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return waiting_ != 0; });
  }

 private:
  friend class DmabufTransport;
  template <typename Function>
  void Change(Function function) {
    const std::lock_guard lock(mutex_);
    function();
    changed_.notify_all();
  }
  uint64_t Look(const uint64_t& counter) const {
    const std::lock_guard lock(mutex_);
    return counter;
  }
  Status EnterRegistration() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !held_; });
    --waiting_;
    ++registrations_;
    return refusal_;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Status refusal_;
  bool held_ = false;
  size_t waiting_ = 0;
  Code put_code_ = Code::kOk;
  uint64_t registered_ = 0;
  uint64_t registrations_ = 0;
  uint64_t puts_ = 0;
};

class DmabufTransport : public ForwardingTransport {
 public:
  DmabufTransport(std::unique_ptr<Transport> inner, std::shared_ptr<DmabufControl> control)
      : ForwardingTransport(std::move(inner)), control_(std::move(control)) {
    capabilities_.dmabuf = true;
  }

  Result<RegionId> RegisterDmabuf(int fd, uint64_t offset, uint64_t length) override {
    ROPETEAM_RETURN_IF_ERROR(control_->EnterRegistration());
    void* memory = mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(offset));
    if (memory == MAP_FAILED) return ErrnoError(errno, "map a dmabuf");
    Result<RegionId> region = RegisterRegion(memory, length);
    if (!region.ok()) {
      munmap(memory, length);
      return region;
    }
    const std::lock_guard lock(mutex_);
    mapped_[*region] = {memory, length};
    control_->Change([&] { ++control_->registered_; });
    return region;
  }
  Status DeregisterRegion(RegionId region) override {
    ROPETEAM_RETURN_IF_ERROR(ForwardingTransport::DeregisterRegion(region));
    const std::lock_guard lock(mutex_);
    const auto mapped = mapped_.extract(region);
    if (mapped.empty()) return OkStatus();
    munmap(mapped.mapped().first, mapped.mapped().second);
    control_->Change([&] { --control_->registered_; });
    return OkStatus();
  }
  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    Code code = Code::kOk;
    {
      const std::lock_guard lock(mutex_);
      if (mapped_.contains(local)) {
        control_->Change([&] {
          ++control_->puts_;
          code = control_->put_code_;
        });
      }
    }
    if (code == Code::kOk)
      return ForwardingTransport::Put(peer, local, local_offset, remote, remote_offset, length, context);
    failed_.push_back({OperationKind::kPut, peer, context, code});
    Wake();
    return OkStatus();
  }
  size_t Poll(Completion* out, size_t capacity) override {
    if (capacity != 0 && !failed_.empty()) {
      *out = failed_.front();
      failed_.pop_front();
      return 1;
    }
    return ForwardingTransport::Poll(out, capacity);
  }

 private:
  const std::shared_ptr<DmabufControl> control_;
  std::mutex mutex_;
  std::map<RegionId, std::pair<void*, uint64_t>> mapped_;  // guarded by mutex_
  std::deque<Completion> failed_;                          // loop thread only
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_NODE_DMABUF_TRANSPORT_H_
