/* SPDX-License-Identifier: Apache-2.0
 *
 * Ropeteam's C API: a rank saves named bytes into its node's memory, has them copied to other nodes, and reads back what
 * any rank saved, from wherever a good copy is.
 *
 * Does not:
 * . coordinate ranks: no call is a collective, and none waits for another rank unless it is asked to wait for a level
 * . interpret bytes: a tensor's type and shape are for the caller (the Python package keeps them in an object)
 * . keep a save that was not committed: a save that is closed, aborted or cut off by death leaves nothing behind
 * . copy steps to other places or from there: the programs `ropeteam export` and `ropeteam import` do
 * . work across fork(): a child must open its own handle
 *
 * Conventions
 * (1) Handles are opaque, typed, and owned by the caller until the matching close. Passing NULL where a handle is wanted
 *     is ROPETEAM_INVALID_ARGUMENT; passing NULL to a close does nothing.
 * (2) Every fallible call returns a ropeteam_status_t. On anything but ROPETEAM_OK its outputs are untouched, and
 *     ropeteam_last_error() has a sentence with the value and the limit that were met. No call ends the process, raises
 *     a signal or prints (unless ROPETEAM_LOG is set, to one of trace, debug, info, warning, error: then the library's log
 *     is on stderr): trouble in the store must never stop training.
 * (3) Threads: calls on different handles, and on the same ropeteam_t, may run at the same time. Calls on one
 *     ropeteam_save_t or one ropeteam_view_t are serialised inside; closing one while another thread uses it is the
 *     caller's mistake.
 * (4) Every call that can wait takes `timeout_ms`: milliseconds from now, 0 to look once and not wait, at most
 *     ROPETEAM_TIMEOUT_MAX_MS. When it passes the call returns ROPETEAM_DEADLINE_EXCEEDED and the outcome is unknown. With
 *     a daemon that is stopped, and so cannot say how far it came, the call is up to a second late. Calls without a timeout
 *     wait for this node's daemon alone, and for 5 s at most; a commit also for the copies that ropeteam_save_put_cuda()
 *     was given, however long their stream takes.
 * (5) Names are bytes, 1 to ROPETEAM_NAME_MAX of them, ended by a zero; unique within a shard.
 * (6) Structs that the caller fills begin with `size` = sizeof(the struct): a library that is newer than the caller
 *     takes the fields it knows of. A zeroed field means the default. Enums and structs only ever grow at the end. Structs
 *     that come in arrays (ropeteam_range_t) have no `size` and never grow.
 * (7) `const void* data` may be NULL only when its length is 0.
 * (8) Device memory: where the bytes of an object are given or wanted, a pointer into memory of a CUDA device will do as
 *     well (also managed memory), in a process that has NVIDIA's driver loaded; nothing is needed to say so. Calls that
 *     end in _cuda take the caller's stream, and are for device memory alone. docs/gpu.md has the mechanism.
 */

#ifndef ROPETEAM_ROPETEAM_H_
#define ROPETEAM_ROPETEAM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ROPETEAM_EXPORT __attribute__((visibility("default")))
#else
#define ROPETEAM_EXPORT
#endif

#define ROPETEAM_VERSION_MAJOR 0
#define ROPETEAM_VERSION_MINOR 1
#define ROPETEAM_VERSION_PATCH 0

/* Limits; each is checked and named in the error it causes. */
#define ROPETEAM_NAME_MAX 255               /* bytes of an object's name */
#define ROPETEAM_OBJECTS_MAX 1000000        /* objects of one shard */
#define ROPETEAM_RANGES_MAX 1000000         /* ranges of one ropeteam_view_read_ranges() */
#define ROPETEAM_PARTS_MAX 1000000          /* parts of one ropeteam_save_put_parts() */
#define ROPETEAM_METADATA_MAX 4096          /* bytes of the object ROPETEAM_METADATA */
#define ROPETEAM_STORAGE_STEPS_MAX 200      /* steps of one listing of storage */
#define ROPETEAM_SAVES_OPEN_MAX 4           /* saves of one handle begun and neither committed nor aborted */
#define ROPETEAM_VIEWS_OPEN_MAX 1024        /* views of one handle */
#define ROPETEAM_WORLD_MAX 131072           /* ranks of one job */
#define ROPETEAM_TIMEOUT_MAX_MS 86400000    /* one day */
#define ROPETEAM_RANK_FROM_ENV UINT32_MAX   /* ropeteam_open_options_t.rank: take RANK from the environment */

typedef struct ropeteam_handle ropeteam_t;    /* a rank's tie to its node's daemon */
typedef struct ropeteam_save ropeteam_save_t; /* one shard while it is being saved */
typedef struct ropeteam_view ropeteam_view_t; /* one saved shard, open for reading */
typedef struct ropeteam_storage_list ropeteam_storage_list_t; /* what lay on storage when it was asked */

typedef enum {
  ROPETEAM_OK = 0,
  ROPETEAM_INVALID_ARGUMENT = 1,
  ROPETEAM_NOT_FOUND = 2,
  ROPETEAM_ALREADY_EXISTS = 3,
  ROPETEAM_NO_SPACE = 4,
  ROPETEAM_DEADLINE_EXCEEDED = 5,
  ROPETEAM_PEER_GONE = 6,
  ROPETEAM_LINK_FAILED = 7,
  ROPETEAM_CORRUPT = 8,
  ROPETEAM_STALE = 9, /* this rank belongs to an older life of the world: stop saving, the job has restarted */
  ROPETEAM_UNAVAILABLE = 10, /* the daemon is not there; the next call tries to reach it again */
  ROPETEAM_UNSUPPORTED = 11,
  ROPETEAM_IO = 12,
  ROPETEAM_ABORTED = 13,
  ROPETEAM_INTERNAL = 14
} ropeteam_status_t;

/* How far a shard has climbed; each level includes those before it. */
typedef enum {
  ROPETEAM_LOCAL = 1,      /* in this node's arena, checksummed; survives the death of any process */
  ROPETEAM_REPLICATED = 2, /* verified copies on as many other nodes as asked for */
  ROPETEAM_COMMITTED = 3,  /* every rank of this life of the world reached REPLICATED at this step */
  ROPETEAM_PERSISTED = 4   /* the whole step is on storage */
} ropeteam_level_t;

/* "0.1.0". */
ROPETEAM_EXPORT const char* ropeteam_version(void);
/* "no space", …; never NULL. */
ROPETEAM_EXPORT const char* ropeteam_status_name(ropeteam_status_t status);
/* What went wrong in this thread's last failed call; "" when none failed. Valid until this thread's next call. */
ROPETEAM_EXPORT const char* ropeteam_last_error(void);

/* ---- open ---- */

typedef struct {
  size_t size;
  /* The daemon's unix socket; NULL: the environment variable ROPETEAM_SOCKET, which `ropeteam run` sets. */
  const char* socket;
  /* This process's rank, and how many there are; world_size 0 takes WORLD_SIZE from the environment. */
  uint32_t rank;
  uint32_t world_size;
  /* A string that all ranks of one life of the world share and no other life has, e.g. a token that rank 0 made and
   * broadcast. NULL: ROPETEAM_LIFE, or SLURM's job, step and restart numbers (not under torchrun, which restarts the world
   * within one step of SLURM's). Without any, a life ends when one of its ranks dies or opens again, which is right for
   * launchers that stop the whole world before they start the next. */
  const char* life;
  int64_t timeout_ms; /* 0: 30 s, the one timeout whose zero is a default (convention 6 over convention 4) */
} ropeteam_open_options_t;

/* Ties this rank to its daemon and joins the current life of the world, or begins the next. Waits until a leader has
 * admitted the rank. STALE: this life has been superseded. UNAVAILABLE: no daemon at the socket. UNSUPPORTED: the daemon
 * speaks another protocol version; both are named. INVALID_ARGUMENT: rank outside the world, another world size than
 * the life of this name has. ALREADY_EXISTS: this rank of this life is open already. DEADLINE_EXCEEDED: not enough nodes
 * are there, or the handle names no life and a world of another size, or of a named life, is still open: who only looks
 * ends nobody's training, and a process that goes on in a world of another size closes its old handle first. If the
 * daemon dies later, calls return UNAVAILABLE and the next call reaches out to its successor. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_open(const ropeteam_open_options_t* options, ropeteam_t** handle);
/* Aborts what is not committed, closes every view. Never waits for the network. Saves and views that are still open stay
 * valid handles, to be closed by their own calls before or after; everything else they are asked fails. */
ROPETEAM_EXPORT void ropeteam_close(ropeteam_t* handle);

typedef struct {
  size_t size;
  uint32_t rank;
  uint32_t world_size;
  uint64_t incarnation; /* which life of the world, counted from 1 */
  uint64_t chunk_bytes;
  uint64_t arena_bytes; /* the node's whole budget */
} ropeteam_info_t;
ROPETEAM_EXPORT ropeteam_status_t ropeteam_info(ropeteam_t* handle, ropeteam_info_t* info);

/* ---- save ---- */

typedef struct {
  size_t size;
  /* The sum of the objects' lengths and their number, as exactly as known: what is reserved, here and now, before a
   * byte is copied. A save that turns out larger asks for more on its way and may then be refused. */
  uint64_t bytes;
  uint64_t objects;
  /* A value that all ranks of this step must share, e.g. a digest of what they are to have in common: which rank stores
   * what, or a state that is replicated. 0: none. The leader compares; where two ranks gave different values, or one a
   * value and one none, the step is never committed and its memory is released. Each rank's ropeteam_wait() for it answers
   * ABORTED with both values and their ranks. UNSUPPORTED: a node of the job has an older daemon. */
  uint64_t agreement;
} ropeteam_save_options_t;

/* Begins to save this rank's shard of `step`. NO_SPACE: needed, free and limit are in the message, nothing is changed and
 * older committed steps stay. ALREADY_EXISTS: this rank has saved or is saving this step in this life. STALE: the world
 * has restarted without this process. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_begin(ropeteam_t* handle, uint64_t step,
                                                      const ropeteam_save_options_t* options, ropeteam_save_t** save);
/* The name of the object with the step's metadata: loss, accuracy, tokens, a revision. Its bytes are a JSON object,
 * UTF-8, of at most ROPETEAM_METADATA_MAX bytes; a longer one is INVALID_ARGUMENT. One rank is enough: the lowest that
 * gives any counts. The metadata stand in the manifest on storage, for the daemons' --keep-best and for people. Bytes
 * that are not a JSON object are left out there, with a warning in the daemon's log. In every other way it is an object
 * like any other: a view counts it, finds it by this name and reads it. */
#define ROPETEAM_METADATA "ropeteam.metadata"
/* Copies [data, data + length) into the shard as the object `name`, checksumming on the way; the source is the
 * caller's again at return. Replication of full chunks begins meanwhile. After INVALID_ARGUMENT and NO_SPACE the save is as
 * it was, without this object; any other error ends it, and every later call on it returns the same.
 * From device memory it copies what all work has left there that was given, before this call, to the legacy default
 * stream and those that synchronise with it, as cudaMemcpy() does; work in non-blocking streams must have been waited for.
 * UNSUPPORTED (the driver is too old) then leaves the save as it was, too. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put(ropeteam_save_t* save, const char* name, const void* data,
                                                    uint64_t length);
/* The same from device memory, without waiting: copies what the work given to `stream` before this call leaves there
 * (a CUstream or cudaStream_t of any device of this process; NULL: the legacy default stream), in the background, while
 * this thread and later work in that stream go on. The source must keep its bytes, and its allocation, until
 * ropeteam_save_commit() has returned, or the save has been aborted, closed or ended by an error: so the work that changes
 * it next is to be given to the device after the commit. The commit waits for the copies, however long `stream` takes to
 * come to them; an abort does not, it waits for what the device is copying just then. Where the node's network card reads
 * the memory by itself, commit and abort wait for that as well, a second at most.
 * INVALID_ARGUMENT: not a pointer into device memory, or its context is gone. UNSUPPORTED: libcuda.so.1 cannot be loaded
 * or is too old. After these and NO_SPACE the save is as it was; a copy that the device fails ends it, IO, at the next
 * call on it, at the latest in the commit. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put_cuda(ropeteam_save_t* save, const char* name, const void* data,
                                                         uint64_t length, void* stream);
/* With it, the part's `data` is device memory and is copied as by ropeteam_save_put_cuda(), behind the work given to its
 * `stream`. Without it, the part is copied as by ropeteam_save_put(), and `stream` is not looked at. */
#define ROPETEAM_PART_BACKGROUND UINT64_C(1)
/* A piece of an object. It stands in arrays, so it has no `size` and does not grow. */
typedef struct {
  const void* data; /* NULL only where length is 0 */
  uint64_t length;  /* bytes; 0 is a piece without bytes */
  void* stream;
  uint64_t flags; /* 0 or ROPETEAM_PART_BACKGROUND; anything else is INVALID_ARGUMENT */
} ropeteam_part_t;
/* Copies `count` parts, 0 to ROPETEAM_PARTS_MAX of them, into the shard as one object `name`: their bytes one behind the
 * other, without gaps. Each part is copied once, straight into the arena, with the checksum in the same pass. Host and
 * device memory may be mixed. The array is the caller's at return; the parts are the caller's again when they would be
 * after ropeteam_save_put() or ropeteam_save_put_cuda(). Errors as of these two: after INVALID_ARGUMENT, NO_SPACE and
 * UNSUPPORTED the save is as it was, without any of the parts. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put_parts(ropeteam_save_t* save, const char* name,
                                                          const ropeteam_part_t* parts, uint64_t count);
/* Makes the object that was put last longer: copies [data, data + length) behind its bytes, as ropeteam_save_put() does. For
 * an object whose length is not known before its last byte. INVALID_ARGUMENT: nothing was put yet, or ROPETEAM_METADATA was.
 * Errors otherwise as of ropeteam_save_put(): after INVALID_ARGUMENT and NO_SPACE the object is as it was. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_append(ropeteam_save_t* save, const void* data, uint64_t length);
/* Hands out `length` bytes of the arena, 64-byte aligned and contiguous, to be filled in place before
 * ropeteam_save_commit(), which checksums them. *pointer is valid until the save is committed, aborted or closed.
 * INVALID_ARGUMENT: a length of 0; an empty object is put. Otherwise as ropeteam_save_put(). */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_reserve(ropeteam_save_t* save, const char* name, uint64_t length,
                                                        void** pointer);
/* Seals the shard: at OK it is LOCAL. Waits for copies from device memory, if there are any, and for the daemon's answer on
 * this machine only, never for the network. After any error the save is aborted. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_commit(ropeteam_save_t* save);
/* Gives the save up; its chunks are free again. INVALID_ARGUMENT after commit. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_abort(ropeteam_save_t* save);
/* Frees the handle; aborts first if neither committed nor aborted. */
ROPETEAM_EXPORT void ropeteam_save_close(ropeteam_save_t* save);

/* Waits until this rank's shard of `step` has reached `level`. DEADLINE_EXCEEDED: it has not yet. ABORTED: it never will
 * (the world has restarted, the ranks gave different values as `agreement`, or a newer step has replaced it before it got
 * there; PERSISTED: the step is not due, or was
 * overtaken before it was begun; the message says which). NOT_FOUND: this rank did not save it.
 * UNSUPPORTED: PERSISTED, while the job has no storage. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_wait(ropeteam_t* handle, uint64_t step, ropeteam_level_t level,
                                                int64_t timeout_ms);

/* Has `step`, which this life of the world saves, written to storage once it is committed, whether it is due or not (the
 * daemons' --persist-every). One rank's call is enough, before or after the commit; more change nothing. At OK every node
 * knows of it, nothing has been written yet: ropeteam_wait() for PERSISTED tells when. A newer step that is asked for takes
 * the place of one that has not been begun. ABORTED: it is too old. NO_SPACE: too many steps that are not committed were
 * asked for. UNSUPPORTED: the job has no storage. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_persist(ropeteam_t* handle, uint64_t step, int64_t timeout_ms);

/* ---- load ---- */

typedef struct {
  size_t size;
  uint64_t step;
  uint64_t incarnation; /* the life that saved it */
  uint32_t world_size;  /* the number of ranks that saved it: the views that can be opened */
  /* 1: a newer step, `passed_over_step`, could be produced and is quarantined: the world kept ending after it had restored
   * it, or a person said so (`ropeteam quarantine`). It can be opened by its number. 0: there is none. */
  uint32_t passed_over;
  uint64_t passed_over_step;
} ropeteam_step_t;

/* The newest step that every one of its ranks' shards can be produced of, now; the same answer for every rank of one life
 * until that life has itself completed a step. NOT_FOUND when there is none. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_latest(ropeteam_t* handle, ropeteam_step_t* step, int64_t timeout_ms);
/* The same by level. ROPETEAM_COMMITTED: as ropeteam_latest(). ROPETEAM_PERSISTED: the newest good step on storage, also
 * where memory has a newer one; this chooses nothing for the life. INVALID_ARGUMENT: another level. UNSUPPORTED:
 * PERSISTED, while the job has no storage. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_latest_at(ropeteam_t* handle, ropeteam_level_t level, ropeteam_step_t* step,
                                                     int64_t timeout_ms);

typedef struct {
  size_t size;
  const char* name;  /* valid until the view is closed */
  uint64_t length;   /* bytes */
} ropeteam_object_t;

/* Opens what `rank` saved at `step`, any rank, fetching it from its holders if this node has no copy. The shard stays
 * readable until the close even if retention would release it. NOT_FOUND: no holder, or no such step or rank. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_open(ropeteam_t* handle, uint64_t step, uint32_t rank,
                                                     int64_t timeout_ms, ropeteam_view_t** view);
typedef struct {
  size_t size;
  /* 1: a shard that this node lacks is not fetched; ropeteam_view_read() and ropeteam_view_read_ranges() bring only the bytes
   * that they are asked for, from the memory of the nodes that have it, each checked there and here. The shard is not
   * kept for this view: if retention releases it, reads are NOT_FOUND. ropeteam_view_map() fetches the whole shard first. So
   * does any read where ranges cannot be had: the job encrypts its replicas, only storage has the shard, a node runs an
   * older daemon, or no holder answers. A shard that this node has is opened as ever. */
  uint32_t partial;
} ropeteam_view_options_t;
/* ropeteam_view_open() with options. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_open_with(ropeteam_t* handle, uint64_t step, uint32_t rank,
                                                          const ropeteam_view_options_t* options, int64_t timeout_ms,
                                                          ropeteam_view_t** view);
/* Objects in the view, in the order they were saved. 0 for NULL. */
ROPETEAM_EXPORT uint64_t ropeteam_view_count(const ropeteam_view_t* view);
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_object(const ropeteam_view_t* view, uint64_t index,
                                                       ropeteam_object_t* object);
/* NOT_FOUND: no object of this name. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_find(const ropeteam_view_t* view, const char* name,
                                                     ropeteam_object_t* object);
/* Copies [offset, offset + length) of the object to `data`, every chunk checked. A chunk that does not match is repaired
 * from another holder inside the call; CORRUPT names every source that was tried, and `data` is then unspecified.
 * INVALID_ARGUMENT: the range is outside the object. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_read(ropeteam_view_t* view, const char* name, uint64_t offset,
                                                     void* data, uint64_t length, int64_t timeout_ms);
/* The same into device memory, behind the work given to `stream` (as ropeteam_save_put_cuda()) before this call. At return
 * the bytes are there for any work given to the device from then on. DEADLINE_EXCEEDED: `stream` did not come to this call
 * in time; `data` is as it was. ropeteam_view_read() with device memory does the same for the legacy default stream. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_read_cuda(ropeteam_view_t* view, const char* name, uint64_t offset,
                                                          void* data, uint64_t length, void* stream,
                                                          int64_t timeout_ms);
/* `count` runs of `length` bytes each: run i goes from byte `offset + i * stride` of the object `name` to
 * `data + i * data_stride`. A count of 0 is 1. With more than one run both strides are at least `length`. */
typedef struct {
  const char* name;
  uint64_t offset;
  uint64_t length;
  uint64_t count;
  uint64_t stride;
  void* data; /* also device memory, as in ropeteam_view_read() */
  uint64_t data_stride;
} ropeteam_range_t;
/* Reads many ranges, of one object or of many, in one call: slices of rows are one run, slices of columns are one run a row.
 * Each chunk that a run touches is checked once, however many runs touch it, and repaired as in ropeteam_view_read().
 * Nothing is read if any range is invalid. After any other error all targets are unspecified. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_read_ranges(ropeteam_view_t* view, const ropeteam_range_t* ranges,
                                                            uint64_t count, int64_t timeout_ms);
/* Gives the object's bytes in place, read-only, checked (and repaired) once, now; valid until the view is closed. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_map(ropeteam_view_t* view, const char* name, const void** data,
                                                    uint64_t* length, int64_t timeout_ms);
ROPETEAM_EXPORT void ropeteam_view_close(ropeteam_view_t* view);

/* ---- storage ---- */

/* Lists the newest steps that have a manifest on the job's storage: `steps_max` of them, at most
 * ROPETEAM_STORAGE_STEPS_MAX; 0: 100. Newest first: a later life's step is newer than any of an earlier one. This node's
 * daemon looks by itself, at manifests and files' sizes, at no data. INVALID_ARGUMENT: steps_max is over the limit.
 * UNSUPPORTED: the job has no storage. UNAVAILABLE, IO and others: it cannot be read; the message says why. The list is
 * the caller's until its close, whatever becomes of the handle; any thread may read it. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_storage_list(ropeteam_t* handle, uint32_t steps_max, int64_t timeout_ms,
                                                        ropeteam_storage_list_t** list);

typedef struct {
  size_t size;
  uint64_t step;
  uint64_t incarnation; /* the life that saved it */
  /* The name of its folder below the job's, "step-0000000100-i…": unique, and what `ropeteam export` and `verify` take.
   * Texts are never NULL, and valid until the list is closed. */
  const char* folder;
  const char* problem;  /* why it cannot be restored; "": its manifest is good, its files are there with their sizes */
  const char* metadata; /* see ROPETEAM_METADATA: a JSON object; "" where not known, or over ROPETEAM_METADATA_MAX */
  uint64_t time_s;      /* when its manifest was written: seconds since 1970, by the writer's clock; 0 where not known */
  uint64_t bytes;       /* of its ranks' shards; 0 where not known */
  uint32_t world_size;  /* the number of ranks that saved it; 0 where not known */
} ropeteam_storage_step_t;
/* Steps in the list. 0 for NULL. */
ROPETEAM_EXPORT uint64_t ropeteam_storage_list_count(const ropeteam_storage_list_t* list);
ROPETEAM_EXPORT ropeteam_status_t ropeteam_storage_list_step(const ropeteam_storage_list_t* list, uint64_t index,
                                                             ropeteam_storage_step_t* step);
ROPETEAM_EXPORT void ropeteam_storage_list_close(ropeteam_storage_list_t* list);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ROPETEAM_ROPETEAM_H_ */
