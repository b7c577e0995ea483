/* SPDX-License-Identifier: Apache-2.0
 *
 * A libropeteam of one process for the Python package's unit tests: it keeps sealed shards in its own memory, and can be
 * told to fail. Compiled by the tests against the real header, so that the prototypes are the contract's.
 *
 * fake_fail(call, status): the next `call` answers this. fake_handles(): open saves and views, to see what is leaked. */
#include "ropeteam/ropeteam.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kObjects = 256, kShards = 64 };

typedef struct {
  char name[ROPETEAM_NAME_MAX + 1];
  unsigned char* data;
  uint64_t length;
} object_t;
struct ropeteam_save {
  uint64_t step;
  uint32_t rank, world_size;
  uint64_t count;
  int over;
  object_t objects[kObjects];
};
struct ropeteam_view {
  struct ropeteam_save* shard;
};
struct ropeteam_handle {
  uint32_t rank, world_size;
};

static __thread char last_error[256];
static struct ropeteam_save* shards[kShards];
static int shard_count, handles, fail_status, begun_bytes, begun_objects;
static char fail_call[32], open_token[256], open_socket[256];
static int64_t open_timeout;
static int cuda_calls, partial_views;
static uint64_t begun_agreement;

ROPETEAM_EXPORT void fake_fail(const char* call, int status) {
  snprintf(fail_call, sizeof fail_call, "%s", call);
  fail_status = status;
}
ROPETEAM_EXPORT void fake_reset(void) { shard_count = cuda_calls = partial_views = 0; }
ROPETEAM_EXPORT int fake_cuda_calls(void) { return cuda_calls; }
ROPETEAM_EXPORT int fake_partial_views(void) { return partial_views; }
ROPETEAM_EXPORT int fake_handles(void) { return handles; }
ROPETEAM_EXPORT int fake_begun_bytes(void) { return begun_bytes; }
ROPETEAM_EXPORT int fake_begun_objects(void) { return begun_objects; }
ROPETEAM_EXPORT uint64_t fake_begun_agreement(void) { return begun_agreement; }
ROPETEAM_EXPORT const char* fake_token(void) { return open_token; }
ROPETEAM_EXPORT const char* fake_socket(void) { return open_socket; }
ROPETEAM_EXPORT int64_t fake_timeout(void) { return open_timeout; }

static ropeteam_status_t error(ropeteam_status_t status, const char* message) {
  snprintf(last_error, sizeof last_error, "%s", message);
  return status;
}
static ropeteam_status_t failing(const char* call) {
  if (strcmp(fail_call, call) != 0) return ROPETEAM_OK;
  fail_call[0] = 0;
  return error((ropeteam_status_t)fail_status, "needed 12 chunks, free 3, limit 64");
}
#define FAILING(call)                              \
  do {                                             \
    ropeteam_status_t failure = failing(call);     \
    if (failure != ROPETEAM_OK) return failure;    \
  } while (0)

const char* ropeteam_version(void) { return "0.1.0"; }
const char* ropeteam_status_name(ropeteam_status_t status) {
  return status == ROPETEAM_OK ? "ok" : status == ROPETEAM_NOT_FOUND ? "not found" : "trouble";
}
const char* ropeteam_last_error(void) { return last_error; }

ropeteam_status_t ropeteam_open(const ropeteam_open_options_t* options, ropeteam_t** handle) {
  FAILING("open");
  if (options->size != sizeof *options) return error(ROPETEAM_INVALID_ARGUMENT, "size");
  *handle = calloc(1, sizeof **handle);
  (*handle)->rank = options->rank == ROPETEAM_RANK_FROM_ENV ? 7 : options->rank;
  (*handle)->world_size = options->world_size == 0 ? 8 : options->world_size;
  snprintf(open_token, sizeof open_token, "%s", options->incarnation_token ? options->incarnation_token : "");
  snprintf(open_socket, sizeof open_socket, "%s", options->socket ? options->socket : "");
  open_timeout = options->timeout_ms;
  handles++;
  return ROPETEAM_OK;
}
void ropeteam_close(ropeteam_t* handle) {
  if (handle) handles--;
  free(handle);
}
ropeteam_status_t ropeteam_info(ropeteam_t* handle, ropeteam_info_t* info) {
  info->rank = handle->rank;
  info->world_size = handle->world_size;
  info->incarnation = 3;
  info->chunk_bytes = 4096;
  info->arena_bytes = UINT64_C(1) << 40;
  return ROPETEAM_OK;
}

ropeteam_status_t ropeteam_save_begin(ropeteam_t* handle, uint64_t step, const ropeteam_save_options_t* options,
                                      ropeteam_save_t** save) {
  FAILING("save_begin");
  begun_bytes = (int)options->bytes;
  begun_objects = (int)options->objects;
  begun_agreement = options->agreement;
  *save = calloc(1, sizeof **save);
  (*save)->step = step;
  (*save)->rank = handle->rank;
  (*save)->world_size = handle->world_size;
  handles++;
  return ROPETEAM_OK;
}
static ropeteam_status_t add(ropeteam_save_t* save, const char* name, uint64_t length, object_t** object) {
  if (save->over) return error(ROPETEAM_INVALID_ARGUMENT, "put after the end");
  if (!name || !*name || strlen(name) > ROPETEAM_NAME_MAX) return error(ROPETEAM_INVALID_ARGUMENT, "name");
  *object = &save->objects[save->count++];
  strcpy((*object)->name, name);
  (*object)->data = malloc(length + 1);
  (*object)->length = length;
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_save_put(ropeteam_save_t* save, const char* name, const void* data, uint64_t length) {
  FAILING("save_put");
  if (!data && length) return error(ROPETEAM_INVALID_ARGUMENT, "a null pointer with a length");
  object_t* object;
  ropeteam_status_t status = add(save, name, length, &object);
  if (status == ROPETEAM_OK && length) memcpy(object->data, data, length);
  return status;
}
/* With streams at addresses from 1 on, and device memory where the process's is. */
ropeteam_status_t ropeteam_save_put_cuda(ropeteam_save_t* save, const char* name, const void* data, uint64_t length,
                                         void* stream) {
  if (!stream) return error(ROPETEAM_INVALID_ARGUMENT, "no stream");
  cuda_calls++;
  return ropeteam_save_put(save, name, data, length);
}
ropeteam_status_t ropeteam_save_put_parts(ropeteam_save_t* save, const char* name, const ropeteam_part_t* parts,
                                          uint64_t count) {
  FAILING("save_put_parts");
  uint64_t length = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (!parts[i].data && parts[i].length) return error(ROPETEAM_INVALID_ARGUMENT, "a null pointer with a length");
    if (parts[i].flags & ROPETEAM_PART_BACKGROUND) {
      if (!parts[i].stream) return error(ROPETEAM_INVALID_ARGUMENT, "no stream");
      cuda_calls++;
    }
    length += parts[i].length;
  }
  object_t* object;
  ropeteam_status_t status = add(save, name, length, &object);
  for (uint64_t i = 0, at = 0; status == ROPETEAM_OK && i < count; at += parts[i++].length) {
    if (parts[i].length) memcpy(object->data + at, parts[i].data, parts[i].length);
  }
  return status;
}
ropeteam_status_t ropeteam_save_put_many(ropeteam_save_t* save, const ropeteam_named_part_t* objects, uint64_t count) {
  ropeteam_status_t status = ROPETEAM_OK;
  for (uint64_t i = 0; i < count && status == ROPETEAM_OK; i++) {
    status = ropeteam_save_put_parts(save, objects[i].name, &objects[i].part, 1);
  }
  return status;
}
ropeteam_status_t ropeteam_save_append(ropeteam_save_t* save, const void* data, uint64_t length) {
  FAILING("save_append");
  if (save->over || !save->count) return error(ROPETEAM_INVALID_ARGUMENT, "append to nothing");
  object_t* object = &save->objects[save->count - 1];
  object->data = realloc(object->data, object->length + length + 1);
  if (length) memcpy(object->data + object->length, data, length);
  object->length += length;
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_save_reserve(ropeteam_save_t* save, const char* name, uint64_t length, void** pointer) {
  object_t* object;
  ropeteam_status_t status = add(save, name, length, &object);
  if (status == ROPETEAM_OK) *pointer = object->data;
  return status;
}
ropeteam_status_t ropeteam_save_commit(ropeteam_save_t* save) {
  save->over = 1;
  FAILING("save_commit");
  shards[shard_count] = malloc(sizeof *save);
  *shards[shard_count++] = *save;
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_save_abort(ropeteam_save_t* save) {
  if (save->over) return error(ROPETEAM_INVALID_ARGUMENT, "abort after the end");
  save->over = 1;
  return ROPETEAM_OK;
}
void ropeteam_save_close(ropeteam_save_t* save) {
  if (save) handles--;
  free(save); /* its objects' memory is leaked: shards share it */
}

ropeteam_status_t ropeteam_wait(ropeteam_t* handle, uint64_t step, ropeteam_level_t level, int64_t timeout_ms) {
  (void)handle, (void)step;
  FAILING("wait");
  if (level == ROPETEAM_LOCAL) return ROPETEAM_OK;
  struct timespec t = {timeout_ms / 1000, timeout_ms % 1000 * 1000000};
  nanosleep(&t, NULL);
  return error(ROPETEAM_DEADLINE_EXCEEDED, "not yet");
}
ropeteam_status_t ropeteam_drop(ropeteam_t* handle, uint64_t step, int64_t timeout_ms) {
  (void)handle, (void)timeout_ms;
  FAILING("drop");
  int left = 0;
  for (int i = 0; i < shard_count; i++)
    if (shards[i]->step != step) shards[left++] = shards[i];
  if (left == shard_count) return error(ROPETEAM_NOT_FOUND, "no node holds a shard of it");
  shard_count = left;
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_persist(ropeteam_t* handle, uint64_t step, int64_t timeout_ms) {
  (void)handle, (void)step, (void)timeout_ms;
  FAILING("persist");
  return error(ROPETEAM_UNSUPPORTED, "this job has no storage to persist to");
}
ropeteam_status_t ropeteam_set_policy(ropeteam_t* handle, const ropeteam_policy_t* policy, int64_t timeout_ms) {
  (void)handle, (void)timeout_ms;
  FAILING("set_policy");
  if (policy->persist_every == 3)
    return error(ROPETEAM_INVALID_ARGUMENT, "this job's daemons were started with --persist-every 2");
  if (policy->keep_on_storage == 3)
    return error(ROPETEAM_INVALID_ARGUMENT, "this job's daemons were started with --keep-on-storage 2");
  if (policy->keep_on_storage == 5) return error(ROPETEAM_UNSUPPORTED, "this job has no storage");
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_latest(ropeteam_t* handle, ropeteam_step_t* step, int64_t timeout_ms) {
  return ropeteam_latest_at(handle, ROPETEAM_COMMITTED, step, timeout_ms);
}
ropeteam_status_t ropeteam_latest_at(ropeteam_t* handle, ropeteam_level_t level, ropeteam_step_t* step,
                                     int64_t timeout_ms) {
  (void)handle, (void)timeout_ms;
  FAILING("latest");
  if (level != ROPETEAM_COMMITTED) return error(ROPETEAM_UNSUPPORTED, "this job has no storage");
  if (!shard_count) return error(ROPETEAM_NOT_FOUND, "nothing yet");
  step->step = shards[shard_count - 1]->step;
  step->incarnation = 3;
  step->world_size = shards[shard_count - 1]->world_size;
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_view_open(ropeteam_t* handle, uint64_t step, uint32_t rank, int64_t timeout_ms,
                                     ropeteam_view_t** view) {
  (void)handle, (void)timeout_ms;
  FAILING("view_open");
  for (int i = 0; i < shard_count; i++) {
    if (shards[i]->step != step || shards[i]->rank != rank) continue;
    *view = calloc(1, sizeof **view);
    (*view)->shard = shards[i];
    handles++;
    return ROPETEAM_OK;
  }
  return error(ROPETEAM_NOT_FOUND, "no holder");
}
ropeteam_status_t ropeteam_view_open_with(ropeteam_t* handle, uint64_t step, uint32_t rank,
                                          const ropeteam_view_options_t* options, int64_t timeout_ms,
                                          ropeteam_view_t** view) {
  if (options->size != sizeof *options) return error(ROPETEAM_INVALID_ARGUMENT, "size");
  partial_views += options->partial;
  return ropeteam_view_open(handle, step, rank, timeout_ms, view);
}
ropeteam_origin_t ropeteam_view_origin(const ropeteam_view_t* view) {
  return view->shard->step % 2 ? ROPETEAM_ORIGIN_PEERS : ROPETEAM_ORIGIN_HERE;
}
uint64_t ropeteam_view_count(const ropeteam_view_t* view) { return view->shard->count; }
ropeteam_status_t ropeteam_view_object(const ropeteam_view_t* view, uint64_t index, ropeteam_object_t* object) {
  object->name = view->shard->objects[index].name;
  object->length = view->shard->objects[index].length;
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_view_find(const ropeteam_view_t* view, const char* name, ropeteam_object_t* object) {
  for (uint64_t i = 0; i < view->shard->count; i++) {
    if (strcmp(view->shard->objects[i].name, name) == 0) return ropeteam_view_object(view, i, object);
  }
  return error(ROPETEAM_NOT_FOUND, "no such name");
}
static const object_t* find(const ropeteam_view_t* view, const char* name) {
  for (uint64_t i = 0; i < view->shard->count; i++) {
    if (strcmp(view->shard->objects[i].name, name) == 0) return &view->shard->objects[i];
  }
  return NULL;
}
ropeteam_status_t ropeteam_view_read(ropeteam_view_t* view, const char* name, uint64_t offset, void* data,
                                     uint64_t length, int64_t timeout_ms) {
  (void)timeout_ms;
  FAILING("view_read");
  const object_t* object = find(view, name);
  if (!object) return error(ROPETEAM_NOT_FOUND, "no such name");
  if (offset > object->length || length > object->length - offset) {
    return error(ROPETEAM_INVALID_ARGUMENT, "range outside the object");
  }
  if (length) memcpy(data, object->data + offset, length);
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_view_read_cuda(ropeteam_view_t* view, const char* name, uint64_t offset, void* data,
                                          uint64_t length, void* stream, int64_t timeout_ms) {
  if (!stream) return error(ROPETEAM_INVALID_ARGUMENT, "no stream");
  cuda_calls++;
  return ropeteam_view_read(view, name, offset, data, length, timeout_ms);
}
static int leaves(const object_t* object, const ropeteam_range_t* range) {
  uint64_t runs = range->count ? range->count : 1;
  return range->offset + (runs - 1) * range->stride + range->length > object->length;
}
ropeteam_status_t ropeteam_view_read_ranges(ropeteam_view_t* view, const ropeteam_range_t* ranges, uint64_t count,
                                            int64_t timeout_ms) {
  (void)timeout_ms;
  FAILING("view_read_ranges");
  for (uint64_t i = 0; i < count; i++) {
    const object_t* object = find(view, ranges[i].name);
    if (!object) return error(ROPETEAM_NOT_FOUND, "no such name");
    if (leaves(object, &ranges[i])) return error(ROPETEAM_INVALID_ARGUMENT, "range outside the object");
  }
  for (uint64_t i = 0; i < count; i++) {
    const unsigned char* from = find(view, ranges[i].name)->data + ranges[i].offset;
    uint64_t runs = ranges[i].count ? ranges[i].count : 1;
    for (uint64_t run = 0; ranges[i].length && run < runs; run++)
      memcpy((char*)ranges[i].data + run * ranges[i].data_stride, from + run * ranges[i].stride, ranges[i].length);
  }
  return ROPETEAM_OK;
}
ropeteam_status_t ropeteam_view_map(ropeteam_view_t* view, const char* name, const void** data, uint64_t* length,
                                    int64_t timeout_ms) {
  (void)timeout_ms;
  const object_t* object = find(view, name);
  if (!object) return error(ROPETEAM_NOT_FOUND, "no such name");
  *data = object->data;
  *length = object->length;
  return ROPETEAM_OK;
}
void ropeteam_view_close(ropeteam_view_t* view) {
  if (view) handles--;
  free(view);
}

/* Two steps on storage, whatever was saved: a good one and a damaged one. */
struct ropeteam_storage_list {
  uint64_t count;
};
ropeteam_status_t ropeteam_storage_list(ropeteam_t* handle, uint32_t steps_max, int64_t timeout_ms,
                                        ropeteam_storage_list_t** list) {
  (void)handle, (void)timeout_ms;
  FAILING("storage_list");
  *list = calloc(1, sizeof **list);
  (*list)->count = steps_max < 2 ? steps_max : 2;
  handles++;
  return ROPETEAM_OK;
}
uint64_t ropeteam_storage_list_count(const ropeteam_storage_list_t* list) { return list->count; }
ropeteam_status_t ropeteam_storage_list_step(const ropeteam_storage_list_t* list, uint64_t index,
                                             ropeteam_storage_step_t* step) {
  (void)list;
  ropeteam_storage_step_t good = {sizeof *step, 20, 3, "step-20", "", "{\"loss\":0.25}", 1800000000, 12345, 4};
  ropeteam_storage_step_t bad = {sizeof *step, 10, 3, "step-10", "it lacks a file", "", 0, 0, 0};
  if (step->size != sizeof *step) return error(ROPETEAM_INVALID_ARGUMENT, "size");
  *step = index == 0 ? good : bad;
  return ROPETEAM_OK;
}
void ropeteam_storage_list_close(ropeteam_storage_list_t* list) {
  if (list) handles--;
  free(list);
}
