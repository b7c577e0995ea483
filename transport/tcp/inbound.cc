// SPDX-License-Identifier: Apache-2.0
//
// Carries out the requests of peers whose hello was accepted.

#include <errno.h>
#include <sys/epoll.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/tcp/internal.h"

namespace ropeteam::tcp {
namespace {

constexpr size_t kDiscardBytes = 64 << 10;  // by one call

}  // namespace

void TcpTransport::Serve(Inbound* inbound, uint32_t events) {
  bool open = true;
  if ((events & ~uint32_t{EPOLLOUT}) != 0) open = ReadRequests(inbound);
  if (open && !inbound->answers.empty()) open = SendAnswers(inbound);
  // No event announces a request that was received with the payload before it, and waited for room.
  if (open && !inbound->in_payload && inbound->received == sizeof(Request)) open = ReadRequests(inbound);
  if (!open) return Close(inbound);
  const size_t answers = inbound->answers.size();
  Watch(inbound, (answers < kRepliesMax ? uint32_t{EPOLLIN} : 0) | (answers > 0 ? uint32_t{EPOLLOUT} : 0));
}

// False: the connection is to be closed.
bool TcpTransport::ReadRequests(Inbound* inbound) {
  for (uint64_t moved = 0; inbound->answers.size() < kRepliesMax;) {
    if (!inbound->in_payload && inbound->received == sizeof(Request)) {
      if (!Begin(inbound)) return false;
      continue;
    }
    if (moved >= kTurnBytes) return true;
    ssize_t count = 0;
    if (inbound->in_payload) {
      count = ReadPayload(inbound);
    } else {
      char* const begin = reinterpret_cast<char*>(&inbound->request);
      count = recv(inbound->fd.get(), begin + inbound->received, sizeof(Request) - inbound->received, 0);
      if (count > 0) inbound->received += static_cast<size_t>(count);
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return true;
    if (count <= 0) return false;
    moved += static_cast<uint64_t>(count);
  }
  return true;
}

// `request` is complete. False: it is not a request.
bool TcpTransport::Begin(Inbound* inbound) {
  const Request& request = inbound->request;
  inbound->received = 0;
  if (!Valid(request, config_.operation_bytes)) {
    LOG_WARNING(
        "transport tcp: %s sent an invalid request (operation %u, %llu bytes); its connection is closed",
        ToText(inbound->remote).c_str(), request.op, static_cast<unsigned long long>(request.length));
    return false;
  }
  std::shared_ptr<Export> exported = exports_.Find(request.key);
  if (exported != nullptr && !front::InRange(request.offset, request.length, exported->length))
    exported = nullptr;
  if (request.op == static_cast<uint32_t>(Op::kPut)) {
    inbound->put = request;
    inbound->target = std::move(exported);
    inbound->rest = request.length;
    inbound->in_payload = true;
    return true;
  }
  Inbound::Answer& answer = inbound->answers.emplace_back();
  answer.reply.id = request.id;
  answer.reply.code = static_cast<uint32_t>(exported != nullptr ? ReplyCode::kOk : ReplyCode::kRefused);
  answer.reply.length = exported != nullptr ? static_cast<uint32_t>(request.length) : 0;
  answer.source = std::move(exported);
  answer.offset = request.offset;
  return true;
}

// Receives into the region, and the next request behind it. Returns what the system call returned.
ssize_t TcpTransport::ReadPayload(Inbound* inbound) {
  ssize_t count = -1;
  bool allowed = false;
  if (inbound->target != nullptr) {
    Export& target = *inbound->target;
    const std::lock_guard lock(target.mutex);
    PeerAccess::Use use;
    allowed = target.base != nullptr &&
              use.Begin(target.access, inbound->put.offset, inbound->put.length, PeerAccess::Kind::kWrite);
    if (allowed) {
      iovec parts[2] = {
          {target.base + inbound->put.offset + (inbound->put.length - inbound->rest),
           std::min(inbound->rest, kTurnBytes)},
          {&inbound->request, sizeof(Request)},
      };
      count = readv(inbound->fd.get(), parts, inbound->rest <= kTurnBytes ? 2 : 1);
    }
  }
  if (!allowed) {
    inbound->target = nullptr;  // refused, or revoked in the middle
    discarded_.resize(kDiscardBytes);
    count = recv(inbound->fd.get(), discarded_.data(), std::min<uint64_t>(inbound->rest, kDiscardBytes), 0);
  }
  if (count <= 0) return count;
  const uint64_t payload = std::min(static_cast<uint64_t>(count), inbound->rest);
  inbound->rest -= payload;
  inbound->received = static_cast<size_t>(count) - payload;
  if (inbound->rest > 0) return count;
  Inbound::Answer& answer = inbound->answers.emplace_back();
  answer.reply.id = inbound->put.id;
  answer.reply.code = static_cast<uint32_t>(allowed ? ReplyCode::kOk : ReplyCode::kRefused);
  inbound->in_payload = false;
  inbound->target = nullptr;
  return count;
}

// Several replies at a time, until and including the first that has a payload. False: the connection is to be closed.
bool TcpTransport::SendAnswers(Inbound* inbound) {
  std::deque<Inbound::Answer>& answers = inbound->answers;
  for (uint64_t moved = 0; moved < kTurnBytes && !answers.empty();) {
    iovec parts[kPartsMax];
    size_t count = 0;
    std::unique_lock<std::mutex> lock;
    PeerAccess::Use use;
    uint64_t skip = inbound->sent;
    for (Inbound::Answer& answer : answers) {
      if (count + 2 > kPartsMax) break;
      if (answer.source != nullptr) {
        lock = std::unique_lock(answer.source->mutex);
        if (answer.source->base == nullptr ||
            !use.Begin(answer.source->access, answer.offset, answer.reply.length, PeerAccess::Kind::kRead)) {
          if (skip > 0) return false;  // its bytes were announced
          lock = {};
          answer.source = nullptr;
          answer.reply.code = static_cast<uint32_t>(ReplyCode::kRefused);
          answer.reply.length = 0;
        }
      }
      if (skip < sizeof(Reply))
        parts[count++] = {reinterpret_cast<char*>(&answer.reply) + skip, sizeof(Reply) - skip};
      if (answer.source != nullptr) {
        const uint64_t done = skip > sizeof(Reply) ? skip - sizeof(Reply) : 0;
        parts[count++] = {answer.source->base + answer.offset + done,
                          std::min<uint64_t>(answer.reply.length - done, kTurnBytes)};
        break;
      }
      skip = 0;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(inbound->fd.get(), &message, MSG_NOSIGNAL);
    use.End();
    if (lock.owns_lock()) lock.unlock();
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    moved += static_cast<uint64_t>(sent);
    inbound->sent += static_cast<uint64_t>(sent);
    while (!answers.empty() && inbound->sent >= sizeof(Reply) + answers.front().reply.length) {
      inbound->sent -= sizeof(Reply) + answers.front().reply.length;
      answers.pop_front();
    }
  }
  return true;
}

}  // namespace ropeteam::tcp
