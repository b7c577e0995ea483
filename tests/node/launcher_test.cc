// SPDX-License-Identifier: Apache-2.0
#include "api/cli/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/cli/etcd_member.h"
#include "api/cli/run_options.h"

namespace ropeteam::cli {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Result<Settings> Choose(const Variables& flags, const Variables& variables,
                        const std::string& own_address = "10.0.0.9") {
  const Environment environment = [&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  return ChooseSettings(flags, environment, [&](const std::string&) { return own_address; });
}

struct Expected {
  std::string value;
  std::string from;
};

struct LauncherCase {
  std::string name;
  Variables flags;
  Variables variables;
  std::map<std::string, Expected> expected;
};
void PrintTo(const LauncherCase& launcher, std::ostream* out) { *out << launcher.name; }

class Launchers : public ::testing::TestWithParam<LauncherCase> {};

TEST_P(Launchers, GiveWhatIsNotTold) {
  const Result<Settings> settings = Choose(GetParam().flags, GetParam().variables);
  ASSERT_TRUE(settings.ok()) << settings.status().ToString();
  for (const auto& [option, expected] : GetParam().expected) {
    if (expected.value.empty()) {
      EXPECT_FALSE(settings->contains(option)) << option;
      continue;
    }
    ASSERT_TRUE(settings->contains(option)) << option;
    EXPECT_EQ(settings->at(option).value, expected.value) << option;
    EXPECT_EQ(settings->at(option).from, expected.from) << option;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, Launchers,
    ::testing::Values(
        LauncherCase{"nothing",
                     {},
                     {},
                     {{"job", {"local", "default"}},
                      {"node", {"node-0", "default"}},
                      {"nodes", {"1", "default"}},
                      {"ordinal", {"0", "default"}},
                      {"coordinator", {}},
                      {"listen", {}},
                      {"memory", {}}}},
        LauncherCase{"skypilot",
                     {},
                     {{"SKYPILOT_TASK_ID", "sky-1"},
                      {"SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2\n10.0.0.3"},
                      {"SKYPILOT_NODE_RANK", "1"},
                      {"SKYPILOT_NUM_NODES", "3"},
                      {"MASTER_ADDR", "unused"}},
                     {{"job", {"sky-1", "SKYPILOT_TASK_ID"}},
                      {"node", {"node-1", "default"}},
                      {"nodes", {"3", "SKYPILOT_NUM_NODES"}},
                      {"ordinal", {"1", "SKYPILOT_NODE_RANK"}},
                      {"coordinator", {"10.0.0.1:29600", "SKYPILOT_NODE_IPS"}},
                      {"listen", {"10.0.0.2", "SKYPILOT_NODE_IPS"}}}},
        LauncherCase{"slurm",
                     {},
                     {{"SLURM_JOB_ID", "4711"},
                      {"SLURM_NODEID", "2"},
                      {"SLURM_NNODES", "4"},
                      {"SLURM_JOB_NODELIST", "gpu[003-006]"},
                      {"SLURMD_NODENAME", "gpu005"}},
                     {{"job", {"4711", "SLURM_JOB_ID"}},
                      {"node", {"gpu005", "SLURMD_NODENAME"}},
                      {"nodes", {"4", "SLURM_NNODES"}},
                      {"ordinal", {"2", "SLURM_NODEID"}},
                      {"coordinator", {"gpu003:29600", "SLURM_JOB_NODELIST"}},
                      {"listen", {"10.0.0.9", "the way to gpu003"}}}},
        LauncherCase{"torchrun",
                     {},
                     {{"TORCHELASTIC_RUN_ID", "run-9"},
                      {"MASTER_ADDR", "10.0.0.1"},
                      {"GROUP_RANK", "1"},
                      {"NNODES", "2:4"}},
                     {{"job", {"run-9", "TORCHELASTIC_RUN_ID"}},
                      {"nodes", {"2", "NNODES"}},
                      {"ordinal", {"1", "GROUP_RANK"}},
                      {"coordinator", {"10.0.0.1:29600", "MASTER_ADDR"}},
                      {"listen", {"10.0.0.9", "the way to 10.0.0.1"}}}},
        LauncherCase{
            "torchrun_without_an_id", {}, {{"TORCHELASTIC_RUN_ID", "none"}}, {{"job", {"local", "default"}}}},
        LauncherCase{"our_own_variables_before_launchers",
                     {},
                     {{"ROPETEAM_JOB", "mine"},
                      {"ROPETEAM_NODES", "2"},
                      {"ROPETEAM_ORDINAL", "1"},
                      {"ROPETEAM_NODE", "left"},
                      {"ROPETEAM_COORDINATOR", "h:1"},
                      {"ROPETEAM_LISTEN", "127.0.0.2"},
                      {"ROPETEAM_CHUNK_SIZE", "1M"},
                      {"SKYPILOT_TASK_ID", "sky-1"},
                      {"SKYPILOT_NUM_NODES", "3"},
                      {"SKYPILOT_NODE_RANK", "2"}},
                     {{"job", {"mine", "ROPETEAM_JOB"}},
                      {"nodes", {"2", "ROPETEAM_NODES"}},
                      {"ordinal", {"1", "ROPETEAM_ORDINAL"}},
                      {"node", {"left", "ROPETEAM_NODE"}},
                      {"coordinator", {"h:1", "ROPETEAM_COORDINATOR"}},
                      {"listen", {"127.0.0.2", "ROPETEAM_LISTEN"}},
                      {"chunk-size", {"1M", "ROPETEAM_CHUNK_SIZE"}}}},
        LauncherCase{"flags_before_everything",
                     {{"job", "flag"}, {"memory", "1G"}},
                     {{"ROPETEAM_JOB", "mine"}, {"SLURM_JOB_ID", "1"}, {"ROPETEAM_MEMORY", "2G"}},
                     {{"job", {"flag", "--job"}}, {"memory", {"1G", "--memory"}}}},
        LauncherCase{"over_etcd_no_node_is_the_coordinator",
                     {{"membership", "etcd://ada@e1:2379,e2:2379/p@q"}},
                     {{"MASTER_ADDR", "10.0.0.1"}, {"NNODES", "3"}, {"NODE_RANK", "0"}},
                     {{"coordinator", {}}, {"listen", {"10.0.0.9", "the way to e1"}}}},
        LauncherCase{"an_empty_variable_is_not_set",
                     {},
                     {{"ROPETEAM_JOB", ""}, {"SLURM_JOB_ID", "5"}},
                     {{"job", {"5", "SLURM_JOB_ID"}}}},
        LauncherCase{"the_coordinators_port",
                     {},
                     {{"SKYPILOT_NODE_IPS", "fd00::1 fd00::2"},
                      {"SKYPILOT_NUM_NODES", "2"},
                      {"SKYPILOT_NODE_RANK", "1"},
                      {"ROPETEAM_COORDINATOR_PORT", "77"}},
                     {{"coordinator", {"[fd00::1]:77", "SKYPILOT_NODE_IPS"}}}}),
    [](const auto& info) { return info.param.name; });

TEST(LauncherErrors, NameTheVariable) {
  EXPECT_THAT(Choose({}, {{"SLURM_NNODES", "many"}}).status().message(),
              HasSubstr("SLURM_NNODES is \"many\""));
  EXPECT_THAT(Choose({}, {{"NODE_RANK", "-1"}}).status().message(), HasSubstr("NODE_RANK is \"-1\""));
  EXPECT_THAT(Choose({{"nodes", "3"}, {"ordinal", "0"}}, {}).status().message(), HasSubstr("--coordinator"));
}

// Otherwise every node would take position 0, and run a coordinator for itself alone.
TEST(LauncherErrors, OfSeveralNodesEachMustKnowWhichItIs) {
  const Variables variables = {{"MASTER_ADDR", "127.0.0.1"}, {"NNODES", "2"}};
  EXPECT_THAT(Choose({}, variables, "127.0.0.1").status().message(),
              HasSubstr("a job of 2 nodes (NNODES) without this node's position: give --ordinal"));
  EXPECT_TRUE(Choose({{"ordinal", "1"}}, variables, "127.0.0.1").ok());
}

TEST(LauncherErrors, ANameThatMeansThisMachineOnlyToItselfIsNoAddressForPeers) {
  const Variables variables = {{"MASTER_ADDR", "trainhost"}, {"NNODES", "2"}, {"NODE_RANK", "1"}};
  const Result<Settings> settings = Choose({}, variables, "127.0.1.1");
  ASSERT_FALSE(settings.ok());
  EXPECT_THAT(settings.status().message(), HasSubstr("127.0.1.1"));
  EXPECT_THAT(settings.status().message(), HasSubstr("--listen"));
  EXPECT_TRUE(
      Choose({}, {{"MASTER_ADDR", "127.0.0.1"}, {"NNODES", "2"}, {"NODE_RANK", "1"}}, "127.0.0.1").ok())
      << "said so: one machine";
  EXPECT_FALSE(Choose({}, variables, "").ok()) << "no way known";
}

TEST(FirstSlurmHost, UnderstandsItsLists) {
  EXPECT_EQ(FirstSlurmHost("gpu1"), "gpu1");
  EXPECT_EQ(FirstSlurmHost("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(FirstSlurmHost("gpu[003-010,12],x7"), "gpu003");
  EXPECT_EQ(FirstSlurmHost("gpu[7,9]"), "gpu7");
  EXPECT_EQ(FirstSlurmHost("r[1-2]n[5-6]"), "r1n5");
  EXPECT_EQ(FirstSlurmHost("r[1-2]-ib,other[3]"), "r1-ib");
  EXPECT_EQ(FirstSlurmHost("gpu[1-2"), "");
  EXPECT_EQ(FirstSlurmHost(""), "");
}

TEST(Flags, AreTakenFromVariablesUnlessTheyWereGiven) {
  const auto choose = [](const std::vector<std::string>& given, const Variables& variables) {
    return ChooseFlags(given, [&](const std::string& name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(choose({}, {}).value(), ElementsAre());
  EXPECT_THAT(choose({}, {{"ROPETEAM_REQUIRE_RDMA", "1"}}).value(), ElementsAre("require-rdma"));
  EXPECT_THAT(
      choose({"arena-reset"}, {{"ROPETEAM_REQUIRE_RDMA", "true"}, {"ROPETEAM_ARENA_RESET", "0"}}).value(),
      ElementsAre("arena-reset", "require-rdma"));
  EXPECT_THAT(choose({}, {{"ROPETEAM_REQUIRE_RDMA", "false"}, {"ROPETEAM_ARENA_RESET", ""}}).value(),
              ElementsAre());
  EXPECT_THAT(choose({"no-embed-coordinator"}, {{"ROPETEAM_EMBED_COORDINATOR", "1"}}).value(),
              ElementsAre("no-embed-coordinator"));
  const auto refused = choose({}, {{"ROPETEAM_REQUIRE_RDMA", "yes"}});
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(),
              ::testing::AllOf(HasSubstr("ROPETEAM_REQUIRE_RDMA"), HasSubstr("yes")));
}

TEST(RunOptions, SplitsItsOwnTheDaemonsAndTheCommand) {
  const Result<RunOptions> options = ParseRunOptions({"--job=j", "--memory", "1G", "--arena-reset", "--quiet",
                                                      "--ready-timeout", "5", "--", "torchrun", "--", "x"});
  ASSERT_TRUE(options.ok()) << options.status().ToString();
  EXPECT_EQ(options->daemon_values, (Variables{{"job", "j"}, {"memory", "1G"}}));
  EXPECT_THAT(options->daemon_flags, ::testing::ElementsAre("arena-reset"));
  EXPECT_TRUE(options->quiet);
  EXPECT_EQ(options->ready_timeout_s, 5u);
  EXPECT_THAT(options->command, ::testing::ElementsAre("torchrun", "--", "x"));
}

TEST(RunOptions, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(ParseRunOptions({"--nosuch", "--", "x"}).status().message(), HasSubstr("--nosuch"));
  EXPECT_THAT(ParseRunOptions({"torchrun"}).status().message(), HasSubstr("behind --"));
  EXPECT_THAT(ParseRunOptions({"--job", "--", "x"}).status().message(), HasSubstr("--job has no value"));
  EXPECT_THAT(ParseRunOptions({"--job=j"}).status().message(), HasSubstr("no command"));
  EXPECT_THAT(ParseRunOptions({"--job=j", "--"}).status().message(), HasSubstr("no command"));
  EXPECT_EQ(ParseRunOptions({"--job=j", "--memory", "1G", "--job", "k", "--", "x"}).status().message(),
            "--job is given twice");
  EXPECT_THAT(ParseRunOptions({"--quiet=yes", "--", "x"}).status().message(), HasSubstr("--quiet"));
  EXPECT_THAT(ParseRunOptions({"--ready-timeout=0", "--", "x"}).status().message(),
              HasSubstr("--ready-timeout"));
}

TEST(EtcdMember, HostsAreOneOrThreeWithAPortEach) {
  const auto hosts = ParseEtcdHosts("a,b:7,[fe80::1]:8");
  ASSERT_TRUE(hosts.ok()) << hosts.status().ToString();
  EXPECT_EQ(EtcdUrlOf(*hosts), "etcd://a:29610,b:7,[fe80::1]:8/ropeteam");
  EXPECT_EQ(EtcdUrlOf(*ParseEtcdHosts("fe80::1")), "etcd://[fe80::1]:29610/ropeteam");
  for (const char* bad : {"", "a,b", "a,b,c,d", "a,,c", "a:0", "a:x", "a:65535", "http://a"})
    EXPECT_EQ(ParseEtcdHosts(bad).status().code(), Code::kInvalidArgument) << bad;
}

TEST(JobOf, AnotherCommandLineIsAnotherJobAndTheSameOneGoesOn) {
  const std::string job = JobOf({"python", "sweep.py", "0.1"}, "/home/a");
  EXPECT_THAT(job, ::testing::MatchesRegex("sweep-[0-9a-f]{8}"));
  EXPECT_EQ(JobOf({"python", "sweep.py", "0.1"}, "/home/a"), job);
  EXPECT_NE(JobOf({"python", "sweep.py", "0.001"}, "/home/a"), job);
  EXPECT_NE(JobOf({"python", "sweep.py", "0.1"}, "/home/b"), job);
  EXPECT_NE(JobOf({"python", "other/sweep.py", "0.1"}, "/home/a"), job);
  EXPECT_NE(JobOf({"python", "sweep.py", "0", ".1"}, "/home/a"),
            JobOf({"python", "sweep.py", "0.1"}, "/home/a"));
  // The number of processes is not the program's.
  EXPECT_EQ(JobOf({"torchrun", "--nproc-per-node", "4", "sweep.py", "0.1"}, "/home/a"), job);
  EXPECT_EQ(
      JobOf({"/usr/bin/python3", "-m", "torch.distributed.run", "--nproc-per-node", "2", "sweep.py", "0.1"},
            "/home/a"),
      job);
  EXPECT_EQ(JobOf({"torchrun", "--module", "train", "1"}, "/"), JobOf({"python", "-m", "train", "1"}, "/"));
  // What is no launcher counts as a whole.
  EXPECT_NE(JobOf({"bash", "run1.sh", "conf.py"}, "/"), JobOf({"bash", "run2.sh", "conf.py"}, "/"));
  EXPECT_NE(JobOf({"/bin/echo", "-m", "10"}, "/"), JobOf({"/usr/bin/printf", "-m", "10"}, "/"));
}

TEST(JobOf, IsTheNameOfTheProgramInPlainLetters) {
  EXPECT_TRUE(JobOf({"/opt/bin/train it"}, "/").starts_with("train_it-"));
  EXPECT_TRUE(JobOf({"python", "-m", "pkg.train", "x.py"}, "/").starts_with("pkg.train-"));
  EXPECT_TRUE(JobOf({"sh", "-c", "a"}, "/").starts_with("sh-"));
  EXPECT_TRUE(JobOf({"./.hidden"}, "/").starts_with("job.hidden-"));
  EXPECT_EQ(JobOf({std::string(300, 'x')}, "/").size(), 40u + 9u);
}

TEST(EtcdMember, AMemberThatHasRunBeforeIsReplacedAndANewClusterIsBegunTogether) {
  const std::string others =
      R"({"ID":1,"name":"ropeteam-1","peerURLs":["http://b:2"],"clientURLs":["http://b:1"]},)"
      R"({"ID":2,"name":"ropeteam-2","peerURLs":["http://c:2"],"clientURLs":["http://c:1"]})";
  const auto decide = [&](const std::string& own) {
    const auto entry = DecideEntry(R"({"members":[)" + own + others + "]}", "ropeteam-0", "http://a:2");
    EXPECT_TRUE(entry.ok()) << entry.status().ToString();
    return *entry;
  };
  EtcdEntry entry =
      decide(R"({"ID":255,"name":"ropeteam-0","peerURLs":["http://a:2"],"clientURLs":["http://a:1"]},)");
  EXPECT_FALSE(entry.begin);
  EXPECT_EQ(entry.remove, "ff");
  EXPECT_EQ(entry.members, "ropeteam-1=http://b:2,ropeteam-2=http://c:2");
  entry =
      decide(R"({"ID":255,"name":"ropeteam-0","peerURLs":["http://old:2"],"clientURLs":["http://old:1"]},)");
  EXPECT_EQ(entry.remove, "ff") << "it was at another address";
  entry = decide(R"({"ID":255,"peerURLs":["http://a:2"]},)");
  EXPECT_EQ(entry.remove, "ff") << "added, and lost before it started";
  EXPECT_FALSE(entry.begin);
  entry = decide(R"({"ID":255,"name":"ropeteam-0","peerURLs":["http://a:2"]},)");
  EXPECT_TRUE(entry.begin) << "it has not started yet";
  entry = decide("");
  EXPECT_FALSE(entry.begin);
  EXPECT_EQ(entry.remove, "");
  EXPECT_FALSE(DecideEntry("Error: x", "ropeteam-0", "http://a:2").ok());
}

}  // namespace
}  // namespace ropeteam::cli
