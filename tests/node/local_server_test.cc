// SPDX-License-Identifier: Apache-2.0
#include "node/local_server.h"

#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <random>

#include "node/local_socket.h"
#include "tests/node/local_server_fixture.h"

namespace ropeteam {
namespace {

TEST_F(LocalServerTest, ItsSocketIsForThisUserAlone) {
  struct stat info {};
  ASSERT_EQ(stat(server_->socket_path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(stat((directory_ + "/private").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(LocalServerTest, ARankSaysHelloSavesAndIsForgottenWithItsUncommittedSave) {
  UniqueFd rank = Connect();
  Send(rank, Type::kHello, 1, RankHello());
  const Received hello = Receive(rank);
  ASSERT_EQ(hello.type, Type::kHelloReply);
  local::HelloReply reply;
  ASSERT_TRUE(Decode(hello.payload, reply));
  EXPECT_EQ(IncarnationNumber(reply.incarnation), 1u);
  EXPECT_EQ(reply.job, "job");

  const uint64_t free_before = store_->chunks_free();
  Send(rank, Type::kSaveBegin, 2, Encode(local::SaveBegin{5, 3 * kChunk}));
  const Received grant = Receive(rank);
  ASSERT_EQ(grant.type, Type::kSaveGrant);
  EXPECT_EQ(grant.request, 2u);
  EXPECT_LT(store_->chunks_free(), free_before);

  rank.reset();
  for (int i = 0; i < 10000 && store_->chunks_free() != free_before; ++i) Turn();
  EXPECT_EQ(store_->chunks_free(), free_before) << "the chunks of a save whose rank is gone are free";
}

TEST_F(LocalServerTest, AnotherProtocolVersionIsRefusedWithBothNamed) {
  const UniqueFd client = Connect();
  local::Hello hello;
  hello.version = 99;
  Send(client, Type::kHello, 1, Encode(hello) + "fields of a later version");
  const local::Reply reply = ReceiveReply(client);
  EXPECT_EQ(reply.code, Code::kUnsupported);
  EXPECT_THAT(reply.message, HasSubstr("99"));
  EXPECT_THAT(reply.message, HasSubstr(std::to_string(local::kLocalProtocolVersion)));
  EXPECT_EQ(Receive(client).type, Type{}) << "and the connection ends";
}

// A rank keeps running when its daemon is replaced by a newer one.
TEST_F(LocalServerTest, AnOlderLibraryIsAnsweredInItsVersion) {
  const UniqueFd client = Connect();
  local::Hello hello;
  hello.version = local::kLocalProtocolOldest;
  hello.kind = local::ClientKind::kAdmin;
  Send(client, Type::kHello, 1, Encode(hello, local::kLocalProtocolOldest));
  const Received received = Receive(client);
  ASSERT_EQ(received.type, Type::kHelloReply);
  local::HelloReply reply;
  ASSERT_TRUE(Decode(received.payload, reply, local::kLocalProtocolOldest));
  EXPECT_EQ(reply.version, local::kLocalProtocolOldest);
  const std::string latest = Encode(local::LatestReply{7, 3, 2, 8, 3}, 4);
  EXPECT_EQ(latest.size(), 8u + 8u + 4u) << "step, incarnation, world_size";
}

TEST_F(LocalServerTest, AnOlderLibrarysSaveIsReadInItsVersion) {
  const UniqueFd client = Connect();
  local::Hello hello;
  hello.token = 42;
  hello.world_size = 1;
  hello.timeout_ms = 1000;
  hello.version = local::kLocalProtocolOldest;
  Send(client, Type::kHello, 1, Encode(hello, local::kLocalProtocolOldest));
  ASSERT_EQ(Receive(client).type, Type::kHelloReply);
  Send(client, Type::kSaveBegin, 2, Encode(local::SaveBegin{1, 1, 77}, local::kLocalProtocolOldest));
  EXPECT_EQ(Receive(client).type, Type::kSaveGrant);
}

TEST_F(LocalServerTest, ARequestBeforeHelloEndsTheConnection) {
  const UniqueFd client = Connect();
  Send(client, Type::kLatest, 1, Encode(local::Latest{3, 1000}));
  EXPECT_EQ(Receive(client).type, Type{});
}

TEST_F(LocalServerTest, FramesThatAreNotAsDeclaredEndTheConnectionAndHarmNobodyElse) {
  const UniqueFd good = Connect();
  Send(good, Type::kHello, 1, AdminHello());
  ASSERT_EQ(Receive(good).type, Type::kHelloReply);
  struct Bad {
    Type type;
    std::string payload;
  };
  for (const Bad& bad :
       {Bad{Type::kSaveBegin, "short"}, Bad{Type::kHello, RankHello()}, Bad{Type::kHelloReply, ""},
        Bad{static_cast<Type>(77), ""}, Bad{Type::kStorageList, Encode(local::StorageList{0, 1})},
        Bad{Type::kStorageList, Encode(local::StorageList{local::kListedStepsMax + 1, 1})},
        Bad{Type::kSaveFilled, std::string(20, '\xff')},
        Bad{Type::kAdmin, Encode(local::Admin{static_cast<local::AdminCommand>(9), false, 0, 0})}}) {
    const UniqueFd client = Connect();
    Send(client, Type::kHello, 1, RankHello());
    ASSERT_EQ(Receive(client).type, Type::kHelloReply);
    Send(client, bad.type, 2, bad.payload);
    EXPECT_EQ(Receive(client).type, Type{}) << "type " << static_cast<int>(bad.type);
  }
  Send(good, Type::kAdmin, 2, Encode(local::Admin{local::AdminCommand::kNode, false, 0, 1000}));
  EXPECT_EQ(Receive(good).type, Type::kAdminReply);
}

TEST_F(LocalServerTest, BadValuesAreAnsweredInWords) {
  const UniqueFd client = Connect();
  local::Hello hello;
  hello.world_size = 1;
  hello.incarnation_token = std::string(local::kIncarnationTokenBytesMax + 1, 'x');
  Send(client, Type::kHello, 1, Encode(hello));
  EXPECT_THAT(ReceiveReply(client).message, HasSubstr("limit 255"));
  Send(client, Type::kHello, 2, RankHello(/*rank=*/5, /*world=*/2));
  EXPECT_EQ(ReceiveReply(client).code, Code::kInvalidArgument);
  Send(client, Type::kHello, 3, RankHello());
  ASSERT_EQ(Receive(client).type, Type::kHelloReply) << "the connection lived through both";
  Send(client, Type::kWait, 4, Encode(local::Wait{1, 9, 1000}));
  const local::Reply reply = ReceiveReply(client);
  EXPECT_EQ(reply.code, Code::kInvalidArgument);
  EXPECT_THAT(reply.message, HasSubstr("level 9"));
}

// Valid messages with extreme values: the Engine must accept any of them from a rank without harm.
TEST_F(LocalServerTest, AbsurdValuesHarmNobody) {
  std::mt19937_64 random(20);
  const auto edge = [&]() -> uint64_t {
    static constexpr uint64_t kEdges[] = {
        0, 1, 2, 3, 5, 63, 64, 4095, 4096, 1u << 20, UINT32_MAX, UINT64_MAX - 1, UINT64_MAX};
    return kEdges[random() % std::size(kEdges)];
  };
  const auto edge32 = [&] { return static_cast<uint32_t>(edge()); };
  const auto crcs = [&] { return std::vector<uint32_t>(random() % 70, edge32()); };
  const uint64_t free_before = store_->chunks_free();
  for (int round = 0; round < 60; ++round) {
    UniqueFd rank = Connect();
    Send(rank, Type::kHello, 1, RankHello());
    ASSERT_EQ(Receive(rank).type, Type::kHelloReply);
    for (uint64_t request = 2; request < 40; ++request) {
      // Saves and views are numbered from 1, so small numbers hit open ones.
      const uint64_t id = random() % 2 == 0 ? random() % (static_cast<uint64_t>(round) * 8 + 2) : edge();
      switch (random() % 13) {
        case 0:
        case 1:
          Send(rank, Type::kSaveBegin, request, Encode(local::SaveBegin{edge(), edge()}));
          break;
        case 2:
          Send(rank, Type::kSaveExtend, request, Encode(local::SaveExtend{id, edge()}));
          break;
        case 3:
          Send(rank, Type::kSaveFilled, request, Encode(local::SaveFilled{id, edge32(), crcs()}));
          break;
        case 4:
          Send(rank, Type::kSaveCommit, request,
               Encode(local::SaveCommit{id, edge(), edge(), edge32(), crcs()}));
          break;
        case 5:
          Send(rank, Type::kSaveAbort, request, Encode(local::SaveAbort{id}));
          break;
        case 6:
          Send(rank, Type::kWait, request,
               Encode(
                   local::Wait{edge(), static_cast<uint8_t>(random() % 6), random() % 2 == 0 ? 0 : edge()}));
          break;
        case 7:
          Send(rank, Type::kViewOpen, request, Encode(local::ViewOpen{edge(), edge32(), 0}));
          break;
        case 8:
          Send(rank, Type::kGpuBuffer, request, Encode(local::GpuBuffer{edge(), edge()}));
          break;
        case 9:
          Send(rank, Type::kGpuBufferEnd, request, Encode(local::GpuBufferEnd{edge()}));
          break;
        case 10:
          Send(rank, Type::kSaveDirect, request,
               Encode(local::SaveDirect{id, edge(), edge(), edge32(), edge32()}));
          break;
        case 11:
          Send(rank, Type::kSaveSettle, request, Encode(local::SaveSettle{id, edge()}));
          break;
        default:
          Send(rank, Type::kViewRepair, request, Encode(local::ViewRepair{id, crcs(), 0}));
          break;
      }
    }
    Turn();
    engine_->CheckInvariants();
    rank.reset();
    Turn();
  }
  for (int i = 0; i < 1000 && store_->chunks_free() != free_before; ++i) Turn();
  EXPECT_EQ(store_->chunks_free(), free_before) << "nothing they asked for is left behind";
}

TEST_F(LocalServerTest, AnAdminAsksAndHasNoRank) {
  const UniqueFd client = Connect();
  Send(client, Type::kHello, 1, AdminHello());
  const Received hello = Receive(client);
  ASSERT_EQ(hello.type, Type::kHelloReply);
  local::HelloReply reply;
  ASSERT_TRUE(Decode(hello.payload, reply));
  EXPECT_EQ(reply.incarnation, 0u);

  Send(client, Type::kSaveBegin, 2, Encode(local::SaveBegin{1, 1}));
  EXPECT_EQ(ReceiveReply(client).code, Code::kInvalidArgument);

  for (const auto command :
       {local::AdminCommand::kStatus, local::AdminCommand::kList, local::AdminCommand::kNode}) {
    Send(client, Type::kAdmin, 3, Encode(local::Admin{command, false, 0, 5000}));
    const Received answer = Receive(client);
    ASSERT_EQ(answer.type, Type::kAdminReply);
    local::AdminReply admin;
    ASSERT_TRUE(Decode(answer.payload, admin));
    const auto json = nlohmann::json::parse(admin.json);
    EXPECT_TRUE(json.is_object());
    if (command == local::AdminCommand::kStatus) {
      EXPECT_EQ(json.at("job"), "job");
      EXPECT_EQ(json.at("leader"), "node-0");
      EXPECT_EQ(json.at("nodes").at(0).at("chunks_total"), store_->chunks_total());
      EXPECT_EQ(json.at("daemon").at("version"), "0.0.test");
    }
  }
  Send(client, Type::kAdmin, 4, Encode(local::Admin{local::AdminCommand::kVerify, true, 77, 5000}));
  EXPECT_EQ(ReceiveReply(client).code, Code::kNotFound);
  Send(client, Type::kDrop, 5, Encode(local::Drop{77, 5000}));
  EXPECT_EQ(ReceiveReply(client).code, Code::kNotFound);
}

TEST_F(LocalServerTest, ListingsOfStorageAreAnsweredOnceAndInTime) {
  const UniqueFd client = Connect();
  Send(client, Type::kHello, 1, RankHello());
  ASSERT_EQ(Receive(client).type, Type::kHelloReply);
  Send(client, Type::kStorageList, 2, Encode(local::StorageList{7, 60'000}));
  Send(client, Type::kStorageList, 3, Encode(local::StorageList{7, 60'000}));
  Send(client, Type::kStorageList, 4, Encode(local::StorageList{local::kListedStepsMax, 1}));
  const Received late = Receive(client);
  EXPECT_EQ(late.request, 4u) << "the loop's own clock answers for a storage that does not";
  local::Reply reply;
  ASSERT_TRUE(Decode(late.payload, reply));
  EXPECT_EQ(reply.code, Code::kDeadlineExceeded);
  ASSERT_EQ(listings_.size(), 3u);
  EXPECT_EQ(listings_[0].first, 7u);
  local::StorageListReply stored;
  stored.steps.push_back({5, 1, "step-5", "", 1, 2, 3, "{}"});
  listings_[2].second(OkStatus(), stored);  // too late: dropped
  listings_[1].second(Status(Code::kIo, "the disk is gone"), {});
  EXPECT_EQ(ReceiveReply(client).message, "the disk is gone");
  listings_[0].second(OkStatus(), stored);
  const Received received = Receive(client);
  EXPECT_EQ(received.type, Type::kStorageListReply);
  EXPECT_EQ(received.request, 2u);
  ASSERT_TRUE(Decode(received.payload, stored));
  EXPECT_EQ(stored.steps.at(0).folder, "step-5");
  EXPECT_EQ(server_->NextTimer(), EventLoop::kNever);
}

TEST_F(LocalServerTest, AListingForAClientThatIsGoneIsDropped) {
  {
    const UniqueFd client = Connect();
    Send(client, Type::kHello, 1, RankHello());
    ASSERT_EQ(Receive(client).type, Type::kHelloReply);
    Send(client, Type::kStorageList, 2, Encode(local::StorageList{7, 60'000}));
    for (int i = 0; i < 10000 && listings_.empty(); ++i) Turn();
  }
  for (int i = 0; i < 10000 && server_->NextTimer() != EventLoop::kNever; ++i) Turn();
  ASSERT_EQ(listings_.size(), 1u);
  EXPECT_EQ(server_->NextTimer(), EventLoop::kNever);
  listings_[0].second(OkStatus(), {});
}

TEST_F(LocalServerTest, ASecondServerDoesNotTakeALiveSocketAway) {
  const Result<UniqueFd> second = ListenLocal(server_->socket_path());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
}

TEST(LocalSocket, AStaleSocketIsReplacedAndAFileIsNot) {
  char path[] = "/tmp/ropeteam-test-XXXXXX";
  ASSERT_NE(mkdtemp(path), nullptr);
  const std::string socket_path = std::string(path) + "/s.sock";
  { ASSERT_TRUE(ListenLocal(socket_path).ok()); }  // closed, but the file stays, as after kill -9
  EXPECT_EQ(access(socket_path.c_str(), F_OK), 0);
  { EXPECT_TRUE(ListenLocal(socket_path).ok()); }
  unlink(socket_path.c_str());

  FILE* file = std::fopen(socket_path.c_str(), "w");
  ASSERT_NE(file, nullptr);
  std::fclose(file);
  const Result<UniqueFd> refused = ListenLocal(socket_path);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("not a socket"));
  unlink(socket_path.c_str());
  rmdir(path);
}

TEST(LocalSocket, DefaultPathsAlwaysFit) {
  const std::string a = DefaultSocketPath(std::string(255, 'a') + "1", std::string(63, 'n'));
  const std::string b = DefaultSocketPath(std::string(255, 'a') + "2", std::string(63, 'n'));
  EXPECT_LE(a.size(), sizeof(sockaddr_un::sun_path) - 1);
  EXPECT_NE(a, b);
}

TEST(StatusJson, IsCutToAFrameAndSaysSo) {
  ClusterReport report;
  report.job = "a name that is no UTF-8: \xff";
  for (int node = 0; node < 200; ++node) {
    NodeReport& each = report.nodes.emplace_back();
    each.name = "node-" + std::to_string(node);
    each.copies.resize(200);
  }
  const std::string text = StatusJson(report, DaemonFacts());
  EXPECT_LE(text.size(), local::kFrameBytesMax - 8);
  const auto json = nlohmann::json::parse(text);
  EXPECT_TRUE(json.at("truncated").get<bool>());
  EXPECT_EQ(json.at("nodes").size(), 200u) << "what goes first is the detail";
}

}  // namespace
}  // namespace ropeteam
