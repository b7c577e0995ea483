// SPDX-License-Identifier: Apache-2.0
//
// A Save packs one rank's objects into the chunks that the daemon granted, checksumming on the way, and tells
// the daemon of each chunk as it fills, so that replication runs while the rest is still copied.
//
// Bytes come three ways: Put() copies them, in one pass with the checksum, with several threads where they are
// many (copy_team.h); Reserve() hands out the memory and
// the checksum is taken at the commit, for every chunk that such an object touches (also of the bytes that
// Put() laid beside it); and a device copies them (Put() of device memory), with the checksum of the chunks
// that it touches behind the copy, in the lanes' threads (cuda_lane.h).
//
// However many threads copy, at Put()'s return none of them reads the source or writes to the arena. Chunks are
// announced in their order, by the caller, while the rest is copied. Before each the caller looks whether the
// daemon is there. When it is not, the pieces that are being copied are the last ones.
//
// Safe from any thread: calls are serialised. A save that is like one before it (the same objects, in the
// same order) allocates nothing; another one allocates its manifest, and nothing for a chunk or a byte.

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
  // Aborts first if neither committed nor aborted.
  ~Save();
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // See ropeteam_save_put_parts(), …_reserve(), …_commit(), …_abort(). After kInvalidArgument or kNoSpace of
  // the first two the save is as it was; any other error ends it, and is the answer to every later call.
  // The parts have been checked: no null pointer with a length, no unknown flag.
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
