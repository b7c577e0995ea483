// SPDX-License-Identifier: Apache-2.0
//
// A process without CUDA: it saves normally and loads no driver. If it claims to have device memory, it gets
// an error.

#include <dlfcn.h>

#include <cstdlib>

#include "tests/api/api_fixture.h"

namespace ropeteam::test {
namespace {

class NoCudaTest : public ApiTest {
 protected:
  NoCudaTest() {
    ::setenv("ROPETEAM_LIBCUDA", ROPETEAM_FAKE_CUDA, 1);
    handle_ = Open();
  }
  Handle handle_;
};

// Each test runs in a process of its own, because a loaded library stays.
TEST_F(NoCudaTest, ASaveOfHostMemoryLoadsNoDriver) {
  const std::string bytes = RandomBytes(200000, 1);
  SaveOne(handle_.get(), 1, bytes);
  EXPECT_EQ(ReadAll(OpenView(handle_.get(), 1).get(), "x"), bytes);
  EXPECT_EQ(::dlopen(ROPETEAM_FAKE_CUDA, RTLD_NOW | RTLD_NOLOAD), nullptr);
}

TEST_F(NoCudaTest, ADriverThatIsLoadedLaterIsFound) {
  SaveOne(handle_.get(), 1, "x");
  void* driver = ::dlopen(ROPETEAM_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(driver, nullptr) << ::dlerror();
  const auto alloc = reinterpret_cast<void* (*)(int, uint64_t, int)>(::dlsym(driver, "fake_cuda_alloc"));
  const auto write =
      reinterpret_cast<void (*)(void*, const void*, uint64_t)>(::dlsym(driver, "fake_cuda_write"));
  void* device = alloc(0, 4096, 0);
  write(device, "device", 6);
  const SaveHandle save = Begin(handle_.get(), 2, 6, 1);
  // A copy by the CPU would crash here.
  EXPECT_OK(ropeteam_save_put(save.get(), "y", device, 6));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(2, kRank, "y"), "device");
}

TEST_F(NoCudaTest, AClaimWithoutALibraryNamesItAndTheSaveGoesOn) {
  ::setenv("ROPETEAM_LIBCUDA", "/nonexistent/libcuda.so.1", 1);
  const SaveHandle save = Begin(handle_.get(), 1, 100, 1);
  EXPECT_FAILS(ropeteam_save_put_cuda(save.get(), "x", &handle_, 8, nullptr), ROPETEAM_UNSUPPORTED,
               "/nonexistent/libcuda.so.1");
  Put(save.get(), "x", "bytes");
  ASSERT_OK(ropeteam_save_commit(save.get()));
  const ViewHandle view = OpenView(handle_.get(), 1);
  char target[5];
  EXPECT_FAILS(ropeteam_view_read_cuda(view.get(), "x", 0, target, 5, nullptr, kTimeoutMs),
               ROPETEAM_UNSUPPORTED, "/nonexistent/libcuda.so.1");
}

TEST_F(NoCudaTest, ALibraryThatIsNoDriverIsNamed) {
  ::setenv("ROPETEAM_LIBCUDA", "libm.so.6", 1);
  const SaveHandle save = Begin(handle_.get(), 1, 100, 1);
  EXPECT_FAILS(ropeteam_save_put_cuda(save.get(), "x", &handle_, 8, nullptr), ROPETEAM_UNSUPPORTED,
               "libm.so.6 has no cuDriverGetVersion");
}

}  // namespace
}  // namespace ropeteam::test
