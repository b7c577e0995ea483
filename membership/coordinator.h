// SPDX-License-Identifier: Apache-2.0
//
// The Coordinator decides which nodes are members, as a deterministic state machine: messages and the time go in,
// messages to send come out, and nothing happens between calls. It has no socket, thread or clock. A driver
// (standalone/, simulated/) passes messages in and calls Tick() at NextDeadline(). All its state is soft: a new
// coordinator learns everything from the nodes that register.
//
// clang-format off
//   a member is       when                                          it leaves that state
//   ---------------   -------------------------------------------   ---------------------------------------------------
//   well              it registered, and is heard                   -> probed: connection lost, or suspected
//                                                                   -> out: silent for dead_after, left, replaced
//   probed            its connection broke, or a node suspects it   -> well: it registers again, or answers the probe
//                                                                   -> out: neither within probe_ms
//   out               it left the members, for any reason           never: its id is remembered and refused
//
//   the coordinator   does                                          until
//   ---------------   -------------------------------------------   ---------------------------------------------------
//   holds             collects registrations and the newest view    all of that view's members are accounted for, or
//                     they report; sends no view                    (no view reported) nodes_expected registered, or
//                                                                   dead_after passed since the first registration
//   publishes         sends a view whenever the members change      its end, or the members of an earlier view come:
//                                                                   it holds again (coordinator_hold.cc)
// clang-format on
//
// Leases. A lease is granted in the answer to a numbered registration or heartbeat, to an instance that
//   1. is in the current view, and
//   2. has reported that it has seen a view of this coordinator that contains it: one that this coordinator has given
//      out, or one that it found and continues.
// Hence no lease is granted during the first hold, because there is no such view yet. A view that a registrant reports
// then does not permit a lease, because it may not be the newest. A node that registers later may have seen a newer
// view without this instance. Then that node has fenced the instance, and may believe that its leader is dead.
// EndHold() may also leave the instance out. So the members have no leases during the hold, and saves stay LOCAL for
// that time.
// Rule 2 also matters after the hold. A readmitted instance follows the leader of a view that this coordinator did not
// make. With a lease it would act on that view while the leader of the present view acts, too.
//
// The coordinator records for each member when its leases have expired. The time counts from the receipt of the
// answered message and allows for the drift of both clocks. Silence for dead_after lasts longer than a lease. An
// instance that is removed sooner (after a probe, or replaced) may hold its lease for a while. From then on,
// View::settle_us of every view covers the last end of all leases of removed instances, because any view may be the
// first that a member receives. A leave message returns the lease.
//
// The lead may also move away from a member that stays (coordinator_leader.cc). Then two leaders never act at once,
// either. A former leader acts as long as it has a lease and has not received the view E that takes the lead from it:
//   * From the moment that E is made, it is granted no lease before it reports that it has seen E or a newer view (its
//     `ours` becomes E). So its last lease was granted before, and its end is known. A driver hands views and leases on
//     in their order, so a lease that was granted after the report finds the node with the view.
//   * settle_us of E and of every later view covers that end, as for a removed instance. Its successor decides nothing
//     before, whichever of these views it receives first.
//   * Once it has received E it does not lead, and what it leads later begins from nothing (View::led_since), also if it
//     has missed the views in which another member led.
//   * With a store, E is made before it is stored, so the grants end even earlier.
// A new coordinator continues with the leader of the newest view that any registrant has seen. Nobody else acts for a
// leader that only a view knows that no registrant has seen, and no lease of that time lasts (see below).
//
// A predecessor's leases are unknown. It was gone when this coordinator started, so its leases end within one lease
// after the start. That is the longest lease reported by any registrant, or this coordinator's own if that is longer.
// No lease is granted before: the holder of an old lease may know that the asking instance has left. There is one
// exception: no registrant has seen any view, and nodes_expected of them have come with the ordinals 0, 1, 2, … Then
// the whole job is starting. The daemons of an earlier run are gone, since their names are in use, and no member of
// this run is in their views.
//
// All of this is for one coordinator at a time. Two simultaneous coordinators grant leases on both sides, and nodes may
// go from one to the other. Each accepts members of the other's views as after a restart of its own. Both may give out
// the same epoch if one leaps (kEpochLeap) to where the other has counted to. ARCHITECTURE.md says what stays safe.
//
// With a store (Inheritance::term_us is not 0), an outside store (etcd/) gives the coordinator role to one process at a
// time. Then two coordinators never act at once:
//   * A view is written to the store before it is given out: Store, then Stored(). So the successor knows every view
//     that any node may have seen, and every instance that has left.
//   * The role must be confirmed regularly: Confirmed(). No lease lasts beyond the confirmation. A successor grants no
//     lease for one term after its start.
//   * Without a confirmation no node is declared dead, no hold ends and no view is given out.
//
// Not thread-safe: one caller at a time.

#ifndef ROPETEAM_MEMBERSHIP_COORDINATOR_H_
#define ROPETEAM_MEMBERSHIP_COORDINATOR_H_

#include <deque>
#include <map>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "membership/messages.h"

namespace ropeteam {

// Removed ids remembered: as many as there can be nodes, so that all instances of a whole former job are known.
inline constexpr size_t kRemovedMax = kNodesMax;
// If first_epoch is not above what registrants report (the wall clock was set back), the coordinator skips to the next
// multiple of this. Its predecessor may have given out views that no remaining node has seen, and their epochs must not
// be used twice.
inline constexpr Epoch kEpochLeap = 1000;
// Simultaneous connections: one for each node, one for its replacement, and as many again for unknown clients.
inline constexpr size_t kConnectionsMax = 4 * kNodesMax;
// The least time between two views. It turns the registrations of a thousand nodes into a few views, instead of a
// thousand views of a thousand members to a thousand nodes. Four nodes wait at most 1.1 ms, 16,384 wait 0.33 s.
inline constexpr TimeUs kViewPauseUs = 1000;
inline constexpr TimeUs kViewPausePerMemberUs = 20;
static_assert(kViewPauseUs >= 1000, "epochs count milliseconds at most");
// A node that has seen one of this many last views gets a delta from it; others get the whole view. A few are enough:
// views come faster than acknowledgements only when many nodes join or leave.
inline constexpr size_t kDeltaBasesMax = 8;
// A probe is repeated this many times within probe_ms, so that one lost message does not remove a node.
inline constexpr uint32_t kProbesPerDeath = 4;
// The coordinator reads its clock at least this often per dead_after, even if nothing is due: see LateBy().
inline constexpr uint32_t kTicksPerDeath = 4;
// The members that are asked at a time whether they reach the members that the leader does not reach.
inline constexpr size_t kLeaderCandidates = 8;
// After the lead has moved it stays for this time. A new leader has waited for its predecessor's lease by then and has
// heard all members, and a link that fails again has been noticed: links that come and go move the lead this often at
// most.
inline constexpr TimeUs kLeaderStaysUs = 10'000'000;
static_assert(kLeaderStaysUs > kSettleUsMax);
// If the store's confirmation would cut a lease to less than this part, none is granted: it would expire before a
// transfer started under it ends.
inline constexpr uint32_t kLeaseFractionMin = 4;

// Versions of the engines' protocol, both ends included.
struct Protocols {
  uint32_t oldest = 0;
  uint32_t newest = 0;
  bool Meets(const Protocols& other) const { return newest >= other.oldest && oldest <= other.newest; }
  friend bool operator==(const Protocols&, const Protocols&) = default;
};

class Coordinator {
 public:
  struct Send {
    ConnectionId connection;
    CoordinatorMessage message;
  };
  struct Close {  // after everything sent on it has gone out
    ConnectionId connection;
  };
  struct Store {  // write the view to the store; Stored() gives it out. One at a time
    ViewStatePtr view;
  };
  using Output = std::variant<Send, Close, Store>;
  using Outputs = std::vector<Output>;

  // The initial state of a node that takes the coordinator role. The default is a coordinator without a store.
  struct Inheritance {
    // The last view in the store; only its members' ids are used. Null: there is none. Its settings do not count,
    // because a restarted job may have others.
    ViewStatePtr newest = nullptr;
    // The former holder, if its members took the role from it because none of them reached it. That counts as the
    // beginning of its probe. kNoNode: no node had the role.
    NodeId deposed = kNoNode;
    TimeUs term_us = 0;          // the longest TermMs() of this and any former holder; 0: no store
    TimeUs confirmed_until = 0;  // see Confirmed()
  };

  // `config` is valid (ValidateConfig). `now` never goes back. `first_epoch` is the epoch of the first view unless a
  // registrant reports a higher one. It must be above all epochs that any predecessor gave out, even if no node has
  // seen them. A driver takes it in milliseconds from a clock that also runs while there is no coordinator. A
  // coordinator gives out at most one view per millisecond (kViewPauseUs).
  Coordinator(const MembershipConfig& config, TimeUs now, Epoch first_epoch)
      : Coordinator(config, now, first_epoch, Inheritance()) {}
  Coordinator(const MembershipConfig& config, TimeUs now, Epoch first_epoch, const Inheritance& inheritance);

  // A connection that does not register within dead_after is closed. Optional: a Registration on an unknown
  // connection opens it.
  Outputs Opened(TimeUs now, ConnectionId connection);
  // A view in `message` is valid (ValidateViewState): whatever decodes the message checks it.
  Outputs Received(TimeUs now, ConnectionId connection, const NodeMessage& message);
  Outputs Closed(TimeUs now, ConnectionId connection);
  Outputs Tick(TimeUs now);
  // Gives out at once a view that waits for the pause between views, for a coordinator that is about to end. Not during
  // the hold.
  Outputs Flush(TimeUs now);
  // The view of that epoch is in the store.
  Outputs Stored(TimeUs now, Epoch epoch);
  // This coordinator had the role at `until` - term_us, and no other one uses it before `until`.
  Outputs Confirmed(TimeUs now, TimeUs until);

  // The time at which Tick() is needed next; at most dead_after / kTicksPerDeath away. Earlier calls do no harm.
  TimeUs NextDeadline() const;

  // Null before the first view.
  const ViewStatePtr& view() const { return view_; }
  size_t registered() const { return records_.size(); }
  // Whether no view waits to be given out.
  bool settled() const { return !changed_ && storing_ == nullptr; }

 private:
  struct Record {
    Member member;
    Epoch joined = 0;  // 0: in no view yet
    ConnectionId connection = kNoConnection;
    uint64_t attempt = 0;
    uint64_t order = 0;    // of registration; orders two instances of one name during the hold
    bool veteran = false;  // its registration had a view with itself: another coordinator accepted it before
    TimeUs heard_at = 0;
    TimeUs probe_until = 0;  // 0: not probed
    TimeUs probe_next_at = 0;
    uint64_t nonce = 0;
    TimeUs view_sent_at = 0;
    Epoch view_sent = 0;  // the last epoch sent on this connection
    uint64_t beat = 0;    // of the last registration or heartbeat
    Epoch seen = 0;       // the epoch that it reported last
    Epoch reported = 0;   // the epoch of the view that it first registered with
    // The view that it must have seen to get a lease: the first of this coordinator that contains it, or the one that
    // took the lead from it. 0: none yet.
    Epoch ours = 0;
    TimeUs lease_from = 0;       // no lease is granted before this time
    TimeUs lease_until = 0;      // the end of all granted leases; 0: none was granted
    std::set<NodeId> unreached;  // as in its last heartbeat
    std::set<NodeId> reached;
    JobSettings settings;  // of its registration
    NamedSettings named;
    Protocols protocols;
  };
  struct Connection {
    NodeId node = kNoNode;  // kNoNode: has not registered yet
    TimeUs opened_at = 0;
  };

  // Every public input begins and ends with these two.
  void Begin(TimeUs now);
  Outputs End();

  void Register(ConnectionId connection, const Registration& registration);
  void RegisterAgain(Record* record, ConnectionId connection, const Registration& registration);
  // A member here that followed another coordinator meanwhile has fenced the members here that its view lacks. One side
  // must go, the smaller one: kStale if that is this member, else the others are removed.
  Status CheckFollowed(const Record& record, const Registration& registration);
  // May take the job's settings from it.
  Status Check(const Registration& registration);
  static Protocols ProtocolsOf(uint32_t version, uint32_t oldest);
  // The versions that all registered nodes and this one speak. A node of this name is left out: the registrant replaces
  // it.
  Protocols CommonProtocols(const std::string& except) const;
  // kInvalidArgument: a setting that the registrant named differs from the job's.
  Status CheckSettings(const std::string& name, const JobSettings& settings, const NamedSettings& named,
                       const JobSettings& job) const;
  // The refusal of an instance that was removed or replaced; OK for others.
  Status CheckInstance(const Registration& registration) const;
  // During the first hold: takes the job's settings from the newest reported view. Removes nodes that named others.
  void LearnSettings(const JobSettings& settings, const Member& reporter);
  // Any node may hold the role, so its defaults yield to values named on another node.
  void TakeNamedSettings(const Registration& registration);
  bool IsOurs(Epoch epoch) const;
  void OnHeartbeat(Record* record, const Heartbeat& heartbeat);
  // Answers its last registration or heartbeat, with a lease where rules 1 and 2 allow one.
  void Answer(Record* record);
  bool MayHaveLease(const Record& record) const;
  TimeUs LeaseNow() const;  // how long a lease that is granted now may be; 0: none
  bool IsConfirmed() const { return now_ < confirmed_until_; }
  // No node could be heard for this long: moves the deadlines by as much, but not beyond what they would be now.
  void MoveDeadlines(TimeUs by, TimeUs now);
  void OpenLeases();
  bool WholeJobStarts();
  void OnSuspicion(const Record& reporter, const Suspicion& suspicion);
  void Learn(const Registration& registration);
  void Scan();
  void StartProbe(Record* record, const char* why);
  void SendProbe(Record* record);
  // Removes the node for good. `refusal` is sent to it with the reason, if it can be reached. An OK status only closes
  // the connection.
  void Remove(NodeId id, const Status& refusal, const char* why);
  void RemoveName(const std::string& name, const Record& successor);
  void Remember(NodeId id);
  void Bind(Record* record, ConnectionId connection);
  void Refuse(ConnectionId connection, const Status& status);
  void Reply(ConnectionId connection, CoordinatorMessage message);
  // Only one view at a time is on its way to a node. The next is sent after the acknowledgement or after a timeout.
  bool ViewDue(const Record& record) const;
  void SendView(Record* record, bool whole = false);
  ViewDeltaPtr DeltaFrom(Epoch base);
  void KeepView();
  void Drop(ConnectionId connection);

  // coordinator_hold.cc
  bool HoldMayEnd();
  void EndHold();
  void ContinueNewest();
  // Whether an instance that reports this view, and is in it, may become a member after the hold.
  bool MayReturn(const ViewState& seen) const;
  bool AccountedFor(const Member& member) const;
  void HoldAgain(const ViewStatePtr& seen);
  void ResolveNames();

  // coordinator_leader.cc
  void NoteReach(Record* record, const Heartbeat& heartbeat);
  // It is heard, and has the present view.
  bool IsCurrent(const Record& record) const;
  // The members that do not reach each other, by each of the two.
  std::map<NodeId, std::set<NodeId>> Apart() const;
  void LogApart(const std::map<NodeId, std::set<NodeId>>& apart);
  std::vector<const Record*> Candidates(const std::map<NodeId, std::set<NodeId>>& apart) const;
  void Ask(NodeId member, const std::set<NodeId>& others);  // whether it reaches them
  void JudgeLeader();
  // For a view of these members, which is being made: the leader stays, or its successor begins.
  void ChooseLeader(const std::vector<const Record*>& members, Epoch epoch);

  void Publish();
  void GiveOut(const ViewStatePtr& view);
  Epoch NextEpoch() const;
  TimeUs ViewPause() const;
  // How late Tick() was called. A process that was stopped or got no processor heard no node, and must not count that
  // as silence of the nodes: all deadlines move by as much.
  TimeUs LateBy(TimeUs now) const;

  const MembershipConfig config_;
  const TimeUs dead_after_;
  const TimeUs probe_;
  const TimeUs lease_;
  const Epoch first_epoch_;
  const TimeUs term_us_;
  const bool lost_store_;  // the store has no view: the job is new, or the store's data is lost
  const NodeId deposed_;

  TimeUs now_ = 0;
  Outputs outputs_;
  std::map<NodeId, Record> records_;
  std::multimap<std::string, NodeId> names_;  // of records_; several per name only during the hold
  std::map<ConnectionId, Connection> connections_;
  std::deque<NodeId> removed_order_;
  std::set<NodeId> removed_;

  bool holding_ = true;
  static constexpr TimeUs kNever = ~TimeUs{0};
  TimeUs hold_until_ = kNever;  // set by the first registration
  ViewStatePtr newest_;         // of the views reported during the hold, and the inherited one
  size_t hold_accounted_ = 0;   // how many of newest_'s first members are accounted for
  std::set<NodeId> hold_ids_;   // ids in any view reported during the hold
  Epoch reported_ = 0;          // the highest epoch that any registrant reported
  // The highest epoch of a reported view that is not this coordinator's own.
  Epoch foreign_ = 0;

  TimeUs confirmed_until_;  // kNever without a store
  ViewStatePtr storing_;    // the view that waits for Stored()
  ViewStatePtr view_;
  std::deque<ViewStatePtr> given_;        // the last kDeltaBasesMax views, view_ among them: bases of deltas
  std::map<Epoch, ViewDeltaPtr> deltas_;  // deltas to view_, by the epoch of their base
  // The first and last epoch of each run that this coordinator has given out. A run ends where the next epoch skips
  // some that another coordinator may have given out.
  static constexpr size_t kOwnRunsMax =
      64;  // the oldest are forgotten: no node reports a view as old as that
  std::map<Epoch, Epoch> own_;
  bool changed_ = false;     // the members differ from view_, or the lead moves
  NodeId leader_ = kNoNode;  // of the last view that was made
  Epoch led_since_ = 0;
  NodeId successor_ = kNoNode;  // leads in the next view; kNoNode: the leader stays
  TimeUs move_from_ = 0;        // the lead does not move before
  bool judge_leader_ = false;   // what members reach has changed, or it is time to look again
  std::map<NodeId, std::vector<NodeId>>
      check_;                                  // members that are asked, and whether they reach which others
  std::set<std::pair<NodeId, NodeId>> apart_;  // as logged
  const TimeUs started_at_;
  // The time when all leases of predecessors have expired. leases_open_ is set then; no lease is granted here before.
  TimeUs predecessor_until_;
  bool leases_open_ = false;
  // The time when all leases of removed instances have expired.
  TimeUs out_lease_until_;
  JobSettings settings_;       // the job's
  NamedSettings named_;        // the settings that some node named
  Epoch settings_epoch_ = 0;   // of the reported view with these settings
  std::string settings_from_;  // the node that they come from; for messages
  TimeUs published_at_ = 0;
  TimeUs scan_at_;
  uint64_t registrations_ = 0;
  uint64_t nonces_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_COORDINATOR_H_
