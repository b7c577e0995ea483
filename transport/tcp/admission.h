// SPDX-License-Identifier: Apache-2.0
//
// Which instances may open a connection to this one. A hello is accepted only from an instance that SetPeers() has
// named, that Disconnect() has not sent away, with a MAC by this instance's secret, and only once: its counter must be
// higher than that of every hello accepted before from that instance and lane. Opens no socket. [loop]
//
//   state      means                                   leaves when
//   (unknown)  admitted if SetPeers() names it         Depart() -> departed
//   departed   refused                                 Return() -> (unknown)

#ifndef ROPETEAM_TRANSPORT_TCP_ADMISSION_H_
#define ROPETEAM_TRANSPORT_TCP_ADMISSION_H_

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "transport/tcp/codec.h"

namespace ropeteam::tcp {

// Departed instances that are remembered: all members that have left during the job. The oldest is forgotten first.
inline constexpr size_t kDepartedMax = 64 * 1024;
// Instances whose counters are remembered. A counter is never forgotten, because a recorded hello would be accepted
// again. Only a process with the secret can add one, so the limit is not reached by strangers; beyond it a new instance
// is refused.
inline constexpr size_t kCountersMax = 64 * 1024;

class Admission {
 public:
  Admission(uint64_t instance, const Secret& secret) : instance_(instance), secret_(secret) {}

  // Before the first call every instance is admitted.
  void SetPeers(std::unordered_set<uint64_t> instances) { peers_ = std::move(instances); }
  void Depart(uint64_t instance);
  void Return(uint64_t instance) {
    if (departed_.erase(instance) > 0) std::erase(departed_order_, instance);
  }
  bool Admits(uint64_t instance) const;

  // Fills `welcome` and remembers the counter. Otherwise returns why the hello is refused, for the log; the reason must
  // not be told to the sender.
  const char* Refusal(const Hello& hello, Welcome* welcome);

 private:
  const uint64_t instance_;
  const Secret secret_;
  std::optional<std::unordered_set<uint64_t>> peers_;
  std::unordered_set<uint64_t> departed_;
  std::deque<uint64_t> departed_order_;
  std::unordered_map<uint64_t, std::array<uint64_t, kLanesMax>> counters_;  // highest accepted, by lane
};

}  // namespace ropeteam::tcp

#endif  // ROPETEAM_TRANSPORT_TCP_ADMISSION_H_
