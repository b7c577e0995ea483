// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/rails.h"

#include <sched.h>

#include <algorithm>
#include <fstream>

#include "core/base/log.h"
#include "transport/parcel.h"

namespace ropeteam::ofi {
namespace {

// Pieces that a rail is given beyond those that it hands to its device: it has the next at hand, and the
// others take what it does not get done.
constexpr uint32_t kPiecesAhead = 2;
constexpr size_t kBatch = 64;

unsigned long long Ull(uint64_t value) { return value; }

bool InRange(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

// The devices of a provider without IP addresses, this thread's NUMA node first. Empty: it has addresses, or
// nothing is there.
std::vector<std::string> DomainsOf(const std::string& provider) {
  fi_info* list = nullptr;
  if (fi_getinfo(kFabricVersion, nullptr, nullptr, 0, Hints(provider).get(), &list) != 0) return {};
  const Info all(list);
  unsigned own_node = 0;
  getcpu(nullptr, &own_node);
  std::vector<std::string> near, far;
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    if (HasIpAddresses(info)) return {};
    const std::string name = info->domain_attr->name;
    if (std::find(near.begin(), near.end(), name) != near.end() ||
        std::find(far.begin(), far.end(), name) != far.end())
      continue;
    (NumaNodeOf(info) == static_cast<int>(own_node) ? near : far).push_back(name);
  }
  near.insert(near.end(), far.begin(), far.end());
  return near;
}

}  // namespace

int NumaNodeOf(const fi_info* info) {
  if (info->nic == nullptr || info->nic->bus_attr == nullptr || info->nic->bus_attr->bus_type != FI_BUS_PCI)
    return -1;
  const fi_pci_attr& pci = info->nic->bus_attr->attr.pci;
  char path[80];
  snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.%x/numa_node", pci.domain_id, pci.bus_id,
           pci.device_id, pci.function_id);
  std::ifstream file(path);
  int node = -1;
  return file >> node ? node : -1;
}

std::vector<OfiConfig> RailsOf(const OfiConfig& config) {
  std::vector<OfiConfig> rails;
  const std::vector<std::string> addresses = Split(config.listen_address), devices = Split(config.device);
  // Also a single device without an IP address: the nodes of a job need not have as many, and speak one
  // language.
  const std::vector<std::string> domains = DomainsOf(config.provider);
  if (addresses.size() > 1) {
    for (const std::string& address : addresses) {
      rails.push_back(config);
      rails.back().listen_address = address;
      rails.back().device = devices.size() == addresses.size() ? devices[rails.size() - 1] : "";
    }
  } else if (devices.size() > 1 || !domains.empty()) {
    for (const std::string& name : devices.empty() ? domains : devices) {
      rails.push_back(config);
      rails.back().device = name;
      rails.back().listen_address = "";  // the device's own
    }
  }
  if (rails.size() > kRailsMax) {
    LOG_WARNING("ofi: %zu devices, the first %zu are used", rails.size(), kRailsMax);
    rails.resize(kRailsMax);
  }
  return rails;
}

Result<std::unique_ptr<Transport>> OfiRails::Create(const std::vector<OfiConfig>& configs) {
  std::unique_ptr<OfiRails> made(new OfiRails);
  made->instance_ = RandomNumber();
  made->depth_ = configs[0].depth;
  for (const OfiConfig& config : configs) {
    Result<std::unique_ptr<OfiTransport>> rail = OfiTransport::Create(config, made->instance_);
    if (!rail.ok()) return rail.status();
    made->rails_.push_back(std::move(rail).value());
  }
  made->NameSelf();
  LOG_INFO("transport %s", made->Describe().c_str());
  return std::unique_ptr<Transport>(std::move(made));
}

void OfiRails::NameSelf() {
  by_rail_.resize(rails_.size());
  rail_bytes_.resize(rails_.size());
  RailsAddress self;
  self.instance = instance_;
  for (const auto& rail : rails_) {
    const TransportCapabilities& of = rail->capabilities();
    EndpointAddress address;
    ROPETEAM_CHECK(Decode(rail->LocalAddress(), &address).ok());
    self.address_format = address.address_format;
    self.provider = address.provider;
    rail_mbps_.push_back(static_cast<uint32_t>(of.link_mbps));
    self.rails.push_back({address.hello_address, address.hello_key, address.name, rail_mbps_.back()});
    if (self.rails.size() == 1) {
      capabilities_ = of;
      description_ = rail->Describe();
      continue;
    }
    capabilities_.devices += "," + of.devices;
    if (!of.address.empty()) capabilities_.address += "," + of.address;
    capabilities_.link_mbps += of.link_mbps;
    const std::string prefix = address.provider + " on ";
    description_ += ", " + rail->Describe().substr(prefix.size());
  }
  local_address_ = Encode(self);
  ROPETEAM_CHECK(local_address_.size() <= kParcelBytesMax);
}

Result<RegionId> OfiRails::RegisterRegion(void* base, uint64_t length) {
  auto region = std::make_unique<Region>();
  region->length = length;
  region->base = rails_[0]->RemoteBase(base);
  Status status;
  for (const auto& rail : rails_) {
    Result<RegionId> id = rail->RegisterRegion(base, length);
    if (!id.ok()) {
      status = id.status();
      break;
    }
    region->rails.push_back(*id);
  }
  if (!status.ok()) {
    for (size_t i = 0; i < region->rails.size(); i++) (void)rails_[i]->DeregisterRegion(region->rails[i]);
    return status;
  }
  registrations_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(regions_mutex_);
  const RegionId id = region_next_++;
  regions_.emplace(id, std::move(region));
  return id;
}

Status OfiRails::DeregisterRegion(RegionId id) {
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end()) return Error(Code::kInvalidArgument, "region %u is not registered", id);
  if (const uint64_t operations = found->second->operations.load(); operations != 0)
    return Error(Code::kInvalidArgument, "region %u has %llu operations outstanding", id, Ull(operations));
  Status status;
  for (size_t i = 0; i < rails_.size(); i++)
    if (const Status one = rails_[i]->DeregisterRegion(found->second->rails[i]); !one.ok()) status = one;
  regions_.erase(found);
  return status;
}

std::string OfiRails::ExportRegion(RegionId id) const {
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end()) return {};
  RailsKey key{instance_, found->second->base, found->second->length, {}};
  for (size_t i = 0; i < rails_.size(); i++) {
    RegionKey one;
    ROPETEAM_CHECK(Decode(rails_[i]->ExportRegion(found->second->rails[i]), &one).ok());
    key.keys.push_back(one.key);
  }
  return Encode(key);
}

Result<PeerId> OfiRails::Connect(const std::string& bytes) {
  RailsAddress remote;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &remote));
  auto peer = std::make_unique<Peer>();
  peer->instance = remote.instance;
  peer->rails = remote.rails.size();
  Status status;
  for (const RailPair& pair : PairRails(rails_.size(), remote.rails.size())) {
    const RailsAddress::Rail& other = remote.rails[pair.remote];
    EndpointAddress address{remote.instance,       other.hello_address, other.hello_key,
                            remote.address_format, remote.provider,     other.name};
    Result<PeerId> id = rails_[pair.local]->Connect(Encode(address));
    if (!id.ok()) {
      status = id.status();
      break;
    }
    const uint64_t mbps = std::min(rail_mbps_[pair.local], other.link_mbps);
    peer->links.push_back({peer.get(), pair.local, *id, mbps, 0, false});
  }
  if (!status.ok()) {
    // Their completions find nobody and are dropped.
    for (const Link& link : peer->links) rails_[link.rail]->Disconnect(link.id);
    return status;
  }
  peer->id = peer_next_++;
  for (const Link& link : peer->links) by_rail_[link.rail][link.id] = peer.get();
  const PeerId id = peer->id;
  peers_.emplace(id, std::move(peer));
  return id;
}

Result<RemoteRegionId> OfiRails::ImportRegion(PeerId id, const std::string& bytes) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->state == State::kClosing)
    return Error(Code::kInvalidArgument, "peer %u is not connected", id);
  Peer* peer = found->second.get();
  RailsKey key;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &key));
  if (key.instance != peer->instance)
    return Error(Code::kInvalidArgument, "the region key is not from this instance of peer %u", id);
  if (key.keys.size() != peer->rails)
    return Error(Code::kInvalidArgument, "the region key is for %zu devices, peer %u has %zu",
                 key.keys.size(), id, peer->rails);
  RemoteRegion region{id, key.length, {}};
  const std::vector<RailPair> pairs = PairRails(rails_.size(), peer->rails);
  for (size_t i = 0; i < pairs.size(); i++) {
    const RegionKey one{key.instance, key.base, key.keys[pairs[i].remote], key.length};
    Result<RemoteRegionId> imported = rails_[pairs[i].local]->ImportRegion(peer->links[i].id, Encode(one));
    if (!imported.ok()) return imported.status();
    region.links.push_back(*imported);
  }
  const RemoteRegionId remote = remote_region_next_++;
  remote_regions_.emplace(remote, std::move(region));
  return remote;
}

Status OfiRails::Submit(OperationKind kind, PeerId peer_id, RegionId local, uint64_t local_offset,
                        RemoteRegionId remote, uint64_t remote_offset, uint64_t length, uint64_t context) {
  const auto found = peers_.find(peer_id);
  if (found == peers_.end() || found->second->state == State::kClosing)
    return Error(Code::kInvalidArgument, "peer %u is not connected", peer_id);
  Peer* peer = found->second.get();
  const auto target = remote_regions_.find(remote);
  if (target == remote_regions_.end() || target->second.peer != peer_id)
    return Error(Code::kInvalidArgument, "remote region %u is not of peer %u", remote, peer_id);
  if (!InRange(remote_offset, length, target->second.length))
    return Error(Code::kInvalidArgument, "offset %llu + %llu bytes is outside remote region %u of %llu bytes",
                 Ull(remote_offset), Ull(length), remote, Ull(target->second.length));
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
  if (operations_free_.empty()) operations_free_.push_back(&operations_.emplace_back());
  Operation* operation = operations_free_.back();
  operations_free_.pop_back();
  *operation = Operation{};
  operation->completion = {kind, peer_id, context, Code::kOk};
  operation->region = region;
  operation->remote = &target->second;
  operation->local_offset = local_offset;
  operation->remote_offset = remote_offset;
  operation->length = length;
  accepted_++;
  if (peer->state == State::kGone || length == 0) {
    Complete(operation, peer->state == State::kGone ? Code::kPeerGone : Code::kOk);
    return OkStatus();
  }
  operation->queued = true;
  if (peer->queue.empty()) working_.push_back(peer);
  peer->queue.push_back(operation);
  return OkStatus();
}

void OfiRails::Complete(Operation* operation, Code code) {
  ROPETEAM_CHECK(operation->pieces == 0 && !operation->queued);
  operation->completion.code = code;
  const bool put = operation->completion.kind == OperationKind::kPut;
  (put ? puts_ : gets_).fetch_add(1, std::memory_order_relaxed);
  if (code != Code::kOk)
    failures_.fetch_add(1, std::memory_order_relaxed);
  else
    (put ? put_bytes_ : get_bytes_).fetch_add(operation->length, std::memory_order_relaxed);
  completed_.push_back(operation->completion);
  completed_regions_.push_back(operation->region);
  operations_free_.push_back(operation);
}

// A piece a turn, round and round, until nobody can post.
void OfiRails::Pump() {
  size_t idle_turns = 0;
  while (idle_turns < working_.size()) {
    if (working_next_ >= working_.size()) working_next_ = 0;
    Peer* peer = working_[working_next_];
    idle_turns = PostNext(peer) ? 0 : idle_turns + 1;
    if (peer->queue.empty())
      working_.erase(working_.begin() +
                     static_cast<ptrdiff_t>(working_next_));  // the next one takes its place
    else
      working_next_++;
  }
}

bool OfiRails::PostNext(Peer* peer) {
  if (peer->state != State::kUp || peer->queue.empty()) return false;
  loads_.clear();
  for (const Link& link : peer->links)
    loads_.push_back({!link.down && link.pieces < depth_ + kPiecesAhead, link.mbps, rail_bytes_[link.rail]});
  const int chosen = ChooseLink(loads_, capabilities_.operation_bytes);
  if (chosen < 0) return false;
  const auto index = static_cast<size_t>(chosen);
  Link* link = &peer->links[index];
  Operation* operation = peer->queue.front();
  if (pieces_free_.empty()) pieces_free_.push_back(&pieces_.emplace_back());
  Piece* piece = pieces_free_.back();
  const uint64_t length = std::min(capabilities_.operation_bytes, operation->length - operation->cut);
  *piece = {operation, link, length};
  OfiTransport& rail = *rails_[link->rail];
  const Status posted =
      rail.Submit(operation->completion.kind, link->id, operation->region->rails[link->rail],
                  operation->local_offset + operation->cut, operation->remote->links[index],
                  operation->remote_offset + operation->cut, length, reinterpret_cast<uintptr_t>(piece));
  if (!posted.ok()) return false;  // the rail's own limit; its completions make room
  pieces_free_.pop_back();
  link->pieces++;
  rail_bytes_[link->rail] += length;
  operation->pieces++;
  operation->cut += length;
  if (operation->cut == operation->length) {
    peer->queue.pop_front();
    operation->queued = false;
  }
  return true;
}

void OfiRails::OnRail(size_t rail, const Completion& completion) {
  if (completion.kind == OperationKind::kDisconnect) {
    const auto found = by_rail_[rail].find(completion.peer);
    if (found == by_rail_[rail].end()) return;  // of a Connect() that came to nothing
    Peer* peer = found->second;
    by_rail_[rail].erase(found);
    if (--peer->disconnecting == 0) FinishDisconnect(peer);
    return;
  }
  auto* piece = reinterpret_cast<Piece*>(completion.context);
  Link* link = piece->link;
  Operation* operation = piece->operation;
  link->pieces--;
  rail_bytes_[rail] -= piece->length;
  operation->pieces--;
  pieces_free_.push_back(piece);
  if (completion.code != Code::kOk) {
    if (operation->completion.code == Code::kOk) operation->completion.code = completion.code;
    if (operation->queued) {
      ROPETEAM_CHECK(link->peer->queue.front() == operation);  // only the first is partly cut
      link->peer->queue.pop_front();
      operation->queued = false;
    }
    if (completion.code == Code::kPeerGone) LoseLink(link);
  }
  Settle(link->peer, operation);
}

void OfiRails::Settle(Peer* peer, Operation* operation) {
  if (operation->pieces > 0 || operation->queued) return;
  const Code code = operation->completion.code;
  if (code == Code::kOk)
    Complete(operation, Code::kOk);
  else if (peer->state == State::kGone || peer->state == State::kClosing)
    Complete(operation, Code::kPeerGone);
  else if (peer->state == State::kJudged)
    peer->pending.push_back(operation);
  else
    Complete(operation, code == Code::kPeerGone ? Code::kLinkFailed : code);
}

void OfiRails::LoseLink(Link* link) {
  Peer* peer = link->peer;
  if (link->down) return;
  link->down = true;
  if (peer->state != State::kUp) return;
  peer->state = State::kJudged;
  judged_++;
  for (const Link& other : peer->links)
    if (!other.down) rails_[other.rail]->Look(other.id);
}

// Once every rail knows: the peer lives, or it does not.
void OfiRails::Judge(Peer* peer) {
  bool lives = false;
  for (Link& link : peer->links) {
    if (link.down) continue;
    const PeerState state = rails_[link.rail]->StateOf(link.id);
    if (state == PeerState::kConnecting) return;
    if (state == PeerState::kGone)
      link.down = true;
    else
      lives = true;
  }
  judged_--;
  peer->state = lives ? State::kUp : State::kGone;
  for (const Link& link : peer->links)
    if (lives && link.down)
      LOG_WARNING("ofi peer %u: left out rail %s", peer->id,
                  rails_[link.rail]->capabilities().devices.c_str());
  std::vector<Operation*> pending;
  pending.swap(peer->pending);
  for (Operation* operation : pending) Settle(peer, operation);
  if (!lives) FailQueue(peer);
}

void OfiRails::FailQueue(Peer* peer) {
  while (!peer->queue.empty()) {
    Operation* operation = peer->queue.front();
    peer->queue.pop_front();
    operation->queued = false;
    operation->completion.code = Code::kPeerGone;
    Settle(peer, operation);
  }
}

void OfiRails::Disconnect(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->state == State::kClosing) return;
  Peer* peer = found->second.get();
  if (peer->state == State::kJudged) judged_--;
  peer->state = State::kClosing;
  std::vector<Operation*> pending;
  pending.swap(peer->pending);
  for (Operation* operation : pending) Settle(peer, operation);
  FailQueue(peer);
  peer->disconnecting = peer->links.size();
  for (const Link& link : peer->links) rails_[link.rail]->Disconnect(link.id);
}

void OfiRails::FinishDisconnect(Peer* peer) {
  ROPETEAM_CHECK(peer->queue.empty() && peer->pending.empty());
  std::erase_if(remote_regions_, [peer](const auto& entry) { return entry.second.peer == peer->id; });
  std::erase(working_, peer);
  completed_.push_back({OperationKind::kDisconnect, peer->id, 0, Code::kOk});
  completed_regions_.push_back(nullptr);
  peers_.erase(peer->id);
}

bool OfiRails::Progress() {
  for (size_t rail = 0; rail < rails_.size(); rail++) {
    Completion batch[kBatch];
    const size_t count = rails_[rail]->Poll(batch, kBatch);
    for (size_t i = 0; i < count; i++) OnRail(rail, batch[i]);
  }
  if (judged_ > 0)
    for (auto& [id, peer] : peers_)
      if (peer->state == State::kJudged) Judge(peer.get());
  Pump();
  return !completed_.empty();
}

size_t OfiRails::Poll(Completion* out, size_t capacity) {
  Progress();
  size_t count = 0;
  for (; count < capacity && !completed_.empty(); count++) {
    out[count] = completed_.front();
    completed_.pop_front();
    if (Region* region = completed_regions_.front(); region != nullptr) {
      region->operations.fetch_sub(1);
      accepted_--;
    }
    completed_regions_.pop_front();
  }
  return count;
}

void OfiRails::Wait(uint64_t timeout_us) {
  if (!completed_.empty() || rails_[0]->ConsumeWake()) return;
  TimeUs now = Now();
  const TimeUs deadline = timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
  if (std::any_of(rails_.begin(), rails_.end(), [now](const auto& rail) { return rail->Busy(now); })) {
    const TimeUs spin_end = std::min(deadline, now + kSpinUs);
    while (now < spin_end) {
      if (Progress() || rails_[0]->ConsumeWake()) return;
      now = Now();
    }
  }
  if (now >= deadline) return;
  timeout_us = deadline - now;
  sleep_items_.clear();
  sleep_begins_.clear();
  for (const auto& rail : rails_) {
    sleep_begins_.push_back(sleep_items_.size());
    if (!rail->PrepareSleep(now, &timeout_us, &sleep_items_)) {
      Progress();
      return;
    }
    // What it has found on the way to bed.
    if (!rail->completed_.empty()) return;
  }
  SleepOn(&sleep_items_, timeout_us);
  for (size_t i = 0; i < rails_.size(); i++) {
    const size_t end = i + 1 < rails_.size() ? sleep_begins_[i + 1] : sleep_items_.size();
    rails_[i]->FinishSleep(sleep_items_.data() + sleep_begins_[i], end - sleep_begins_[i]);
  }
  Progress();
}

Transport::Counters OfiRails::counters() const {
  Counters c;
  c.registrations = registrations_.load(std::memory_order_relaxed);
  c.put_bytes = put_bytes_.load(std::memory_order_relaxed);
  c.get_bytes = get_bytes_.load(std::memory_order_relaxed);
  c.puts = puts_.load(std::memory_order_relaxed);
  c.gets = gets_.load(std::memory_order_relaxed);
  c.failures = failures_.load(std::memory_order_relaxed);
  return c;
}

}  // namespace ropeteam::ofi
