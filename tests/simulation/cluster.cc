// SPDX-License-Identifier: Apache-2.0
//
// Hosts, daemons and the loop. Sessions and outputs are in cluster_io.cc.
#include "tests/simulation/cluster.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>

#include "core/base/check.h"
#include "core/base/checksum.h"
#include "membership/simulated/simulated.h"

namespace ropeteam::simulation {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr const char* kJob = "simulated";

std::string Numbered(const char* prefix, uint64_t number) {
  std::string name = prefix;
  name += std::to_string(number);
  return name;
}

}  // namespace

Cluster::Cluster(const Options& options)
    : options_(options),
      random_(options.seed),
      network_(&scheduler_, &random_, options.network, this),
      storage_(options.storage, &scheduler_, &random_),
      checker_(options, &scheduler_, &network_, &storage_, &hosts_),
      crash_in_input_ppm_(options.faults.crash_in_input_ppm) {
  SimMembership::Config config;
  config.settings.replicas = options.replicas;
  config.settings.keep_steps = options.keep_steps;
  config.settings.nodes = options.nodes_announced == 0 ? options.nodes : options.nodes_announced;
  config.settings.wait_for_missing_us = options.wait_for_missing_us;
  if (options.storage.used) {
    config.settings.storage = "simulated";
    config.settings.persist_every = options.storage.persist_every;
  }
  ConnectStorage();
  config.chunk_bytes = options.chunk_bytes;
  membership_ = std::make_unique<SimMembership>(
      config, &scheduler_, &network_, &random_,
      SimMembership::Listener{
          [this](size_t host, NodeId instance, const View& view) { OnView(host, instance, view); },
          [this](size_t host, NodeId instance, const Status& status) {
            WhenAwake(hosts_[host].get(), [this, host, instance, status] {
              if (hosts_[host]->id != instance) return;
              Trace("host %zu refused by membership: %s", host, status.ToString().c_str());
              // As ropeteamd does: it continues as another instance over the same memory, or ends.
              CrashDaemon(host);
              if (status.code() == Code::kInvalidArgument) {
                hosts_[host]->refused = status;
                return;
              }
              StartDaemon(host);
            });
          },
          [this](size_t host, NodeId instance, TimeUs valid_until) { OnLease(host, instance, valid_until); },
          [this](size_t host, NodeId instance, const std::vector<NodeId>& members) {
            OnCheck(host, instance, members);
          }});
  StartCoordinator();
  for (uint32_t i = 0; i < options.nodes + options.spares; ++i) AddHost();
}

Cluster::~Cluster() {
  for (const auto& host : hosts_) {
    host->engine.reset();
    host->store.reset();
  }
}

// ---- hosts

size_t Cluster::AddHost() {
  auto host = std::make_unique<Host>();
  host->index = hosts_.size();
  host->member.name = Numbered("node", host->index);
  host->member.ordinal = static_cast<uint32_t>(host->index);
  if (options_.domains > 1) host->member.domain = Numbered("rack=", host->index % options_.domains);
  host->member.control_address = Numbered("10.0.0.1:", host->index);
  const uint64_t needed = Store::MemoryFor(options_.chunks, options_.chunk_bytes, options_.encrypts);
  host->memory_bytes = (needed + kPageBytes - 1) / kPageBytes * kPageBytes;
  host->memory.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, host->memory_bytes)));
  ROPETEAM_CHECK(host->memory != nullptr);
  if (options_.clock_drift_ppm != 0) {
    Random random(Mix(options_.seed, host->index, 0xc10c));
    const TimeUs local = random.Between(1, 1000 * kSecond);
    host->clock.Set(now(), local, DrawDrift(&random));
  }
  std::memset(host->memory.get(), 0, host->memory_bytes);
  if (options_.encrypts) host->keys = {kFirstKey};
  hosts_.push_back(std::move(host));
  return hosts_.size() - 1;
}

size_t Cluster::ReplaceHost(size_t index, bool same_name, bool keep_memory) {
  Host& old = *hosts_[index];
  const Member member = old.member;
  StopHost(index, keep_memory);
  old.gone = true;
  const size_t fresh = AddHost();
  hosts_[fresh]->keys = old.keys;  // the operator gives it the job's present key file
  if (same_name) {
    hosts_[fresh]->member.name = member.name;
    hosts_[fresh]->member.ordinal = member.ordinal;
  }
  Trace("host %zu is gone, its memory %s; host %zu takes its place as %s", index,
        keep_memory ? "kept" : "lost", fresh, hosts_[fresh]->member.name.c_str());
  return fresh;
}

std::optional<size_t> Cluster::LeaderHost() const {
  for (const auto& host : hosts_)
    if (host->daemon_runs() && host->engine->is_leader()) return host->index;
  return std::nullopt;
}

size_t Cluster::hosts_in_job() const {
  return static_cast<size_t>(
      std::count_if(hosts_.begin(), hosts_.end(), [](const auto& host) { return !host->gone; }));
}

void Cluster::StartHost(size_t index) {
  Host& host = *hosts_[index];
  if (host.up || host.gone) return;
  host.up = true;
  Trace("host %zu starts", index);
  StartDaemon(index);
  if (on_host) on_host(index, true);
}

void Cluster::StopHost(size_t index, bool keep_memory) {
  Host& host = *hosts_[index];
  if (!host.up) return;
  Trace("host %zu stops, memory %s", index, keep_memory ? "kept" : "lost");
  host.up = false;
  EndDaemon(&host, keep_memory);
  if (!keep_memory) LoseMemory(&host);
  if (on_host) on_host(index, false);
}

void Cluster::LoseMemory(Host* host) {
  checker_.OnMemoryLost(*host);
  std::memset(host->memory.get(), 0, host->memory_bytes);
  ++host->memory_generation;
  host->knows.Clear();
  host->table_damaged = false;
}

void Cluster::CrashDaemon(size_t index) {
  Trace("host %zu daemon crashes", index);
  EndDaemon(hosts_[index].get(), true);
}

void Cluster::EndDaemon(Host* host, bool reset) {
  if (!host->daemon_runs()) return;
  const NodeId id = host->id;
  network_.OnInstanceDead(host->index, id);
  membership_->Gone(id, reset);
  host->paused = false;
  host->backlog.clear();
  host->engine.reset();
  host->store.reset();
  host->id = kNoNode;
  host->knows_early.clear();
  host->timer_at = kForever;
  host->view = {};
  for (auto& [number, session] : sessions_) {
    if (session.host != host->index || session.daemon != id) continue;
    session.open_at_engine = false;
    checker_.OnSessionEnd(session);
    // The client still reads what the daemon had written to the socket, and then its end.
    session.to_client_at = std::max(session.to_client_at, now() + random_.Between(1, 200));
    scheduler_.At(session.to_client_at, [this, number = number] {
      const auto at = sessions_.find(number);
      if (at == sessions_.end()) return;
      const auto pending = std::move(at->second.pending);
      sessions_.erase(at);
      for (const auto& [request, asked] : pending)
        if (asked.done) asked.done(nullptr);
    });
  }
}

void Cluster::SetKeys(size_t index, const std::vector<KeyId>& keys) {
  Host& host = *hosts_[index];
  std::string names;
  for (const KeyId key : keys) names += " " + KeyName(key);
  Trace("host %zu has the keys%s", index, names.c_str());
  host.keys = keys;
  if (!host.daemon_runs()) return;
  CrashDaemon(index);
  StartDaemon(index);
}

void Cluster::Drain(size_t index, TimeUs within) {
  Host& host = *hosts_[index];
  if (!host.daemon_runs() || host.drains_since != 0) return;
  Trace("host %zu is drained", index);
  host.drains_since = now();
  scheduler_.After(within, [this, index, instance = host.id] { LeaveJob(index, instance); });
  WhenAwake(&host, [this, &host] {
    Give(&host, "drain", [](Engine& engine, TimeUs local) { engine.OnDrain(local); });
  });
}

void Cluster::LeaveJob(size_t index, NodeId instance) {
  Host& host = *hosts_[index];
  if (host.id != instance || host.drains_since == kForever) return;
  if (host.paused) return WhenAwake(&host, [this, index, instance] { LeaveJob(index, instance); });
  const DrainReport report = host.engine->drain();
  Trace("host %zu leaves, %s, %" PRIu64 " shards left, %" PRIu64 " short", index,
        report.done ? "done" : "in time", report.shards_left, report.shards_short);
  if (report.done) checker_.OnDrained(host);
  host.drains_since = kForever;
  OnLease(index, instance, 0);
  if (host.id != instance) return;
  membership_->Leave(instance);
  if (on_drained) on_drained(index, report);
}

void Cluster::PauseDaemon(size_t index) {
  Host& host = *hosts_[index];
  if (!host.daemon_runs() || host.paused) return;
  Trace("host %zu daemon is paused", index);
  host.paused = true;
  membership_->Pause(host.id);
}

void Cluster::ResumeDaemon(size_t index) {
  Host& host = *hosts_[index];
  if (!host.paused) return;
  Trace("host %zu daemon goes on", index);
  host.paused = false;
  host.resumed_at = now();
  membership_->Resume(host.id);
  while (!host.paused && !host.backlog.empty()) {
    const std::function<void()> action = std::move(host.backlog.front());
    host.backlog.pop_front();
    action();
  }
}

void Cluster::WhenAwake(Host* host, std::function<void()> action) {
  if (!host->paused) return action();
  host->backlog.push_back(std::move(action));
}

void Cluster::StartDaemon(size_t index) {
  Host& host = *hosts_[index];
  if (!host.up || host.daemon_runs()) return;
  const ArenaIdentity identity{kJob, host.member.name, options_.encrypts};
  Store::AdoptReport report;
  auto adopted = Store::Adopt(host.bytes(), options_.chunk_bytes, identity, &report);
  if (!adopted.ok() && host.table_damaged) {
    Trace("host %zu cannot adopt its arena and resets it: %s", index, adopted.status().ToString().c_str());
    LoseMemory(&host);
    adopted = Store::Adopt(host.bytes(), options_.chunk_bytes, identity, &report);
  }
  const bool fresh = !adopted.ok() && adopted.status().code() == Code::kNotFound;
  if (!adopted.ok() && !fresh)
    return checker_.Fail("host %zu cannot adopt its arena: %s", index, adopted.status().ToString().c_str());
  if (!report.rejected.empty() && !host.table_damaged)
    return checker_.Fail("host %zu rejects its arena: %s", index, report.rejected[0].c_str());
  if (fresh) {
    adopted = Store::Format(host.bytes(), options_.chunk_bytes, identity);
    host.knows.Clear();
  }
  ROPETEAM_CHECK(adopted.ok());
  host.store = std::move(adopted.value());
  host.chunks_begin = host.store->chunk_offset(0);
  host.chunk_bytes = host.store->chunk_bytes();
  MarkBadChunks(&host);
  host.id = Mix(options_.seed, index, ++host.lives, 0x1d) | 1;
  host.member.id = host.id;
  instances_[host.id] = index;
  checker_.OnAdopted(host, host.table_damaged);
  host.table_damaged = host.table_damaged && host.store->CountTableDamage() != 0;
  EngineConfig config;
  config.self = host.id;
  config.job = kJob;
  config.node = host.member.name;
  config.quarantine_us = options_.quarantine_us;
  config.puts_wait_us =
      Mix(options_.seed, host.id, 0x9075) % 2 * 100'000;  // fabrics of both kinds in one job
  config.scrub_bytes_per_s = options_.scrub_bytes_per_s;
  config.restores_max = options_.restores_max;
  config.keep_on_storage = static_cast<uint32_t>(options_.storage.keep);
  if (options_.storage.keep != 0)
    config.keep_rules = "--keep-on-storage " + std::to_string(options_.storage.keep);
  config.protocol = host.protocol;
  config.keys = host.keys;
  config.salt.instance = {Mix(options_.seed, host.id, 0x5a17), host.id};
  host.engine = std::make_unique<Engine>(config, host.store.get());
  host.lease_until = 0;
  host.drains_since = 0;
  host.transfers.clear();
  host.lost_links.clear();
  Trace("host %zu daemon %" PRIx64 " starts, %" PRIu64 " shards adopted", index, host.id, report.shards);
  Give(&host, "start", [](Engine&, TimeUs) {});
  if (!host.daemon_runs()) return;  // it crashed in its first input
  host.refused = OkStatus();
  membership_->Join(index, host.member, host.clock.drift_ppm(), EpochOf(host.store->incarnation_max()),
                    host.protocol, host.own.has_value() ? &*host.own : nullptr);
}

void Cluster::MarkBadChunks(Host* host) {
  std::vector<std::pair<ShardId, uint32_t>> bad;
  for (const auto& [id, shard] : host->store->shards())
    for (uint32_t i = 0; i < shard->crcs.size(); ++i)
      if (Crc32c(host->store->chunk(ChunkAt(shard->extents, i)),
                 ChunkLength(shard->meta.stream_bytes, host->chunk_bytes, i)) != shard->crcs[i])
        bad.emplace_back(id, i);
  for (const auto& [id, chunk] : bad) host->store->MarkBad(id, chunk);
}

bool Cluster::FlipBit(size_t index, const ShardId& id, uint32_t chunk) {
  Host& host = *hosts_[index];
  if (!host.daemon_runs()) return false;
  const SealedShard* shard = host.store->Find(id);
  if (shard == nullptr || chunk >= shard->crcs.size()) return false;
  const uint64_t length = ChunkLength(shard->meta.stream_bytes, host.chunk_bytes, chunk);
  std::byte* bytes = host.store->chunk(ChunkAt(shard->extents, chunk));
  const uint64_t bit = random_.Below(length * 8);
  bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  checker_.OnFlip(host, id, chunk);
  Trace("host %zu bit %" PRIu64 " of chunk %u of %s flips", index, bit, chunk, id.ToString().c_str());
  return true;
}

bool Cluster::FlipUnsealed(size_t index, uint32_t chunk) {
  Host& host = *hosts_[index];
  if (!host.daemon_runs()) return false;
  for (const auto& [id, shard] : host.store->shards())
    for (const Extent& extent : shard->extents)
      if (chunk >= extent.first && chunk < extent.first + extent.count) return false;
  const uint64_t bit = random_.Below(host.chunk_bytes * 8);
  host.chunk(chunk)[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  checker_.OnDamage(host, chunk);
  Trace("host %zu bit %" PRIu64 " of unsealed chunk %u flips", index, bit, chunk);
  return true;
}

void Cluster::FlipTable(size_t index) {
  Host& host = *hosts_[index];
  if (!host.daemon_runs()) return;
  const uint64_t bit = random_.Below(host.chunks_begin * 8);
  host.memory[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  host.table_damaged = true;
  host.store->ExpectTableDamage();
  Trace("host %zu bit %" PRIu64 " of the tables flips", index, bit);
}

void Cluster::StrayWrite(size_t index, uint64_t memory_generation, uint32_t chunk, const std::string& bytes) {
  Host& host = *hosts_[index];
  if (!host.up || host.memory_generation != memory_generation) return;
  if (std::memcmp(host.chunk(chunk), bytes.data(), bytes.size()) == 0) return;
  Trace("host %zu chunk %u is written by a rank whose daemon has died", index, chunk);
  std::memcpy(host.chunk(chunk), bytes.data(), bytes.size());
  checker_.OnDamage(host, chunk);
}

Host* Cluster::FindInstance(NodeId instance) {
  const auto at = instances_.find(instance);
  if (at == instances_.end() || hosts_[at->second]->id != instance) return nullptr;
  return hosts_[at->second].get();
}

void Cluster::OnView(size_t index, NodeId instance, const View& view) {
  Host& host = *hosts_[index];
  if (host.id != instance || !host.daemon_runs()) return;
  if (host.paused) return WhenAwake(&host, [this, index, instance, view] { OnView(index, instance, view); });
  std::vector<NodeId> departed;
  for (const Member& member : host.view.members)
    if (!view.Contains(member.id)) departed.push_back(member.id);
  host.view = view;
  // A message of an epoch that was passed over is stale.
  for (const StepId& step : host.knows_early[view.epoch]) host.knows.Add(step);
  host.knows_early.erase(host.knows_early.begin(), host.knows_early.upper_bound(view.epoch));
  Trace("host %zu view epoch %" PRIu64 " leader %" PRIx64 " members %zu", index, view.epoch, view.leader,
        view.members.size());
  // The daemon disconnects departed peers before its engine sees the new view.
  for (const NodeId peer : departed) {
    host.lost_links.erase(peer);
    if (!network_.Disconnect(index, instance, peer)) continue;
    scheduler_.After(random_.Between(1, 20 * kMs), [this, index, instance, peer] {
      Host& fenced = *hosts_[index];
      if (fenced.id != instance) return;
      WhenAwake(&fenced, [this, &fenced, peer] {
        Give(&fenced, "peer fenced", [&](Engine& engine, TimeUs local) { engine.OnPeerFenced(local, peer); });
      });
    });
  }
  Give(&host, "view", [&](Engine& engine, TimeUs local) { engine.OnView(local, view); });
}

void Cluster::OnLease(size_t index, NodeId instance, TimeUs valid_until) {
  Host& host = *hosts_[index];
  if (host.id != instance || !host.daemon_runs()) return;
  if (host.paused)
    return WhenAwake(&host, [this, index, instance, valid_until] { OnLease(index, instance, valid_until); });
  host.lease_until = valid_until == 0 ? 0 : host.clock.Local(valid_until);
  Give(&host, "lease", [&](Engine& engine, TimeUs local) { engine.OnLease(local, host.lease_until); });
}

void Cluster::OnCheck(size_t index, NodeId instance, const std::vector<NodeId>& members) {
  Host& host = *hosts_[index];
  if (host.id != instance || !host.daemon_runs()) return;
  if (host.paused)
    return WhenAwake(&host, [this, index, instance, members] { OnCheck(index, instance, members); });
  Give(&host, "check", [&](Engine& engine, TimeUs local) { engine.OnCheckMembers(local, members); });
}

int Cluster::DrawDrift(Random* random) const {
  const int most = static_cast<int>(options_.clock_drift_ppm);
  return most == 0 ? 0 : static_cast<int>(random->Below(2 * static_cast<uint64_t>(most) + 1)) - most;
}

void Cluster::StartCoordinator() { membership_->StartCoordinator(DrawDrift(&random_)); }

// ---- running

bool Cluster::RunUntil(const std::function<bool()>& done, TimeUs limit, TimeUs every) {
  // Far more than any right run needs. It finds engines that send messages to each other forever.
  constexpr uint64_t kEventsMax = 60'000'000;
  const TimeUs end = now() + limit;
  TimeUs next = now();
  while (!checker_.failed()) {
    if (now() >= next) {
      if (done()) return true;
      next = now() + every;
    }
    if (scheduler_.events() > kEventsMax) {
      checker_.Fail("more than %" PRIu64 " events: nothing comes to rest", kEventsMax);
      break;
    }
    if (!scheduler_.RunOne(end)) return !checker_.failed() && done();
  }
  return false;
}

void Cluster::RunFor(TimeUs time) {
  RunUntil([] { return false; }, time, time + 1);
}

void Cluster::Heal() {
  healed_ = true;
  Trace("healed");
  crash_in_input_ppm_ = 0;
  NetworkOptions calm = options_.network;
  calm.loss_ppm = calm.misdeliver_ppm = calm.slow_ppm = calm.transfer_fail_ppm = calm.wire_flip_ppm = 0;
  network_.SetOptions(calm);
  network_.HealLinks();
  storage_.Heal();
  if (membership_->coordinators() == kSimulatedCoordinators) membership_->StopCoordinator();
  if (membership_->coordinators() == 0) StartCoordinator();
  for (const auto& host : hosts_) {
    if (host->gone && host->returns) {
      host->gone = false;
    } else if (host->gone) {
      LoseMemory(host.get());  // if it was kept, nobody brings it back
      continue;
    }
    ResumeDaemon(host->index);
    if (host->drains_since != 0) CrashDaemon(host->index);
    StartHost(host->index);
    StartDaemon(host->index);
  }
}

bool Cluster::AllInOneView() const {
  Epoch epoch = 0;
  const size_t in_job = hosts_in_job();
  for (const auto& host : hosts_) {
    if (host->gone) continue;
    if (!host->daemon_runs() || host->view.members.size() != in_job) return false;
    if (epoch == 0) epoch = host->view.epoch;
    if (host->view.epoch != epoch || host->engine->view().epoch != epoch) return false;
  }
  return true;
}

void Cluster::Trace(const char* format, ...) {
  if (!tracing()) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::snprintf(text, sizeof(text), "%10.6f ", static_cast<double>(now()) / 1e6);
  std::vsnprintf(text + length, sizeof(text) - static_cast<size_t>(length), format, arguments);
  va_end(arguments);
  trace_.emplace_back(text);
  if (trace_.size() > trace_lines_) trace_.pop_front();
}

}  // namespace ropeteam::simulation
