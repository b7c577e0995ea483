// SPDX-License-Identifier: Apache-2.0
//
// The newest events of one engine, in a ring. So memory is bounded, and the last steps are always available.

#ifndef ROPETEAM_CORE_ENGINE_TRACE_H_
#define ROPETEAM_CORE_ENGINE_TRACE_H_

#include <vector>

#include "core/base/trace_event.h"

namespace ropeteam::engine {

class Trace {
 public:
  void Add(const TraceEvent& event) {
    if (events_.size() < kTraceEventsMax) {
      events_.push_back(event);
    } else {
      events_[next_] = event;
      next_ = (next_ + 1) % kTraceEventsMax;
    }
  }
  // The events of steps with this number, of all incarnations, in the order in which they were added.
  std::vector<TraceEvent> Of(Step step) const {
    std::vector<TraceEvent> found;
    for (size_t i = 0; i < events_.size(); ++i) {
      const TraceEvent& event = events_[(next_ + i) % events_.size()];
      if (event.shard.step == step) found.push_back(event);
    }
    return found;
  }

 private:
  std::vector<TraceEvent> events_;
  size_t next_ = 0;  // the oldest event, once the ring is full
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_TRACE_H_
