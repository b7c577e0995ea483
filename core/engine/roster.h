// SPDX-License-Identifier: Apache-2.0
//
// The leader's record of the nodes that know of the newest commit. It decides whether the members together can know what
// was committed. The size of a view cannot: a spare node in it knows nothing, and a drained node is not missed.
//
// The roster is the members of one view, the one in which the newest commit had all its copies. Every member marks its
// copies of a step, and writes the step and the roster into its arena, before any rank is told of the commit. So each node
// of the roster knows every step that ranks were told of.
//
// clang-format off
//   a node is        when                                                        it leaves that state
//   --------------   ---------------------------------------------------------   -----------------------------------------
//   in the roster    it was a member when the newest commit had all its copies   -> not in it: the leader renews the roster
//     present        it is a member now, with the memory that it had then           without the node, because the newest
//     missing        it is not, or it is here with other memory                     commit has all its copies on the
//                                                                                   members; or `ropeteam forget` names it
//   not in it        it joined later, or its memory is new                       -> in it: the leader renews the roster
// clang-format on
//
// No list of nodes is needed to count the present ones. A node is in the roster if its arena has this roster, or
// if this instance has been a member since the roster's epoch or before.
//
// MayChoose() is the rule for whoever may decide what is restored, and what may be evicted. Two of these three hold, or no
// node is missing:
//
// * At most R nodes are missing. More than R of the roster's nodes being present serves with it: a newer roster was made by
//   a view that lacked at most R of them, so one of those present was in that view and has the newer roster.
// * One member has belonged to every view since the roster: then no roster of this coordinator is newer.
// * Each missing node is replaced by a member of its name. A name is used by one living node at a time, so no other part
//   of the job goes on with the missing ones.
//
// So where the roster has at most 2 R nodes and all daemons were restarted, R nodes alone wait for the others, until these
// come, or are replaced or forgotten.

#ifndef ROPETEAM_CORE_ENGINE_ROSTER_H_
#define ROPETEAM_CORE_ENGINE_ROSTER_H_

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

// The first protocol version whose messages have the roster.
inline constexpr uint32_t kRosterSince = 9;

class Roster {
 public:
  explicit Roster(const Context* context) : context_(*context) {}

  void Begin();  // to lead: forgets everything
  void OnView();
  void Learn(NodeId member, const Inventory& inventory);

  // Without a roster nothing is known to be committed, and the nodes that the launcher starts count in its place.
  size_t Missing() const;
  bool MayChoose() const;
  // "node-0 and node-3", or how many where the names are not known.
  std::string NamesOfMissing() const;
  // The newest step that a member has heard to be committed, also if no member has a copy of it; {0, 0}: none.
  const StepId& newest_committed() const { return newest_committed_; }

  // The newest commit has all its copies on the members that stay: they are the roster from now on.
  void Renew();
  bool Behind() const;  // the roster is not that of this view's members that stay
  // An operator gives up a missing node, or every missing node (empty). A repeat changes nothing. kNotFound: no such
  // node is missing; kInvalidArgument: the node is here.
  Status Forget(const std::string& node);

  const RosterRecord& record() const { return record_; }  // revision 0: there is none
  // Given up since the roster was renewed. Members remove them from their lists of names.
  const std::vector<std::string>& forgotten() const { return forgotten_; }
  uint64_t version() const { return version_; }  // grows with every change of record()

 private:
  struct Standing {
    // Of the roster in the node's arena. Two leaders may make different rosters of one revision, if the first reached only
    // some members; these differ in the epoch.
    uint64_t revision = 0;
    Epoch epoch = 0;
    Epoch joined = 0;      // of the first view that had this instance
    bool leaving = false;  // it is drained, and is in no new roster
    friend bool operator==(const Standing&, const Standing&) = default;
  };
  struct Counts {
    size_t nodes = 0;
    size_t present = 0;
    size_t replaced = 0;      // missing, but there is a member of that name
    bool continuous = false;  // a member has belonged to every view since
    uint32_t staying = 0;     // members that are not leaving
  };
  bool Continuous(const Standing& standing) const;
  bool Present(const Standing& standing) const;
  // Every inventory asks, and a count looks at every member. So one lasts until a member, the view or the roster changes.
  const Counts& Counted() const;
  Counts Count() const;
  std::vector<std::string> MissingNames() const;

  const Context& context_;
  RosterRecord record_;
  StepId newest_committed_;
  std::vector<std::string> forgotten_;
  std::unordered_map<NodeId, Standing> members_;
  uint64_t version_ = 0;
  mutable std::optional<Counts> counts_;
  mutable Epoch counted_in_ = 0;
};

// The names of a view's members for RosterRecord::names, at most kRosterNamesMax.
std::vector<std::string> RosterNames(const View& view);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_ROSTER_H_
