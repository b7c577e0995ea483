// SPDX-License-Identifier: Apache-2.0
//
// Everything about a run that is drawn from its seed. Swarm testing: each seed switches some kinds of trouble
// off altogether, because trouble that is always there hides the trouble behind it.

#ifndef ROPETEAM_TESTS_SIMULATION_OPTIONS_H_
#define ROPETEAM_TESTS_SIMULATION_OPTIONS_H_

#include <array>
#include <cstdint>
#include <string>

#include "core/base/ids.h"
#include "tests/simulation/content.h"
#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

// Probabilities are parts per million, of each message or transfer.
struct NetworkOptions {
  uint32_t loss_ppm = 0;
  uint32_t replay_ppm = 0;      // delivered once more, later
  uint32_t misdeliver_ppm = 0;  // of those for a dead instance: given to whoever now lives at its address
  TimeUs delay_min_us = 20;
  TimeUs delay_max_us = 200;
  uint32_t slow_ppm = 0;  // takes up to slow_max_us: overtaken by hundreds of others
  TimeUs slow_max_us = 200 * kMs;
  TimeUs transfer_min_us = 20;
  TimeUs transfer_max_us = 2 * kMs;
  uint32_t transfer_fail_ppm = 0;  // completes with kLinkFailed, some of its bytes landed
  uint32_t link_lost_ppm = 0;      // of transfers that fail so: the peer is gone until it is connected again
  uint32_t device_refused_ppm = 50'000;  // of puts from device memory: the card cannot read it
  // A dead node's writes land for a while, and those of a put that has failed: each unlanded piece with
  // zombie_ppm, until zombie_max_us after the put was posted. Must stay below the engines' quarantine.
  uint32_t zombie_ppm = 500'000;
  TimeUs zombie_max_us = 1500 * kMs;
  // The transport can end that, and says so. One that cannot also takes new puts of a peer that was disconnected.
  bool fences = false;
  uint32_t wire_flip_ppm = 0;  // of transfers: one bit of it arrives flipped
  TimeUs post_max_us = 0;      // between the engine's word and the fabric's taking the transfer
  TimeUs check_min_us = 5;
  TimeUs check_max_us = 500;
};

// What a clock may be off by: the bound that membership's leases rest on.
inline constexpr uint32_t kClockDriftPpmMax = 5000;

enum class Fault : uint8_t {
  kHostLost = 0,  // the host and its memory
  kHostReboot,    // all processes of the host; its memory stays
  kDaemonCrash,   // kill -9 of the daemon alone
  kRankCrash,
  kClog,         // a link is stuck for a while; or a host's all, as when it swaps
  kCut,          // a link loses everything in one direction for a while; or a host's all
  kIsolate,      // a node and the coordinator do not hear each other for a while
  kReset,        // what is under way on a link is dropped
  kCoordinator,  // the coordinator dies and returns
  kFlip,         // bits of sealed chunks flip
  kRestart,      // the launcher restarts the world for no reason
  kPerson,       // no fault: somebody asks for a report or a verify
  kPartition,    // the hosts fall into groups that do not hear each other, the coordinator into one of them
  kLeaderLost,   // the leader's host is lost together with the coordinator
  kPause,        // a daemon is stopped and goes on later; what is under way of its transfers lands meanwhile
  kTwoCoordinators,  // a second one runs for a while, and each host finds now this one and now that
  kStorageAway,      // storage answers nothing for a while
  kStorageRot,       // a file on storage is damaged or missing
  kEverythingLost,   // all hosts at once, and their memory
  kStorageHangs,     // what a host has under way on storage makes no progress for a while
  kDrain,            // a host is drained, and leaves
  kCount,
};
inline constexpr size_t kFaultKinds = static_cast<size_t>(Fault::kCount);
const char* FaultName(Fault fault);

enum class Flips : uint8_t {
  kRepairable = 0,  // only where another good copy of that chunk exists
  kAny = 1,
};

struct FaultOptions {
  TimeUs every_us = 0;  // mean time between two; 0: none
  std::array<uint32_t, kFaultKinds> weight{};
  uint32_t hosts_down_max = 1;  // at a time, lost or rebooting
  TimeUs host_back_min_us = 300 * kMs;
  TimeUs host_back_max_us = 3 * kSecond;
  TimeUs daemon_back_min_us = 5 * kMs;
  TimeUs daemon_back_max_us = 1500 * kMs;
  TimeUs link_trouble_max_us = 1200 * kMs;
  TimeUs isolate_max_us = 2400 * kMs;
  TimeUs partition_max_us = 0;
  TimeUs pause_max_us = 0;
  TimeUs two_coordinators_max_us = 0;
  // The daemon dies with an input handled and only some of its outputs carried out
  uint32_t crash_in_input_ppm = 0;
  Flips flips = Flips::kRepairable;
  uint32_t unsealed_ppm = 0;  // of flips: in a chunk that is not sealed yet
  uint32_t table_ppm = 0;     // of flips: in the arena's superblock, slots and descriptors
};

struct JobOptions {
  uint32_t ranks_per_node = 1;
  bool incarnation_tokens = true;  // the launcher gives each incarnation a name
  uint32_t zombie_ppm =
      0;  // of the ranks of an incarnation that is stopped: they go on (needs incarnation_tokens)
  uint32_t reshard_ppm = 0;  // of restarts: another world size
  uint32_t shuffle_ppm = 0;  // of restarts: ranks change nodes
  uint32_t lag = 1;          // steps that a rank may be ahead of the slowest; 1 is a collective every step
  TimeUs compute_min_us = 5 * kMs;  // between two saves of a rank
  TimeUs compute_max_us = 60 * kMs;
  uint32_t wait_ppm = 300'000;  // of saves: waits for a level before it goes on
  uint32_t abort_ppm = 10'000;
  uint32_t device_ppm = 0;    // of saves: the bytes lie in a GPU's memory first, and may be put from there
  bool agree = false;         // saves give a value that the ranks share, …
  uint32_t disagree_ppm = 0;  // … and so many of them another one
  uint32_t drop_ppm = 0;      // of saves: the rank drops one of its last few steps
  uint32_t long_ppm = 0;      // of saves: takes a pause of up to long_max_us
  TimeUs long_max_us = 0;
  // Of saves whose daemon dies: the copy of one chunk goes on for up to stray_max_us.
  uint32_t stray_ppm = 0;
  TimeUs stray_max_us = 0;
  uint32_t ranges_ppm = 500'000;     // of reads of others' shards: by ranges, where the shard is not here
  uint32_t read_other_ppm = 50'000;  // of steps: reads another rank's shard of some recent step
  TimeUs read_hold_max_us = 50 * kMs;
  ContentShape content;
};

struct StorageOptions {
  bool used = false;
  uint64_t persist_every = 1;  // steps
  size_t keep = 0;             // steps on storage, by the daemons' flags; 0: none says anything
  bool policy = false;         // ranks say it, and how often a step is due
  uint32_t ask_ppm = 0;        // of saves: the rank asks for the step to be persisted
  uint32_t wait_ppm = 0;       // of saves: the rank waits for PERSISTED
  TimeUs request_min_us = 100;
  TimeUs request_max_us = 20 * kMs;
  uint32_t fail_ppm = 0;      // of requests: refused, some after a part of their effect
  uint32_t lost_ack_ppm = 0;  // of requests: they take effect, and fail all the same
  // Shorter than what `latest` waits for storage: what was persisted is never passed over for it.
  TimeUs away_max_us = 8 * kSecond;
  bool atomic = true;                // a file that is written again is never seen half written
  TimeUs listing_lag_us = 0;         // a step is listed so late
  TimeUs stalled_us = 60 * kSecond;  // without progress: the daemon is told
};

struct Options {
  uint64_t seed = 0;
  uint32_t nodes = 4;
  uint32_t domains = 1;
  uint32_t replicas = 1;
  uint32_t keep_steps = 2;
  uint64_t chunk_bytes = 4096;
  uint64_t chunks = 128;  // of each arena
  TimeUs quarantine_us = 3 * kSecond;
  TimeUs timer_late_max_us = 0;  // how late OnTimer() may come
  uint64_t scrub_bytes_per_s = 0;
  uint32_t restores_max =
      0;  // EngineConfig's; the stories that set it tell the checker which steps are passed over
  uint32_t clock_drift_ppm = 0;  // each host's clock runs by up to so much too fast or too slow
  TimeUs fault_phase_us = 10 * kSecond;
  TimeUs heal_limit_us = 120 * kSecond;  // by then a healed cluster must have made progress
  bool encrypts = false;
  bool starved = false;  // the arena cannot hold what retention keeps: refusals are expected, progress is not
  bool pause_to_heal = false;        // no world runs while redundancy is restored
  uint32_t invariants_ppm = 20'000;  // of inputs after which the engine recomputes everything it believes
  NetworkOptions network;
  FaultOptions faults;
  JobOptions job;
  StorageOptions storage;
};

// `nodes` 0: drawn from the seed too.
Options DrawOptions(uint64_t seed, uint32_t nodes = 0);
// One line for people.
std::string Describe(const Options& options);

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_OPTIONS_H_
