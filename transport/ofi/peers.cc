// SPDX-License-Identifier: Apache-2.0
//
// Connects to peers, checks them after a failure, and disconnects them. The states are in internal.h.

#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/base/log.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

// A failed hello is tried again after this long.
constexpr TimeUs kHelloRetryUs = 2'000;
// The timeouts of a peer whose hello does not arrive. One that was up a moment ago answers at once, if it lives: a card
// or the peer's loop does so. At first contact the peer's program may be busy.
constexpr TimeUs kHelloDeadlineAfterBreakUs = 1'000'000;
constexpr TimeUs kHelloDeadlineAtFirstUs = 5'000'000;
static_assert(front::kRoundMaxUs < kHelloDeadlineAfterBreakUs / 2);  // one late round does not end a peer

// The name of an endpoint as an IP address; length 0: it is not an IP address.
IpAddress IpAddressOf(const EndpointAddress& remote) {
  IpAddress address;
  const bool v4 = remote.address_format == FI_SOCKADDR_IN && remote.name.size() == sizeof(sockaddr_in);
  const bool v6 = remote.address_format == FI_SOCKADDR_IN6 && remote.name.size() == sizeof(sockaddr_in6);
  if (!v4 && !v6) return address;
  std::memcpy(&address.storage, remote.name.data(), remote.name.size());
  if (address.storage.ss_family == (v4 ? AF_INET : AF_INET6))
    address.length = static_cast<socklen_t>(remote.name.size());
  return address;
}

}  // namespace

Result<PeerId> OfiTransport::Connect(const std::string& bytes) {
  EndpointAddress remote;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &remote));
  if (remote.provider != capabilities_.provider)
    return Error(Code::kInvalidArgument,
                 "the peer uses provider \"%s\", this node \"%s\"; they must be the same",
                 remote.provider.c_str(), capabilities_.provider.c_str());
  auto peer = std::make_unique<Peer>();
  const IpAddress listens = IpAddressOf(remote);
  if (remote.address_format != info_->addr_format || (listen_.length != 0 && listens.length == 0))
    return Error(Code::kInvalidArgument, "the peer's address format is %u, this node's %u",
                 remote.address_format, info_->addr_format);
  // A provider reads as many bytes as its own names have.
  if (remote.address_format != FI_ADDR_STR && remote.name.size() != name_bytes_)
    return Error(Code::kInvalidArgument, "the peer's endpoint name has %zu bytes, this node's %zu",
                 remote.name.size(), name_bytes_);
  if (slots_free_.empty())
    return Error(Code::kNoSpace, "%zu peers are connected, limit %u", peers_.size(), kOfiPeersMax);
  const int inserted = fi_av_insert(addresses_.get(), remote.name.data(), 1, &peer->address, 0, nullptr);
  if (inserted != 1)
    return Error(Code::kInvalidArgument, "provider \"%s\" refuses the peer's address",
                 remote.provider.c_str());
  peer->text = listens.length != 0 ? ToText(listens) : remote.provider;
  peer->remote = std::move(remote);
  peer->slot = slots_free_.back();
  slots_free_.pop_back();
  return AddPeer(std::move(peer));
}

Status OfiTransport::DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const {
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &remote->key));
  if (remote->key.instance != peer.remote.instance) return front::ForeignKey(peer.text);
  remote->length = remote->key.length;
  return OkStatus();
}

void OfiTransport::Suspect(Peer* peer) {
  if (peer->failed) return;
  peer->failed = true;
  failed_.push_back(peer->id);
}

// Starts to check whether the peer is alive. The check waits until nothing is outstanding to it.
void OfiTransport::Check(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  if (found->second->state == PeerState::kIdle) StartConnecting(found->second.get(), Now());
  if (found->second->state == PeerState::kUp) Suspect(found->second.get());
}

PeerState OfiTransport::StateOf(PeerId id) const {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return PeerState::kGone;
  const bool looking = found->second->failed && found->second->state == PeerState::kUp;
  return looking ? PeerState::kConnecting : found->second->state;
}

const char* OfiTransport::WhyGone(PeerId id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? "disconnected" : found->second->gone_reason;
}

void OfiTransport::CheckFailed(TimeUs now) {
  // Checking one peer may make others fail. These are appended to the list.
  for (size_t i = 0; i < failed_.size(); i++) {
    const auto found = peers_.find(failed_[i]);
    if (found == peers_.end() || !found->second->failed) continue;
    Peer* peer = found->second.get();
    peer->failed = false;
    if (peer->state == PeerState::kUp || peer->state == PeerState::kConnecting)
      BreakLink(peer, now);
    else if (peer->state == PeerState::kClosing && peer->outstanding == 0)
      FinishDisconnect(peer);
  }
  failed_.clear();
}

void OfiTransport::StartConnecting(Peer* peer, TimeUs now) {
  peer->state = PeerState::kConnecting;
  connecting_++;
  peer->hello_posted = peer->hello_answered = false;
  peer->connect_start = rounds_.time();
  peer->hello_next = now;
  peer->blocked_since = 0;
}

void OfiTransport::BreakLink(Peer* peer, TimeUs now) {
  if (peer->state == PeerState::kConnecting) {
    peer->hello_next = now + kHelloRetryUs;
    return;
  }
  LOG_INFO("ofi peer %s: link broken, checking whether the peer is alive", peer->text.c_str());
  active_.Remove(peer);
  peer->reconnecting = true;
  StartConnecting(peer, now);
}

void OfiTransport::StepPeers(TimeUs now) {
  if (connecting_ == 0) return;
  for (auto& [id, peer] : peers_)
    if (peer->state == PeerState::kConnecting) StepConnecting(peer.get(), now);
}

void OfiTransport::StepConnecting(Peer* peer, TimeUs now) {
  const TimeUs counted = rounds_.Advance(now);
  if (peer->hello_answered) {
    const Hello& hello = hellos_read_[peer->slot];
    if (hello.magic == kHelloMagic && hello.instance == peer->remote.instance) return SetUp(peer);
    return SetGone(peer, "another instance uses its address");
  }
  // The provider may give fragments back at any time.
  const bool drained = peer->outstanding == 0 || peer->hello_posted;
  if (!drained) peer->connect_start = counted;
  if (!peer->hello_posted && drained && !peer->failed && now >= peer->hello_next) PostHello(peer);
  const TimeUs deadline = peer->reconnecting ? kHelloDeadlineAfterBreakUs : kHelloDeadlineAtFirstUs;
  if (counted - peer->connect_start > deadline) SetGone(peer, "no answer");
}

void OfiTransport::PostHello(Peer* peer) {
  Hello* into = &hellos_read_[peer->slot];
  *into = Hello{};
  Fragment* fragment = NewFragment(peer, nullptr, sizeof *into);
  const ssize_t result =
      fi_read(endpoint_.get(), into, sizeof *into, fi_mr_desc(hellos_read_memory_.get()), peer->address,
              peer->remote.hello_address, peer->remote.hello_key, &fragment->context);
  if (result == 0) {
    peer->hello_posted = true;
    return;
  }
  FreeFragment(fragment);
  if (result == -FI_EAGAIN) return;  // the connection is being made, and this call drives it
  // For example EINVAL: the network cannot be reached from the address that we listen on.
  LOG_DEBUG("ofi peer %s: connecting: %s", peer->text.c_str(), fi_strerror(static_cast<int>(-result)));
  Suspect(peer);
}

void OfiTransport::SetUp(Peer* peer) {
  if (peer->reconnecting) LOG_WARNING("ofi peer %s: link failed and was re-established", peer->text.c_str());
  peer->state = PeerState::kUp;
  peer->hello_answered = false;
  connecting_--;
  while (!peer->broken.empty()) {
    Operation* operation = peer->broken.Pop();
    Complete(operation, operation->code);
  }
  if (!peer->queue.empty()) active_.Add(peer);
}

void OfiTransport::SetGone(Peer* peer, const char* reason) {
  LOG_WARNING("ofi peer %s: gone: %s", peer->text.c_str(), reason);
  peer->gone_reason = reason;
  GiveUp(peer, PeerState::kGone);
}

void OfiTransport::GiveUp(Peer* peer, PeerState state) {
  if (peer->state == PeerState::kConnecting) connecting_--;
  active_.Remove(peer);
  peer->state = state;
  while (!peer->broken.empty()) Complete(peer->broken.Pop(), Code::kPeerGone);
  while (!peer->queue.empty()) FailOperation(peer, peer->queue.head(), Code::kPeerGone);
}

void OfiTransport::Disconnect(PeerId id) {
  Peer* peer = Connected(id);
  if (peer == nullptr) return;
  GiveUp(peer, PeerState::kClosing);
  if (peer->outstanding == 0) FinishDisconnect(peer);
}

void OfiTransport::FinishDisconnect(Peer* peer) {
  ROPETEAM_CHECK(peer->outstanding == 0 && peer->broken.empty() && !peer->listed);
  // A failure leaks an entry of the table.
  if (const int result = fi_av_remove(addresses_.get(), &peer->address, 1, 0); result != 0)
    LOG_WARNING("ofi peer %s: fi_av_remove: %s", peer->text.c_str(), fi_strerror(-result));
  slots_free_.push_back(peer->slot);
  RemovePeer(peer->id);
}

}  // namespace ropeteam::ofi
