// SPDX-License-Identifier: Apache-2.0
//
// The file that an arena lives in, so that it outlives every process: `ropeteam-<job>-<node>.arena` in a
// tmpfs or hugetlbfs directory, mode 0600. One daemon at a time: the file is locked for as long as the
// ArenaFile exists. The contents of a file are never destroyed unless `reset` is set.
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
  // Of the file, rounded down to whole (huge) pages; 0: what is there, else a default
  uint64_t memory_bytes = 0;
  uint64_t chunk_bytes = 0;
  bool reset = false;      // start empty where the file there does not fit
  bool encrypted = false;  // as ArenaIdentity's
  // Progress of the start; either may be empty: a line to be shown, and how much of the memory has been faulted in. The
  // latter is called by several threads at a time.
  std::function<void(const std::string& line)> note = {};
  std::function<void(uint64_t done, uint64_t total)> progress = {};
};

class ArenaFile {
 public:
  // Locks, sizes, maps and faults in. kAlreadyExists: another daemon has it; its pid is in the message.
  // kNoSpace: needed and available are. kInvalidArgument: the directory is neither on tmpfs nor on hugetlbfs, a file of
  // another size is there, or no chunk fits. kIo.
  static Result<std::unique_ptr<ArenaFile>> Open(const ArenaFileConfig& config);
  ~ArenaFile();  // unmaps and unlocks; the file stays

  // Adopts the store that is there, or formats a fresh one; reads every chunk of every sealed shard, in
  // parallel, and marks the bad ones. May be called again once the former Store is gone. kInvalidArgument,
  // kCorrupt, kUnsupported: what is there cannot be used, and the message says what to do.
  Result<std::unique_ptr<Store>> OpenStore();

  // Maps the file at another address. The former range stays unmapped until the next Renew() or the end of this ArenaFile.
  // Another process that still writes to it by address (by the kernel's cross-memory
  // copies, which check no key) fails instead of writing into the arena that the next Node uses.
  // memory(), and a Store over it, must not be in use meanwhile. Errors: kIo, kNoSpace; then the arena cannot be used
  // any more, and its file is as it was.
  Status Renew();

  std::span<std::byte> memory() { return memory_; }
  const std::string& path() const { return path_; }
  // For ranks: an open description of its own, because the lock belongs to a description and would outlive
  // the daemon with any rank that holds it.
  int shared_fd() const { return shared_fd_.get(); }

  ArenaFile(const ArenaFile&) = delete;
  ArenaFile& operator=(const ArenaFile&) = delete;

 private:
  explicit ArenaFile(ArenaFileConfig config) : config_(std::move(config)) {}
  Status Lock();
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
