// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA driver API that saves and reads of device memory need, from a libcuda.so.1 found at run time.
// Nothing is linked, and no CUDA header is included: the names, numbers and signatures below are the driver's stable
// ABI (tests/api/cuda_abi_test.cc compares them with cuda.h if there is one).
//
// A process without CUDA must not notice this. So a pointer without a claim is examined only if libcuda is already
// loaded: a device pointer cannot come from anywhere else. This is checked again only after the dynamic loader has
// loaded something. libcuda is opened only for a caller who claims a device pointer; that caller gets an error if there
// is no libcuda.
//
// A build with ROPETEAM_CUDA=OFF finds no driver, and says so.
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
// Streams that are names and not handles: the null stream, and the legacy and per-thread default streams.
inline constexpr uintptr_t kCuStreamNamesEnd = 3;

// CUDA 11.0. All functions used here are older, except for dmabufs. But nothing below 11 was ever tested, and a clear
// refusal is better than a wrong copy on an older driver.
inline constexpr int kCuDriverVersionMin = 11000;

// The driver's information on a pointer to device memory. Values.
struct DevicePointer {
  CuDevicePtr address = 0;
  // Null: the memory belongs to no context (pools, memory mapped by hand). The device's primary context serves then.
  CuContext context = nullptr;
  CuDevice device = 0;  // ordinal
};

class CudaDriver {
 public:
  // The driver if this process has loaded it; never loads it. Null: no pointer here can be a device's.
  static const CudaDriver* IfLoaded();
  // For a pointer that is claimed to be a device's: loads the driver if necessary. kUnsupported: libcuda cannot be
  // loaded, lacks a function or is older than kCuDriverVersionMin; the message has its name and what is required.
  static Result<const CudaDriver*> Load();
  // "libcuda.so.1 of CUDA 13.0". Loads it; errors as of Load().
  static Result<std::string> Describe();

  // Classifies `pointer`: empty for host memory, page-locked or not, and for memory unknown to the driver.
  // kInvalidArgument: its context is gone, or the driver cannot classify it.
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

// Makes a context current in this thread during its lifetime; status() has the reason if it could not.
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
