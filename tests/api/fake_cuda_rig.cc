// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>

#include "tests/api/cuda_rig.h"
#include "tests/api/fake_cuda.h"

namespace ropeteam::test {
namespace {

class FakeRig : public CudaRig {
 public:
  int devices() override { return FAKE_CUDA_DEVICES; }
  void* Alloc(int device, uint64_t bytes, Kind kind) override {
    return fake_cuda_alloc(device, bytes, static_cast<fake_cuda_kind>(kind));
  }
  void Free(void* pointer, Kind) override { fake_cuda_free(pointer); }
  void Write(void* device, const std::string& bytes) override {
    fake_cuda_write(device, bytes.data(), bytes.size());
  }
  std::string Read(const void* device, uint64_t length) override {
    std::string bytes(length, '\0');
    fake_cuda_read(device, bytes.data(), length);
    return bytes;
  }
  void* MakeStream(int device, bool non_blocking) override {
    return fake_cuda_stream_create(device, non_blocking ? 1 : 0);
  }
  void DestroyStream(void* stream) override { fake_cuda_stream_destroy(stream); }
  void FillLater(void* stream, void* device, uint8_t value, uint64_t length) override {
    // Slow enough: each page is a separate operation.
    const std::string page(4096, static_cast<char>(value));
    for (uint64_t at = 0; at < length; at += page.size()) {
      fake_cuda_write_later(stream, static_cast<char*>(device) + at, page.data(),
                            std::min<uint64_t>(page.size(), length - at), 0);
    }
  }
  void Synchronize(void* stream) override { fake_cuda_synchronize(stream); }
};

// Names the fake libcuda before it is first looked for.
const int set_library = ::setenv("ROPETEAM_LIBCUDA", ROPETEAM_FAKE_CUDA, 1);

}  // namespace

CudaRig* TheRig(std::string*) {
  static FakeRig rig;
  return set_library == 0 ? &rig : nullptr;
}

}  // namespace ropeteam::test
