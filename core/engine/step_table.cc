// SPDX-License-Identifier: Apache-2.0
#include "core/engine/step_table.h"

#include <algorithm>
#include <tuple>

#include "core/base/check.h"
#include "core/base/log.h"
#include "core/engine/copy_rules.h"
#include "core/engine/limits.h"

namespace ropeteam::engine {
namespace {

// Whether every chunk is good on some copy with this content. Bad chunks are few and listed. A copy with too many of
// them is not used.
bool Producible(const std::vector<StepTable::Copy>& copies, uint64_t content) {
  const auto usable = [content](const StepTable::Copy& copy) {
    return copy.content == content && copy.usable();
  };
  const StepTable::Copy* first = nullptr;
  for (const StepTable::Copy& copy : copies) {
    if (!usable(copy)) continue;
    if (copy.bad.empty()) return true;
    if (first == nullptr) first = &copy;
  }
  if (first == nullptr) return false;
  return std::all_of(first->bad.begin(), first->bad.end(), [&](uint32_t chunk) {
    return std::any_of(copies.begin(), copies.end(), [&](const StepTable::Copy& copy) {
      return usable(copy) && !std::binary_search(copy.bad.begin(), copy.bad.end(), chunk);
    });
  });
}

bool OneContent(const std::vector<StepTable::Copy>& copies) {
  return std::all_of(copies.begin(), copies.end(),
                     [&](const StepTable::Copy& copy) { return copy.content == copies.front().content; });
}

// Whether the content that has counted for a committed step still counts. A marked copy with other bytes may have
// returned since.
bool StaysCounted(const std::vector<StepTable::Copy>& copies, uint64_t content) {
  const auto marked = [](const StepTable::Copy& copy) { return copy.committed; };
  const bool held = std::any_of(copies.begin(), copies.end(),
                                [&](const StepTable::Copy& copy) { return copy.content == content; });
  const bool has_mark = std::any_of(copies.begin(), copies.end(), [&](const StepTable::Copy& copy) {
    return copy.content == content && marked(copy);
  });
  return held && (has_mark || std::none_of(copies.begin(), copies.end(), marked));
}

// Chooses the content that counts: RankState::content.
uint64_t ChooseContent(const std::vector<StepTable::Copy>& copies) {
  if (copies.empty()) return 0;
  if (OneContent(copies)) return copies.front().content;
  using Weight = std::tuple<bool, bool, size_t, uint64_t>;
  Weight best{false, false, 0, 0};
  for (const StepTable::Copy& copy : copies) {
    Weight weight{false, false, 0, copy.content};
    for (const StepTable::Copy& other : copies) {
      if (other.content != copy.content) continue;
      std::get<0>(weight) = std::get<0>(weight) || other.committed;
      std::get<1>(weight) = std::get<1>(weight) || other.seated;
      ++std::get<2>(weight);
    }
    best = std::max(best, weight);
  }
  return std::get<3>(best);
}

// Inventories list a node's copies in the order of their shards, each once. They come from other nodes, so this is
// checked anyway.
std::vector<const CopyReport*> Ordered(const std::vector<CopyReport>& copies) {
  std::vector<const CopyReport*> ordered;
  ordered.reserve(copies.size());
  for (const CopyReport& copy : copies) ordered.push_back(&copy);
  const auto before = [](const CopyReport* a, const CopyReport* b) { return a->id < b->id; };
  if (!std::is_sorted(ordered.begin(), ordered.end(), before))
    std::stable_sort(ordered.begin(), ordered.end(), before);
  const auto same = [](const CopyReport* a, const CopyReport* b) { return a->id == b->id; };
  ordered.erase(std::unique(ordered.begin(), ordered.end(), same), ordered.end());
  return ordered;
}

// Calls `visit` for each copy of `of` that `in` does not contain unchanged.
template <typename Visit>
void ForEachMissing(const std::vector<const CopyReport*>& of, const std::vector<const CopyReport*>& in,
                    Visit visit) {
  auto other = in.begin();
  for (const CopyReport* copy : of) {
    while (other != in.end() && (*other)->id < copy->id) ++other;
    if (other == in.end() || (*other)->id != copy->id || **other != *copy) visit(*copy);
  }
}

}  // namespace

const StepTable::StepState* StepTable::Find(const StepId& id) const {
  const auto found = steps_.find(id);
  return found == steps_.end() ? nullptr : &found->second;
}

bool StepTable::HasSaved(Incarnation incarnation, Rank rank) const {
  for (auto step = steps_.lower_bound({incarnation, 0});
       step != steps_.end() && step->first.incarnation == incarnation; ++step)
    if (rank < step->second.world_size && !step->second.ranks[rank].copies.empty()) return true;
  return false;
}

std::optional<StepId> StepTable::NewestProducible(Incarnation only) const {
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step)
    if (step->second.producible() && !step->second.never_commits() &&
        (only == 0 || step->first.incarnation == only))
      return step->first;
  return std::nullopt;
}

std::vector<StepId> StepTable::CompleteNewestFirst(size_t count) const {
  std::vector<StepId> committed;
  for (auto step = steps_.rbegin(); step != steps_.rend() && committed.size() < count; ++step)
    if (step->second.complete) committed.push_back(step->first);
  return committed;
}

void StepTable::Recount(const StepId& id, StepState* step, Rank rank) {
  RankState& state = step->ranks.Make(rank);
  step->ranks_producible -= state.producible ? 1 : 0;
  const bool was_replicated = state.replicated;
  step->ranks_replicated -= was_replicated ? 1 : 0;
  const bool one_content = OneContent(state.copies);
  if (!step->complete || !StaysCounted(state.copies, state.content))
    state.content = ChooseContent(state.copies);
  const ShardId shard{id.incarnation, id.step, rank};
  const bool changed = one_content ? contested_.erase(shard) != 0 : contested_.insert(shard).second;
  if (changed) ++version_;
  RecountAgreement(step, &state);
  state.good = state.staying = 0;
  for (const Copy& copy : state.copies) {
    if (!copy.good() || !Counts(copy.role) || copy.content != state.content) continue;
    ++state.good;
    state.staying += leaving_.contains(copy.node) ? 0 : 1;
  }
  state.producible = Producible(state.copies, state.content);
  state.replicated = state.good > state.replicas;
  step->ranks_producible += state.producible ? 1 : 0;
  step->ranks_replicated += state.replicated ? 1 : 0;
  ROPETEAM_CHECK(!state.replicated || state.producible);
  ROPETEAM_CHECK(step->ranks_producible <= step->world_size && step->ranks_replicated <= step->world_size);
  replications_ += state.replicated && !was_replicated ? 1 : 0;
  losses_ += was_replicated && !state.replicated ? 1 : 0;
  const bool lacking = state.staying <= state.replicas && !state.copies.empty();
  const bool owned = std::any_of(state.copies.begin(), state.copies.end(),
                                 [](const Copy& copy) { return copy.role == Role::kOwn && copy.readable; });
  step->surplus.Set(rank, state.staying > uint64_t{state.replicas} + 1);
  step->lacking.Set(rank, lacking);
  step->orphans.Set(rank, lacking && !owned);
  if (state.copies.empty() && !step->complete) ++version_;
}

void StepTable::RecountAgreement(StepState* step, RankState* rank) {
  std::optional<uint64_t> given;
  for (const Copy& copy : rank->copies)
    if (copy.content == rank->content) given = std::max(given.value_or(0), copy.agreement);
  if (given == rank->agreement) return;
  if (rank->agreement) {
    const auto before = step->agreements.find(*rank->agreement);
    ROPETEAM_CHECK(before != step->agreements.end() && before->second > 0);
    if (--before->second == 0) step->agreements.erase(before);
  }
  if (given) ++step->agreements[*given];
  rank->agreement = given;
}

Disagreement StepTable::DisagreementOf(const StepId& id, const StepState& step) {
  ROPETEAM_CHECK(step.agreements.size() > 1);
  using Given = std::pair<Rank, uint64_t>;
  std::optional<Given> first, other;
  step.ranks.ForEach([&](Rank rank, const RankState& state) {
    if (!state.agreement) return;
    if (!first)
      first = Given{rank, *state.agreement};
    else if (!other && *state.agreement != first->second)
      other = Given{rank, *state.agreement};
  });
  ROPETEAM_CHECK(first && other);
  return {{id}, first->first, first->second, other->first, other->second};
}

std::string Explain(const Disagreement& found) {
  const auto gave = [](Rank rank, uint64_t value) {
    const Status text = value == 0 ? Error(Code::kAborted, "rank %u gave no agreement", rank)
                                   : Error(Code::kAborted, "rank %u gave agreement %#llx", rank,
                                           static_cast<unsigned long long>(value));
    return text.message();
  };
  return "the ranks do not agree on " + found.step.ToString() + ": " + gave(found.rank, found.value) + ", " +
         gave(found.other_rank, found.other_value) + "; it is never committed";
}

bool StepTable::SetLeaving(NodeId node, bool leaving) {
  if (leaving ? !leaving_.insert(node).second : leaving_.erase(node) == 0) return false;
  for (auto& [id, step] : steps_)
    step.ranks.ForEach([&, &id = id, &step = step](Rank rank, const RankState& state) {
      const std::vector<Copy>& copies = state.copies;
      if (std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) { return copy.node == node; }))
        Recount(id, &step, rank);
    });
  return true;
}

bool StepTable::MayCommit(const StepId& id, const StepState& step) const {
  return !step.complete && !step.never_commits() && !step.evictable && !Barred(id);
}

void StepTable::Bar(Incarnation chosen_by, const StepId& restored) {
  ROPETEAM_CHECK(restored.incarnation < chosen_by);
  barred_before_ = chosen_by;
  barred_after_ = restored;
}

void StepTable::Release(const StepId& id) {
  const auto step = steps_.find(id);
  ROPETEAM_CHECK(step != steps_.end() && !step->second.complete);
  if (!step->second.released) ++version_;
  step->second.released = true;
}

void StepTable::AllowEviction(const StepId& id) {
  const auto step = steps_.find(id);
  ROPETEAM_CHECK(step != steps_.end() && !step->second.complete);
  step->second.evictable = true;
}

void StepTable::Remove(NodeId node, const CopyReport& copy) {
  const auto step = steps_.find(StepOf(copy.id));
  if (step == steps_.end() || copy.id.rank >= step->second.world_size) return;
  step->second.copies -= std::erase_if(step->second.ranks.Make(copy.id.rank).copies,
                                       [node](const Copy& of) { return of.node == node; });
}

bool StepTable::Add(NodeId node, const CopyReport& copy) {
  // No store seals such a shard.
  if (copy.id.rank >= copy.world_size || copy.world_size > kWorldMax ||
      copy.id.incarnation >= kIncarnationMax)
    return false;
  StepState& step = steps_[StepOf(copy.id)];
  if (step.world_size == 0) {
    step.world_size = copy.world_size;
    step.ranks.Resize(copy.world_size);
    step.lacking.Resize(copy.world_size);
    step.orphans.Resize(copy.world_size);
    step.surplus.Resize(copy.world_size);
    ++version_;
  }
  if (step.world_size != copy.world_size) {
    LOG_ERROR("%s of a world of %u ignored: the step's world has %u", copy.id.ToString().c_str(),
              copy.world_size, step.world_size);
    return false;
  }
  RankState& rank = step.ranks.Make(copy.id.rank);
  rank.copies.push_back(
      {node, copy.role, copy.committed, copy.seated, copy.readable, copy.bad, copy.content, copy.agreement});
  ++step.copies;
  rank.bytes = copy.stream_bytes;
  rank.replicas = copy.replicas;
  if (copy.committed) {
    if (!step.complete) ++version_;
    step.complete = true;
    step.released = step.evictable = false;  // the previous leader did not know
  }
  return true;
}

// In a large cluster, the states of a node's ranks are not in the processor's cache. Prefetching makes their misses
// overlap.
void StepTable::Prefetch(const std::vector<const CopyReport*>& copies) const {
  const auto for_each = [&](auto visit) {
    auto step = steps_.end();
    for (const CopyReport* copy : copies) {
      if (step == steps_.end() || step->first != StepOf(copy->id)) step = steps_.find(StepOf(copy->id));
      if (step != steps_.end() && copy->id.rank < step->second.world_size)
        visit(step->second.ranks[copy->id.rank]);
    }
  };
  for_each([](const RankState& rank) { __builtin_prefetch(&rank); });
  for_each([](const RankState& rank) { __builtin_prefetch(rank.copies.data()); });
}

void StepTable::Replace(NodeId node, const std::vector<CopyReport>& before,
                        const std::vector<CopyReport>& after) {
  const std::vector<const CopyReport*> old_copies = Ordered(before);
  const std::vector<const CopyReport*> new_copies = Ordered(after);
  Prefetch(old_copies);
  Prefetch(new_copies);
  std::vector<ShardId> touched;
  touched.reserve(old_copies.size() + new_copies.size());
  ForEachMissing(old_copies, new_copies, [&](const CopyReport& copy) {
    Remove(node, copy);
    touched.push_back(copy.id);
  });
  ForEachMissing(new_copies, old_copies, [&](const CopyReport& copy) {
    if (Add(node, copy)) touched.push_back(copy.id);
  });
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (size_t i = 0; i < touched.size();) {
    const StepId id = StepOf(touched[i]);
    const auto step = steps_.find(id);
    const size_t begin = i;
    while (i < touched.size() && StepOf(touched[i]) == id) ++i;
    if (step == steps_.end()) continue;
    const Standing standing = StandingOf(step->second);
    for (size_t at = begin; at < i; ++at)
      if (touched[at].rank < step->second.world_size) Recount(id, &step->second, touched[at].rank);
    if (step->second.copies == 0) {
      steps_.erase(step);
      ++version_;
    } else if (StandingOf(step->second) != standing) {
      ++version_;
    }
  }
}

std::vector<StepId> StepTable::Complete() {
  std::vector<StepId> committed;
  for (auto& [id, step] : steps_) {
    if (!MayCommit(id, step) || step.ranks_replicated != step.world_size) continue;
    ROPETEAM_CHECK(step.producible() && step.world_size > 0);
    step.complete = true;
    ++version_;
    committed.push_back(id);
  }
  return committed;
}

}  // namespace ropeteam::engine
