// SPDX-License-Identifier: Apache-2.0
//
// The responder's side of connections, and the datagrams of both sides. Any process can send a datagram, so
// its instances and its connection are checked against those that are known.

#include <algorithm>
#include <cstring>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam::verbs {
namespace {

// Cached address handles, one per port; more than there are nodes. One takes a few hundred bytes. Making one
// may send an address query over the network.
constexpr size_t kPathsMax = 2 * kPeersMax;
// Responders that are probed at each incoming request.
constexpr int kProbesPerRequest = 2;

uint8_t Within(uint8_t reads, int device_max) {
  return static_cast<uint8_t>(std::clamp<int>(reads, 1, std::max(device_max, 1)));
}

}  // namespace

std::shared_ptr<ibv_ah> VerbsTransport::PathFor(Rail* rail, const PortAddress& to) {
  const std::pair key(to.gid_high ^ (uint64_t{to.lid} << 48), to.gid_low);
  if (const auto found = rail->paths.find(key); found != rail->paths.end()) return found->second;
  ibv_ah_attr path = PathTo(rail->port, to);
  std::shared_ptr<ibv_ah> made(ibv_create_ah(rail->domain.get(), &path), [](ibv_ah* address) {
    if (address != nullptr) HandleCloser()(address);
  });
  if (!made) {
    LOG_DEBUG("verbs: %s has no route to %s: %s", rail->port.name.c_str(), AddressText(to).c_str(),
              std::strerror(errno));
    return nullptr;
  }
  if (rail->paths.size() >= kPathsMax) rail->paths.clear();
  rail->paths.emplace(key, made);
  return made;
}

// A datagram that cannot be sent counts as lost. The peer asks again if it needs an answer.
void VerbsTransport::Send(Rail* rail, const RailAddress& to, uint32_t key, Message message) {
  if (rail->dead) return;
  const std::shared_ptr<ibv_ah> path = PathFor(rail, to.port);
  if (!path) return;
  message.sender = instance_;
  message.sender_rail = rail->index;
  message.datagram_queue_pair = rail->mailbox.queue_pair();
  message.datagram_key = datagram_key_;
  message.port = rail->port.Address();
  rail->mailbox.Send(path, to.queue_pair, key, Encode(message));
}

void VerbsTransport::Answer(Rail* rail, const Message& to, MessageKind kind) {
  Message answer;
  answer.kind = kind;
  answer.receiver = to.sender;
  answer.receiver_rail = to.sender_rail;
  answer.connection = to.connection;
  Send(rail, {to.port, to.datagram_queue_pair, 0}, to.datagram_key, answer);
}

void VerbsTransport::SendRefuse(Rail* rail, const Message& to, Refusal refusal) {
  Message answer;
  answer.kind = MessageKind::kRefuse;
  answer.refusal = refusal;
  answer.receiver = to.sender;
  answer.receiver_rail = to.sender_rail;
  answer.connection = to.connection;
  Send(rail, {to.port, to.datagram_queue_pair, 0}, to.datagram_key, answer);
}

void VerbsTransport::SendAccept(const Inbound& inbound) {
  Message answer;
  answer.kind = MessageKind::kAccept;
  answer.receiver = inbound.instance;
  answer.receiver_rail = inbound.request.sender_rail;
  answer.connection = inbound.connection;
  answer.queue_pair = inbound.queue_pair->qp_num;
  answer.sequence = inbound.sequence;
  answer.reads = inbound.reads;
  const Message& to = inbound.request;
  Send(inbound.rail, {to.port, to.datagram_queue_pair, 0}, to.datagram_key, answer);
}

void VerbsTransport::OnMessage(Rail* rail, std::string_view bytes) {
  Message message;
  const Status decoded = Decode(bytes, &message);
  if (!decoded.ok()) {
    LOG_DEBUG("verbs: datagram on %s: %s", rail->port.name.c_str(), decoded.ToString().c_str());
    return;
  }
  if (message.receiver != instance_) {
    // Only a request for another instance is answered; any other datagram for one is stale.
    if (message.kind == MessageKind::kRequest) SendRefuse(rail, message, Refusal::kOtherInstance);
    return;
  }
  switch (message.kind) {
    case MessageKind::kRequest:
      return OnRequest(rail, message);
    case MessageKind::kAccept:
      return OnAccept(rail, message);
    case MessageKind::kRefuse:
      return OnRefuse(message);
    case MessageKind::kClose:
      DestroyInbound(message.connection, message.sender);
      return Answer(rail, message, MessageKind::kClosed);
    case MessageKind::kClosed:
      return OnClosed(message);
  }
}

// Idempotent: a repeated request gets the same answer.
void VerbsTransport::OnRequest(Rail* rail, const Message& message) {
  if (std::find(fenced_.begin(), fenced_.end(), message.sender) != fenced_.end())
    return SendRefuse(rail, message, Refusal::kFenced);
  // It gets no answer: a member that this node does not know yet repeats its request, and a stranger learns
  // nothing.
  if (admitted_ && !admitted_->contains(message.sender)) return;
  if (message.receiver_rail != rail->index) return SendRefuse(rail, message, Refusal::kNoRail);
  const auto found = inbound_.find(message.connection);
  if (found != inbound_.end()) {
    if (found->second->instance == message.sender) SendAccept(*found->second);
    return;
  }
  if (message.superseded != 0) DestroyInbound(message.superseded, message.sender);
  ProbeInbound();
  Inbound* made = nullptr;
  const Refusal refusal = Accept(rail, message, &made);
  if (refusal != Refusal::kNone) return SendRefuse(rail, message, refusal);
  SendAccept(*made);
}

Refusal VerbsTransport::Accept(Rail* rail, const Message& message, Inbound** made) {
  if (inbound_.size() >= kInboundMax) {
    LOG_WARNING("verbs: refused a connection from %s: there are %zu, limit %zu",
                AddressText(message.port).c_str(), inbound_.size(), kInboundMax);
    return Refusal::kFull;
  }
  auto inbound = std::make_unique<Inbound>();
  const Status status = MakeQueuePair(rail, &inbound->queue_pair, nullptr);
  if (!status.ok()) {
    LOG_WARNING("verbs: refused a connection from %s: %s", AddressText(message.port).c_str(),
                status.ToString().c_str());
    return Refusal::kDevice;
  }
  inbound->sequence = NewSequence();
  inbound->reads = Within(std::min(message.reads, kReads), rail->port.limits.max_qp_rd_atom);
  const int error =
      ConnectQueuePair(rail, inbound->queue_pair.get(), message, inbound->sequence, inbound->reads, 1);
  if (error != 0) {
    LOG_WARNING("verbs: cannot connect to %s: %s (%d)", AddressText(message.port).c_str(),
                std::strerror(error), error);
    return Refusal::kDevice;
  }
  inbound->connection = message.connection;
  inbound->instance = message.sender;
  inbound->rail = rail;
  inbound->request = message;
  inbound->tag = tag_next_++;
  *made = inbound.get();
  inbound_tags_[inbound->tag] = inbound.get();
  probe_order_.push_back(inbound->connection);
  inbound_[inbound->connection] = std::move(inbound);
  return Refusal::kNone;
}

// Once this has returned, the device drops bytes that still arrive over the connection.
void VerbsTransport::DestroyInbound(uint64_t connection, uint64_t instance) {
  const auto found = inbound_.find(connection);
  if (found == inbound_.end() || found->second->instance != instance) return;
  Inbound* inbound = found->second.get();
  if (inbound->probing) inbound->rail->pieces--;
  inbound_tags_.erase(inbound->tag);
  inbound_.erase(found);
}

// An address that cannot be decoded belongs to no peer.
void VerbsTransport::SetPeers(const std::vector<std::string>& addresses) {
  admitted_.emplace();
  for (const std::string& bytes : addresses)
    if (TransportAddress address; Decode(bytes, &address).ok()) admitted_->insert(address.instance);
  std::unordered_set<uint64_t> gone;
  for (const auto& [connection, inbound] : inbound_)
    if (!admitted_->contains(inbound->instance)) gone.insert(inbound->instance);
  for (const uint64_t instance : gone) CutInstance(instance);
}

// Ends the instance's connections and informs the instance.
void VerbsTransport::CutInstance(uint64_t instance) {
  std::vector<uint64_t> connections;
  for (const auto& [connection, inbound] : inbound_)
    if (inbound->instance == instance) connections.push_back(connection);
  for (uint64_t connection : connections) {
    SendRefuse(inbound_.at(connection)->rail, inbound_.at(connection)->request, Refusal::kFenced);
    DestroyInbound(connection, instance);
  }
}

// Afterwards no byte from the instance reaches our memory. It cannot connect again unless this node connects
// to it.
void VerbsTransport::FenceInstance(uint64_t instance) {
  CutInstance(instance);
  fenced_.push_back(instance);
  if (fenced_.size() > kFencedMax) fenced_.pop_front();
}

// If an initiator dies, its responder stays here: the device does not notice by itself. Other peers make new
// connections after a death. So at each request the next few responders send empty writes to their
// initiators. If an initiator does not acknowledge the write, the device reports it, and the responder is
// destroyed.
void VerbsTransport::ProbeInbound() {
  for (int i = 0; i < kProbesPerRequest && !probe_order_.empty(); i++) {
    const uint64_t connection = probe_order_.front();
    probe_order_.pop_front();
    const auto found = inbound_.find(connection);
    if (found == inbound_.end()) continue;
    probe_order_.push_back(connection);
    Inbound* inbound = found->second.get();
    if (inbound->probing || inbound->rail->pieces >= inbound->rail->queue_entries) continue;
    ibv_send_wr request{};
    request.wr_id = static_cast<uint64_t>(inbound->tag) << 32;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (ibv_post_send(inbound->queue_pair.get(), &request, &bad) != 0) continue;
    inbound->probing = true;
    inbound->rail->pieces++;
  }
}

}  // namespace ropeteam::verbs
