// SPDX-License-Identifier: Apache-2.0
//
// A node registers under the name of a member whose connection is open. Either the member's host is gone, and nobody has
// closed the connection; or two nodes were given one name. So the member is probed, and the newcomer waits:
//
//   * The member answers: the newcomer is refused.
//   * It does not answer within probe_ms, its connection closes, or it leaves: the newcomer registers.
//
// Of several newcomers the last one waits. During the hold there are no claims: ResolveNames() decides then.
#include <string>
#include <utility>
#include <vector>

#include "membership/coordinator.h"

namespace ropeteam {
namespace {

unsigned long long Ull(uint64_t value) { return value; }

}  // namespace

Coordinator::Record* Coordinator::HolderOf(const Member& registrant) {
  if (holding_) return nullptr;
  const auto named = names_.find(registrant.name);
  if (named == names_.end()) return nullptr;
  Record& record = records_.at(named->second);
  return record.connection != kNoConnection ? &record : nullptr;
}

void Coordinator::Wait(Record* holder, ConnectionId connection, const Registration& registration) {
  const auto [claim, first] = claims_.try_emplace(registration.member.name);
  if (!first && claim->second.connection != connection) {
    const bool same = claim->second.registration.member.id == registration.member.id;
    if (same && registration.attempt < claim->second.registration.attempt) return Drop(connection);
    if (same) {
      Drop(claim->second.connection);
    } else {
      Refuse(claim->second.connection,
             Error(Code::kAlreadyExists, "node %s has another instance by now, %016llx at %s",
                   registration.member.name.c_str(), Ull(registration.member.id),
                   registration.member.control_address.c_str()));
    }
  }
  claims_[registration.member.name] = {connection, registration};
  StartProbe(holder, "another instance has come under its name");
}

void Coordinator::RefuseClaim(const Record& holder) {
  const auto claim = claims_.find(holder.member.name);
  if (claim == claims_.end()) return;
  Refuse(claim->second.connection,
         Error(Code::kAlreadyExists,
               "node %s is in the job as instance %016llx at %s, which answers: end that daemon, or give "
               "this one another --node",
               holder.member.name.c_str(), Ull(holder.member.id), holder.member.control_address.c_str()));
  claims_.erase(claim);
}

void Coordinator::GrantClaims() {
  std::vector<Claim> granted;
  for (auto claim = claims_.begin(); claim != claims_.end();) {
    const bool gone = !connections_.contains(claim->second.connection);
    if (!gone && HolderOf(claim->second.registration.member) != nullptr) {
      ++claim;
      continue;
    }
    if (!gone) granted.push_back(std::move(claim->second));
    claim = claims_.erase(claim);
  }
  for (const Claim& claim : granted) Register(claim.connection, claim.registration);
}

}  // namespace ropeteam
