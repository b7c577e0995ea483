// SPDX-License-Identifier: Apache-2.0
//
// A Save packs one rank's objects into the chunks that the daemon granted, with their checksums. It announces each full
// chunk to the daemon, so that replication runs while the rest is still being copied.
//
// Bytes come in three ways. Put() copies them in one pass with the checksum; several threads share a large put
// (copy_team.h). Reserve() returns memory; the checksums of all chunks with such an object are computed at the commit,
// including bytes of Put() in them. A device copies them (Put() of device memory); the lanes' threads (cuda_lane.h)
// compute the checksums of these chunks after the copy.
//
// However many threads copy, none of them reads the source or writes to the arena after Put() has returned. The caller
// announces chunks in their order while the rest is being copied. Before each one it checks whether the daemon is
// alive. If it is not, only the pieces already being copied are finished.
//
// Safe from any thread: calls are serialised. A save with the same objects in the same order as an earlier one
// allocates nothing. Another one allocates only its manifest.

#ifndef ROPETEAM_API_CLIENT_SAVE_H_
#define ROPETEAM_API_CLIENT_SAVE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "api/client/client.h"
#include "api/client/copy_team.h"
#include "api/client/cuda_lanes.h"
#include "api/client/link.h"
#include "api/include/ropeteam/ropeteam.h"
#include "core/base/ids.h"
#include "core/base/status.h"

namespace ropeteam::client {

class Save final {
 public:
  // See ropeteam_save_begin().
  static Result<std::unique_ptr<Save>> Begin(const std::shared_ptr<Client>& client, Step step, uint64_t bytes,
                                             uint64_t objects, uint64_t agreement);
  // Aborts the save first if it was neither committed nor aborted.
  ~Save();
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // See ropeteam_save_put_parts(), …_reserve(), …_commit(), …_abort(). After kInvalidArgument or kNoSpace of the first
  // two the save is unchanged. Any other error ends it, and every later call returns the same error. The caller has
  // checked the parts: no null pointer with a length, no unknown flag.
  Status Put(std::string_view name, std::span<const ropeteam_part_t> parts);
  // See ropeteam_save_put_many(). Names and parts have been checked. Any error ends the save.
  Status PutMany(std::span<const ropeteam_named_part_t> objects);
  // See ropeteam_save_append(); otherwise as Put().
  Status Extend(std::span<const ropeteam_part_t> parts);
  Result<void*> Reserve(std::string_view name, uint64_t length);
  Status Commit();
  Status Abort();

  const Client& client() const { return *client_; }

  // Memory of closed saves is kept for the next ones.
  static void* operator new(size_t bytes);
  static void operator delete(void* memory);

 private:
  enum class State { kOpen, kCommitted, kAborted, kFailed };

  Save(std::shared_ptr<Client> client, std::shared_ptr<Link> link, Step step);

  Status BeginOnLink(uint64_t bytes, uint64_t objects, uint64_t agreement);
  Status CheckOpen() const;
  Status Fail(Status status);
  Status PostAbort();
  void End(State state);

  Status TakeGrant(uint64_t chunks_before);
  Status EnsureSpace(uint64_t stream_bytes);
  Status CheckEntry(std::string_view name, uint64_t length);
  Result<uint64_t> AddObject(std::string_view name, uint64_t length);
  Status ExtendObject(uint64_t length);
  Status Take(const std::string_view* name, std::span<const ropeteam_part_t> parts);

  std::byte* ChunkData(uint64_t index) const { return link_->arena->chunk(buffers_->chunks[index]); }
  Status TakeTickets(std::span<const ropeteam_part_t> parts);
  void ReturnTickets();
  Status CopyParts(std::span<const ropeteam_part_t> parts);
  void QueueCopies(CudaTicket* device, uint64_t length, bool direct);
  CudaDirect FindDirect(const CudaTicket& ticket, uint64_t length);
  Status Settle();
  void EndCopies();
  Status PadTo(uint64_t offset);
  Status Append(const void* data, uint64_t length);
  Status AppendParts(std::span<const ropeteam_part_t> parts);
  Status AppendByTeam(CopyTeam::Turn* turn, uint64_t length);
  Status ChunkFilled(uint64_t index);
  Status Announce();
  void ChecksumRest(uint64_t stream_bytes);
  Status Seal();

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Link> link_;
  const Step step_;
  const uint64_t chunk_bytes_;

  std::mutex mutex_;
  // Guarded by mutex_:
  State state_ = State::kOpen;
  Status failure_;       // with kFailed
  uint64_t save_ = 0;    // the daemon's name for it; 0 until granted
  uint64_t cursor_ = 0;  // bytes of the stream that are written or handed out
  std::unique_ptr<SaveBuffers> buffers_;
  std::vector<Window> windows_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_SAVE_H_
