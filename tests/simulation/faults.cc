// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/faults.h"

#include <algorithm>
#include <cinttypes>
#include <string>
#include <utility>
#include <vector>

#include "membership/simulated/simulated.h"

namespace ropeteam::simulation {

void Faults::Start() {
  // After a drain the machine stops, or its daemon starts again.
  cluster_.on_drained = [this](size_t host, const DrainReport&) {
    Random& random = cluster_.random();
    const NodeId instance = cluster_.host(host).id;
    const bool keep_memory = random.Chance(kMillion / 2);
    cluster_.scheduler().After(random.Between(1, 300 * kMs), [this, host, instance, keep_memory] {
      if (cluster_.host(host).id != instance) return;
      if (!stopped_ && cluster_.random().Chance(kMillion / 2)) StopHost(host, keep_memory);
      if (!cluster_.host(host).daemon_runs()) return;
      cluster_.CrashDaemon(host);
      cluster_.StartDaemon(host);
    });
  };
  if (options_.every_us != 0) Next();
  if (cluster_.options().keys_every_us != 0) ReplaceKey(0, 0);
}

void Faults::ReplaceKey(size_t step, size_t host) {
  const KeyId next = key_ + (KeyId{1} << 32);
  const std::vector<std::vector<KeyId>> steps = {{key_, next}, {next, key_}, {next}};
  const TimeUs pause = cluster_.random().Between(1, 2 * cluster_.options().keys_every_us);
  cluster_.scheduler().After(pause, [this, step, host, keys = steps[step]] {
    if (stopped_) return;
    // As `ropeteam status` says: the old key is removed when no copy needs it.
    if (keys.size() == 1 && HasCopiesOf(key_)) return ReplaceKey(step, host);
    cluster_.SetKeys(host, keys);
    if (host + 1 < cluster_.host_count()) return ReplaceKey(step, host + 1);
    if (keys.size() != 1) return ReplaceKey(step + 1, 0);
    key_ = keys.front();
    ReplaceKey(0, 0);
  });
}

bool Faults::HasCopiesOf(KeyId key) const {
  for (size_t host = 0; host < cluster_.host_count(); ++host) {
    const Host& at = cluster_.host(host);
    if (!at.daemon_runs()) return true;  // perhaps
    for (const auto& [id, shard] : at.store->shards())
      if (shard->encryption.key == key) return true;
  }
  return false;
}

void Faults::Next() {
  // Uniform, not exponential, because there are only integers. Bursts come from kinds with several faults.
  const TimeUs pause = cluster_.random().Between(1, 2 * options_.every_us);
  cluster_.scheduler().After(pause, [this] {
    if (stopped_) return;
    uint64_t total = 0;
    for (const uint32_t weight : options_.weight) total += weight;
    if (total == 0) return;
    uint64_t pick = cluster_.random().Below(total);
    for (size_t kind = 0; kind < kFaultKinds; ++kind) {
      if (pick < options_.weight[kind]) {
        Strike(static_cast<Fault>(kind));
        break;
      }
      pick -= options_.weight[kind];
    }
    Next();
  });
}

void Faults::Strike(Fault fault) {
  Random& random = cluster_.random();
  ++counts_[static_cast<size_t>(fault)];
  const size_t host = random.Below(cluster_.host_count());
  switch (fault) {
    case Fault::kHostLost:
      return StopHost(host, false);
    case Fault::kHostReboot:
      return StopHost(host, true);
    case Fault::kDaemonCrash: {
      cluster_.CrashDaemon(host);
      const TimeUs back = random.Between(options_.daemon_back_min_us, options_.daemon_back_max_us);
      return cluster_.scheduler().After(back, [this, host] { cluster_.StartDaemon(host); });
    }
    case Fault::kRankCrash:
      if (!launcher_.ranks().empty()) launcher_.KillOne(random.Below(launcher_.ranks().size()));
      return;
    case Fault::kRestart:
      return launcher_.Restart("its user's wish");
    case Fault::kCoordinator:
      return StopCoordinator();
    case Fault::kFlip:
      for (uint64_t flips = random.Between(1, 4); flips > 0; --flips) Flip();
      return;
    case Fault::kPerson:
      return Ask();
    case Fault::kPartition:
      return Partition();
    case Fault::kLeaderLost:
      return LoseLeader();
    case Fault::kTwoCoordinators:
      return StartSecondCoordinator();
    case Fault::kStorageAway:
      cluster_.Trace("storage is away");
      return cluster_.storage().TakeAway(cluster_.now() +
                                         random.Between(1, cluster_.options().storage.away_max_us));
    case Fault::kStorageHangs:
      cluster_.Trace("storage hangs for host %zu", host);
      return cluster_.storage().HangUntil(
          host, cluster_.now() + random.Between(kMs, cluster_.options().storage.away_max_us));
    case Fault::kStorageRot:
      cluster_.Trace("a file on storage rots");
      cluster_.storage().Rot();
      return;
    case Fault::kEverythingLost:
      return LoseEverything();
    case Fault::kDrain:
      return cluster_.Drain(host, random.Between(100 * kMs, 7 * kSecond));
    case Fault::kReplaced:
      return Replace(host);
    case Fault::kAway:
      return TakeAway();
    case Fault::kPair:
      return PartPair();
    case Fault::kStorageUnmounted:
    case Fault::kStorageStuck:
    case Fault::kStorageRefused:
    case Fault::kStorageMisread:
      return TroubleStorage(fault, host);
    case Fault::kReopened:
      return launcher_.Reopen();
    case Fault::kPause: {
      cluster_.PauseDaemon(host);
      return cluster_.scheduler().After(random.Between(1 * kMs, options_.pause_max_us),
                                        [this, host] { cluster_.ResumeDaemon(host); });
    }
    default:
      return TroubleLink(fault);
  }
}

// Sometimes the old machine is intact, and comes back at the end under its own name.
void Faults::Replace(size_t host) {
  constexpr size_t kReplacedMax = 3;
  if (cluster_.host(host).gone || cluster_.host_count() >= cluster_.options().nodes + kReplacedMax) return;
  Random& random = cluster_.random();
  const bool same_name = random.Chance(kMillion / 2);
  const bool keep_memory = random.Chance(kMillion / 3);
  const size_t fresh = cluster_.ReplaceHost(host, same_name, keep_memory);
  if (keep_memory && !same_name && random.Chance(kMillion / 2)) cluster_.Returns(host);
  cluster_.scheduler().After(random.Between(options_.host_back_min_us, options_.host_back_max_us),
                             [this, fresh] { cluster_.StartHost(fresh); });
}

void Faults::TakeAway() {
  Random& random = cluster_.random();
  const uint64_t most = std::max<uint64_t>(1, cluster_.options().nodes / 2);
  for (uint64_t hosts = random.Between(1, most); hosts > 0; --hosts) {
    const size_t host = random.Below(cluster_.host_count());
    cluster_.StopHost(host, true);
    cluster_.scheduler().After(random.Between(kSecond, std::max(options_.long_us, kSecond)),
                               [this, host] { cluster_.StartHost(host); });
  }
}

// Often one of them leads.
void Faults::PartPair() {
  Random& random = cluster_.random();
  size_t a = random.Below(cluster_.host_count());
  const size_t b = random.Below(cluster_.host_count());
  if (random.Chance(kMillion / 2)) a = cluster_.LeaderHost().value_or(a);
  if (a == b) return;
  const TimeUs until = cluster_.now() + random.Between(kSecond, std::max(options_.long_us, kSecond));
  const uint64_t what = random.Between(1, 3);
  cluster_.Trace("hosts %zu and %zu are apart, %s", a, b,
                 what == 1 ? "messages" : (what == 2 ? "transfers" : "messages and transfers"));
  if (what & 1) cluster_.network().CutMessages(a, b, until);
  if (what & 2) cluster_.network().CutPath(a, b, until);
}

void Faults::TroubleStorage(Fault fault, size_t host) {
  Random& random = cluster_.random();
  SimStorage& storage = cluster_.storage();
  const TimeUs until = cluster_.now() + random.Between(kMs, std::max(options_.long_us, kSecond));
  // The leader's own trouble is the worst.
  if (random.Chance(kMillion / 3)) host = cluster_.LeaderHost().value_or(host);
  // If no node sees the store, nobody can tell that there are steps; and two nodes with bad memory are believed.
  const bool one = fault == Fault::kStorageUnmounted || fault == Fault::kStorageMisread;
  if (one && storage.DiffersElsewhere(host)) return;
  const bool all = fault == Fault::kStorageRefused && random.Chance(kMillion / 2);
  const bool lists = random.Chance(kMillion / 2);
  for (size_t at = all ? 0 : host; at < (all ? cluster_.host_count() : host + 1); ++at) {
    cluster_.Trace("%s, host %zu", FaultName(fault), at);
    if (fault == Fault::kStorageUnmounted) storage.Unmount(at, until);
    if (fault == Fault::kStorageStuck) storage.StickUntil(at, until);
    if (fault == Fault::kStorageRefused) storage.RefuseUntil(at, until, lists);
    if (fault == Fault::kStorageMisread) storage.SpoilUntil(at, until);
  }
}

void Faults::StopCoordinator() {
  SimMembership& membership = cluster_.membership();
  if (membership.coordinators() == 0) return;
  cluster_.Trace("coordinator stops");
  membership.StopCoordinator();
  if (membership.coordinators() != 0) return;
  cluster_.scheduler().After(cluster_.random().Between(10 * kMs, 3 * kSecond), [this] {
    if (cluster_.membership().coordinators() != 0) return;
    cluster_.Trace("coordinator starts");
    cluster_.StartCoordinator();
  });
}

// As when an operator replaces a coordinator's node that is only unreachable.
void Faults::StartSecondCoordinator() {
  if (cluster_.membership().coordinators() != 1) return;
  // Before the first commit nobody knows of nodes beyond --nodes, and nothing is promised to two sides of so many.
  const Options& options = cluster_.options();
  const bool elastic = options.nodes_announced != 0 && options.nodes_announced < options.nodes;
  if (elastic && !cluster_.checker().newest_committed()) return;
  Random& random = cluster_.random();
  cluster_.Trace("a second coordinator starts");
  cluster_.StartCoordinator();
  const TimeUs until = cluster_.now() + random.Between(200 * kMs, options_.two_coordinators_max_us);
  if (random.Chance(kMillion / 2)) return MoveHosts(until);
  // Two halves that cannot reach each other, each with its own coordinator. Then some hosts change sides.
  std::vector<std::pair<size_t, uint64_t>> side = {{kCoordinatorHost, 0}, {kSecondCoordinatorHost, 1}};
  std::string text;
  for (size_t host = 0; host < cluster_.host_count(); ++host) {
    side.emplace_back(host, random.Below(kSimulatedCoordinators));
    cluster_.membership().Route(host, side.back().second, true);
    text += static_cast<char>('a' + side.back().second);
  }
  cluster_.Trace("each with its hosts, %s", text.c_str());
  const TimeUs apart = cluster_.now() + random.Between(100 * kMs, until - cluster_.now());
  CutBetween(side, apart);
  cluster_.scheduler().At(apart, [this, until] { MoveHosts(until); });
}

void Faults::MoveHosts(TimeUs until) {
  Random& random = cluster_.random();
  if (stopped_ || cluster_.membership().coordinators() != kSimulatedCoordinators) return;
  if (until <= cluster_.now()) return StopCoordinator();
  const size_t host = random.Below(cluster_.host_count());
  const uint64_t which = random.Below(kSimulatedCoordinators);
  cluster_.Trace("host %zu finds coordinator %" PRIu64, host, which);
  cluster_.membership().Route(host, which, random.Chance(kMillion / 2));
  cluster_.scheduler().After(random.Between(1 * kMs, 400 * kMs), [this, until] { MoveHosts(until); });
}

void Faults::LoseEverything() {
  Random& random = cluster_.random();
  cluster_.Trace("everything is lost");
  while (cluster_.membership().coordinators() > 1) cluster_.membership().StopCoordinator();
  StopCoordinator();
  for (size_t host = 0; host < cluster_.host_count(); ++host) {
    cluster_.StopHost(host, false);
    cluster_.scheduler().After(random.Between(options_.host_back_min_us, options_.host_back_max_us),
                               [this, host] { cluster_.StartHost(host); });
  }
}

void Faults::LoseLeader() {
  for (size_t host = 0; host < cluster_.host_count(); ++host) {
    if (!cluster_.host(host).daemon_runs() || !cluster_.host(host).engine->is_leader()) continue;
    cluster_.Trace("the leader and the coordinator are lost together");
    StopCoordinator();
    return StopHost(host, false);
  }
}

// Each host goes to one of two or three groups, and so does the coordinator.
void Faults::Partition() {
  Random& random = cluster_.random();
  const uint64_t groups = random.Between(2, 3);
  const TimeUs until = cluster_.now() + random.Between(50 * kMs, options_.partition_max_us);
  std::vector<std::pair<size_t, uint64_t>> group = {{kCoordinatorHost, random.Below(groups)}};
  if (cluster_.membership().coordinators() == kSimulatedCoordinators)
    group.emplace_back(kSecondCoordinatorHost, random.Below(groups));
  std::string text;
  for (size_t host = 0; host < cluster_.host_count(); ++host) {
    group.emplace_back(host, random.Below(groups));
    text += static_cast<char>('a' + group.back().second);
  }
  cluster_.Trace("partition, hosts %s, the coordinator with %c", text.c_str(),
                 static_cast<char>('a' + group[0].second));
  CutBetween(group, until);
}

void Faults::CutBetween(const std::vector<std::pair<size_t, uint64_t>>& group, TimeUs until) {
  for (const auto& [from, of_from] : group)
    for (const auto& [to, of_to] : group)
      if (of_from != of_to) cluster_.network().Cut(from, to, until);
}

void Faults::StopHost(size_t host, bool keep_memory) {
  Random& random = cluster_.random();
  size_t down = 0;
  for (size_t i = 0; i < cluster_.host_count(); ++i)
    down += cluster_.host(i).up || cluster_.host(i).gone ? 0 : 1;
  if (down >= options_.hosts_down_max) return;
  cluster_.StopHost(host, keep_memory);
  cluster_.scheduler().After(random.Between(options_.host_back_min_us, options_.host_back_max_us),
                             [this, host] { cluster_.StartHost(host); });
}

void Faults::TroubleLink(Fault fault) {
  Random& random = cluster_.random();
  Network& network = cluster_.network();
  const size_t a = random.Below(cluster_.host_count());
  size_t b = random.Below(cluster_.host_count());
  const TimeUs until = cluster_.now() + random.Between(1 * kMs, options_.link_trouble_max_us);
  if (fault == Fault::kIsolate) {
    cluster_.Trace("host %zu and the coordinator are apart", a);
    const uint64_t ways = random.Between(1, 3);
    // Sometimes long enough that a living node is declared dead.
    const TimeUs longer = cluster_.now() + random.Between(100 * kMs, options_.isolate_max_us);
    for (const size_t coordinator : {kCoordinatorHost, kSecondCoordinatorHost}) {
      if (ways & 1) network.Cut(a, coordinator, longer);
      if (ways & 2) network.Cut(coordinator, a, longer);
    }
    return;
  }
  if (fault != Fault::kReset && random.Chance(kMillion / 5)) return TroubleHost(fault, until);
  if (a == b) return;
  cluster_.Trace("%s between %zu and %zu", FaultName(fault), a, b);
  if (fault == Fault::kReset) return network.Reset(a, b);
  const bool both = random.Chance(kMillion / 2);
  if (fault == Fault::kClog) {
    network.Clog(a, b, until);
    if (both) network.Clog(b, a, until);
  } else if (random.Chance(kMillion / 3)) {
    network.CutPath(a, b, until);
  } else {
    network.Cut(a, b, until);
    if (both) network.Cut(b, a, until);
  }
}

// Everything to and from the host is lost, or late.
void Faults::TroubleHost(Fault fault, TimeUs until) {
  Network& network = cluster_.network();
  const size_t host = cluster_.random().Below(cluster_.host_count());
  cluster_.Trace("%s around %zu", FaultName(fault), host);
  const auto trouble = [&](size_t other) {
    if (fault == Fault::kClog) {
      network.Clog(host, other, until);
      network.Clog(other, host, until);
    } else {
      network.Cut(host, other, until);
      network.Cut(other, host, until);
    }
  };
  for (size_t other = 0; other < cluster_.host_count(); ++other)
    if (other != host) trouble(other);
  trouble(kCoordinatorHost);
  trouble(kSecondCoordinatorHost);
}

// Any answer is right if it comes in time. Its content is checked at the end of the run.
void Faults::Ask() {
  Random& random = cluster_.random();
  Client::Identity identity;
  identity.host = random.Below(cluster_.host_count());
  people_.push_back(std::make_unique<Client>(&cluster_, identity));
  Client& person = *people_.back();
  const TimeUs timeout = random.Below(2 * kSecond);
  if (random.Chance(kMillion / 2)) return person.Report(timeout, [](const Status&, const ClusterReport&) {});
  person.Verify(nullptr, timeout, [](const Status&, const VerifyReport&) {});
}

void Faults::Flip() {
  Random& random = cluster_.random();
  const size_t index = random.Below(cluster_.host_count());
  const Host& host = cluster_.host(index);
  if (options_.table_ppm != 0 && random.Chance(options_.table_ppm)) return cluster_.FlipTable(index);
  if (options_.unsealed_ppm != 0 && random.Chance(options_.unsealed_ppm)) {
    if (host.daemon_runs())
      cluster_.FlipUnsealed(index, static_cast<uint32_t>(random.Below(host.store->chunks_total())));
    return;
  }
  if (!host.daemon_runs() || host.store->shards().empty()) return;
  auto at = host.store->shards().begin();
  std::advance(at, static_cast<ptrdiff_t>(random.Below(host.store->shards().size())));
  const ShardId id = at->first;
  const uint32_t chunk = static_cast<uint32_t>(random.Below(at->second->crcs.size()));
  if (options_.flips == Flips::kRepairable && !cluster_.checker().HasAnother(host, id, chunk)) return;
  cluster_.FlipBit(index, id, chunk);
}

}  // namespace ropeteam::simulation
