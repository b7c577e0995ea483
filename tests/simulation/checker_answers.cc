// SPDX-License-Identifier: Apache-2.0
//
// Checks what engines answer to ranks, and which memory may be used.
#include <algorithm>
#include <cinttypes>

#include "core/base/bytes.h"
#include "core/base/checksum.h"
#include "core/engine/messages.h"
#include "tests/simulation/checker.h"

namespace ropeteam::simulation {

void Checker::OnAdmitted(const Session& session, Incarnation incarnation,
                         const std::map<SessionId, Session>& others) {
  if (incarnation == 0) return Fail("rank %u was admitted to no incarnation", session.rank);
  if (!options_.job.incarnation_tokens || options_.same_token_again())
    return;  // CheckCommitted() finds mixed incarnations by their shards
  for (const auto& [id, other] : others)
    if (other.open_at_engine && other.incarnation == incarnation && other.launch != session.launch)
      return Fail("rank %u of launch %" PRIu64 " and rank %u of launch %" PRIu64
                  " are both in incarnation %" PRIu64,
                  session.rank, session.launch, other.rank, other.launch, incarnation);
  for (auto at = shards_.lower_bound({incarnation, 0, 0}); at != shards_.end(); ++at) {
    if (at->first.incarnation != incarnation) break;
    if (at->second.sealed && at->second.launch != session.launch)
      return Fail("rank %u of launch %" PRIu64 " is in incarnation %" PRIu64 ", in which launch %" PRIu64
                  " has saved",
                  session.rank, session.launch, incarnation, at->second.launch);
  }
}

// The number means the step of this incarnation, or of a former one.
void Checker::OnDropInput(const Session& session, Step step) {
  const ShardId own{session.incarnation, step, session.rank};
  drops_asked_.insert(StepOf(own));
  if (hosts_[session.host]->store->Find(own) != nullptr) drops_of_saved_.insert(StepOf(own));
  for (const auto& [id, shard] : shards_)
    if (id.step == step) drops_asked_.insert(StepOf(id));
}

void Checker::OnStepDropped(const Host& host, const Session& session, Step step) {
  ++statistics_.dropped;
  const StepId id{session.incarnation, step};
  // Otherwise a step of a former incarnation was meant. Two coordinators may give two views the same epoch.
  if (!drops_of_saved_.contains(id) || options_.faults.two_coordinators_max_us != 0) return;
  for (const auto& other : hosts_) {
    // A node with another view follows another leader, or none yet.
    if (!other->daemon_runs() || other->view.epoch != host.view.epoch || !host.view.Contains(other->id))
      continue;
    for (const auto& [held, shard] : other->store->shards())
      if (StepOf(held) == id)
        return Fail("%s was dropped, and host %zu has %s", id.ToString().c_str(), other->index,
                    held.ToString().c_str());
  }
  // Nodes that are away may come back to another leader with a complete step (docs/save-and-commit.md).
  const bool elsewhere = Covered(id, [&](const Place& place, const Shard&, const Copy& copy, uint32_t) {
    return copy.fate == Fate::kPresent && !host.view.Contains(hosts_[place.host]->id);
  });
  if (!Committed(id) && !elsewhere) never_committed_.insert(id);
}

void Checker::OnViewAnswer(const Host& host, const Session& session, const Pending& request,
                           const AnswerView& view) {
  ++statistics_.views;
  const ShardId& id = view.meta.id;
  const Shard* shard = Find(id);
  if (shard == nullptr) return Fail("a view of %s, which nobody saved", id.ToString().c_str());
  if (id.step != request.step || id.rank != request.rank)
    return Fail("a view of %s for step %" PRIu64 " rank %u", id.ToString().c_str(), request.step,
                request.rank);
  if (request.kind == RequestKind::kRangesOpen && view.extents.empty() && view.crcs.empty()) {
    if (view.meta.stream_bytes != shard->stream_bytes)
      Fail("a partial view of %s with another size than it was saved with", id.ToString().c_str());
    return;
  }
  if (view.crcs != shard->crcs || view.meta.stream_bytes != shard->stream_bytes)
    return Fail("a view of %s with other checksums or another size than it was saved with",
                id.ToString().c_str());
  if (ChunkCount(view.extents) < shard->crcs.size())
    return Fail("a view of %s with %" PRIu64 " chunks of %zu", id.ToString().c_str(),
                ChunkCount(view.extents), shard->crcs.size());
  views_[{session.id, view.view}] = {host.index, id, view.extents};
}

void Checker::OnViewBytes(const Session& session, ViewId view, const std::vector<uint32_t>& bad) {
  const auto at = views_.find({session.id, view});
  if (at == views_.end()) return;
  const Shard* shard = Find(at->second.shard);
  for (const uint32_t chunk : bad)
    if (!shard->flips.contains({PlaceOf(*hosts_[session.host]), chunk}))
      return Fail("host %zu: chunk %u of an open view of %s is wrong, and no bit of it was flipped",
                  session.host, chunk, at->second.shard.ToString().c_str());
}

void Checker::OnRanges(const Session& session, const ShardId& id, const std::vector<PackedPart>& parts,
                       const std::vector<std::string>& packed) {
  ++statistics_.ranges;
  const Shard* shard = Find(id);
  ContentShape shape = options_.job.content;
  shape.chunk_bytes = options_.chunk_bytes;
  const Content content = MakeContent(shape, shard->launch, id.step, id.rank);
  if (content.crcs != shard->crcs) return;  // a story made its own content
  for (size_t i = 0; i < parts.size(); ++i) {
    std::string expected;
    for (const ChunkPiece& piece : parts[i].pieces)
      for (uint32_t run = 0; run < piece.count; ++run)
        expected.append(content.stream, piece.chunk * options_.chunk_bytes + piece.begin + run * piece.stride,
                        piece.length);
    if (packed[i] != expected)
      return Fail("host %zu rank %u read other bytes of %s by ranges than were saved", session.host,
                  session.rank, id.ToString().c_str());
  }
}

void Checker::OnViewClosed(const Session& session, ViewId view) { views_.erase({session.id, view}); }

void Checker::OnAnswer(const Host& host, const Session& session, const Pending& request,
                       const Answer& answer) {
  if (const auto* grant = std::get_if<AnswerGrant>(&answer.body))
    return OnGrant(host, session, request, *grant);
  if (const auto* view = std::get_if<AnswerView>(&answer.body))
    return OnViewAnswer(host, session, request, *view);
  if (const auto* latest = std::get_if<AnswerLatest>(&answer.body);
      latest != nullptr && request.kind == RequestKind::kLatestPersisted) {
    if (!storage_.Has(latest->step) && !storage_.Pruned(latest->step))
      Fail("latest persisted %s is not on storage", latest->step.ToString().c_str());
    if (WorldOf(latest->step) != latest->world_size)
      Fail("latest persisted %s has a world of %u, not %u", latest->step.ToString().c_str(),
           WorldOf(latest->step), latest->world_size);
    return;
  }
  if (const auto* latest = std::get_if<AnswerLatest>(&answer.body))
    return OnLatestAnswer(host, session, request, latest->step, latest->world_size);
  const auto* status = std::get_if<AnswerStatus>(&answer.body);
  if (status == nullptr) return;
  const Code code = status->status.code();
  const ShardId id{session.incarnation, request.step, session.rank};
  if (code == Code::kInternal)
    return Fail("host %zu answered %s: %s", host.index, RequestName(request.kind),
                status->status.ToString().c_str());
  if (code == Code::kStale) ++statistics_.refused_as_stale;
  if (request.kind == RequestKind::kSetPolicy) OnPolicyAnswer(host, session, request.policy, status->status);
  if (request.kind == RequestKind::kLatest && code == Code::kNotFound)
    OnLatestAnswer(host, session, request, {}, 0);
  const bool latest_waits =
      request.kind == RequestKind::kLatest && code != Code::kOk && code != Code::kNotFound;
  if (latest_waits && status->status.message().empty())
    Fail("host %zu does not say why `latest` waits: %s", host.index, CodeName(code));
  const bool may_be_lost = status->status.message().find("`ropeteam quarantine") != std::string::npos;
  if (latest_waits || may_be_lost) {
    why_it_waits_ = status->status.ToString();
    waits_at_ = scheduler_.now();
  }
  if (request.kind == RequestKind::kSaveAbort && code == Code::kOk) ReleaseGrant(session, request.save);
  if (request.kind == RequestKind::kWait && code == Code::kAborted &&
      status->status.message().find("do not agree") != std::string::npos) {
    ++statistics_.disagreed;
    if (!Disagrees(StepOf(id)))
      return Fail("host %zu said of %s that the ranks do not agree", host.index, id.ToString().c_str());
  }
  if (request.kind == RequestKind::kWait && code == Code::kAborted &&
      status->status.message().find("was dropped by") != std::string::npos &&
      !drops_asked_.contains(StepOf(id)))
    return Fail("host %zu said of %s that it was dropped", host.index, id.ToString().c_str());
  if (code != Code::kOk) return;
  if (request.kind == RequestKind::kDrop) return OnStepDropped(host, session, request.step);
  if (request.kind == RequestKind::kSaveCommit) {
    if (host.store->Find(id) == nullptr && !Superseded(StepOf(id)))
      return Fail("host %zu said LOCAL of %s, which is not in its store", host.index, id.ToString().c_str());
    if (session.incarnation < host.engine->incarnation())
      return Fail("host %zu sealed %s although it knows of incarnation %" PRIu64, host.index,
                  id.ToString().c_str(), host.engine->incarnation());
  }
  if (request.kind == RequestKind::kWait) {
    if (Find(id) == nullptr)
      return Fail("host %zu ended a wait for %s, which is not sealed", host.index, id.ToString().c_str());
    if (request.level == Level::kPersisted) CheckPersisted(host, StepOf(id));
    if (request.level >= Level::kReplicated && request.level < Level::kPersisted)
      CheckReplicated(host, id, "REPLICATED");
    if (request.level >= Level::kCommitted && !Committed(StepOf(id)))
      return Fail("host %zu ended a wait for COMMITTED of %s, which nobody has judged so", host.index,
                  id.ToString().c_str());
  }
  if (request.kind == RequestKind::kViewRepair) {
    ++statistics_.repairs;
    const auto at = views_.find({session.id, request.view});
    if (at == views_.end()) return;
    const Shard* shard = Find(at->second.shard);
    for (uint32_t i = 0; i < shard->crcs.size(); ++i)
      if (!ChunkRight(host, at->second.extents, {}, *shard, i) && !shard->flips.contains({PlaceOf(host), i}))
        return Fail("host %zu said that %s is repaired, but chunk %u is wrong", host.index,
                    at->second.shard.ToString().c_str(), i);
  }
}

void Checker::OnRefusedForSpace(const Host& host, const Status& status, uint64_t free_before,
                                uint64_t dropped_before) {
  ++statistics_.refused_for_space;
  if (host.store->chunks_free() < free_before)
    return Fail("host %zu refused a save for want of memory and has %" PRIu64 " chunks free, %" PRIu64
                " before",
                host.index, host.store->chunks_free(), free_before);
  // Judged after the input, because the input may also have brought the commit that superseded the copy.
  if (std::any_of(dropped_.begin() + static_cast<std::ptrdiff_t>(dropped_before), dropped_.end(),
                  [this](const StepId& step) { return !Superseded(step); }))
    return Fail("host %zu refused a save for want of memory and dropped a copy that might be of use",
                host.index);
  const std::string& message = status.message();
  if (std::count_if(message.begin(), message.end(), [](char c) { return c >= '0' && c <= '9'; }) < 3)
    return Fail("host %zu refused a save without saying how much is needed, free and the limit: \"%s\"",
                host.index, message.c_str());
}

void Checker::OnMessage(const Host& host, bool has_lease, const SendMessage& message) {
  Envelope envelope;
  if (!Decode(message.envelope, envelope)) return Fail("host %zu sends what cannot be read", host.index);
  LeaderState state;
  if (has_lease) {
    if (envelope.kind == Kind::kLeaderState &&
        Decode(envelope.payload, state, host.engine->view().protocol()) && state.incarnation.has_pin())
      OnChosen(host, state.incarnation.number, state.incarnation.pin);
    return;
  }
  ReplicaSealed sealed;
  if (envelope.kind == Kind::kReplicaSealed && Decode(envelope.payload, sealed) && sealed.code == Code::kOk)
    return Fail("host %zu acknowledges a copy without a lease", host.index);
  if (envelope.kind == Kind::kLeaderState) Fail("host %zu announces without a lease", host.index);
}

// ---- memory

uint32_t Checker::ChunkOf(const Host& host, uint64_t offset) const {
  return static_cast<uint32_t>((offset - host.chunks_begin) / host.chunk_bytes);
}

// A transfer that may still read or write the chunk, so that it must not be granted; or "".
std::string Checker::TransferOn(const Host& host, uint32_t chunk) const {
  const uint64_t begin = host.chunks_begin + chunk * host.chunk_bytes;
  const uint64_t end = begin + host.chunk_bytes;
  std::string found;
  network_.ForEachAt(host.index, [&](const Transfer& transfer) {
    const bool local = !transfer.orphan && transfer.initiator == host.index &&
                       transfer.initiator_id == host.id && transfer.device == nullptr &&
                       transfer.local_offset < end && transfer.local_offset + transfer.length > begin;
    const bool written = transfer.target == host.index && !transfer.get && !transfer.finishing &&
                         transfer.remote_offset < end && transfer.remote_offset + transfer.length > begin;
    // A reader outside the view must expect other bytes.
    const bool read = transfer.target == host.index && transfer.get && !transfer.finishing &&
                      host.view.Contains(transfer.initiator_id) && transfer.remote_offset < end &&
                      transfer.remote_offset + transfer.length > begin;
    if (found.empty() && (local || written || read)) found = transfer.ToString();
  });
  return found;
}

void Checker::OnGrant(const Host& host, const Session& session, const Pending& request,
                      const AnswerGrant& grant) {
  if (session.incarnation < host.engine->incarnation())
    return Fail("host %zu granted memory to rank %u of incarnation %" PRIu64 " although it knows of %" PRIu64,
                host.index, session.rank, session.incarnation, host.engine->incarnation());
  auto& grants = grants_[host.index];
  for (const Extent& extent : grant.extents) {
    for (uint32_t chunk = extent.first; chunk < extent.first + extent.count; ++chunk) {
      if (chunk >= host.store->chunks_total())
        return Fail("host %zu granted chunk %u of %" PRIu64, host.index, chunk, host.store->chunks_total());
      if (!grants.emplace(chunk, std::pair(session.id, grant.save)).second)
        return Fail("host %zu granted chunk %u for step %" PRIu64 ", which a rank is still writing",
                    host.index, chunk, request.step);
      const std::string transfer = TransferOn(host, chunk);
      if (!transfer.empty())
        return Fail("host %zu granted chunk %u with a transfer on it: %s", host.index, chunk,
                    transfer.c_str());
      for (const auto& [id, sealed] : host.store->shards())
        for (const Extent& other : sealed->extents)
          if (chunk >= other.first && chunk < other.first + other.count)
            return Fail("host %zu granted chunk %u of sealed %s", host.index, chunk, id.ToString().c_str());
      for (const auto& [key, held] : views_)
        for (const Extent& other : held.extents)
          if (held.host == host.index && chunk >= other.first && chunk < other.first + other.count)
            return Fail("host %zu granted chunk %u of a view of %s that is open", host.index, chunk,
                        held.shard.ToString().c_str());
    }
  }
}

void Checker::ReleaseGrant(const Session& session, SaveId save) {
  std::erase_if(grants_[session.host],
                [&](const auto& entry) { return entry.second == std::pair(session.id, save); });
}

void Checker::OnSessionEnd(const Session& session) {
  std::erase_if(grants_[session.host], [&](const auto& entry) { return entry.second.first == session.id; });
  std::erase_if(views_, [&](const auto& entry) { return entry.first.first == session.id; });
}

// Whether the chunk belongs to a copy, maybe a dropped one that a reader holds, and a bit of it has flipped.
bool Checker::FlippedAt(const Host& host, uint32_t chunk) const {
  const Place place = PlaceOf(host);
  return std::any_of(shards_.begin(), shards_.end(), [&](const auto& entry) {
    const auto copy = entry.second.copies.find(place);
    if (copy == entry.second.copies.end()) return false;
    uint32_t index = 0;
    for (const Extent& extent : copy->second.extents) {
      if (chunk >= extent.first && chunk < extent.first + extent.count)
        return entry.second.flips.contains({place, index + chunk - extent.first});
      index += extent.count;
    }
    return false;
  });
}

void Checker::OnTransferStart(const Transfer& transfer) {
  const Host& writer = *hosts_[transfer.writer()];
  if (transfer.get ? writer.id != transfer.initiator_id : writer.id != transfer.target_id) return;
  // The initiator was declared dead and does not know it yet, or its grant came too late.
  if (network_.Refuses(transfer)) return;
  const uint64_t begin = transfer.write_offset();
  const uint64_t end = begin + transfer.length;
  if (begin < writer.chunks_begin || end > writer.memory_bytes)
    return Fail("%s writes outside of the arena's chunks", transfer.ToString().c_str());
  network_.ForEachAt(writer.index, [&](const Transfer& other) {
    if (other.writer() == writer.index && !other.finishing && other.write_offset() < end &&
        other.write_offset() + other.length > begin)
      Fail("%s starts while %s may still write there", transfer.ToString().c_str(), other.ToString().c_str());
    // A bad chunk may be repaired while it is being sent: the receiver checks it.
    if (!other.orphan && other.device == nullptr && other.initiator == writer.index &&
        other.initiator_id == writer.id && other.local_offset < end &&
        other.local_offset + other.length > begin &&
        (other.get || !transfer.get || !FlippedAt(writer, ChunkOf(writer, begin))))
      Fail("%s starts where %s has its buffer", transfer.ToString().c_str(), other.ToString().c_str());
  });
}

void Checker::OnLanding(const Transfer& transfer, uint64_t offset, const std::string& bytes) {
  if (!transfer.orphan) CheckAdmitted(transfer);
  const Host& host = *hosts_[transfer.writer()];
  if (!host.daemon_runs() || offset < host.chunks_begin) return;
  // Bytes that change nothing are harmless.
  if (std::equal(bytes.begin(), bytes.end(), reinterpret_cast<const char*>(host.memory.get()) + offset))
    return;
  const uint32_t first = ChunkOf(host, offset);
  const uint32_t last = ChunkOf(host, offset + bytes.size() - 1);
  for (uint32_t chunk = first; chunk <= last; ++chunk) {
    if (const auto at = grants_[host.index].find(chunk); at != grants_[host.index].end())
      return Fail("%s lands in chunk %u, which is granted to a rank", transfer.ToString().c_str(), chunk);
    const auto right = [&](const ShardId& id, const std::vector<Extent>& extents,
                           const Encryption& encryption) {
      const Shard* shard = Find(id);
      uint32_t index = 0;
      for (const Extent& extent : extents) {
        if (chunk >= extent.first && chunk < extent.first + extent.count) {
          const uint32_t at = index + chunk - extent.first;
          if (shard == nullptr || at >= shard->crcs.size()) return false;
          // The chunk is being repaired, in pieces, maybe from a copy that is bad in another place.
          if (transfer.get && shard->flips.contains({PlaceOf(host), at})) return false;
          return ChunkRight(host, extents, encryption, *shard, at);
        }
        index += extent.count;
      }
      return false;
    };
    for (const auto& [id, sealed] : host.store->shards())
      if (right(id, sealed->extents, sealed->encryption))
        return Fail("%s lands in chunk %u of sealed %s", transfer.ToString().c_str(), chunk,
                    id.ToString().c_str());
    for (const auto& [key, held] : views_)
      if (held.host == host.index && right(held.shard, held.extents, {}))
        return Fail("%s lands in chunk %u of an open view of %s", transfer.ToString().c_str(), chunk,
                    held.shard.ToString().c_str());
  }
}

}  // namespace ropeteam::simulation
