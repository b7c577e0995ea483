// SPDX-License-Identifier: Apache-2.0
#include "api/client/admin_client.h"

#include <algorithm>

namespace ropeteam::client {
namespace {

using local::Type;

// Above it a deadline could overflow; a command that waits for a day waits for ever.
constexpr uint64_t kAdminTimeoutMaxMs = 86400000;

}  // namespace

Result<std::unique_ptr<AdminClient>> AdminClient::Connect(const std::string& socket, int64_t timeout_ms) {
  local::Hello hello;
  hello.kind = local::ClientKind::kAdmin;
  const int64_t bounded = std::clamp<int64_t>(timeout_ms, 0, kAdminTimeoutMaxMs);
  Result<std::shared_ptr<Link>> link = MakeLink(socket, hello, Deadline::In(bounded), nullptr);
  if (!link.ok()) return link.status();
  return std::unique_ptr<AdminClient>(new AdminClient(std::move(link).value()));
}

Result<std::string> AdminClient::Request(const local::Admin& request) {
  FrameBuffers buffers;
  local::AdminReply reply;
  const auto bounded = static_cast<int64_t>(std::min(request.timeout_ms, kAdminTimeoutMaxMs));
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kAdmin, request, Type::kAdminReply, &reply,
                                                Deadline::In(bounded).Plus(kAnswerGraceMs), &buffers));
  return std::move(reply.json);
}

Result<local::TraceReply> AdminClient::Trace(const local::Trace& request) {
  FrameBuffers buffers;
  local::TraceReply reply;
  const auto bounded = static_cast<int64_t>(std::min(request.timeout_ms, kAdminTimeoutMaxMs));
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kTrace, request, Type::kTraceReply, &reply,
                                                Deadline::In(bounded).Plus(kAnswerGraceMs), &buffers));
  return reply;
}

Result<std::string> AdminClient::Drain(const local::Drain& request, int64_t timeout_ms) {
  FrameBuffers buffers;
  local::AdminReply reply;
  const int64_t bounded = std::clamp<int64_t>(timeout_ms, 0, kAdminTimeoutMaxMs);
  ROPETEAM_RETURN_IF_ERROR(link_->channel->Call(Type::kDrain, request, Type::kAdminReply, &reply,
                                                Deadline::In(bounded), &buffers));
  return std::move(reply.json);
}

Status AdminClient::Rejoin(const local::Rejoin& request, int64_t timeout_ms) {
  FrameBuffers buffers;
  local::Reply reply;
  const int64_t bounded = std::clamp<int64_t>(timeout_ms, 0, kAdminTimeoutMaxMs);
  return link_->channel->Call(Type::kRejoin, request, Type::kReply, &reply, Deadline::In(bounded), &buffers);
}

Status AdminClient::Quarantine(const local::Quarantine& request) {
  FrameBuffers buffers;
  local::Reply reply;
  const auto bounded = static_cast<int64_t>(std::min(request.timeout_ms, kAdminTimeoutMaxMs));
  return link_->channel->Call(Type::kQuarantine, request, Type::kReply, &reply,
                              Deadline::In(bounded).Plus(kAnswerGraceMs), &buffers);
}

}  // namespace ropeteam::client
