// SPDX-License-Identifier: Apache-2.0
#include "node/daemon.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "membership/credentials/credentials.h"
#include "membership/standalone/acceptor.h"
#include "membership/standalone/options.h"
#include "node/arena_guard.h"
#include "node/drain.h"
#include "node/local_socket.h"
#include "node/replica_cipher.h"
#include "node/user_directory.h"
#include "storage/audit/audit.h"
#include "storage/sinks.h"
#include "storage/steps/steps.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam {
namespace {

static_assert(EngineConfig{}.quarantine_us >= kQuarantineMsMin * TimeUs{1000},
              "a departed node's lease must have run out before what it may write to is reused");

// The only state that the signal handler may access. It runs on any thread, between any two instructions.
std::atomic<int> g_signal_fd{-1};        // -1: not ready yet, a signal ends the process
std::atomic<int64_t> g_signalled_at{0};  // nanoseconds of the monotonic clock; 0: not yet
std::atomic<int> g_signal{0};            // the first one, until the loop takes it
std::atomic<pid_t> g_supervisor{0};      // with --supervised: the parent
std::atomic<pid_t> g_stranger{0};        // whose SIGTERM was ignored; 0: nothing to report
// Launchers signal the process and then its group, or a parent forwards a signal that its child also
// received. Signals within this time count as one.
constexpr int64_t kSameSignalNs = 1'000'000'000;
// The coordinator of a node that is alone, for messages.
constexpr const char* kThisProcess = "this-process:0";
// In units of --dead-after-ms. The nodes of a job may start this far apart without any fault.
constexpr TimeUs kTroubleNotedDeaths = 5;

void OnSignal(int number, siginfo_t* info, void*) {
  const int saved = errno;
  const uint64_t one = 1;
  // The kernel's signal at the parent's death has the parent's pid, too.
  const pid_t supervisor = g_supervisor.load();
  if (number == SIGTERM && supervisor != 0 && info->si_pid != supervisor && getppid() == supervisor) {
    g_stranger.store(info->si_pid);
    if (g_signal_fd.load() >= 0) (void)!write(g_signal_fd.load(), &one, sizeof(one));
    errno = saved;
    return;
  }
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  const int fd = g_signal_fd.load();
  int64_t first = 0;
  if (fd < 0) _exit(128 + number);
  if (!g_signalled_at.compare_exchange_strong(first, now)) {
    if (now - first < kSameSignalNs) return;
    _exit(128 + number);
  }
  g_signal.store(number);
  (void)!write(fd, &one, sizeof(one));
  errno = saved;
}

void InstallSignals(bool supervised) {
  if (supervised) g_supervisor = getppid();
  struct sigaction action {};
  action.sa_sigaction = OnSignal;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  action.sa_flags = SA_RESTART;
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);  // the ready line's reader may be gone
  sigaction(SIGHUP, &action, nullptr);   // a closed terminal must not end the daemon
  // The signal may be inherited as ignored. Then the kernel reaps children itself, and the exit code of the
  // command of --notice is lost.
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, nullptr);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Libraries below libfabric (PSM) catch these signals once they are loaded. They turn a crash into an exit
  // without a core dump or a signal.
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGABRT}) sigaction(number, &action, nullptr);
#endif
}

// A session needs two descriptors, a peer needs a few, and strangers may take a part (acceptor.h). The usual soft
// limit of 1024 is for programs that use select().
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);  // if this fails: fewer sessions, and each refusal is logged
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  LOG_INFO("open files at most %llu (RLIMIT_NOFILE)", static_cast<unsigned long long>(limit.rlim_cur));
}

// Binds a socket to the port, or to a free one for 0, and closes it again. Returns the port. If another
// process takes it before it is used, listening fails with an error.
Result<uint16_t> TryPort(const std::string& address, uint16_t port) {
  sockaddr_storage storage{};
  socklen_t length = 0;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, address.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    length = sizeof(*v4);
  } else if (inet_pton(AF_INET6, address.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    length = sizeof(*v6);
  }
  const UniqueFd probe(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // As servers do: lingering connections of a former daemon must not prevent the bind. Not with port 0: the
  // kernel might choose a port that such connections still use.
  const int reuse = port != 0;
  if (!probe.valid() || setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse)) != 0 ||
      bind(probe.get(), reinterpret_cast<sockaddr*>(&storage), length) != 0 ||
      getsockname(probe.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0)
    return ErrnoError(errno, "--listen %s, port %u", address.c_str(), port);
  return ntohs(storage.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
}

}  // namespace

Status Daemon::Run() {
  InstallSignals(options_.supervised);
  RaiseDescriptorLimit();
  SetOfiEnvironment();  // before there is any other thread, like the next line
  SetGrpcEnvironment();
  const UniqueFd signals(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!signals.valid()) return ErrnoError(errno, "eventfd");
  ROPETEAM_RETURN_IF_ERROR(loop_.Init());
  ROPETEAM_RETURN_IF_ERROR(loop_.Add(signals.get(), EPOLLIN, [this, &signals](uint32_t) {
    uint64_t count = 0;
    (void)!read(signals.get(), &count, sizeof(count));
    OnTermination();
  }));
  Status started = Start();
  if (started.ok()) {
    g_signal_fd = signals.get();
    if (options_.join_timeout_s == 0) TellReady();
    end_ = StartTicking();
    if (options_.notice.kind != NoticeSource::Kind::kNone)
      notices_ = std::make_unique<NoticeWatch>(options_.notice, [this](const std::string& why) {
        loop_.Post([this, why] { BeginDrain(0, why); });
      });
    if (end_.ok()) loop_.Run();
  }
  notices_.reset();
  // The leave message returns the lease. Nothing may be started under the lease after that.
  if (node_ != nullptr) node_->OnLease(0);
  if (membership_ != nullptr) membership_->Stop();
  // A refused node may be started elsewhere, or never again: it must not keep memory that holds nothing.
  const bool unused = refused_ && !joined_ && arena_->fresh() && node_ != nullptr && node_->HoldsNothing();
  EndNode();
  if (unused) arena_->Remove();
  metrics_.reset();  // after the leave message, because a slow reader may delay it
  if (!started.ok()) return started;
  if (end_.ok()) LOG_INFO("stopped, arena %s stays", arena_->path().c_str());
  return end_;
}

void Daemon::OnTermination() {
  if (const pid_t stranger = g_stranger.exchange(0); stranger != 0)
    LOG_INFO("ignoring the SIGTERM of process %d: ropeteam run ends this daemon after its command",
             static_cast<int>(stranger));
  const int number = g_signal.exchange(0);
  if (number == 0) return;
  if (number == SIGTERM && options_.drain_on_term) return BeginDrain(0, "SIGTERM");
  LOG_INFO("stopping, as a signal asked");
  if (drain_until_ != EventLoop::kNever && node_ != nullptr) return OnDrained(node_->EndDrain());
  loop_.Stop();
}

void Daemon::BeginDrain(TimeUs within_us, const std::string& why) {
  const TimeUs within = within_us != 0 ? within_us : options_.notice_seconds * TimeUs{1'000'000};
  const TimeUs until = EventLoop::Now() + within;
  if (until >= drain_until_ || node_ == nullptr) return;
  const uint64_t seconds = (within + 999'999) / 1'000'000;
  LOG_INFO("draining within %" PRIu64 " s: %s", seconds, why.c_str());
  if (drain_until_ == EventLoop::kNever) supervisor_.Note("this node leaves the job (" + why + ")");
  drain_until_ = until;
  supervisor_.Draining(seconds);
  node_->Drain(until);
}

void Daemon::OnDrained(const DrainReport& report) {
  drained_ = DrainExitCode(report);
  const std::string text = DrainText(report);
  ROPETEAM_LOG(drained_ == 0 ? LogLevel::kInfo : LogLevel::kWarning, "drained, exit code %d: %s", drained_,
               text.c_str());
  supervisor_.Note("this node has left the job: " + text);
  loop_.Stop();
}

Status Daemon::Start() {
  LOG_INFO("ropeteamd %s job %s node %s ordinal %u nodes %u replicas %u keep_steps %u pid %d checksum %s",
           ROPETEAM_VERSION_TEXT, options_.job.c_str(), options_.node.c_str(), options_.ordinal,
           options_.nodes, options_.replicas, options_.keep_steps, static_cast<int>(getpid()),
           ChecksumKernelName());
  if (options_.ordinal >= options_.nodes && options_.named.nodes)
    LOG_WARNING("ordinal %u of a job of %u nodes: right for a spare, else --nodes or --ordinal is wrong",
                options_.ordinal, options_.nodes);
  // These options are checked early, because faulting memory in takes minutes.
  if (!options_.storage.empty()) {
    const Result<std::unique_ptr<storage::Sink>> sink = storage::OpenSink(options_.storage);
    // A directory may be made, or mounted, before the next start.
    misused_ = sink.status().code() == Code::kInvalidArgument || sink.status().code() == Code::kUnsupported;
    if (!sink.ok()) return sink.status();
  }
  if (!options_.audit_log.empty()) {
    const Result<std::shared_ptr<storage::AuditLog>> log =
        storage::AuditLog::Open(options_.audit_log, options_.job, options_.node);
    if (!log.ok()) return log.status();
  }
  if (!options_.restore_from.empty()) {
    // Only parsed: the place itself may be gone once the job has steps of its own.
    const Result<storage::StepSource> source = storage::ParseStepSource(options_.restore_from);
    misused_ = !source.ok();
    if (!source.ok())
      return Error(Code::kInvalidArgument, "--restore-from: %s", source.status().message().c_str());
  }
  const Result<uint16_t> listens = TryPort(options_.listen, options_.control_port);
  if (!listens.ok()) return listens.status();
  ROPETEAM_RETURN_IF_ERROR(MakeCredentials());
  if (!options_.metrics.empty()) {
    Result<std::unique_ptr<MetricsServer>> metrics = MetricsServer::Start(
        options_.metrics, &loop_, [this] { return node_ != nullptr ? node_->Metrics() : MetricsSnapshot(); });
    if (!metrics.ok()) return metrics.status();
    metrics_ = std::move(*metrics);
    LOG_INFO("metrics http://%s/metrics", options_.metrics.c_str());
  }
  Result<FabricChoice> fabric = CreateFabric(FabricConfigOf(options_));
  if (!fabric.ok()) return fabric.status();
  first_fabric_ = std::move(*fabric);
  ArenaFileConfig config{options_.arena_path,      options_.job,         options_.node,
                         options_.memory_bytes,    options_.chunk_bytes, options_.arena_reset,
                         options_.encrypt_replicas};
  config.note = [this](const std::string& line) { supervisor_.Note(line); };
  config.progress = [this](uint64_t done, uint64_t total) { supervisor_.Progress("prefault", done, total); };
  Result<std::unique_ptr<ArenaFile>> arena = ArenaFile::Open(config);
  if (!arena.ok()) return arena.status();
  arena_ = std::move(*arena);
  GuardArena(arena_->memory(), arena_->path());
  ROPETEAM_RETURN_IF_ERROR(ChooseCoordinator());
  ROPETEAM_RETURN_IF_ERROR(NewNode());
  ROPETEAM_RETURN_IF_ERROR(node_->Listen());
  return StartMembership();
}

Status Daemon::MakeCredentials() {
  if (!options_.tls_files.certificate.empty()) {
    Result<std::shared_ptr<const Credentials>> credentials =
        Credentials::FromFiles(options_.tls_files, options_.tls_name);
    if (!credentials.ok()) return credentials.status();
    return UseCredentials(std::move(*credentials));
  }
  std::vector<JobKey> keys = std::exchange(options_.job_keys, {});
  if (keys.empty() && options_.insecure) {
    if (!options_.alone)
      LOG_WARNING(
          "insecure: anyone who reaches %s or %s can join job %s, and read and delete its checkpoints",
          options_.listen.c_str(),
          options_.coordinator_listen.empty() ? options_.listen.c_str() : options_.coordinator_listen.c_str(),
          options_.job.c_str());
    return OkStatus();
  }
  if (keys.empty()) {
    const Result<std::string> directory = MakeRuntimeDirectory();
    if (!directory.ok()) return directory.status();
    // One key for all jobs: derived keys depend on the job's name.
    const std::string path = *directory + "/job.key";
    Result<std::vector<JobKey>> local = ReadOrMakeJobKeyFile(path);
    if (!local.ok()) return local.status();
    keys = std::move(*local);
    options_.job_key_from = "of this machine and user, " + path;
  }
  if (options_.encrypt_replicas)
    options_.replica_cipher = std::make_shared<const ReplicaCipher>(keys, options_.job);
  Result<std::shared_ptr<const Credentials>> credentials =
      Credentials::FromJobKey(keys, options_.job, options_.node, options_.job_key_from);
  if (!credentials.ok()) return credentials.status();
  return UseCredentials(std::move(*credentials));
}

Status Daemon::UseCredentials(std::shared_ptr<const Credentials> credentials) {
  credentials_ = std::move(credentials);
  LOG_INFO("control connections mutual TLS, %s", credentials_->description().c_str());
  return OkStatus();
}

Status Daemon::ChooseCoordinator() {
  if (options_.etcd) return OkStatus();
  std::vector<std::string>& list = options_.coordinators;
  if (options_.alone) {
    LOG_INFO("alone, because of --nodes 1 and no --coordinator: no other node can join, and no port is open");
    list = {kThisProcess};
    options_.coordinator_listen = kThisProcess;
  } else if (!options_.embed_coordinator) {
    options_.coordinator_listen.clear();
  } else if (options_.coordinator_listen.empty()) {
    // A single address is this node's. Of several addresses, the first one that belongs to this machine is.
    const auto own = list.size() == 1 ? list.begin() : std::find_if(list.begin(), list.end(), IsOwnAddress);
    if (own == list.end()) {
      LOG_WARNING(
          "no coordinator runs here: none of the addresses of --coordinator is one of this machine's "
          "(--coordinator-listen HOST:PORT names one)");
    } else {
      options_.coordinator_listen = *own;
    }
  }
  return OkStatus();
}

Status Daemon::NewNode() {
  Result<std::unique_ptr<Node>> node = Node::Create(
      options_, credentials_, &loop_, arena_.get(),
      [this](NodeId member, const std::string& reason) { membership_->ReportSuspect(member, reason); },
      [this](const FabricConfig& config) -> Result<FabricChoice> {
        if (first_fabric_.transport == nullptr) return CreateFabric(config);
        return std::exchange(first_fabric_, FabricChoice());
      });
  if (!node.ok()) return node.status();
  node_ = std::move(*node);
  if (watch_ == nullptr)
    watch_ = std::make_unique<CoordinatorWatch>(options_.coordinator_listen, EventLoop::Now(),
                                                options_.etcd.has_value());
  node_->UseReach([this](NodeId member, bool reached) { membership_->ReportReach(member, reached); });
  node_->UseDrain([this](TimeUs within_us) { BeginDrain(within_us, "ropeteam drain"); },
                  [this](const DrainReport&) { OnDrained(node_->EndDrain()); });
  // This node was declared dead during a drain. Its shards must still be copied.
  if (drain_until_ != EventLoop::kNever) node_->Drain(drain_until_);
  node_->UseWatch(watch_.get(), [this](const std::string& coordinator, bool now) {
    membership_->Relocate({coordinator}, now);
  });
  return OkStatus();
}

void Daemon::EndNode() {
  if (node_ != nullptr && !node_->Stop()) {
    hangs_ = true;
    (void)node_.release();
  }
  node_.reset();
}

Status Daemon::StartMembership() {
  MembershipConfig config;
  config.job = options_.job;
  config.credentials = credentials_;
  config.coordinator_addresses = options_.coordinators;
  config.coordinator_listen = options_.coordinator_listen;
  config.alone = options_.alone;
  config.protocol_version = kProtocolVersion;
  config.protocol_oldest = kProtocolOldest;
  config.chunk_bytes = options_.chunk_bytes;
  // Nodes with different values could not read each other's copies.
  config.data_transport = node_->transport_name() + (options_.encrypt_replicas ? " --encrypt-replicas" : "");
  config.heartbeat_ms = options_.heartbeat_ms;
  config.dead_after_ms = options_.dead_after_ms;
  config.probe_ms = ProbeMs(options_.dead_after_ms);
  config.nodes_expected = options_.nodes;
  config.settings = {options_.replicas,     options_.keep_steps,         options_.nodes,
                     options_.storage,      options_.persist_every,      options_.persist_every_seconds,
                     options_.restore_from, options_.wait_for_missing_us};
  config.named = options_.named;
  config.epoch_known = node_->epoch_known();
  if (options_.etcd) {
    config.coordinator_addresses.clear();
    config.coordinator_listen = JoinHostPort(options_.listen, 0);
    membership_ = CreateEtcdMembership(config, *options_.etcd);
    LOG_INFO("coordinator as stored in %s, keys below %s", EtcdName(*options_.etcd).c_str(),
             options_.etcd->prefix.c_str());
  } else {
    membership_ = CreateStandaloneMembership(config);
    std::string list;
    for (const std::string& address : options_.coordinators) list += " " + address;
    LOG_INFO("coordinator%s%s%s", list.c_str(),
             options_.coordinator_listen.empty() ? "" : ", may be embedded here at ",
             options_.coordinator_listen.c_str());
  }
  Membership::Callbacks callbacks;
  callbacks.on_view = [this](const View& view) {
    loop_.Post([this, view] {
      // A view of this node's former instance may still arrive after the next instance has begun.
      if (node_ == nullptr || !view.Contains(node_->self().id)) return;
      node_->OnView(view);
      OnJoined();
    });
  };
  callbacks.on_lease = [this](TimeUs valid_until) {
    // The last call for a refused instance passes 0, before the next instance begins.
    loop_.Post([this, valid_until] {
      if (node_ != nullptr) node_->OnLease(valid_until);
    });
  };
  callbacks.on_check = [this](const std::vector<NodeId>& members) {
    loop_.Post([this, members] {
      if (node_ != nullptr) node_->OnCheckMembers(members);
    });
  };
  callbacks.on_contact = [this](const Contact& contact) {
    loop_.Post([this, contact] {
      contact_ = contact;
      watch_->OnContact(contact);
      if (node_ != nullptr) node_->OnContact();
    });
  };
  callbacks.on_refused = [this](const Status& status) { loop_.Post([this, status] { OnRefused(status); }); };
  joining_since_ = EventLoop::Now();
  return membership_->Start(node_->self(), std::move(callbacks));
}

void Daemon::OnRefused(const Status& status) {
  if (status.code() != Code::kStale) {
    LOG_ERROR("membership refused this node: %s", status.ToString().c_str());
    end_ = status;
    refused_ = true;
    return loop_.Stop();
  }
  LOG_WARNING("this node was declared dead while alive, it starts again: %s", status.message().c_str());
  supervisor_.Starting();
  EndNode();
  if (hangs_)  // a thread still uses the arena
    end_ = Error(Code::kUnavailable, "a call of storage has not returned, this daemon must be started again");
  else
    end_ = arena_->Renew();  // peers that do not know yet must not write into the next instance's chunks
  if (end_.ok()) GuardArena(arena_->memory(), arena_->path());
  options_.take_over_storage = false;  // only once, not each time this node starts again
  if (end_.ok()) end_ = NewNode();
  if (end_.ok()) end_ = node_->Listen();
  if (end_.ok()) end_ = membership_->Rejoin(node_->self());
  if (end_.ok()) {
    LOG_INFO("rejoining as node %016" PRIx64, node_->self().id);
    return;
  }
  LOG_ERROR("cannot start again: %s", end_.ToString().c_str());
  loop_.Stop();
}

Status Daemon::StartTicking() {
  tick_.reset(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  constexpr timespec kInterval{kAliveIntervalUs / 1'000'000, kAliveIntervalUs % 1'000'000 * 1000};
  const itimerspec often{kInterval, kInterval};
  if (!tick_.valid() || timerfd_settime(tick_.get(), 0, &often, nullptr) != 0)
    return ErrnoError(errno, "timer of a second");
  supervisor_.Alive();
  return loop_.Add(tick_.get(), EPOLLIN, [this](uint32_t) {
    uint64_t expirations = 0;
    (void)!read(tick_.get(), &expirations, sizeof(expirations));
    OnTick();
  });
}

void Daemon::OnTick() {
  supervisor_.Alive();
  if (joined_ || refused_) return;
  const TimeUs waited = EventLoop::Now() - joining_since_;
  std::string at = contact_.address;
  if (at.empty() && !options_.coordinators.empty()) at = options_.coordinators.front();
  const std::string& why = contact_.trouble.empty() ? contact_.reason : contact_.trouble;
  const Status status = Error(Code::kUnavailable, "no coordinator has answered%s%s for %" PRIu64 " s: %s",
                              at.empty() ? "" : " at ", at.c_str(), waited / 1'000'000,
                              !why.empty() ? why.c_str()
                              : at.empty() ? "no node has the coordinator role yet"
                                           : "it has not answered");
  if (options_.join_timeout_s != 0 && waited >= options_.join_timeout_s * TimeUs{1'000'000}) {
    end_ = status;
    alone_ = true;
    return loop_.Stop();
  }
  if (trouble_noted_ || waited < kTroubleNotedDeaths * options_.dead_after_ms * TimeUs{1000}) return;
  trouble_noted_ = true;
  supervisor_.Note(status.message() +
                   (options_.etcd ? "; check --membership, etcd and the network between"
                                  : "; saves stay on this node until one does: check --coordinator, the node "
                                    "that runs it, and the network between"));
}

void Daemon::OnJoined() {
  if (std::exchange(joined_, true)) return;
  if (options_.join_timeout_s != 0) TellReady();
  if (trouble_noted_) supervisor_.Note("the coordinator at " + contact_.address + " has answered");
}

void Daemon::TellReady() {
  const std::string line = "ropeteamd ready " + node_->Describe() + "\n";
  (void)!write(STDOUT_FILENO, line.data(), line.size());  // there may be no reader
  supervisor_.Ready(line);
  LOG_INFO("ready %s", node_->Describe().c_str());
}

}  // namespace ropeteam
