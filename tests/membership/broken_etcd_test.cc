// SPDX-License-Identifier: Apache-2.0
//
// The client against a server that speaks etcd's protocol but is not etcd, or is broken.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "membership/etcd/client.h"
#include "membership/etcd/etcd.grpc.pb.h"
#include "tests/membership/standalone_cluster.h"

namespace ropeteam {
namespace {

using etcdserverpb::TxnRequest;
using etcdserverpb::TxnResponse;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class BrokenEtcd final : public etcdserverpb::KV::Service {
 public:
  using OnTxn = std::function<void(grpc::ServerContext*, TxnResponse*)>;
  explicit BrokenEtcd(OnTxn on_txn) : on_txn_(std::move(on_txn)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(OwnHost() + ":0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    endpoint_ = OwnHost() + ":" + std::to_string(port);
  }
  grpc::Status Txn(grpc::ServerContext* context, const TxnRequest*, TxnResponse* response) override {
    on_txn_(context, response);
    return grpc::Status::OK;
  }
  const std::string& endpoint() const { return endpoint_; }

 private:
  const OnTxn on_txn_;
  std::unique_ptr<grpc::Server> server_;
  std::string endpoint_;
};

// One client and the answer to its last call.
class BrokenEtcdTest : public ::testing::Test {
 protected:
  void Connect(const std::vector<std::string>& endpoints) {
    EtcdConfig config;
    config.endpoints = endpoints;
    config.prefix = "p";
    EtcdClient::Handler handler;
    handler.on_answer = [this](uint64_t, Result<StoreAnswer> answer) {
      const std::lock_guard lock(mutex_);
      answer_ = std::move(answer);
      ++handled_;
      changed_.notify_all();
    };
    handler.on_kept_alive = [this](StoreLease, int64_t) { Count(); };
    handler.on_changed = [this](uint64_t, int64_t, const std::string*) { Count(); };
    handler.on_watch_ended = [this](uint64_t, const std::string&) { Count(); };
    client_ = std::make_unique<EtcdClient>(config, handler);
  }
  void Count() {
    const std::lock_guard lock(mutex_);
    ++handled_;
  }
  Result<StoreAnswer> Get() {
    client_->Call(1, StoreTxn{{}, {{StoreOp::kGet, "k"}}, {}}, 5000);
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [this] { return answer_.has_value(); }))
      return Error(Code::kInternal, "no answer at all");
    return *std::exchange(answer_, std::nullopt);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Result<StoreAnswer>> answer_;
  int handled_ = 0;
  std::unique_ptr<EtcdClient> client_;
};

TEST_F(BrokenEtcdTest, AnAnswerWithoutTheWantedPartsIsAnErrorThatNamesTheEndpoint) {
  BrokenEtcd etcd([](grpc::ServerContext*, TxnResponse* response) { response->set_succeeded(true); });
  Connect({etcd.endpoint()});
  const Status status = Get().status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), StartsWith(etcd.endpoint() + ": invalid answer, 0 parts to a request of 1"));
}

TEST_F(BrokenEtcdTest, ARequestWithoutAConditionThatHasFailedOneIsAnError) {
  BrokenEtcd etcd([](grpc::ServerContext*, TxnResponse* response) { response->set_succeeded(false); });
  Connect({etcd.endpoint()});
  const Status status = Get().status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("a request without a condition has failed one"));
}

TEST_F(BrokenEtcdTest, AnErrorNamesTheEndpointThatFailedAndNotTheNextOne) {
  Connect({"127.0.0.1:1", "127.0.0.1:2"});
  for (int i = 0; i < 4; ++i) {
    const std::string text = Get().status().message();
    EXPECT_THAT(text, HasSubstr("ipv4:" + text.substr(0, text.find(": ")) + ":"));
  }
}

TEST_F(BrokenEtcdTest, StopEndsACallThatIsNeverAnsweredAndNothingIsCalledAfterIt) {
  bool asked = false;
  BrokenEtcd etcd([&](grpc::ServerContext* context, TxnResponse*) {
    std::unique_lock lock(mutex_);
    asked = true;
    changed_.notify_all();
    while (!context->IsCancelled()) changed_.wait_for(lock, std::chrono::milliseconds(5));
  });
  Connect({etcd.endpoint()});
  client_->Watch(1, "k", 1);
  client_->KeepAlive(7);
  client_->Call(1, StoreTxn{}, 600'000);
  {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return asked; }));
  }
  const auto began = std::chrono::steady_clock::now();
  client_->Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  const std::lock_guard lock(mutex_);
  handled_ = 0;
  client_->KeepAlive(7);
  client_->Watch(2, "k", 1);
  client_->Call(2, StoreTxn{}, 100);
  EXPECT_EQ(handled_, 0);
}

}  // namespace
}  // namespace ropeteam
