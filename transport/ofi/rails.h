// SPDX-License-Identifier: Apache-2.0
//
// Several endpoints as one transport: one for each network card of the host, as EFA wants it, or for each
// address that was named. Each rail is an OfiTransport of its own; this class cuts operations into pieces and
// gives each to the link that would be done first.
//
// A rail that loses a peer is left out for that peer until it is connected to anew: the others are made to
// look whether it lives, what was outstanding fails with kLinkFailed when it does and with kPeerGone when it
// does not. Nothing is redone here: a provider that does not fence could still deliver the old bytes.

#ifndef ROPETEAM_TRANSPORT_OFI_RAILS_H_
#define ROPETEAM_TRANSPORT_OFI_RAILS_H_

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/ofi/codec.h"
#include "transport/ofi/internal.h"
#include "transport/rails.h"

namespace ropeteam::ofi {

// The configurations of the rails that `config` comes to: one for each address or device named where several
// are, or for each device of a provider without IP addresses, those of this thread's NUMA node first, at most
// kRailsMax. Empty: one endpoint will do.
std::vector<OfiConfig> RailsOf(const OfiConfig& config);

class OfiRails final : public Transport {
 public:
  static Result<std::unique_ptr<Transport>> Create(const std::vector<OfiConfig>& configs);

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::string LocalAddress() const override { return local_address_; }
  std::string Describe() const override { return description_; }
  Result<RegionId> RegisterRegion(void* base, uint64_t length) override;
  Status DeregisterRegion(RegionId region) override;
  std::string ExportRegion(RegionId region) const override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;
  Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) override;
  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return Submit(OperationKind::kPut, peer, local, local_offset, remote, remote_offset, length, context);
  }
  Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return Submit(OperationKind::kGet, peer, local, local_offset, remote, remote_offset, length, context);
  }
  size_t Poll(Completion* out, size_t capacity) override;
  void Wait(uint64_t timeout_us) override;
  void Wake() override { rails_[0]->Wake(); }
  Counters counters() const override;

 private:
  struct Region {
    uint64_t length = 0;
    uint64_t base = 0;                    // what the provider adds remote offsets to
    std::vector<RegionId> rails;          // by rail
    std::atomic<uint64_t> operations{0};  // accepted, not yet handed out as completed
  };
  struct RemoteRegion {
    PeerId peer = 0;
    uint64_t length = 0;
    std::vector<RemoteRegionId> links;  // by link of the peer
  };
  struct Operation {
    Completion completion;
    bool queued = false;  // in its peer's queue: not all of it is cut
    uint32_t pieces = 0;  // at rails
    Region* region = nullptr;
    const RemoteRegion* remote = nullptr;  // valid until the peer is disconnected
    uint64_t local_offset = 0, remote_offset = 0;
    uint64_t length = 0, cut = 0;
  };
  struct Peer;
  struct Link {
    Peer* peer = nullptr;
    size_t rail = 0;
    PeerId id = 0;        // of the peer, by the rail's count
    uint64_t mbps = 0;    // of the slower end
    uint32_t pieces = 0;  // at the rail
    bool down = false;    // the rail has lost the peer
  };
  struct Piece {
    Operation* operation = nullptr;
    Link* link = nullptr;
    uint64_t length = 0;
  };
  enum class State : uint8_t { kUp, kJudged, kGone, kClosing };
  struct Peer {
    PeerId id = 0;
    State state = State::kUp;  // kJudged: a rail has lost it, the others look whether it lives
    size_t rails = 0;          // of its own
    uint64_t instance = 0;
    std::vector<Link> links;
    size_t disconnecting = 0;         // links
    std::deque<Operation*> queue;     // not wholly cut; only the first may be partly
    std::vector<Operation*> pending;  // failed, waiting for the verdict on the peer
  };

  OfiRails() = default;
  void NameSelf();
  Status Submit(OperationKind kind, PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
                uint64_t remote_offset, uint64_t length, uint64_t context);
  bool Progress();
  void OnRail(size_t rail, const Completion& completion);
  void Settle(Peer* peer, Operation* operation);
  void Complete(Operation* operation, Code code);
  void LoseLink(Link* link);
  void Judge(Peer* peer);
  void FailQueue(Peer* peer);
  void Pump();
  bool PostNext(Peer* peer);
  void FinishDisconnect(Peer* peer);

  TransportCapabilities capabilities_;
  std::string local_address_, description_;
  uint64_t instance_ = 0;
  uint32_t depth_ = 0;
  std::vector<std::unique_ptr<OfiTransport>> rails_;
  std::vector<uint64_t> rail_bytes_;  // outstanding, by rail
  std::vector<uint32_t> rail_mbps_;

  mutable std::mutex regions_mutex_;
  std::unordered_map<RegionId, std::unique_ptr<Region>> regions_;
  RegionId region_next_ = 1;

  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId peer_next_ = 1;
  std::vector<std::unordered_map<PeerId, Peer*>> by_rail_;  // by the rail's count
  std::unordered_map<RemoteRegionId, RemoteRegion> remote_regions_;
  RemoteRegionId remote_region_next_ = 1;

  std::deque<Completion> completed_;
  std::deque<Region*> completed_regions_;  // of them, in the same order; null for kDisconnect
  size_t accepted_ = 0;                    // operations not yet handed out
  uint32_t judged_ = 0;                    // peers in kJudged
  std::vector<Peer*> working_;             // peers with a queue
  size_t working_next_ = 0;                // whose turn it is
  std::deque<Operation> operations_;       // slabs; a deque moves nothing
  std::vector<Operation*> operations_free_;
  std::deque<Piece> pieces_;
  std::vector<Piece*> pieces_free_;
  std::vector<LinkLoad> loads_;      // PostNext()'s scratch
  std::vector<pollfd> sleep_items_;  // Wait()'s, and where each rail's begin
  std::vector<size_t> sleep_begins_;

  std::atomic<uint64_t> registrations_{0}, put_bytes_{0}, get_bytes_{0}, puts_{0}, gets_{0}, failures_{0};
};

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_RAILS_H_
