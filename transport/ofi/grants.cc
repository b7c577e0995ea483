// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/grants.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstring>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::ofi {
namespace {

// A bijection of 64-bit numbers that spreads every bit (the last step of splitmix64).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t SipHash24(uint64_t key_low, uint64_t key_high, uint64_t message) {
  uint64_t v0 = key_low ^ 0x736f6d6570736575, v1 = key_high ^ 0x646f72616e646f6d;
  uint64_t v2 = key_low ^ 0x6c7967656e657261, v3 = key_high ^ 0x7465646279746573;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
    }
  };
  for (const uint64_t word : {message, uint64_t{8} << 56}) {  // the second one holds the length
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

uint64_t KeyOf(uint64_t key, uint64_t instance) { return SipHash24(key, 0, instance); }

size_t AnswerPlace(uint64_t instance) { return Mix(instance) % kAnswers; }

bool Answered(const uint64_t* window, uint64_t instance) {
  return std::find(window, window + kAnswerWindow, instance) != window + kAnswerWindow;
}

Status Grants::AddRegion(uint64_t key, void* base, uint64_t length) {
  const std::lock_guard lock(mutex_);
  for (auto& [instance, peer] : peers_) {
    Result<Registration> made = register_(base, length, KeyOf(key, instance));
    if (!made.ok()) {
      for (auto& [other, granted] : peers_) granted.regions.erase(key);
      return made.status();
    }
    peer.regions[key] = std::move(made).value();
  }
  const bool added = exported_.emplace(key, Exported{base, length}).second;
  ROPETEAM_CHECK(added);
  return OkStatus();
}

void Grants::RemoveRegion(uint64_t key) {
  const std::lock_guard lock(mutex_);
  ROPETEAM_CHECK(exported_.erase(key) == 1);
  for (auto& [instance, peer] : peers_) peer.regions.erase(key);
}

bool Grants::OnKnock(const Knock& knock) {
  if (knock.magic != kKnockMagic || knock.instance == 0 || revoked_.contains(knock.instance)) return false;
  if (admitted_ && !admitted_->contains(knock.instance)) return false;
  const std::string source(knock.source, strnlen(knock.source, sizeof knock.source));
  const std::lock_guard lock(mutex_);
  if (const auto known = peers_.find(knock.instance); known != peers_.end()) {
    Attribute(knock.instance, &known->second, source);
    return true;
  }
  Peer peer;
  peer.answer = FreeAnswer(knock.instance);
  if (peer.answer == nullptr) {
    LOG_WARNING("ofi: no free slot of %zu for the keys of instance %016" PRIx64
                ": too many peers reach this node's memory",
                kAnswerWindow, knock.instance);
    return false;
  }
  for (const auto& [key, region] : exported_) {
    Result<Registration> made = register_(region.base, region.length, KeyOf(key, knock.instance));
    if (!made.ok()) {
      LOG_WARNING("ofi: no key for instance %016" PRIx64 ": %s", knock.instance,
                  made.status().ToString().c_str());
      return false;
    }
    peer.regions[key] = std::move(made).value();
  }
  *peer.answer = knock.instance;
  Attribute(knock.instance, &peers_.emplace(knock.instance, std::move(peer)).first->second, source);
  return true;
}

void Grants::Revoke(uint64_t instance) {
  if (revoked_.insert(instance).second) revoked_order_.push_back(instance);
  if (revoked_order_.size() > kRevokedMax) {
    revoked_.erase(revoked_order_.front());
    revoked_order_.pop_front();
  }
  Drop(instance);
}

void Grants::Admit(std::unordered_set<uint64_t> instances) {
  std::vector<uint64_t> gone;
  for (const auto& [instance, peer] : peers_)
    if (!instances.contains(instance)) gone.push_back(instance);
  for (const uint64_t instance : gone) Drop(instance);
  admitted_ = std::move(instances);
}

void Grants::Drop(uint64_t instance) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(instance);
  if (found == peers_.end()) return;
  ROPETEAM_CHECK(*found->second.answer == instance);
  *found->second.answer = 0;
  for (const std::string& source : found->second.sources) owners_.erase(source);
  peers_.erase(found);
}

void Grants::Readmit(uint64_t instance) {
  if (revoked_.erase(instance) == 0) return;
  const auto place = std::find(revoked_order_.begin(), revoked_order_.end(), instance);
  ROPETEAM_CHECK(place != revoked_order_.end());
  revoked_order_.erase(place);
}

bool Grants::Owns(const std::string& source) const { return owners_.contains(source); }

uint64_t* Grants::FreeAnswer(uint64_t instance) {
  uint64_t* const begin = answers_.data() + AnswerPlace(instance);
  uint64_t* const free = std::find(begin, begin + kAnswerWindow, uint64_t{0});
  return free == begin + kAnswerWindow ? nullptr : free;
}

// The source (address and port) may have belonged to another peer before.
void Grants::Attribute(uint64_t instance, Peer* peer, const std::string& source) {
  if (source.empty()) return;
  const auto owner = owners_.find(source);
  if (owner != owners_.end()) {
    if (owner->second == instance) return;
    const auto former = peers_.find(owner->second);
    ROPETEAM_CHECK(former != peers_.end());
    std::erase(former->second.sources, source);
  }
  owners_[source] = instance;
  peer->sources.push_back(source);
  if (peer->sources.size() <= kSourcesMax) return;
  owners_.erase(peer->sources.front());
  peer->sources.pop_front();
}

}  // namespace ropeteam::ofi
