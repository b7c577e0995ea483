// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <utility>

#include "tests/transport/kinds.h"
#include "transport/fabrics.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kGoneWithinMs = 8'000;  // 0.8 s by the constants, and a crowded, emulated machine

std::vector<std::string> UsableDevices() {
  std::vector<std::string> names;
  for (const FabricDevice& device : ListVerbsDevices().devices)
    if (device.unusable.empty()) names.push_back(device.name);
  return names;
}

TransportKind Kind(const std::string& name, std::vector<std::string> devices) {
  TransportKind kind;
  kind.name = name;
  kind.describes = "verbs on ";
  kind.serves_stopped = true;
  kind.names_refusals = true;
  kind.gone_within_ms = kGoneWithinMs;
  // Every other transport has its devices the other way round, so that with the two ends of one cable (see
  // scripts/soft-roce) what is sent by one goes over the cable.
  kind.make = [devices](const std::string&) {
    static std::atomic<uint32_t> made{0};
    VerbsConfig config{devices, -1};
    if (made++ % 2 == 1) std::swap(config.devices.front(), config.devices.back());
    return CreateVerbsTransport(config);
  };
  return kind;
}

}  // namespace

std::vector<TransportKind> VerbsKinds() {
  const std::vector<std::string> devices = UsableDevices();
  TransportKind one = Kind("verbs", {});
  TransportKind two = Kind("verbs_two_rails", {});
  if (devices.empty()) {
    const auto made = CreateVerbsTransport({});
    one.absent = two.absent = made.ok() ? "no device" : made.status().message();
    return {one, two};
  }
  one = Kind("verbs", {devices[0]});
  if (devices.size() < 2)
    two.absent = "this machine has one usable device, " + devices[0];
  else
    two = Kind("verbs_two_rails", {devices[0], devices[1]});
  return {one, two};
}

}  // namespace ropeteam::test
