// SPDX-License-Identifier: Apache-2.0
#include "membership/etcd/seat.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "core/base/log.h"
#include "membership/standalone/wire.h"

namespace ropeteam {
namespace {

constexpr TimeUs kUsPerMs = 1000;
constexpr const char* kFormat = "1";
constexpr TimeUs kTermMax = TermMs(kDeadAfterMsMax) * kUsPerMs;
constexpr int kCallMs = 500;  // more than the slowest write of a healthy etcd; a dead endpoint costs no more
constexpr int kCallLongMs = 1000;  // for calls that nothing waits for within a term
// Without contact the record is read this often, even if the watch reports nothing.
constexpr TimeUs kFindUs = 500'000;
constexpr TimeUs kFindJitterUs = 100'000;
// A vacant role is taken after the first time for each member before this one in the last view, up to the second time,
// plus up to the third at random.
constexpr TimeUs kClaimStepUs = 10'000;
constexpr TimeUs kClaimStepsMaxUs = 250'000;
constexpr TimeUs kClaimJitterUs = 50'000;
// No node doubts a new holder before its hold has ended and its first view is in the store. From then on a node that is
// not in the view does not count. The hold lasts dead_after from the first registration. This time is for that
// registration and the store, some round trips. It is short enough that nodes lost with a new holder are out within 3
// s.
constexpr TimeUs kSpareUs = 500'000;
// An answer to a keep-alive that comes this long after the next keep-alive counts as lost.
constexpr TimeUs kKeptLateUs = 500'000;

std::string Hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, value);
  return text;
}

}  // namespace

std::string EncodeKeyPart(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_' || c == '-';
    if (plain) {
      out += c;
      continue;
    }
    char code[4];
    std::snprintf(code, sizeof code, "%%%02X", static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += code;
  }
  return out;
}

Seat::Seat(const Config& config, const Member& self)
    : config_(config),
      root_("/" + EncodeKeyPart(config.prefix) + "/" + EncodeKeyPart(config.job) + "/"),
      dead_after_(config.dead_after_ms * kUsPerMs),
      probe_(config.probe_ms * kUsPerMs),
      term_(TermMs(config.dead_after_ms) * kUsPerMs),
      longest_term_(term_),
      self_(self),
      random_(config.seed) {}

Seat::Outputs Seat::Start(TimeUs now) {
  started_ = true;
  contact_since_ = now;
  find_at_ = now + kFindUs;
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::Tick(TimeUs now) {
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::OnContact(TimeUs now, bool registered) {
  if (contact_ == registered) return Take();
  contact_ = registered;
  contact_since_ = now;
  find_at_ = registered ? kNever : now + kFindUs - kFindJitterUs + random_() % (2 * kFindJitterUs);
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::OnView(TimeUs now, const View& view) {
  if (view.Contains(self_.id)) view_ = view;
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::OnRefused(TimeUs now) {
  refused_ = true;
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::StoreView(TimeUs now, const ViewStatePtr& view) {
  if (!holds()) return Take();
  storing_ = view;
  storing_bytes_ = EncodeStoredView(*view, longest_term_);
  store_at_ = now;
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::Rejoin(TimeUs now, const Member& self) {
  former_ = self_.id;
  self_ = self;
  joined_ = refused_ = doubted_ = removed_ = false;
  view_ = View();
  // The answer would be mistaken for one to the new instance.
  if (main_kind_ == Kind::kJoin || main_kind_ == Kind::kDoubt) main_ = Pending();
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::Resign(TimeUs now) {
  resigning_ = true;
  retry_at_ = now;
  Proceed(now);
  return Take();
}

TimeUs Seat::DoubtDue() const {
  if (view_.epoch == 0 || refused_ || removed_ || contact_ || vacant() || record_->id == self_.id || holds())
    return kNever;
  return std::max({contact_since_ + probe_, record_since_ + WithDrift(dead_after_) + kSpareUs, doubt_at_});
}

TimeUs Seat::NextDeadline() const {
  if (!started_ || resigned_) return kNever;
  TimeUs next = kNever;
  if (main_.id == 0) {
    TimeUs due = kNever;
    if (lease_ == 0 || !joined_ || resigning_ || find_wanted_ || WantsUndoubt() || WantsClaim(kNever))
      due = 0;
    if (vacant() && !refused_) due = std::min(due, claim_at_);
    due = std::min({due, find_at_, watch_at_, DoubtDue()});
    if (due != kNever) next = std::max(due, retry_at_);
  }
  if (holds() && confirm_.id == 0) next = std::min(next, confirm_at_);
  if (storing_ != nullptr && store_.id == 0) next = std::min(next, store_at_);
  if (lease_ != 0) next = std::min(next, keep_alive_at_);
  if (failing_since_ != 0 && (said_.since == 0 || said_.refuses))
    next = std::min(next, failing_since_ + kOutageSaidUs);
  return next;
}

bool Seat::WantsClaim(TimeUs now) const {
  if (!joined_ || refused_ || resigning_ || holds()) return false;
  if (vacant()) return now != kNever && now >= claim_at_;
  if (record_->id == self_.id) return true;  // taken by this process, which does not use it
  // A name has one live daemon, so this node is the holder's successor. If it has seen a view, it is not new: it may be
  // the former daemon itself, which was stopped for a while.
  if (record_->name == self_.name && view_.epoch == 0) return true;
  return !lost_.empty() && lost_ == record_->value;
}

Seat::Kind Seat::NextKind(TimeUs now) const {
  if (resigning_) return holds() ? Kind::kResign : lease_ != 0 ? Kind::kRevoke : Kind::kNone;
  if (lease_ == 0) return Kind::kGrant;
  if (!joined_) return format_missing_ ? Kind::kFormat : Kind::kJoin;
  if (find_wanted_ || now >= find_at_ || now >= watch_at_) return Kind::kFind;
  // A long lease must not keep the record after its holder has gone.
  if (WantsClaim(now)) return ttl_s_ > kSeatTtlS ? Kind::kGrant : Kind::kClaim;
  if (WantsUndoubt()) return Kind::kUndoubt;
  if (now >= DoubtDue()) return Kind::kDoubt;
  return Kind::kNone;
}

Seat::Pending Seat::Begin(TimeUs now, StoreRequest request, int deadline_ms) {
  outputs_.push_back(Call{++calls_, std::move(request), deadline_ms});
  return {calls_, now};
}

void Seat::Proceed(TimeUs now) {
  if (!started_ || resigned_) return;
  if (main_.id == 0 && now >= retry_at_) {
    main_kind_ = NextKind(now);
    if (main_kind_ == Kind::kGrant) {
      asked_ttl_s_ = self_.ordinal < kSeatOrdinals || joined_ ? kSeatTtlS : kSeatTtlLongS;
      main_ = Begin(now, StoreGrant{asked_ttl_s_}, kCallLongMs);
    } else if (main_kind_ == Kind::kRevoke) {
      main_ = Begin(now, StoreRevoke{lease_}, kCallMs);
    } else if (main_kind_ != Kind::kNone) {
      const bool is_long = main_kind_ == Kind::kJoin || main_kind_ == Kind::kClaim;
      main_ = Begin(now, TxnOf(main_kind_), is_long ? kCallLongMs : kCallMs);
    } else if (resigning_) {
      resigned_ = true;
      outputs_.push_back(Resigned{});
      return;
    }
  }
  if (holds() && confirm_.id == 0 && now >= confirm_at_) StartConfirm(now);
  if (storing_ != nullptr && store_.id == 0 && now >= store_at_) StartStore(now);
  if (lease_ != 0 && now >= keep_alive_at_) {
    const TimeUs third = static_cast<TimeUs>(ttl_s_) * 1'000'000 / 3;
    if (now >= kept_at_ + third + kKeptLateUs) {
      kept_at_ = now;
      find_wanted_ = true;  // its failure shows that etcd is unreachable
      outputs_.push_back(NextEndpoint{});
    }
    outputs_.push_back(KeepAlive{lease_});
    keep_alive_at_ = now + third;
  }
  if (refusing_since_ != 0 && WritesNothing(now)) refusing_since_ = 0;
  SayOutage(now);
}

bool Seat::WritesNothing(TimeUs now) const {
  return contact_ && main_.id == 0 && NextKind(now) == Kind::kNone && storing_ == nullptr;
}

void Seat::SayOutage(TimeUs now) {
  Outage outage{0, {}, false};
  if (failing_since_ != 0 && now >= failing_since_ + kOutageSaidUs) {
    outage = {failing_since_, failing_why_, false};
  } else if (refusing_since_ != 0) {
    outage = {refusing_since_, refusing_why_, true};
  }
  if (outage.since == said_.since && outage.refuses == said_.refuses) return;
  said_ = outage;
  outputs_.push_back(std::move(outage));
}

StoreTxn Seat::TxnOf(Kind kind) {
  const StoreOp get_record{StoreOp::kGet, root_ + "coordinator"};
  const StoreOp get_view{StoreOp::kGet, root_ + "view"};
  const StoreOp get_format{StoreOp::kGet, root_ + "format"};
  const auto record_is = [this](const std::string& value) {
    return StoreCompare{root_ + "coordinator", StoreCompare::kValue, value};
  };
  switch (kind) {
    case Kind::kJoin: {
      StoreTxn txn{{{root_ + "format", StoreCompare::kValue, kFormat}},
                   {get_record,
                    get_view,
                    {StoreOp::kPut, root_ + "nodes/" + Hex(self_.id), config_.describe(self_), lease_}},
                   {get_format}};
      if (former_ != kNoNode) txn.success.push_back({StoreOp::kDelete, root_ + "nodes/" + Hex(former_)});
      if (former_ != kNoNode && !vacant())
        txn.success.push_back({StoreOp::kDelete, root_ + "doubt/" + record_->nonce + "/" + Hex(former_)});
      return txn;
    }
    case Kind::kFormat:
      return {{{root_ + "format", StoreCompare::kAbsent}},
              {{StoreOp::kPut, root_ + "format", kFormat}},
              {get_format}};
    case Kind::kClaim: {
      claim_deposes_ = record_ && lost_ == record_->value ? record_->id : kNoNode;
      claim_ = config_.address + " " + Hex(self_.id) + " " + Hex(random_()) + " " + self_.name;
      StoreTxn txn{{}, {get_view, {StoreOp::kDeletePrefix, root_ + "doubt/"}, {}}, {get_record}};
      txn.compare.push_back(record_ ? record_is(record_->value)
                                    : StoreCompare{root_ + "coordinator", StoreCompare::kAbsent});
      txn.success.back() = {StoreOp::kPut, root_ + "coordinator", claim_, lease_};
      return txn;
    }
    case Kind::kDoubt: {
      const std::string doubts = root_ + "doubt/" + record_->nonce + "/";
      return {{record_is(record_->value)},
              {{StoreOp::kPut, doubts + Hex(self_.id), "no contact", lease_},
               {StoreOp::kCountPrefix, doubts},
               get_view},
              {get_record}};
    }
    case Kind::kUndoubt:
      return {{},
              {{StoreOp::kDelete, root_ + "doubt/" + (record_ ? record_->nonce : "") + "/" + Hex(self_.id)}},
              {}};
    case Kind::kResign:
      return {{record_is(mine_)}, {{StoreOp::kDelete, root_ + "coordinator"}}, {}};
    default:
      return {{}, {get_record}, {}};
  }
}

void Seat::StartConfirm(TimeUs now) {
  const StoreOp get{StoreOp::kGet, root_ + "coordinator"};
  confirm_at_ = now + term_ / 4;
  confirm_ = Begin(now, StoreTxn{{{root_ + "coordinator", StoreCompare::kValue, mine_}}, {get}, {get}},
                   static_cast<int>(term_ / 2 / kUsPerMs));
}

void Seat::StartStore(TimeUs now) {
  const std::string key = root_ + "view";
  // The doubts of nodes that this view leaves out must not depose its holder. The remaining nodes doubt again.
  const StoreOp clear{StoreOp::kDeletePrefix, root_ + "doubt/"};
  store_ = Begin(now,
                 StoreTxn{{{root_ + "coordinator", StoreCompare::kValue, mine_},
                           {key, StoreCompare::kRevision, {}, view_revision_}},
                          {{StoreOp::kPut, key, storing_bytes_}, clear},
                          {{StoreOp::kGet, root_ + "coordinator"}, {StoreOp::kGet, key}}},
                 kCallMs);
}

void Seat::Answers() {
  pause_ = kSeatPauseMinUs;
  failing_since_ = 0;
}

void Seat::Fail(TimeUs now, const Pending& of, const Status& status) {
  if (failing_since_ == 0) failing_since_ = of.sent_at;
  failing_why_ = status.message();
  retry_at_ = now + pause_;
  confirm_at_ = std::min(std::max(confirm_at_, now + kSeatPauseMinUs), retry_at_);
  store_at_ = retry_at_;
  pause_ = std::min(pause_ * 2, kSeatPauseMaxUs);
  // The failed call may not be needed any more. A read then notices when etcd answers again.
  find_wanted_ |= joined_;
}

// etcd has answered with a refusal.
void Seat::Refuse(TimeUs now, const Status& status) {
  Answers();
  retry_at_ = store_at_ = now + kSeatPauseMaxUs;
  if (status.code() == Code::kNotFound) return LoseLease(now);
  if (refusing_since_ == 0) refusing_since_ = now;
  refusing_why_ = status.message();
  if (status.code() == Code::kNoSpace) refusing_why_ += ": etcdctl compact, defrag, alarm disarm";
  // A node that was never admitted needs its user to correct this.
  if (status.code() == Code::kInvalidArgument && !joined_ && view_.epoch == 0 &&
      !std::exchange(refused_, true))
    outputs_.push_back(Refused{
        Error(status.code(), "etcd refuses the keys below %s: %s", root_.c_str(), status.message().c_str())});
}

void Seat::LoseLease(TimeUs now) {
  if (lease_ == 0) return;
  LOG_WARNING("membership etcd has ended this node's lease, it takes another one");
  lease_ = 0;
  joined_ = false;
  retry_at_ = std::min(retry_at_, now);
}

Seat::Outputs Seat::Answered(TimeUs now, uint64_t call, const Result<StoreAnswer>& answer) {
  Pending* pending = call == main_.id      ? &main_
                     : call == confirm_.id ? &confirm_
                     : call == store_.id   ? &store_
                                           : nullptr;
  if (pending == nullptr || call == 0) return Take();
  const Pending of = std::exchange(*pending, Pending());
  if (!answer.ok()) {
    if (pending == &main_ && resigning_) {  // nothing depends on it: the lease expires
      Depose("it leaves");
      lease_ = 0;
    }
    answer.status().code() == Code::kUnavailable ? Fail(now, of, answer.status())
                                                 : Refuse(now, answer.status());
  } else {
    Answers();
    const bool writes = pending == &store_ || (pending == &main_ && main_kind_ != Kind::kFind);
    if (writes) refusing_since_ = 0;
    if (pending == &main_) {
      OnMain(now, main_kind_, of.sent_at, *answer);
    } else if (pending == &store_) {
      OnStored(now, *answer);
    } else if (answer->succeeded) {
      outputs_.push_back(Confirmed{of.sent_at + term_});
    } else {
      Depose("another node has the coordinator role, or etcd has lost the key");
      LearnRecord(now, answer->revision, answer->found.at(0));
    }
  }
  Proceed(now);
  return Take();
}

void Seat::OnMain(TimeUs now, Kind kind, TimeUs sent_at, const StoreAnswer& answer) {
  switch (kind) {
    case Kind::kGrant:
      lease_ = answer.lease;
      ttl_s_ = asked_ttl_s_;
      joined_ = false;
      keep_alive_at_ = kept_at_ = now;
      return;
    case Kind::kJoin:
      return OnJoined(now, answer);
    case Kind::kFormat:
      format_missing_ = false;
      return;
    case Kind::kClaim:
      if (answer.succeeded) return OnClaimed(now, sent_at, answer);
      return LearnRecord(now, answer.revision, answer.found.at(0));
    case Kind::kDoubt:
      if (answer.succeeded) return OnDoubted(now, answer);
      return LearnRecord(now, answer.revision, answer.found.at(0));
    case Kind::kUndoubt:
      doubted_ = false;
      return;
    case Kind::kResign:
      return Depose("it leaves");
    case Kind::kRevoke:
      lease_ = 0;
      return;
    default:
      find_wanted_ = false;
      watch_at_ = kNever;
      if (find_at_ != kNever) find_at_ = now + kFindUs - kFindJitterUs + random_() % (2 * kFindJitterUs);
      LearnRecord(now, answer.revision, answer.found.at(0));
  }
}

void Seat::OnJoined(TimeUs now, const StoreAnswer& answer) {
  if (!answer.succeeded) {
    const StoreFound& format = answer.found.at(0);
    format_missing_ = !format.present;
    if (format_missing_) return;
    retry_at_ = now + kSeatPauseMaxUs;
    if (!std::exchange(refused_, true))
      outputs_.push_back(Refused{Error(Code::kUnsupported,
                                       "etcd has keys of format %.20s below %s, this node writes format %s",
                                       format.value.c_str(), root_.c_str(), kFormat)});
    return;
  }
  joined_ = true;
  former_ = kNoNode;
  LearnRecord(now, answer.revision, answer.found.at(0));
}

void Seat::LearnRecord(TimeUs now, int64_t revision, const StoreFound& found) {
  if (revision < known_at_ && !std::exchange(behind_, true)) {
    // Either an event has overtaken this answer, or the store has started over. The next answer shows which.
    find_wanted_ = true;
    return;
  }
  const bool again = revision < known_at_;
  behind_ = false;
  known_at_ = revision;
  if (again) {
    LOG_WARNING("membership etcd has lost its data, or has been restored from an older copy");
    watching_ = false;
  }
  FollowRecord(now, found.present ? std::optional<std::string>(found.value) : std::nullopt);
  if (watching_ || find_wanted_) return;
  watching_ = true;
  watched_at_ = now;
  // Only a broken etcd comes to the last number.
  const int64_t from = known_at_ == std::numeric_limits<int64_t>::max() ? known_at_ : known_at_ + 1;
  outputs_.push_back(Watch{++watch_, root_ + "coordinator", from});
}

void Seat::FollowRecord(TimeUs now, const std::optional<std::string>& value) {
  if (record_ && value && record_->value == *value) return;
  if (!record_ && !value && record_since_ != 0) return;
  record_since_ = now;
  doubted_ = removed_ = false;
  if (holds() && value != mine_)
    Depose(resigning_ ? "it leaves" : "another node has the coordinator role, or etcd has lost the key");
  record_ = value ? std::optional(Parse(*value)) : std::nullopt;
  if (vacant()) {
    if (record_)
      LOG_ERROR(
          "membership etcd's key %scoordinator holds %zu bytes that no node of this job writes, it is taken "
          "over",
          root_.c_str(), value->size());
    size_t before = self_.ordinal;
    for (size_t i = 0; i < view_.members.size(); ++i)
      if (view_.members[i].id == self_.id) before = i;
    claim_at_ = now + std::min<TimeUs>(before * kClaimStepUs, kClaimStepsMaxUs) + random_() % kClaimJitterUs;
    return;
  }
  // A record of this process that it does not use has no coordinator behind it.
  if (record_->id == self_.id && !holds()) return;
  LOG_INFO("membership node %s at %s has the coordinator role", record_->name.c_str(),
           record_->address.c_str());
  outputs_.push_back(Moved{record_->address});
}

// The format in which TxnOf() writes a Claim, byte for byte; anything else is not a record.
Seat::CoordinatorRecord Seat::Parse(const std::string& value) {
  CoordinatorRecord record{value, {}, kNoNode, {}, {}};
  std::string id;
  std::istringstream words(value);
  words >> record.address >> id >> record.nonce >> record.name;
  record.id = std::strtoull(id.c_str(), nullptr, 16);
  Member holder;
  holder.id = record.id;
  holder.name = record.name;
  const uint64_t nonce = std::strtoull(record.nonce.c_str(), nullptr, 16);
  if (ValidateMember(holder).ok() && ValidateCoordinatorAddress(record.address).ok() &&
      record.address + " " + Hex(record.id) + " " + Hex(nonce) + " " + record.name == value)
    return record;
  return {value, {}, kNoNode, {}, {}};
}

void Seat::OnClaimed(TimeUs now, TimeUs sent_at, const StoreAnswer& answer) {
  Coordinator::Inheritance inheritance;
  inheritance.confirmed_until = sent_at + term_;
  inheritance.deposed = claim_deposes_;
  const StoreFound& view = answer.found.at(0);
  view_revision_ = view.present ? view.revision : 0;
  if (view.present) {
    Result<ViewStatePtr> stored = DecodeStoredView(view.value);
    if (stored.ok()) {
      inheritance.newest = *stored;
      longest_term_ = std::max(longest_term_, std::min((*stored)->view.settle_us, kTermMax));
    } else {
      LOG_ERROR("membership the view in etcd below %s is not used: %s", root_.c_str(),
                stored.status().ToString().c_str());
    }
  }
  inheritance.term_us = longest_term_;
  mine_ = claim_;
  known_at_ = std::max(known_at_, answer.revision);
  confirm_at_ = now;
  storing_ = nullptr;
  lost_.clear();
  outputs_.push_back(Elected{std::move(inheritance)});
  record_.reset();  // the watch may have reported it before this answer came
  FollowRecord(now, mine_);
}

void Seat::OnDoubted(TimeUs now, const StoreAnswer& answer) {
  doubted_ = true;
  doubt_at_ = now + probe_;
  size_t members = view_.members.size();
  if (answer.found.at(2).present) {
    const Result<ViewStatePtr> stored = DecodeStoredView(answer.found.at(2).value);
    if (stored.ok() && (*stored)->view.epoch >= view_.epoch) {
      members = (*stored)->view.members.size();
      // This node was declared dead. The coordinator reports it when the node reaches it again.
      removed_ = !(*stored)->view.Contains(self_.id);
      if (removed_) return;
    }
  }
  // More than half of the members other than the holder.
  const size_t quorum = (members - 1) / 2 + 1;
  if (static_cast<size_t>(answer.found.at(1).count) < quorum) return;
  LOG_WARNING("membership %lld of %zu members do not reach the coordinator on node %s: its role is taken",
              static_cast<long long>(answer.found.at(1).count), members, record_->name.c_str());
  lost_ = record_->value;
}

void Seat::OnStored(TimeUs now, const StoreAnswer& answer) {
  if (storing_ == nullptr || !holds()) return;
  if (answer.succeeded) {
    view_revision_ = answer.revision;
  } else {
    const StoreFound& record = answer.found.at(0);
    const StoreFound& view = answer.found.at(1);
    // The answer to the same Store was lost.
    const bool done = record.present && record.value == mine_ && view.present && view.value == storing_bytes_;
    if (!done) {
      Depose("the view in etcd is not the one that this coordinator wrote last");
      LearnRecord(now, answer.revision, record);
      return;
    }
    view_revision_ = view.revision;
  }
  const Epoch epoch = std::exchange(storing_, nullptr)->view.epoch;
  outputs_.push_back(Stored{epoch});
}

void Seat::Depose(const std::string& why) {
  if (!holds()) return;
  mine_.clear();
  storing_ = nullptr;
  confirm_ = store_ = Pending();
  outputs_.push_back(Deposed{why});
}

Seat::Outputs Seat::KeptAlive(TimeUs now, StoreLease lease, int64_t ttl_s) {
  if (lease != lease_ || lease_ == 0) return Take();
  kept_at_ = now;
  if (ttl_s <= 0) LoseLease(now);
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::Changed(TimeUs now, uint64_t watch, int64_t revision,
                            const std::optional<std::string>& value) {
  if (watch != watch_ || !watching_ || revision <= known_at_) return Take();
  known_at_ = revision;
  FollowRecord(now, value);
  Proceed(now);
  return Take();
}

Seat::Outputs Seat::WatchEnded(TimeUs now, uint64_t watch) {
  if (watch != watch_ || !watching_) return Take();
  // Only the present record matters, not what happened meanwhile: it is read, and watched from there on. If a watch
  // ends right after its begin, it is not restarted in an endless loop.
  watching_ = false;
  watch_at_ = std::max(now + kSeatPauseMinUs, watched_at_ + kFindUs);
  Proceed(now);
  return Take();
}

}  // namespace ropeteam
