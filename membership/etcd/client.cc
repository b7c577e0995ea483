// SPDX-License-Identifier: Apache-2.0
#include "membership/etcd/client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "core/base/log.h"
#include "membership/etcd/etcd.grpc.pb.h"
#include "membership/standalone/loop.h"
#include "membership/standalone/options.h"

namespace ropeteam {
namespace {

namespace pb = etcdserverpb;

// etcd ends connections that ping more often than every 5 s (its --grpc-keepalive-min-time). Deadlines of calls detect
// a dead path sooner; pings only end streams on it.
constexpr int kPingMs = 10'000;
constexpr int kPingTimeoutMs = 2'000;
constexpr int kConnectMs = 500;  // a call's usual deadline

// If the file is missing now, the former content stays: the file may be about to be replaced.
void ReadAgain(const std::string& path, std::string* text) {
  std::ifstream file(path, std::ios::binary);
  std::string now{std::istreambuf_iterator<char>(file), {}};
  if (!now.empty()) *text = std::move(now);
}

// The first key that does not begin with `prefix`. Our prefixes end with '/', so the last byte is never the highest.
std::string EndOfPrefix(std::string prefix) {
  ++prefix.back();
  return prefix;
}

void Encode(const StoreOp& op, pb::RequestOp* out) {
  switch (op.kind) {
    case StoreOp::kGet:
      out->mutable_request_range()->set_key(op.key);
      break;
    case StoreOp::kCountPrefix:
      out->mutable_request_range()->set_key(op.key);
      out->mutable_request_range()->set_range_end(EndOfPrefix(op.key));
      out->mutable_request_range()->set_count_only(true);
      break;
    case StoreOp::kPut:
      out->mutable_request_put()->set_key(op.key);
      out->mutable_request_put()->set_value(op.value);
      out->mutable_request_put()->set_lease(op.lease);
      break;
    case StoreOp::kDelete:
      out->mutable_request_delete_range()->set_key(op.key);
      break;
    case StoreOp::kDeletePrefix:
      out->mutable_request_delete_range()->set_key(op.key);
      out->mutable_request_delete_range()->set_range_end(EndOfPrefix(op.key));
      break;
  }
}

pb::TxnRequest Encode(const StoreTxn& txn) {
  pb::TxnRequest out;
  for (const StoreCompare& compare : txn.compare) {
    pb::Compare* to = out.add_compare();
    to->set_key(compare.key);
    to->set_target(compare.kind == StoreCompare::kAbsent     ? 1
                   : compare.kind == StoreCompare::kRevision ? 2
                                                             : 3);
    if (compare.kind == StoreCompare::kAbsent) to->set_create_revision(0);
    if (compare.kind == StoreCompare::kRevision) to->set_mod_revision(compare.revision);
    if (compare.kind == StoreCompare::kValue) to->set_value(compare.value);
  }
  for (const StoreOp& op : txn.success) Encode(op, out.add_success());
  for (const StoreOp& op : txn.failure) Encode(op, out.add_failure());
  return out;
}

StoreAnswer Decode(pb::TxnResponse* response) {
  StoreAnswer answer;
  answer.revision = response->header().revision();
  answer.succeeded = response->succeeded();
  for (pb::ResponseOp& op : *response->mutable_responses()) {
    StoreFound& found = answer.found.emplace_back();
    if (!op.has_response_range()) continue;
    pb::RangeResponse* range = op.mutable_response_range();
    found.count = range->count();
    if (range->kvs_size() == 0) continue;
    found.present = true;
    found.revision = range->kvs(0).mod_revision();
    found.value = std::move(*range->mutable_kvs(0)->mutable_value());
  }
  return answer;
}

bool Says(const grpc::Status& status, const char* text) {
  return status.error_message().find(text) != std::string::npos;
}

// The code for the caller of a failed call. All other codes concern the endpoint.
Code CodeOf(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::NOT_FOUND:
      return Code::kNotFound;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return Says(status, "database space exceeded") ? Code::kNoSpace : Code::kUnavailable;
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::UNAUTHENTICATED:
      return Code::kInvalidArgument;
    default:
      return Code::kUnavailable;
  }
}

// etcd's messages for an expired token, and for a token from before a change of its users.
bool TokenIsBad(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED || Says(status, "invalid auth token") ||
         Says(status, "auth: revision in header is old") || Says(status, "user name is empty");
}

// One TCP connection.
struct Connection {
  Connection(size_t of, std::shared_ptr<grpc::Channel> to)
      : endpoint(of), channel(std::move(to)), kv(channel), lease(channel), watch(channel), auth(channel) {}
  const size_t endpoint;  // its index
  std::shared_ptr<grpc::Channel> channel;
  pb::KV::Stub kv;
  pb::Lease::Stub lease;
  pb::Watch::Stub watch;
  pb::Auth::Stub auth;
};

// An object in use by gRPC. It must not be destroyed on gRPC's threads: its channel may be the last one that keeps
// them, and would wait for itself. So it is kept until the loop's thread runs.
struct Work {
  virtual ~Work() = default;
  grpc::ClientContext context;
  std::shared_ptr<Connection> connection;
};

struct CallWork final : Work {
  uint64_t id = 0;  // 0: Authenticate
  StoreRequest request;
  pb::TxnRequest txn;
  pb::TxnResponse txn_answer;
  pb::LeaseGrantRequest grant;
  pb::LeaseGrantResponse grant_answer;
  pb::LeaseRevokeRequest revoke;
  pb::LeaseRevokeResponse revoke_answer;
  pb::AuthenticateRequest user;
  pb::AuthenticateResponse user_answer;
};

template <typename Request, typename Response>
struct StreamWork final : Work, grpc::ClientBidiReactor<Request, Response> {
  std::function<void(const Response&)> on_message;
  std::function<void(const grpc::Status&)> on_done;
  uint64_t number = 0;

  void Begin(const Request& first) {
    out_ = first;
    writing_ = true;
    this->AddHold();
    this->StartRead(&in_);
    this->StartWrite(&out_);
    this->StartCall();
  }
  // Dropped if the previous one was not sent yet: the next one requests the same.
  void Send(const Request& request) {
    const std::lock_guard lock(mutex_);
    if (writing_ || !held_) return;
    writing_ = true;
    out_ = request;
    this->StartWrite(&out_);
  }
  void Cancel() {
    context.TryCancel();
    Release();
  }

 private:
  void Release() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(held_, false)) this->RemoveHold();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return Release();
    on_message(in_);
    const std::lock_guard lock(mutex_);
    if (held_) this->StartRead(&in_);
  }
  void OnWriteDone(bool) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
  }
  void OnDone(const grpc::Status& status) override { on_done(status); }

  std::mutex mutex_;
  bool held_ = true;  // operations may be started; gRPC delays OnDone() until it is released
  bool writing_ = false;
  Request out_;
  Response in_;
};
using KeepAliveWork = StreamWork<pb::LeaseKeepAliveRequest, pb::LeaseKeepAliveResponse>;
using WatchWork = StreamWork<pb::WatchRequest, pb::WatchResponse>;

}  // namespace

struct EtcdClient::Impl {
  Impl(const EtcdConfig& of, Handler to)
      : config(of), handler(std::move(to)), cluster(config.endpoints.size()) {
    at = std::random_device()() % config.endpoints.size();
    connection = Connect();
  }

  std::shared_ptr<Connection> Connect();
  void Prepare(Work* work, int deadline_ms);
  template <typename W>
  W* Keep(std::unique_ptr<W> work);
  std::vector<std::unique_ptr<Work>> TakeEnded();
  void Begin(CallWork* call);
  void BeginAuthentication();
  void Done(CallWork* call, const grpc::Status& status);
  Result<StoreAnswer> AnswerOf(CallWork* call, const grpc::Status& status);
  void Ended(Work* work);
  void Leave(const Connection* failed);
  void OnWatch(uint64_t number, const pb::WatchResponse& response);

  const EtcdConfig config;
  const Handler handler;

  std::mutex mutex;  // not held while a handler runs
  std::condition_variable changed;
  size_t at = 0;                    // the endpoint in use
  grpc::SslCredentialsOptions tls;  // as last read
  std::shared_ptr<Connection> connection;
  std::string token;
  bool authenticating = false;
  std::vector<CallWork*> waiting;  // for the token
  std::map<Work*, std::unique_ptr<Work>> live;
  std::vector<std::unique_ptr<Work>> ended;
  KeepAliveWork* keep_alive = nullptr;  // of `live`
  WatchWork* watch = nullptr;
  OneCluster cluster;
  bool stopping = false;
};

std::shared_ptr<Connection> EtcdClient::Impl::Connect() {
  grpc::ChannelArguments arguments;
  // A new attempt must be a new TCP connection: the old one may be a path that is silently dead.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetMaxReceiveMessageSize(kEtcdMessageBytesMax);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (config.tls) {
    if (!config.ca.empty()) {
      ReadAgain(config.ca, &tls.pem_root_certs);
      if (tls.pem_root_certs.empty())
        tls.pem_root_certs = "nobody";  // empty would mean the roots that the system trusts
    }
    if (!config.cert.empty()) ReadAgain(config.cert, &tls.pem_cert_chain);
    if (!config.key.empty()) ReadAgain(config.key, &tls.pem_private_key);
    credentials = grpc::SslCredentials(tls);
  }
  return std::make_shared<Connection>(
      at, grpc::CreateCustomChannel(config.endpoints[at], credentials, arguments));
}

// Under mutex, like everything down to Done().
void EtcdClient::Impl::Prepare(Work* work, int deadline_ms) {
  work->connection = connection;
  if (!token.empty()) work->context.AddMetadata("token", token);
  if (deadline_ms != 0)
    work->context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
}

template <typename W>
W* EtcdClient::Impl::Keep(std::unique_ptr<W> work) {
  W* raw = work.get();
  live.emplace(raw, std::move(work));
  return raw;
}

// Destroy these without the lock, and only after a new channel exists: gRPC's threads end with its last channel.
std::vector<std::unique_ptr<Work>> EtcdClient::Impl::TakeEnded() { return std::exchange(ended, {}); }

void EtcdClient::Impl::Begin(CallWork* call) {
  const auto done = [this, call](const grpc::Status& status) { Done(call, status); };
  Connection& to = *call->connection;
  if (const auto* txn = std::get_if<StoreTxn>(&call->request)) {
    call->txn = Encode(*txn);
    to.kv.async()->Txn(&call->context, &call->txn, &call->txn_answer, done);
  } else if (const auto* grant = std::get_if<StoreGrant>(&call->request)) {
    call->grant.set_ttl(grant->ttl_s);
    to.lease.async()->LeaseGrant(&call->context, &call->grant, &call->grant_answer, done);
  } else {
    call->revoke.set_id(std::get<StoreRevoke>(call->request).lease);
    to.lease.async()->LeaseRevoke(&call->context, &call->revoke, &call->revoke_answer, done);
  }
}

void EtcdClient::Impl::BeginAuthentication() {
  if (std::exchange(authenticating, true)) return;
  CallWork* call = Keep(std::make_unique<CallWork>());
  Prepare(call, kConnectMs);
  call->user.set_name(config.user);
  call->user.set_password(config.password);
  call->connection->auth.async()->Authenticate(
      &call->context, &call->user, &call->user_answer,
      [this, call](const grpc::Status& status) { Done(call, status); });
}

void EtcdClient::Impl::Ended(Work* work) {
  const auto found = live.find(work);
  ended.push_back(std::move(found->second));
  live.erase(found);
  if (work == keep_alive) keep_alive = nullptr;
  if (work == watch) watch = nullptr;
  changed.notify_all();
}

void EtcdClient::Impl::Leave(const Connection* failed) {
  if (stopping || failed != connection.get()) return;  // a former connection
  at = (at + 1) % config.endpoints.size();
  connection = Connect();
  if (keep_alive != nullptr) keep_alive->Cancel();
  if (watch != nullptr) watch->Cancel();
}

Result<StoreAnswer> EtcdClient::Impl::AnswerOf(CallWork* call, const grpc::Status& status) {
  const std::string& endpoint = config.endpoints[call->connection->endpoint];
  if (!status.ok()) {
    const bool renew = !config.user.empty() && TokenIsBad(status);
    const Code code = renew ? Code::kUnavailable : CodeOf(status);
    if (renew) {
      token.clear();
    } else if (code == Code::kUnavailable) {
      Leave(call->connection.get());
    }
    return Error(code, "%s: %s%s", endpoint.c_str(),
                 ExplainName(status.error_message(), endpoint).substr(0, 300).c_str(),
                 !renew && TokenIsBad(status) ? "(etcd requires a user: etcd://USER@HOST:PORT/PREFIX)" : "");
  }
  StoreAnswer answer;
  uint64_t cluster_id = 0;
  if (const auto* txn = std::get_if<StoreTxn>(&call->request)) {
    answer = Decode(&call->txn_answer);
    if (txn->compare.empty() && !answer.succeeded) {
      Leave(call->connection.get());
      return Error(Code::kUnavailable, "%s: invalid answer, a request without a condition has failed one",
                   endpoint.c_str());
    }
    if (const size_t asked = (answer.succeeded ? txn->success : txn->failure).size();
        answer.found.size() != asked) {
      Leave(call->connection.get());
      return Error(Code::kUnavailable, "%s: invalid answer, %zu parts to a request of %zu", endpoint.c_str(),
                   answer.found.size(), asked);
    }
    cluster_id = call->txn_answer.header().cluster_id();
  } else if (std::holds_alternative<StoreGrant>(call->request)) {
    answer.lease = call->grant_answer.id();
    answer.revision = call->grant_answer.header().revision();
    cluster_id = call->grant_answer.header().cluster_id();
    if (answer.lease == 0) {
      Leave(call->connection.get());
      return Error(Code::kUnavailable, "%s: a lease without an id", endpoint.c_str());
    }
  } else {
    answer.revision = call->revoke_answer.header().revision();
    cluster_id = call->revoke_answer.header().cluster_id();
  }
  const uint64_t before = cluster.id();
  if (cluster.Counts(Loop::Now(), cluster_id, call->connection->endpoint)) {
    if (before != cluster_id && before != 0)
      LOG_WARNING("membership etcd at %s is another cluster than before and is used as a new one",
                  endpoint.c_str());
    return answer;
  }
  Leave(call->connection.get());
  return Error(Code::kUnavailable, "%s is of another etcd cluster than the endpoints before",
               endpoint.c_str());
}

void EtcdClient::Impl::Done(CallWork* call, const grpc::Status& status) {
  std::vector<std::pair<uint64_t, Result<StoreAnswer>>> answers;
  {
    const std::lock_guard lock(mutex);
    if (call->id != 0) {
      answers.emplace_back(call->id, AnswerOf(call, status));
    } else {
      authenticating = false;
      const std::vector<CallWork*> calls = std::exchange(waiting, {});
      if (status.ok()) token = call->user_answer.token();
      const Code code = CodeOf(status);
      if (!status.ok() && code == Code::kUnavailable) Leave(call->connection.get());
      const std::string& endpoint = config.endpoints[call->connection->endpoint];
      for (CallWork* of : calls) {
        if (status.ok() && !stopping) {
          of->context.AddMetadata("token", token);
          Begin(of);
          continue;
        }
        answers.emplace_back(
            of->id,
            Error(code == Code::kNotFound ? Code::kUnavailable : code, "%s, user %s: %s", endpoint.c_str(),
                  config.user.c_str(), ExplainName(status.error_message(), endpoint).substr(0, 300).c_str()));
        Ended(of);
      }
    }
  }
  for (auto& [id, answer] : answers) handler.on_answer(id, std::move(answer));
  // Only now, because Stop() waits for it, and no handler runs after that.
  const std::lock_guard lock(mutex);
  Ended(call);
}

void EtcdClient::Impl::OnWatch(uint64_t number, const pb::WatchResponse& response) {
  for (const pb::Event& event : response.events()) {
    const bool put = event.type() == 0;
    handler.on_changed(number, event.kv().mod_revision(), put ? &event.kv().value() : nullptr);
  }
}

EtcdClient::EtcdClient(const EtcdConfig& config, Handler handler)
    : impl_(std::make_unique<Impl>(config, std::move(handler))) {}

EtcdClient::~EtcdClient() { Stop(); }

void EtcdClient::Call(uint64_t id, const StoreRequest& request, int deadline_ms) {
  std::vector<std::unique_ptr<Work>> ended;
  const std::lock_guard lock(impl_->mutex);
  if (impl_->stopping) return;
  ended = impl_->TakeEnded();
  CallWork* call = impl_->Keep(std::make_unique<CallWork>());
  call->id = id;
  call->request = request;
  impl_->Prepare(call, deadline_ms);
  if (impl_->config.user.empty() || !impl_->token.empty()) return impl_->Begin(call);
  impl_->waiting.push_back(call);
  impl_->BeginAuthentication();
}

void EtcdClient::KeepAlive(StoreLease lease) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->stopping || (!impl_->config.user.empty() && impl_->token.empty())) return;
  pb::LeaseKeepAliveRequest request;
  request.set_id(lease);
  if (impl_->keep_alive != nullptr) return impl_->keep_alive->Send(request);
  KeepAliveWork* work = impl_->Keep(std::make_unique<KeepAliveWork>());
  impl_->Prepare(work, 0);
  work->context.AddMetadata("hasleader", "true");
  Impl* impl = impl_.get();
  work->on_message = [impl](const pb::LeaseKeepAliveResponse& response) {
    impl->handler.on_kept_alive(response.id(), response.ttl());
  };
  work->on_done = [impl, work](const grpc::Status& status) {
    const std::lock_guard inner(impl->mutex);
    if (TokenIsBad(status)) impl->token.clear();
    impl->Ended(work);
  };
  impl_->keep_alive = work;
  work->connection->lease.async()->LeaseKeepAlive(&work->context, work);
  work->Begin(request);
}

void EtcdClient::Watch(uint64_t number, const std::string& key, int64_t from) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->stopping) return;
  if (impl_->watch != nullptr) std::exchange(impl_->watch, nullptr)->Cancel();
  pb::WatchRequest request;
  request.mutable_create_request()->set_key(key);
  request.mutable_create_request()->set_start_revision(from);
  WatchWork* work = impl_->Keep(std::make_unique<WatchWork>());
  impl_->Prepare(work, 0);
  // A member that has lost the others would be silent for ever. With this it ends the watch.
  work->context.AddMetadata("hasleader", "true");
  Impl* impl = impl_.get();
  work->number = number;
  work->on_message = [impl, work](const pb::WatchResponse& response) {
    impl->OnWatch(work->number, response);
    if (response.canceled()) work->Cancel();  // compacted, or the token is not valid
  };
  work->on_done = [impl, work](const grpc::Status& status) {
    impl->handler.on_watch_ended(work->number, status.error_message().substr(0, 300));
    const std::lock_guard inner(impl->mutex);
    if (TokenIsBad(status)) impl->token.clear();
    impl->Ended(work);
  };
  impl_->watch = work;
  work->connection->watch.async()->Watch(&work->context, work);
  work->Begin(request);
}

void EtcdClient::NextEndpoint() {
  const std::lock_guard lock(impl_->mutex);
  impl_->Leave(impl_->connection.get());
}

void EtcdClient::Stop() {
  std::vector<std::unique_ptr<Work>> ended;
  std::vector<uint64_t> dropped;
  std::unique_lock lock(impl_->mutex);
  impl_->stopping = true;
  // A call that waits for the token has not begun.
  for (CallWork* call : std::exchange(impl_->waiting, {})) impl_->Ended(call);
  for (const auto& [work, owned] : impl_->live) {
    if (work == impl_->keep_alive) {
      impl_->keep_alive->Cancel();
    } else if (auto* watch = dynamic_cast<WatchWork*>(work)) {
      watch->Cancel();
    } else if (auto* keep_alive = dynamic_cast<KeepAliveWork*>(work)) {
      keep_alive->Cancel();
    } else {
      work->context.TryCancel();
    }
  }
  impl_->changed.wait(lock, [this] { return impl_->live.empty(); });
  ended = impl_->TakeEnded();
  lock.unlock();
}

}  // namespace ropeteam
