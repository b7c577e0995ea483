// SPDX-License-Identifier: Apache-2.0
//
// From an accepted put or get to its completion. Operations are cut into fragments of operation_bytes, at
// most `depth` at the device for one peer. They are posted round-robin, so that peers share the link.

#include <algorithm>

#include "core/base/log.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

// FI_EAGAIN may also mean that other peers fill the endpoint's queue. So a peer's connection is suspected only after
// this long without outstanding fragments of the peer.
constexpr TimeUs kBlockedUs = 20'000;

unsigned long long Ull(uint64_t value) { return value; }

}  // namespace

Fragment* OfiTransport::NewFragment(Peer* peer, Operation* operation, uint64_t length) {
  Fragment* fragment = fragments_.New();
  fragment->operation = operation;
  fragment->peer = peer;
  fragment->length = length;
  fragment->next = peer->fragments;
  if (peer->fragments != nullptr) peer->fragments->previous = fragment;
  peer->fragments = fragment;
  peer->outstanding++;
  outstanding_++;
  return fragment;
}

void OfiTransport::FreeFragment(Fragment* fragment) {
  Peer* peer = fragment->peer;
  ROPETEAM_CHECK(peer != nullptr && peer->outstanding > 0 && outstanding_ > 0);
  (fragment->previous != nullptr ? fragment->previous->next : peer->fragments) = fragment->next;
  if (fragment->next != nullptr) fragment->next->previous = fragment->previous;
  peer->outstanding--;
  outstanding_--;
  fragment->operation = nullptr;
  fragment->peer = nullptr;
  fragments_.Free(fragment);
}

void OfiTransport::Start(Peer* peer) {
  if (peer->state == PeerState::kIdle) StartConnecting(peer, Now());
  if (peer->state == PeerState::kUp) active_.Add(peer);
}

void OfiTransport::Complete(Operation* operation, Code code) {
  ROPETEAM_CHECK(operation->fragments == 0);
  operations_.Finish(operation, code);
}

// One fragment per turn.
void OfiTransport::Pump() {
  active_.Go([this](Peer* peer) { return PostNext(peer); }, [](Peer* peer) { return peer->queue.empty(); });
}

bool OfiTransport::PostNext(Peer* peer) {
  ROPETEAM_CHECK(peer->state == PeerState::kUp);
  if (peer->failed || peer->queue.empty() || peer->outstanding >= config_.depth) return false;
  Operation* operation = peer->queue.head();
  const uint64_t length = std::min(capabilities_.operation_bytes, operation->length - operation->cut);
  Fragment* fragment = NewFragment(peer, operation, length);
  const ssize_t result = PostFragment(peer, operation, fragment);
  if (result == 0) {
    peer->blocked_since = 0;
    operation->fragments++;
    peer->queue.Cut(length);
    return true;
  }
  FreeFragment(fragment);
  if (result == -FI_EAGAIN) {
    // If fragments are outstanding, their completions make room. Otherwise the connection was lost while
    // idle. ofi_rxm then connects to the process that listens there now, perhaps another instance. Only a
    // hello may do that.
    if (peer->outstanding > 0) return false;
    const TimeUs now = Now();
    if (peer->blocked_since == 0) peer->blocked_since = now;
    if (now - peer->blocked_since > kBlockedUs) Suspect(peer);
    return false;
  }
  LOG_WARNING("ofi peer %s: posting %llu bytes failed: %s", peer->text.c_str(), Ull(length),
              fi_strerror(static_cast<int>(-result)));
  FailOperation(peer, operation, Code::kLinkFailed);
  Suspect(peer);
  return false;
}

ssize_t OfiTransport::PostFragment(Peer* peer, Operation* operation, Fragment* fragment) {
  const RegionKey& key = operation->remote->key;
  iovec local{operation->region->base + operation->local_offset + operation->cut, fragment->length};
  fi_rma_iov remote{key.base + operation->remote_offset + operation->cut, fragment->length, key.key};
  void* descriptor = operation->region->descriptor;
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer->address;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = &fragment->context;
  if (operation->kind == OperationKind::kGet) return fi_readmsg(endpoint_.get(), &message, FI_COMPLETION);
  return fi_writemsg(endpoint_.get(), &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

// The operation fails. It ends when the device has returned its fragments.
void OfiTransport::FailOperation(Peer* peer, Operation* operation, Code code) {
  if (operation->code == Code::kOk) operation->code = code;
  peer->queue.Abandon(operation);
  if (operation->fragments > 0) return;
  if (peer->state == PeerState::kGone || peer->state == PeerState::kClosing)
    Complete(operation, Code::kPeerGone);
  else
    peer->broken.Push(operation);
}

// The device has released the fragment's memory.
void OfiTransport::FinishFragment(Fragment* fragment, Code code) {
  Peer* peer = fragment->peer;
  Operation* operation = fragment->operation;
  FreeFragment(fragment);
  if (operation == nullptr) {
    peer->hello_posted = false;
    peer->hello_answered = code == Code::kOk;
    // It may be the last fragment of a peer that is being disconnected.
    if (code != Code::kOk || peer->state == PeerState::kClosing) Suspect(peer);
    return;
  }
  ROPETEAM_CHECK(operation->fragments > 0);
  operation->fragments--;
  if (code != Code::kOk) Suspect(peer);
  // A provider's error does not say which side failed. For device memory the likely cause is that this node's
  // card cannot access it. If the peer is gone, the operation still ends with kPeerGone.
  if (code == Code::kLinkFailed && !operation->region->exported) code = Code::kIo;
  if (code != Code::kOk || operation->code != Code::kOk)
    FailOperation(peer, operation, code);
  else if (operation->fragments == 0 && !operation->queued)
    Complete(operation, Code::kOk);
  if (peer->state == PeerState::kClosing && peer->outstanding == 0) Suspect(peer);
}

}  // namespace ropeteam::ofi
