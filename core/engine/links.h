// SPDX-License-Identifier: Apache-2.0
//
// Which members this node reaches: over the data path, as the driver reports it, and with control messages, as their
// answers show. A member that is lost on either path gets no new copies from here, and the node reports it to the
// leader. Membership gets the control paths: the coordinator moves the leader away from a member that it does not
// reach.
//
//   a control path is   when                                        it goes to
//   -----------------   -----------------------------------------   -------------------------------------------------
//   quiet               nothing that was asked is unanswered        asked: a request is sent, or membership wants to
//                                                                   know (Check)
//   asked               a request is unanswered; after kAskAgainUs  quiet: any answer
//                       the member is asked for its time, too       lost: none for kUnansweredUs
//   lost                no answer; the member is asked again and    quiet: any answer
//                       again, and the link is made again
//
// An answer shows that both directions work. Requests of the engine may be refused for other reasons than the path, so
// only the question for the time decides: every member answers it at once, in any state.

#ifndef ROPETEAM_CORE_ENGINE_LINKS_H_
#define ROPETEAM_CORE_ENGINE_LINKS_H_

#include <set>
#include <string>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Links {
 public:
  explicit Links(Parts* parts) : parts_(*parts) {}

  void OnDataPath(NodeId peer, bool up, const std::string& reason);
  // An envelope of this epoch has come from the member.
  void OnMessage(NodeId from, Kind kind);
  // Membership wants to know which of these members this node reaches, from now on until the next list.
  void Check(const std::vector<NodeId>& members);
  void OnView();
  void OnTimer();
  TimeUs NextTimer() const;

 private:
  void Set(NodeId peer, bool LostLink::*path, bool lost, const LostLink& why);

  void Ask(NodeId peer);

  Parts& parts_;
  std::set<NodeId> check_;    // membership's list
  std::set<NodeId> reached_;  // those of the list that have answered
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LINKS_H_
