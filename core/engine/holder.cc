// SPDX-License-Identifier: Apache-2.0
#include "core/engine/holder.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

Holder::Incoming* Holder::Find(NodeId from, const CopyId& id) {
  const auto found = incoming_.find(id);
  if (found == incoming_.end() || id.source != from) return nullptr;
  found->second.heard = parts_.context.now;
  CheckIncoming(found->second);
  return &found->second;
}

void Holder::CheckIncoming(const Incoming& incoming) {
  ROPETEAM_CHECK(!incoming.extents.empty() && incoming.serial != 0);
  ROPETEAM_CHECK(ChunkCount(incoming.extents) == incoming.chunks.size());
  ROPETEAM_CHECK(incoming.checked_crcs.size() == incoming.chunks.size());
  ROPETEAM_CHECK(incoming.crcs.size() <= incoming.chunks.size());
  ROPETEAM_CHECK(incoming.sealing == !incoming.crcs.empty());
  ROPETEAM_CHECK(incoming.sealing || (incoming.attempt == 0 && !incoming.attempt_checked));
}

void Holder::OnReserve(NodeId from, const ReplicaReserve& reserve) {
  Context& context = parts_.context;
  ReplicaGrant grant;
  grant.copy = reserve.copy;
  const auto refuse = [&](Status status) {
    grant.code = status.code();
    grant.message = status.message();
    context.Send(from, grant);
  };
  if (reserve.copy.source != from)
    return refuse(Error(Code::kInvalidArgument, "the copy's number names another source"));
  if (reserve.chunk_bytes != context.store.chunk_bytes())
    return refuse(Error(Code::kInvalidArgument, "chunks of %llu bytes offered, this arena has chunks of %llu",
                        static_cast<unsigned long long>(reserve.chunk_bytes),
                        static_cast<unsigned long long>(context.store.chunk_bytes())));
  if (reserve.chunks == 0 || reserve.chunks > kChunksPerShardMax)
    return refuse(Error(Code::kInvalidArgument, "%llu chunks asked for, limit %llu",
                        static_cast<unsigned long long>(reserve.chunks),
                        static_cast<unsigned long long>(kChunksPerShardMax)));
  if (!context.HasKey(reserve.key))
    return refuse(Error(Code::kUnavailable, "%s", context.KeyAbsent(reserve.key).c_str()));
  if (const SealedShard* sealed = context.store.Find(reserve.shard);
      sealed != nullptr && context.Readable(*sealed)) {
    if (!sealed->bad.empty()) return refuse(Error(Code::kUnavailable, "the copy here is being repaired"));
    grant.sealed_already = true;
    context.Send(from, grant);
    return;
  }
  Incoming* incoming = Find(from, reserve.copy);
  if (incoming != nullptr && incoming->shard != reserve.shard)
    return refuse(Error(Code::kInvalidArgument, "this copy was reserved for %s, not for %s",
                        incoming->shard.ToString().c_str(), reserve.shard.ToString().c_str()));
  if (incoming == nullptr) {
    for (const auto& [id, other] : incoming_)
      if (other.shard == reserve.shard)
        return refuse(Error(Code::kAlreadyExists, "another copy of this shard is on its way here"));
  }
  if (incoming == nullptr && context.leaving)
    return refuse(Error(Code::kUnavailable, "this node is leaving the job"));
  const uint64_t have = incoming == nullptr ? 0 : ChunkCount(incoming->extents);
  if (reserve.chunks > have) {
    Result<std::vector<Extent>> extents = parts_.memory.Allocate(reserve.chunks - have);
    if (!extents.ok()) {
      if (reserve.shard.incarnation == context.incarnation.number)
        parts_.memory.OnReplicaRefused(reserve.chunks - have);
      return refuse(extents.status());
    }
    context.store.AdmitPuts(*extents);
    if (incoming == nullptr) {
      incoming = &incoming_[reserve.copy];
      incoming->id = reserve.copy;
      incoming->serial = next_serial_++;
      incoming->shard = reserve.shard;
      incoming->heard = context.now;
    }
    incoming->extents.insert(incoming->extents.end(), extents->begin(), extents->end());
    incoming->chunks.resize(reserve.chunks, Chunk::kUnknown);
    incoming->checked_crcs.resize(reserve.chunks);
    CheckIncoming(*incoming);
  }
  grant.chunks_begin = kExportedChunksBegin;
  grant.extents = incoming->extents;
  grant.reservation = incoming->serial;
  context.Send(from, grant);
}

void Holder::OnArrived(NodeId from, const ReplicaArrived& arrived) {
  Incoming* incoming = Find(from, arrived.copy);
  if (incoming == nullptr || incoming->sealing || arrived.chunks.size() != arrived.crcs.size()) return;
  for (const uint32_t chunk : arrived.chunks)
    if (chunk >= incoming->chunks.size()) return;
  StartChecks(incoming, arrived.chunks, arrived.crcs,
              incoming->chunks.size() * parts_.context.store.chunk_bytes());
}

void Holder::StartChecks(Incoming* incoming, const std::vector<uint32_t>& chunks,
                         const std::vector<uint32_t>& crcs, uint64_t stream_bytes) {
  ROPETEAM_CHECK(chunks.size() == crcs.size());
  std::vector<uint32_t> started;
  std::vector<StartCheck::Range> ranges;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const uint32_t chunk = chunks[i];
    ROPETEAM_CHECK(chunk < incoming->chunks.size());
    if (incoming->chunks[chunk] != Chunk::kUnknown) continue;
    incoming->chunks[chunk] = Chunk::kChecking;
    incoming->checked_crcs[chunk] = crcs[i];
    started.push_back(chunk);
    ranges.push_back(RangeOf(parts_.context.store, incoming->extents, stream_bytes, chunk, crcs[i]));
  }
  if (ranges.empty()) return;
  parts_.transfers.Check(std::move(ranges),
                         [this, id = CopyId(incoming->id), serial = incoming->serial, started,
                          begun = parts_.context.now](const std::vector<uint32_t>& bad) {
                           std::vector<uint32_t> bad_chunks;
                           for (const uint32_t index : bad) bad_chunks.push_back(started[index]);
                           OnChecked(id, serial, started, begun, bad_chunks);
                         });
}

void Holder::OnChecked(const CopyId& id, uint64_t serial, const std::vector<uint32_t>& chunks, TimeUs begun,
                       const std::vector<uint32_t>& bad) {
  const auto found = incoming_.find(id);
  if (found == incoming_.end() || found->second.serial != serial) return;  // aborted meanwhile
  Incoming& incoming = found->second;
  CheckIncoming(incoming);
  for (const uint32_t chunk : chunks) {
    ROPETEAM_CHECK(chunk < incoming.chunks.size() && incoming.chunks[chunk] == Chunk::kChecking);
    incoming.chunks[chunk] = Chunk::kGood;
    parts_.context.Note({.what = TraceEvent::What::kCheck,
                         .shard = incoming.shard,
                         .first = chunk,
                         .count = 1,
                         .peer = id.source,
                         .failed = std::find(bad.begin(), bad.end(), chunk) != bad.end()},
                        begun);
  }
  for (const uint32_t chunk : bad) {
    ROPETEAM_CHECK(chunk < incoming.chunks.size() && incoming.chunks[chunk] == Chunk::kGood);
    incoming.chunks[chunk] = Chunk::kUnknown;
  }
  if (incoming.sealing) {
    CheckAttempt(&incoming);
  } else {
    parts_.context.counters.chunks_bad += bad.size();
  }
}

void Holder::Release(Incoming* incoming, bool quarantine) {
  CheckIncoming(*incoming);
  const CopyId id = incoming->id;
  if (quarantine) {
    parts_.memory.Quarantine(std::move(incoming->extents), id.source);
  } else {
    parts_.context.store.Free(incoming->extents);
  }
  const size_t known = incoming_.erase(id);
  ROPETEAM_CHECK(known == 1);
}

void Holder::OnSeal(NodeId from, const ReplicaSeal& seal, const Encryption& encryption) {
  Incoming* incoming = Find(from, seal.copy);
  if (incoming == nullptr || incoming->serial != seal.reservation)
    return AnswerUnknownSeal(from, seal, encryption);
  Context& context = parts_.context;
  if (incoming->sealing && seal.attempt == incoming->attempt) {
    if (incoming->attempt_checked) CheckAttempt(incoming);  // our answer was lost
    return;
  }
  const uint64_t chunks = ChunksFor(seal.meta.stream_bytes, context.store.chunk_bytes());
  if (seal.attempt < incoming->attempt) return;
  if (seal.meta.id != incoming->shard || seal.meta.chunk_bytes != context.store.chunk_bytes() ||
      chunks != seal.crcs.size() || chunks == 0 || chunks > incoming->chunks.size() ||
      encryption.tags.size() != (context.config.encrypts() ? chunks : 0) ||
      (encryption.key != kPlaintext) != context.config.encrypts() || !context.HasKey(encryption.key) ||
      seal.meta.manifest_offset > seal.meta.stream_bytes) {
    context.Send(from, ReplicaSealed{seal.copy,
                                     seal.attempt,
                                     Code::kInvalidArgument,
                                     "the seal does not fit the copy that was reserved",
                                     {}});
    return;
  }
  incoming->sealing = true;
  incoming->attempt_checked = false;
  incoming->attempt = seal.attempt;
  incoming->meta = seal.meta;
  incoming->crcs = seal.crcs;
  incoming->encryption = encryption;
  incoming->committed = seal.committed;
  CheckIncoming(*incoming);
  std::vector<uint32_t> wanted;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    // A check against a checksum other than the seal's does not count.
    if (incoming->chunks[chunk] == Chunk::kGood && incoming->checked_crcs[chunk] != seal.crcs[chunk])
      incoming->chunks[chunk] = Chunk::kUnknown;
    if (incoming->chunks[chunk] == Chunk::kUnknown) wanted.push_back(chunk);
  }
  std::vector<uint32_t> crcs;
  for (const uint32_t chunk : wanted) crcs.push_back(seal.crcs[chunk]);
  if (wanted.empty()) {
    CheckAttempt(incoming);
  } else {
    StartChecks(incoming, wanted, crcs, seal.meta.stream_bytes);
  }
}

void Holder::CheckAttempt(Incoming* incoming) {
  Context& context = parts_.context;
  CheckIncoming(*incoming);
  ROPETEAM_CHECK(incoming->sealing);
  std::vector<uint32_t> bad;
  for (uint32_t chunk = 0; chunk < incoming->crcs.size(); ++chunk) {
    if (incoming->chunks[chunk] == Chunk::kChecking) return;
    if (incoming->chunks[chunk] != Chunk::kGood || incoming->checked_crcs[chunk] != incoming->crcs[chunk])
      bad.push_back(chunk);
  }
  ReplicaSealed answer{incoming->id, incoming->attempt, Code::kOk, {}, {}};
  const NodeId source = incoming->id.source;
  if (!bad.empty()) {
    if (!incoming->attempt_checked) context.counters.chunks_bad += bad.size();
    incoming->attempt_checked = true;
    for (const uint32_t chunk : bad) incoming->chunks[chunk] = Chunk::kUnknown;
    answer.code = Code::kCorrupt;
    answer.message = std::to_string(bad.size()) + " chunks do not match their checksums";
    answer.bad = std::move(bad);
    context.Send(source, answer);
    return;
  }
  // If there is no lease now, the source asks again later.
  incoming->attempt_checked = true;
  if (!context.has_lease()) return;
  const ShardMeta meta = incoming->meta;
  ROPETEAM_CHECK(meta.id == incoming->shard);
  const Status sealed =
      context.Seal(meta, Role::kReplica, incoming->extents, incoming->crcs, incoming->encryption);
  if (!sealed.ok()) {
    // The shard was sealed by a fetch meanwhile. That copy counts, and these chunks are not needed.
    context.store.Free(incoming->extents);
    const SealedShard* other = context.store.Find(meta.id);
    if (other == nullptr || other->meta != meta || !other->bad.empty() || !context.Readable(*other) ||
        PlainCrcs(other->encryption, other->crcs) != PlainCrcs(incoming->encryption, incoming->crcs)) {
      answer.code = sealed.code();
      answer.message = sealed.message();
    }
  } else {
    context.counters.replica_bytes_held += meta.stream_bytes;
    context.CountTraffic(source, &PeerTraffic::held, meta.stream_bytes, incoming->crcs.size());
    context.Note({.what = TraceEvent::What::kHeld, .shard = meta.id, .peer = source});
  }
  if (answer.code == Code::kOk) Count(meta.id, incoming->committed);
  const size_t known = incoming_.erase(answer.copy);
  ROPETEAM_CHECK(known == 1);
  context.inventory_dirty = true;
  context.Send(source, answer);
}

void Holder::Count(const ShardId& id, bool committed) {
  Store& store = parts_.context.store;
  // An acknowledgement may make other nodes release older steps, so only a node with a lease may send it.
  ROPETEAM_CHECK(parts_.context.has_lease());
  const SealedShard* shard = store.Find(id);
  ROPETEAM_CHECK(shard != nullptr && shard->bad.empty());
  if (!Counts(shard->role)) store.SetRole(id, Role::kReplica);
  if (committed && !shard->committed) store.SetCommitted(id);
  ROPETEAM_CHECK(Counts(store.Find(id)->role));
  parts_.context.inventory_dirty = true;
}

void Holder::AnswerUnknownSeal(NodeId from, const ReplicaSeal& seal, const Encryption& encryption) {
  if (!parts_.context.has_lease()) return;  // the source asks again
  // Three cases: the copy was sealed before and our answer was lost; the shard was already here; or this instance is
  // new and has no record of the copy.
  ReplicaSealed answer{seal.copy, seal.attempt, Code::kOk, {}, {}};
  const SealedShard* sealed = parts_.context.store.Find(seal.meta.id);
  if (sealed == nullptr || !parts_.context.Readable(*sealed)) {
    answer.code = Code::kNotFound;
    answer.message = "no such copy here";
  } else if (PlainCrcs(sealed->encryption, sealed->crcs) != PlainCrcs(encryption, seal.crcs) ||
             sealed->meta != seal.meta) {
    answer.code = Code::kAlreadyExists;
    answer.message = "another shard of the same name is sealed here";
  } else if (!sealed->bad.empty()) {
    answer.code = Code::kUnavailable;
    answer.message = "the copy here is being repaired";
  } else {
    Count(seal.meta.id, seal.committed);
  }
  parts_.context.Send(from, answer);
}

void Holder::OnAbort(NodeId from, const ReplicaAbort& abort) {
  Incoming* incoming = Find(from, abort.copy);
  if (incoming != nullptr) Release(incoming, abort.failed);
}

void Holder::OnFetchOpen(NodeId from, const FetchOpen& open) {
  Context& context = parts_.context;
  FetchGrant grant;
  grant.fetch = open.fetch;
  const auto key = std::make_pair(from, open.fetch);
  auto reading = reading_.find(key);
  if (reading == reading_.end() && context.config.encrypts()) {
    const SealedShard* here = context.store.Find(open.shard);
    if (here != nullptr && !here->encrypted()) return context.Send(from, EncryptedGrant{grant, {}});
  }
  if (reading == reading_.end()) {
    Result<Store::LeaseToken> lease = context.store.Lease(open.shard);
    if (lease.ok()) {
      reading = reading_.emplace(key, Reading{*lease, context.now}).first;
    } else {
      grant.code = lease.status().code();
      grant.message = lease.status().message();
    }
  }
  if (reading != reading_.end()) {
    reading->second.heard = context.now;
    const SealedShard* shard = context.store.Leased(reading->second.lease);
    ROPETEAM_CHECK(shard != nullptr && ChunkCount(shard->extents) == shard->crcs.size());
    grant.meta = shard->meta;
    grant.crcs = shard->crcs;
    grant.committed = shard->committed;
    grant.chunks_begin = kExportedChunksBegin;
    grant.extents = shard->extents;
    if (context.config.encrypts()) return context.Send(from, EncryptedGrant{grant, shard->encryption});
  }
  context.Send(from, grant);
}

void Holder::OnEncryptCopy(NodeId from, const EncryptCopy& encrypt) {
  const FetchOpen& open = encrypt.open;
  if (parts_.converter.running(open.shard)) return;  // the fetcher asks again
  const std::vector<KeyId>& ours = parts_.context.config.keys;
  const auto key = std::find_first_of(ours.begin(), ours.end(), encrypt.keys.begin(), encrypt.keys.end());
  const auto done = [this, from, open](const Status& status) {
    if (status.ok()) return OnFetchOpen(from, open);
    FetchGrant refused;
    refused.fetch = open.fetch;
    refused.code = status.code();
    refused.message = status.message();
    parts_.context.Send(from, refused);
  };
  if (key == ours.end())
    return done(
        Error(Code::kUnavailable, "it has none of the keys of %s", parts_.context.NameOf(from).c_str()));
  // Its repair may need the fetcher's own copy. Then each would wait for the other, though a third node has a good one.
  if (const SealedShard* copy = parts_.context.store.Find(open.shard); copy != nullptr && !copy->bad.empty())
    return done(Error(Code::kUnavailable, "the copy here is being repaired"));
  parts_.converter.Convert(open.shard, *key, [this, from, open, key = *key, done](const Status& status) {
    // The fetcher reads nothing of a copy that it cannot decrypt.
    const auto reading = reading_.find(std::make_pair(from, open.fetch));
    if (reading != reading_.end() &&
        parts_.context.store.Leased(reading->second.lease)->encryption.key != key)
      OnFetchClose(from, FetchClose{open.fetch});
    done(status);
  });
}

void Holder::OnFetchClose(NodeId from, const FetchClose& close) {
  const auto reading = reading_.find(std::make_pair(from, close.fetch));
  if (reading == reading_.end()) return;
  parts_.context.store.EndLease(reading->second.lease);
  reading_.erase(reading);
}

void Holder::OnBadCopy(NodeId from, const BadCopy& bad) {
  const SealedShard* shard = parts_.context.store.Find(bad.shard);
  if (shard == nullptr) return;
  for (const uint32_t chunk : bad.chunks)
    if (chunk >= shard->crcs.size()) return;
  // A chunk known to be bad is already being repaired, or could not be repaired. Without this check, two nodes with the
  // same bad chunk would read it from each other and report it for ever. The next pass of the scrub tries again.
  if (std::all_of(bad.chunks.begin(), bad.chunks.end(), [&](uint32_t chunk) {
        return std::binary_search(shard->bad.begin(), shard->bad.end(), chunk);
      }))
    return;
  LOG_WARNING("%s reports %zu bad chunks in this node's copy of %s", parts_.context.NameOf(from).c_str(),
              bad.chunks.size(), bad.shard.ToString().c_str());
  parts_.fetcher.Repair(bad.shard, bad.chunks, [](const Status&) {});
}

void Holder::OnVerifyOrder(NodeId from, const VerifyOrder& order) {
  if (!verifying_.emplace(from, order.number).second) return;  // a repeat
  Context& context = parts_.context;
  auto result = std::make_shared<VerifyResult>();
  auto waiting = std::make_shared<size_t>(0);
  result->number = order.number;
  const auto finish = [this, from, result] {
    verifying_.erase({from, result->number});
    parts_.context.Send(from, *result);
  };
  for (const auto& [id, shard] : context.store.shards()) {
    if (StepOf(id) != order.step) continue;
    VerifiedCopy copy{context.config.node,     id, shard->role, shard->crcs.size(), {}, shard->encryption.key,
                      context.Readable(*shard)};
    std::vector<StartCheck::Range> ranges;
    for (uint32_t chunk = 0; chunk < shard->crcs.size(); ++chunk)
      ranges.push_back(
          RangeOf(context.store, shard->extents, shard->meta.stream_bytes, chunk, shard->crcs[chunk]));
    result->copies.push_back(copy);
    ++*waiting;
    // The lease keeps the chunks in place while they are read.
    Result<Store::LeaseToken> lease = context.store.Lease(id);
    ROPETEAM_CHECK(lease.ok());
    const size_t index = result->copies.size() - 1;
    parts_.transfers.Check(std::move(ranges), [this, id = ShardId(id), lease = *lease, result, waiting, index,
                                               finish](const std::vector<uint32_t>& bad) {
      ROPETEAM_CHECK(index < result->copies.size() && *waiting > 0);
      result->copies[index].bad = bad;
      parts_.context.store.EndLease(lease);
      if (!bad.empty()) parts_.fetcher.Repair(id, bad, [](const Status&) {});
      if (--*waiting == 0) finish();
    });
  }
  if (result->copies.empty()) finish();
}

void Holder::OnView() {
  Context& context = parts_.context;
  for (auto it = incoming_.begin(); it != incoming_.end();) {
    Incoming* incoming = &(it++)->second;
    if (!context.Contains(incoming->id.source)) Release(incoming, true);
  }
  std::erase_if(reading_, [&](const auto& reading) {
    if (context.Contains(reading.first.first)) return false;
    context.store.EndLease(reading.second.lease);
    return true;
  });
}

void Holder::OnTimer() {
  for (auto& [id, incoming] : incoming_) {
    if (incoming.heard + kSilenceUs > parts_.context.now) continue;
    incoming.heard = parts_.context.now;
    parts_.context.Send(id.source, CopyQuery{id});
  }
  for (auto& [key, reading] : reading_) {
    if (reading.heard + kSilenceUs > parts_.context.now) continue;
    reading.heard = parts_.context.now;
    // The fetcher answers a grant for a finished fetch with FetchClose. So a lost FetchClose does not keep chunks for
    // ever.
    const SealedShard* shard = parts_.context.store.Leased(reading.lease);
    ROPETEAM_CHECK(shard != nullptr);
    OnFetchOpen(key.first, FetchOpen{key.second, {shard->meta.id}});
  }
}

TimeUs Holder::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, incoming] : incoming_) due = std::min(due, incoming.heard + kSilenceUs);
  for (const auto& [key, reading] : reading_) due = std::min(due, reading.heard + kSilenceUs);
  return due;
}

uint64_t Holder::granted_chunks() const {
  uint64_t chunks = 0;
  for (const auto& [id, incoming] : incoming_) {
    CheckIncoming(incoming);
    chunks += ChunkCount(incoming.extents);
  }
  return chunks;
}

}  // namespace ropeteam::engine
