// SPDX-License-Identifier: Apache-2.0
//
// Connects to peers, checks them after a failure, and disconnects them. The states are in internal.h.

#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/base/log.h"
#include "transport/ofi/hang_up.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

// If a first connection takes longer, a bare TCP connection probes whether a process listens there. Most are
// up in 2 ms.
constexpr TimeUs kProbeAfterUs = 3'000;
// A failed hello is tried again after this long.
constexpr TimeUs kHelloRetryUs = 2'000;
// The interval of reading the answer to a knock. The peer's loop needs one round to give it.
constexpr TimeUs kAnswerRetryUs = 100;
// A peer that has disconnected this node does not answer. It may connect to this node again, so the knock is
// repeated.
constexpr TimeUs kKnockAgainUs = 20'000;
// The timeout if the peer's kernel answers but its program makes no progress: it may be busy.
constexpr TimeUs kHelloDeadlineUs = 5'000'000;
// The timeouts if nothing answers at all. transport.h promises that a peer that was up a moment ago is
// reported gone within 100 ms. A first contact may have to wait for ARP and a lost SYN.
constexpr TimeUs kSilenceAfterBreakUs = 80'000;
constexpr TimeUs kSilenceAtFirstUs = 1'500'000;
static_assert(kSilenceAfterBreakUs < 100'000);
static_assert(front::kRoundMaxUs < kSilenceAfterBreakUs / 2);  // one late round does not end a peer
// A connection that was shut down returns everything within this time: a socket's buffer is read in 1 to 2
// ms.
constexpr TimeUs kHangUpUs = 50'000;
// At least this many rounds are made. On a busy machine the time may pass while the thread does not run, and
// closing an endpoint too early ends the process (hang_up.h). tcp reads from at most 100 sockets in a round.
constexpr size_t kHangUpRounds = 1'000;
// The pause after a round of Fence() that found nothing to read. A round reads a file of /proc for each queue
// and queries each connection's peer.
constexpr TimeUs kFenceStepUs = 100;
constexpr size_t kFenceRounds = 100;  // as kHangUpRounds
// The timeout without an IP address to probe: only the hello shows whether the peer is alive.
constexpr TimeUs kHelloDeadlineUnprobedUs = 1'000'000;

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

// An address that cannot be decoded belongs to no peer.
void OfiTransport::SetPeers(const std::vector<std::string>& addresses) {
  std::unordered_set<uint64_t> instances;
  for (const std::string& bytes : addresses)
    if (EndpointAddress address; Decode(bytes, &address).ok()) instances.insert(address.instance);
  Admit(instances);
}

void OfiTransport::Admit(const std::unordered_set<uint64_t>& instances) {
  if (grants_ != nullptr) grants_->Admit(instances);
}

Result<PeerId> OfiTransport::Connect(const std::string& bytes) {
  EndpointAddress remote;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &remote));
  if (remote.provider != capabilities_.provider)
    return Error(Code::kInvalidArgument,
                 "the peer uses provider \"%s\", this node \"%s\"; they must be the same",
                 remote.provider.c_str(), capabilities_.provider.c_str());
  auto peer = std::make_unique<Peer>();
  peer->probe_target = IpAddressOf(remote);
  if (remote.address_format != info_->addr_format || (listen_.length != 0 && peer->probe_target.length == 0))
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
  if (grants_ != nullptr) grants_->Readmit(remote.instance);
  peer->text = peer->probe_target.length != 0 ? ToText(peer->probe_target) : remote.provider;
  peer->remote = std::move(remote);
  peer->slot = slots_free_.back();
  slots_free_.pop_back();
  return AddPeer(std::move(peer));
}

Status OfiTransport::DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const {
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &remote->key));
  if (remote->key.instance != peer.remote.instance) return front::ForeignKey(peer.text);
  if (peer.remote.grants) remote->key.key = KeyOf(remote->key.key, instance_);
  remote->length = remote->key.length;
  return OkStatus();
}

void OfiTransport::Suspect(Peer* peer) {
  if (peer->failed) return;
  peer->failed = true;
  failed_.push_back(peer->id);
}

// Starts to check whether the peer is alive. This cancels the operations that are outstanding to it.
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

// A peer that does not answer may be busy or stopped. If its kernel answers, the link is kept; if not, the
// link counts as broken.
void OfiTransport::CheckSilent(TimeUs now) {
  if (now < silence_next_) return;
  silence_next_ = now + kSilenceStepUs;
  const TimeUs silence = TimeUs{config_.silence_ms} * 1'000;
  for (Peer* peer : linked_) {
    if (peer->state != PeerState::kUp || peer->failed) continue;
    const bool silent = peer->outstanding > 0 && now - peer->heard_at > silence / 2;
    if (!silent) {
      peer->probe.Stop();
      continue;
    }
    if (!peer->probe.started()) peer->probe.Start(listen_, peer->probe_target, now);
    const PeerProbe::Answer answer = peer->probe.Step();
    // The time runs from the probe's start, and its answer is read first. So a pause of this thread is not taken for
    // the peer's silence.
    const bool unanswered = now - peer->probe.start_us() > silence / 2;
    if (answer == PeerProbe::Answer::kAlive) {
      peer->probe.Stop();
      peer->heard_at = now;
    } else if (answer == PeerProbe::Answer::kRefused || unanswered) {
      LOG_WARNING("ofi peer %s: silent for %llu ms with %u operations outstanding", peer->text.c_str(),
                  static_cast<unsigned long long>((now - peer->heard_at) / 1'000), peer->outstanding);
      peer->probe.Stop();
      Suspect(peer);
    }
  }
}

void OfiTransport::StartConnecting(Peer* peer, TimeUs now) {
  peer->state = PeerState::kConnecting;
  connecting_++;
  peer->hello_posted = peer->hello_answered = peer->met = false;
  peer->connect_start = rounds_.time();
  peer->hello_next = now;
  peer->heard = false;
  peer->blocked_since = 0;
}

void OfiTransport::BreakLink(Peer* peer, TimeUs now) {
  if (peer->state == PeerState::kConnecting) {
    CloseLink(peer);
    peer->hello_next = now + kHelloRetryUs;
    return;
  }
  LOG_INFO("ofi peer %s: link broken, checking whether the peer is alive", peer->text.c_str());
  active_.Remove(peer);
  CloseLink(peer);
  peer->reconnecting = true;
  StartConnecting(peer, now);
}

// Shuts down the connection, so that no bytes arrive while the endpoint is being closed (hang_up.h). Bytes
// that have arrived are read first. Then the provider returns everything that was outstanding.
void OfiTransport::EndConnection(Peer* peer) {
  const Queue& queue = LinkOf(peer).queue;
  if (peer->fragments == nullptr || queue.fd < 0) return;
  if (HangUp(queue.fd, peer->probe_target) == 0) return;
  const TimeUs deadline = Now() + kHangUpUs;
  for (size_t round = 0; peer->fragments != nullptr && (round < kHangUpRounds || Now() < deadline); round++)
    ReadCompletions(queue, SIZE_MAX);
}

// Afterwards the device holds no fragment of this peer. The exception is a shared endpoint, which returns
// fragments only by their completions.
void OfiTransport::CloseLink(Peer* peer) {
  peer->hello_posted = peer->hello_answered = peer->met = false;
  if (!peer->link.endpoint) return;
  EndConnection(peer);
  // fi_close() of a connected endpoint drops the connection and writes a cancelled completion for each
  // outstanding fragment. If it failed, the device would still own the buffers, and they could not be
  // returned.
  const int result = fi_close(&peer->link.endpoint.release()->fid);
  ROPETEAM_CHECK(result == 0);
  ReadCompletions(peer->link.queue, SIZE_MAX);
  while (peer->fragments != nullptr) FinishFragment(peer->fragments, Code::kLinkFailed);
  peer->link = Link{};
  linked_.erase(std::find(linked_.begin(), linked_.end(), peer));
  peer->failed = false;
}

void OfiTransport::StepPeers(TimeUs now) {
  if (connecting_ == 0) return;
  for (auto& [id, peer] : peers_)
    if (peer->state == PeerState::kConnecting) StepConnecting(peer.get(), now);
}

void OfiTransport::StepConnecting(Peer* peer, TimeUs now) {
  const TimeUs counted = rounds_.Advance(now);
  if (peer->hello_answered && HelloSays(peer, now)) return;
  const bool drained = peer->outstanding == 0 || peer->hello_posted;
  if (!drained) peer->connect_start = counted;  // a shared endpoint may return fragments at any time
  if (peer->met && !peer->failed && now >= peer->knock_next) SendKnock(peer, now);
  if (!peer->hello_posted && drained && !peer->failed && now >= peer->hello_next) PostHello(peer, now);
  const bool probed = probes_ && peer->probe_target.length != 0;
  if (probed && !peer->probe.started() && (peer->reconnecting || counted - peer->connect_start >= kProbeAfterUs))
    peer->probe.Start(listen_, peer->probe_target, now);
  if (peer->probe.started()) {
    const PeerProbe::Answer answer = peer->probe.Step();
    if (answer == PeerProbe::Answer::kRefused) return SetGone(peer, "no process listens at its address");
    if (answer == PeerProbe::Answer::kAlive) peer->heard = true;
  }
  TimeUs deadline = peer->reconnecting ? kSilenceAfterBreakUs : kSilenceAtFirstUs;
  if (peer->heard || (!probed && !peer->reconnecting)) deadline = kHelloDeadlineUs;
  if (!probed && peer->reconnecting) deadline = kHelloDeadlineUnprobedUs;
  if (counted - peer->connect_start <= deadline) return;
  SetGone(peer, peer->met     ? "it has disconnected this node and grants no access"
                : peer->heard ? "it makes no progress"
                              : "no answer");
}

// Handles what was read from the peer. True: the peer is no longer in kConnecting.
bool OfiTransport::HelloSays(Peer* peer, TimeUs now) {
  const HelloRead& read = hellos_read_[peer->slot];
  peer->hello_answered = false;
  if (!peer->met) {
    if (read.hello.magic != kHelloMagic || read.hello.instance != peer->remote.instance) {
      SetGone(peer, "another instance uses its address");
      return true;
    }
    peer->met = peer->remote.grants;
    peer->knock_next = now;
  } else if (!Answered(read.answers, instance_)) {
    peer->hello_next = now + kAnswerRetryUs;
  } else {
    peer->met = false;
  }
  if (!peer->met) SetUp(peer);
  return !peer->met;
}

// Requests the keys to the peer's memory.
void OfiTransport::SendKnock(Peer* peer, TimeUs now) {
  Knock knock;
  knock.magic = kKnockMagic;
  knock.instance = instance_;
  const std::string source = SourceTo(peer->link.queue.fd, peer->probe_target);
  if (source.size() <= sizeof knock.source) std::memcpy(knock.source, source.data(), source.size());
  const ssize_t result = fi_inject(EndpointOf(peer), &knock, sizeof knock, peer->address);
  if (result == 0) peer->knock_next = now + kKnockAgainUs;
  if (result != 0 && result != -FI_EAGAIN) Suspect(peer);
}

void OfiTransport::PostHello(Peer* peer, TimeUs now) {
  if (!shared_ && !peer->link.endpoint) {
    const Status opened = OpenEndpoint(/*listening=*/false, &peer->link);
    if (!opened.ok()) {
      LOG_WARNING("ofi peer %s: %s", peer->text.c_str(), opened.ToString().c_str());
      peer->link.endpoint.reset();
      peer->link = Link{};
      peer->hello_next = now + kHelloRetryUs;
      return;
    }
    linked_.push_back(peer);
  }
  HelloRead* read = &hellos_read_[peer->slot];
  void* into = &read->hello;
  size_t length = sizeof read->hello;
  uint64_t from = peer->remote.hello_address, key = peer->remote.hello_key;
  if (peer->met) {
    into = read->answers;
    length = sizeof read->answers;
    from = AnswerPlace(instance_) * sizeof read->answers[0];
    key = kAnswersKey;
  }
  std::memset(into, 0, length);
  Fragment* fragment = NewFragment(peer, nullptr, length);
  const ssize_t result = fi_read(EndpointOf(peer), into, length, fi_mr_desc(hellos_read_memory_.get()),
                                 peer->address, from, key, &fragment->context);
  if (result == 0) {
    peer->hello_posted = true;
    return;
  }
  FreeFragment(fragment);
  if (result == -FI_EAGAIN) return;  // the connection is being made, and this call drives it
  // For example EINVAL: the network cannot be reached from the address that we listen on. The endpoint is not
  // used again, because ofi_rxm keeps it half-open.
  LOG_DEBUG("ofi peer %s: connecting: %s", peer->text.c_str(), fi_strerror(static_cast<int>(-result)));
  Suspect(peer);
}

void OfiTransport::SetUp(Peer* peer) {
  if (peer->reconnecting) LOG_WARNING("ofi peer %s: link failed and was re-established", peer->text.c_str());
  peer->state = PeerState::kUp;
  peer->hello_answered = false;
  connecting_--;
  peer->probe.Stop();
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
  peer->probe.Stop();
  CloseLink(peer);
  while (!peer->broken.empty()) Complete(peer->broken.Pop(), Code::kPeerGone);
  while (!peer->queue.empty()) FailOperation(peer, peer->queue.head(), Code::kPeerGone);
}

void OfiTransport::Disconnect(PeerId id) {
  Peer* peer = Connected(id);
  if (peer == nullptr) return;
  GiveUp(peer, PeerState::kClosing);
  if (grants_ != nullptr) Fence(*peer);
  if (peer->outstanding == 0) FinishDisconnect(peer);
}

// Afterwards no byte from the peer reaches our memory. First its keys are revoked, so that no new fragment
// begins. A fragment may still be arriving, so every connection that does not belong to a peer with access is
// then ended. Bytes that libfabric has read ahead are copied until it closes the socket.
void OfiTransport::Fence(const Peer& departed) {
  const uint64_t instance = departed.remote.instance;
  grants_->Revoke(instance);
  const auto unowned = [this](const std::string& source) { return !grants_->Owns(source); };
  const TimeUs deadline = Now() + kHangUpUs;
  size_t open = 0, round = 0;
  while ((open = Cut(listener_.queue.fd, unowned)) > 0 && (round++ < kFenceRounds || Now() < deadline))
    if (ReadCompletions(listener_.queue, kReadsPerPoll) == 0) usleep(kFenceStepUs);
  if (open > 0)
    LOG_WARNING("ofi peer %s: %zu connections that were ended are still open", departed.text.c_str(), open);
  const bool connected_twice = std::any_of(peers_.begin(), peers_.end(), [instance](const auto& entry) {
    return !entry.second->closing() && entry.second->remote.instance == instance;
  });
  if (connected_twice) grants_->Readmit(instance);
}

void OfiTransport::FinishDisconnect(Peer* peer) {
  ROPETEAM_CHECK(peer->outstanding == 0 && peer->broken.empty() && !peer->listed);
  // The address is removed after the endpoints that used it. A failure leaks an entry of the table.
  if (const int result = fi_av_remove(addresses_.get(), &peer->address, 1, 0); result != 0)
    LOG_WARNING("ofi peer %s: fi_av_remove: %s", peer->text.c_str(), fi_strerror(-result));
  slots_free_.push_back(peer->slot);
  RemovePeer(peer->id);
}

}  // namespace ropeteam::ofi
