// SPDX-License-Identifier: Apache-2.0
#include "core/engine/replicator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/log.h"
#include "core/engine/parts.h"
#include "core/engine/placement.h"

namespace ropeteam::engine {

// The effects of one copy.
class Replicator::Effects final : public CopyEffects {
 public:
  Effects(Replicator* replicator, SourceId id, const Source* source, const OutgoingCopy* copy)
      : replicator_(*replicator), id_(id), source_(*source), copy_(*copy) {}

  void SendReserve(uint64_t chunks) override {
    Context& context = replicator_.parts_.context;
    const KeyId key = replicator_.Encrypts(source_) ? context.config.key() : source_.encryption.key;
    context.Send(copy_.target(),
                 ReplicaReserve{copy_.id(), {source_.shard}, chunks, context.store.chunk_bytes(), key});
  }
  uint64_t StartPut(uint32_t chunk, const SaveDirectInput* device) override {
    return replicator_.StartPut(id_, source_, copy_, chunk, device);
  }
  bool Withdraw(uint64_t transfer) override { return replicator_.parts_.transfers.Withdraw(transfer); }
  void SendArrived(const std::vector<uint32_t>& chunks) override {
    replicator_.SendArrived(source_, copy_, chunks);
  }
  void SendSeal(uint32_t attempt) override { replicator_.SendSeal(source_, copy_, attempt); }
  void SendAbort(bool put_failed) override {
    replicator_.parts_.context.Send(copy_.target(), ReplicaAbort{copy_.id(), put_failed});
  }

 private:
  Replicator& replicator_;
  const SourceId id_;
  const Source& source_;
  const OutgoingCopy& copy_;
};

Replicator::SourceId Replicator::Add(Source source) {
  const SourceId id = next_source_++;
  source.begun = parts_.context.now;
  sources_.emplace(id, std::move(source));
  return id;
}

Replicator::SourceId Replicator::Begin(const ShardId& shard, uint32_t replicas, std::vector<Extent> extents,
                                       const EncryptionSalt& salt) {
  Source source;
  source.shard = shard;
  source.wanted = replicas;
  source.encryption.salt = salt;
  const uint64_t chunks = ChunkCount(extents);
  ROPETEAM_CHECK(chunks != 0);
  source.extents = std::move(extents);
  source.crcs.resize(chunks);
  source.chunks.ready.resize(chunks);
  source.chunks.puts_wait = parts_.context.config.puts_wait_us != 0;
  const SourceId id = Add(std::move(source));
  Advance(id);
  ROPETEAM_CHECK(sources_.contains(id));  // valid until Sealed() or Cancel()
  return id;
}

Replicator::Source& Replicator::SourceOf(SourceId id) {
  const auto found = sources_.find(id);
  ROPETEAM_CHECK(found != sources_.end());
  return found->second;
}

OutgoingCopy& Replicator::CopyOf(Source* source, const CopyId& id) {
  const auto found = source->copies.find(id);
  ROPETEAM_CHECK(found != source->copies.end());
  ROPETEAM_CHECK(found->second.id() == id && found->second.state() != OutgoingCopy::State::kGone);
  return found->second;
}

void Replicator::Extend(SourceId id, std::vector<Extent> all_extents) {
  Source& source = SourceOf(id);
  const uint64_t chunks = ChunkCount(all_extents);
  ROPETEAM_CHECK(!source.chunks.sealed && !source.ending && chunks > source.crcs.size());
  source.extents = std::move(all_extents);
  source.crcs.resize(chunks);
  source.chunks.ready.resize(chunks);
  Advance(id);
}

void Replicator::Ready(SourceId id, uint32_t first, const std::vector<uint32_t>& crcs) {
  Source& source = SourceOf(id);
  ROPETEAM_CHECK(!source.chunks.sealed && !source.ending);
  ROPETEAM_CHECK(first <= source.crcs.size() && crcs.size() <= source.crcs.size() - first);
  for (size_t i = 0; i < crcs.size(); ++i) {
    ROPETEAM_CHECK(!source.chunks.ready[first + i]);  // filled once: its checksum never changes
    source.chunks.ready[first + i] = true;
    source.crcs[first + i] = crcs[i];
  }
  // Chunks put from device memory before had no checksum. Now they have.
  for (auto& [copy_id, copy] : source.copies) copy.ChecksumsKnown(first, static_cast<uint32_t>(crcs.size()));
  Advance(id);
}

bool Replicator::AddDevice(SourceId id, const SaveDirectInput& chunks) {
  Source& source = SourceOf(id);
  if (source.device_ended || chunks.count == 0 || parts_.context.config.encrypts()) return false;
  std::map<uint32_t, SaveDirectInput>& device = source.chunks.device;
  const auto next = device.lower_bound(chunks.first);
  if (next != device.end() && next->first - chunks.first < chunks.count) return false;
  if (source.chunks.FindDevice(chunks.first) != nullptr) return false;
  device.emplace_hint(next, chunks.first, chunks);
  Advance(id);
  return true;
}

void Replicator::EndDevice(SourceId id, std::function<void()> settled) {
  Source& source = SourceOf(id);
  CloseDevice(id, &source);
  source.settling.push_back(std::move(settled));
  Advance(id);
}

// Puts that the fabric already has go on. Queued ones are withdrawn, and their chunks are put from the arena.
void Replicator::CloseDevice(SourceId id, Source* source) {
  source->device_ended = true;
  source->chunks.device.clear();
  for (auto& [copy_id, copy] : source->copies) {
    Effects effects(this, id, source, &copy);
    copy.WithdrawDevicePuts(&effects);
  }
}

void Replicator::TellSettled(Source* source) {
  if (source->settling.empty()) return;
  ROPETEAM_CHECK(source->device_ended);
  for (const auto& [id, copy] : source->copies)
    if (copy.device_on_way() != 0) return;
  for (const auto& settled : std::exchange(source->settling, {})) settled();
}

void Replicator::Sealed(SourceId id) {
  Source& source = SourceOf(id);
  ROPETEAM_CHECK(!source.ending && source.ordered_target == kNoNode);
  CloseDevice(id, &source);
  const bool sealed = AddSealed(&source);
  ROPETEAM_CHECK(sealed);
  Advance(id);
}

bool Replicator::AddSealed(Source* source) {
  ROPETEAM_CHECK(!source->chunks.sealed && source->lease == 0);
  const SealedShard* sealed = parts_.context.store.Find(source->shard);
  if (sealed == nullptr || !sealed->bad.empty() || !parts_.context.Readable(*sealed)) return false;
  source->chunks.sealed = true;
  source->chunks.puts_wait = false;
  source->meta = sealed->meta;
  source->extents = sealed->extents;
  source->crcs = sealed->crcs;
  source->encryption = sealed->encryption;
  source->chunks.ready.assign(sealed->crcs.size(), true);
  Result<Store::LeaseToken> lease = parts_.context.store.Lease(source->shard);
  ROPETEAM_CHECK(lease.ok());
  source->lease = *lease;
  return true;
}

void Replicator::Cancel(SourceId id, std::function<void()> quiescent) {
  Source& source = SourceOf(id);
  ROPETEAM_CHECK(!source.chunks.sealed && !source.ending);
  CloseDevice(id, &source);
  source.ending = true;
  source.quiescent = std::move(quiescent);
  Advance(id);
}

void Replicator::Resume(const ShardId& shard) {
  const Store& store = parts_.context.store;
  const SealedShard* here = store.Find(shard);
  if (here == nullptr || here->role != Role::kOwn || here->committed ||
      shard.incarnation != store.incarnation_max())
    return;
  for (const auto& [id, running] : sources_)
    if (running.shard == shard && running.ordered_target == kNoNode && !running.ending) return;
  Source source;
  source.shard = shard;
  if (!AddSealed(&source)) return;  // it has bad chunks, and the end of their repair resumes it
  source.wanted = source.meta.replicas;
  Advance(Add(std::move(source)));
}

void Replicator::Order(const ShardId& shard, NodeId target) {
  if (target == parts_.context.config.self || !parts_.context.Contains(target)) return;
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
    if (!source.chunks.sealed || source.ending) continue;
    const bool released = context.store.Find(source.shard) == nullptr;
    const bool former = source.shard.incarnation < context.incarnation.number &&
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
  return &SourceOf(found->second);
}

void Replicator::Forget(Source* source, const CopyId& id) {
  const auto copy = source->copies.find(id);
  ROPETEAM_CHECK(copy != source->copies.end());
  // The caller may free the chunks, so nothing may read them any more.
  ROPETEAM_CHECK(copy->second.state() == OutgoingCopy::State::kGone && copy->second.on_way() == 0);
  const size_t known = by_copy_.erase(id);
  ROPETEAM_CHECK(known == 1);
  source->copies.erase(copy);
}

void Replicator::Advance(SourceId id) {
  const auto found = sources_.find(id);
  if (found == sources_.end()) return;
  Source& source = found->second;
  Context& context = parts_.context;

  std::erase_if(source.done, [&](NodeId node) { return !context.Contains(node); });
  // Before targets are chosen: a node that has left is replaced at once.
  for (auto& [copy_id, copy] : source.copies)
    if (copy.active() && !context.Contains(copy.target())) Drop(id, &source, &copy, "it left the view");
  // An ordered copy is not tried a second time. The leader chooses again after a failure.
  if (source.ordered_target == kNoNode)
    std::erase_if(source.avoid_until, [&](const auto& avoid) { return avoid.second <= context.now; });
  if (!source.ending && source.chunks.sealed && source.done.size() >= source.wanted) {
    const ShardId shard = source.shard;
    const bool own = source.ordered_target == kNoNode;
    source.ending = true;
    if (own) parts_.sessions.OnReplicated(shard);
  }
  if (source.ending) {
    for (auto& [copy_id, copy] : source.copies)
      if (copy.active()) Drop(id, &source, &copy, "no longer wanted");
  } else {
    ChooseTargets(id, &source);
  }
  AdvanceCopies(id, &source);
  TellSettled(&source);
  if (source.ending && source.copies.empty()) End(id);
}

void Replicator::AdvanceCopies(SourceId id, Source* source) {
  std::vector<CopyId> gone;
  for (auto& [copy_id, copy] : source->copies) {
    Effects effects(this, id, source, &copy);
    copy.Advance(parts_.context.now, source->chunks, &effects);
    if (copy.state() == OutgoingCopy::State::kGone) gone.push_back(copy_id);
  }
  for (const CopyId& copy_id : gone) Forget(source, copy_id);
}

void Replicator::End(SourceId id) {
  const auto found = sources_.find(id);
  ROPETEAM_CHECK(found != sources_.end());
  Source& source = found->second;
  ROPETEAM_CHECK(source.ending && source.copies.empty() && source.settling.empty());
  ROPETEAM_CHECK(source.chunks.sealed == (source.lease != 0));
  if (source.lease != 0) parts_.context.store.EndLease(source.lease);
  const std::function<void()> quiescent = std::move(source.quiescent);
  sources_.erase(found);
  if (quiescent) quiescent();
}

void Replicator::ChooseTargets(SourceId id, Source* source) {
  Context& context = parts_.context;
  std::set<NodeId> busy = source->done;
  size_t active = source->done.size();
  for (const auto& [copy_id, copy] : source->copies) {
    busy.insert(copy.target());
    if (copy.active()) ++active;
  }
  if (active >= source->wanted) return;

  std::vector<NodeId> candidates;
  if (source->ordered_target != kNoNode) {
    const NodeId target = source->ordered_target;
    if (!context.Contains(target) || context.unreachable.contains(target) || !source->avoid_until.empty()) {
      source->ending = true;  // the leader chooses again
      return;
    }
    candidates = {target};
  } else {
    const Placement::Holders holders = context.placement.HoldersOf(context.config.self, source->wanted);
    // The code below never skips more holders than these.
    const size_t looked_at =
        std::min(holders.size(),
                 source->wanted + busy.size() + source->avoid_until.size() + context.unreachable.size());
    for (size_t i = 0; i < looked_at; ++i) candidates.push_back(holders[i]);
  }
  for (const NodeId target : candidates) {
    if (active >= source->wanted) break;
    if (busy.contains(target) || source->avoid_until.contains(target)) continue;
    if (context.unreachable.contains(target)) continue;
    ROPETEAM_CHECK(target != context.config.self && context.Contains(target));
    const CopyId copy_id{context.config.self, next_copy_++};
    const bool fresh = by_copy_.emplace(copy_id, id).second;
    ROPETEAM_CHECK(fresh);  // a copy's number is never reused
    source->copies.try_emplace(copy_id, copy_id, target);
    ++active;
  }
  if (active < source->wanted && !source->warned) {
    source->warned = true;
    LOG_WARNING("%s has %zu of %u holders: the view has %zu members", source->shard.ToString().c_str(),
                active, source->wanted, context.view.members.size());
  }
}

uint64_t Replicator::StartPut(SourceId id, const Source& source, const OutgoingCopy& copy, uint32_t chunk,
                              const SaveDirectInput* device) {
  const Store& store = parts_.context.store;
  const uint64_t chunk_bytes = store.chunk_bytes();
  ROPETEAM_CHECK(chunk < source.crcs.size());
  StartTransfer transfer;
  transfer.peer = copy.target();
  if (device != nullptr) {
    ROPETEAM_CHECK(!source.device_ended && !source.chunks.sealed && !source.chunks.ready[chunk]);
    ROPETEAM_CHECK(device->first <= chunk && chunk - device->first < device->count);
    transfer.buffer = device->buffer;
    transfer.local_offset = device->offset + (chunk - device->first) * chunk_bytes;
  } else {
    ROPETEAM_CHECK(source.chunks.ready[chunk]);  // its bytes no longer change
    transfer.local_offset = store.chunk_offset(ChunkAt(source.extents, chunk));
  }
  transfer.remote_offset = copy.chunks_begin() + ChunkAt(copy.extents(), chunk) * chunk_bytes;
  transfer.length =
      source.chunks.sealed ? ChunkLength(source.meta.stream_bytes, chunk_bytes, chunk) : chunk_bytes;
  std::optional<Transfers::Plaintext> plaintext;
  if (Encrypts(source))
    plaintext = Transfers::Plaintext{source.shard, chunk, source.encryption.salt, source.crcs[chunk]};
  return parts_.transfers.Start(
      source.ordered_target == kNoNode ? Transfers::Priority::kSave : Transfers::Priority::kBackground,
      transfer,
      [this, id, copy_id = CopyId(copy.id()), chunk, begun = parts_.context.now,
       whole = !source.chunks.sealed](Code code, const EncryptedChunk* encrypted) {
        OnPut(id, copy_id, chunk, begun, whole, code, encrypted);
      },
      plaintext);
}

bool Replicator::Encrypts(const Source& source) const {
  return parts_.context.config.encrypts() && source.encryption.tags.empty();
}

void Replicator::OnPut(SourceId id, CopyId copy_id, uint32_t chunk, TimeUs begun, bool whole, Code code,
                       const EncryptedChunk* encrypted) {
  Source& source = SourceOf(id);  // a source and its copies outlive their outstanding puts
  OutgoingCopy& copy = CopyOf(&source, copy_id);
  Context& context = parts_.context;
  const bool from_device = copy.chunk(chunk) == OutgoingCopy::Chunk::kFromDevice;
  context.Note({.what = TraceEvent::What::kPut,
                .shard = source.shard,
                .first = chunk,
                .count = 1,
                .peer = copy.target(),
                .failed = code != Code::kOk},
               begun);
  // Every holder's copy has the same bytes: the plaintext, key and nonce are the same.
  bool differs = false;
  if (code == Code::kOk && encrypted != nullptr) {
    const auto [known, fresh] = source.encrypted.try_emplace(chunk, *encrypted);
    differs = !fresh && (known->second.crc != encrypted->crc || known->second.tag != encrypted->tag);
  }
  if (code == Code::kCorrupt && whole) {
    // This may be the last chunk, whose checksum covers less than a whole chunk. The length is known after the seal.
    copy.PutNotSent(chunk);
    source.chunks.ready[chunk] = source.chunks.sealed;
  } else if (code == Code::kCorrupt || differs) {
    copy.PutNotSent(chunk);
    if (copy.active()) Drop(id, &source, &copy, "a chunk here does not match its checksum");
    if (source.chunks.sealed) parts_.fetcher.Repair(source.shard, {chunk}, [](const Status&) {});
  } else if (code == Code::kOk) {
    copy.PutArrived(chunk, source.chunks.ready[chunk] || encrypted != nullptr);
    const uint64_t bytes = source.chunks.sealed
                               ? ChunkLength(source.meta.stream_bytes, context.store.chunk_bytes(), chunk)
                               : context.store.chunk_bytes();
    context.counters.replica_bytes_sent += bytes;
    context.CountTraffic(copy.target(), &PeerTraffic::sent, bytes, 1);
    context.counters_dirty = true;
  } else if (code == Code::kStale || (from_device && code == Code::kNotFound)) {
    copy.PutNotSent(chunk);  // no byte has left this node, so the holder's place can be reused
  } else {
    copy.PutFailed(chunk);
    const std::string why = std::string("a put failed: ") + CodeName(code);
    if (copy.active()) {
      // If device memory could not be read here, the peer is not suspected.
      if (!from_device || code != Code::kIo) context.out.suspicions.push_back({copy.target(), why});
      Drop(id, &source, &copy, why);
    }
  }
  // If one piece of device memory cannot be read here, the save's other pieces are not tried.
  if (from_device && (code == Code::kNotFound || code == Code::kIo)) CloseDevice(id, &source);
  Advance(id);
}

void Replicator::SendArrived(const Source& source, const OutgoingCopy& copy,
                             const std::vector<uint32_t>& chunks) {
  const uint64_t chunk_bytes = parts_.context.store.chunk_bytes();
  ReplicaArrived arrived{copy.id(), {}, {}};
  for (const uint32_t chunk : chunks) {
    ROPETEAM_CHECK(source.chunks.ready[chunk] || Encrypts(source));
    // The last chunk of a sealed stream may be short. The holder gets the length only with the seal.
    if (source.chunks.sealed && ChunkLength(source.meta.stream_bytes, chunk_bytes, chunk) != chunk_bytes)
      continue;
    arrived.chunks.push_back(chunk);
    arrived.crcs.push_back(Encrypts(source) ? source.encrypted.at(chunk).crc : source.crcs[chunk]);
  }
  if (!arrived.chunks.empty()) parts_.context.Send(copy.target(), arrived);
}

void Replicator::SendSeal(const Source& source, const OutgoingCopy& copy, uint32_t attempt) {
  const SealedShard* sealed = parts_.context.store.Leased(source.lease);
  ROPETEAM_CHECK(source.chunks.sealed && sealed != nullptr && sealed->meta == source.meta);
  EncryptedSeal seal{{copy.id(), attempt, source.meta, source.crcs, sealed->committed, copy.reservation()},
                     source.encryption};
  if (!parts_.context.config.encrypts()) return parts_.context.Send(copy.target(), seal.seal);
  // If the holder has the shard, no chunk needs to be encrypted here: the plaintext's checksums identify the shard.
  if (Encrypts(source) && source.encrypted.size() == source.crcs.size()) {
    seal.encryption.key = parts_.context.config.key();
    for (const auto& [chunk, encrypted] : source.encrypted) {
      seal.seal.crcs[chunk] = encrypted.crc;
      seal.encryption.tags.push_back(encrypted.tag);
    }
  }
  parts_.context.Send(copy.target(), seal);
}

void Replicator::Drop(SourceId id, Source* source, OutgoingCopy* copy, const std::string& why) {
  if (!source->ending) {
    ++parts_.context.local.copies_retried;
    LOG_INFO("copy of %s on %s dropped: %s", source->shard.ToString().c_str(),
             parts_.context.NameOf(copy->target()).c_str(), why.c_str());
  }
  Effects effects(this, id, source, copy);
  copy->Drop(&effects);
  source->avoid_until[copy->target()] = parts_.context.now + kAvoidUs;
}

void Replicator::OnGrant(NodeId from, const ReplicaGrant& grant) {
  SourceId id = 0;
  Source* source = FindSource(grant.copy, &id);
  if (source == nullptr) {
    // The attempt is over, and the holder must not keep chunks for it. This node does not remember whether a put of it
    // failed.
    if (grant.copy.source == parts_.context.config.self)
      parts_.context.Send(from, ReplicaAbort{grant.copy, true});
    return;
  }
  OutgoingCopy& copy = CopyOf(source, grant.copy);
  const bool asked =
      copy.state() == OutgoingCopy::State::kReserving || copy.state() == OutgoingCopy::State::kSending;
  if (copy.target() != from || !asked) return;
  if (grant.code != Code::kOk) {
    Drop(id, source, &copy, grant.message);
  } else if (grant.sealed_already) {
    copy.HolderHasIt();
  } else if (copy.reservation() != 0 && copy.reservation() != grant.reservation) {
    Drop(id, source, &copy, "the holder has reused what it had granted");
  } else {
    copy.Granted(grant.reservation, grant.chunks_begin, grant.extents);
  }
  Advance(id);
}

void Replicator::OnSealed(NodeId from, const ReplicaSealed& sealed) {
  SourceId id = 0;
  Source* source = FindSource(sealed.copy, &id);
  if (source == nullptr) return;
  OutgoingCopy& copy = CopyOf(source, sealed.copy);
  if (copy.target() != from || copy.state() != OutgoingCopy::State::kSealing ||
      sealed.attempt != copy.attempt())
    return;
  parts_.context.Note({.what = TraceEvent::What::kAck,
                       .shard = source->shard,
                       .peer = from,
                       .failed = sealed.code != Code::kOk});
  if (sealed.code == Code::kOk) {
    copy.Matched();
    Forget(source, CopyId(sealed.copy));
    const bool fresh = source->done.insert(from).second;
    ROPETEAM_CHECK(fresh && source->done.size() <= source->wanted);
  } else if (sealed.code != Code::kCorrupt || !PutBadAgain(*source, &copy, sealed.bad)) {
    Drop(id, source, &copy, sealed.message);
  }
  Advance(id);
}

// Returns false if the copy must be dropped.
bool Replicator::PutBadAgain(const Source& source, OutgoingCopy* copy, const std::vector<uint32_t>& bad) {
  std::vector<uint32_t> from_arena;
  const size_t again = copy->Mismatched(bad, &from_arena);
  if (again == 0) return false;
  ROPETEAM_CHECK(from_arena.size() <= again);
  parts_.context.counters.chunks_bad += again;
  parts_.context.local.chunks_put_again += again;
  LOG_WARNING("%zu chunks of %s did not match on %s, %zu of them put from device memory, putting them again",
              again, source.shard.ToString().c_str(), parts_.context.NameOf(copy->target()).c_str(),
              again - from_arena.size());
  // This node's own bytes may have changed since their checksum was computed.
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
    for (auto& [copy_id, copy] : source.copies) copy.RepeatNow();
  }
  for (const SourceId id : ids) Advance(id);
}

// A copy on an unreachable member is made on another node. A member that is reachable again is tried at once.
void Replicator::OnPeerLink(NodeId peer, bool up) {
  std::vector<SourceId> ids;
  for (auto& [id, source] : sources_) {
    ids.push_back(id);
    if (up && source.ordered_target == kNoNode) source.avoid_until.erase(peer);
    for (auto& [copy_id, copy] : source.copies)
      if (!up && copy.target() == peer && copy.active()) Drop(id, &source, &copy, "it is not reached");
  }
  for (const SourceId id : ids) Advance(id);
}

void Replicator::OnTimer() {
  const EngineConfig& config = parts_.context.config;
  std::vector<SourceId> ids;
  for (auto& [id, source] : sources_) {
    ids.push_back(id);
    if (source.begun + config.puts_wait_us <= parts_.context.now) source.chunks.puts_wait = false;
  }
  for (const SourceId id : ids) Advance(id);
}

TimeUs Replicator::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, source] : sources_) {
    for (const auto& [copy_id, copy] : source.copies) due = std::min(due, copy.NextSend());
    // Stays due until OnTimer() has handled it, however late OnTimer() is called.
    if (source.ending) continue;
    if (source.chunks.puts_wait) due = std::min(due, source.begun + parts_.context.config.puts_wait_us);
    for (const auto& [node, until] : source.avoid_until) due = std::min(due, until);
  }
  return due;
}

void Replicator::CheckInvariants() const {
  size_t copies = 0;
  for (const auto& [id, source] : sources_) {
    ROPETEAM_CHECK(source.crcs.size() == source.chunks.ready.size());
    ROPETEAM_CHECK(source.chunks.sealed == (source.lease != 0));
    ROPETEAM_CHECK(!source.ending || !source.copies.empty());  // otherwise it would have ended
    ROPETEAM_CHECK(!source.device_ended || source.chunks.device.empty());
    size_t active = source.done.size();
    std::set<NodeId> targets = source.done;
    for (const auto& [copy_id, copy] : source.copies) {
      copy.CheckInvariants();
      const auto by_copy = by_copy_.find(copy_id);
      ROPETEAM_CHECK(by_copy != by_copy_.end() && by_copy->second == id && copy.id() == copy_id);
      const bool fresh = targets.insert(copy.target()).second;
      ROPETEAM_CHECK(fresh);  // one copy of a shard per node
      active += copy.active() ? 1 : 0;
      ROPETEAM_CHECK(!source.ending || !copy.active());
    }
    ROPETEAM_CHECK(active <= source.wanted);
    copies += source.copies.size();
  }
  ROPETEAM_CHECK(copies == by_copy_.size());
}

}  // namespace ropeteam::engine
