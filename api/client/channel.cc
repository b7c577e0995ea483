// SPDX-License-Identifier: Apache-2.0
#include "api/client/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "api/client/fork_guard.h"
#include "api/client/socket.h"
#include "core/base/log.h"

namespace ropeteam::client {
namespace {

using local::FrameHeader;
using local::Type;

// Room for several answers in one read; grows to the largest frame that arrives.
constexpr size_t kReadBytesMin = 64 * 1024;
// If a view is granted after its caller has left, the reading call closes it. This must not delay that call.
constexpr int64_t kLateViewCloseMs = 10;

bool IsAnswer(Type type) {
  switch (type) {
    case Type::kHelloReply:
    case Type::kSaveGrant:
    case Type::kLatestReply:
    case Type::kViewGrant:
    case Type::kViewBytes:
    case Type::kAdminReply:
    case Type::kStorageListReply:
    case Type::kTraceReply:
    case Type::kReply:
      return true;
    default:
      return false;
  }
}

}  // namespace

Status StatusOf(const local::Reply& reply) {
  if (reply.code == Code::kOk) return OkStatus();
  if (reply.code > Code::kInternal) {
    return Error(Code::kInternal, "the daemon answered with the unknown code %u: %s",
                 static_cast<unsigned>(reply.code), reply.message.c_str());
  }
  return {reply.code, reply.message};
}

Result<std::unique_ptr<Channel>> Channel::Connect(const std::string& socket, Deadline deadline) {
  Result<UniqueFd> fd = ConnectUnix(socket, deadline);
  if (!fd.ok()) return fd.status();
  return std::unique_ptr<Channel>(new Channel(std::move(fd).value(), socket));
}

Channel::Channel(UniqueFd fd, std::string socket) : socket_(std::move(socket)), fd_(std::move(fd)) {
  buffer_.resize(kReadBytesMin);
  CloseInChildren(fd_.get());
}

Channel::~Channel() { ForgetInChildren(fd_.get()); }

uint64_t Channel::NextId() {
  const std::lock_guard lock(mutex_);
  return next_id_++;
}

Status Channel::Check() {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.ok()) return broken_;
  }
  if (PeerIsThere(fd_.get())) return OkStatus();
  // Does not break the channel: calls may still read answers that came before the end.
  return Error(Code::kUnavailable, "the daemon at %s is gone", socket_.c_str());
}

void Channel::Break(Status reason) {
  const std::lock_guard lock(mutex_);
  if (!broken_.ok()) return;
  broken_ = std::move(reason);
  // Not close(): another thread may be using this descriptor, and its number could be reused.
  ::shutdown(fd_.get(), SHUT_RDWR);
  changed_.notify_all();
}

Status Channel::BreakFor(const char* what) {
  Status status =
      Error(Code::kUnavailable, "the daemon at %s %s; the connection is closed", socket_.c_str(), what);
  LOG_WARNING("%s", status.message().c_str());
  Break(status);
  return status;
}

UniqueFd Channel::TakeDescriptor() {
  const std::lock_guard lock(mutex_);
  return std::move(descriptor_);
}

Status Channel::Exchange(Type request_type, Type expected, Deadline deadline, FrameBuffers* buffers,
                         int descriptor) {
  Pending pending;
  pending.payload = &buffers->in;
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.ok()) return broken_;
    pending.id = next_id_++;
    pending_.push_back(&pending);
  }
  // `pending` is unregistered on every path, so that a later answer is never written to a dead stack frame.
  Status status = Send(request_type, pending.id, deadline, &buffers->out, descriptor);
  if (status.ok()) status = WaitFor(&pending, deadline);
  {
    const std::lock_guard lock(mutex_);
    std::erase(pending_, &pending);
    if (pending.done) status = OkStatus();  // it arrived while the deadline passed
  }
  CloseLateViews();
  ROPETEAM_RETURN_IF_ERROR(std::move(status));
  buffers->in_type = pending.type;
  if (pending.type == Type::kReply) {
    local::Reply reply;
    if (!Decode(buffers->in, reply)) return BreakFor("sent a reply that cannot be decoded");
    ROPETEAM_RETURN_IF_ERROR(StatusOf(reply));
    if (expected != Type::kReply) return BreakFor("answered ok where an answer with content was due");
    return OkStatus();
  }
  if (pending.type != expected) return BreakFor("sent an answer of another type than was due");
  return OkStatus();
}

Status Channel::Send(Type type, uint64_t id, Deadline deadline, std::string* frame, int descriptor) {
  FrameHeader header;
  const size_t length = frame->size() - sizeof(header);
  if (length > local::kFrameBytesMax) {
    return Error(Code::kInternal, "a request of %zu bytes, limit %u", length, local::kFrameBytesMax);
  }
  header.length = static_cast<uint32_t>(length);
  header.type = type;
  header.request = id;
  std::memcpy(frame->data(), &header, sizeof(header));
  {
    std::unique_lock lock(mutex_);
    const bool free = changed_.wait_until(lock, deadline.at(), [&] { return !sending_ || !broken_.ok(); });
    if (!broken_.ok()) return broken_;
    if (!free) return Error(Code::kDeadlineExceeded, "the daemon at %s takes no requests", socket_.c_str());
    sending_ = true;
  }
  bool partly = false;
  Status status = SendBytes(*frame, descriptor, deadline, &partly);
  {
    const std::lock_guard lock(mutex_);
    sending_ = false;
    changed_.notify_all();
    if (!broken_.ok()) return broken_;
  }
  if (partly) {
    // The rest of the frame cannot be sent after another frame.
    Break(Error(Code::kUnavailable, "the daemon at %s stopped reading in the middle of a request",
                socket_.c_str()));
  }
  return status;
}

Status Channel::SendBytes(const std::string& frame, int descriptor, Deadline deadline, bool* partly) {
  size_t sent = 0;
  while (sent < frame.size()) {
    Result<size_t> more =
        SendSome(fd_.get(), frame.data() + sent, frame.size() - sent, sent == 0 ? descriptor : -1);
    if (!more.ok()) {
      *partly = sent > 0;
      return Error(more.status().code(), "%s (socket %s)", more.status().message().c_str(), socket_.c_str());
    }
    sent += *more;
    if (*more == 0 && !PollUntil(fd_.get(), POLLOUT, deadline)) {
      *partly = sent > 0;
      return Error(Code::kDeadlineExceeded, "the daemon at %s takes no requests", socket_.c_str());
    }
  }
  return OkStatus();
}

Status Channel::WaitFor(Pending* pending, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (pending->done) return OkStatus();
    if (!broken_.ok()) return broken_;
    if (reading_) {
      if (changed_.wait_until(lock, deadline.at()) == std::cv_status::timeout && !pending->done) {
        return Error(Code::kDeadlineExceeded, "no answer from the daemon at %s", socket_.c_str());
      }
      continue;
    }
    reading_ = true;
    lock.unlock();
    Status status = Receive(deadline);
    lock.lock();
    reading_ = false;
    // Wakes the other calls: one may have its answer, or must take over reading.
    changed_.notify_all();
    if (pending->done) return OkStatus();
    if (status.code() == Code::kDeadlineExceeded) return status;
    if (!status.ok() && broken_.ok()) {
      broken_ = std::move(status);
      ::shutdown(fd_.get(), SHUT_RDWR);
    }
  }
}

// Waits for bytes, reads those that have arrived, and delivers the complete frames.
Status Channel::Receive(Deadline deadline) {
  if (!PollUntil(fd_.get(), POLLIN, deadline)) {
    return Error(Code::kDeadlineExceeded, "no answer from the daemon at %s", socket_.c_str());
  }
  UniqueFd descriptor;
  Result<size_t> got =
      ReceiveSome(fd_.get(), buffer_.data() + buffered_, buffer_.size() - buffered_, &descriptor);
  if (!got.ok()) {
    return Error(got.status().code(), "%s (socket %s)", got.status().message().c_str(), socket_.c_str());
  }
  buffered_ += *got;
  if (descriptor.valid()) {
    const std::lock_guard lock(mutex_);
    descriptor_ = std::move(descriptor);
  }
  return Dispatch();
}

Status Channel::Dispatch() {
  size_t begin = 0;
  while (buffered_ - begin >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, buffer_.data() + begin, sizeof(header));
    if (header.magic != local::kLocalMagic || header.length > local::kFrameBytesMax ||
        !IsAnswer(header.type)) {
      return Error(
          Code::kUnsupported,
          "%s is not a ropeteamd: it sent a frame with magic 0x%08x, type %u and %u bytes (limit %u)",
          socket_.c_str(), header.magic, static_cast<unsigned>(header.type), header.length,
          local::kFrameBytesMax);
    }
    const size_t whole = sizeof(header) + header.length;
    if (buffered_ - begin < whole) {
      if (buffer_.size() < whole) buffer_.resize(whole);
      break;
    }
    Deliver(header, std::string_view(buffer_.data() + begin + sizeof(header), header.length));
    begin += whole;
  }
  buffered_ -= begin;
  if (begin != 0 && buffered_ != 0) std::memmove(buffer_.data(), buffer_.data() + begin, buffered_);
  return OkStatus();
}

void Channel::Deliver(const FrameHeader& header, std::string_view payload) {
  const std::lock_guard lock(mutex_);
  for (Pending* pending : pending_) {
    if (pending->id != header.request || pending->done) continue;
    pending->payload->assign(payload);
    pending->type = header.type;
    pending->done = true;
    changed_.notify_all();
    return;
  }
  // The caller has left. A view that was granted to it must be closed; other answers are dropped.
  local::ViewGrant grant;
  if (header.type == Type::kViewGrant && Decode(payload, grant)) late_views_.push_back(grant.view);
}

void Channel::CloseLateViews() {
  std::vector<uint64_t> views;
  {
    const std::lock_guard lock(mutex_);
    if (late_views_.empty()) return;
    views.swap(late_views_);
  }
  FrameBuffers buffers;
  for (const uint64_t view : views) {
    // Ignore errors: a view that stays open only costs memory until the connection ends.
    (void)Post(Type::kViewClose, local::ViewClose{view}, Deadline::In(kLateViewCloseMs), &buffers);
  }
}

}  // namespace ropeteam::client
