// SPDX-License-Identifier: Apache-2.0
//
// A Transport that forwards every call to another one. Tests override the calls that they change.

#ifndef ROPETEAM_TESTS_NODE_FORWARDING_TRANSPORT_H_
#define ROPETEAM_TESTS_NODE_FORWARDING_TRANSPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace ropeteam {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner)
      : capabilities_(inner->capabilities()), inner_(std::move(inner)) {}
  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::string LocalAddress() const override { return inner_->LocalAddress(); }
  std::string Describe() const override { return inner_->Describe(); }
  Result<RegionId> RegisterRegion(void* base, uint64_t length) override {
    return inner_->RegisterRegion(base, length);
  }
  Status DeregisterRegion(RegionId region) override { return inner_->DeregisterRegion(region); }
  void GuardRegion(RegionId region, PeerAccess* access) override { inner_->GuardRegion(region, access); }
  std::string ExportRegion(RegionId region) const override { return inner_->ExportRegion(region); }
  void SetPeers(const std::vector<std::string>& addresses) override { inner_->SetPeers(addresses); }
  Result<PeerId> Connect(const std::string& address) override { return inner_->Connect(address); }
  void Disconnect(PeerId peer) override { inner_->Disconnect(peer); }
  Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) override {
    return inner_->ImportRegion(peer, key);
  }
  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return inner_->Put(peer, local, local_offset, remote, remote_offset, length, context);
  }
  Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return inner_->Get(peer, local, local_offset, remote, remote_offset, length, context);
  }
  size_t Poll(Completion* out, size_t capacity) override { return inner_->Poll(out, capacity); }
  void Wait(uint64_t timeout_us) override { inner_->Wait(timeout_us); }
  void Wake() override { inner_->Wake(); }
  Counters counters() const override { return inner_->counters(); }

 protected:
  TransportCapabilities capabilities_;

 private:
  const std::unique_ptr<Transport> inner_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_NODE_FORWARDING_TRANSPORT_H_
