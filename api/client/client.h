// SPDX-License-Identifier: Apache-2.0
//
// The Client behind a ropeteam_t: one rank's connection to its node's daemon, which survives a restart of the daemon.
// It holds the current Link, and makes the next one when that has ended.
//
// Safe from any thread. Shared: saves and views also hold it, so that handles may be closed in any order.

#ifndef ROPETEAM_API_CLIENT_CLIENT_H_
#define ROPETEAM_API_CLIENT_CLIENT_H_

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "api/client/copy_team.h"
#include "api/client/cuda_fill.h"
#include "api/client/cuda_lanes.h"
#include "api/client/deadline.h"
#include "api/client/environment.h"
#include "api/client/layout.h"
#include "api/client/link.h"
#include "api/client/local_protocol.h"
#include "core/base/status.h"

// All of api/client is in a namespace of its own. Its classes have the users' names (View, Save, Client). The daemon's
// components have other classes with the same names, and a program may link both.
namespace ropeteam::client {

inline constexpr uint32_t kSavesOpenMax = 4;     // ROPETEAM_SAVES_OPEN_MAX
inline constexpr uint32_t kViewsOpenMax = 1024;  // ROPETEAM_VIEWS_OPEN_MAX

// When a chunk's checksum is computed. A chunk only ever moves down this list.
enum ChecksumBy : uint8_t {
  kByCopy = 0,    // in the copy, running
  kByFill = 1,    // holds a device's bytes: computed when they have arrived
  kByCommit = 2,  // has a reserved object, whose bytes change until the commit
};

// Device memory among the parts of one put.
struct PartTicket {
  size_t part = 0;
  CudaTicket ticket;
};

// The working memory of a save, kept by the client between saves, so that a save of the same shape allocates nothing.
struct SaveBuffers {
  std::vector<Extent> extents;
  std::vector<uint32_t> chunks;   // the arena's chunk for each of the stream
  std::vector<uint32_t> crcs;     // of each chunk of the stream; partial for the chunk being filled
  std::vector<uint8_t> in_place;  // when the checksum is computed: a ChecksumBy
  Layout layout;
  CudaFill fill;
  std::vector<std::shared_ptr<CudaLane>> lanes;  // lanes with pieces of the fill
  std::vector<CudaPiece> pieces;
  std::vector<ropeteam_part_t> parts;  // of one put of many objects
  std::vector<PartTicket> tickets;     // for the parts that a put copies from devices; empty between puts
  std::vector<uint64_t> exports;       // buffers of device memory that this save uses (cuda_exports.h)
  FrameBuffers frames;
  local::SaveGrant grant;
  local::SaveFilled filled;
  local::SaveCommit commit;
};

class Client {
 public:
  // Whether a call without a daemon retries until its deadline.
  enum class Retry { kNo, kYes };

  static Result<std::shared_ptr<Client>> Open(OpenOptions options);
  // Ends the connection: the daemon aborts uncommitted saves and closes views. Saves and views of this client stay
  // valid objects, but their calls fail.
  void Close();

  // kInvalidArgument in a forked child, which may not use this object.
  Status CheckProcess() const;
  bool InForkedChild() const;

  // The current link, or a new one if the daemon has died. Waits at most until the deadline. kUnavailable: no daemon.
  Result<std::shared_ptr<Link>> GetLink(Deadline deadline, Retry retry);

  Status Wait(Step step, uint8_t level, int64_t timeout_ms);
  Status Drop(Step step, int64_t timeout_ms);
  Status Persist(Step step, int64_t timeout_ms);
  // A field of 0 is not set. The values are sent again to a restarted daemon.
  Status SetPolicy(uint64_t persist_every, uint32_t keep_on_storage, int64_t timeout_ms);
  Result<local::LatestReply> Latest(uint8_t level, int64_t timeout_ms);
  Result<local::StorageListReply> ListStorage(uint32_t steps_max, int64_t timeout_ms);
  // The daemon's last hello.
  local::HelloReply hello() const;
  const OpenOptions& options() const { return options_; }

  // Limits open saves and views; kInvalidArgument at the limit. Every Take needs a Return.
  Status TakeSave();
  void ReturnSave();
  Status TakeView();
  void ReturnView();

  CudaLanes& cuda() { return cuda_; }
  CopyTeam& copy_team() { return copy_team_; }

  std::unique_ptr<SaveBuffers> TakeBuffers();
  void ReturnBuffers(std::unique_ptr<SaveBuffers> buffers);

 private:
  explicit Client(OpenOptions options);
  Result<std::shared_ptr<Link>> Connect(Deadline deadline, Retry retry);
  template <typename Request>
  Status CallForStep(local::Type type, Step step, int64_t timeout_ms);

  const OpenOptions options_;
  const pid_t pid_;
  uint64_t token_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::shared_ptr<Link> link_;
  bool connecting_ = false;
  bool closed_ = false;
  uint64_t persist_every_ = 0;  // as set
  uint32_t keep_on_storage_ = 0;
  uint32_t saves_open_ = 0;
  uint32_t views_open_ = 0;
  std::vector<std::unique_ptr<SaveBuffers>> buffers_;

  CopyTeam copy_team_;
  CudaLanes cuda_;  // the last member: destroyed first, while the arena that its threads use is still mapped
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CLIENT_H_
