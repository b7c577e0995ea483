// SPDX-License-Identifier: Apache-2.0
//
// The Agent is a node's side of membership, as a deterministic state machine: messages and the time go in, actions come
// out, and nothing happens between calls. It has no socket, thread or clock. A driver (standalone/, simulated/) opens
// connections, transports messages and calls Tick() at NextDeadline().
//
// clang-format off
//   phase        is when                               it goes to
//   ----------   -----------------------------------   -----------------------------------------------------------
//   idle         before Start()                        connecting
//   connecting   a connection is open and the          registered: anything is heard on it
//                registration sent, or a pause         connecting: it broke, or nothing was heard for dead_after
//                before the next attempt runs, or      refused
//                no address is known yet
//   registered   the coordinator answers               connecting: the connection broke, or nothing was heard on it
//                                                      for half of dead_after (a path that is dead in one direction)
//                                                      refused
//   refused      the coordinator refused it            connecting: Rejoin()
//   left         after Leave()                         never
// clang-format on
//
// The lease: registrations and heartbeats are numbered, and the agent records when it sent each. After the answer to
// number n, the lease lasts until the sending of n plus lease_us, whenever the answer arrives. A lease survives the
// loss of the connection and of the coordinator until it expires. Refusal, Rejoin() and Leave() end it at once, because
// the instance must not use it any more.
//
// If the coordinator is lost, the last view stays in force. Not thread-safe: one caller at a time.
//
// Several addresses: after a loss the agent tries the same address once more, and then all addresses of its list in a
// circle: first the configured ones in their order, then those from Relocate(). A registered agent stays with its
// coordinator.
//
// A coordinator in this process (coordinator_listen): the agent first tries all other addresses. So if the host of an
// old coordinator returns, it joins the job at its present coordinator. The driver starts the coordinator when the
// agent opens its own address:
//   * at once, if the list has no other address;
//   * else after unsuccessful rounds over the others, dead_after apart: one more than its own index in the list. So if
//     several start together, those later in the list find the earlier one;
//   * never, if the agent was registered elsewhere before. An unreachable coordinator is no reason for another node to
//     become coordinator: without an outside quorum, a dead coordinator looks the same as one that is cut off.
// The agent stays at its own address. An agent whose index is not 0 tries the others once more while its coordinator
// still holds the first view: two that started within the same few milliseconds may have missed each other. Relocate()
// moves the agent to another coordinator, by an operator's order or because the daemon learned the address. If that
// coordinator does not answer either, the agent returns after the same rounds.

#ifndef ROPETEAM_MEMBERSHIP_AGENT_H_
#define ROPETEAM_MEMBERSHIP_AGENT_H_

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "membership/messages.h"

namespace ropeteam {

// The pause between attempts to reach a coordinator that does not answer. The shortest is the time of a local
// reconnect. The longest is well below dead_after, the time for which a returned coordinator waits for the nodes.
inline constexpr TimeUs kReconnectPauseMinUs = 20'000;
inline constexpr TimeUs kReconnectPauseMaxUs = 250'000;
// Suspects remembered at a time. If there are more, this node's own network has failed, and its silence tells the
// coordinator.
inline constexpr size_t kSuspectsMax = 64;
// A lease is renewed at least this often while it lasts, even if heartbeat_ms is longer than the coordinator's.
inline constexpr uint32_t kHeartbeatsPerLease = 3;
// Unanswered numbered messages that are remembered. An answer to an older one would grant an expired lease: the
// messages are sent a heartbeat apart, and views add only a few.
inline constexpr size_t kBeatsMax = 64;

class Agent {
 public:
  // Closes the present connection, if any, and opens another one. Its first message follows. The driver passes messages
  // from it, and its end, with this `attempt`. If the address is coordinator_listen, the driver starts the coordinator
  // first, unless it runs. For any other address it ends a running coordinator.
  struct Open {
    uint64_t attempt;
    std::string address;
  };
  struct Send {
    uint64_t attempt;
    NodeMessage message;
  };
  struct Close {  // at once; unsent messages are dropped
    uint64_t attempt;
  };
  struct Lease {
    TimeUs valid_until;  // 0: no lease
  };
  struct Check {  // for Membership::Callbacks::on_check
    std::vector<NodeId> members;
  };
  // View, Status, Lease, Contact: for Membership::Callbacks. Lease{0} precedes the Status or the message that ends the
  // lease.
  using Output = std::variant<Open, Send, Close, View, Status, Lease, Contact, Check>;
  using Outputs = std::vector<Output>;

  // `config` and `self` are valid (ValidateConfig, ValidateMember).
  Agent(const MembershipConfig& config, const Member& self);

  Outputs Start(TimeUs now);
  Outputs Rejoin(TimeUs now, const Member& self);
  // Several suspicions of one member within probe_ms count as one.
  Outputs Suspect(TimeUs now, NodeId member, const std::string& reason);
  // Membership::ReportReach().
  Outputs Reach(TimeUs now, NodeId member, bool reached);
  // Membership::Relocate().
  Outputs Relocate(TimeUs now, const Place& place, bool move);
  // The coordinator answers by closing the connection.
  Outputs Leave(TimeUs now);
  Outputs Received(TimeUs now, uint64_t attempt, const CoordinatorMessage& message);
  // `reason` is for the log.
  Outputs Broken(TimeUs now, uint64_t attempt, const std::string& reason);
  Outputs Tick(TimeUs now);

  // The time at which Tick() is needed next; the end of time if never.
  TimeUs NextDeadline() const;

  bool registered() const { return phase_ == Phase::kRegistered; }
  const Member& self() const { return self_; }
  // The last view passed to the callbacks; null before the first.
  const ViewStatePtr& seen() const { return seen_; }

 private:
  static constexpr uint32_t kNoOwn = UINT32_MAX;  // of rounds_: the own address is not opened
  enum class Phase { kIdle, kConnecting, kRegistered, kRefused, kLeft };
  struct Beat {
    uint64_t number = 0;
    TimeUs sent_at = 0;
  };
  struct Doubt {
    std::string reason;
    TimeUs reported_at = 0;
    bool sent = false;
  };

  struct Known {
    std::string address;
    bool told = false;   // from Relocate(), not configured
    std::string reason;  // why it does not answer, as last reported
  };

  void Connect(TimeUs now);
  bool IsOwn(size_t index) const { return addresses_[index].address == config_.coordinator_listen; }
  // The address does not answer: chooses the next address and time. Returns true if there is a pause first.
  bool Advance();
  TimeUs ConnectTimeout() const { return addresses_.size() > 1 ? dead_after_ / 2 : dead_after_; }
  bool Alone() const { return seen_ == nullptr || seen_->view.members.size() == 1; }
  void AskOthersFirst(uint32_t rounds);
  size_t Learn(const std::string& address);
  void Tell(bool registered, TimeUs now, const std::string& reason);
  void Lose(TimeUs now, const std::string& reason);
  uint64_t NextBeat(TimeUs now);
  void SendHeartbeat(TimeUs now);
  void OnAnswer(TimeUs now, const HeartbeatAnswer& answer);
  void EndLease();
  void OnView(TimeUs now, const ViewStatePtr& view);
  void OnDelta(TimeUs now, const ViewDelta& delta);
  void SendSuspects(TimeUs now);
  void Say(NodeMessage message) { outputs_.push_back(Send{attempt_, std::move(message)}); }
  Outputs Take() { return std::exchange(outputs_, {}); }

  const MembershipConfig config_;
  const TimeUs heartbeat_;
  const TimeUs dead_after_;
  const TimeUs probe_;
  Member self_;

  std::vector<Known> addresses_;  // configured, own, from Relocate()
  size_t current_ = 0;
  size_t own_ = 0;            // index of coordinator_listen, if there is one
  uint32_t rounds_ = kNoOwn;  // rounds over the other addresses before the own address is opened
  uint64_t order_ = 0;        // the highest order seen by Relocate()
  TimeUs look_again_at_ = 0;  // when the agent at its own address tries the others again; 0: never
  bool looked_again_ = false;
  bool contact_ = false;  // as last reported
  TimeUs contact_since_ = 0;

  Phase phase_ = Phase::kIdle;
  Outputs outputs_;
  uint64_t attempt_ = 0;
  bool open_ = false;         // attempt_'s connection has not broken
  bool lost_logged_ = false;  // one line per loss, however many attempts it takes
  TimeUs opened_at_ = 0;
  TimeUs heard_at_ = 0;
  TimeUs heartbeat_at_ = 0;
  TimeUs retry_at_ = 0;  // when !open_
  TimeUs pause_ = kReconnectPauseMinUs;
  ViewStatePtr seen_;
  bool whole_wanted_ = false;    // a delta did not fit, and no whole view has come since
  uint64_t beats_ = 0;           // count of numbered messages
  std::deque<Beat> unanswered_;  // sent by this instance on this connection, oldest first; at most kBeatsMax
  // 0: no lease. The end of an expired lease stays here until the next lease.
  TimeUs lease_until_ = 0;
  TimeUs lease_us_ = 0;      // as last granted; 0: no lease was granted
  TimeUs lease_us_max_ = 0;  // the longest that was granted
  std::map<NodeId, Doubt> suspects_;
  // What the node has reported of members: false until they answer it, true only for those of check_.
  std::map<NodeId, bool> reach_;
  std::vector<NodeId> check_;  // the coordinator's list
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_AGENT_H_
