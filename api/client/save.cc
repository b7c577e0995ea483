// SPDX-License-Identifier: Apache-2.0
#include "api/client/save.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>

#include "core/base/check.h"
#include "core/base/checksum.h"
#include "core/shard/manifest.h"

namespace ropeteam::client {
namespace {

using local::Type;

// How long save_begin may try to reach a daemon that died. If a daemon is there, connecting takes
// microseconds and the hello takes one answer of a leader. If not, training must not wait for it.
constexpr int64_t kSaveReconnectMs = 1000;
// Chunks announced in one frame. A frame costs some microseconds here and wakes the daemon. Copying four
// chunks of 4 MiB takes about a millisecond. So replication starts a millisecond after the copy, and the
// daemon wakes up a thousand times a second.
constexpr size_t kChunksPerAnnouncement = 4;

constexpr std::array<std::byte, kObjectAlignmentBytes> kZeros{};

unsigned long long Ull(uint64_t value) { return value; }

// Memory of closed saves, for as many saves as one handle can have open. Leaked on purpose: a save may be
// closed while the process exits.
struct Blocks {
  std::mutex mutex;
  size_t count = 0;
  std::array<void*, kSavesOpenMax> free;
};
Blocks& TheBlocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

}  // namespace

void* Save::operator new(size_t bytes) {
  // Nothing derives from Save, so all blocks have the same size.
  ROPETEAM_CHECK(bytes == sizeof(Save));
  Blocks& blocks = TheBlocks();
  {
    const std::lock_guard lock(blocks.mutex);
    if (blocks.count > 0) return blocks.free[--blocks.count];
  }
  return ::operator new(bytes);
}

void Save::operator delete(void* memory) {
  Blocks& blocks = TheBlocks();
  {
    const std::lock_guard lock(blocks.mutex);
    if (blocks.count < blocks.free.size()) {
      blocks.free[blocks.count++] = memory;
      return;
    }
  }
  ::operator delete(memory);
}

Save::Save(std::shared_ptr<Client> client, std::shared_ptr<Link> link, Step step)
    : client_(std::move(client)),
      link_(std::move(link)),
      step_(step),
      chunk_bytes_(link_->arena->chunk_bytes()),
      buffers_(client_->TakeBuffers()) {
  buffers_->extents.clear();
  buffers_->chunks.clear();
  buffers_->crcs.clear();
  buffers_->in_place.clear();
  buffers_->filled.crcs.clear();
  buffers_->filled.crcs.reserve(kChunksPerAnnouncement);
}

Result<std::unique_ptr<Save>> Save::Begin(const std::shared_ptr<Client>& client, Step step, uint64_t bytes,
                                          uint64_t objects, uint64_t agreement) {
  if (objects > kObjectsMax) {
    return Error(Code::kInvalidArgument, "a shard of %llu objects, limit %llu", Ull(objects),
                 Ull(kObjectsMax));
  }
  Result<std::shared_ptr<Link>> link = client->GetLink(Deadline::In(kSaveReconnectMs), Client::Retry::kNo);
  if (link.status().code() == Code::kDeadlineExceeded) {
    // The caller gave no deadline, so this code would be wrong.
    return Error(Code::kUnavailable, "%s", link.status().message().c_str());
  }
  if (!link.ok()) return link.status();
  ROPETEAM_RETURN_IF_ERROR(client->TakeSave());
  std::unique_ptr<Save> save(new Save(client, *link, step));
  Status status = save->BeginOnLink(bytes, objects, agreement);
  if (!status.ok()) return save->Fail(std::move(status));
  return save;
}

Status Save::BeginOnLink(uint64_t bytes, uint64_t objects, uint64_t agreement) {
  const uint64_t limit = kChunksPerShardMax * chunk_bytes_;
  const uint64_t beyond_data = objects * kObjectAlignmentBytes + Manifest::EstimateBytes(objects);
  if (bytes > limit || beyond_data > limit - bytes) {
    return Error(Code::kInvalidArgument,
                 "a shard of %llu bytes in %llu objects, limit %llu bytes (%llu chunks of %llu)", Ull(bytes),
                 Ull(objects), Ull(limit), Ull(kChunksPerShardMax), Ull(chunk_bytes_));
  }
  ROPETEAM_RETURN_IF_ERROR(link_->LocalCall(Type::kSaveBegin,
                                            local::SaveBegin{step_, bytes + beyond_data, agreement},
                                            Type::kSaveGrant, &buffers_->grant, &buffers_->frames));
  save_ = buffers_->grant.save;
  buffers_->fill.Begin(link_.get(), save_);
  return TakeGrant(0);
}

Save::~Save() {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kOpen) {
    EndCopies();
    // Ignore errors: without a connection, the daemon has already aborted it.
    (void)PostAbort();
    End(State::kAborted);
  }
  buffers_->layout.Restart();
  client_->ReturnBuffers(std::move(buffers_));
}

Status Save::CheckOpen() const {
  switch (state_) {
    case State::kOpen:
      return OkStatus();
    case State::kCommitted:
      return Error(Code::kInvalidArgument, "the save of step %llu has been committed", Ull(step_));
    case State::kAborted:
      return Error(Code::kInvalidArgument, "the save of step %llu has been aborted", Ull(step_));
    case State::kFailed:
      return failure_;
  }
  return Error(Code::kInternal, "the save of step %llu has state %d", Ull(step_), static_cast<int>(state_));
}

void Save::End(State state) {
  state_ = state;
  windows_.clear();
  buffers_->lanes.clear();
  link_->exports.Release(buffers_->exports, link_->channel.get());
  buffers_->exports.clear();
  client_->ReturnSave();
}

Status Save::PostAbort() {
  if (save_ == 0) return OkStatus();
  return link_->channel->Post(Type::kSaveAbort, local::SaveAbort{save_}, Deadline::In(kLocalAnswerMs),
                              &buffers_->frames);
}

Status Save::Fail(Status status) {
  EndCopies();
  // Ignore errors: if the abort cannot be sent, the connection ends, and that aborts the save too.
  (void)PostAbort();
  failure_ = status;
  End(State::kFailed);
  return status;
}

// Appends the chunks in buffers_->grant to the stream's chunks.
Status Save::TakeGrant(uint64_t chunks_before) {
  const std::vector<Extent>& granted = buffers_->grant.extents;
  const uint64_t count = ChunkCount(granted);
  if (Status status = link_->arena->CheckExtents(granted);
      !status.ok() || count == 0 || count > kChunksPerShardMax - chunks_before) {
    if (status.ok()) {
      status = Error(Code::kInternal, "the daemon granted %llu chunks on top of %llu, limit %llu", Ull(count),
                     Ull(chunks_before), Ull(kChunksPerShardMax));
    }
    link_->channel->Break(status);
    return status;
  }
  for (const Extent& extent : granted) {
    buffers_->extents.push_back(extent);
    for (uint32_t i = 0; i < extent.count; ++i) buffers_->chunks.push_back(extent.first + i);
  }
  buffers_->crcs.resize(buffers_->chunks.size(), 0);
  buffers_->in_place.resize(buffers_->chunks.size(), 0);
  return link_->arena->Populate(granted);
}

// Extends the grant to hold `stream_bytes`. kNoSpace and kInvalidArgument leave it unchanged.
Status Save::EnsureSpace(uint64_t stream_bytes) {
  const uint64_t have = buffers_->chunks.size();
  const uint64_t need = ChunksFor(stream_bytes, chunk_bytes_);
  if (need <= have) return OkStatus();
  if (need > kChunksPerShardMax) {
    return Error(Code::kInvalidArgument, "a shard of %llu bytes, limit %llu (%llu chunks of %llu)",
                 Ull(stream_bytes), Ull(kChunksPerShardMax * chunk_bytes_), Ull(kChunksPerShardMax),
                 Ull(chunk_bytes_));
  }
  const Status status = link_->LocalCall(Type::kSaveExtend, local::SaveExtend{save_, need - have},
                                         Type::kSaveGrant, &buffers_->grant, &buffers_->frames);
  if (status.code() == Code::kNoSpace || status.code() == Code::kInvalidArgument) return status;
  if (!status.ok()) return Fail(status);
  if (Status taken = TakeGrant(have); !taken.ok()) return Fail(std::move(taken));
  if (buffers_->chunks.size() >= need) return OkStatus();
  return Fail(Error(Code::kInternal, "the daemon granted %zu chunks where %llu were asked for",
                    buffers_->chunks.size(), Ull(need)));
}

// Checks that `length` more bytes are allowed, and makes room for them and for `name` in the manifest.
Status Save::CheckEntry(std::string_view name, uint64_t length) {
  ROPETEAM_RETURN_IF_ERROR(CheckOpen());
  // Checked before each object, however small: if the daemon has died, others may own the chunk (see
  // ChunkFilled()).
  if (Status status = link_->channel->Check(); !status.ok()) return Fail(std::move(status));
  // If a copy from a device has failed meanwhile, the save ends here.
  if (Status status = buffers_->fill.failure(); !status.ok()) return Fail(std::move(status));
  if (name == kMetadataObjectName && length > kStepMetadataBytesMax) {
    return Error(Code::kInvalidArgument, "step %llu: metadata of %llu bytes, limit %zu", Ull(step_),
                 Ull(length), kStepMetadataBytesMax);
  }
  const uint64_t limit = kChunksPerShardMax * chunk_bytes_;
  if (length > limit) {
    return Error(Code::kInvalidArgument, "an object of %llu bytes, limit %llu (%llu chunks of %llu)",
                 Ull(length), Ull(limit), Ull(kChunksPerShardMax), Ull(chunk_bytes_));
  }
  // Includes the manifest as it would be now. If that does not fit, the error comes here, where the caller
  // can leave out one object, and not at the commit.
  const uint64_t end = AlignObject(buffers_->layout.manifest_offset() + length);
  return EnsureSpace(end + buffers_->layout.encoded_bytes() + kManifestEntryBytes + name.size());
}

// Checks the object, makes room, adds it to the manifest, and pads up to it. Returns its offset.
Result<uint64_t> Save::AddObject(std::string_view name, uint64_t length) {
  ROPETEAM_RETURN_IF_ERROR(CheckEntry(name, length));
  Result<uint64_t> offset = buffers_->layout.Add(name, length);
  if (!offset.ok()) return offset.status();
  if (Status status = PadTo(*offset); !status.ok()) return Fail(std::move(status));
  return offset;
}

// Does the same for more bytes of the last object. The cursor is at its end.
Status Save::ExtendObject(uint64_t length) {
  ROPETEAM_RETURN_IF_ERROR(CheckEntry("", length));
  if (buffers_->layout.last_name() == kMetadataObjectName) {
    return Error(Code::kInvalidArgument,
                 "step %llu: an append of %llu bytes to the metadata, which are put whole", Ull(step_),
                 Ull(length));
  }
  return buffers_->layout.Extend(length);
}

Status Save::Put(std::string_view name, std::span<const ropeteam_part_t> parts) { return Take(&name, parts); }

Status Save::Extend(std::span<const ropeteam_part_t> parts) { return Take(nullptr, parts); }

// First adds all objects to the manifest. Then copies them as one run of parts, with a part of zeros for the
// gap before each object. So the copying threads do not wait for each other at the end of each object.
Status Save::PutMany(std::span<const ropeteam_named_part_t> objects) {
  const std::lock_guard lock(mutex_);
  ROPETEAM_RETURN_IF_ERROR(CheckOpen());
  std::vector<ropeteam_part_t>& parts = buffers_->parts;
  parts.clear();
  for (const ropeteam_named_part_t& object : objects) {
    parts.push_back({kZeros.data(), 0, nullptr, 0});
    parts.push_back(object.part);
  }
  Status status = TakeTickets(parts);
  uint64_t end = cursor_;
  for (size_t i = 0; status.ok() && i < objects.size(); ++i) {
    const uint64_t length = objects[i].part.length;
    status = CheckEntry(objects[i].name, length);
    if (!status.ok()) break;
    const Result<uint64_t> offset = buffers_->layout.Add(objects[i].name, length);
    status = offset.status();
    if (!status.ok()) break;
    parts[2 * i].length = *offset - end;
    end = *offset + length;
  }
  if (status.ok()) status = CopyParts(parts);
  ReturnTickets();
  // CheckEntry() may have ended the save already.
  return status.ok() || state_ != State::kOpen ? status : Fail(std::move(status));
}

// Saves the parts as the object `name`; null: appends them to the last object.
Status Save::Take(const std::string_view* name, std::span<const ropeteam_part_t> parts) {
  const std::lock_guard lock(mutex_);
  uint64_t length = 0;  // saturates; the largest value is over the limit
  for (const ropeteam_part_t& part : parts) length += std::min(part.length, UINT64_MAX - length);
  // Every pointer is checked before the object is added, so a bad one leaves the save unchanged.
  Status status = TakeTickets(parts);
  if (status.ok()) status = name == nullptr ? ExtendObject(length) : AddObject(*name, length).status();
  if (status.ok()) {
    status = CopyParts(parts);
    if (!status.ok()) status = Fail(std::move(status));
  }
  ReturnTickets();
  return status;
}

Status Save::TakeTickets(std::span<const ropeteam_part_t> parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const ropeteam_part_t& part = parts[i];
    if (part.length == 0) continue;
    if ((part.flags & ROPETEAM_PART_BACKGROUND) != 0) {
      Result<CudaTicket> ticket =
          client_->cuda().Claimed(part.data, static_cast<CuStream>(part.stream), link_->arena.get());
      if (!ticket.ok()) return ticket.status();
      buffers_->tickets.push_back({i, std::move(ticket).value()});
    } else {
      Result<std::optional<CudaTicket>> ticket = client_->cuda().Unclaimed(part.data, link_->arena.get());
      if (!ticket.ok()) return ticket.status();
      if (ticket->has_value()) buffers_->tickets.push_back({i, std::move(**ticket)});
    }
  }
  return OkStatus();
}

void Save::ReturnTickets() {
  for (const PartTicket& each : buffers_->tickets) {
    if (each.ticket.ready != nullptr) each.ticket.ready_lane->ReturnEvent(each.ticket.ready);
  }
  buffers_->tickets.clear();
}

Status Save::CopyParts(std::span<const ropeteam_part_t> parts) {
  auto device = buffers_->tickets.begin();
  bool wait = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t end = device == buffers_->tickets.end() ? parts.size() : device->part;
    ROPETEAM_RETURN_IF_ERROR(AppendParts(parts.subspan(i, end - i)));
    i = end;
    if (i == parts.size()) break;
    // The network reads only background parts. Other memory is returned to the caller at the end of the put,
    // which would have to wait for the network.
    const bool background = (parts[i].flags & ROPETEAM_PART_BACKGROUND) != 0;
    wait = wait || !background;
    QueueCopies(&device->ticket, parts[i].length, /*direct=*/background);
    ++device;
  }
  // Announces the full chunks now, because the next call may come much later.
  ROPETEAM_RETURN_IF_ERROR(Announce());
  return wait ? buffers_->fill.Wait() : OkStatus();
}

Result<void*> Save::Reserve(std::string_view name, uint64_t length) {
  const std::lock_guard lock(mutex_);
  ROPETEAM_RETURN_IF_ERROR(CheckOpen());
  if (length == 0) {
    return Error(Code::kInvalidArgument, "reserve of 0 bytes; an empty object is put, not reserved");
  }
  const Result<uint64_t> offset = AddObject(name, length);
  if (!offset.ok()) return offset.status();
  // Chunks filled before this object are final. The chunk in which it begins gets its checksum at the commit.
  if (Status status = Announce(); !status.ok()) return Fail(std::move(status));
  const uint64_t first = *offset / chunk_bytes_;
  const uint64_t last = (*offset + length - 1) / chunk_bytes_;
  for (uint64_t i = first; i <= last; ++i) buffers_->in_place[i] = kByCommit;
  cursor_ = *offset + length;
  const std::span<const uint32_t> chunks = std::span(buffers_->chunks).subspan(first, last - first + 1);
  if (IsContiguous(chunks)) return static_cast<void*>(ChunkData(first) + *offset % chunk_bytes_);
  Result<Window> window = link_->arena->MapWindow(chunks, /*writable=*/true);
  if (!window.ok()) return Fail(window.status());
  windows_.push_back(std::move(window).value());
  return static_cast<void*>(windows_.back().data() + *offset % chunk_bytes_);
}

// The gap is shorter than an alignment. It is overwritten, because the chunk may hold an older save's bytes
// and the checksum covers it.
Status Save::PadTo(uint64_t offset) { return Append(kZeros.data(), offset - cursor_); }

Status Save::Append(const void* data, uint64_t length) {
  const auto* source = static_cast<const std::byte*>(data);
  while (length > 0) {
    const uint64_t index = cursor_ / chunk_bytes_;
    const uint64_t within = cursor_ % chunk_bytes_;
    const uint64_t part = std::min(length, chunk_bytes_ - within);
    std::byte* target = ChunkData(index) + within;
    if (buffers_->in_place[index] != kByCopy) {
      CopyNonTemporal(target, source, part);
    } else {
      buffers_->crcs[index] = CopyCrc32c(target, source, part, buffers_->crcs[index]);
    }
    source += part;
    cursor_ += part;
    length -= part;
    if (within + part == chunk_bytes_) ROPETEAM_RETURN_IF_ERROR(ChunkFilled(index));
  }
  return OkStatus();
}

// Copies parts of host memory.
Status Save::AppendParts(std::span<const ropeteam_part_t> parts) {
  uint64_t length = 0;
  for (const ropeteam_part_t& part : parts) length += part.length;
  CopyTeam::Turn turn(&client_->copy_team(), parts, length);
  if (turn.taken()) return AppendByTeam(&turn, length);
  for (const ropeteam_part_t& part : parts) ROPETEAM_RETURN_IF_ERROR(Append(part.data, part.length));
  return OkStatus();
}

Status Save::AppendByTeam(CopyTeam::Turn* turn, uint64_t length) {
  const uint64_t end = cursor_ + length;
  uint64_t ahead = cursor_;  // the end of what was handed out; the cursor is the end of what was copied
  while (cursor_ < end) {
    while (turn->HasRoom()) {
      const uint64_t within = ahead % chunk_bytes_;
      const bool checksum = buffers_->in_place[ahead / chunk_bytes_] == kByCopy;
      ahead += turn->HandOut(ChunkData(ahead / chunk_bytes_) + within, chunk_bytes_ - within, checksum);
    }
    const CopyTeam::Piece piece = turn->Take();
    const uint64_t index = cursor_ / chunk_bytes_;
    uint32_t& crc = buffers_->crcs[index];
    if (piece.checksum) crc = Crc32cCombine(crc, piece.crc, piece.bytes);
    cursor_ += piece.bytes;
    if (cursor_ % chunk_bytes_ == 0) ROPETEAM_RETURN_IF_ERROR(ChunkFilled(index));
  }
  return OkStatus();
}

Status Save::ChunkFilled(uint64_t index) {
  // If the daemon has died, the next one may grant these chunks to another save. So stop at the next chunk,
  // not at the end of a long copy.
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Check());
  if (buffers_->in_place[index] == kByCommit) return OkStatus();
  if (buffers_->in_place[index] == kByFill) {
    if (!buffers_->fill.Seal(static_cast<uint32_t>(index), ChunkData(index), chunk_bytes_)) return OkStatus();
    buffers_->crcs[index] = Crc32c(ChunkData(index), chunk_bytes_);
    buffers_->in_place[index] = kByCopy;
  }
  local::SaveFilled& filled = buffers_->filled;
  if (!filled.crcs.empty() && filled.first + filled.crcs.size() != index)
    ROPETEAM_RETURN_IF_ERROR(Announce());
  if (filled.crcs.empty()) filled.first = static_cast<uint32_t>(index);
  filled.crcs.push_back(buffers_->crcs[index]);
  return filled.crcs.size() < kChunksPerAnnouncement ? OkStatus() : Announce();
}

Status Save::Announce() {
  local::SaveFilled& filled = buffers_->filled;
  if (filled.crcs.empty()) return OkStatus();
  filled.save = save_;
  const Status status =
      link_->channel->Post(Type::kSaveFilled, filled, Deadline::In(kLocalAnswerMs), &buffers_->frames);
  filled.crcs.clear();
  return status;
}

void Save::ChecksumRest(uint64_t stream_bytes) {
  const uint64_t count = ChunksFor(stream_bytes, chunk_bytes_);
  for (uint64_t i = 0; i < count; ++i) {
    if (buffers_->in_place[i] == kByCopy) continue;
    if (buffers_->fill.TakeCrc(static_cast<uint32_t>(i), &buffers_->crcs[i])) continue;
    buffers_->crcs[i] = Crc32c(ChunkData(i), ChunkLength(stream_bytes, chunk_bytes_, i));
  }
}

Status Save::Commit() {
  const std::lock_guard lock(mutex_);
  ROPETEAM_RETURN_IF_ERROR(CheckOpen());
  Status status = Seal();
  if (!status.ok()) return state_ == State::kOpen ? Fail(std::move(status)) : status;
  End(State::kCommitted);
  return status;
}

Status Save::Seal() {
  const uint64_t manifest_offset = buffers_->layout.manifest_offset();
  const std::string& manifest = buffers_->layout.Encode();
  const uint64_t stream_bytes = manifest_offset + manifest.size();
  ROPETEAM_RETURN_IF_ERROR(EnsureSpace(stream_bytes));
  ROPETEAM_RETURN_IF_ERROR(PadTo(manifest_offset));
  ROPETEAM_RETURN_IF_ERROR(Append(manifest.data(), manifest.size()));
  ROPETEAM_RETURN_IF_ERROR(Announce());
  ROPETEAM_RETURN_IF_ERROR(buffers_->fill.Wait());
  ROPETEAM_RETURN_IF_ERROR(Settle());
  ChecksumRest(stream_bytes);
  local::SaveCommit& commit = buffers_->commit;
  commit.save = save_;
  commit.stream_bytes = stream_bytes;
  commit.manifest_offset = manifest_offset;
  commit.object_count = static_cast<uint32_t>(buffers_->layout.object_count());
  commit.crcs.assign(buffers_->crcs.begin(),
                     buffers_->crcs.begin() + static_cast<ptrdiff_t>(ChunksFor(stream_bytes, chunk_bytes_)));
  return link_->LocalCall(Type::kSaveCommit, commit, &buffers_->frames);
}

// The whole chunks of the part that begins at the cursor, if the daemon can read them from device memory.
CudaDirect Save::FindDirect(const CudaTicket& ticket, uint64_t length) {
  const uint64_t first = ChunksFor(cursor_, chunk_bytes_);
  const uint64_t end = (cursor_ + length) / chunk_bytes_;
  if (first >= end) return {};
  const CudaScope scope(ticket.lane->driver(), ticket.lane->context());
  const CudaExports::Place place =
      link_->exports.Find(ticket.lane->driver(), ticket.pointer.address + (first * chunk_bytes_ - cursor_),
                          (end - first) * chunk_bytes_, link_->hello, link_->channel.get());
  if (place.buffer == 0) return {};
  buffers_->exports.push_back(place.buffer);
  return {place.buffer, place.offset, static_cast<uint32_t>(first), static_cast<uint32_t>(end - first)};
}

// Passes [ticket's pointer, + length) and the ticket's event to the lane, one piece per chunk.
void Save::QueueCopies(CudaTicket* device, uint64_t length, bool direct) {
  const CudaTicket& ticket = *device;
  const CudaDirect place = direct ? FindDirect(ticket, length) : CudaDirect();
  std::vector<CudaPiece>& pieces = buffers_->pieces;
  pieces.clear();
  uint64_t source = ticket.pointer.address;
  const uint64_t first = cursor_ / chunk_bytes_;
  while (length > 0) {
    const uint64_t index = cursor_ / chunk_bytes_;
    const uint64_t within = cursor_ % chunk_bytes_;
    const uint64_t part = std::min(length, chunk_bytes_ - within);
    if (buffers_->in_place[index] == kByCopy) buffers_->in_place[index] = kByFill;
    const bool seals = within + part == chunk_bytes_ && buffers_->in_place[index] == kByFill;
    pieces.push_back({source, ChunkData(index) + within, part, static_cast<uint32_t>(index), seals});
    source += part;
    cursor_ += part;
    length -= part;
  }
  for (const std::shared_ptr<CudaLane>& lane : {ticket.lane, ticket.ready_lane}) {
    if (std::find(buffers_->lanes.begin(), buffers_->lanes.end(), lane) == buffers_->lanes.end()) {
      buffers_->lanes.push_back(lane);
    }
  }
  link_->arena->PreferPinned(buffers_->chunks[first]);
  buffers_->fill.Add(pieces, chunk_bytes_);
  ticket.lane->Queue(&buffers_->fill, pieces, ticket.ready_lane.get(), std::exchange(device->ready, nullptr),
                     place);
}

// Asks the daemon to stop reading this save's device memory, because the caller is about to reuse it. Chunks
// that have not been put from there are put from the arena. The wait for a put to a slow peer is limited to
// kSettleMs. If the memory changes during a put, the replica's check finds that, and the chunk is put again
// from the arena.
Status Save::Settle() {
  constexpr int64_t kSettleMs = 1000;
  if (!buffers_->fill.told_direct()) return OkStatus();
  const Status status = link_->channel->Call(Type::kSaveSettle, local::SaveSettle{save_, kSettleMs},
                                             Deadline::In(kSettleMs + kAnswerGraceMs), &buffers_->frames);
  // The daemon reports the timeout or does not answer. The commit will distinguish the two.
  return status.code() == Code::kDeadlineExceeded ? OkStatus() : status;
}

// Waits until no device writes into the save's chunks any more, because others may get them next.
void Save::EndCopies() {
  if (buffers_->lanes.empty()) return;
  buffers_->fill.Cancel();
  for (const std::shared_ptr<CudaLane>& lane : buffers_->lanes) lane->Drop(&buffers_->fill);
  // Ignore the failure: the save has ended, and its end has its own status.
  (void)buffers_->fill.Wait();
  (void)Settle();
}

Status Save::Abort() {
  const std::lock_guard lock(mutex_);
  ROPETEAM_RETURN_IF_ERROR(CheckOpen());
  EndCopies();
  const Status status = PostAbort();
  End(State::kAborted);
  // Without a daemon, nobody holds the save any more, so it counts as aborted.
  return status.code() == Code::kUnavailable ? OkStatus() : status;
}

}  // namespace ropeteam::client
