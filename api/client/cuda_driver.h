// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver API, as much of it as saves and reads of device memory need, through libcuda.so.1 found at
// run time. Nothing is linked and no header of CUDA's is included: names, numbers and signatures below are
// the driver's stable ABI (tests/api/cuda_abi_test.cc holds them against cuda.h where there is one).
//
// A process that has nothing to do with CUDA must not notice this. So an unclaimed pointer is looked at only
// when libcuda is in the process already: a device pointer cannot come from anywhere else. Whether it is, is
// asked again only when the dynamic loader has loaded something since. Only a caller who says that a pointer
// is the device's has the library opened, and gets an error when there is none.
//
// A build with ROPETEAM_CUDA=OFF finds none, and says so.
//
// Safe from any thread. A driver, once found, is never unloaded.

#ifndef ROPETEAM_API_CLIENT_CUDA_DRIVER_H_
#define ROPETEAM_API_CLIENT_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/base/status.h"

namespace ropeteam::client {

using CuResult = int;
using CuDevice = int;
using CuDevicePtr = unsigned long long;
using CuContext = struct CuContextOpaque*;
using CuStream = struct CuStreamOpaque*;
using CuEvent = struct CuEventOpaque*;

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuInvalidValue = 1;
inline constexpr CuResult kCuNotInitialized = 3;
inline constexpr CuResult kCuDeinitialized = 4;
inline constexpr CuResult kCuInvalidContext = 201;
inline constexpr CuResult kCuInvalidHandle = 400;
inline constexpr CuResult kCuNotReady = 600;
inline constexpr CuResult kCuContextIsDestroyed = 709;
inline constexpr CuResult kCuHostMemoryAlreadyRegistered = 712;
inline constexpr CuResult kCuNotSupported = 801;

inline constexpr int kCuPointerContext = 1;
inline constexpr int kCuPointerMemoryType = 2;
inline constexpr int kCuPointerBufferId = 7;
inline constexpr int kCuPointerIsManaged = 8;
inline constexpr int kCuPointerDeviceOrdinal = 9;
inline constexpr int kCuPointerRangeStart = 11;
inline constexpr int kCuPointerRangeSize = 12;
inline constexpr unsigned kCuMemoryTypeHost = 1;
inline constexpr unsigned kCuMemoryTypeDevice = 2;

inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventBlockingSync = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr unsigned kCuMemHostRegisterPortable = 1;
inline constexpr int kCuMemRangeHandleTypeDmaBufFd = 1;
// Streams that are names and not handles: the null stream, the legacy and the per-thread default stream.
inline constexpr uintptr_t kCuStreamNamesEnd = 3;

// CUDA 11.0. Everything we call is older, except for dmabufs; but nothing below 11 was ever tried, and a
// clear refusal is better than a copy that is wrong on a driver from before the GPUs this was written for.
inline constexpr int kCuDriverVersionMin = 11000;

// What the driver says of a pointer to a device's memory. Values.
struct DevicePointer {
  CuDevicePtr address = 0;
  // Null: not of one context's (pools, memory mapped by hand); the device's primary one will do
  CuContext context = nullptr;
  CuDevice device = 0;  // ordinal
};

class CudaDriver {
 public:
  // The driver, if this process has loaded it; never loads it. Null: no pointer here can be a device's.
  static const CudaDriver* IfLoaded();
  // For a pointer that is said to be a device's: loads the driver if need be. kUnsupported: libcuda cannot be
  // loaded, lacks an entry point or is older than kCuDriverVersionMin; the message has its name and what is
  // wanted.
  static Result<const CudaDriver*> Load();
  // "libcuda.so.1 of CUDA 13.0", loading it; the errors of Load().
  static Result<std::string> Describe();

  // What `pointer` is: nothing for host memory, page-locked or not, and for what the driver does not know.
  // kInvalidArgument: the driver says that its context is gone, or fails to say what it is.
  Result<std::optional<DevicePointer>> Classify(const void* pointer) const;
  // kUnsupported below kCuDriverVersionMin.
  Status CheckVersion() const;
  // "what: CUDA_ERROR_X (n)".
  Status ErrorOf(CuResult result, const char* what) const;

  CuResult (*driver_get_version)(int* version);
  CuResult (*get_error_name)(CuResult result, const char** name);
  CuResult (*pointer_get_attributes)(unsigned count, int* attributes, void** data, CuDevicePtr pointer);
  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*device_primary_ctx_retain)(CuContext* context, CuDevice device);
  CuResult (*device_primary_ctx_release)(CuDevice device);
  CuResult (*ctx_push_current)(CuContext context);
  CuResult (*ctx_pop_current)(CuContext* context);
  CuResult (*stream_create)(CuStream* stream, unsigned flags);
  CuResult (*stream_destroy)(CuStream stream);
  CuResult (*stream_get_ctx)(CuStream stream, CuContext* context);
  CuResult (*stream_synchronize)(CuStream stream);
  CuResult (*event_create)(CuEvent* event, unsigned flags);
  CuResult (*event_record)(CuEvent event, CuStream stream);
  CuResult (*event_query)(CuEvent event);
  CuResult (*event_synchronize)(CuEvent event);
  CuResult (*event_destroy)(CuEvent event);
  CuResult (*memcpy_dtoh_async)(void* target, CuDevicePtr source, size_t bytes, CuStream stream);
  CuResult (*memcpy_htod_async)(CuDevicePtr target, const void* source, size_t bytes, CuStream stream);
  CuResult (*mem_host_register)(void* begin, size_t bytes, unsigned flags);
  CuResult (*mem_host_unregister)(void* begin);
  // Since CUDA 11.7; null before.
  CuResult (*mem_get_handle_for_address_range)(void* handle, CuDevicePtr begin, size_t bytes, int type,
                                               unsigned long long flags);

 private:
  static Result<const CudaDriver*> Bind(void* library);
};

// Makes a context current in this thread for as long as it lives; status() is why it could not.
class CudaScope {
 public:
  CudaScope(const CudaDriver& driver, CuContext context)
      : driver_(driver), result_(driver.ctx_push_current(context)) {}
  ~CudaScope() {
    CuContext popped = nullptr;
    // Ignore errors: the context may have been destroyed meanwhile, and is then no longer current either.
    if (result_ == kCuSuccess) (void)driver_.ctx_pop_current(&popped);
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  CuResult result() const { return result_; }

 private:
  const CudaDriver& driver_;
  const CuResult result_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CUDA_DRIVER_H_
