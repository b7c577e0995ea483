// SPDX-License-Identifier: Apache-2.0
//
// When a node registers, compares the values that must be equal on all nodes of a job. The refusal has both nodes, both
// values and the option to change.
#include <string>
#include <utility>
#include <vector>

#include "membership/coordinator.h"

namespace ropeteam {
namespace {

// One row of the table of what is compared.
struct Compared {
  const char* what;  // as the user set it: the option, or what it is about if there is no option
  std::string theirs;
  std::string ours;
  Code code;
};

std::string Range(const Protocols& of) {
  return of.oldest == of.newest ? std::to_string(of.newest)
                                : std::to_string(of.oldest) + " to " + std::to_string(of.newest);
}
std::string Number(uint64_t value) { return std::to_string(value); }
std::string Quoted(const std::string& text, size_t limit) { return '"' + text.substr(0, limit) + '"'; }

}  // namespace

Protocols Coordinator::ProtocolsOf(uint32_t version, uint32_t oldest) {
  return {oldest == 0 ? version : oldest, version};
}

Protocols Coordinator::CommonProtocols(const std::string& except) const {
  Protocols common = ProtocolsOf(config_.protocol_version, config_.protocol_oldest);
  for (const auto& [id, record] : records_) {
    if (record.member.name == except) continue;
    common.oldest = std::max(common.oldest, record.protocols.oldest);
    common.newest = std::min(common.newest, record.protocols.newest);
  }
  return common;
}

Status Coordinator::Check(const Registration& registration) {
  const Member& member = registration.member;
  ROPETEAM_RETURN_IF_ERROR(ValidateMember(member));
  const Protocols theirs = ProtocolsOf(registration.protocol_version, registration.protocol_oldest);
  // A node with the same range as this one fits, because this range includes the common versions of all members.
  Protocols common = ProtocolsOf(config_.protocol_version, config_.protocol_oldest);
  if (theirs != common) common = CommonProtocols(member.name);
  const Compared table[] = {
      {"--job", Quoted(registration.job, kJobBytesMax), Quoted(config_.job, kJobBytesMax),
       Code::kInvalidArgument},
      {"protocol version", Range(theirs), Range(theirs.Meets(common) ? theirs : common), Code::kUnsupported},
      {"--chunk-size", Number(registration.chunk_bytes), Number(config_.chunk_bytes), Code::kInvalidArgument},
      {"--transport", registration.data_transport.substr(0, kDataTransportBytesMax), config_.data_transport,
       Code::kInvalidArgument},
  };
  for (const Compared& row : table)
    if (row.theirs != row.ours)
      return Error(row.code,
                   "node %s has %s %s, the coordinator%s%s at %s has %s: all nodes of a job need the same",
                   member.name.c_str(), row.what, row.theirs.c_str(),
                   config_.coordinator_node.empty() ? "" : " on node ", config_.coordinator_node.c_str(),
                   config_.coordinator_listen.c_str(), row.ours.c_str());
  if (registration.lease_us_max > kLeaseUsMax)
    return Error(Code::kInvalidArgument, "node %s had a lease of %llu us, limit %llu", member.name.c_str(),
                 static_cast<unsigned long long>(registration.lease_us_max),
                 static_cast<unsigned long long>(kLeaseUsMax));
  if (registration.epoch_known > kEpochKnownMax)
    return Error(Code::kInvalidArgument, "node %s knows of epoch %llu, limit %llu", member.name.c_str(),
                 static_cast<unsigned long long>(registration.epoch_known),
                 static_cast<unsigned long long>(kEpochKnownMax));
  TakeNamedSettings(registration);
  const ViewStatePtr& seen = registration.seen;
  // The settings that this registration would make the job's; see Learn().
  const bool brings = holding_ && view_ == nullptr && seen != nullptr && seen->view.epoch > settings_epoch_;
  return CheckSettings(member.name, registration.settings, registration.named,
                       brings ? seen->view.settings : settings_);
}

Status Coordinator::CheckSettings(const std::string& name, const JobSettings& settings,
                                  const NamedSettings& named, const JobSettings& job) const {
  struct Setting {
    const char* option;
    bool named;
    std::string theirs;
    std::string ours;
  };
  const auto every = [](const JobSettings& of) {
    return std::to_string(of.persist_every) + (of.persist_every_seconds ? "s" : "");
  };
  const auto seconds = [](const JobSettings& of) {
    return std::to_string(of.wait_for_missing_us / 1'000'000) + "s";
  };
  const auto url = [](const std::string& of) { return of.empty() ? "none" : of; };
  const Setting table[] = {
      {"--replicas", named.replicas, std::to_string(settings.replicas), std::to_string(job.replicas)},
      {"--keep-steps", named.keep_steps, std::to_string(settings.keep_steps), std::to_string(job.keep_steps)},
      {"--nodes", named.nodes, std::to_string(settings.nodes), std::to_string(job.nodes)},
      {"--storage", named.storage, settings.storage, url(job.storage)},
      {"--persist-every", named.persist_every, every(settings), every(job)},
      {"--restore-from", named.restore_from, settings.restore_from, url(job.restore_from)},
      {"--wait-for-missing", named.wait_for_missing, seconds(settings), seconds(job)},
  };
  for (const Setting& row : table)
    if (row.named && row.theirs != row.ours)
      return Error(
          Code::kInvalidArgument,
          "node %s was given %s %s, the job runs with %s %s (from %s at %s): give the same, or leave the "
          "option out to take the job's",
          name.c_str(), row.option, row.theirs.c_str(), row.option, row.ours.c_str(), settings_from_.c_str(),
          config_.coordinator_listen.c_str());
  return OkStatus();
}

void Coordinator::TakeNamedSettings(const Registration& registration) {
  if (term_us_ == 0 || !holding_ || view_ != nullptr || settings_epoch_ != 0 || registration.seen != nullptr)
    return;
  JobSettings settings = settings_;
  NamedSettings named = named_;
  const JobSettings& from = registration.settings;
  const auto take = [](bool theirs, bool* ours, const auto& copy) {
    if (!theirs || *ours) return;
    *ours = true;
    copy();
  };
  take(registration.named.replicas, &named.replicas, [&] { settings.replicas = from.replicas; });
  take(registration.named.keep_steps, &named.keep_steps, [&] { settings.keep_steps = from.keep_steps; });
  take(registration.named.nodes, &named.nodes, [&] { settings.nodes = from.nodes; });
  take(registration.named.storage, &named.storage, [&] { settings.storage = from.storage; });
  take(registration.named.persist_every, &named.persist_every, [&] {
    settings.persist_every = from.persist_every;
    settings.persist_every_seconds = from.persist_every_seconds;
  });
  take(registration.named.wait_for_missing, &named.wait_for_missing,
       [&] { settings.wait_for_missing_us = from.wait_for_missing_us; });
  take(registration.named.restore_from, &named.restore_from,
       [&] { settings.restore_from = from.restore_from; });
  // A registration that is refused for one setting sets no other setting.
  if (named == named_ || !CheckSettings(registration.member.name, from, registration.named, settings).ok())
    return;
  settings_ = settings;
  named_ = named;
  settings_from_ = "node " + registration.member.name;
}

void Coordinator::LearnSettings(const JobSettings& settings, const Member& reporter) {
  if (settings_ == settings) return;
  settings_ = settings;
  settings_from_ = "the view that node " + reporter.name + " reported to the coordinator";
  std::vector<std::pair<NodeId, Status>> refused;
  for (const auto& [id, record] : records_) {
    Status status = CheckSettings(record.member.name, record.settings, record.named, settings_);
    if (!status.ok()) refused.emplace_back(id, std::move(status));
  }
  for (const auto& [id, status] : refused) Remove(id, status, "it was given other settings than the job's");
}

}  // namespace ropeteam
