// SPDX-License-Identifier: Apache-2.0
//
// A real GPU for the device memory suite, through the driver found at run time.

#ifndef ROPETEAM_TESTS_GPU_CUDA_RIG_H_
#define ROPETEAM_TESTS_GPU_CUDA_RIG_H_

#include <cstddef>
#include <vector>

#include "tests/api/cuda_rig.h"

namespace ropeteam::test {

class RealRig : public CudaRig {
 public:
  // False, with the reason, if there is no GPU.
  bool Open(std::string* why);

  int devices() override { return devices_; }
  void* Alloc(int device, uint64_t bytes, Kind kind) override;
  void Free(void* pointer, Kind kind) override;
  void Write(void* device, const std::string& bytes) override;
  std::string Read(const void* device, uint64_t length) override;
  void* MakeStream(int device, bool non_blocking) override;
  void DestroyStream(void* stream) override;
  void FillLater(void* stream, void* device, uint8_t value, uint64_t length) override;
  void Synchronize(void* stream) override;
  // The baseline of the bandwidth test.
  void CopyOut(void* host, const void* device, uint64_t bytes, void* stream);

 private:
  struct Scope {
    Scope(RealRig* rig, int device);
    ~Scope();
    RealRig* rig_;
  };

  int devices_ = 0;
  std::vector<void*> contexts_;
  int (*init_)(unsigned) = nullptr;
  int (*device_get_count_)(int*) = nullptr;
  int (*retain_)(void**, int) = nullptr;
  int (*push_)(void*) = nullptr;
  int (*pop_)(void**) = nullptr;
  int (*mem_alloc_)(unsigned long long*, size_t) = nullptr;
  int (*mem_alloc_async_)(unsigned long long*, size_t, void*) = nullptr;
  int (*mem_alloc_managed_)(unsigned long long*, size_t, unsigned) = nullptr;
  int (*mem_free_)(unsigned long long) = nullptr;
  int (*mem_host_alloc_)(void**, size_t, unsigned) = nullptr;
  int (*mem_free_host_)(void*) = nullptr;
  int (*htod_)(unsigned long long, const void*, size_t) = nullptr;
  int (*dtoh_)(void*, unsigned long long, size_t) = nullptr;
  int (*dtoh_async_)(void*, unsigned long long, size_t, void*) = nullptr;
  int (*memset_)(unsigned long long, unsigned char, size_t, void*) = nullptr;
  int (*stream_create_)(void**, unsigned) = nullptr;
  int (*stream_destroy_)(void*) = nullptr;
  int (*stream_synchronize_)(void*) = nullptr;
};

RealRig* TheRealRig(std::string* why);

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_GPU_CUDA_RIG_H_
