/* SPDX-License-Identifier: Apache-2.0
 *
 * The controls of libfake_cuda.so, which stands in for libcuda.so.1 where there is no GPU: it has the driver calls that
 * libropeteam makes, two devices, and streams that really run behind their callers' backs, one thread each.
 *
 * Its device memory cannot be touched by the CPU: the address that the caller gets is mapped without any rights (a second
 * mapping has the bytes), so code that copies from a device pointer by itself dies of it.
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
  FAKE_CUDA_POOL = 1,    /* of no one context, as cuMemAllocFromPoolAsync and mapped memory */
  FAKE_CUDA_MANAGED = 2, /* cuMemAllocManaged */
  FAKE_CUDA_HOST = 3     /* cuMemHostAlloc: page-locked, the CPU's as well */
} fake_cuda_kind;

/* What fake_cuda_count() tells, and fake_cuda_wait_for() waits for. */
typedef enum {
  FAKE_CUDA_COPIES_OUT = 0,      /* finished, device to host */
  FAKE_CUDA_COPIES_IN = 1,       /* finished, host to device */
  FAKE_CUDA_COPIES_PAGEABLE = 2, /* of both, those whose host side was not page-locked */
  FAKE_CUDA_COPIES_HELD = 3,     /* that have come to fake_cuda_hold_copies(), ever */
  FAKE_CUDA_REGISTERED = 4,      /* ranges of host memory page-locked now */
  FAKE_CUDA_REGISTER_CALLS = 5,
  FAKE_CUDA_STREAMS = 6, /* made and not destroyed */
  FAKE_CUDA_EVENTS = 7,
  FAKE_CUDA_RETAINED = 8, /* primary contexts */
  FAKE_CUDA_EXPORTS = 9,  /* dmabufs handed out */
  FAKE_CUDA_COUNTERS = 10
} fake_cuda_counter;

/* A device pointer (or a host one for FAKE_CUDA_HOST); NULL when there is no memory. */
void* fake_cuda_alloc(int device, uint64_t bytes, fake_cuda_kind kind);
void fake_cuda_free(void* pointer);
/* At once, past every stream. */
void fake_cuda_write(void* device, const void* data, uint64_t bytes);
void fake_cuda_read(const void* device, void* data, uint64_t bytes);

/* A context as an application makes one beside the primary; memory allocated in it while it is the device's. Killed,
 * every call that has to do with it fails, as after cuCtxDestroy() or a device's loss. */
void* fake_cuda_context_create(int device);
void* fake_cuda_alloc_in(void* context, uint64_t bytes);
void fake_cuda_context_kill(void* context);
void* fake_cuda_primary(int device);
/* The primary context is another from here on, as after cudaDeviceReset(). */
void fake_cuda_primary_reset(int device);

/* A caller's stream; non_blocking: the legacy default stream does not wait for it. */
void* fake_cuda_stream_create(int device, int non_blocking);
void fake_cuda_stream_destroy(void* stream);
/* A kernel that writes these bytes, when the gate is open and it is its turn; gate 0 is open. */
void fake_cuda_write_later(void* stream, void* device, const void* data, uint64_t bytes, int gate);
int fake_cuda_gate(void);
void fake_cuda_open(int gate);
/* Waits until all that was given to the stream has run. */
void fake_cuda_synchronize(void* stream);

/* While held, copies from devices wait when their turn comes; `allow` lets so many more through. */
void fake_cuda_hold_copies(int held);
void fake_cuda_allow_copies(int count);
/* While held, cuMemHostRegister waits. */
void fake_cuda_hold_registering(int held);
/* The n-th call of this driver function from now returns `result` instead of doing anything, and so does every one after
 * it if `lasting`; result 0 ends that. "copy" is no function: an asynchronous copy that fails when it runs. */
void fake_cuda_fail(const char* function, int nth, int result, int lasting);
void fake_cuda_set_version(int version);
void fake_cuda_set_initialised(int initialised);

uint64_t fake_cuda_count(fake_cuda_counter counter);
/* Waits until the counter is at least (below: less than) `value`; 0 after ten seconds. */
int fake_cuda_wait_for(fake_cuda_counter counter, uint64_t value);
int fake_cuda_wait_until_below(fake_cuda_counter counter, uint64_t value);
/* Knobs as at the start, copy counters zero; allocations and streams stay. */
void fake_cuda_reset(void);

#ifdef __cplusplus
}
#endif

#endif /* ROPETEAM_TESTS_API_FAKE_CUDA_H_ */
