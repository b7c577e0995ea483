// SPDX-License-Identifier: Apache-2.0

#include "transport/tcp/admission.h"

namespace ropeteam::tcp {

void Admission::Depart(uint64_t instance) {
  if (!departed_.insert(instance).second) return;
  departed_order_.push_back(instance);
  if (departed_order_.size() <= kDepartedMax) return;
  departed_.erase(departed_order_.front());
  departed_order_.pop_front();
}

bool Admission::Admits(uint64_t instance) const {
  return !departed_.contains(instance) && (!peers_ || peers_->contains(instance));
}

const char* Admission::Refusal(const Hello& hello, Welcome* welcome) {
  if (hello.magic != kHelloMagic) return "not a hello of this version";
  // Nothing that the sender says is believed before the MAC is checked.
  if (!Same(hello.mac, MacOf(secret_, hello))) return "wrong MAC";
  if (hello.target != instance_) return "meant for another instance";
  if (hello.lane >= kLanesMax) return "no such lane";
  if (!Admits(hello.initiator)) return departed_.contains(hello.initiator) ? "departed" : "not a member";
  const auto found = counters_.find(hello.initiator);
  if (found == counters_.end() && counters_.size() >= kCountersMax) return "too many instances";
  uint64_t& highest = counters_[hello.initiator][hello.lane];
  if (hello.counter <= highest) return "used before";
  highest = hello.counter;
  welcome->magic = kWelcomeMagic;
  welcome->target = instance_;
  welcome->mac = MacOf(secret_, hello, *welcome);
  return nullptr;
}

}  // namespace ropeteam::tcp
