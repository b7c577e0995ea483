// SPDX-License-Identifier: Apache-2.0
#include "node/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

namespace ropeteam {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(NodeStats, DetectionBeginsWithTheFirstSignAndEndsWithTheView) {
  View both;
  both.members.resize(3);
  for (size_t i = 0; i < both.members.size(); ++i) both.members[i].id = i + 1;
  NodeStats stats;
  stats.OnSign(1'000'000, 2);
  stats.OnSign(1'200'000, 2);
  stats.OnSign(1'000'000, 3);
  stats.OnLinkUp(3);
  stats.OnView(1'300'000, both, {1});
  EXPECT_EQ(stats.members_lost(), 2u);
  EXPECT_EQ(stats.detection().count(), 1u) << "the link with node 3 was up again";
  EXPECT_EQ(stats.detection().sum_us(), 300'000u);
  stats.OnView(9'000'000, both, {1, 3});
  EXPECT_EQ(stats.detection().count(), 1u) << "the sign has been used up";
}

TEST(NodeStats, LevelsAreMeasuredFromSaveBeginOnThisNode) {
  NodeStats stats;
  stats.OnLevel({{1, 7, 0}, Level::kReplicated, 100, 20'000});
  stats.OnLevel({{1, 7, 1}, Level::kReplicated, 100, 0});  // begun on another node, or before a restart
  stats.OnLevel({{1, 7, LevelEvent::kNoRank}, Level::kCommitted, 0, 0});
  const Histogram& replicated = stats.levels()[static_cast<size_t>(Level::kReplicated)];
  EXPECT_EQ(replicated.count(), 1u);
  EXPECT_EQ(replicated.sum_us(), 20'000u);
  EXPECT_EQ(stats.steps_committed(), 1u);
  EXPECT_EQ(stats.levels()[static_cast<size_t>(Level::kCommitted)].count(), 0u);
}

TEST(Histogram, ABoundBelongsToItsBucket) {
  Histogram histogram;
  histogram.Add(0);
  histogram.Add(1'000);
  histogram.Add(1'001);
  histogram.Add(Histogram::kBoundsUs.back() + 1);
  EXPECT_EQ(histogram.count(0), 2u);
  EXPECT_EQ(histogram.count(1), 1u);
  EXPECT_EQ(histogram.count(Histogram::kBoundsUs.size()), 1u);
  EXPECT_EQ(histogram.count(), 4u);
}

uint16_t FreePort() {
  const UniqueFd probe(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(probe.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  return ntohs(address.sin_port);
}

std::string Scrape(uint16_t port) {
  const UniqueFd client(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  EXPECT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(send(client.get(), request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string text;
  char buffer[4096];
  for (ssize_t count = 0; (count = recv(client.get(), buffer, sizeof(buffer), 0)) > 0;)
    text.append(buffer, static_cast<size_t>(count));
  return text;
}

class MetricsServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(loop_.Init().ok());
    port_ = FreePort();
    Result<std::unique_ptr<MetricsServer>> server =
        MetricsServer::Start("127.0.0.1:" + std::to_string(port_), &loop_, [this] {
          ++collected_;
          MetricsSnapshot snapshot;
          snapshot.version = "1";
          snapshot.engine.local.peers[7] = PeerTraffic{.name = "node-7", .sent = {100, 2}};
          return snapshot;
        });
    if (!server.ok() && server.status().code() == Code::kUnsupported)
      GTEST_SKIP() << server.status().ToString();
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(*server);
  }
  EventLoop loop_;
  uint16_t port_ = 0;
  int collected_ = 0;
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, AScrapeGetsWhatTheLoopGives) {
  std::thread looping([this] { loop_.Run(); });
  const std::string text = Scrape(port_);
  EXPECT_THAT(text, HasSubstr("ropeteam_event_loop_answered 1"));
  EXPECT_THAT(text, HasSubstr("ropeteam_peer_bytes_total{peer=\"node-7\",direction=\"sent\"} 100"));
  EXPECT_THAT(text, HasSubstr("ropeteam_peer_chunks_total{peer=\"node-7\",direction=\"sent\"} 2"));
  loop_.Stop();
  looping.join();
}

TEST_F(MetricsServerTest, ALoopThatHangsIsToldAndAskedOnce) {
  for (int i = 0; i < 2; ++i) {
    const std::string text = Scrape(port_);
    EXPECT_THAT(text, HasSubstr("ropeteam_event_loop_answered 0"));
    EXPECT_THAT(text, Not(HasSubstr("ropeteam_members")));
  }
  EXPECT_EQ(collected_, 0);
  loop_.Post([this] { loop_.Stop(); });
  loop_.Run();
  EXPECT_EQ(collected_, 1) << "what waited was one question";
}

TEST_F(MetricsServerTest, ALoopThatRunsAfterTheServersEndIsNotAsked) {
  EXPECT_THAT(Scrape(port_), HasSubstr("ropeteam_event_loop_answered 0"));
  server_.reset();
  loop_.Post([this] { loop_.Stop(); });
  loop_.Run();
  EXPECT_EQ(collected_, 0);
}

TEST_F(MetricsServerTest, APortThatIsTakenIsNamed) {
  const std::string address = "127.0.0.1:" + std::to_string(port_);
  const auto second = MetricsServer::Start(address, &loop_, [] { return MetricsSnapshot(); });
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kIo);
  EXPECT_THAT(second.status().message(), HasSubstr("--metrics " + address));
}

}  // namespace
}  // namespace ropeteam
