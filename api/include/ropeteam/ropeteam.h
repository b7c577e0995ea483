/* SPDX-License-Identifier: Apache-2.0
 *
 * Ropeteam's C API. A rank saves named bytes into its node's memory, other nodes get copies, and any rank can read back
 * what any rank saved, from any good copy.
 *
 * Does not:
 * . coordinate ranks: no call is a collective, and only a wait for a level waits for other ranks
 * . interpret bytes: the caller keeps a tensor's type and shape (the Python package keeps them in an object)
 * . keep a save that was not committed: nothing is left of a save that is closed or aborted, or whose process dies
 * . copy steps to or from other places: the programs `ropeteam export` and `ropeteam import` do that
 * . work across fork(): a child must open its own handle
 *
 * Conventions
 * (1) Handles are opaque, typed, and owned by the caller until the matching close. NULL in place of a handle is
 *     ROPETEAM_INVALID_ARGUMENT; a close of NULL does nothing.
 * (2) Every fallible call returns a ropeteam_status_t. If it is not ROPETEAM_OK, the outputs are unchanged, and
 *     ropeteam_last_error() returns a sentence with the value and the limit. No call ends the process, raises a signal or
 *     prints: a failure in the store must never stop training. The library logs to stderr only if ROPETEAM_LOG is set (to
 *     trace, debug, info, warning or error).
 * (3) Threads: calls on different handles, and on the same ropeteam_t, may run at the same time. Calls on one
 *     ropeteam_save_t or one ropeteam_view_t are serialised inside. Do not close one while another thread uses it.
 *     Helper threads of the handle take part in a put of 256 KiB or more of host memory. They are done with the memory
 *     when the put returns. They take no signals, and end when the handle and its saves and views are closed. The
 *     environment variable ROPETEAM_COPY_THREADS is the number of threads that copy, 1 to 16, the caller included. If it
 *     is unset: 4, or this rank's share of the processors if that is less.
 * (4) Every call that can wait takes `timeout_ms`: milliseconds from now, at most ROPETEAM_TIMEOUT_MAX_MS; 0: look once,
 *     do not wait. When the time has passed, the call returns ROPETEAM_DEADLINE_EXCEEDED and the outcome is unknown. If
 *     the daemon is stopped and cannot answer, the call returns up to a second late. Calls without a timeout wait only
 *     for this node's daemon, at most 5 s. A commit also waits for the copies of ropeteam_save_put_cuda(), however long
 *     their stream takes.
 * (5) Names have 1 to ROPETEAM_NAME_MAX bytes, end with a zero byte, and are unique within a shard.
 * (6) Structs that the caller fills begin with `size` = sizeof(the struct), so that a newer library uses only the fields
 *     that the caller has. A zeroed field means the default. Enums and structs only ever grow at the end. Structs
 *     that come in arrays (ropeteam_range_t) have no `size` and never grow.
 * (7) `const void* data` may be NULL only when its length is 0.
 * (8) Device memory: a pointer to the bytes of an object may also point to memory of a CUDA device, or to managed memory,
 *     if the process has loaded NVIDIA's driver. The library detects it. Calls that end in _cuda take the caller's stream,
 *     and only device memory. docs/gpu.md has the mechanism.
 * (9) An incarnation is the ranks of the job from one (re)start to the next. A launcher may give each incarnation a token,
 *     the field `incarnation_token` of ropeteam_open_options_t or the environment variable ROPETEAM_INCARNATION_TOKEN.
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

/* Limits. Each is checked, and an error names the limit that was exceeded. */
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

/* Of ropeteam_policy_t. */
#define ROPETEAM_PERSIST_EVERY_MAX 1000000000
#define ROPETEAM_KEEP_ON_STORAGE_MAX 1000000

typedef struct ropeteam_handle ropeteam_t;    /* a rank's connection to its node's daemon */
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
  ROPETEAM_STALE = 9, /* this rank belongs to an older incarnation: stop saving, the job has restarted */
  ROPETEAM_UNAVAILABLE = 10, /* the daemon does not answer; the next call tries to connect again */
  ROPETEAM_UNSUPPORTED = 11,
  ROPETEAM_IO = 12,
  ROPETEAM_ABORTED = 13,
  ROPETEAM_INTERNAL = 14
} ropeteam_status_t;

/* The levels of a shard. Each level includes those before it. */
typedef enum {
  ROPETEAM_LOCAL = 1,      /* in this node's arena, checksummed; survives the death of any process */
  ROPETEAM_REPLICATED = 2, /* verified copies on as many other nodes as configured */
  ROPETEAM_COMMITTED = 3,  /* every rank of this incarnation reached REPLICATED at this step */
  ROPETEAM_PERSISTED = 4   /* the whole step is on storage */
} ropeteam_level_t;

/* "0.1.0". */
ROPETEAM_EXPORT const char* ropeteam_version(void);
/* "no space", …; never NULL. */
ROPETEAM_EXPORT const char* ropeteam_status_name(ropeteam_status_t status);
/* The error of this thread's last failed call; "" if none has failed. Valid until this thread's next call. */
ROPETEAM_EXPORT const char* ropeteam_last_error(void);

/* ---- open ---- */

typedef struct {
  size_t size;
  /* The daemon's unix socket; NULL: the environment variable ROPETEAM_SOCKET, which `ropeteam run` sets. */
  const char* socket;
  /* This process's rank, and how many there are; world_size 0 takes WORLD_SIZE from the environment. */
  uint32_t rank;
  uint32_t world_size;
  /* The incarnation's token: a string that all its ranks share and no other incarnation has, for example one that
   * rank 0 made and broadcast. NULL: ROPETEAM_INCARNATION_TOKEN, or else SLURM's job, step and restart numbers. The
   * latter are not used under torchrun, which restarts its workers within one step of SLURM. When a rank
   * has left, the next process that opens with the same token begins the next incarnation. Without a token, an
   * incarnation ends when one of its ranks dies or opens again. That is right for launchers that stop all ranks
   * before they restart them. */
  const char* incarnation_token;
  int64_t timeout_ms; /* 0: 30 s; the only timeout whose zero is a default (convention 6 over convention 4) */
} ropeteam_open_options_t;

/* Connects this rank to its daemon and joins the current incarnation, or begins the next one. Waits until a leader
 * has admitted the rank. STALE: this incarnation has been superseded. UNAVAILABLE: there is no daemon at the socket.
 * UNSUPPORTED: the daemon speaks another protocol version; the message has both. INVALID_ARGUMENT: the rank is not
 * below world_size, the incarnation of this token has another world size, or ROPETEAM_COPY_THREADS is not a number
 * from 1 to 16. ALREADY_EXISTS: this rank of this incarnation is already open. DEADLINE_EXCEEDED: there are too few
 * nodes; or the handle has no token, and an incarnation with a token or another world size is still open. The second
 * case prevents a program that only reads from ending the training. A process that continues with another world size
 * closes its old handle first. If the daemon dies later, calls return UNAVAILABLE, and the next call tries to
 * connect to its successor. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_open(const ropeteam_open_options_t* options, ropeteam_t** handle);
/* Aborts uncommitted saves and closes every view. Never waits for the network. Open saves and views stay valid
 * handles: close each with its own call, before or after. All other calls on them fail. */
ROPETEAM_EXPORT void ropeteam_close(ropeteam_t* handle);

typedef struct {
  size_t size;
  uint32_t rank;
  uint32_t world_size;
  uint64_t incarnation; /* counted from 1 */
  uint64_t chunk_bytes;
  uint64_t arena_bytes; /* the node's whole budget */
} ropeteam_info_t;
ROPETEAM_EXPORT ropeteam_status_t ropeteam_info(ropeteam_t* handle, ropeteam_info_t* info);

/* ---- save ---- */

typedef struct {
  size_t size;
  /* The sum of the objects' lengths, and their number, as exactly as known. Memory for them is reserved at once,
   * before any byte is copied. A larger save requests more later, and that may be refused. */
  uint64_t bytes;
  uint64_t objects;
  /* A value that all ranks of this step must share, for example a digest of what they must have in common: which
   * rank stores what, or a replicated state. 0: none. The leader compares the values. If two ranks gave different
   * values, or only one of them gave a value, the step is never committed and its memory is released. Each rank's
   * ropeteam_wait() for it returns ABORTED with both values and their ranks. UNSUPPORTED: a node of the job has an
   * older daemon. */
  uint64_t agreement;
} ropeteam_save_options_t;

/* Begins to save this rank's shard of `step`. Numbers must grow within an incarnation: use one counter across epochs.
 * INVALID_ARGUMENT: the rank has saved a newer step in this incarnation, and would lose this one at once; or the shard
 * is larger than the arena, and the message has the --memory that is needed. A program that goes back to an earlier
 * step closes its handle and opens again, on all ranks. NO_SPACE: the message has the bytes needed, free and the limit;
 * nothing has changed, and older committed steps stay. ALREADY_EXISTS: this rank has already saved this step in this
 * incarnation, or is saving it. STALE: the job has restarted without this process. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_begin(ropeteam_t* handle, uint64_t step,
                                                      const ropeteam_save_options_t* options, ropeteam_save_t** save);
/* The name of the object with the step's metadata: loss, accuracy, tokens, a revision. Its bytes are a JSON object
 * in UTF-8, at most ROPETEAM_METADATA_MAX bytes; a longer one is INVALID_ARGUMENT. One rank is enough; of several,
 * the lowest rank's metadata counts. The manifest on storage has it, for the daemons' --keep-best and for people. If
 * the bytes are not a JSON object, the manifest omits them and the daemon logs a warning. Otherwise the object is
 * like any other: a view counts it, finds it by this name and reads it. */
#define ROPETEAM_METADATA "ropeteam.metadata"
/* Copies [data, data + length) into the shard as the object `name` and computes its checksum in the same pass. After
 * the return the caller may reuse the source. Replication of full chunks begins meanwhile. After INVALID_ARGUMENT
 * and NO_SPACE the save is unchanged, without this object. Any other error ends the save, and every later call on it
 * returns the same error. Device memory is copied as by cudaMemcpy(): after all work given before this call to the
 * legacy default stream and to streams that synchronise with it. The caller must already have waited for work in
 * non-blocking streams. UNSUPPORTED (the driver is too old) also leaves the save unchanged. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put(ropeteam_save_t* save, const char* name, const void* data,
                                                    uint64_t length);
/* The same from device memory, without waiting. The copy runs in the background, after the work given to `stream`
 * before this call (a CUstream or cudaStream_t of any device of this process; NULL: the legacy default stream). This
 * thread and later work in that stream continue. The source must keep its bytes and its allocation until
 * ropeteam_save_commit() has returned, or the save was aborted, closed or ended by an error. So give work that
 * changes the source to the device after the commit. The commit waits for the copies, however long `stream` takes to
 * reach them. An abort waits only for the copy that the device is making at that moment. If the node's network card
 * reads the memory itself, commit and abort also wait for that, at most a second.
 * INVALID_ARGUMENT: it does not point to device memory, or its context is gone. UNSUPPORTED: libcuda.so.1 cannot be
 * loaded or is too old. After these and NO_SPACE the save is unchanged. If the device fails to copy, the next call
 * on the save, at the latest the commit, ends it with IO. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put_cuda(ropeteam_save_t* save, const char* name, const void* data,
                                                         uint64_t length, void* stream);
/* A flag of a part. With it, `data` is device memory and is copied as by ropeteam_save_put_cuda(), after the work
 * given to the part's `stream`. Without it, the part is copied as by ropeteam_save_put(), and `stream` is ignored. */
#define ROPETEAM_PART_BACKGROUND UINT64_C(1)
/* A piece of an object. It is used in arrays, so it has no `size` and never grows. */
typedef struct {
  const void* data; /* NULL only where length is 0 */
  uint64_t length;  /* bytes; 0 is a piece without bytes */
  void* stream;
  uint64_t flags; /* 0 or ROPETEAM_PART_BACKGROUND; anything else is INVALID_ARGUMENT */
} ropeteam_part_t;
/* Copies `count` parts, 0 to ROPETEAM_PARTS_MAX, into the shard as one object `name`: their bytes one after the
 * other, without gaps. Each part is copied once, straight into the arena, with the checksum in the same pass. Host
 * and device memory may be mixed. After the return the caller may reuse the array, and the parts as after
 * ropeteam_save_put() or ropeteam_save_put_cuda(). The errors are those of these two. After INVALID_ARGUMENT,
 * NO_SPACE and UNSUPPORTED the save is unchanged, without any of the parts. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put_parts(ropeteam_save_t* save, const char* name,
                                                          const ropeteam_part_t* parts, uint64_t count);
/* An object of one part. It is used in arrays, so it has no `size` and never grows. */
typedef struct {
  const char* name;
  ropeteam_part_t part;
} ropeteam_named_part_t;
/* Puts `count` objects, 0 to ROPETEAM_OBJECTS_MAX, in this order: each as by ropeteam_save_put() or, according to
 * its flags, ropeteam_save_put_cuda(). One call for many objects is faster, because the copies of neighbours
 * overlap. After the return the caller may reuse the array and the names, and the sources as after those calls.
 * INVALID_ARGUMENT for a pointer, a name's length, flags or `count` leaves the save unchanged. Any other error ends
 * it. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_put_many(ropeteam_save_t* save, const ropeteam_named_part_t* objects,
                                                         uint64_t count);
/* Appends [data, data + length) to the last object, copied as by ropeteam_save_put(). Use it for an object whose
 * length is not known in advance. INVALID_ARGUMENT: there is no object yet, or the last one is ROPETEAM_METADATA.
 * Other errors as of ropeteam_save_put(): after INVALID_ARGUMENT and NO_SPACE the object is unchanged. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_append(ropeteam_save_t* save, const void* data, uint64_t length);
/* Reserves `length` bytes of the arena, 64-byte aligned and contiguous, for the object `name`. The caller fills them in
 * place before ropeteam_save_commit(), which computes their checksums. *pointer is valid until the save is committed,
 * aborted or closed. INVALID_ARGUMENT: a length of 0 (use ropeteam_save_put() for an empty object). Other errors as of
 * ropeteam_save_put(). */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_reserve(ropeteam_save_t* save, const char* name, uint64_t length,
                                                        void** pointer);
/* Seals the shard: at OK it is LOCAL. Waits for the copies from device memory, if any, and for the daemon of this
 * node, never for the network. After any error the save is aborted. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_commit(ropeteam_save_t* save);
/* Discards the save and frees its chunks. INVALID_ARGUMENT after commit. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_save_abort(ropeteam_save_t* save);
/* Frees the handle. Aborts the save first if it was neither committed nor aborted. */
ROPETEAM_EXPORT void ropeteam_save_close(ropeteam_save_t* save);

/* Waits until this rank's shard of `step` has reached `level`. DEADLINE_EXCEEDED: it has not reached it yet.
 * ABORTED: it never will. The message has the reason: the job has restarted, the ranks gave different values as
 * `agreement`, the step was dropped, or a newer step has replaced it; at PERSISTED also: the step is not due, or a
 * newer step was written in its place. NOT_FOUND: this rank did not save it. UNSUPPORTED: PERSISTED in a job without
 * storage. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_wait(ropeteam_t* handle, uint64_t step, ropeteam_level_t level,
                                                int64_t timeout_ms);

/* Releases `step` from the memory of all nodes now, earlier than retention would. If several incarnations have saved
 * a step of this number, all of them are released. Storage is not changed. One rank's call is enough. At OK no node
 * of the job has a copy of the step. An absent node releases its copies when it returns. A step that was not
 * committed will never be: ropeteam_wait() for it returns ABORTED with the rank that dropped it. Open views stay
 * readable, except partial ones. The daemons' --keep-steps counts the other steps, so older ones stay longer. If the
 * step is being written to storage, the call waits until that has ended.
 * INVALID_ARGUMENT: a restart needs the step, and the message has the reason. It is the newest committed step; or
 * this incarnation was restored from it and has no committed step of its own yet; or it is not committed, and no
 * other step is. NOT_FOUND: no node has a copy of such a step. A second call returns OK, or NOT_FOUND if another
 * node leads now. DEADLINE_EXCEEDED: the step may or may not be released later. This is also the answer while the
 * newest committed step cannot be produced. For a step that is not committed, it is also the answer while a node of
 * the job is absent, because that node may know of a commit. UNSUPPORTED: the job has an older daemon. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_drop(ropeteam_t* handle, uint64_t step, int64_t timeout_ms);

/* Requests that `step` of this incarnation is written to storage once it is committed, even if it is not due by the
 * daemons' --persist-every. One rank's call is enough, before or after the commit; further calls change nothing. At
 * OK every node has recorded the request, and nothing has been written yet: wait with ropeteam_wait() for PERSISTED.
 * A request for a newer step replaces one whose writing has not begun. ABORTED: the step is too old. NO_SPACE: too
 * many uncommitted steps were requested. UNSUPPORTED: the job has no storage. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_persist(ropeteam_t* handle, uint64_t step, int64_t timeout_ms);

typedef struct {
  size_t size;
  uint64_t persist_every;   /* a committed step is due when a multiple of so many steps has been passed; 0: not set */
  uint32_t keep_on_storage; /* so many of the newest steps are kept on storage; 0: not set */
} ropeteam_policy_t;
/* Sets for the job what the daemons' flags --persist-every and --keep-* leave open. One rank's call is enough; all
 * ranks may call it with the same values. The policy applies to this incarnation. The next one begins without a
 * policy, and until one of its ranks calls, the former policy deletes nothing. At OK every node has recorded the
 * policy, so it survives the death of the leader's node. A value cannot be changed within an incarnation. Steps are
 * deleted after the next step was persisted. The newest good step, newer ones, and steps that are being read are
 * never deleted; in doubt nothing is deleted.
 * INVALID_ARGUMENT: this or another rank has set another value, or a daemon was started with another one (any
 * --keep-* is a rule); the message has both, and nothing has changed. Also: neither field is set, or a value exceeds
 * its limit. UNSUPPORTED: the job has no storage, or has an older daemon. DEADLINE_EXCEEDED: it may or may not have
 * been set; repeat the call. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_set_policy(ropeteam_t* handle, const ropeteam_policy_t* policy,
                                                      int64_t timeout_ms);

/* ---- load ---- */

typedef struct {
  size_t size;
  uint64_t step;
  uint64_t incarnation; /* the one that saved it */
  uint32_t world_size;  /* the number of ranks that saved it: the views that can be opened */
  /* 1: a newer step, `passed_over_step`, could be produced but is quarantined. Either the job kept failing after it
   * had restored that step, or an operator quarantined it (`ropeteam quarantine`). It can be opened by its number.
   * 0: there is none. */
  uint32_t passed_over;
  uint64_t passed_over_step;
} ropeteam_step_t;

/* The newest step of which every rank's shard can be produced now. All ranks of one incarnation get the same answer
 * until that incarnation has completed a step of its own. NOT_FOUND: there is no such step. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_latest(ropeteam_t* handle, ropeteam_step_t* step, int64_t timeout_ms);
/* The same by level. ROPETEAM_COMMITTED: as ropeteam_latest(). ROPETEAM_PERSISTED: the newest good step on storage,
 * even if memory has a newer one; it does not fix what the incarnation restores. INVALID_ARGUMENT: another level.
 * UNSUPPORTED: PERSISTED in a job without storage. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_latest_at(ropeteam_t* handle, ropeteam_level_t level, ropeteam_step_t* step,
                                                     int64_t timeout_ms);

typedef struct {
  size_t size;
  const char* name;  /* valid until the view is closed */
  uint64_t length;   /* bytes */
} ropeteam_object_t;

/* Opens the shard that `rank` saved at `step`; any rank is possible. If this node has no copy, it fetches one from
 * the holders. The shard stays readable until the close, even if retention releases it. NOT_FOUND: there is no
 * holder, or no such step or rank. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_open(ropeteam_t* handle, uint64_t step, uint32_t rank,
                                                     int64_t timeout_ms, ropeteam_view_t** view);
typedef struct {
  size_t size;
  /* 1: a shard that this node lacks is not fetched. ropeteam_view_read() and ropeteam_view_read_ranges() transfer
   * only the requested bytes from the memory of the nodes that have them, and check them at both ends. The shard is
   * not kept for this view: if retention releases it, reads return NOT_FOUND. ropeteam_view_map() fetches the whole
   * shard first. So does any read if ranges are not available: the job encrypts its replicas, only storage has the
   * shard, a node runs an older daemon, or no holder answers. A shard that this node has is opened as usual. */
  uint32_t partial;
} ropeteam_view_options_t;
/* ropeteam_view_open() with options. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_open_with(ropeteam_t* handle, uint64_t step, uint32_t rank,
                                                          const ropeteam_view_options_t* options, int64_t timeout_ms,
                                                          ropeteam_view_t** view);
/* The number of objects in the view, in the order in which they were saved. 0 for NULL. */
ROPETEAM_EXPORT uint64_t ropeteam_view_count(const ropeteam_view_t* view);
/* Where the shard was when the view was opened. A partial view (ropeteam_view_open_with()) reads it from there. */
typedef enum {
  ROPETEAM_ORIGIN_UNKNOWN = 0, /* the daemon is older */
  ROPETEAM_ORIGIN_HERE = 1,    /* in this node's memory */
  ROPETEAM_ORIGIN_PEERS = 2,   /* in the memory of other nodes */
  ROPETEAM_ORIGIN_STORAGE = 3  /* only on storage */
} ropeteam_origin_t;
ROPETEAM_EXPORT ropeteam_origin_t ropeteam_view_origin(const ropeteam_view_t* view);
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_object(const ropeteam_view_t* view, uint64_t index,
                                                       ropeteam_object_t* object);
/* NOT_FOUND: no object of this name. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_find(const ropeteam_view_t* view, const char* name,
                                                     ropeteam_object_t* object);
/* Copies [offset, offset + length) of the object to `data` and checks every chunk. A chunk that does not match is
 * repaired from another holder inside the call. CORRUPT: no source has a good copy; the message has every source
 * that was tried, and the contents of `data` are unspecified. INVALID_ARGUMENT: the range is outside the object. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_read(ropeteam_view_t* view, const char* name, uint64_t offset,
                                                     void* data, uint64_t length, int64_t timeout_ms);
/* The same into device memory, after the work given to `stream` (as in ropeteam_save_put_cuda()) before this call.
 * After the return, the bytes are there for any work given to the device from then on. DEADLINE_EXCEEDED: the
 * earlier work in `stream` did not end in time; `data` is unchanged. ropeteam_view_read() with device memory does
 * the same for the legacy default stream. */
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
/* Reads many ranges, of one object or of many, in one call. A slice of rows is one run; a slice of columns is one
 * run per row. Each chunk is checked once, however many runs touch it, and repaired as in ropeteam_view_read(). If
 * any range is invalid, nothing is read. After any other error all targets are unspecified. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_read_ranges(ropeteam_view_t* view, const ropeteam_range_t* ranges,
                                                            uint64_t count, int64_t timeout_ms);
/* Returns the object's bytes in place, read-only. This call checks them once and repairs them if needed. They are
 * valid until the view is closed. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_view_map(ropeteam_view_t* view, const char* name, const void** data,
                                                    uint64_t* length, int64_t timeout_ms);
ROPETEAM_EXPORT void ropeteam_view_close(ropeteam_view_t* view);

/* ---- storage ---- */

/* Lists the newest steps that have a manifest on the job's storage: `steps_max` of them, at most
 * ROPETEAM_STORAGE_STEPS_MAX; 0: 100. Newest first: a step of a later incarnation is newer than any of an earlier
 * one. This node's daemon reads manifests and the sizes of files, but no data. INVALID_ARGUMENT: steps_max exceeds
 * the limit. UNSUPPORTED: the job has no storage. UNAVAILABLE, IO and others: storage cannot be read; the message
 * has the reason. The list is valid until its own close, even after the handle is closed. Any thread may read it. */
ROPETEAM_EXPORT ropeteam_status_t ropeteam_storage_list(ropeteam_t* handle, uint32_t steps_max, int64_t timeout_ms,
                                                        ropeteam_storage_list_t** list);

typedef struct {
  size_t size;
  uint64_t step;
  uint64_t incarnation; /* the one that saved it */
  /* The name of its folder below the job's, "step-0000000100-i…". It is unique, and `ropeteam export` and `verify` accept it.
   * Strings are never NULL, and valid until the list is closed. */
  const char* folder;
  const char* problem;  /* why it cannot be restored; "": its manifest is good, its files are there with their sizes */
  const char* metadata; /* see ROPETEAM_METADATA: a JSON object; "" where not known, or over ROPETEAM_METADATA_MAX */
  uint64_t time_s;      /* when its manifest was written: seconds since 1970, by the writer's clock; 0 where not known */
  uint64_t bytes;       /* of its ranks' shards; 0 where not known */
  uint32_t world_size;  /* the number of ranks that saved it; 0 where not known */
} ropeteam_storage_step_t;
/* The number of steps in the list. 0 for NULL. */
ROPETEAM_EXPORT uint64_t ropeteam_storage_list_count(const ropeteam_storage_list_t* list);
ROPETEAM_EXPORT ropeteam_status_t ropeteam_storage_list_step(const ropeteam_storage_list_t* list, uint64_t index,
                                                             ropeteam_storage_step_t* step);
ROPETEAM_EXPORT void ropeteam_storage_list_close(ropeteam_storage_list_t* list);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ROPETEAM_ROPETEAM_H_ */
