// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <utility>

#include "tests/transport/kinds.h"
#include "transport/fabrics.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kGoneWithinMs = 10'000;  // 2 s of kSilenceMsDefault, and time for a busy, emulated machine

std::vector<std::string> UsableDevices() {
  std::vector<std::string> names;
  for (const FabricDevice& device : ListVerbsDevices().devices)
    if (device.unusable.empty()) names.push_back(device.name);
  return names;
}

// The first `rails` usable devices.
TransportKind Kind(const std::string& name, size_t rails) {
  TransportKind kind;
  kind.name = name;
  kind.describes = "verbs on ";
  kind.serves_stopped = true;
  kind.names_refusals = true;
  kind.fences = true;
  kind.gone_within_ms = kGoneWithinMs;
  // Every second transport lists its devices in reverse order. So with two devices at the ends of one cable
  // (see scripts/soft-roce), traffic between two transports crosses the cable.
  kind.make = [rails](const std::string&) {
    static std::atomic<uint32_t> made{0};
    static const std::vector<std::string> usable = UsableDevices();
    VerbsConfig config;
    config.devices.assign(usable.begin(),
                          usable.begin() + static_cast<ptrdiff_t>(std::min(rails, usable.size())));
    if (made++ % 2 == 1 && rails > 1) std::swap(config.devices.front(), config.devices.back());
    return CreateVerbsTransport(config);
  };
  kind.absent = [rails]() -> std::string {
    const std::vector<std::string> usable = UsableDevices();
    if (usable.size() >= rails) return "";
    if (!usable.empty()) return "this machine has one usable device, " + usable[0];
    const auto none = CreateVerbsTransport({});
    return none.ok() ? "no device" : none.status().message();
  };
  return kind;
}

}  // namespace

std::vector<TransportKind> VerbsKinds() { return {Kind("verbs", 1), Kind("verbs_two_rails", 2)}; }

}  // namespace ropeteam::test
