// SPDX-License-Identifier: Apache-2.0
//
// What the device memory suite (cuda_suite.cc) needs of a GPU, so that one suite runs on the fake driver
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
  // Null: this machine has none of the kind.
  virtual void* Alloc(int device, uint64_t bytes, Kind kind) = 0;
  virtual void Free(void* pointer, Kind kind) = 0;
  // At once, and done at return.
  virtual void Write(void* device, const std::string& bytes) = 0;
  virtual std::string Read(const void* device, uint64_t length) = 0;
  virtual void* MakeStream(int device, bool non_blocking) = 0;
  virtual void DestroyStream(void* stream) = 0;
  // Asynchronous and slow: the stream's work ends in `length` bytes of this value, and what is there before
  // is other.
  virtual void FillLater(void* stream, void* device, uint8_t value, uint64_t length) = 0;
  virtual void Synchronize(void* stream) = 0;
};

// The one of this test program; null, with the reason, when this machine has no such device.
CudaRig* TheRig(std::string* why);

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_CUDA_RIG_H_
