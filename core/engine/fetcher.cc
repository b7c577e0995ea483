// SPDX-License-Identifier: Apache-2.0
#include "core/engine/fetcher.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

Fetcher::Job* Fetcher::Find(uint64_t id) {
  const auto job = jobs_.find(id);
  return job == jobs_.end() ? nullptr : &job->second;
}

Fetcher::Job& Fetcher::Outstanding(uint64_t id) {
  Job* job = Find(id);
  ROPETEAM_CHECK(job != nullptr && job->id == id && job->outstanding > 0);
  return *job;
}

Fetcher::Source& Fetcher::SourceOf(Job* job, NodeId holder) {
  const auto source = job->sources.find(holder);
  ROPETEAM_CHECK(source != job->sources.end());
  ROPETEAM_CHECK(source->second.outstanding <= kOutstandingPerHolder);
  return source->second;
}

Fetcher::Job* Fetcher::Running(const ShardId& shard, bool repair) {
  const auto running = by_shard_.find(shard);
  if (running == by_shard_.end()) return nullptr;
  const auto found = jobs_.find(running->second);
  ROPETEAM_CHECK(found != jobs_.end() && found->second.shard == shard);
  Job& job = found->second;
  return job.failing || job.repair != repair ? nullptr : &job;
}

void Fetcher::Fetch(const ShardId& shard, Done done) {
  const SealedShard* here = parts_.context.store.Find(shard);
  const bool readable = here != nullptr && parts_.context.Readable(*here);
  if (readable && here->bad.empty()) return done(OkStatus());
  if (Job* running = Running(shard, false)) return running->waiters.push_back(std::move(done));
  if (readable) return Repair(shard, {}, std::move(done));
  ROPETEAM_CHECK(!jobs_.contains(next_job_));
  Job& job = jobs_[next_job_];
  job.id = next_job_++;
  job.begun = parts_.context.now;
  job.shard = shard;
  job.waiters.push_back(std::move(done));
  by_shard_[shard] = job.id;
  Locate(&job);
}

void Fetcher::Repair(const ShardId& shard, const std::vector<uint32_t>& chunks, Done done) {
  const SealedShard* here = parts_.context.store.Find(shard);
  if (here == nullptr) return done(Error(Code::kNotFound, "%s is not here", shard.ToString().c_str()));
  if (!parts_.context.Readable(*here))
    return done(Error(Code::kUnavailable, "%s is not repaired: %s", shard.ToString().c_str(),
                      parts_.context.KeyAbsent(here->encryption.key).c_str()));
  std::set<uint32_t> suspects(chunks.begin(), chunks.end());
  suspects.insert(here->bad.begin(), here->bad.end());
  Job* job = Running(shard, true);
  if (job != nullptr && StillHere(*job)) {
    job->waiters.push_back(std::move(done));
    return Look(job, suspects);
  }
  ROPETEAM_CHECK(!jobs_.contains(next_job_) && ChunkCount(here->extents) == here->crcs.size());
  job = &jobs_[next_job_];
  job->id = next_job_++;
  job->shard = shard;
  job->repair = true;
  Result<Store::LeaseToken> lease = parts_.context.store.Lease(shard);
  ROPETEAM_CHECK(lease.ok());
  job->lease = *lease;
  job->extents = here->extents;
  job->meta = here->meta;
  job->crcs = here->crcs;
  job->encryption = here->encryption;
  job->have_meta = true;
  job->waiters.push_back(std::move(done));
  by_shard_[shard] = job->id;
  Look(job, suspects);
}

bool Fetcher::StillHere(const Job& job) const {
  const Store& store = parts_.context.store;
  const SealedShard* leased = store.Leased(job.lease);
  ROPETEAM_CHECK(job.repair && leased != nullptr && leased->meta.id == job.shard);
  return store.Find(job.shard) == leased;
}

// Checks the chunks before anything is read: the report may be wrong, or the chunk may have been repaired meanwhile.
void Fetcher::Look(Job* job, const std::set<uint32_t>& suspects) {
  ROPETEAM_CHECK(job->repair && job->have_meta && !job->failing);
  std::vector<uint32_t> looked;
  std::vector<StartCheck::Range> ranges;
  for (const uint32_t chunk : suspects) {
    if (chunk >= job->crcs.size() || job->wanted.contains(chunk) || !job->busy.insert(chunk).second) continue;
    looked.push_back(chunk);
    ranges.push_back(
        RangeOf(parts_.context.store, job->extents, job->meta.stream_bytes, chunk, job->crcs[chunk]));
  }
  const uint64_t id = job->id;
  if (ranges.empty()) return Pump(id);
  ++job->outstanding;
  parts_.transfers.Check(std::move(ranges),
                         [this, id, looked](const std::vector<uint32_t>& bad) { OnLooked(id, looked, bad); });
}

void Fetcher::OnLooked(uint64_t id, const std::vector<uint32_t>& looked, const std::vector<uint32_t>& bad) {
  Job* job = &Outstanding(id);
  Context& context = parts_.context;
  --job->outstanding;
  std::set<uint32_t> wrong;
  for (const uint32_t index : bad) {
    ROPETEAM_CHECK(index < looked.size());
    wrong.insert(looked[index]);
  }
  for (const uint32_t chunk : looked) {
    const size_t busy = job->busy.erase(chunk);
    ROPETEAM_CHECK(busy == 1 && !job->wanted.contains(chunk));
    if (!wrong.contains(chunk)) {
      if (StillHere(*job)) context.store.MarkRepaired(job->shard, chunk);
      continue;
    }
    job->wanted.insert(chunk);
    if (StillHere(*job)) context.store.MarkBad(job->shard, chunk);
  }
  context.inventory_dirty = true;
  if (!bad.empty() && !job->looked_again) {
    context.counters.chunks_bad += bad.size();
    job->corrupt = true;
    LOG_WARNING("%zu chunks of %s are bad here, repairing", bad.size(), job->shard.ToString().c_str());
    if (job->locate_rounds == 0) return Locate(job);
  }
  Pump(id);
}

void Fetcher::Locate(Job* job) {
  const bool by_another = job->storage.by_another();
  const bool from_storage = job->storage.state == StorageRead::State::kAsked || by_another;
  ROPETEAM_CHECK(!job->locating && !job->failing && (from_storage || job->locate_rounds < kLocateRoundsMax));
  job->locating = true;
  job->locate_rounds += from_storage ? 0 : 1;
  LocateQuestion question;
  question.step = job->shard.step;
  question.rank = job->shard.rank;
  question.exact = job->shard.incarnation;
  question.from_storage = from_storage;
  question.stalled = by_another;
  const uint64_t id = job->id;
  const bool storage = parts_.context.view.settings.reads_storage();
  const TimeUs timeout = job->storage.load_failed ? kStandInUs
                         : storage                ? kStorageLocateTimeoutUs
                                                  : kLocateTimeoutUs;
  job->question = parts_.asker.Ask(Question::Topic::kLocate, Encode(question), parts_.context.now + timeout,
                                   [this, id](const Result<std::string>& reply) { OnLocated(id, reply); });
}

void Fetcher::OnLocated(uint64_t id, const Result<std::string>& reply) {
  Job* job = Find(id);
  if (job == nullptr) return;
  ROPETEAM_CHECK(job->locating && job->id == id);
  job->locating = false;
  LocateReply located;
  if (std::exchange(job->storage.load_failed, false)) {
    job->storage.state = StorageRead::State::kNotAsked;
    if (reply.status().code() == Code::kDeadlineExceeded) return Pump(id);  // no other node has read it
  }
  if (!reply.ok()) {
    // The errors of the attempts have more details.
    const bool tried = job->storage.tried() && reply.status().code() == Code::kNotFound;
    job->failing = true;
    job->failure = tried ? Explain(*job) : reply.status();
  } else if (!Decode(*reply, located, parts_.context.protocol)) {
    job->failing = true;
    job->failure = Error(Code::kInternal, "the leader's answer cannot be read");
  }
  bool fresh = false;
  for (const NodeId holder : located.holders)
    if (holder != parts_.context.config.self) fresh = job->sources.try_emplace(holder).second || fresh;
  if (job->storage.load_stalled && (fresh || job->failing)) {
    AbandonLoad(job);
  } else if (job->storage.load_stalled) {
    job->storage.again_at = parts_.context.now + kStorageAgainUs;
  }
  if (located.stored && job->storage.state != StorageRead::State::kTried) {
    job->storage.state = StorageRead::State::kOffered;
    job->storage.offer = located;
  }
  Pump(id);
}

void Fetcher::Pump(uint64_t id) {
  Job* job = Find(id);
  if (job == nullptr) return;
  Context& context = parts_.context;
  if (job->failing) {
    if (job->outstanding == 0 && !job->locating) End(id, Status(job->failure));
    return;
  }
  size_t usable = 0;
  for (auto& [node, source] : job->sources) {
    if (source.state != Source::State::kFailed && !context.Contains(node)) {
      source.state = Source::State::kFailed;
      source.trouble = "gone";
    }
    const auto lost = context.unreachable.find(node);
    if (lost != context.unreachable.end() && source.state != Source::State::kFailed &&
        lost->second.since + kLostHolderUs <= context.now) {
      source.state = Source::State::kFailed;
      source.trouble = "no connection: " + lost->second.reason;
    }
    if (source.state == Source::State::kOpening && source.next_send <= context.now) {
      source.next_send = context.now + kRepeatUs;
      context.Send(node, FetchOpen{job->id, {job->shard}});
    }
    if (source.state == Source::State::kOpening || source.state == Source::State::kOpen) ++usable;
  }
  bool stuck = usable == 0;
  if (job->have_meta) {
    if (job->wanted.empty() && job->outstanding == 0) return End(id, OkStatus());
    if (!GiveOut(job)) stuck = true;
  }
  if (job->storage.load_stalled && !job->locating && job->storage.again_at <= context.now) return Locate(job);
  if (job->storage.load_failed && !job->locating) return Locate(job);
  if (!stuck || job->outstanding != 0 || job->locating) return;
  if (AskToEncrypt(job)) return;
  if (job->storage.state == StorageRead::State::kOffered) return LoadFromStorage(job);
  if (job->locate_rounds < kLocateRoundsMax) {
    Locate(job);  // other nodes may have made new copies meanwhile
    return;
  }
  if (AskStorage(job)) return;
  // A get that failed with an error may still have brought its bytes. So the chunk may be good now.
  if (job->repair && !job->looked_again) {
    job->looked_again = true;
    return Look(job, std::exchange(job->wanted, {}));
  }
  End(id, Explain(*job));
}

bool Fetcher::IsLost(NodeId holder) const { return parts_.context.unreachable.contains(holder); }

bool Fetcher::GiveOut(Job* job) {
  size_t room = 0;
  for (const auto& [node, source] : job->sources)
    if (source.state == Source::State::kOpen && !IsLost(node)) {
      ROPETEAM_CHECK(source.outstanding <= kOutstandingPerHolder);
      room += kOutstandingPerHolder - source.outstanding;
    }
  size_t hopeless = 0;
  const size_t waiting = job->wanted.size();
  for (auto next = job->wanted.begin(); next != job->wanted.end() && room > 0;) {
    const uint32_t chunk = *next++;  // Start() removes it from the set
    const auto tried = job->tried.find(chunk);
    bool hope = false;
    NodeId best = kNoNode;
    uint32_t best_outstanding = kOutstandingPerHolder;
    for (const auto& [node, source] : job->sources) {
      if (source.state == Source::State::kFailed || source.state == Source::State::kForeign) continue;
      if (tried != job->tried.end() && tried->second.contains(node)) continue;
      hope = true;
      if (source.state != Source::State::kOpen || source.outstanding >= best_outstanding || IsLost(node))
        continue;
      best = node;
      best_outstanding = source.outstanding;
    }
    if (!hope) ++hopeless;
    if (best == kNoNode) continue;
    Start(job, chunk, best);
    --room;
  }
  return hopeless == 0 || hopeless < waiting;
}

void Fetcher::Start(Job* job, uint32_t chunk, NodeId holder) {
  Source& source = SourceOf(job, holder);
  ROPETEAM_CHECK(source.state == Source::State::kOpen && holder != parts_.context.config.self);
  ROPETEAM_CHECK(source.outstanding < kOutstandingPerHolder);
  ROPETEAM_CHECK(ChunkCount(source.extents) == job->crcs.size() &&
                 ChunkCount(job->extents) == job->crcs.size());
  ++source.outstanding;
  ++job->outstanding;
  const size_t wanted = job->wanted.erase(chunk);
  const bool fresh = job->busy.insert(chunk).second;
  ROPETEAM_CHECK(wanted == 1 && fresh);
  StartTransfer transfer;
  transfer.peer = holder;
  transfer.get = true;
  const StartCheck::Range range = RangeFor(*job, chunk, source);
  transfer.local_offset = range.offset;
  transfer.remote_offset =
      source.chunks_begin + ChunkAt(source.extents, chunk) * parts_.context.store.chunk_bytes();
  transfer.length = range.length;
  const uint64_t id = job->id;
  parts_.transfers.Start(
      Transfers::Priority::kFetch, transfer,
      [this, id, chunk, holder](Code code, const EncryptedChunk*) { OnRead(id, chunk, holder, code); });
}

// The range with the checksum that a chunk must have here.
StartCheck::Range Fetcher::RangeFor(const Job& job, uint32_t chunk, const Source& from) const {
  const Encryption& theirs = from.encryption;
  const bool same = theirs.key == job.encryption.key;
  StartCheck::Range range = RangeOf(parts_.context.store, job.extents, job.meta.stream_bytes, chunk,
                                    same ? job.crcs[chunk] : theirs.tags[chunk].crc);
  if (!same)
    range.cipher = ChunkCipher{theirs.key, job.encryption.key, range.offset,      job.shard,
                               chunk,      theirs.salt,        theirs.tags[chunk]};
  return range;
}

bool Fetcher::KeepsCiphertext(const Job& job) const {
  return parts_.context.config.encrypts() && (!job.repair || !job.encryption.tags.empty());
}

bool Fetcher::AskToEncrypt(Job* job) {
  for (auto& [node, source] : job->sources) {
    if (source.state != Source::State::kForeign) continue;
    source.state = Source::State::kOpening;
    source.next_send = parts_.context.now + kRepeatUs;
    parts_.context.Send(node, EncryptCopy{{job->id, {job->shard}}, parts_.context.config.keys});
    return true;
  }
  return false;
}

void Fetcher::OnRead(uint64_t id, uint32_t chunk, NodeId holder, Code code) {
  Job* job = &Outstanding(id);
  Source& source = SourceOf(job, holder);
  ROPETEAM_CHECK(source.outstanding > 0 && job->busy.contains(chunk));
  --source.outstanding;
  if (code != Code::kOk) {
    --job->outstanding;
    job->busy.erase(chunk);
    job->wanted.insert(chunk);
    if (source.state != Source::State::kFailed) FailRead(&source, holder, code);
    return Pump(id);
  }
  source.lost_since = 0;
  const StartCheck::Range range = RangeFor(*job, chunk, source);
  parts_.transfers.Encrypt({range}, [this, id, chunk, holder](const auto& bad, const auto& encrypted) {
    OnChecked(id, chunk, holder, bad.empty(), encrypted);
  });
  Pump(id);
}

// The data path reconnects to a member whose connection has failed, so the member is asked again after a pause.
void Fetcher::FailRead(Source* source, NodeId holder, Code code) {
  Context& context = parts_.context;
  ++context.local.reads_retried;
  if (source->lost_since == 0) {
    source->lost_since = context.now;
    context.out.suspicions.push_back({holder, std::string("a get failed: ") + CodeName(code)});
  }
  const bool by_path = code == Code::kPeerGone || code == Code::kLinkFailed;
  const bool wait = by_path && context.now < source->lost_since + kLostHolderUs;
  source->state = wait ? Source::State::kOpening : Source::State::kFailed;
  source->next_send = context.now + kRepeatUs;
  source->trouble = CodeName(code);
}

void Fetcher::OnChecked(uint64_t id, uint32_t chunk, NodeId holder, bool good,
                        const std::vector<EncryptedChunk>& encrypted) {
  Job* job = &Outstanding(id);
  if (good && !encrypted.empty())
    good = encrypted[0].crc == job->crcs[chunk] && encrypted[0].tag == job->encryption.tags[chunk];
  --job->outstanding;
  const size_t busy = job->busy.erase(chunk);
  ROPETEAM_CHECK(busy == 1 && !job->wanted.contains(chunk));
  Context& context = parts_.context;
  if (good) {
    const uint64_t bytes = ChunkLength(job->meta.stream_bytes, context.store.chunk_bytes(), chunk);
    context.counters.fetch_bytes += bytes;
    context.CountTraffic(holder, &PeerTraffic::fetched, bytes, 1);
    context.Note(
        {.what = TraceEvent::What::kFetch, .shard = job->shard, .first = chunk, .count = 1, .peer = holder});
    context.counters_dirty = true;
    if (job->repair) {
      if (StillHere(*job)) context.store.MarkRepaired(job->shard, chunk);
      ++context.counters.chunks_repaired;
      context.inventory_dirty = true;
    }
  } else {
    job->wanted.insert(chunk);
    job->tried[chunk].insert(holder);
    SourceOf(job, holder).trouble = "checksum mismatch";
    job->corrupt = true;
    ++context.counters.chunks_bad;
    ++context.local.reads_retried;
    LOG_WARNING("chunk %u of %s from %s does not match its checksum", chunk, job->shard.ToString().c_str(),
                context.NameOf(holder).c_str());
    context.Send(holder, BadCopy{job->shard, {chunk}});
  }
  Pump(id);
}

bool Fetcher::AcceptMeta(Job* job, const FetchGrant& grant, const Encryption& encryption) {
  const Context& context = parts_.context;
  const uint64_t chunks = ChunksFor(grant.meta.stream_bytes, context.store.chunk_bytes());
  if (grant.meta.id != job->shard || grant.meta.chunk_bytes != context.store.chunk_bytes() || chunks == 0 ||
      chunks != grant.crcs.size() || ChunkCount(grant.extents) != chunks ||
      encryption.tags.size() != (context.config.encrypts() ? chunks : 0))
    return false;
  const Encryption& ours = job->encryption;
  if (job->have_meta && ours.key == encryption.key)
    return job->crcs == grant.crcs && job->meta == grant.meta && ours == encryption;
  // The same salt and key give the same ciphertext.
  if (job->have_meta)
    return PlainCrcs(ours, job->crcs) == PlainCrcs(encryption, grant.crcs) && job->meta == grant.meta &&
           (ours.key == kPlaintext || ours.salt == encryption.salt);
  Result<std::vector<Extent>> extents = parts_.memory.Allocate(chunks);
  if (!extents.ok()) {
    job->failing = true;
    job->failure = extents.status();
    return true;
  }
  ROPETEAM_CHECK(!job->repair && job->extents.empty() && job->wanted.empty() && job->outstanding == 0);
  ROPETEAM_CHECK(ChunkCount(*extents) == chunks);
  job->extents = std::move(*extents);
  job->meta = grant.meta;
  job->crcs = grant.crcs;
  job->encryption = encryption;
  job->have_meta = true;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) job->wanted.insert(chunk);
  return true;
}

void Fetcher::OnGrant(NodeId from, const FetchGrant& grant, const Encryption& encryption) {
  Job* job = Find(grant.fetch);
  if (job == nullptr) {
    if (grant.code == Code::kOk) parts_.context.Send(from, FetchClose{grant.fetch});
    return;
  }
  const auto found = job->sources.find(from);
  if (found == job->sources.end() || found->second.state != Source::State::kOpening) return;
  Source& source = found->second;
  if (grant.code != Code::kOk) {
    source.state = Source::State::kFailed;
    source.trouble += (source.trouble.empty() ? "" : ", ") + grant.message;
  } else if (encryption.tags.empty() != (encryption.key == kPlaintext)) {
    source.state = Source::State::kFailed;
    source.trouble = "its copy has no key";
  } else if (parts_.context.config.encrypts() &&
             (encryption.tags.empty() || !parts_.context.HasKey(encryption.key))) {
    source.state = Source::State::kForeign;
    source.trouble =
        encryption.tags.empty() ? "its copy is plaintext" : parts_.context.KeyAbsent(encryption.key);
    job->key_absent = job->key_absent || !encryption.tags.empty();
  } else if (!AcceptMeta(job, grant, encryption)) {
    source.state = Source::State::kFailed;
    source.trouble = "its copy is of another shard";
  } else {
    source.state = Source::State::kOpen;
    if (grant.committed) job->committed = ContentDigest(grant.meta, PlainCrcs(encryption, grant.crcs));
    source.chunks_begin = grant.chunks_begin;
    source.extents = grant.extents;
    source.encryption = encryption;
  }
  Pump(grant.fetch);
}

Status Fetcher::Explain(const Job& job) const {
  const SealedShard* here = parts_.context.store.Find(job.shard);
  const bool bad_here = job.repair || (here != nullptr && !here->bad.empty());
  std::string tried = bad_here ? "this node (checksum mismatch)" : "";
  for (const auto& [node, source] : job.sources) {
    if (!tried.empty()) tried += ", ";
    tried +=
        parts_.context.NameOf(node) + " (" + (source.trouble.empty() ? "no bytes" : source.trouble) + ")";
  }
  if (job.storage.tried())
    tried += (tried.empty() ? "" : ", ") + std::string("storage (") +
             (job.storage.trouble.ok() ? "no bytes" : job.storage.trouble.message()) + ")";
  if (tried.empty()) tried = "no node holds a copy";
  const Code code = job.corrupt                                ? Code::kCorrupt
                    : job.storage.tries != 0 || job.key_absent ? Code::kUnavailable
                                                               : Code::kNotFound;
  return Error(code, "%s cannot be produced; tried: %s", job.shard.ToString().c_str(), tried.c_str());
}

std::string Fetcher::Trouble(const ShardId& shard) const {
  const auto running = by_shard_.find(shard);
  if (running == by_shard_.end()) return {};
  const Job& job = jobs_.at(running->second);
  if (job.locating) return parts_.asker.Reason(job.question);
  return job.corrupt || job.storage.tries != 0 ? Explain(job).message() : "";
}

// Another copy may be here, which was bad or was sealed meanwhile. It has its own chunks, and it may have other bytes.
Status Fetcher::SealFetched(const Job& job) {
  Store& store = parts_.context.store;
  const uint64_t content = ContentDigest(job.meta, PlainCrcs(job.encryption, job.crcs));
  const SealedShard* here = store.Find(job.shard);
  if (here != nullptr && !here->bad.empty() && here->content == content) {
    parts_.context.counters.chunks_repaired += here->bad.size();
    store.Replace(job.shard, job.extents, job.crcs, job.encryption);
  } else {
    const Role role = parts_.sessions.HasRank(job.shard.rank) ? Role::kReplica : Role::kCache;
    const Status sealed = parts_.context.Seal(job.meta, role, job.extents, job.crcs, job.encryption);
    if (!sealed.ok()) store.Free(job.extents);
    if (!sealed.ok() && sealed.code() != Code::kAlreadyExists) return sealed;
  }
  here = store.Find(job.shard);
  ROPETEAM_CHECK(here != nullptr);
  if (here->content != content)
    return Error(Code::kUnavailable, "%s was sealed here with other bytes during its fetch: read it again",
                 job.shard.ToString().c_str());
  if (job.committed == here->content) store.SetCommitted(job.shard);
  return OkStatus();
}

void Fetcher::End(uint64_t id, const Status& status) {
  Context& context = parts_.context;
  const auto found = jobs_.find(id);
  ROPETEAM_CHECK(found != jobs_.end());
  Job job = std::move(found->second);
  jobs_.erase(found);
  if (job.locating) parts_.asker.Forget(job.question);  // a stalled load has ended after all
  // Nothing writes to its chunks any more, and after a success it has every chunk.
  ROPETEAM_CHECK(job.outstanding == 0 && job.busy.empty() && !job.waiters.empty());
  ROPETEAM_CHECK(!status.ok() || (job.have_meta && job.wanted.empty()));
  const auto mine = by_shard_.find(job.shard);
  if (mine != by_shard_.end() && mine->second == id) by_shard_.erase(mine);
  for (const auto& [node, source] : job.sources)
    if (source.state != Source::State::kOpening || source.next_send != 0) context.Send(node, FetchClose{id});

  Status result = status;
  if (job.repair) {
    context.store.EndLease(job.lease);
    if (result.ok()) parts_.replicator.Resume(job.shard);
  } else if (!job.extents.empty()) {
    if (result.ok()) {
      result = SealFetched(job);
      if (result.ok()) context.local.fetches.Add(context.now - job.begun);
      context.inventory_dirty = true;
    } else {
      // No get can still write to these chunks: each has completed (outstanding is 0).
      context.store.Free(job.extents);
    }
  }
  if (!result.ok()) LOG_WARNING("%s", result.ToString().c_str());
  for (const Done& done : job.waiters) done(result);
}

void Fetcher::OnView() {
  for (auto& [id, job] : jobs_)
    for (auto& [node, source] : job.sources)
      source.next_send = std::min(source.next_send, parts_.context.now);
  PumpAll();
}

void Fetcher::PumpAll() {
  std::vector<uint64_t> ids;
  for (const auto& [id, job] : jobs_) ids.push_back(id);
  for (const uint64_t id : ids) Pump(id);
}

TimeUs Fetcher::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, job] : jobs_) {
    if (job.storage.again_at > parts_.context.now) due = std::min(due, job.storage.again_at);
    for (const auto& [node, source] : job.sources) {
      if (source.state == Source::State::kOpening) due = std::min(due, source.next_send);
      const auto lost = parts_.context.unreachable.find(node);
      if (source.state != Source::State::kFailed && lost != parts_.context.unreachable.end())
        due = std::min(due, lost->second.since + kLostHolderUs);
    }
  }
  return due;
}

uint64_t Fetcher::allocated_chunks() const {
  uint64_t chunks = 0;
  for (const auto& [id, job] : jobs_)
    if (!job.repair) chunks += ChunkCount(job.extents);
  return chunks;
}

}  // namespace ropeteam::engine
