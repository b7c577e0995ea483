// SPDX-License-Identifier: Apache-2.0
//
// Connects to peers, checks them after a failure, and disconnects them. The states are in internal.h.

#include <algorithm>

#include "core/base/log.h"
#include "transport/ucx/internal.h"

namespace ropeteam::ucx {
namespace {

// A failed hello is tried again after this long, then each time after three times as long …
constexpr TimeUs kHelloRetryUs = 1'000;
// … and after this many tries the peer counts as gone. The pauses are 1, 3, 9 and 27 ms.
constexpr uint32_t kHelloTriesMax = 5;
// A peer that does not answer may be busy, or its host may be gone. A peer that was up a moment ago gets less
// time.
constexpr TimeUs kHelloDeadlineUs = 5'000'000;
constexpr TimeUs kHelloDeadlineAfterBreakUs = 1'000'000;

}  // namespace

Result<PeerId> UcxTransport::Connect(const std::string& bytes) {
  auto peer = std::make_unique<Peer>();
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &peer->remote));
  peer->transport = this;
  char text[32];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(peer->remote.instance));
  peer->text = text;
  return AddPeer(std::move(peer));
}

Status UcxTransport::DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const {
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &remote->key));
  if (remote->key.instance != peer.remote.instance) return front::ForeignKey(peer.text);
  remote->length = remote->key.length;
  return OkStatus();
}

void UcxTransport::StartConnecting(Peer* peer, TimeUs now) {
  peer->state = PeerState::kConnecting;
  peer->hello_posted = peer->hello_answered = false;
  peer->tries = 0;
  peer->connect_start = rounds_.time();
  peer->hello_next = now;
  peer->failed = false;
  if (!peer->watch.watching()) peer->watch.Start(peer->remote.process, peer->remote.instance);
  suspects_ = true;
}

Status UcxTransport::OpenEndpoint(Peer* peer) {
  if (cma_ != nullptr && !peer->remote.cma.empty()) peer->cma = cma_->Connect(peer->remote.cma);
  if (peer->cma != nullptr) return OkStatus();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer->remote.name.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = OnEndpointError;
  params.err_handler.arg = peer;
  peer->wired = false;
  const ucs_status_t status = ucp_ep_create(worker_.get(), &params, &peer->endpoint);
  if (status != UCS_OK) {
    peer->endpoint = nullptr;
    return Error(Code::kLinkFailed, "ucp_ep_create: %s", ucs_status_string(status));
  }
  const ucs_status_t unpacked =
      ucp_ep_rkey_unpack(peer->endpoint, peer->remote.hello_key.data(), &peer->hello_key);
  if (unpacked != UCS_OK) {
    peer->hello_key = nullptr;
    return Error(Code::kLinkFailed, "ucp_ep_rkey_unpack: %s", ucs_status_string(unpacked));
  }
  return OkStatus();
}

ucp_rkey_h UcxTransport::KeyOf(Peer* peer, RemoteRegion* remote) {
  if (remote->handle != nullptr) return remote->handle;
  const ucs_status_t status = ucp_ep_rkey_unpack(peer->endpoint, remote->key.key.data(), &remote->handle);
  if (status == UCS_OK) return remote->handle;
  LOG_WARNING("ucx peer %s: its region cannot be reached: %s", peer->text.c_str(), ucs_status_string(status));
  return remote->handle = nullptr;
}

void UcxTransport::OnEndpointError(void* argument, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  auto* peer = static_cast<Peer*>(argument);
  peer->wired = true;
  if (peer->parked) return;
  LOG_DEBUG("ucx peer %s: endpoint failed: %s", peer->text.c_str(), ucs_status_string(status));
  peer->transport->Suspect(peer);
}

// Closes by force: UCX cancels what was posted and returns it from its progress. Until then the peer is
// draining.
void UcxTransport::CloseEndpoint(Peer* peer) {
  peer->hello_answered = false;
  if ((peer->endpoint == nullptr && peer->cma == nullptr) || peer->parked) return;
  // Only network cards connect by datagrams.
  if (peer->endpoint != nullptr && !peer->wired && capabilities_.rdma && !ClosesInWireup()) return Park(peer);
  peer->draining = suspects_ = true;
  if (peer->endpoint == nullptr) return;  // cma's operations end by themselves
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* handle = ucp_ep_close_nbx(peer->endpoint, &param);
  peer->endpoint = nullptr;
  if (UCS_PTR_IS_PTR(handle))
    peer->close_request = handle;
  else if (UCS_PTR_IS_ERR(handle))
    LOG_WARNING("ucx peer %s: ucp_ep_close_nbx: %s", peer->text.c_str(),
                ucs_status_string(UCS_PTR_STATUS(handle)));
}

// The endpoint stays open, so UCX may still write to the peer's hello. Nothing else is posted before the
// hello is answered, so UCX holds no buffer of an operation.
void UcxTransport::Park(Peer* peer) {
  LOG_DEBUG("ucx peer %s: its endpoint cannot be closed while it is being connected, and is left open",
            peer->text.c_str());
  peer->parked = true;
  if (peer->hello_posted) ReleaseRequest(peer->hello_request);
  peer->hello_posted = false;
}

// UCX 1.13 does not return every flush: with the endpoint it drops the flushes that wait for a confirmation
// over shared memory. A flush refers to no memory of ours, so their puts can settle here. If the callback
// comes after all, it finds a request without a peer.
void UcxTransport::OrphanFlushes(Peer* peer) {
  while (!peer->flushing.empty()) {
    Request* request = peer->flushing.back();
    List<Operation> flushed = request->flushed;
    request->flushed = List<Operation>();
    ReleaseRequest(request);
    while (!flushed.empty()) {
      Operation* put = flushed.Pop();
      put->requests--;
      Settle(peer, put, Code::kLinkFailed);
    }
  }
}

// Whether UCX has returned all requests of this peer. If so, releases what belonged to its endpoint.
bool UcxTransport::Drained(Peer* peer) {
  if (peer->close_request != nullptr && ucp_request_check_status(peer->close_request) != UCS_INPROGRESS) {
    ucp_request_free(peer->close_request);
    peer->close_request = nullptr;
  }
  if (peer->close_request != nullptr || peer->fragments > 0 || peer->hello_posted) return false;
  peer->cma.reset();
  OrphanFlushes(peer);
  if (peer->hello_key != nullptr) ucp_rkey_destroy(peer->hello_key);
  peer->hello_key = nullptr;
  remotes_.ForEach(peer->id, [](RemoteRegion* remote) {
    if (remote->handle != nullptr) ucp_rkey_destroy(remote->handle);
    remote->handle = nullptr;
  });
  peer->draining = false;
  return true;
}

void UcxTransport::StepPeers(TimeUs now) {
  suspects_ = false;
  unsettled_ = 0;
  std::vector<Peer*> finished;
  for (auto& [id, peer] : peers_) {
    StepPeer(peer.get(), now);
    if (peer->state == PeerState::kClosing && !peer->draining) finished.push_back(peer.get());
    if (peer->draining || peer->state == PeerState::kConnecting) unsettled_++;
  }
  for (Peer* peer : finished) FinishDisconnect(peer);
}

void UcxTransport::StepPeer(Peer* peer, TimeUs now) {
  const bool drained = peer->draining && Drained(peer);
  const bool judged = peer->state == PeerState::kConnecting || peer->state == PeerState::kUp ||
                      peer->state == PeerState::kBroken;
  if (!judged) return;
  // A peer without work is not checked: nothing waits for the outcome. Its next operation makes the check
  // due.
  const bool working = peer->requests > 0 || !peer->queue.empty() || !peer->unflushed.empty() ||
                       !peer->broken.empty() || peer->failed || peer->draining;
  if (working && peer->watch.Dead()) return SetGone(peer, "its process has ended");
  if (peer->failed) {
    peer->failed = false;
    if (peer->state == PeerState::kUp) return BreakEndpoint(peer);
    if (peer->state == PeerState::kConnecting && !peer->draining) {
      TimeUs wait = kHelloRetryUs;
      for (uint32_t i = 0; i < peer->tries; i++) wait *= 3;
      peer->tries++;
      peer->hello_next = now + wait;
      CloseEndpoint(peer);
    }
  }
  if (drained && peer->state == PeerState::kBroken) StartConnecting(peer, now);
  if (peer->state == PeerState::kConnecting) StepConnecting(peer, now);
}

void UcxTransport::BreakEndpoint(Peer* peer) {
  LOG_INFO("ucx peer %s: link broken, checking whether the peer is alive", peer->text.c_str());
  active_.Remove(peer);
  peer->state = PeerState::kBroken;
  peer->reconnecting = true;
  CloseEndpoint(peer);
  // The next endpoint would not confirm what went over this one.
  if (!peer->queue.empty() && peer->queue.head()->cut > 0)
    Settle(peer, peer->queue.head(), Code::kLinkFailed);
  while (!peer->unflushed.empty()) {
    Operation* operation = peer->unflushed.Pop();
    operation->gathered = false;
    Settle(peer, operation, Code::kLinkFailed);
  }
  peer->unflushed_bytes = 0;
}

void UcxTransport::StepConnecting(Peer* peer, TimeUs now) {
  const TimeUs counted = rounds_.Advance(now);
  if (peer->hello_answered) {
    if (peer->hello.magic == kHelloMagic && peer->hello.instance == peer->remote.instance)
      SetUp(peer);
    else
      SetGone(peer, "another instance uses its address");
    return;
  }
  if (peer->tries >= kHelloTriesMax) return SetGone(peer, "it cannot be reached");
  // If the process of a peer on this host is alive, the peer is busy: no link between hosts can have failed.
  const bool known = peer->reconnecting && !peer->watch.watching();
  if (counted - peer->connect_start > (known ? kHelloDeadlineAfterBreakUs : kHelloDeadlineUs))
    return SetGone(peer, "it does not answer");
  if (!peer->draining && !peer->hello_posted && now >= peer->hello_next) PostHello(peer, now);
}

void UcxTransport::PostHello(Peer* peer, TimeUs /*now*/) {
  if (const Status opened = OpenEndpoint(peer); !opened.ok()) {
    LOG_WARNING("ucx peer %s: %s", peer->text.c_str(), opened.message().c_str());
    return Suspect(peer);
  }
  peer->hello = Hello{};
  peer->hello_posted = true;
  Request* request = NewRequest(peer, RequestKind::kHello);
  peer->hello_request = request;
  Post(peer, request, /*put=*/false, &peer->hello, sizeof peer->hello, peer->remote.hello_address,
       peer->hello_key);
}

void UcxTransport::SetUp(Peer* peer) {
  if (peer->reconnecting)
    LOG_WARNING("ucx peer %s: link failed and was re-established", peer->text.c_str());
  else
    LOG_INFO("ucx peer %s: lanes %s", peer->text.c_str(),
             peer->cma != nullptr ? "cma/memory" : LanesOf(peer->endpoint).c_str());
  peer->state = PeerState::kUp;
  peer->hello_answered = false;
  peer->wired = true;
  while (!peer->broken.empty()) {
    Operation* operation = peer->broken.Pop();
    Complete(operation, operation->code);
  }
  if (!peer->queue.empty()) active_.Add(peer);
}

void UcxTransport::SetGone(Peer* peer, const char* reason) {
  LOG_WARNING("ucx peer %s: gone: %s", peer->text.c_str(), reason);
  GiveUp(peer, PeerState::kGone);
}

void UcxTransport::GiveUp(Peer* peer, PeerState state) {
  active_.Remove(peer);
  peer->state = state;
  CloseEndpoint(peer);
  peer->watch.Stop();
  while (!peer->broken.empty()) Complete(peer->broken.Pop(), Code::kPeerGone);
  while (!peer->queue.empty()) Settle(peer, peer->queue.head(), Code::kPeerGone);
  while (!peer->unflushed.empty()) {
    Operation* operation = peer->unflushed.Pop();
    operation->gathered = false;
    Settle(peer, operation, Code::kPeerGone);
  }
  peer->unflushed_bytes = 0;
}

void UcxTransport::Disconnect(PeerId id) {
  Peer* peer = Connected(id);
  if (peer == nullptr) return;
  GiveUp(peer, PeerState::kClosing);
  suspects_ = true;
}

void UcxTransport::FinishDisconnect(Peer* peer) {
  ROPETEAM_CHECK(peer->requests == 0 && peer->broken.empty() && !peer->listed);
  std::unique_ptr<Peer> removed = RemovePeer(peer->id);
  if (removed->parked) parked_.push_back(std::move(removed));
}

}  // namespace ropeteam::ucx
