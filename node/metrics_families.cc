// SPDX-License-Identifier: Apache-2.0
#include "node/metrics_families.h"

#include <prometheus/metric_family.h>

#include <string>
#include <utility>

namespace ropeteam {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr double kUsPerSecond = 1e6;

double Seconds(TimeUs us) { return static_cast<double>(us) / kUsPerSecond; }

// In the order of StorageWork.
constexpr const char* kStorageWorks[] = {"list", "read_manifest", "name", "write", "write_manifest", "load",
                                         "hold", "release",       "mark", "prune", "note",           "prove"};
static_assert(std::size(kStorageWorks) == std::variant_size_v<StorageWork>);

// Collects samples. A sample belongs to the family that was named last.
class Families {
 public:
  Families& Counter(const char* name, const char* help) { return Begin(name, help, MetricType::Counter); }
  Families& Gauge(const char* name, const char* help) { return Begin(name, help, MetricType::Gauge); }
  Families& Histograms(const char* name, const char* help) {
    return Begin(name, help, MetricType::Histogram);
  }
  template <typename Number>
  Families& Add(Number value, Labels labels = {}) {
    ClientMetric& sample = Sample(std::move(labels));
    (families_.back().type == MetricType::Counter ? sample.counter.value : sample.gauge.value) =
        static_cast<double>(value);
    return *this;
  }
  Families& Add(const Histogram& histogram, Labels labels = {}) {
    ClientMetric::Histogram& filled = Sample(std::move(labels)).histogram;
    filled.sample_count = histogram.count();
    filled.sample_sum = Seconds(histogram.sum_us());
    uint64_t cumulative = 0;
    for (size_t i = 0; i < Histogram::kBoundsUs.size(); ++i) {
      cumulative += histogram.count(i);
      filled.bucket.push_back({cumulative, Seconds(Histogram::kBoundsUs[i])});
    }
    return *this;  // the serializer adds the +Inf bucket
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  Families& Begin(const char* name, const char* help, MetricType type) {
    families_.push_back({std::string("ropeteam_") + name, help, type, {}});
    return *this;
  }
  ClientMetric& Sample(Labels labels) {
    ClientMetric& sample = families_.back().metric.emplace_back();
    sample.label = std::move(labels);
    return sample;
  }
  std::vector<MetricFamily> families_;
};

void AddMembership(const MetricsSnapshot& s, Families* f) {
  f->Gauge("info", "1; what this daemon is")
      .Add(1, {{"version", s.version}, {"training_job", s.job}, {"node", s.node}, {"fabric", s.fabric}});
  f->Gauge("view_epoch", "Epoch of the newest view").Add(s.epoch);
  f->Gauge("members", "Nodes in the view").Add(s.members);
  f->Gauge("nodes_expected", "Nodes that the job has").Add(s.nodes_expected);
  f->Gauge("leader", "1 where this node leads").Add(s.engine.leader);
  f->Counter("view_changes_total", "Views received").Add(s.stats.views());
  f->Counter("members_lost_total", "Nodes that have left a view").Add(s.stats.members_lost());
  const TimeUs until = s.stats.lease_until();
  f->Gauge("lease_valid", "1 while this node holds a lease; without one its saves stay local")
      .Add(s.now < until);
  f->Gauge("lease_age_seconds", "Time since the lease was renewed; 0 without one")
      .Add(until == 0 ? 0 : Seconds(s.now - s.stats.lease_renewed_at()));
  f->Gauge("lease_remaining_seconds", "Time until the lease runs out; 0 without one")
      .Add(s.now < until ? Seconds(until - s.now) : 0);
  f->Gauge("sessions", "Connected ranks and tools that have asked something").Add(s.engine.sessions);
  f->Histograms("detection_seconds", "From the first sign here that a node is lost to the view without it")
      .Add(s.stats.detection());
  f->Histograms("recovery_seconds", "Leader: from the view without a node to all copies being there again")
      .Add(s.stats.recovery());
  f->Gauge("recovering", "1 on the leader while copies of a lost node are being made again")
      .Add(s.stats.recovering());
}

void AddSteps(const MetricsSnapshot& s, Families* f) {
  const NodeCounters& c = s.engine.counters;
  f->Counter("saves_total", "Saves of this node's ranks by what became of them; refused: for want of memory")
      .Add(c.saves_begun, {{"result", "begun"}})
      .Add(c.saves_sealed, {{"result", "sealed"}})
      .Add(c.saves_aborted, {{"result", "aborted"}})
      .Add(c.saves_refused, {{"result", "refused"}});
  f->Histograms("level_seconds", "From save_begin to the level, of each shard saved on this node");
  for (const Level level : {Level::kLocal, Level::kReplicated, Level::kCommitted, Level::kPersisted})
    f->Add(s.stats.levels()[static_cast<size_t>(level)], {{"level", LevelName(level)}});
  f->Counter("steps_total", "Steps that this node was told have reached the level")
      .Add(s.stats.steps_committed(), {{"level", "committed"}})
      .Add(s.stats.steps_persisted(), {{"level", "persisted"}});
  f->Gauge("newest_step", "Number of the newest step of the level that this node knows of");
  if (s.engine.has_committed) f->Add(s.engine.newest_committed, {{"level", "committed"}});
  if (s.engine.has_persisted) f->Add(s.engine.newest_persisted, {{"level", "persisted"}});
  f->Histograms("fetch_seconds", "Whole shards brought to this node, from the first question to the seal")
      .Add(s.engine.local.fetches);
}

void AddBytes(const MetricsSnapshot& s, Families* f) {
  const NodeCounters& c = s.engine.counters;
  f->Counter("bytes_total",
             "Sent: copies put elsewhere. Held: copies sealed here for others. Fetched, loaded: "
             "read from nodes, from storage. Persisted: written to storage")
      .Add(c.replica_bytes_sent, {{"direction", "sent"}})
      .Add(c.replica_bytes_held, {{"direction", "held"}})
      .Add(c.fetch_bytes, {{"direction", "fetched"}})
      .Add(c.persisted_bytes, {{"direction", "persisted"}})
      .Add(c.loaded_bytes, {{"direction", "loaded"}});
  struct Direction {
    const char* name;
    Flow PeerTraffic::*flow;
  };
  constexpr Direction kDirections[] = {
      {"sent", &PeerTraffic::sent}, {"held", &PeerTraffic::held}, {"fetched", &PeerTraffic::fetched}};
  f->Counter("peer_bytes_total", "Bytes of chunks exchanged with another node of the view");
  for (const auto& [id, peer] : s.engine.local.peers)
    for (const Direction& direction : kDirections)
      f->Add((peer.*direction.flow).bytes, {{"peer", peer.name}, {"direction", direction.name}});
  f->Counter("peer_chunks_total", "Chunks exchanged with another node of the view");
  for (const auto& [id, peer] : s.engine.local.peers)
    for (const Direction& direction : kDirections)
      f->Add((peer.*direction.flow).chunks, {{"peer", peer.name}, {"direction", direction.name}});
  f->Counter("transport_bytes_total", "Bytes of completed puts and gets, failed ones and probes included")
      .Add(s.transport.put_bytes, {{"operation", "put"}})
      .Add(s.transport.get_bytes, {{"operation", "get"}});
  f->Counter("transport_operations_total", "Completed puts and gets")
      .Add(s.transport.puts, {{"operation", "put"}})
      .Add(s.transport.gets, {{"operation", "get"}});
  f->Counter("transport_failures_total", "Puts and gets that failed").Add(s.transport.failures);
  const EngineMetrics& e = s.engine;
  const uint64_t sealed = e.own.chunks + e.replica.chunks + e.cache.chunks;
  f->Gauge("arena_bytes",
           "The arena's chunks by what lies in them; other: saves and copies that are not sealed")
      .Add(e.own.chunks * e.chunk_bytes, {{"role", "own"}})
      .Add(e.replica.chunks * e.chunk_bytes, {{"role", "replica"}})
      .Add(e.cache.chunks * e.chunk_bytes, {{"role", "cache"}})
      .Add((e.chunks_total - e.chunks_free - sealed) * e.chunk_bytes, {{"role", "other"}})
      .Add(e.chunks_free * e.chunk_bytes, {{"role", "free"}});
  f->Gauge("arena_shards", "Sealed shards by role")
      .Add(e.own.shards, {{"role", "own"}})
      .Add(e.replica.shards, {{"role", "replica"}})
      .Add(e.cache.shards, {{"role", "cache"}});
}

void AddTrouble(const MetricsSnapshot& s, Families* f) {
  const EngineMetrics& e = s.engine;
  f->Counter("retries_total", "Repeated: copies on another node, chunks that did not match, reads, messages")
      .Add(e.local.copies_retried, {{"kind", "copy"}})
      .Add(e.local.chunks_put_again, {{"kind", "chunk"}})
      .Add(e.local.reads_retried, {{"kind", "read"}})
      .Add(e.local.messages_repeated, {{"kind", "message"}});
  f->Counter("stalls_total",
             "Saves refused for want of memory, leases that ran out, links lost, storage that hung")
      .Add(e.counters.saves_refused, {{"cause", "memory"}})
      .Add(e.local.leases_lost, {{"cause", "lease"}})
      .Add(e.local.links_lost, {{"cause", "link"}})
      .Add(e.local.storage_stalls, {{"cause", "storage"}});
  f->Gauge("unreached_members", "Members of the view that this node does not reach")
      .Add(e.lost_control, {{"path", "control"}})
      .Add(e.lost_data, {{"path", "data"}});
  f->Counter("corrupt_chunks_total", "Checksum mismatches, here or in what came").Add(e.counters.chunks_bad);
  f->Counter("repaired_chunks_total", "Chunks that were written again from a good copy")
      .Add(e.counters.chunks_repaired);
  f->Counter("table_repairs_total", "Places of the arena's tables that were written again")
      .Add(e.counters.table_repairs);
  f->Counter("reencrypted_copies_total", "Copies encrypted again with the new key").Add(e.reencrypted);
  f->Gauge("key_copies", "Copies that wait to be encrypted again, and copies whose key this node lacks")
      .Add(e.copies_of_other_keys, {{"state", "other_key"}})
      .Add(e.copies_unreadable, {{"state", "unreadable"}});
  f->Counter("stale_messages_total", "Messages refused: of an older epoch or another instance")
      .Add(e.counters.messages_stale);
  f->Gauge("queue_depth", "What waits or is under way")
      .Add(e.gets_waiting, {{"queue", "get"}})
      .Add(e.puts_waiting, {{"queue", "put"}})
      .Add(e.background_waiting, {{"queue", "background_put"}})
      .Add(e.transfers_running, {{"queue", "transfer"}})
      .Add(e.checks_running, {{"queue", "check"}})
      .Add(e.storage_running, {{"queue", "storage"}})
      .Add(e.questions_open, {{"queue", "question"}})
      .Add(e.saves_open, {{"queue", "save"}})
      .Add(s.early_messages, {{"queue", "early_message"}});
  f->Counter("unauthenticated_connections_total", "Connections that ended before they had authenticated")
      .Add(s.unauthenticated);
  f->Counter("storage_works_total", "Work on storage that has ended");
  for (size_t i = 0; i < std::size(kStorageWorks); ++i)
    f->Add(e.local.works[i].done, {{"operation", kStorageWorks[i]}, {"result", "done"}})
        .Add(e.local.works[i].failed, {{"operation", kStorageWorks[i]}, {"result", "failed"}});
  // After a restore, the newest committed step may have a lower number than the newest persisted one.
  f->Gauge("storage_lag_steps", "How far the newest persisted step is behind the newest committed one");
  if (e.has_persisted)
    f->Add(e.newest_committed > e.newest_persisted ? e.newest_committed - e.newest_persisted : 0);
}

}  // namespace

std::vector<MetricFamily> FamiliesOf(const MetricsSnapshot& snapshot, TimeUs waited) {
  Families families;
  families.Gauge("event_loop_answered", "0 when the daemon's event loop gave no numbers in time").Add(1);
  families.Gauge("event_loop_wait_seconds", "How long this scrape waited for the event loop")
      .Add(Seconds(waited));
  if (snapshot.version.empty()) return families.Take();
  AddMembership(snapshot, &families);
  AddSteps(snapshot, &families);
  AddBytes(snapshot, &families);
  AddTrouble(snapshot, &families);
  return families.Take();
}

std::vector<MetricFamily> SilentFamilies() {
  Families families;
  families.Gauge("event_loop_answered", "0 when the daemon's event loop gave no numbers in time").Add(0);
  return families.Take();
}

}  // namespace ropeteam
