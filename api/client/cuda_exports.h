// SPDX-License-Identifier: Apache-2.0
//
// CudaExports are the allocations of device memory that one connection's daemon may read directly (GPUDirect). Each is
// passed as a dmabuf, once, for all saves, because a network card takes milliseconds to register one. An allocation
// that the last saves have not used is revoked, because a dmabuf keeps the memory even after the program has freed it.
//
// Memory that the driver or the daemon refuses is saved through the arena like any other. The reason is logged once.
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
  // The place of [address, address + bytes): a buffer that the daemon has, and the offset in it. Buffer 0: none, so
  // copy the bytes through the arena. The first time, this may take as long as a registration. The caller's save uses
  // every returned buffer until it ends.
  struct Place {
    uint64_t buffer = 0;
    uint64_t offset = 0;
  };
  Place Find(const CudaDriver& driver, CuDevicePtr address, uint64_t bytes, const local::HelloReply& hello,
             Channel* channel);
  // The save that used these buffers has ended.
  void Release(const std::vector<uint64_t>& buffers, Channel* channel);

 private:
  // A buffer is revoked after this many saves without it. Saves that are open at the same time as one that uses it, and
  // a small one in between, must not revoke it.
  static constexpr uint64_t kSavesUnusedMax = 4;

  struct Allocation {
    unsigned long long id = 0;  // the driver's number, never reused
    CuDevicePtr begin = 0;      // of the dmabuf: the allocation's first page
    uint64_t bytes = 0;
    uint64_t buffer = 0;  // 0: refused
    uint32_t users = 0;
    uint64_t used_at = 0;  // the value of saves_ended_ at the last use
  };

  // The driver's information on the allocation around `address`; false: it cannot be exported.
  bool Describe(const CudaDriver& driver, CuDevicePtr address, Allocation* allocation) const;
  Status Export(const CudaDriver& driver, Allocation* allocation, Channel* channel);
  void SayStaged(const char* why);

  std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<Allocation> allocations_;
  uint64_t next_buffer_ = 1;
  uint64_t saves_ended_ = 0;
  bool unsupported_ = false;  // the driver or the daemon does not support it at all
  bool said_staged_ = false;
  bool said_direct_ = false;
  FrameBuffers frames_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CUDA_EXPORTS_H_
