// SPDX-License-Identifier: Apache-2.0
//
// Saves by the ranks of this node. sessions.cc has the rest of the sessions.

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "core/base/log.h"
#include "core/base/sizes.h"
#include "core/engine/parts.h"
#include "core/engine/sessions.h"
#include "core/shard/manifest.h"

namespace ropeteam::engine {

// A rank's step numbers grow within an incarnation: an older step would be released at once. What counts is the newest step
// of which this node has the rank's shard, or that is committed: the rank may have saved it on another node.
Status Sessions::CheckNewer(const ShardId& shard) const {
  std::optional<Step> newest;
  const auto& shards = parts_.context.store.shards();
  for (auto at = shards.lower_bound({shard.incarnation + 1, 0, 0}); at != shards.begin() && !newest;) {
    if ((--at)->first.incarnation != shard.incarnation) break;
    if (at->first.rank == shard.rank) newest = at->first.step;
  }
  const std::set<StepId>& listed = parts_.context.announced.listed;
  if (!listed.empty() && listed.rbegin()->incarnation == shard.incarnation)
    newest = std::max(newest.value_or(0), listed.rbegin()->step);
  const auto progress = progress_.find(shard);  // the step may have been released or dropped since
  if (progress != progress_.end() && progress->second.level >= Level::kLocal)
    newest = std::max(newest.value_or(0), shard.step);
  if (!newest || shard.step > *newest) return OkStatus();
  return Error(
      shard.step == *newest ? Code::kAlreadyExists : Code::kInvalidArgument,
      "step %llu is not newer than %llu: use one counter across epochs; to go back, open again on all ranks",
      static_cast<unsigned long long>(shard.step), static_cast<unsigned long long>(*newest));
}

// A shard that is larger than the whole arena never fits, whatever is released.
Status Sessions::CheckFits(uint64_t chunks) const {
  const Context& context = parts_.context;
  const Store& store = context.store;
  if (chunks <= store.chunks_total()) return OkStatus();
  const auto ranks =
      static_cast<uint64_t>(std::count_if(sessions_.begin(), sessions_.end(), [&](const auto& each) {
        return each.second.admitted && each.second.incarnation == context.incarnation.number;
      }));
  const JobSettings& settings = context.view.settings;
  const uint64_t steps = settings.keep_steps + 1;  // one more is being saved
  const uint64_t copies = settings.replicas + 1;
  return Error(Code::kInvalidArgument,
               "a shard of %s is larger than the arena of %s: the daemon needs --memory %s "
               "(%llu steps x %llu copies x %llu ranks x %s)",
               FormatSize(chunks * store.chunk_bytes()).c_str(),
               FormatSize(store.chunks_total() * store.chunk_bytes()).c_str(),
               SizeFlag(Store::MemoryFor(chunks * ranks * steps * copies, store.chunk_bytes(),
                                         context.config.encrypts()))
                   .c_str(),
               static_cast<unsigned long long>(steps), static_cast<unsigned long long>(copies),
               static_cast<unsigned long long>(ranks), FormatSize(chunks * store.chunk_bytes()).c_str());
}

// While the save was open, the step may have been committed with other bytes: with the shard that the rank has saved on
// another node.
Status Sessions::CheckNotCommitted(const ShardId& shard) const {
  const StepId step = StepOf(shard);
  if (!parts_.context.announced.listed.contains(step)) return OkStatus();
  return Error(Code::kAlreadyExists, "%s is committed already", step.ToString().c_str());
}

// A rank that goes on alone, while the others do not save, must not fill the leader's memory: every step costs it some.
Status Sessions::CheckUncommitted(const ShardId& shard) const {
  const Context& context = parts_.context;
  size_t count = 0;
  const auto& shards = context.store.shards();
  for (auto at = shards.lower_bound({shard.incarnation, 0, 0});
       at != shards.end() && at->first.incarnation == shard.incarnation; ++at)
    count += at->first.rank == shard.rank && at->second->role == Role::kOwn && !at->second->committed ? 1 : 0;
  if (count < kUncommittedMax) return OkStatus();
  return Error(Code::kNoSpace,
               "rank %u has saved %zu steps of incarnation %llu that are not committed, limit %zu: the other "
               "ranks have "
               "not saved them",
               shard.rank, count, static_cast<unsigned long long>(IncarnationNumber(shard.incarnation)),
               kUncommittedMax);
}

void Sessions::SaveBegin(SessionId id, RequestId request, Step step, uint64_t stream_bytes,
                         uint64_t agreement) {
  Session* session = Admitted(id, request);
  if (session == nullptr) return;
  Context& context = parts_.context;
  const ShardId shard{session->incarnation, step, session->hello.rank};
  if (session->saves >= kSavesOpenMax)
    return AnswerStatusTo(
        id, request, Error(Code::kNoSpace, "%u saves are open, limit %zu", session->saves, kSavesOpenMax));
  Status open = CheckNewer(shard);
  if (open.ok()) open = CheckUncommitted(shard);
  if (!open.ok()) return AnswerStatusTo(id, request, open);
  for (const auto& [save_id, save] : saves_)
    if (save.shard == shard)
      return AnswerStatusTo(
          id, request, Error(Code::kAlreadyExists, "%s is being saved already", shard.ToString().c_str()));
  if (context.leaving) {
    NoteEnded(id, step);  // the other ranks need not wait for this rank's shard
    return AnswerStatusTo(
        id, request,
        Error(Code::kUnavailable, "node %s leaves the job (it is drained): no save begins here",
              context.config.node.c_str()));
  }
  if (agreement != 0 && context.protocol < 9) {
    NoteEnded(id, step);
    return AnswerStatusTo(id, request,
                          Error(Code::kUnsupported,
                                "a save with an agreement needs protocol 9 on every node, the job speaks %u: "
                                "replace its older daemons",
                                context.protocol));
  }
  const uint64_t chunks = ChunksFor(std::max<uint64_t>(stream_bytes, 1), context.store.chunk_bytes());
  if (chunks > kChunksPerShardMax)
    return AnswerStatusTo(
        id, request,
        Error(Code::kInvalidArgument, "a shard of %llu bytes takes %llu chunks of %llu bytes, limit %llu",
              static_cast<unsigned long long>(stream_bytes), static_cast<unsigned long long>(chunks),
              static_cast<unsigned long long>(context.store.chunk_bytes()),
              static_cast<unsigned long long>(kChunksPerShardMax)));
  if (const Status fits = CheckFits(chunks); !fits.ok()) {
    NoteEnded(id, step);
    return AnswerStatusTo(id, request, fits);
  }
  Result<std::vector<Extent>> extents = parts_.memory.AllocateForSave(chunks);
  if (!extents.ok()) {
    ++context.counters.saves_refused;
    NoteEnded(id, step);
    context.counters_dirty = true;
    return AnswerStatusTo(id, request, extents.status());
  }
  ++context.counters.saves_begun;
  context.counters_dirty = true;
  ++session->saves;
  const SaveId save_id = next_save_++;
  ROPETEAM_CHECK(ChunkCount(*extents) == chunks && !saves_.contains(save_id));
  Save& save = saves_[save_id];
  save.session = id;
  save.shard = shard;
  save.world_size = session->hello.world_size;
  save.agreement = agreement;
  save.extents = *extents;
  save.crcs.resize(chunks);
  save.ready.resize(chunks);
  ProgressOf(shard).begun = context.now;
  context.Note({.what = TraceEvent::What::kBegin, .shard = shard, .count = static_cast<uint32_t>(chunks)});
  save.salt = context.NewSalt();
  save.source = parts_.replicator.Begin(shard, context.view.settings.replicas, save.extents, save.salt);
  ROPETEAM_CHECK(save.source != 0);
  AnswerTo(id, request, AnswerGrant{save_id, std::move(*extents)});
}

void Sessions::SaveExtend(SessionId id, RequestId request, SaveId save_id, uint64_t chunks) {
  if (Admitted(id, request) == nullptr) return;
  const auto found = saves_.find(save_id);
  if (found == saves_.end() || found->second.session != id)
    return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such save is open"));
  Save& save = found->second;
  const uint64_t have = save.crcs.size();
  if (chunks == 0 || chunks > kChunksPerShardMax - have)
    return AnswerStatusTo(
        id, request,
        Error(Code::kInvalidArgument, "%llu chunks more than %llu, limit %llu of a shard",
              static_cast<unsigned long long>(chunks), static_cast<unsigned long long>(have),
              static_cast<unsigned long long>(kChunksPerShardMax)));
  if (const Status fits = CheckFits(have + chunks); !fits.ok()) return AnswerStatusTo(id, request, fits);
  Result<std::vector<Extent>> extents = parts_.memory.AllocateForSave(chunks);
  if (!extents.ok()) {
    ++parts_.context.counters.saves_refused;
    return AnswerStatusTo(id, request, extents.status());
  }
  save.extents.insert(save.extents.end(), extents->begin(), extents->end());
  save.crcs.resize(have + chunks);
  save.ready.resize(have + chunks);
  ROPETEAM_CHECK(ChunkCount(save.extents) == save.crcs.size());
  parts_.replicator.Extend(save.source, save.extents);
  AnswerTo(id, request, AnswerGrant{save_id, std::move(*extents)});
}

void Sessions::SaveFilled(SessionId id, SaveId save_id, uint32_t first, const std::vector<uint32_t>& crcs) {
  const auto found = saves_.find(save_id);
  if (found == saves_.end() || found->second.session != id)
    return;  // the save was aborted: late messages are ignored
  Save& save = found->second;
  if (first > save.crcs.size() || crcs.size() > save.crcs.size() - first) return;
  for (size_t i = 0; i < crcs.size(); ++i)
    if (save.ready[first + i]) return;
  for (size_t i = 0; i < crcs.size(); ++i) {
    save.ready[first + i] = true;
    save.crcs[first + i] = crcs[i];
  }
  parts_.context.Note({.what = TraceEvent::What::kFilled,
                       .shard = save.shard,
                       .first = first,
                       .count = static_cast<uint32_t>(crcs.size())});
  parts_.replicator.Ready(save.source, first, crcs);
}

void Sessions::SaveDirect(SessionId id, const SaveDirectInput& direct) {
  const auto found = saves_.find(direct.save);
  if (found == saves_.end() || found->second.session != id) return;  // as in SaveFilled
  Save& save = found->second;
  if (direct.first > save.crcs.size() || direct.count > save.crcs.size() - direct.first) return;
  if (!parts_.replicator.AddDevice(save.source, direct)) return;
  save.device_chunks_end = std::max<uint64_t>(save.device_chunks_end, direct.first + direct.count);
}

void Sessions::SaveSettle(SessionId id, RequestId request, SaveId save_id, TimeUs timeout_us) {
  const auto found = saves_.find(save_id);
  if (found == saves_.end() || found->second.session != id)
    return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such save is open"));
  const uint64_t pending =
      AddPending(id, request, Deadline(timeout_us), "a put was reading device memory of the save");
  if (pending == 0) return;
  parts_.replicator.EndDevice(found->second.source, [this, pending] {
    const std::optional<Pending> open = TakePending(pending);
    if (open) AnswerStatusTo(open->session, open->request, OkStatus());
  });
}

// Of everything but the manifest's content.
Status Sessions::CheckForm(const Save& save, const SaveCommitInput& commit) const {
  const Store& store = parts_.context.store;
  const uint64_t chunks = ChunksFor(commit.stream_bytes, store.chunk_bytes());
  if (chunks == 0 || chunks > save.crcs.size() || commit.crcs.size() != chunks)
    return Error(Code::kInvalidArgument, "a stream of %llu bytes with %zu checksums in a save of %zu chunks",
                 static_cast<unsigned long long>(commit.stream_bytes), commit.crcs.size(), save.crcs.size());
  for (size_t chunk = 0; chunk < save.ready.size(); ++chunk) {
    if (save.ready[chunk] && (chunk >= chunks || save.crcs[chunk] != commit.crcs[chunk]))
      return Error(Code::kInvalidArgument, "chunk %zu was announced with another checksum", chunk);
  }
  if (save.device_chunks_end * store.chunk_bytes() > commit.stream_bytes)
    return Error(Code::kInvalidArgument,
                 "%llu whole chunks were announced in device memory, the stream is %llu bytes",
                 static_cast<unsigned long long>(save.device_chunks_end),
                 static_cast<unsigned long long>(commit.stream_bytes));
  if (commit.manifest_offset >= commit.stream_bytes)
    return Error(Code::kInvalidArgument, "a manifest at %llu in a stream of %llu bytes",
                 static_cast<unsigned long long>(commit.manifest_offset),
                 static_cast<unsigned long long>(commit.stream_bytes));
  // The manifest is copied and read. So a rank cannot have its whole shard copied.
  const uint64_t manifest_bytes = commit.stream_bytes - commit.manifest_offset;
  if (commit.object_count > kObjectsMax || manifest_bytes > ManifestBytesMax(commit.object_count))
    return Error(Code::kInvalidArgument,
                 "a manifest of %llu bytes for %u objects, limit %llu bytes and %llu objects",
                 static_cast<unsigned long long>(manifest_bytes), commit.object_count,
                 static_cast<unsigned long long>(ManifestBytesMax(commit.object_count)),
                 static_cast<unsigned long long>(kObjectsMax));
  return OkStatus();
}

// `commit` has the right form. The function uses only what is constant in the store: the place of a chunk.
std::function<Status()> Sessions::ManifestCheckOf(const Save& save, const SaveCommitInput& commit) const {
  return [&store = std::as_const(parts_.context.store), extents = save.extents, end = commit.stream_bytes,
          begin = commit.manifest_offset, object_count = commit.object_count] {
    std::string bytes(end - begin, '\0');
    for (uint64_t at = begin; at < end;) {
      const uint64_t chunk = at / store.chunk_bytes();
      const uint64_t offset = at % store.chunk_bytes();
      const uint64_t length = std::min(store.chunk_bytes() - offset, end - at);
      std::memcpy(bytes.data() + (at - begin), store.chunk(ChunkAt(extents, chunk)) + offset, length);
      at += length;
    }
    const Result<Manifest> manifest = Manifest::Parse(bytes, begin);
    if (!manifest.ok()) return manifest.status();
    if (manifest->objects().size() != object_count)
      return Error(Code::kInvalidArgument, "%u objects announced, %zu in the manifest", object_count,
                   manifest->objects().size());
    return OkStatus();
  };
}

std::function<Status()> Sessions::ManifestCheck(SessionId id, const SaveCommitInput& commit) const {
  const auto found = saves_.find(commit.save);
  if (found == saves_.end() || found->second.session != id || !CheckForm(found->second, commit).ok())
    return {};
  return ManifestCheckOf(found->second, commit);
}

void Sessions::SaveCommit(SessionId id, RequestId request, const SaveCommitInput& commit) {
  const auto found = saves_.find(commit.save);
  const bool mine = found != saves_.end() && found->second.session == id;
  const Session* session = Admitted(id, request);
  if (session == nullptr) {
    if (mine) EndSave(commit.save, "its rank is of a former incarnation");
    return;
  }
  if (!mine) return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such save is open"));
  ROPETEAM_CHECK(session->saves > 0 && found->second.shard.rank == session->hello.rank);
  Status checked = CheckForm(found->second, commit);
  if (checked.ok()) checked = commit.manifest ? *commit.manifest : ManifestCheckOf(found->second, commit)();
  if (checked.ok()) checked = CheckNotCommitted(found->second.shard);
  if (!checked.ok()) {
    EndSave(commit.save, checked.message().c_str());
    return AnswerStatusTo(id, request, checked);
  }
  Context& context = parts_.context;
  Save save = std::move(found->second);
  const ShardMeta meta{save.shard,
                       save.world_size,
                       context.view.settings.replicas,
                       context.store.chunk_bytes(),
                       commit.stream_bytes,
                       commit.manifest_offset,
                       commit.object_count,
                       save.agreement};
  const Status sealed =
      context.store.Seal(meta, Role::kOwn, save.extents, commit.crcs, Encryption{save.salt, {}});
  if (!sealed.ok()) {
    found->second = std::move(save);
    EndSave(commit.save, sealed.message().c_str());
    return AnswerStatusTo(id, request, sealed);
  }
  saves_.erase(found);
  --SessionOf(id).saves;
  ROPETEAM_CHECK(context.store.Find(save.shard) != nullptr);
  NoteEnded(id, save.shard.step);
  ++context.counters.saves_sealed;
  context.inventory_dirty = true;
  ProgressOf(save.shard).bytes = commit.stream_bytes;
  AnswerStatusTo(id, request, OkStatus());
  Reached(save.shard, Level::kLocal);
  parts_.replicator.Sealed(save.source);
}

void Sessions::SaveAbort(SessionId id, RequestId request, SaveId save_id) {
  const auto found = saves_.find(save_id);
  if (found == saves_.end() || found->second.session != id)
    return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such save is open"));
  EndSave(save_id, "by request");
  AnswerStatusTo(id, request, OkStatus());
}

void Sessions::EndSave(SaveId id, const char* why) {
  const auto found = saves_.find(id);
  ROPETEAM_CHECK(found != saves_.end());
  Save save = std::move(found->second);
  saves_.erase(found);
  Session& session = SessionOf(save.session);
  ROPETEAM_CHECK(session.saves > 0);
  --session.saves;
  NoteEnded(save.session, save.shard.step);
  LOG_INFO("save of %s aborted: %s", save.shard.ToString().c_str(), why);
  ++parts_.context.counters.saves_aborted;
  parts_.context.Note({.what = TraceEvent::What::kAbort, .shard = save.shard});
  parts_.context.counters_dirty = true;
  progress_.erase(save.shard);
  const uint64_t chunks = ChunkCount(save.extents);
  quiescing_chunks_ += chunks;
  parts_.replicator.Cancel(save.source, [this, chunks, extents = std::move(save.extents)] {
    ROPETEAM_CHECK(quiescing_chunks_ >= chunks);
    parts_.context.store.Free(extents);
    quiescing_chunks_ -= chunks;
  });
}

}  // namespace ropeteam::engine
