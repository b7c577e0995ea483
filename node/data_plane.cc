// SPDX-License-Identifier: Apache-2.0
#include "node/data_plane.h"

#include <array>
#include <cinttypes>
#include <utility>

#include "core/base/log.h"
#include "node/event_loop.h"

namespace ropeteam {
namespace {

constexpr size_t kCompletionsPerPoll = 64;
constexpr uint64_t kForeverUs = UINT64_MAX;
// Stop() gives peers' completions this long; the contract says 100 ms, a loaded machine may take more.
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
                                                     std::span<std::byte> arena) {
  Result<RegionId> region = transport->RegisterRegion(arena.data(), arena.size());
  if (!region.ok()) return region.status();
  const std::string endpoint = transport->LocalAddress();
  const std::string key = transport->ExportRegion(*region);
  std::unique_ptr<DataPlane> plane(new DataPlane(std::move(transport), *region));
  plane->address_ = PackDataAddress(endpoint, key);
  if (plane->address_.size() > kAddressBytesMax)
    return Error(Code::kInternal, "data address of %zu bytes, limit %zu", plane->address_.size(),
                 kAddressBytesMax);
  return plane;
}

DataPlane::DataPlane(std::unique_ptr<Transport> transport, RegionId region)
    : transport_(std::move(transport)), device_buffers_(transport_.get()), region_(region) {}

DataPlane::~DataPlane() {
  Stop();
  // Nothing is outstanding; a refusal would only say that the transport is broken, and it goes next.
  (void)transport_->DeregisterRegion(region_);
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
    StartWaiting();
    const size_t count = transport_->Poll(completions.data(), completions.size());
    for (size_t i = 0; i < count; ++i) Complete(completions[i]);
    TellDone();
    if (!took && count == 0) transport_->Wait(kForeverUs);
  }
  DrainForStop();
}

bool DataPlane::TakeInput() {
  Input input;
  {
    const std::lock_guard lock(mutex_);
    if (input_.transfers.empty() && input_.views.empty() && !input_.stop) return false;
    std::swap(input, input_);
  }
  // Members first: a transfer to a node is asked for only after the view that has it.
  for (const std::vector<Member>& members : input.views) ApplyMembers(members);
  waiting_.insert(waiting_.end(), input.transfers.begin(), input.transfers.end());
  stopping_ = stopping_ || input.stop;
  return true;
}

void DataPlane::ApplyMembers(const std::vector<Member>& members) {
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
  // Only a transport that fences can promise anything about a peer, and only once it has been connected and
  // disconnected.
  if (!peer.connected && !stopping_ && transport_->capabilities().fences_peers) (void)Connect(node, peer);
  if (!peer.connected) return;
  leaving_[peer.peer] = node;
  transport_->Disconnect(peer.peer);
}

Status DataPlane::Connect(NodeId node, Peer& peer) {
  if (peer.connected) return OkStatus();
  std::string endpoint, key;
  if (!UnpackDataAddress(peer.data_address, &endpoint, &key))
    return Error(Code::kInvalidArgument, "node %016" PRIx64 " has a data address of %zu bytes that is none",
                 node, peer.data_address.size());
  Result<PeerId> connected = transport_->Connect(endpoint);
  if (!connected.ok()) return connected.status();
  Result<RemoteRegionId> region = transport_->ImportRegion(*connected, key);
  if (!region.ok()) {
    leaving_[*connected] = kNoNode;
    transport_->Disconnect(*connected);
    return region.status();
  }
  peer.connected = true;
  peer.peer = *connected;
  peer.region = *region;
  return OkStatus();
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
  Status status = Connect(transfer.peer, peer);
  if (status.ok() && transfer.buffer != 0) return StartFromDevice(peer, transfer);
  if (status.ok())
    status = transfer.get ? transport_->Get(peer.peer, region_, transfer.local_offset, peer.region,
                                            transfer.remote_offset, transfer.length, transfer.tag)
                          : transport_->Put(peer.peer, region_, transfer.local_offset, peer.region,
                                            transfer.remote_offset, transfer.length, transfer.tag);
  if (status.ok()) {
    ++outstanding_;
    return true;
  }
  if (status.code() == Code::kNoSpace && outstanding_ != 0) return false;  // a completion makes room
  Refuse(transfer, status, status.code());
  return true;
}

bool DataPlane::StartFromDevice(const Peer& peer, const StartTransfer& transfer) {
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
    ++outstanding_;
    return true;
  }
  device_buffers_.EndUse(transfer.buffer, status.code());
  if (status.code() == Code::kNoSpace && outstanding_ != 0) return false;
  Refuse(transfer, status, Code::kNotFound);
  return true;
}

void DataPlane::Refuse(const StartTransfer& transfer, const Status& status, Code code) {
  LOG_WARNING("data transfer of %" PRIu64 " bytes with node %016" PRIx64 " refused: %s", transfer.length,
              transfer.peer, status.ToString().c_str());
  done_.push_back({transfer.tag, code});
}

void DataPlane::Complete(const Completion& completion) {
  if (completion.kind != OperationKind::kDisconnect) {
    --outstanding_;
    done_.push_back({completion.context, completion.code});
    if (const auto from_device = from_device_.extract(completion.context); !from_device.empty())
      device_buffers_.EndUse(from_device.mapped(), completion.code);
    return;
  }
  const auto found = leaving_.find(completion.peer);
  if (found == leaving_.end()) return;
  const NodeId node = found->second;
  leaving_.erase(found);
  if (node != kNoNode && !stopping_ && transport_->capabilities().fences_peers) callbacks_.on_fenced(node);
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
