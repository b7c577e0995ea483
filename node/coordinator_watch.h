// SPDX-License-Identifier: Apache-2.0
//
// This node's knowledge of its coordinator and of missing nodes: for `status`, and to find a coordinator that has moved.
//
// A node that is not registered asks members of its last view where their coordinator is (ControlPlane::Ask), every
// kAskPauseUs, and goes where one of them is registered. So one survivor that finds the coordinator is enough.
//
// A node that runs a coordinator in its process asks too, if it is the only member: it asks the members that it has lost.
// So a host that was stopped or cut off, and whose members have moved to another coordinator meanwhile, ends its own
// coordinator and follows them. Only a node that is alone does that, and a node that is alone gives no answers: so if two
// coordinators learn of each other, they never both end.
//
// One thread.

#ifndef ROPETEAM_NODE_COORDINATOR_WATCH_H_
#define ROPETEAM_NODE_COORDINATOR_WATCH_H_

#include <map>
#include <string>
#include <vector>

#include "membership/membership.h"

namespace ropeteam {

// A coordinator that moved waits for the others for dead_after, a second by default: they must come in that time.
inline constexpr TimeUs kAskPauseUs = 250'000;
// An alone coordinator's node is in no hurry.
inline constexpr TimeUs kAskPauseAloneUs = 2'000'000;
// Nodes that are asked at a time, and lost ones that are remembered. In a larger view those at distances of 1, 2, 4, … are
// asked: what one knows reaches all in as many steps as the number of nodes has bits.
inline constexpr size_t kAskedMax = 64;
inline constexpr size_t kMissingShownMax = 16;

// For `status`.
struct MembershipReport {
  struct Tried {
    std::string address;
    std::string reason;
  };
  struct Missing {
    std::string node;  // "ordinal 3" for one that was never seen
    TimeUs for_us = 0;
    bool in_view = false;  // not reached, but nobody can take it out of the view
  };
  const char* kind = "standalone";  // or "etcd"
  std::string coordinator;          // the address of the present or the last contact; empty: none yet
  bool registered = false;
  TimeUs for_us = 0;  // `registered` is as it is for so long
  std::vector<Tried> tried;
  std::vector<Missing> missing;  // at most kMissingShownMax
  size_t missing_total = 0;
  std::string blocked;  // what stands still because of all this; empty: nothing
  std::string advice;   // what to do about it; empty: nothing
};

class CoordinatorWatch {
 public:
  // `own`: where this process may run a coordinator; empty: nowhere. `moves`: another node takes a lost coordinator's place
  // by itself (membership over etcd).
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
  // A node that was asked has answered. Returns whether to go there; `now` is then the argument of Membership::Relocate().
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
