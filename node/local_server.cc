// SPDX-License-Identifier: Apache-2.0
#include "node/local_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "node/local_socket.h"

namespace ropeteam {

LocalServer::LocalServer(EventLoop* loop, Config config, Drive drive, ObjectLister objects)
    : loop_(loop), config_(std::move(config)), drive_(std::move(drive)), objects_(std::move(objects)) {}

LocalServer::~LocalServer() {
  if (!listener_.valid()) return;
  loop_->Remove(listener_.get());
  // The next daemon replaces a stale socket, so it does not matter whether this fails.
  (void)unlink(config_.socket_path.c_str());
}

Status LocalServer::Listen() {
  Result<UniqueFd> listener = ListenLocal(config_.socket_path);
  if (!listener.ok()) return listener.status();
  listener_ = std::move(*listener);
  reserve_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
  return loop_->Add(listener_.get(), EPOLLIN, [this](uint32_t) { OnAcceptable(); });
}

void LocalServer::OnAcceptable() {
  for (;;) {
    pid_t pid = 0;
    Result<UniqueFd> socket = AcceptLocal(listener_.get(), &pid);
    if (!socket.ok()) {
      LOG_WARNING("session not accepted: %s", socket.status().ToString().c_str());
      reserve_.reset();
      const UniqueFd refused(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      reserve_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
      return;
    }
    if (!socket->valid()) return;
    if (clients_.size() >= kSessionsMax) {
      LOG_WARNING("session of pid %d refused, %zu are open, limit %zu", static_cast<int>(pid),
                  clients_.size(), kSessionsMax);
      continue;
    }
    const SessionId id = ++last_session_;
    LocalSession::Callbacks callbacks;
    callbacks.on_frame = [this, id](const local::FrameHeader& header, std::string_view payload) {
      OnFrame(id, header, payload);
    };
    callbacks.on_closed = [this, id](const std::string& reason) { OnClosed(id, reason); };
    Client& client = clients_[id];
    client.session = std::make_unique<LocalSession>(loop_, std::move(*socket), pid, std::move(callbacks));
    const Status started = client.session->Start();
    if (started.ok()) {
      LOG_DEBUG("session %" PRIu64 " pid %d opened", id, static_cast<int>(pid));
      continue;
    }
    LOG_WARNING("session of pid %d refused: %s", static_cast<int>(pid), started.ToString().c_str());
    clients_.erase(id);
  }
}

void LocalServer::OnClosed(SessionId id, const std::string& reason) {
  const Client& client = clients_.at(id);
  std::erase_if(lists_, [id](const auto& list) { return list.first.first == id; });
  std::erase_if(drains_, [id](const auto& drain) { return drain.first == id; });
  const int pid = static_cast<int>(client.session->peer_pid());
  if (client.opened) {
    LOG_INFO("session %" PRIu64 " pid %d closed: %s", id, pid, reason.c_str());
  } else {
    LOG_WARNING("session %" PRIu64 " pid %d closed before it was known: %s", id, pid, reason.c_str());
  }
  // The session is on the call stack, perhaps while an input is carried out. The loop destroys it later.
  loop_->Post([this, id, alive = std::weak_ptr<int>(alive_)] {
    if (alive.expired()) return;
    const auto client = clients_.extract(id);
    if (client.mapped().opened) drive_([&](Engine& engine, TimeUs now) { engine.OnSessionClosed(now, id); });
    for (const auto& [name, buffer] : client.mapped().gpu_buffers) config_.device_buffers->Remove(buffer.id);
  });
}

void LocalServer::Reply(Client& client, RequestId request, Code code, std::string message) {
  client.session->Send(local::Type::kReply, request, Encode(local::Reply{code, std::move(message)}));
}

void LocalServer::OnFrame(SessionId id, const local::FrameHeader& header, std::string_view payload) {
  Client& client = clients_.at(id);
  if (header.type == local::Type::kHello) return OnHello(id, client, header.request, payload);
  if (client.state != State::kRank && client.state != State::kAdmin)
    return client.session->Close("a request before its hello was answered");
  const bool reads = header.type == local::Type::kLatest || header.type == local::Type::kViewOpen ||
                     header.type == local::Type::kViewRead || header.type == local::Type::kViewRepair ||
                     header.type == local::Type::kViewClose;
  const bool looks = header.type == local::Type::kAdmin || header.type == local::Type::kTrace ||
                     header.type == local::Type::kRejoin || header.type == local::Type::kQuarantine ||
                     header.type == local::Type::kDrain || header.type == local::Type::kDrop ||
                     header.type == local::Type::kForget;
  if (client.state == State::kAdmin && !looks && !reads)
    return Reply(client, header.request, Code::kInvalidArgument,
                 "a session of kind admin has no rank to do that for");
  if (OnRequest(id, client, header.type, header.request, payload)) return;
  client.session->Close("frame of type " + std::to_string(static_cast<unsigned>(header.type)) + " and " +
                        std::to_string(payload.size()) + " bytes does not match the protocol");
}

void LocalServer::OnHello(SessionId id, Client& client, RequestId request, std::string_view payload) {
  if (client.state != State::kNew) return client.session->Close("a second hello");
  // Every version's Hello begins with the version. The rest may not decode if the version differs.
  uint32_t version = 0;
  if (payload.size() < sizeof(version)) return client.session->Close("a hello without a version");
  std::memcpy(&version, payload.data(), sizeof(version));
  if (version < local::kLocalProtocolOldest || version > local::kLocalProtocolVersion) {
    Reply(client, request, Code::kUnsupported,
          "the client speaks local protocol version " + std::to_string(version) + ", this daemon (" +
              config_.facts.version + ") speaks " + std::to_string(local::kLocalProtocolOldest) + " to " +
              std::to_string(local::kLocalProtocolVersion));
    return client.session->CloseAfterSend("local protocol version " + std::to_string(version));
  }
  client.version = version;
  local::Hello hello;
  if (!Decode(payload, hello, version))
    return client.session->Close("a hello that does not match the protocol");
  if (hello.incarnation_token.size() > local::kIncarnationTokenBytesMax)
    return Reply(client, request, Code::kInvalidArgument,
                 "incarnation_token of " + std::to_string(hello.incarnation_token.size()) + " bytes, limit " +
                     std::to_string(local::kIncarnationTokenBytesMax));
  if (hello.kind != local::ClientKind::kRank && hello.kind != local::ClientKind::kAdmin)
    return client.session->Close("a hello of an unknown kind of client");
  if (!client.opened) {
    client.opened = true;
    drive_([&](Engine& engine, TimeUs now) { engine.OnSessionOpened(now, id); });
  }
  if (hello.kind == local::ClientKind::kAdmin) {
    client.state = State::kAdmin;
    local::HelloReply reply = config_.hello;
    reply.version = client.version;
    return client.session->Send(local::Type::kHelloReply, request, Encode(reply), config_.arena_fd);
  }
  LOG_INFO("session %" PRIu64 " pid %d rank %u world_size %u says hello", id,
           static_cast<int>(client.session->peer_pid()), hello.rank, hello.world_size);
  client.state = State::kHelloSent;
  client.hello_request = request;
  const HelloInput input{hello.rank,
                         hello.world_size,
                         hello.token,
                         hello.incarnation_token,
                         TimeoutUs(hello.timeout_ms),
                         hello.incarnation,
                         {hello.persist_every, hello.keep_on_storage}};
  drive_([&](Engine& engine, TimeUs now) { engine.OnHello(now, id, request, input); });
}

DaemonFacts LocalServer::Facts() const {
  DaemonFacts facts = config_.facts;
  if (config_.membership) facts.membership = config_.membership();
  return facts;
}

void LocalServer::SetSettings(const JobSettings& settings) {
  config_.hello.replicas = settings.replicas;
  config_.facts.replicas = settings.replicas;
  config_.facts.keep_steps = settings.keep_steps;
}

void LocalServer::OnAnswer(const Answer& answer) {
  const auto found = clients_.find(answer.session);
  if (found == clients_.end()) return;  // closed meanwhile; OnClosed() tells the Engine
  Client& client = found->second;
  LocalSession& session = *client.session;
  const bool of_hello = client.state == State::kHelloSent && answer.request == client.hello_request;
  if (!of_hello && client.outstanding != 0) --client.outstanding;
  if (const auto* hello = std::get_if<AnswerHello>(&answer.body)) {
    client.state = State::kRank;
    local::HelloReply reply = config_.hello;
    reply.version = client.version;
    reply.incarnation = hello->incarnation;
    session.Send(local::Type::kHelloReply, answer.request, Encode(reply), config_.arena_fd);
  } else if (const auto* status = std::get_if<AnswerStatus>(&answer.body)) {
    if (of_hello) client.state = State::kNew;  // it may try again
    client.admin.erase(answer.request);
    Reply(client, answer.request, status->status.code(), status->status.message());
  } else if (const auto* grant = std::get_if<AnswerGrant>(&answer.body)) {
    session.Send(local::Type::kSaveGrant, answer.request,
                 Encode(local::SaveGrant{grant->save, grant->extents}));
  } else if (const auto* latest = std::get_if<AnswerLatest>(&answer.body)) {
    const local::LatestReply reply{latest->step.step, latest->step.incarnation, latest->world_size,
                                   latest->passed_over.step, latest->passed_over.incarnation};
    session.Send(local::Type::kLatestReply, answer.request, Encode(reply, client.version));
  } else if (const auto* trace = std::get_if<AnswerTrace>(&answer.body)) {
    const local::TraceReply reply{trace->asked_at, trace->node_at, trace->answered_at, trace->events};
    session.Send(local::Type::kTraceReply, answer.request, Encode(reply));
  } else if (const auto* view = std::get_if<AnswerView>(&answer.body)) {
    std::string reply = Encode(local::ViewGrant{view->view, view->meta, view->extents, view->crcs,
                                                static_cast<uint8_t>(view->origin)});
    if (client.version < 5) reply.resize(reply.size() - sizeof(local::ViewGrant::origin));
    session.Send(local::Type::kViewGrant, answer.request, reply);
  } else if (const auto* ranges = std::get_if<AnswerRanges>(&answer.body)) {
    const local::ViewBytes reply{ranges->chunks, ranges->crcs};
    session.Send(local::Type::kViewBytes, answer.request, Encode(reply));
  } else {
    AnswerAdmin(client, answer);
  }
}

void LocalServer::AnswerAdmin(Client& client, const Answer& answer) {
  const auto found = client.admin.find(answer.request);
  if (found == client.admin.end()) return;
  const local::Admin admin = found->second;
  client.admin.erase(found);
  local::AdminReply reply;
  if (const auto* verify = std::get_if<AnswerVerify>(&answer.body)) {
    reply.json = VerifyJson(verify->report);
  } else {
    const ClusterReport& report = std::get<AnswerReport>(answer.body).report;
    if (admin.command == local::AdminCommand::kList) {
      const Step* step = admin.has_step ? &admin.step : nullptr;
      reply.json = ListJson(report, step, step != nullptr ? objects_(*step) : std::vector<ShardObjects>());
    } else {
      reply.json = StatusJson(report, Facts());
    }
  }
  client.session->Send(local::Type::kAdminReply, answer.request, Encode(reply));
}

}  // namespace ropeteam
