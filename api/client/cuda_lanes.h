// SPDX-License-Identifier: Apache-2.0
//
// CudaLanes are the lanes of one client, one per CUDA context that its saves and reads use, created on first use.
// Destroyed with the client, after its saves and views and before its arena.
//
// Safe from any thread.

#ifndef ROPETEAM_API_CLIENT_CUDA_LANES_H_
#define ROPETEAM_API_CLIENT_CUDA_LANES_H_

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "api/client/arena.h"
#include "api/client/cuda_driver.h"
#include "api/client/cuda_lane.h"
#include "core/base/status.h"

namespace ropeteam::client {

// The legacy default stream: ordered after everything given to any blocking stream of the context.
inline const CuStream kCuStreamLegacy = reinterpret_cast<CuStream>(uintptr_t{1});

// Device memory passed to a call, and the point in the caller's stream from which it may be used.
struct CudaTicket {
  DevicePointer pointer;
  std::shared_ptr<CudaLane> lane;        // of the memory's context
  std::shared_ptr<CudaLane> ready_lane;  // of the stream's context, which owns the event
  CuEvent ready = nullptr;
};

class CudaLanes {
 public:
  // Classifies `pointer` for a caller who makes no claim: empty for host memory. Without CUDA this costs next to
  // nothing. The stream is the legacy default one. Errors as Claimed().
  Result<std::optional<CudaTicket>> Unclaimed(const void* pointer, Arena* arena);
  // For a caller who claims that `pointer` is device memory. kInvalidArgument: it is not, its context is gone, or
  // `stream` is invalid. kUnsupported: there is no driver, or it is too old.
  Result<CudaTicket> Claimed(const void* pointer, CuStream stream, Arena* arena);

 private:
  Result<CudaTicket> Make(const CudaDriver& driver, const DevicePointer& pointer, CuStream stream,
                          Arena* arena);
  Result<std::shared_ptr<CudaLane>> Get(const CudaDriver& driver, const DevicePointer& pointer, Arena* arena);

  std::mutex mutex_;
  // Guarded by mutex_:
  struct Entry {
    CuContext asked;  // null: the device's primary one
    CuDevice device;
    std::shared_ptr<CudaLane> lane;
  };
  std::vector<Entry> lanes_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CUDA_LANES_H_
