// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/node_stream.h"

#include <utility>

#include "membership/agent.h"
#include "membership/standalone/options.h"
#include "membership/standalone/wire.h"

namespace ropeteam {

std::shared_ptr<NodeStream> NodeStream::Open(const std::shared_ptr<grpc::Channel>& channel, uint64_t attempt,
                                             Handler handler) {
  std::shared_ptr<NodeStream> stream(new NodeStream(channel, attempt, std::move(handler)));
  stream->self_ = stream;
  stream->stub_->async()->Session(&stream->context_, stream.get());
  stream->AddHold();
  stream->StartRead(&stream->in_);
  stream->StartCall();
  return stream;
}

NodeStream::NodeStream(const std::shared_ptr<grpc::Channel>& channel, uint64_t attempt, Handler handler)
    : attempt_(attempt), handler_(std::move(handler)), stub_(membership::v1::Coordinator::NewStub(channel)) {}

void NodeStream::Send(const NodeMessage& message) {
  const std::lock_guard lock(mutex_);
  if (!held_) return;
  if (const auto* registration = std::get_if<Registration>(&message)) {
    registration_ = *registration;
  } else if (const auto* heartbeat = std::get_if<Heartbeat>(&message)) {
    heartbeat_ = *heartbeat;  // a newer heartbeat includes the requests of an older one
  } else if (const auto* answer = std::get_if<ProbeAnswer>(&message)) {
    answer_ = *answer;
  } else if (const auto* suspicion = std::get_if<Suspicion>(&message)) {
    if (suspicions_.size() < kSuspectsMax) suspicions_.push_back(*suspicion);
  } else {
    leave_ = true;
  }
  Advance();
}

void NodeStream::ReadNext() {
  const std::lock_guard lock(mutex_);
  if (held_) StartRead(&in_);
}

void NodeStream::Cancel() {
  context_.TryCancel();
  const std::lock_guard lock(mutex_);
  Release();
}

void NodeStream::Release() {
  if (std::exchange(held_, false)) RemoveHold();
}

void NodeStream::Advance() {
  if (writing_ || !held_) return;
  if (registration_) {
    out_ = Encode(NodeMessage(*std::exchange(registration_, {})));
  } else if (answer_) {
    out_ = Encode(NodeMessage(*std::exchange(answer_, {})));
  } else if (!suspicions_.empty()) {
    out_ = Encode(NodeMessage(std::move(suspicions_.front())));
    suspicions_.pop_front();
  } else if (heartbeat_) {
    out_ = Encode(NodeMessage(*std::exchange(heartbeat_, {})));
  } else if (std::exchange(leave_, false)) {
    out_ = Encode(NodeMessage(LeaveMessage{}));
  } else {
    return;
  }
  writing_ = true;
  StartWrite(&out_);
}

void NodeStream::OnReadDone(bool ok) {
  if (ok) {
    Result<CoordinatorMessage> message = Decode(std::exchange(in_, {}));
    if (message.ok()) {
      handler_.on_message(attempt_, std::move(*message));
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      nonsense_ = message.status().ToString();
    }
    return Cancel();
  }
  const std::lock_guard lock(mutex_);
  Release();
}

void NodeStream::OnWriteDone(bool ok) {
  const std::lock_guard lock(mutex_);
  writing_ = false;
  // A failed write means that the stream has ended; the read reports it.
  if (ok) Advance();
}

void NodeStream::OnDone(const grpc::Status& status) {
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    reason = nonsense_;
  }
  if (reason.empty()) reason = status.ok() ? "the coordinator closed the connection" : status.error_message();
  handler_.on_done(std::move(self_), reason);
}

}  // namespace ropeteam
