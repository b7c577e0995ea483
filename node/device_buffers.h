// SPDX-License-Identifier: Apache-2.0
//
// Memory of GPUs that ranks of this node have passed as dmabufs, registered with the transport as the
// source of puts. A card takes milliseconds to register a buffer, and hundreds of milliseconds for tens of gigabytes. So
// a separate thread does that; it is started when the first rank passes memory.
//
// A buffer that is removed stays registered until no put reads it any more, also when its rank is dead: the
// registration keeps the memory. A buffer that this node's card failed to read is not used again.
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

  // Registers the first `bytes` of a dmabuf; closes the descriptor when that is done. `added` is called once,
  // on the thread of the buffers, unless Stop() comes first: kOk; kInvalidArgument, when the descriptor has
  // no size or a smaller one; kAborted, when the buffer was removed meanwhile; and what RegisterDmabuf()
  // says.
  DeviceBufferId Add(UniqueFd descriptor, uint64_t bytes, Added added);
  // Of a buffer that was added and not refused. Whatever reads it goes on.
  void Remove(DeviceBufferId id);

  // The region to put from, which stays registered until EndUse(). kNotFound: it is being registered, was
  // removed, or cannot be read.
  Result<RegionId> Use(DeviceBufferId id);
  // `code`: how the use ended.
  void EndUse(DeviceBufferId id, Code code);

  // Registered now, also those that were removed and are still being read.
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
