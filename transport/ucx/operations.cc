// SPDX-License-Identifier: Apache-2.0
//
// From an accepted put or get to its completion. Operations are cut into fragments of operation_bytes, at
// most kDepth at UCX for one peer. They are posted round-robin, so that peers share the link. Puts are then
// flushed.

#include <algorithm>

#include "core/base/log.h"
#include "transport/ucx/internal.h"

namespace ropeteam::ucx {
namespace {

// Fragments at UCX for one peer. 16 × 1 MiB covers the bandwidth-delay product of 100 Gb/s at 1 ms.
constexpr uint32_t kDepth = 16;
// A flush is started when none is outstanding, or when this many bytes wait for one …
constexpr uint64_t kFlushBytes = 1 << 20;
// … and fewer flushes than this are outstanding. They are enough that the link never waits for a
// confirmation.
constexpr uint32_t kFlushesMax = 8;

}  // namespace

Request* UcxTransport::NewRequest(Peer* peer, RequestKind kind) {
  Request* request = requests_.New();
  request->kind = kind;
  request->transport = this;
  request->peer = peer;
  peer->requests++;
  if (kind == RequestKind::kFragment) peer->fragments++;
  if (kind == RequestKind::kFlush) peer->flushing.push_back(request);
  outstanding_++;
  return request;
}

// The request no longer belongs to its peer; UCX may still know it.
void UcxTransport::ReleaseRequest(Request* request) {
  Peer* peer = request->peer;
  ROPETEAM_CHECK(peer != nullptr && peer->requests > 0 && outstanding_ > 0);
  peer->requests--;
  if (request->kind == RequestKind::kFragment) peer->fragments--;
  if (request->kind == RequestKind::kFlush) std::erase(peer->flushing, request);
  outstanding_--;
  request->peer = nullptr;
}

// `handle` is UCX's answer: done at once, an error, or a request whose callback will come.
void UcxTransport::Track(Request* request, void* handle) {
  if (UCS_PTR_IS_PTR(handle)) return;
  Finish(request, UCS_PTR_STATUS(handle));
}

void UcxTransport::OnRequest(void* handle, ucs_status_t status, void* user_data) {
  auto* request = static_cast<Request*>(user_data);
  request->transport->Finish(request, status);
  ucp_request_free(handle);
}

void UcxTransport::Start(Peer* peer) {
  if (peer->state == PeerState::kIdle) StartConnecting(peer, Now());
  if (peer->state == PeerState::kUp) active_.Add(peer);
}

void UcxTransport::Complete(Operation* operation, Code code) {
  ROPETEAM_CHECK(operation->requests == 0 && !operation->gathered);
  operations_.Finish(operation, code);
}

// One fragment or flush per turn.
void UcxTransport::Pump() {
  active_.Go([this](Peer* peer) { return PostNext(peer); },
             [](Peer* peer) { return peer->queue.empty() && peer->unflushed.empty(); });
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
    Suspect(peer);  // operations in `broken` wait until the peer has been checked
    return true;
  }
  PostFragment(peer, operation, key);
  return true;
}

void UcxTransport::PostFragment(Peer* peer, Operation* operation, ucp_rkey_h key) {
  const uint64_t length = std::min(capabilities_.operation_bytes, operation->length - operation->cut);
  char* local = operation->region->base + operation->local_offset + operation->cut;
  const uint64_t remote = operation->remote->key.base + operation->remote_offset + operation->cut;
  peer->queue.Cut(length);
  operation->requests++;
  const bool put = operation->kind == OperationKind::kPut;
  if (!operation->queued) {
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

// Confirms all gathered puts: their fragments were posted before.
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

// UCX has released a request, and with it the request's memory.
void UcxTransport::Finish(Request* request, ucs_status_t status) {
  Peer* peer = request->peer;
  const RequestKind kind = request->kind;
  Operation* operation = request->operation;
  List<Operation> flushed = request->flushed;
  if (peer != nullptr) ReleaseRequest(request);
  requests_.Free(request);
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

// One part of the operation has ended with `code`. If it was the last part, the operation completes.
void UcxTransport::Settle(Peer* peer, Operation* operation, Code code) {
  if (operation->code == Code::kOk) operation->code = code;
  if (operation->code != Code::kOk) peer->queue.Abandon(operation);
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
