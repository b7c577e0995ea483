// SPDX-License-Identifier: Apache-2.0
//
// Tracks the coordinator and missing nodes, for `status` and to find a coordinator that has moved.
//
// A node that is not registered asks members of its last view for their coordinator (ControlPlane::Ask), every
// kAskPauseUs, and goes where one of them is registered. So it is enough that one survivor finds the coordinator.
//
// A node with a coordinator in its process also asks, if it is the only member: it asks the members that it has lost. A
// host may have been stopped or cut off while its members moved to another coordinator. By asking, it learns this, ends
// its own coordinator and follows them. Only a node that is alone does that, and a node that is alone gives no answers.
// So if two coordinators learn of each other, they never both end.
//
// One thread.

#ifndef ROPETEAM_NODE_COORDINATOR_WATCH_H_
#define ROPETEAM_NODE_COORDINATOR_WATCH_H_

#include <map>
#include <string>
#include <vector>

#include "membership/membership.h"

namespace ropeteam {

// A coordinator that has moved waits for the others for dead_after, a second by default. They must arrive within that
// time.
inline constexpr TimeUs kAskPauseUs = 250'000;
// An alone coordinator's node is in no hurry.
inline constexpr TimeUs kAskPauseAloneUs = 2'000'000;
// Nodes that are asked at a time, and lost nodes that are remembered. In a larger view the nodes at distances 1, 2, 4,
// … are asked: so one node's information reaches all others in a logarithmic number of steps.
inline constexpr size_t kAskedMax = 64;
inline constexpr size_t kMissingShownMax = 16;

// For `status`.
struct MembershipReport {
  struct Tried {
    std::string address;
    std::string reason;
  };
  struct Missing {
    std::string node;  // "ordinal 3" for a node that was never seen
    TimeUs for_us = 0;
    bool in_view = false;  // unreachable, but no node can remove it from the view
  };
  const char* kind = "standalone";  // or "etcd"
  std::string coordinator;          // the address of the present or the last contact; empty: none yet
  bool registered = false;
  TimeUs for_us = 0;  // how long `registered` has been unchanged
  std::vector<Tried> tried;
  std::vector<Missing> missing;  // at most kMissingShownMax
  size_t missing_total = 0;
  std::string blocked;  // what cannot proceed because of this; empty: nothing
  std::string advice;   // what the operator can do; empty: nothing
};

class CoordinatorWatch {
 public:
  // `own`: where this process may run a coordinator; empty: nowhere. `moves`: another node replaces a lost coordinator
  // automatically (membership over etcd).
  CoordinatorWatch(std::string own, TimeUs now, bool moves = false)
      : own_(std::move(own)), moves_(moves), since_(now) {}

  void OnView(TimeUs now, NodeId self, const View& view);
  void OnContact(const Contact& contact);

  bool moves() const { return moves_; }
  // The address of the coordinator that answers this node; empty: none does.
  std::string Registered() const { return registered_ ? coordinator_ : ""; }
  // The answer to a node that asks; empty: no answer.
  std::string Answer() const { return AloneWithOwn() ? "" : Registered(); }
  std::vector<Member> ToAsk() const;
  TimeUs AskPause() const { return registered_ ? kAskPauseAloneUs : kAskPauseUs; }
  // A node has answered. Returns whether to go there; `now` is then the argument of Membership::Relocate().
  bool Follows(const std::string& coordinator, bool* now) const;

  // `unreached`: members of the view to which there is no control stream, and since when.
  MembershipReport Report(TimeUs now, const std::map<NodeId, TimeUs>& unreached) const;

 private:
  struct Lost {
    Member member;
    TimeUs since = 0;
  };
  bool AloneWithOwn() const { return registered_ && coordinator_ == own_ && view_.members.size() <= 1; }
  void Explain(bool leader_lost, MembershipReport* report) const;

  const std::string own_;
  const bool moves_;
  std::string trouble_;  // Contact::trouble
  NodeId self_ = kNoNode;
  View view_;
  TimeUs first_view_at_ = 0;
  std::map<NodeId, Lost> lost_;  // members of earlier views that were not replaced
  bool registered_ = false;
  std::string coordinator_;
  TimeUs since_;
  std::map<std::string, std::string> tried_;  // address -> reason, since the last contact
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_COORDINATOR_WATCH_H_
