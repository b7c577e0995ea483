// SPDX-License-Identifier: Apache-2.0
//
// Storage settings that ranks make where the daemons' flags make none: how often a step is due, and how many are kept.
// A policy belongs to an incarnation:
//
//     not set ──a rank sets a value──> set ──a later incarnation begins──> not set
//
// Within an incarnation a field is set once, and a different value is refused. The leader announces the policy, and
// every node repeats it in its inventory to the next leader. A rank is answered when every node has acknowledged its
// value. Two nodes may still have different values: under two coordinators, or if every node had forgotten the first
// value. Then Join() takes the value that keeps and persists more. So the order of arrival does not matter, and an old
// message changes nothing.

#ifndef ROPETEAM_CORE_ENGINE_POLICY_H_
#define ROPETEAM_CORE_ENGINE_POLICY_H_

#include <cstdint>

#include "core/base/status.h"
#include "core/engine/context.h"
#include "core/engine/messages.h"

namespace ropeteam::engine {

// Returns true if `known` has changed.
bool Join(RankPolicy* known, const RankPolicy& other);

struct PersistEvery {
  uint64_t count = 0;  // steps, or seconds; 0: no step is due
  bool seconds = false;
  bool by_rank = false;
};
// The setting for steps of this incarnation: the flag's value, or else the value that its ranks have set.
PersistEvery PersistEveryOf(const Context& context, const RankPolicy& policy, Incarnation incarnation);

class Policy {
 public:
  explicit Policy(const Context* context) : context_(*context) {}

  // kUnsupported: a member speaks an older version.
  static Status Spoken(const Context& context);

  void Begin();  // to lead, or no longer: starts from this node's last known policy
  void Learn(const RankPolicy& policy);
  // kInvalidArgument: another value is set. Flags are not compared.
  Status Set(const PolicyQuestion& question);

  const RankPolicy& known() const { return known_; }  // of any incarnation
  // The policy in effect for this incarnation. Empty if a member speaks an older version, because that member could not
  // report it to the next leader.
  RankPolicy Of(Incarnation incarnation) const;
  uint64_t version() const { return version_; }  // grows whenever known() changes

 private:
  const Context& context_;
  RankPolicy known_;
  uint64_t version_ = 1;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_POLICY_H_
