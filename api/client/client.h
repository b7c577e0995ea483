// SPDX-License-Identifier: Apache-2.0
//
// The Client behind a ropeteam_t: one rank's connection to its node's daemon, also after the daemon was restarted. It
// holds the current Link and makes the next when that one has ended.
//
// Safe from any thread. Shared: saves and views hold it too, so that handles may be closed in any order.

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

// All of api/client is in a namespace of its own: its classes have the names that its users think in (View,
// Save, Client), and the daemon's components have other things of the same names, with which a program may link
// both.
namespace ropeteam::client {

inline constexpr uint32_t kSavesOpenMax = 4;     // ROPETEAM_SAVES_OPEN_MAX
inline constexpr uint32_t kViewsOpenMax = 1024;  // ROPETEAM_VIEWS_OPEN_MAX

// When a chunk's checksum is taken. In this order: a chunk only ever goes down the list.
enum ChecksumBy : uint8_t {
  kByCopy = 0,    // in the copy, running
  kByFill = 1,    // holds a device's bytes: once they have arrived
  kByCommit = 2,  // touched by a reserved object, whose bytes change until then
};

// Device memory among the parts of one put.
struct PartTicket {
  size_t part = 0;
  CudaTicket ticket;
};

// What a save works with, kept by the client between saves: a save like the one before allocates none of it
// again.
struct SaveBuffers {
  std::vector<Extent> extents;
  std::vector<uint32_t> chunks;   // the arena's chunk for each of the stream
  std::vector<uint32_t> crcs;     // of each chunk of the stream; running in the one being filled
  std::vector<uint8_t> in_place;  // who takes the checksum: a ChecksumBy
  Layout layout;
  CudaFill fill;
  std::vector<std::shared_ptr<CudaLane>> lanes;  // that the fill has pieces in
  std::vector<CudaPiece> pieces;
  std::vector<ropeteam_part_t> parts;  // of one put of many objects
  std::vector<PartTicket> tickets;  // of the parts that one put takes from devices; empty between puts
  std::vector<uint64_t> exports;    // buffers of device memory that this save uses (cuda_exports.h)
  FrameBuffers frames;
  local::SaveGrant grant;
  local::SaveFilled filled;
  local::SaveCommit commit;
};

class Client {
 public:
  // Whether a call that finds no daemon keeps trying until its deadline.
  enum class Retry { kNo, kYes };

  static Result<std::shared_ptr<Client>> Open(OpenOptions options);
  // Ends the connection: the daemon aborts saves that are not committed and closes views. Saves and
  // views of this client stay valid objects whose calls fail.
  void Close();

  // kInvalidArgument in a forked child, where nothing of this may be used.
  Status CheckProcess() const;
  bool InForkedChild() const;

  // The current link, or a new one when the daemon has died: at the latest at the deadline. kUnavailable: no
  // daemon.
  Result<std::shared_ptr<Link>> GetLink(Deadline deadline, Retry retry);

  Status Wait(Step step, uint8_t level, int64_t timeout_ms);
  Status Drop(Step step, int64_t timeout_ms);
  Status Persist(Step step, int64_t timeout_ms);
  // A field of 0 says nothing. What was set is said again to a daemon that comes back.
  Status SetPolicy(uint64_t persist_every, uint32_t keep_on_storage, int64_t timeout_ms);
  Result<local::LatestReply> Latest(uint8_t level, int64_t timeout_ms);
  Result<local::StorageListReply> ListStorage(uint32_t steps_max, int64_t timeout_ms);
  // What the daemon said last of itself.
  local::HelloReply hello() const;
  const OpenOptions& options() const { return options_; }

  // Places for open saves and views; kInvalidArgument when the limit is reached. Every Take is matched by a
  // Return.
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
  CudaLanes cuda_;  // the last member: the first to go, while the arena that its threads know is still mapped
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CLIENT_H_
