// SPDX-License-Identifier: Apache-2.0
//
// The initiator's side of connections: makes them by datagrams, handles broken ones, and leaves peers that
// are gone. The states are in internal.h.

#include <errno.h>

#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam::verbs {
namespace {

// A packet that is not acknowledged is sent again after 4.096 µs << kTimeout, which is 67 ms, up to kRetries
// times. So a peer counts as silent after 0.47 s; the specification allows devices up to four times that.
// kRetries must stay below 7, which some devices take as infinite.
constexpr uint8_t kTimeout = 14;
constexpr uint8_t kRetries = 6;
static_assert(kRetries < 7);
// One-sided operations need no receive buffers. This is for devices that answer "not ready" for other
// reasons.
constexpr uint8_t kNotReadyTimer = 12;  // 0.64 ms
// A request is repeated after kRepeatUs. The interval then doubles each time, up to kRepeatMaxUs.
constexpr TimeUs kRepeatUs = 5'000;
constexpr TimeUs kRepeatMaxUs = 80'000;
// A device must return the pieces of a queue pair in error within this time. After it, the queue pair is
// destroyed, which also releases them.
constexpr TimeUs kDrainUs = 1'000'000;
// The interval at which a rail that was left out is tried again, if no event reports that it is back.
constexpr TimeUs kRailRetryUs = 5'000'000;

constexpr uint32_t kSequenceMask = (1u << 24) - 1;

const char* LinkText(const Link& link) { return link.rail->port.name.c_str(); }

}  // namespace

uint32_t NewSequence() { return static_cast<uint32_t>(RandomNumber()) & kSequenceMask; }

Status MakeQueuePair(Rail* rail, Handle<ibv_qp>* queue_pair, uint32_t* inline_bytes) {
  ibv_qp_init_attr initial{};
  initial.send_cq = initial.recv_cq = rail->queue.get();
  initial.qp_type = IBV_QPT_RC;
  initial.cap.max_send_wr = kLinkPieces;
  initial.cap.max_recv_wr = 1;
  initial.cap.max_send_sge = initial.cap.max_recv_sge = 1;
  initial.cap.max_inline_data = inline_bytes != nullptr ? kInlineBytes : 0;
  queue_pair->reset(ibv_create_qp(rail->domain.get(), &initial));
  if (!*queue_pair && initial.cap.max_inline_data > 0) {
    initial.cap.max_inline_data = 0;
    queue_pair->reset(ibv_create_qp(rail->domain.get(), &initial));
  }
  if (!*queue_pair) return ErrnoError(errno, "device %s: queue pair", rail->port.name.c_str());
  if (inline_bytes != nullptr) *inline_bytes = std::min(kInlineBytes, initial.cap.max_inline_data);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = rail->port.number;
  // The initiator's end accepts writes too: the empty ones of ProbeInbound(). The keys protect the memory.
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (const int error = ibv_modify_qp(queue_pair->get(), &attributes,
                                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
      error != 0) {
    queue_pair->reset();
    return ErrnoError(error, "device %s: queue pair to INIT", rail->port.name.c_str());
  }
  return OkStatus();
}

int ConnectQueuePair(Rail* rail, ibv_qp* queue_pair, const Message& remote, uint32_t sequence,
                     uint8_t reads_served, uint8_t reads_made) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.ah_attr = PathTo(rail->port, remote.port);
  attributes.path_mtu = static_cast<ibv_mtu>(
      std::min<int>(remote.port.mtu, static_cast<int>(rail->port.attributes.active_mtu)));
  attributes.dest_qp_num = remote.queue_pair;
  attributes.rq_psn = remote.sequence;
  attributes.max_dest_rd_atomic = reads_served;
  attributes.min_rnr_timer = kNotReadyTimer;
  const int error = ibv_modify_qp(queue_pair, &attributes,
                                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) return error;
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = kTimeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRetries;
  attributes.sq_psn = sequence;
  attributes.max_rd_atomic = reads_made;
  return ibv_modify_qp(queue_pair, &attributes,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC);
}

Result<PeerId> VerbsTransport::Connect(const std::string& bytes) {
  auto peer = std::make_unique<Peer>();
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &peer->remote));
  if (peers_.size() >= kPeersMax)
    return Error(Code::kNoSpace, "%zu peers are connected, limit %zu", peers_.size(), kPeersMax);
  const TransportAddress& remote = peer->remote;
  for (const RailPair& pair : PairRails(rails_.size(), remote.rails.size())) {
    Rail* rail = rails_[pair.local].get();
    const RailAddress& other = remote.rails[pair.remote];
    if (rail->port.ethernet() != (other.port.ethernet != 0)) continue;
    Link link;
    link.peer = peer.get();
    link.rail = rail;
    link.remote_rail = pair.remote;
    link.mbps = std::min<uint64_t>(rail->port.link_mbps, other.link_mbps);
    peer->links.push_back(std::move(link));
  }
  if (peer->links.empty())
    return Error(Code::kInvalidArgument,
                 "the peer's devices are %s, this node's %s (%s): they cannot be connected",
                 remote.rails[0].port.ethernet != 0 ? "Ethernet" : "InfiniBand",
                 rails_[0]->port.fabric.c_str(), capabilities_.devices.c_str());
  peer->text = AddressText(remote.rails[0].port);
  // A peer that this node connects to may connect to this node too, even if it was disconnected before.
  std::erase(fenced_, remote.instance);
  return AddPeer(std::move(peer));
}

Status VerbsTransport::DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const {
  RegionKey& key = remote->key;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &key));
  if (key.instance != peer.remote.instance) return front::ForeignKey(peer.text);
  if (!key.keys.empty() && key.keys.size() != peer.remote.rails.size())
    return Error(Code::kInvalidArgument, "the region key is for %zu devices, peer %s has %zu",
                 key.keys.size(), peer.text.c_str(), peer.remote.rails.size());
  remote->length = key.length;
  return OkStatus();
}

void VerbsTransport::SetTimer(Link* link) {
  if (link->timed) return;
  link->timed = true;
  timed_.push_back(link);
}

void VerbsTransport::StartConnecting(Link* link, TimeUs timeout, TimeUs now) {
  link->state = LinkState::kConnecting;
  link->deadline = rounds_.time() + timeout;
  link->send_next = now;
  link->send_interval = kRepeatUs;
  SetTimer(link);
  const Status made = MakeQueuePair(link->rail, &link->queue_pair, &link->inline_bytes);
  if (!made.ok()) {
    LOG_WARNING("verbs peer %s: %s", link->peer->text.c_str(), made.ToString().c_str());
    link->deadline = 0;
    return;
  }
  link->connection = RandomNumber();
  link->sequence = NewSequence();
  link->tag = tag_next_++;
  link->piece_next = 0;
  link->oldest_since = 0;
  tags_[link->tag] = link;
  connections_[link->connection] = link;
}

void VerbsTransport::DropQueuePair(Link* link) {
  if (!link->queue_pair) return;
  tags_.erase(link->tag);
  connections_.erase(link->connection);
  link->queue_pair.reset();
}

void VerbsTransport::SendRequest(Link* link, TimeUs now) {
  link->send_next = now + link->send_interval;
  link->send_interval = std::min(2 * link->send_interval, kRepeatMaxUs);
  if (!link->queue_pair) return;
  Message request;
  request.kind = MessageKind::kRequest;
  request.receiver = link->peer->remote.instance;
  request.receiver_rail = link->remote_rail;
  request.connection = link->connection;
  request.superseded = link->superseded;
  request.queue_pair = link->queue_pair->qp_num;
  request.sequence = link->sequence;
  request.reads =
      static_cast<uint8_t>(std::clamp<int>(link->rail->port.limits.max_qp_init_rd_atom, 1, kReads));
  Send(link->rail, link->peer->remote.rails[link->remote_rail], link->peer->remote.datagram_key, request);
  // The path of the old connection may be broken. Datagrams over other rails can end it too.
  if (link->superseded == 0) return;
  for (const Link& other : link->peer->links)
    if (other.state == LinkState::kUp) SendClose(other, link->superseded);
}

// Sends a request over `over` to end a connection, which may belong to another link.
void VerbsTransport::SendClose(const Link& over, uint64_t connection) {
  Message close;
  close.kind = MessageKind::kClose;
  close.receiver = over.peer->remote.instance;
  close.receiver_rail = over.remote_rail;
  close.connection = connection;
  Send(over.rail, over.peer->remote.rails[over.remote_rail], over.peer->remote.datagram_key, close);
}

void VerbsTransport::StepLinks(TimeUs now) {
  for (size_t i = 0; i < timed_.size(); i++) StepLink(timed_[i], now);
  std::erase_if(timed_, [](Link* link) {
    const bool ended = link->state == LinkState::kUp || link->state == LinkState::kIdle;
    if (ended) link->timed = false;
    return ended;
  });
}

void VerbsTransport::StepLink(Link* link, TimeUs now) {
  switch (link->state) {
    case LinkState::kIdle:
    case LinkState::kUp:
      return;
    case LinkState::kConnecting:
      if (rounds_.Advance(now) >= link->deadline) return TakeDown(link, "no answer", now);
      if (now >= link->send_next) SendRequest(link, now);
      return;
    case LinkState::kDraining:
      if (link->pieces.empty() || now >= link->deadline || link->rail->dead) FinishDraining(link, now);
      return;
    case LinkState::kDown:
      if (now < link->deadline) return;
      link->deadline = now + kRailRetryUs;
      if (link->rail->up && !link->rail->dead) StartConnecting(link, timeout_silent_, now);
      return;
  }
}

// Makes the device return the pieces of this connection. Then a new connection is requested.
void VerbsTransport::BreakLink(Link* link, TimeUs timeout, TimeUs now) {
  ROPETEAM_CHECK(link->state == LinkState::kUp);
  Peer* peer = link->peer;
  link->state = LinkState::kDraining;
  link->timeout = timeout;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  const int error = ibv_modify_qp(link->queue_pair.get(), &attributes, IBV_QP_STATE);
  link->deadline = error == 0 ? now + kDrainUs : now;
  SetTimer(link);
  peer->links_up--;
  if (peer->links_up > 0 || peer->state != PeerState::kUp) return;
  peer->state = PeerState::kConnecting;
  active_.Remove(peer);
  for (Link& other : peer->links) {
    if (other.state == LinkState::kDown) other.deadline = now;
    // Their timeouts assumed that this link proved the peer alive; shorten them.
    if (other.state == LinkState::kConnecting)
      other.deadline = std::min(other.deadline, rounds_.time() + timeout);
    if (other.state == LinkState::kDraining) other.timeout = std::min(other.timeout, timeout);
  }
}

void VerbsTransport::BreakStuckLinks(TimeUs now) {
  // After a pause of this thread, the queue may have completions that were not read yet.
  const bool paused = now > stuck_next_ + kStuckLookUs;
  stuck_next_ = now + kStuckLookUs;
  if (outstanding_ == 0) return;
  for (const auto& [id, peer] : peers_) {
    for (Link& link : peer->links) {
      if (link.state != LinkState::kUp) continue;
      const uint32_t oldest = link.piece_next - link.piece_count;
      if (paused || link.pieces.empty() || link.oldest != oldest || link.oldest_since == 0) {
        link.oldest = oldest;
        link.oldest_since = now;
      }
      if (now - link.oldest_since < kStuckUs) continue;
      LOG_WARNING("verbs peer %s: %s has neither completed nor failed any of %u pieces for %llu s",
                  peer->text.c_str(), LinkText(link), link.piece_count,
                  static_cast<unsigned long long>(kStuckUs / 1'000'000));
      const bool others = peer->links_up > 1;
      if (!others) FailOperation(peer.get(), link.pieces.head()->operation, Code::kLinkFailed);
      BreakLink(&link, others ? kTimeoutAliveUs : timeout_silent_, now);
    }
  }
}

void VerbsTransport::FinishDraining(Link* link, TimeUs now) {
  if (!link->pieces.empty() && !link->rail->dead)
    LOG_WARNING("verbs peer %s: %s did not return %u pieces in %llu ms; its queue pair is destroyed",
                link->peer->text.c_str(), LinkText(*link), link->piece_count,
                static_cast<unsigned long long>(kDrainUs / 1'000));
  DropQueuePair(link);
  while (!link->pieces.empty()) FailPiece(link, TakePiece(link), IBV_WC_WR_FLUSH_ERR);
  link->superseded = link->connection;
  link->connection = 0;
  const PeerState state = link->peer->state;
  if (state == PeerState::kGone || state == PeerState::kClosing) {
    SendClose(*link, link->superseded);
    link->superseded = 0;
    link->state = LinkState::kIdle;
    return;
  }
  StartConnecting(link, link->timeout, now);
}

// The peer has destroyed its responder of the old connection, so the unfinished pieces may be posted again.
void VerbsTransport::ReleaseHeld(Link* link) {
  link->superseded = 0;
  while (!link->held.empty()) {
    Piece* piece = link->held.Pop();
    if (piece->operation->code == Code::kOk)
      link->peer->redo.Push(piece);
    else
      DropPiece(piece);
  }
  if (link->peer->state == PeerState::kUp) Activate(link->peer);
}

void VerbsTransport::TakeDown(Link* link, const char* reason, TimeUs now) {
  Peer* peer = link->peer;
  if (link->connection != 0) SendClose(*link, link->connection);
  DropQueuePair(link);
  link->connection = 0;
  link->state = LinkState::kDown;
  link->deadline = now + kRailRetryUs;
  const bool trying = std::any_of(peer->links.begin(), peer->links.end(), [](const Link& other) {
    return other.state != LinkState::kDown && other.state != LinkState::kIdle;
  });
  // A piece is held until the peer confirms that it may be posted again. If pieces are still held, that
  // confirmation has not arrived over any rail.
  if (!trying || !link->held.empty()) return SetGone(peer, reason);
  LOG_WARNING("verbs peer %s: left out rail %s: %s", peer->text.c_str(), LinkText(*link), reason);
}

void VerbsTransport::OnAccept(Rail* rail, const Message& message) {
  const auto found = connections_.find(message.connection);
  if (found == connections_.end()) {
    Answer(rail, message, MessageKind::kClose);  // no longer wanted
    return;
  }
  Link* link = found->second;
  Peer* peer = link->peer;
  if (link->state != LinkState::kConnecting || message.sender != peer->remote.instance) return;
  const int error =
      ConnectQueuePair(link->rail, link->queue_pair.get(), message, link->sequence, 1, message.reads);
  if (error != 0) {
    LOG_WARNING("verbs peer %s: connecting over %s: %s (%d)", peer->text.c_str(), LinkText(*link),
                std::strerror(error), error);
    link->deadline = 0;
    return;
  }
  if (link->superseded != 0)
    LOG_WARNING("verbs peer %s: the link over %s failed and was re-established", peer->text.c_str(),
                LinkText(*link));
  link->state = LinkState::kUp;
  peer->links_up++;
  peer->state = PeerState::kUp;
  ReleaseHeld(link);
  Activate(peer);
}

void VerbsTransport::OnRefuse(const Message& message) {
  const auto found = connections_.find(message.connection);
  if (found == connections_.end()) return;
  Link* link = found->second;
  Peer* peer = link->peer;
  if (message.sender != peer->remote.instance && message.refusal != Refusal::kOtherInstance) return;
  if (peer->state == PeerState::kGone || peer->state == PeerState::kClosing) return;
  switch (message.refusal) {
    case Refusal::kOtherInstance:
    case Refusal::kFenced:
    case Refusal::kLeaving:
      return SetGone(peer, RefusalText(message.refusal));
    case Refusal::kNoRail:
      if (link->state == LinkState::kConnecting) link->deadline = 0;
      return;
    default:
      // The reason may pass. The requests are repeated until the timeout.
      LOG_DEBUG("verbs peer %s: refused: %s", peer->text.c_str(), RefusalText(message.refusal));
      return;
  }
}

void VerbsTransport::OnClosed(const Message& message) {
  for (Link* link : timed_) {
    if (link->superseded != message.connection || link->peer->remote.instance != message.sender) continue;
    ReleaseHeld(link);
    return;
  }
}

void VerbsTransport::SetGone(Peer* peer, const char* reason) {
  LOG_WARNING("verbs peer %s: gone: %s", peer->text.c_str(), reason);
  GiveUp(peer, PeerState::kGone);
}

void VerbsTransport::GiveUp(Peer* peer, PeerState state) {
  const TimeUs now = Now();
  active_.Remove(peer);
  peer->state = state;
  for (Link& link : peer->links) {
    if (link.state == LinkState::kUp) {
      BreakLink(&link, 0, now);
    } else if (link.state != LinkState::kDraining) {
      if (link.connection != 0) SendClose(link, link.connection);
      DropQueuePair(&link);
      link.connection = link.superseded = 0;
      link.state = LinkState::kIdle;
    }
    while (!link.held.empty()) peer->redo.Push(link.held.Pop());
  }
  while (!peer->redo.empty()) {
    Piece* piece = peer->redo.Pop();
    FailOperation(peer, piece->operation, Code::kPeerGone);
    piece->operation->code = Code::kPeerGone;  // also if it had failed before
    DropPiece(piece);
  }
  while (!peer->queue.empty()) FailOperation(peer, peer->queue.head(), Code::kPeerGone);
}

void VerbsTransport::Disconnect(PeerId id) {
  Peer* peer = Connected(id);
  if (peer == nullptr) return;
  GiveUp(peer, PeerState::kClosing);
  closed_.push_back(id);
  const uint64_t instance = peer->remote.instance;
  const bool again = std::any_of(peers_.begin(), peers_.end(), [&](const auto& entry) {
    return entry.second->state != PeerState::kClosing && entry.second->remote.instance == instance;
  });
  if (!again) FenceInstance(instance);
  FinishClosed();
}

void VerbsTransport::FinishClosed() {
  std::erase_if(closed_, [this](PeerId id) {
    Peer* peer = peers_.at(id).get();
    const bool drained = std::none_of(peer->links.begin(), peer->links.end(),
                                      [](const Link& link) { return link.state == LinkState::kDraining; });
    if (drained) FinishDisconnect(peer);
    return drained;
  });
}

void VerbsTransport::FinishDisconnect(Peer* peer) {
  std::erase_if(timed_, [peer](const Link* link) { return link->peer == peer; });
  RemovePeer(peer->id);
}

}  // namespace ropeteam::verbs
