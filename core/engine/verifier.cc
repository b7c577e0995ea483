// SPDX-License-Identifier: Apache-2.0
#include "core/engine/verifier.h"

#include <algorithm>

#include "core/base/check.h"

namespace ropeteam::engine {

void Verifier::OnView() {
  for (auto& [asker, job] : jobs_)
    std::erase_if(job.missing, [&](NodeId node) { return !context_.Contains(node); });
  std::erase_if(jobs_, [&](const auto& job) { return !context_.Contains(job.first.first); });
}

void Verifier::Begin(const Asker& asker, const StepId& step) {
  ROPETEAM_CHECK(!jobs_.contains(asker) && context_.Contains(asker.first));
  Job& job = jobs_[asker];
  job.number = ++next_number_;
  job.report.incarnation = step.incarnation;
  job.report.step = step.step;
  for (const Member& member : context_.view.members) {
    job.report.nodes_asked.push_back(member.name);
    job.missing.insert(member.id);
  }
  job.touched = context_.now;
  job.next_send = context_.now;
  OnTimer();
}

Result<VerifyReport> Verifier::Look(const Asker& asker) {
  const auto job = jobs_.find(asker);
  ROPETEAM_CHECK(job != jobs_.end());
  job->second.touched = context_.now;
  if (!job->second.missing.empty())
    return Error(Code::kUnavailable, "%zu nodes are still reading", job->second.missing.size());
  return job->second.report;
}

void Verifier::OnResult(NodeId from, const VerifyResult& result) {
  for (auto& [asker, job] : jobs_) {
    if (job.number != result.number || job.missing.erase(from) == 0) continue;
    job.report.copies.insert(job.report.copies.end(), result.copies.begin(), result.copies.end());
  }
}

void Verifier::OnTimer() {
  for (auto& [asker, job] : jobs_) {
    if (job.missing.empty() || job.next_send > context_.now) continue;
    job.next_send = context_.now + kVerifyRepeatUs;
    for (const NodeId node : job.missing)
      context_.Send(node, VerifyOrder{job.number, {job.report.incarnation, job.report.step}});
  }
  std::erase_if(jobs_, [&](const auto& job) { return job.second.touched + kVerifyForgetUs < context_.now; });
}

TimeUs Verifier::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [asker, job] : jobs_) {
    ROPETEAM_CHECK(job.touched <= context_.now);
    if (!job.missing.empty()) due = std::min(due, job.next_send);
    due = std::min(due, job.touched + kVerifyForgetUs + 1);
  }
  return due;
}

}  // namespace ropeteam::engine
