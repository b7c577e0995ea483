// SPDX-License-Identifier: Apache-2.0
#include "membership/coordinator.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/base/log.h"

namespace ropeteam {
namespace {

constexpr TimeUs kUsPerMs = 1000;

unsigned long long Ull(uint64_t value) { return value; }

}  // namespace

Coordinator::Coordinator(const MembershipConfig& config, TimeUs now, Epoch first_epoch,
                         const Inheritance& inheritance)
    : config_(config),
      dead_after_(config.dead_after_ms * kUsPerMs),
      probe_(config.probe_ms * kUsPerMs),
      lease_(LeaseMs(config.dead_after_ms) * kUsPerMs),
      first_epoch_(first_epoch),
      term_us_(inheritance.term_us),
      lost_store_(term_us_ != 0 && inheritance.newest == nullptr),
      deposed_(inheritance.deposed),
      now_(now),
      confirmed_until_(term_us_ == 0 ? kNever : inheritance.confirmed_until),
      started_at_(now),
      predecessor_until_(now + WithDrift(std::max(lease_, term_us_))),
      out_lease_until_(predecessor_until_),
      settings_(config.settings),
      named_(config.named),
      settings_from_(config.coordinator_node.empty() ? "the coordinator"
                                                     : "the coordinator's node " + config.coordinator_node),
      scan_at_(now + dead_after_ / kTicksPerDeath) {
  ROPETEAM_CHECK(WithDrift(lease_) < dead_after_);
  if (inheritance.newest == nullptr) return;
  // An instance that is missing in it has left, even if that instance reports an older view.
  newest_ = inheritance.newest;
  foreign_ = reported_ = newest_->view.epoch;
  for (const NodeId id : newest_->removed) Remember(id);
  for (const Member& member : newest_->view.members) hold_ids_.insert(member.id);
}

Coordinator::Outputs Coordinator::Opened(TimeUs now, ConnectionId connection) {
  Begin(now);
  if (connections_.size() >= kConnectionsMax) {
    outputs_.push_back(Close{connection});
  } else {
    connections_.emplace(connection, Connection{kNoNode, now_});
  }
  return End();
}

Coordinator::Outputs Coordinator::Received(TimeUs now, ConnectionId connection, const NodeMessage& message) {
  Begin(now);
  if (const auto* registration = std::get_if<Registration>(&message)) {
    Register(connection, *registration);
    return End();
  }
  const auto bound = connections_.find(connection);
  if (bound == connections_.end() || bound->second.node == kNoNode) {
    // An unknown connection, perhaps from before a restart: the node must register first.
    Drop(connection);
    return End();
  }
  Record* record = &records_.at(bound->second.node);
  record->heard_at = now_;
  if (const auto* heartbeat = std::get_if<Heartbeat>(&message)) {
    OnHeartbeat(record, *heartbeat);
  } else if (const auto* answer = std::get_if<ProbeAnswer>(&message)) {
    if (record->probe_until != 0 && answer->nonce == record->nonce) {
      record->probe_until = 0;
      LOG_INFO("membership probe answered, node %s stays", record->member.name.c_str());
    }
  } else if (const auto* suspicion = std::get_if<Suspicion>(&message)) {
    OnSuspicion(*record, *suspicion);
  } else {
    record->lease_until = 0;  // the node ended its lease before it sent this message
    Remove(record->member.id, OkStatus(), "it left");
  }
  return End();
}

Coordinator::Outputs Coordinator::Closed(TimeUs now, ConnectionId connection) {
  Begin(now);
  const auto bound = connections_.find(connection);
  if (bound != connections_.end()) {
    const NodeId node = bound->second.node;
    connections_.erase(bound);
    if (node != kNoNode) {
      Record& record = records_.at(node);
      record.connection = kNoConnection;
      StartProbe(&record, "its connection closed");
    }
  }
  return End();
}

Coordinator::Outputs Coordinator::Tick(TimeUs now) {
  Begin(now);
  return End();
}

Coordinator::Outputs Coordinator::Flush(TimeUs now) {
  Begin(now);
  if (holding_) return End();
  if (changed_ && storing_ == nullptr) Publish();
  if (view_ == nullptr) return End();
  // Acknowledgements are no longer awaited. Nodes with an unacknowledged view get the whole last view.
  for (auto& [id, record] : records_)
    if (record.connection != kNoConnection && record.ours != 0 &&
        std::max(record.seen, record.view_sent) < view_->view.epoch)
      SendView(&record, /*whole=*/true);
  return End();
}

Coordinator::Outputs Coordinator::Stored(TimeUs now, Epoch epoch) {
  Begin(now);
  if (storing_ != nullptr && storing_->view.epoch == epoch) {
    const ViewStatePtr view = std::exchange(storing_, nullptr);
    if (holding_) {
      changed_ = true;  // replaced by the next view, after the hold
    } else {
      GiveOut(view);
    }
  }
  return End();
}

Coordinator::Outputs Coordinator::Confirmed(TimeUs now, TimeUs until) {
  Begin(now);
  const TimeUs lapsed = now_ > confirmed_until_ ? now_ - confirmed_until_ : 0;
  confirmed_until_ = std::max(confirmed_until_, until);
  if (lapsed != 0) {
    LOG_INFO("membership coordinator was not confirmed for %llu ms, deadlines move by as much",
             Ull(lapsed / kUsPerMs));
    MoveDeadlines(lapsed, now_);
    for (auto& [id, record] : records_)
      if (record.connection != kNoConnection && MayHaveLease(record)) Answer(&record);
  }
  return End();
}

TimeUs Coordinator::NextDeadline() const {
  TimeUs next = scan_at_;
  if (holding_ && IsConfirmed()) {
    next = std::min(next, hold_until_);
    if (deposed_ != kNoNode && now_ < started_at_ + probe_) next = std::min(next, started_at_ + probe_);
  }
  if (!leases_open_ && !holding_) next = std::min(next, predecessor_until_);
  if (changed_ && !holding_ && storing_ == nullptr) next = std::min(next, published_at_ + ViewPause());
  return next;
}

TimeUs Coordinator::LateBy(TimeUs now) const {
  const TimeUs due = NextDeadline();
  // Less than an eighth of dead_after is ordinary scheduling. Correcting for it would only blur the deadlines.
  return now > due + dead_after_ / 8 ? now - due : 0;
}

void Coordinator::Begin(TimeUs now) {
  ROPETEAM_CHECK(now >= now_);
  outputs_.clear();
  if (const TimeUs late = LateBy(now); late != 0) {
    LOG_WARNING("membership coordinator was held up for %llu ms, deadlines move by as much",
                Ull(late / kUsPerMs));
    MoveDeadlines(late, now);
  }
  now_ = now;
}

void Coordinator::MoveDeadlines(TimeUs by, TimeUs now) {
  const auto move = [by](TimeUs* when, TimeUs latest) {
    *when = std::max(*when, std::min(*when + by, latest));
  };
  if (hold_until_ != kNever) move(&hold_until_, now + dead_after_);
  for (auto& [id, record] : records_) {
    move(&record.heard_at, now);
    if (record.probe_until != 0) move(&record.probe_until, now + probe_);
  }
  for (auto& [id, connection] : connections_) move(&connection.opened_at, now);
}

Coordinator::Outputs Coordinator::End() {
  if (now_ >= scan_at_) Scan();
  if (std::exchange(judge_leader_, false)) JudgeLeader();
  if (holding_ && IsConfirmed() && (now_ >= hold_until_ || HoldMayEnd())) EndHold();
  if (!leases_open_ && !holding_ && now_ >= predecessor_until_) OpenLeases();
  if (changed_ && !holding_ && storing_ == nullptr && now_ >= published_at_ + ViewPause()) Publish();
  return std::exchange(outputs_, {});
}

Status Coordinator::CheckInstance(const Registration& registration) const {
  const Member& member = registration.member;
  const bool was_in_view = registration.seen != nullptr && registration.seen->view.Contains(member.id);
  const bool out =
      removed_.contains(member.id) || (!holding_ && was_in_view && !MayReturn(*registration.seen));
  // Of two instances with one name, the one that was in a view is the older; see ResolveNames().
  const bool older = out || (!holding_ && was_in_view);
  const auto [begin, end] = names_.equal_range(member.name);
  for (auto at = begin; older && at != end; ++at) {
    if (at->second == member.id) continue;
    return Error(Code::kAlreadyExists,
                 "node %s has another instance by now, %016llx at %s; this one is %016llx",
                 member.name.c_str(), Ull(at->second), records_.at(at->second).member.control_address.c_str(),
                 Ull(member.id));
  }
  if (out)
    return Error(Code::kStale,
                 "instance %016llx of node %s was declared dead; it must come back as a new one",
                 Ull(member.id), member.name.c_str());
  return OkStatus();
}

void Coordinator::Register(ConnectionId connection, const Registration& registration) {
  const Member& member = registration.member;
  const auto known = connections_.find(connection);
  if (known == connections_.end()) {
    connections_.emplace(connection, Connection{kNoNode, now_});
  } else if (known->second.node != kNoNode && known->second.node != member.id) {
    return Refuse(connection, Error(Code::kInvalidArgument, "two nodes on one connection"));
  }
  if (Status status = Check(registration); !status.ok()) return Refuse(connection, status);
  if (const auto found = records_.find(member.id); found != records_.end())
    return RegisterAgain(&found->second, connection, registration);
  if (Status status = CheckInstance(registration); !status.ok()) return Refuse(connection, status);

  const size_t others = records_.size() - names_.count(member.name);
  if (others >= kNodesMax)
    return Refuse(connection,
                  Error(Code::kNoSpace, "node %s cannot register: %zu nodes are registered, limit %zu",
                        member.name.c_str(), others, kNodesMax));
  Record record;
  record.member = member;
  record.order = ++registrations_;
  record.veteran = registration.seen != nullptr && registration.seen->view.Contains(member.id);
  record.reported = record.seen = registration.seen != nullptr ? registration.seen->view.epoch : 0;
  record.beat = registration.beat;
  record.settings = registration.settings;
  record.named = registration.named;
  record.protocols = ProtocolsOf(registration.protocol_version, registration.protocol_oldest);
  // During the hold it is not known yet which of two instances is older; ResolveNames() decides then.
  if (!holding_) RemoveName(member.name, record);
  Record* placed = &records_.emplace(member.id, std::move(record)).first->second;
  names_.emplace(member.name, member.id);
  changed_ = true;
  if (holding_ && hold_until_ == kNever) hold_until_ = now_ + dead_after_;
  LOG_INFO("membership node %s registered, instance %016llx at %s", member.name.c_str(), Ull(member.id),
           member.control_address.c_str());
  placed->attempt = registration.attempt;
  Bind(placed, connection);
  Learn(registration);
}

void Coordinator::RegisterAgain(Record* record, ConnectionId connection, const Registration& registration) {
  if (registration.attempt < record->attempt)
    return Drop(connection);  // overtaken by a newer connection of the same node
  if (record->member != registration.member)
    return Refuse(connection,
                  Error(Code::kInvalidArgument, "instance %016llx of node %s registered as another node",
                        Ull(record->member.id), record->member.name.c_str()));
  if (const Status status = CheckFollowed(*record, registration); !status.ok()) {
    Remove(record->member.id, status, "it came from a view of another coordinator without most members");
    return Refuse(connection, status);
  }
  record->attempt = registration.attempt;
  record->beat = std::max(record->beat, registration.beat);
  if (registration.seen != nullptr) record->seen = std::max(record->seen, registration.seen->view.epoch);
  Bind(record, connection);
  Learn(registration);
  if (ViewDue(*record)) SendView(record);
}

Status Coordinator::CheckFollowed(const Record& record, const Registration& registration) {
  reported_ = std::max(reported_, registration.epoch_known);
  const ViewStatePtr& seen = registration.seen;
  if (record.ours == 0 || seen == nullptr || IsOurs(seen->view.epoch) || seen->view.epoch < record.ours)
    return OkStatus();
  const std::set<NodeId> followed = IdsOf(seen->view);
  std::vector<NodeId> fenced;
  size_t members = 0;
  for (const auto& [id, other] : records_) {
    if (other.joined == 0) continue;
    ++members;
    if (id != record.member.id && !followed.contains(id)) fenced.push_back(id);
  }
  if (2 * fenced.size() > members)
    return Error(
        Code::kStale,
        "instance %016llx of node %s comes from view %llu of another coordinator, without %zu of the "
        "%zu members here; it must come back as a new one",
        Ull(record.member.id), record.member.name.c_str(), Ull(seen->view.epoch), fenced.size(), members);
  for (const NodeId id : fenced)
    Remove(id,
           Error(Code::kStale, "instance %016llx of node %s was declared dead by another coordinator",
                 Ull(id), records_.at(id).member.name.c_str()),
           "another coordinator had declared it dead");
  return OkStatus();
}

void Coordinator::Bind(Record* record, ConnectionId connection) {
  if (record->connection != connection && record->connection != kNoConnection) Drop(record->connection);
  record->connection = connection;
  record->view_sent = 0;  // a view that was being sent may be lost
  record->heard_at = now_;
  record->probe_until = 0;
  connections_[connection].node = record->member.id;
  Answer(record);
}

bool Coordinator::MayHaveLease(const Record& record) const {
  return leases_open_ && record.ours != 0 && record.seen >= record.ours && now_ >= record.lease_from;
}

void Coordinator::OpenLeases() {
  leases_open_ = true;
  for (auto& [id, record] : records_)
    if (record.connection != kNoConnection && MayHaveLease(record)) Answer(&record);
}

void Coordinator::Answer(Record* record) {
  HeartbeatAnswer answer{record->beat, 0};
  if (const auto asked = check_.find(record->member.id); asked != check_.end()) answer.check = asked->second;
  if (const TimeUs lease = LeaseNow(); lease != 0 && MayHaveLease(*record)) {
    // The node sent the answered message before it arrived here, and the node's lease counts from that time. A shorter
    // lease does not shorten an earlier one.
    record->lease_until = std::max(record->lease_until, now_ + WithDrift(lease));
    answer.lease_us = lease;
  }
  Reply(record->connection, answer);
}

TimeUs Coordinator::LeaseNow() const {
  if (!IsConfirmed()) return 0;
  const TimeUs lease = std::min(lease_, confirmed_until_ - now_);
  return lease < lease_ / kLeaseFractionMin ? 0 : lease;
}

bool Coordinator::IsOurs(Epoch epoch) const {
  const auto after = own_.upper_bound(epoch);
  return after != own_.begin() && epoch <= std::prev(after)->second;
}

void Coordinator::Learn(const Registration& registration) {
  // Nodes may have different dead_after_ms, and a store that has lost its data lacks the former holders' values.
  const bool term_unknown = lost_store_ && registration.seen != nullptr;
  const TimeUs longest = term_unknown ? TermMs(kDeadAfterMsMax) * kUsPerMs : registration.lease_us_max;
  predecessor_until_ = std::max(predecessor_until_, started_at_ + WithDrift(longest));
  out_lease_until_ = std::max(out_lease_until_, predecessor_until_);
  reported_ = std::max(reported_, registration.epoch_known);
  if (view_ != nullptr && registration.epoch_known > view_->view.epoch) changed_ = true;
  const ViewStatePtr& seen = registration.seen;
  if (seen == nullptr) return;
  const Epoch epoch = seen->view.epoch;
  reported_ = std::max(reported_, epoch);
  const bool foreign = !IsOurs(epoch);
  const bool newer = foreign && epoch > foreign_;
  if (newer) foreign_ = epoch;
  if (holding_) {
    if (!foreign) return;
    if (view_ == nullptr && epoch > settings_epoch_) {
      settings_epoch_ = epoch;
      LearnSettings(seen->view.settings, registration.member);
    }
    // Equal epochs mean equal views, but one from the store has no names.
    if (newest_ != nullptr && epoch == newest_->view.epoch) {
      if (newest_->view.members.empty() || newest_->view.members.front().name.empty()) newest_ = seen;
      return;
    }
    for (const NodeId id : seen->removed) Remember(id);
    for (const Member& member : seen->view.members) hold_ids_.insert(member.id);
    if (newest_ != nullptr && epoch < newest_->view.epoch) return;
    newest_ = seen;
    hold_accounted_ = 0;
    return;
  }
  // A view given out by this coordinator contains nothing new: every instance that left it, or an earlier one, was
  // removed here.
  if (std::any_of(given_.begin(), given_.end(),
                  [epoch](const ViewStatePtr& given) { return given->view.epoch == epoch; }))
    return;
  const auto remove = [this](NodeId id) {
    Remove(id,
           Error(Code::kStale, "instance %016llx of node %s was declared dead by a former coordinator",
                 Ull(id), records_.at(id).member.name.c_str()),
           "a former coordinator had declared it dead");
  };
  // Another coordinator made this view. An instance has left that coordinator's views in two cases: this view lists it
  // as removed, or it was in an earlier view and is missing in this one.
  for (const NodeId id : seen->removed) {
    if (id == registration.member.id) continue;
    if (records_.contains(id)) remove(id);
    Remember(id);
  }
  if (newer) {
    const std::set<NodeId> present = IdsOf(seen->view);
    std::vector<NodeId> missing;
    for (const auto& [id, record] : records_)
      if (id != registration.member.id && record.veteran && record.reported < epoch && !present.contains(id))
        missing.push_back(id);
    for (const NodeId id : missing) remove(id);
  }
  if (newer && !std::all_of(seen->view.members.begin(), seen->view.members.end(),
                            [this](const Member& member) { return AccountedFor(member); }))
    return HoldAgain(seen);
  // For the registrant, the next view removes those members of its own view that are not members here.
  for (const Member& member : seen->view.members)
    if (!records_.contains(member.id)) Remember(member.id);
  if (view_ != nullptr && epoch > view_->view.epoch) changed_ = true;
}

void Coordinator::OnHeartbeat(Record* record, const Heartbeat& heartbeat) {
  record->beat = std::max(record->beat, heartbeat.beat);
  record->seen = std::max(record->seen, heartbeat.seen);
  NoteReach(record, heartbeat);
  Answer(record);
  if (heartbeat.whole && record->ours != 0 && !holding_) {
    SendView(record, /*whole=*/true);
  } else if (ViewDue(*record)) {
    SendView(record);
  }
}

void Coordinator::OnSuspicion(const Record& reporter, const Suspicion& suspicion) {
  const auto found = records_.find(suspicion.member);
  if (found == records_.end() || &found->second == &reporter) return;
  Record& suspect = found->second;
  if (suspect.probe_until != 0) return;  // a probe is already running; a new one would only delay the answer
  LOG_INFO("membership node %s suspects node %s, reason %s", reporter.member.name.c_str(),
           suspect.member.name.c_str(), suspicion.reason.c_str());
  StartProbe(&suspect, "it is suspected");
}

void Coordinator::StartProbe(Record* record, const char* why) {
  if (record->probe_until == 0) {
    LOG_INFO("membership probing node %s, %s", record->member.name.c_str(), why);
    record->probe_until = now_ + probe_;
    record->nonce = ++nonces_;
  }
  SendProbe(record);
}

void Coordinator::SendProbe(Record* record) {
  if (record->connection != kNoConnection) Reply(record->connection, Probe{record->nonce});
  record->probe_next_at = now_ + std::max<TimeUs>(probe_ / kProbesPerDeath, 1);
  scan_at_ = std::min({scan_at_, record->probe_next_at, record->probe_until});
}

void Coordinator::Scan() {
  judge_leader_ = true;
  if (!IsConfirmed()) {
    scan_at_ = now_ + dead_after_ / kTicksPerDeath;
    return;
  }
  std::vector<std::pair<NodeId, const char*>> dead;
  TimeUs next = now_ + dead_after_ / kTicksPerDeath;
  for (auto& [id, record] : records_) {
    if (now_ >= record.heard_at + dead_after_) {
      dead.emplace_back(id, "it was silent");
      continue;
    }
    next = std::min(next, record.heard_at + dead_after_);
    if (record.probe_until == 0) continue;
    if (now_ >= record.probe_until) {
      dead.emplace_back(id, record.connection == kNoConnection
                                ? "it did not come back after its connection closed"
                                : "it did not answer a probe");
      continue;
    }
    if (now_ >= record.probe_next_at) SendProbe(&record);
    next = std::min({next, record.probe_next_at, record.probe_until});
  }
  scan_at_ = next;
  for (const auto& [id, why] : dead)
    Remove(id,
           Error(Code::kStale, "instance %016llx of node %s was declared dead, %s", Ull(id),
                 records_.at(id).member.name.c_str(), why),
           why);
  std::vector<ConnectionId> mute;
  for (const auto& [id, connection] : connections_)
    if (connection.node == kNoNode && now_ >= connection.opened_at + dead_after_) mute.push_back(id);
  for (const ConnectionId id : mute) Drop(id);
}

void Coordinator::Remove(NodeId id, const Status& refusal, const char* why) {
  const auto found = records_.find(id);
  Record& record = found->second;
  LOG_INFO("membership node %s is out, %s, instance %016llx", record.member.name.c_str(), why, Ull(id));
  if (record.connection != kNoConnection) {
    if (refusal.ok()) {
      Drop(record.connection);
    } else {
      Refuse(record.connection, refusal);
    }
  }
  out_lease_until_ = std::max(out_lease_until_, record.lease_until);
  // No node has fenced an instance that was in no view, so it may try again as it is.
  if (record.joined != 0 || record.veteran || refusal.code() == Code::kAlreadyExists) Remember(id);
  const auto [begin, end] = names_.equal_range(record.member.name);
  const auto named = std::find_if(begin, end, [id](const auto& entry) { return entry.second == id; });
  ROPETEAM_CHECK(named != end);
  names_.erase(named);
  records_.erase(found);
  changed_ = true;
}

void Coordinator::RemoveName(const std::string& name, const Record& successor) {
  std::vector<NodeId> replaced;
  const auto [begin, end] = names_.equal_range(name);
  for (auto at = begin; at != end; ++at)
    if (at->second != successor.member.id) replaced.push_back(at->second);
  for (const NodeId id : replaced)
    Remove(id,
           Error(Code::kAlreadyExists, "instance %016llx of node %s was replaced by %016llx at %s", Ull(id),
                 name.c_str(), Ull(successor.member.id), successor.member.control_address.c_str()),
           "replaced by another instance");
}

void Coordinator::Remember(NodeId id) {
  if (!removed_.insert(id).second) return;
  removed_order_.push_back(id);
  if (removed_order_.size() <= kRemovedMax) return;
  removed_.erase(removed_order_.front());
  removed_order_.pop_front();
}

void Coordinator::Refuse(ConnectionId connection, const Status& status) {
  Reply(connection, Refusal{status});
  Drop(connection);
}

void Coordinator::Reply(ConnectionId connection, CoordinatorMessage message) {
  outputs_.push_back(Send{connection, std::move(message)});
}

bool Coordinator::ViewDue(const Record& record) const {
  if (holding_ || record.connection == kNoConnection || record.ours == 0 || record.seen >= view_->view.epoch)
    return false;
  // On a working connection the previous view is just not acknowledged yet.
  return record.view_sent <= record.seen || now_ >= record.view_sent_at + dead_after_ / kTicksPerDeath;
}

void Coordinator::SendView(Record* record, bool whole) {
  record->view_sent_at = now_;
  record->view_sent = view_->view.epoch;
  const ViewDeltaPtr delta = whole ? nullptr : DeltaFrom(record->seen);
  if (delta != nullptr) {
    Reply(record->connection, delta);
  } else {
    Reply(record->connection, view_);
  }
}

void Coordinator::KeepView() {
  deltas_.clear();
  given_.push_back(view_);
  if (given_.size() > kDeltaBasesMax) given_.pop_front();
}

ViewDeltaPtr Coordinator::DeltaFrom(Epoch base) {
  const auto known = deltas_.find(base);
  if (known != deltas_.end()) return known->second;
  const auto from = std::find_if(given_.begin(), given_.end(),
                                 [base](const ViewStatePtr& given) { return given->view.epoch == base; });
  if (from == given_.end()) return nullptr;
  return deltas_[base] = MakeViewDelta(**from, *view_);
}

void Coordinator::Drop(ConnectionId connection) {
  const auto found = connections_.find(connection);
  if (found != connections_.end()) {
    if (found->second.node != kNoNode) {
      Record& record = records_.at(found->second.node);
      if (record.connection == connection) record.connection = kNoConnection;
    }
    connections_.erase(found);
  }
  outputs_.push_back(Close{connection});
}

TimeUs Coordinator::ViewPause() const {
  if (view_ == nullptr) return 0;
  return kViewPauseUs + kViewPausePerMemberUs * records_.size();
}

Epoch Coordinator::NextEpoch() const {
  const Epoch next = own_.empty() ? first_epoch_ : own_.rbegin()->second + 1;
  if (reported_ < next) return next;
  return (reported_ / kEpochLeap + 1) * kEpochLeap + 1;
}

void Coordinator::Publish() {
  auto state = std::make_shared<ViewState>();
  View& view = state->view;
  view.epoch = NextEpoch();
  view.settings = settings_;
  std::vector<const Record*> members;
  for (auto& [id, record] : records_) {
    if (record.joined == 0) record.joined = view.epoch;
    members.push_back(&record);
  }
  if (!own_.empty() && own_.rbegin()->second + 1 == view.epoch)
    own_.rbegin()->second = view.epoch;
  else
    own_[view.epoch] = view.epoch;
  if (own_.size() > kOwnRunsMax) own_.erase(own_.begin());
  std::sort(members.begin(), members.end(), [](const Record* a, const Record* b) {
    return std::tie(a->member.ordinal, a->member.name) < std::tie(b->member.ordinal, b->member.name);
  });
  for (const Record* record : members) {
    view.members.push_back(record->member);
    state->joined.push_back(record->joined);
  }
  ChooseLeader(members, view.epoch);
  view.leader = leader_;
  view.led_since = led_since_;
  view.settle_us = out_lease_until_ > now_ ? WithDrift(out_lease_until_ - now_) : 0;
  const size_t carried = std::min(removed_order_.size(), kRemovedCarriedMax);
  state->removed.assign(removed_order_.end() - static_cast<std::ptrdiff_t>(carried), removed_order_.end());
  changed_ = false;
  if (term_us_ == 0) return GiveOut(state);
  storing_ = std::move(state);
  outputs_.push_back(Store{storing_});
}

void Coordinator::GiveOut(const ViewStatePtr& view) {
  for (const Member& member : view->view.members) {
    const auto found = records_.find(member.id);
    if (found == records_.end() || found->second.ours != 0) continue;
    Record& record = found->second;
    record.ours = view->view.epoch;
    // In another coordinator's view the registrant may have seen that a present member had left. That instance's lease
    // has expired by then.
    if (view_ != nullptr && record.reported != 0 && !IsOurs(record.reported))
      record.lease_from = out_lease_until_;
  }
  view_ = view;
  KeepView();
  published_at_ = now_;
  judge_leader_ = true;
  LOG_INFO("membership view %llu, members %zu, leader %016llx, settles in %llu ms", Ull(view_->view.epoch),
           view_->view.members.size(), Ull(view_->view.leader), Ull(view_->view.settle_us / kUsPerMs));
  for (auto& [id, record] : records_)
    if (ViewDue(record)) SendView(&record);
}

}  // namespace ropeteam
