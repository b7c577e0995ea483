// SPDX-License-Identifier: Apache-2.0
//
// CudaLanes are the lanes of one client, one for each CUDA context that its saves and reads have met, made
// when they first meet it. Destroyed with the client, after its saves and views, before its arena.
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

// The legacy default stream: behind everything that was given to any stream of the context that is not
// non-blocking.
inline const CuStream kCuStreamLegacy = reinterpret_cast<CuStream>(uintptr_t{1});

// Device memory that a call was given, and the point in the caller's stream from which on it may be used.
struct CudaTicket {
  DevicePointer pointer;
  std::shared_ptr<CudaLane> lane;        // of the memory's context
  std::shared_ptr<CudaLane> ready_lane;  // of the stream's context, whose event this is
  CuEvent ready = nullptr;
};

class CudaLanes {
 public:
  // What `pointer` is, for a caller who has not said: nothing if it is host memory, which costs next to
  // nothing where there is no CUDA. The stream is the legacy default one. Errors as Claimed().
  Result<std::optional<CudaTicket>> Unclaimed(const void* pointer, Arena* arena);
  // For a caller who says that `pointer` is device memory. kInvalidArgument: it is not, its context is gone,
  // or `stream` is no stream. kUnsupported: no driver, or too old a one.
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
