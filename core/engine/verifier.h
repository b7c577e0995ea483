// SPDX-License-Identifier: Apache-2.0
//
// `ropeteam verify`: every node reads its copies of one step, and the leader collects the results.

#ifndef ROPETEAM_CORE_ENGINE_VERIFIER_H_
#define ROPETEAM_CORE_ENGINE_VERIFIER_H_

#include <map>
#include <set>
#include <utility>

#include "core/engine/context.h"

namespace ropeteam::engine {

class Verifier {
 public:
  // A node's question. The node repeats it until it is answered.
  using Asker = std::pair<NodeId, uint64_t>;
  explicit Verifier(Context* context) : context_(*context) {}

  void Clear() { jobs_.clear(); }
  void OnView();  // does not wait for members that have left
  bool Knows(const Asker& asker) const { return jobs_.contains(asker); }
  void Begin(const Asker& asker, const StepId& step);  // for a question that is not known yet
  // The report, or kUnavailable while nodes are still reading.
  Result<VerifyReport> Look(const Asker& asker);
  void OnResult(NodeId from, const VerifyResult& result);
  void OnTimer();
  TimeUs NextTimer() const;

 private:
  struct Job {
    uint64_t number = 0;  // the leader's own number, used in its orders
    VerifyReport report;
    std::set<NodeId> missing;
    TimeUs next_send = 0;
    TimeUs touched = 0;
  };
  Context& context_;
  std::map<Asker, Job> jobs_;
  uint64_t next_number_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_VERIFIER_H_
