// SPDX-License-Identifier: Apache-2.0
#include "membership/agent.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/base/log.h"

namespace ropeteam {
namespace {

constexpr TimeUs kUsPerMs = 1000;
constexpr TimeUs kNever = std::numeric_limits<TimeUs>::max();

// A name server that is silent looks like a silent coordinator.
std::string WhySilent(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  const bool numeric = host.starts_with('[') || host.find_first_not_of("0123456789.") == std::string::npos;
  return numeric ? "it does not answer" : "it does not answer, or the name " + host + " is not resolved";
}

}  // namespace

Agent::Agent(const MembershipConfig& config, const Member& self)
    : config_(config),
      heartbeat_(config.heartbeat_ms * kUsPerMs),
      dead_after_(config.dead_after_ms * kUsPerMs),
      probe_(config.probe_ms * kUsPerMs),
      self_(self) {
  for (const std::string& address : config.coordinator_addresses) Learn(address);
  for (Known& known : addresses_) known.told = false;
  if (config.coordinator_listen.empty()) return;
  own_ = Learn(config.coordinator_listen);
  addresses_[own_].told = false;
  AskOthersFirst(static_cast<uint32_t>(own_) + 1);
}

Agent::Outputs Agent::Start(TimeUs now) {
  if (phase_ != Phase::kIdle) return Take();
  contact_since_ = now;
  Connect(now);
  return Take();
}

void Agent::AskOthersFirst(uint32_t rounds) {
  rounds_ = addresses_.size() == 1 ? 0 : rounds;
  current_ = rounds_ != 0 && own_ == 0 ? 1 : 0;
}

size_t Agent::Learn(const std::string& address) {
  for (size_t i = 0; i < addresses_.size(); ++i)
    if (addresses_[i].address == address) return i;
  // The oldest address from Relocate() is dropped for the new one.
  const auto told =
      std::count_if(addresses_.begin(), addresses_.end(), [](const Known& k) { return k.told; });
  if (static_cast<size_t>(told) >= kCoordinatorsMax)
    for (size_t i = 0; i < addresses_.size(); ++i) {
      if (!addresses_[i].told || i == current_) continue;
      addresses_.erase(addresses_.begin() + static_cast<ptrdiff_t>(i));
      if (current_ > i) --current_;
      break;
    }
  addresses_.push_back({address, true, {}});
  return addresses_.size() - 1;
}

Agent::Outputs Agent::Relocate(TimeUs now, const Place& place, bool move) {
  if (phase_ == Phase::kLeft || place.order < order_ || !ValidateCoordinatorAddress(place.address).ok())
    return Take();
  const bool elsewhere = addresses_.empty() || addresses_[current_].address != place.address;
  const bool newer = place.order > order_;
  if (elsewhere && contact_ && (move || newer)) Tell(false, now, "left for " + place.address);
  if (newer) {  // the only address now; older ones are invalid
    addresses_.clear();
    current_ = 0;
    rounds_ = kNoOwn;
  }
  order_ = place.order;
  const size_t index = Learn(place.address);
  if (phase_ == Phase::kRegistered && !(elsewhere && (move || newer))) return Take();
  if (phase_ == Phase::kConnecting && open_ && !elsewhere) return Take();
  // All members of a view may report it at the same time, and may be wrong.
  if (phase_ == Phase::kConnecting && !move && !newer && now < opened_at_ + kReconnectPauseMinUs)
    return Take();
  if (elsewhere && rounds_ == 0) AskOthersFirst(static_cast<uint32_t>(own_) + 1);  // it leaves its own
  current_ = index;
  if (phase_ != Phase::kConnecting && phase_ != Phase::kRegistered) return Take();
  LOG_DEBUG("membership moves to the coordinator at %s, as requested", place.address.c_str());
  pause_ = kReconnectPauseMinUs;
  Connect(now);
  return Take();
}

void Agent::Tell(bool registered, TimeUs now, const std::string& reason) {
  Known& known = addresses_[current_];
  if (contact_ == registered && (registered || known.reason == reason)) return;
  if (contact_ != registered) contact_since_ = now;
  contact_ = registered;
  if (registered)
    for (Known& each : addresses_) each.reason.clear();
  known.reason = reason;
  outputs_.push_back(Contact{known.address, registered, contact_since_, reason});
}

bool Agent::Advance() {
  if (rounds_ == 0 && IsOwn(current_)) return true;
  bool around = false;
  do {
    if (++current_ < addresses_.size()) continue;
    current_ = 0;
    around = true;
  } while (IsOwn(current_) && addresses_.size() > 1);
  if (!around || rounds_ == kNoOwn || --rounds_ != 0) return around;
  current_ = own_;
  return false;
}

Agent::Outputs Agent::Rejoin(TimeUs now, const Member& self) {
  if (phase_ == Phase::kIdle || phase_ == Phase::kLeft) return Take();
  EndLease();
  reach_.clear();
  check_.clear();
  LOG_INFO("membership rejoining as instance %016llx", static_cast<unsigned long long>(self.id));
  self_ = self;
  pause_ = kReconnectPauseMinUs;
  Connect(now);
  return Take();
}

void Agent::Connect(TimeUs now) {
  phase_ = Phase::kConnecting;
  if (addresses_.empty()) {
    retry_at_ = kNever;
    return;
  }
  ++attempt_;
  open_ = true;
  opened_at_ = now;
  unanswered_.clear();  // answers come on the connection of their question
  whole_wanted_ = false;
  outputs_.push_back(Open{attempt_, addresses_[current_].address});
  Registration registration;
  registration.job = config_.job;
  registration.protocol_version = config_.protocol_version;
  registration.chunk_bytes = config_.chunk_bytes;
  registration.data_transport = config_.data_transport;
  registration.protocol_oldest = config_.protocol_oldest;
  registration.member = self_;
  registration.member.protocol = config_.protocol_version;
  registration.seen = seen_;
  registration.epoch_known = config_.epoch_known;
  registration.settings = config_.settings;
  registration.named = config_.named;
  registration.attempt = attempt_;
  registration.beat = NextBeat(now);
  registration.lease_us_max = lease_us_max_;
  Say(std::move(registration));
}

uint64_t Agent::NextBeat(TimeUs now) {
  if (unanswered_.size() >= kBeatsMax) unanswered_.pop_front();
  unanswered_.push_back({++beats_, now});
  // Counted from now, not from when it was due: after a stall, one heartbeat is as good as ten.
  heartbeat_at_ = now + (lease_us_ == 0 ? heartbeat_ : std::min(heartbeat_, lease_us_ / kHeartbeatsPerLease));
  return beats_;
}

void Agent::SendHeartbeat(TimeUs now) {
  const uint64_t beat = NextBeat(now);
  Heartbeat heartbeat{seen_ != nullptr ? seen_->view.epoch : 0, beat, whole_wanted_};
  for (const auto& [member, reached] : reach_) {
    std::vector<NodeId>& list = reached ? heartbeat.reached : heartbeat.unreached;
    if (list.size() < kReachMax) list.push_back(member);
  }
  Say(std::move(heartbeat));
}

void Agent::OnAnswer(TimeUs now, const HeartbeatAnswer& answer) {
  if (answer.check != check_) {
    check_ = answer.check;
    std::erase_if(reach_, [](const auto& entry) { return entry.second; });
    outputs_.push_back(Check{check_});
  }
  if (answer.lease_us == 0) return;  // unanswered_ is kept: a lease may be granted for it later
  const TimeUs lease_us = std::min(answer.lease_us, kLeaseUsMax);
  lease_us_ = lease_us;
  lease_us_max_ = std::max(lease_us_max_, lease_us);
  std::optional<TimeUs> sent_at;
  while (!unanswered_.empty() && unanswered_.front().number <= answer.beat) {
    if (unanswered_.front().number == answer.beat) sent_at = unanswered_.front().sent_at;
    unanswered_.pop_front();
  }
  // It was answered before, or is so old that its record was dropped: the time of its sending is unknown.
  if (!sent_at || *sent_at + lease_us <= std::max(now, lease_until_)) return;
  lease_until_ = *sent_at + lease_us;
  outputs_.push_back(Lease{lease_until_});
}

void Agent::EndLease() {
  unanswered_.clear();
  if (std::exchange(lease_until_, 0) != 0) outputs_.push_back(Lease{0});
}

void Agent::Lose(TimeUs now, const std::string& reason) {
  const bool was_registered = phase_ == Phase::kRegistered;
  phase_ = Phase::kConnecting;
  if (!lost_logged_) {
    LOG_WARNING("membership coordinator %s %s, reason %s", addresses_[current_].address.c_str(),
                was_registered ? "lost" : "not reached yet", reason.c_str());
    lost_logged_ = true;
  }
  Tell(false, now, reason);
  if (open_) outputs_.push_back(Close{attempt_});
  open_ = false;
  for (auto& [id, suspect] : suspects_) suspect.sent = false;
  // A coordinator that had answered is tried again at once, because that repairs a mere reset. The shortest pause still
  // applies: a coordinator that accepts and resets must not be called in an endless loop.
  if (was_registered) {
    retry_at_ = std::max(now, opened_at_ + kReconnectPauseMinUs);
    pause_ = kReconnectPauseMinUs;
  } else if (!Advance()) {
    retry_at_ = now;
  } else if (rounds_ != 0 && rounds_ != kNoOwn) {
    retry_at_ = now + dead_after_;
  } else {
    retry_at_ = now + pause_;
    pause_ = std::min(pause_ * 2, kReconnectPauseMaxUs);
  }
}

Agent::Outputs Agent::Broken(TimeUs now, uint64_t attempt, const std::string& reason) {
  if (attempt != attempt_ || !open_) return Take();
  open_ = false;
  if (phase_ == Phase::kConnecting || phase_ == Phase::kRegistered) {
    Lose(now, reason);
    if (now >= retry_at_) Connect(now);
  }
  return Take();
}

Agent::Outputs Agent::Received(TimeUs now, uint64_t attempt, const CoordinatorMessage& message) {
  if (attempt != attempt_ || !open_) return Take();
  if (phase_ != Phase::kConnecting && phase_ != Phase::kRegistered) return Take();
  heard_at_ = now;
  if (const auto* refusal = std::get_if<Refusal>(&message)) {
    phase_ = Phase::kRefused;
    open_ = false;
    LOG_WARNING("membership refused, %s", refusal->status.ToString().c_str());
    EndLease();
    outputs_.push_back(Close{attempt_});
    outputs_.push_back(refusal->status);
    return Take();
  }
  if (phase_ == Phase::kConnecting) {
    phase_ = Phase::kRegistered;
    pause_ = kReconnectPauseMinUs;
    lost_logged_ = false;
    LOG_INFO("membership registered with %s", addresses_[current_].address.c_str());
    Tell(true, now, {});
    if (!IsOwn(current_)) {
      rounds_ = kNoOwn;
    } else if (own_ != 0 && addresses_.size() > 1 && !looked_again_) {
      // This must happen before the coordinator's hold ends, so that two coordinators that missed each other never give
      // out two views of one epoch. Each waits for a different time, so that they do not miss each other again.
      look_again_at_ =
          now + dead_after_ / 4 + dead_after_ / 4 * std::min(own_, kCoordinatorsMax) / kCoordinatorsMax;
    }
  }
  if (const auto* view = std::get_if<ViewStatePtr>(&message)) {
    OnView(now, *view);
  } else if (const auto* delta = std::get_if<ViewDeltaPtr>(&message)) {
    OnDelta(now, **delta);
  } else if (const auto* probe = std::get_if<Probe>(&message)) {
    Say(ProbeAnswer{probe->nonce});
  } else {
    OnAnswer(now, std::get<HeartbeatAnswer>(message));
  }
  SendSuspects(now);
  return Take();
}

void Agent::OnView(TimeUs now, const ViewStatePtr& view) {
  // A view that is not newer was sent twice, or was overtaken. A view without this node comes only from a coordinator
  // that is about to refuse this instance, or from a faulty one. A node must not use a view without itself.
  if (view == nullptr || (seen_ != nullptr && view->view.epoch <= seen_->view.epoch)) return;
  if (!view->view.Contains(self_.id)) return;
  seen_ = view;
  std::erase_if(suspects_, [&view](const auto& entry) { return !view->view.Contains(entry.first); });
  std::erase_if(reach_, [&view](const auto& entry) { return !view->view.Contains(entry.first); });
  outputs_.push_back(view->view);
  whole_wanted_ = false;
  // The heartbeat says which view was seen. The next view and the first lease wait for it.
  SendHeartbeat(now);
}

void Agent::OnDelta(TimeUs now, const ViewDelta& delta) {
  if (seen_ != nullptr && delta.changed.view.epoch <= seen_->view.epoch) return;
  if (ViewStatePtr view = seen_ != nullptr ? ApplyViewDelta(*seen_, delta) : nullptr)
    return OnView(now, view);
  LOG_INFO(
      "membership view %llu came as what changed since view %llu, this node has view %llu: asking for all of "
      "it",
      static_cast<unsigned long long>(delta.changed.view.epoch), static_cast<unsigned long long>(delta.base),
      static_cast<unsigned long long>(seen_ != nullptr ? seen_->view.epoch : 0));
  whole_wanted_ = true;
  SendHeartbeat(now);
}

Agent::Outputs Agent::Suspect(TimeUs now, NodeId member, const std::string& reason) {
  if (member == self_.id || seen_ == nullptr || !seen_->view.Contains(member)) return Take();
  const auto found = suspects_.find(member);
  if (found != suspects_.end() && found->second.sent && now < found->second.reported_at + probe_)
    return Take();
  if (found == suspects_.end() && suspects_.size() >= kSuspectsMax) {
    std::erase_if(suspects_, [&](const auto& entry) {
      return entry.second.sent && now >= entry.second.reported_at + probe_;
    });
    if (suspects_.size() >= kSuspectsMax) return Take();
  }
  suspects_[member] = {reason.substr(0, kReasonBytesMax), now, false};
  SendSuspects(now);
  return Take();
}

Agent::Outputs Agent::Reach(TimeUs now, NodeId member, bool reached) {
  if (member == self_.id || seen_ == nullptr || !seen_->view.Contains(member)) return Take();
  const auto known = reach_.find(member);
  if (known != reach_.end() && known->second == reached) return Take();
  if (reached && std::find(check_.begin(), check_.end(), member) == check_.end()) {
    reach_.erase(member);
  } else {
    reach_[member] = reached;
  }
  heartbeat_at_ = std::min(heartbeat_at_, now);
  return Take();
}

void Agent::SendSuspects(TimeUs now) {
  if (phase_ != Phase::kRegistered) return;
  for (auto& [id, suspect] : suspects_) {
    if (suspect.sent) continue;
    suspect.sent = true;
    suspect.reported_at = now;
    Say(Suspicion{id, suspect.reason});
  }
}

Agent::Outputs Agent::Leave(TimeUs) {
  EndLease();
  if (open_ && (phase_ == Phase::kConnecting || phase_ == Phase::kRegistered)) Say(LeaveMessage{});
  phase_ = Phase::kLeft;
  return Take();
}

Agent::Outputs Agent::Tick(TimeUs now) {
  if (phase_ != Phase::kConnecting && phase_ != Phase::kRegistered) return Take();
  if (!open_) {
    if (now >= retry_at_) Connect(now);
    return Take();
  }
  const bool registered = phase_ == Phase::kRegistered;
  const TimeUs silent_since = registered ? heard_at_ : opened_at_;
  const TimeUs timeout = registered ? dead_after_ / 2 : ConnectTimeout();
  if (now >= silent_since + timeout) {
    Lose(now, registered ? "it does not answer" : WhySilent(addresses_[current_].address));
    if (now >= retry_at_) Connect(now);
    return Take();
  }
  if (registered && !looked_again_ && look_again_at_ != 0 && now >= look_again_at_) {
    looked_again_ = true;
    if (Alone() && IsOwn(current_)) {
      AskOthersFirst(1);
      Connect(now);
      return Take();
    }
  }
  if (now >= heartbeat_at_) SendHeartbeat(now);
  return Take();
}

TimeUs Agent::NextDeadline() const {
  if (phase_ != Phase::kConnecting && phase_ != Phase::kRegistered) return kNever;
  if (!open_) return retry_at_;
  const bool registered = phase_ == Phase::kRegistered;
  const TimeUs next =
      std::min(heartbeat_at_, registered ? heard_at_ + dead_after_ / 2 : opened_at_ + ConnectTimeout());
  return registered && !looked_again_ && look_again_at_ != 0 ? std::min(next, look_again_at_) : next;
}

}  // namespace ropeteam
