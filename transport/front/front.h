// SPDX-License-Identifier: Apache-2.0
//
// Front<> is the part of a Transport that is the same for all fabrics: the checks of a call and their messages, the
// tables of regions and peers, the list of finished operations, waiting and waking. The fabric moves the bytes. Front<>
// consists of the pieces in this folder. It has its fabric as a template parameter, so there is no virtual call and no
// lock between the two.
//
//   class XTransport final : public front::Front<XTransport, Peer, Operation> { friend Front; … };
//
// Operation derives from Accepted<>, its Region from LocalRegion, its Remote from PeerRegion. Peer has
//   PeerId id; Queue<Operation> queue; bool gone() const; bool closing() const;
// and the fabric has
//   MapRegion(Region*, base) -> Status          any thread: registers region->length bytes, which may be 0,
//                                               with its devices; logs why it could not
//   EncodeKey(const Region&) -> string          any thread
//   DecodeKey(const Peer&, bytes, Remote*) -> Status      fills in `length` and its own; `peer` is set here
//   Start(Peer*)                                the peer's queue has a new operation. Progress() follows before
//                                               the next Sleep(), so Start() need not post it
//   Progress()                                  as far as it goes without blocking
//   Busy(now) -> bool                           the next piece of work is likely to be nearer than a sleep
//                                               and its wake-up are long
//   Sleep(now, timeout_us)                      on wake_ and what the devices have; may return early
// in addition to Connect(), Disconnect() and RegisterDmabuf() of Transport.
//
// The fabric's destructor ends its peers and clears its regions while its devices are open: the members of Front<>
// are destroyed after those of the fabric.

#ifndef ROPETEAM_TRANSPORT_FRONT_FRONT_H_
#define ROPETEAM_TRANSPORT_FRONT_FRONT_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "transport/front/checks.h"
#include "transport/front/list.h"
#include "transport/front/operation_table.h"
#include "transport/front/regions.h"
#include "transport/front/system.h"
#include "transport/transport.h"

namespace ropeteam::front {

template <typename Fabric, typename Peer, typename Operation>
class Front : public Transport {
 public:
  using Region = typename Operation::Region;
  using Remote = typename Operation::Remote;

  const TransportCapabilities& capabilities() const final { return capabilities_; }
  std::string LocalAddress() const final { return local_address_; }
  std::string Describe() const final { return description_; }
  Counters counters() const final { return operations_.counts().Read(regions_.registrations()); }
  void Wake() final { wake_.Wake(); }

  Result<RegionId> RegisterRegion(void* base, uint64_t length) final {
    ROPETEAM_RETURN_IF_ERROR(CheckMemory(base, length));
    return AddRegion(length, [&](Region* region) { return self().MapRegion(region, base); });
  }
  Status DeregisterRegion(RegionId id) final {
    Result<std::unique_ptr<Region>> removed = regions_.Remove(id);
    return removed.ok() ? OkStatus() : removed.status();  // the devices are released here, without the lock
  }
  std::string ExportRegion(RegionId id) const final {
    return regions_.Export(id, [this](const Region& region) { return self().EncodeKey(region); });
  }
  Result<RemoteRegionId> ImportRegion(PeerId id, const std::string& bytes) final {
    Peer* peer = Connected(id);
    if (peer == nullptr) return NotConnected(id);
    Remote remote;
    ROPETEAM_RETURN_IF_ERROR(self().DecodeKey(*peer, bytes, &remote));
    remote.peer = id;
    return remotes_.Add(std::move(remote));
  }

  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) final {
    return Submit(OperationKind::kPut, peer, local, local_offset, remote, remote_offset, length, context);
  }
  Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) final {
    return Submit(OperationKind::kGet, peer, local, local_offset, remote, remote_offset, length, context);
  }
  // Put() and Get().
  Status Submit(OperationKind kind, PeerId peer_id, RegionId local, uint64_t local_offset,
                RemoteRegionId remote_id, uint64_t remote_offset, uint64_t length, uint64_t context);

  size_t Poll(Completion* out, size_t capacity) final {
    submitted_ = false;
    self().Progress();
    return operations_.Take(out, capacity);
  }
  void Wait(uint64_t timeout_us) final;

 protected:
  Front() = default;

  // No event announces what only waits in a queue of this process.
  void StartSubmitted() {
    if (std::exchange(submitted_, false)) self().Progress();
  }

  // Registers a region of `length` bytes with `map`, which gets the Region and returns a Status.
  template <typename Map>
  Result<RegionId> AddRegion(uint64_t length, Map map);
  // nullptr: the peer is unknown, or is being disconnected.
  Peer* Connected(PeerId id) {
    const auto found = peers_.find(id);
    return found == peers_.end() || found->second->closing() ? nullptr : found->second.get();
  }
  PeerId AddPeer(std::unique_ptr<Peer> peer) {
    peer->id = peer_next_++;
    const PeerId id = peer->id;
    peers_.emplace(id, std::move(peer));
    return id;
  }
  // The last step of Disconnect(): no device uses the peer any more. The caller destroys it.
  std::unique_ptr<Peer> RemovePeer(PeerId id) {
    remotes_.Drop(id);
    operations_.FinishDisconnect(id);
    const auto found = peers_.find(id);
    std::unique_ptr<Peer> peer = std::move(found->second);
    peers_.erase(found);
    ROPETEAM_CHECK(peer->queue.empty());
    return peer;
  }

  TransportCapabilities capabilities_;
  std::string local_address_, description_;
  WakeFd wake_;
  RegionTable<Region> regions_;
  // [loop]
  OperationTable<Operation> operations_;
  RemoteTable<Remote> remotes_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;

 private:
  Fabric& self() { return static_cast<Fabric&>(*this); }
  const Fabric& self() const { return static_cast<const Fabric&>(*this); }

  PeerId peer_next_ = 1;
  bool submitted_ = false;  // [loop] an operation was queued, and no Progress() was made since
};

template <typename Fabric, typename Peer, typename Operation>
Status Front<Fabric, Peer, Operation>::Submit(OperationKind kind, PeerId peer_id, RegionId local,
                                              uint64_t local_offset, RemoteRegionId remote_id,
                                              uint64_t remote_offset, uint64_t length, uint64_t context) {
  Peer* peer = Connected(peer_id);
  if (peer == nullptr) return NotConnected(peer_id);
  Remote* remote = remotes_.Find(remote_id, peer_id);
  if (remote == nullptr) return NotOfPeer(remote_id, peer_id);
  ROPETEAM_RETURN_IF_ERROR(CheckRange(remote_offset, length, remote->length, "remote region", remote_id));
  if (operations_.accepted() >= kOperationsOutstandingMax) return TooManyOperations(operations_.accepted());
  Region* region = nullptr;
  ROPETEAM_RETURN_IF_ERROR(regions_.Acquire(local, local_offset, length, &region));
  Operation* operation = operations_.Accept(region);
  operation->kind = kind;
  operation->peer = peer_id;
  operation->context = context;
  operation->remote = remote;
  operation->local_offset = local_offset;
  operation->remote_offset = remote_offset;
  operation->length = length;
  if (peer->gone()) {
    operations_.Finish(operation, Code::kPeerGone);
  } else if (length == 0) {
    operations_.Finish(operation, Code::kOk);  // devices differ on empty operations, so none is posted
  } else {
    peer->queue.Push(operation);
    self().Start(peer);
    submitted_ = true;
  }
  return OkStatus();
}

template <typename Fabric, typename Peer, typename Operation>
void Front<Fabric, Peer, Operation>::Wait(uint64_t timeout_us) {
  StartSubmitted();
  if (operations_.finished() || wake_.Consume()) return;
  TimeUs now = Now();
  const TimeUs deadline = timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
  if (self().Busy(now)) {
    const TimeUs spin_end = std::min(deadline, now + kSpinUs);
    while (now < spin_end) {
      self().Progress();
      if (operations_.finished() || wake_.Consume()) return;
      now = Now();
    }
  }
  if (now < deadline) self().Sleep(now, deadline - now);
}

template <typename Fabric, typename Peer, typename Operation>
template <typename Map>
Result<RegionId> Front<Fabric, Peer, Operation>::AddRegion(uint64_t length, Map map) {
  ROPETEAM_RETURN_IF_ERROR(regions_.Reserve());
  auto region = std::make_unique<Region>();
  region->length = length;
  if (Status mapped = map(region.get()); !mapped.ok()) {
    regions_.Unreserve();
    return mapped;
  }
  return regions_.Add(std::move(region));
}

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_FRONT_H_
