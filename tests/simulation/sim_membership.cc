// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/sim_membership.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "membership/simulated/simulated.h"

namespace ropeteam::simulation {
namespace {

constexpr char kMovedAddress[] = "moved:1";

// The detection times of membership.h's defaults.
MembershipConfig MakeConfig(const SimMembership::Config& from) {
  MembershipConfig config;
  config.job = "simulated";
  config.coordinator_addresses = {"coordinator:1"};
  config.protocol_version = kProtocolVersion;
  config.protocol_oldest = kProtocolOldest;
  config.chunk_bytes = from.chunk_bytes;
  config.nodes_expected = from.settings.nodes;
  config.settings = from.settings;
  return config;
}

}  // namespace

class SimMembership::Impl {
 public:
  Impl(const Config& config, Scheduler* scheduler, Network* network, Random* random, Listener listener)
      : config_(config),
        scheduler_(*scheduler),
        network_(*network),
        random_(*random),
        listener_(std::move(listener)),
        machines_(
            MakeConfig(config), [this](const SimulatedPacket& packet) { Carry(packet); },
            {[this](NodeId node, const View& view) { OnView(node, view); },
             [this](NodeId node, const Status& status) { OnRefused(node, status); },
             [this](NodeId node, TimeUs valid_until) { OnLease(node, valid_until); },
             {},
             [this](NodeId node, const std::vector<NodeId>& members) { OnCheck(node, members); }},
            [this](NodeId node, const std::string& address) {
              return address == kMovedAddress ? 1 : RouteOf(hosts_.at(node).host);
            }) {}

  void Join(size_t host, const Member& member, int drift_ppm, Epoch epoch_known, uint32_t protocol,
            const OwnSettings* own) {
    hosts_[member.id] = {host, 0};
    MembershipConfig config = MakeConfig(config_);
    config.epoch_known = epoch_known;
    config.protocol_version = protocol;
    if (own != nullptr) {
      config.settings = own->settings;
      config.named = {own->named, own->named, own->named};
    }
    machines_.AddNode(scheduler_.now(), member, drift_ppm, &config);
    Arm();
  }
  void Gone(NodeId instance, bool reset) {
    if (machines_.agent(instance) != nullptr) machines_.CrashNode(instance, reset);
    Arm();
  }
  void Leave(NodeId instance) {
    machines_.LeaveNode(scheduler_.now(), instance);
    Arm();
  }
  void Pause(NodeId instance) { machines_.StopNode(instance); }
  void Resume(NodeId instance) {
    machines_.ContinueNode(scheduler_.now(), instance);
    Arm();
  }
  void Suspect(NodeId reporter, NodeId suspect, const std::string& reason) {
    if (machines_.agent(reporter) != nullptr)
      machines_.ReportSuspect(scheduler_.now(), reporter, suspect, reason);
    Arm();
  }
  void Reach(NodeId reporter, NodeId member, bool reached) {
    if (machines_.agent(reporter) != nullptr)
      machines_.ReportReach(scheduler_.now(), reporter, member, reached);
    Arm();
  }
  void StopCoordinator() {
    const size_t which = coordinators() == kSimulatedCoordinators
                             ? random_.Below(kSimulatedCoordinators)
                             : (machines_.coordinator(0) != nullptr ? 0 : 1);
    machines_.CrashCoordinator(random_.Chance(kMillion / 2), which);
    found_ = 1 - which;
    routes_.clear();
  }
  void StartCoordinator(int drift_ppm) {
    const size_t which = machines_.coordinator(0) == nullptr ? 0 : 1;
    if (coordinators() == 0) found_ = which;
    machines_.RestartCoordinator(scheduler_.now(), drift_ppm, which);
    Arm();
  }
  void MoveCoordinator() {
    machines_.CrashCoordinator(random_.Chance(kMillion / 2), 0);
    machines_.RestartCoordinator(scheduler_.now(), 0, 1);
    Arm();
  }
  void TellMoved(NodeId instance) {
    machines_.Relocate(scheduler_.now(), instance, {kMovedAddress}, false);
    Arm();
  }
  size_t coordinators() const {
    return (machines_.coordinator(0) != nullptr ? 1 : 0) + (machines_.coordinator(1) != nullptr ? 1 : 0);
  }
  void Route(size_t host, size_t coordinator, bool reset) {
    if (RouteOf(host) == coordinator) return;
    routes_[host] = coordinator;
    if (!reset) return;
    const bool told = random_.Chance(kMillion / 2);
    for (const auto& [node, place] : hosts_)
      if (place.host == host) machines_.ResetConnection(node, told);
    Arm();
  }

 private:
  struct Place {
    size_t host = 0;
    TimeUs last_view_at = 0;
  };

  size_t RouteOf(size_t host) const {
    const auto route = routes_.find(host);
    return route == routes_.end() ? found_ : route->second;
  }
  void Carry(const SimulatedPacket& packet) {
    const size_t host = hosts_.at(packet.node).host;
    const size_t coordinator = packet.coordinator == 0 ? kCoordinatorHost : kSecondCoordinatorHost;
    const size_t from = packet.to_coordinator ? host : coordinator;
    const size_t to = packet.to_coordinator ? coordinator : host;
    network_.PostPacket(from, to, {packet.node, packet.attempt}, [this, packet] {
      machines_.Arrive(scheduler_.now(), packet);
      Arm();
    });
  }

  // A view waits for the daemon's event loop. Each daemon gets its views in order, but at its own time.
  void OnView(NodeId node, const View& view) {
    Place& place = hosts_.at(node);
    place.last_view_at =
        std::max(place.last_view_at,
                 scheduler_.now() + random_.Between(1, std::max<TimeUs>(1, config_.view_lag_max_us)));
    scheduler_.At(place.last_view_at,
                  [this, host = place.host, node, view] { listener_.on_view(host, node, view); });
  }
  // Membership and engine are in one process, so the end of a lease is known at once. A renewal comes later,
  // and never before an earlier view: both go through the daemon's event loop.
  void OnLease(NodeId node, TimeUs valid_until) {
    const Place& place = hosts_.at(node);
    const TimeUs at = valid_until == 0
                          ? scheduler_.now()
                          : std::max(place.last_view_at, scheduler_.now() + random_.Between(1, kMs));
    scheduler_.At(
        at, [this, host = place.host, node, valid_until] { listener_.on_lease(host, node, valid_until); });
  }
  void OnCheck(NodeId node, const std::vector<NodeId>& members) {
    scheduler_.After(random_.Between(1, kMs), [this, host = hosts_.at(node).host, node, members] {
      listener_.on_check(host, node, members);
    });
  }
  void OnRefused(NodeId node, const Status& status) {
    scheduler_.After(random_.Between(1, 1000), [this, host = hosts_.at(node).host, node, status] {
      listener_.on_refused(host, node, status);
    });
  }

  void Arm() {
    const TimeUs next = machines_.NextDeadline();
    if (next >= armed_) return;
    armed_ = next;
    scheduler_.At(next, [this, next] {
      if (armed_ != next) return;
      armed_ = kForever;
      machines_.Tick(scheduler_.now());
      Arm();
    });
  }

  const Config config_;
  Scheduler& scheduler_;
  Network& network_;
  Random& random_;
  const Listener listener_;
  std::map<NodeId, Place> hosts_;
  size_t found_ = 0;  // the coordinator of hosts that have no entry in routes_
  std::map<size_t, size_t> routes_;
  TimeUs armed_ = kForever;
  SimulatedMembership machines_;
};

SimMembership::SimMembership(const Config& config, Scheduler* scheduler, Network* network, Random* random,
                             Listener listener)
    : impl_(std::make_unique<Impl>(config, scheduler, network, random, std::move(listener))) {}
SimMembership::~SimMembership() = default;
void SimMembership::Join(size_t host, const Member& member, int drift_ppm, Epoch epoch_known,
                         uint32_t protocol, const OwnSettings* own) {
  impl_->Join(host, member, drift_ppm, epoch_known, protocol, own);
}
void SimMembership::Gone(NodeId instance, bool reset) { impl_->Gone(instance, reset); }
void SimMembership::Leave(NodeId instance) { impl_->Leave(instance); }
void SimMembership::Pause(NodeId instance) { impl_->Pause(instance); }
void SimMembership::Resume(NodeId instance) { impl_->Resume(instance); }
void SimMembership::Suspect(NodeId reporter, NodeId suspect, const std::string& reason) {
  impl_->Suspect(reporter, suspect, reason);
}
void SimMembership::Reach(NodeId reporter, NodeId member, bool reached) {
  impl_->Reach(reporter, member, reached);
}
void SimMembership::StopCoordinator() { impl_->StopCoordinator(); }
void SimMembership::StartCoordinator(int drift_ppm) { impl_->StartCoordinator(drift_ppm); }
void SimMembership::MoveCoordinator() { impl_->MoveCoordinator(); }
void SimMembership::TellMoved(NodeId instance) { impl_->TellMoved(instance); }
size_t SimMembership::coordinators() const { return impl_->coordinators(); }
void SimMembership::Route(size_t host, size_t coordinator, bool reset) {
  impl_->Route(host, coordinator, reset);
}

}  // namespace ropeteam::simulation
