// SPDX-License-Identifier: Apache-2.0
//
// From an accepted put or get to its completion: fragments of operation_bytes, at most `depth` at the device
// for one peer, posted in turns so that peers share the link.

#include <algorithm>

#include "core/base/log.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

// Slabs grow to the high-water mark and stay, so that a steady state allocates nothing.
constexpr size_t kOperationsPerSlab = 1024;
constexpr size_t kFragmentsPerSlab = 256;
// With a shared endpoint "again" may also mean that others fill its queue; only after this long with nothing
// of this peer's outstanding is its connection suspected.
constexpr TimeUs kBlockedUs = 20'000;

unsigned long long Ull(uint64_t value) { return value; }

bool InRange(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

}  // namespace

Operation* OfiTransport::NewOperation() {
  if (operations_free_.empty()) {
    operation_slabs_.push_back(std::make_unique<Operation[]>(kOperationsPerSlab));
    for (size_t i = 0; i < kOperationsPerSlab; i++) operations_free_.Push(&operation_slabs_.back()[i]);
  }
  Operation* operation = operations_free_.Pop();
  *operation = Operation{};
  return operation;
}

void OfiTransport::FreeOperation(Operation* operation) { operations_free_.Push(operation); }

Fragment* OfiTransport::NewFragment(Peer* peer, Operation* operation, uint64_t length) {
  if (fragments_free_ == nullptr) {
    fragment_slabs_.push_back(std::make_unique<Fragment[]>(kFragmentsPerSlab));
    for (size_t i = 0; i < kFragmentsPerSlab; i++) {
      Fragment* fresh = &fragment_slabs_.back()[i];
      fresh->next = fragments_free_;
      fragments_free_ = fresh;
    }
  }
  Fragment* fragment = fragments_free_;
  fragments_free_ = fragment->next;
  fragment->operation = operation;
  fragment->peer = peer;
  fragment->length = length;
  fragment->previous = nullptr;
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
  fragment->next = fragments_free_;
  fragments_free_ = fragment;
}

Status OfiTransport::Submit(OperationKind kind, PeerId peer_id, RegionId local, uint64_t local_offset,
                            RemoteRegionId remote, uint64_t remote_offset, uint64_t length,
                            uint64_t context) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second->state == PeerState::kClosing)
    return Error(Code::kInvalidArgument, "peer %u is not connected", peer_id);
  Peer* peer = found->second.get();
  const auto target = remote_regions_.find(remote);
  if (target == remote_regions_.end() || target->second.peer != peer_id)
    return Error(Code::kInvalidArgument, "remote region %u is not of peer %u", remote, peer_id);
  const RegionKey& key = target->second.key;
  if (!InRange(remote_offset, length, key.length))
    return Error(Code::kInvalidArgument, "offset %llu + %llu bytes is outside remote region %u of %llu bytes",
                 Ull(remote_offset), Ull(length), remote, Ull(key.length));
  if (accepted_ >= kOperationsOutstandingMax)
    return Error(Code::kNoSpace, "%zu operations outstanding, limit %zu", accepted_,
                 kOperationsOutstandingMax);

  Region* region = nullptr;
  {
    std::lock_guard lock(regions_mutex_);
    const auto source = regions_.find(local);
    if (source == regions_.end()) return Error(Code::kInvalidArgument, "region %u is not registered", local);
    region = source->second.get();
    if (!InRange(local_offset, length, region->length))
      return Error(Code::kInvalidArgument, "offset %llu + %llu bytes is outside region %u of %llu bytes",
                   Ull(local_offset), Ull(length), local, Ull(region->length));
    region->operations.fetch_add(1);  // under the lock: from here on it cannot be deregistered
  }
  Operation* operation = NewOperation();
  operation->kind = kind;
  operation->peer = peer_id;
  operation->context = context;
  operation->local = region->base + local_offset;
  operation->region = region;
  operation->remote_address = key.base + remote_offset;
  operation->remote_key = key.key;
  operation->length = length;
  accepted_++;
  if (peer->state == PeerState::kGone) {
    Complete(operation, Code::kPeerGone);
  } else if (length == 0) {
    Complete(operation, Code::kOk);  // providers differ on empty operations, so none is posted
  } else {
    operation->queued = true;
    peer->queue.Push(operation);
    if (peer->state == PeerState::kIdle) StartConnecting(peer, Now());
    if (peer->state == PeerState::kUp) List(peer);
  }
  return OkStatus();
}

void OfiTransport::Complete(Operation* operation, Code code) {
  ROPETEAM_CHECK(operation->fragments == 0 && !operation->queued);
  operation->code = code;
  const bool put = operation->kind == OperationKind::kPut;
  (put ? puts_ : gets_).fetch_add(1, std::memory_order_relaxed);
  if (code != Code::kOk)
    failures_.fetch_add(1, std::memory_order_relaxed);
  else
    (put ? put_bytes_ : get_bytes_).fetch_add(operation->length, std::memory_order_relaxed);
  completed_.Push(operation);
}

void OfiTransport::List(Peer* peer) {
  if (peer->listed) return;
  peer->listed = true;
  active_.push_back(peer);
}

void OfiTransport::Unlist(Peer* peer) {
  if (!peer->listed) return;
  peer->listed = false;
  active_.erase(std::find(active_.begin(), active_.end(), peer));
}

// Posts one fragment a turn, round and round, until nobody can post.
void OfiTransport::Pump() {
  size_t idle_turns = 0;
  while (idle_turns < active_.size()) {
    if (active_next_ >= active_.size()) active_next_ = 0;
    Peer* peer = active_[active_next_];
    idle_turns = PostNext(peer) ? 0 : idle_turns + 1;
    if (peer->queue.empty())
      Unlist(peer);  // the next one takes its place
    else
      active_next_++;
  }
}

bool OfiTransport::PostNext(Peer* peer) {
  ROPETEAM_CHECK(peer->state == PeerState::kUp);
  if (peer->failed || peer->queue.empty() || peer->outstanding >= config_.depth) return false;
  Operation* operation = peer->queue.head();
  const uint64_t length = std::min(capabilities_.operation_bytes, operation->length - operation->posted);
  Fragment* fragment = NewFragment(peer, operation, length);
  const ssize_t result = PostFragment(peer, operation, fragment);
  if (result == 0) {
    peer->blocked_since = 0;
    operation->fragments++;
    operation->posted += length;
    if (operation->posted == operation->length) {
      peer->queue.Pop();
      operation->queued = false;
    }
    return true;
  }
  FreeFragment(fragment);
  if (result == -FI_EAGAIN) {
    // With fragments outstanding their completions make room. With none, the connection was lost while idle
    // and ofi_rxm makes another, to whoever listens there now: only a hello may do that.
    if (peer->outstanding > 0) return false;
    const TimeUs now = Now();
    if (peer->blocked_since == 0) peer->blocked_since = now;
    if (!shared_ || now - peer->blocked_since > kBlockedUs) Suspect(peer);
    return false;
  }
  LOG_WARNING("ofi peer %s: posting %llu bytes failed: %s", peer->text.c_str(), Ull(length),
              fi_strerror(static_cast<int>(-result)));
  FailOperation(peer, operation, Code::kLinkFailed);
  Suspect(peer);
  return false;
}

ssize_t OfiTransport::PostFragment(Peer* peer, Operation* operation, Fragment* fragment) {
  iovec local{operation->local + operation->posted, fragment->length};
  fi_rma_iov remote{operation->remote_address + operation->posted, fragment->length, operation->remote_key};
  void* descriptor = operation->region->descriptor;
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer->address;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = &fragment->context;
  if (operation->kind == OperationKind::kGet) return fi_readmsg(EndpointOf(peer), &message, FI_COMPLETION);
  return fi_writemsg(EndpointOf(peer), &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

// The operation will not complete with kOk. What the device still holds of it comes back first.
void OfiTransport::FailOperation(Peer* peer, Operation* operation, Code code) {
  if (operation->code == Code::kOk) operation->code = code;
  if (operation->queued) {
    ROPETEAM_CHECK(peer->queue.head() == operation);  // only the head is partly posted
    peer->queue.Pop();
    operation->queued = false;
  }
  if (operation->fragments > 0) return;
  if (peer->state == PeerState::kGone || peer->state == PeerState::kClosing)
    Complete(operation, Code::kPeerGone);
  else
    peer->broken.Push(operation);
}

// The device has let go of the fragment's memory.
void OfiTransport::FinishFragment(Fragment* fragment, Code code) {
  Peer* peer = fragment->peer;
  Operation* operation = fragment->operation;
  FreeFragment(fragment);
  if (operation == nullptr) {
    peer->hello_posted = false;
    peer->hello_answered = code == Code::kOk;
    if (code != Code::kOk) Suspect(peer);
    return;
  }
  ROPETEAM_CHECK(operation->fragments > 0);
  operation->fragments--;
  if (code != Code::kOk) Suspect(peer);
  if (code != Code::kOk || operation->code != Code::kOk)
    FailOperation(peer, operation, code);
  else if (operation->fragments == 0 && !operation->queued)
    Complete(operation, Code::kOk);
  if (peer->state == PeerState::kClosing && peer->outstanding == 0) Suspect(peer);
}

}  // namespace ropeteam::ofi
