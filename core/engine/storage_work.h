// SPDX-License-Identifier: Apache-2.0
//
// The engine's orders to storage and their results, as values only. The driver decides the layout and the place of a
// step's files (storage/format). Here, a persisted step consists of its ranks' shards and a manifest. The manifest is
// written last and makes the step count.

#ifndef ROPETEAM_CORE_ENGINE_STORAGE_WORK_H_
#define ROPETEAM_CORE_ENGINE_STORAGE_WORK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "core/base/ids.h"
#include "core/shard/extent.h"
#include "core/shard/manifest.h"

namespace ropeteam {

inline constexpr uint64_t kPersistEveryMax =
    1'000'000'000;  // ROPETEAM_PERSIST_EVERY_MAX: steps, or thirty years of seconds
inline constexpr uint32_t kKeepOnStorageMax = 1'000'000;  // ROPETEAM_KEEP_ON_STORAGE_MAX

// How often a step was restored, and whether `latest` passes it over (core/engine/restores.h).
struct RestoreNote {
  StepId step;
  uint32_t revision = 0;    // counts up with every change, from 1
  uint32_t restores = 0;    // by consecutive incarnations, without a newer commit
  Incarnation counted = 0;  // the last incarnation counted
  bool quarantined = false;
  bool by_hand = false;
  auto Fields() { return std::tie(step, revision, restores, counted, quarantined, by_hand); }
  friend bool operator==(const RestoreNote&, const RestoreNote&) = default;
};
// Steps with a note: those restored since the last commit, and those that an operator has quarantined.
inline constexpr size_t kRestoreNotesMax = 16;

// What a node's answer about something on storage means.
enum class StoredWord : uint8_t {
  kGood,
  kBad,         // other bytes than were written: proven if two nodes say so
  kNotHere,     // this node does not see it: its directory may not be the store
  kUnreadable,  // refused, failed or timed out: it may be good
};
constexpr StoredWord WordOf(Code code) {
  if (code == Code::kOk) return StoredWord::kGood;
  if (code == Code::kNotFound) return StoredWord::kNotHere;
  const bool bad = code == Code::kCorrupt || code == Code::kUnsupported;
  return bad ? StoredWord::kBad : StoredWord::kUnreadable;
}

struct StoredFile {
  std::string path;  // in the step's folder
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  uint64_t header_bytes = 0;  // of a rank's own file; for the driver
  uint32_t header_crc32c = 0;
  auto Fields() { return std::tie(path, bytes, crc32c, header_bytes, header_crc32c); }
  friend bool operator==(const StoredFile&, const StoredFile&) = default;
};
struct StoredRank {
  uint64_t stream_bytes = 0;
  uint64_t content = 0;  // ContentDigest() of the shard in chunks of StoredStep::chunk_bytes
  std::vector<StoredFile> files;
  // The program's metadata in this shard: a JSON object of at most kStepMetadataBytesMax, or empty.
  std::string metadata;
  auto Fields() { return std::tie(stream_bytes, content, files, metadata); }
  friend bool operator==(const StoredRank&, const StoredRank&) = default;
};
// The content of a manifest.
struct StoredStep {
  StepId id;
  uint32_t world_size = 0;
  uint64_t chunk_bytes = 0;
  std::vector<StoredRank> ranks;
  std::string metadata;  // of the lowest rank that gave any; a JSON object, or empty
  RestoreNote restored;  // as NoteStored wrote it; revision 0: there is none
  auto Fields() { return std::tie(id, world_size, chunk_bytes, ranks, metadata, restored); }
};

// ---- work; each is answered by OnStorageDone() with the result named here, or with an error. Codes that are not named
// here are those of WordOf(): what the store refuses by permission is kIo.

// Lists the steps that have a manifest, and the highest incarnation of any folder, even without a manifest. If there is
// no step, it also lists the steps of restore_from, and fails if there are none either. → StoredList
struct ListStored {
  auto Fields() { return std::tuple<>(); }
};
// Reads the manifest of a step, and checks that the files named in it exist with the right sizes. The ranks' files are
// left out of the result. kCorrupt: invalid manifest, or a file is missing or has another size. kNotFound: there is no
// manifest. → StoredStep
struct ReadStored {
  StepId step;
  auto Fields() { return std::tie(step); }
};
// Returns the names of the shard's objects that become files of their own. → FileNames
struct NameFiles {
  ShardMeta meta;
  std::vector<Extent> extents;
  std::vector<uint32_t> crcs;
};
// Writes the shard's files; all are durable when it is done. Files whose names are in `taken` go into a folder of the
// rank. Existing files are used or replaced. kNotFound: `proof` is not there (ProveStorage). kCorrupt: the chunks in
// StorageDone::bad do not match their checksum. → StoredRank
struct WriteShard {
  NameFiles shard;
  std::vector<std::string> taken;
  std::string proof;  // empty: none is asked for
};
// Makes the step count, after a look at every file: its size, and its checksum if the store has one. kOk also if an
// equal manifest exists; kAlreadyExists if a different one does. kNotFound: a file is not there, or has another size. →
// nothing
struct WriteManifest {
  std::shared_ptr<StoredStep> step;
  auto Fields() {
    if (step == nullptr) step = std::make_shared<StoredStep>();
    return std::tie(*step);
  }
};
// Reads these chunks of a rank's shard into `extents`, where the i-th chunk is the shard's chunk i. After success the
// bytes match the files' checksums. kCorrupt: the files are damaged. kNotFound: there is no such step. → LoadedChunks
struct LoadChunks {
  ShardId shard;
  uint64_t stream_bytes = 0;
  std::vector<Extent> extents;
  std::vector<uint32_t> chunks;  // ascending
};
// Takes the lock and keeps it until ReleaseStorage. In all clusters, under any coordinator, only this node writes and
// deletes under the job's name. Write or delete nothing before the answer kOk. A repeat is cheap. kUnavailable: another
// node holds the lock, and it is not known yet whether that node is alive; ask again. kAlreadyExists: another node
// holds the lock and is alive, or has taken it over from this node; the message names the node and says what to do. →
// StorageProof
struct HoldStorage {
  auto Fields() { return std::tuple<>(); }
};
struct ReleaseStorage {
  auto Fields() { return std::tuple<>(); }
};
// Reads the lock, as the node that has this proof wrote it. kNotFound: it is not there, so this node does not see the
// same store. → nothing
struct ProveStorage {
  std::string proof;
  auto Fields() { return std::tie(proof); }
};
// Marks the step as damaged, because a file in it is damaged. Every reader passes it over, also in later clusters.
// Nothing is deleted. → nothing
struct MarkStored {
  StepId step;
  std::string why;
  auto Fields() { return std::tie(step, why); }
};
// Replaces the note in the step's folder. kOk also if the step does not exist. → nothing
struct NoteStored {
  RestoreNote note;
  auto Fields() { return std::tie(note); }
};
// Deletes steps. It keeps those that a rule of the driver keeps, the `keep_newest` newest ones, the newest one in any
// case, and those `in_use`. The manifest is deleted first, so a half-deleted step does not count. → StoredList, the
// deleted steps
struct PruneStored {
  std::vector<StepId> in_use;
  uint64_t keep_newest = 0;  // set by ranks; 0: not set
  auto Fields() { return std::tie(in_use, keep_newest); }
};
using StorageWork =
    std::variant<ListStored, ReadStored, NameFiles, WriteShard, WriteManifest, LoadChunks, HoldStorage,
                 ReleaseStorage, MarkStored, PruneStored, NoteStored, ProveStorage>;
// What the leader may order from any node.
using RemoteWork = std::variant<ListStored, ReadStored, WriteManifest, HoldStorage, ReleaseStorage,
                                MarkStored, PruneStored, NoteStored, ProveStorage>;

struct StoredList {
  Incarnation incarnation_max = 0;
  std::vector<StepId> steps;
  std::vector<StepId> source_steps;  // of the job that JobSettings::restore_from names
  auto Fields() { return std::tie(incarnation_max, steps, source_steps); }
};
struct StorageProof {
  std::string text;  // at most 256 bytes
  auto Fields() { return std::tie(text); }
};
struct FileNames {
  std::vector<std::string> names;
};
struct LoadedChunks {
  ShardMeta meta;
  std::vector<uint32_t> crcs;  // of the requested chunks, as read
};
struct StorageDone {
  std::variant<std::monostate, StoredList, StoredStep, FileNames, StoredRank, LoadedChunks, StorageProof>
      result;
  std::vector<uint32_t> bad;  // chunks of the arena
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_WORK_H_
