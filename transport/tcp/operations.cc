// SPDX-License-Identifier: Apache-2.0
//
// From an accepted put or get to its completion. Operations are cut into pieces, at most `depth` in flight on a lane.
// Peers and lanes take turns.

#include <errno.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "transport/tcp/internal.h"

namespace ropeteam::tcp {
namespace {

OperationKind KindOf(const Piece* piece) { return piece->operation->kind; }
Op OpOf(const Piece* piece) { return KindOf(piece) == OperationKind::kPut ? Op::kPut : Op::kGet; }

char* LocalOf(const Piece* piece) {
  const Operation& operation = *piece->operation;
  return operation.region->base + operation.local_offset + piece->offset;
}

// Bytes that a request takes on the connection.
uint64_t SizeOf(const Piece* piece) {
  return sizeof(Request) + (KindOf(piece) == OperationKind::kPut ? piece->length : 0);
}

}  // namespace

void TcpTransport::Start(Peer* peer) {
  const TimeUs now = Now();
  for (const auto& lane : peer->lanes)
    if (lane->state == LaneState::kIdle) StartConnecting(lane.get(), now);
  Resolve(peer);
}

// One piece per turn.
void TcpTransport::Pump() {
  active_.Go([this](Peer* peer) { return PostNext(peer); },
             [](Peer* peer) { return peer->queue.empty() && peer->redo.empty(); });
  for (size_t i = 0; i < unsent_.size(); i++)
    if (Lane* lane = unsent_[i]; lane->state == LaneState::kUp && !Send(lane))
      Break(lane, "the connection was reset");
  unsent_.clear();
}

// First those that a broken lane has returned, then those of the queue. nullptr: nothing is left.
Piece* TcpTransport::NextPiece(Peer* peer) {
  while (!peer->redo.empty()) {
    Piece* piece = peer->redo.Pop();
    if (piece->operation->code == Code::kOk) return piece;
    FinishPiece(peer, piece, piece->operation->code);
  }
  if (peer->queue.empty()) return nullptr;
  Operation* operation = peer->queue.head();
  Piece* piece = pieces_.New();
  piece->operation = operation;
  piece->offset = operation->cut;
  piece->length = std::min(peer->operation_bytes, operation->length - operation->cut);
  operation->pieces++;
  peer->queue.Cut(piece->length);
  return piece;
}

bool TcpTransport::PostNext(Peer* peer) {
  if (peer->state != PeerState::kUp) return false;
  loads_.clear();
  for (const auto& lane : peer->lanes)
    loads_.push_back(
        {lane->state == LaneState::kUp && lane->pieces < config_.depth, lane->mbps, lane->local->lane_bytes});
  const int chosen = ChooseLink(loads_, peer->operation_bytes);
  if (chosen < 0) return false;
  Piece* piece = NextPiece(peer);
  if (piece == nullptr) return false;
  Lane* lane = peer->lanes[static_cast<size_t>(chosen)].get();
  const Operation& operation = *piece->operation;
  piece->request = {static_cast<uint32_t>(OpOf(piece)),
                    0,
                    operation.remote->key,
                    operation.remote_offset + piece->offset,
                    piece->length,
                    ++lane->id};
  if (lane->pieces == 0) lane->heard_at = Now();
  if (lane->unsent.empty()) unsent_.push_back(lane);
  lane->flight.Push(piece);
  lane->unsent.push_back(piece);
  lane->pieces++;
  lane->local->lane_bytes += piece->length;
  flight_++;
  return true;
}

void TcpTransport::OnLane(Lane* lane, uint32_t events) {
  if (lane->state == LaneState::kConnecting) return OnConnecting(lane, Now());
  if (lane->state != LaneState::kUp) return;
  if ((events & ~uint32_t{EPOLLOUT}) != 0 && !Receive(lane))
    return Break(lane, "its end closed the connection");
  if ((events & EPOLLOUT) != 0 && lane->fd.open() && !Send(lane)) Break(lane, "the connection was reset");
}

// Several requests at a time. False: the connection is broken.
bool TcpTransport::Send(Lane* lane) {
  for (uint64_t moved = 0; moved < kTurnBytes && !lane->unsent.empty();) {
    iovec parts[kPartsMax];
    size_t count = 0;
    uint64_t bytes = 0, skip = lane->sent;
    for (Piece* piece : lane->unsent) {
      if (count + 2 > kPartsMax || bytes >= kTurnBytes) break;
      if (skip < sizeof(Request))
        parts[count++] = {reinterpret_cast<char*>(&piece->request) + skip, sizeof(Request) - skip};
      if (KindOf(piece) == OperationKind::kPut) {
        const uint64_t done = skip > sizeof(Request) ? skip - sizeof(Request) : 0;
        const uint64_t length = std::min(piece->length - done, kTurnBytes);
        parts[count++] = {LocalOf(piece) + done, length};
        bytes += length;
        if (length < piece->length - done) break;
      }
      skip = 0;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(lane->fd.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) return false;
    moved += static_cast<uint64_t>(sent);
    lane->sent += static_cast<uint64_t>(sent);
    while (!lane->unsent.empty() && lane->sent >= SizeOf(lane->unsent.front())) {
      lane->sent -= SizeOf(lane->unsent.front());
      lane->unsent.pop_front();
    }
  }
  Watch(lane, EPOLLIN | (lane->unsent.empty() ? 0 : uint32_t{EPOLLOUT}));
  return true;
}

// False: the connection is closed, or its bytes are no replies.
bool TcpTransport::Receive(Lane* lane) {
  for (uint64_t moved = 0; moved < kTurnBytes;) {
    const ssize_t count = lane->in_payload ? ReadPayload(lane) : ReadReplies(lane);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0 || !TakeReplies(lane)) return false;
    moved += static_cast<uint64_t>(count);
    lane->heard_at = Now();
  }
  return true;
}

// As many replies as follow each other without a payload between.
ssize_t TcpTransport::ReadReplies(Lane* lane) {
  size_t replies = 1;
  for (const Piece* piece = lane->flight.head();
       piece != nullptr && KindOf(piece) == OperationKind::kPut && replies < lane->replies.size();
       piece = piece->next)
    if (piece->next != nullptr) replies++;
  char* const begin = reinterpret_cast<char*>(lane->replies.data());
  const ssize_t count = recv(lane->fd.get(), begin + lane->replies_received,
                             replies * sizeof(Reply) - lane->replies_received, 0);
  if (count > 0) lane->replies_received += static_cast<size_t>(count);
  return count;
}

// Receives into the local range, and the next reply behind it.
ssize_t TcpTransport::ReadPayload(Lane* lane) {
  const Piece* piece = lane->flight.head();
  const uint64_t rest = piece->length - lane->payload;
  iovec parts[2] = {{LocalOf(piece) + lane->payload, std::min(rest, kTurnBytes)},
                    {lane->replies.data(), sizeof(Reply)}};
  const ssize_t count = readv(lane->fd.get(), parts, rest <= kTurnBytes ? 2 : 1);
  if (count <= 0) return count;
  const uint64_t payload = std::min(static_cast<uint64_t>(count), rest);
  lane->payload += payload;
  lane->replies_received = static_cast<size_t>(count) - payload;
  if (payload < rest) return count;
  lane->in_payload = false;
  lane->payload = 0;
  Done(lane, Code::kOk);
  return count;
}

// Uses the complete replies that were received. False: one is invalid.
bool TcpTransport::TakeReplies(Lane* lane) {
  if (lane->in_payload) return true;
  size_t taken = 0;
  for (; (taken + 1) * sizeof(Reply) <= lane->replies_received; taken++) {
    const Reply& reply = lane->replies[taken];
    const Piece* piece = lane->flight.head();
    const bool sent = piece != nullptr && (lane->unsent.empty() || lane->unsent.front() != piece);
    if (!sent || !Valid(reply, OpOf(piece), piece->length, piece->request.id)) {
      LOG_WARNING("tcp peer %s: sent an invalid reply", lane->peer->text.c_str());
      return false;
    }
    if (reply.length > 0) {
      lane->in_payload = true;
      // ReadReplies() stops at such a reply.
      ROPETEAM_CHECK((taken + 1) * sizeof(Reply) == lane->replies_received);
    } else {
      Done(lane, reply.code == static_cast<uint32_t>(ReplyCode::kOk) ? Code::kOk : Code::kInvalidArgument);
    }
  }
  lane->replies_received -= taken * sizeof(Reply);
  std::memmove(lane->replies.data(), lane->replies.data() + taken, lane->replies_received);
  return true;
}

// The lane's first piece was answered.
void TcpTransport::Done(Lane* lane, Code code) {
  Piece* piece = lane->flight.Pop();
  lane->pieces--;
  lane->local->lane_bytes -= piece->length;
  flight_--;
  FinishPiece(lane->peer, piece, code);
}

void TcpTransport::FinishPiece(Peer* peer, Piece* piece, Code code) {
  Operation* operation = piece->operation;
  operation->pieces--;
  pieces_.Free(piece);
  if (code != Code::kOk && operation->code == Code::kOk) {
    operation->code = code;
    peer->queue.Abandon(operation);
  }
  Settle(peer, operation);
}

// Finishes the operation if all of its pieces are done.
void TcpTransport::Settle(Peer* peer, Operation* operation) {
  if (operation->pieces > 0 || operation->queued) return;
  const bool ended = peer->gone() || peer->closing();
  if (operation->code == Code::kLinkFailed && !ended) {
    peer->broken.Push(operation);
    Resolve(peer);  // the peer may have been checked before this piece ended
  } else {
    operations_.Finish(operation, operation->code == Code::kOk || !ended ? operation->code : Code::kPeerGone);
  }
}

}  // namespace ropeteam::tcp
