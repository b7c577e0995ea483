// SPDX-License-Identifier: Apache-2.0
//
// The options of ropeteamd: flags, and a config file with the same names (flags win). docs/operations.md lists
// them. Everything is checked here, so that other code never sees a value outside its limits.

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
#include "membership/credentials/tls_files.h"
#include "membership/etcd/etcd.h"
#include "membership/messages.h"
#include "node/notice_watch.h"
#include "storage/retention/retention.h"

namespace ropeteam {

class ReplicaCipher;

inline constexpr uint32_t kCheckThreadsMax = 64;
inline constexpr uint32_t kJoinTimeoutSecondsMax = 86400;  // a day
inline constexpr uint32_t kNoticeSecondsMax = 86400;
inline constexpr size_t kDevicesMax = 16;  // rails of one node; the largest machines have eight
inline constexpr int kGidIndexMax = 255;   // ports have tables of up to 256
inline constexpr uint64_t kPersistRateMax = 1000ull << 30;  // above what a node's network gives
inline constexpr uint64_t kScrubRateDefault = 100ull << 20;
inline constexpr uint64_t kScrubRateMax = 100ull << 30;  // above what a machine's memory gives
// The loss of a node also restarts the ranks, but three times in a row without a commit between them is unlikely.
inline constexpr uint32_t kQuarantineAfterDefault = 3;
inline constexpr uint32_t kQuarantineAfterMax = 1000;

struct Options {
  std::string job;
  std::string node;      // default "node-<ordinal>"
  uint32_t ordinal = 0;  // position among the job's nodes; the launcher's node rank
  uint32_t nodes = 1;    // expected
  // host:port each, in the order in which they are tried; empty only with nodes == 1: embedded on a port of the system's
  // choice
  std::vector<std::string> coordinators;
  bool embed_coordinator = false;
  std::string
      coordinator_listen;  // which of them an embedded one listens on; empty: the first that is this machine's
  // Where membership's state is, if not with a coordinator at a fixed address: then those above are not used.
  std::optional<EtcdConfig> etcd;
  std::string listen = "127.0.0.1";  // numeric, never a wildcard
  uint16_t control_port = 0;         // 0: the system chooses
  uint16_t data_port = 0;
  // Access to the job: daemons that have one of these keys, or a certificate of tls_files.roots (and of tls_name). Without
  // either, a key of this machine and user, made if there is none; with `insecure`, everyone who reaches the ports.
  std::vector<JobKey> job_keys;
  std::string job_key_from;  // "--job-key-file FILE"
  TlsFiles tls_files;        // all paths empty: none
  std::string tls_name;      // that peers' certificates must have; empty: any
  bool insecure = false;
  // Chunks are encrypted before they leave this node. The daemon makes the cipher from the job keys.
  bool encrypt_replicas = false;
  std::shared_ptr<const ReplicaCipher> replica_cipher = nullptr;
  uint64_t memory_bytes = 0;  // of the arena's file; 0: as the file there has, else a quarter of what is free
  uint64_t chunk_bytes = kChunkBytesDefault;
  std::string arena_path = "/dev/shm";
  bool arena_reset = false;
  uint32_t replicas = 1;
  uint32_t keep_steps = 2;
  // Which of nodes, replicas and keep_steps were given, here or in the config file: those must be the job's. The
  // others are what a job gets whose coordinator runs here; elsewhere the job's are taken.
  NamedSettings named;
  std::string storage;       // URL of where committed steps are persisted; empty: nowhere
  std::string restore_from;  // URL[@STEP] of another job's steps, to begin from; empty: there is none
  uint64_t persist_every = 0;
  bool persist_every_seconds = false;
  uint64_t persist_bytes_per_s = 0;   // written by this node; 0: no bound
  storage::RetentionRules retention;  // of steps on storage; the node that leads goes by its own
  std::string metrics;                // ADDRESS:PORT where Prometheus may ask; empty: nowhere
  std::string audit_log;              // path of the log of files written and deleted; empty: none
  bool take_over_storage = false;     // from a live holder of the job's lock on storage, once
  std::string domain;
  std::string socket;                // empty: DefaultSocketPath()
  std::string transport = "auto";    // see transport/fabrics.h
  std::string provider;              // libfabric's; empty: the transport's choice
  std::vector<std::string> devices;  // empty: the transport's choice
  int gid_index = -1;                // -1: RoCE v2 preferred
  bool require_rdma = false;
  bool list_devices = false;  // print what each transport sees, and end
  bool list_json = false;     // as JSON
  uint32_t dead_after_ms = 1000;
  uint32_t heartbeat_ms = 200;
  uint32_t check_threads = 2;
  uint64_t scrub_bytes_per_s = kScrubRateDefault;       // 0: off
  uint32_t quarantine_after = kQuarantineAfterDefault;  // restores of a step in a row; 0: never
  int ready_fd = -1;        // the ready line goes there too, and the descriptor is closed behind it
  bool supervised = false;  // that descriptor stays open, for what node/supervisor_link.h lists
  uint32_t join_timeout_s =
      0;  // the ready line waits for the first view, at most this long; 0: it does not wait
  bool drain_on_term = false;    // SIGTERM drains this node
  uint32_t notice_seconds = 30;  // a drain takes no longer
  NoticeSource notice;           // the source that announces that this machine will be reclaimed
  LogLevel log_level = LogLevel::kInfo;
  std::string log_file;  // empty: stderr
};

// Parses and checks, and reads the job key. `job_key` is the text of ROPETEAM_JOB_KEY, empty where it is not set. When
// `print` is not empty after kOk, the caller prints it and exits 0 (--help,
// --version). kInvalidArgument: one line that names the flag, the value and the limit.
Status ParseOptions(int argc, const char* const* argv, const std::string& job_key, Options* options,
                    std::string* print);

// Whether other hosts may reach what these options listen on: --listen or the coordinator's host is not loopback. Asks the
// resolver where the coordinator has a name.
bool ReachableFromElsewhere(const Options& options);
// A numeric IPv4 or IPv6 address that names one interface; the message says what is wrong with `flag`'s
// value.
Status CheckListenAddress(const std::string& flag, const std::string& address);
// Splits "host:port", "[::1]:port"; the port must be 1 … 65535.
Status SplitHostPort(const std::string& flag, const std::string& text, std::string* host, uint16_t* port);
// "127.0.0.1:80", "[::1]:80".
std::string JoinHostPort(const std::string& host, uint16_t port);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_OPTIONS_H_
