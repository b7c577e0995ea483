// SPDX-License-Identifier: Apache-2.0
//
// The GPU operations of the device memory suite (cuda_suite.cc). So one suite runs on the fake driver
// (tests/api) and on a real one (tests/gpu).

#ifndef ROPETEAM_TESTS_API_CUDA_RIG_H_
#define ROPETEAM_TESTS_API_CUDA_RIG_H_

#include <cstdint>
#include <string>

namespace ropeteam::test {

class CudaRig {
 public:
  enum class Kind { kDevice, kPool, kManaged, kHost };

  virtual ~CudaRig() = default;
  virtual int devices() = 0;
  // Null: this machine has no memory of this kind.
  virtual void* Alloc(int device, uint64_t bytes, Kind kind) = 0;
  virtual void Free(void* pointer, Kind kind) = 0;
  // Immediate: the bytes are written when this returns.
  virtual void Write(void* device, const std::string& bytes) = 0;
  virtual std::string Read(const void* device, uint64_t length) = 0;
  virtual void* MakeStream(int device, bool non_blocking) = 0;
  virtual void DestroyStream(void* stream) = 0;
  // Asynchronous and slow: at the end of the stream's work `length` bytes have this value; before that,
  // another one.
  virtual void FillLater(void* stream, void* device, uint8_t value, uint64_t length) = 0;
  virtual void Synchronize(void* stream) = 0;
};

// This test program's rig. Null, with the reason, if this machine has no such device.
CudaRig* TheRig(std::string* why);

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_CUDA_RIG_H_
