// SPDX-License-Identifier: Apache-2.0
#include "core/engine/policy.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "core/engine/durable.h"

namespace ropeteam::engine {
namespace {

// The first protocol version whose messages have the policy.
constexpr uint32_t kPolicySince = 9;

RankPolicy From(const PolicyQuestion& question) {
  return {question.incarnation, question.persist_every, question.rank, question.keep_on_storage,
          question.rank};
}

Status Otherwise(const char* field, uint64_t value, Rank rank, uint64_t said, Rank by) {
  return Error(Code::kInvalidArgument, "%s %llu of rank %u, rank %u has set %llu in this incarnation", field,
               static_cast<unsigned long long>(value), rank, by, static_cast<unsigned long long>(said));
}

}  // namespace

bool Join(RankPolicy* known, const RankPolicy& other) {
  if (other.incarnation < known->incarnation || other.incarnation >= kIncarnationMax) return false;
  const RankPolicy before = *known;
  if (other.incarnation > known->incarnation) *known = {.incarnation = other.incarnation};
  const bool persists_more = known->persist_every == 0 || other.persist_every < known->persist_every;
  const bool as_often = other.persist_every == known->persist_every && other.persist_by < known->persist_by;
  if (other.persist_every != 0 && (persists_more || as_often)) {
    known->persist_every = other.persist_every;
    known->persist_by = other.persist_by;
  }
  const bool keeps_more = other.keep_on_storage > known->keep_on_storage;
  const bool as_many = other.keep_on_storage == known->keep_on_storage && other.keep_by < known->keep_by;
  if (other.keep_on_storage != 0 && (keeps_more || as_many)) {
    known->keep_on_storage = other.keep_on_storage;
    known->keep_by = other.keep_by;
  }
  return !(*known == before);
}

PersistEvery PersistEveryOf(const Context& context, const RankPolicy& policy, Incarnation incarnation) {
  const JobSettings& settings = context.view.settings;
  if (settings.persist_every != 0) return {settings.persist_every, settings.persist_every_seconds, false};
  const bool counts = context.protocol >= kPolicySince && policy.incarnation == incarnation;
  return {counts ? policy.persist_every : 0, false, true};
}

Status RequireProtocol(const Context& context, uint32_t since, const char* what) {
  if (context.protocol >= since) return OkStatus();
  return Error(Code::kUnsupported,
               "%s needs protocol %u on every node, the job speaks %u: replace its older daemons", what,
               since, context.protocol);
}

Status Policy::Spoken(const Context& context) {
  return RequireProtocol(context, kPolicySince, "a rank's policy");
}

void Policy::Begin() {
  known_ = context_.policy;
  ++version_;
}

void Policy::Learn(const RankPolicy& policy) {
  if (Join(&known_, policy)) ++version_;
}

Status Policy::Set(const PolicyQuestion& question) {
  const RankPolicy known = Of(question.incarnation);
  if (question.again) {
    Learn(From(question));
    return OkStatus();
  }
  if (question.persist_every != 0 && known.persist_every != 0 &&
      question.persist_every != known.persist_every)
    return Otherwise("persist_every", question.persist_every, question.rank, known.persist_every,
                     known.persist_by);
  if (question.keep_on_storage != 0 && known.keep_on_storage != 0 &&
      question.keep_on_storage != known.keep_on_storage)
    return Otherwise("keep_on_storage", question.keep_on_storage, question.rank, known.keep_on_storage,
                     known.keep_by);
  RankPolicy added = From(question);
  // Keep the name of the first rank that set it.
  if (known.persist_every != 0) added.persist_every = 0;
  if (known.keep_on_storage != 0) added.keep_on_storage = 0;
  Learn(added);
  return OkStatus();
}

RankPolicy Policy::Of(Incarnation incarnation) const {
  if (context_.protocol < kPolicySince || known_.incarnation != incarnation) return {};
  return known_;
}

}  // namespace ropeteam::engine
