// SPDX-License-Identifier: Apache-2.0
#include "core/engine/storage_keeper.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace ropeteam::engine {

template <typename If>
void StorageKeeper::Fail(const std::string& why, const If& condition) {
  std::vector<uint64_t> numbers;
  for (const auto& [number, open] : open_)
    if (condition(open)) numbers.push_back(number);
  for (const uint64_t number : numbers) End(number, Error(Code::kUnavailable, "%s", why.c_str()), {});
}

void StorageKeeper::Begin() {
  keeper_ = context_.config.self;
  // Steps may be deleted as long as this runs, also if this node leads again.
  Fail("another node leads", [this](const Open& open) {
    return open.node != context_.config.self || !std::holds_alternative<PruneStored>(open.work);
  });
}

void StorageKeeper::OnView() {
  if (!context_.Contains(keeper_) || context_.protocol < kStorageOrdersSince) keeper_ = context_.config.self;
  Fail("the node has left", [this](const Open& open) { return !context_.Contains(open.node); });
  // Messages of the previous epoch are lost.
  for (auto& [number, open] : open_)
    if (open.node != context_.config.self) open.again_at = context_.now;
}

std::vector<NodeId> StorageKeeper::nodes() const {
  std::vector<NodeId> nodes = {keeper_};
  if (context_.protocol < kStorageOrdersSince) return nodes;
  for (const Member& member : context_.view.members)
    if (member.id != keeper_) nodes.push_back(member.id);
  return nodes;
}

void StorageKeeper::PassOn(const std::string& why) {
  const std::vector<Member>& members = context_.view.members;
  if (context_.protocol < kStorageOrdersSince || members.size() < 2) return;
  const size_t at = context_.PositionOf(keeper_);
  Appoint(members[at == Context::kNowhere ? 0 : (at + 1) % members.size()].id, why);
}

void StorageKeeper::Appoint(NodeId node, const std::string& why) {
  if (node == keeper_) return;
  const NodeId former = std::exchange(keeper_, node);
  LOG_INFO("storage is no longer written by %s but by %s: %s", context_.NameOf(former).c_str(),
           context_.NameOf(node).c_str(), why.c_str());
  StartAt(former, ReleaseStorage{}, [](const Status&, const StorageDone&) {});
  Fail("storage is no longer written by " + context_.NameOf(former) + ": " + why,
       [](const Open& open) { return open.of_keeper; });
}

uint64_t StorageKeeper::Order(NodeId node, bool of_keeper, RemoteWork work, Done done, Stalled stalled) {
  const uint64_t number = next_++;
  Open& open = open_[number];
  open = {node, of_keeper, std::move(work), std::move(done), std::move(stalled), kNever};
  if (node != context_.config.self) {
    Send(number, &open);
    return number;
  }
  desk_.Do(
      open.work,
      [this, number](const Status& status, const StorageDone& result) { End(number, status, result); },
      [this, number] {
        const auto at = open_.find(number);
        if (at != open_.end() && at->second.stalled) Stalled(at->second.stalled)();
      });
  return number;
}

void StorageKeeper::Send(uint64_t number, Open* open) {
  open->again_at = context_.now + open->again_after;
  open->again_after = std::min(2 * open->again_after, kAgainMaxUs);
  context_.Send(open->node, StorageOrder{number, open_.begin()->first, open->work});
}

void StorageKeeper::End(uint64_t number, const Status& status, const StorageDone& result) {
  const auto at = open_.find(number);
  if (at == open_.end()) return;
  const Done done = std::move(at->second.done);
  open_.erase(at);
  done(status, result);
}

void StorageKeeper::OnResult(NodeId from, const StorageResult& result) {
  const auto at = open_.find(result.number);
  if (at == open_.end() || at->second.node != from) return;
  if (result.stalled) {
    if (at->second.stalled) Stalled(at->second.stalled)();
    return;
  }
  StorageDone done;
  std::visit([&](const auto& each) { done.result = each; }, result.result);
  const Status status = result.code == Code::kOk ? OkStatus()
                                                 : Error(result.code, "%s: %s", context_.NameOf(from).c_str(),
                                                         result.message.c_str());
  End(result.number, status, done);
}

void StorageKeeper::OnTimer() {
  for (auto& [number, open] : open_)
    if (open.again_at <= context_.now) Send(number, &open);
}

TimeUs StorageKeeper::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [number, open] : open_) due = std::min(due, open.again_at);
  return due;
}

}  // namespace ropeteam::engine
