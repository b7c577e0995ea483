// SPDX-License-Identifier: Apache-2.0
#include "node/control_link.h"

#include <arpa/inet.h>

#include <algorithm>
#include <chrono>

#include "core/base/log.h"
#include "node/event_loop.h"

namespace ropeteam {
namespace {

// Without a scheme, gRPC would pass the address to a resolver.
std::string Target(const std::string& host_port) {
  const std::string host = host_port.substr(0, host_port.rfind(':'));
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return "ipv4:" + host_port;
  if (!host.empty() && host.front() == '[') return "ipv6:" + host_port;
  return host_port;
}

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kControlMessageBytesMax));
  arguments.SetMaxSendMessageSize(static_cast<int>(kControlMessageBytesMax));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kControlBackoffMsMin);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kControlBackoffMsMax);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kControlBackoffMsMax);
  // Addresses are used as given: no proxy from the environment, no service configuration from DNS.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

}  // namespace

void StreamCount::Add() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void StreamCount::Remove() {
  const std::lock_guard lock(mutex_);
  if (--count_ == 0) zero_.notify_all();
}

void StreamCount::WaitForZero() {
  std::unique_lock lock(mutex_);
  zero_.wait(lock, [this] { return count_ == 0; });
}

ControlLink::ControlLink(NodeId self, const Member& peer, const Credentials* credentials, StreamCount* count,
                         const ControlPlane::OnAnswer* on_answer)
    : self_(self),
      peer_(peer),
      credentials_(credentials),
      count_(count),
      on_answer_(on_answer) {}

bool ControlLink::TakeNext(control::Envelope* message) {
  if (stopped_ || stream_ == nullptr || stream_->writing_ || stream_->broken_) return false;
  if (queue_.empty() && !ask_) return false;
  stream_->writing_ = true;
  message->set_from(self_);
  message->set_to(peer_.id);
  message->set_protocol_version(kControlProtocolVersion);
  message->set_where_is_coordinator(ask_);
  message->clear_engine_envelope();
  if (ask_) {
    ask_ = false;
    asked_ = true;
    return true;
  }
  queue_bytes_ -= queue_.front().size();
  message->set_engine_envelope(std::move(queue_.front()));
  queue_.pop_front();
  return true;
}

void ControlLink::Send(std::string envelope) {
  if (envelope.size() > kControlMessageBytesMax - 1024) {
    LOG_ERROR("control message of %zu bytes for %s dropped, limit %zu", envelope.size(), peer_.name.c_str(),
              kControlMessageBytesMax - 1024);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    queue_bytes_ += envelope.size();
    queue_.push_back(std::move(envelope));
    while (queue_.size() > kControlQueueMessagesMax || queue_bytes_ > kControlQueueBytesMax) {
      queue_bytes_ -= queue_.front().size();
      queue_.pop_front();
      ++dropped_;
    }
  }
  Wake();
}

void ControlLink::Ask() {
  {
    const std::lock_guard lock(mutex_);
    ask_ = true;
  }
  Wake();
}

void ControlLink::Wake() {
  control::Envelope message;
  std::shared_ptr<Stream> writer;
  bool connect = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    connect = channel_ == nullptr;
    if (!connect && TakeNext(&message)) writer = stream_;
  }
  if (connect) return Connect();
  // The stream cannot end meanwhile: writing_ keeps its hold.
  if (writer != nullptr) writer->Write(std::move(message));
}

void ControlLink::Hold() {
  pending_.fetch_add(1);
  count_->Add();
}

void ControlLink::Release() {
  StreamCount* const count = count_;
  pending_.fetch_sub(1);  // the link may be destroyed from here on
  count->Remove();
}

void ControlLink::Connect() {
  std::shared_ptr<Stream> stream;
  control::Envelope message;
  bool write = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_ || stream_ != nullptr) return;
    if (unreached_since_ == 0) unreached_since_ = EventLoop::Now();
    if (channel_ == nullptr) {
      channel_ = grpc::CreateCustomChannel(Target(peer_.control_address), ChannelCredentialsOf(credentials_),
                                           Arguments());
      stub_ = control::Control::NewStub(channel_);
    }
    stream = stream_ = std::make_shared<Stream>(this, stub_.get());
    Hold();
    write = TakeNext(&message);
  }
  stream->Begin(stream);
  if (write) stream->Write(std::move(message));
}

TimeUs ControlLink::unreached_since() {
  const std::lock_guard lock(mutex_);
  return unreached_since_;
}

void ControlLink::Stop() {
  std::shared_ptr<Stream> stream;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    queue_.clear();
    stream = stream_;
  }
  alarm_.Cancel();
  if (stream != nullptr) stream->Cancel();
}

void ControlLink::OnStreamDone(Stream* stream, const grpc::Status& status) {
  uint32_t wait_ms = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stream_.get() == stream) stream_.reset();
    if (stopped_) return;
    if (unreached_since_ == 0) unreached_since_ = EventLoop::Now();
    // A successful write sets this to 0, so that the next wait is the shortest one.
    backoff_ms_ = backoff_ms_ == 0 ? kControlBackoffMsMin : std::min(backoff_ms_ * 2, kControlBackoffMsMax);
    wait_ms = backoff_ms_;
  }
  LOG_DEBUG("control stream to %s at %s ended: %s; again in ms %u", peer_.name.c_str(),
            peer_.control_address.c_str(), status.error_message().c_str(), wait_ms);
  if (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION)
    LOG_ERROR("control stream to %s refused: %s", peer_.name.c_str(), status.error_message().c_str());
  // If Stop() is called before the alarm is set, Connect() sees that the link is stopped.
  Hold();
  alarm_.Set(std::chrono::system_clock::now() + std::chrono::milliseconds(wait_ms), [this](bool ok) {
    if (ok) Connect();
    Release();
  });
}

ControlLink::Stream::Stream(ControlLink* link, control::Control::Stub* stub) : link_(link) {
  // Waits for the channel, which retries with its own backoff. Otherwise the stream would fail at the first
  // refusal.
  context_.set_wait_for_ready(true);
  stub->async()->Exchange(&context_, this);
}

void ControlLink::Stream::Begin(std::shared_ptr<Stream> self) {
  self_ = std::move(self);
  AddHold();  // until broken_: threads other than gRPC's start writes
  StartRead(&answer_);
  StartCall();
}

void ControlLink::Stream::Write(control::Envelope message) {
  message_ = std::move(message);
  StartWrite(&message_);
}

void ControlLink::Stream::OnReadInitialMetadataDone(bool ok) {
  if (!ok) return;
  const std::lock_guard lock(link_->mutex_);
  link_->unreached_since_ = 0;
}

void ControlLink::Stream::OnReadDone(bool ok) {
  if (ok) {
    bool asked = false;
    {
      const std::lock_guard lock(link_->mutex_);
      link_->unreached_since_ = 0;  // gRPC may report the answer before the metadata
      asked = std::exchange(link_->asked_, false);
    }
    if (asked && *link_->on_answer_) (*link_->on_answer_)(answer_.coordinator());
    return StartRead(&answer_);
  }
  bool release = false;
  {
    const std::lock_guard lock(link_->mutex_);
    release = !broken_ && !writing_;
    broken_ = true;
  }
  if (release) RemoveHold();
}

void ControlLink::Stream::OnWriteDone(bool ok) {
  bool write = false;
  bool release = false;
  {
    const std::lock_guard lock(link_->mutex_);
    writing_ = false;
    if (ok) link_->backoff_ms_ = 0;
    // After a failed write the read fails too. The last of the two releases the hold.
    release = broken_;
    if (!broken_ && ok) write = link_->TakeNext(&message_);
  }
  if (write) return StartWrite(&message_);
  if (release) RemoveHold();
}

void ControlLink::Stream::OnDone(const grpc::Status& status) {
  ControlLink* const link = link_;
  link->OnStreamDone(this, status);
  self_.reset();  // may destroy *this, which holds the link's channel
  link->Release();
}

}  // namespace ropeteam
