// SPDX-License-Identifier: Apache-2.0
//
// The seat against a simulated store: which node takes the role and when, what it inherits, and the effects
// of lost, late and repeated calls.
#include "membership/etcd/seat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "core/base/log.h"
#include "membership/standalone/wire.h"
#include "tests/membership/etcd_store.h"
#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr TimeUs kTerm = TermMs(kDeadAfterMsDefault) * kMs;
constexpr const char* kRoot = "/p%2Fq/run-7/";

class SeatTest : public ::testing::Test {
 protected:
  // One node: its seat and the seat's outputs.
  struct Node {
    std::unique_ptr<Seat> seat;
    Member self;
    bool cut = false;                   // from the store: calls fail after 100 ms
    bool lose_answers = false;          // calls take effect, but their answers are lost
    std::optional<Code> refuse_writes;  // the answer to every call that writes
    bool slow_answers = false;          // answers come 2 ms later, after the watch's event
    std::multimap<TimeUs, std::pair<uint64_t, Result<StoreAnswer>>> slow;
    bool hold_calls = false;  // calls wait in `held`
    std::vector<std::pair<uint64_t, StoreRequest>> held;
    std::multimap<TimeUs, uint64_t> failing;
    std::pair<uint64_t, int64_t> watch = {0, 0};  // number, next revision
    size_t calls = 0;
    std::vector<std::string> moved;
    std::vector<Coordinator::Inheritance> elected;
    std::vector<TimeUs> confirmed;
    std::vector<Epoch> stored;
    size_t deposed = 0;
    std::vector<Status> refused;
    std::vector<std::string> outages;  // "": the end of an outage
    bool resigned = false;
  };

  Node& Add(NodeId id, uint32_t ordinal, const std::string& name = "",
            uint32_t dead_after_ms = kDeadAfterMsDefault) {
    Node& node = nodes_[id];
    node.self.id = id;
    node.self.name = name.empty() ? Numbered("n", id) : name;
    node.self.ordinal = ordinal;
    Seat::Config config{
        "run-7", "p/q", dead_after_ms, 250, Numbered("10.0.0.", id) + ":7", id, [](const Member& member) {
          return member.name;
        }};
    node.seat = std::make_unique<Seat>(config, node.self);
    Perform(&node, node.seat->Start(now_));
    return node;
  }
  static bool Writes(const StoreRequest& request) {
    const auto* txn = std::get_if<StoreTxn>(&request);
    return txn == nullptr || std::any_of(txn->success.begin(), txn->success.end(), [](const StoreOp& op) {
             return op.kind != StoreOp::kGet && op.kind != StoreOp::kCountPrefix;
           });
  }
  void Perform(Node* node, Seat::Outputs outputs) {
    for (Seat::Output& output : outputs) {
      if (auto* call = std::get_if<Seat::Call>(&output)) {
        ++node->calls;
        if (node->cut) {
          node->failing.emplace(now_ + 100 * kMs, call->id);
        } else if (node->refuse_writes && Writes(call->request)) {
          Answer(node, call->id, Error(*node->refuse_writes, "h1:2379: database space exceeded"));
        } else if (node->hold_calls) {
          node->held.emplace_back(call->id, call->request);
        } else if (node->slow_answers) {
          node->slow.emplace(now_ + 2 * kMs, std::pair(call->id, store_.Apply(now_, call->request)));
        } else if (node->lose_answers) {
          (void)store_.Apply(now_, call->request);
          node->failing.emplace(now_ + 100 * kMs, call->id);
        } else {
          Answer(node, call->id, store_.Apply(now_, call->request));
        }
      } else if (auto* keep_alive = std::get_if<Seat::KeepAlive>(&output)) {
        if (!node->cut)
          Perform(node,
                  node->seat->KeptAlive(now_, keep_alive->lease, store_.KeepAlive(now_, keep_alive->lease)));
      } else if (auto* watch = std::get_if<Seat::Watch>(&output)) {
        EXPECT_EQ(watch->key, std::string(kRoot) + "coordinator");
        node->watch = {watch->number, watch->from};
      } else if (auto* moved = std::get_if<Seat::Moved>(&output)) {
        node->moved.push_back(moved->address);
      } else if (auto* elected = std::get_if<Seat::Elected>(&output)) {
        node->elected.push_back(elected->inheritance);
      } else if (auto* confirmed = std::get_if<Seat::Confirmed>(&output)) {
        node->confirmed.push_back(confirmed->until);
      } else if (auto* stored = std::get_if<Seat::Stored>(&output)) {
        node->stored.push_back(stored->epoch);
      } else if (std::holds_alternative<Seat::Deposed>(output)) {
        ++node->deposed;
      } else if (auto* refused = std::get_if<Seat::Refused>(&output)) {
        node->refused.push_back(refused->status);
      } else if (auto* outage = std::get_if<Seat::Outage>(&output)) {
        node->outages.push_back(outage->since == 0 ? ""
                                                   : (outage->refuses ? "refuses " : "away ") + outage->why);
      } else if (std::holds_alternative<Seat::Resigned>(output)) {
        node->resigned = true;
      }
    }
  }
  void Answer(Node* node, uint64_t id, const Result<StoreAnswer>& answer) {
    Perform(node, node->seat->Answered(now_, id, answer));
  }
  void Release(Node* node) {
    node->hold_calls = false;
    for (const auto& [id, request] : std::exchange(node->held, {}))
      Answer(node, id, store_.Apply(now_, request));
  }
  void RunFor(uint64_t ms) {
    for (const TimeUs end = now_ + ms * kMs; now_ < end;) {
      now_ += 1 * kMs;
      store_.Expire(now_);
      for (auto& [id, node] : nodes_) {
        while (!node.failing.empty() && node.failing.begin()->first <= now_) {
          const uint64_t call = node.failing.begin()->second;
          node.failing.erase(node.failing.begin());
          Answer(&node, call, Error(Code::kUnavailable, "h1:2379: connection refused"));
        }
        while (!node.slow.empty() && node.slow.begin()->first <= now_) {
          const auto [call, answer] = node.slow.begin()->second;
          node.slow.erase(node.slow.begin());
          Answer(&node, call, answer);
        }
        const std::vector<FakeStore::Change> changes = store_.changes();
        for (const auto& change : changes) {
          if (node.cut || node.hold_calls || change.revision < node.watch.second ||
              change.key != std::string(kRoot) + "coordinator")
            continue;
          node.watch.second = change.revision + 1;
          Perform(&node, node.seat->Changed(now_, node.watch.first, change.revision, change.value));
        }
        if (now_ >= node.seat->NextDeadline()) Perform(&node, node.seat->Tick(now_));
      }
    }
  }
  std::optional<std::string> Key(const std::string& key) { return store_.Get(kRoot + key); }
  // Gives all members a view of these nodes, which the holder has stored.
  ViewStatePtr GiveView(Node* holder, Epoch epoch, const std::vector<NodeId>& ids) {
    auto state = std::make_shared<ViewState>();
    state->view.epoch = epoch;
    state->view.leader = ids.front();
    for (const NodeId id : ids) {
      state->view.members.push_back(nodes_.at(id).self);
      state->joined.push_back(1);
    }
    Perform(holder, holder->seat->StoreView(now_, state));
    for (const NodeId id : ids) Perform(&nodes_.at(id), nodes_.at(id).seat->OnView(now_, state->view));
    return state;
  }
  void Contact(Node* node, bool registered) { Perform(node, node->seat->OnContact(now_, registered)); }
  // Starts three nodes. Node 1 has had the role for long enough that it can be deposed. All are in the view
  // of epoch 5 and have contact.
  void StartThree() {
    for (const NodeId id : {1, 2, 3}) Add(id, static_cast<uint32_t>(id) - 1);
    RunFor(100);
    ASSERT_TRUE(nodes_[1].seat->holds());
    GiveView(&nodes_[1], 5, {1, 2, 3});
    for (const NodeId id : {1, 2, 3}) Contact(&nodes_[id], true);
    RunFor(3000);
  }
  size_t Holders() {
    size_t holders = 0;
    for (const auto& [id, node] : nodes_) holders += node.seat->holds();
    return holders;
  }

  TimeUs now_ = 5'000'000;
  FakeStore store_;
  std::map<NodeId, Node> nodes_;
};

TEST_F(SeatTest, OneOfSeveralTakesTheEmptyRoleAndAllAreToldWhere) {
  StartThree();
  EXPECT_EQ(Holders(), 1u);
  EXPECT_EQ(*Key("format"), "1");
  EXPECT_EQ(*Key("nodes/0000000000000002"), "n2");
  EXPECT_THAT(*Key("coordinator"), StartsWith("10.0.0.1:7 0000000000000001 "));
  for (const auto& [id, node] : nodes_) EXPECT_EQ(node.moved.back(), "10.0.0.1:7");
  ASSERT_EQ(nodes_[1].elected.size(), 1u);
  EXPECT_EQ(nodes_[1].elected[0].newest, nullptr);
  EXPECT_EQ(nodes_[1].stored, std::vector<Epoch>{5});
  // Four confirmations per term, each valid for a term from its sending.
  EXPECT_GE(nodes_[1].confirmed.size(), 12u);
  EXPECT_GT(nodes_[1].confirmed.back(), now_ + kTerm / 2);
  EXPECT_LE(nodes_[1].confirmed.back(), now_ + kTerm);
}

TEST_F(SeatTest, AConfirmationCountsFromItsSending) {
  StartThree();
  Node& holder = nodes_[1];
  holder.hold_calls = true;
  const TimeUs before = now_;
  RunFor(300);
  ASSERT_EQ(holder.held.size(), 1u);
  const size_t count = holder.confirmed.size();
  Release(&holder);
  ASSERT_EQ(holder.confirmed.size(), count + 1);
  EXPECT_LE(holder.confirmed.back(), before + kTerm / 4 + kTerm + 1 * kMs);
  EXPECT_GE(holder.confirmed.back(), before + kTerm);
}

TEST_F(SeatTest, TheSuccessorOfADeadHolderInheritsItsViewWhenTheLeaseEnds) {
  StartThree();
  nodes_.erase(1);
  RunFor(static_cast<uint64_t>(kSeatTtlS) * 1000 + 400);
  ASSERT_TRUE(nodes_[2].seat->holds());
  ASSERT_EQ(nodes_[2].elected.size(), 1u);
  const Coordinator::Inheritance& inheritance = nodes_[2].elected[0];
  ASSERT_NE(inheritance.newest, nullptr);
  EXPECT_EQ(inheritance.newest->view.epoch, 5u);
  EXPECT_TRUE(inheritance.newest->view.Contains(3));
  EXPECT_EQ(inheritance.deposed, kNoNode) << "a vacant role proves nothing about its former holder";
  EXPECT_EQ(inheritance.term_us, kTerm);
  EXPECT_EQ(nodes_[3].moved.back(), "10.0.0.2:7");
}

TEST_F(SeatTest, MoreThanHalfOfTheOthersDeposeAHolder) {
  StartThree();
  Contact(&nodes_[2], false);
  RunFor(1000);
  EXPECT_TRUE(nodes_[1].seat->holds()) << "one of two others is not more than half";
  Contact(&nodes_[3], false);
  RunFor(240);
  EXPECT_TRUE(nodes_[1].seat->holds()) << "a probe has not passed";
  RunFor(20);
  EXPECT_EQ(Holders(), 1u);
  EXPECT_EQ(nodes_[1].deposed, 1u);
  Node& successor = nodes_[2].seat->holds() ? nodes_[2] : nodes_[3];
  EXPECT_EQ(successor.elected[0].deposed, 1u);
  EXPECT_EQ(successor.elected[0].newest->view.epoch, 5u);
}

TEST_F(SeatTest, TheWatchMayTellOfAClaimBeforeItsAnswerComes) {
  StartThree();
  for (const NodeId id : {2, 3}) {
    nodes_[id].slow_answers = true;
    Contact(&nodes_[id], false);
  }
  RunFor(400);
  ASSERT_EQ(Holders(), 1u);
  Node& successor = nodes_[2].seat->holds() ? nodes_[2] : nodes_[3];
  ASSERT_EQ(successor.elected.size(), 1u);
  EXPECT_EQ(successor.elected[0].deposed, 1u);
  EXPECT_EQ(successor.moved.back(), successor.self.id == 2 ? "10.0.0.2:7" : "10.0.0.3:7");
}

TEST_F(SeatTest, ADoubtIsWithdrawnWhenThereIsContactAgain) {
  StartThree();
  Contact(&nodes_[2], false);
  RunFor(400);
  Contact(&nodes_[2], true);
  RunFor(100);
  Contact(&nodes_[3], false);
  RunFor(2000);
  EXPECT_TRUE(nodes_[1].seat->holds()) << "two short losses one after the other are not a quorum";
}

TEST_F(SeatTest, NeitherANewcomerNorADeclaredDeadInstanceDoubts) {
  StartThree();
  Add(4, 3);
  GiveView(&nodes_[1], 6, {1, 3});  // 2 was declared dead and has seen only view 5
  RunFor(3000);
  Contact(&nodes_[2], false);
  RunFor(3000);
  EXPECT_TRUE(nodes_[1].seat->holds());
  for (const auto& change : store_.changes())
    EXPECT_FALSE(change.value && change.key.ends_with("/0000000000000004") &&
                 change.key.find("doubt") != std::string::npos);
  size_t doubts = 0;
  for (const auto& change : store_.changes())
    if (change.key.find("doubt/") != std::string::npos) doubts += change.value ? 1 : -1;
  EXPECT_EQ(doubts, 0u) << "it has taken its doubt back";
}

TEST_F(SeatTest, TheDoubtOfAMemberThatTheNextViewLeavesOutDoesNotCount) {
  for (const NodeId id : {1, 2, 3, 4, 5}) Add(id, static_cast<uint32_t>(id) - 1);
  RunFor(100);
  ASSERT_TRUE(nodes_[1].seat->holds());
  GiveView(&nodes_[1], 5, {1, 2, 3, 4, 5});
  for (const NodeId id : {1, 2, 3, 4, 5}) Contact(&nodes_[id], true);
  RunFor(3000);
  Contact(&nodes_[2], false);
  RunFor(100);
  Contact(&nodes_[3], false);
  RunFor(160);  // 2 doubts, 3 does not yet
  GiveView(&nodes_[1], 6, {1, 3, 4, 5});
  RunFor(2000);
  EXPECT_TRUE(nodes_[1].seat->holds()) << "one of three others doubts";
  Contact(&nodes_[4], false);
  RunFor(600);
  EXPECT_FALSE(nodes_[1].seat->holds()) << "two do";
}

TEST_F(SeatTest, ANewHolderIsSparedForItsHold) {
  StartThree();
  for (const NodeId id : {2, 3}) Contact(&nodes_[id], false);
  RunFor(600);
  ASSERT_EQ(Holders(), 1u);
  const NodeId second = nodes_[2].seat->holds() ? 2 : 3;
  Contact(&nodes_[1], false);
  RunFor(1100);  // no node reaches it; two of two others would depose it, but only after its hold
  EXPECT_TRUE(nodes_[second].seat->holds());
  RunFor(400);
  EXPECT_FALSE(nodes_[second].seat->holds());
}

TEST_F(SeatTest, ALostAnswerToAClaimIsClaimedAgainWithAnotherNonce) {
  Node& node = Add(1, 0);
  node.lose_answers = true;
  RunFor(100);
  ASSERT_TRUE(Key("coordinator"));
  const std::string lost = *Key("coordinator");
  EXPECT_TRUE(node.elected.empty());
  node.lose_answers = false;
  RunFor(300);
  ASSERT_EQ(node.elected.size(), 1u);
  EXPECT_NE(*Key("coordinator"), lost);
}

TEST_F(SeatTest, ARepeatedStoreWhoseFirstCopyTookEffectIsStored) {
  StartThree();
  Node& holder = nodes_[1];
  holder.lose_answers = true;
  GiveView(&holder, 6, {1, 2, 3});
  RunFor(50);
  holder.lose_answers = false;
  EXPECT_EQ(holder.stored.back(), 5u);
  RunFor(200);
  EXPECT_EQ(holder.stored.back(), 6u);
  EXPECT_TRUE(holder.seat->holds());
}

TEST_F(SeatTest, ALateCopyOfAnOlderStoreChangesNothing) {
  StartThree();
  Node& holder = nodes_[1];
  holder.hold_calls = true;
  GiveView(&holder, 6, {1, 2, 3});
  ASSERT_FALSE(holder.held.empty());
  const auto held = holder.held;
  Release(&holder);
  GiveView(&holder, 7, {1, 2});
  for (const auto& [id, request] : held) (void)store_.Apply(now_, request);
  EXPECT_EQ((*DecodeStoredView(*Key("view")))->view.epoch, 7u);
}

TEST_F(SeatTest, AFormerHolderCanNeitherStoreNorConfirm) {
  StartThree();
  Node& former = nodes_[1];
  former.hold_calls = true;  // as if it was stopped
  GiveView(&former, 6, {1, 3});
  for (const NodeId id : {2, 3}) Contact(&nodes_[id], false);
  RunFor(500);
  const size_t confirmed = former.confirmed.size();
  ASSERT_EQ(Holders(), 2u);
  Release(&former);
  EXPECT_FALSE(former.seat->holds());
  EXPECT_EQ(former.confirmed.size(), confirmed);
  EXPECT_EQ(former.stored.back(), 5u);
  EXPECT_EQ((*DecodeStoredView(*Key("view")))->view.epoch, 5u);
}

// The store loses its data. Another node then gets the role at the same revision as the former holder.
TEST_F(SeatTest, AfterAWipeTheSameRevisionIsNotTheSameRole) {
  Node& a = Add(1, 0);
  RunFor(100);
  ASSERT_TRUE(a.seat->holds());
  const int64_t revision = store_.revision();
  a.hold_calls = true;
  RunFor(100);
  store_.Wipe();
  Node& b = Add(2, 0);
  RunFor(100);
  ASSERT_TRUE(b.seat->holds());
  EXPECT_EQ(store_.revision(), revision) << "else this tests nothing";
  Release(&a);
  RunFor(300);
  EXPECT_FALSE(a.seat->holds());
  EXPECT_EQ(a.deposed, 1u);
  EXPECT_EQ(a.moved.back(), "10.0.0.2:7");
}

TEST_F(SeatTest, AWipedStoreIsWrittenAgainByTheSameNodes) {
  StartThree();
  store_.Wipe();
  RunFor(2000);
  EXPECT_EQ(Holders(), 1u);
  EXPECT_EQ(*Key("format"), "1");
  for (const char* id : {"1", "2", "3"}) EXPECT_TRUE(Key(std::string("nodes/000000000000000") + id)) << id;
  for (const auto& [id, node] : nodes_) {
    EXPECT_TRUE(node.refused.empty());
    if (node.seat->holds()) {
      EXPECT_EQ(node.elected.back().newest, nullptr);
    }
  }
  // All nodes follow the record in the new store.
  for (auto& [id, node] : nodes_) EXPECT_EQ(node.moved.back() + " ", Key("coordinator")->substr(0, 11));
}

TEST_F(SeatTest, WhileTheStoreIsAwayTheRoleStaysAndItIsSaid) {
  StartThree();
  for (auto& [id, node] : nodes_) node.cut = true;
  RunFor(1300);
  EXPECT_TRUE(nodes_[1].seat->holds());
  ASSERT_FALSE(nodes_[1].outages.empty());
  EXPECT_THAT(nodes_[1].outages.back(), HasSubstr("connection refused"));
  const size_t confirmed = nodes_[1].confirmed.size();
  for (auto& [id, node] : nodes_) node.cut = false;
  RunFor(600);
  EXPECT_TRUE(nodes_[1].seat->holds());
  EXPECT_GT(nodes_[1].confirmed.size(), confirmed);
  EXPECT_EQ(nodes_[1].outages.back(), "");
}

// Its confirmations, which only read, still succeed.
TEST_F(SeatTest, AHolderWhoseViewIsRefusedSaysSoAndTriesSeldom) {
  StartThree();
  Node& holder = nodes_[1];
  holder.refuse_writes = Code::kNoSpace;
  GiveView(&holder, 6, {1, 2});
  const size_t calls = holder.calls;
  RunFor(3000);
  ASSERT_EQ(holder.outages.size(), 1u);
  EXPECT_THAT(holder.outages[0],
              AllOf(StartsWith("refuses "), HasSubstr("space exceeded"), HasSubstr("alarm disarm")));
  EXPECT_TRUE(holder.seat->holds());
  EXPECT_GT(holder.confirmed.back(), now_);
  EXPECT_LE(holder.calls - calls, 12u + 7u) << "confirmations, and a Store every half second";
  holder.refuse_writes.reset();
  RunFor(600);
  EXPECT_EQ(holder.stored.back(), 6u);
  EXPECT_EQ(holder.outages.back(), "");
}

// The failed call is no longer needed. The outage still ends when the store answers, so none is reported.
TEST_F(SeatTest, AnOutageEndsThoughWhatFailedIsNotWantedAnyMore) {
  StartThree();
  Node& node = nodes_[2];
  Contact(&node, false);
  node.cut = true;
  RunFor(500);  // a doubt has failed
  node.cut = false;
  Contact(&node, true);
  RunFor(2000);
  EXPECT_THAT(node.outages, ::testing::IsEmpty());
}

TEST_F(SeatTest, AWatchThatEndsAsSoonAsItBeginsIsBegunTwiceASecond) {
  StartThree();
  Node& node = nodes_[2];
  const uint64_t first = node.watch.first;
  for (int i = 0; i < 3000; ++i) {
    Perform(&node, node.seat->WatchEnded(now_, node.watch.first));
    RunFor(1);
  }
  EXPECT_GE(node.watch.first - first, 5u);
  EXPECT_LE(node.watch.first - first, 7u);
  RunFor(1000);
  const uint64_t number = node.watch.first;
  Perform(&node, node.seat->WatchEnded(now_, number));
  RunFor(30);
  EXPECT_GT(node.watch.first, number) << "one that lasted is begun again at once";
}

TEST_F(SeatTest, AKeyThatNoNodeWroteIsTakenOver) {
  for (const std::string& garbage :
       {std::string(), std::string("x"), std::string(100'000, 'A'), std::string("a:1 b c d"),
        std::string("\0\n\xff", 3), std::string("10.0.0.9:7 0000000000000000 0000000000000001 n"),
        std::string("10.0.0.9 0000000000000009 0000000000000001 n"),
        std::string("10.0.0.9:7 0000000000000009 0000000000000001 n "),
        std::string("10.0.0.9:7 0000000000000009 00000000000001 n")}) {
    nodes_.clear();
    store_ = FakeStore();
    (void)store_.Apply(now_,
                       StoreTxn{{}, {{StoreOp::kPut, std::string(kRoot) + "coordinator", garbage}}, {}});
    StartThree();
    EXPECT_EQ(Holders(), 1u) << garbage.substr(0, 80);
    for (const auto& [id, node] : nodes_) EXPECT_EQ(node.moved, std::vector<std::string>{"10.0.0.1:7"});
    // The same while the job runs.
    (void)store_.Apply(now_,
                       StoreTxn{{}, {{StoreOp::kPut, std::string(kRoot) + "coordinator", garbage}}, {}});
    RunFor(1000);
    EXPECT_EQ(Holders(), 1u);
    EXPECT_NE(*Key("coordinator"), garbage);
  }
}

TEST_F(SeatTest, AViewThatNoNodeWroteIsReplaced) {
  auto far = std::make_shared<ViewState>();
  far->view.epoch = kEpochKnownMax + 1;
  for (const std::string& garbage :
       {std::string("x"), std::string(1000, '\xff'), EncodeStoredView(*far, 0)}) {
    nodes_.clear();
    store_ = FakeStore();
    (void)store_.Apply(now_, StoreTxn{{}, {{StoreOp::kPut, std::string(kRoot) + "view", garbage}}, {}});
    StartThree();
    EXPECT_EQ(nodes_[1].elected.at(0).newest, nullptr);
    EXPECT_EQ((*DecodeStoredView(*Key("view")))->view.epoch, 5u);
  }
}

TEST_F(SeatTest, ASuccessorWaitsAsLongAsTheLeasesOfAnyFormerHolder) {
  Add(1, 0, "", 10'000);
  RunFor(100);
  ASSERT_TRUE(nodes_[1].seat->holds());
  GiveView(&nodes_[1], 5, {1});
  Add(2, 1);
  Add(3, 2);
  RunFor(100);
  nodes_.erase(1);
  RunFor(static_cast<uint64_t>(kSeatTtlS) * 1000 + 400);
  ASSERT_TRUE(nodes_[2].seat->holds());
  EXPECT_EQ(nodes_[2].elected[0].term_us, TermMs(10'000) * kMs);
  GiveView(&nodes_[2], 6, {2, 3});
  nodes_.erase(2);
  RunFor(static_cast<uint64_t>(kSeatTtlS) * 1000 + 400);
  ASSERT_TRUE(nodes_[3].seat->holds());
  EXPECT_EQ(nodes_[3].elected[0].term_us, TermMs(10'000) * kMs) << "the first one's may not have run out";
}

TEST_F(SeatTest, ARejoinedInstanceIsNotTakenForTheFormerOne) {
  StartThree();
  Node& node = nodes_[2];
  Contact(&node, false);
  node.hold_calls = true;
  RunFor(300);  // its doubt is on the way
  ASSERT_EQ(node.held.size(), 1u);
  (void)Perform(&node, node.seat->OnRefused(now_));
  Member again = node.self;
  again.id = 22;
  Perform(&node, node.seat->Rejoin(now_, again));
  Release(&node);
  RunFor(100);
  EXPECT_TRUE(Key("nodes/0000000000000016"));
  EXPECT_FALSE(Key("nodes/0000000000000002"));
  node.self = again;
  nodes_.emplace(22, std::move(node));
  nodes_.erase(2);
  GiveView(&nodes_[1], 6, {1, 22, 3});
  nodes_.erase(1);
  for (const NodeId id : {22, 3}) Contact(&nodes_[id], false);
  RunFor(300);
  EXPECT_EQ(Holders(), 1u) << "the doubts of both count";
}

TEST_F(SeatTest, ANodeThatKeepsALeaseButHearsNoEventFindsTheNewHolderByReading) {
  StartThree();
  Node& deaf = nodes_[3];
  deaf.watch.second = 1'000'000;  // its watch hangs
  nodes_.erase(1);
  Contact(&deaf, false);
  RunFor(3200);
  ASSERT_TRUE(nodes_[2].seat->holds());
  EXPECT_EQ(deaf.moved.back(), "10.0.0.2:7");
}

TEST_F(SeatTest, TheWatchGoesOnWhereTheRoleWasRead) {
  Node& node = Add(1, 0);
  Node& other = Add(2, 1);
  RunFor(1000);
  ASSERT_TRUE(node.seat->holds());
  const uint64_t number = other.watch.first;
  Perform(&other, other.seat->WatchEnded(now_, number));  // compacted, or its endpoint failed
  other.watch.second = 1'000'000;
  RunFor(30);
  EXPECT_GT(other.watch.first, number);
  EXPECT_EQ(other.watch.second, store_.revision() + 1);
}

TEST_F(SeatTest, TheRoleNeverHangsOnALongLease) {
  Add(1, kSeatOrdinals);
  RunFor(500);
  ASSERT_TRUE(nodes_[1].seat->holds());
  EXPECT_TRUE(Key("nodes/0000000000000001"));
  nodes_.erase(1);
  RunFor(static_cast<uint64_t>(kSeatTtlS) * 1000 + 10);
  EXPECT_FALSE(Key("coordinator"));
}

TEST_F(SeatTest, TheRoleDoesNotHangOnALongLeaseWhenTheAnswerToAShortOneIsLost) {
  Add(1, 0);
  RunFor(100);
  Node& node = Add(2, kSeatOrdinals);
  RunFor(100);
  nodes_.erase(1);
  RunFor(static_cast<uint64_t>(kSeatTtlS) * 1000 - 200);
  node.lose_answers = true;
  RunFor(800);
  node.lose_answers = false;
  RunFor(1000);
  ASSERT_TRUE(node.seat->holds());
  nodes_.erase(2);
  RunFor(static_cast<uint64_t>(kSeatTtlS) * 1000 + 10);
  EXPECT_FALSE(Key("coordinator"));
}

TEST_F(SeatTest, ARestartedHolderTakesItsRoleBackAtOnce) {
  Add(1, 0, "host");
  RunFor(100);
  const std::string before = *Key("coordinator");
  nodes_.erase(1);
  Add(9, 0, "host");
  RunFor(5);
  EXPECT_TRUE(nodes_[9].seat->holds());
  EXPECT_NE(*Key("coordinator"), before);
}

// A stopped process continues after another one with its name took over. It must not take the role back.
TEST_F(SeatTest, AnOldProcessOfTheHoldersNameLeavesTheRoleAlone) {
  Node& old = Add(1, 0, "host");
  RunFor(100);
  GiveView(&old, 5, {1});
  old.hold_calls = true;
  Add(9, 0, "host");
  RunFor(100);
  ASSERT_TRUE(nodes_[9].seat->holds());
  const std::string record = *Key("coordinator");
  Release(&old);
  RunFor(1000);
  EXPECT_EQ(*Key("coordinator"), record);
  EXPECT_FALSE(old.seat->holds());
}

TEST_F(SeatTest, WhoLeavesGivesTheRoleAndTheLeaseBack) {
  StartThree();
  Perform(&nodes_[1], nodes_[1].seat->Resign(now_));
  EXPECT_TRUE(nodes_[1].resigned);
  EXPECT_EQ(nodes_[1].deposed, 1u);
  EXPECT_FALSE(Key("nodes/0000000000000001"));
  RunFor(150);
  EXPECT_TRUE(nodes_[2].seat->holds() || nodes_[3].seat->holds());
}

TEST_F(SeatTest, ANodeThatMayNotWriteIsRefusedOnceAndSaysWhere) {
  Node& node = Add(1, 0);
  nodes_[2].refuse_writes = Code::kInvalidArgument;
  Node& other = Add(2, 1);
  RunFor(2000);
  EXPECT_THAT(node.refused, ::testing::IsEmpty());
  ASSERT_EQ(other.refused.size(), 1u);
  EXPECT_THAT(other.refused[0].message(), HasSubstr("keys below /p%2Fq/run-7/: h1:2379: "));
}

TEST_F(SeatTest, KeysOfAnotherFormatAreRefusedWithBothNamed) {
  (void)store_.Apply(now_, StoreTxn{{}, {{StoreOp::kPut, std::string(kRoot) + "format", "2"}}, {}});
  Node& node = Add(1, 0);
  RunFor(1000);
  ASSERT_EQ(node.refused.size(), 1u);
  EXPECT_EQ(node.refused[0].code(), Code::kUnsupported);
  EXPECT_THAT(node.refused[0].message(),
              HasSubstr("format 2 below /p%2Fq/run-7/, this node writes format 1"));
  EXPECT_FALSE(Key("coordinator"));
}

}  // namespace
}  // namespace ropeteam
