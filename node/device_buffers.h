// SPDX-License-Identifier: Apache-2.0
//
// GPU memory that ranks of this node have passed as dmabufs, registered with the transport as the source of puts. A
// card takes milliseconds to register a buffer, and hundreds of milliseconds for tens of gigabytes. So a separate
// thread does that; it starts when the first rank passes memory.
//
// A removed buffer stays registered until no put reads it any more, even if its rank is dead: the registration keeps
// the memory. A buffer that this node's card failed to read is not used again.
//
// Safe from any thread.

#ifndef ROPETEAM_NODE_DEVICE_BUFFERS_H_
#define ROPETEAM_NODE_DEVICE_BUFFERS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "node/unique_fd.h"
#include "transport/transport.h"

namespace ropeteam {

class DeviceBuffers {
 public:
  using Added = std::function<void(const Status&)>;

  // `transport` must outlive this object.
  explicit DeviceBuffers(Transport* transport) : transport_(*transport) {}
  ~DeviceBuffers() { Stop(); }

  // Registers the first `bytes` of a dmabuf, and closes the descriptor afterwards. `added` is called once, on the
  // thread of the buffers, unless Stop() comes first. kOk; kInvalidArgument: the descriptor has no size or a smaller
  // one; kAborted: the buffer was removed meanwhile; or the error of RegisterDmabuf().
  DeviceBufferId Add(UniqueFd descriptor, uint64_t bytes, Added added);
  // For a buffer that was added and not refused. Running reads continue.
  void Remove(DeviceBufferId id);

  // The region to put from; it stays registered until EndUse(). kNotFound: it is still being registered, was removed,
  // or cannot be read.
  Result<RegionId> Use(DeviceBufferId id);
  // `code`: how the use ended.
  void EndUse(DeviceBufferId id, Code code);

  // Buffers that are registered now, removed ones that are still being read included.
  size_t registered() const;

  // Deregisters everything; nothing may be in use. No `added` is called after the return. Idempotent.
  void Stop();

  DeviceBuffers(const DeviceBuffers&) = delete;
  DeviceBuffers& operator=(const DeviceBuffers&) = delete;

 private:
  struct Buffer {
    uint64_t bytes = 0;
    UniqueFd descriptor;  // until it is registered
    Added added;          // likewise
    bool registered = false;
    RegionId region = 0;
    uint32_t uses = 0;
    bool removed = false;
    bool unreadable = false;
  };

  void Run();
  void Register(DeviceBufferId id, std::unique_lock<std::mutex>& lock);
  void Deregister(DeviceBufferId id, std::unique_lock<std::mutex>& lock);
  Result<RegionId> RegisterDescriptor(int descriptor, uint64_t bytes);
  void DeregisterIfUnused(DeviceBufferId id, const Buffer& buffer);

  Transport& transport_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  // Guarded by mutex_:
  std::thread thread_;
  std::map<DeviceBufferId, Buffer> buffers_;
  std::deque<DeviceBufferId> work_;  // to be registered or, being removed and unused, deregistered
  DeviceBufferId next_ = 1;
  bool stop_ = false;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_DEVICE_BUFFERS_H_
