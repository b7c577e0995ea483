// SPDX-License-Identifier: Apache-2.0
//
// A View reads one saved shard from this node's arena. It checks every chunk against the checksum of the rank that
// saved it: in the same pass as the copy if the whole chunk is read, or once before if only a part is. The daemon
// repairs a bad chunk in place from another holder, and the chunk is read again. For a read into a device, a chunk is
// checked here before it is copied, while the device copies the previous one.
//
// The chunks are under a lease that ends with the connection. So a read checks after its copy whether the daemon is
// still alive: if it is, the lease was valid during the copy.
//
// A partial view has no chunks here. Its reads request the ranges from the daemon. These come packed in chunks that
// belong to this view until its next read, each with a checksum that a holder computed from checked bytes. If this is
// not possible, the daemon fetches the shard and the view becomes whole.
//
// Safe from any thread: reads are serialised, and the list of objects never changes.

#ifndef ROPETEAM_API_CLIENT_VIEW_H_
#define ROPETEAM_API_CLIENT_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/client/client.h"
#include "api/client/cuda_lanes.h"
#include "api/client/deadline.h"
#include "api/client/link.h"
#include "api/include/ropeteam/ropeteam.h"
#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/shard/manifest.h"

namespace ropeteam::client {

class View {
 public:
  // See ropeteam_view_open().
  static Result<std::unique_ptr<View>> Open(const std::shared_ptr<Client>& client, Step step, Rank rank,
                                            bool partial, int64_t timeout_ms);
  // Over a connection without a rank, whose arena is mapped. Such a view cannot use device memory: no ReadCuda().
  static Result<std::unique_ptr<View>> Open(const std::shared_ptr<Link>& link, Step step, Rank rank,
                                            bool partial, int64_t timeout_ms);
  ~View();
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  const ShardMeta& meta() const { return grant_.meta; }
  uint8_t origin() const { return grant_.origin; }
  const std::vector<Object>& objects() const { return manifest_.objects(); }
  // kNotFound: no object of this name; the message has step, rank and the number of objects.
  Result<const Object*> Find(std::string_view name) const;

  // See ropeteam_view_read() and ropeteam_view_map(); `object` is one of objects().
  Status Read(const Object& object, uint64_t offset, void* data, uint64_t length, int64_t timeout_ms);
  // See ropeteam_view_read_cuda().
  Status ReadCuda(const Object& object, uint64_t offset, void* data, uint64_t length, CuStream stream,
                  int64_t timeout_ms);
  // See ropeteam_view_read_ranges(). `offset` counts from the stream's beginning, and `count` is at least 1.
  struct Runs {
    uint64_t offset = 0;
    uint64_t length = 0;
    uint64_t count = 1;
    uint64_t stride = 0;
    std::byte* target = nullptr;
    uint64_t target_stride = 0;
  };
  // kInvalidArgument: the range leaves the object, or its runs overlap.
  Result<Runs> RunsOf(const ropeteam_range_t& range, const Object& object) const;
  // Reorders `all`.
  Status ReadRanges(std::span<Runs> all, int64_t timeout_ms);
  Result<const void*> Map(const Object& object, int64_t timeout_ms);

  const Client& client() const { return *client_; }

 private:
  View(std::shared_ptr<Client> client, std::shared_ptr<Link> link, Step step, Rank rank);

  // A run of a ranged read in one chunk, and where it goes.
  struct Wanted {
    ChunkPiece piece;
    std::byte* target = nullptr;
    uint64_t target_stride = 0;
  };

  Status OpenAll(bool partial, Deadline deadline);
  Status OpenGrant(bool partial, Deadline deadline);
  Status CheckGrant() const;
  Status LoadManifest(Deadline deadline);
  void Want(const Runs& runs, std::vector<Wanted>* wanted) const;
  Status ReadByRanges(std::span<const Runs> all, Deadline deadline);
  Status ReadParts(std::span<const std::span<const Wanted>> parts, Deadline deadline);
  bool CopyPart(std::span<const Wanted> part, uint32_t chunk, uint32_t crc);
  Status BecomeWhole(Deadline deadline);
  const std::byte* ChunkData(uint64_t index) const { return link_->arena->chunk(chunks_[index]); }
  uint64_t ChunkSize(uint64_t index) const {
    return ChunkLength(grant_.meta.stream_bytes, chunk_bytes_, index);
  }
  Status CheckRange(const Object& object, uint64_t offset, uint64_t length) const;
  Status ReadTicket(const Runs& runs, const CudaTicket& ticket, Deadline deadline);
  bool Verify(uint64_t index);
  void MarkBad(uint64_t index);
  std::vector<uint32_t> ForgetBad();
  bool CopyChunkPart(uint64_t index, uint64_t within, std::byte* target, uint64_t length);
  bool CopyToDevice(uint64_t index, uint64_t within, std::byte* target, uint64_t length);
  void CopyRange(uint64_t offset, std::byte* target, uint64_t length, const std::vector<uint32_t>* only);
  Status ReadRuns(std::span<const Runs> all, Deadline deadline);
  Status VerifyRange(uint64_t offset, uint64_t length, Deadline deadline);
  Status Repair(int attempt, Deadline deadline);

  const std::shared_ptr<Client> client_;  // null: without a rank
  const std::shared_ptr<Link> link_;
  const Step step_;
  const Rank rank_;
  const uint64_t chunk_bytes_;
  local::ViewGrant grant_;
  bool granted_ = false;
  std::vector<uint32_t> chunks_;  // the arena's chunk for each of the stream
  Manifest manifest_;
  std::optional<uint32_t> manifest_crc_;  // once it is loaded

  std::mutex mutex_;
  // Guarded by mutex_:
  enum class Chunk : uint8_t { kUnknown, kGood, kBad };
  std::vector<Chunk> checked_;  // by chunk of the stream, under this lease; kBad: in the pass under way
  bool partial_ = false;        // grant_ has no chunks
  std::vector<uint32_t> bad_;   // chunks that did not match in the pass under way
  CudaLane* device_ = nullptr;  // where targets are, in a read into device memory
  Status device_status_;        // of that read's copies
  std::map<uint64_t, Window> windows_;  // by the object's offset
  FrameBuffers frames_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_VIEW_H_
