// SPDX-License-Identifier: Apache-2.0
#include "node/data_plane.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <utility>

#include "core/base/log.h"
#include "node/event_loop.h"

namespace ropeteam {
namespace {

constexpr size_t kCompletionsPerPoll = 64;
constexpr uint64_t kForeverUs = UINT64_MAX;
constexpr TimeUs kGivingUpUs = 10'000;  // poll interval after the lease has expired
// Stop() waits this long for completions. The contract says 100 ms, but a loaded machine may take longer.
constexpr TimeUs kDrainUs = 2'000'000;

void AppendWithLength(const std::string& part, std::string* out) {
  const auto length = static_cast<uint16_t>(part.size());
  out->push_back(static_cast<char>(length & 0xff));
  out->push_back(static_cast<char>(length >> 8));
  *out += part;
}

bool TakeWithLength(std::string_view* packed, std::string* part) {
  if (packed->size() < 2) return false;
  const size_t length =
      static_cast<unsigned char>((*packed)[0]) | (static_cast<unsigned char>((*packed)[1]) << 8);
  packed->remove_prefix(2);
  if (packed->size() < length) return false;
  *part = packed->substr(0, length);
  packed->remove_prefix(length);
  return true;
}

}  // namespace

std::string PackDataAddress(const std::string& endpoint, const std::string& region_key) {
  std::string packed;
  AppendWithLength(endpoint, &packed);
  AppendWithLength(region_key, &packed);
  return packed;
}

bool UnpackDataAddress(std::string_view packed, std::string* endpoint, std::string* region_key) {
  return TakeWithLength(&packed, endpoint) && TakeWithLength(&packed, region_key) && packed.empty();
}

std::string DataPlane::transport_name() const {
  const TransportCapabilities& has = transport_->capabilities();
  return has.provider.empty() ? has.name : has.name + "/" + has.provider;
}

Result<std::unique_ptr<DataPlane>> DataPlane::Create(std::unique_ptr<Transport> transport,
                                                     std::span<std::byte> arena, uint64_t chunks_begin,
                                                     PeerAccess* access) {
  const std::span<std::byte> chunks = arena.subspan(chunks_begin);
  Result<RegionId> region = transport->RegisterRegion(chunks.data(), chunks.size());
  if (!region.ok()) return region.status();
  if (access != nullptr) transport->GuardRegion(*region, access);
  transport->SetPeers({});  // it listens from now on, and admits no peer before the first view
  const std::string endpoint = transport->LocalAddress();
  const std::string key = transport->ExportRegion(*region);
  std::unique_ptr<DataPlane> plane(new DataPlane(std::move(transport), *region, chunks_begin));
  Result<RegionId> probe = plane->transport_->RegisterRegion(plane->probe_.data(), plane->probe_.size());
  if (!probe.ok()) return probe.status();
  plane->probe_region_ = *probe;
  plane->address_ = PackDataAddress(endpoint, key);
  if (plane->address_.size() > kAddressBytesMax)
    return Error(Code::kInternal, "data address of %zu bytes, limit %zu", plane->address_.size(),
                 kAddressBytesMax);
  return plane;
}

DataPlane::DataPlane(std::unique_ptr<Transport> transport, RegionId region, uint64_t chunks_begin)
    : transport_(std::move(transport)),
      device_buffers_(transport_.get()),
      region_(region),
      chunks_begin_(chunks_begin) {}

DataPlane::~DataPlane() {
  Stop();
  // Nothing is outstanding. A failure would mean a broken transport, which is destroyed next.
  (void)transport_->DeregisterRegion(region_);
  if (probe_region_ != 0) (void)transport_->DeregisterRegion(probe_region_);
}

void DataPlane::Start(Callbacks callbacks) {
  callbacks_ = std::move(callbacks);
  thread_ = std::thread([this] { Run(); });
}

void DataPlane::Stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    input_.stop = true;
  }
  transport_->Wake();
  thread_.join();
  device_buffers_.Stop();
}

void DataPlane::Submit(std::vector<StartTransfer> transfers) {
  {
    const std::lock_guard lock(mutex_);
    if (input_.transfers.empty()) {
      input_.transfers = std::move(transfers);
    } else {
      input_.transfers.insert(input_.transfers.end(), transfers.begin(), transfers.end());
    }
  }
  transport_->Wake();
}

void DataPlane::SetLease(TimeUs valid_until) {
  // The sleeping thread wakes up when the lease that it knows expires. Only an earlier end must wake it.
  if (valid_until < lease_until_.exchange(valid_until)) transport_->Wake();
}

void DataPlane::SetMembers(std::vector<Member> members) {
  {
    const std::lock_guard lock(mutex_);
    input_.views.push_back(std::move(members));
  }
  transport_->Wake();
}

void DataPlane::Run() {
  std::array<Completion, kCompletionsPerPoll> completions;
  while (!stopping_) {
    const bool took = TakeInput();
    StartReconnecting();
    StartWaiting();
    CutOffPuts();
    const size_t count = transport_->Poll(completions.data(), completions.size());
    for (size_t i = 0; i < count; ++i) Complete(completions[i]);
    TellDone();
    if (!took && count == 0) transport_->Wait(WaitUs());
  }
  DrainForStop();
}

// The time until the next reconnection of a lost member, or until the lease of outstanding puts expires.
uint64_t DataPlane::WaitUs() const {
  const TimeUs lease_until = lease_until_.load();
  const bool leased = puts_ != 0 && lease_until != UINT64_MAX && !transport_->capabilities().fences_peers;
  if (lost_.empty() && !leased) return kForeverUs;
  const TimeUs now = EventLoop::Now();
  uint64_t wait = kForeverUs;
  // After the lease has expired, the connections are being closed.
  if (leased) wait = lease_until > now ? lease_until - now : kGivingUpUs;
  for (const auto& [node, retry_at] : lost_) wait = std::min(wait, retry_at > now ? retry_at - now : 0);
  return wait;
}

bool DataPlane::TakeInput() {
  Input input;
  {
    const std::lock_guard lock(mutex_);
    if (input_.transfers.empty() && input_.views.empty() && !input_.stop) return false;
    std::swap(input, input_);
  }
  // Members first: a transfer to a node is submitted only after the view that contains the node.
  for (const std::vector<Member>& members : input.views) ApplyMembers(members);
  waiting_.insert(waiting_.end(), input.transfers.begin(), input.transfers.end());
  stopping_ = stopping_ || input.stop;
  return true;
}

void DataPlane::ApplyMembers(const std::vector<Member>& members) {
  std::vector<std::string> addresses;
  for (const Member& member : members) {
    std::string endpoint, key;
    if (UnpackDataAddress(member.data_address, &endpoint, &key)) addresses.push_back(std::move(endpoint));
  }
  transport_->SetPeers(addresses);
  std::map<NodeId, Peer> next;
  for (const Member& member : members) {
    const auto found = peers_.find(member.id);
    if (found == peers_.end()) {
      next[member.id].data_address = member.data_address;
    } else {
      next[member.id] = std::move(found->second);
      peers_.erase(found);
    }
  }
  std::map<NodeId, Peer> gone = std::exchange(peers_, std::move(next));
  for (auto& [node, peer] : gone) Leave(node, peer);
}

void DataPlane::Leave(NodeId node, Peer& peer) {
  lost_.erase(node);
  // Only a transport that fences can guarantee that a peer writes no more, and only after Connect() and
  // Disconnect().
  if (peer.peer == 0 && !stopping_ && transport_->capabilities().fences_peers) (void)Connect(node, peer);
  if (peer.peer == 0) return;
  ROPETEAM_CHECK(puts_ >= peer.puts);
  puts_ -= peer.puts;
  connected_.erase(peer.peer);
  leaving_[peer.peer] = node;
  if (peer.state != LinkState::kClosing) transport_->Disconnect(peer.peer);
}

// Connects to the peer, or returns why that failed.
Status DataPlane::Connect(NodeId node, Peer& peer) {
  ROPETEAM_CHECK(peer.peer == 0);
  std::string endpoint, key;
  if (!UnpackDataAddress(peer.data_address, &endpoint, &key))
    return Error(Code::kInvalidArgument, "invalid data address of %zu bytes from node %016" PRIx64,
                 peer.data_address.size(), node);
  Result<PeerId> connected = transport_->Connect(endpoint);
  if (!connected.ok()) return connected.status();
  Result<RemoteRegionId> region = transport_->ImportRegion(*connected, key);
  if (!region.ok()) {
    leaving_[*connected] = kNoNode;
    transport_->Disconnect(*connected);
    return region.status();
  }
  peer.peer = *connected;
  peer.region = *region;
  connected_[peer.peer] = node;
  return OkStatus();
}

// Marks the link as down. It is tried again after a pause.
void DataPlane::Lose(NodeId node, Peer& peer, const std::string& reason) {
  ROPETEAM_CHECK(peer.state == LinkState::kUp || peer.state == LinkState::kClosing ||
                 peer.state == LinkState::kProbing);
  if (peer.state == LinkState::kUp) {
    LOG_WARNING("data link with node %016" PRIx64 " is down: %s; connecting again", node, reason.c_str());
    peer.pause = kReconnectPauseUs;
    callbacks_.on_link(node, false, reason);
  } else {
    LOG_DEBUG("data link with node %016" PRIx64 " is still down: %s", node, reason.c_str());
    peer.pause = std::min(2 * peer.pause, kReconnectPauseMaxUs);
  }
  peer.state = LinkState::kLost;
  const bool fresh = lost_.emplace(node, EventLoop::Now() + peer.pause).second;
  ROPETEAM_CHECK(fresh);
}

void DataPlane::StartReconnecting() {
  if (lost_.empty()) return;
  const TimeUs now = EventLoop::Now();
  for (auto lost = lost_.begin(); lost != lost_.end();) {
    if (now < lost->second) {
      ++lost;
      continue;
    }
    const NodeId node = lost->first;
    lost = lost_.erase(lost);  // a failed attempt inserts it again, before `lost`
    Peer& peer = peers_.at(node);
    ROPETEAM_CHECK(peer.state == LinkState::kLost);
    peer.state = LinkState::kClosing;
    if (peer.peer != 0)
      transport_->Disconnect(peer.peer);
    else
      Reconnect(node, peer);
  }
}

void DataPlane::Reconnect(NodeId node, Peer& peer) {
  ROPETEAM_CHECK(peer.state == LinkState::kClosing && peer.peer == 0);
  Status status = Connect(node, peer);
  if (status.ok())
    status = transport_->Get(peer.peer, probe_region_, 0, peer.region, 0, kProbeBytes, kProbeTag);
  if (!status.ok()) return Lose(node, peer, status.ToString());
  peer.state = LinkState::kProbing;
}

// nullptr: `id` does not belong to a member, or no longer.
DataPlane::Peer* DataPlane::PeerOf(PeerId id, NodeId* node) {
  const auto found = connected_.find(id);
  if (found == connected_.end()) return nullptr;
  *node = found->second;
  const auto peer = peers_.find(*node);
  ROPETEAM_CHECK(peer != peers_.end() && peer->second.peer == id);
  return &peer->second;
}

void DataPlane::OnProbe(const Completion& completion) {
  NodeId node = kNoNode;
  Peer* peer = PeerOf(completion.peer, &node);
  if (peer == nullptr || peer->state != LinkState::kProbing) return;  // it has left the view
  // A peer that guards its chunks may refuse to read this one, and then the link is up, too.
  const bool refused = completion.code == Code::kInvalidArgument && transport_->capabilities().guards_chunks;
  if (completion.code != Code::kOk && !refused)
    return Lose(node, *peer, std::string("reading from it ended with ") + CodeName(completion.code));
  peer->state = LinkState::kUp;
  LOG_INFO("data link with node %016" PRIx64 " is up again", node);
  callbacks_.on_link(node, true, "connected again");
}

bool DataPlane::LeaseHolds() const {
  const TimeUs until = lease_until_.load();
  return until == UINT64_MAX || transport_->capabilities().fences_peers || EventLoop::Now() < until;
}

// Puts in the transport's queue must not be sent after the lease has expired.
void DataPlane::CutOffPuts() {
  if (puts_ == 0 || LeaseHolds()) return;
  for (auto& [node, peer] : peers_) {
    if (peer.state != LinkState::kUp || peer.puts == 0) continue;
    LOG_WARNING("data link with node %016" PRIx64
                " is closed with %zu puts outstanding: the lease has run out",
                node, peer.puts);
    peer.pause = kReconnectPauseUs;
    peer.state = LinkState::kClosing;
    callbacks_.on_link(node, false, "the lease has run out with puts under way");
    transport_->Disconnect(peer.peer);
  }
}

void DataPlane::StartWaiting() {
  while (!waiting_.empty() && StartOne(waiting_.front())) waiting_.pop_front();
}

bool DataPlane::StartOne(const StartTransfer& transfer) {
  const auto found = peers_.find(transfer.peer);
  if (found == peers_.end()) {
    done_.push_back({transfer.tag, Code::kPeerGone});
    return true;
  }
  Peer& peer = found->second;
  ROPETEAM_CHECK(transfer.tag != kProbeTag);
  if (peer.state == LinkState::kLost || peer.state == LinkState::kClosing ||
      peer.state == LinkState::kProbing) {
    done_.push_back({transfer.tag, Code::kPeerGone});
    return true;
  }
  if (!transfer.get && !LeaseHolds()) {
    done_.push_back({transfer.tag, Code::kStale});
    return true;
  }
  Status status = peer.state == LinkState::kIdle ? Connect(transfer.peer, peer) : OkStatus();
  if (status.ok()) peer.state = LinkState::kUp;
  if (status.ok() && transfer.buffer != 0) return StartFromDevice(peer, transfer);
  if (status.ok()) {
    ROPETEAM_CHECK(transfer.local_offset >= chunks_begin_);
    const uint64_t local_offset = transfer.local_offset - chunks_begin_;
    status = transfer.get ? transport_->Get(peer.peer, region_, local_offset, peer.region,
                                            transfer.remote_offset, transfer.length, transfer.tag)
                          : transport_->Put(peer.peer, region_, local_offset, peer.region,
                                            transfer.remote_offset, transfer.length, transfer.tag);
  }
  if (status.ok()) {
    CountStarted(peer, transfer);
    return true;
  }
  if (status.code() == Code::kNoSpace && outstanding_ != 0) return false;  // a completion makes room
  Refuse(transfer, status, status.code());
  return true;
}

bool DataPlane::StartFromDevice(Peer& peer, const StartTransfer& transfer) {
  ROPETEAM_CHECK(!transfer.get);
  const Result<RegionId> region = device_buffers_.Use(transfer.buffer);
  if (!region.ok()) {
    done_.push_back({transfer.tag, Code::kNotFound});
    return true;
  }
  const Status status = transport_->Put(peer.peer, *region, transfer.local_offset, peer.region,
                                        transfer.remote_offset, transfer.length, transfer.tag);
  if (status.ok()) {
    from_device_[transfer.tag] = transfer.buffer;
    CountStarted(peer, transfer);
    return true;
  }
  device_buffers_.EndUse(transfer.buffer, status.code());
  if (status.code() == Code::kNoSpace && outstanding_ != 0) return false;
  Refuse(transfer, status, Code::kNotFound);
  return true;
}

void DataPlane::CountStarted(Peer& peer, const StartTransfer& transfer) {
  ++outstanding_;
  if (transfer.get) return;
  ++peer.puts;
  ++puts_;
}

void DataPlane::Refuse(const StartTransfer& transfer, const Status& status, Code code) {
  LOG_WARNING("data transfer of %" PRIu64 " bytes with node %016" PRIx64 " refused: %s", transfer.length,
              transfer.peer, status.ToString().c_str());
  done_.push_back({transfer.tag, code});
}

void DataPlane::Complete(const Completion& completion) {
  NodeId node = kNoNode;
  if (completion.kind == OperationKind::kDisconnect) {
    if (Peer* peer = PeerOf(completion.peer, &node); peer != nullptr) {
      ROPETEAM_CHECK(peer->state == LinkState::kClosing && peer->puts == 0);
      connected_.erase(completion.peer);
      peer->peer = 0;
      return Reconnect(node, *peer);
    }
    const auto found = leaving_.find(completion.peer);
    if (found == leaving_.end()) return;
    node = found->second;
    leaving_.erase(found);
    if (node != kNoNode && !stopping_ && transport_->capabilities().fences_peers) callbacks_.on_fenced(node);
    return;
  }
  if (completion.context == kProbeTag) return OnProbe(completion);
  ROPETEAM_CHECK(outstanding_ > 0);
  --outstanding_;
  done_.push_back({completion.context, completion.code});
  if (const auto from_device = from_device_.extract(completion.context); !from_device.empty())
    device_buffers_.EndUse(from_device.mapped(), completion.code);
  Peer* peer = PeerOf(completion.peer, &node);
  if (peer == nullptr) return;  // it has left the view
  if (completion.kind == OperationKind::kPut) {
    ROPETEAM_CHECK(peer->puts > 0 && puts_ > 0);
    --peer->puts;
    --puts_;
  }
  if (completion.code == Code::kPeerGone && peer->state == LinkState::kUp)
    Lose(node, *peer, "the fabric has lost the peer");
}

void DataPlane::TellDone() {
  if (!done_.empty()) callbacks_.on_done(std::exchange(done_, {}));
}

void DataPlane::DrainForStop() {
  for (const StartTransfer& transfer : waiting_) done_.push_back({transfer.tag, Code::kPeerGone});
  waiting_.clear();
  ApplyMembers({});
  std::array<Completion, kCompletionsPerPoll> completions;
  const TimeUs give_up = EventLoop::Now() + kDrainUs;
  while ((outstanding_ != 0 || !leaving_.empty()) && EventLoop::Now() < give_up) {
    const size_t count = transport_->Poll(completions.data(), completions.size());
    for (size_t i = 0; i < count; ++i) Complete(completions[i]);
    TellDone();
    if (count == 0) transport_->Wait(10'000);
  }
  TellDone();
  if (outstanding_ != 0) LOG_WARNING("data plane stopped with %zu transfers unanswered", outstanding_);
}

}  // namespace ropeteam
