// SPDX-License-Identifier: Apache-2.0
//
// CudaExports are the allocations of device memory that one connection's daemon has been given to read by
// itself (GPUDirect): each as a dmabuf, once, however many saves it is in. Not with every save, because a
// network card takes milliseconds to register one; and not for ever, because a dmabuf keeps the memory of an
// allocation that the program has freed: one that the last saves have not used is revoked.
//
// Whatever is refused, by the driver or the daemon, is saved through the arena like anything else; why is
// logged, once.
//
// Safe from any thread.

#ifndef ROPETEAM_API_CLIENT_CUDA_EXPORTS_H_
#define ROPETEAM_API_CLIENT_CUDA_EXPORTS_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "api/client/channel.h"
#include "api/client/cuda_driver.h"
#include "api/client/local_protocol.h"
#include "core/base/status.h"

namespace ropeteam::client {

class CudaExports {
 public:
  // Where [address, address + bytes) is to be found: a buffer that the daemon has, and the offset in it.
  // Buffer 0: nowhere, copy it through the arena. May take the time of a registration, the first time. Every
  // buffer that is found is used by the caller's save until that ends.
  struct Place {
    uint64_t buffer = 0;
    uint64_t offset = 0;
  };
  Place Find(const CudaDriver& driver, CuDevicePtr address, uint64_t bytes, const local::HelloReply& hello,
             Channel* channel);
  // The save that used these has ended.
  void Release(const std::vector<uint64_t>& buffers, Channel* channel);

 private:
  // Saves that may end without having used a buffer before it is revoked: those that are open beside one
  // that uses it, and a small one in between.
  static constexpr uint64_t kSavesUnusedMax = 4;

  struct Allocation {
    unsigned long long id = 0;  // the driver's, never used again
    CuDevicePtr begin = 0;      // of the dmabuf: the allocation's first page
    uint64_t bytes = 0;
    uint64_t buffer = 0;  // 0: refused
    uint32_t users = 0;
    uint64_t used_at = 0;  // as saves_ended_ was
  };

  // What the driver says of the allocation around `address`; false: nothing that could be exported.
  bool Describe(const CudaDriver& driver, CuDevicePtr address, Allocation* allocation) const;
  Status Export(const CudaDriver& driver, Allocation* allocation, Channel* channel);
  void SayStaged(const char* why);

  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<Allocation> allocations_;
  uint64_t next_buffer_ = 1;
  uint64_t saves_ended_ = 0;
  bool unsupported_ = false;  // the driver or the daemon cannot at all
  bool said_staged_ = false;
  bool said_direct_ = false;
  FrameBuffers frames_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CUDA_EXPORTS_H_
