// SPDX-License-Identifier: Apache-2.0
//
// The options of ropeteamd: flags, and a config file with the same names (flags win). docs/operations.md lists them.
// Everything is checked here, so other code never gets a value outside its limits.

#ifndef ROPETEAM_NODE_OPTIONS_H_
#define ROPETEAM_NODE_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/view.h"
#include "core/shard/extent.h"
#include "membership/credentials/secrets.h"
#include "membership/credentials/tls_files.h"
#include "membership/etcd/etcd.h"
#include "membership/messages.h"
#include "node/notice_watch.h"
#include "storage/retention/retention.h"
#include "storage/sink.h"

namespace ropeteam {

class ReplicaCipher;

inline constexpr uint32_t kCheckThreadsMax = 64;
inline constexpr uint32_t kJoinTimeoutSecondsMax = 86400;  // a day
inline constexpr uint32_t kNoticeSecondsMax = 86400;
inline constexpr size_t kDevicesMax = 16;  // rails of one node; the largest machines have eight
inline constexpr int kGidIndexMax = 255;   // ports have tables of up to 256
inline constexpr uint64_t kPersistRateMax = 1000ull << 30;  // more than a node's network can carry
inline constexpr uint64_t kScrubRateDefault = 100ull << 20;
inline constexpr uint64_t kScrubRateMax = 100ull << 30;  // more than a machine's memory bandwidth
// The loss of a node also restarts the ranks. Three losses in a row without a commit between them are unlikely.
inline constexpr uint32_t kQuarantineAfterDefault = 3;
inline constexpr uint32_t kQuarantineAfterMax = 1000;

struct Options {
  std::string job;
  std::string node;      // default "node-<ordinal>"
  uint32_t ordinal = 0;  // position among the job's nodes; the launcher's node rank
  uint32_t nodes = 1;    // expected
  // host:port each, in the order of the attempts. Empty only if `alone`.
  std::vector<std::string> coordinators;
  bool embed_coordinator = false;
  std::string
      coordinator_listen;  // which of them an embedded one listens on; empty: the first that is this machine's
  // Where membership's state is, unless a coordinator has a fixed address. If set, the addresses above are not used.
  std::optional<EtcdConfig> etcd;
  // No other node can join, because nothing names this one: --nodes 1 without --coordinator. It listens on no port but
  // that of `metrics`, and the ports below are not used.
  bool alone = false;
  std::string listen = "127.0.0.1";  // numeric, never a wildcard
  uint16_t control_port = 0;         // 0: the system chooses
  uint16_t data_port = 0;
  // Access to the job: daemons with one of these keys, or with a certificate of tls_files.roots (and of tls_name).
  // Without either: daemons with a key of this machine and user, which is created if there is none. With `insecure`:
  // everyone who can reach the ports.
  std::vector<JobKey> job_keys;
  std::string job_key_from;  // "--job-key-file FILE"
  TlsFiles tls_files;        // all paths empty: none
  std::string tls_name;      // the name that peers' certificates must have; empty: any
  bool insecure = false;
  // Encrypts chunks before they leave this node. The daemon derives the key from the job keys.
  bool encrypt_replicas = false;
  std::shared_ptr<const ReplicaCipher> replica_cipher = nullptr;
  uint64_t memory_bytes = 0;  // of the arena's file; 0: as the file there has, else a quarter of what is free
  uint64_t chunk_bytes = kChunkBytesDefault;
  std::string arena_path = "/dev/shm";
  bool arena_reset = false;
  uint32_t replicas = 1;
  uint32_t keep_steps = 2;
  TimeUs wait_for_missing_us = kWaitForMissingDefaultUs;
  // Which of nodes, replicas and keep_steps were given, here or in the config file. Those must equal the job's. The
  // others are the job's values if its coordinator runs here; otherwise the job's values are taken.
  NamedSettings named;
  std::string storage;       // URL of where committed steps are persisted; empty: nowhere
  std::string restore_from;  // URL[@STEP] of another job's steps, to begin from; empty: there is none
  uint64_t persist_every = 0;
  bool persist_every_seconds = false;
  uint64_t persist_bytes_per_s = 0;   // written by this node; 0: no limit
  storage::RetentionRules retention;  // of steps on storage; the leader's rules count
  std::string metrics;                // ADDRESS:PORT for Prometheus; empty: none
  std::string audit_log;              // path of the log of files written and deleted; empty: none
  mode_t storage_mode = storage::kFileModeDefault;  // of new files, if storage is a directory
  bool take_over_storage = false;                   // once, from a live holder of the job's lock on storage
  std::string domain;
  std::string socket;                // empty: DefaultSocketPath()
  std::string transport = "auto";    // see transport/fabrics.h
  std::string provider;              // libfabric's; empty: the transport's choice
  std::vector<std::string> devices;  // empty: the transport's choice
  int gid_index = -1;                // -1: RoCE v2 preferred
  bool require_rdma = false;
  bool list_devices = false;  // print the devices that each transport finds, and exit
  bool list_json = false;     // as JSON
  uint32_t dead_after_ms = 1000;
  uint32_t heartbeat_ms = 200;
  uint32_t check_threads = 2;
  uint64_t scrub_bytes_per_s = kScrubRateDefault;       // 0: off
  uint32_t quarantine_after = kQuarantineAfterDefault;  // restores of a step in a row; 0: never
  int ready_fd = -1;        // the ready line is also written to this descriptor, which is then closed
  bool supervised = false;  // the descriptor stays open, for the uses in node/supervisor_link.h
  uint32_t join_timeout_s =
      0;  // the ready line waits for the first view, at most this long; 0: it does not wait
  bool drain_on_term = false;    // SIGTERM drains this node
  uint32_t notice_seconds = 30;  // the longest time for a drain
  NoticeSource notice;           // the source that announces that this machine will be reclaimed
  LogLevel log_level = LogLevel::kInfo;
  std::string log_file;  // empty: stderr
};

// Parses and checks the options, and reads the job key. If `print` is not empty after kOk, the caller prints it and exits
// with 0 (--help, --version). kInvalidArgument: one line with the flag, the value and the limit.
Status ParseOptions(int argc, const char* const* argv, const Secrets& secrets, Options* options,
                    std::string* print);

// Whether other hosts can reach the addresses on which these options listen: --listen or the coordinator's host is not
// loopback. Uses the resolver if the coordinator's host is a name.
bool ReachableFromElsewhere(const Options& options);
// A numeric IPv4 or IPv6 address of one interface. The message has `flag` and what is wrong with its value.
Status CheckListenAddress(const std::string& flag, const std::string& address);
// Splits "host:port", "[::1]:port"; the port must be 1 … 65535.
Status SplitHostPort(const std::string& flag, const std::string& text, std::string* host, uint16_t* port);
// "127.0.0.1:80", "[::1]:80".
std::string JoinHostPort(const std::string& host, uint16_t port);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_OPTIONS_H_
