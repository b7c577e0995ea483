// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/rails.h"

#include <sched.h>

#include <algorithm>
#include <fstream>

#include "core/base/log.h"
#include "transport/blob.h"

namespace ropeteam::ofi {
namespace {

// Pieces that a rail gets beyond those at its device, so that its device is never idle. There are few of
// them, so that the other rails can take the rest.
constexpr uint32_t kPiecesAhead = 2;
constexpr size_t kBatch = 64;

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

// The devices of a provider without IP addresses, those of this thread's NUMA node first. Empty: it has
// addresses, or there is no device.
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
  // Even a single device without an IP address makes a rail: the nodes of a job must use the same address
  // format, and may have different numbers of devices.
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
      rails.back().listen_address = "";  // the device's own address
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
  ROPETEAM_RETURN_IF_ERROR(made->wake_.Open());
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

// A rail does not release a region that operations use. It releases it with its endpoint.
OfiRails::~OfiRails() { regions_.Clear(); }

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
    capabilities_.dmabuf &= of.dmabuf;
    const std::string prefix = address.provider + " on ";
    description_ += ", " + rail->Describe().substr(prefix.size());
  }
  local_address_ = Encode(self);
  ROPETEAM_CHECK(local_address_.size() <= kBlobBytesMax);
}

// `with(rail)` registers the region with the rail and returns its id there.
template <typename Register>
Status OfiRails::RegisterWithRails(rails::Region* region, Register with) {
  for (const auto& rail : rails_) {
    Result<RegionId> id = with(rail.get());
    if (!id.ok()) return id.status();
    region->rails.emplace_back(rail.get(), *id);
  }
  return OkStatus();
}

Status OfiRails::MapRegion(rails::Region* region, void* base) {
  region->base = rails_[0]->RemoteBase(base);
  return RegisterWithRails(region,
                           [&](OfiTransport* rail) { return rail->RegisterRegion(base, region->length); });
}

Result<RegionId> OfiRails::RegisterDmabuf(int fd, uint64_t offset, uint64_t length) {
  return AddRegion(length, [&](rails::Region* region) {
    region->exported = false;
    return RegisterWithRails(region,
                             [&](OfiTransport* rail) { return rail->RegisterDmabuf(fd, offset, length); });
  });
}

std::string OfiRails::EncodeKey(const rails::Region& region) const {
  RailsKey key{instance_, region.base, region.length, {}};
  for (size_t i = 0; i < rails_.size(); i++) {
    RegionKey one;
    ROPETEAM_CHECK(Decode(rails_[i]->ExportRegion(region.rails[i].id()), &one).ok());
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
    peer->links.push_back({peer.get(), peer->links.size(), pair.local, *id, mbps});
  }
  if (!status.ok()) {
    // Their completions find no peer and are dropped.
    for (const Link& link : peer->links) rails_[link.rail]->Disconnect(link.id);
    return status;
  }
  for (const Link& link : peer->links) by_rail_[link.rail][link.id] = peer.get();
  return AddPeer(std::move(peer));
}

Status OfiRails::DecodeKey(const Peer& peer, const std::string& bytes, rails::RemoteRegion* remote) {
  RailsKey key;
  ROPETEAM_RETURN_IF_ERROR(Decode(bytes, &key));
  if (key.instance != peer.instance) return front::ForeignKey(std::to_string(peer.id));
  if (key.keys.size() != peer.rails)
    return Error(Code::kInvalidArgument, "the region key is for %zu devices, peer %u has %zu",
                 key.keys.size(), peer.id, peer.rails);
  remote->length = key.length;
  const std::vector<RailPair> pairs = PairRails(rails_.size(), peer.rails);
  for (size_t i = 0; i < pairs.size(); i++) {
    const RegionKey one{key.instance, key.base, key.keys[pairs[i].remote], key.length};
    Result<RemoteRegionId> imported = rails_[pairs[i].local]->ImportRegion(peer.links[i].id, Encode(one));
    if (!imported.ok()) return imported.status();
    remote->links.push_back(*imported);
  }
  return OkStatus();
}

// One piece per turn.
void OfiRails::Pump() {
  working_.Go([this](Peer* peer) { return PostNext(peer); },
              [](Peer* peer) { return peer->queue.empty() && peer->redo.empty(); });
}

// The next piece to post: first those that a rail returned, then those of the queue. nullptr: nothing is
// left.
rails::Piece* OfiRails::NextPiece(Peer* peer) {
  while (!peer->redo.empty()) {
    Piece* piece = peer->redo.Pop();
    if (piece->operation->code == Code::kOk) return piece;
    FailPiece(piece, piece->operation->code);
  }
  if (peer->queue.empty()) return nullptr;
  Operation* operation = peer->queue.head();
  Piece* piece = pieces_.New();
  piece->operation = operation;
  piece->offset = operation->cut;
  piece->length = std::min(capabilities_.operation_bytes, operation->length - operation->cut);
  operation->pieces++;
  peer->queue.Cut(piece->length);
  return piece;
}

bool OfiRails::PostNext(Peer* peer) {
  if (peer->state != State::kUp) return false;
  loads_.clear();
  for (const Link& link : peer->links)
    loads_.push_back({!link.down && link.pieces < depth_ + kPiecesAhead, link.mbps, rail_bytes_[link.rail]});
  const int chosen = ChooseLink(loads_, capabilities_.operation_bytes);
  if (chosen < 0) return false;
  Piece* piece = NextPiece(peer);
  if (piece == nullptr) return false;
  Link* link = &peer->links[static_cast<size_t>(chosen)];
  piece->link = link;
  const Operation& operation = *piece->operation;
  const Status posted = rails_[link->rail]->Submit(
      operation.kind, link->id, operation.region->rails[link->rail].id(),
      operation.local_offset + piece->offset, operation.remote->links[link->index],
      operation.remote_offset + piece->offset, piece->length, reinterpret_cast<uintptr_t>(piece));
  if (!posted.ok()) {  // the rail's own limit; its completions make room
    peer->redo.Push(piece);
    return false;
  }
  link->pieces++;
  rail_bytes_[link->rail] += piece->length;
  return true;
}

void OfiRails::OnRail(size_t rail, const Completion& completion) {
  if (completion.kind == OperationKind::kDisconnect) {
    const auto found = by_rail_[rail].find(completion.peer);
    if (found == by_rail_[rail].end()) return;  // from a Connect() that failed
    Peer* peer = found->second;
    by_rail_[rail].erase(found);
    if (--peer->disconnecting == 0) FinishDisconnect(peer);
    return;
  }
  auto* piece = reinterpret_cast<Piece*>(completion.context);
  Link* link = piece->link;
  link->pieces--;
  rail_bytes_[rail] -= piece->length;
  if (completion.code == Code::kOk) {
    Operation* operation = piece->operation;
    operation->pieces--;
    pieces_.Free(piece);
    return Settle(link->peer, operation);
  }
  const bool lost = completion.code == Code::kPeerGone;
  if (lost) LoseLink(link);
  // Judge() decides whether the peer is gone, not one rail.
  if (!Redo(piece, completion.code)) FailPiece(piece, lost ? Code::kLinkFailed : completion.code);
}

// Queues the piece of a get for another try, if one is due. False: the piece fails.
bool OfiRails::Redo(Piece* piece, Code code) {
  Peer* peer = piece->link->peer;
  const bool lost = code == Code::kPeerGone;
  const bool broken = code == Code::kLinkFailed;
  if (peer->gone() || peer->closing() || !(lost || broken)) return false;
  if (piece->operation->kind == OperationKind::kPut) return false;  // see rails.h
  if (broken) {
    const bool others = std::any_of(peer->links.begin(), peer->links.end(), [piece](const Link& other) {
      return &other != piece->link && !other.down;
    });
    if (piece->suspected || !others) return false;
    piece->suspected = true;
  }
  peer->redo.Push(piece);
  working_.Add(peer);
  return true;
}

void OfiRails::FailPiece(Piece* piece, Code code) {
  Peer* peer = piece->link->peer;
  Operation* operation = piece->operation;
  operation->pieces--;
  pieces_.Free(piece);
  if (operation->code == Code::kOk) operation->code = code;
  peer->queue.Abandon(operation);
  Settle(peer, operation);
}

void OfiRails::Settle(Peer* peer, Operation* operation) {
  if (operation->pieces > 0 || operation->queued) return;
  const Code code = operation->code;
  if (code == Code::kOk)
    operations_.Finish(operation, Code::kOk);
  else if (peer->gone() || peer->closing())
    operations_.Finish(operation, Code::kPeerGone);
  else if (peer->state == State::kJudged)
    peer->pending.Push(operation);
  else
    operations_.Finish(operation, code);
}

void OfiRails::LoseLink(Link* link) {
  Peer* peer = link->peer;
  if (link->down) return;
  link->down = true;
  if (peer->state != State::kUp) return;
  peer->state = State::kJudged;
  judged_++;
  for (Link& other : peer->links) {
    if (other.down) continue;
    rails_[other.rail]->Check(other.id);
  }
}

// Ends the check once every rail knows whether it reaches the peer; until then it does nothing.
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
  if (!lives) {
    LOG_WARNING("ofi peer %u: gone: no rail reaches it", peer->id);
    return GiveUp(peer, State::kGone);
  }
  peer->state = State::kUp;
  for (Link& link : peer->links) {
    if (!link.down || link.told) continue;
    link.told = true;
    LOG_WARNING("ofi peer %u: left out rail %s: %s; the others carry on", peer->id,
                rails_[link.rail]->Describe().c_str(), rails_[link.rail]->WhyGone(link.id));
  }
  while (!peer->pending.empty()) Settle(peer, peer->pending.Pop());
}

// Pieces that are at rails complete later.
void OfiRails::GiveUp(Peer* peer, State state) {
  peer->state = state;
  working_.Remove(peer);
  while (!peer->redo.empty()) FailPiece(peer->redo.Pop(), Code::kPeerGone);
  while (!peer->pending.empty()) Settle(peer, peer->pending.Pop());
  while (!peer->queue.empty()) {
    Operation* operation = peer->queue.head();
    operation->code = Code::kPeerGone;
    peer->queue.Pop();
    Settle(peer, operation);
  }
}

void OfiRails::Disconnect(PeerId id) {
  Peer* peer = Connected(id);
  if (peer == nullptr) return;
  if (peer->state == State::kJudged) judged_--;
  GiveUp(peer, State::kClosing);
  peer->disconnecting = peer->links.size();
  for (const Link& link : peer->links) rails_[link.rail]->Disconnect(link.id);
}

void OfiRails::FinishDisconnect(Peer* peer) {
  ROPETEAM_CHECK(peer->redo.empty() && peer->pending.empty() && !peer->listed);
  RemovePeer(peer->id);
}

void OfiRails::Progress() {
  for (size_t rail = 0; rail < rails_.size(); rail++) {
    Completion batch[kBatch];
    const size_t count = rails_[rail]->Poll(batch, kBatch);
    for (size_t i = 0; i < count; i++) OnRail(rail, batch[i]);
  }
  if (judged_ > 0)
    for (auto& [id, peer] : peers_)
      if (peer->state == State::kJudged) Judge(peer.get());
  Pump();
  for (const auto& rail : rails_) rail->StartSubmitted();
}

bool OfiRails::Busy(TimeUs now) const {
  return std::any_of(rails_.begin(), rails_.end(), [now](const auto& rail) { return rail->Busy(now); });
}

void OfiRails::Sleep(TimeUs now, uint64_t timeout_us) {
  sleep_items_.assign(1, wake_.item());
  sleep_begins_.clear();
  for (const auto& rail : rails_) {
    sleep_begins_.push_back(sleep_items_.size());
    if (!rail->PrepareSleep(now, &timeout_us, &sleep_items_)) return Progress();
    // PrepareSleep() has found completions.
    if (rail->operations_.finished()) return;
  }
  sleep_begins_.push_back(sleep_items_.size());
  front::SleepOn(&sleep_items_, timeout_us);
  wake_.AfterSleep(sleep_items_[0]);
  for (size_t i = 0; i < rails_.size(); i++)
    rails_[i]->FinishSleep(sleep_items_.data() + sleep_begins_[i], sleep_begins_[i + 1] - sleep_begins_[i]);
  Progress();
}

}  // namespace ropeteam::ofi
