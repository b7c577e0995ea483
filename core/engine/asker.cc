// SPDX-License-Identifier: Apache-2.0
#include "core/engine/asker.h"

#include <algorithm>

namespace ropeteam::engine {

uint64_t Asker::Ask(Question::Topic topic, std::string payload, TimeUs deadline, Done done) {
  ROPETEAM_CHECK(done != nullptr);
  const uint64_t number = next_number_++;
  ROPETEAM_CHECK(questions_.empty() || questions_.rbegin()->first < number);
  Open& open = questions_[number];
  open.question = {number, topic, std::move(payload)};
  open.asked_at = context_.now;
  open.deadline = deadline;
  open.done = std::move(done);
  Send(&open);
  return number;
}

void Asker::Forget(uint64_t number) {
  const size_t known = questions_.erase(number);
  ROPETEAM_CHECK(known == 1);
}

void Asker::Send(Open* open) {
  const bool patient = open->waits && open->question.topic == Question::Topic::kLocate;
  open->next_send =
      context_.now +
      (patient ? std::clamp((context_.now - open->asked_at) / kWaitShare, kRepeatUs, kWaitMaxUs) : kRepeatUs);
  if (context_.view.leader == kNoNode) return;
  open->sent_to = context_.view.leader;
  context_.Send(open->sent_to, open->question);
}

void Asker::OnReply(NodeId from, const Reply& reply) {
  const auto open = questions_.find(reply.number);
  if (open == questions_.end() || from != context_.view.leader) return;
  if (reply.code == Code::kUnavailable) {
    open->second.reason = reply.message;
    open->second.waits = true;
    return;
  }
  ROPETEAM_CHECK(open->second.question.number == reply.number && open->second.done != nullptr);
  const Done done = std::move(open->second.done);
  questions_.erase(open);
  if (reply.code == Code::kOk) {
    done(reply.payload);
  } else {
    done(Status(reply.code, reply.message));
  }
}

void Asker::OnView() {
  std::vector<Done> ended;
  for (auto at = questions_.begin(); at != questions_.end();) {
    Open& open = at->second;
    if (open.question.topic == Question::Topic::kForget && open.sent_to != kNoNode &&
        context_.view.leader != kNoNode && open.sent_to != context_.view.leader) {
      ended.push_back(std::move(open.done));
      at = questions_.erase(at);
      continue;
    }
    open.waits = false;
    Send(&open);
    ++at;
  }
  for (const Done& done : ended)
    done(Error(Code::kUnavailable, "the leader has changed: see who is missing now, and say it again"));
}

void Asker::OnTimer() {
  std::vector<uint64_t> expired;
  for (auto& [number, open] : questions_) {
    if (open.deadline <= context_.now) {
      expired.push_back(number);
    } else if (open.next_send <= context_.now) {
      ++context_.local.messages_repeated;
      Send(&open);
    }
  }
  for (const uint64_t number : expired) {
    const auto open = questions_.find(number);
    if (open == questions_.end()) continue;                 // an earlier callback has removed it
    ROPETEAM_CHECK(open->second.deadline <= context_.now);  // numbers are never reused
    const Open late = std::move(open->second);
    questions_.erase(open);
    late.done(Error(Code::kDeadlineExceeded, "the deadline passed; last heard: %s", late.reason.c_str()));
  }
}

TimeUs Asker::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [number, open] : questions_) due = std::min({due, open.deadline, open.next_send});
  return due;
}

}  // namespace ropeteam::engine
