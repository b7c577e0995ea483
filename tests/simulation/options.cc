// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/options.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/shard/extent.h"
#include "tests/simulation/random.h"

namespace ropeteam::simulation {
namespace {

constexpr uint32_t kPercent = kMillion / 100;
constexpr uint32_t kSmallNodes = 12;  // a bigger cluster gets a shorter run: its seconds cost more
constexpr uint64_t kDeviceSalt = 0x6465766963650001;  // "device"
constexpr uint64_t kAgreeSalt = 0x6167726565000001;   // "agree"
constexpr uint64_t kDropSalt = 0x64726f7001;          // "drop"
constexpr uint64_t kEncryptSalt = 0xe9c;
constexpr uint64_t kTroubleSalt = 0x74726f75626c6501;  // "trouble"
constexpr uint64_t kTroublesSalt = 0x74726f75626c6502;
constexpr size_t kFirstDrawn = static_cast<size_t>(Fault::kPartition);
constexpr uint32_t kBigNodes = 200;  // and fewer, smaller steps

// By Trouble, with the default. It is 0 where the promise is known not to hold.
struct TroubleKind {
  const char* name;
  uint32_t percent;
};
constexpr TroubleKind kTroubleKinds[] = {
    {"spares", 8},
    {"few-nodes", 8},
    {"elastic", 8},
    {"replaced", 8},
    {"away", 15},
    {"pair", 8},
    {"storage-unmounted", 8},
    {"storage-stuck", 8},
    {"storage-refused", 8},
    {"storage-misread", 8},
    {"token-again", 8},
    {"reopened", 8},
};
static_assert(sizeof(kTroubleKinds) / sizeof(kTroubleKinds[0]) == kTroubles);

// Most seeds are small: errors between many nodes also occur between few, and a small run costs a hundredth.
uint32_t DrawNodes(Random* random) {
  const uint64_t kind = random->Below(1000);
  if (kind < 750) return static_cast<uint32_t>(random->Between(2, 6));
  if (kind < 960) return static_cast<uint32_t>(random->Between(7, 12));
  if (kind < 996) return static_cast<uint32_t>(random->Between(13, 24));
  return static_cast<uint32_t>(random->Between(kBigNodes, 240));
}

void DrawNetwork(Random* random, NetworkOptions* network) {
  if (random->Chance(50 * kPercent))
    network->loss_ppm = static_cast<uint32_t>(random->Between(1, 10 * kPercent));
  if (random->Chance(50 * kPercent))
    network->replay_ppm = static_cast<uint32_t>(random->Between(1, 10 * kPercent));
  if (random->Chance(50 * kPercent)) network->misdeliver_ppm = 50 * kPercent;
  network->delay_max_us = random->Between(50, 5 * kMs);
  if (random->Chance(40 * kPercent))
    network->slow_ppm = static_cast<uint32_t>(random->Between(1, 3 * kPercent));
  network->slow_max_us = random->Between(10 * kMs, 1 * kSecond);
  network->transfer_max_us = random->Between(30, 20 * kMs);
  if (random->Chance(40 * kPercent))
    network->transfer_fail_ppm = static_cast<uint32_t>(random->Between(1, 5 * kPercent));
  if (random->Chance(50 * kPercent))
    network->link_lost_ppm = static_cast<uint32_t>(random->Between(1, kMillion));
  network->fences = random->Chance(50 * kPercent);
  network->check_max_us = random->Between(10, 5 * kMs);
  // A slow message takes longer than any other.
  network->slow_max_us = std::max(network->slow_max_us, network->delay_max_us + 1);
}

void DrawFaults(Random* random, Options* options) {
  FaultOptions& faults = options->faults;
  if (random->Chance(5 * kPercent))
    return;  // some runs have no faults, because a failure there is easy to find
  faults.every_us = random->Between(40 * kMs, 1500 * kMs);
  for (size_t kind = 0; kind < kFirstDrawn; ++kind)
    if (random->Chance(50 * kPercent)) faults.weight[kind] = static_cast<uint32_t>(random->Between(1, 10));
  // A restart of all ranks takes half a second. If every fault caused one, nothing else would happen.
  for (const Fault rare : {Fault::kHostLost, Fault::kHostReboot, Fault::kRankCrash, Fault::kRestart}) {
    uint32_t& weight = faults.weight[static_cast<size_t>(rare)];
    weight = (weight + 2) / 3;
  }
  faults.hosts_down_max = static_cast<uint32_t>(random->Chance(70 * kPercent)
                                                    ? options->replicas
                                                    : random->Between(1, std::max(1u, options->nodes / 2)));
  faults.flips = random->Chance(80 * kPercent) ? Flips::kRepairable : Flips::kAny;
  if (random->Chance(25 * kPercent))
    faults.crash_in_input_ppm = static_cast<uint32_t>(random->Between(10, 300));
}

// Each kind is drawn from its own generator, so a kind that is added here changes no other draw.
void DrawMoreTrouble(uint64_t seed, Options* options) {
  uint64_t salt = kTroubleSalt;
  const auto draw = [&salt, seed](uint32_t percent, auto set) {
    Random random(Mix(seed, salt++));
    if (random.Chance(percent * kPercent)) set(&random);
  };
  FaultOptions& faults = options->faults;
  const auto weight = [&faults](Fault fault, Random* random) {
    if (faults.every_us != 0)
      faults.weight[static_cast<size_t>(fault)] = static_cast<uint32_t>(random->Between(3, 12));
  };
  const TimeUs beyond_quarantine = options->quarantine_us + 2 * kSecond;
  draw(25, [&](Random* random) {
    weight(Fault::kPartition, random);
    faults.partition_max_us = random->Between(kSecond, beyond_quarantine);
  });
  draw(20, [&](Random* random) { weight(Fault::kLeaderLost, random); });
  draw(25, [&](Random* random) {
    weight(Fault::kPause, random);
    faults.pause_max_us = random->Between(200 * kMs, beyond_quarantine);
  });
  draw(40, [&](Random* random) {
    faults.isolate_max_us = random->Between(kSecond, beyond_quarantine + 2 * kSecond);
  });
  draw(50, [&](Random* random) {
    options->clock_drift_ppm = static_cast<uint32_t>(random->Between(1, kClockDriftPpmMax));
  });
  draw(20, [&](Random* random) {
    options->job.long_ppm = static_cast<uint32_t>(random->Between(1000, 10'000));
    options->job.long_max_us = random->Between(kSecond, beyond_quarantine);
  });
  draw(30, [&](Random* random) {
    options->network.wire_flip_ppm = static_cast<uint32_t>(random->Between(100, 5000));
  });
  draw(30, [&](Random*) { faults.unsealed_ppm = 50 * kPercent; });
  draw(30, [&](Random*) { faults.table_ppm = 30 * kPercent; });
  draw(50, [&](Random* random) {
    if (options->nodes <= kSmallNodes) options->scrub_bytes_per_s = random->Between(1, 64) * 65'536;
  });
  draw(30, [&](Random* random) {
    options->job.stray_ppm = 50 * kPercent;
    options->job.stray_max_us = random->Between(100, 20 * kMs);
  });
  draw(50, [&](Random* random) { options->network.post_max_us = random->Between(1, kMs); });
  draw(20, [&](Random* random) {
    weight(Fault::kTwoCoordinators, random);
    faults.two_coordinators_max_us = random->Between(kSecond, beyond_quarantine);
  });
  draw(50, [&](Random* random) {
    StorageOptions& storage = options->storage;
    storage.used = options->nodes <= kSmallNodes;
    storage.persist_every = random->Between(0, 5);
    if (random->Chance(50 * kPercent)) storage.keep = random->Between(1, 3);
    storage.ask_ppm = random->Chance(50 * kPercent) ? 10 * kPercent : 0;
    storage.wait_ppm = random->Chance(50 * kPercent) ? 5 * kPercent : 0;
    storage.request_max_us = random->Between(kMs, 100 * kMs);
    if (random->Chance(50 * kPercent))
      storage.fail_ppm = static_cast<uint32_t>(random->Between(1, 20 * kPercent));
    if (random->Chance(50 * kPercent))
      storage.lost_ack_ppm = static_cast<uint32_t>(random->Between(1, 20 * kPercent));
    if (!storage.used) return;
    if (random->Chance(50 * kPercent)) weight(Fault::kStorageAway, random);
    if (random->Chance(20 * kPercent)) weight(Fault::kStorageRot, random);
    if (random->Chance(30 * kPercent)) weight(Fault::kEverythingLost, random);
    if (random->Chance(40 * kPercent)) weight(Fault::kStorageHangs, random);
    storage.atomic = random->Chance(50 * kPercent);
    if (random->Chance(20 * kPercent)) storage.listing_lag_us = random->Between(kMs, 3 * kSecond);
    storage.stalled_us = random->Between(100 * kMs, 4 * kSecond);
  });
  draw(30, [&](Random* random) { weight(Fault::kDrain, random); });
  draw(50, [&](Random* random) {
    options->storage.policy = options->storage.used;
    if (random->Chance(50 * kPercent)) options->storage.keep = 0;
    if (random->Chance(50 * kPercent)) options->storage.persist_every = 0;
  });
}

void DrawJob(Random* random, JobOptions* job) {
  job->ranks_per_node = static_cast<uint32_t>(random->Chance(70 * kPercent) ? 1 : random->Between(2, 3));
  job->incarnation_tokens = random->Chance(60 * kPercent);
  if (random->Chance(40 * kPercent)) job->zombie_ppm = 30 * kPercent;
  if (random->Chance(25 * kPercent)) job->reshard_ppm = 40 * kPercent;
  if (random->Chance(25 * kPercent)) job->shuffle_ppm = 40 * kPercent;
  job->lag = static_cast<uint32_t>(random->Chance(70 * kPercent) ? 1 : random->Between(2, 4));
  job->compute_max_us = random->Between(20 * kMs, 200 * kMs);
  job->wait_ppm = static_cast<uint32_t>(random->Below(kMillion));
  if (random->Chance(50 * kPercent)) job->abort_ppm = 0;
  job->content.objects_max = static_cast<uint32_t>(random->Between(1, 4));
  job->content.object_bytes_max = random->Between(1, 8192);
}

// Nothing but the troubles that are drawn.
void LeaveAlone(Options* options) {
  FaultOptions& faults = options->faults;
  faults = FaultOptions();
  options->clock_drift_ppm = 0;
  options->timer_late_max_us = 0;
  options->job.zombie_ppm = options->job.reshard_ppm = options->job.shuffle_ppm = options->job.drop_ppm = 0;
  options->job.abort_ppm = options->job.long_ppm = options->job.stray_ppm = options->job.disagree_ppm = 0;
  NetworkOptions& network = options->network;
  network.loss_ppm = network.replay_ppm = network.misdeliver_ppm = network.slow_ppm = 0;
  network.transfer_fail_ppm = network.link_lost_ppm = network.wire_flip_ppm = 0;
  options->storage.fail_ppm = options->storage.lost_ack_ppm = 0;
  options->storage.listing_lag_us = 0;
  options->storage.atomic = true;
}

// The hosts, the launcher and the ranks.
void DrawWorldTrouble(Trouble trouble, Random* random, Options* options) {
  const uint32_t nodes = options->nodes;
  switch (trouble) {
    case Trouble::kSpares:
      options->spares = static_cast<uint32_t>(random->Between(1, std::min(3u, nodes)));
      break;
    case Trouble::kFewNodes:
      options->nodes_announced = static_cast<uint32_t>(random->Between(1, nodes - 1));
      break;
    case Trouble::kElastic:
      options->nodes_min = static_cast<uint32_t>(random->Between(std::max(1u, nodes / 2), nodes - 1));
      options->nodes_announced = options->nodes_min;
      break;
    case Trouble::kTokenAgain:
      options->job.incarnation_tokens = true;
      options->job.zombie_ppm = 0;  // a rank that was left over cannot be told from the others
      options->job.token_again_ppm = 50 * kPercent;
      break;
    case Trouble::kReopened:
      options->job.reopens = true;
      options->job.incarnation_tokens = true;
      options->job.zombie_ppm = 0;
      break;
    default:
      break;
  }
}

void DrawTroubles(uint64_t seed, const TroubleOdds& odds, Options* options) {
  if (odds.alone) LeaveAlone(options);
  FaultOptions& faults = options->faults;
  const auto strikes = [&](Fault fault, Random* random) {
    if (faults.every_us == 0) faults.every_us = random->Between(200 * kMs, 1500 * kMs);
    faults.weight[static_cast<size_t>(fault)] = static_cast<uint32_t>(random->Between(3, 12));
    faults.long_us = std::max(faults.long_us, random->Between(kSecond, 20 * kSecond));
  };
  constexpr std::pair<Trouble, Fault> kStrikes[] = {
      {Trouble::kReplaced, Fault::kReplaced},
      {Trouble::kAway, Fault::kAway},
      {Trouble::kPair, Fault::kPair},
      {Trouble::kStorageUnmounted, Fault::kStorageUnmounted},
      {Trouble::kStorageStuck, Fault::kStorageStuck},
      {Trouble::kStorageRefused, Fault::kStorageRefused},
      {Trouble::kStorageMisread, Fault::kStorageMisread},
      {Trouble::kReopened, Fault::kReopened},
  };
  for (size_t at = 0; at < kTroubles; ++at) {
    Random random(Mix(seed, kTroublesSalt, at));
    if (options->nodes > kSmallNodes || !random.Chance(odds.percent[at] * kPercent)) continue;
    const Trouble trouble = static_cast<Trouble>(at);
    const bool of_storage = trouble >= Trouble::kStorageUnmounted && trouble <= Trouble::kStorageMisread;
    if (of_storage && odds.percent[at] == 100) options->storage.used = true;
    if (of_storage && !options->storage.used) continue;
    DrawWorldTrouble(trouble, &random, options);
    for (const auto& [of, fault] : kStrikes)
      if (of == trouble) strikes(fault, &random);
    // In an odd world hosts must go, or nothing is asked of it. Where only storage has a step, all of them.
    if (odds.alone && trouble < Trouble::kReplaced) strikes(Fault::kAway, &random);
    if (odds.alone && of_storage) strikes(Fault::kEverythingLost, &random);
    if (odds.alone && trouble == Trouble::kTokenAgain) strikes(Fault::kRestart, &random);
    const bool stays = random.Chance(50 * kPercent);
    // Each node must reach R others.
    if (trouble == Trouble::kPair && options->nodes >= std::max(3u, options->replicas + 2))
      options->pair_stays = stays;
    if (trouble == Trouble::kStorageStuck) options->stuck_stays = stays;
    if (trouble == Trouble::kReplaced || trouble == Trouble::kAway)
      options->wait_for_missing_us = random.Between(5, 60) * kSecond;
  }
}

// The chunks that a node needs by promise 8: the kept steps, those being persisted and those in flight.
uint64_t ChunksNeeded(const Options& options) {
  const ContentShape& content = options.job.content;
  const uint64_t shard = content.objects_max * AlignObject(content.object_bytes_max) + 512;
  const uint64_t chunks = ChunksFor(shard, options.chunk_bytes);
  const uint64_t in_flight = 1 + options.job.lag;
  // After resharding a node may have half as many ranks more.
  const uint64_t ranks =
      options.job.ranks_per_node + (options.job.reshard_ppm == 0 ? 0 : (options.job.ranks_per_node + 1) / 2);
  const uint64_t persisting =
      options.storage.used ? 2 : 0;  // one is being written, and one that was requested may wait
  return (options.keep_steps + persisting + in_flight) * (1 + options.replicas) * ranks * chunks;
}

}  // namespace

const char* FaultName(Fault fault) {
  constexpr const char* kNames[] = {"host lost",
                                    "host reboot",
                                    "daemon crash",
                                    "rank crash",
                                    "clog",
                                    "cut",
                                    "isolate",
                                    "reset",
                                    "coordinator",
                                    "flip",
                                    "restart",
                                    "person",
                                    "partition",
                                    "leader lost",
                                    "pause",
                                    "two coordinators",
                                    "storage away",
                                    "storage rot",
                                    "everything lost",
                                    "storage hangs",
                                    "drain",
                                    "replaced",
                                    "away",
                                    "pair",
                                    "storage unmounted",
                                    "storage stuck",
                                    "storage refused",
                                    "storage misread",
                                    "reopened"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == kFaultKinds);
  return kNames[static_cast<size_t>(fault)];
}

const char* TroubleName(Trouble trouble) { return kTroubleKinds[static_cast<size_t>(trouble)].name; }

TroubleOdds::TroubleOdds() {
  for (size_t at = 0; at < kTroubles; ++at) percent[at] = kTroubleKinds[at].percent;
}

bool TroubleOdds::Set(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) return false;
  char* end = nullptr;
  const uint64_t value = std::strtoull(text.c_str() + equals + 1, &end, 10);
  if (*end != '\0' || equals + 1 == text.size() || value > 100) return false;
  for (size_t at = 0; at < kTroubles; ++at) {
    if (text.compare(0, equals, kTroubleKinds[at].name) != 0) continue;
    percent[at] = static_cast<uint32_t>(value);
    return true;
  }
  return false;
}

Options DrawOptions(uint64_t seed, uint32_t nodes, const TroubleOdds& odds) {
  Random random(Mix(seed, 0x0b7105));
  Options options;
  options.seed = seed;
  const uint32_t drawn = DrawNodes(&random);
  options.nodes = nodes != 0 ? nodes : drawn;
  const bool big = options.nodes >= kBigNodes;
  options.domains = random.Chance(60 * kPercent) ? 1 : static_cast<uint32_t>(random.Between(2, 5));
  options.replicas = static_cast<uint32_t>(
      random.Chance(70 * kPercent) ? 1 : random.Between(1, std::min(3u, options.nodes - 1)));
  options.keep_steps = static_cast<uint32_t>(random.Chance(60 * kPercent) ? 2 : random.Between(1, 4));
  options.quarantine_us = random.Between(2, 4) * kSecond;
  if (random.Chance(50 * kPercent)) options.timer_late_max_us = random.Between(1, 20 * kMs);
  options.fault_phase_us = random.Between(2, options.nodes > kSmallNodes ? 4 : 8) * kSecond;
  options.pause_to_heal = random.Chance(50 * kPercent);
  DrawNetwork(&random, &options.network);
  options.network.zombie_max_us = options.quarantine_us - 100 * kMs;
  DrawFaults(&random, &options);
  DrawJob(&random, &options.job);
  if (big) {
    options.job.ranks_per_node = 1;
    options.job.abort_ppm = 0;  // with 300 ranks hardly any step would be complete
    options.job.compute_min_us = 100 * kMs;
    options.job.compute_max_us = 300 * kMs;
    options.job.content.objects_max = std::min(options.job.content.objects_max, 2u);
    options.keep_steps = std::min(options.keep_steps, 2u);
    options.replicas = std::min(options.replicas, 2u);
    options.invariants_ppm = 500;
  }
  // From a generator of its own, so that a seed without it remains the same run.
  Random device(Mix(seed, kDeviceSalt));
  if (device.Chance(25 * kPercent)) options.job.device_ppm = 50 * kPercent;
  Random agree(Mix(seed, kAgreeSalt));
  options.job.agree = agree.Chance(50 * kPercent);
  // So few that most steps can be committed.
  if (options.job.agree && agree.Chance(50 * kPercent))
    options.job.disagree_ppm = 20 * kPercent / (options.nodes * options.job.ranks_per_node);
  Random drop(Mix(seed, kDropSalt));
  if (drop.Chance(30 * kPercent))
    options.job.drop_ppm = 50 * kPercent / (options.nodes * options.job.ranks_per_node);
  DrawMoreTrouble(seed, &options);
  DrawTroubles(seed, odds, &options);
  // The same. An encrypted copy needs its chunks twice while it is decrypted.
  Random encrypt(Mix(seed, kEncryptSalt));
  options.encrypts = encrypt.Chance(25 * kPercent);
  if (options.encrypts && encrypt.Chance(50 * kPercent))
    options.keys_every_us = encrypt.Between(20 * kMs, 400 * kMs);
  const uint64_t needed = ChunksNeeded(options) + (options.encrypts ? 16 : 0);
  options.starved = !big && random.Chance(6 * kPercent) && !odds.alone;
  options.chunks = options.starved ? std::max<uint64_t>(8, needed / random.Between(2, 5))
                                   : needed * random.Between(15, 30) / 10 + 16;
  return options;
}

std::string Describe(const Options& options) {
  char text[512];
  std::snprintf(text, sizeof(text),
                "nodes %u replicas %u keep %u chunks %" PRIu64
                " ranks per node %u incarnation tokens %d fences %d loss %u ppm "
                "transfer failures %u ppm links lost %u ppm crashes in inputs %u ppm fault every %" PRIu64
                " us starved %d pause %d drift %u ppm long saves %u ppm wire flips %u ppm",
                options.nodes, options.replicas, options.keep_steps, options.chunks,
                options.job.ranks_per_node, options.job.incarnation_tokens, options.network.fences,
                options.network.loss_ppm, options.network.transfer_fail_ppm, options.network.link_lost_ppm,
                options.faults.crash_in_input_ppm, options.faults.every_us, options.starved,
                options.pause_to_heal, options.clock_drift_ppm, options.job.long_ppm,
                options.network.wire_flip_ppm);
  std::string line = text;
  if (options.encrypts) line += " encrypts";
  if (options.keys_every_us != 0) line += " replaces keys";
  if (options.job.agree) line += " agreements, others " + std::to_string(options.job.disagree_ppm) + " ppm";
  if (options.job.drop_ppm != 0) line += " drops " + std::to_string(options.job.drop_ppm) + " ppm";
  if (options.storage.used) line += " persist every " + std::to_string(options.storage.persist_every);
  if (options.storage.policy) line += " policy by ranks";
  if (options.spares != 0) line += " spares " + std::to_string(options.spares);
  if (options.nodes_announced != 0) line += " announced " + std::to_string(options.nodes_announced);
  if (options.nodes_min != 0) line += " starts with " + std::to_string(options.nodes_min);
  if (options.job.token_again_ppm != 0) line += " tokens again";
  if (options.pair_stays) line += " pair stays";
  if (options.stuck_stays) line += " stuck stays";
  for (size_t kind = 0; kind < kFaultKinds; ++kind) {
    if (options.faults.every_us == 0 || options.faults.weight[kind] == 0) continue;
    line += ", ";
    line += FaultName(static_cast<Fault>(kind));
  }
  return line;
}

}  // namespace ropeteam::simulation
