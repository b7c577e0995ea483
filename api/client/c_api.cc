// SPDX-License-Identifier: Apache-2.0
//
// The C API of the classes in this folder. It checks what callers in C can get wrong, turns a Status into a
// code and this thread's error message, and lets no exception out.

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/client/client.h"
#include "api/client/environment.h"
#include "api/client/save.h"
#include "api/client/view.h"
#include "api/include/ropeteam/ropeteam.h"
#include "core/base/log.h"

struct ropeteam_handle {
  std::shared_ptr<ropeteam::client::Client> client;
};
struct ropeteam_view {
  std::unique_ptr<ropeteam::client::View> view;
};
struct ropeteam_storage_list {
  std::vector<ropeteam::local::ListedStep> steps;
};

namespace ropeteam::client {
namespace {

// The C header cannot include ours, so these checks keep the numbers equal.
static_assert(static_cast<int>(Code::kOk) == ROPETEAM_OK);
static_assert(static_cast<int>(Code::kInvalidArgument) == ROPETEAM_INVALID_ARGUMENT);
static_assert(static_cast<int>(Code::kNotFound) == ROPETEAM_NOT_FOUND);
static_assert(static_cast<int>(Code::kAlreadyExists) == ROPETEAM_ALREADY_EXISTS);
static_assert(static_cast<int>(Code::kNoSpace) == ROPETEAM_NO_SPACE);
static_assert(static_cast<int>(Code::kDeadlineExceeded) == ROPETEAM_DEADLINE_EXCEEDED);
static_assert(static_cast<int>(Code::kPeerGone) == ROPETEAM_PEER_GONE);
static_assert(static_cast<int>(Code::kLinkFailed) == ROPETEAM_LINK_FAILED);
static_assert(static_cast<int>(Code::kCorrupt) == ROPETEAM_CORRUPT);
static_assert(static_cast<int>(Code::kStale) == ROPETEAM_STALE);
static_assert(static_cast<int>(Code::kUnavailable) == ROPETEAM_UNAVAILABLE);
static_assert(static_cast<int>(Code::kUnsupported) == ROPETEAM_UNSUPPORTED);
static_assert(static_cast<int>(Code::kIo) == ROPETEAM_IO);
static_assert(static_cast<int>(Code::kAborted) == ROPETEAM_ABORTED);
static_assert(static_cast<int>(Code::kInternal) == ROPETEAM_INTERNAL);
static_assert(kNameBytesMax == ROPETEAM_NAME_MAX && kObjectsMax == ROPETEAM_OBJECTS_MAX);
static_assert(kMetadataObjectName == ROPETEAM_METADATA && kStepMetadataBytesMax == ROPETEAM_METADATA_MAX);
static_assert(kSavesOpenMax == ROPETEAM_SAVES_OPEN_MAX && kViewsOpenMax == ROPETEAM_VIEWS_OPEN_MAX);

static_assert(local::kListedStepsMax == ROPETEAM_STORAGE_STEPS_MAX);

constexpr int64_t kOpenTimeoutDefaultMs = 30000;  // as in the header
constexpr uint32_t kListedStepsDefault = 100;     // as in the header

// The structs' sizes in version 0.1, the first. A caller's struct has at least this size.
constexpr size_t kOpenOptionsBytes = sizeof(ropeteam_open_options_t);
constexpr size_t kInfoBytes = sizeof(ropeteam_info_t);
constexpr size_t kSaveOptionsBytes = offsetof(ropeteam_save_options_t, agreement);
constexpr size_t kViewOptionsBytes = sizeof(ropeteam_view_options_t);
constexpr size_t kStepBytes = sizeof(ropeteam_step_t);
constexpr size_t kPolicyBytes = sizeof(ropeteam_policy_t);
constexpr size_t kObjectBytes = sizeof(ropeteam_object_t);
constexpr size_t kStorageStepBytes = sizeof(ropeteam_storage_step_t);
// No struct of ours will grow beyond this. A larger `size` was never set.
constexpr size_t kStructBytesMax = 4096;

// This thread's error message; null if there is no memory or no key for it. It uses a pthread key:
// thread_local would link the library to the dynamic loader (__tls_get_addr), and needs room in a table that
// large processes are known to fill. The library is never unloaded (nodelete), so the key's destructor stays
// valid.
std::string* LastError() {
  static pthread_key_t key;
  static const bool has_key =
      pthread_key_create(&key, [](void* message) { delete static_cast<std::string*>(message); }) == 0;
  if (!has_key) return nullptr;
  if (void* message = pthread_getspecific(key)) return static_cast<std::string*>(message);
  auto* message = new (std::nothrow) std::string;
  if (message != nullptr && pthread_setspecific(key, message) == 0) return message;
  delete message;
  return nullptr;
}

ropeteam_status_t Report(const Status& status) {
  if (status.ok()) return ROPETEAM_OK;
  if (std::string* message = LastError()) {
    try {
      *message = status.message();
    } catch (const std::bad_alloc&) {
      message->clear();  // the code is still right
    }
  }
  return static_cast<ropeteam_status_t>(status.code());
}

// Runs the body of a call.
template <typename Body>
ropeteam_status_t Guard(Body&& body) {
  try {
    return Report(body());
  } catch (const std::bad_alloc&) {
    return Report(Status(Code::kInternal, "no memory"));  // short: needs no allocation
  } catch (const std::exception& error) {
    return Report(Error(Code::kInternal, "unexpected: %s", error.what()));
  }
}

Status CheckNotNull(const void* pointer, const char* what) {
  return pointer != nullptr ? OkStatus() : Error(Code::kInvalidArgument, "%s is NULL", what);
}

Status CheckTimeout(int64_t timeout_ms) {
  if (timeout_ms >= 0 && timeout_ms <= ROPETEAM_TIMEOUT_MAX_MS) return OkStatus();
  return Error(Code::kInvalidArgument, "timeout of %lld ms, limits 0 and %d",
               static_cast<long long>(timeout_ms), ROPETEAM_TIMEOUT_MAX_MS);
}

// A C caller may pass any number. Loading such a number as an enum would be undefined behaviour.
Status CheckLevel(const ropeteam_level_t& level, uint8_t* checked) {
  int number = 0;
  static_assert(sizeof number == sizeof level);
  std::memcpy(&number, &level, sizeof number);
  if (number < ROPETEAM_LOCAL || number > ROPETEAM_PERSISTED) {
    return Error(Code::kInvalidArgument, "level %d, limits %d and %d", number, ROPETEAM_LOCAL,
                 ROPETEAM_PERSISTED);
  }
  *checked = static_cast<uint8_t>(number);
  return OkStatus();
}

Status CheckParts(const ropeteam_part_t* parts, uint64_t count) {
  if (count > ROPETEAM_PARTS_MAX) {
    return Error(Code::kInvalidArgument, "an object of %llu parts, limit %d",
                 static_cast<unsigned long long>(count), ROPETEAM_PARTS_MAX);
  }
  if (count != 0) ROPETEAM_RETURN_IF_ERROR(CheckNotNull(parts, "the array of an object's parts"));
  for (uint64_t i = 0; i < count; ++i) {
    if (parts[i].length != 0)
      ROPETEAM_RETURN_IF_ERROR(CheckNotNull(parts[i].data, "the data of an object that is not empty"));
    if ((parts[i].flags & ~ROPETEAM_PART_BACKGROUND) != 0) {
      return Error(Code::kInvalidArgument,
                   "part %llu of %llu has flags %#llx; ROPETEAM_PART_BACKGROUND is known",
                   static_cast<unsigned long long>(i), static_cast<unsigned long long>(count),
                   static_cast<unsigned long long>(parts[i].flags));
    }
  }
  return OkStatus();
}

Status CheckName(const char* name, std::string_view* checked) {
  ROPETEAM_RETURN_IF_ERROR(CheckNotNull(name, "the object's name"));
  const size_t length = ::strnlen(name, ROPETEAM_NAME_MAX + 1);
  if (length == 0) return Error(Code::kInvalidArgument, "the object's name is empty");
  if (length > ROPETEAM_NAME_MAX) {
    return Error(Code::kInvalidArgument, "object name of more than %d bytes: %.*s…", ROPETEAM_NAME_MAX, 64,
                 name);
  }
  *checked = std::string_view(name, length);
  return OkStatus();
}

Status CheckSize(size_t size, size_t known, const char* what) {
  if (size >= known && size <= kStructBytesMax) return OkStatus();
  return Error(Code::kInvalidArgument, "%s.size is %zu, limits %zu and %zu: set it to sizeof(%s)", what, size,
               known, kStructBytesMax, what);
}

// Copies a struct that the caller filled. Fields that this version does not know must be zero, because it
// cannot do what they request.
template <typename T>
Status TakeInput(const T* input, size_t least, const char* what, T* taken) {
  ROPETEAM_RETURN_IF_ERROR(CheckNotNull(input, what));
  size_t size = 0;
  std::memcpy(&size, input, sizeof(size));
  ROPETEAM_RETURN_IF_ERROR(CheckSize(size, least, what));
  const auto* bytes = reinterpret_cast<const unsigned char*>(input);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return Error(Code::kUnsupported, "%s of %zu bytes has a value at byte %zu; this library knows %zu bytes",
                 what, size, i, sizeof(T));
  }
  *taken = T();
  std::memcpy(taken, input, std::min(size, sizeof(T)));
  return OkStatus();
}

// Checks a struct that we fill. Only `size` is read.
Status CheckOutput(const void* output, size_t known, const char* what) {
  ROPETEAM_RETURN_IF_ERROR(CheckNotNull(output, what));
  size_t size = 0;
  std::memcpy(&size, output, sizeof(size));
  return CheckSize(size, known, what);
}

// Keeps the caller's size, and zeroes the fields that only the caller knows.
template <typename T>
void FillOutput(T value, T* output) {
  value.size = output->size;
  std::memset(reinterpret_cast<char*>(output) + sizeof(T), 0, output->size - sizeof(T));
  *output = value;
}

Status CheckHandle(const ropeteam_t* handle) {
  ROPETEAM_RETURN_IF_ERROR(CheckNotNull(handle, "the ropeteam handle"));
  return handle->client->CheckProcess();
}
// A ropeteam_save_t is a Save under a name for C. No struct around it needs an allocation.
Save* Of(ropeteam_save_t* save) { return reinterpret_cast<Save*>(save); }
Status CheckHandle(ropeteam_save_t* save) {
  ROPETEAM_RETURN_IF_ERROR(CheckNotNull(save, "the save handle"));
  return Of(save)->client().CheckProcess();
}
Status CheckHandle(const ropeteam_view_t* view) {
  ROPETEAM_RETURN_IF_ERROR(CheckNotNull(view, "the view handle"));
  return view->view->client().CheckProcess();
}

// Returns the object of that name. The view owns it.
Result<const Object*> FindObject(const ropeteam_view_t* view, const char* name) {
  std::string_view checked;
  ROPETEAM_RETURN_IF_ERROR(CheckHandle(view));
  ROPETEAM_RETURN_IF_ERROR(CheckName(name, &checked));
  return view->view->Find(checked);
}

// Our log is silent unless ROPETEAM_LOG sets a level, because a library should not print.
void SetUpLogOnce() {
  static const bool done = [] {
    LogLevel level = LogLevel::kOff;
    const char* name = std::getenv("ROPETEAM_LOG");
    if (name == nullptr || !ParseLogLevel(name, &level)) level = LogLevel::kOff;
    SetLogLevel(level);
    return true;
  }();
  (void)done;
}

Result<OpenOptions> ResolveOptions(const ropeteam_open_options_t& given) {
  OpenOptions options;
  ROPETEAM_RETURN_IF_ERROR(CheckTimeout(given.timeout_ms));
  options.timeout_ms = given.timeout_ms != 0 ? given.timeout_ms : kOpenTimeoutDefaultMs;
  if (given.socket != nullptr) {
    options.socket = given.socket;
  } else {
    Result<std::string> socket = SocketFromEnvironment();
    if (!socket.ok()) return socket.status();
    options.socket = std::move(socket).value();
  }
  options.rank = given.rank;
  if (given.rank == ROPETEAM_RANK_FROM_ENV) {
    const Result<uint32_t> rank = NumberFromEnvironment("RANK");
    if (!rank.ok()) return rank.status();
    options.rank = *rank;
  }
  options.world_size = given.world_size;
  if (given.world_size == 0) {
    const Result<uint32_t> world_size = NumberFromEnvironment("WORLD_SIZE");
    if (!world_size.ok()) return world_size.status();
    options.world_size = *world_size;
  }
  if (options.world_size == 0 || options.world_size > ROPETEAM_WORLD_MAX) {
    return Error(Code::kInvalidArgument, "world_size %u, limits 1 and %d", options.world_size,
                 ROPETEAM_WORLD_MAX);
  }
  if (options.rank >= options.world_size) {
    return Error(Code::kInvalidArgument, "rank %u, world_size %u: a rank must be below world_size",
                 options.rank, options.world_size);
  }
  options.incarnation_token = given.incarnation_token != nullptr ? std::string(given.incarnation_token)
                                                                 : IncarnationTokenFromEnvironment();
  if (options.incarnation_token.size() > local::kIncarnationTokenBytesMax) {
    return Error(Code::kInvalidArgument, "incarnation_token has %zu bytes, limit %u",
                 options.incarnation_token.size(), local::kIncarnationTokenBytesMax);
  }
  const Result<uint32_t> copy_threads = CopyThreadsFromEnvironment();
  if (!copy_threads.ok()) return copy_threads.status();
  options.copy_threads = *copy_threads;
  return options;
}

ropeteam_object_t ToC(const Object& object) { return {kObjectBytes, object.name.c_str(), object.length}; }

}  // namespace
}  // namespace ropeteam::client

using ropeteam::Code;
using ropeteam::Error;
using ropeteam::OkStatus;
using ropeteam::Result;
using ropeteam::Status;
using ropeteam::client::CheckHandle;
using ropeteam::client::CheckNotNull;
using ropeteam::client::FindObject;
using ropeteam::client::Guard;

#define ROPETEAM_TEXT_OF(x) #x
#define ROPETEAM_TEXT(x) ROPETEAM_TEXT_OF(x)

const char* ropeteam_version(void) {
  return ROPETEAM_TEXT(ROPETEAM_VERSION_MAJOR) "." ROPETEAM_TEXT(ROPETEAM_VERSION_MINOR) "." ROPETEAM_TEXT(
      ROPETEAM_VERSION_PATCH);
}

const char* ropeteam_status_name(ropeteam_status_t status) {
  return ropeteam::CodeName(static_cast<Code>(status));
}

const char* ropeteam_last_error(void) {
  const std::string* message = ropeteam::client::LastError();
  return message != nullptr ? message->c_str() : "";
}

ropeteam_status_t ropeteam_open(const ropeteam_open_options_t* options, ropeteam_t** handle) {
  return Guard([&]() -> Status {
    ropeteam::client::SetUpLogOnce();
    ropeteam_open_options_t given;
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::TakeInput(options, ropeteam::client::kOpenOptionsBytes,
                                                         "ropeteam_open_options_t", &given));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(handle, "where to put the ropeteam handle"));
    Result<ropeteam::client::OpenOptions> resolved = ropeteam::client::ResolveOptions(given);
    if (!resolved.ok()) return resolved.status();
    auto opened = std::make_unique<ropeteam_t>();
    Result<std::shared_ptr<ropeteam::client::Client>> client =
        ropeteam::client::Client::Open(std::move(resolved).value());
    if (!client.ok()) return client.status();
    opened->client = std::move(client).value();
    *handle = opened.release();
    return OkStatus();
  });
}

void ropeteam_close(ropeteam_t* handle) {
  if (handle == nullptr) return;
  // A forked child has neither the connection nor the threads that may have held locks at the fork. So
  // nothing is closed or freed in it.
  if (handle->client->InForkedChild()) return;
  handle->client->Close();
  delete handle;
}

ropeteam_status_t ropeteam_info(ropeteam_t* handle, ropeteam_info_t* info) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(
        ropeteam::client::CheckOutput(info, ropeteam::client::kInfoBytes, "ropeteam_info_t"));
    const ropeteam::local::HelloReply hello = handle->client->hello();
    ropeteam::client::FillOutput(
        {ropeteam::client::kInfoBytes, handle->client->options().rank, handle->client->options().world_size,
         ropeteam::IncarnationNumber(hello.incarnation), hello.chunk_bytes,
         hello.chunks_total * hello.chunk_bytes},
        info);
    return OkStatus();
  });
}

ropeteam_status_t ropeteam_save_begin(ropeteam_t* handle, uint64_t step,
                                      const ropeteam_save_options_t* options, ropeteam_save_t** save) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ropeteam_save_options_t given;
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::TakeInput(options, ropeteam::client::kSaveOptionsBytes,
                                                         "ropeteam_save_options_t", &given));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(save, "where to put the save handle"));
    Result<std::unique_ptr<ropeteam::client::Save>> begun =
        ropeteam::client::Save::Begin(handle->client, step, given.bytes, given.objects, given.agreement);
    if (!begun.ok()) return begun.status();
    *save = reinterpret_cast<ropeteam_save_t*>(begun->release());
    return OkStatus();
  });
}

ropeteam_status_t ropeteam_save_put(ropeteam_save_t* save, const char* name, const void* data,
                                    uint64_t length) {
  const ropeteam_part_t part{data, length, nullptr, 0};
  return ropeteam_save_put_parts(save, name, &part, 1);
}

ropeteam_status_t ropeteam_save_put_cuda(ropeteam_save_t* save, const char* name, const void* data,
                                         uint64_t length, void* stream) {
  const ropeteam_part_t part{data, length, stream, ROPETEAM_PART_BACKGROUND};
  return ropeteam_save_put_parts(save, name, &part, 1);
}

ropeteam_status_t ropeteam_save_put_parts(ropeteam_save_t* save, const char* name,
                                          const ropeteam_part_t* parts, uint64_t count) {
  return Guard([&]() -> Status {
    std::string_view checked;
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(save));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckName(name, &checked));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckParts(parts, count));
    return ropeteam::client::Of(save)->Put(checked, {parts, count});
  });
}

ropeteam_status_t ropeteam_save_put_many(ropeteam_save_t* save, const ropeteam_named_part_t* objects,
                                         uint64_t count) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(save));
    if (count > ROPETEAM_OBJECTS_MAX) {
      return Error(Code::kInvalidArgument, "a put of %llu objects, limit %d",
                   static_cast<unsigned long long>(count), ROPETEAM_OBJECTS_MAX);
    }
    if (count != 0) ROPETEAM_RETURN_IF_ERROR(CheckNotNull(objects, "the array of objects"));
    for (uint64_t i = 0; i < count; ++i) {
      std::string_view checked;
      ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckName(objects[i].name, &checked));
      ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckParts(&objects[i].part, 1));
    }
    return ropeteam::client::Of(save)->PutMany({objects, count});
  });
}

ropeteam_status_t ropeteam_save_append(ropeteam_save_t* save, const void* data, uint64_t length) {
  return Guard([&]() -> Status {
    const ropeteam_part_t part{data, length, nullptr, 0};
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(save));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckParts(&part, 1));
    return ropeteam::client::Of(save)->Extend({&part, 1});
  });
}

ropeteam_status_t ropeteam_save_reserve(ropeteam_save_t* save, const char* name, uint64_t length,
                                        void** pointer) {
  return Guard([&]() -> Status {
    std::string_view checked;
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(save));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckName(name, &checked));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(pointer, "where to put the pointer"));
    const Result<void*> memory = ropeteam::client::Of(save)->Reserve(checked, length);
    if (!memory.ok()) return memory.status();
    *pointer = *memory;
    return OkStatus();
  });
}

ropeteam_status_t ropeteam_save_commit(ropeteam_save_t* save) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(save));
    return ropeteam::client::Of(save)->Commit();
  });
}

ropeteam_status_t ropeteam_save_abort(ropeteam_save_t* save) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(save));
    return ropeteam::client::Of(save)->Abort();
  });
}

void ropeteam_save_close(ropeteam_save_t* save) {
  if (save == nullptr || ropeteam::client::Of(save)->client().InForkedChild()) return;
  delete ropeteam::client::Of(save);
}

ropeteam_status_t ropeteam_wait(ropeteam_t* handle, uint64_t step, ropeteam_level_t level,
                                int64_t timeout_ms) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    uint8_t checked = 0;
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckLevel(level, &checked));
    return handle->client->Wait(step, checked, timeout_ms);
  });
}

ropeteam_status_t ropeteam_drop(ropeteam_t* handle, uint64_t step, int64_t timeout_ms) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    return handle->client->Drop(step, timeout_ms);
  });
}

ropeteam_status_t ropeteam_persist(ropeteam_t* handle, uint64_t step, int64_t timeout_ms) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    return handle->client->Persist(step, timeout_ms);
  });
}

ropeteam_status_t ropeteam_set_policy(ropeteam_t* handle, const ropeteam_policy_t* policy,
                                      int64_t timeout_ms) {
  return Guard([&]() -> Status {
    ropeteam_policy_t given;
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(
        ropeteam::client::TakeInput(policy, ropeteam::client::kPolicyBytes, "ropeteam_policy_t", &given));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    return handle->client->SetPolicy(given.persist_every, given.keep_on_storage, timeout_ms);
  });
}

ropeteam_status_t ropeteam_latest(ropeteam_t* handle, ropeteam_step_t* step, int64_t timeout_ms) {
  return ropeteam_latest_at(handle, ROPETEAM_COMMITTED, step, timeout_ms);
}

ropeteam_status_t ropeteam_latest_at(ropeteam_t* handle, ropeteam_level_t level, ropeteam_step_t* step,
                                     int64_t timeout_ms) {
  return Guard([&]() -> Status {
    uint8_t checked = 0;
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckLevel(level, &checked));
    ROPETEAM_RETURN_IF_ERROR(
        ropeteam::client::CheckOutput(step, ropeteam::client::kStepBytes, "ropeteam_step_t"));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    const Result<ropeteam::local::LatestReply> latest = handle->client->Latest(checked, timeout_ms);
    if (!latest.ok()) return latest.status();
    ropeteam::client::FillOutput(
        {ropeteam::client::kStepBytes, latest->step, ropeteam::IncarnationNumber(latest->incarnation),
         latest->world_size, latest->passed_over_incarnation != 0 ? 1u : 0u, latest->passed_over},
        step);
    return OkStatus();
  });
}

ropeteam_status_t ropeteam_view_open(ropeteam_t* handle, uint64_t step, uint32_t rank, int64_t timeout_ms,
                                     ropeteam_view_t** view) {
  const ropeteam_view_options_t whole{sizeof(whole), 0};
  return ropeteam_view_open_with(handle, step, rank, &whole, timeout_ms, view);
}

ropeteam_status_t ropeteam_view_open_with(ropeteam_t* handle, uint64_t step, uint32_t rank,
                                          const ropeteam_view_options_t* options, int64_t timeout_ms,
                                          ropeteam_view_t** view) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ropeteam_view_options_t given;
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::TakeInput(options, ropeteam::client::kViewOptionsBytes,
                                                         "ropeteam_view_options_t", &given));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(view, "where to put the view handle"));
    auto opened = std::make_unique<ropeteam_view_t>();
    Result<std::unique_ptr<ropeteam::client::View>> result =
        ropeteam::client::View::Open(handle->client, step, rank, given.partial != 0, timeout_ms);
    if (!result.ok()) return result.status();
    opened->view = std::move(result).value();
    *view = opened.release();
    return OkStatus();
  });
}

ropeteam_origin_t ropeteam_view_origin(const ropeteam_view_t* view) {
  return view == nullptr ? ROPETEAM_ORIGIN_UNKNOWN : static_cast<ropeteam_origin_t>(view->view->origin());
}

uint64_t ropeteam_view_count(const ropeteam_view_t* view) {
  return view != nullptr ? view->view->objects().size() : 0;
}

ropeteam_status_t ropeteam_view_object(const ropeteam_view_t* view, uint64_t index,
                                       ropeteam_object_t* object) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(view));
    ROPETEAM_RETURN_IF_ERROR(
        ropeteam::client::CheckOutput(object, ropeteam::client::kObjectBytes, "ropeteam_object_t"));
    const auto& objects = view->view->objects();
    if (index >= objects.size()) {
      return Error(Code::kInvalidArgument, "object %llu of a view of %zu",
                   static_cast<unsigned long long>(index), objects.size());
    }
    ropeteam::client::FillOutput(ropeteam::client::ToC(objects[index]), object);
    return OkStatus();
  });
}

ropeteam_status_t ropeteam_view_find(const ropeteam_view_t* view, const char* name,
                                     ropeteam_object_t* object) {
  return Guard([&]() -> Status {
    const Result<const ropeteam::Object*> found = FindObject(view, name);
    if (!found.ok()) return found.status();
    ROPETEAM_RETURN_IF_ERROR(
        ropeteam::client::CheckOutput(object, ropeteam::client::kObjectBytes, "ropeteam_object_t"));
    ropeteam::client::FillOutput(ropeteam::client::ToC(**found), object);
    return OkStatus();
  });
}

ropeteam_status_t ropeteam_view_read(ropeteam_view_t* view, const char* name, uint64_t offset, void* data,
                                     uint64_t length, int64_t timeout_ms) {
  return Guard([&]() -> Status {
    const Result<const ropeteam::Object*> found = FindObject(view, name);
    if (!found.ok()) return found.status();
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    if (length != 0) ROPETEAM_RETURN_IF_ERROR(CheckNotNull(data, "where to put the bytes"));
    return view->view->Read(**found, offset, data, length, timeout_ms);
  });
}

ropeteam_status_t ropeteam_view_read_cuda(ropeteam_view_t* view, const char* name, uint64_t offset,
                                          void* data, uint64_t length, void* stream, int64_t timeout_ms) {
  return Guard([&]() -> Status {
    const Result<const ropeteam::Object*> found = FindObject(view, name);
    if (!found.ok()) return found.status();
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    if (length != 0) ROPETEAM_RETURN_IF_ERROR(CheckNotNull(data, "where to put the bytes"));
    return view->view->ReadCuda(**found, offset, data, length,
                                static_cast<ropeteam::client::CuStream>(stream), timeout_ms);
  });
}

ropeteam_status_t ropeteam_view_read_ranges(ropeteam_view_t* view, const ropeteam_range_t* ranges,
                                            uint64_t count, int64_t timeout_ms) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(view));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    if (count > ROPETEAM_RANGES_MAX)
      return Error(Code::kInvalidArgument, "%llu ranges, limit %d", static_cast<unsigned long long>(count),
                   ROPETEAM_RANGES_MAX);
    if (count != 0) ROPETEAM_RETURN_IF_ERROR(CheckNotNull(ranges, "the ranges"));
    std::vector<ropeteam::client::View::Runs> all(count);
    for (uint64_t i = 0; i < count; ++i) {
      const Result<const ropeteam::Object*> found = FindObject(view, ranges[i].name);
      if (!found.ok()) return found.status();
      if (ranges[i].length != 0)
        ROPETEAM_RETURN_IF_ERROR(CheckNotNull(ranges[i].data, "where to put the bytes"));
      const Result<ropeteam::client::View::Runs> runs = view->view->RunsOf(ranges[i], **found);
      if (!runs.ok()) return runs.status();
      all[i] = *runs;
    }
    return view->view->ReadRanges(all, timeout_ms);
  });
}

ropeteam_status_t ropeteam_view_map(ropeteam_view_t* view, const char* name, const void** data,
                                    uint64_t* length, int64_t timeout_ms) {
  return Guard([&]() -> Status {
    const Result<const ropeteam::Object*> found = FindObject(view, name);
    if (!found.ok()) return found.status();
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(data, "where to put the pointer"));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(length, "where to put the length"));
    const Result<const void*> mapped = view->view->Map(**found, timeout_ms);
    if (!mapped.ok()) return mapped.status();
    *data = *mapped;
    *length = (*found)->length;
    return OkStatus();
  });
}

void ropeteam_view_close(ropeteam_view_t* view) {
  if (view == nullptr || view->view->client().InForkedChild()) return;
  delete view;
}

ropeteam_status_t ropeteam_storage_list(ropeteam_t* handle, uint32_t steps_max, int64_t timeout_ms,
                                        ropeteam_storage_list_t** list) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckHandle(handle));
    ROPETEAM_RETURN_IF_ERROR(ropeteam::client::CheckTimeout(timeout_ms));
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(list, "where to put the list"));
    if (steps_max > ROPETEAM_STORAGE_STEPS_MAX)
      return Error(Code::kInvalidArgument, "a listing of %u steps, limit %d", steps_max,
                   ROPETEAM_STORAGE_STEPS_MAX);
    auto listed = std::make_unique<ropeteam_storage_list_t>();
    Result<ropeteam::local::StorageListReply> reply = handle->client->ListStorage(
        steps_max != 0 ? steps_max : ropeteam::client::kListedStepsDefault, timeout_ms);
    if (!reply.ok()) return reply.status();
    listed->steps = std::move(reply->steps);
    *list = listed.release();
    return OkStatus();
  });
}

uint64_t ropeteam_storage_list_count(const ropeteam_storage_list_t* list) {
  return list != nullptr ? list->steps.size() : 0;
}

ropeteam_status_t ropeteam_storage_list_step(const ropeteam_storage_list_t* list, uint64_t index,
                                             ropeteam_storage_step_t* step) {
  return Guard([&]() -> Status {
    ROPETEAM_RETURN_IF_ERROR(CheckNotNull(list, "the list"));
    ROPETEAM_RETURN_IF_ERROR(
        ropeteam::client::CheckOutput(step, ropeteam::client::kStorageStepBytes, "ropeteam_storage_step_t"));
    if (index >= list->steps.size()) {
      return Error(Code::kInvalidArgument, "step %llu of a list of %zu",
                   static_cast<unsigned long long>(index), list->steps.size());
    }
    const ropeteam::local::ListedStep& listed = list->steps[index];
    ropeteam::client::FillOutput(
        {ropeteam::client::kStorageStepBytes, listed.step, ropeteam::IncarnationNumber(listed.incarnation),
         listed.folder.c_str(), listed.problem.c_str(), listed.metadata.c_str(), listed.time_s, listed.bytes,
         listed.world_size},
        step);
    return OkStatus();
  });
}

void ropeteam_storage_list_close(ropeteam_storage_list_t* list) { delete list; }
