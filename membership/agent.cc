// SPDX-License-Identifier: Apache-2.0
#include "membership/agent.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/log.h"

namespace ropeteam {
namespace {

constexpr TimeUs kUsPerMs = 1000;
constexpr TimeUs kNever = std::numeric_limits<TimeUs>::max();

}  // namespace

Agent::Agent(const MembershipConfig& config, const Member& self)
    : config_(config),
      heartbeat_(config.heartbeat_ms * kUsPerMs),
      dead_after_(config.dead_after_ms * kUsPerMs),
      probe_(config.probe_ms * kUsPerMs),
      self_(self) {}

Agent::Outputs Agent::Start(TimeUs now) {
  if (phase_ == Phase::kIdle) Connect(now);
  return Take();
}

Agent::Outputs Agent::Rejoin(TimeUs now, const Member& self) {
  if (phase_ == Phase::kIdle || phase_ == Phase::kLeft) return Take();
  LOG_INFO("membership rejoining as instance %016llx", static_cast<unsigned long long>(self.id));
  self_ = self;
  pause_ = kReconnectPauseMinUs;
  Connect(now);
  return Take();
}

void Agent::Connect(TimeUs now) {
  phase_ = Phase::kConnecting;
  ++attempt_;
  open_ = true;
  opened_at_ = now;
  heartbeat_at_ = now + heartbeat_;
  outputs_.push_back(Open{attempt_});
  Registration registration;
  registration.job = config_.job;
  registration.protocol_version = config_.protocol_version;
  registration.chunk_bytes = config_.chunk_bytes;
  registration.data_transport = config_.data_transport;
  registration.member = self_;
  registration.seen = seen_;
  registration.attempt = attempt_;
  Say(std::move(registration));
}

void Agent::Lose(TimeUs now, const std::string& reason) {
  const bool was_registered = phase_ == Phase::kRegistered;
  phase_ = Phase::kConnecting;
  if (!lost_logged_) {
    LOG_WARNING("membership coordinator %s %s, reason %s", config_.coordinator_address.c_str(),
                was_registered ? "lost" : "not reached yet", reason.c_str());
    lost_logged_ = true;
  }
  if (open_) outputs_.push_back(Close{attempt_});
  open_ = false;
  // A coordinator that had answered is worth another try at once: a mere reset heals with it. Never faster
  // than the least pause, though, or one that accepts and resets would be called without end.
  retry_at_ = was_registered ? std::max(now, opened_at_ + kReconnectPauseMinUs) : now + pause_;
  pause_ = was_registered ? kReconnectPauseMinUs : std::min(pause_ * 2, kReconnectPauseMaxUs);
  for (auto& [id, suspect] : suspects_) suspect.sent = false;
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
    outputs_.push_back(Close{attempt_});
    outputs_.push_back(refusal->status);
    return Take();
  }
  if (phase_ == Phase::kConnecting) {
    phase_ = Phase::kRegistered;
    pause_ = kReconnectPauseMinUs;
    lost_logged_ = false;
    LOG_INFO("membership registered with %s", config_.coordinator_address.c_str());
  }
  if (const auto* view = std::get_if<ViewStatePtr>(&message)) {
    OnView(now, *view);
  } else if (const auto* probe = std::get_if<Probe>(&message)) {
    Say(ProbeAnswer{probe->nonce});
  }
  SendSuspects(now);
  return Take();
}

void Agent::OnView(TimeUs, const ViewStatePtr& view) {
  // Not newer: sent twice, or overtaken. Not in it: only a coordinator that is about to refuse this instance,
  // or a broken one, sends that; to act on it would be to see a world without oneself.
  if (view == nullptr || (seen_ != nullptr && view->view.epoch <= seen_->view.epoch)) return;
  if (!view->view.Contains(self_.id)) return;
  seen_ = view;
  std::erase_if(suspects_, [&view](const auto& entry) { return !view->view.Contains(entry.first); });
  outputs_.push_back(view->view);
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
  if (open_ && (phase_ == Phase::kConnecting || phase_ == Phase::kRegistered)) Say(Farewell{});
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
  const TimeUs patience = registered ? dead_after_ / 2 : dead_after_;
  if (now >= silent_since + patience) {
    Lose(now, "it does not answer");
    if (now >= retry_at_) Connect(now);
    return Take();
  }
  if (now >= heartbeat_at_) {
    Say(Heartbeat{seen_ != nullptr ? seen_->view.epoch : 0});
    // From now and not from when it was due: after a stall one heartbeat is as good as ten.
    heartbeat_at_ = now + heartbeat_;
  }
  return Take();
}

TimeUs Agent::NextDeadline() const {
  if (phase_ != Phase::kConnecting && phase_ != Phase::kRegistered) return kNever;
  if (!open_) return retry_at_;
  const bool registered = phase_ == Phase::kRegistered;
  return std::min(heartbeat_at_, registered ? heard_at_ + dead_after_ / 2 : opened_at_ + dead_after_);
}

}  // namespace ropeteam
