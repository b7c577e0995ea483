// SPDX-License-Identifier: Apache-2.0
//
// The protocol between a rank (libropeteam.so, or the command line) and its node's ropeteamd, over a unix stream
// socket. It is the only header that api/client and node share. docs/local-protocol.md describes the protocol in prose.
//
// Frames: LocalFrameHeader, then `length` bytes: the message, encoded by core/base/bytes.h. A request has an id that
// its answer repeats. The client chooses ids, counting up from 1. A frame whose type, length or content differs from
// the declarations here ends the connection, and nothing else.
//
// Order: the first request is Hello. The answer's ancillary data (SCM_RIGHTS) has one descriptor, of the arena, opened
// for reading and writing. The client maps its chunks once, but not the tables before them. Requests of one connection
// are handled in order. Answers that may have to wait (kWait, kDrop, kLatest, kSetPolicy, kViewOpen, kViewRead,
// kViewRepair, kStorageList, kTrace, kAdmin, kDrain) come when they are ready, in any order.
//
// Device memory: a rank may pass a descriptor of its GPU's memory (kGpuBuffer, with SCM_RIGHTS in its frame). It may
// then announce that chunks of a save are also there (kSaveDirect), before they were copied to the arena. The daemon
// may put them to replicas from either place. The memory must keep those bytes until kSaveSettle is answered.
//
// A client writes only into chunks of a grant that it has not committed or aborted. When the connection ends, for any
// reason, its uncommitted saves are aborted, its views are closed, and its waits are dropped.
//
// Enums are append-only, and so are fields: a new one is marked Since<kLocalProtocolVersion>() (core/base/bytes.h).

#ifndef ROPETEAM_API_CLIENT_LOCAL_PROTOCOL_H_
#define ROPETEAM_API_CLIENT_LOCAL_PROTOCOL_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/status.h"
#include "core/base/trace_event.h"
#include "core/shard/extent.h"
#include "core/shard/manifest.h"
#include "core/shard/pieces.h"

namespace ropeteam::local {

inline constexpr uint32_t kLocalMagic = 0x45504f52;  // "ROPE", first in every frame: detects garbage at once
inline constexpr uint32_t kLocalProtocolVersion = 5;
// The daemon answers clients of these versions in their version: a running rank keeps its library when the daemon is
// replaced.
inline constexpr uint32_t kLocalProtocolOldest = 4;
// The largest message is a grant or seal of kChunksPerShardMax chunks: 4 bytes of checksum and, in the worst
// fragmentation, 8 of extent each.
inline constexpr uint32_t kFrameBytesMax = 1u << 20;
static_assert(kChunksPerShardMax * 12 + 4096 <= kFrameBytesMax);
inline constexpr uint32_t kIncarnationTokenBytesMax = 255;
// Allocations of device memory that one session may have passed at a time. A node's transport has 64 regions for all of
// its ranks; further allocations are copied through the arena.
inline constexpr size_t kGpuBuffersMax = 32;
// An allocation's size: above any device's memory, and far from where offsets in it could overflow.
inline constexpr uint64_t kGpuBufferBytesMax = 1ull << 48;
// A listing of storage is one frame, which limits the steps and the text of each. A folder's name has 48 bytes, the
// numbers 48.
inline constexpr uint32_t kListedStepsMax = 200;
inline constexpr size_t kListedProblemBytesMax = 512;
static_assert(kListedStepsMax * (kStepMetadataBytesMax + kListedProblemBytesMax + 100) + 4 <= kFrameBytesMax);

enum class Type : uint16_t {
  kHello = 1,
  kHelloReply = 2,
  kSaveBegin = 3,
  kSaveGrant = 4,
  kSaveExtend = 5,  // answered by kSaveGrant with the additional extents only
  kSaveFilled = 6,  // not answered
  kSaveCommit = 7,  // answered by kReply: at kOk the shard is LOCAL
  kSaveAbort = 8,   // answered by kReply
  kWait = 9,        // answered by kReply
  kLatest = 10,
  kLatestReply = 11,
  kViewOpen = 12,
  kViewGrant = 13,
  kViewRepair = 14,  // answered by kReply: at kOk the named chunks are good again, in place
  kViewClose = 15,   // not answered
  kAdmin = 16,
  kAdminReply = 17,
  kReply = 18,         // a bare status; the answer to any request that fails
  kGpuBuffer = 19,     // with a descriptor; answered by kReply: at kOk the daemon can read the memory
  kGpuBufferEnd = 20,  // not answered
  kSaveDirect = 21,    // not answered
  kSaveSettle = 22,  // answered by kReply: the daemon reads no device memory for this save any more, and will
                     // not again; kDeadlineExceeded: a put that began is not over yet
  kPersist = 23,     // answered by kReply: every node knows that the step is to be persisted
  kStorageList = 24,
  kStorageListReply = 25,
  kTrace = 26,
  kTraceReply = 27,
  kRejoin = 28,      // of kind kAdmin; answered by kReply: at kOk the daemon looks for the coordinator there
  kQuarantine = 29,  // of kind kAdmin; answered by kReply: at kOk every node knows
  // Of kind kAdmin; answered by kAdminReply when the node leaves, and the connection ends behind it.
  kDrain = 30,
  // Of a view without chunks. Answered by kViewBytes; no parts: answered by kReply, and the chunks of the read before are the
  // daemon's again.
  kViewRead = 31,
  kViewBytes = 32,
  kDrop = 33,       // of either kind; answered by kReply: at kOk no node of the job has a copy of the step
  kSetPolicy = 34,  // answered by kReply: every node knows it
  kForget = 35,     // of kind kAdmin; answered by kReply: at kOk every node knows
};

struct FrameHeader {
  uint32_t magic = kLocalMagic;
  uint32_t length = 0;  // of the message behind this header
  Type type = Type::kReply;
  uint16_t reserved = 0;  // sent as 0, ignored
  uint32_t reserved2 = 0;
  uint64_t request = 0;
};
static_assert(sizeof(FrameHeader) == 24, "the header has no padding: it is sent as it lies");

enum class ClientKind : uint8_t { kRank = 1, kAdmin = 2 };

struct Hello {
  uint32_t version = kLocalProtocolVersion;
  ClientKind kind = ClientKind::kRank;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  // Random, one for each handle: by it a restarted daemon recognises a library that reconnects.
  uint64_t token = 0;
  std::string incarnation_token;  // as in ropeteam_open_options_t; may be empty
  uint64_t timeout_ms = 0;        // how long the daemon may try to have the rank admitted
  // The incarnation of an earlier HelloReply to this handle, 0 at first. A handle that reconnects after its incarnation
  // has ended is refused (kStale) instead of beginning another one.
  Incarnation incarnation = 0;
  // What this handle has set by kSetPolicy, 0 at first: every daemon may have been restarted since.
  uint64_t persist_every = 0;
  uint32_t keep_on_storage = 0;
  auto Fields() {
    return Tie(version, kind, rank, world_size, token, incarnation_token, timeout_ms, incarnation,
               Since<5>(persist_every), Since<5>(keep_on_storage));
  }
};
// For an admin client incarnation is 0. A daemon of another version answers kReply with kUnsupported, both
// named.
struct HelloReply {
  uint32_t version = kLocalProtocolVersion;
  std::string job;
  std::string node;
  Incarnation incarnation = 0;
  uint32_t replicas = 0;
  uint64_t chunk_bytes = 0;
  uint64_t arena_bytes = 0;   // of the file: what to map
  uint64_t chunks_begin = 0;  // offset of chunk 0 in it
  uint64_t chunks_total = 0;
  bool dmabuf = false;    // kGpuBuffer has a chance: the transport reads device memory
  std::string transport;  // its name, for people
  auto Fields() {
    return std::tie(version, job, node, incarnation, replicas, chunk_bytes, arena_bytes, chunks_begin,
                    chunks_total, dmabuf, transport);
  }
};

struct SaveBegin {
  Step step = 0;
  uint64_t stream_bytes = 0;  // data, alignment and manifest, as estimated by the library
  uint64_t agreement = 0;     // ropeteam_save_options_t's
  auto Fields() { return Tie(step, stream_bytes, Since<5>(agreement)); }
};
struct SaveGrant {
  uint64_t save = 0;
  std::vector<Extent> extents;
  auto Fields() { return std::tie(save, extents); }
};
struct SaveExtend {
  uint64_t save = 0;
  uint64_t chunks = 0;  // more, beyond those granted
  auto Fields() { return std::tie(save, chunks); }
};
// Chunks [first, first + crcs.size()) of the stream are final, whole, and have these CRC32Cs: they may be
// replicated. In any order, each chunk once. What is not announced here is given in SaveCommit.
struct SaveFilled {
  uint64_t save = 0;
  uint32_t first = 0;
  std::vector<uint32_t> crcs;
  auto Fields() { return std::tie(save, first, crcs); }
};
struct SaveCommit {
  uint64_t save = 0;
  uint64_t stream_bytes = 0;
  uint64_t manifest_offset = 0;
  uint32_t object_count = 0;
  std::vector<uint32_t> crcs;  // of all chunks of the stream, those announced before included
  auto Fields() { return std::tie(save, stream_bytes, manifest_offset, object_count, crcs); }
};
struct SaveAbort {
  uint64_t save = 0;
  auto Fields() { return std::tie(save); }
};

// An allocation of device memory, as a dmabuf. `buffer` is the client's name for it; names of one connection
// count up from 1.
struct GpuBuffer {
  uint64_t buffer = 0;
  uint64_t bytes = 0;  // from the dmabuf's beginning
  auto Fields() { return std::tie(buffer, bytes); }
};
struct GpuBufferEnd {
  uint64_t buffer = 0;
  auto Fields() { return std::tie(buffer); }
};
// Chunks [first, first + count) of the stream, whole, are the bytes of the buffer from `offset` on, one
// behind the other. They may be put to replicas from there; their checksums come in SaveFilled or SaveCommit
// as ever, and a replica counts only if it matches.
struct SaveDirect {
  uint64_t save = 0;
  uint64_t buffer = 0;
  uint64_t offset = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  auto Fields() { return std::tie(save, buffer, offset, first, count); }
};
struct SaveSettle {
  uint64_t save = 0;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(save, timeout_ms); }
};

struct Wait {
  Step step = 0;
  uint8_t level = 0;  // ropeteam_level_t
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(step, level, timeout_ms); }
};
struct Drop {
  Step step = 0;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(step, timeout_ms); }
};
struct Persist {
  Step step = 0;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(step, timeout_ms); }
};
struct SetPolicy {
  uint64_t persist_every = 0;  // as ropeteam_policy_t's
  uint32_t keep_on_storage = 0;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(persist_every, keep_on_storage, timeout_ms); }
};
struct Latest {
  uint8_t level = 0;  // ropeteam_level_t
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(level, timeout_ms); }
};
struct LatestReply {
  Step step = 0;
  Incarnation incarnation = 0;
  uint32_t world_size = 0;
  // The newest quarantined step that would have been offered otherwise; of incarnation 0: there is none.
  Step passed_over = 0;
  Incarnation passed_over_incarnation = 0;
  auto Fields() {
    return Tie(step, incarnation, world_size, Since<5>(passed_over), Since<5>(passed_over_incarnation));
  }
};

// The newest steps that have a manifest on the job's storage, as this node sees it now.
struct StorageList {
  uint32_t steps_max = 0;  // 1 to kListedStepsMax
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(steps_max, timeout_ms); }
};
struct ListedStep {
  Step step = 0;
  Incarnation incarnation = 0;
  std::string folder;   // below the job's
  std::string problem;  // what is wrong with it; empty: its files are there with their sizes
  // Without a good manifest the rest is not known, 0 and empty.
  uint32_t world_size = 0;
  uint64_t time_s = 0;   // when the manifest was written, since 1970
  uint64_t bytes = 0;    // of all ranks' shards
  std::string metadata;  // a JSON object; one over kStepMetadataBytesMax is left out
  auto Fields() { return std::tie(step, incarnation, folder, problem, world_size, time_s, bytes, metadata); }
};
struct StorageListReply {
  std::vector<ListedStep> steps;  // newest first
  auto Fields() { return std::tie(steps); }
};

struct ViewOpen {
  Step step = 0;
  Rank rank = 0;
  uint64_t timeout_ms = 0;
  // A shard that is not on this node need not be fetched: the grant may then be without extents and checksums, and the view is
  // read by kViewRead.
  bool partial = false;
  auto Fields() { return Tie(step, rank, timeout_ms, Since<5>(partial)); }
};
struct ViewGrant {
  uint64_t view = 0;
  ShardMeta meta;
  std::vector<Extent> extents;
  std::vector<uint32_t> crcs;
  // ropeteam_origin_t; since version 5. Not marked: ShardMeta has marks of the engines' versions, and an encoder knows
  // one version only. The daemon cuts it off for older clients.
  uint8_t origin = 0;
  auto Fields() { return std::tie(view, meta, extents, crcs, origin); }
};
// kUnavailable, kNotFound, kNoSpace: open the whole shard instead.
struct ViewRead {
  uint64_t view = 0;
  std::vector<PackedPart> parts;  // at most kPackedPartsMax
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(view, parts, timeout_ms); }
};
static_assert(kPackedPartsMax * (kPiecesMax * 20 + 4) + 64 <= kFrameBytesMax);
// The chunks of the arena at whose beginnings the packed parts are, and the parts' CRC32Cs. They stay until the next kViewRead
// of the view, or its close.
struct ViewBytes {
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> crcs;
  auto Fields() { return std::tie(chunks, crcs); }
};
struct ViewRepair {
  uint64_t view = 0;
  std::vector<uint32_t> chunks;  // indices in the stream whose bytes did not match
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(view, chunks, timeout_ms); }
};
struct ViewClose {
  uint64_t view = 0;
  auto Fields() { return std::tie(view); }
};

enum class AdminCommand : uint8_t {
  kStatus = 1,  // the cluster as the leader sees it
  kList = 2,  // steps and shards; with has_step, that step's shards and, where a manifest is at hand, objects
  kVerify = 3,  // read every chunk of a step, on every node that holds any
  kNode = 4,    // this daemon alone: answered without the leader
};
struct Admin {
  AdminCommand command = AdminCommand::kStatus;
  bool has_step = false;
  Step step = 0;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(command, has_step, step, timeout_ms); }
};
// Drains the node: its shards are copied to other nodes, then it leaves the job. kNode reports the progress.
struct Drain {
  uint64_t within_ms = 0;  // it leaves then at the latest; 0: as the daemon was told (--notice-seconds)
  auto Fields() { return std::tie(within_ms); }
};
struct AdminReply {
  std::string json;
  auto Fields() { return std::tie(json); }
};

// The events that a member of the view has recorded for a step, and its clock compared with this daemon's.
struct Trace {
  NodeId node = kNoNode;
  bool events = false;  // false: the clock alone
  Step step = 0;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(node, events, step, timeout_ms); }
};
struct TraceReply {
  TimeUs asked_at = 0;     // when the daemon asked the node, on the daemon's clock
  TimeUs node_at = 0;      // when the node answered, on the node's clock
  TimeUs answered_at = 0;  // when the answer was there, on the daemon's clock
  std::vector<TraceEvent> events;
  auto Fields() { return std::tie(asked_at, node_at, answered_at, events); }
};
static_assert(kTraceEventsMax * kTraceEventBytes + 64 <= kFrameBytesMax);

struct Rejoin {
  std::string coordinator;  // host:port
  bool force = false;       // also if this node's coordinator answers
  auto Fields() { return std::tie(coordinator, force); }
};

struct Quarantine {
  Step step = 0;  // the newest of this number
  bool undo = false;
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(step, undo, timeout_ms); }
};

struct Forget {
  std::string node;  // one that is missing; empty: all that are
  uint64_t timeout_ms = 0;
  auto Fields() { return std::tie(node, timeout_ms); }
};

struct Reply {
  Code code = Code::kOk;
  std::string message;
  auto Fields() { return std::tie(code, message); }
};

}  // namespace ropeteam::local

#endif  // ROPETEAM_API_CLIENT_LOCAL_PROTOCOL_H_
