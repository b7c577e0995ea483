// SPDX-License-Identifier: Apache-2.0
//
// Compares our declarations of the CUDA driver's ABI with NVIDIA's header: numbers, types, and the names
// behind its macros.

#include <cuda.h>
#include <gtest/gtest.h>

#include <type_traits>

#include "api/client/cuda_driver.h"

namespace ropeteam::client {
namespace {

static_assert(kCuSuccess == CUDA_SUCCESS);
static_assert(kCuInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(kCuNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(kCuDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(kCuInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(kCuInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(kCuNotReady == CUDA_ERROR_NOT_READY);
static_assert(kCuContextIsDestroyed == CUDA_ERROR_CONTEXT_IS_DESTROYED);
static_assert(kCuHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(kCuNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kCuPointerContext == CU_POINTER_ATTRIBUTE_CONTEXT);
static_assert(kCuPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(kCuPointerBufferId == CU_POINTER_ATTRIBUTE_BUFFER_ID);
static_assert(kCuPointerRangeStart == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
static_assert(kCuPointerRangeSize == CU_POINTER_ATTRIBUTE_RANGE_SIZE);
static_assert(kCuPointerIsManaged == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(kCuPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(kCuMemoryTypeHost == CU_MEMORYTYPE_HOST);
static_assert(kCuMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
static_assert(kCuStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kCuEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(kCuEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCuMemHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kCuMemRangeHandleTypeDmaBufFd == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
static_assert(std::is_same_v<CuDevicePtr, CUdeviceptr>);
static_assert(std::is_same_v<CuDevice, CUdevice>);
static_assert(sizeof(CUresult) == sizeof(CuResult) && sizeof(CUpointer_attribute) == sizeof(int) &&
              sizeof(CUmemRangeHandleType) == sizeof(int));

// A signature as the ABI sees it: handles are pointers, enums are ints.
template <typename T>
struct Machine {
  using Type = T;
};
template <typename T>
requires std::is_enum_v<T>
struct Machine<T> {
  using Type = int;
};
template <typename T>
struct Machine<T*> {
  using Type = void*;
};
template <typename Result, typename... Arguments>
struct Machine<Result (*)(Arguments...)> {
  using Type = typename Machine<Result>::Type (*)(typename Machine<Arguments>::Type...);
};
template <typename Result, typename... Arguments>
struct Machine<Result(Arguments...)> : Machine<Result (*)(Arguments...)> {};
template <typename Ours, typename Theirs>
constexpr bool kSame = std::is_same_v<typename Machine<Ours>::Type, typename Machine<Theirs>::Type>;

#define SAME(member, call) static_assert(kSame<decltype(CudaDriver::member), decltype(call)>, #call)
SAME(driver_get_version, cuDriverGetVersion);
SAME(get_error_name, cuGetErrorName);
SAME(pointer_get_attributes, cuPointerGetAttributes);
SAME(device_get, cuDeviceGet);
SAME(device_primary_ctx_retain, cuDevicePrimaryCtxRetain);
SAME(device_primary_ctx_release, cuDevicePrimaryCtxRelease);
SAME(ctx_push_current, cuCtxPushCurrent);
SAME(ctx_pop_current, cuCtxPopCurrent);
SAME(stream_create, cuStreamCreate);
SAME(stream_destroy, cuStreamDestroy);
SAME(stream_get_ctx, cuStreamGetCtx);
SAME(stream_synchronize, cuStreamSynchronize);
SAME(event_create, cuEventCreate);
SAME(event_record, cuEventRecord);
SAME(event_query, cuEventQuery);
SAME(event_synchronize, cuEventSynchronize);
SAME(event_destroy, cuEventDestroy);
SAME(memcpy_dtoh_async, cuMemcpyDtoHAsync);
SAME(memcpy_htod_async, cuMemcpyHtoDAsync);
SAME(mem_host_register, cuMemHostRegister);
SAME(mem_host_unregister, cuMemHostUnregister);
SAME(mem_get_handle_for_address_range, cuMemGetHandleForAddressRange);
#undef SAME

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// We look up these names in the library. The header's macros must expand to the same names.
TEST(CudaAbiTest, TheNamesThatAreLookedUpAreTheHeaders) {
  EXPECT_STREQ(TEXT(cuDevicePrimaryCtxRelease), "cuDevicePrimaryCtxRelease_v2");
  EXPECT_STREQ(TEXT(cuCtxPushCurrent), "cuCtxPushCurrent_v2");
  EXPECT_STREQ(TEXT(cuCtxPopCurrent), "cuCtxPopCurrent_v2");
  EXPECT_STREQ(TEXT(cuStreamDestroy), "cuStreamDestroy_v2");
  EXPECT_STREQ(TEXT(cuEventDestroy), "cuEventDestroy_v2");
  EXPECT_STREQ(TEXT(cuMemcpyDtoHAsync), "cuMemcpyDtoHAsync_v2");
  EXPECT_STREQ(TEXT(cuMemcpyHtoDAsync), "cuMemcpyHtoDAsync_v2");
  EXPECT_STREQ(TEXT(cuMemHostRegister), "cuMemHostRegister_v2");
  EXPECT_STREQ(TEXT(cuStreamCreate), "cuStreamCreate");
  EXPECT_STREQ(TEXT(cuStreamGetCtx), "cuStreamGetCtx");
  EXPECT_STREQ(TEXT(cuEventRecord), "cuEventRecord");
  EXPECT_STREQ(TEXT(cuPointerGetAttributes), "cuPointerGetAttributes");
  EXPECT_STREQ(TEXT(cuMemGetHandleForAddressRange), "cuMemGetHandleForAddressRange");
}

}  // namespace
}  // namespace ropeteam::client
