// SPDX-License-Identifier: Apache-2.0
//
// Checks the policies by which ranks say what stays on storage.
#include <algorithm>
#include <cinttypes>

#include "tests/simulation/checker.h"

namespace ropeteam::simulation {

void Checker::OnPolicyInput(const Session& session, const PolicyInput& policy) {
  Policy& known = policies_[session.incarnation];
  if (policy.keep_on_storage != 0) known.asked.insert(policy.keep_on_storage);
  if (policy.persist_every != 0) known.every_asked.insert(policy.persist_every);
}

void Checker::OnPolicyAnswer(const Host& host, const Session& session, const PolicyInput& policy,
                             const Status& status) {
  Policy& known = policies_[session.incarnation];
  const StorageOptions& flags = options_.storage;
  const bool keep_differs =
      policy.keep_on_storage != 0 && flags.keep != 0 && policy.keep_on_storage != flags.keep;
  const bool every_differs =
      policy.persist_every != 0 && flags.persist_every != 0 && policy.persist_every != flags.persist_every;
  if (status.code() == Code::kInvalidArgument && !keep_differs && !every_differs && known.asked.size() < 2 &&
      known.every_asked.size() < 2)
    return Fail("host %zu refused a policy that nothing contradicts: %s", host.index,
                status.ToString().c_str());
  if (!status.ok()) return;
  if (keep_differs || every_differs)
    return Fail("host %zu took a policy that a flag contradicts", host.index);
  if (policy.keep_on_storage != 0 && known.keep != 0 && known.keep != policy.keep_on_storage)
    return Fail("host %zu took keep_on_storage %u, and %" PRIu64 " was set in incarnation %" PRIu64,
                host.index, policy.keep_on_storage, known.keep, session.incarnation);
  if (policy.keep_on_storage != 0) known.keep = policy.keep_on_storage;
  ++statistics_.policies;
}

void Checker::OnPrune(const Host& host, const PruneStored& prune) {
  if (prune.keep_newest == 0) return;
  const Policy& known = policies_[host.engine->incarnation()];
  // A leader's order may arrive when this node has not heard of its incarnation yet, or has heard of a newer one.
  const bool asked = std::any_of(policies_.begin(), policies_.end(), [&](const auto& policy) {
    return policy.second.asked.contains(prune.keep_newest);
  });
  if (!asked || prune.keep_newest < known.keep)
    Fail("host %zu deletes all but %" PRIu64 " steps on storage; ranks of incarnation %" PRIu64
         " were told that %" PRIu64 " stay",
         host.index, prune.keep_newest, host.engine->incarnation(), known.keep);
}

void Checker::OnPruned(const Host& host, const std::vector<StepId>& newest_first,
                       const std::vector<StepId>& gone) {
  const uint64_t keep = policies_[host.engine->incarnation()].keep;
  statistics_.pruned += options_.storage.keep == 0 ? gone.size() : 0;
  // With two coordinators this host may not know the policy.
  if (!host.engine->is_leader()) return;
  for (size_t i = 0; i < std::min<size_t>(keep, newest_first.size()); ++i)
    if (std::find(gone.begin(), gone.end(), newest_first[i]) != gone.end())
      Fail("%s is deleted, and ranks were told that %" PRIu64 " steps stay",
           newest_first[i].ToString().c_str(), keep);
}

}  // namespace ropeteam::simulation
