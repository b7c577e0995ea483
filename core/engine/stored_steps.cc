// SPDX-License-Identifier: Apache-2.0
#include "core/engine/stored_steps.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {
namespace {

constexpr const char* kListingStalls = "listing it has made no progress for a minute";

}  // namespace

void StoredSteps::Begin() {
  ++generation_;
  ++wanted_;
  begun_ = true;
  known_ = false;
  incarnation_max_ = source_incarnation_max_ = 0;
  source_damage_.clear();
  steps_.clear();
  trouble_ = listing_stalls_ ? kListingStalls : "";
  again_at_ = 0;
  again_after_ = kAgainUs;
  ++version_;
}

void StoredSteps::ListAgain() {
  ++wanted_;
  known_ = false;
  trouble_ = listing_stalls_ ? kListingStalls : "";
  again_at_ = context_.now;
  ++version_;
}

void StoredSteps::List() {
  listing_ = true;
  works_.Start(
      ListStored{},
      [this, wanted = wanted_](const Status& status, const StorageDone& done) {
        listing_ = false;
        if (std::exchange(listing_stalls_, false)) trouble_.clear();
        if (wanted == wanted_) OnListed(status, done);
      },
      [this] {
        listing_stalls_ = true;
        trouble_ = kListingStalls;
        LOG_WARNING("storage hangs: %s", kListingStalls);
      });
}

void StoredSteps::Fail(const Status& status) {
  trouble_ = status.ToString();
  again_at_ = context_.now + again_after_;
  again_after_ = std::min(2 * again_after_, kAgainMaxUs);
}

void StoredSteps::OnListed(const Status& status, const StorageDone& done) {
  const auto* list = std::get_if<StoredList>(&done.result);
  if (!status.ok()) {
    if (again_after_ == kAgainUs)
      LOG_WARNING("storage cannot be listed, trying again: %s", status.ToString().c_str());
    return Fail(status);
  }
  ROPETEAM_CHECK(list != nullptr);
  known_ = true;
  trouble_.clear();
  again_after_ = kAgainUs;
  incarnation_max_ = std::max(incarnation_max_, list->incarnation_max);
  for (const StepId& id : list->steps) {
    incarnation_max_ = std::max(incarnation_max_, id.incarnation);
    steps_.try_emplace(id);
  }
  for (const StepId& id : list->source_steps) {
    source_incarnation_max_ = std::max(source_incarnation_max_, id.incarnation);
    const auto [at, fresh] = steps_.try_emplace(id);
    if (fresh) at->second.of_source = true;
  }
  ++version_;
  const std::optional<StepId> newest = Newest();
  LOG_INFO("storage has %zu steps, newest %s%s", steps_.size(), newest ? newest->ToString().c_str() : "none",
           list->source_steps.empty() ? "" : (", of " + context_.view.settings.restore_from).c_str());
}

bool StoredSteps::Offers(const StepId& id, const Entry& entry) const {
  return !entry.damaged && !(entry.of_source && current_.number != 0 && current_.number <= id.incarnation);
}

bool StoredSteps::IsOfSource(const StepId& id) const {
  const auto at = steps_.find(id);
  return at != steps_.end() && at->second.of_source;
}

bool StoredSteps::Has(const StepId& id) const {
  const auto at = steps_.find(id);
  return at != steps_.end() && Offers(id, at->second);
}

std::optional<StepId> StoredSteps::Newest() const {
  const std::vector<StepId> newest = NewestFirst(1);
  return newest.empty() ? std::nullopt : std::optional(newest.front());
}

std::optional<StepId> StoredSteps::NewestBefore(const StepId& end) const {
  for (auto at = steps_.lower_bound(end); at != steps_.begin();) {
    --at;
    if (Offers(at->first, at->second)) return at->first;
  }
  return std::nullopt;
}

std::optional<StepId> StoredSteps::NewestOf(Step step) const {
  for (auto at = steps_.rbegin(); at != steps_.rend(); ++at)
    if (at->first.step == step && Offers(at->first, at->second)) return at->first;
  return std::nullopt;
}

std::vector<StepId> StoredSteps::NewestFirst(size_t count) const {
  std::vector<StepId> newest;
  for (auto at = steps_.rbegin(); at != steps_.rend() && newest.size() < count; ++at)
    if (Offers(at->first, at->second)) newest.push_back(at->first);
  return newest;
}

std::shared_ptr<const StoredStep> StoredSteps::Manifest(const StepId& id) {
  const auto at = steps_.find(id);
  if (at == steps_.end() || !Offers(id, at->second)) return nullptr;
  at->second.used_at = ++use_;
  if (at->second.manifest == nullptr) ReadManifest(id);
  return at->second.manifest;
}

void StoredSteps::ReadManifest(const StepId& id) {
  if (again_at_ > context_.now || !reading_.insert(id).second) return;
  works_.Start(
      ReadStored{id},
      [this, id, generation = generation_](const Status& status, const StorageDone& done) {
        reading_.erase(id);
        if (generation == generation_) OnRead(id, status, done);
      },
      [this, id, generation = generation_] {
        const std::string hangs =
            "reading the manifest of " + id.ToString() + " has made no progress for a minute";
        LOG_WARNING("storage hangs: %s", hangs.c_str());
        if (generation == generation_ && known_) trouble_ = hangs;
      });
}

void StoredSteps::OnRead(const StepId& id, const Status& status, const StorageDone& done) {
  const auto at = steps_.find(id);
  if (at == steps_.end()) return;
  ++version_;
  const bool damaged = status.code() == Code::kCorrupt || status.code() == Code::kNotFound ||
                       status.code() == Code::kUnsupported || status.code() == Code::kInvalidArgument;
  if (damaged) return MarkDamaged(id, status.ToString());
  if (status.code() == Code::kIo && ++at->second.failures >= kReadsMax)
    return MarkDamaged(id, status.ToString());
  // While storage is being listed again, trouble_ and again_at_ are the listing's.
  if (!status.ok() && known_) return Fail(status);
  if (!status.ok()) return;
  const auto* step = std::get_if<StoredStep>(&done.result);
  if (step == nullptr || step->id != id || step->world_size == 0 || step->ranks.size() != step->world_size)
    return MarkDamaged(id, "its manifest is of another step");
  if (known_) {
    again_after_ = kAgainUs;
    trouble_.clear();
  }
  at->second.manifest = std::make_shared<const StoredStep>(*step);
  ForgetOldManifests();
}

void StoredSteps::ForgetOldManifests() {
  std::vector<std::pair<uint64_t, StepId>> held;
  for (const auto& [id, entry] : steps_)
    if (entry.manifest != nullptr) held.emplace_back(entry.used_at, id);
  if (held.size() <= kManifestsMax) return;
  std::sort(held.begin(), held.end());
  for (size_t i = 0; i + kManifestsMax < held.size(); ++i) steps_.at(held[i].second).manifest = nullptr;
}

void StoredSteps::Add(std::shared_ptr<const StoredStep> step) {
  incarnation_max_ = std::max(incarnation_max_, step->id.incarnation);
  steps_[step->id] = Entry();
  ++version_;
}

void StoredSteps::Remove(const std::vector<StepId>& steps) {
  for (const StepId& id : steps) version_ += steps_.erase(id);
}

void StoredSteps::MarkDamaged(const StepId& id, const std::string& why) {
  const auto at = steps_.find(id);
  if (at == steps_.end() || at->second.damaged) return;
  LOG_WARNING("%s on storage is passed over: %s", id.ToString().c_str(), why.c_str());
  at->second.damaged = true;
  at->second.manifest = nullptr;
  if (at->second.of_source) source_damage_ = id.ToString() + ": " + why;
  ++version_;
}

void StoredSteps::OnTimer() {
  if (begun_ && used() && !known_ && !listing_ && again_at_ <= context_.now) List();
}

TimeUs StoredSteps::NextTimer() const {
  return begun_ && used() && !known_ && !listing_ ? again_at_ : kNever;
}

}  // namespace ropeteam::engine
