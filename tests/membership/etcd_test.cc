// SPDX-License-Identifier: Apache-2.0
//
// The client, and members over it, against the distribution's etcd on loopback. Skipped with a reason if it
// is not installed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "membership/etcd/client.h"
#include "membership/etcd/etcd.h"
#include "membership/messages.h"
#include "membership/standalone/loop.h"
#include "tests/membership/etcd_server.h"
#include "tests/membership/standalone_cluster.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class EtcdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = EtcdServer::Missing(); !missing.empty()) GTEST_SKIP() << missing;
  }
};

// A client that waits for its answers.
class Waiting {
 public:
  explicit Waiting(const EtcdConfig& config)
      : client(config,
               {[this](uint64_t id, Result<StoreAnswer> answer) {
                  const std::lock_guard lock(mutex_);
                  answers_.emplace(id, std::move(answer));
                  changed_.notify_all();
                },
                [this](StoreLease, int64_t ttl_s) {
                  const std::lock_guard lock(mutex_);
                  kept_.push_back(ttl_s);
                  changed_.notify_all();
                },
                [this](uint64_t watch, int64_t, const std::string* value) {
                  const std::lock_guard lock(mutex_);
                  events_.push_back(std::to_string(watch) + (value != nullptr ? " " + *value : " gone"));
                  changed_.notify_all();
                },
                [this](uint64_t watch, const std::string&) {
                  const std::lock_guard lock(mutex_);
                  events_.push_back(std::to_string(watch) + " ended");
                  changed_.notify_all();
                }}) {}
  Result<StoreAnswer> Ask(const StoreRequest& request) {
    const uint64_t id = ++calls_;
    client.Call(id, request, 1000);
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return answers_.contains(id); }))
      return Error(Code::kInternal, "no answer at all");
    return answers_.at(id);
  }
  // Repeats until it is answered, because the endpoint may change.
  Result<StoreAnswer> AskUntilAnswered(const StoreRequest& request) {
    Result<StoreAnswer> answer = Ask(request);
    for (int i = 0; i < 100 && !answer.ok() && answer.status().code() == Code::kUnavailable; ++i)
      answer = Ask(request);
    return answer;
  }
  bool WaitForEvent(const std::string& event) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] {
      return std::find(events_.begin(), events_.end(), event) != events_.end();
    });
  }
  // Sends a keep-alive and returns the time to live in its answer.
  int64_t Keep(StoreLease lease) {
    client.KeepAlive(lease);
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !kept_.empty(); })) return -1;
    const int64_t ttl_s = kept_.back();
    kept_.clear();
    return ttl_s;
  }

 private:
  uint64_t calls_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Result<StoreAnswer>> answers_;
  std::vector<int64_t> kept_;
  std::vector<std::string> events_;

 public:
  EtcdClient client;  // destroyed first
};

EtcdConfig At(const std::string& endpoint) {
  EtcdConfig config;
  config.endpoints = {endpoint};
  config.prefix = "p";
  return config;
}
StoreTxn Put(const std::string& key, const std::string& value, StoreLease lease = 0) {
  return {{}, {{StoreOp::kPut, key, value, lease}}, {}};
}
StoreTxn Get(const std::string& key) { return {{}, {{StoreOp::kGet, key}}, {}}; }

TEST(EtcdUrlTest, AUrlSaysWhereEtcdIs) {
  const Result<EtcdConfig> config = ParseEtcdUrl("etcd://ada@h1:2379,[::1]:2380/a/b@c/");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  EXPECT_EQ(config.value().endpoints, (std::vector<std::string>{"h1:2379", "[::1]:2380"}));
  EXPECT_EQ(config.value().prefix, "a/b@c");
  EXPECT_EQ(config.value().user, "ada");
  EXPECT_FALSE(config.value().tls);
  EXPECT_TRUE(ParseEtcdUrl("etcds://h:1/p").value().tls);
  EXPECT_EQ(EtcdName(config.value()), "etcd at h1:2379,[::1]:2380");
  for (const char* bad :
       {"http://h:1/p", "etcd://h:1", "etcd://h:1/", "etcd://h/p", "etcd://h:/p", "etcd://h:1,/p",
        "etcd://:1/p", "etcd://h:x/p", "etcd://::1:2379/p", "etcd://[::1:2379/p", "etcd://h:0/p",
        "etcd://h:65536/p", "etcd://h:99999999999999999999/p"})
    EXPECT_THAT(ParseEtcdUrl(bad).status().message(), HasSubstr(bad));
  EXPECT_THAT(ParseEtcdUrl("etcd://ada:pass@h:1/p").status().message(), HasSubstr("--etcd-password-file"));
  for (const char* secret : {"etcd://ada:pass@h:1/p", "etcd://ada:pass@h:1", "etcd://ada:pa/pass@h:1/p",
                             "x://a:pass@h:1/p", "etcd://a:pass@h/p"})
    EXPECT_EQ(ParseEtcdUrl(secret).status().message().find("pass@"), std::string::npos) << secret;
  std::string many = "etcd://h:1";
  for (int i = 0; i < 16; ++i) many += ",h:1";
  EXPECT_THAT(ParseEtcdUrl(many + "/p").status().message(), HasSubstr("17 endpoints of etcd, limit 16"));
}

TEST(EtcdClusterTest, AnotherClusterCountsOnceTheFirstIsNowhereOrSilentForLong) {
  constexpr uint64_t kFirst = 7, kOther = 8;
  constexpr TimeUs kStart = 1'000'000'000;
  OneCluster cluster(3);
  EXPECT_TRUE(cluster.Counts(1, kFirst, 0));
  EXPECT_FALSE(cluster.Counts(kStart, kOther, 1)) << "however long ago the first one answered";
  EXPECT_FALSE(cluster.Counts(kStart + kOtherClusterUs - 1, kOther, 2));
  EXPECT_TRUE(cluster.Counts(kStart + kOtherClusterUs - 1, kFirst, 0)) << "it lives";
  EXPECT_FALSE(cluster.Counts(kStart + kOtherClusterUs, kOther, 1)) << "the time begins again";
  EXPECT_TRUE(cluster.Counts(kStart + 2 * kOtherClusterUs, kOther, 1)) << "and is over";
  EXPECT_FALSE(cluster.Counts(kStart + 2 * kOtherClusterUs, kFirst, 0));
  EXPECT_FALSE(cluster.Counts(kStart + 2 * kOtherClusterUs, kFirst, 2));
  EXPECT_FALSE(cluster.Counts(kStart + 2 * kOtherClusterUs, kFirst, 2));
  EXPECT_TRUE(cluster.Counts(kStart + 2 * kOtherClusterUs, kFirst, 1)) << "all endpoints are of that one";
}

TEST_F(EtcdTest, TransactionsLeasesAndTheWatchDoWhatTheSeatNeeds) {
  EtcdServer server;
  server.Start();
  EtcdConfig config = At(server.endpoint());
  config.endpoints.insert(config.endpoints.begin(), "127.0.0.1:1");  // nothing listens: the next is used
  Waiting etcd(config);
  const auto grant = etcd.AskUntilAnswered(StoreGrant{2});
  ASSERT_TRUE(grant.ok()) << grant.status().ToString();
  const StoreLease lease = grant.value().lease;
  const std::string odd("\0\xff'\n", 4);
  StoreTxn claim{{{"k", StoreCompare::kAbsent}},
                 {{StoreOp::kPut, "k", odd, lease}, {StoreOp::kGet, "k"}, {StoreOp::kDeletePrefix, "d/"}},
                 {{StoreOp::kGet, "k"}}};
  const auto claimed = etcd.Ask(claim);
  ASSERT_TRUE(claimed.ok()) << claimed.status().ToString();
  EXPECT_TRUE(claimed.value().succeeded);
  EXPECT_EQ(claimed.value().found.at(1).value, odd);
  EXPECT_EQ(claimed.value().found.at(1).revision, claimed.value().revision);
  EXPECT_FALSE(etcd.Ask(claim).value().succeeded);
  EXPECT_TRUE(etcd.Ask(StoreTxn{{{"k", StoreCompare::kValue, odd}}, {}, {}}).value().succeeded);
  EXPECT_FALSE(etcd.Ask(StoreTxn{{{"k", StoreCompare::kValue, "x"}}, {}, {}}).value().succeeded);
  StoreCompare written{"k", StoreCompare::kRevision, {}, claimed.value().revision};
  EXPECT_TRUE(etcd.Ask(StoreTxn{{written}, {}, {}}).value().succeeded);
  written.key = "none";
  EXPECT_FALSE(etcd.Ask(StoreTxn{{written}, {}, {}}).value().succeeded);
  written.revision = 0;
  EXPECT_TRUE(etcd.Ask(StoreTxn{{written}, {}, {}}).value().succeeded);
  ASSERT_TRUE(etcd.Ask(Put("d/1", "a")).ok());
  ASSERT_TRUE(etcd.Ask(Put("d/2", "b")).ok());
  EXPECT_EQ(etcd.Ask(StoreTxn{{}, {{StoreOp::kCountPrefix, "d/"}}, {}}).value().found.at(0).count, 2);

  EXPECT_EQ(etcd.Keep(lease), 2);
  EXPECT_EQ(etcd.Keep(lease), 2) << "on the same stream";
  etcd.client.Watch(7, "k", claimed.value().revision);
  EXPECT_TRUE(etcd.WaitForEvent("7 " + odd)) << "from its revision on, which is past";
  ASSERT_TRUE(etcd.Ask(StoreRevoke{lease}).ok());
  EXPECT_TRUE(etcd.WaitForEvent("7 gone"));
  EXPECT_EQ(etcd.Keep(lease), 0);
  EXPECT_EQ(etcd.Ask(Put("k", "x", lease)).status().code(), Code::kNotFound);
  EXPECT_FALSE(etcd.Ask(Get("k")).value().found.at(0).present);

  ASSERT_TRUE(server.Control("compact " + std::to_string(etcd.Ask(Put("k", "y")).value().revision)));
  etcd.client.Watch(8, "k", claimed.value().revision);
  EXPECT_TRUE(etcd.WaitForEvent("8 ended")) << "compacted";
  etcd.client.Watch(9, "k", etcd.Ask(Get("k")).value().revision + 1);
  ASSERT_TRUE(etcd.Ask(Put("k", "z")).ok());
  EXPECT_TRUE(etcd.WaitForEvent("9 z"));
  const auto large = etcd.Ask(Put("k", std::string(1'600'000, 'x')));
  EXPECT_EQ(large.status().code(), Code::kInvalidArgument) << large.status().ToString();
  server.Kill();
  EXPECT_TRUE(etcd.WaitForEvent("9 ended"));
  EXPECT_EQ(etcd.Ask(Get("k")).status().code(), Code::kUnavailable);
}

TEST_F(EtcdTest, TheUsersTokenIsRenewedAndAWrongPasswordSaidSo) {
  EtcdServer server;
  server.Start();
  for (const char* words :
       {"user add root:r", "role add root", "user grant-role root root", "user add ada:pw", "role add job",
        "role grant-permission job --prefix=true readwrite /p/", "user grant-role ada job", "auth enable"})
    ASSERT_TRUE(server.Control(words) || std::string(words) == "role add root") << words;
  EtcdConfig config = At(server.endpoint());
  config.user = "ada";
  config.password = "pw";
  Waiting etcd(config);
  ASSERT_TRUE(etcd.AskUntilAnswered(Put("/p/k", "1")).ok());
  EXPECT_EQ(etcd.Ask(Put("/q/k", "1")).status().code(), Code::kInvalidArgument) << "not this user's";
  const auto lease = etcd.AskUntilAnswered(StoreGrant{5});
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(etcd.Keep(lease.value().lease), 5);
  // This invalidates all tokens, as their expiry would.
  ASSERT_TRUE(server.Control("--user root:r auth disable") && server.Control("auth enable"));
  const auto answer = etcd.AskUntilAnswered(Put("/p/k", "2"));
  EXPECT_TRUE(answer.ok()) << answer.status().ToString();
  config.password = "wrong";
  const Status wrong = Waiting(config).Ask(Put("/p/k", "3")).status();
  EXPECT_EQ(wrong.code(), Code::kInvalidArgument);
  EXPECT_THAT(wrong.message(), HasSubstr("user ada"));
  config.user.clear();
  const Status nobody = Waiting(config).Ask(Put("/p/k", "3")).status();
  EXPECT_EQ(nobody.code(), Code::kInvalidArgument) << "to try again is of no use";
  EXPECT_THAT(nobody.message(), HasSubstr("etcd requires a user: etcd://USER@"));
}

TEST_F(EtcdTest, OverTlsBothSidesShowACertificate) {
  EtcdServer server({}, true);
  server.Start();
  EtcdConfig config = At(server.endpoint());
  config.tls = true;
  config.ca = server.folder() + "/ca.pem";
  config.cert = server.folder() + "/node.pem";
  config.key = server.folder() + "/node.key";
  const auto answer = Waiting(config).AskUntilAnswered(Put("k", "1"));
  EXPECT_TRUE(answer.ok()) << answer.status().ToString();
  EtcdConfig without = config;
  without.cert.clear();
  without.key.clear();
  EXPECT_EQ(Waiting(without).Ask(Put("k", "1")).status().code(), Code::kUnavailable);
  EtcdConfig other = config;
  other.ca.clear();  // the system does not trust the authority of etcd's certificate
  EXPECT_EQ(Waiting(other).Ask(Put("k", "1")).status().code(), Code::kUnavailable);
  other.ca = "/dev/null";
  EXPECT_EQ(Waiting(other).Ask(Put("k", "1")).status().code(), Code::kUnavailable)
      << "nobody is trusted then";
  other = config;
  other.tls = false;
  EXPECT_EQ(Waiting(other).Ask(Put("k", "1")).status().code(), Code::kUnavailable);
}

// Members in this process and in others, over one etcd.
class EtcdMembersTest : public EtcdTest {
 protected:
  void SetUp() override {
    EtcdTest::SetUp();
    if (IsSkipped()) return;
    server_.Start();
  }
  std::string Url() const { return "etcd://" + server_.endpoint() + "/test"; }
  TestMember& Start(const std::string& name, uint32_t ordinal, NodeId id, uint32_t expected) {
    MembershipConfig config = StandaloneConfig("");
    config.coordinator_addresses.clear();
    config.coordinator_listen = OwnHost() + ":0";
    config.nodes_expected = expected;
    members_.push_back(std::make_unique<TestMember>(CreateEtcdMembership(config, *ParseEtcdUrl(Url())),
                                                    StandaloneMember(name, ordinal, id)));
    const Status status = members_.back()->Start();
    EXPECT_TRUE(status.ok()) << status.ToString();
    return *members_.back();
  }
  static bool WaitForLease(TestMember& member) {
    return member.WaitForLease([](TimeUs until) { return until > Loop::Now(); });
  }

  EtcdServer server_;
  std::vector<std::unique_ptr<TestMember>> members_;
};

TEST_F(EtcdMembersTest, AnotherNodeTakesOverWhenTheCoordinatorIsKilledAndWhenOneLeaves) {
  MemberProcess first(Url(), "a", 0, 1, 3);
  ASSERT_TRUE(first.WaitForLine("listening"));
  ASSERT_TRUE(first.WaitForLine("registered"));
  TestMember& b = Start("b", 1, 2, 3);
  TestMember& c = Start("c", 2, 3, 3);
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));
  ASSERT_TRUE(WaitForLease(b));
  // A new holder cannot be deposed for 2 s; this waits longer.
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  const View before = b.LastView();
  const TimeUs killed = Loop::Now();
  first.Kill();
  ASSERT_TRUE(b.WaitForNames({"b", "c"}));
  const TimeUs seen = Loop::Now();
  ASSERT_TRUE(c.WaitForNames({"b", "c"}));
  EXPECT_GT(b.LastView().epoch, before.epoch);
  ASSERT_TRUE(b.WaitForLease([&](TimeUs until) { return until > seen + 800'000; }));
  RecordProperty("view_ms", static_cast<int>((seen - killed) / 1000));
  std::printf("coordinator killed: view after %llu ms, lease after %llu ms\n",
              static_cast<unsigned long long>((seen - killed) / 1000),
              static_cast<unsigned long long>((Loop::Now() - killed) / 1000));
  // A process with its name starts at another address.
  MemberProcess again(Url(), "a", 0, 9, 3);
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));
  // Both leave in good order, one after the other, whichever is the coordinator.
  members_[0]->Stop();
  ASSERT_TRUE(c.WaitForNames({"a", "c"}));
  members_[1]->Stop();
  EXPECT_TRUE(again.WaitForLine("members 1"));
  EXPECT_TRUE(b.orderly() && c.orderly());
}

TEST_F(EtcdMembersTest, WhileEtcdIsAwayNobodyIsDeclaredDeadAndAllGoesOnWhenItIsBack) {
  TestMember& a = Start("a", 0, 1, 2);
  TestMember& b = Start("b", 1, 2, 2);
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  ASSERT_TRUE(WaitForLease(a) && WaitForLease(b));
  const View before = a.LastView();
  server_.Kill();
  for (int i = 0; i < 40 && b.HasLease(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(b.HasLease());
  EXPECT_EQ(a.LastView(), before);
  server_.Start();
  ASSERT_TRUE(WaitForLease(a) && WaitForLease(b));
  EXPECT_EQ(IdsOf(a.LastView()), IdsOf(before));

  // etcd is stopped for longer than its leases last, so they end at SIGCONT.
  server_.Signal(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_FALSE(b.HasLease());
  server_.Signal(SIGCONT);
  ASSERT_TRUE(WaitForLease(a) && WaitForLease(b));
  EXPECT_EQ(IdsOf(a.LastView()), IdsOf(before));

  // etcd loses all its data.
  const Epoch seen = std::max(a.LastView().epoch, b.LastView().epoch);
  server_.Kill();
  server_.Wipe();
  server_.Start();
  ASSERT_TRUE(a.WaitFor([&](const View& view) { return view.epoch > seen && view.members.size() == 2; }));
  ASSERT_TRUE(b.WaitFor([&](const View& view) { return view.epoch > seen && view.members.size() == 2; }));
  ASSERT_TRUE(WaitForLease(a) && WaitForLease(b));
  EXPECT_EQ(IdsOf(a.LastView()), IdsOf(before)) << "the same instances";
  EXPECT_TRUE(a.orderly() && b.orderly());
}

}  // namespace
}  // namespace ropeteam
