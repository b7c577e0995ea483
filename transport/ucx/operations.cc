// SPDX-License-Identifier: Apache-2.0
//
// From an accepted put or get to its completion: fragments of operation_bytes, at most kDepth at UCX for one
// peer, posted in turns so that peers share the link; then, for puts, a flush.

#include <algorithm>

#include "core/base/log.h"
#include "transport/ucx/internal.h"

namespace ropeteam::ucx {
namespace {

// Slabs grow to the high-water mark and stay, so that a steady state allocates nothing.
constexpr size_t kOperationsPerSlab = 1024;
constexpr size_t kRequestsPerSlab = 256;
// Fragments at UCX for one peer. 16 × 1 MiB covers the bandwidth-delay product of 100 Gb/s at 1 ms.
constexpr uint32_t kDepth = 16;
// A flush is started when none is under way, or when this much waits for one …
constexpr uint64_t kFlushBytes = 1 << 20;
// … and there are fewer than this: enough that the link never waits for a confirmation.
constexpr uint32_t kFlushesMax = 8;

unsigned long long Ull(uint64_t value) { return value; }

bool InRange(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

}  // namespace

Operation* UcxTransport::NewOperation() {
  if (operations_free_.empty()) {
    operation_slabs_.push_back(std::make_unique<Operation[]>(kOperationsPerSlab));
    for (size_t i = 0; i < kOperationsPerSlab; i++) operations_free_.Push(&operation_slabs_.back()[i]);
  }
  Operation* operation = operations_free_.Pop();
  *operation = Operation{};
  return operation;
}

void UcxTransport::FreeOperation(Operation* operation) { operations_free_.Push(operation); }

Request* UcxTransport::NewRequest(Peer* peer, RequestKind kind) {
  if (requests_free_ == nullptr) {
    request_slabs_.push_back(std::make_unique<Request[]>(kRequestsPerSlab));
    for (size_t i = 0; i < kRequestsPerSlab; i++) {
      Request* fresh = &request_slabs_.back()[i];
      fresh->next = requests_free_;
      requests_free_ = fresh;
    }
  }
  Request* request = requests_free_;
  requests_free_ = request->next;
  *request = Request{};
  request->kind = kind;
  request->transport = this;
  request->peer = peer;
  peer->requests++;
  if (kind == RequestKind::kFragment) peer->fragments++;
  if (kind == RequestKind::kFlush) peer->flushing.push_back(request);
  outstanding_++;
  return request;
}

// The request is no longer its peer's; UCX may still know it.
void UcxTransport::ReleaseRequest(Request* request) {
  Peer* peer = request->peer;
  ROPETEAM_CHECK(peer != nullptr && peer->requests > 0 && outstanding_ > 0);
  peer->requests--;
  if (request->kind == RequestKind::kFragment) peer->fragments--;
  if (request->kind == RequestKind::kFlush) std::erase(peer->flushing, request);
  outstanding_--;
  request->peer = nullptr;
}

void UcxTransport::FreeRequest(Request* request) {
  request->next = requests_free_;
  requests_free_ = request;
}

// `handle` is what UCX answered: done at once, an error, or a request whose callback will come.
void UcxTransport::Track(Request* request, void* handle) {
  if (UCS_PTR_IS_PTR(handle)) return;
  Finish(request, UCS_PTR_STATUS(handle));
}

void UcxTransport::OnRequest(void* handle, ucs_status_t status, void* user_data) {
  auto* request = static_cast<Request*>(user_data);
  request->transport->Finish(request, status);
  ucp_request_free(handle);
}

Status UcxTransport::Submit(OperationKind kind, PeerId peer_id, RegionId local, uint64_t local_offset,
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
  operation->remote = &target->second;
  operation->remote_address = key.base + remote_offset;
  operation->length = length;
  accepted_++;
  if (peer->state == PeerState::kGone) {
    Complete(operation, Code::kPeerGone);
  } else if (length == 0) {
    Complete(operation, Code::kOk);
  } else {
    operation->queued = true;
    peer->queue.Push(operation);
    if (peer->state == PeerState::kIdle) StartConnecting(peer, Now());
    if (peer->state == PeerState::kUp) List(peer);
  }
  return OkStatus();
}

void UcxTransport::Complete(Operation* operation, Code code) {
  ROPETEAM_CHECK(operation->requests == 0 && !operation->queued && !operation->gathered);
  operation->code = code;
  const bool put = operation->kind == OperationKind::kPut;
  (put ? puts_ : gets_).fetch_add(1, std::memory_order_relaxed);
  if (code != Code::kOk)
    failures_.fetch_add(1, std::memory_order_relaxed);
  else
    (put ? put_bytes_ : get_bytes_).fetch_add(operation->length, std::memory_order_relaxed);
  completed_.Push(operation);
}

void UcxTransport::List(Peer* peer) {
  if (peer->listed) return;
  peer->listed = true;
  active_.push_back(peer);
}

void UcxTransport::Unlist(Peer* peer) {
  if (!peer->listed) return;
  peer->listed = false;
  active_.erase(std::find(active_.begin(), active_.end(), peer));
}

// Posts one fragment or flush a turn, round and round, until nobody can post.
void UcxTransport::Pump() {
  size_t idle_turns = 0;
  while (idle_turns < active_.size()) {
    if (active_next_ >= active_.size()) active_next_ = 0;
    Peer* peer = active_[active_next_];
    idle_turns = PostNext(peer) ? 0 : idle_turns + 1;
    if (peer->queue.empty() && peer->unflushed.empty())
      Unlist(peer);  // the next one takes its place
    else
      active_next_++;
  }
}

bool UcxTransport::PostNext(Peer* peer) {
  ROPETEAM_CHECK(peer->state == PeerState::kUp);
  if (peer->failed) return false;
  const bool flush_due =
      peer->flushing.empty() || (peer->unflushed_bytes >= kFlushBytes && peer->flushing.size() < kFlushesMax);
  if (!peer->unflushed.empty() && flush_due) {
    StartFlush(peer);
    return true;
  }
  if (peer->queue.empty() || peer->fragments >= kDepth) return false;
  Operation* operation = peer->queue.head();
  ucp_rkey_h key = peer->cma != nullptr ? nullptr : KeyOf(peer, operation->remote);
  if (key == nullptr && peer->cma == nullptr) {
    Settle(peer, operation, Code::kLinkFailed);
    Suspect(peer);  // what stands in `broken` waits for a verdict
    return true;
  }
  PostFragment(peer, operation, key);
  return true;
}

void UcxTransport::PostFragment(Peer* peer, Operation* operation, ucp_rkey_h key) {
  const uint64_t length = std::min(capabilities_.operation_bytes, operation->length - operation->posted);
  char* local = operation->local + operation->posted;
  const uint64_t remote = operation->remote_address + operation->posted;
  operation->posted += length;
  operation->requests++;
  const bool last = operation->posted == operation->length;
  const bool put = operation->kind == OperationKind::kPut;
  if (last) {
    peer->queue.Pop();
    operation->queued = false;
    if (put && peer->cma == nullptr) {
      operation->gathered = true;
      peer->unflushed.Push(operation);
      peer->unflushed_bytes += operation->length;
    } else {
      operation->confirmed = true;
    }
  }
  Request* request = NewRequest(peer, RequestKind::kFragment);
  request->operation = operation;
  Post(peer, request, put, local, length, remote, key);
}

void UcxTransport::Post(Peer* peer, Request* request, bool put, void* local, uint64_t length, uint64_t remote,
                        ucp_rkey_h key) {
  if (peer->cma != nullptr) {
    request->done = {OnCma, 1, UCS_OK};
    const ucs_status_t status = put ? cma_->Put(peer->cma.get(), local, length, remote, &request->done)
                                    : cma_->Get(peer->cma.get(), local, length, remote, &request->done);
    if (status != UCS_INPROGRESS) Finish(request, status);
    return;
  }
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = OnRequest;
  param.user_data = request;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  Track(request, put ? ucp_put_nbx(peer->endpoint, local, length, remote, key, &param)
                     : ucp_get_nbx(peer->endpoint, local, length, remote, key, &param));
}

void UcxTransport::OnCma(uct_completion_t* done) {
  auto* request = reinterpret_cast<Request*>(done);
  request->transport->Finish(request, done->status);
}

// Confirms all the puts that are gathered: their fragments were posted before.
void UcxTransport::StartFlush(Peer* peer) {
  Request* request = NewRequest(peer, RequestKind::kFlush);
  while (!peer->unflushed.empty()) {
    Operation* operation = peer->unflushed.Pop();
    operation->gathered = false;
    operation->requests++;
    request->flushed.Push(operation);
  }
  peer->unflushed_bytes = 0;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = OnRequest;
  param.user_data = request;
  Track(request, ucp_ep_flush_nbx(peer->endpoint, &param));
}

// UCX has let go of a request, and with it of its memory.
void UcxTransport::Finish(Request* request, ucs_status_t status) {
  Peer* peer = request->peer;
  const RequestKind kind = request->kind;
  Operation* operation = request->operation;
  OperationList flushed = request->flushed;
  if (peer != nullptr) ReleaseRequest(request);
  FreeRequest(request);
  if (peer == nullptr) return;
  const Code code = status == UCS_OK ? Code::kOk : Code::kLinkFailed;
  if (status != UCS_OK) {
    LOG_DEBUG("ucx peer %s: a request failed: %s", peer->text.c_str(), ucs_status_string(status));
    if (!peer->draining) Suspect(peer);
  }
  if (kind == RequestKind::kHello) {
    peer->hello_posted = false;
    peer->wired = true;
    peer->hello_answered = status == UCS_OK && !peer->draining;
    suspects_ = true;
  } else if (kind == RequestKind::kFragment) {
    operation->requests--;
    Settle(peer, operation, code);
  } else {
    while (!flushed.empty()) {
      Operation* put = flushed.Pop();
      put->requests--;
      put->confirmed = status == UCS_OK;
      Settle(peer, put, code);
    }
  }
}

// One step of the operation is over, with `code`. Completes it when that was the last.
void UcxTransport::Settle(Peer* peer, Operation* operation, Code code) {
  if (operation->code == Code::kOk) operation->code = code;
  if (operation->code != Code::kOk && operation->queued) {
    ROPETEAM_CHECK(peer->queue.head() == operation);  // only the head is partly posted
    peer->queue.Pop();
    operation->queued = false;
  }
  if (operation->requests > 0 || operation->queued || operation->gathered) return;
  if (operation->code == Code::kOk) {
    if (operation->confirmed) Complete(operation, Code::kOk);
    return;
  }
  if (peer->state == PeerState::kGone || peer->state == PeerState::kClosing)
    Complete(operation, Code::kPeerGone);
  else
    peer->broken.Push(operation);
}

}  // namespace ropeteam::ucx
