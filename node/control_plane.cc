// SPDX-License-Identifier: Apache-2.0
#include "node/control_plane.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <mutex>

#include "core/base/log.h"
#include "membership/standalone/options.h"
#include "node/control.grpc.pb.h"
#include "node/control_link.h"
#include "node/options.h"

namespace ropeteam {
namespace {

class AddressBox {
 public:
  void Set(const std::string& address) {
    const std::lock_guard lock(mutex_);
    address_ = address;
  }
  std::string Get() {
    const std::lock_guard lock(mutex_);
    return address_;
  }

 private:
  std::mutex mutex_;
  std::string address_;
};

// One incoming stream. Owned by gRPC until OnDone() and by the messages that are being handled.
class Incoming : public grpc::ServerBidiReactor<control::Envelope, control::Answer> {
 public:
  static Incoming* Begin(NodeId self, const ControlPlane::OnMessage* on_message, AddressBox* coordinator,
                         Acceptor* acceptor, std::string peer) {
    std::shared_ptr<Incoming> incoming(
        new Incoming(self, on_message, coordinator, acceptor, std::move(peer)));
    incoming->self_reference_ = incoming;
    incoming->StartSendInitialMetadata();  // tells the sender that the stream exists
    incoming->StartRead(&incoming->message_);
    return incoming.get();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return FinishOnce(grpc::Status::OK);
    if (message_.protocol_version() != kControlProtocolVersion)
      return FinishOnce(grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                                     "control protocol version " +
                                         std::to_string(message_.protocol_version()) + " there, " +
                                         std::to_string(kControlProtocolVersion) + " here"));
    if (acceptor_ != nullptr) std::exchange(acceptor_, nullptr)->Admit(peer_);
    bool read_on = true;
    if (message_.where_is_coordinator()) {
      AnswerWhere();
    } else if (message_.to() == self_ && message_.from() != kNoNode) {
      {
        const std::lock_guard lock(mutex_);
        parked_ = ++unhandled_ >= kControlUnhandledMessagesMax;
        read_on = !parked_;
      }
      (*on_message_)(message_.from(), std::move(*message_.mutable_engine_envelope()),
                     [self = self_reference_] { self->Handled(); });
    } else {
      LOG_DEBUG("control message for another instance dropped");
    }
    // If Handled() has cleared parked_ meanwhile, it has begun the next read itself.
    if (read_on) StartRead(&message_);
  }

  void OnWriteDone(bool) override {
    const std::lock_guard lock(mutex_);
    answering_ = false;
  }

  void OnCancel() override {
    bool finish = false;
    {
      const std::lock_guard lock(mutex_);
      // An outstanding read would fail and finish the stream. If there is none, this call finishes it.
      finish = parked_;
      parked_ = false;
      cancelled_ = true;
    }
    if (finish) FinishOnce(grpc::Status::CANCELLED);
  }

  void OnDone() override { self_reference_.reset(); }

 private:
  Incoming(NodeId self, const ControlPlane::OnMessage* on_message, AddressBox* coordinator,
           Acceptor* acceptor, std::string peer)
      : self_(self),
        on_message_(on_message),
        coordinator_(coordinator),
        acceptor_(acceptor),
        peer_(std::move(peer)) {}

  // One answer at a time. The sender repeats a question that was not answered.
  void AnswerWhere() {
    const std::string coordinator = coordinator_->Get();
    if (coordinator.empty()) return;
    const std::lock_guard lock(mutex_);
    if (answering_ || cancelled_ || finished_) return;
    answering_ = true;
    answer_.set_coordinator(coordinator);
    StartWrite(&answer_);
  }

  void Handled() {
    {
      const std::lock_guard lock(mutex_);
      --unhandled_;
      if (!parked_ || cancelled_) return;
      parked_ = false;
    }
    StartRead(&message_);
  }

  void FinishOnce(const grpc::Status& status) {
    {
      const std::lock_guard lock(mutex_);
      if (finished_) return;
      finished_ = true;
    }
    Finish(status);
  }

  const NodeId self_;
  const ControlPlane::OnMessage* const on_message_;
  AddressBox* const coordinator_;
  Acceptor* acceptor_;  // of the connection from peer_; null after the first message
  const std::string peer_;
  std::shared_ptr<Incoming> self_reference_;
  control::Envelope message_;
  control::Answer answer_;  // used by gRPC while answering_
  std::mutex mutex_;
  bool answering_ = false;
  size_t unhandled_ = 0;
  bool parked_ = false;  // no read is outstanding: too many messages are unhandled
  bool cancelled_ = false;
  bool finished_ = false;
};

class Service : public control::Control::CallbackService {
 public:
  Service(NodeId self, ControlPlane::OnMessage on_message)
      : self_(self), on_message_(std::move(on_message)) {}
  grpc::ServerBidiReactor<control::Envelope, control::Answer>* Exchange(
      grpc::CallbackServerContext* context) override {
    return Incoming::Begin(self_, &on_message_, &coordinator_, acceptor_.get(), context->peer());
  }
  void Use(std::unique_ptr<Acceptor> acceptor) { acceptor_ = std::move(acceptor); }
  Acceptor* acceptor() { return acceptor_.get(); }
  AddressBox& coordinator() { return coordinator_; }

 private:
  AddressBox coordinator_;
  std::unique_ptr<Acceptor> acceptor_;  // null: no port
  const NodeId self_;
  const ControlPlane::OnMessage on_message_;
};

}  // namespace

class ControlPlane::Impl {
 public:
  Impl(const Config& config, OnMessage on_message, OnAnswer on_answer)
      : config_(config), on_answer_(std::move(on_answer)), service_(config.self, std::move(on_message)) {}

  Status Listen() {
    if (config_.listen.empty()) return OkStatus();
    Result<std::unique_ptr<Acceptor>> acceptor = Acceptor::Listen(JoinHostPort(config_.listen, config_.port));
    if (!acceptor.ok()) return acceptor.status();
    service_.Use(std::move(*acceptor));
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(static_cast<int>(kControlMessageBytesMax));
    builder.RegisterService(&service_);
    Result<std::unique_ptr<grpc::Server>> server =
        StartServer(&builder, service_.acceptor(), config_.credentials.get());
    if (!server.ok()) return server.status();
    server_ = std::move(*server);
    return OkStatus();
  }

  uint16_t port() { return service_.acceptor() != nullptr ? service_.acceptor()->port() : 0; }

  void SetMembers(const std::vector<Member>& members) {
    std::map<NodeId, std::unique_ptr<ControlLink>> next;
    for (const Member& member : members) {
      const auto found = links_.find(member.id);
      if (found == links_.end()) {
        next[member.id] = std::make_unique<ControlLink>(config_.self, member, config_.credentials.get(),
                                                        &count_, &on_answer_);
      } else {
        next[member.id] = std::move(found->second);
        links_.erase(found);
      }
    }
    links_.swap(next);
    for (auto& [id, link] : next) {
      link->Stop();
      retired_.push_back(std::move(link));
    }
    std::erase_if(retired_, [](const auto& link) { return link->idle(); });
  }

  void Send(NodeId to, std::string envelope) {
    const auto found = links_.find(to);
    if (found != links_.end()) found->second->Send(std::move(envelope));
  }

  void Reconnect(NodeId to) {
    const auto found = links_.find(to);
    if (found == links_.end() || found->second->unreached_since() != 0) return;
    found->second->Stop();
    auto fresh = std::make_unique<ControlLink>(config_.self, found->second->peer(), config_.credentials.get(),
                                               &count_, &on_answer_);
    retired_.push_back(std::exchange(found->second, std::move(fresh)));
    std::erase_if(retired_, [](const auto& link) { return link->idle(); });
  }

  void Ask(NodeId to) {
    if (const auto found = links_.find(to); found != links_.end()) found->second->Ask();
  }

  void SetCoordinator(const std::string& address) { service_.coordinator().Set(address); }

  std::map<NodeId, TimeUs> Unreached() {
    std::map<NodeId, TimeUs> unreached;
    for (const auto& [id, link] : links_)
      if (const TimeUs since = link->unreached_since(); since != 0) unreached[id] = since;
    return unreached;
  }

  void Stop() {
    SetMembers({});
    if (server_ != nullptr) {
      service_.acceptor()->Stop();
      server_->Shutdown(
          std::chrono::system_clock::now());  // streams never end by themselves: cancel them now
      server_->Wait();
      server_.reset();
    }
    count_.WaitForZero();
    retired_.clear();
  }

 private:
  const Config config_;
  const OnAnswer on_answer_;
  Service service_;
  std::unique_ptr<grpc::Server> server_;
  StreamCount count_;
  std::map<NodeId, std::unique_ptr<ControlLink>> links_;
  std::vector<std::unique_ptr<ControlLink>> retired_;  // stopped, but gRPC still uses them
};

Result<std::unique_ptr<ControlPlane>> ControlPlane::Create(const Config& config, OnMessage on_message,
                                                           OnAnswer on_answer) {
  auto impl = std::make_unique<Impl>(config, std::move(on_message), std::move(on_answer));
  ROPETEAM_RETURN_IF_ERROR(impl->Listen());
  return std::unique_ptr<ControlPlane>(new ControlPlane(std::move(impl)));
}

ControlPlane::ControlPlane(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ControlPlane::~ControlPlane() { Stop(); }
uint16_t ControlPlane::port() const { return impl_->port(); }
void ControlPlane::SetMembers(const std::vector<Member>& members) { impl_->SetMembers(members); }
void ControlPlane::Send(NodeId to, std::string envelope) { impl_->Send(to, std::move(envelope)); }
void ControlPlane::Reconnect(NodeId to) { impl_->Reconnect(to); }
void ControlPlane::Ask(NodeId to) { impl_->Ask(to); }
void ControlPlane::SetCoordinator(const std::string& address) { impl_->SetCoordinator(address); }
std::map<NodeId, TimeUs> ControlPlane::Unreached() const { return impl_->Unreached(); }
void ControlPlane::Stop() { impl_->Stop(); }

}  // namespace ropeteam
