// SPDX-License-Identifier: Apache-2.0
//
// Membership over real gRPC in real time, on a loopback host of this process only.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <random>

#include "core/base/log.h"
#include "membership/standalone/acceptor.h"
#include "membership/standalone/membership.grpc.pb.h"
#include "membership/standalone/options.h"
#include "tests/membership/standalone_cluster.h"
#include "tests/membership/tcp_relay.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

class Stopwatch {
 public:
  long ms() const {
    return static_cast<long>(
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start_)
            .count());
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class StandaloneTest : public ::testing::Test {
 protected:
  StandaloneTest() : address_(FreeAddress()), config_(StandaloneConfig(address_)) {}
  void TearDown() override {
    for (const auto& member : members_) EXPECT_TRUE(member->orderly()) << member->self().name;
    // Members without the coordinator stop first, while it still receives their leave messages.
    while (!members_.empty()) members_.pop_back();
  }
  TestMember& Add(const std::string& name, uint32_t ordinal, NodeId id, const MembershipConfig& config) {
    members_.push_back(std::make_unique<TestMember>(config, StandaloneMember(name, ordinal, id)));
    return *members_.back();
  }
  // The first member embeds the coordinator.
  TestMember& Start(const std::string& name, uint32_t ordinal, NodeId id) {
    MembershipConfig config = config_;
    if (members_.empty()) config.coordinator_listen = address_;
    TestMember& member = Add(name, ordinal, id, config);
    const Status status = member.Start();
    EXPECT_TRUE(status.ok()) << status.ToString();
    return member;
  }

  const std::string address_;
  MembershipConfig config_;
  std::vector<std::unique_ptr<TestMember>> members_;
};

TEST_F(StandaloneTest, FourMembersSeeEachOther) {
  config_.nodes_expected = 4;
  const Stopwatch watch;
  for (uint32_t i = 0; i < 4; ++i) Start("n" + std::string(1, static_cast<char>('0' + i)), i, 100 + i);
  for (const auto& member : members_) ASSERT_TRUE(member->WaitForNames({"n0", "n1", "n2", "n3"}));
  RecordProperty("first_view_ms", static_cast<int>(watch.ms()));
  const View view = members_[0]->LastView();
  for (const auto& member : members_) EXPECT_EQ(member->LastView(), view);
  EXPECT_EQ(*view.Find(102), members_[2]->self());  // all bytes are the same
  EXPECT_EQ(view.leader, 100u);
}

TEST_F(StandaloneTest, AMemberThatStopsIsGoneAtOnce) {
  config_.nodes_expected = 3;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  TestMember& c = Start("c", 2, 3);
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));
  const Stopwatch watch;
  c.Stop();
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  std::printf("leave message to view %ld ms\n", watch.ms());
  c.Stop();  // a second call does nothing
}

TEST_F(StandaloneTest, TheCoordinatorsNodeTellsTheOthersBeforeItEnds) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  a.Stop();
  EXPECT_TRUE(b.WaitForNames({"b"}));
  EXPECT_EQ(b.LastView().leader, 2u);
}

TEST_F(StandaloneTest, AKilledProcessIsOutSoonAfterItsConnectionResets) {
  config_.nodes_expected = 3;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  MemberProcess c(address_, "c", 2, 3, 3);
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));
  ASSERT_TRUE(c.WaitForLine("view "));
  const Stopwatch watch;
  c.Kill();
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  const long ms = watch.ms();
  std::printf("kill -9 to view %ld ms\n", ms);
  EXPECT_LT(ms, 1000 + 500);
  EXPECT_TRUE(a.WaitForNames({"a", "b"}));
}

TEST_F(StandaloneTest, AStoppedProcessIsOutAfterDeadAfterAndComesBackAsANewInstance) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  MemberProcess b(address_, "b", 1, 20, 2);
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  const Stopwatch watch;
  b.Signal(SIGSTOP);
  ASSERT_TRUE(a.WaitForNames({"a"}));
  std::printf("silence to view %ld ms\n", watch.ms());
  EXPECT_GE(watch.ms(), 750);
  b.Signal(SIGCONT);
  EXPECT_TRUE(b.WaitForLine("refused stale"));
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  EXPECT_TRUE(a.LastView().Contains(21));
}

TEST_F(StandaloneTest, ASuspectThatIsStoppedIsOutAfterProbeMs) {
  config_.nodes_expected = 2;
  config_.dead_after_ms = 10'000;
  TestMember& a = Start("a", 0, 1);
  MemberProcess b(address_, "b", 1, 2, 2);
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  for (int i = 0; i < 1000; ++i) a.membership().ReportSuspect(2, "put failed");
  b.Signal(SIGSTOP);
  const Stopwatch watch;
  // The first suspicions may have been answered before the signal, so they are repeated, as a failing data
  // path repeats them.
  ASSERT_TRUE(a.WaitFor([&](const View& view) { return view.members.size() == 1; }, 1) || [&] {
    for (int i = 0; i < 200; ++i) {
      a.membership().ReportSuspect(2, "put failed");
      if (a.WaitForNames({"a"}, 50)) return true;
    }
    return false;
  }());
  std::printf("suspicion to view %ld ms\n", watch.ms());
  EXPECT_LT(watch.ms(), 5000);
}

TEST_F(StandaloneTest, ASuspectThatIsAliveStays) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  for (int i = 0; i < 1000; ++i) a.membership().ReportSuspect(2, "put failed");
  // Long enough for a probe to fail and the view to arrive.
  EXPECT_FALSE(a.WaitForNames({"a"}, 600));
  EXPECT_EQ(b.ViewCount(), 1u);
}

TEST_F(StandaloneTest, AMemberThatIsAloneOpensNoPort) {
  config_.coordinator_addresses = {"this-process:0"};
  config_.coordinator_listen = "this-process:0";
  config_.alone = true;
  config_.nodes_expected = 1;
  TestMember& a = Add("a", 0, 1, config_);
  ASSERT_TRUE(a.Start().ok());
  EXPECT_TRUE(a.WaitForNames({"a"}));
  EXPECT_TRUE(a.WaitForLease([](TimeUs valid_until) { return valid_until > 0; }));
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t length = sizeof listens;
    (void)getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);  // fails for what is no socket
    EXPECT_EQ(listens, 0) << fd;
  }
}

TEST_F(StandaloneTest, TheCoordinatorsProcessDiesAndReturnsUnderItsName) {
  auto coordinator = std::make_unique<MemberProcess>(address_, "a", 0, 10, 3, /*embed=*/true);
  TestMember& b = Add("b", 1, 2, config_);
  TestMember& c = Add("c", 2, 3, config_);
  ASSERT_TRUE(b.Start().ok());
  ASSERT_TRUE(c.Start().ok());
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));
  ASSERT_TRUE(c.WaitForNames({"a", "b", "c"}));
  const Epoch before = b.LastView().epoch;
  coordinator->Kill();
  const Stopwatch watch;
  coordinator = std::make_unique<MemberProcess>(address_, "a", 0, 11, 3, /*embed=*/true);
  ASSERT_TRUE(b.WaitFor([](const View& view) { return view.Contains(11); }));
  std::printf("coordinator restart to view %ld ms\n", watch.ms());
  ASSERT_TRUE(c.WaitFor([](const View& view) { return view.Contains(11); }));
  const View after = b.LastView();
  EXPECT_GT(after.epoch, before);
  EXPECT_EQ(after.members.size(), 3u);
  EXPECT_EQ(after.leader, 2u);  // the oldest of the members that stayed
  EXPECT_EQ(c.ViewCount(), 2u) << "its return showed itself in one view";
}

TEST_F(StandaloneTest, MembersMayStartBeforeTheCoordinator) {
  config_.nodes_expected = 2;
  TestMember& b = Add("b", 1, 2, config_);
  ASSERT_TRUE(b.Start().ok());
  EXPECT_FALSE(b.WaitFor([](const View& view) { return view.epoch != 0; }, 300));
  MembershipConfig embedding = config_;
  embedding.coordinator_listen = address_;
  TestMember& a = Add("a", 0, 1, embedding);
  ASSERT_TRUE(a.Start().ok());
  EXPECT_TRUE(b.WaitForNames({"a", "b"}));
  std::swap(members_[0], members_[1]);
}

TEST_F(StandaloneTest, StoppingWithoutACoordinatorDoesNotWaitForOne) {
  TestMember& a = Add("a", 0, 1, config_);
  ASSERT_TRUE(a.Start().ok());
  const Stopwatch watch;
  a.Stop();
  EXPECT_LT(watch.ms(), 2000);
}

TEST_F(StandaloneTest, APathThatDiesSilentlyIsLeftForANewConnection) {
  config_.nodes_expected = 2;
  config_.dead_after_ms = 4000;
  TestMember& a = Start("a", 0, 1);
  TcpRelay relay(OwnHost(3), address_);
  MembershipConfig through = config_;
  through.coordinator_addresses = {relay.address()};
  TestMember& b = Add("b", 1, 2, through);
  ASSERT_TRUE(b.Start().ok());
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  relay.FreezeConnections();  // neither bytes nor a reset pass, as when a switch dies
  ASSERT_TRUE(relay.WaitForConnections(2, TestMember::kWaitMs));
  // The new connection works: it brings a new view.
  TestMember& c = Add("c", 2, 3, config_);
  ASSERT_TRUE(c.Start().ok());
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));
  EXPECT_EQ(b.ViewCount(), 2u) << "it never left";
}

TEST_F(StandaloneTest, AMismatchIsRefusedWithBothSides) {
  config_.nodes_expected = 1;
  Start("a", 0, 1);
  MembershipConfig other = config_;
  other.job = "another-job";
  TestMember& b = Add("b", 1, 2, other);
  ASSERT_TRUE(b.Start().ok());
  Status status;
  ASSERT_TRUE(b.WaitForRefusal(&status));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("another-job"));
  EXPECT_THAT(status.message(), HasSubstr("test-job"));
  EXPECT_THAT(status.message(), HasSubstr(address_));
}

TimeUs BootTime() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<TimeUs>(now.tv_sec) * 1'000'000 + static_cast<TimeUs>(now.tv_nsec) / 1000;
}

TEST_F(StandaloneTest, LeasesAreRenewedAndGivenBackInTheEnd) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  const TimeUs begin = BootTime();
  TimeUs first = 0;
  ASSERT_TRUE(b.WaitForLease([&](TimeUs until) { return (first = until) != 0; }));
  EXPECT_LE(first, BootTime() + LeaseMs(config_.dead_after_ms) * 1000u);
  EXPECT_GE(first, begin);
  ASSERT_TRUE(b.WaitForLease([&](TimeUs until) { return until > first; }));
  ASSERT_TRUE(a.WaitForLease([](TimeUs until) { return until != 0; }));
  b.Stop();
  EXPECT_TRUE(b.WaitForLease([](TimeUs until) { return until == 0; }, 1));
}

TEST_F(StandaloneTest, TheJobsSettingsReachANodeThatNamedNoneAndRefuseOneThatNamedOthers) {
  config_.nodes_expected = 2;
  config_.settings = {.replicas = 2, .keep_steps = 7, .nodes = 3};
  config_.named = {.replicas = true, .keep_steps = true, .nodes = true};
  const JobSettings job = config_.settings;
  Start("a", 0, 1);
  MembershipConfig silent = config_;
  silent.settings = {.replicas = 0, .keep_steps = 2, .nodes = 1};
  silent.named = {};
  TestMember& b = Add("b", 1, 2, silent);
  ASSERT_TRUE(b.Start().ok());
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  EXPECT_EQ(b.LastView().settings, job);
  silent.named.replicas = true;
  TestMember& c = Add("c", 2, 3, silent);
  ASSERT_TRUE(c.Start().ok());
  Status status;
  ASSERT_TRUE(c.WaitForRefusal(&status));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("node c was given --replicas 0"));
  EXPECT_THAT(status.message(), HasSubstr("--replicas 2 (from the coordinator's node a"));
}

TEST_F(StandaloneTest, AReplacedInstanceIsToldSo) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  TestMember& old = Start("b", 1, 2);
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  TestMember& fresh = Start("b", 1, 3);
  ASSERT_TRUE(a.WaitFor([](const View& view) { return view.Contains(3) && !view.Contains(2); }));
  Status status;
  ASSERT_TRUE(old.WaitForRefusal(&status));
  EXPECT_EQ(status.code(), Code::kAlreadyExists);
  EXPECT_TRUE(fresh.WaitForNames({"a", "b"}));
}

TEST_F(StandaloneTest, TheViewHasTheProtocolVersionOfEachMember) {
  Start("a", 0, 1);
  MembershipConfig newer = config_;
  newer.protocol_version = 2;
  newer.protocol_oldest = 1;
  ASSERT_TRUE(Add("b", 1, 2, newer).Start().ok());
  for (const auto& member : members_) {
    ASSERT_TRUE(member->WaitForNames({"a", "b"}));
    const View view = member->LastView();
    EXPECT_EQ(view.Find(1)->protocol, 1u);
    EXPECT_EQ(view.Find(2)->protocol, 2u);
    EXPECT_EQ(view.protocol(), 1u) << "what they speak";
  }
}

TEST_F(StandaloneTest, APortInUseIsAnErrorThatNamesTheAddress) {
  Start("a", 0, 1);
  MembershipConfig second = config_;
  second.coordinator_listen = address_;
  TestMember member(second, StandaloneMember("b", 1, 2));
  const Status status = member.Start();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr(address_));
  EXPECT_THAT(status.message(), HasSubstr("in use"));
}

TEST_F(StandaloneTest, BadArgumentsAreRefusedAtStart) {
  const auto start = [](MembershipConfig config, Member member) {
    config.coordinator_listen = config.coordinator_addresses.at(0);
    return TestMember(config, member).Start();
  };
  const Member good = StandaloneMember("a", 0, 1);
  MembershipConfig config = config_;
  config.coordinator_addresses = {"no.such.host.invalid:7000"};
  EXPECT_THAT(start(config, good).message(), HasSubstr("no.such.host.invalid"));
  config.coordinator_addresses = {"192.0.2.1:7000"};  // a documentation address, not of this host
  EXPECT_EQ(start(config, good).code(), Code::kIo);
  config.coordinator_addresses = {"7000"};
  EXPECT_EQ(start(config, good).code(), Code::kInvalidArgument);
  EXPECT_EQ(start(config_, StandaloneMember(std::string(64, 'x'), 0, 1)).code(), Code::kInvalidArgument);
  EXPECT_EQ(start(config_, StandaloneMember("a", 0, kNoNode)).code(), Code::kInvalidArgument);
}

// Connects to host:port; -1: nothing listens there.
int Connect(const std::string& host, const std::string& address) {
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + address.rfind(':') + 1)));
  inet_pton(AF_INET, host.c_str(), &to.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) return fd;
  close(fd);
  return -1;
}

TEST_F(StandaloneTest, StrangersTakeNoMembersPlaceAndKeepNobodyOut) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  ASSERT_TRUE(a.WaitForNames({"a", "b"}));
  std::atomic<int> lost{0};
  SetLogSink(
      [&lost](LogLevel, std::string_view line) { lost += line.find("lost") != std::string_view::npos; },
      LogLevel::kWarning);
  const int first = Connect(OwnHost(), address_);
  std::vector<int> strangers;
  while (strangers.size() < 2 * kStrangersOfAddressMax) strangers.push_back(Connect(OwnHost(), address_));
  char byte = 0;
  while (recv(first, &byte, 1, 0) > 0) continue;  // ends because it is the oldest, and has to make room
  Start("c", 2, 3);
  EXPECT_TRUE(a.WaitForNames({"a", "b", "c"}));
  EXPECT_TRUE(b.WaitForNames({"a", "b", "c"}));
  SetLogSink(nullptr, LogLevel::kWarning);
  EXPECT_EQ(lost, 0) << "no member's connection made room";
  close(first);
  for (const int stranger : strangers) close(stranger);
}

TEST_F(StandaloneTest, OnlyTheAddressItWasToldIsListenedOn) {
  Start("a", 0, 1);
  const int told = Connect(OwnHost(1), address_);
  EXPECT_GE(told, 0);
  close(told);
  EXPECT_EQ(Connect(OwnHost(2), address_), -1);
  EXPECT_EQ(Connect("127.0.0.1", address_), -1);
}

TEST_F(StandaloneTest, GarbageOnThePortHarmsNobody) {
  config_.nodes_expected = 2;
  TestMember& a = Start("a", 0, 1);
  TestMember& b = Start("b", 1, 2);
  ASSERT_TRUE(b.WaitForNames({"a", "b"}));
  std::mt19937_64 random(7);
  std::vector<int> connections;
  for (int i = 0; i < 40; ++i) {
    const int fd = Connect(OwnHost(), address_);
    ASSERT_GE(fd, 0);
    std::string bytes = i % 4 == 0   ? "GET / HTTP/1.1\r\n\r\n"
                        : i % 4 == 1 ? "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                                     : "";
    for (uint64_t left = random() % 100'000; left > 0; --left) bytes += static_cast<char>(random());
    (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);  // the server may close it
    connections.push_back(fd);
  }
  TestMember& c = Start("c", 2, 3);
  EXPECT_TRUE(c.WaitForNames({"a", "b", "c"}));
  for (const int fd : connections) close(fd);
  EXPECT_TRUE(a.WaitForNames({"a", "b", "c"}));
  ASSERT_TRUE(b.WaitForNames({"a", "b", "c"}));  // each member gets the view separately
  EXPECT_EQ(b.ViewCount(), 2u);
}

TEST_F(StandaloneTest, NonsenseInWellFormedFramesEndsItsOwnStreamOnly) {
  namespace wire = membership::v1;
  config_.nodes_expected = 1;
  TestMember& a = Start("a", 0, 1);
  ASSERT_TRUE(a.WaitForNames({"a"}));
  const auto stub = wire::Coordinator::NewStub(
      grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), ChannelOptions()));
  const auto ends = [&](const wire::NodeFrame& frame) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    const auto stream = stub->Session(&context);
    stream->Write(frame);
    wire::CoordinatorFrame answer;
    while (stream->Read(&answer)) {
    }
    return stream->Finish().error_code() != grpc::StatusCode::DEADLINE_EXCEEDED;
  };
  wire::NodeFrame frame;
  EXPECT_TRUE(ends(frame));
  frame.mutable_heartbeat()->set_seen(~0ull);
  EXPECT_TRUE(ends(frame));
  frame.mutable_registration();
  EXPECT_TRUE(ends(frame));
  auto* member = frame.mutable_registration()->mutable_member();
  frame.mutable_registration()->set_job("test-job");
  member->set_id(9);
  member->set_name(std::string(1u << 20, '\xff'));
  EXPECT_TRUE(ends(frame));
  auto* view = frame.mutable_registration()->mutable_seen();
  for (size_t i = 0; i <= kNodesMax; ++i) view->add_members();
  EXPECT_TRUE(ends(frame));
  // Only the view is invalid.
  auto* registration = frame.mutable_registration();
  registration->set_job(config_.job);
  registration->set_protocol_version(config_.protocol_version);
  registration->set_chunk_bytes(config_.chunk_bytes);
  registration->set_data_transport(config_.data_transport);
  member->set_name("x");
  view->Clear();
  view->set_epoch(1);
  view->set_leader(9);
  EXPECT_TRUE(ends(frame)) << "the view's leader is no member of it";
  EXPECT_EQ(a.ViewCount(), 1u);
}

}  // namespace
}  // namespace ropeteam
