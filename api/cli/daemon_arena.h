// SPDX-License-Identifier: Apache-2.0
//
// A daemon's arena, mapped by a command that moves steps between it and files. What lies in files is read and written by the
// daemon's own code, so that both make the same of it.

#ifndef ROPETEAM_API_CLI_DAEMON_ARENA_H_
#define ROPETEAM_API_CLI_DAEMON_ARENA_H_

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "api/cli/sockets.h"
#include "api/cli/storage_options.h"
#include "api/client/link.h"
#include "core/base/status.h"
#include "core/engine/storage_work.h"
#include "node/storage_workers.h"

namespace ropeteam::cli {

// A connection that joins no incarnation of the world, and the arena, which must outlive what is done in it. The link has
// the arena, too.
struct DaemonArena {
  std::shared_ptr<client::Link> link;
  std::shared_ptr<client::Arena> arena;
};
// The daemon that the options name.
SocketChoice DaemonOf(const StorageOptions& options);
// kUnavailable: no daemon, or several and none named.
Result<DaemonArena> OpenDaemonArena(const StorageOptions& options);

// The step that options.step names: a number or "latest", which the daemon is asked for. kNotFound: there is none;
// kInvalidArgument: neither.
Result<Step> StepInMemory(const DaemonArena& daemon, const StorageOptions& options);

// `ropeteam export --format hf`, from memory or storage.
Status ExportHf(const StorageOptions& options);
// `ropeteam export` without --storage.
Status ExportFromMemory(const StorageOptions& options);

// kInternal, with `what`: the daemon has granted other chunks than a shard of this size needs here.
Status CheckGrantedChunks(const client::Arena& arena, const std::vector<Extent>& extents,
                          uint64_t stream_bytes, const char* what);

// One work at a time.
class ArenaStorage {
 public:
  // `moved`: as StorageWorkers::Config has it.
  ArenaStorage(const client::Arena& arena, std::shared_ptr<storage::Sink> sink, std::string job,
               std::function<void(uint64_t bytes)> moved);

  // Blocks. `bad` (may be null) gets the chunks of a shard in memory that do not match their checksums.
  template <typename T = std::monostate>
  Result<T> Do(StorageWork work, std::vector<uint32_t>* bad = nullptr) {
    StorageDone done;
    const Status status = Run(std::move(work), &done);
    if (bad != nullptr) *bad = std::move(done.bad);
    if (!status.ok()) return status;
    return std::get<T>(std::move(done.result));
  }

 private:
  Status Run(StorageWork work, StorageDone* done);
  StorageDone* done_ = nullptr;  // of the work that runs
  std::promise<Status> status_;
  StorageWorkers workers_;
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_DAEMON_ARENA_H_
