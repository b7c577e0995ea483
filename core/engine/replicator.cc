// SPDX-License-Identifier: Apache-2.0
#include "core/engine/replicator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/log.h"
#include "core/engine/parts.h"
#include "core/engine/placement.h"

namespace ropeteam::engine {
namespace {

// Chunks of one copy that are being put at once: keeps its link busy while leaving the queue to other copies
// too.
constexpr uint32_t kOutstandingPerCopy = 8;
// Arrived chunks per hint to the holder: at 4 MiB a check of 16 MiB, about a millisecond's work.
constexpr size_t kArrivedBatch = 4;
// Times that chunks may fail the holder's check before the copy is given up: once is a flipped bit on the
// way.
constexpr uint32_t kRoundsBadMax = 3;

}  // namespace

Replicator::SourceId Replicator::Add(Source source) {
  const SourceId id = next_source_++;
  source.begun = parts_.context.now;
  sources_.emplace(id, std::move(source));
  return id;
}

Replicator::SourceId Replicator::Begin(const ShardId& shard, uint32_t replicas, std::vector<Extent> extents) {
  Source source;
  source.shard = shard;
  source.wanted = replicas;
  const uint64_t chunks = ChunkCount(extents);
  source.extents = std::move(extents);
  source.crcs.resize(chunks);
  source.ready.resize(chunks);
  const SourceId id = Add(std::move(source));
  Advance(id);
  return id;
}

void Replicator::Extend(SourceId id, std::vector<Extent> all_extents) {
  Source& source = sources_.at(id);
  source.extents = std::move(all_extents);
  source.crcs.resize(ChunkCount(source.extents));
  source.ready.resize(ChunkCount(source.extents));
  Advance(id);
}

void Replicator::Ready(SourceId id, uint32_t first, const std::vector<uint32_t>& crcs) {
  Source& source = sources_.at(id);
  for (size_t i = 0; i < crcs.size(); ++i) {
    source.ready[first + i] = true;
    source.crcs[first + i] = crcs[i];
  }
  for (auto& [copy_id, copy] : source.copies) {
    // What came from device memory before had no checksum to be checked against.
    const auto end = copy.from_device.lower_bound(first + static_cast<uint32_t>(crcs.size()));
    for (auto chunk = copy.from_device.lower_bound(first); chunk != end; ++chunk)
      copy.unreported.push_back(*chunk);
    if (copy.state == State::kSending) ReportArrived(source, &copy);
  }
  Advance(id);
}

bool Replicator::AddDevice(SourceId id, const SaveDirectInput& chunks) {
  Source& source = sources_.at(id);
  if (source.device_ended || chunks.count == 0) return false;
  const auto next = source.device.lower_bound(chunks.first);
  if (next != source.device.end() && next->first - chunks.first < chunks.count) return false;
  if (FindDevice(source, chunks.first) != nullptr) return false;
  source.device.emplace_hint(next, chunks.first, chunks);
  Advance(id);
  return true;
}

void Replicator::EndDevice(SourceId id, std::function<void()> settled) {
  Source& source = sources_.at(id);
  CloseDevice(&source);
  source.settling.push_back(std::move(settled));
  TellSettled(&source);
  Advance(id);
}

// What the fabric has goes on; what waits for its turn is left to the arena.
void Replicator::CloseDevice(Source* source) {
  source->device_ended = true;
  source->device.clear();
  for (auto& [copy_id, copy] : source->copies) {
    for (auto put = copy.device_puts.begin(); put != copy.device_puts.end();) {
      if (!parts_.transfers.Withdraw(put->second)) {
        ++put;
        continue;
      }
      --copy.outstanding;
      --source->device_puts;
      PutAgain(&copy, put->first);
      put = copy.device_puts.erase(put);
    }
  }
}

void Replicator::TellSettled(Source* source) {
  if (source->device_puts != 0) return;
  for (const auto& settled : std::exchange(source->settling, {})) settled();
}

const SaveDirectInput* Replicator::FindDevice(const Source& source, uint32_t chunk) {
  const auto behind = source.device.upper_bound(chunk);
  if (behind == source.device.begin()) return nullptr;
  const SaveDirectInput& before = std::prev(behind)->second;
  return chunk - before.first < before.count ? &before : nullptr;
}

void Replicator::PutAgain(Copy* copy, uint32_t chunk) {
  copy->put[chunk] = false;
  copy->cursor = std::min(copy->cursor, chunk);
}

void Replicator::Sealed(SourceId id) {
  Source& source = sources_.at(id);
  CloseDevice(&source);
  ROPETEAM_CHECK(AddSealed(&source));
  Advance(id);
}

bool Replicator::AddSealed(Source* source) {
  const SealedShard* sealed = parts_.context.store.Find(source->shard);
  if (sealed == nullptr || !sealed->bad.empty()) return false;
  source->sealed = true;
  source->meta = sealed->meta;
  source->extents = sealed->extents;
  source->crcs = sealed->crcs;
  source->ready.assign(sealed->crcs.size(), true);
  Result<Store::LeaseToken> lease = parts_.context.store.Lease(source->shard);
  ROPETEAM_CHECK(lease.ok());
  source->lease = *lease;
  return true;
}

void Replicator::Cancel(SourceId id, std::function<void()> quiescent) {
  Source& source = sources_.at(id);
  CloseDevice(&source);
  source.ending = true;
  source.quiescent = std::move(quiescent);
  Advance(id);
}

void Replicator::Resume(const ShardId& shard) {
  for (const auto& [id, running] : sources_)
    if (running.shard == shard && running.ordered_target == kNoNode && !running.ending) return;
  Source source;
  source.shard = shard;
  if (!AddSealed(&source)) return;
  source.wanted = source.meta.replicas;
  Advance(Add(std::move(source)));
}

void Replicator::Order(const ShardId& shard, NodeId target) {
  for (const auto& [id, source] : sources_)
    if (source.shard == shard && (source.ordered_target == target || source.ordered_target == kNoNode))
      return;
  Source source;
  source.shard = shard;
  source.wanted = 1;
  source.ordered_target = target;
  if (!AddSealed(&source)) return;
  Advance(Add(std::move(source)));
}

void Replicator::DropObsolete() {
  const Context& context = parts_.context;
  std::vector<SourceId> ending;
  for (auto& [id, source] : sources_) {
    if (!source.sealed || source.ending) continue;
    const bool released = context.store.Find(source.shard) == nullptr;
    const bool former = source.shard.incarnation < context.life.incarnation &&
                        source.ordered_target == kNoNode &&
                        !context.announced.keep.contains(StepOf(source.shard));
    if (!released && !former) continue;
    source.ending = true;
    ending.push_back(id);
  }
  for (const SourceId id : ending) Advance(id);
}

Replicator::Source* Replicator::FindSource(const CopyId& copy, SourceId* id) {
  const auto found = by_copy_.find(copy);
  if (found == by_copy_.end()) return nullptr;
  *id = found->second;
  return &sources_.at(found->second);
}

void Replicator::Advance(SourceId id) {
  const auto found = sources_.find(id);
  if (found == sources_.end()) return;
  Source& source = found->second;
  Context& context = parts_.context;

  std::erase_if(source.done, [&](NodeId node) { return !context.view.Contains(node); });
  // Before targets are chosen: another takes the place of who has gone at once.
  for (auto& [copy_id, copy] : source.copies)
    if (copy.state != State::kDropping && !context.view.Contains(copy.target))
      Drop(&source, &copy, "it left the view");
  // What was ordered is not tried a second time: that it failed is remembered.
  if (source.ordered_target == kNoNode)
    std::erase_if(source.avoid_until, [&](const auto& avoid) { return avoid.second <= context.now; });
  if (!source.ending && source.sealed && source.done.size() >= source.wanted) {
    const ShardId shard = source.shard;
    const bool own = source.ordered_target == kNoNode;
    source.ending = true;
    if (own) parts_.sessions.OnReplicated(shard);
  }
  if (source.ending) {
    for (auto& [copy_id, copy] : source.copies)
      if (copy.state != State::kDropping) Drop(&source, &copy, "no longer wanted");
  } else {
    ChooseTargets(id, &source);
  }
  std::vector<CopyId> ids;
  for (const auto& [copy_id, copy] : source.copies) ids.push_back(copy_id);
  for (const CopyId& copy_id : ids) {
    const auto copy = source.copies.find(copy_id);
    if (copy != source.copies.end()) AdvanceCopy(id, &source, &copy->second);
  }
  if (source.ending && source.copies.empty()) End(id);
}

void Replicator::End(SourceId id) {
  const auto found = sources_.find(id);
  if (found->second.lease != 0) parts_.context.store.EndLease(found->second.lease);
  const std::function<void()> quiescent = std::move(found->second.quiescent);
  sources_.erase(found);
  if (quiescent) quiescent();
}

void Replicator::ChooseTargets(SourceId id, Source* source) {
  Context& context = parts_.context;
  std::set<NodeId> busy = source->done;
  size_t active = source->done.size();
  for (const auto& [copy_id, copy] : source->copies) {
    busy.insert(copy.target);
    if (copy.state != State::kDropping) ++active;
  }
  if (active >= source->wanted) return;

  std::vector<NodeId> candidates;
  if (source->ordered_target != kNoNode) {
    if (context.view.Contains(source->ordered_target)) candidates = {source->ordered_target};
    if (candidates.empty() || !source->avoid_until.empty()) {
      source->ending = true;  // the leader will choose anew
      return;
    }
  } else {
    candidates = HoldersOf(context.view, context.config.self, source->wanted);
  }
  for (const NodeId target : candidates) {
    if (active >= source->wanted) break;
    if (busy.contains(target) || source->avoid_until.contains(target)) continue;
    if (context.unreachable.contains(target)) continue;
    Copy copy;
    copy.id = {context.config.self, next_copy_++};
    copy.target = target;
    copy.put.resize(source->ready.size());
    by_copy_[copy.id] = id;
    source->copies.emplace(copy.id, std::move(copy));
    ++active;
  }
  if (active < source->wanted && !source->warned) {
    source->warned = true;
    LOG_WARNING("%s has %zu of %u holders: the view has %zu members", source->shard.ToString().c_str(),
                active, source->wanted, context.view.members.size());
  }
}

void Replicator::AdvanceCopy(SourceId id, Source* source, Copy* copy) {
  Context& context = parts_.context;
  if (copy->state == State::kDropping) {
    if (copy->outstanding != 0) return;
    context.Send(copy->target, ReplicaAbort{copy->id, copy->put_failed});
    by_copy_.erase(copy->id);
    source->copies.erase(CopyId(copy->id));
    return;
  }
  const uint64_t chunks = source->crcs.size();
  copy->put.resize(chunks);
  const bool enough =
      copy->sealed_already || (copy->state != State::kReserving && ChunkCount(copy->extents) >= chunks);
  if (!enough) {
    if (copy->reserve_sent < chunks || copy->next_send <= context.now) {
      copy->reserve_sent = chunks;
      copy->next_send = context.now + kRepeatUs;
      context.Send(copy->target,
                   ReplicaReserve{copy->id, {source->shard}, chunks, context.store.chunk_bytes()});
    }
    if (copy->state == State::kReserving) return;
  }
  if (copy->state == State::kSending && !copy->sealed_already) SendChunks(id, source, copy);
  const bool all_there = copy->sealed_already || copy->arrived >= chunks;
  if (copy->state == State::kSending && source->sealed && enough && all_there && copy->outstanding == 0) {
    copy->state = State::kSealing;
    copy->next_send = 0;
  }
  if (copy->state == State::kSealing && copy->next_send <= context.now) {
    copy->next_send = context.now + kRepeatUs;
    const SealedShard* sealed = context.store.Leased(source->lease);
    context.Send(copy->target,
                 ReplicaSeal{copy->id, copy->attempt, source->meta, source->crcs, sealed->committed});
  }
}

void Replicator::SendChunks(SourceId id, Source* source, Copy* copy) {
  const uint64_t granted = ChunkCount(copy->extents);
  const uint64_t chunk_bytes = parts_.context.store.chunk_bytes();
  while (copy->cursor < copy->put.size() && copy->put[copy->cursor]) ++copy->cursor;
  for (uint32_t chunk = copy->cursor; chunk < source->ready.size() && chunk < granted; ++chunk) {
    if (copy->outstanding >= kOutstandingPerCopy) return;
    if (copy->put[chunk]) continue;
    // The arena first, where it has the bytes: they are those that the checksum is of.
    const SaveDirectInput* device = source->ready[chunk] ? nullptr : FindDevice(*source, chunk);
    if (!source->ready[chunk] && device == nullptr) continue;
    copy->put[chunk] = true;
    ++copy->outstanding;
    StartTransfer transfer;
    transfer.peer = copy->target;
    if (device != nullptr) {
      transfer.buffer = device->buffer;
      transfer.local_offset = device->offset + (chunk - device->first) * chunk_bytes;
    } else {
      transfer.local_offset = parts_.context.store.chunk_offset(ChunkAt(source->extents, chunk));
    }
    transfer.remote_offset = copy->chunks_begin + ChunkAt(copy->extents, chunk) * chunk_bytes;
    transfer.length =
        source->sealed ? ChunkLength(source->meta.stream_bytes, chunk_bytes, chunk) : chunk_bytes;
    const CopyId copy_id = copy->id;
    const uint64_t tag = parts_.transfers.Start(
        source->ordered_target == kNoNode ? Transfers::Priority::kSave : Transfers::Priority::kBackground,
        transfer, [this, id, copy_id, chunk](Code code) { OnPut(id, copy_id, chunk, code); });
    if (device == nullptr) continue;
    copy->device_puts[chunk] = tag;
    ++source->device_puts;
  }
}

void Replicator::OnPut(SourceId id, CopyId copy_id, uint32_t chunk, Code code) {
  Source& source = sources_.at(id);  // a source outlives its outstanding puts
  Copy& copy = source.copies.at(copy_id);
  --copy.outstanding;
  Context& context = parts_.context;
  const bool from_device = copy.device_puts.erase(chunk) != 0;
  if (from_device) {
    --source.device_puts;
    if (code == Code::kOk) copy.from_device.insert(chunk);
    // Memory that cannot be read here says enough of what else the save has there.
    if (code == Code::kNotFound || code == Code::kIo) CloseDevice(&source);
    TellSettled(&source);
  }
  if (code == Code::kOk) {
    ++copy.arrived;
    if (source.ready[chunk]) copy.unreported.push_back(chunk);
    context.counters.replica_bytes_sent +=
        source.sealed ? ChunkLength(source.meta.stream_bytes, context.store.chunk_bytes(), chunk)
                      : context.store.chunk_bytes();
    context.counters_dirty = true;
    if (copy.state == State::kSending) ReportArrived(source, &copy);
  } else if (code == Code::kStale || (from_device && code == Code::kNotFound)) {
    PutAgain(&copy, chunk);  // no byte has left this node: the same place at the holder will do
  } else if (copy.put_failed = true; copy.state != State::kDropping) {
    // Of device memory that could not be read here the peer knows nothing.
    if (!from_device || code != Code::kIo)
      context.out.suspicions.push_back({copy.target, std::string("a put failed: ") + CodeName(code)});
    Drop(&source, &copy, std::string("a put failed: ") + CodeName(code));
  }
  Advance(id);
}

void Replicator::ReportArrived(const Source& source, Copy* copy) {
  // A save that is still being filled is checked as it arrives; what is left at the end is checked at the
  // seal anyway.
  if (copy->unreported.size() < kArrivedBatch) return;
  ReplicaArrived arrived{copy->id, std::move(copy->unreported), {}};
  copy->unreported.clear();
  for (const uint32_t chunk : arrived.chunks) arrived.crcs.push_back(source.crcs[chunk]);
  const uint64_t chunk_bytes = parts_.context.store.chunk_bytes();
  // The last chunk of a sealed stream may be short; the holder knows its length only from the seal.
  if (source.sealed && source.meta.stream_bytes % chunk_bytes != 0) {
    const uint32_t last = static_cast<uint32_t>(source.crcs.size() - 1);
    const auto found = std::find(arrived.chunks.begin(), arrived.chunks.end(), last);
    if (found != arrived.chunks.end()) {
      arrived.crcs.erase(arrived.crcs.begin() + (found - arrived.chunks.begin()));
      arrived.chunks.erase(found);
    }
  }
  if (!arrived.chunks.empty()) parts_.context.Send(copy->target, arrived);
}

void Replicator::Drop(Source* source, Copy* copy, const std::string& why) {
  if (!source->ending)
    LOG_INFO("copy of %s on %s dropped: %s", source->shard.ToString().c_str(),
             parts_.context.NameOf(copy->target).c_str(), why.c_str());
  copy->state = State::kDropping;
  source->avoid_until[copy->target] = parts_.context.now + kAvoidUs;
}

void Replicator::OnGrant(NodeId from, const ReplicaGrant& grant) {
  SourceId id = 0;
  Source* source = FindSource(grant.copy, &id);
  if (source == nullptr) {
    // The attempt is over; the holder must not keep chunks for it. Whether a put of it failed is not
    // remembered.
    if (grant.copy.source == parts_.context.config.self)
      parts_.context.Send(from, ReplicaAbort{grant.copy, true});
    return;
  }
  Copy& copy = source->copies.at(grant.copy);
  if (copy.target != from || (copy.state != State::kReserving && copy.state != State::kSending)) return;
  if (grant.code != Code::kOk) {
    Drop(source, &copy, grant.message);
  } else if (grant.sealed_already) {
    copy.sealed_already = true;
    copy.state = State::kSending;
  } else if (ChunkCount(grant.extents) >= ChunkCount(copy.extents)) {
    copy.chunks_begin = grant.chunks_begin;
    copy.extents = grant.extents;
    copy.state = State::kSending;
  }
  Advance(id);
}

void Replicator::OnSealed(NodeId from, const ReplicaSealed& sealed) {
  SourceId id = 0;
  Source* source = FindSource(sealed.copy, &id);
  if (source == nullptr) return;
  Copy& copy = source->copies.at(sealed.copy);
  if (copy.target != from || copy.state != State::kSealing || sealed.attempt != copy.attempt) return;
  if (sealed.code == Code::kOk) {
    source->done.insert(from);
    by_copy_.erase(copy.id);
    source->copies.erase(CopyId(sealed.copy));
  } else if (sealed.code == Code::kCorrupt && !sealed.bad.empty() && !copy.sealed_already &&
             PutBadAgain(*source, &copy, sealed.bad)) {
    ++copy.attempt;
    copy.state = State::kSending;
  } else {
    Drop(source, &copy, sealed.message);
  }
  Advance(id);
}

// False: they have been put again often enough.
bool Replicator::PutBadAgain(const Source& source, Copy* copy, const std::vector<uint32_t>& bad) {
  std::vector<uint32_t> from_arena;
  for (const uint32_t chunk : bad)
    if (copy->from_device.erase(chunk) == 0) from_arena.push_back(chunk);
  // Device memory may have been written since, when its put was not waited for; the arena's bytes may not.
  if (!from_arena.empty() && ++copy->rounds_bad > kRoundsBadMax) return false;
  parts_.context.counters.chunks_bad += bad.size();
  LOG_WARNING("%zu chunks of %s did not match on %s, %zu of them put from device memory, putting them again",
              bad.size(), source.shard.ToString().c_str(), parts_.context.NameOf(copy->target).c_str(),
              bad.size() - from_arena.size());
  for (const uint32_t chunk : bad) {
    if (chunk >= copy->put.size() || !copy->put[chunk]) continue;
    PutAgain(copy, chunk);
    --copy->arrived;
  }
  // It may be our bytes that have changed since they were summed.
  if (!from_arena.empty()) parts_.fetcher.Repair(source.shard, from_arena, [](const Status&) {});
  return true;
}

void Replicator::OnQuery(NodeId from, const CopyQuery& query) {
  SourceId id = 0;
  if (FindSource(query.copy, &id) == nullptr) parts_.context.Send(from, ReplicaAbort{query.copy, true});
}

void Replicator::OnView() {
  std::vector<SourceId> ids;
  for (auto& [id, source] : sources_) {
    ids.push_back(id);
    for (auto& [copy_id, copy] : source.copies) copy.next_send = 0;
  }
  for (const SourceId id : ids) Advance(id);
}

// A copy on a member that cannot be reached is made elsewhere; one that can be reached again is tried at once.
void Replicator::OnPeerLink(NodeId peer, bool up) {
  std::vector<SourceId> ids;
  for (auto& [id, source] : sources_) {
    ids.push_back(id);
    if (up && source.ordered_target == kNoNode) source.avoid_until.erase(peer);
    for (auto& [copy_id, copy] : source.copies)
      if (!up && copy.target == peer && copy.state != State::kDropping)
        Drop(&source, &copy, "the data path to it is lost");
  }
  for (const SourceId id : ids) Advance(id);
}

void Replicator::OnTimer() {
  std::vector<SourceId> ids;
  for (const auto& [id, source] : sources_) ids.push_back(id);
  for (const SourceId id : ids) Advance(id);
}

TimeUs Replicator::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, source] : sources_) {
    for (const auto& [copy_id, copy] : source.copies) {
      if (copy.state == State::kDropping || copy.state == State::kSending) continue;
      due = std::min(due, copy.next_send);
    }
    for (const auto& [copy_id, copy] : source.copies)
      if (copy.state == State::kSending && !copy.sealed_already &&
          ChunkCount(copy.extents) < source.crcs.size())
        due = std::min(due, copy.next_send);
    // Due until OnTimer() has seen to it, however late that comes and whatever comes before.
    if (source.ending) continue;
    for (const auto& [node, until] : source.avoid_until) due = std::min(due, until);
  }
  return due;
}

}  // namespace ropeteam::engine
