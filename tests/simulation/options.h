// SPDX-License-Identifier: Apache-2.0
//
// Everything about a run that is drawn from its seed. Swarm testing: each seed disables some kinds of faults,
// because a fault that is always on hides the bugs that others would show.

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
  uint32_t misdeliver_ppm = 0;  // of those for a dead instance: delivered to the next one at its address
  TimeUs delay_min_us = 20;
  TimeUs delay_max_us = 200;
  uint32_t slow_ppm = 0;  // takes up to slow_max_us: overtaken by hundreds of others
  TimeUs slow_max_us = 200 * kMs;
  TimeUs transfer_min_us = 20;
  TimeUs transfer_max_us = 2 * kMs;
  uint32_t transfer_fail_ppm = 0;        // completes with kLinkFailed after some of its bytes landed
  uint32_t link_lost_ppm = 0;            // of these transfers: the peer is gone until it is connected again
  uint32_t device_refused_ppm = 50'000;  // of puts from device memory: the card cannot read it
  // Writes of a dead node or of a failed put may land later: each remaining piece with zombie_ppm, until
  // zombie_max_us after the put was posted. That must stay below the engines' quarantine.
  uint32_t zombie_ppm = 500'000;
  TimeUs zombie_max_us = 1500 * kMs;
  // The transport can prevent that, and says so. If it cannot, it also accepts new puts of disconnected
  // peers.
  bool fences = false;
  uint32_t wire_flip_ppm = 0;  // of pieces: one bit of it arrives flipped
  TimeUs post_max_us = 0;      // from the engine's order until the fabric accepts the transfer
  TimeUs check_min_us = 5;
  TimeUs check_max_us = 500;
};

// The largest drift of a clock, on which membership's leases rely.
inline constexpr uint32_t kClockDriftPpmMax = 5000;

enum class Fault : uint8_t {
  kHostLost = 0,  // the host and its memory
  kHostReboot,    // all processes of the host; its memory stays
  kDaemonCrash,   // kill -9 of the daemon alone
  kRankCrash,
  kClog,             // a link is stuck for a while; or all links of a host, as when it swaps
  kCut,              // a link loses everything for a while, in one or both directions; or all links of a host
  kIsolate,          // a node and the coordinator cannot reach each other for a while
  kReset,            // the messages in flight on a link are dropped
  kCoordinator,      // the coordinator dies and returns
  kFlip,             // bits flip: in sealed chunks, in other chunks, or in the arena's tables
  kRestart,          // the launcher restarts all ranks for no reason
  kPerson,           // not a fault: an operator asks for a report or a verify
  kPartition,        // the hosts and the coordinator are split into groups that cannot reach each other
  kLeaderLost,       // the leader's host is lost together with the coordinator
  kPause,            // a daemon is stopped and continues later; its transfers in flight land meanwhile
  kTwoCoordinators,  // a second one runs for a while; a host finds sometimes one and sometimes the other
  kStorageAway,      // storage does not answer for a while
  kStorageRot,       // a file on storage is damaged or missing
  kEverythingLost,   // all hosts at once, and their memory
  kStorageHangs,     // a host's work on storage makes no progress for a while
  kDrain,            // a host is drained, and leaves
  // Those of a Trouble of the same name:
  kReplaced,
  kAway,
  kPair,
  kStorageUnmounted,
  kStorageStuck,
  kStorageRefused,
  kStorageMisread,
  kReopened,
  kCount,
};
inline constexpr size_t kFaultKinds = static_cast<size_t>(Fault::kCount);
const char* FaultName(Fault fault);

// Trouble that a campaign can switch off, force, or run alone, by its name.
enum class Trouble : uint8_t {
  kSpares = 0,  // more hosts than --nodes: they join, and no rank runs there until another host is down
  kFewNodes,    // --nodes is below the number of hosts with ranks
  kElastic,     // ranks start on the hosts that are up, if these are enough
  kReplaced,    // a host is gone for good, and an empty one joins under the same or another name
  kAway,        // hosts are down with their memory for long, more than R of them
  kPair,  // two hosts cannot reach each other for long, in control, data or both. Both reach the coordinator
  kStorageUnmounted,  // a host has an empty directory in the place of storage
  kStorageStuck,      // storage hangs for one host for long
  kStorageRefused,    // storage refuses everything by permission, for one host or for all
  kStorageMisread,    // the memory of one host spoils what it reads from storage
  kTokenAgain,        // the launcher gives the next opening the token of the last
  kReopened,          // all ranks open again in their own processes, each when it is ready
  kCount,
};
inline constexpr size_t kTroubles = static_cast<size_t>(Trouble::kCount);
const char* TroubleName(Trouble trouble);

// Of seeds, in percent.
struct TroubleOdds {
  std::array<uint32_t, kTroubles> percent;
  bool alone = false;  // no other fault, and a network without faults
  TroubleOdds();       // the defaults
  // "NAME=PERCENT". False: there is no such name, or more than 100 %.
  bool Set(const std::string& text);
};

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
  TimeUs long_us =
      0;  // the longest of those that last long: hosts away, pairs apart, storage of one host in trouble
  // Of inputs: the daemon dies after it, with only some of its outputs executed.
  uint32_t crash_in_input_ppm = 0;
  Flips flips = Flips::kRepairable;
  uint32_t unsealed_ppm = 0;  // of flips: in a chunk that is not sealed yet
  uint32_t table_ppm = 0;     // of flips: in the arena's superblock, slots and descriptors
};

struct JobOptions {
  uint32_t ranks_per_node = 1;
  bool incarnation_tokens = true;  // the launcher gives each incarnation a token
  uint32_t zombie_ppm =
      0;  // of the ranks of a stopped incarnation: they continue to save (needs incarnation_tokens)
  uint32_t token_again_ppm = 0;  // of restarts: the same token as before
  bool reopens = false;          // ranks may open again in their own processes
  uint32_t reshard_ppm = 0;      // of restarts: another world size
  uint32_t shuffle_ppm = 0;      // of restarts: ranks change nodes
  uint32_t lag = 1;  // steps that a rank may be ahead of the slowest; 1 is a collective every step
  TimeUs compute_min_us = 5 * kMs;  // between two saves of a rank
  TimeUs compute_max_us = 60 * kMs;
  uint32_t wait_ppm = 300'000;  // of saves: waits for a level before it goes on
  uint32_t abort_ppm = 10'000;
  uint32_t device_ppm = 0;    // of saves: the bytes are first in a GPU's memory, and may be put from there
  bool agree = false;         // saves give a value that must be the same on all ranks
  uint32_t disagree_ppm = 0;  // of those saves: they give another value
  uint32_t drop_ppm = 0;      // of saves: the rank drops one of its last few steps
  uint32_t long_ppm = 0;      // of saves: takes a pause of up to long_max_us
  TimeUs long_max_us = 0;
  // Of saves during which the daemon dies: the copy of one chunk continues for up to stray_max_us.
  uint32_t stray_ppm = 0;
  TimeUs stray_max_us = 0;
  uint32_t ranges_ppm = 500'000;     // of reads of others' shards: by ranges, if the shard is not here
  uint32_t read_other_ppm = 50'000;  // of steps: reads another rank's shard of some recent step
  TimeUs read_hold_max_us = 50 * kMs;
  ContentShape content;
};

struct StorageOptions {
  bool used = false;
  uint64_t persist_every = 1;  // steps
  size_t keep = 0;             // steps on storage, by the daemons' flags; 0: no flag
  bool policy = false;         // ranks set it, and how often a step is persisted
  uint32_t ask_ppm = 0;        // of saves: the rank asks for the step to be persisted
  uint32_t wait_ppm = 0;       // of saves: the rank waits for PERSISTED
  TimeUs request_min_us = 100;
  TimeUs request_max_us = 20 * kMs;
  uint32_t fail_ppm = 0;      // of requests: refused, some after a part of their effect
  uint32_t lost_ack_ppm = 0;  // of requests: they take effect, but are reported as failed
  // Shorter than `latest` waits for storage, so a persisted step is never passed over because of it.
  TimeUs away_max_us = 8 * kSecond;
  bool atomic = true;                // a rewritten file is never seen half written
  TimeUs listing_lag_us = 0;         // listings show a step after this time
  TimeUs stalled_us = 60 * kSecond;  // after this time without progress the daemon is told
};

struct Options {
  uint64_t seed = 0;
  uint32_t nodes = 4;            // hosts that ranks are started on
  uint32_t spares = 0;           // further hosts
  uint32_t nodes_announced = 0;  // --nodes; 0: `nodes`
  uint32_t nodes_min = 0;        // ranks start when so many hosts are up; 0: `nodes`
  bool pair_stays = false;       // the leader and a member cannot reach each other while progress is demanded
  bool stuck_stays = false;      // nor does the leader's storage make any
  uint32_t domains = 1;
  uint32_t replicas = 1;
  uint32_t keep_steps = 2;
  uint64_t chunk_bytes = 4096;
  uint64_t chunks = 128;  // of each arena
  TimeUs quarantine_us = 3 * kSecond;
  // --wait-for-missing: a known commit is passed over after its nodes were away for so long.
  TimeUs wait_for_missing_us = 20 * kSecond;
  TimeUs timer_late_max_us = 0;  // how late OnTimer() may come
  uint64_t scrub_bytes_per_s = 0;
  uint32_t restores_max =
      0;  // EngineConfig's; the stories that set it tell the checker which steps are passed over
  uint32_t clock_drift_ppm = 0;  // each host's clock runs too fast or too slow by up to this much
  TimeUs fault_phase_us = 10 * kSecond;
  TimeUs heal_limit_us = 120 * kSecond;  // by then a healed cluster must have made progress
  bool encrypts = false;
  TimeUs keys_every_us = 0;  // mean time between the steps of a key's replacement, on one host each; 0: none
  bool starved = false;  // the arena cannot hold what retention keeps: refusals are expected, progress is not
  bool pause_to_heal = false;        // no ranks run while redundancy is restored
  uint32_t invariants_ppm = 20'000;  // of inputs: CheckInvariants() is called after them
  NetworkOptions network;
  FaultOptions faults;
  JobOptions job;
  StorageOptions storage;
  // Several openings may be under one token, and so in one incarnation.
  bool same_token_again() const { return job.token_again_ppm != 0 || job.reopens; }
};

// `nodes` 0: drawn from the seed, too.
Options DrawOptions(uint64_t seed, uint32_t nodes = 0, const TroubleOdds& odds = {});
// One line, for the output.
std::string Describe(const Options& options);

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_OPTIONS_H_
