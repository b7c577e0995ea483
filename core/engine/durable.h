// SPDX-License-Identifier: Apache-2.0
//
// When every member has recorded something that the leader announces. An answer that must survive the loss of the leader
// is given only then, because the members repeat what they have recorded to the next leader.

#ifndef ROPETEAM_CORE_ENGINE_DURABLE_H_
#define ROPETEAM_CORE_ENGINE_DURABLE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

// kUnsupported: a member speaks an older protocol, so it would not repeat `what` to the next leader.
Status RequireProtocol(const Context& context, uint32_t since, const char* what);

// A value, or the version of one.
template <typename T = uint64_t>
class Durable {
 public:
  void Begin() { announced_.reset(); }
  // The newest announcement, of this sequence, has the value. Earlier ones may have it, too.
  void OnAnnounced(const T& value, uint64_t sequence) {
    if (Announced(value)) return;
    announced_ = value;
    sequence_ = sequence;
  }
  bool Announced(const T& value) const { return announced_ == value; }
  // `acked`: every member has acknowledged announcements up to this one.
  bool Recorded(const T& value, uint64_t acked) const { return Announced(value) && sequence_ <= acked; }

 private:
  std::optional<T> announced_;
  uint64_t sequence_ = 0;  // of the first announcement with it
};

// A list of steps. A step with a gap in its listing counts from scratch, because some member may have received no
// announcement that listed it.
class DurableSteps {
 public:
  void Begin() { since_.clear(); }
  void OnAnnounced(const std::set<StepId>& steps, uint64_t sequence) {
    std::map<StepId, uint64_t> since;
    for (const StepId& id : steps) {
      const auto known = since_.find(id);
      since.emplace(id, known == since_.end() ? sequence : known->second);
    }
    since_ = std::move(since);
  }
  bool contains(const StepId& step) const { return since_.contains(step); }
  bool Recorded(const StepId& step, uint64_t acked) const {
    const auto known = since_.find(step);
    return known != since_.end() && known->second <= acked;
  }
  // By the first announcement that has listed them without a gap.
  const std::map<StepId, uint64_t>& since() const { return since_; }

 private:
  std::map<StepId, uint64_t> since_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_DURABLE_H_
