// SPDX-License-Identifier: Apache-2.0
#include "api/client/admin_client.h"

#include <algorithm>

namespace ropeteam::client {
namespace {

using local::Type;

// A longer deadline could overflow. Nobody needs a command that waits for more than a day.
constexpr uint64_t kAdminTimeoutMaxMs = 86400000;

Deadline Bounded(int64_t timeout_ms) {
  return Deadline::In(std::clamp<int64_t>(timeout_ms, 0, kAdminTimeoutMaxMs));
}
// The deadline for the answer to a request that has its own timeout.
Deadline AnswerDeadline(uint64_t timeout_ms) {
  return Deadline::In(static_cast<int64_t>(std::min(timeout_ms, kAdminTimeoutMaxMs))).Plus(kAnswerGraceMs);
}

}  // namespace

Result<std::unique_ptr<AdminClient>> AdminClient::Connect(const std::string& socket, int64_t timeout_ms) {
  local::Hello hello;
  hello.kind = local::ClientKind::kAdmin;
  Result<std::shared_ptr<Link>> link = MakeLink(socket, hello, Bounded(timeout_ms), nullptr);
  if (!link.ok()) return link.status();
  return std::unique_ptr<AdminClient>(new AdminClient(std::move(link).value()));
}

Result<std::string> AdminClient::Request(const local::Admin& request) {
  FrameBuffers buffers;
  local::AdminReply reply;
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kAdmin, request, Type::kAdminReply, &reply,
                                                AnswerDeadline(request.timeout_ms), &buffers));
  return std::move(reply.json);
}

Result<local::TraceReply> AdminClient::Trace(const local::Trace& request) {
  FrameBuffers buffers;
  local::TraceReply reply;
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kTrace, request, Type::kTraceReply, &reply,
                                                AnswerDeadline(request.timeout_ms), &buffers));
  return reply;
}

Result<std::string> AdminClient::Drain(const local::Drain& request, int64_t timeout_ms) {
  FrameBuffers buffers;
  local::AdminReply reply;
  ROPETEAM_RETURN_IF_ERROR(
      link_->channel->Call(Type::kDrain, request, Type::kAdminReply, &reply, Bounded(timeout_ms), &buffers));
  return std::move(reply.json);
}

Status AdminClient::Rejoin(const local::Rejoin& request, int64_t timeout_ms) {
  FrameBuffers buffers;
  return link_->channel->Call(Type::kRejoin, request, Bounded(timeout_ms), &buffers);
}

Status AdminClient::Quarantine(const local::Quarantine& request) {
  FrameBuffers buffers;
  return link_->channel->Call(Type::kQuarantine, request, AnswerDeadline(request.timeout_ms), &buffers);
}

Status AdminClient::Forget(const local::Forget& request) {
  FrameBuffers buffers;
  return link_->channel->Call(Type::kForget, request, AnswerDeadline(request.timeout_ms), &buffers);
}

Status AdminClient::Drop(const local::Drop& request) {
  FrameBuffers buffers;
  return link_->channel->Call(Type::kDrop, request, AnswerDeadline(request.timeout_ms), &buffers);
}

}  // namespace ropeteam::client
