// SPDX-License-Identifier: Apache-2.0
//
// The Seat is a node's side of etcd, as a deterministic state machine: events and the time go in, actions come out, and
// nothing happens between calls. The *role* is that of coordinator; its record is the key `coordinator` in etcd. The
// Seat keeps the node's lease in etcd and follows which node has the role. It takes the role when it is vacant or its
// holder is lost, and proves that it still has it.
//
// Keys, below /PREFIX/JOB/ (both percent-encoded):
// clang-format off
//   key                              value                               ends with the lease of   written by
//   ------------------------------   ---------------------------------   ----------------------   --------------------------
//   format                           1                                   -                        the first node
//   nodes/<id>                       a line of JSON, for people          the node                 each node; no decision uses it
//   coordinator                      HOST:PORT <id> <nonce> <name>       the holder               the node that takes the role
//   view                             the last view (EncodeStoredView)    -                        the holder
//   doubt/<nonce>/<id>               why                                 the node                 nodes that do not reach the holder
//
//   the node is    when                                        it goes on when
//   ------------   -----------------------------------------   ---------------------------------------------------
//   without        it starts, or etcd says that the lease is   etcd grants a lease (Grant)
//   a lease        gone
//   outside        it has a lease                              its key is written, and the record and the view are read (Join)
//   seated         it knows which node has the role            the lease is gone; Rejoin(); Resign()
//
//   the role is    it is taken (Claim) when
//   ------------   -----------------------------------------------------------------------------------------------------
//   vacant         after a pause that is longer for later ordinals, so that not all nodes try at once; also if its key has
//                  a value that no node of this job writes
//   another's      more than half of the other members of the last view doubt the holder: they have not reached it for a
//                  probe, and it has had the role for longer than its hold lasts
//   of my name     the holder is a former process of this node, or this process took it and missed the answer: at once
// clang-format on
//
// Safety rests on three things.
//   * A compare of the key `coordinator` with the exact bytes that the holder wrote, its nonce among them. A revision
//     is not enough: revisions repeat if etcd loses its data. All reads and writes need a majority of etcd's members.
//   * Time counts from sending: a Confirm that was sent at s and answered "still mine" proves that no other node had
//     taken the role before s. The holder acts until s + TermMs(), its successor not before its own Claim + TermMs().
//   * A view is in the store before it is given out, in a transaction that fails if the role is lost.
// etcd's leases prove nothing: a member of etcd renews them without asking the others. They only delete the record in
// the end. So no clock of etcd's and no wrong suspicion can break a promise; evidence only decides when to try.
//
// A call with unknown outcome is repeated. Each call is made so that it recognises its own earlier effect.
//
// Not thread-safe: one caller at a time.

#ifndef ROPETEAM_MEMBERSHIP_ETCD_SEAT_H_
#define ROPETEAM_MEMBERSHIP_ETCD_SEAT_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "core/base/status.h"
#include "membership/coordinator.h"
#include "membership/etcd/store.h"

namespace ropeteam {

// etcd raises a shorter time to live to this. Without doubts, the role becomes vacant this long after its holder is
// gone.
inline constexpr int64_t kSeatTtlS = 2;
// For nodes with an ordinal from kSeatOrdinals on, until they take the role. 16,384 nodes that renew three times in 2 s
// would send etcd 25,000 messages a second.
inline constexpr int64_t kSeatTtlLongS = 10;
inline constexpr uint32_t kSeatOrdinals = 64;
// Pauses between attempts while etcd does not answer. The shortest is the time for the next endpoint, the longest is
// well below a term.
inline constexpr TimeUs kSeatPauseMinUs = 20'000;
inline constexpr TimeUs kSeatPauseMaxUs = 500'000;
// How long etcd may be silent before it is reported: a change of its leader takes 1 to 2 s.
inline constexpr TimeUs kOutageSaidUs = 1'000'000;

class Seat {
 public:
  struct Config {
    std::string job;
    std::string prefix;
    uint32_t dead_after_ms = kDeadAfterMsDefault;
    uint32_t probe_ms = 250;
    std::string address;  // HOST:PORT at which this node's coordinator would be reached
    uint64_t seed = 0;    // of nonces and pauses; differs from process to process
    std::function<std::string(const Member&)> describe;  // the value of nodes/<id>
  };

  // Answer with Answered().
  struct Call {
    uint64_t id;
    StoreRequest request;
    int deadline_ms;
  };
  struct KeepAlive {
    StoreLease lease;
  };
  // Watch the key from that revision on, and no other key any more.
  struct Watch {
    uint64_t number;
    std::string key;
    int64_t from;
  };
  // The present endpoint of etcd is silent: use the next one.
  struct NextEndpoint {};
  // The address of the node that has the role: this node's agent must register there.
  struct Moved {
    std::string address;
  };
  // This node has the role: run a coordinator. Moved follows.
  struct Elected {
    Coordinator::Inheritance inheritance;
  };
  struct Confirmed {  // for the coordinator, as Stored
    TimeUs until;
  };
  struct Stored {
    Epoch epoch;
  };
  struct Deposed {  // end the coordinator at once
    std::string why;
  };
  // For Membership::Callbacks::on_refused: kUnsupported, kInvalidArgument.
  struct Refused {
    Status status;
  };
  // etcd does not answer or, if `refuses`, accepts no writes.
  struct Outage {
    TimeUs since;  // 0: it is over
    std::string why;
    bool refuses;
  };
  struct Resigned {};
  using Output = std::variant<Call, KeepAlive, Watch, NextEndpoint, Moved, Elected, Confirmed, Stored,
                              Deposed, Refused, Outage, Resigned>;
  using Outputs = std::vector<Output>;

  Seat(const Config& config, const Member& self);

  Outputs Start(TimeUs now);
  Outputs Answered(TimeUs now, uint64_t call, const Result<StoreAnswer>& answer);
  Outputs KeptAlive(TimeUs now, StoreLease lease, int64_t ttl_s);
  Outputs Changed(TimeUs now, uint64_t watch, int64_t revision, const std::optional<std::string>& value);
  Outputs WatchEnded(TimeUs now, uint64_t watch);
  // Whether this node's agent is registered.
  Outputs OnContact(TimeUs now, bool registered);
  // A view with this node in it was given to it.
  Outputs OnView(TimeUs now, const View& view);
  // This node was refused: until Rejoin() it does not claim the role and does not doubt its holder.
  Outputs OnRefused(TimeUs now);
  // For Coordinator::Store. The previous one has been answered with Stored.
  Outputs StoreView(TimeUs now, const ViewStatePtr& view);
  Outputs Rejoin(TimeUs now, const Member& self);
  // Releases the role and the lease, then outputs Resigned.
  Outputs Resign(TimeUs now);
  Outputs Tick(TimeUs now);
  TimeUs NextDeadline() const;

  bool holds() const { return !mine_.empty(); }

 private:
  static constexpr TimeUs kNever = std::numeric_limits<TimeUs>::max();
  enum class Kind { kNone, kGrant, kJoin, kFormat, kFind, kClaim, kDoubt, kUndoubt, kResign, kRevoke };
  struct CoordinatorRecord {
    std::string value;
    std::string address;
    NodeId id = kNoNode;  // kNoNode: `value` is not from a node, and the other fields are empty
    std::string nonce;
    std::string name;
  };
  // A call under way; id 0: none.
  struct Pending {
    uint64_t id = 0;
    TimeUs sent_at = 0;
  };

  static CoordinatorRecord Parse(const std::string& value);
  bool vacant() const { return !record_ || record_->id == kNoNode; }
  void Proceed(TimeUs now);
  Kind NextKind(TimeUs now) const;
  bool WantsClaim(TimeUs now) const;
  // The doubts of nodes that have contact again would add up with those of others.
  bool WantsUndoubt() const { return doubted_ && (contact_ || removed_); }
  TimeUs DoubtDue() const;
  StoreTxn TxnOf(Kind kind);
  void StartConfirm(TimeUs now);
  void StartStore(TimeUs now);
  Pending Begin(TimeUs now, StoreRequest request, int deadline_ms);
  void OnMain(TimeUs now, Kind kind, TimeUs sent_at, const StoreAnswer& answer);
  void OnJoined(TimeUs now, const StoreAnswer& answer);
  void OnClaimed(TimeUs now, TimeUs sent_at, const StoreAnswer& answer);
  void OnDoubted(TimeUs now, const StoreAnswer& answer);
  void OnStored(TimeUs now, const StoreAnswer& answer);
  void Fail(TimeUs now, const Pending& of, const Status& status);
  void Refuse(TimeUs now, const Status& status);
  void Answers();
  void SayOutage(TimeUs now);
  bool WritesNothing(TimeUs now) const;
  void LearnRecord(TimeUs now, int64_t revision, const StoreFound& found);
  void FollowRecord(TimeUs now, const std::optional<std::string>& value);
  void Depose(const std::string& why);
  void LoseLease(TimeUs now);
  Outputs Take() { return std::exchange(outputs_, {}); }

  const Config config_;
  const std::string root_;  // of all keys
  const TimeUs dead_after_;
  const TimeUs probe_;
  const TimeUs term_;
  // The maximum of this node and of former holders. Nodes may have different dead_after_ms, and a successor must wait
  // for the leases of its predecessors.
  TimeUs longest_term_;
  Member self_;
  NodeId former_ = kNoNode;  // before Rejoin(): its key is to be deleted
  std::mt19937_64 random_;
  Outputs outputs_;

  bool started_ = false;
  bool resigning_ = false;
  bool resigned_ = false;
  uint64_t calls_ = 0;
  Pending main_, confirm_, store_;
  Kind main_kind_ = Kind::kNone;
  TimeUs retry_at_ = 0;
  TimeUs pause_ = kSeatPauseMinUs;
  TimeUs failing_since_ = 0;  // 0: the last call was answered
  std::string failing_why_;
  TimeUs refusing_since_ = 0;  // since when etcd refuses writes; 0: it does not
  std::string refusing_why_;
  Outage said_{0, {}, false};

  StoreLease lease_ = 0;
  int64_t ttl_s_ = 0;        // of lease_
  int64_t asked_ttl_s_ = 0;  // of the Grant under way
  TimeUs keep_alive_at_ = 0;
  TimeUs kept_at_ = 0;  // last answer, or the last change of the endpoint
  bool joined_ = false;
  bool format_missing_ = false;

  uint64_t watch_ = 0;
  bool watching_ = false;
  int64_t known_at_ = 0;  // the revision of the store for which record_ is known to be right
  bool behind_ = false;   // an answer came from before known_at_: it is late, or the store has lost its data
  bool find_wanted_ = false;
  TimeUs find_at_ = kNever;   // during a loss of contact, because a watch may hang
  TimeUs watched_at_ = 0;     // when the watch was begun
  TimeUs watch_at_ = kNever;  // it has ended: when the record is read and watched again
  std::optional<CoordinatorRecord> record_;
  TimeUs record_since_ = 0;
  TimeUs claim_at_ = 0;   // while the role is vacant
  std::string lost_;      // the record whose holder is doubted by enough members
  bool doubted_ = false;  // this node's doubt may be in the store
  bool removed_ = false;  // the holder has declared this instance dead: its doubt does not count
  TimeUs doubt_at_ = 0;

  bool contact_ = false;
  TimeUs contact_since_ = 0;
  bool refused_ = false;
  View view_;  // the last one with this instance; epoch 0: none

  std::string mine_;                // the record, while this node holds the role
  std::string claim_;               // the value of the Claim under way
  NodeId claim_deposes_ = kNoNode;  // the holder that it replaces because of doubts
  TimeUs confirm_at_ = 0;
  int64_t view_revision_ = 0;  // of the key `view`
  ViewStatePtr storing_;
  std::string storing_bytes_;
  TimeUs store_at_ = 0;
};

// Percent-encoding of everything outside [A-Za-z0-9._-].
std::string EncodeKeyPart(const std::string& text);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_ETCD_SEAT_H_
