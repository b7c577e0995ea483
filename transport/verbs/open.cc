// SPDX-License-Identifier: Apache-2.0
//
// Opens the devices and describes the transport.

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdio>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateVerbsTransport(const VerbsConfig& config) {
  return verbs::VerbsTransport::Create(config);
}

namespace verbs {
namespace {

constexpr uint32_t kDatagramKeyMask = 0x7fffffff;  // the highest bit is for privileged keys
constexpr uint64_t kMbpsPerGbps = 1'000;
constexpr size_t kDmabufProbeBytes = 4096;

Status NotBlocking(int fd, const std::string& device) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
    return ErrnoError(errno, "device %s: O_NONBLOCK", device.c_str());
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<Transport>> VerbsTransport::Create(const VerbsConfig& config) {
  std::unique_ptr<VerbsTransport> transport(new VerbsTransport);
  const Status status = transport->Open(config);
  if (!status.ok()) return status;
  LOG_INFO("transport %s", transport->Describe().c_str());
  return std::unique_ptr<Transport>(std::move(transport));
}

Status VerbsTransport::Open(const VerbsConfig& config) {
  Result<std::vector<Port>> ports = ChoosePorts(config);
  if (!ports.ok()) return ports.status();
  const TimeUs silence = TimeUs{config.silence_ms} * 1'000;
  timeout_silent_ = std::max(silence, kDeviceSilenceUs + kTimeoutSilentMinUs) - kDeviceSilenceUs;
  instance_ = RandomNumber();
  datagram_key_ = static_cast<uint32_t>(RandomNumber()) & kDatagramKeyMask;
  ROPETEAM_RETURN_IF_ERROR(wake_.Open());
  for (const Port& port : *ports) ROPETEAM_RETURN_IF_ERROR(OpenRail(port));
  capabilities_.dmabuf = true;
  ProbeDmabuf();
  NameSelf();
  return OkStatus();
}

Status VerbsTransport::OpenRail(const Port& port) {
  auto rail = std::make_unique<Rail>();
  rail->index = static_cast<uint8_t>(rails_.size());
  rail->port = port;
  const char* name = port.name.c_str();
  Result<Handle<ibv_context>> context = OpenDevice(port.device);
  if (!context.ok()) return context.status();
  rail->context = std::move(*context);
  rail->domain.reset(ibv_alloc_pd(rail->context.get()));
  if (!rail->domain) return ErrnoError(errno, "device %s: protection domain", name);
  rail->channel.reset(ibv_create_comp_channel(rail->context.get()));
  if (!rail->channel) return ErrnoError(errno, "device %s: completion channel", name);
  ROPETEAM_RETURN_IF_ERROR(NotBlocking(rail->channel->fd, port.name));
  ROPETEAM_RETURN_IF_ERROR(NotBlocking(rail->context->async_fd, port.name));
  rail->queue_entries = std::min(kRailPieces, static_cast<uint32_t>(std::max(port.limits.max_cqe, 1)));
  rail->queue.reset(ibv_create_cq(rail->context.get(), static_cast<int>(rail->queue_entries), nullptr,
                                  rail->channel.get(), 0));
  if (!rail->queue)
    return ErrnoError(errno, "device %s: completion queue of %u entries", name, rail->queue_entries);
  ROPETEAM_RETURN_IF_ERROR(rail->mailbox.Open(rail->domain.get(), rail->channel.get(), port, datagram_key_));
  rails_.push_back(std::move(rail));
  return OkStatus();
}

// A device that can register dmabufs rejects the descriptor. A device that cannot rejects the call.
void VerbsTransport::ProbeDmabuf() {
  for (const auto& rail : rails_) {
    errno = 0;
    const Handle<ibv_mr> memory(
        ibv_reg_dmabuf_mr(rail->domain.get(), 0, kDmabufProbeBytes, 0, -1, IBV_ACCESS_LOCAL_WRITE));
    if (errno != EBADF) capabilities_.dmabuf = false;
  }
}

void VerbsTransport::NameSelf() {
  TransportAddress self;
  self.instance = instance_;
  self.datagram_key = datagram_key_;
  for (const auto& rail : rails_) {
    const Port& port = rail->port;
    self.rails.push_back({port.Address(), rail->mailbox.queue_pair(), static_cast<uint32_t>(port.link_mbps)});
    const bool first = rail == rails_.front();
    capabilities_.devices += (first ? "" : ",") + port.name;
    capabilities_.link_mbps += port.link_mbps;
    description_ += (first ? "verbs on " : ", ") + port.name + " (" + port.fabric + ", " + port.address;
    if (port.link_mbps != 0) description_ += ", " + std::to_string(port.link_mbps / kMbpsPerGbps) + " Gb/s";
    if (port.numa_node >= 0) description_ += ", NUMA node " + std::to_string(port.numa_node);
    description_ += ")";
  }
  local_address_ = Encode(self);
  capabilities_.name = "verbs";
  capabilities_.rdma = true;
  // A peer writes only through a queue pair of ours, made for its request. Disconnect() destroys the queue
  // pair. After that, the device drops bytes that still arrive for it, and the instance gets no other queue
  // pair.
  capabilities_.fences_peers = true;
  capabilities_.admits_peers = true;
  capabilities_.operation_bytes = kOperationBytes;
  capabilities_.address = rails_.front()->port.address;
}

VerbsTransport::~VerbsTransport() {
  // With these messages peers notice at once instead of after a timeout. They are optional, so the wait is
  // short.
  constexpr TimeUs kGoodbyeUs = 5'000;
  for (const auto& [connection, inbound] : inbound_)
    if (!inbound->rail->dead) SendRefuse(inbound->rail, inbound->request, Refusal::kLeaving);
  for (const auto& [id, peer] : peers_)
    for (Link& link : peer->links)
      if (link.connection != 0 && !link.rail->dead) SendClose(link, link.connection);
  const TimeUs end = Now() + kGoodbyeUs;
  for (const auto& rail : rails_)
    while (rail->mailbox.sends_outstanding() > 0 && Now() < end)
      rail->mailbox.Receive(Mailbox::kSends, [](std::string_view) {});
  // Destroying the queue pairs makes the devices release all buffers. Operations that are not complete yet
  // are lost, as transport.h says.
  inbound_.clear();
  peers_.clear();
  regions_.Clear();
  rails_.clear();
}

}  // namespace verbs
}  // namespace ropeteam
