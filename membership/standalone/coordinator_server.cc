// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/coordinator_server.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <optional>
#include <utility>

#include "core/base/log.h"
#include "membership/credentials/credentials.h"
#include "membership/standalone/acceptor.h"
#include "membership/standalone/loop.h"
#include "membership/standalone/membership.grpc.pb.h"
#include "membership/standalone/options.h"
#include "membership/standalone/wire.h"

namespace ropeteam {

using membership::v1::CoordinatorFrame;
using membership::v1::NodeFrame;

namespace {

// The time for the last view to reach the other nodes before this process ends. Without it they would only lose time.
constexpr auto kFlushMax = std::chrono::milliseconds(200);

// A coordinator's epochs begin at the milliseconds since 2025. That is above all that any earlier one gave out,
// and short enough to read. See Coordinator().
Epoch FirstEpoch() {
  constexpr int64_t kMsAt2025 = 1'735'689'600'000;
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(since).count() - kMsAt2025;
  return static_cast<Epoch>(ms > 0 ? ms : 0) + 1;
}

std::shared_ptr<const CoordinatorFrame> Frame(const CoordinatorMessage& message) {
  return std::make_shared<const CoordinatorFrame>(Encode(message));
}

}  // namespace

class CoordinatorServer::Stream final : public grpc::ServerBidiReactor<NodeFrame, CoordinatorFrame> {
 public:
  // `acceptor`: of the connection from `peer`; may be null.
  Stream(CoordinatorServer* server, Acceptor* acceptor, std::string peer)
      : server_(server), acceptor_(acceptor), peer_(std::move(peer)) {
    id_ = server->Adopt(this);
    ReadNext();
  }

  // Under the server's lock, which keeps the stream alive during the call. `view`: the message's frame, if the
  // message is a view.
  void Send(const CoordinatorMessage& message, std::shared_ptr<const CoordinatorFrame> view) {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    if (view != nullptr) {
      view_ = std::move(view);
    } else if (const auto* probe = std::get_if<Probe>(&message)) {
      probe_ = *probe;
    } else if (const auto* refusal = std::get_if<Refusal>(&message)) {
      refusal_ = *refusal;
    } else {
      answer_ = std::get<HeartbeatAnswer>(message);  // to the newest heartbeat: its lease is the longest
    }
    Advance();
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    Advance();
  }
  void ReadNext() {
    const std::lock_guard lock(mutex_);
    if (!closing_) StartRead(&in_);
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return finished_ || (!writing_ && !HasNext());
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return End();
    Result<NodeMessage> message = Decode(std::exchange(in_, {}));
    if (message.ok()) {
      if (acceptor_ != nullptr) std::exchange(acceptor_, nullptr)->Admit(peer_);
      server_->OnMessage(id_, std::move(*message));
      return ReadNext();
    }
    LOG_WARNING("membership stream closed, reason %s", message.status().ToString().c_str());
    End();
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return EndWrite();
    bool idle = false;
    {
      const std::lock_guard lock(mutex_);
      writing_ = false;
      Advance();
      idle = !writing_;
    }
    if (idle) server_->OnIdle();
  }
  void EndWrite() {
    {
      const std::lock_guard lock(mutex_);
      writing_ = false;
    }
    End();
  }
  void OnCancel() override { End(); }
  void OnDone() override {
    server_->Forget(id_);
    delete this;
  }

  // The peer is gone or breaks the protocol, so nothing more is sent.
  void End() {
    server_->OnEnd(id_);
    const std::lock_guard lock(mutex_);
    closing_ = true;
    view_ = nullptr;
    probe_.reset();
    refusal_.reset();
    answer_.reset();
    Advance();
  }

  bool HasNext() const { return view_ != nullptr || probe_ || refusal_ || answer_; }
  // Writes the next message, or finishes when closing and all is sent. Under mutex_.
  void Advance() {
    if (writing_ || finished_) return;
    if (!HasNext()) {
      if (!closing_) return;
      finished_ = true;
      Finish(grpc::Status::OK);
      return;
    }
    // The probe first, because a node waits for it; the refusal last, because it ends the stream.
    if (probe_) {
      out_ = Frame(*std::exchange(probe_, {}));
    } else if (answer_) {
      out_ = Frame(*std::exchange(answer_, {}));
    } else if (view_ != nullptr) {
      out_ = std::exchange(view_, nullptr);
    } else {
      out_ = Frame(*std::exchange(refusal_, {}));
    }
    writing_ = true;
    StartWrite(out_.get());
  }

  CoordinatorServer* const server_;
  Acceptor* acceptor_;  // null after the first message
  const std::string peer_;
  ConnectionId id_ = kNoConnection;
  NodeFrame in_;                                 // gRPC's from StartRead() to OnReadDone()
  std::shared_ptr<const CoordinatorFrame> out_;  // gRPC's while writing_

  std::mutex mutex_;
  bool writing_ = false;
  bool closing_ = false;
  bool finished_ = false;
  std::shared_ptr<const CoordinatorFrame> view_;
  std::optional<Probe> probe_;
  std::optional<Refusal> refusal_;
  std::optional<HeartbeatAnswer> answer_;
};

class CoordinatorServer::Service final : public membership::v1::Coordinator::CallbackService {
 public:
  Service(CoordinatorServer* server, Acceptor* acceptor) : server_(server), acceptor_(acceptor) {}
  grpc::ServerBidiReactor<NodeFrame, CoordinatorFrame>* Session(
      grpc::CallbackServerContext* context) override {
    return new Stream(server_, acceptor_, context->peer());  // deletes itself in OnDone()
  }

 private:
  CoordinatorServer* const server_;
  Acceptor* const acceptor_;
};

struct CoordinatorServer::Server {
  Server(CoordinatorServer* owner, std::unique_ptr<Acceptor> from)
      : acceptor(std::move(from)), service(owner, acceptor.get()) {}
  std::unique_ptr<Acceptor> acceptor;  // null: it has no port
  Service service;                     // outlives the calls on it, which `grpc` ends
  std::unique_ptr<grpc::Server> grpc;
};

CoordinatorServer::CoordinatorServer(const MembershipConfig& config, OnStore on_store)
    : config_(config), on_store_(std::move(on_store)) {}

CoordinatorServer::~CoordinatorServer() { Stop(); }

Status CoordinatorServer::Start() {
  ROPETEAM_CHECK(server_ == nullptr);
  std::unique_ptr<Acceptor> acceptor;
  if (!config_.alone) {
    Result<std::unique_ptr<Acceptor>> listening = Acceptor::Listen(config_.coordinator_listen);
    if (!listening.ok()) return listening.status();
    acceptor = std::move(*listening);
  }
  address_ = acceptor != nullptr ? acceptor->address() : config_.coordinator_listen;
  if (!on_store_) coordinator_ = std::make_unique<Coordinator>(config_, Loop::Now(), FirstEpoch());
  auto server = std::make_unique<Server>(this, std::move(acceptor));
  grpc::ServerBuilder builder;
  SetServerOptions(&builder);
  builder.RegisterService(&server->service);
  Result<std::unique_ptr<grpc::Server>> started =
      StartServer(&builder, server->acceptor.get(), config_.credentials.get());
  if (!started.ok()) return started.status();
  server->grpc = std::move(*started);
  server_ = std::move(server);
  LOG_INFO("membership coordinator listens on %s, job %s", address_.c_str(), config_.job.c_str());
  thread_ = std::thread([this] { KeepDeadlines(); });
  return OkStatus();
}

void CoordinatorServer::Stop() {
  if (server_ == nullptr) return;
  if (server_->acceptor != nullptr) server_->acceptor->Stop();
  const auto deadline = std::chrono::steady_clock::now() + kFlushMax;
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    if (coordinator_ != nullptr) Perform(coordinator_->Flush(Loop::Now()));
    changed_.wait_until(lock, deadline, [this] { return AllIdle(); });
  }
  server_->grpc->Shutdown(std::chrono::system_clock::now());
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return streams_.empty(); });
    ending_ = true;
  }
  timer_.notify_one();
  thread_.join();
  server_->grpc->Wait();
  server_.reset();
}

std::shared_ptr<grpc::Channel> CoordinatorServer::Channel() const {
  return server_->grpc->InProcessChannel(ChannelOptions());
}

void CoordinatorServer::KeepDeadlines() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    if (coordinator_ == nullptr) {
      timer_.wait(lock);
      continue;
    }
    armed_ = coordinator_->NextDeadline();
    if (const TimeUs now = Loop::Now(); now >= armed_) {
      Perform(coordinator_->Tick(now));
    } else {
      Loop::WaitUntil(timer_, lock, armed_);
    }
  }
}

void CoordinatorServer::Elect(const Coordinator::Inheritance& inheritance) {
  const std::lock_guard lock(mutex_);
  if (stopping_ || coordinator_ != nullptr) return;
  MembershipConfig config = config_;
  config.coordinator_listen = address_;
  LOG_INFO("membership coordinator begins on %s, job %s", address_.c_str(), config_.job.c_str());
  coordinator_ = std::make_unique<Coordinator>(config, Loop::Now(), FirstEpoch(), inheritance);
  encoded_ = 0;  // its epochs may repeat those of the previous coordinator, if the store has lost its data
  timer_.notify_one();
}

void CoordinatorServer::Depose() {
  const std::lock_guard lock(mutex_);
  if (coordinator_ == nullptr) return;
  LOG_INFO("membership coordinator on %s ends", address_.c_str());
  coordinator_.reset();
  for (const auto& [id, stream] : streams_) stream->Close();
  changed_.notify_all();
}

void CoordinatorServer::Stored(Epoch epoch) {
  const std::lock_guard lock(mutex_);
  if (coordinator_ != nullptr) Perform(coordinator_->Stored(Loop::Now(), epoch));
  changed_.notify_all();
}

void CoordinatorServer::Confirmed(TimeUs until) {
  const std::lock_guard lock(mutex_);
  if (coordinator_ != nullptr) Perform(coordinator_->Confirmed(Loop::Now(), until));
}

void CoordinatorServer::Settle() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kFlushMax, [this] { return coordinator_ == nullptr || coordinator_->settled(); });
}

bool CoordinatorServer::AllIdle() {
  for (const auto& [id, stream] : streams_)
    if (!stream->idle()) return false;
  return true;
}

ConnectionId CoordinatorServer::Adopt(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const ConnectionId id = ++connections_made_;
  streams_.emplace(id, stream);
  if (coordinator_ != nullptr) {
    Perform(coordinator_->Opened(Loop::Now(), id));
  } else {
    stream->Close();
  }
  return id;
}

void CoordinatorServer::OnMessage(ConnectionId connection, NodeMessage message) {
  const std::lock_guard lock(mutex_);
  if (coordinator_ != nullptr) Perform(coordinator_->Received(Loop::Now(), connection, message));
}

void CoordinatorServer::OnEnd(ConnectionId connection) {
  // Called twice for a stream that is both cancelled and at its end; the second call finds nothing to close.
  const std::lock_guard lock(mutex_);
  if (coordinator_ != nullptr) Perform(coordinator_->Closed(Loop::Now(), connection));
}

void CoordinatorServer::Forget(ConnectionId connection) {
  const std::lock_guard lock(mutex_);
  streams_.erase(connection);
  changed_.notify_all();
}

void CoordinatorServer::OnIdle() {
  const std::lock_guard lock(mutex_);
  if (stopping_) changed_.notify_all();
}

void CoordinatorServer::Perform(Coordinator::Outputs outputs) {
  for (const Coordinator::Output& output : outputs) {
    if (const auto* store = std::get_if<Coordinator::Store>(&output)) {
      on_store_(store->view);
      continue;
    }
    const auto* send = std::get_if<Coordinator::Send>(&output);
    const auto* close = std::get_if<Coordinator::Close>(&output);
    const auto found = streams_.find(send != nullptr ? send->connection : close->connection);
    if (found == streams_.end()) continue;  // it has ended, and Closed() was called for it
    if (send == nullptr) {
      found->second->Close();
      continue;
    }
    found->second->Send(send->message, FrameOfView(send->message));
  }
  if (coordinator_->NextDeadline() < armed_) timer_.notify_one();
}

std::shared_ptr<const CoordinatorFrame> CoordinatorServer::FrameOfView(const CoordinatorMessage& message) {
  const auto* view = std::get_if<ViewStatePtr>(&message);
  const auto* delta = std::get_if<ViewDeltaPtr>(&message);
  if (view == nullptr && delta == nullptr) return nullptr;
  const Epoch epoch = view != nullptr ? (*view)->view.epoch : (*delta)->changed.view.epoch;
  if (epoch != encoded_) frames_.clear();
  encoded_ = epoch;
  std::shared_ptr<const CoordinatorFrame>& frame = frames_[view != nullptr ? 0 : (*delta)->base];
  if (frame == nullptr) frame = Frame(message);
  return frame;
}

}  // namespace ropeteam
