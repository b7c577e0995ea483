// SPDX-License-Identifier: Apache-2.0
//
// The output of `ropeteam status` for a daemon's answer.

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

// A node's report, to which each test adds fields.
Json Node() {
  const Json counters = {{"replica_bytes_sent", 0}, {"replica_bytes_held", 0}, {"fetch_bytes", 0},
                         {"last_replicated_us", 0}, {"saves_refused", 0},      {"chunks_bad", 0},
                         {"chunks_repaired", 0}};
  return {{"id", "1"},        {"name", "node-7"},        {"chunk_bytes", 4096},       {"chunks_total", 4},
          {"chunks_free", 4}, {"copies", Json::array()}, {"sessions", Json::array()}, {"counters", counters}};
}

std::string ShownNode(const Json& node) {
  Json answer = Answer({{"transport", "ucx"}});
  answer["nodes"] = Json::array({node});
  return RenderStatus(answer, nullptr, 0);
}

std::string ShownScrub(const Json& scrub) {
  Json node = Node();
  if (!scrub.is_null()) node["scrub"] = scrub;
  const std::string shown = ShownNode(node);
  const size_t line = shown.find("node-7");
  const std::string row = shown.substr(line, shown.find('\n', line) - line);
  return row.substr(row.find("0/0") == std::string::npos ? 0 : row.rfind("0/0") + 3);
}

TEST(StatusText, SaysWhichNodeHasNoLeaseAndWhichTwoHaveLostEachOther) {
  Json node = Node();
  EXPECT_THAT(ShownNode(node), Not(HasSubstr("lease"))) << "a daemon of another build";
  node["has_lease"] = true;
  node["lost_links"] = Json::array();
  EXPECT_THAT(ShownNode(node), Not(HasSubstr("lease")));
  node["has_lease"] = false;
  node["lost_links"] = {{{"peer", "node-8"}, {"reason", "link failed"}, {"lost_for_us", 12'900'000}}};
  EXPECT_THAT(ShownNode(node), HasSubstr("node-7 has no lease: it does not reach"));
  EXPECT_THAT(ShownNode(node), HasSubstr("node-7 has not reached node-8 for 12 s (link failed)"));
  node["lost_links"][0]["control"] = true;
  node["lost_links"][0]["peer"] = "node-0";
  EXPECT_THAT(ShownNode(node),
              HasSubstr("node-0 (leader) and node-7 do not reach each other (control), 12 s"));
  EXPECT_THAT(ShownNode(node), Not(HasSubstr("has not reached")));
  node["lost_links"][0]["data"] = true;
  EXPECT_THAT(ShownNode(node), HasSubstr("do not reach each other (control and data), 12 s"));
}

TEST(StatusText, NamesTheNodesThatAreMissingAndWhatTheJobWaitsFor) {
  Json answer = Answer({{"transport", "ucx"}});
  answer["nodes"] = Json::array({Node()});
  EXPECT_EQ(RosterText(answer), "") << "a daemon of another build";
  answer["roster"] = {{"nodes", 4}, {"missing", 0}, {"missing_names", ""}, {"waiting", ""}};
  EXPECT_EQ(RosterText(answer), "");
  answer["roster"] = {{"nodes", 4}, {"missing", 2}, {"missing_names", "a, b"}, {"waiting", "waits 9 s more"}};
  EXPECT_THAT(
      RenderStatus(answer, nullptr, 0),
      HasSubstr("MISSING 2 of the 4 nodes that know of the newest commit: a, b\nWAITING: waits 9 s more\n"));
}

TEST(StatusText, ANodeShowsWhenItsLastScrubEndedAndHowFastItWas) {
  const Json scrub = {{"bytes_per_s", 100 << 20},
                      {"passes", 3},
                      {"pass_ended_us_ago", 42'900'000},
                      {"pass_us", 2'000'000},
                      {"pass_bytes", 200 << 20}};
  EXPECT_THAT(ShownScrub(scrub), ::testing::MatchesRegex(" +42 s ago, 100.0 MiB/s *"));
  Json old = scrub;
  old["pass_ended_us_ago"] = 600'000'000;
  EXPECT_THAT(ShownScrub(old), HasSubstr("10 min ago"));
  old["pass_ended_us_ago"] = 36'000'000'000;
  EXPECT_THAT(ShownScrub(old), HasSubstr("10 h ago"));
  Json empty = scrub;
  empty["pass_us"] = 0;
  empty["pass_bytes"] = 0;
  EXPECT_THAT(ShownScrub(empty), ::testing::MatchesRegex(" +42 s ago *"));
}

TEST(StatusText, AScrubThatIsOffOrHasNotEndedYetSaysSo) {
  Json scrub = {
      {"bytes_per_s", 0}, {"passes", 0}, {"pass_ended_us_ago", 0}, {"pass_us", 0}, {"pass_bytes", 0}};
  EXPECT_THAT(ShownScrub(scrub), HasSubstr("off"));
  scrub["bytes_per_s"] = 1;
  EXPECT_THAT(ShownScrub(scrub), HasSubstr("not yet"));
  EXPECT_THAT(ShownScrub(nullptr), ::testing::MatchesRegex(" +- *"));
}

Json Copy(const char* node, uint64_t incarnation, uint64_t rank, const char* role = "own") {
  return {{"node", node},  {"id", {{"incarnation", incarnation}, {"step", 7}, {"rank", rank}}},
          {"replicas", 1}, {"role", role},
          {"chunks", 1},   {"bad", Json::array()}};
}

// Two ranks of step 7, saved with one copy on another node; `copies` are those that the nodes have checked.
Json Verified(const Json& copies, bool truncated = false) {
  Json verify = {{"incarnation", 2}, {"step", 7},       {"nodes_asked", {"a", "b"}},
                 {"chunks", 3},      {"chunks_bad", 0}, {"copies", copies}};
  if (truncated) verify["truncated"] = true;
  const Json former = {{"incarnation", 1}, {"world_size", 9}, {"ranks_replicated", 0}};
  const Json step = {{"incarnation", 2}, {"world_size", 2}, {"ranks_replicated", 1}};
  const Json list = {{"steps", {step, former}}, {"copies", {Copy("a", 2, 0)}}};
  AddMissingCopies(list, &verify);
  return verify;
}

TEST(StatusText, VerifyNamesTheRanksThatLackCopies) {
  const Json verify =
      Verified({Copy("a", 2, 0), Copy("b", 2, 0, "replica"), Copy("b", 2, 1), Copy("a", 2, 1, "cache")});
  EXPECT_EQ(verify["ranks_short"], 1);
  EXPECT_THAT(RenderVerify(verify), HasSubstr("missing: step 7 rank 1 has 1 of 2 copies\n"));
  EXPECT_THAT(RenderVerify(verify), HasSubstr("ranks that lack copies 1\n"));
}

TEST(StatusText, VerifyIsAllGoodWithEveryCopy) {
  const Json verify =
      Verified({Copy("a", 2, 0), Copy("b", 2, 0, "replica"), Copy("b", 2, 1), Copy("a", 2, 1, "replica")});
  EXPECT_EQ(verify["ranks_short"], 0);
  EXPECT_THAT(RenderVerify(verify), HasSubstr(", all good\n"));
}

TEST(StatusText, VerifyDoesNotCountACopyWhoseKeyItsNodeLacks) {
  Json unreadable = Copy("b", 2, 0, "replica");
  unreadable["key"] = "1a2b3c4d";
  unreadable["readable"] = false;
  const Json verify = Verified({Copy("a", 2, 0), unreadable, Copy("b", 2, 1), Copy("a", 2, 1, "replica")});
  EXPECT_EQ(verify["ranks_short"], 1);
  EXPECT_THAT(
      RenderVerify(verify),
      HasSubstr("unreadable: node b step 7 rank 0 incarnation 2 is encrypted with key 1a2b3c4d, which the "
                "node lacks (replica)\n"));
  EXPECT_THAT(RenderVerify(verify), Not(HasSubstr("all good")));
}

TEST(StatusText, SaysWhichKeyIsNeededByHowManyCopiesAndWhichMayBeRemoved) {
  Json answer = Answer({{"transport", "ucx"}});
  EXPECT_THAT(RenderStatus(answer, nullptr, 0), Not(HasSubstr("key ")));
  Json old = {{"key", "1a2b3c4d"}, {"first_on", Json::array()}, {"on", {"a", "b"}},          {"copies", 28},
              {"unreadable", 0},   {"removable", false},        {"absent_on", Json::array()}};
  const Json fresh = {{"key", "3c4d5e6f"}, {"first_on", {"a", "b"}},     {"on", {"a", "b"}},  {"copies", 12},
                      {"unreadable", 0},   {"absent_on", Json::array()}, {"removable", false}};
  answer["keys"] = {old, fresh};
  EXPECT_THAT(
      RenderStatus(answer, nullptr, 0),
      HasSubstr("key 1a2b3c4d   second on a,b   copies 28: keep it until no copy needs it and all nodes are "
                "here\nkey 3c4d5e6f   encrypts on a,b   copies 12\n"));
  old["copies"] = 0;
  old["removable"] = true;
  answer["keys"] = {old, fresh};
  EXPECT_THAT(RenderStatus(answer, nullptr, 0),
              HasSubstr("key 1a2b3c4d   second on a,b   copies 0: it may be removed\n"));
  old = {{"key", "1a2b3c4d"}, {"first_on", Json::array()}, {"on", Json::array()}, {"copies", 3},
         {"unreadable", 3},   {"removable", false},        {"absent_on", {"b"}}};
  answer["keys"] = {old, fresh};
  EXPECT_THAT(
      RenderStatus(answer, nullptr, 0),
      HasSubstr("key 1a2b3c4d   copies 3\n  3 copies DO NOT COUNT: the key is not on b; put it back there"));
}

TEST(StatusText, WhereCopiesWereCutOffTheLeadersCountDecides) {
  EXPECT_EQ(Verified({Copy("a", 2, 0)}, true)["ranks_short"], 1);
}

TEST(StatusText, AScreenIsDrawnOverWhatWasThere) {
  EXPECT_EQ(Redraw("one\ntwo and more\n", 10, 5), "\x1b[Hone\x1b[K\ntwo a\x1b[K\n\x1b[J");
  EXPECT_EQ(Redraw("1\n2\n3\n4\n", 4, 80), "\x1b[H1\x1b[K\n2\x1b[K\n\xe2\x80\xa6 2 more lines\x1b[K\n\x1b[J");
  EXPECT_EQ(Redraw("1\n2\n3\n", 4, 80), "\x1b[H1\x1b[K\n2\x1b[K\n3\x1b[K\n\x1b[J");
}

TEST(StatusText, APolicyHasWhereItComesFrom) {
  Json answer = Answer({{"transport", "ucx"}});
  Json& policy = answer["policy"] = nullptr;
  EXPECT_THAT(RenderStatus(answer, nullptr, 0), Not(HasSubstr("storage persists")));
  policy = {{"persist_every", 500},
            {"persist_every_seconds", false},
            {"persist_every_by", "rank 3"},
            {"keep", "--keep-on-storage 5"},
            {"keep_by", "flag"},
            {"doubt", ""}};
  EXPECT_THAT(RenderStatus(answer, nullptr, 0),
              HasSubstr("storage persists every 500 steps (rank 3)   keeps --keep-on-storage 5 (flag)\n"));
  policy = {{"persist_every", 0},
            {"persist_every_seconds", false},
            {"persist_every_by", nullptr},
            {"keep", ""},
            {"keep_by", nullptr},
            {"doubt", "a and b differ"},
            {"trouble", "step 7: the disk is full"}};
  EXPECT_THAT(
      RenderStatus(answer, nullptr, 0),
      HasSubstr("storage persists what is asked for   keeps all steps   DELETES NOTHING: a and b differ\n"
                "NOT PERSISTED: step 7: the disk is full\n"));
}

}  // namespace
}  // namespace ropeteam::cli
