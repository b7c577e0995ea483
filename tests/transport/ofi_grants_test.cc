// SPDX-License-Identifier: Apache-2.0
//
// Keys per peer: granted on request, revoked with the peer, and updated when regions are added and removed.

#include "transport/ofi/grants.h"

#include <gmock/gmock.h>

#include <cstring>
#include <map>

namespace ropeteam::ofi {
namespace {

using testing::UnorderedElementsAre;

constexpr uint64_t kRegion = 77, kOtherRegion = 78;

class OfiGrants : public testing::Test {
 protected:
  Grants::Registration Register(uint64_t key) {
    keys_.insert(key);
    return Grants::Registration(this, [key](OfiGrants* test) { test->keys_.erase(key); });
  }
  bool Knocks(uint64_t instance, const std::string& source = "") {
    Knock knock;
    knock.magic = kKnockMagic;
    knock.instance = instance;
    std::memcpy(knock.source, source.data(), source.size());
    return grants_.OnKnock(knock);
  }
  bool Answers(uint64_t instance) {
    return Answered(grants_.answers().data() + AnswerPlace(instance), instance);
  }

  std::set<uint64_t> keys_;  // registered
  bool refuse_ = false;
  Grants grants_{[this](void*, uint64_t, uint64_t key) -> Result<Grants::Registration> {
    if (refuse_) return Error(Code::kNoSpace, "no");
    return Register(key);
  }};
  char memory_[8] = {};
};

TEST_F(OfiGrants, EachPeerHasKeysOfItsOwnAsLongAsItHasAccess) {
  ASSERT_TRUE(grants_.AddRegion(kRegion, memory_, sizeof memory_).ok());
  EXPECT_TRUE(keys_.empty());
  EXPECT_TRUE(Knocks(1));
  EXPECT_TRUE(Knocks(2));
  EXPECT_TRUE(Knocks(1)) << "it asks again over another connection";
  EXPECT_THAT(keys_, UnorderedElementsAre(KeyOf(kRegion, 1), KeyOf(kRegion, 2)));
  EXPECT_TRUE(Answers(1));
  EXPECT_FALSE(Answers(3));
  grants_.Revoke(1);
  EXPECT_THAT(keys_, UnorderedElementsAre(KeyOf(kRegion, 2)));
  EXPECT_FALSE(Answers(1));
  EXPECT_FALSE(Knocks(1)) << "it was shut out";
  grants_.Readmit(1);
  EXPECT_FALSE(Answers(1)) << "before it has asked";
  EXPECT_TRUE(Knocks(1));
  EXPECT_EQ(keys_.size(), 2u);
}

TEST_F(OfiGrants, WhoIsNotNamedGetsNothingAndLeavesNoTrace) {
  ASSERT_TRUE(grants_.AddRegion(kRegion, memory_, sizeof memory_).ok());
  EXPECT_TRUE(Knocks(1)) << "before anybody was named";
  grants_.Admit({2});
  EXPECT_TRUE(keys_.empty()) << "it lost its access";
  EXPECT_FALSE(Answers(1));
  for (uint64_t instance = 3; instance < 100'000; ++instance)
    ASSERT_FALSE(Knocks(instance, "127.0.0.1:" + std::to_string(instance)));
  EXPECT_EQ(grants_.peers(), 0u);
  EXPECT_TRUE(Knocks(2));
  grants_.Admit({1, 2});
  EXPECT_TRUE(Knocks(1)) << "named again";
  EXPECT_THAT(keys_, UnorderedElementsAre(KeyOf(kRegion, 1), KeyOf(kRegion, 2)));
}

// Key and first eight message bytes from appendix A of the SipHash paper. Checked with `openssl mac SIPHASH`.
TEST(OfiKeys, AreMadeBySipHash) {
  EXPECT_EQ(SipHash24(0x0706050403020100, 0x0f0e0d0c0b0a0908, 0x0706050403020100), 0x93f5f5799a932462u);
}

TEST_F(OfiGrants, OneThatIsShutOutBeforeItEverAskedStaysOut) {
  grants_.Revoke(9);
  EXPECT_FALSE(Knocks(9));
  EXPECT_FALSE(Answers(9));
}

TEST_F(OfiGrants, RegionsComeAndGoForAllPeers) {
  EXPECT_TRUE(Knocks(1));
  ASSERT_TRUE(grants_.AddRegion(kRegion, memory_, sizeof memory_).ok());
  ASSERT_TRUE(grants_.AddRegion(kOtherRegion, memory_, sizeof memory_).ok());
  EXPECT_THAT(keys_, UnorderedElementsAre(KeyOf(kRegion, 1), KeyOf(kOtherRegion, 1)));
  grants_.RemoveRegion(kRegion);
  EXPECT_THAT(keys_, UnorderedElementsAre(KeyOf(kOtherRegion, 1)));
}

TEST_F(OfiGrants, APeerWhoseKeysCannotBeRegisteredIsNotAnswered) {
  ASSERT_TRUE(grants_.AddRegion(kRegion, memory_, sizeof memory_).ok());
  refuse_ = true;
  EXPECT_FALSE(Knocks(1));
  EXPECT_FALSE(Answers(1));
  refuse_ = false;
  EXPECT_TRUE(Knocks(1)) << "it may ask again";
}

TEST_F(OfiGrants, ConnectionsBelongToThePeerThatNamedThemLast) {
  EXPECT_TRUE(Knocks(1, "127.0.0.1:1000"));
  EXPECT_TRUE(Knocks(2, "127.0.0.1:2000"));
  EXPECT_TRUE(grants_.Owns("127.0.0.1:1000"));
  EXPECT_FALSE(grants_.Owns("127.0.0.1:3000"));
  EXPECT_TRUE(Knocks(2, "127.0.0.1:1000")) << "the port has another owner now";
  grants_.Revoke(1);
  EXPECT_TRUE(grants_.Owns("127.0.0.1:1000"));
  grants_.Revoke(2);
  EXPECT_FALSE(grants_.Owns("127.0.0.1:1000"));
  EXPECT_FALSE(grants_.Owns("127.0.0.1:2000"));
}

TEST_F(OfiGrants, WhatIsNoKnockIsIgnored) {
  Knock knock;
  knock.instance = 5;
  EXPECT_FALSE(grants_.OnKnock(knock));
  EXPECT_FALSE(Knocks(0));
  EXPECT_FALSE(Answers(5));
}

}  // namespace
}  // namespace ropeteam::ofi
