// SPDX-License-Identifier: Apache-2.0
//
// The choice of a transport from the devices of a machine.

#include "transport/fabrics.h"

#include <gmock/gmock.h>

namespace ropeteam {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

FabricDevice Card(const std::string& name, const std::string& provider, const std::string& unusable = "") {
  FabricDevice device;
  device.name = name;
  device.provider = provider;
  device.rdma = true;
  device.unusable = unusable;
  return device;
}

FabricListing Verbs(std::vector<FabricDevice> devices) {
  return {"verbs", "libibverbs 1.14", "", std::move(devices)};
}
FabricListing Ofi(std::vector<FabricDevice> devices) {
  FabricDevice tcp;
  tcp.name = "eth0";
  tcp.provider = "tcp;ofi_rxm";
  devices.insert(devices.begin(), tcp);
  return {"ofi", "libfabric 1.17", "", std::move(devices)};
}

FabricConfig OnNetwork(const std::string& transport = "auto") {
  FabricConfig config;
  config.transport = transport;
  config.listen_address = "10.0.0.3:7000";
  return config;
}

TEST(PlanFabric, AutoPrefersVerbsThenEfaThenTcp) {
  const auto verbs =
      PlanFabric(OnNetwork(), {Verbs({Card("mlx5_0", "InfiniBand")}), Ofi({Card("efa0", "efa")})});
  EXPECT_EQ(verbs->transport, "verbs");
  EXPECT_EQ(verbs->fallback, "");
  const auto efa = PlanFabric(
      OnNetwork(), {Verbs({Card("efa0", "", "no reliable connections")}), Ofi({Card("efa0-rdm", "efa")})});
  EXPECT_EQ(efa->transport, "ofi");
  EXPECT_EQ(efa->provider, "efa");
  EXPECT_EQ(efa->fallback, "");
  const auto tcp = PlanFabric(OnNetwork(), {Verbs({}), Ofi({})});
  EXPECT_EQ(tcp->transport, "tcp");
  EXPECT_EQ(tcp->provider, "");
}

TEST(PlanFabric, PassingRdmaOverNamesEveryReason) {
  const FabricListing without{"verbs", "", "libibverbs was not found", {}};
  EXPECT_THAT(PlanFabric(OnNetwork(), {without, Ofi({})})->fallback,
              HasSubstr("verbs: libibverbs was not found"));
  EXPECT_THAT(PlanFabric(OnNetwork(), {Verbs({}), Ofi({})})->fallback, HasSubstr("shows no device"));
  EXPECT_THAT(PlanFabric(OnNetwork(), {Verbs({Card("mlx5_0", "RoCE", "port 1 is down")}),
                                       Ofi({Card("efa0", "efa", "no EFA")})})
                  ->fallback,
              AllOf(HasSubstr("verbs: mlx5_0: port 1 is down"), HasSubstr("ofi: efa0: no EFA")));
}

TEST(PlanFabric, RequiredRdmaIsNeverReplaced) {
  FabricConfig config = OnNetwork();
  config.require_rdma = true;
  const auto refused = PlanFabric(config, {Verbs({Card("mlx5_0", "RoCE", "port 1 is down")}), Ofi({})});
  EXPECT_EQ(refused.status().code(), Code::kUnsupported);
  EXPECT_THAT(refused.status().message(), AllOf(HasSubstr("required"), HasSubstr("port 1 is down")));
  EXPECT_EQ(PlanFabric(config, {Verbs({Card("mlx5_0", "RoCE")}), Ofi({})})->transport, "verbs");
  config.listen_address = "127.0.0.1";
  EXPECT_FALSE(PlanFabric(config, {Verbs({}), Ofi({})}).ok()) << "also where the nodes are on one machine";
}

TEST(PlanFabric, OnLoopbackTheNodesAreOnOneMachineAndTcpIsNoFallback) {
  for (const char* address : {"127.0.0.1", "127.0.0.2:5000", "::1", "[::1]:5000"}) {
    FabricConfig config = OnNetwork();
    config.listen_address = address;
    const auto plan = PlanFabric(config, {Verbs({Card("mlx5_0", "RoCE")}), Ofi({})});
    EXPECT_EQ(plan->transport, "tcp") << address;
    EXPECT_EQ(plan->fallback, "");
  }
}

TEST(PlanFabric, OnlyDevicesThatWereAskedForCount) {
  FabricConfig config = OnNetwork();
  config.devices = {"eth0"};
  const auto plan = PlanFabric(config, {Verbs({Card("mlx5_0", "RoCE")}), Ofi({})});
  EXPECT_EQ(plan->transport, "tcp");
  EXPECT_NE(plan->fallback, "");
  config.devices = {"mlx5_0:2"};
  EXPECT_EQ(PlanFabric(config, {Verbs({Card("mlx5_0", "RoCE")}), Ofi({})})->transport, "verbs")
      << "a port of it";
}

TEST(PlanFabric, WhatIsAskedForByNameIsTaken) {
  EXPECT_EQ(PlanFabric(OnNetwork("ucx"), {})->transport, "ucx");
  EXPECT_EQ(PlanFabric(OnNetwork("verbs"), {Verbs({})})->transport, "verbs")
      << "its factory says what is missing";
  const FabricListing both = Ofi({Card("efa0", "efa")});
  EXPECT_EQ(PlanFabric(OnNetwork("ofi"), {Verbs({Card("mlx5_0", "RoCE")}), both})->provider, "efa");
  FabricConfig config = OnNetwork("ofi");
  config.listen_address = "127.0.0.1";
  EXPECT_EQ(PlanFabric(config, {both})->provider, "efa") << "also where the nodes are on one machine";
  for (const char* provider : {"efa", "shm"}) {
    config.provider = provider;
    EXPECT_EQ(PlanFabric(config, {})->provider, provider);
  }
}

TEST(PlanFabric, AProviderThatTrustsItsPeersIsTakenOnlyWhenToldTo) {
  for (const char* address : {"10.0.0.3:7000", "127.0.0.1"})
    for (const char* transport : {"ofi", "auto"})
      for (const char* provider : {"tcp;ofi_rxm", "verbs;ofi_rxm", "tcp", "net", "sockets", "udp;ofi_rxd"}) {
        FabricConfig config = OnNetwork(transport);
        config.listen_address = address;
        config.provider = provider;
        const auto refused = PlanFabric(config, {});
        EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << provider << " at " << address;
        EXPECT_THAT(refused.status().message(), AllOf(HasSubstr(std::string("\"") + provider + "\""),
                                                      HasSubstr("--transport tcp"), HasSubstr("--insecure")));
        config.insecure = true;
        EXPECT_EQ(PlanFabric(config, {})->provider, provider);
      }
}

TEST(PlanFabric, OfiWithoutEfaIsRefusedUnlessToldTo) {
  FabricConfig config = OnNetwork("ofi");
  const std::vector<FabricListing> listings = {Verbs({Card("mlx5_0", "RoCE")}), Ofi({})};
  const auto refused = PlanFabric(config, listings);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(),
              AllOf(HasSubstr("no EFA device"), HasSubstr("tcp;ofi_rxm"), HasSubstr("--transport tcp")));
  config.insecure = true;
  EXPECT_EQ(PlanFabric(config, listings)->provider, "tcp;ofi_rxm");
  EXPECT_EQ(PlanFabric(config, listings)->fallback, "") << "it was asked for";
  config.require_rdma = true;
  EXPECT_EQ(PlanFabric(config, listings).status().code(), Code::kUnsupported);
}

TEST(PlanFabric, NonsenseIsRefusedByName) {
  EXPECT_THAT(PlanFabric(OnNetwork("pigeon"), {}).status().message(), HasSubstr("pigeon"));
  FabricConfig config = OnNetwork("verbs");
  config.provider = "efa";
  EXPECT_THAT(PlanFabric(config, {}).status().message(), AllOf(HasSubstr("efa"), HasSubstr("ofi")));
}

TEST(ListFabrics, EachTransportIsThereOrSaysWhyNot) {
  const std::vector<FabricListing> listings = ListFabrics();
  ASSERT_EQ(listings.size(), 4u);
  for (const FabricListing& listing : listings)
    EXPECT_NE(listing.library.empty(), listing.missing.empty()) << listing.transport;
}

TEST(CreateFabric, MakesWhatWasPlanned) {
  const auto made = CreateFabric({});
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  EXPECT_EQ(made->transport->capabilities().name, "tcp");
  EXPECT_EQ(made->transport->capabilities().provider, "");
  EXPECT_EQ(made->transport->capabilities().devices, "lo");
  EXPECT_EQ(made->fallback, "");
}

// UCX does not replace it either; it replaces TCP only if no provider was named.
TEST(CreateFabric, AProviderThatWasNamedIsNotReplaced) {
  FabricConfig config;
  config.provider = "tcp;ofi_rxm";
  EXPECT_EQ(CreateFabric(config).status().code(), Code::kInvalidArgument);
  config.insecure = true;
  const auto made = CreateFabric(config);
  if (ListOfiDevices().missing.empty()) {
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_EQ(made->transport->capabilities().provider, config.provider);
  } else {
    EXPECT_EQ(made.status().code(), Code::kUnsupported);
  }
}

// ---- what UCX may use

FabricListing Ucx() {
  FabricDevice ethernet;
  ethernet.name = "eth0";
  return {
      "ucx", "UCX 1.13", "", {ethernet, Card("mlx5_0:1", "rc_mlx5"), Card("mlx5_1:1", "rc_mlx5", "down")}};
}

TEST(UcxDevices, OnLoopbackNothingListensToTheOutside) {
  FabricConfig config;
  config.listen_address = "127.0.0.2:7000";
  EXPECT_EQ(*UcxDevices(config, Ucx()), std::vector<std::string>{"lo"});
  config.require_rdma = true;
  EXPECT_EQ(*UcxDevices(config, Ucx()), (std::vector<std::string>{"lo", "mlx5_0:1"}));
}

TEST(UcxListens, WhereOthersReachItOnlyWhenToldTo) {
  const FabricListing ucx{
      "ucx", "UCX 1.13", "", {Card("eth0", "tcp"), Card("lo", "tcp"), Card("mlx5_0:1", "rc_mlx5,ud_mlx5")}};
  FabricConfig config;
  const Status refused = CheckUcxListens(config, {"eth0", "mlx5_0:1"}, ucx);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("listens by tcp on eth0"));
  EXPECT_TRUE(CheckUcxListens(config, {"mlx5_0:1"}, ucx).ok());
  EXPECT_TRUE(CheckUcxListens(config, {"lo"}, ucx).ok());
  config.insecure = true;
  EXPECT_TRUE(CheckUcxListens(config, {"eth0", "mlx5_0:1"}, ucx).ok());
}

TEST(UcxDevices, WhatWasNamedIsLeftAsItIs) {
  FabricConfig config;
  config.devices = {"mlx5_1:1"};
  EXPECT_EQ(*UcxDevices(config, Ucx()), config.devices);
}

TEST(UcxDevices, AnAddressThatIsNotHereIsAnErrorThatNamesIt) {
  FabricConfig config;
  config.listen_address = "198.51.100.77";
  const auto devices = UcxDevices(config, Ucx());
  ASSERT_FALSE(devices.ok());
  EXPECT_THAT(devices.status().message(), HasSubstr("198.51.100.77"));
}

}  // namespace
}  // namespace ropeteam
