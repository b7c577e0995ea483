// SPDX-License-Identifier: Apache-2.0
//
// From an accepted put or get to its completion. Operations are cut into pieces of kOperationBytes. They are
// posted in batches, round-robin, so that peers share the devices. Each batch goes to the link that would
// finish it first.

#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam::verbs {
namespace {

uint64_t WorkId(uint32_t tag, uint32_t number) { return static_cast<uint64_t>(tag) << 32 | number; }

// The piece reached the peer, and the peer's device refused it.
bool IsRefusal(ibv_wc_status status) {
  return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR;
}
bool IsLocal(ibv_wc_status status) {
  return status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_LOC_ACCESS_ERR;
}

}  // namespace

void VerbsTransport::Start(Peer* peer) {
  if (peer->state == PeerState::kIdle) {
    const TimeUs now = Now();
    peer->state = PeerState::kConnecting;
    for (Link& link : peer->links) StartConnecting(&link, kTimeoutAliveUs, now);
  }
  if (peer->state == PeerState::kUp) Activate(peer);
}

void VerbsTransport::FinishOperation(Operation* operation) {
  ROPETEAM_CHECK(operation->pieces == 0);
  operations_.Finish(operation, operation->code);
}

void VerbsTransport::Activate(Peer* peer) {
  if (!peer->queue.empty() || !peer->redo.empty()) active_.Add(peer);
}

// A turn may break the last link; the peer then gets no more turns.
void VerbsTransport::Pump() {
  active_.Go([this](Peer* peer) { return PostTurn(peer); },
             [](Peer* peer) { return peer->queue.empty() && peer->redo.empty(); });
}

Link* VerbsTransport::LinkForNext(Peer* peer) {
  loads_.clear();
  for (const Link& link : peer->links) {
    const bool room = link.piece_count < kLinkPieces && link.bytes < kLinkBytes &&
                      link.rail->pieces < link.rail->pieces_max();
    loads_.push_back({link.state == LinkState::kUp && room, link.mbps, link.rail->bytes});
  }
  const int chosen = ChooseLink(loads_, kOperationBytes);
  return chosen < 0 ? nullptr : &peer->links[static_cast<size_t>(chosen)];
}

// The next piece to post: first those that a broken link returned, then those of the queue. nullptr: nothing
// is left.
Piece* VerbsTransport::NextPiece(Peer* peer) {
  while (!peer->redo.empty()) {
    Piece* piece = peer->redo.Pop();
    if (piece->operation->code == Code::kOk) return piece;
    DropPiece(piece);
  }
  if (peer->queue.empty()) return nullptr;
  Operation* operation = peer->queue.head();
  Piece* piece = pieces_.New();
  piece->operation = operation;
  piece->offset = operation->cut;
  piece->length = static_cast<uint32_t>(std::min(kOperationBytes, operation->length - operation->cut));
  operation->pieces++;
  peer->queue.Cut(piece->length);
  return piece;
}

bool VerbsTransport::PostTurn(Peer* peer) {
  ROPETEAM_CHECK(peer->state == PeerState::kUp);
  Link* link = LinkForNext(peer);
  if (link == nullptr) return false;
  const uint32_t room =
      std::min({kTurnPieces, kLinkPieces - link->piece_count, link->rail->pieces_max() - link->rail->pieces});
  Piece* pieces[kTurnPieces];
  uint32_t count = 0;
  for (uint64_t bytes = 0; count < room && bytes < kTurnBytes; count++) {
    pieces[count] = NextPiece(peer);
    if (pieces[count] == nullptr) break;
    bytes += pieces[count]->length;
  }
  if (count > 0) Post(link, pieces, count);
  return count > 0;
}

void VerbsTransport::Post(Link* link, Piece** pieces, uint32_t count) {
  ibv_send_wr requests[kTurnPieces];
  ibv_sge ranges[kTurnPieces];
  for (uint32_t i = 0; i < count; i++) {
    const Piece& piece = *pieces[i];
    const Operation& operation = *piece.operation;
    const bool put = operation.kind == OperationKind::kPut;
    ranges[i] = {operation.region->base + operation.local_offset + piece.offset, piece.length,
                 operation.region->memory[link->rail->index]->lkey};
    requests[i] = ibv_send_wr{};
    requests[i].wr_id = WorkId(link->tag, link->piece_next + i);
    requests[i].next = i + 1 < count ? &requests[i + 1] : nullptr;
    requests[i].sg_list = &ranges[i];
    requests[i].num_sge = 1;
    requests[i].opcode = put ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    // Work requests of a queue pair complete in order, so the last one's completion stands for all. Errors
    // are reported even without IBV_SEND_SIGNALED.
    requests[i].send_flags = i + 1 < count ? 0 : IBV_SEND_SIGNALED;
    if (put && operation.region->exported && piece.length <= link->inline_bytes)
      requests[i].send_flags |= IBV_SEND_INLINE;
    requests[i].wr.rdma.remote_addr = operation.remote->key.base + operation.remote_offset + piece.offset;
    requests[i].wr.rdma.rkey = operation.remote->key.keys[link->remote_rail];
  }
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(link->queue_pair.get(), requests, &bad);
  const uint32_t posted = error == 0 ? count : static_cast<uint32_t>(bad - requests);
  for (uint32_t i = 0; i < posted; i++) {
    link->pieces.Push(pieces[i]);
    link->bytes += pieces[i]->length;
    link->rail->bytes += pieces[i]->length;
  }
  link->piece_count += posted;
  link->piece_next += posted;
  link->rail->pieces += posted;
  outstanding_ += posted;
  if (error == 0) return;
  LOG_WARNING("verbs peer %s: %s refused work: %s (%d)", link->peer->text.c_str(),
              link->rail->port.name.c_str(), std::strerror(error), error);
  for (uint32_t i = posted; i < count; i++) link->peer->redo.Push(pieces[i]);
  BreakLink(link, kTimeoutAliveUs, Now());
}

Piece* VerbsTransport::TakePiece(Link* link) {
  Piece* piece = link->pieces.Pop();
  link->piece_count--;
  link->bytes -= piece->length;
  link->rail->bytes -= piece->length;
  link->rail->pieces--;
  outstanding_--;
  return piece;
}

// The piece has ended: its bytes have moved, or its operation has failed.
void VerbsTransport::DropPiece(Piece* piece) {
  Operation* operation = piece->operation;
  ROPETEAM_CHECK(operation->pieces > 0);
  operation->pieces--;
  piece->operation = nullptr;
  pieces_.Free(piece);
  if (operation->pieces == 0 && !operation->queued) FinishOperation(operation);
}

void VerbsTransport::FailOperation(Peer* peer, Operation* operation, Code code) {
  if (operation->code == Code::kOk) operation->code = code;
  if (!operation->queued) return;
  peer->queue.Abandon(operation);
  if (operation->pieces == 0) FinishOperation(operation);
}

// The work request of this number has ended with `status`. All before it have succeeded.
void VerbsTransport::FinishPieces(Link* link, uint32_t number, ibv_wc_status status) {
  const uint32_t before = number - (link->piece_next - link->piece_count);
  if (before >= link->piece_count) return;  // the device has reported it before
  for (uint32_t i = 0; i < before; i++) DropPiece(TakePiece(link));
  Piece* piece = TakePiece(link);
  if (status == IBV_WC_SUCCESS)
    DropPiece(piece);
  else
    FailPiece(link, piece, status);
}

void VerbsTransport::FailPiece(Link* link, Piece* piece, ibv_wc_status status) {
  Peer* peer = link->peer;
  Operation* operation = piece->operation;
  const bool first = link->state == LinkState::kUp;
  if (first) {
    const bool refused = IsRefusal(status), local = IsLocal(status);
    const bool others = peer->links_up > 1;
    LOG_WARNING("verbs peer %s: %s: %s of %u bytes failed: %s", peer->text.c_str(),
                link->rail->port.name.c_str(), operation->kind == OperationKind::kPut ? "put" : "get",
                piece->length, ibv_wc_status_str(status));
    if (refused || local)
      FailOperation(peer, operation, refused ? Code::kInvalidArgument : Code::kIo);
    else if (!others)
      FailOperation(peer, operation, Code::kLinkFailed);
    BreakLink(link, refused || local || others ? kTimeoutAliveUs : timeout_silent_, Now());
  }
  if (peer->state == PeerState::kGone || peer->state == PeerState::kClosing) {
    FailOperation(peer, operation, Code::kPeerGone);
    operation->code = Code::kPeerGone;  // also if it had failed before
    DropPiece(piece);
  } else {
    link->held.Push(piece);
  }
}

}  // namespace ropeteam::verbs
