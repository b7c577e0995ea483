// SPDX-License-Identifier: Apache-2.0
#include "api/client/cuda_driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

namespace ropeteam::client {
namespace {

// The name that every driver installs and every CUDA runtime opens.
constexpr const char* kLibrary = "libcuda.so.1";

#ifdef ROPETEAM_HAVE_CUDA
constexpr bool kBuilt = true;
#else
constexpr bool kBuilt = false;
#endif

struct Found {
  std::mutex mutex;
  std::atomic<const CudaDriver*> driver = nullptr;
  std::atomic<unsigned long long> loads_seen = 0;  // LoadsSoFar() at the last search without success
};
// Leaked on purpose: a save may run while the process exits.
Found& TheFound() {
  static auto* found = new Found;
  return *found;
}

const std::string& LibraryName() {
  static const auto* name = [] {
    const char* given = std::getenv("ROPETEAM_LIBCUDA");
    return new std::string(given != nullptr && *given != '\0' ? given : kLibrary);
  }();
  return *name;
}

// How often the dynamic loader has loaded something. This costs one callback and touches no file.
unsigned long long LoadsSoFar() {
  unsigned long long loads = 0;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<unsigned long long*>(out) = info->dlpi_adds;
        return 1;
      },
      &loads);
  return loads;
}

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

Result<const CudaDriver*> CudaDriver::Bind(void* library) {
  auto driver = std::make_unique<CudaDriver>();
  const char* missing = nullptr;
  const auto need = [&](const char* name, auto* function) {
    if (!Find(library, name, function) && missing == nullptr) missing = name;
  };
  need("cuDriverGetVersion", &driver->driver_get_version);
  need("cuGetErrorName", &driver->get_error_name);
  need("cuPointerGetAttributes", &driver->pointer_get_attributes);
  need("cuDeviceGet", &driver->device_get);
  need("cuDevicePrimaryCtxRetain", &driver->device_primary_ctx_retain);
  need("cuDevicePrimaryCtxRelease_v2", &driver->device_primary_ctx_release);
  need("cuCtxPushCurrent_v2", &driver->ctx_push_current);
  need("cuCtxPopCurrent_v2", &driver->ctx_pop_current);
  need("cuStreamCreate", &driver->stream_create);
  need("cuStreamDestroy_v2", &driver->stream_destroy);
  need("cuStreamGetCtx", &driver->stream_get_ctx);
  need("cuStreamSynchronize", &driver->stream_synchronize);
  need("cuEventCreate", &driver->event_create);
  need("cuEventRecord", &driver->event_record);
  need("cuEventQuery", &driver->event_query);
  need("cuEventSynchronize", &driver->event_synchronize);
  need("cuEventDestroy_v2", &driver->event_destroy);
  need("cuMemcpyDtoHAsync_v2", &driver->memcpy_dtoh_async);
  need("cuMemcpyHtoDAsync_v2", &driver->memcpy_htod_async);
  need("cuMemHostRegister_v2", &driver->mem_host_register);
  need("cuMemHostUnregister", &driver->mem_host_unregister);
  Find(library, "cuMemGetHandleForAddressRange", &driver->mem_get_handle_for_address_range);
  if (missing != nullptr) {
    return Error(Code::kUnsupported, "%s has no %s: a driver of CUDA %d.%d or newer is needed",
                 LibraryName().c_str(), missing, kCuDriverVersionMin / 1000, kCuDriverVersionMin % 1000 / 10);
  }
  return driver.release();
}

const CudaDriver* CudaDriver::IfLoaded() {
  if (!kBuilt) return nullptr;
  Found& found = TheFound();
  if (const CudaDriver* driver = found.driver.load(std::memory_order_acquire)) return driver;
  const unsigned long long loads = LoadsSoFar();
  if (found.loads_seen.load(std::memory_order_relaxed) == loads) return nullptr;
  const std::lock_guard lock(found.mutex);
  if (found.driver.load(std::memory_order_relaxed) == nullptr) {
    void* library = ::dlopen(LibraryName().c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library != nullptr) {
      // Ignore the error: a driver without these entry points has no memory that we could copy. A caller that
      // claims a pointer gets the error.
      if (const Result<const CudaDriver*> driver = Bind(library); driver.ok()) {
        found.driver.store(*driver, std::memory_order_release);
      }
    }
    found.loads_seen.store(loads, std::memory_order_relaxed);
  }
  return found.driver.load(std::memory_order_relaxed);
}

Result<const CudaDriver*> CudaDriver::Load() {
  if (!kBuilt) return Error(Code::kUnsupported, "this build has no device memory: ROPETEAM_CUDA is OFF");
  Found& found = TheFound();
  const std::lock_guard lock(found.mutex);
  if (found.driver.load(std::memory_order_relaxed) == nullptr) {
    void* library = ::dlopen(LibraryName().c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = ::dlerror();
      return Error(Code::kUnsupported, "device memory needs NVIDIA's driver library: %s",
                   why != nullptr ? why : LibraryName().c_str());
    }
    Result<const CudaDriver*> driver = Bind(library);
    if (!driver.ok()) return driver;
    found.driver.store(*driver, std::memory_order_release);
  }
  const CudaDriver* driver = found.driver.load(std::memory_order_relaxed);
  ROPETEAM_RETURN_IF_ERROR(driver->CheckVersion());
  return driver;
}

Result<std::string> CudaDriver::Describe() {
  const Result<const CudaDriver*> driver = Load();
  if (!driver.ok()) return driver.status();
  int version = 0;
  if (const CuResult result = (*driver)->driver_get_version(&version); result != kCuSuccess)
    return (*driver)->ErrorOf(result, "cuDriverGetVersion");
  return LibraryName() + " of CUDA " + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10);
}

Status CudaDriver::CheckVersion() const {
  int version = 0;
  if (const CuResult result = driver_get_version(&version); result != kCuSuccess) {
    return Status(Code::kUnsupported, ErrorOf(result, "cuDriverGetVersion").message());
  }
  if (version >= kCuDriverVersionMin) return OkStatus();
  return Error(Code::kUnsupported, "%s is of CUDA %d.%d, needed is %d.%d or newer", LibraryName().c_str(),
               version / 1000, version % 1000 / 10, kCuDriverVersionMin / 1000,
               kCuDriverVersionMin % 1000 / 10);
}

Status CudaDriver::ErrorOf(CuResult result, const char* what) const {
  const char* name = nullptr;
  if (get_error_name(result, &name) != kCuSuccess || name == nullptr) name = "an unknown error";
  return Error(Code::kIo, "%s: %s (%d)", what, name, result);
}

Result<std::optional<DevicePointer>> CudaDriver::Classify(const void* pointer) const {
  DevicePointer found;
  found.address = static_cast<CuDevicePtr>(reinterpret_cast<uintptr_t>(pointer));
  unsigned type = 0;
  unsigned managed = 0;  // the driver writes a bool of four bytes
  int attributes[] = {kCuPointerMemoryType, kCuPointerContext, kCuPointerDeviceOrdinal, kCuPointerIsManaged};
  void* values[] = {&type, &found.context, &found.device, &managed};
  const CuResult result = pointer_get_attributes(4, attributes, values, found.address);
  // A driver that is not initialised has not allocated any memory, and one that is shut down has none left.
  if (result == kCuNotInitialized || result == kCuDeinitialized || result == kCuInvalidValue) {
    return std::optional<DevicePointer>();
  }
  if (result == kCuContextIsDestroyed || result == kCuInvalidContext) {
    return Error(Code::kInvalidArgument, "a pointer into memory of a CUDA context that is gone: %s",
                 ErrorOf(result, "cuPointerGetAttributes").message().c_str());
  }
  if (result != kCuSuccess) {
    return Error(Code::kInvalidArgument, "a pointer that the CUDA driver does not know: %s",
                 ErrorOf(result, "cuPointerGetAttributes").message().c_str());
  }
  // Managed memory may be on the host or on the device, and a CPU that touches it while kernels run may
  // fault. So the driver copies it.
  if (type != kCuMemoryTypeDevice && (managed & 0xff) == 0) return std::optional<DevicePointer>();
  return std::optional<DevicePointer>(found);
}

}  // namespace ropeteam::client
