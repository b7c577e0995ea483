/* SPDX-License-Identifier: Apache-2.0
 *
 * The C API from C11, linked with libropeteam.so and nothing else. Checks every argument error that needs no
 * daemon. With ROPETEAM_SOCKET set (and RANK and WORLD_SIZE, by default rank 0 of 1) it then saves a new
 * step, waits for it, and reads it back. Prints each failed check; returns 1 if there was any.
 */
#include <ropeteam/ropeteam.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                                                                  \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      ++failures;                                                                                         \
      fprintf(stderr, "%s:%d: not true: %s (last error: %s)\n", __FILE__, __LINE__, #condition,           \
              ropeteam_last_error());                                                                     \
    }                                                                                                     \
  } while (0)

#define CHECK_INVALID(call) CHECK((call) == ROPETEAM_INVALID_ARGUMENT && ropeteam_last_error()[0] != '\0')

enum { kTimeoutMs = 20000, kBigBytes = 10 * 1000 * 1000 + 7 };

static void check_constants(void) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", ROPETEAM_VERSION_MAJOR, ROPETEAM_VERSION_MINOR,
           ROPETEAM_VERSION_PATCH);
  CHECK(strcmp(ropeteam_version(), version) == 0);
  CHECK(strcmp(ropeteam_last_error(), "") == 0);
  CHECK(strcmp(ropeteam_status_name(ROPETEAM_OK), "ok") == 0);
  CHECK(strcmp(ropeteam_status_name(ROPETEAM_NO_SPACE), "no space") == 0);
  CHECK(ropeteam_status_name((ropeteam_status_t)99) != NULL);
}

static void check_null_handles(void) {
  ropeteam_info_t info = {sizeof info, 0, 0, 0, 0, 0};
  ropeteam_save_options_t options = {sizeof options, 0, 0, 0};
  ropeteam_step_t step = {.size = sizeof step};
  ropeteam_object_t object = {sizeof object, NULL, 0};
  ropeteam_policy_t policy = {sizeof policy, 0, 5};
  ropeteam_storage_step_t stored = {sizeof stored, 0, 0, NULL, NULL, NULL, 0, 0, 0};
  ropeteam_storage_list_t *list = NULL;
  ropeteam_save_t *save = NULL;
  ropeteam_view_t *view = NULL;
  void *pointer = NULL;
  const void *data = NULL;
  uint64_t length = 0;
  char byte = 0;
  CHECK_INVALID(ropeteam_info(NULL, &info));
  CHECK_INVALID(ropeteam_save_begin(NULL, 1, &options, &save));
  CHECK_INVALID(ropeteam_save_put(NULL, "a", &byte, 1));
  CHECK_INVALID(ropeteam_save_reserve(NULL, "a", 1, &pointer));
  CHECK_INVALID(ropeteam_save_commit(NULL));
  CHECK_INVALID(ropeteam_save_abort(NULL));
  CHECK_INVALID(ropeteam_wait(NULL, 1, ROPETEAM_LOCAL, 0));
  CHECK_INVALID(ropeteam_drop(NULL, 1, 0));
  CHECK_INVALID(ropeteam_persist(NULL, 1, 0));
  CHECK_INVALID(ropeteam_set_policy(NULL, &policy, 0));
  CHECK_INVALID(ropeteam_latest(NULL, &step, 0));
  CHECK_INVALID(ropeteam_latest_at(NULL, ROPETEAM_PERSISTED, &step, 0));
  CHECK_INVALID(ropeteam_storage_list(NULL, 0, 0, &list));
  CHECK_INVALID(ropeteam_storage_list_step(NULL, 0, &stored));
  CHECK(ropeteam_storage_list_count(NULL) == 0);
  ropeteam_storage_list_close(NULL);
  CHECK_INVALID(ropeteam_view_open(NULL, 1, 0, 0, &view));
  CHECK_INVALID(ropeteam_view_object(NULL, 0, &object));
  CHECK_INVALID(ropeteam_view_find(NULL, "a", &object));
  CHECK_INVALID(ropeteam_view_read(NULL, "a", 0, &byte, 1, 0));
  CHECK_INVALID(ropeteam_view_map(NULL, "a", &data, &length, 0));
  CHECK(ropeteam_view_count(NULL) == 0);
  CHECK(save == NULL && view == NULL && pointer == NULL && data == NULL && list == NULL);
  ropeteam_close(NULL);
  ropeteam_save_close(NULL);
  ropeteam_view_close(NULL);
}

static void check_open_arguments(void) {
  ropeteam_t *handle = NULL;
  ropeteam_open_options_t options;
  memset(&options, 0, sizeof options);
  options.socket = "/nonexistent/ropeteam/socket";
  options.world_size = 2;
  CHECK_INVALID(ropeteam_open(NULL, &handle));
  CHECK_INVALID(ropeteam_open(&options, &handle)); /* size is 0 */
  options.size = sizeof options - 1;
  CHECK_INVALID(ropeteam_open(&options, &handle));
  options.size = sizeof options;
  CHECK_INVALID(ropeteam_open(&options, NULL));
  options.timeout_ms = -1;
  CHECK_INVALID(ropeteam_open(&options, &handle));
  options.timeout_ms = (int64_t)ROPETEAM_TIMEOUT_MAX_MS + 1;
  CHECK_INVALID(ropeteam_open(&options, &handle));
  options.timeout_ms = 100;
  options.rank = 2;
  CHECK_INVALID(ropeteam_open(&options, &handle));
  CHECK(strstr(ropeteam_last_error(), "rank 2, world_size 2") != NULL);
  options.rank = 1;
  options.world_size = ROPETEAM_WORLD_MAX + 1;
  CHECK_INVALID(ropeteam_open(&options, &handle));
  options.world_size = 2;
  char token[300];
  memset(token, 'l', sizeof token - 1);
  token[sizeof token - 1] = '\0';
  options.incarnation_token = token;
  CHECK_INVALID(ropeteam_open(&options, &handle));
  options.incarnation_token = NULL;
  CHECK(ropeteam_open(&options, &handle) == ROPETEAM_UNAVAILABLE);
  CHECK(strstr(ropeteam_last_error(), "/nonexistent/ropeteam/socket") != NULL);
  options.socket = "/";
  CHECK_INVALID(ropeteam_open(&options, &handle));
  CHECK(handle == NULL);
}

static unsigned char pattern(uint64_t i) { return (unsigned char)(i * 31 + (i >> 8) + (i >> 16)); }

static const char kMetadata[] = "{\"loss\": 0.25}";

static void save_step(ropeteam_t *handle, uint64_t step, const unsigned char *big) {
  ropeteam_save_options_t options = {sizeof options, 2 * kBigBytes + 1 + sizeof kMetadata, 5, 0};
  ropeteam_save_t *save = NULL;
  void *pointer = NULL;
  CHECK(ropeteam_save_begin(handle, step, &options, &save) == ROPETEAM_OK);
  if (save == NULL) return;
  CHECK(ropeteam_save_put(save, "empty", NULL, 0) == ROPETEAM_OK);
  CHECK(ropeteam_save_put(save, "byte", "b", 1) == ROPETEAM_OK);
  CHECK(ropeteam_save_put(save, "big", big, kBigBytes) == ROPETEAM_OK);
  CHECK_INVALID(ropeteam_save_put(save, "big", big, 1)); /* twice */
  CHECK_INVALID(ropeteam_save_put(save, "null", NULL, 1));
  CHECK_INVALID(ropeteam_save_put(save, ROPETEAM_METADATA, big, ROPETEAM_METADATA_MAX + 1));
  CHECK(ropeteam_save_put(save, ROPETEAM_METADATA, kMetadata, sizeof kMetadata - 1) == ROPETEAM_OK);
  CHECK(ropeteam_save_reserve(save, "in place", kBigBytes, &pointer) == ROPETEAM_OK);
  if (pointer != NULL) memcpy(pointer, big, kBigBytes);
  CHECK(ropeteam_save_commit(save) == ROPETEAM_OK);
  CHECK_INVALID(ropeteam_save_put(save, "late", "x", 1));
  CHECK_INVALID(ropeteam_save_abort(save));
  ropeteam_save_close(save);
  CHECK(ropeteam_save_begin(handle, step, &options, &save) == ROPETEAM_ALREADY_EXISTS);
}

static void read_step(ropeteam_t *handle, uint64_t step, uint32_t rank, const unsigned char *big) {
  ropeteam_view_t *view = NULL;
  ropeteam_object_t object = {sizeof object, NULL, 0};
  unsigned char *target = malloc(kBigBytes);
  const void *data = NULL;
  uint64_t length = 0;
  CHECK(ropeteam_view_open(handle, step, rank, kTimeoutMs, &view) == ROPETEAM_OK);
  if (view == NULL || target == NULL) {
    free(target);
    return;
  }
  CHECK(ropeteam_view_count(view) == 5);
  CHECK(ropeteam_view_find(view, ROPETEAM_METADATA, &object) == ROPETEAM_OK);
  CHECK(object.length == sizeof kMetadata - 1);
  CHECK(ropeteam_view_object(view, 1, &object) == ROPETEAM_OK);
  CHECK(strcmp(object.name, "byte") == 0 && object.length == 1);
  CHECK(ropeteam_view_find(view, "big", &object) == ROPETEAM_OK && object.length == kBigBytes);
  CHECK(ropeteam_view_find(view, "none", &object) == ROPETEAM_NOT_FOUND);
  CHECK(ropeteam_view_read(view, "big", 0, target, kBigBytes, kTimeoutMs) == ROPETEAM_OK);
  CHECK(memcmp(target, big, kBigBytes) == 0);
  CHECK(ropeteam_view_read(view, "in place", 1234567, target, 4444444, kTimeoutMs) == ROPETEAM_OK);
  CHECK(memcmp(target, big + 1234567, 4444444) == 0);
  CHECK_INVALID(ropeteam_view_read(view, "big", 1, target, kBigBytes, kTimeoutMs));
  CHECK(ropeteam_view_map(view, "in place", &data, &length, kTimeoutMs) == ROPETEAM_OK);
  CHECK(length == kBigBytes && data != NULL && memcmp(data, big, kBigBytes) == 0);
  CHECK(ropeteam_view_map(view, "empty", &data, &length, kTimeoutMs) == ROPETEAM_OK);
  CHECK(length == 0 && data != NULL);
  ropeteam_view_close(view);
  free(target);
}

static uint64_t check_abort(ropeteam_t *handle, uint64_t step) {
  ropeteam_save_options_t options = {sizeof options, 100, 1, 0};
  ropeteam_save_t *save = NULL;
  CHECK(ropeteam_save_begin(handle, step, &options, &save) == ROPETEAM_OK);
  CHECK(ropeteam_save_put(save, "given up", "x", 1) == ROPETEAM_OK);
  CHECK(ropeteam_save_abort(save) == ROPETEAM_OK);
  CHECK_INVALID(ropeteam_save_commit(save));
  ropeteam_save_close(save);
  return step + 1;
}

static void check_cycle(void) {
  ropeteam_open_options_t options;
  ropeteam_info_t info = {sizeof info, 0, 0, 0, 0, 0};
  ropeteam_step_t latest = {.size = sizeof latest};
  ropeteam_storage_list_t *list = NULL;
  ropeteam_t *handle = NULL;
  unsigned char *big = malloc(kBigBytes);
  uint64_t step = 1;
  if (big == NULL) abort();
  for (uint64_t i = 0; i < kBigBytes; ++i) big[i] = pattern(i);
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.rank = getenv("RANK") != NULL ? ROPETEAM_RANK_FROM_ENV : 0;
  options.world_size = getenv("WORLD_SIZE") != NULL ? 0 : 1;
  CHECK(ropeteam_open(&options, &handle) == ROPETEAM_OK);
  if (handle == NULL) {
    free(big);
    return;
  }
  CHECK(ropeteam_info(handle, &info) == ROPETEAM_OK);
  CHECK(info.world_size >= 1 && info.rank < info.world_size && info.chunk_bytes > 0);
  ropeteam_status_t status = ropeteam_latest(handle, &latest, kTimeoutMs);
  CHECK(status == ROPETEAM_OK || status == ROPETEAM_NOT_FOUND);
  if (status == ROPETEAM_OK) step = latest.step + 1;
  step = check_abort(handle, step);
  save_step(handle, step, big);
  CHECK(ropeteam_wait(handle, step, ROPETEAM_LOCAL, 0) == ROPETEAM_OK);
  CHECK(ropeteam_wait(handle, step, ROPETEAM_COMMITTED, kTimeoutMs) == ROPETEAM_OK);
  CHECK(ropeteam_wait(handle, step + 1000, ROPETEAM_LOCAL, 0) == ROPETEAM_NOT_FOUND);
  CHECK(ropeteam_latest(handle, &latest, kTimeoutMs) == ROPETEAM_OK);
  CHECK(latest.step == step && latest.world_size == info.world_size);
  CHECK(ropeteam_latest_at(handle, ROPETEAM_COMMITTED, &latest, kTimeoutMs) == ROPETEAM_OK && latest.step == step);
  read_step(handle, step, info.rank, big);
  CHECK_INVALID(ropeteam_storage_list(handle, ROPETEAM_STORAGE_STEPS_MAX + 1, kTimeoutMs, &list));
  status = ropeteam_storage_list(handle, 0, kTimeoutMs, &list);
  CHECK(status == ROPETEAM_UNSUPPORTED || (status == ROPETEAM_OK && list != NULL));
  ropeteam_storage_list_close(list);
  ropeteam_close(handle);
  free(big);
}

int main(void) {
  const char *socket = getenv("ROPETEAM_SOCKET");
  check_constants();
  check_null_handles();
  check_open_arguments();
  if (socket != NULL && *socket != '\0') check_cycle();
  printf("%s: %d failed\n", socket != NULL && *socket != '\0' ? "arguments and a whole cycle" : "arguments", failures);
  return failures == 0 ? 0 : 1;
}
