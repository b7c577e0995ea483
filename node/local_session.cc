// SPDX-License-Identifier: Apache-2.0
#include "node/local_session.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "core/base/bytes.h"
#include "core/base/log.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace ropeteam {
namespace {

using local::FrameHeader;

// A frame takes at most one. Room for more distinguishes a client that sends too many from a lack of
// descriptors.
constexpr size_t kDescriptorsPerRead = 4;

std::string EncodeFrame(local::Type type, uint64_t request, std::string_view payload) {
  FrameHeader header;
  header.type = type;
  header.request = request;
  header.length = static_cast<uint32_t>(payload.size());
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(payload);
  return bytes;
}

// Sends some of `bytes`. If `fd` is not negative, it is sent with the first of them.
ssize_t SendSome(int socket, std::string_view bytes, int fd) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

LocalSession::LocalSession(EventLoop* loop, UniqueFd socket, pid_t peer_pid, Callbacks callbacks)
    : loop_(loop), socket_(std::move(socket)), peer_pid_(peer_pid), callbacks_(std::move(callbacks)) {}

LocalSession::~LocalSession() {
  if (process_.valid()) loop_->Remove(process_.get());
  if (socket_.valid()) loop_->Remove(socket_.get());
}

Status LocalSession::Start() {
  ROPETEAM_RETURN_IF_ERROR(
      loop_->Add(socket_.get(), EPOLLIN | EPOLLRDHUP, [this](uint32_t events) { OnEvents(events); }));
  WatchProcess();
  return OkStatus();
}

void LocalSession::WatchProcess() {
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) {
    process_.reset(fd);
  } else if (peer_pid_ > 0) {
    process_.reset(static_cast<int>(syscall(SYS_pidfd_open, peer_pid_, 0)));
  }
  if (!process_.valid()) {
    LOG_DEBUG("session pid %d is watched by its connection alone", static_cast<int>(peer_pid_));
    return;
  }
  const Status added =
      loop_->Add(process_.get(), EPOLLIN, [this](uint32_t) { Close("its process has ended"); });
  if (!added.ok()) process_.reset();
}

void LocalSession::OnEvents(uint32_t epoll_events) {
  if ((epoll_events & EPOLLOUT) != 0) Flush();
  if (held_) {
    if ((epoll_events & (EPOLLHUP | EPOLLERR)) != 0) Close("the client closed it");
    return;
  }
  if (!closed() && (epoll_events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) Read();
}

void LocalSession::Read() {
  std::array<char, 64 * 1024> buffer;
  for (size_t taken = 0; taken < kSessionReadBytesPerTurn && !closed() && !held_;) {
    const ssize_t count = Receive(buffer.data(), buffer.size());
    if (count == 0) return Close("the client closed it");
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (errno == EINTR) continue;
      return Close(std::string("receive: ") + std::strerror(errno));
    }
    taken += static_cast<size_t>(count);
    if (closing_) {  // ignores what follows the frame that ended it
      descriptors_.clear();
      continue;
    }
    input_.append(buffer.data(), static_cast<size_t>(count));
    HandleFrames();
    if (static_cast<size_t>(count) < buffer.size()) return;
  }
}

// Like recv(), and keeps the descriptors that came with the bytes.
ssize_t LocalSession::Receive(char* buffer, size_t length) {
  iovec part{buffer, length};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kDescriptorsPerRead * sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t count = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0) return count;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof(int));
      descriptors_.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) descriptors_lost_ = true;
  return count;
}

UniqueFd LocalSession::TakeDescriptor() {
  if (descriptors_.empty()) return UniqueFd();
  UniqueFd first = std::move(descriptors_.front());
  descriptors_.pop_front();
  return first;
}

void LocalSession::HandleFrames() {
  size_t begin = 0;
  while (!closed() && !closing_ && !held_ && input_.size() - begin >= sizeof(uint32_t)) {
    FrameHeader header;
    // The magic is checked as soon as it has arrived: garbage may never be as long as a header.
    std::memcpy(&header.magic, input_.data() + begin, sizeof(header.magic));
    if (header.magic != local::kLocalMagic) return Close("garbage: no frame begins with these bytes");
    if (input_.size() - begin < sizeof(FrameHeader)) break;
    std::memcpy(&header, input_.data() + begin, sizeof(FrameHeader));
    if (header.length > local::kFrameBytesMax)
      return Close("frame of " + std::to_string(header.length) + " bytes, limit " +
                   std::to_string(local::kFrameBytesMax));
    const size_t whole = sizeof(FrameHeader) + header.length;
    if (input_.size() - begin < whole) break;
    callbacks_.on_frame(header, std::string_view(input_).substr(begin + sizeof(FrameHeader), header.length));
    begin += whole;
  }
  if (begin != 0) input_.erase(0, begin);
  // A descriptor comes with the first byte of its frame, so one may belong to an incomplete frame.
  if (!closed() && !closing_ && !held_ && descriptors_.size() > (input_.empty() ? 0u : 1u))
    return Close("a descriptor came with a frame that takes none");
  // A large message's buffer is not kept for the small ones that follow.
  if (input_.empty() && input_.capacity() > kSessionReadBytesPerTurn) input_.shrink_to_fit();
}

void LocalSession::Send(local::Type type, uint64_t request, std::string_view payload, int fd) {
  if (closed() || closing_) return;
  if (payload.size() > local::kFrameBytesMax) {
    const local::Reply reply{Code::kInternal, "an answer of " + std::to_string(payload.size()) +
                                                  " bytes, limit " + std::to_string(local::kFrameBytesMax)};
    LOG_ERROR("session pid %d %s", static_cast<int>(peer_pid_), reply.message.c_str());
    return Send(local::Type::kReply, request, Encode(reply));
  }
  output_.push_back({EncodeFrame(type, request, payload), fd});
  output_bytes_ += output_.back().bytes.size();
  if (!writable_wanted_) Flush();
  if (!closed() && output_bytes_ > kSessionOutputBytesMax)
    Close("it has not read " + std::to_string(output_bytes_) + " bytes of answers, limit " +
          std::to_string(kSessionOutputBytesMax));
}

void LocalSession::Flush() {
  while (!output_.empty()) {
    Frame& frame = output_.front();
    const ssize_t count = SendSome(socket_.get(), std::string_view(frame.bytes).substr(sent_), frame.fd);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return Close(std::string("send: ") + std::strerror(errno));
      break;
    }
    frame.fd = -1;  // sent with the first bytes
    sent_ += static_cast<size_t>(count);
    output_bytes_ -= static_cast<size_t>(count);
    if (sent_ < frame.bytes.size()) continue;
    output_.pop_front();
    sent_ = 0;
  }
  if (output_.empty() && closing_) return Close(closing_reason_);
  const bool wanted = !output_.empty();
  if (wanted == writable_wanted_) return;
  writable_wanted_ = wanted;
  WatchSocket();
}

void LocalSession::WatchSocket() {
  loop_->Modify(socket_.get(), (held_ ? 0u : EPOLLIN | EPOLLRDHUP) | (writable_wanted_ ? EPOLLOUT : 0u));
}

void LocalSession::Hold() {
  held_ = true;
  if (!closed()) WatchSocket();
}

void LocalSession::Resume() {
  held_ = false;
  if (closed()) return;
  WatchSocket();
  HandleFrames();
}

void LocalSession::CloseAfterSend(std::string reason) {
  if (closed() || closing_) return;
  closing_ = true;
  closing_reason_ = std::move(reason);
  if (output_.empty()) Close(closing_reason_);
}

void LocalSession::Close(const std::string& reason) {
  if (closed()) return;
  if (process_.valid()) loop_->Remove(process_.get());
  loop_->Remove(socket_.get());
  process_.reset();
  socket_.reset();
  output_.clear();
  descriptors_.clear();
  callbacks_.on_closed(reason);
}

}  // namespace ropeteam
