// SPDX-License-Identifier: Apache-2.0
#include "api/client/view.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "core/base/checksum.h"
#include "core/base/log.h"

namespace ropeteam::client {
namespace {

using local::Type;

// In each attempt the daemon fetches the chunks again and checks them. If bytes that it found good are bad
// here three times, a fourth attempt would not help.
constexpr int kRepairAttemptsMax = 3;

// An empty object is mapped to this. The pointer is not null, but must not be dereferenced.
alignas(kObjectAlignmentBytes) constexpr std::byte kNoBytes[kObjectAlignmentBytes] = {};

unsigned long long Ull(uint64_t value) { return value; }
std::byte* AsBytes(void* data) { return static_cast<std::byte*>(data); }

}  // namespace

View::View(std::shared_ptr<Client> client, std::shared_ptr<Link> link, Step step, Rank rank)
    : client_(std::move(client)),
      link_(std::move(link)),
      step_(step),
      rank_(rank),
      chunk_bytes_(link_->arena->chunk_bytes()) {}

Result<std::unique_ptr<View>> View::Open(const std::shared_ptr<Client>& client, Step step, Rank rank,
                                         bool partial, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Result<std::shared_ptr<Link>> link = client->GetLink(deadline, Client::Retry::kYes);
  if (!link.ok()) return link.status();
  ROPETEAM_RETURN_IF_ERROR(client->TakeView());
  std::unique_ptr<View> view(new View(client, *link, step, rank));
  ROPETEAM_RETURN_IF_ERROR(view->OpenAll(partial, deadline));
  return view;
}

Result<std::unique_ptr<View>> View::Open(const std::shared_ptr<Link>& link, Step step, Rank rank,
                                         bool partial, int64_t timeout_ms) {
  std::unique_ptr<View> view(new View(nullptr, link, step, rank));
  ROPETEAM_RETURN_IF_ERROR(view->OpenAll(partial, Deadline::In(timeout_ms)));
  return view;
}

Status View::OpenAll(bool partial, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(OpenGrant(partial, deadline));
  return LoadManifest(deadline);
}

// If the call fails, grant_ is unchanged. A grant that is wrong breaks the channel.
Status View::OpenGrant(bool partial, Deadline deadline) {
  const local::ViewOpen open{step_, rank_, deadline.RemainingMs(), partial};
  local::ViewGrant grant;
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kViewOpen, open, Type::kViewGrant, &grant,
                                                deadline.Plus(kAnswerGraceMs), &frames_));
  grant_ = std::move(grant);
  granted_ = true;
  partial_ = partial && grant_.extents.empty() && grant_.crcs.empty();
  if (Status status = CheckGrant(); !status.ok()) {
    link_->channel->Break(status);
    return status;
  }
  const uint64_t count = grant_.crcs.size();
  chunks_.clear();
  chunks_.reserve(count);
  for (const Extent& extent : grant_.extents) {
    for (uint32_t i = 0; i < extent.count && chunks_.size() < count; ++i) chunks_.push_back(extent.first + i);
  }
  checked_.assign(count, Chunk::kUnknown);
  return OkStatus();
}

View::~View() {
  if (granted_) {
    // Ignore errors: without a connection, the daemon has already closed it.
    (void)link_->channel->Post(Type::kViewClose, local::ViewClose{grant_.view}, Deadline::In(kLocalAnswerMs),
                               &frames_);
  }
  if (client_ != nullptr) client_->ReturnView();
}

Status View::CheckGrant() const {
  const ShardMeta& meta = grant_.meta;
  ROPETEAM_RETURN_IF_ERROR(link_->arena->CheckExtents(grant_.extents));
  const uint64_t need = ChunksFor(meta.stream_bytes, chunk_bytes_);
  const bool chunks = partial_ || (ChunkCount(grant_.extents) >= need && grant_.crcs.size() == need);
  if (meta.chunk_bytes != chunk_bytes_ || need > kChunksPerShardMax || !chunks ||
      meta.manifest_offset >= meta.stream_bytes) {
    return Error(Code::kInternal,
                 "the daemon granted a view of %llu bytes (manifest at %llu) with %llu chunks of %llu, %zu "
                 "checksums; this arena has chunks of %llu",
                 Ull(meta.stream_bytes), Ull(meta.manifest_offset), Ull(ChunkCount(grant_.extents)),
                 Ull(meta.chunk_bytes), grant_.crcs.size(), Ull(chunk_bytes_));
  }
  return OkStatus();
}

Status View::LoadManifest(Deadline deadline) {
  const uint64_t offset = grant_.meta.manifest_offset;
  std::string bytes(grant_.meta.stream_bytes - offset, '\0');
  const Runs runs{.offset = offset, .length = bytes.size(), .target = AsBytes(bytes.data())};
  ROPETEAM_RETURN_IF_ERROR(ReadRuns({&runs, 1}, deadline));
  Result<Manifest> manifest = Manifest::Parse(bytes, offset);
  if (!manifest.ok()) {
    return Error(manifest.status().code(), "step %llu rank %u: %s", Ull(step_), rank_,
                 manifest.status().message().c_str());
  }
  manifest_ = std::move(manifest).value();
  manifest_crc_ = Crc32c(bytes.data(), bytes.size());
  return OkStatus();
}

Result<const Object*> View::Find(std::string_view name) const {
  const Object* object = manifest_.Find(name);
  if (object != nullptr) return object;
  return Error(Code::kNotFound, "no object '%.*s' among the %zu of step %llu rank %u",
               static_cast<int>(std::min(name.size(), kNameBytesMax)), name.data(), objects().size(),
               Ull(step_), rank_);
}

// Whether the chunk matches its checksum. Records the result.
bool View::Verify(uint64_t index) {
  if (checked_[index] != Chunk::kUnknown) return checked_[index] == Chunk::kGood;
  if (Crc32c(ChunkData(index), ChunkSize(index)) != grant_.crcs[index]) {
    MarkBad(index);
    return false;
  }
  checked_[index] = Chunk::kGood;
  return true;
}

void View::MarkBad(uint64_t index) {
  if (checked_[index] != Chunk::kBad) bad_.push_back(static_cast<uint32_t>(index));
  checked_[index] = Chunk::kBad;
}

bool View::CopyChunkPart(uint64_t index, uint64_t within, std::byte* target, uint64_t length) {
  if (device_ != nullptr) return CopyToDevice(index, within, target, length);
  const std::byte* source = ChunkData(index) + within;
  if (within != 0 || length != ChunkSize(index)) {
    if (!Verify(index)) return false;
    std::memcpy(target, source, length);
    return true;
  }
  // Checked in this pass even if an earlier pass found it good: the checksum costs nothing beside the copy.
  const bool good = CopyCrc32c(target, source, length) == grant_.crcs[index];
  if (good) {
    checked_[index] = Chunk::kGood;
  } else {
    MarkBad(index);
  }
  return good;
}

bool View::CopyToDevice(uint64_t index, uint64_t within, std::byte* target, uint64_t length) {
  // As for host memory: a read of a whole chunk checks it, even if an earlier read found it good.
  if (within == 0 && length == ChunkSize(index) && checked_[index] == Chunk::kGood)
    checked_[index] = Chunk::kUnknown;
  if (!Verify(index)) return false;
  if (device_status_.ok()) {
    const auto address = static_cast<CuDevicePtr>(reinterpret_cast<uintptr_t>(target));
    device_status_ = device_->CopyIn(address, ChunkData(index) + within, length);
  }
  return true;
}

// Copies the range, or its part in the sorted chunks `only`. Then bad_ has the chunks that must be repaired
// and copied again.
void View::CopyRange(uint64_t offset, std::byte* target, uint64_t length, const std::vector<uint32_t>* only) {
  while (length > 0) {
    const uint64_t index = offset / chunk_bytes_;
    const uint64_t within = offset % chunk_bytes_;
    const uint64_t part = std::min(length, chunk_bytes_ - within);
    if (only == nullptr || std::binary_search(only->begin(), only->end(), index))
      CopyChunkPart(index, within, target, part);
    offset += part;
    target += part;
    length -= part;
  }
}

Status View::ReadRuns(std::span<const Runs> all, Deadline deadline) {
  if (partial_) return ReadByRanges(all, deadline);
  const auto pass = [&](const std::vector<uint32_t>* only) {
    for (const Runs& runs : all)
      for (uint64_t i = 0; i < runs.count; ++i)
        CopyRange(runs.offset + i * runs.stride, runs.target + i * runs.target_stride, runs.length, only);
  };
  ForgetBad();
  pass(nullptr);
  for (int attempt = 1; !bad_.empty(); ++attempt) {
    ROPETEAM_RETURN_IF_ERROR(Repair(attempt, deadline));
    const std::vector<uint32_t> repaired = ForgetBad();
    pass(&repaired);
  }
  return link_->channel->Check();
}

// Returns the sorted chunks that the pass found bad, and prepares the next pass.
std::vector<uint32_t> View::ForgetBad() {
  std::vector<uint32_t> bad = std::exchange(bad_, {});
  for (const uint32_t index : bad) checked_[index] = Chunk::kUnknown;
  std::sort(bad.begin(), bad.end());
  return bad;
}

// Cuts the runs at the ends of chunks.
void View::Want(const Runs& runs, std::vector<Wanted>* wanted) const {
  const auto add = [&](uint64_t offset, uint64_t length, uint64_t count, std::byte* target) {
    const ChunkPiece piece{static_cast<uint32_t>(offset / chunk_bytes_),
                           static_cast<uint32_t>(offset % chunk_bytes_), static_cast<uint32_t>(length),
                           static_cast<uint32_t>(count), static_cast<uint32_t>(count > 1 ? runs.stride : 0)};
    wanted->push_back({piece, target, runs.target_stride});
  };
  for (uint64_t i = 0; i < runs.count && runs.length != 0;) {
    uint64_t offset = runs.offset + i * runs.stride;
    std::byte* target = runs.target + i * runs.target_stride;
    const uint64_t room = chunk_bytes_ - offset % chunk_bytes_;
    if (runs.length <= room) {  // this one, and the next ones that end in the same chunk
      const uint64_t more =
          runs.count == 1 ? 0 : std::min(runs.count - 1 - i, (room - runs.length) / runs.stride);
      add(offset, runs.length, more + 1, target);
      i += more + 1;
      continue;
    }
    for (uint64_t left = runs.length; left != 0;) {
      const uint64_t part = std::min(left, chunk_bytes_ - offset % chunk_bytes_);
      add(offset, part, 1, target);
      offset += part;
      target += part;
      left -= part;
    }
    ++i;
  }
}

// Reads in the order of the chunks. So a holder checks a chunk for one part, or for two at a part's end.
Status View::ReadByRanges(std::span<const Runs> all, Deadline deadline) {
  std::vector<Wanted> wanted;
  for (const Runs& runs : all) Want(runs, &wanted);
  std::stable_sort(wanted.begin(), wanted.end(),
                   [](const Wanted& a, const Wanted& b) { return a.piece.chunk < b.piece.chunk; });
  Status status;
  std::vector<std::span<const Wanted>> parts;
  for (size_t begin = 0; begin < wanted.size() && status.ok();) {
    uint64_t bytes = wanted[begin].piece.bytes();
    size_t end = begin + 1;
    while (end < wanted.size() && end - begin < kPiecesMax &&
           bytes + wanted[end].piece.bytes() <= chunk_bytes_)
      bytes += wanted[end++].piece.bytes();
    parts.push_back(std::span(wanted).subspan(begin, end - begin));
    begin = end;
    if (parts.size() < kPackedPartsMax && begin < wanted.size()) continue;
    status = ReadParts(parts, deadline);
    parts.clear();
  }
  const Code code = status.code();
  if (code != Code::kUnavailable && code != Code::kNotFound && code != Code::kNoSpace &&
      code != Code::kCorrupt)
    return status;
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Check());
  LOG_INFO("the whole of step %llu rank %u is fetched: %s", Ull(step_), rank_, status.message().c_str());
  ROPETEAM_RETURN_IF_ERROR(BecomeWhole(deadline));
  return ReadRuns(all, deadline);
}

Status View::ReadParts(std::span<const std::span<const Wanted>> parts, Deadline deadline) {
  local::ViewRead read{grant_.view, std::vector<PackedPart>(parts.size()), deadline.RemainingMs()};
  for (size_t i = 0; i < parts.size(); ++i)
    for (const Wanted& each : parts[i]) read.parts[i].pieces.push_back(each.piece);
  local::ViewBytes bytes;
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kViewRead, read, Type::kViewBytes, &bytes,
                                                deadline.Plus(kAnswerGraceMs), &frames_));
  bool good = bytes.chunks.size() == parts.size() && bytes.crcs.size() == parts.size();
  for (const uint32_t chunk : bytes.chunks) good = good && chunk < link_->arena->chunks_total();
  if (!good) return link_->channel->BreakFor("sent ranges that are not in its arena");
  for (size_t i = 0; i < parts.size(); ++i) good = CopyPart(parts[i], bytes.chunks[i], bytes.crcs[i]) && good;
  if (device_ != nullptr && device_status_.ok()) device_status_ = device_->WaitCopiesIn();
  // The view held the bytes while they were copied. The request below returns them to the daemon.
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Check());
  (void)link_->channel->Post(Type::kViewRead, local::ViewRead{grant_.view, {}, 0},
                             Deadline::In(kLocalAnswerMs), &frames_);
  if (good) return OkStatus();
  return Error(Code::kCorrupt, "ranges of step %llu rank %u do not match their checksums on this node",
               Ull(step_), rank_);
}

// False: the packed bytes do not match; they were copied to the targets anyway.
bool View::CopyPart(std::span<const Wanted> part, uint32_t chunk, uint32_t crc) {
  const std::byte* source = link_->arena->chunk(chunk);
  uint32_t found = 0;
  if (device_ != nullptr) {
    uint64_t bytes = 0;
    for (const Wanted& each : part) bytes += each.piece.bytes();
    found = Crc32c(source, bytes);
  }
  for (const Wanted& each : part) {
    for (uint32_t run = 0; run < each.piece.count; ++run) {
      std::byte* target = each.target + run * each.target_stride;
      if (device_ == nullptr) {
        found = CopyCrc32c(target, source, each.piece.length, found);
      } else if (device_status_.ok()) {
        const auto address = static_cast<CuDevicePtr>(reinterpret_cast<uintptr_t>(target));
        device_status_ = device_->CopyIn(address, source, each.piece.length);
      }
      source += each.piece.length;
    }
  }
  return found == crc;
}

// Does not change the view if it fails.
Status View::BecomeWhole(Deadline deadline) {
  const local::ViewGrant before = grant_;
  ROPETEAM_RETURN_IF_ERROR(OpenGrant(false, deadline));
  const ShardMeta& meta = before.meta;
  bool same = grant_.meta == meta;
  Status status;
  if (same && manifest_crc_) {
    std::string bytes(meta.stream_bytes - meta.manifest_offset, '\0');
    const Runs runs{.offset = meta.manifest_offset, .length = bytes.size(), .target = AsBytes(bytes.data())};
    status = ReadRuns({&runs, 1}, deadline);
    same = *manifest_crc_ == Crc32c(bytes.data(), bytes.size());
  }
  if (status.ok() && !same)
    status = Error(Code::kUnavailable, "step %llu rank %u is another shard now", Ull(step_), rank_);
  // Keeps the new view after success, otherwise the old one.
  const local::ViewClose close{status.ok() ? before.view : grant_.view};
  if (!status.ok()) {
    grant_ = before;
    partial_ = true;
  }
  (void)link_->channel->Post(Type::kViewClose, close, Deadline::In(kLocalAnswerMs), &frames_);
  return status;
}

Status View::VerifyRange(uint64_t offset, uint64_t length, Deadline deadline) {
  ForgetBad();
  for (uint64_t i = offset / chunk_bytes_; i <= (offset + length - 1) / chunk_bytes_; ++i) Verify(i);
  for (int attempt = 1; !bad_.empty(); ++attempt) {
    ROPETEAM_RETURN_IF_ERROR(Repair(attempt, deadline));
    for (const uint64_t index : ForgetBad()) Verify(index);
  }
  return link_->channel->Check();
}

// Asks the daemon to repair the chunks in bad_. kCorrupt: it could not; the message says what was tried.
Status View::Repair(int attempt, Deadline deadline) {
  // If the daemon has died, its successor may have reused the chunks. Then a mismatch says nothing about the
  // shard.
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Check());
  if (attempt > kRepairAttemptsMax) {
    return Error(
        Code::kCorrupt,
        "step %llu rank %u: %zu chunks, the first of them %u, do not match their checksums, also after %d "
        "repairs",
        Ull(step_), rank_, bad_.size(), bad_.front(), kRepairAttemptsMax);
  }
  LOG_WARNING("chunks that do not match %zu first %u step %llu rank %u repair %d", bad_.size(), bad_.front(),
              Ull(step_), rank_, attempt);
  local::ViewRepair request{grant_.view, bad_, deadline.RemainingMs()};
  return link_->channel->Call(Type::kViewRepair, request, deadline.Plus(kAnswerGraceMs), &frames_);
}

Status View::CheckRange(const Object& object, uint64_t offset, uint64_t length) const {
  if (offset <= object.length && length <= object.length - offset) return OkStatus();
  return Error(Code::kInvalidArgument, "bytes [%llu, %llu + %llu) of object %s, which has %llu", Ull(offset),
               Ull(offset), Ull(length), object.name.c_str(), Ull(object.length));
}

Status View::ReadCuda(const Object& object, uint64_t offset, void* data, uint64_t length, CuStream stream,
                      int64_t timeout_ms) {
  ROPETEAM_RETURN_IF_ERROR(CheckRange(object, offset, length));
  if (length == 0) return Read(object, offset, nullptr, 0, timeout_ms);
  const Result<CudaTicket> ticket = client_->cuda().Claimed(data, stream, link_->arena.get());
  if (!ticket.ok()) return ticket.status();
  return ReadTicket({.offset = object.offset + offset, .length = length}, *ticket, Deadline::In(timeout_ms));
}

// The ticket has the target of the runs.
Status View::ReadTicket(const Runs& runs, const CudaTicket& ticket, Deadline deadline) {
  const std::lock_guard lock(mutex_);
  Status status = link_->channel->Check();
  if (status.ok()) status = ticket.ready_lane->WaitFor(ticket.ready, deadline);
  ticket.ready_lane->ReturnEvent(ticket.ready);
  ROPETEAM_RETURN_IF_ERROR(status);
  const std::lock_guard device_lock(ticket.lane->reads());
  device_ = ticket.lane.get();
  device_status_ = OkStatus();
  Runs there = runs;
  there.target = reinterpret_cast<std::byte*>(uintptr_t{ticket.pointer.address});
  status = ReadRuns({&there, 1}, deadline);
  device_ = nullptr;
  // Waits even after a failure: the lease and the target are released when this returns. The last Check()
  // shows whether the daemon was alive until the last copy ended.
  const Status copied = ticket.lane->WaitCopiesIn();
  ROPETEAM_RETURN_IF_ERROR(status);
  ROPETEAM_RETURN_IF_ERROR(device_status_);
  ROPETEAM_RETURN_IF_ERROR(copied);
  return link_->channel->Check();
}

Status View::Read(const Object& object, uint64_t offset, void* data, uint64_t length, int64_t timeout_ms) {
  ROPETEAM_RETURN_IF_ERROR(CheckRange(object, offset, length));
  Runs runs{.offset = object.offset + offset, .length = length, .target = AsBytes(data)};
  return ReadRanges({&runs, 1}, timeout_ms);
}

Result<View::Runs> View::RunsOf(const ropeteam_range_t& range, const Object& object) const {
  Runs runs{.offset = object.offset + range.offset,
            .length = range.length,
            .count = std::max<uint64_t>(range.count, 1),
            .stride = range.stride,
            .target = AsBytes(range.data),
            .target_stride = range.data_stride};
  ROPETEAM_RETURN_IF_ERROR(CheckRange(object, range.offset, range.length));
  if (runs.count == 1 || runs.length == 0) return Runs{runs.offset, runs.length, 1, 0, runs.target, 0};
  if (runs.stride < runs.length || runs.target_stride < runs.length)
    return Error(Code::kInvalidArgument,
                 "%llu runs of %llu bytes of object %s, %llu apart, to places %llu apart: they overlap",
                 Ull(runs.count), Ull(runs.length), object.name.c_str(), Ull(runs.stride),
                 Ull(runs.target_stride));
  if (runs.count - 1 > (object.length - range.offset - runs.length) / runs.stride)
    return Error(Code::kInvalidArgument,
                 "%llu runs of %llu bytes from byte %llu on, %llu apart, of object %s, which has %llu",
                 Ull(runs.count), Ull(runs.length), Ull(range.offset), Ull(runs.stride), object.name.c_str(),
                 Ull(object.length));
  if (runs.stride == runs.length && runs.target_stride == runs.length)
    return Runs{runs.offset, runs.length * runs.count, 1, 0, runs.target, 0};
  return runs;
}

Status View::ReadRanges(std::span<Runs> all, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Status status;
  const auto in_device_memory = [&](const Runs& runs) {
    if (!status.ok() || runs.length == 0 || client_ == nullptr) return runs.length == 0;
    const Result<std::optional<CudaTicket>> ticket =
        client_->cuda().Unclaimed(runs.target, link_->arena.get());
    if (!ticket.ok()) status = ticket.status();
    if (!ticket.ok() || !ticket->has_value()) return false;
    status = ReadTicket(runs, **ticket, deadline);
    return true;
  };
  const auto here = std::remove_if(all.begin(), all.end(), in_device_memory);
  ROPETEAM_RETURN_IF_ERROR(status);
  const std::lock_guard lock(mutex_);
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Check());
  return ReadRuns({all.begin(), here}, deadline);
}

Result<const void*> View::Map(const Object& object, int64_t timeout_ms) {
  const std::lock_guard lock(mutex_);
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Check());
  if (object.length == 0) return static_cast<const void*>(kNoBytes);
  const Deadline deadline = Deadline::In(timeout_ms);
  if (partial_) ROPETEAM_RETURN_IF_ERROR(BecomeWhole(deadline));
  ROPETEAM_RETURN_IF_ERROR(VerifyRange(object.offset, object.length, deadline));
  const uint64_t first = object.offset / chunk_bytes_;
  const uint64_t last = (object.offset + object.length - 1) / chunk_bytes_;
  const uint64_t within = object.offset % chunk_bytes_;
  const std::span<const uint32_t> chunks = std::span(chunks_).subspan(first, last - first + 1);
  if (IsContiguous(chunks)) return static_cast<const void*>(ChunkData(first) + within);
  auto window = windows_.find(object.offset);
  if (window == windows_.end()) {
    Result<Window> made = link_->arena->MapWindow(chunks, /*writable=*/false);
    if (!made.ok()) return made.status();
    window = windows_.emplace(object.offset, std::move(made).value()).first;
  }
  return static_cast<const void*>(window->second.data() + within);
}

}  // namespace ropeteam::client
