// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/cuda_rig.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace ropeteam::test {
namespace {

// Ends the test with the call and the error number if a necessary driver call fails.
void Must(int result, const char* call) {
  if (result == 0) return;
  std::fprintf(stderr, "%s: CUDA error %d\n", call, result);
  std::abort();
}
#define MUST(call) Must(call, #call)

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

bool RealRig::Open(std::string* why) {
  const char* name = std::getenv("ROPETEAM_LIBCUDA");
  void* library = ::dlopen(name != nullptr ? name : "libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    *why = std::string("no GPU driver on this machine: ") + ::dlerror();
    return false;
  }
  bool whole =
      Find(library, "cuInit", &init_) && Find(library, "cuDeviceGetCount", &device_get_count_) &&
      Find(library, "cuDevicePrimaryCtxRetain", &retain_) && Find(library, "cuCtxPushCurrent_v2", &push_) &&
      Find(library, "cuCtxPopCurrent_v2", &pop_) && Find(library, "cuMemAlloc_v2", &mem_alloc_) &&
      Find(library, "cuMemFree_v2", &mem_free_) && Find(library, "cuMemAllocManaged", &mem_alloc_managed_) &&
      Find(library, "cuMemHostAlloc", &mem_host_alloc_) && Find(library, "cuMemFreeHost", &mem_free_host_) &&
      Find(library, "cuMemcpyHtoD_v2", &htod_) && Find(library, "cuMemcpyDtoH_v2", &dtoh_) &&
      Find(library, "cuMemcpyDtoHAsync_v2", &dtoh_async_) && Find(library, "cuMemsetD8Async", &memset_) &&
      Find(library, "cuStreamCreate", &stream_create_) &&
      Find(library, "cuStreamDestroy_v2", &stream_destroy_) &&
      Find(library, "cuStreamSynchronize", &stream_synchronize_);
  if (!whole) {
    *why = "the GPU driver of this machine lacks a call that these tests make";
    return false;
  }
  // Older drivers have no pools, so there is no such memory to test.
  if (!Find(library, "cuMemAllocAsync", &mem_alloc_async_)) mem_alloc_async_ = nullptr;
  if (const int result = init_(0); result != 0) {
    *why = "the GPU driver does not start: CUDA error " + std::to_string(result);
    return false;
  }
  if (const int result = device_get_count_(&devices_); result != 0 || devices_ == 0) {
    *why = "no GPU on this machine";
    return false;
  }
  for (int device = 0; device < devices_; ++device) {
    contexts_.push_back(nullptr);
    MUST(retain_(&contexts_.back(), device));
  }
  return true;
}

RealRig::Scope::Scope(RealRig* rig, int device) : rig_(rig) { MUST(rig->push_(rig->contexts_.at(device))); }
RealRig::Scope::~Scope() {
  void* popped = nullptr;
  MUST(rig_->pop_(&popped));
}

void* RealRig::Alloc(int device, uint64_t bytes, Kind kind) {
  const Scope scope(this, device);
  unsigned long long pointer = 0;
  void* host = nullptr;
  switch (kind) {
    case Kind::kDevice:
      MUST(mem_alloc_(&pointer, bytes));
      break;
    case Kind::kPool:
      if (mem_alloc_async_ == nullptr || mem_alloc_async_(&pointer, bytes, nullptr) != 0) return nullptr;
      MUST(stream_synchronize_(nullptr));
      break;
    case Kind::kManaged:
      if (mem_alloc_managed_(&pointer, bytes, /*CU_MEM_ATTACH_GLOBAL*/ 1) != 0) return nullptr;
      break;
    case Kind::kHost:
      MUST(mem_host_alloc_(&host, bytes, 0));
      return host;
  }
  return reinterpret_cast<void*>(uintptr_t{pointer});
}

void RealRig::Free(void* pointer, Kind kind) {
  const Scope scope(this, 0);
  if (kind == Kind::kHost) {
    MUST(mem_free_host_(pointer));
  } else {
    MUST(mem_free_(reinterpret_cast<uintptr_t>(pointer)));
  }
}

void RealRig::Write(void* device, const std::string& bytes) {
  const Scope scope(this, 0);
  MUST(htod_(reinterpret_cast<uintptr_t>(device), bytes.data(), bytes.size()));
}

std::string RealRig::Read(const void* device, uint64_t length) {
  const Scope scope(this, 0);
  std::string bytes(length, '\0');
  MUST(dtoh_(bytes.data(), reinterpret_cast<uintptr_t>(device), length));
  return bytes;
}

void* RealRig::MakeStream(int device, bool non_blocking) {
  const Scope scope(this, device);
  void* stream = nullptr;
  MUST(stream_create_(&stream, non_blocking ? 1 : 0));
  return stream;
}

void RealRig::DestroyStream(void* stream) { MUST(stream_destroy_(stream)); }

void RealRig::FillLater(void* stream, void* device, uint8_t value, uint64_t length) {
  const Scope scope(this, 0);
  // Some milliseconds of work: a copy that does not wait finds another value.
  constexpr int kFills = 500;
  for (int i = 1; i <= kFills; ++i) {
    const auto fill = static_cast<unsigned char>(i == kFills ? value : i % 50);
    MUST(memset_(reinterpret_cast<uintptr_t>(device), fill, length, stream));
  }
}

void RealRig::Synchronize(void* stream) { MUST(stream_synchronize_(stream)); }

void RealRig::CopyOut(void* host, const void* device, uint64_t bytes, void* stream) {
  const Scope scope(this, 0);
  MUST(dtoh_async_(host, reinterpret_cast<uintptr_t>(device), bytes, stream));
}

RealRig* TheRealRig(std::string* why) {
  static std::string reason;
  static RealRig* rig = []() -> RealRig* {
    auto* made = new RealRig;  // never freed: the end of the process releases the contexts
    return made->Open(&reason) ? made : nullptr;
  }();
  *why = reason;
  return rig;
}

CudaRig* TheRig(std::string* why) { return TheRealRig(why); }

}  // namespace ropeteam::test
