// SPDX-License-Identifier: Apache-2.0
#include "node/node.h"

#include <sys/random.h>

#include <algorithm>
#include <cinttypes>

#include "core/base/log.h"
#include "core/base/sizes.h"
#include "core/engine/limits.h"
#include "core/shard/manifest.h"
#include "membership/coordinator.h"
#include "membership/standalone/acceptor.h"
#include "node/drain.h"
#include "node/local_socket.h"
#include "storage/audit/audit.h"
#include "storage/sinks.h"

namespace ropeteam {
namespace {

// Limits for messages from instances that are not in the view yet. More are dropped; their senders repeat
// them.
constexpr size_t kEarlyMessagesMax = 256;
constexpr size_t kEarlyBytesMax = 4ull << 20;
// A listing of objects omits shards with larger manifests, because the loop's thread reads them.
constexpr uint64_t kListedManifestBytesMax = 4ull << 20;
constexpr size_t kListedObjectsMax = 8192;
// The lead moves at most this often, and a member that the new leader does not reach is known by then.
static_assert(kLeaderStaysUs > 2 * engine::kUnansweredUs);
constexpr size_t kBegunStepsMax = 64;  // only a few steps are in flight at a time
constexpr size_t kNamedMax = 16;       // nodes named in one log line
// Interval of the check for stalled storage work. Short compared with StorageWorkers::kStalledAfter.
constexpr TimeUs kStorageLookUs = 5'000'000;

std::string ReadStream(const Store& store, const SealedShard& shard, uint64_t offset, uint64_t length) {
  std::string bytes;
  const uint64_t chunk_bytes = shard.meta.chunk_bytes;
  while (length != 0) {
    const uint64_t within = offset % chunk_bytes;
    const uint64_t part = std::min(length, chunk_bytes - within);
    const std::byte* chunk = store.chunk(ChunkAt(shard.extents, offset / chunk_bytes));
    bytes.append(reinterpret_cast<const char*>(chunk + within), part);
    offset += part;
    length -= part;
  }
  return bytes;
}

// Lists the view's members that are not in `known`, each after `word`.
std::string Missing(const View& view, const std::unordered_set<NodeId>& known, const char* word) {
  std::string names;
  size_t count = 0;
  for (const Member& member : view.members)
    if (!known.contains(member.id) && ++count <= kNamedMax) names += word + member.name;
  if (count > kNamedMax) names += word + std::to_string(count - kNamedMax) + " more";
  return names;
}

// The access control of the data ports, as text.
std::string DataSecurity(const TransportCapabilities& has) {
  if (has.name == "inproc") return "no port";
  if (has.admits_peers) return "members only";
  const bool trusts = (has.name == "ucx" && !has.rdma) ||
                      (has.name == "ofi" && has.provider != "efa" && has.provider != "shm");
  return trusts ? "OPEN (" + has.name + ")" : "one key for all peers";
}

// Longer than copying 1 GiB into the arena. A save that takes longer to fill is replicated meanwhile.
constexpr TimeUs kPutsWaitUs = 100'000;

EngineConfig EngineConfigOf(const Options& options, NodeId self, const TransportCapabilities& fabric) {
  EngineConfig config;
  config.self = self;
  config.job = options.job;
  config.node = options.node;
  config.scrub_bytes_per_s = options.scrub_bytes_per_s;
  config.restores_max = options.quarantine_after;
  config.keep_on_storage = static_cast<uint32_t>(options.retention.keep_newest);
  config.keep_rules = storage::FlagsOf(options.retention);
  if (!fabric.rdma) config.puts_wait_us = kPutsWaitUs;
  if (options.replica_cipher != nullptr) {
    config.keys = options.replica_cipher->key_ids();
    config.salt = NewEncryptionSalt();
  }
  return config;
}

}  // namespace

FabricConfig FabricConfigOf(const Options& options) {
  FabricConfig fabric;
  fabric.transport = options.transport;
  fabric.provider = options.provider;
  fabric.listen_address = JoinHostPort(options.listen, options.data_port);
  fabric.devices = options.devices;
  fabric.gid_index = options.gid_index;
  fabric.require_rdma = options.require_rdma;
  fabric.insecure = options.insecure;
  fabric.alone = options.alone;
  return fabric;
}

NodeId NewNodeId() {
  NodeId id = kNoNode;
  while (id == kNoNode)
    if (getrandom(&id, sizeof(id), 0) != sizeof(id))
      id = kNoNode;  // interrupted before the pool was ready: try again
  return id;
}

Result<std::unique_ptr<Node>> Node::Create(const Options& options,
                                           std::shared_ptr<const Credentials> credentials, EventLoop* loop,
                                           ArenaFile* arena, OnSuspect on_suspect, OpenFabric open_fabric) {
  std::unique_ptr<Node> node(new Node(options, std::move(credentials), loop, arena, std::move(on_suspect)));
  ROPETEAM_RETURN_IF_ERROR(node->Init(open_fabric));
  return node;
}

Node::Node(const Options& options, std::shared_ptr<const Credentials> credentials, EventLoop* loop,
           ArenaFile* arena, OnSuspect on_suspect)
    : options_(options),
      credentials_(std::move(credentials)),
      loop_(loop),
      arena_(arena),
      on_suspect_(std::move(on_suspect)) {}

Node::~Node() {
  if (alive_ != nullptr) (void)Stop();
  storage_.reset();
  engine_.reset();
}

bool Node::Stop() {
  alive_.reset();
  loop_->SetTimer(EventLoop::kNever, nullptr);
  // The Engine's sources of input end before the Engine. The fabric releases the arena before the store does.
  local_.reset();
  if (control_ != nullptr) control_->Stop();
  if (data_ != nullptr) data_->Stop();
  checks_.reset();
  return storage_ == nullptr || storage_->Stop();
}

Status Node::Init(const OpenFabric& open_fabric) {
  Result<std::unique_ptr<Store>> store = arena_->OpenStore();
  if (!store.ok()) return store.status();
  store_ = std::move(*store);
  self_.id = NewNodeId();
  self_.name = options_.node;
  self_.ordinal = options_.ordinal;
  self_.domain = options_.domain;
  checks_ = std::make_unique<CheckWorkers>(
      arena_->memory(), options_.replica_cipher, options_.check_threads,
      [this](uint64_t tag, std::vector<uint32_t> bad, std::vector<EncryptedChunk> encrypted) {
        PostToSelf([this, tag, bad = std::move(bad), encrypted = std::move(encrypted)] {
          Drive([&](Engine& engine, TimeUs now) { engine.OnCheckDone(now, tag, bad, encrypted); });
        });
      });
  ROPETEAM_RETURN_IF_ERROR(InitPlanes(open_fabric));
  engine_ = std::make_unique<Engine>(EngineConfigOf(options_, self_.id, data_->capabilities()), store_.get());
  return InitLocal();
}

Status Node::InitPlanes(const OpenFabric& open_fabric) {
  Result<FabricChoice> choice = open_fabric(FabricConfigOf(options_));
  if (!choice.ok()) return choice.status();
  if (!choice->fallback.empty())
    LOG_WARNING("transport without RDMA, reason %s (--require-rdma makes this an error)",
                choice->fallback.c_str());
  fallback_ = std::move(choice->fallback);
  Result<std::unique_ptr<DataPlane>> data = DataPlane::Create(std::move(choice->transport), arena_->memory(),
                                                              store_->chunk_offset(0), store_->peer_access());
  if (!data.ok()) return data.status();
  data_ = std::move(*data);
  self_.data_address = data_->address();
  const TransportCapabilities& has = data_->capabilities();
  LOG_INFO("data %s transport %s devices %s address %s link_mbps %llu rdma %s dmabuf %s",
           data_->Describe().c_str(), data_->transport_name().c_str(), has.devices.c_str(),
           has.address.c_str(), static_cast<unsigned long long>(has.link_mbps), has.rdma ? "yes" : "no",
           has.dmabuf ? "yes" : "no");

  const ControlPlane::Config control{self_.id, options_.alone ? "" : options_.listen, options_.control_port,
                                     credentials_};
  Result<std::unique_ptr<ControlPlane>> plane = ControlPlane::Create(
      control,
      [this](NodeId from, std::string envelope, std::function<void()> handled) {
        PostToSelf([this, from, envelope = std::move(envelope), handled = std::move(handled)]() mutable {
          OnControlMessage(from, std::move(envelope));
          handled();
        });
      },
      [this](const std::string& coordinator) { PostToSelf([this, coordinator] { OnTold(coordinator); }); });
  if (!plane.ok()) return plane.status();
  control_ = std::move(*plane);
  self_.control_address = options_.alone ? "none" : JoinHostPort(options_.listen, control_->port());
  LOG_INFO("control %s", self_.control_address.c_str());

  DataPlane::Callbacks callbacks;
  callbacks.on_done = [this](std::vector<TransferDone> done) {
    PostToSelf([this, done = std::move(done)] {
      transfers_ -= done.size();
      for (const TransferDone& each : done)
        Drive([&](Engine& engine, TimeUs now) { engine.OnTransferDone(now, each.tag, each.code); });
    });
  };
  callbacks.on_fenced = [this](NodeId peer) {
    PostToSelf([this, peer] { Drive([&](Engine& engine, TimeUs now) { engine.OnPeerFenced(now, peer); }); });
  };
  callbacks.on_link = [this](NodeId peer, bool up, std::string reason) {
    PostToSelf([this, peer, up, reason = std::move(reason)] {
      if (up) stats_.OnLinkUp(peer);
      if (!up && members_.contains(peer)) stats_.OnSign(EventLoop::Now(), peer);
      Drive([&](Engine& engine, TimeUs now) { engine.OnPeerLink(now, peer, up, reason); });
    });
  };
  data_->Start(std::move(callbacks));
  return OkStatus();
}

Status Node::InitLocal() {
  LocalServer::Config config;
  config.socket_path =
      options_.socket.empty() ? DefaultSocketPath(options_.job, options_.node) : options_.socket;
  config.arena_fd = arena_->shared_fd();
  config.hello.job = options_.job;
  config.hello.node = options_.node;
  config.hello.replicas = options_.replicas;
  config.hello.chunk_bytes = store_->chunk_bytes();
  config.hello.arena_bytes = arena_->memory().size();
  config.hello.chunks_begin = store_->chunk_offset(0);
  config.hello.chunks_total = store_->chunks_total();
  config.hello.transport = data_->transport_name();
  // Chunks that are put from device memory cannot be encrypted.
  config.hello.dmabuf = data_->capabilities().dmabuf && options_.replica_cipher == nullptr;
  if (config.hello.dmabuf) config.device_buffers = &data_->device_buffers();
  DaemonFacts& facts = config.facts;
  facts.version = ROPETEAM_VERSION_TEXT;
  facts.node = options_.node;
  facts.pid = getpid();
  facts.socket = config.socket_path;
  facts.control = self_.control_address;
  facts.data = data_->Describe();
  facts.data_security = DataSecurity(data_->capabilities()) +
                        (options_.replica_cipher != nullptr ? ", replicas encrypted" : "");
  facts.security = [credentials = credentials_, alone = options_.alone]() -> std::string {
    if (alone) return "no port";
    return credentials == nullptr ? "OPEN (--insecure)" : "mutual TLS, " + credentials->description();
  };
  facts.transport = data_->transport_name();
  facts.fallback = fallback_;
  facts.capabilities = data_->capabilities();
  facts.arena = arena_->path();
  facts.arena_bytes = arena_->memory().size();
  facts.replicas = options_.replicas;
  facts.keep_steps = options_.keep_steps;
  config.off_loop = [this](std::function<void()> work, std::function<void()> done) {
    checks_->Run([this, work = std::move(work), done = std::move(done)] {
      work();
      PostToSelf(done);
    });
  };
  config.transport = [data = data_.get()] { return data->counters(); };
  config.list_storage = [this](uint32_t steps_max, TimeUs timeout_us, LocalServer::StorageListDone done) {
    ListStorage(steps_max, timeout_us, std::move(done));
  };
  config.membership = [this] {
    return watch_ == nullptr ? MembershipReport{} : watch_->Report(EventLoop::Now(), control_->Unreached());
  };
  config.drain = [this](TimeUs within_us) {
    if (drain_asked_) drain_asked_(within_us);
  };
  config.rejoin = [this](const std::string& coordinator, bool force) { return Rejoin(coordinator, force); };
  local_ = std::make_unique<LocalServer>(
      loop_, std::move(config), [this](const auto& input) { Drive(input); },
      [this](Step step) { return ListObjects(step); });
  return OkStatus();
}

Epoch Node::epoch_known() const { return EpochOf(store_->incarnation_max()); }

Status Node::Listen() { return local_->Listen(); }

void Node::UseWatch(CoordinatorWatch* watch, Relocate relocate) {
  watch_ = watch;
  relocate_ = std::move(relocate);
  OnContact();
}

void Node::UseDrain(DrainAsked asked, OnDrained drained) {
  drain_asked_ = std::move(asked);
  on_drained_ = std::move(drained);
}

void Node::Drain(TimeUs until) {
  drain_until_ = std::min(drain_until_, until);
  Drive([](Engine& engine, TimeUs now) { engine.OnDrain(now); });
}

DrainReport Node::EndDrain() {
  const DrainReport report = engine_->drain();
  local_->OnDrained(DrainJson(report, true));
  return report;
}

void Node::LookAtDrain(TimeUs now) {
  if (drain_until_ == EventLoop::kNever || !on_drained_) return;
  const DrainReport report = engine_->drain();
  // Other nodes that leave need the leader and the coordinator, so those leave last.
  const bool last = engine_->is_leader() || (watch_ != nullptr && !options_.coordinator_listen.empty() &&
                                             watch_->Registered() == options_.coordinator_listen);
  if ((report.done && !(last && report.others_leave)) || drain_until_ <= now)
    std::exchange(on_drained_, nullptr)(report);
}

void Node::OnContact() {
  control_->SetCoordinator(watch_->Answer());
  ask_at_ = watch_->ToAsk().empty() ? EventLoop::kNever : EventLoop::Now();
  LookForCoordinator(EventLoop::Now());
  ArmTimer();
}

void Node::LookForCoordinator(TimeUs now) {
  if (now < ask_at_) return;
  for (const Member& member : watch_->ToAsk()) control_->Ask(member.id);
  ask_at_ = now + watch_->AskPause();
}

void Node::OnTold(const std::string& coordinator) {
  bool now = false;
  if (watch_ == nullptr || !ValidateCoordinatorAddress(coordinator).ok() ||
      !watch_->Follows(coordinator, &now))
    return;
  if (std::exchange(told_, coordinator) != coordinator)
    LOG_INFO("coordinator is at %s according to a member of the last view", coordinator.c_str());
  relocate_(coordinator, now);
}

Status Node::Rejoin(const std::string& coordinator, bool force) {
  std::string host;
  uint16_t port = 0;
  ROPETEAM_RETURN_IF_ERROR(SplitHostPort("--coordinator", coordinator, &host, &port));
  if (watch_ == nullptr) return Error(Code::kUnavailable, "this node has no membership yet");
  if (options_.alone)
    return Error(
        Code::kUnsupported,
        "node %s runs with --nodes 1 and without --coordinator, so no other node reaches it: give it "
        "--coordinator %s and restart it",
        options_.node.c_str(), coordinator.c_str());
  if (watch_->moves())
    return Error(Code::kUnsupported,
                 "node %s runs with --membership etcd://…: it takes the coordinator's address from etcd "
                 "alone",
                 options_.node.c_str());
  if (const std::string& present = watch_->Registered(); !present.empty() && present != coordinator && !force)
    return Error(Code::kAlreadyExists,
                 "node %s is registered with the coordinator at %s, which answers: to move it to %s "
                 "anyway, give "
                 "--force, on every node that must move",
                 options_.node.c_str(), present.c_str(), coordinator.c_str());
  LOG_INFO("coordinator is at %s according to `ropeteam rejoin`%s", coordinator.c_str(),
           force ? ", by force" : "");
  relocate_(coordinator, force);
  return OkStatus();
}

std::string Node::Describe() const {
  return "socket " + local_->socket_path() + " control " + self_.control_address + " data " +
         data_->Describe();
}

void Node::PostToSelf(std::function<void()> closure) {
  loop_->Post([closure = std::move(closure), alive = alive_for_others_] {
    if (!alive.expired()) closure();
  });
}

// The first view brings the job's storage. The URL of this node's own option was checked before.
void Node::OpenStorage(const JobSettings& settings) {
  StorageWorkers::Config config;
  if (!settings.storage.empty()) {
    Result<std::unique_ptr<storage::Sink>> sink = storage::OpenSink(settings.storage, options_.storage_mode);
    if (!sink.ok()) {
      // A directory that is missing here, or a build without S3, says nothing about the steps.
      storage_trouble_ = Error(Code::kIo, "%s", sink.status().message().c_str());
      LOG_ERROR("storage cannot be used by this node: %s", storage_trouble_.ToString().c_str());
      return;
    }
    LOG_INFO("storage %s", (*sink)->Describe().c_str());
    config.sink = config.lock_sink = std::move(*sink);
    if (!options_.audit_log.empty()) {
      Result<std::shared_ptr<storage::AuditLog>> log =
          storage::AuditLog::Open(options_.audit_log, options_.job, options_.node);
      if (!log.ok()) {
        storage_trouble_ = Error(Code::kIo, "%s", log.status().message().c_str());
        LOG_ERROR("storage cannot be used by this node: %s", storage_trouble_.ToString().c_str());
        return;
      }
      config.sink = storage::AuditedSink(config.lock_sink, std::move(*log), "retention");
    }
  }
  config.restore_from = settings.restore_from;
  config.job = options_.job;
  config.node = options_.node;
  config.take_over = options_.take_over_storage;
  config.memory = arena_->memory();
  config.chunks_begin = store_->chunk_offset(0);
  config.chunk_bytes = store_->chunk_bytes();
  config.bytes_per_s = options_.persist_bytes_per_s;
  config.rules = options_.retention;
  storage_ = std::make_unique<StorageWorkers>(std::move(config),
                                              [this](uint64_t tag, Status status, StorageDone done) {
                                                OnStorageDone(tag, std::move(status), std::move(done));
                                              });
}

void Node::ListStorage(uint32_t steps_max, TimeUs timeout_us, LocalServer::StorageListDone done) {
  if (view_.settings.storage.empty()) return done(Error(Code::kUnsupported, "this job has no storage"), {});
  if (storage_ == nullptr) return done(storage_trouble_, {});
  storage_->ListNewest(steps_max, std::chrono::microseconds(timeout_us),
                       [this, done = std::move(done)](Status status, local::StorageListReply reply) {
                         PostToSelf([done, status = std::move(status), reply = std::move(reply)]() mutable {
                           done(status, std::move(reply));
                         });
                       });
}

void Node::OnStorageDone(uint64_t tag, Status status, StorageDone done) {
  PostToSelf([this, tag, status = std::move(status), done = std::move(done)] {
    Drive([&](Engine& engine, TimeUs now) { engine.OnStorageDone(now, tag, status, done); });
  });
}

void Node::Drive(const std::function<void(Engine&, TimeUs)>& input) {
  input(*engine_, EventLoop::Now());
  if (carrying_) return;  // the caller further up the stack carries it out
  carrying_ = true;
  while (!engine_->outbox().empty()) {
    Outbox outbox = std::exchange(engine_->outbox(), Outbox());
    CarryOut(outbox);
  }
  carrying_ = false;
  if (storage_ != nullptr) storage_->SetUrgent(transfers_ != 0 || engine_->saving());
  stats_.AfterInput(EventLoop::Now(), *engine_);
  LookAtDrain(EventLoop::Now());
  ArmTimer();
}

void Node::CarryOut(Outbox& outbox) {
  transfers_ += outbox.transfers.size();
  if (!outbox.transfers.empty()) data_->Submit(std::move(outbox.transfers));
  for (StartCheck& check : outbox.checks) checks_->Submit(std::move(check));
  for (StartStorage& start : outbox.storage) {
    if (storage_ != nullptr) {
      storage_->Submit(std::move(start));
    } else {
      OnStorageDone(start.tag, storage_trouble_, {});
    }
  }
  for (SendMessage& message : outbox.messages) control_->Send(message.to, std::move(message.envelope));
  for (const Answer& answer : outbox.answers) local_->OnAnswer(answer);
  for (const PeerSuspicion& suspicion : outbox.suspicions) {
    LOG_INFO("suspect node %016" PRIx64 " reason %s", suspicion.peer, suspicion.reason.c_str());
    if (members_.contains(suspicion.peer)) stats_.OnSign(EventLoop::Now(), suspicion.peer);
    on_suspect_(suspicion.peer, suspicion.reason);
  }
  for (const PeerReached& peer : outbox.reached) {
    if (!peer.reached) control_->Reconnect(peer.peer);
    if (on_reach_) on_reach_(peer.peer, peer.reached);
  }
  for (const LevelEvent& event : outbox.events) LogEvent(event);
}

void Node::ArmTimer() {
  TimeUs next = std::min(engine_->NextTimer(), local_->NextTimer());
  if (storage_ != nullptr) next = std::min(next, storage_look_at_);
  next = std::min(next, ask_at_);
  if (on_drained_) next = std::min(next, drain_until_);
  loop_->SetTimer(next, [this] {
    Drive([this](Engine& engine, TimeUs now) {
      engine.OnTimer(now);
      local_->OnTimer(now);
      LookAtStorage(engine, now);
      LookForCoordinator(now);
    });
  });
}

void Node::LookAtStorage(Engine& engine, TimeUs now) {
  if (storage_ == nullptr || now < storage_look_at_) return;
  storage_look_at_ = now + kStorageLookUs;
  for (const uint64_t tag : storage_->Stalled(std::chrono::steady_clock::now()))
    engine.OnStorageStalled(now, tag);
}

void Node::OnControlMessage(NodeId from, std::string envelope) {
  if (members_.contains(from)) {
    Drive([&](Engine& engine, TimeUs now) { engine.OnMessage(now, from, envelope); });
    return;
  }
  if (early_.size() >= kEarlyMessagesMax || early_bytes_ + envelope.size() > kEarlyBytesMax) {
    LOG_DEBUG("control message from node %016" PRIx64 " dropped, it is not in the view", from);
    return;
  }
  early_bytes_ += envelope.size();
  early_.push_back({from, std::move(envelope)});
}

void Node::OnView(const View& view) {
  std::unordered_set<NodeId> members;
  for (const Member& member : view.members) members.insert(member.id);
  LogView(view, members);
  if (view.settings != view_.settings || view_.epoch == 0) {
    LOG_INFO("job nodes %u replicas %u keep_steps %u", view.settings.nodes, view.settings.replicas,
             view.settings.keep_steps);
    local_->SetSettings(view.settings);
  }
  if (view.settings.reads_storage() && storage_ == nullptr && storage_trouble_.ok())
    OpenStorage(view.settings);
  stats_.OnView(EventLoop::Now(), view_, members);
  view_ = view;
  members_ = std::move(members);
  std::vector<Member> others;
  for (const Member& member : view.members)
    if (member.id != self_.id) others.push_back(member);
  std::vector<Member> talked_to = others;
  if (watch_ != nullptr) {
    watch_->OnView(EventLoop::Now(), self_.id, view);
    for (Member& lost : watch_->ToAsk())
      if (!members_.contains(lost.id)) talked_to.push_back(std::move(lost));
  }
  control_->SetMembers(talked_to);
  data_->SetMembers(std::move(others));
  if (watch_ != nullptr) OnContact();
  Drive([&](Engine& engine, TimeUs now) { engine.OnView(now, view); });
  std::deque<Early> early = std::exchange(early_, {});
  early_bytes_ = 0;
  for (Early& message : early)
    if (members_.contains(message.from)) OnControlMessage(message.from, std::move(message.envelope));
}

void Node::OnLease(TimeUs valid_until) {
  data_->SetLease(valid_until);
  stats_.OnLease(EventLoop::Now(), valid_until);
  Drive([&](Engine& engine, TimeUs now) { engine.OnLease(now, valid_until); });
}

void Node::OnCheckMembers(const std::vector<NodeId>& members) {
  Drive([&](Engine& engine, TimeUs now) { engine.OnCheckMembers(now, members); });
}

void Node::LogView(const View& view, const std::unordered_set<NodeId>& members) const {
  const Member* leader = view.Find(view.leader);
  const std::string changes = Missing(view_, members, " lost ") + Missing(view, members_, " joined ");
  LOG_INFO("view epoch %" PRIu64 " members %zu leader %s%s", view.epoch, view.members.size(),
           leader != nullptr ? leader->name.c_str() : "none", changes.c_str());
}

void Node::LogEvent(const LevelEvent& event) {
  stats_.OnLevel(event);
  const TimeUs now = EventLoop::Now();
  const StepId step = StepOf(event.shard);
  if (event.level == Level::kCommitted && event.shard.rank == LevelEvent::kNoRank) {
    const auto begun = begun_.find(step);
    const std::string after =
        begun == begun_.end() ? "" : " after_ms " + std::to_string((now - begun->second) / 1000);
    LOG_INFO("step %" PRIu64 " committed incarnation %llu%s", step.step, IncarnationNumber(step.incarnation),
             after.c_str());
    return;
  }
  if (event.level == Level::kPersisted && event.shard.rank == LevelEvent::kNoRank) {
    LOG_INFO("step %" PRIu64 " persisted incarnation %llu", step.step, IncarnationNumber(step.incarnation));
    return;
  }
  if (event.since_begin_us != 0) {
    const auto [begun, first] = begun_.try_emplace(step, now - event.since_begin_us);
    if (!first) begun->second = std::min(begun->second, now - event.since_begin_us);
    if (begun_.size() > kBegunStepsMax) begun_.erase(begun_.begin());
  }
  LOG_DEBUG("shard %s level %s bytes %" PRIu64 " after_us %" PRIu64, event.shard.ToString().c_str(),
            LevelName(event.level), event.bytes, event.since_begin_us);
}

MetricsSnapshot Node::Metrics() const {
  MetricsSnapshot snapshot;
  snapshot.version = ROPETEAM_VERSION_TEXT;
  snapshot.job = options_.job;
  snapshot.node = options_.node;
  snapshot.fabric = data_->transport_name();
  snapshot.now = EventLoop::Now();
  snapshot.engine = engine_->Metrics();
  snapshot.stats = stats_;
  snapshot.transport = data_->counters();
  snapshot.epoch = view_.epoch;
  snapshot.members = view_.members.size();
  snapshot.nodes_expected = view_.settings.nodes;
  snapshot.early_messages = early_.size();
  snapshot.unauthenticated = Acceptor::Unauthenticated();
  return snapshot;
}

std::vector<ShardObjects> Node::ListObjects(Step step) const {
  std::vector<ShardObjects> listed;
  size_t count = 0;
  for (const auto& [id, shard] : store_->shards()) {
    if (id.step != step || shard->encrypted()) continue;  // a node that reads the shard has plaintext
    const uint64_t bytes = shard->meta.stream_bytes - shard->meta.manifest_offset;
    if (bytes > kListedManifestBytesMax || count > kListedObjectsMax) continue;
    const std::string encoded = ReadStream(*store_, *shard, shard->meta.manifest_offset, bytes);
    Result<Manifest> manifest = Manifest::Parse(encoded, shard->meta.manifest_offset);
    if (!manifest.ok()) continue;  // a bad chunk: `verify` reports it
    count += manifest->objects().size();
    listed.push_back({id, manifest->objects()});
  }
  return listed;
}

}  // namespace ropeteam
