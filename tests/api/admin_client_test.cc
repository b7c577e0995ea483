// SPDX-License-Identifier: Apache-2.0
#include "api/client/admin_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/fake_daemon.h"

namespace ropeteam::test {
namespace {

using ::testing::HasSubstr;

TEST(AdminClientTest, AsksAndGetsJson) {
  FakeDaemon daemon;
  Result<std::unique_ptr<AdminClient>> client = AdminClient::Connect(daemon.socket(), 1000);
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_EQ(daemon.last_hello().kind, local::ClientKind::kAdmin);
  EXPECT_EQ((*client)->hello().job, "job");
  const Result<std::string> json = (*client)->Request({local::AdminCommand::kVerify, true, 5, 1000});
  ASSERT_TRUE(json.ok()) << json.status().ToString();
  EXPECT_EQ(*json, "{\"command\": 3}");
}

TEST(AdminClientTest, ARefusalIsTheDaemons) {
  FakeDaemon daemon;
  daemon.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kAdmin] = {Code::kNotFound, "no step 9"};
  });
  Result<std::unique_ptr<AdminClient>> client = AdminClient::Connect(daemon.socket(), 1000);
  ASSERT_TRUE(client.ok());
  const Result<std::string> json = (*client)->Request({local::AdminCommand::kList, true, 9, 1000});
  EXPECT_EQ(json.status().code(), Code::kNotFound);
  EXPECT_THAT(json.status().message(), HasSubstr("no step 9"));
}

TEST(AdminClientTest, NoDaemonAndADeadOneAreUnavailable) {
  FakeDaemon daemon;
  EXPECT_EQ(AdminClient::Connect(daemon.socket() + ".not", 1000).status().code(), Code::kUnavailable);
  Result<std::unique_ptr<AdminClient>> client = AdminClient::Connect(daemon.socket(), 1000);
  ASSERT_TRUE(client.ok());
  daemon.Kill();
  EXPECT_EQ((*client)->Request({}).status().code(), Code::kUnavailable);
}

TEST(AdminClientTest, ASilentDaemonEndsAtTheDeadline) {
  FakeDaemon daemon;
  daemon.Configure([](FakeConfig& config) { config.silent = true; });
  EXPECT_EQ(AdminClient::Connect(daemon.socket(), 10).status().code(), Code::kDeadlineExceeded);
}

}  // namespace
}  // namespace ropeteam::test
