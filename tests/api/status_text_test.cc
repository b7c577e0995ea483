// SPDX-License-Identifier: Apache-2.0
//
// What `ropeteam status` makes of a daemon's answer.

#include "api/cli/status_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ropeteam::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

Json Answer(const Json& transport) {
  Json daemon = {{"node", "node-1"}, {"socket", "/s"}, {"data", "somewhere"}};
  daemon.update(transport);
  return {{"job", "j"},   {"epoch", 1},       {"leader", "node-0"},  {"nodes_expected", 1},
          {"nodes", {}},  {"incarnation", 1}, {"world_size", 1},     {"ranks_open", 0},
          {"latest", {}}, {"steps", {}},      {"has_latest", false}, {"daemon", daemon}};
}

std::string Shown(const Json& transport) { return RenderStatus(Answer(transport), nullptr, 0); }

TEST(StatusText, TheLinesOfTheNodeThatWasAskedNameTransportDevicesAndLinkSpeed) {
  EXPECT_THAT(
      Shown({{"transport", "verbs"}, {"devices", "mlx5_0,mlx5_1"}, {"link_mbps", 800'000}, {"rdma", true}}),
      HasSubstr("transport verbs   devices mlx5_0,mlx5_1   link 800.0 Gb/s   RDMA\n"));
  EXPECT_THAT(Shown({{"transport", "ucx"}, {"devices", "eth0"}, {"link_mbps", 100}, {"rdma", false}}),
              HasSubstr("transport ucx   devices eth0   link 100 Mb/s   no RDMA\n"));
}

TEST(StatusText, ASpeedThatNoDeviceTellsIsUnknownAndNotZero) {
  const std::string shown =
      Shown({{"transport", "ofi"}, {"devices", "lo"}, {"link_mbps", 0}, {"rdma", false}});
  EXPECT_THAT(shown, HasSubstr("devices lo   link speed unknown   no RDMA\n"));
  EXPECT_THAT(shown, Not(HasSubstr("0 Mb/s")));
}

}  // namespace
}  // namespace ropeteam::cli
