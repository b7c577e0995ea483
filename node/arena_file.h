// SPDX-License-Identifier: Apache-2.0
//
// The file with an arena, so that the arena outlives every process: `ropeteam-<job>-<node>.arena` in a tmpfs or
// hugetlbfs directory, mode 0600. Only one daemon uses it at a time: the file is locked as long as the ArenaFile
// exists. The contents of a file are never destroyed unless `reset` is set, or they are shorter than a superblock.
//
// Not thread-safe.

#ifndef ROPETEAM_NODE_ARENA_FILE_H_
#define ROPETEAM_NODE_ARENA_FILE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/base/status.h"
#include "core/store/store.h"
#include "node/arena_list.h"
#include "node/unique_fd.h"

namespace ropeteam {

struct ArenaFileConfig {
  std::string directory;  // must exist
  std::string job;
  std::string node;
  // The file's size, rounded down to whole (huge) pages; 0: the size of the existing file, else a default.
  uint64_t memory_bytes = 0;
  uint64_t chunk_bytes = 0;
  bool reset = false;      // start empty if the existing file does not fit
  bool encrypted = false;  // as ArenaIdentity's
  // Progress of the start; either may be empty. `note` gets a line to show. The other gets how much of the memory has
  // been faulted in, and several threads may call it at a time.
  std::function<void(const std::string& line)> note = {};
  std::function<void(uint64_t done, uint64_t total)> progress = {};
};

class ArenaFile {
 public:
  // Locks, sizes, maps and faults in the file. A file that another process has truncated or extended gets its size back:
  // OpenStore() then finds what is missing. kAlreadyExists: another daemon uses it; the message has its pid.
  // kNoSpace: the message has the bytes needed and available. kInvalidArgument: the directory is neither on tmpfs nor
  // on hugetlbfs, the existing file has another size, or no chunk fits. kIo.
  static Result<std::unique_ptr<ArenaFile>> Open(const ArenaFileConfig& config);
  ~ArenaFile();  // unmaps and unlocks; the file stays

  // Adopts the existing store or formats a new one. Then reads every chunk of every sealed shard, in parallel, and
  // marks the bad ones. May be called again once the former Store is destroyed. kInvalidArgument, kCorrupt,
  // kUnsupported: the existing store cannot be used; the message says what to do.
  Result<std::unique_ptr<Store>> OpenStore();

  // Maps the file at another address. The former range stays unmapped until the next Renew() or the end of this
  // ArenaFile. So another process that still writes to the old address (by the kernel's cross-memory copies, which
  // check no key) fails instead of writing into the arena of the next Node. memory(), and a Store over it, must not be
  // in use meanwhile. Errors: kIo, kNoSpace; then the arena is unusable, and its file is unchanged.
  Status Renew();

  // Whether Open() has found no contents, so that what is there is this daemon's own.
  bool fresh() const { return fresh_; }
  // Removes the file. Its memory is free once nobody maps it.
  void Remove();

  std::span<std::byte> memory() { return memory_; }
  const std::string& path() const { return path_; }
  // For ranks: a separate open file description. The lock belongs to a description, and would outlive the daemon with
  // any rank that holds it.
  int shared_fd() const { return shared_fd_.get(); }

  ArenaFile(const ArenaFile&) = delete;
  ArenaFile& operator=(const ArenaFile&) = delete;

 private:
  explicit ArenaFile(ArenaFileConfig config) : config_(std::move(config)) {}
  std::string Taken() const;  // what lies where the file should be, and what to do
  Status Lock();
  Status RestoreSize(uint64_t* there);
  void WarnIfContainersDefault(uint64_t directory_bytes) const;
  Status Size();
  Status CheckRoom(uint64_t bytes, uint64_t allocated) const;
  Result<uint64_t> DefaultBytes() const;
  Status Map();
  Status Populate();

  ArenaFileConfig config_;
  std::string path_;
  UniqueFd fd_;
  UniqueFd shared_fd_;
  uint64_t page_bytes_ = 4096;
  bool fresh_ = false;  // the file was empty
  std::span<std::byte> memory_;
  std::span<std::byte> former_;  // reserved, without access
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_ARENA_FILE_H_
