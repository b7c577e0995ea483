// SPDX-License-Identifier: Apache-2.0
#include "api/client/link.h"

#include <cstring>
#include <utility>

namespace ropeteam::client {
namespace {

using local::Type;

Status OtherVersion(const std::string& socket, uint32_t theirs) {
  return Error(Code::kUnsupported, "the daemon at %s speaks local protocol %u, this library %u",
               socket.c_str(), theirs, local::kLocalProtocolVersion);
}

Status SayHello(const local::Hello& hello, Deadline deadline, Link* link) {
  FrameBuffers buffers;
  const Status status = link->channel->Call(Type::kHello, hello, Type::kHelloReply, &link->hello,
                                            deadline.Plus(kAnswerGraceMs), &buffers);
  const std::string& socket = link->channel->socket();
  if (status.ok()) {
    if (link->hello.version == local::kLocalProtocolVersion) return status;
    return OtherVersion(socket, link->hello.version);
  }
  // The version is the first field of every version's answer, so it can be read even if the rest cannot.
  uint32_t version = local::kLocalProtocolVersion;
  if (buffers.in_type == Type::kHelloReply && buffers.in.size() >= sizeof(version)) {
    std::memcpy(&version, buffers.in.data(), sizeof(version));
    if (version != local::kLocalProtocolVersion) return OtherVersion(socket, version);
  }
  return status;
}

}  // namespace

Status Link::EndIfSilent(Status status) {
  if (status.code() != Code::kDeadlineExceeded) return status;
  status = Error(Code::kUnavailable, "the daemon at %s did not answer within %lld ms",
                 channel->socket().c_str(), static_cast<long long>(kLocalAnswerMs));
  channel->Break(status);
  return status;
}

Result<std::shared_ptr<Link>> MakeLink(const std::string& socket, local::Hello hello, Deadline deadline,
                                       const std::shared_ptr<Arena>& known) {
  Result<std::unique_ptr<Channel>> channel = Channel::Connect(socket, deadline);
  if (!channel.ok()) return channel.status();
  auto link = std::make_shared<Link>();
  link->channel = std::move(channel).value();
  hello.timeout_ms = deadline.RemainingMs();
  ROPETEAM_RETURN_IF_ERROR(SayHello(hello, deadline, link.get()));
  if (hello.kind == local::ClientKind::kAdmin) return link;
  UniqueFd descriptor = link->channel->TakeDescriptor();
  if (known != nullptr && descriptor.valid() && known->IsOf(descriptor, link->hello)) {
    link->arena = known;
    return link;
  }
  Result<std::shared_ptr<Arena>> arena = Arena::Map(std::move(descriptor), link->hello);
  if (!arena.ok()) return arena.status();
  link->arena = std::move(arena).value();
  return link;
}

}  // namespace ropeteam::client
