// SPDX-License-Identifier: Apache-2.0
#include "tests/api/fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

// All exports are looked up by name.
#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotInitialised = 3;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kContextIsDestroyed = 709;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr uint64_t kPage = 4096;

struct Context {
  int device;
  bool dead = false;
};

struct Event {
  Context* context;
  uint64_t recorded = 0;
  uint64_t fired = 0;
  int result = kSuccess;
};

struct Stream {
  Context* context;
  bool blocking;
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> work;
  uint64_t given = 0;
  uint64_t done = 0;
  int error = kSuccess;  // sticky, as in the real driver
  bool stop = false;
  std::thread thread;
};

struct Memory {
  char* address;  // what callers get
  char* bytes;    // the mapping with access to the bytes
  uint64_t length;
  int fd;
  Context* context;  // null: of no particular context
  int device;
  fake_cuda_kind kind;
  uint64_t id;
};

struct Failure {
  int after = 0;  // calls that still succeed
  int result = 0;
  bool lasting = false;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Context>> contexts;  // never freed: handles of destroyed ones may be used
  Context* primary[FAKE_CUDA_DEVICES];
  std::map<uintptr_t, Memory> memory;        // by address
  std::map<uintptr_t, uint64_t> registered;  // begin → bytes
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<Context*, Stream*> legacy;
  std::map<Event*, std::unique_ptr<Event>> events;
  std::map<std::string, Failure> failures;
  std::vector<bool> gates = {true};
  bool hold_copies = false;
  int allowed = 0;
  bool hold_registering = false;
  int version = 12040;
  bool initialised = true;
  uint64_t next_id = 1;
  uint64_t counts[FAKE_CUDA_COUNTERS] = {};

  State() {
    for (int device = 0; device < FAKE_CUDA_DEVICES; ++device) primary[device] = NewContext(device);
  }
  Context* NewContext(int device) {
    contexts.push_back(std::make_unique<Context>(Context{device}));
    return contexts.back().get();
  }
};
// Leaked: its threads outlive main().
State& S() {
  static auto* state = new State;
  return *state;
}
using Lock = std::unique_lock<std::mutex>;

thread_local std::vector<Context*> current;

void Count(fake_cuda_counter counter, int64_t by = 1) {
  S().counts[counter] += static_cast<uint64_t>(by);
  S().changed.notify_all();
}

// The injected result of this call; kSuccess: none.
int Injected(const char* function) {
  const auto found = S().failures.find(function);
  if (found == S().failures.end() || found->second.result == 0) return kSuccess;
  if (found->second.after > 0) {
    --found->second.after;
    return kSuccess;
  }
  const int result = found->second.result;
  if (!found->second.lasting) S().failures.erase(found);
  return result;
}

int Enter(const char* function) {
  if (!S().initialised) return kNotInitialised;
  return Injected(function);
}

Context* Current() { return current.empty() ? nullptr : current.back(); }
int CheckCurrent() {
  if (Current() == nullptr) return kInvalidContext;
  return Current()->dead ? kContextIsDestroyed : kSuccess;
}

Memory* FindMemory(uintptr_t address, uint64_t length) {
  auto found = S().memory.upper_bound(address);
  if (found == S().memory.begin()) return nullptr;
  Memory& memory = std::prev(found)->second;
  const uint64_t offset = address - reinterpret_cast<uintptr_t>(memory.address);
  return offset < memory.length && length <= memory.length - offset ? &memory : nullptr;
}

char* Touchable(Memory* memory, uintptr_t address) {
  return memory->bytes + (address - reinterpret_cast<uintptr_t>(memory->address));
}

void RunStream(Stream* stream) {
  Lock lock(S().mutex);
  for (;;) {
    S().changed.wait(lock, [&] { return stream->stop || !stream->work.empty(); });
    if (stream->work.empty()) return;
    auto work = std::move(stream->work.front());
    stream->work.pop_front();
    work(lock);
    ++stream->done;
    S().changed.notify_all();
  }
}

Stream* NewStream(Context* context, bool blocking) {
  auto made = std::make_unique<Stream>();
  made->context = context;
  made->blocking = blocking;
  Stream* stream = made.get();
  S().streams[stream] = std::move(made);
  stream->thread = std::thread(RunStream, stream);
  return stream;
}

// `handle` may also be one of the names of a default stream. Null: no such stream.
Stream* FindStream(void* handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number > 2) {
    const auto found = S().streams.find(static_cast<Stream*>(handle));
    return found == S().streams.end() ? nullptr : found->first;
  }
  Context* context = Current();
  Stream*& stream = S().legacy[context];
  if (stream == nullptr) stream = NewStream(context, true);
  return stream;
}

void Give(Stream* stream, std::function<void(Lock&)> work) {
  // Work of the legacy default stream runs after all earlier work of the blocking streams of its context.
  if (S().legacy[stream->context] == stream) {
    std::vector<std::pair<Stream*, uint64_t>> before;
    for (const auto& [other, owner] : S().streams) {
      if (other != stream && other->context == stream->context && other->blocking) {
        before.emplace_back(other, other->given);
      }
    }
    work = [before, work = std::move(work)](Lock& lock) {
      for (const auto& [other, given] : before) {
        S().changed.wait(lock, [&, other = other, given = given] {
          return !S().streams.contains(other) || other->done >= given;
        });
      }
      work(lock);
    };
  }
  ++stream->given;
  stream->work.push_back(std::move(work));
  S().changed.notify_all();
}

void Drain(Stream* stream, Lock& lock) {
  const uint64_t given = stream->given;
  S().changed.wait(lock, [&] { return stream->done >= given; });
}

void DestroyStream(Stream* stream, Lock& lock) {
  stream->stop = true;
  S().changed.notify_all();
  std::thread thread = std::move(stream->thread);
  lock.unlock();
  thread.join();
  lock.lock();
  S().streams.erase(stream);
}

// 1: the whole range is page-locked, 0: none of it, -1: a part, which the driver refuses.
int Lockedness(uintptr_t begin, uint64_t bytes) {
  int touched = 0;
  for (const auto& [start, length] : S().registered) {
    if (start < begin + bytes && begin < start + length) {
      if (start <= begin && begin + bytes <= start + length) return 1;
      touched = -1;
    }
  }
  const Memory* memory = FindMemory(begin, bytes);
  return memory != nullptr && memory->kind == FAKE_CUDA_HOST ? 1 : touched;
}

int Copy(uintptr_t device, uintptr_t host, uint64_t bytes, void* handle, bool out) {
  Lock lock(S().mutex);
  if (const int result = Enter(out ? "cuMemcpyDtoHAsync_v2" : "cuMemcpyHtoDAsync_v2"); result != kSuccess)
    return result;
  if (const int result = CheckCurrent(); result != kSuccess) return result;
  Stream* stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  Memory* memory = FindMemory(device, bytes);
  const int lockedness = Lockedness(host, bytes);
  if (memory == nullptr || memory->kind == FAKE_CUDA_HOST || lockedness < 0) return kInvalidValue;
  Give(stream, [=](Lock& running) {
    if (out && S().hold_copies && S().allowed == 0) {
      Count(FAKE_CUDA_COPIES_HELD);
      S().changed.wait(running, [] { return !S().hold_copies || S().allowed > 0; });
    }
    if (out && S().hold_copies) --S().allowed;
    const int failed = Injected("copy");
    if (failed != kSuccess) stream->error = failed;
    Memory* now = FindMemory(device, bytes);
    if (stream->error == kSuccess && now == nullptr) stream->error = kInvalidValue;
    if (stream->error == kSuccess) {
      char* touchable = Touchable(now, device);
      auto* other = reinterpret_cast<char*>(host);
      // Without the lock, as a device copies: so a sanitizer sees a use of the bytes that is too early.
      running.unlock();
      std::memcpy(out ? other : touchable, out ? touchable : other, bytes);
      running.lock();
    }
    if (lockedness == 0) Count(FAKE_CUDA_COPIES_PAGEABLE);
    Count(out ? FAKE_CUDA_COPIES_OUT : FAKE_CUDA_COPIES_IN);
  });
  if (lockedness == 0) Drain(stream, lock);  // pageable memory is copied before the return
  return kSuccess;
}

}  // namespace

// ---- the driver's calls

EXPORTED int cuDriverGetVersion(int* version) {
  const Lock lock(S().mutex);
  if (const int result = Injected("cuDriverGetVersion"); result != kSuccess) return result;
  *version = S().version;
  return kSuccess;
}

EXPORTED int cuGetErrorName(int result, const char** name) {
  switch (result) {
    case kSuccess:
      *name = "CUDA_SUCCESS";
      return kSuccess;
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case 2:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kInvalidHandle:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      return kSuccess;
    case 700:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return kSuccess;
    case kContextIsDestroyed:
      *name = "CUDA_ERROR_CONTEXT_IS_DESTROYED";
      return kSuccess;
    case 801:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      return kSuccess;
    default:
      *name = nullptr;
      return kInvalidValue;
  }
}

EXPORTED int cuPointerGetAttributes(unsigned count, int* attributes, void** data,
                                    unsigned long long pointer) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuPointerGetAttributes"); result != kSuccess) return result;
  const Memory* memory = FindMemory(pointer, 1);
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case 1:
        *static_cast<void**>(data[i]) = memory != nullptr ? memory->context : nullptr;
        break;
      case 2: {
        unsigned type = 0;
        if (memory != nullptr)
          type = memory->kind == FAKE_CUDA_HOST || memory->kind == FAKE_CUDA_MANAGED ? 1 : 2;
        *static_cast<unsigned*>(data[i]) = type;
        break;
      }
      case 7:
        *static_cast<unsigned long long*>(data[i]) = memory != nullptr ? memory->id : 0;
        break;
      case 8:
        *static_cast<unsigned*>(data[i]) = memory != nullptr && memory->kind == FAKE_CUDA_MANAGED;
        break;
      case 9:
        *static_cast<int*>(data[i]) = memory != nullptr ? memory->device : -2;
        break;
      case 11:
        *static_cast<unsigned long long*>(data[i]) =
            memory != nullptr ? reinterpret_cast<uintptr_t>(memory->address) : 0;
        break;
      case 12:
        *static_cast<size_t*>(data[i]) = memory != nullptr ? memory->length : 0;
        break;
      default:
        return kInvalidValue;
    }
  }
  // Memory of a destroyed context is unknown, but some calls still report it.
  if (memory != nullptr && memory->context != nullptr && memory->context->dead) return kContextIsDestroyed;
  return kSuccess;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuDeviceGet"); result != kSuccess) return result;
  if (ordinal < 0 || ordinal >= FAKE_CUDA_DEVICES) return 101;
  *device = ordinal;
  return kSuccess;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuDevicePrimaryCtxRetain"); result != kSuccess) return result;
  *context = S().primary[device];
  Count(FAKE_CUDA_RETAINED);
  return kSuccess;
}
EXPORTED int cuDevicePrimaryCtxRelease_v2(int) {
  const Lock lock(S().mutex);
  Count(FAKE_CUDA_RETAINED, -1);
  return kSuccess;
}

EXPORTED int cuCtxPushCurrent_v2(void* context) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuCtxPushCurrent_v2"); result != kSuccess) return result;
  auto* found = static_cast<Context*>(context);
  if (found == nullptr) return kInvalidContext;
  if (found->dead) return kContextIsDestroyed;
  current.push_back(found);
  return kSuccess;
}
EXPORTED int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

EXPORTED int cuStreamCreate(void** stream, unsigned flags) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuStreamCreate"); result != kSuccess) return result;
  if (const int result = CheckCurrent(); result != kSuccess) return result;
  *stream = NewStream(Current(), (flags & 1) == 0);
  Count(FAKE_CUDA_STREAMS);
  return kSuccess;
}
EXPORTED int cuStreamDestroy_v2(void* handle) {
  Lock lock(S().mutex);
  Stream* stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  DestroyStream(stream, lock);
  Count(FAKE_CUDA_STREAMS, -1);
  return kSuccess;
}
EXPORTED int cuStreamGetCtx(void* handle, void** context) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuStreamGetCtx"); result != kSuccess) return result;
  Stream* stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  *context = stream->context;
  return kSuccess;
}
EXPORTED int cuStreamSynchronize(void* handle) {
  Lock lock(S().mutex);
  if (const int result = Enter("cuStreamSynchronize"); result != kSuccess) return result;
  Stream* stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  Drain(stream, lock);
  return stream->error;
}

EXPORTED int cuEventCreate(void** event, unsigned) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuEventCreate"); result != kSuccess) return result;
  if (const int result = CheckCurrent(); result != kSuccess) return result;
  auto made = std::make_unique<Event>(Event{Current()});
  *event = made.get();
  S().events[made.get()] = std::move(made);
  Count(FAKE_CUDA_EVENTS);
  return kSuccess;
}
EXPORTED int cuEventDestroy_v2(void* handle) {
  const Lock lock(S().mutex);
  if (S().events.erase(static_cast<Event*>(handle)) == 0) return kInvalidHandle;
  Count(FAKE_CUDA_EVENTS, -1);
  return kSuccess;
}
EXPORTED int cuEventRecord(void* handle, void* stream_handle) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuEventRecord"); result != kSuccess) return result;
  auto* event = static_cast<Event*>(handle);
  Stream* stream = FindStream(stream_handle);
  if (!S().events.contains(event) || stream == nullptr || stream->context != event->context)
    return kInvalidHandle;
  if (stream->context->dead) return kContextIsDestroyed;
  const uint64_t number = ++event->recorded;
  Give(stream, [event, stream, number](Lock&) {
    if (!S().events.contains(event)) return;
    event->fired = number;
    event->result = stream->error;
  });
  return kSuccess;
}
EXPORTED int cuEventQuery(void* handle) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuEventQuery"); result != kSuccess) return result;
  auto* event = static_cast<Event*>(handle);
  if (!S().events.contains(event)) return kInvalidHandle;
  if (event->context->dead) return kContextIsDestroyed;
  return event->fired == event->recorded ? event->result : kNotReady;
}
EXPORTED int cuEventSynchronize(void* handle) {
  Lock lock(S().mutex);
  if (const int result = Enter("cuEventSynchronize"); result != kSuccess) return result;
  auto* event = static_cast<Event*>(handle);
  if (!S().events.contains(event)) return kInvalidHandle;
  S().changed.wait(lock, [&] { return event->fired == event->recorded; });
  return event->context->dead ? kContextIsDestroyed : event->result;
}

EXPORTED int cuMemcpyDtoHAsync_v2(void* target, unsigned long long source, size_t bytes, void* stream) {
  return Copy(source, reinterpret_cast<uintptr_t>(target), bytes, stream, true);
}
EXPORTED int cuMemcpyHtoDAsync_v2(unsigned long long target, const void* source, size_t bytes, void* stream) {
  return Copy(target, reinterpret_cast<uintptr_t>(source), bytes, stream, false);
}

EXPORTED int cuMemHostRegister_v2(void* begin, size_t bytes, unsigned) {
  Lock lock(S().mutex);
  Count(FAKE_CUDA_REGISTER_CALLS);
  S().changed.wait(lock, [] { return !S().hold_registering; });
  if (const int result = Enter("cuMemHostRegister_v2"); result != kSuccess) return result;
  if (const int result = CheckCurrent(); result != kSuccess) return result;
  const auto address = reinterpret_cast<uintptr_t>(begin);
  if (bytes == 0 || address % kPage != 0) return kInvalidValue;
  if (Lockedness(address, bytes) != 0) return kAlreadyRegistered;
  S().registered[address] = bytes;
  Count(FAKE_CUDA_REGISTERED);
  return kSuccess;
}
EXPORTED int cuMemHostUnregister(void* begin) {
  const Lock lock(S().mutex);
  if (S().registered.erase(reinterpret_cast<uintptr_t>(begin)) == 0) return kNotRegistered;
  Count(FAKE_CUDA_REGISTERED, -1);
  return kSuccess;
}

EXPORTED int cuMemGetHandleForAddressRange(void* handle, unsigned long long begin, size_t bytes, int type,
                                           unsigned long long) {
  const Lock lock(S().mutex);
  if (const int result = Enter("cuMemGetHandleForAddressRange"); result != kSuccess) return result;
  const Memory* memory = FindMemory(begin, bytes);
  // A memfd cannot begin in the middle of another one. So only whole allocations are exported; the library
  // asks for no others.
  if (type != 1 || memory == nullptr || begin != reinterpret_cast<uintptr_t>(memory->address) ||
      bytes % kPage != 0) {
    return kInvalidValue;
  }
  *static_cast<int*>(handle) = ::dup(memory->fd);
  Count(FAKE_CUDA_EXPORTS);
  return kSuccess;
}

// ---- the controls

namespace {

void* Allocate(int device, Context* context, uint64_t bytes, fake_cuda_kind kind) {
  const Lock lock(S().mutex);
  Memory memory{};
  memory.length = (bytes + kPage - 1) / kPage * kPage;
  memory.fd = ::memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (memory.fd < 0 || ::ftruncate(memory.fd, static_cast<off_t>(memory.length)) != 0) return nullptr;
  void* touchable = ::mmap(nullptr, memory.length, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  void* address = kind == FAKE_CUDA_HOST
                      ? touchable
                      : ::mmap(nullptr, memory.length, PROT_NONE, MAP_SHARED, memory.fd, 0);
  if (touchable == MAP_FAILED || address == MAP_FAILED) return nullptr;
  memory.bytes = static_cast<char*>(touchable);
  memory.address = static_cast<char*>(address);
  memory.context = context;
  memory.device = device;
  memory.kind = kind;
  memory.id = S().next_id++;
  S().memory[reinterpret_cast<uintptr_t>(address)] = memory;
  return address;
}

bool WaitFor(const std::function<bool()>& holds) {
  Lock lock(S().mutex);
  return S().changed.wait_for(lock, std::chrono::seconds(10), holds);
}

}  // namespace

EXPORTED void* fake_cuda_alloc(int device, uint64_t bytes, fake_cuda_kind kind) {
  return Allocate(device, kind == FAKE_CUDA_POOL ? nullptr : S().primary[device], bytes, kind);
}
EXPORTED void* fake_cuda_alloc_in(void* context, uint64_t bytes) {
  auto* found = static_cast<Context*>(context);
  return Allocate(found->device, found, bytes, FAKE_CUDA_DEVICE);
}
EXPORTED void fake_cuda_free(void* pointer) {
  const Lock lock(S().mutex);
  const auto found = S().memory.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == S().memory.end()) std::abort();
  const Memory& memory = found->second;
  ::munmap(memory.bytes, memory.length);
  if (memory.address != memory.bytes) ::munmap(memory.address, memory.length);
  ::close(memory.fd);
  S().memory.erase(found);
}
EXPORTED void fake_cuda_write(void* device, const void* data, uint64_t bytes) {
  const Lock lock(S().mutex);
  const auto address = reinterpret_cast<uintptr_t>(device);
  Memory* memory = FindMemory(address, bytes);
  if (memory == nullptr) std::abort();
  std::memcpy(Touchable(memory, address), data, bytes);
}
EXPORTED void fake_cuda_read(const void* device, void* data, uint64_t bytes) {
  const Lock lock(S().mutex);
  const auto address = reinterpret_cast<uintptr_t>(device);
  Memory* memory = FindMemory(address, bytes);
  if (memory == nullptr) std::abort();
  std::memcpy(data, Touchable(memory, address), bytes);
}

EXPORTED void* fake_cuda_context_create(int device) {
  const Lock lock(S().mutex);
  return S().NewContext(device);
}
EXPORTED void fake_cuda_context_kill(void* context) {
  const Lock lock(S().mutex);
  static_cast<Context*>(context)->dead = true;
  S().changed.notify_all();
}
EXPORTED void* fake_cuda_primary(int device) {
  const Lock lock(S().mutex);
  return S().primary[device];
}
EXPORTED void fake_cuda_primary_reset(int device) {
  const Lock lock(S().mutex);
  S().primary[device]->dead = true;
  S().primary[device] = S().NewContext(device);
  // Its page-locked ranges are released with it.
  S().counts[FAKE_CUDA_REGISTERED] -= S().registered.size();
  S().registered.clear();
  S().changed.notify_all();
}

EXPORTED void* fake_cuda_stream_create(int device, int non_blocking) {
  const Lock lock(S().mutex);
  return NewStream(S().primary[device], non_blocking == 0);
}
EXPORTED void fake_cuda_stream_destroy(void* stream) {
  Lock lock(S().mutex);
  DestroyStream(static_cast<Stream*>(stream), lock);
}
EXPORTED void fake_cuda_write_later(void* stream, void* device, const void* data, uint64_t bytes, int gate) {
  const Lock lock(S().mutex);
  const auto* begin = static_cast<const char*>(data);
  Give(static_cast<Stream*>(stream), [device, gate, kept = std::string(begin, begin + bytes)](Lock& running) {
    S().changed.wait(running, [&] { return S().gates[static_cast<size_t>(gate)]; });
    const auto address = reinterpret_cast<uintptr_t>(device);
    std::memcpy(Touchable(FindMemory(address, kept.size()), address), kept.data(), kept.size());
  });
}
EXPORTED int fake_cuda_gate(void) {
  const Lock lock(S().mutex);
  S().gates.push_back(false);
  return static_cast<int>(S().gates.size()) - 1;
}
EXPORTED void fake_cuda_open(int gate) {
  const Lock lock(S().mutex);
  S().gates[static_cast<size_t>(gate)] = true;
  S().changed.notify_all();
}
EXPORTED void fake_cuda_synchronize(void* stream) {
  Lock lock(S().mutex);
  Drain(static_cast<Stream*>(stream), lock);
}

EXPORTED void fake_cuda_hold_copies(int held) {
  const Lock lock(S().mutex);
  S().hold_copies = held != 0;
  S().allowed = 0;
  S().changed.notify_all();
}
EXPORTED void fake_cuda_allow_copies(int count) {
  const Lock lock(S().mutex);
  S().allowed += count;
  S().changed.notify_all();
}
EXPORTED void fake_cuda_hold_registering(int held) {
  const Lock lock(S().mutex);
  S().hold_registering = held != 0;
  S().changed.notify_all();
}
EXPORTED void fake_cuda_fail(const char* function, int nth, int result, int lasting) {
  const Lock lock(S().mutex);
  S().failures[function] = {nth - 1, result, lasting != 0};
}
EXPORTED void fake_cuda_set_version(int version) {
  const Lock lock(S().mutex);
  S().version = version;
}
EXPORTED void fake_cuda_set_initialised(int initialised) {
  const Lock lock(S().mutex);
  S().initialised = initialised != 0;
}

EXPORTED uint64_t fake_cuda_count(fake_cuda_counter counter) {
  const Lock lock(S().mutex);
  return S().counts[counter];
}
EXPORTED int fake_cuda_wait_for(fake_cuda_counter counter, uint64_t value) {
  return WaitFor([&] { return S().counts[counter] >= value; });
}
EXPORTED int fake_cuda_wait_until_below(fake_cuda_counter counter, uint64_t value) {
  return WaitFor([&] { return S().counts[counter] < value; });
}
EXPORTED void fake_cuda_reset(void) {
  const Lock lock(S().mutex);
  S().failures.clear();
  S().hold_copies = false;
  S().hold_registering = false;
  S().allowed = 0;
  S().version = 12040;
  S().initialised = true;
  for (const fake_cuda_counter counter :
       {FAKE_CUDA_COPIES_OUT, FAKE_CUDA_COPIES_IN, FAKE_CUDA_COPIES_PAGEABLE, FAKE_CUDA_COPIES_HELD,
        FAKE_CUDA_REGISTER_CALLS, FAKE_CUDA_EXPORTS}) {
    S().counts[counter] = 0;
  }
  S().changed.notify_all();
}
