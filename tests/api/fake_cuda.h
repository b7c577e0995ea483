/* SPDX-License-Identifier: Apache-2.0
 *
 * The controls of libfake_cuda.so, which replaces libcuda.so.1 on machines without a GPU. It has the driver
 * calls that libropeteam makes, two devices, and asynchronous streams with one thread each.
 *
 * The CPU cannot touch its device memory: the caller's address is mapped without any rights (a second mapping
 * has the bytes). So code that copies from a device pointer with the CPU crashes.
 *
 * Plain C, so that Python's ctypes can use it. Safe from any thread.
 */
#ifndef ROPETEAM_TESTS_API_FAKE_CUDA_H_
#define ROPETEAM_TESTS_API_FAKE_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAKE_CUDA_DEVICES 2

typedef enum {
  FAKE_CUDA_DEVICE = 0,  /* cuMemAlloc */
  FAKE_CUDA_POOL = 1,    /* of no particular context, as cuMemAllocFromPoolAsync and mapped memory */
  FAKE_CUDA_MANAGED = 2, /* cuMemAllocManaged */
  FAKE_CUDA_HOST = 3     /* cuMemHostAlloc: page-locked, the CPU can use it too */
} fake_cuda_kind;

/* Counters for fake_cuda_count() and fake_cuda_wait_for(). */
typedef enum {
  FAKE_CUDA_COPIES_OUT = 0,      /* finished, device to host */
  FAKE_CUDA_COPIES_IN = 1,       /* finished, host to device */
  FAKE_CUDA_COPIES_PAGEABLE = 2, /* of both, those with host memory that was not page-locked */
  FAKE_CUDA_COPIES_HELD = 3,     /* held by fake_cuda_hold_copies() so far */
  FAKE_CUDA_REGISTERED = 4,      /* page-locked ranges of host memory */
  FAKE_CUDA_REGISTER_CALLS = 5,
  FAKE_CUDA_STREAMS = 6, /* created and not destroyed */
  FAKE_CUDA_EVENTS = 7,
  FAKE_CUDA_RETAINED = 8, /* primary contexts */
  FAKE_CUDA_EXPORTS = 9,  /* exported dmabufs */
  FAKE_CUDA_COUNTERS = 10
} fake_cuda_counter;

/* A device pointer (for FAKE_CUDA_HOST a host pointer); NULL: no memory. */
void* fake_cuda_alloc(int device, uint64_t bytes, fake_cuda_kind kind);
void fake_cuda_free(void* pointer);
/* Immediate: waits for no stream. */
void fake_cuda_write(void* device, const void* data, uint64_t bytes);
void fake_cuda_read(const void* device, void* data, uint64_t bytes);

/* A context that an application creates besides the primary one, and memory allocated in it. Once it is
 * killed, every call that uses it fails, as after cuCtxDestroy() or the loss of a device. */
void* fake_cuda_context_create(int device);
void* fake_cuda_alloc_in(void* context, uint64_t bytes);
void fake_cuda_context_kill(void* context);
void* fake_cuda_primary(int device);
/* Replaces the primary context, as cudaDeviceReset() does. */
void fake_cuda_primary_reset(int device);

/* A caller's stream; non_blocking: the legacy default stream does not wait for it. */
void* fake_cuda_stream_create(int device, int non_blocking);
void fake_cuda_stream_destroy(void* stream);
/* A kernel that writes these bytes in stream order, once the gate is open; gate 0 is open. */
void fake_cuda_write_later(void* stream, void* device, const void* data, uint64_t bytes, int gate);
int fake_cuda_gate(void);
void fake_cuda_open(int gate);
/* Waits until all work of the stream has run. */
void fake_cuda_synchronize(void* stream);

/* While held, copies from devices wait; fake_cuda_allow_copies() lets `count` more through. */
void fake_cuda_hold_copies(int held);
void fake_cuda_allow_copies(int count);
/* While held, cuMemHostRegister waits. */
void fake_cuda_hold_registering(int held);
/* The n-th call of this driver function from now returns `result` and does nothing; if `lasting`, every later
 * one too. Result 0 ends this. "copy" is not a function: an asynchronous copy fails when it runs. */
void fake_cuda_fail(const char* function, int nth, int result, int lasting);
void fake_cuda_set_version(int version);
void fake_cuda_set_initialised(int initialised);

uint64_t fake_cuda_count(fake_cuda_counter counter);
/* Waits until the counter is at least (below: less than) `value`; 0 after ten seconds. */
int fake_cuda_wait_for(fake_cuda_counter counter, uint64_t value);
int fake_cuda_wait_until_below(fake_cuda_counter counter, uint64_t value);
/* Resets all controls and the copy counters; allocations and streams stay. */
void fake_cuda_reset(void);

#ifdef __cplusplus
}
#endif

#endif /* ROPETEAM_TESTS_API_FAKE_CUDA_H_ */
