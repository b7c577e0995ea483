// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/storage.h"

#include <algorithm>
#include <utility>

#include "core/base/checksum.h"

namespace ropeteam::simulation {
namespace {

constexpr TimeUs kPausedUs = 5 * kMs;  // time between two checks whether a stopped daemon continues

// As storage/posix and storage/s3 answer what the permissions forbid.
constexpr Code kRefusedCode = Code::kIo;

const Status kAway = Error(Code::kUnavailable, "storage is away");

uint32_t CrcOf(const std::string& bytes) { return Crc32c(bytes.data(), bytes.size()); }

// Some ranks have metadata. The manifest has that of the lowest one.
std::string MetadataOf(const StepId& id, Rank rank) {
  if (rank % 3 != 1) return "";
  return "{\"loss\": " + std::to_string(id.step * 1000 + rank) + "}";
}

std::string RankFile(Rank rank) { return "rank-" + std::to_string(rank); }

}  // namespace

// Some ranks have a file with a name of their own, some share a name with others.
std::vector<std::string> SimStorage::NamesOf(const ShardId& shard) {
  std::vector<std::string> names;
  if (shard.rank % 2 == 0) names.push_back("model.pt");
  if (shard.rank % 3 == 0) names.push_back("own-" + std::to_string(shard.rank) + ".json");
  return names;
}

const std::string* SimStorage::Stream(const ShardId& id) const {
  const Step* step = At(StepOf(id));
  if (step == nullptr) return nullptr;
  const auto file = step->files.find(RankFile(id.rank));
  return file == step->files.end() ? nullptr : &file->second.bytes;
}

size_t SimStorage::steps() const {
  return static_cast<size_t>(std::count_if(
      steps_.begin(), steps_.end(), [](const auto& step) { return step.second.manifest.has_value(); }));
}

StepId SimStorage::NewestSound() const {
  const TimeUs settled = options_.listing_lag_us + kListingAgeUs;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step)
    if (Sound(step->first) && step->second.stored_at + settled <= scheduler_.now()) return step->first;
  return {};
}

void SimStorage::Damage(const StepId& id, Rank rank) {
  Step& step = steps_.at(id);
  step.files.at(RankFile(rank)).bytes[0] ^= 0x10;
  step.rotten = true;
}

void SimStorage::LoseFile(const StepId& id, Rank rank) {
  Step& step = steps_.at(id);
  step.files.erase(RankFile(rank));
  step.rotten = true;
}

// While the step is hidden the checker expects nothing of it.
void SimStorage::Hide(const StepId& id) {
  hidden_.insert(id);
  steps_.at(id).rotten = true;
}

void SimStorage::Show() {
  for (const StepId& id : hidden_) steps_.at(id).rotten = false;
  hidden_.clear();
}

void SimStorage::Heal() {
  healed_ = true;
  away_until_ = 0;
  while (!hung_.empty()) GoOn(*hung_.begin());
  unmounted_.clear();
  refused_.clear();
  spoilt_.clear();
}

bool SimStorage::DiffersElsewhere(size_t host) const {
  return std::any_of(unmounted_.begin(), unmounted_.end(),
                     [&](const auto& at) { return at.first != host && Unmounted(at.first); }) ||
         std::any_of(spoilt_.begin(), spoilt_.end(), [&](size_t at) { return at != host; });
}

bool SimStorage::Rot() {
  if (steps() == 0) return false;
  uint64_t pick = random_.Below(steps());
  for (auto& [id, step] : steps_) {
    if (!step.manifest || pick-- != 0) continue;
    if (step.files.empty()) return false;
    auto file = step.files.begin();
    std::advance(file, static_cast<ptrdiff_t>(random_.Below(step.files.size())));
    step.rotten = true;
    if (file->second.bytes.empty() || random_.Chance(kMillion / 3)) {
      step.files.erase(file);
    } else {
      file->second.bytes[random_.Below(file->second.bytes.size())] ^= 0x10;
    }
    return true;
  }
  return false;
}

void SimStorage::Start(const Host& host, const StartStorage& start) {
  const bool writes =
      std::get_if<NameFiles>(&start.work) != nullptr || std::get_if<WriteShard>(&start.work) != nullptr;
  const bool decides = std::get_if<WriteManifest>(&start.work) != nullptr ||
                       std::get_if<PruneStored>(&start.work) != nullptr ||
                       std::get_if<MarkStored>(&start.work) != nullptr ||
                       std::get_if<NoteStored>(&start.work) != nullptr;
  if ((writes && told_.empty()) || (decides && !told_.contains(host.id)))
    on_violation("host " + std::to_string(host.index) + " has work on storage that nobody holds for it");
  loads_ += std::get_if<LoadChunks>(&start.work) != nullptr ? 1 : 0;
  listings_ += std::get_if<ListStored>(&start.work) != nullptr ? 1 : 0;
  const auto job = std::make_shared<Job>();
  job->host = host.index;
  job->instance = host.id;
  job->memory_generation = host.memory_generation;
  job->chunk_bytes = host.chunk_bytes;
  job->start = start;
  if (std::get_if<ReleaseStorage>(&start.work) != nullptr) ++releases_[host.id];
  job->releases = releases_[host.id];
  if (const auto* prune = std::get_if<PruneStored>(&start.work)) on_prune(host.index, *prune);
  Later(job);
}

void SimStorage::HangUntil(size_t host, TimeUs until) {
  if (!MayTrouble(until)) return;
  Hang(host);
  scheduler_.At(until, [this, host] { GoOn(host); });
}

void SimStorage::StickUntil(size_t host, TimeUs until) {
  Hang(host);
  scheduler_.At(until, [this, host] { GoOn(host); });
}

void SimStorage::SpoilUntil(size_t host, TimeUs until) {
  Spoil(host);
  scheduler_.At(until, [this, host] { spoilt_.erase(host); });
}

bool SimStorage::Unmounted(size_t host) const {
  const auto at = unmounted_.find(host);
  return at != unmounted_.end() && scheduler_.now() < at->second.until;
}

bool SimStorage::Refused(const Job& job) const {
  const auto at = refused_.find(job.host);
  if (at == refused_.end() || at->second.until <= scheduler_.now()) return false;
  return !at->second.lists || std::get_if<ListStored>(&job.start.work) == nullptr;
}

void SimStorage::GoOn(size_t host) {
  hung_.erase(host);
  for (const JobPtr& job : std::exchange(hanging_, {})) {
    if (job->host != host) {
      hanging_.push_back(job);
      continue;
    }
    job->hangs = false;
    Later(job);
  }
}

void SimStorage::Stall(const JobPtr& job) {
  const Host* host = find_host(job->host, job->instance);
  if (!job->hangs || host == nullptr) return;
  if (host->paused) {
    scheduler_.After(kPausedUs, [this, job] { Stall(job); });
    return;
  }
  const bool again = std::exchange(job->stalled, true);
  stalled(job->host, job->instance, job->start.tag);
  // Again while the work that the first call began is running.
  scheduler_.After(again ? options_.stalled_us : 1, [this, job] { Stall(job); });
}

void SimStorage::Later(const JobPtr& job) {
  scheduler_.After(random_.Between(options_.request_min_us, options_.request_max_us),
                   [this, job] { Advance(job); });
}

void SimStorage::Advance(const JobPtr& job) {
  Host* host = find_host(job->host, job->instance);
  if (host != nullptr && host->paused) {
    scheduler_.After(kPausedUs, [this, job] { Advance(job); });
    return;
  }
  Status status;
  // The last stage is a request to storage. It may have been sent before the daemon died.
  if (host == nullptr) {
    if (const auto* load = std::get_if<LoadChunks>(&job->start.work)) return LandLate(*job, *load);
    if (Stage(job, nullptr, &status) || !random_.Chance(kMillion / 2)) return;
    if (!away()) status = Effect(job);
    return;
  }
  if (prunes_hang_ && std::get_if<PruneStored>(&job->start.work) != nullptr) return Later(job);
  if (hung_.contains(job->host)) {
    job->hangs = true;
    hanging_.push_back(job);
    scheduler_.After(options_.stalled_us, [this, job] { Stall(job); });
    return;
  }
  if (std::get_if<ReleaseStorage>(&job->start.work) != nullptr && hold_.instance == job->instance)
    hold_.renews = false;  // also if the rest fails
  if (away()) return End(job, kAway);
  if (Refused(*job)) return End(job, Error(kRefusedCode, "permission denied (errno 13)"));
  if (const auto* load = std::get_if<LoadChunks>(&job->start.work);
      load != nullptr && unloadable_.contains(StepOf(load->shard)))
    return End(job, Error(Code::kIo, "the disk has failed"));
  if (Stage(job, host, &status)) return Later(job);
  if (!status.ok()) return End(job, status);
  // A listing or a read of a manifest fails only while storage is away: `latest` does not wait for long.
  const bool fails = !healed_ && std::get_if<ListStored>(&job->start.work) == nullptr &&
                     std::get_if<ReadStored>(&job->start.work) == nullptr;
  if (fails && random_.Chance(options_.fail_ppm))
    return End(job, Error(Code::kUnavailable, "the request was refused"));
  status = Effect(job);
  // It took effect, but the acknowledgement is lost.
  if (fails && random_.Chance(options_.lost_ack_ppm))
    status = Error(Code::kDeadlineExceeded, "no answer to the request");
  if (status.ok() && std::get_if<HoldStorage>(&job->start.work) != nullptr) {
    told_.insert(job->instance);
    hold_.renews = true;
  }
  End(job, status);
}

void SimStorage::LandLate(const Job& job, const LoadChunks& load) {
  const std::string* stream = Stream(load.shard);
  if (stream == nullptr || job.stage >= load.chunks.size() || !random_.Chance(kMillion / 2)) return;
  const uint32_t chunk = load.chunks[job.stage];
  const uint64_t begin = chunk * job.chunk_bytes;
  if (begin < stream->size())
    stray(job.host, job.memory_generation, ChunkAt(load.extents, chunk),
          stream->substr(begin, job.chunk_bytes));
}

void SimStorage::End(const JobPtr& job, const Status& status) {
  if (!status.ok()) job->done.result = std::monostate();
  answer(job->host, job->instance, job->start.tag, status, job->done);
}

// If `host` is null, only returns whether there is another stage.
bool SimStorage::Stage(const JobPtr& job, Host* host, Status* status) {
  if (const auto* name = std::get_if<NameFiles>(&job->start.work)) return ReadChunk(job, *name, host, status);
  if (const auto* write = std::get_if<WriteShard>(&job->start.work))
    return ReadChunk(job, write->shard, host, status);
  if (const auto* load = std::get_if<LoadChunks>(&job->start.work))
    return LoadChunk(job, *load, host, status);
  return false;
}

bool SimStorage::ReadChunk(const JobPtr& job, const NameFiles& shard, Host* host, Status* status) {
  if (job->stage >= shard.crcs.size()) return false;
  if (host == nullptr) return true;
  const auto index = static_cast<uint32_t>(job->stage++);
  const uint64_t length = ChunkLength(shard.meta.stream_bytes, shard.meta.chunk_bytes, index);
  const auto* bytes = reinterpret_cast<const char*>(host->chunk(ChunkAt(shard.extents, index)));
  job->bytes.append(bytes, length);
  if (Crc32c(bytes, length) != shard.crcs[index]) job->done.bad.push_back(index);
  if (job->stage < shard.crcs.size()) return true;
  if (!job->done.bad.empty())
    *status = Error(Code::kCorrupt, "%zu chunks do not match", job->done.bad.size());
  return false;
}

bool SimStorage::LoadChunk(const JobPtr& job, const LoadChunks& load, Host* host, Status* status) {
  if (job->stage >= load.chunks.size()) return false;
  if (host == nullptr) return true;
  const Step* step = At(StepOf(load.shard));
  const std::string* stream = Stream(load.shard);
  if (Unmounted(job->host) || step == nullptr || !step->manifest || stream == nullptr) {
    *status = Error(Code::kNotFound, "%s is not there", load.shard.ToString().c_str());
    return false;
  }
  // A file is checked as a whole, so damage is found only at its end.
  const uint32_t chunk = load.chunks[job->stage++];
  const uint64_t begin = chunk * host->chunk_bytes;
  if (stream->size() != load.stream_bytes || begin >= stream->size()) {
    *status = Error(Code::kCorrupt, "%s has %zu bytes", load.shard.ToString().c_str(), stream->size());
    return false;
  }
  const uint64_t length = std::min<uint64_t>(host->chunk_bytes, stream->size() - begin);
  std::copy_n(stream->data() + begin, length,
              reinterpret_cast<char*>(host->chunk(ChunkAt(load.extents, chunk))));
  if (job->stage < load.chunks.size()) return true;
  const std::vector<StoredFile>& files = step->manifest->ranks[load.shard.rank].files;
  const auto file = std::find_if(files.begin(), files.end(),
                                 [&](const StoredFile& at) { return at.path == RankFile(load.shard.rank); });
  if (file == files.end() || file->crc32c != CrcOf(*stream) ||
      IsTorn(StepOf(load.shard), RankFile(load.shard.rank)))
    *status =
        Error(Code::kCorrupt, "%s has other bytes than its manifest says", load.shard.ToString().c_str());
  return false;
}

Status SimStorage::Effect(const JobPtr& job) {
  if (!Unmounted(job->host)) return EffectOn(job);
  Directory& directory = unmounted_.at(job->host);
  const auto exchange = [&] {
    std::swap(steps_, directory.steps);
    std::swap(hold_, directory.hold);
    elsewhere_ = !elsewhere_;
  };
  exchange();
  const Status status = EffectOn(job);
  exchange();
  return status;
}

Status SimStorage::EffectOn(const JobPtr& job) {
  const StorageWork& work = job->start.work;
  if (std::get_if<ListStored>(&work) != nullptr) {
    StoredList list;
    for (const auto& [id, step] : steps_) {
      list.incarnation_max = std::max(list.incarnation_max, id.incarnation);
      const bool late = step.stored_at + options_.listing_lag_us > scheduler_.now();
      if (step.manifest && !late && !hidden_.contains(id)) list.steps.push_back(id);
    }
    job->done.result = list;
  } else if (const auto* read = std::get_if<ReadStored>(&work)) {
    StoredStep stored;
    if (unreadable_.contains(read->step)) return Error(Code::kIo, "the disk has failed");
    ROPETEAM_RETURN_IF_ERROR(Read(read->step, &stored));
    job->done.result = stored;
  } else if (const auto* name = std::get_if<NameFiles>(&work)) {
    job->done.result = FileNames{NamesOf(name->meta.id)};
  } else if (const auto* write = std::get_if<WriteShard>(&work)) {
    StoredRank stored;
    if (!write->proof.empty()) ROPETEAM_RETURN_IF_ERROR(Prove(write->proof));
    ROPETEAM_RETURN_IF_ERROR(Write(*write, job->bytes, &stored));
    job->done.result = stored;
  } else if (std::get_if<HoldStorage>(&work) != nullptr) {
    ROPETEAM_RETURN_IF_ERROR(TakeHold(*job));
    job->done.result = StorageProof{std::to_string(hold_.claim)};
  } else if (const auto* prove = std::get_if<ProveStorage>(&work)) {
    return Prove(prove->proof);
  } else if (std::get_if<ReleaseStorage>(&work) != nullptr) {
    if (hold_.instance == job->instance) hold_ = Hold();
  } else if (const auto* manifest = std::get_if<WriteManifest>(&work)) {
    ROPETEAM_RETURN_IF_ERROR(CheckHold(*job));
    if (refuses_manifests_.contains(job->host)) return Error(Code::kNoSpace, "the disk is full");
    return WriteTheManifest(*manifest->step);
  } else if (const auto* prune = std::get_if<PruneStored>(&work)) {
    const Status held = CheckHold(*job);
    if (!held.ok()) return held;
    if (job->releases != releases_[job->instance]) return Error(Code::kUnavailable, "storage was let go of");
    job->done.result = Prune(*job, *prune);
  } else if (const auto* mark = std::get_if<MarkStored>(&work)) {
    const Status held = CheckHold(*job);
    if (!held.ok()) return held;
    const auto step = steps_.find(mark->step);
    if (step == steps_.end()) return OkStatus();
    if (!step->second.rotten && !elsewhere_)
      on_violation(mark->step.ToString() + " is marked as damaged, and is good");
    step->second.marked = true;
  } else if (const auto* note = std::get_if<NoteStored>(&work)) {
    const Status held = CheckHold(*job);
    if (!held.ok()) return held;
    const auto step = steps_.find(note->note.step);
    if (step != steps_.end()) step->second.restored = note->note;
  } else if (const auto* load = std::get_if<LoadChunks>(&work)) {
    if (spoilt_.contains(job->host)) return Error(Code::kCorrupt, "other bytes than the manifest says");
    if (Unmounted(job->host))
      return Error(Code::kNotFound, "%s is not there", load->shard.ToString().c_str());
    LoadedChunks loaded;
    loaded.meta = steps_.at(StepOf(load->shard)).metas.at(load->shard.rank);
    const std::string& stream = *Stream(load->shard);
    for (const uint32_t chunk : load->chunks)
      loaded.crcs.push_back(Crc32c(stream.data() + chunk * loaded.meta.chunk_bytes,
                                   ChunkLength(loaded.meta.stream_bytes, loaded.meta.chunk_bytes, chunk)));
    job->done.result = loaded;
  }
  return OkStatus();
}

// A daemon that wants storage watches the holder's renewals. It counts as dead only after some silence.
Status SimStorage::TakeHold(const Job& job) {
  const Host* holder = hold_.instance == kNoNode ? nullptr : find_host(hold_.host, hold_.instance);
  if (holder != nullptr && !holder->paused && !hung_.contains(hold_.host) && hold_.renews)
    hold_.renewal = scheduler_.now() / kRenewUs;
  Watch& watch = watches_[job.instance];
  const bool lost = watch.holder == job.instance && hold_.instance != job.instance;
  const bool free = hold_.instance == kNoNode || hold_.instance == job.instance;
  const bool same = watch.holder == hold_.instance;
  const bool silent =
      same && watch.renewal == hold_.renewal && watch.since + kHolderSilentUs <= scheduler_.now();
  if (free || silent) {
    if (hold_.instance != job.instance) hold_ = {job.host, job.instance, 0, false, ++claims_};
    watch = {job.instance, 0, scheduler_.now()};
    return OkStatus();
  }
  const bool lives = same && watch.renewal != hold_.renewal;
  if (!same || lives) watch = {hold_.instance, hold_.renewal, scheduler_.now()};
  const std::string who = "host " + std::to_string(hold_.host);
  if (lost) return Error(Code::kAlreadyExists, "%s has taken storage over", who.c_str());
  if (lives) return Error(Code::kAlreadyExists, "%s writes to this storage", who.c_str());
  return Error(Code::kUnavailable, "%s wrote to this storage, and may be dead", who.c_str());
}

Status SimStorage::Prove(const std::string& proof) const {
  if (hold_.instance != kNoNode && std::to_string(hold_.claim) == proof) return OkStatus();
  return Error(Code::kNotFound, "the lock of %s is not here", proof.c_str());
}

Status SimStorage::CheckHold(const Job& job) const {
  if (hold_.instance == job.instance) return OkStatus();
  return Error(Code::kUnavailable, "this node does not hold storage any more");
}

bool SimStorage::IsTorn(const StepId& id, const std::string& path) {
  Step& step = steps_.at(id);
  const auto file = step.files.find(path);
  const bool torn = file != step.files.end() && scheduler_.now() < file->second.torn_until;
  step.rotten = step.rotten || torn;
  return torn;
}

Status SimStorage::Read(const StepId& id, StoredStep* stored) {
  const Step* step = At(id);
  if (step == nullptr || !step->manifest)
    return Error(Code::kNotFound, "%s has no manifest", id.ToString().c_str());
  if (step->marked) return Error(Code::kCorrupt, "%s is marked as damaged", id.ToString().c_str());
  *stored = *step->manifest;
  stored->restored = step->restored;
  for (StoredRank& rank : stored->ranks) {
    for (const StoredFile& file : rank.files) {
      const auto at = step->files.find(file.path);
      if (at == step->files.end() || at->second.bytes.size() != file.bytes || IsTorn(id, file.path))
        return Error(Code::kCorrupt, "%s lacks %s", id.ToString().c_str(), file.path.c_str());
    }
    rank.files.clear();
  }
  return OkStatus();
}

// All writers of a path must write the same bytes: two nodes may write it at once, and one may be dead.
Status SimStorage::Put(const StepId& id, const std::string& path, Rank rank, std::string bytes) {
  Step& step = steps_[id];
  const auto [at, fresh] = step.files.try_emplace(path, File{rank, bytes, 0});
  if (!fresh && !step.rotten && (at->second.rank != rank || at->second.bytes != bytes))
    on_violation("rank " + std::to_string(rank) + " of " + id.ToString() + " writes " + path +
                 ", which rank " + std::to_string(at->second.rank) + " has written with other bytes");
  const bool torn = !fresh && !options_.atomic;
  at->second = {rank, std::move(bytes),
                torn ? scheduler_.now() + random_.Between(1, options_.request_max_us) : 0};
  return OkStatus();
}

// Sometimes fails after only the first files were written.
Status SimStorage::Write(const WriteShard& write, const std::string& stream, StoredRank* stored) {
  const ShardMeta& meta = write.shard.meta;
  const StepId id = StepOf(meta.id);
  std::vector<std::pair<std::string, std::string>> files;
  for (const std::string& name : NamesOf(meta.id)) {
    const bool taken = std::find(write.taken.begin(), write.taken.end(), name) != write.taken.end();
    files.emplace_back(taken ? RankFile(meta.id.rank) + "/" + name : name, "file of " + meta.id.ToString());
  }
  files.emplace_back(RankFile(meta.id.rank), stream);
  const size_t until =
      !healed_ && random_.Chance(options_.fail_ppm) ? random_.Below(files.size()) : files.size();
  for (size_t i = 0; i < until; ++i) Put(id, files[i].first, meta.id.rank, files[i].second).ok();
  if (until < files.size()) return Error(Code::kIo, "the disk failed in the middle");
  steps_[id].metas[meta.id.rank] = meta;
  stored->stream_bytes = meta.stream_bytes;
  stored->content = ContentDigest(meta, write.shard.crcs);
  stored->metadata = MetadataOf(id, meta.id.rank);
  if (loses_writes_) steps_[id].files.clear();
  for (const auto& [path, bytes] : files) stored->files.push_back({path, bytes.size(), CrcOf(bytes), 0, 0});
  return OkStatus();
}

// Sometimes deletes only a part. The next call deletes the rest.
StoredList SimStorage::Prune(const Job& job, const PruneStored& prune) {
  StoredList gone;
  std::vector<StepId> newest_first;
  const size_t keep = std::max<size_t>(options_.keep, prune.keep_newest);
  for (auto step = steps_.rbegin(); step != steps_.rend() && keep != 0; ++step) {
    if (!step->second.manifest) continue;
    newest_first.push_back(step->first);
    if (newest_first.size() <= keep) continue;
    if (std::find(prune.in_use.begin(), prune.in_use.end(), step->first) == prune.in_use.end())
      gone.steps.push_back(step->first);
  }
  if (!healed_ && random_.Chance(options_.fail_ppm)) gone.steps.resize(random_.Below(gone.steps.size() + 1));
  if (find_host(job.host, job.instance) != nullptr && !elsewhere_)
    on_pruned(job.host, newest_first, gone.steps);
  for (const StepId& id : gone.steps) steps_.erase(id);
  if (!elsewhere_) pruned_.insert(gone.steps.begin(), gone.steps.end());
  return gone;
}

Status SimStorage::WriteTheManifest(const StoredStep& stored) {
  const bool in_ranks = std::any_of(stored.ranks.begin(), stored.ranks.end(),
                                    [](const StoredRank& rank) { return !rank.metadata.empty(); });
  if (in_ranks || stored.metadata != (stored.world_size > 1 ? MetadataOf(stored.id, 1) : ""))
    on_violation("the manifest of " + stored.id.ToString() + " has metadata '" + stored.metadata + "'");
  Step& step = steps_[stored.id];
  for (const StoredRank& rank : stored.ranks)
    for (const StoredFile& file : rank.files)
      if (const auto at = step.files.find(file.path);
          at == step.files.end() || at->second.bytes.size() != file.bytes)
        return Error(Code::kNotFound, "%s lacks %s", stored.id.ToString().c_str(), file.path.c_str());
  if (step.manifest) {
    const StoredStep& there = *step.manifest;
    if (there.world_size == stored.world_size && there.chunk_bytes == stored.chunk_bytes &&
        there.ranks == stored.ranks)
      return OkStatus();
    return Error(Code::kAlreadyExists, "another manifest of %s is there", stored.id.ToString().c_str());
  }
  step.manifest = stored;
  step.stored_at = scheduler_.now();
  step.rotten =
      step.rotten || Pruned(stored.id);  // a late request of a dead leader, and the files are already deleted
  if (!elsewhere_) on_stored(stored.id, stored);
  return OkStatus();
}

}  // namespace ropeteam::simulation
