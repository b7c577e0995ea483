// SPDX-License-Identifier: Apache-2.0
//
// Connects to peers, checks them after a failure, and disconnects them. The states are in internal.h.

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/tcp/internal.h"

namespace ropeteam::tcp {
namespace {

// The pauses before another attempt: after a connection that failed, and after a first hello that was refused. The peer
// may not have heard of this node yet.
constexpr TimeUs kRetryUs = 2'000;
constexpr TimeUs kRefusedRetryUs = 20'000;
// A peer that was up and now refuses so often in a row has disconnected this node. Under a flood of connections it may
// close a few whose hello is still on its way.
constexpr uint32_t kRefusalsMin = 5;
// The timeout if the peer's kernel answers but its program makes no progress: it may be busy. Also for a peer that
// refuses a first connection.
constexpr TimeUs kProgressDeadlineUs = 5'000'000;
// The timeouts if nothing answers at all. transport.h promises that a peer that was up a moment ago is reported gone
// within 100 ms. A first contact may have to wait for ARP and a lost SYN.
constexpr TimeUs kSilenceAfterBreakUs = 80'000;
constexpr TimeUs kSilenceAtFirstUs = 1'500'000;
static_assert(kSilenceAfterBreakUs < 100'000);
static_assert(front::kRoundMaxUs < kSilenceAfterBreakUs / 2);  // one late round does not end a peer
// How often silent lanes are looked for.
constexpr TimeUs kSilenceStepUs = 50'000;
// A connection's path counts as dead if the kernel has repeated the same bytes so often, at 0.2, 0.6 and 1.4 s.
constexpr uint32_t kRepeatsMin = 3;

// Whether no byte of this connection was acknowledged for so long. Its path may be dead while another connection, the
// probe, takes one that is not. The kernel of a stopped peer acknowledges.
bool PathIsDead(int fd, TimeUs silence) {
  tcp_info info{};
  socklen_t length = sizeof info;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_unacked > 0 &&
         info.tcpi_retransmits >= kRepeatsMin && TimeUs{info.tcpi_last_ack_recv} * 1'000 > silence;
}

}  // namespace

Result<PeerId> TcpTransport::Connect(const std::string& bytes) {
  auto peer = std::make_unique<Peer>();
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &peer->remote));
  const std::vector<EndpointAddress::Lane>& remote = peer->remote.lanes;
  for (const RailPair& pair : PairRails(listeners_.size(), remote.size())) {
    auto lane = std::make_unique<Lane>();
    lane->peer = peer.get();
    lane->index = static_cast<uint32_t>(peer->lanes.size());
    lane->local = listeners_[pair.local].get();
    lane->remote = remote[pair.remote].address;
    lane->mbps = std::min(lane->local->link_mbps, remote[pair.remote].link_mbps);
    if (lane->remote.storage.ss_family != lane->local->address.storage.ss_family)
      return Error(Code::kInvalidArgument,
                   "the peer's address %s and this node's %s are of different families",
                   ToText(lane->remote).c_str(), ToText(lane->local->address).c_str());
    peer->lanes.push_back(std::move(lane));
  }
  peer->text = ToText(remote[0].address);
  peer->operation_bytes = std::min(config_.operation_bytes, peer->remote.operation_bytes);
  admission_.Return(peer->remote.instance);
  return AddPeer(std::move(peer));
}

Status TcpTransport::DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const {
  RegionKey key;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &key));
  if (key.instance != peer.remote.instance) return front::ForeignKey(peer.text);
  remote->key = key.key;
  remote->length = key.length;
  return OkStatus();
}

void TcpTransport::StartConnecting(Lane* lane, TimeUs now) {
  lane->state = LaneState::kConnecting;
  lane->reached = false;
  lane->refusals = 0;
  lane->connect_start = rounds_.time();
  connecting_++;
  TryToConnect(lane, now);
}

void TcpTransport::TryToConnect(Lane* lane, TimeUs now) {
  lane->greeted = false;
  lane->welcomed = 0;
  lane->fd = Fd(socket(lane->remote.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = lane->fd.get();
  if (fd < 0) return ConnectFailed(lane, errno, now);
  SetConnectionOptions(fd);
  SetOption(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  // So that the lane takes its own device. If the address cannot be bound, the kernel chooses one by the route.
  const IpAddress source = WithPort(lane->local->address, 0);
  (void)bind(fd, source.get(), source.length);
  if (connect(fd, lane->remote.get(), lane->remote.length) == 0 || errno == EINPROGRESS)
    return Watch(lane, EPOLLOUT);
  ConnectFailed(lane, errno, now);
}

void TcpTransport::ConnectFailed(Lane* lane, int error, TimeUs now) {
  lane->refusals = 0;
  switch (error) {
    case ECONNREFUSED:
      return Lose(lane, "no process listens at its address");
    case ECONNRESET:
    case EPIPE:
      // It was connected before. A flood may have made the peer close it before the hello was sent.
      lane->reached = true;
      return Retry(lane, "the connection was reset", now);
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case EAGAIN:
    case EADDRINUSE:
    case EADDRNOTAVAIL:
      lane->reached = true;  // it was not asked
      return Retry(lane, "no descriptor (RLIMIT_NOFILE), port or memory is left here", now);
    default:
      return Retry(lane, "its address cannot be reached", now);  // a route may return: no more than silence
  }
}

// Another attempt follows.
void TcpTransport::Retry(Lane* lane, const char* reason, TimeUs now) {
  Unwatch(lane);
  lane->reason = reason;
  lane->retry_at = now + (lane->refusals > 0 && !lane->was_up ? kRefusedRetryUs : kRetryUs);
}

void TcpTransport::OnConnecting(Lane* lane, TimeUs now) {
  if (!lane->fd.open()) return;
  if (!lane->greeted) return Greet(lane, now);
  const ssize_t count = ReceiveGreeting(lane->fd.get(), &lane->welcome, &lane->welcomed);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) {
    // Perhaps the process was just dying, or does not admit this node yet.
    lane->refusals++;
    return Retry(lane, "it refuses this node", now);
  }
  const Welcome& welcome = lane->welcome;
  const Mac expected = MacOf(lane->peer->remote.secret, lane->hello, welcome);
  if (welcome.magic != kWelcomeMagic || welcome.target != lane->peer->remote.instance ||
      !Same(welcome.mac, expected))
    return Lose(lane, "another process answers at its address");
  SetUp(lane, now);
}

// TCP has connected, or failed to.
void TcpTransport::Greet(Lane* lane, TimeUs now) {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(lane->fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return ConnectFailed(lane, error, now);
  lane->reached = true;
  Hello& hello = lane->hello;
  hello.initiator = instance_;
  hello.target = lane->peer->remote.instance;
  hello.channel = lane->peer->id;
  hello.lane = lane->index;
  hello.counter = ++counter_;
  ROPETEAM_CHECK(getrandom(hello.nonce.data(), hello.nonce.size(), 0) ==
                 static_cast<ssize_t>(hello.nonce.size()));
  hello.mac = MacOf(lane->peer->remote.secret, hello);
  // A new connection has room for these bytes.
  if (send(lane->fd.get(), Padded(hello).data(), kGreetingBytes, MSG_NOSIGNAL) != kGreetingBytes)
    return ConnectFailed(lane, ECONNRESET, now);
  lane->greeted = true;
  Watch(lane, EPOLLIN);
}

void TcpTransport::SetUp(Lane* lane, TimeUs now) {
  if (lane->was_up)
    LOG_WARNING("tcp peer %s: link to %s failed and was re-established", lane->peer->text.c_str(),
                ToText(lane->remote).c_str());
  lane->state = LaneState::kUp;
  lane->was_up = true;
  lane->heard_at = now;
  connecting_--;
  Resolve(lane->peer);
}

void TcpTransport::StepConnecting(TimeUs now) {
  const TimeUs counted = rounds_.Advance(now);
  for (const auto& [id, peer] : peers_)
    for (const auto& lane : peer->lanes) {
      if (lane->state != LaneState::kConnecting) continue;
      const bool refuses = !lane->fd.open() && lane->refusals >= kRefusalsMin;
      const TimeUs deadline = lane->was_up && (!lane->reached || refuses) ? kSilenceAfterBreakUs
                              : lane->reached                             ? kProgressDeadlineUs
                                                                          : kSilenceAtFirstUs;
      if (counted - lane->connect_start > deadline)
        Lose(lane.get(), lane->refusals > 0 || !lane->fd.open() ? lane->reason
                         : lane->reached                        ? "it makes no progress"
                                                                : "no answer");
      else if (!lane->fd.open() && now >= lane->retry_at)
        TryToConnect(lane.get(), now);
      else if (lane->greeted && PathIsDead(lane->fd.get(), kSilenceAtFirstUs))
        Lose(lane.get(), "its host answers, but no long packet reaches it: is the MTU smaller on the way?");
    }
}

// A peer that does not answer may be busy or stopped. If its kernel answers, the lane is kept.
void TcpTransport::CheckSilent(TimeUs now) {
  if (now < silence_next_) return;
  silence_next_ = now + kSilenceStepUs;
  const TimeUs silence = TimeUs{config_.silence_ms} * 1'000;
  for (const auto& [id, peer] : peers_)
    for (const auto& lane : peer->lanes) {
      if (lane->state != LaneState::kUp || lane->doubted) continue;
      if (lane->pieces == 0 || now - lane->heard_at <= silence / 2) {
        lane->probe.Stop();
        continue;
      }
      if (!lane->probe.started()) lane->probe.Start(lane->local->address, lane->remote, now);
      const PeerProbe::Answer answer = lane->probe.Step();
      // The time runs from the probe's start, and its answer is read first. So a pause of this thread is not taken for
      // the peer's silence.
      if (answer == PeerProbe::Answer::kAlive) {
        lane->probe.Stop();
        lane->heard_at = now;
        if (PathIsDead(lane->fd.get(), silence)) Break(lane.get(), "its path is dead");
      } else if (answer == PeerProbe::Answer::kRefused || now - lane->probe.start_us() > silence / 2) {
        Break(lane.get(), "silent");
      }
    }
}

// Probes the lanes that are up after another lane of the same peer was lost.
void TcpTransport::CheckDoubted(TimeUs now) {
  for (const auto& [id, peer] : peers_)
    for (const auto& lane : peer->lanes) {
      if (!lane->doubted) continue;
      const PeerProbe::Answer answer = lane->probe.Step();
      if (answer == PeerProbe::Answer::kAlive) {
        EndDoubt(lane.get());
        Resolve(peer.get());
      } else if (answer == PeerProbe::Answer::kRefused ||
                 now - lane->probe.start_us() > kSilenceAfterBreakUs) {
        Break(lane.get(), "its end does not answer", true);
      }
    }
}

void TcpTransport::EndDoubt(Lane* lane) {
  lane->probe.Stop();
  if (!lane->doubted) return;
  lane->doubted = false;
  doubted_--;
}

// Returns the pieces that were in flight.
List<Piece> TcpTransport::CloseLane(Lane* lane, LaneState state) {
  if (lane->state == LaneState::kConnecting) connecting_--;
  EndDoubt(lane);
  Unwatch(lane);
  lane->state = state;
  List<Piece> pieces = lane->flight;
  lane->flight = {};
  for (const Piece* piece = pieces.head(); piece != nullptr; piece = piece->next) {
    lane->local->lane_bytes -= piece->length;
    flight_--;
  }
  lane->pieces = 0;
  lane->unsent.clear();
  lane->sent = lane->payload = 0;
  lane->replies_received = 0;
  lane->in_payload = false;
  return pieces;
}

// The connection failed. With pieces in flight, or with `reconnect`, the peer is checked.
void TcpTransport::Break(Lane* lane, const char* reason, bool reconnect) {
  Peer* peer = lane->peer;
  List<Piece> pieces = CloseLane(lane, LaneState::kIdle);
  const bool others = std::any_of(peer->lanes.begin(), peer->lanes.end(), [lane](const auto& other) {
    return other.get() != lane && other->state != LaneState::kLost;
  });
  if (!pieces.empty() || reconnect) {
    LOG_INFO("tcp peer %s: link to %s broken (%s), checking whether the peer is alive", peer->text.c_str(),
             ToText(lane->remote).c_str(), reason);
    StartConnecting(lane, Now());
  }
  while (!pieces.empty()) {
    Piece* piece = pieces.Pop();
    const bool repeat = piece->operation->kind == OperationKind::kGet && others && !peer->gone();
    if (repeat && ++piece->breaks <= kLanesMax)
      peer->redo.Push(piece);
    else
      FinishPiece(peer, piece, Code::kLinkFailed);
  }
  Resolve(peer);
}

// The lane is left out until the peer is disconnected.
void TcpTransport::Lose(Lane* lane, const char* reason) {
  Peer* peer = lane->peer;
  lane->reason = reason;
  CloseLane(lane, LaneState::kLost);
  for (const auto& other : peer->lanes) {
    if (other->state != LaneState::kUp || other->doubted) continue;
    other->probe.Start(other->local->address, other->remote, Now());
    other->doubted = true;
    doubted_++;
  }
  const bool all = std::all_of(peer->lanes.begin(), peer->lanes.end(),
                               [](const auto& each) { return each->state == LaneState::kLost; });
  if (!all) {
    LOG_WARNING("tcp peer %s: left out lane to %s: %s", peer->text.c_str(), ToText(lane->remote).c_str(),
                reason);
    return Resolve(peer);
  }
  LOG_WARNING("tcp peer %s: gone: %s", peer->text.c_str(), reason);
  GiveUp(peer, PeerState::kGone);
}

// Sets the peer's state from those of its lanes, and ends the failed operations once the peer was checked.
void TcpTransport::Resolve(Peer* peer) {
  if (peer->gone() || peer->closing()) return;
  const auto any = [peer](auto predicate) {
    return std::any_of(peer->lanes.begin(), peer->lanes.end(),
                       [&](const auto& lane) { return predicate(*lane); });
  };
  const bool up = any([](const Lane& lane) { return lane.state == LaneState::kUp; });
  const bool work = !peer->queue.empty() || !peer->redo.empty();
  if (!up && (work || !peer->broken.empty()))
    for (const auto& lane : peer->lanes)
      if (lane->state == LaneState::kIdle) {
        StartConnecting(lane.get(), Now());  // may lose it, and call this again
        if (peer->gone()) return;
      }
  const bool connecting = any([](const Lane& lane) { return lane.state == LaneState::kConnecting; });
  peer->state = up ? PeerState::kUp : connecting ? PeerState::kConnecting : PeerState::kIdle;
  if (!up)
    active_.Remove(peer);
  else if (work)
    active_.Add(peer);
  const bool checking = any(
      [](const Lane& lane) { return lane.doubted || (lane.state == LaneState::kConnecting && lane.was_up); });
  if (!up || checking) return;
  while (!peer->broken.empty()) operations_.Finish(peer->broken.Pop(), Code::kLinkFailed);
}

void TcpTransport::GiveUp(Peer* peer, PeerState state) {
  active_.Remove(peer);
  peer->state = state;
  for (const auto& lane : peer->lanes) {
    List<Piece> pieces = CloseLane(lane.get(), LaneState::kLost);
    while (!pieces.empty()) FinishPiece(peer, pieces.Pop(), Code::kPeerGone);
  }
  while (!peer->redo.empty()) FinishPiece(peer, peer->redo.Pop(), Code::kPeerGone);
  while (!peer->broken.empty()) operations_.Finish(peer->broken.Pop(), Code::kPeerGone);
  while (!peer->queue.empty()) {
    Operation* operation = peer->queue.head();
    operation->code = Code::kPeerGone;
    peer->queue.Pop();
    Settle(peer, operation);
  }
}

// Afterwards no byte from the peer reaches this node's memory: its connections are closed here, and a new one is
// refused until Connect() names it.
void TcpTransport::Disconnect(PeerId id) {
  Peer* peer = Connected(id);
  if (peer == nullptr) return;
  GiveUp(peer, PeerState::kClosing);
  const uint64_t instance = peer->remote.instance;
  const std::unique_ptr<Peer> removed = RemovePeer(id);
  std::erase_if(unsent_, [&](const Lane* lane) { return lane->peer == peer; });
  for (auto& lane : removed->lanes) closed_.push_back(std::move(lane));
  const bool connected_twice = std::any_of(peers_.begin(), peers_.end(), [instance](const auto& entry) {
    return entry.second->remote.instance == instance;
  });
  if (!connected_twice) admission_.Depart(instance);
  CloseAll([instance](const Inbound& each) { return each.instance == instance; });
}

}  // namespace ropeteam::tcp
