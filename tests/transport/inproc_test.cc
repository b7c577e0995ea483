// SPDX-License-Identifier: Apache-2.0
//
// The faults that the in-process fabric can inject. What it shares with the other fabrics is in
// conformance_test.cc.

#include "transport/inproc/inproc_transport.h"

#include <gmock/gmock.h>

#include <cstring>
#include <vector>

namespace ropeteam {
namespace {

class InprocTest : public testing::Test {
 protected:
  InprocTest() {
    local_ = a_->RegisterRegion(source_.data(), source_.size()).value();
    const RegionId region = b_->RegisterRegion(target_.data(), target_.size()).value();
    peer_ = a_->Connect(b_->LocalAddress()).value();
    remote_ = a_->ImportRegion(peer_, b_->ExportRegion(region)).value();
  }
  void Put(uint64_t context) {
    ASSERT_TRUE(a_->Put(peer_, local_, context, remote_, context, 1, context).ok());
  }
  std::vector<Completion> PollAll() {
    std::vector<Completion> out(64);
    out.resize(a_->Poll(out.data(), out.size()));
    return out;
  }

  std::shared_ptr<InprocFabric> fabric_ = InprocFabric::Create();
  std::vector<char> source_ = std::vector<char>(64, 's'), target_ = std::vector<char>(64, 't');
  std::unique_ptr<Transport> a_ = fabric_->CreateTransport("a").value(),
                             b_ = fabric_->CreateTransport("b").value();
  RegionId local_ = 0;
  PeerId peer_ = 0;
  RemoteRegionId remote_ = 0;
};

TEST_F(InprocTest, NothingMovesBeforePoll) {
  Put(3);
  EXPECT_EQ(target_[3], 't');
  EXPECT_EQ(PollAll().size(), 1u);
  EXPECT_EQ(target_[3], 's');
}

TEST_F(InprocTest, FailNextFailsThatManyAndMovesNothing) {
  fabric_->FailNext("b", 2, Code::kLinkFailed);
  for (uint64_t i = 0; i < 3; i++) Put(i);
  const auto done = PollAll();
  ASSERT_EQ(done.size(), 3u);
  EXPECT_EQ(done[0].code, Code::kLinkFailed);
  EXPECT_EQ(done[1].code, Code::kLinkFailed);
  EXPECT_EQ(done[2].code, Code::kOk);
  EXPECT_EQ(std::string(target_.data(), 4), "ttst");
  EXPECT_EQ(a_->counters().failures, 2u);
}

TEST_F(InprocTest, HeldOperationsWaitForRelease) {
  fabric_->Hold("b");
  Put(0);
  EXPECT_TRUE(PollAll().empty());
  EXPECT_EQ(target_[0], 't');
  fabric_->Release("b");
  ASSERT_EQ(PollAll().size(), 1u);
  EXPECT_EQ(target_[0], 's');
}

TEST_F(InprocTest, LimitPerPollSpreadsTheWork) {
  fabric_->LimitPerPoll(2);
  for (uint64_t i = 0; i < 5; i++) Put(i);
  EXPECT_EQ(PollAll().size(), 2u);
  EXPECT_EQ(PollAll().size(), 2u);
  EXPECT_EQ(PollAll().size(), 1u);
}

TEST_F(InprocTest, AKilledTransportMakesNoProgress) {
  Put(0);
  fabric_->Kill("a");
  EXPECT_TRUE(PollAll().empty());
  EXPECT_EQ(target_[0], 't');
  EXPECT_TRUE(fabric_->CreateTransport("a").ok());
}

TEST_F(InprocTest, TwoLivingOfOneNameAreRefused) {
  EXPECT_EQ(fabric_->CreateTransport("b").status().code(), Code::kAlreadyExists);
  EXPECT_EQ(fabric_->CreateTransport("").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(fabric_->CreateTransport(std::string(256, 'x')).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace ropeteam
