// SPDX-License-Identifier: Apache-2.0
//
// What a writer of etcd's keys, or etcd itself, can say to a node.
//
// etcd_view: the value of the key `view`. An accepted view is the same after it is encoded and decoded again.
// etcd_seat: any answers, changes and times. A seat writes only below its own root, never holds a confirmation beyond its
// term, and a coordinator works on with all that it inherits.

#include "membership/etcd/seat.h"
#include "membership/standalone/wire.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/membership_values.h"

namespace ropeteam::fuzz {
namespace {

void RunView(std::string_view input) {
  const Result<ViewStatePtr> state = DecodeStoredView(std::string(input));
  if (!state.ok()) return;
  const std::string stored = EncodeStoredView(**state, (*state)->view.settle_us);
  const Result<ViewStatePtr> again = DecodeStoredView(stored);
  ROPETEAM_CHECK(again.ok() && EncodeStoredView(**again, (*again)->view.settle_us) == stored);
}

ViewState SomeView() {
  ViewState state;
  state.view.epoch = 5;
  state.view.leader = 1;
  for (NodeId id = 1; id <= 3; ++id) {
    Member& member = state.view.members.emplace_back();
    member.id = id;
    member.name = "n" + std::to_string(id);
    state.joined.push_back(id);
  }
  state.removed = {9};
  return state;
}

std::vector<std::string> ViewSeeds() {
  ViewState led = SomeView();
  led.view.led_since = 3;
  led.view.settings.storage = "s3://b/p";
  return {"", EncodeStoredView(SomeView(), 0), EncodeStoredView(led, 1'000'000)};
}

class World {
 public:
  void Run(std::string_view input) {
    Take(seat_.Start(now_));
    FromBytes in(input);
    while (!in.done()) Step(&in);
    // A seat whose next deadline is always now would keep its thread busy.
    for (int i = 0, at_once = 0; i < kTicks; ++i) {
      const TimeUs due = seat_.NextDeadline();
      if (due == std::numeric_limits<TimeUs>::max()) break;
      at_once = due > now_ ? 0 : at_once + 1;
      ROPETEAM_CHECK(at_once <= kAtOnceMax);
      now_ = std::max(now_, due);
      Take(seat_.Tick(now_));
    }
  }

 private:
  enum Op : uint8_t {
    kAnswer,
    kError,
    kChanged,
    kTime,
    kKeptAlive,
    kWatchEnded,
    kContact,
    kView,
    kStore,
    kRefused,
    kRejoin,
    kResign,
    kOps
  };
  static constexpr int kTicks = 16;
  static constexpr int kAtOnceMax = 4;  // ticks in a row
  static constexpr Code kCodes[] = {Code::kUnavailable, Code::kNotFound, Code::kNoSpace,
                                    Code::kInvalidArgument};

  static Seat::Config Config() {
    Seat::Config config;
    config.job = "job";
    config.prefix = "p";
    config.address = "127.0.0.1:7";
    config.seed = 1;
    config.describe = [](const Member&) { return std::string("{}"); };
    return config;
  }
  static Member SelfOf(NodeId id) {
    Member self;
    self.id = id;
    self.name = "n1";
    return self;
  }

  std::string Value(FromBytes* in) {
    switch (in->Byte() % 6) {
      case 0:
        return in->Text();
      case 1:
        return "1";  // the format
      case 2:
        return claim_;
      case 3: {
        char nonce[40];
        std::snprintf(nonce, sizeof(nonce), " %016x %016x n2", in->Byte(), in->Byte());
        return "127.0.0.1:8" + std::string(nonce);
      }
      case 4:
        return EncodeStoredView(SomeView(), static_cast<TimeUs>(in->Number()));
      default: {
        const ViewState state = GetViewState(in);
        return EncodeStoredView(state, static_cast<TimeUs>(in->Number()));
      }
    }
  }

  void Step(FromBytes* in) {
    switch (in->Byte() % kOps) {
      case kAnswer: {
        if (calls_.empty()) return;
        const Seat::Call call = TakeCall(in->Byte());
        StoreAnswer answer;
        answer.succeeded = in->Get<bool>();
        answer.revision = static_cast<int64_t>(in->Number());
        answer.lease = static_cast<StoreLease>(in->Number());
        if (std::holds_alternative<StoreGrant>(call.request) && answer.lease == 0)
          answer.lease = 1;                                            // client.cc
        if (const auto* txn = std::get_if<StoreTxn>(&call.request)) {  // client.cc checks this
          answer.succeeded |= txn->compare.empty();
          for (size_t i = (answer.succeeded ? txn->success : txn->failure).size(); i > 0; --i) {
            StoreFound& found = answer.found.emplace_back();
            found.present = in->Get<bool>();
            if (found.present) found.value = Value(in);
            found.revision = static_cast<int64_t>(in->Number());
            found.count = static_cast<int64_t>(in->Number());
          }
        }
        return Take(seat_.Answered(now_, call.id, answer));
      }
      case kError:
        if (calls_.empty()) return;
        return Take(seat_.Answered(now_, TakeCall(in->Byte()).id,
                                   Error(kCodes[in->Byte() % std::size(kCodes)], "%s", in->Text().c_str())));
      case kChanged: {
        const bool gone = in->Get<bool>();
        const auto revision = static_cast<int64_t>(in->Number());
        return Take(seat_.Changed(now_, watch_, revision, gone ? std::nullopt : std::optional(Value(in))));
      }
      case kTime:
        now_ += std::min<uint64_t>(in->Number(), 5000) * 1000;
        return Take(seat_.Tick(now_));
      case kKeptAlive:
        return Take(seat_.KeptAlive(now_, lease_, static_cast<int64_t>(in->Number())));
      case kWatchEnded:
        return Take(seat_.WatchEnded(now_, watch_));
      case kContact:
        return Take(seat_.OnContact(now_, in->Get<bool>()));
      case kView: {
        ViewState state = SomeView();
        state.view.epoch = 1 + in->Byte();
        return Take(seat_.OnView(now_, state.view));
      }
      case kStore: {
        if (storing_) return;
        storing_ = seat_.holds();
        ViewState state = SomeView();
        state.view.epoch = 1 + in->Byte();
        return Take(seat_.StoreView(now_, std::make_shared<ViewState>(state)));
      }
      case kRefused:
        return Take(seat_.OnRefused(now_));
      case kRejoin:
        return Take(seat_.Rejoin(now_, SelfOf(20 + in->Byte())));
      default:
        return Take(seat_.Resign(now_));
    }
  }

  Seat::Call TakeCall(size_t index) {
    const auto at = calls_.begin() + static_cast<ptrdiff_t>(index % calls_.size());
    Seat::Call call = *at;
    calls_.erase(at);
    return call;
  }

  void Take(const Seat::Outputs& outputs) {
    for (const Seat::Output& output : outputs) {
      if (const auto* call = std::get_if<Seat::Call>(&output)) {
        calls_.push_back(*call);
        if (const auto* txn = std::get_if<StoreTxn>(&call->request)) CheckKeys(*txn);
      } else if (const auto* alive = std::get_if<Seat::KeepAlive>(&output)) {
        lease_ = alive->lease;
      } else if (const auto* watch = std::get_if<Seat::Watch>(&output)) {
        watch_ = watch->number;
      } else if (const auto* moved = std::get_if<Seat::Moved>(&output)) {
        ROPETEAM_CHECK(ValidateCoordinatorAddress(moved->address).ok());
      } else if (const auto* elected = std::get_if<Seat::Elected>(&output)) {
        ROPETEAM_CHECK(seat_.holds());
        storing_ = false;
        Coordinate(elected->inheritance);
      } else if (const auto* confirmed = std::get_if<Seat::Confirmed>(&output)) {
        ROPETEAM_CHECK(confirmed->until <= now_ + TermMs(kDeadAfterMsDefault) * 1000);
      } else if (std::holds_alternative<Seat::Stored>(output)) {
        ROPETEAM_CHECK(std::exchange(storing_, false));
      } else if (std::holds_alternative<Seat::Deposed>(output)) {
        storing_ = false;
      }
    }
  }

  void CheckKeys(const StoreTxn& txn) {
    for (const auto* ops : {&txn.success, &txn.failure})
      for (const StoreOp& op : *ops) {
        ROPETEAM_CHECK(op.key.starts_with("/p/job/"));
        if (op.kind == StoreOp::kPut && op.key.ends_with("/coordinator")) claim_ = op.value;
      }
  }

  // The coordinator of a node that has just taken the role.
  void Coordinate(const Coordinator::Inheritance& inheritance) const {
    MembershipConfig config;
    config.job = "job";
    config.coordinator_addresses = {"127.0.0.1:7"};
    config.protocol_version = 1;
    config.chunk_bytes = 4096;
    config.data_transport = "tcp";
    Coordinator coordinator(config, now_, 1, inheritance);
    Registration registration;
    registration.job = "job";
    registration.protocol_version = 1;
    registration.chunk_bytes = 4096;
    registration.data_transport = "tcp";
    registration.member = SelfOf(1);
    TimeUs now = now_;
    (void)coordinator.Received(now, 1, registration);
    for (int i = 0; i < kTicks; ++i) {
      now = std::max(now, std::min<TimeUs>(coordinator.NextDeadline(), now + 10'000'000));
      (void)coordinator.Confirmed(now, now + inheritance.term_us);
      (void)coordinator.Tick(now);
    }
  }

  TimeUs now_ = 1'000'000;
  Seat seat_{Config(), SelfOf(1)};
  std::vector<Seat::Call> calls_;
  std::string claim_ = "127.0.0.1:7 0000000000000001 0000000000000002 n1";
  StoreLease lease_ = 0;
  uint64_t watch_ = 0;
  bool storing_ = false;
};

void RunSeat(std::string_view input) { World().Run(input); }

// A node that takes its lease and joins, then takes the role and stores a view, or follows and doubts its holder.
std::vector<std::string> SeatSeeds() {
  const auto op = [](size_t kind) { return ToBytes().Byte(kind); };
  const auto answer = [&](bool succeeded, int64_t revision) {
    return op(0).Byte(0).Put(succeeded).Put(revision).Put(int64_t{5});
  };
  const auto found = [](ToBytes&& bytes, std::initializer_list<size_t> values) {
    for (const size_t value : values) {
      if (value == 9) {
        bytes.Put(false);
      } else {
        bytes.Put(true).Byte(value);
        if (value == 3) bytes.Byte(2).Byte(3);
        if (value == 4) bytes.Put(uint64_t{0});
      }
      bytes.Put(uint64_t{2}).Put(uint64_t{2});
    }
    return bytes.bytes();
  };
  const std::string lease = answer(true, 1).bytes();
  const std::string time = op(3).Put(uint64_t{0xaf}).bytes() + op(3).Put(uint64_t{0xaf}).bytes() +
                           op(3).Put(uint64_t{0xaf}).bytes();
  const std::string vacant = lease + found(answer(true, 2), {9, 9, 9}) + time;
  const std::string role = vacant + found(answer(true, 3), {4, 9, 9});
  const std::string follows = lease + found(answer(true, 2), {3, 4, 9}) + op(7).Byte(5).bytes();
  return {
      lease,
      vacant,
      role,
      role + found(answer(true, 3), {2}) + op(8).Byte(6).bytes() + found(answer(true, 4), {9, 9}) + time,
      role + op(8).Byte(6).bytes() + found(answer(false, 4), {3, 4}),
      role + op(2).Put(false).Put(uint64_t{9}).Byte(3).Byte(2).Byte(3).bytes() + time + op(11).bytes(),
      follows + op(3).Put(uint64_t{5000}).bytes() + found(answer(true, 3), {3}) + time +
          found(answer(true, 4), {9, 9, 4}) + time,
      follows + op(2).Put(true).Put(uint64_t{9}).bytes() + time + op(5).bytes() +
          op(4).Put(uint64_t{0}).bytes(),
      lease + found(answer(false, 2), {0}) + op(1).Byte(0).Byte(1).Put(std::string("gone")).bytes() +
          op(10).Byte(1).bytes(),
  };
}

const Target kView("etcd_view", RunView, ViewSeeds);
const Target kSeat("etcd_seat", RunSeat, SeatSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
