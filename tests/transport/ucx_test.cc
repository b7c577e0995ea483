// SPDX-License-Identifier: Apache-2.0
//
// What is particular to UCX: missing devices and transports, GIDs, and, in the guest of scripts/soft-roce
// with its cables, a silent peer.

#include "transport/ucx/ucx_transport.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>

#include "tests/transport/rig.h"
#include "transport/fabrics.h"

namespace ropeteam::test {
namespace {

using testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;

// "rxe0:1"; empty: none.
std::string RdmaDevice() {
  for (const FabricDevice& device : ListUcxDevices().devices)
    if (device.rdma) return device.name;
  return "";
}

struct Node : Endpoint {
  explicit Node(const UcxConfig& config) : Endpoint(CreateUcxTransport(config)) {}
};

TEST(Ucx, ADeviceThatIsNotThereIsAnsweredWithThoseThatAre) {
  const auto refused = CreateUcxTransport({.devices = {"nosuch0"}});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), testing::AllOf(HasSubstr("nosuch0"), HasSubstr("tcp/lo")));
  const auto one_of_two = CreateUcxTransport({.devices = {"lo", "nosuch0"}, .transports = "tcp"});
  ASSERT_FALSE(one_of_two.ok());
  EXPECT_THAT(one_of_two.status().message(), HasSubstr("\"nosuch0\""));
}

TEST(Ucx, ATransportThatReachesNobodyIsRefused) {
  const auto refused = CreateUcxTransport({.transports = "self"});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_THAT(refused.status().message(), testing::AllOf(HasSubstr("\"self\""), HasSubstr("tcp/lo")));
}

TEST(Ucx, ShowsWhatItChoseAndItsVersion) {
  const FabricListing listing = ListUcxDevices();
  EXPECT_EQ(listing.transport, "ucx");
  EXPECT_THAT(listing.library, HasSubstr("UCX 1."));
  EXPECT_THAT(listing.devices, testing::Contains(testing::Field(&FabricDevice::name, "memory")));
  const auto made = CreateUcxTransport({.devices = {"lo"}, .transports = "tcp"});
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  EXPECT_THAT((*made)->Describe(), HasSubstr("over tcp/lo"));
  EXPECT_EQ((*made)->capabilities().devices, "lo");
  EXPECT_FALSE((*made)->capabilities().rdma);
}

TEST(Ucx, TheGidThatIsAskedForIsTaken) {
  if (RdmaDevice().empty()) GTEST_SKIP() << "no RDMA device";
  EXPECT_TRUE(CreateUcxTransport({.transports = "rc,self", .gid_index = 0}).ok());
  const auto refused = CreateUcxTransport({.transports = "rc,self", .gid_index = 250});
  EXPECT_FALSE(refused.ok()) << "a port has no such entry";
}

// Memory is registered once with each device, however many bytes are transferred.
TEST(Ucx, RegistrationsDoNotGrowWithOperations) {
  if (RdmaDevice().empty()) GTEST_SKIP() << "no RDMA device";
  const UcxConfig config{.devices = {RdmaDevice()}, .transports = "rc,self", .gid_index = 0};
  Node a(config), b(config);
  a.Meet(b);
  Completions done;
  auto& list = done[a.transport.get()];
  const auto put = [&](uint64_t offset, uint64_t length) {
    const size_t before = list.size();
    ASSERT_TRUE(a.transport->Put(a.peer, a.region, offset, a.remote, offset, length, 1).ok());
    ASSERT_TRUE(PollUntil(nullptr, {a.transport.get(), b.transport.get()}, &done,
                          [&] { return list.size() > before; }));
    ASSERT_EQ(list.back().code, Code::kOk);
  };
  put(0, kMiB);
  const int before = RdmaObjects("mr");
  if (before < 0) GTEST_SKIP() << "rdma resource show mr says nothing here";
  for (uint64_t i = 0; i < 32; i++) put(i * 100'001, 100'000 + i);
  EXPECT_EQ(RdmaObjects("mr"), before);
  EXPECT_EQ(a.transport->counters().registrations, 1u);
}

// A peer whose cable is cut does not answer. The device's retries must end; with UCX's default of 7 they
// would not on some devices.
TEST(UcxDeviceCables, ASilentPeerGivesEveryBufferBackOnce) {
  const char* network = std::getenv("SOFT_ROCE");
  if (network == nullptr || !std::ifstream("/sys/class/infiniband/rxd/node_guid"))
    GTEST_SKIP() << "only in the guest of scripts/soft-roce --setup cables";
  // The link-local GIDs: UCX drops rxe's datagrams between IPv4 ones.
  Node a({.devices = {"rxa:1"}, .transports = "rc,self", .gid_index = 0});
  Node b({.devices = {"rxb:1"}, .transports = "rc,self", .gid_index = 0});
  a.Meet(b);
  constexpr uint64_t kCount = 100;
  for (uint64_t i = 0; i < kCount; i++)
    ASSERT_TRUE(a.transport->Put(a.peer, a.region, i % 8 * kMiB, a.remote, i % 8 * kMiB, kMiB, i).ok());
  Completions done;
  auto& list = done[a.transport.get()];
  const std::vector<Transport*> both = {a.transport.get(), b.transport.get()};
  ASSERT_TRUE(PollUntil(nullptr, both, &done, [&] { return list.size() >= 4; }));
  ASSERT_EQ(std::system((std::string(network) + " netem 1 loss 100%").c_str()), 0);
  const bool ended = PollUntil(
      nullptr, both, &done, [&] { return list.size() >= kCount; }, 60'000);
  EXPECT_EQ(std::system((std::string(network) + " netem 1").c_str()), 0);
  ASSERT_TRUE(ended) << list.size() << " of " << kCount;
  std::vector<int> times(kCount, 0);
  for (const Completion& completion : list) {
    times[completion.context]++;
    EXPECT_THAT(completion.code, testing::AnyOf(Code::kOk, Code::kLinkFailed, Code::kPeerGone));
  }
  EXPECT_THAT(times, testing::Each(1));
  EXPECT_NE(list.back().code, Code::kOk);
  a.transport->Disconnect(a.peer);
  ASSERT_TRUE(PollUntil(nullptr, both, &done, [&] { return list.size() > kCount; }));
  EXPECT_TRUE(a.transport->DeregisterRegion(a.region).ok()) << "a buffer was not given back";
}

}  // namespace
}  // namespace ropeteam::test
