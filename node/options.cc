// SPDX-License-Identifier: Apache-2.0
#include "node/options.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>

#include "core/base/sizes.h"
#include "core/engine/storage_work.h"
#include "membership/membership.h"
#include "storage/sink.h"

namespace ropeteam {
namespace {

constexpr size_t kSocketPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;

// All values as text. They are converted here, so that every error message is ours and names the limit.
struct Texts {
  std::string job, node, ordinal = "0", nodes = "1", coordinator, coordinator_listen, listen = "127.0.0.1",
                         control_port = "0";
  std::string data_port = "0", memory = "auto", chunk_size = "4M", arena_path = "/dev/shm", replicas,
              keep_steps = "2";
  std::string domain, socket, transport = "auto", provider, device, gid_index, dead_after_ms = "1000";
  std::string heartbeat_ms, check_threads, scrub_rate = "100M", quarantine_after, ready_fd = "-1",
                                           log_level = "info", log_file;
  std::string storage, persist_every = "0", persist_rate = "0", keep_on_storage = "0", keep_every = "0";
  std::string storage_mode, keep_best, keep_within, audit_log, restore_from, metrics, join_timeout = "0";
  std::string wait_for_missing;
  std::string notice, notice_endpoint, notice_seconds = "30";
  std::string membership = "standalone", etcd_ca, etcd_cert, etcd_key, etcd_password_file;
  bool embed = false, no_embed = false, arena_reset = false, version = false, require_rdma = false;
  std::string job_key_file, tls_cert, tls_key, tls_ca, tls_name;
  bool list_devices = false, json = false, take_over_storage = false, insecure = false, supervised = false;
  bool drain_on_term = false, encrypt_replicas = false;
};

void Declare(CLI::App& app, Texts& t) {
  app.allow_config_extras(
      CLI::config_extras_mode::error);  // otherwise a misspelt name would be ignored silently
  app.set_config("--config", "", "file with these options, one `name = value` a line; flags win");
  app.add_option("--job", t.job, "name of the training run; survives its restarts (required)");
  app.add_option("--node", t.node, "this node's name, unique in the job [node-<ordinal>]");
  app.add_option("--ordinal", t.ordinal, "this node's position among the job's nodes, from 0 [0]");
  app.add_option("--nodes", t.nodes, "number of nodes that the job has [1, or the running job's]");
  app.add_option(
      "--coordinator", t.coordinator,
      "HOST:PORT[,HOST:PORT…] where the job's nodes register, in the order in which they are tried; needed "
      "with --nodes over 1");
  app.add_flag("--embed-coordinator", t.embed, "run the coordinator here [where --ordinal is 0]");
  app.add_flag("--no-embed-coordinator", t.no_embed, "do not run the coordinator here");
  app.add_option("--coordinator-listen", t.coordinator_listen,
                 "HOST:PORT of a coordinator that runs here [the first of --coordinator that is an address "
                 "of this machine]");
  app.add_option(
      "--membership", t.membership,
      "standalone, or etcd://[USER@]HOST:PORT,…/PREFIX: any node may run the coordinator, and etcd stores "
      "which one does; etcds:// for TLS [standalone]");
  app.add_option("--etcd-ca", t.etcd_ca,
                 "file with the certificates of the authorities that signed etcd's [the system's]");
  app.add_option("--etcd-cert", t.etcd_cert, "file with this client's certificate for etcd");
  app.add_option("--etcd-key", t.etcd_key, "file with the private key of --etcd-cert");
  app.add_option("--etcd-password-file", t.etcd_password_file,
                 "file with the password of etcd's USER [$ROPETEAM_ETCD_PASSWORD]");
  app.add_option("--listen", t.listen,
                 "numeric address for control and data, and for nothing else [127.0.0.1]");
  app.add_option("--control-port", t.control_port,
                 "TCP port of the control plane, 0: any free one; no port is open with --nodes 1 and no "
                 "--coordinator [0]");
  app.add_option("--data-port", t.data_port, "port of the data plane, likewise [0]");
  app.add_option("--job-key-file", t.job_key_file,
                 "file with the job key, the same on all nodes: openssl rand -hex 32 makes one "
                 "[ROPETEAM_JOB_KEY, or on loopback a key of this machine and user]");
  app.add_option("--tls-cert", t.tls_cert,
                 "this node's certificate in PEM, in place of a job key; replaced files are used at once");
  app.add_option("--tls-key", t.tls_key, "its private key");
  app.add_option("--tls-ca", t.tls_ca, "the certificates of those that sign the job's nodes");
  app.add_option("--tls-name", t.tls_name,
                 "DNS name or CN that every node's certificate has, where --tls-ca signs others too [any]");
  app.add_flag("--insecure", t.insecure,
               "without a key, accept everyone who reaches the ports, also from other hosts; permits "
               "transports that trust "
               "their peers");
  app.add_flag(
      "--encrypt-replicas", t.encrypt_replicas,
      "encrypt the copies on other nodes and the data sent to them; on all nodes of a job or on none");
  app.add_option("--memory", t.memory,
                 "the arena's size: 512M, 24G; auto: as it was, else a quarter of what is free [auto]");
  app.add_option("--chunk-size", t.chunk_size,
                 "unit of allocation, transfer and checksum, a power of two [4M]");
  app.add_option("--arena-path", t.arena_path,
                 "directory of the arena's file: tmpfs or hugetlbfs [/dev/shm]");
  app.add_flag("--arena-reset", t.arena_reset,
               "discard the contents of an arena file of this job and node that does not fit");
  app.add_option("--replicas", t.replicas,
                 "verified copies on other nodes [1; 0 with --nodes 1; or the running job's]");
  app.add_option("--keep-steps", t.keep_steps, "committed steps that are kept [2, or the running job's]");
  app.add_option("--wait-for-missing", t.wait_for_missing,
                 "how long a restart waits for missing nodes, if they may have or know of a newer commit: "
                 "90s, 30m; 0: not "
                 "at all [5m, or the running job's]");
  app.add_option(
      "--storage", t.storage,
      "where committed steps are persisted: a directory, s3://BUCKET/PREFIX, gs://… [nowhere, or the running "
      "job's]");
  app.add_option(
      "--restore-from", t.restore_from,
      "URL[@STEP]: if neither memory nor --storage has a step, begin from the newest step, or this one, "
      "of another job: URL/…/JOB [none, or the running job's]");
  app.add_option(
      "--persist-every", t.persist_every,
      "persist a committed step every so many steps (100) or seconds (600s); 0: only on request [0, or the "
      "running job's]");
  app.add_option("--persist-rate", t.persist_rate,
                 "bytes per second that this node writes to storage, such as 500M; 0: no bound [0]");
  app.add_option(
      "--storage-mode", t.storage_mode,
      "mode of the files in a directory of --storage, such as 0660; folders get x where files have r "
      "[0640, less the umask]");
  app.add_option("--audit-log", t.audit_log,
                 "append a JSON line there for each file written to storage and deleted from it");
  app.add_flag(
      "--take-over-storage", t.take_over_storage,
      "take the right to write the job's steps on storage from another allocation that has it, once");
  app.add_option("--keep-on-storage", t.keep_on_storage,
                 "keep the N newest steps on storage; 0: no such rule [0]");
  app.add_option("--keep-every", t.keep_every,
                 "keep steps that are a multiple of this on storage; 0: no such rule [0]");
  app.add_option("--keep-best", t.keep_best,
                 "keep the step whose user metadata are best: KEY:max or KEY:min");
  app.add_option("--keep-within", t.keep_within,
                 "keep steps written less than so long ago: 90s, 30m, 12h, 7d, 2w");
  app.add_option("--domain", t.domain, "failure domain of this node: rack, switch, zone, …");
  app.add_option("--socket", t.socket, "unix socket for ranks [$XDG_RUNTIME_DIR/ropeteam/JOB-NODE.sock]");
  app.add_option(
      "--transport", t.transport,
      "tcp, verbs, ucx, ofi or auto: verbs on InfiniBand and RoCE, ofi on EFA, tcp otherwise and on "
      "loopback [auto]");
  app.add_option("--provider", t.provider,
                 "libfabric provider, for ofi; others than efa only with --insecure [efa]");
  app.add_option(
      "--device", t.device,
      "network interface or fabric devices, comma-separated, as --list-devices names them [the transport's "
      "choice]");
  app.add_option("--gid-index", t.gid_index, "verbs, ucx: entry of the port's GID table [RoCE v2 preferred]");
  app.add_flag("--require-rdma", t.require_rdma, "do not start where the bytes would go over TCP");
  app.add_flag("--list-devices", t.list_devices, "print what each transport sees on this machine, and exit");
  app.add_flag("--json", t.json, "with --list-devices: as JSON");
  app.add_option("--dead-after-ms", t.dead_after_ms, "silence after which a node is declared dead [1000]");
  app.add_option("--heartbeat-ms", t.heartbeat_ms, "time between heartbeats [a fifth of --dead-after-ms]");
  app.add_option("--check-threads", t.check_threads, "threads that check data from other nodes [2]");
  app.add_option("--scrub-rate", t.scrub_rate,
                 "bytes per second of sealed data that are checked in the background; 0: off [100M]");
  app.add_option(
      "--quarantine-after", t.quarantine_after,
      "restores of a step in a row, without a newer commit, after which an older one is offered; 0: never "
      "[3]");
  app.add_option("--metrics", t.metrics,
                 "[ADDRESS:]PORT that serves metrics to Prometheus; a port alone: on 127.0.0.1 [nowhere]");
  app.add_option("--ready-fd", t.ready_fd, "descriptor that gets the ready line too");
  app.add_flag("--supervised", t.supervised,
               "keep that descriptor open, and report the daemon's state there");
  app.add_option("--join-timeout", t.join_timeout,
                 "be ready only as a member of the job, and end with 4 after so many seconds without a "
                 "coordinator; 0: be ready without [0]");
  app.add_flag("--drain-on-term", t.drain_on_term,
               "on SIGTERM, copy this node's shards to other nodes before leaving (ropeteam drain)");
  app.add_option("--notice-seconds", t.notice_seconds,
                 "how long a drain may take; then the node leaves in any case [30]");
  app.add_option("--notice", t.notice,
                 "drain when this source announces that the machine will be reclaimed: file:PATH (it "
                 "exists), cmd:COMMAND "
                 "(it ends with 0), aws, gcp or azure (the instance's metadata) [nothing]");
  app.add_option("--notice-endpoint", t.notice_endpoint,
                 "http://HOST[:PORT] of the instance's metadata [the cloud's own]");
  app.add_option("--log-level", t.log_level, "trace, debug, info, warning, error, off [info]");
  app.add_option("--log-file", t.log_file, "log there, in up to 4 files of 64 MiB, and not to stderr");
  app.add_flag("--version", t.version, "print the version and exit");
}

template <typename T>
Status Count(const char* flag, const std::string& text, uint64_t low, uint64_t high, T* out) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < low || value > high)
    return Error(Code::kInvalidArgument, "%s \"%.80s\" is not a whole number from %llu to %llu", flag,
                 text.c_str(), static_cast<unsigned long long>(low), static_cast<unsigned long long>(high));
  *out = static_cast<T>(value);
  return OkStatus();
}

Status CheckNames(const Texts& t, Options* o) {
  if (t.job.empty())
    return Error(
        Code::kInvalidArgument,
        "--job is missing: the name of the training run, the same on all its nodes and after its restarts");
  if (t.job.size() > kJobBytesMax)
    return Error(Code::kInvalidArgument, "--job has %zu bytes, limit %zu", t.job.size(), kJobBytesMax);
  for (const char c : t.job)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      return Error(Code::kInvalidArgument, "--job has a control character, byte %d", static_cast<int>(c));
  o->job = t.job;
  o->node = t.node.empty() ? "node-" + std::to_string(o->ordinal) : t.node;
  if (o->node.size() > kNodeNameBytesMax)
    return Error(Code::kInvalidArgument, "--node has %zu bytes, limit %zu", o->node.size(),
                 kNodeNameBytesMax);
  for (const char c : o->node)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-')
      return Error(Code::kInvalidArgument, "--node \"%s\" has a character outside A-Z a-z 0-9 . _ -",
                   o->node.c_str());
  if (t.domain.size() > kDomainBytesMax)
    return Error(Code::kInvalidArgument, "--domain has %zu bytes, limit %zu", t.domain.size(),
                 kDomainBytesMax);
  o->domain = t.domain;
  if (t.socket.size() > kSocketPathBytesMax)
    return Error(Code::kInvalidArgument, "--socket has %zu bytes, limit %zu", t.socket.size(),
                 kSocketPathBytesMax);
  o->socket = t.socket;
  return OkStatus();
}

Status CheckMemory(const Texts& t, Options* o) {
  if (!ParseSize(t.chunk_size, &o->chunk_bytes) || !std::has_single_bit(o->chunk_bytes) ||
      o->chunk_bytes < kChunkBytesMin || o->chunk_bytes > kChunkBytesMax)
    return Error(Code::kInvalidArgument,
                 "--chunk-size \"%.80s\" is not a power of two from 4K to 1G, such as 4M",
                 t.chunk_size.c_str());
  if (t.memory != "auto") {
    if (!ParseSize(t.memory, &o->memory_bytes) || o->memory_bytes == 0)
      return Error(Code::kInvalidArgument,
                   "--memory \"%.80s\" is not a size such as 512M or 24G (powers of 1024), or auto",
                   t.memory.c_str());
    // The tables need more; the store checks that when the arena is made.
    if (o->memory_bytes <= o->chunk_bytes)
      return Error(Code::kInvalidArgument,
                   "--memory %s holds no chunk of --chunk-size %s and the arena's tables: more than the "
                   "chunk is needed",
                   t.memory.c_str(), t.chunk_size.c_str());
  }
  if (t.arena_path.empty() || t.arena_path[0] != '/')
    return Error(Code::kInvalidArgument, "--arena-path \"%.80s\" is not an absolute path",
                 t.arena_path.c_str());
  o->arena_path = t.arena_path;
  o->arena_reset = t.arena_reset;
  return OkStatus();
}

Status CheckRedundancy(const Texts& t, Options* o) {
  o->replicas = o->nodes > 1 ? 1 : 0;
  if (!t.replicas.empty()) {
    ROPETEAM_RETURN_IF_ERROR(Count("--replicas", t.replicas, 0, kReplicasMax, &o->replicas));
    // Without --nodes, the job's number of nodes is known here only if the coordinator runs here.
    if (o->replicas >= o->nodes && (o->named.nodes || o->embed_coordinator))
      return Error(Code::kInvalidArgument, "--replicas %u needs %u nodes, --nodes is %u", o->replicas,
                   o->replicas + 1, o->nodes);
  }
  if (!t.wait_for_missing.empty() && t.wait_for_missing != "0") {
    const Result<uint64_t> wait = storage::ParseDuration(t.wait_for_missing);
    if (!wait.ok())
      return Error(Code::kInvalidArgument, "--wait-for-missing: %s", wait.status().message().c_str());
    if (*wait > kWaitForMissingMaxUs / 1'000'000)
      return Error(Code::kInvalidArgument, "--wait-for-missing %.80s, limit %llu s",
                   t.wait_for_missing.c_str(),
                   static_cast<unsigned long long>(kWaitForMissingMaxUs / 1'000'000));
    o->wait_for_missing_us = *wait * 1'000'000;
  } else if (!t.wait_for_missing.empty()) {
    o->wait_for_missing_us = 0;
  }
  return Count("--keep-steps", t.keep_steps, 1, kKeepStepsMax, &o->keep_steps);
}

Status CheckRetention(const Texts& t, storage::RetentionRules* rules) {
  ROPETEAM_RETURN_IF_ERROR(
      Count("--keep-on-storage", t.keep_on_storage, 0, storage::kKeepNewestMax, &rules->keep_newest));
  ROPETEAM_RETURN_IF_ERROR(Count("--keep-every", t.keep_every, 0, kPersistEveryMax, &rules->keep_every));
  if (!t.keep_best.empty()) {
    Result<storage::KeepBest> best = storage::ParseKeepBest(t.keep_best);
    if (!best.ok()) return Error(Code::kInvalidArgument, "--keep-best: %s", best.status().message().c_str());
    rules->keep_best = std::move(*best);
  }
  if (t.keep_within.empty()) return OkStatus();
  const Result<uint64_t> within = storage::ParseDuration(t.keep_within);
  if (!within.ok())
    return Error(Code::kInvalidArgument, "--keep-within: %s", within.status().message().c_str());
  rules->keep_within_s = *within;
  return OkStatus();
}

// The umask of this process, which cannot be read without setting it.
mode_t Umask() {
  const mode_t mask = umask(077);
  umask(mask);
  return mask;
}

Status CheckStorageMode(const std::string& text, mode_t* mode) {
  constexpr mode_t kNeeded = 0600;
  constexpr mode_t kAllowed = 0664;
  constexpr size_t kDigitsMax = 4;
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 8);
  if (error != std::errc() || end != text.data() + text.size() || text.size() > kDigitsMax ||
      (value & kNeeded) != kNeeded || (value & ~kAllowed) != 0)
    return Error(
        Code::kInvalidArgument,
        "--storage-mode \"%.80s\" is not an octal mode from 0600 to 0664: the owner reads and writes, others "
        "than the group do not write",
        text.c_str());
  if (const mode_t mask = Umask(); (value & mask) != 0)
    return Error(
        Code::kInvalidArgument,
        "--storage-mode %04o: the umask of this process, %04o, takes %04o away: set umask %04o before", value,
        mask, value & mask, mask & ~(value | (value & 0444) >> 2));
  *mode = value;
  return OkStatus();
}

Status CheckStorage(const Texts& t, Options* o) {
  std::string every = t.persist_every;
  o->persist_every_seconds = every.size() > 1 && every.back() == 's';
  if (o->persist_every_seconds) every.pop_back();
  const Status status = Count("--persist-every", every, 0, kPersistEveryMax, &o->persist_every);
  if (!status.ok())
    return Error(Code::kInvalidArgument,
                 "--persist-every \"%.80s\" is neither steps (100) nor seconds (600s), up to %llu",
                 t.persist_every.c_str(), static_cast<unsigned long long>(kPersistEveryMax));
  if (!ParseSize(t.persist_rate, &o->persist_bytes_per_s) || o->persist_bytes_per_s > kPersistRateMax)
    return Error(
        Code::kInvalidArgument,
        "--persist-rate \"%.80s\" is not a size such as 500M (bytes per second), at most %lluG, or 0 for no "
        "bound",
        t.persist_rate.c_str(), static_cast<unsigned long long>(kPersistRateMax >> 30));
  ROPETEAM_RETURN_IF_ERROR(CheckRetention(t, &o->retention));
  o->restore_from = t.restore_from;
  if (o->restore_from.size() > kStorageUrlBytesMax)
    return Error(Code::kInvalidArgument, "--restore-from of %zu bytes, limit %zu", o->restore_from.size(),
                 kStorageUrlBytesMax);
  o->storage = t.storage;
  o->take_over_storage = t.take_over_storage;
  o->audit_log = t.audit_log;
  if (!t.storage_mode.empty()) ROPETEAM_RETURN_IF_ERROR(CheckStorageMode(t.storage_mode, &o->storage_mode));
  if (o->storage.empty()) {
    if (o->named.persist_every && o->persist_every != 0 && o->embed_coordinator)
      return Error(Code::kInvalidArgument, "--persist-every %s needs --storage", t.persist_every.c_str());
    return OkStatus();
  }
  if (o->storage.size() > kStorageUrlBytesMax)
    return Error(Code::kInvalidArgument, "--storage of %zu bytes, limit %zu", o->storage.size(),
                 kStorageUrlBytesMax);
  if (const Status name = storage::CheckFileName(o->job); !name.ok())
    return Error(Code::kInvalidArgument, "--job \"%s\" names a folder on storage: %s", o->job.c_str(),
                 name.message().c_str());
  return OkStatus();
}

std::vector<std::string> SplitAtCommas(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Status CheckFabric(const Texts& t, Options* o) {
  if (t.transport != "auto" && t.transport != "verbs" && t.transport != "ucx" && t.transport != "ofi" &&
      t.transport != "tcp")
    return Error(Code::kInvalidArgument, "--transport \"%.80s\" is not auto, tcp, verbs, ucx or ofi",
                 t.transport.c_str());
  o->transport = t.transport;
  o->provider = t.provider;
  if (!o->provider.empty() && o->transport != "auto" && o->transport != "ofi")
    return Error(Code::kInvalidArgument,
                 "--provider \"%.80s\" is libfabric's and goes with --transport ofi, not %s",
                 t.provider.c_str(), t.transport.c_str());
  if (!t.device.empty()) o->devices = SplitAtCommas(t.device);
  if (o->devices.size() > kDevicesMax || std::count(o->devices.begin(), o->devices.end(), "") != 0)
    return Error(Code::kInvalidArgument, "--device \"%.80s\" is not 1 to %zu names with commas between them",
                 t.device.c_str(), kDevicesMax);
  if (!t.gid_index.empty()) {
    ROPETEAM_RETURN_IF_ERROR(Count("--gid-index", t.gid_index, 0, kGidIndexMax, &o->gid_index));
    if (o->transport == "ofi" || o->transport == "tcp")
      return Error(Code::kInvalidArgument, "--gid-index %d goes with --transport verbs or ucx, not %s",
                   o->gid_index, t.transport.c_str());
  }
  o->require_rdma = t.require_rdma;
  return OkStatus();
}

Status CheckMetrics(const Texts& t, Options* o) {
  if (t.metrics.empty()) return OkStatus();
  std::string host = "127.0.0.1";
  uint16_t port = 0;
  if (t.metrics.find_first_not_of("0123456789") == std::string::npos) {
    ROPETEAM_RETURN_IF_ERROR(Count("--metrics's port", t.metrics, 1, UINT16_MAX, &port));
  } else {
    ROPETEAM_RETURN_IF_ERROR(SplitHostPort("--metrics", t.metrics, &host, &port));
    ROPETEAM_RETURN_IF_ERROR(CheckListenAddress("--metrics", host));
  }
  o->metrics = JoinHostPort(host, port);
  return OkStatus();
}

Status CheckCoordinator(const char* flag, const std::string& address) {
  std::string host;
  uint16_t port = 0;
  ROPETEAM_RETURN_IF_ERROR(SplitHostPort(flag, address, &host, &port));
  in6_addr any;
  if (inet_pton(AF_INET, host.c_str(), &any) == 1 || inet_pton(AF_INET6, host.c_str(), &any) == 1)
    return CheckListenAddress(flag, host);
  return OkStatus();
}

Status CheckEtcd(const Texts& t, const std::string& password, Options* o) {
  const bool files = !(t.etcd_ca + t.etcd_cert + t.etcd_key).empty();
  if (t.membership == "standalone") {
    if (!files && t.etcd_password_file.empty()) return OkStatus();
    return Error(Code::kInvalidArgument, "--etcd-… goes with --membership etcd://HOST:PORT/PREFIX");
  }
  Result<EtcdConfig> etcd = ParseEtcdUrl(t.membership);
  if (!etcd.ok())
    return Error(Code::kInvalidArgument, "--membership is not standalone, and %s",
                 etcd.status().message().c_str());
  if (!(t.coordinator + t.coordinator_listen).empty() || t.embed || t.no_embed)
    return Error(Code::kInvalidArgument,
                 "--coordinator and --embed-coordinator go with --membership standalone: with etcd any node "
                 "may run the "
                 "coordinator");
  etcd->tls |= files;
  etcd->ca = t.etcd_ca;
  etcd->cert = t.etcd_cert;
  etcd->key = t.etcd_key;
  if (etcd->cert.empty() != etcd->key.empty())
    return Error(Code::kInvalidArgument, "--etcd-cert and --etcd-key go together");
  if (!etcd->key.empty()) {
    const Result<std::string> key = ReadSecretFile(etcd->key, "--etcd-key " + etcd->key, kTlsFileBytesMax);
    if (!key.ok()) return Error(Code::kInvalidArgument, "%s", key.status().message().c_str());
  }
  for (const std::string& path : {etcd->ca, etcd->cert, etcd->key}) {
    if (path.empty()) continue;
    std::ifstream file(path);
    if (!file) return ErrnoError(errno, "cannot read %s", path.c_str());
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find("-----BEGIN ") == std::string::npos)
      return Error(Code::kInvalidArgument, "%s is not in PEM", path.c_str());
  }
  if (!t.etcd_password_file.empty()) {
    const Result<std::string> text =
        ReadSecretFile(t.etcd_password_file, "--etcd-password-file " + t.etcd_password_file);
    if (!text.ok()) return Error(Code::kInvalidArgument, "%s", text.status().message().c_str());
    etcd->password = text->substr(0, text->find_first_of("\r\n"));
  } else {
    etcd->password = password;
  }
  if (etcd->user.empty() && !t.etcd_password_file.empty())
    return Error(Code::kInvalidArgument, "--etcd-password-file without a user: --membership etcd://USER@…");
  if (!etcd->user.empty() && etcd->password.empty())
    return Error(Code::kInvalidArgument,
                 "etcd's user %s needs a password: --etcd-password-file FILE or ROPETEAM_ETCD_PASSWORD",
                 etcd->user.c_str());
  o->etcd = std::move(*etcd);
  return OkStatus();
}

Status CheckNetwork(const Texts& t, const Secrets& secrets, Options* o) {
  ROPETEAM_RETURN_IF_ERROR(CheckListenAddress("--listen", t.listen));
  o->listen = t.listen;
  ROPETEAM_RETURN_IF_ERROR(Count("--control-port", t.control_port, 0, UINT16_MAX, &o->control_port));
  ROPETEAM_RETURN_IF_ERROR(Count("--data-port", t.data_port, 0, UINT16_MAX, &o->data_port));
  ROPETEAM_RETURN_IF_ERROR(CheckFabric(t, o));
  ROPETEAM_RETURN_IF_ERROR(CheckMetrics(t, o));
  ROPETEAM_RETURN_IF_ERROR(CheckEtcd(t, secrets.etcd_password, o));
  if (o->etcd) return OkStatus();
  if (t.embed && t.no_embed)
    return Error(Code::kInvalidArgument, "--embed-coordinator and --no-embed-coordinator exclude each other");
  o->embed_coordinator = t.embed || (!t.no_embed && o->ordinal == 0);
  o->coordinator_listen = t.coordinator_listen;
  if (!o->coordinator_listen.empty())
    ROPETEAM_RETURN_IF_ERROR(CheckCoordinator("--coordinator-listen", o->coordinator_listen));
  if (t.coordinator.empty()) {
    if (o->nodes == 1 && o->embed_coordinator) {
      o->alone = o->coordinator_listen.empty();
      if (!o->alone) o->coordinators = {o->coordinator_listen};
      return OkStatus();
    }
    return Error(Code::kInvalidArgument,
                 "--coordinator is missing: with --nodes %u and --ordinal %u it is needed, the same "
                 "HOST:PORT on every node",
                 o->nodes, o->ordinal);
  }
  o->coordinators = SplitAtCommas(t.coordinator);
  if (o->coordinators.size() > kCoordinatorsMax)
    return Error(Code::kInvalidArgument, "--coordinator has %zu addresses, limit %zu", o->coordinators.size(),
                 kCoordinatorsMax);
  for (const std::string& address : o->coordinators)
    ROPETEAM_RETURN_IF_ERROR(CheckCoordinator("--coordinator", address));
  return OkStatus();
}

// Whether all addresses of `host`, a name or a numeric address, are loopback.
bool IsLoopback(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  bool loopback = true;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (each->ai_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(each->ai_addr);
      loopback = loopback && ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    } else {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(each->ai_addr);
      loopback = loopback && each->ai_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
    }
  }
  freeaddrinfo(found);
  return loopback;
}

Status CheckIdentity(const Texts& t, const std::string& job_key, Options* o) {
  o->insecure = t.insecure;
  o->encrypt_replicas = t.encrypt_replicas;
  o->tls_files = {t.tls_cert, t.tls_key, t.tls_ca};
  o->tls_name = t.tls_name;
  const bool has_files =
      !t.tls_cert.empty() || !t.tls_key.empty() || !t.tls_ca.empty() || !t.tls_name.empty();
  for (const auto& [option, value] : {std::pair("--tls-cert", &t.tls_cert),
                                      std::pair("--tls-key", &t.tls_key), std::pair("--tls-ca", &t.tls_ca)})
    if (has_files && value->empty())
      return Error(Code::kInvalidArgument, "%s is missing: --tls-cert, --tls-key and --tls-ca go together",
                   option);
  if (has_files && (!t.job_key_file.empty() || !job_key.empty()))
    return Error(Code::kInvalidArgument, "--tls-cert and %s are both given: leave one out",
                 job_key.empty() ? "--job-key-file" : "ROPETEAM_JOB_KEY");
  if (t.encrypt_replicas && (has_files || (t.insecure && t.job_key_file.empty() && job_key.empty())))
    return Error(
        Code::kInvalidArgument,
        "--encrypt-replicas needs a job key, --job-key-file or ROPETEAM_JOB_KEY: every node derives the "
        "replicas' keys from it");
  if (has_files) return OkStatus();
  if (!t.job_key_file.empty() && !job_key.empty())
    return Error(Code::kInvalidArgument, "--job-key-file and ROPETEAM_JOB_KEY are both set: leave one out");
  if (!t.job_key_file.empty() || !job_key.empty()) {
    o->job_key_from = job_key.empty() ? "--job-key-file " + t.job_key_file : "ROPETEAM_JOB_KEY";
    Result<std::vector<JobKey>> keys = job_key.empty() ? ReadJobKeyFile(t.job_key_file, o->job_key_from)
                                                       : ParseJobKeys(job_key, o->job_key_from);
    if (!keys.ok()) return Error(Code::kInvalidArgument, "%s", keys.status().message().c_str());
    o->job_keys = std::move(*keys);
    return OkStatus();
  }
  if (o->insecure || !ReachableFromElsewhere(*o)) return OkStatus();
  return Error(Code::kInvalidArgument,
               "--listen %s%s%s can be reached from other hosts, and this daemon has no job key and "
               "no certificate: give --job-key-file FILE (openssl rand -hex 32 > FILE, the same file on "
               "every node), or "
               "--tls-cert, --tls-key and --tls-ca, or say --insecure (docs/security.md)",
               o->listen.c_str(), t.coordinator.empty() ? "" : " or --coordinator ", t.coordinator.c_str());
}

Status CheckTimes(const Texts& t, Options* o) {
  ROPETEAM_RETURN_IF_ERROR(
      Count("--dead-after-ms", t.dead_after_ms, kDeadAfterMsMin, kDeadAfterMsMax, &o->dead_after_ms));
  o->heartbeat_ms = o->dead_after_ms / 5;
  if (!t.heartbeat_ms.empty()) {
    ROPETEAM_RETURN_IF_ERROR(Count("--heartbeat-ms", t.heartbeat_ms, 1, kDeadAfterMsMax, &o->heartbeat_ms));
    if (o->heartbeat_ms > o->dead_after_ms / kHeartbeatsPerDeath)
      return Error(Code::kInvalidArgument,
                   "--heartbeat-ms %u is over a quarter of --dead-after-ms %u: at most %u", o->heartbeat_ms,
                   o->dead_after_ms, o->dead_after_ms / kHeartbeatsPerDeath);
  }
  o->check_threads = std::clamp(std::thread::hardware_concurrency(), 1u, 2u);
  if (!t.check_threads.empty())
    ROPETEAM_RETURN_IF_ERROR(
        Count("--check-threads", t.check_threads, 1, kCheckThreadsMax, &o->check_threads));
  if (!ParseSize(t.scrub_rate, &o->scrub_bytes_per_s) || o->scrub_bytes_per_s > kScrubRateMax)
    return Error(
        Code::kInvalidArgument,
        "--scrub-rate \"%.80s\" is not a size such as 100M (bytes per second), at most %lluG, or 0 for "
        "no scrub",
        t.scrub_rate.c_str(), static_cast<unsigned long long>(kScrubRateMax >> 30));
  if (!t.quarantine_after.empty())
    ROPETEAM_RETURN_IF_ERROR(
        Count("--quarantine-after", t.quarantine_after, 0, kQuarantineAfterMax, &o->quarantine_after));
  if (t.ready_fd != "-1") {
    ROPETEAM_RETURN_IF_ERROR(Count("--ready-fd", t.ready_fd, 0, 1 << 20, &o->ready_fd));
    if (fcntl(o->ready_fd, F_GETFD) < 0)
      return Error(Code::kInvalidArgument, "--ready-fd %d is not an open descriptor", o->ready_fd);
  }
  o->supervised = t.supervised;
  ROPETEAM_RETURN_IF_ERROR(
      Count("--join-timeout", t.join_timeout, 0, kJoinTimeoutSecondsMax, &o->join_timeout_s));
  o->drain_on_term = t.drain_on_term;
  ROPETEAM_RETURN_IF_ERROR(
      Count("--notice-seconds", t.notice_seconds, 1, kNoticeSecondsMax, &o->notice_seconds));
  ROPETEAM_RETURN_IF_ERROR(ParseNotice(t.notice, t.notice_endpoint, &o->notice));
  if (!ParseLogLevel(t.log_level, &o->log_level))
    return Error(Code::kInvalidArgument,
                 "--log-level \"%.80s\" is not trace, debug, info, warning, error or off",
                 t.log_level.c_str());
  o->log_file = t.log_file;
  return OkStatus();
}

// The file may be any file, so only a short text without control characters is shown.
std::string Printable(std::string text) {
  constexpr size_t kShownMax = 80;
  if (text.size() > kShownMax) text.resize(kShownMax);
  for (char& c : text)
    if (std::isprint(static_cast<unsigned char>(c)) == 0) c = '?';
  return text;
}

}  // namespace

bool ReachableFromElsewhere(const Options& options) {
  if (!IsLoopback(options.listen)) return true;
  std::vector<std::string> addresses = options.coordinators;
  if (!options.coordinator_listen.empty()) addresses.push_back(options.coordinator_listen);
  return std::any_of(addresses.begin(), addresses.end(), [](const std::string& address) {
    std::string host;
    uint16_t port = 0;
    return !SplitHostPort("--coordinator", address, &host, &port).ok() || !IsLoopback(host);
  });
}

Status CheckListenAddress(const std::string& flag, const std::string& address) {
  in_addr v4;
  in6_addr v6;
  const bool is_v4 = inet_pton(AF_INET, address.c_str(), &v4) == 1;
  const bool is_v6 = !is_v4 && inet_pton(AF_INET6, address.c_str(), &v6) == 1;
  if (!is_v4 && !is_v6)
    return Error(Code::kInvalidArgument, "%s \"%.80s\" is not a numeric address such as 127.0.0.1 or fd00::2",
                 flag.c_str(), address.c_str());
  if ((is_v4 && v4.s_addr == INADDR_ANY) || (is_v6 && IN6_IS_ADDR_UNSPECIFIED(&v6)))
    return Error(Code::kInvalidArgument,
                 "%s %s is every address of this machine: name the one that is to be used", flag.c_str(),
                 address.c_str());
  return OkStatus();
}

Status SplitHostPort(const std::string& flag, const std::string& text, std::string* host, uint16_t* port) {
  const size_t colon = text.rfind(':');
  std::string name = colon == std::string::npos ? "" : text.substr(0, colon);
  if (name.size() > 2 && name.front() == '[' && name.back() == ']')
    name = name.substr(1, name.size() - 2);
  else if (name.find(':') != std::string::npos)
    name.clear();
  if (name.empty())
    return Error(Code::kInvalidArgument, "%s \"%.80s\" is not HOST:PORT", flag.c_str(), text.c_str());
  ROPETEAM_RETURN_IF_ERROR(Count((flag + "'s port").c_str(), text.substr(colon + 1), 1, UINT16_MAX, port));
  *host = std::move(name);
  return OkStatus();
}

std::string JoinHostPort(const std::string& host, uint16_t port) {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Status ParseOptions(int argc, const char* const* argv, const Secrets& secrets, Options* options,
                    std::string* print) {
  Texts texts;
  CLI::App app(
      "ropeteamd: keeps the checkpoints of one job's ranks on this node in memory, and copies of its peers'.",
      "ropeteamd");
  Declare(app, texts);
  // In reverse order, as CLI11 expects them. For `--name=` it would take the next argument as the value, so
  // an empty value becomes an argument of its own.
  std::vector<std::string> arguments;
  for (int i = argc - 1; i > 0; --i) {
    std::string argument = argv[i];
    if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
      arguments.emplace_back();
      argument.pop_back();
    }
    arguments.push_back(std::move(argument));
  }
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    *print = app.help();
    return OkStatus();
  } catch (const CLI::ConfigError& error) {
    return Error(
        Code::kInvalidArgument,
        "--config \"%.200s\" has a line that is no option of ropeteamd (ropeteamd --help lists them): %s",
        app.get_config_ptr()->as<std::string>().c_str(), Printable(error.what()).c_str());
  } catch (const CLI::ParseError& error) {
    for (const CLI::Option* option : app.get_options())
      if (option->get_items_expected_max() == 1 && option->count() > 1)
        return Error(Code::kInvalidArgument, "%s is given twice (ropeteamd --help lists the options)",
                     option->get_name().c_str());
    return Error(Code::kInvalidArgument, "%s (ropeteamd --help lists the options)", error.what());
  }
  if (texts.version) {
    *print = "ropeteamd " ROPETEAM_VERSION_TEXT "\n";
    return OkStatus();
  }
  Options parsed;
  if (texts.json && !texts.list_devices)
    return Error(Code::kInvalidArgument,
                 "--json goes with --list-devices; for the state of a job: ropeteam status");
  parsed.list_devices = texts.list_devices;
  parsed.list_json = texts.json;
  if (texts.list_devices) {
    *options = std::move(parsed);
    return OkStatus();
  }
  ROPETEAM_RETURN_IF_ERROR(Count("--nodes", texts.nodes, 1, kNodesMax, &parsed.nodes));
  ROPETEAM_RETURN_IF_ERROR(Count("--ordinal", texts.ordinal, 0, kNodesMax - 1, &parsed.ordinal));
  parsed.named = {app.count("--replicas") != 0,        app.count("--keep-steps") != 0,
                  app.count("--nodes") != 0,           app.count("--storage") != 0,
                  app.count("--persist-every") != 0,   app.count("--restore-from") != 0,
                  app.count("--wait-for-missing") != 0};
  ROPETEAM_RETURN_IF_ERROR(CheckNames(texts, &parsed));
  ROPETEAM_RETURN_IF_ERROR(CheckMemory(texts, &parsed));
  ROPETEAM_RETURN_IF_ERROR(CheckNetwork(texts, secrets, &parsed));
  ROPETEAM_RETURN_IF_ERROR(CheckRedundancy(texts, &parsed));
  ROPETEAM_RETURN_IF_ERROR(CheckTimes(texts, &parsed));
  ROPETEAM_RETURN_IF_ERROR(CheckStorage(texts, &parsed));
  ROPETEAM_RETURN_IF_ERROR(CheckIdentity(texts, secrets.job_key, &parsed));
  *options = std::move(parsed);
  return OkStatus();
}

}  // namespace ropeteam
