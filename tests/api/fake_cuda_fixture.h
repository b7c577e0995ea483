// SPDX-License-Identifier: Apache-2.0
//
// Shared by the tests on the fake driver: an open handle, and memory of the fake devices.

#ifndef ROPETEAM_TESTS_API_FAKE_CUDA_FIXTURE_H_
#define ROPETEAM_TESTS_API_FAKE_CUDA_FIXTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/api/api_fixture.h"
#include "tests/api/cuda_rig.h"
#include "tests/api/fake_cuda.h"

namespace ropeteam::test {

class FakeCudaTest : public ApiTest {
 protected:
  using ApiTest::ApiTest;

  void SetUp() override {
    std::string why;
    ASSERT_NE(TheRig(&why), nullptr) << why;  // makes the library use the fake driver
    fake_cuda_reset();
    handle_ = Open();
    ASSERT_NE(handle_, nullptr);
  }
  void TearDown() override {
    fake_cuda_reset();
    handle_.reset();
    for (void* pointer : allocated_) fake_cuda_free(pointer);
    ExpectNoProblems();
  }
  char* Upload(const std::string& bytes, int device = 0, fake_cuda_kind kind = FAKE_CUDA_DEVICE) {
    void* pointer = fake_cuda_alloc(device, bytes.size(), kind);
    allocated_.push_back(pointer);
    fake_cuda_write(pointer, bytes.data(), bytes.size());
    return static_cast<char*>(pointer);
  }

  Handle handle_;
  std::vector<void*> allocated_;
};

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_FAKE_CUDA_FIXTURE_H_
