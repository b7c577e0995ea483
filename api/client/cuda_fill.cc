// SPDX-License-Identifier: Apache-2.0
#include "api/client/cuda_fill.h"

#include <algorithm>
#include <utility>

#include "core/base/checksum.h"

namespace ropeteam::client {
namespace {

// As in save.cc: replication starts a millisecond after the copies, and the daemon wakes up a thousand times
// a second.
constexpr size_t kChunksPerAnnouncement = 4;

}  // namespace

void CudaFill::Begin(Link* link, uint64_t save) {
  const std::lock_guard lock(mutex_);
  ROPETEAM_CHECK(outstanding_ == 0 && announcing_ == 0);
  link_ = link;
  save_ = save;
  cancelled_ = false;
  told_direct_ = false;
  failure_ = OkStatus();
  chunks_.clear();
  filled_.clear();
}

void CudaFill::Add(std::span<const CudaPiece> pieces, uint64_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  for (const CudaPiece& piece : pieces) {
    if (piece.chunk >= chunks_.size()) chunks_.resize(piece.chunk + 1);
    Chunk& chunk = chunks_[piece.chunk];
    ++chunk.pending;
    if (!piece.seals) continue;
    chunk.data = piece.target + piece.bytes - chunk_bytes;
    chunk.bytes = chunk_bytes;
  }
  outstanding_ += pieces.size();
}

bool CudaFill::Seal(uint32_t chunk, const std::byte* data, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (chunk >= chunks_.size() || chunks_[chunk].pending == 0) return true;
  chunks_[chunk].data = data;
  chunks_[chunk].bytes = bytes;
  return false;
}

Status CudaFill::Wait() {
  std::unique_lock lock(mutex_);
  settled_.wait(lock, [this] { return outstanding_ == 0 && announcing_ == 0; });
  return failure_;
}

bool CudaFill::told_direct() {
  const std::lock_guard lock(mutex_);
  return told_direct_;
}

Status CudaFill::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool CudaFill::TakeCrc(uint32_t chunk, uint32_t* crc) {
  const std::lock_guard lock(mutex_);
  if (chunk >= chunks_.size() || !chunks_[chunk].has_crc) return false;
  *crc = chunks_[chunk].crc;
  return true;
}

void CudaFill::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool CudaFill::Wanted() {
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_ || !failure_.ok()) return false;
  }
  Status status = link_->channel->Check();
  if (status.ok()) return true;
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = std::move(status);
  return false;
}

void CudaFill::FinishPiece(const CudaPiece& piece, const Status& status) {
  std::unique_lock lock(mutex_);
  if (!status.ok() && failure_.ok()) failure_ = status;
  Chunk& chunk = chunks_[piece.chunk];
  const bool complete = --chunk.pending == 0 && chunk.bytes != 0;
  if (!complete || cancelled_ || !failure_.ok()) return;
  const std::byte* data = chunk.data;
  const uint64_t bytes = chunk.bytes;
  lock.unlock();
  const uint32_t crc = Crc32c(data, bytes);
  lock.lock();
  // Not the earlier reference: another put may have made the vector grow.
  chunks_[piece.chunk].crc = crc;
  chunks_[piece.chunk].has_crc = true;
  filled_.push_back({piece.chunk, crc});
}

void CudaFill::TellDirect(const CudaDirect& direct) {
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_ || !failure_.ok()) return;
    told_direct_ = true;
  }
  const std::lock_guard announce_lock(announce_mutex_);
  const local::SaveDirect frame{save_, direct.buffer, direct.offset, direct.first, direct.count};
  Status status =
      link_->channel->Post(local::Type::kSaveDirect, frame, Deadline::In(kLocalAnswerMs), &buffers_);
  if (status.ok()) return;
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = std::move(status);
}

void CudaFill::Finished(std::span<const CudaPiece> pieces, const Status& status) {
  for (const CudaPiece& piece : pieces) FinishPiece(piece, status);
  Settle(pieces.size());
}

void CudaFill::Dropped(uint64_t pieces) { Settle(pieces); }

// First announces the chunks that are due. Once nothing is outstanding, the save may commit, and announcing a
// chunk after the commit breaks the protocol.
void CudaFill::Settle(uint64_t pieces) {
  std::unique_lock lock(mutex_);
  outstanding_ -= pieces;
  const bool due = filled_.size() >= kChunksPerAnnouncement || (outstanding_ == 0 && !filled_.empty());
  if (due && !cancelled_ && failure_.ok()) {
    ++announcing_;
    lock.unlock();
    Status status;
    {
      const std::lock_guard announce_lock(announce_mutex_);
      announcement_.clear();
      lock.lock();
      announcement_.swap(filled_);
      lock.unlock();
      status = Announce(&announcement_);
    }
    lock.lock();
    --announcing_;
    if (!status.ok() && failure_.ok()) failure_ = std::move(status);
  }
  // Notifies under the lock: a waiting thread may destroy the fill as soon as it sees this.
  if (outstanding_ == 0 && announcing_ == 0) settled_.notify_all();
}

// Threads finish chunks in any order, so each run of neighbours gets its own frame.
Status CudaFill::Announce(std::vector<Filled>* filled) {
  std::sort(filled->begin(), filled->end(),
            [](const Filled& a, const Filled& b) { return a.chunk < b.chunk; });
  for (size_t i = 0; i < filled->size();) {
    frame_.save = save_;
    frame_.first = (*filled)[i].chunk;
    frame_.crcs.clear();
    do {
      frame_.crcs.push_back((*filled)[i++].crc);
    } while (i < filled->size() && (*filled)[i].chunk == (*filled)[i - 1].chunk + 1);
    ROPETEAM_RETURN_IF_ERROR(
        link_->channel->Post(local::Type::kSaveFilled, frame_, Deadline::In(kLocalAnswerMs), &buffers_));
  }
  return OkStatus();
}

}  // namespace ropeteam::client
