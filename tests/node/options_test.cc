// SPDX-License-Identifier: Apache-2.0
#include "node/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <vector>

#include "core/base/sizes.h"

namespace ropeteam {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Parsed {
  Status status;
  Options options;
  std::string print;
};

Parsed Parse(std::vector<const char*> arguments, const Secrets& secrets = {}) {
  arguments.insert(arguments.begin(), "ropeteamd");
  Parsed parsed;
  parsed.status = ParseOptions(static_cast<int>(arguments.size()), arguments.data(), secrets, &parsed.options,
                               &parsed.print);
  return parsed;
}

TEST(Options, TheDefaultsOfASingleNode) {
  const Parsed parsed = Parse({"--job", "train"});
  ASSERT_TRUE(parsed.status.ok()) << parsed.status.ToString();
  const Options& options = parsed.options;
  EXPECT_EQ(options.node, "node-0");
  EXPECT_EQ(options.listen, "127.0.0.1");
  EXPECT_EQ(options.replicas, 0u) << "a single node has nobody to copy to";
  EXPECT_TRUE(options.embed_coordinator);
  EXPECT_TRUE(options.coordinators.empty());
  EXPECT_EQ(options.memory_bytes, 0u) << "auto";
  EXPECT_EQ(options.chunk_bytes, 4u << 20);
  EXPECT_EQ(options.heartbeat_ms, 200u);
}

TEST(Options, MembershipOverEtcdNeedsNoCoordinatorAndTakesItsFiles) {
  const std::string path = ::testing::TempDir() + "etcd-password-" + std::to_string(getpid());
  std::ofstream(path) << "secret\r\n-----BEGIN CERTIFICATE-----\n";
  chmod(path.c_str(), 0644);
  const std::string password = "--etcd-password-file=" + path;
  const std::string ca = "--etcd-ca=" + path;
  const char* url = "--membership=etcd://ada@h1:2379,h2:2379/jobs";
  EXPECT_THAT(Parse({"--job=j", url, password.c_str()}).status.message(),
              AllOf(HasSubstr("--etcd-password-file " + path),
                    HasSubstr("may be read by others (mode 0644): chmod 600")));
  chmod(path.c_str(), 0600);
  const Parsed parsed = Parse({"--job=j", "--nodes=3", "--ordinal=2", url, password.c_str(), ca.c_str()});
  ASSERT_TRUE(parsed.status.ok()) << parsed.status.ToString();
  ASSERT_TRUE(parsed.options.etcd.has_value());
  EXPECT_EQ(parsed.options.etcd->endpoints, (std::vector<std::string>{"h1:2379", "h2:2379"}));
  EXPECT_EQ(parsed.options.etcd->password, "secret");
  EXPECT_TRUE(parsed.options.etcd->tls) << "a file of certificates asks for it";
  EXPECT_FALSE(parsed.options.embed_coordinator);
  EXPECT_FALSE(Parse({"--job=j"}).options.etcd.has_value());
  const auto refused = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "--job=j");
    return Parse(arguments).status.message();
  };
  EXPECT_THAT(refused({"--membership=zookeeper://h:1/p"}), HasSubstr("--membership is not standalone"));
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", "--coordinator=127.0.0.1:7"}),
              HasSubstr("any node may run"));
  EXPECT_THAT(refused({"--membership=etcd://ada@h:1/p"}), HasSubstr("etcd's user ada needs a password"));
  EXPECT_EQ(Parse({"--job=j", "--membership=etcd://ada@h:1/p"}, {"", "pw"}).options.etcd->password, "pw");
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", password.c_str()}), HasSubstr("without a user"));
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", "--etcd-cert=/dev/null"}), HasSubstr("go together"));
  chmod(path.c_str(), 0644);
  const std::string cert = "--etcd-cert=" + path;
  const std::string etcd_key = "--etcd-key=" + path;
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", cert.c_str(), etcd_key.c_str()}),
              HasSubstr("--etcd-key " + path + " may be read by others (mode 0644): chmod 600 " + path));
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", "--etcd-ca=/no/such"}),
              HasSubstr("cannot read /no/such"));
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", "--etcd-ca=/dev/null"}),
              HasSubstr("/dev/null is not in PEM"));
  EXPECT_THAT(refused({"--etcd-ca=/dev/null"}), HasSubstr("goes with --membership etcd://"));
  EXPECT_THAT(refused({"--membership=etcd://h:1/p", "--listen=10.0.0.1"}),
              HasSubstr("--listen 10.0.0.1 can be reached"));
  unlink(path.c_str());
}

TEST(Options, WhereOtherHostsReachItItNeedsAKeyOrIsToldNotTo) {
  const std::string key(64, 'a');
  struct Case {
    std::vector<const char*> arguments;
    bool reachable;
  };
  for (const Case& each :
       {Case{{"--job=j"}, false},
        Case{{"--job=j", "--listen=127.9.9.9", "--coordinator=127.0.0.1:70"}, false},
        Case{{"--job=j", "--listen=::1", "--coordinator=[::1]:70"}, false},
        Case{{"--job=j", "--coordinator=localhost:70"}, false}, Case{{"--job=j", "--listen=192.0.2.1"}, true},
        Case{{"--job=j", "--listen=2001:db8::1"}, true},
        Case{{"--job=j", "--coordinator=192.0.2.1:70"}, true},
        Case{{"--job=j", "--listen=::ffff:192.0.2.1"}, true}}) {
    const Status status = Parse(each.arguments).status;
    EXPECT_EQ(status.ok(), !each.reachable) << each.arguments.back() << " " << status.ToString();
    if (each.reachable) {
      EXPECT_THAT(
          status.message(),
          HasSubstr("can be reached from other hosts, and this daemon has no job key and no certificate"));
    }
    EXPECT_TRUE(Parse(each.arguments, {key, ""}).status.ok()) << each.arguments.back();
    std::vector<const char*> insecure = each.arguments;
    insecure.push_back("--insecure");
    EXPECT_TRUE(Parse(insecure).status.ok()) << each.arguments.back();
  }
}

TEST(Options, AKeyComesFromOnePlace) {
  const std::string key(64, 'a');
  const Parsed both = Parse({"--job=j", "--job-key-file=/etc/none"}, {key, ""});
  EXPECT_THAT(both.status.message(), HasSubstr("--job-key-file and ROPETEAM_JOB_KEY are both set"));
  EXPECT_THAT(Parse({"--job=j", "--job-key-file=/etc/none"}).status.message(), HasSubstr("/etc/none"));
  EXPECT_THAT(Parse({"--job=j"}, {"abc", ""}).status.message(),
              HasSubstr("ROPETEAM_JOB_KEY holds 3 characters"));
  const Parsed good = Parse({"--job=j"}, {key, ""});
  ASSERT_TRUE(good.status.ok());
  EXPECT_EQ(good.options.job_keys.size(), 1u);
  EXPECT_EQ(good.options.job_key_from, "ROPETEAM_JOB_KEY");
}

TEST(Options, TheCoordinatorMayBeAtSeveralAddresses) {
  const Parsed parsed =
      Parse({"--job=j", "--nodes=2", "--ordinal=0", "--coordinator=127.0.0.1:70,127.0.0.2:71",
             "--coordinator-listen=127.0.0.2:71"});
  ASSERT_TRUE(parsed.status.ok()) << parsed.status.ToString();
  EXPECT_EQ(parsed.options.coordinators, (std::vector<std::string>{"127.0.0.1:70", "127.0.0.2:71"}));
  EXPECT_EQ(parsed.options.coordinator_listen, "127.0.0.2:71");
  const auto refused = [](const char* coordinators) {
    return Parse({"--job=j", "--nodes=2", coordinators}).status.message();
  };
  EXPECT_THAT(refused("--coordinator=127.0.0.1:70,127.0.0.2"), HasSubstr("\"127.0.0.2\" is not HOST:PORT"));
  EXPECT_THAT(refused("--coordinator=127.0.0.1:70,"), HasSubstr("is not HOST:PORT"));
  EXPECT_THAT(refused("--coordinator=h:1,h:2,h:3,h:4,h:5,h:6,h:7,h:8,h:9"),
              HasSubstr("9 addresses, limit 8"));
}

TEST(Options, CertificatesGoTogetherAndWithoutAKey) {
  const Parsed good =
      Parse({"--job=j", "--listen=192.0.2.1", "--tls-cert=c", "--tls-key=k", "--tls-ca=a", "--tls-name=n"});
  ASSERT_TRUE(good.status.ok()) << good.status.ToString();
  EXPECT_EQ(good.options.tls_files.private_key, "k");
  EXPECT_EQ(good.options.tls_name, "n");
  EXPECT_THAT(Parse({"--job=j", "--tls-cert=c", "--tls-ca=a"}).status.message(),
              HasSubstr("--tls-key is missing: --tls-cert, --tls-key and --tls-ca go together"));
  EXPECT_THAT(Parse({"--job=j", "--tls-name=n"}).status.message(), HasSubstr("--tls-cert is missing"));
  EXPECT_THAT(Parse({"--job=j", "--tls-cert=c", "--tls-key=k", "--tls-ca=a"}, {std::string(64, 'a'), ""})
                  .status.message(),
              HasSubstr("--tls-cert and ROPETEAM_JOB_KEY are both given"));
}

TEST(Options, ASecondNodeOfFour) {
  const Parsed parsed =
      Parse({"--job=train", "--nodes=4", "--ordinal=1", "--coordinator=127.0.0.1:7000", "--memory=24GiB",
             "--chunk-size=1M", "--listen=127.0.0.2", "--dead-after-ms=2000", "--domain=rack=r7",
             "--log-level=debug", "--keep-steps=3"});
  ASSERT_TRUE(parsed.status.ok()) << parsed.status.ToString();
  const Options& options = parsed.options;
  EXPECT_EQ(options.node, "node-1");
  EXPECT_EQ(options.replicas, 1u);
  EXPECT_FALSE(options.embed_coordinator);
  EXPECT_EQ(options.memory_bytes, 24ull << 30);
  EXPECT_EQ(options.chunk_bytes, 1u << 20);
  EXPECT_EQ(options.heartbeat_ms, 400u) << "a fifth of --dead-after-ms";
  EXPECT_EQ(options.domain, "rack=r7");
  EXPECT_EQ(options.log_level, LogLevel::kDebug);
  EXPECT_EQ(options.keep_steps, 3u);
}

TEST(Options, WhatWasGivenIsKnownFromWhatIsDefault) {
  const char* coordinator = "--coordinator=127.0.0.1:7000";
  EXPECT_EQ(Parse({"--job=j", "--ordinal=1", coordinator}).options.named, NamedSettings{});
  const Options given =
      Parse({"--job=j", "--ordinal=1", coordinator, "--nodes=3", "--replicas=2", "--keep-steps=2"}).options;
  EXPECT_EQ(given.named, (NamedSettings{.replicas = true, .keep_steps = true, .nodes = true}));
  // Without --nodes, the job may have more nodes than the default.
  const Options joining = Parse({"--job=j", "--ordinal=1", coordinator, "--replicas=2"}).options;
  EXPECT_EQ(joining.replicas, 2u);
  EXPECT_EQ(joining.named, NamedSettings{.replicas = true});
}

TEST(Options, MetricsAreOffAndOnLoopbackUnlessTold) {
  EXPECT_EQ(Parse({"--job=j"}).options.metrics, "");
  EXPECT_EQ(Parse({"--job=j", "--metrics=9464"}).options.metrics, "127.0.0.1:9464");
  EXPECT_EQ(Parse({"--job=j", "--metrics=10.0.0.7:9464"}).options.metrics, "10.0.0.7:9464");
  EXPECT_EQ(Parse({"--job=j", "--metrics=[fd00::2]:9464"}).options.metrics, "[fd00::2]:9464");
}

TEST(Options, EmbeddingFollowsTheOrdinalUnlessTold) {
  const char* const coordinator = "--coordinator=127.0.0.1:7000";
  EXPECT_TRUE(Parse({"--job=j", "--nodes=2", "--ordinal=0", coordinator}).options.embed_coordinator);
  EXPECT_FALSE(Parse({"--job=j", "--nodes=2", "--ordinal=1", coordinator}).options.embed_coordinator);
  EXPECT_TRUE(Parse({"--job=j", "--nodes=2", "--ordinal=1", "--embed-coordinator", coordinator})
                  .options.embed_coordinator);
  EXPECT_FALSE(
      Parse({"--job=j", "--nodes=2", "--no-embed-coordinator", coordinator}).options.embed_coordinator);
}

TEST(Options, HelpAndVersionArePrintedAndNeedNoJob) {
  const Parsed help = Parse({"--help"});
  EXPECT_TRUE(help.status.ok());
  EXPECT_THAT(help.print, HasSubstr("--coordinator"));
  const Parsed version = Parse({"--version"});
  EXPECT_TRUE(version.status.ok());
  EXPECT_THAT(version.print, HasSubstr("ropeteamd "));
}

struct BadCase {
  std::vector<const char*> arguments;
  const char* flag;   // must be in the message …
  const char* value;  // … and this too
};

class BadOptions : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadOptions, AreOneLineThatNamesFlagAndValue) {
  std::vector<const char*> arguments = GetParam().arguments;
  const Parsed parsed = Parse(arguments);
  ASSERT_FALSE(parsed.status.ok());
  EXPECT_EQ(parsed.status.code(), Code::kInvalidArgument);
  EXPECT_THAT(parsed.status.message(), HasSubstr(GetParam().flag));
  EXPECT_THAT(parsed.status.message(), HasSubstr(GetParam().value));
  EXPECT_EQ(parsed.status.message().find('\n'), std::string::npos) << parsed.status.message();
  EXPECT_TRUE(parsed.options.job.empty()) << "a refused command line leaves its output untouched";
}

const std::string kLong(300, 'x');

INSTANTIATE_TEST_SUITE_P(
    All, BadOptions,
    ::testing::Values(
        BadCase{{}, "--job", "missing"}, BadCase{{"--job", ""}, "--job", "missing"},
        BadCase{{"--job=", "--node=n"}, "--job", "missing"},
        BadCase{{"--job", kLong.c_str()}, "--job", "limit 255"},
        BadCase{{"--job", "a\nb"}, "--job", "control character"}, BadCase{{"--job"}, "--job", "required"},
        BadCase{{"--job=j", "--node", "a/b"}, "--node", "a/b"},
        BadCase{{"--job=j", "--node", kLong.c_str()}, "--node", "limit 63"},
        BadCase{{"--job=j", "--ordinal", "-1"}, "--ordinal", "-1"},
        BadCase{{"--job=j", "--ordinal", "16384"}, "--ordinal", "16383"},
        BadCase{{"--job=j", "--nodes", "0"}, "--nodes", "from 1 to 16384"},
        BadCase{{"--job=j", "--nodes", "four"}, "--nodes", "four"},
        BadCase{{"--job=j", "--nodes", "4"}, "--coordinator", "missing"},
        BadCase{{"--job=j", "--ordinal", "1"}, "--coordinator", "missing"},
        BadCase{{"--job=j", "--coordinator", "host"}, "--coordinator", "HOST:PORT"},
        BadCase{{"--job=j", "--coordinator", ":80"}, "--coordinator", "HOST:PORT"},
        BadCase{{"--job=j", "--coordinator", "host:0"}, "--coordinator's port", "\"0\""},
        BadCase{{"--job=j", "--coordinator", "host:65536"}, "--coordinator's port", "65535"},
        BadCase{{"--job=j", "--coordinator", "0.0.0.0:80"}, "--coordinator", "every address"},
        BadCase{
            {"--job=j", "--embed-coordinator", "--no-embed-coordinator"}, "--embed-coordinator", "exclude"},
        BadCase{{"--job=j", "--listen", "0.0.0.0"}, "--listen", "every address"},
        BadCase{{"--job=j", "--listen", "::"}, "--listen", "every address"},
        BadCase{{"--job=j", "--listen", "localhost"}, "--listen", "localhost"},
        BadCase{{"--job=j", "--control-port", "65536"}, "--control-port", "65536"},
        BadCase{{"--job=j", "--data-port", "x"}, "--data-port", "x"},
        BadCase{{"--job=j", "--memory", "12Q"}, "--memory", "12Q"},
        BadCase{{"--job=j", "--memory", "24GB"}, "--memory", "24GB"},
        BadCase{{"--job=j", "--memory", "0"}, "--memory", "0"},
        BadCase{{"--job=j", "--memory", "4M"}, "--memory", "no chunk"},
        BadCase{{"--job=j", "--memory", "99999999999999999999G"}, "--memory", "9999"},
        BadCase{{"--job=j", "--chunk-size", "3M"}, "--chunk-size", "power of two"},
        BadCase{{"--job=j", "--chunk-size", "2G"}, "--chunk-size", "2G"},
        BadCase{{"--job=j", "--chunk-size", "1K"}, "--chunk-size", "1K"},
        BadCase{{"--job=j", "--arena-path", "shm"}, "--arena-path", "shm"},
        BadCase{{"--job=j", "--join-timeout", "soon"}, "--join-timeout", "from 0 to 86400"},
        BadCase{{"--job=j", "--replicas", "1"}, "--replicas", "--nodes is 1"},
        BadCase{{"--job=j", "--nodes=4", "--coordinator=h:1", "--replicas", "4"},
                "--replicas 4",
                "needs 5 nodes"},
        BadCase{
            {"--job=j", "--nodes=40", "--coordinator=h:1", "--replicas", "9"}, "--replicas", "from 0 to 8"},
        BadCase{{"--job=j", "--keep-steps", "0"}, "--keep-steps", "from 1"},
        BadCase{{"--job=j", "--domain", kLong.c_str()}, "--domain", "limit 255"},
        BadCase{{"--job=j", "--socket", kLong.c_str()}, "--socket", "limit 107"},
        BadCase{{"--job=j", "--transport", "pigeon"}, "--transport", "pigeon"},
        BadCase{
            {"--job=j", "--transport=verbs", "--provider", "efa"}, "--provider", "goes with --transport ofi"},
        BadCase{{"--job=j", "--device", "mlx5_0,"}, "--device", "mlx5_0,"},
        BadCase{{"--job=j", "--device", ",mlx5_0"}, "--device", "1 to 16 names"},
        BadCase{{"--job=j", "--device", "1,2,3,4,5,6,7,8,9,a,b,c,d,e,f,g,h"}, "--device", "1 to 16 names"},
        BadCase{{"--job=j", "--gid-index", "256"}, "--gid-index", "from 0 to 255"},
        BadCase{{"--job=j", "--transport=ofi", "--gid-index", "1"}, "--gid-index", "--transport verbs"},
        BadCase{{"--job=j", "--json"}, "--json", "--list-devices"},
        BadCase{{"--job=j", "--dead-after-ms", "10"}, "--dead-after-ms", "from 40"},
        BadCase{{"--job=j", "--heartbeat-ms", "300"}, "--heartbeat-ms 300", "at most 250"},
        BadCase{{"--job=j", "--check-threads", "0"}, "--check-threads", "from 1"},
        BadCase{{"--job=j", "--scrub-rate", "quick"}, "--scrub-rate", "quick"},
        BadCase{{"--job=j", "--scrub-rate", "101G"}, "--scrub-rate", "at most 100G"},
        BadCase{{"--job=j", "--metrics", "0"}, "--metrics's port", "from 1"},
        BadCase{{"--job=j", "--metrics", "65536"}, "--metrics's port", "65535"},
        BadCase{{"--job=j", "--metrics", "127.0.0.1"}, "--metrics", "HOST:PORT"},
        BadCase{{"--job=j", "--metrics", "localhost:9464"}, "--metrics", "localhost"},
        BadCase{{"--job=j", "--metrics", "0.0.0.0:9464"}, "--metrics", "every address"},
        BadCase{{"--job=j", "--metrics", "[::]:9464"}, "--metrics", "every address"},
        BadCase{{"--job=j", "--log-level", "loud"}, "--log-level", "loud"},
        BadCase{{"--job=j", "--ready-fd", "x"}, "--ready-fd", "x"},
        BadCase{{"--job=j", "--ready-fd", "1000000"}, "--ready-fd", "1000000"},
        BadCase{{"--job=j", "--unheard-of"}, "--unheard-of", "not expected"},
        BadCase{{"--job=j", "stray"}, "stray", "not expected"},
        BadCase{{"--job=j", "--config", "/nonexistent/file"}, "/nonexistent/file", ""}));

TEST(Options, TheScrubRateIsASizeAndZeroIsOff) {
  EXPECT_EQ(Parse({"--job=j"}).options.scrub_bytes_per_s, 100ull << 20);
  EXPECT_EQ(Parse({"--job=j", "--scrub-rate=1G"}).options.scrub_bytes_per_s, 1ull << 30);
  EXPECT_EQ(Parse({"--job=j", "--scrub-rate", "0"}).options.scrub_bytes_per_s, 0u);
}

class ConfigFile : public ::testing::Test {
 protected:
  std::string Write(const std::string& text) {
    path_ = ::testing::TempDir() + "/ropeteam-options-" + std::to_string(getpid());
    std::ofstream(path_) << text;
    return "--config=" + path_;
  }
  void TearDown() override { (void)unlink(path_.c_str()); }
  std::string path_;
};

TEST_F(ConfigFile, GivesWhatFlagsDoNot) {
  const std::string config =
      Write("job = \"from-file\"\nmemory = \"512M\"\nnodes = 4\ncoordinator = \"127.0.0.1:7000\"\n");
  const Parsed parsed = Parse({config.c_str(), "--memory=1G"});
  ASSERT_TRUE(parsed.status.ok()) << parsed.status.ToString();
  EXPECT_EQ(parsed.options.job, "from-file");
  EXPECT_EQ(parsed.options.nodes, 4u);
  EXPECT_EQ(parsed.options.memory_bytes, 1ull << 30) << "the flag wins";
}

TEST_F(ConfigFile, WithAnUnknownKeyIsRefused) {
  const std::string config = Write("job = \"j\"\nmemmory = \"512M\"\n");
  const Parsed parsed = Parse({config.c_str()});
  ASSERT_FALSE(parsed.status.ok());
  EXPECT_THAT(parsed.status.message(), HasSubstr("memmory"));
  EXPECT_THAT(parsed.status.message(), HasSubstr("that is no option of ropeteamd"));
  EXPECT_THAT(parsed.status.message(), HasSubstr(config.substr(std::string("--config=").size())));
}

TEST_F(ConfigFile, OfAnyBytesIsAnErrorThatATerminalCanShow) {
  const std::string config = Write(std::string("\x7f"
                                               "ELF\x1b[2J") +
                                   std::string(500, '\xff') + "\n");
  const Parsed parsed = Parse({config.c_str()});
  ASSERT_FALSE(parsed.status.ok());
  EXPECT_LT(parsed.status.message().size(), 400u);
  for (const char c : parsed.status.message())
    EXPECT_TRUE(std::isprint(static_cast<unsigned char>(c))) << int{c};
}

TEST(Options, NoticesAreReadAndNamedWhenTheyAreWrong) {
  const Parsed file =
      Parse({"--job=j", "--notice=file:/run/notice", "--notice-seconds=110", "--drain-on-term"});
  ASSERT_TRUE(file.status.ok()) << file.status.ToString();
  EXPECT_EQ(file.options.notice.kind, NoticeSource::Kind::kFile);
  EXPECT_EQ(file.options.notice.what, "/run/notice");
  EXPECT_EQ(file.options.notice_seconds, 110u);
  EXPECT_TRUE(file.options.drain_on_term);
  EXPECT_EQ(Parse({"--job=j", "--notice=cmd:test -e x"}).options.notice.what, "test -e x");
  const Parsed none = Parse({"--job=j"});
  EXPECT_EQ(none.options.notice.kind, NoticeSource::Kind::kNone);
  EXPECT_EQ(none.options.notice_seconds, 30u);
  EXPECT_FALSE(none.options.drain_on_term);
  const auto refused = [](std::vector<const char*> arguments) {
    arguments.push_back("--job=j");
    return Parse(arguments).status.message();
  };
  for (const char* bad : {"--notice=oracle", "--notice=file:", "--notice=file:relative", "--notice=cmd:"})
    EXPECT_THAT(refused({bad}), HasSubstr("is not file:/PATH, cmd:COMMAND, aws, gcp or azure")) << bad;
  EXPECT_THAT(refused({"--notice-seconds=0"}), HasSubstr("from 1 to 86400"));
  for (const std::vector<const char*>& bad :
       {std::vector<const char*>{"--notice=cmd:x", "--notice-endpoint=http://127.0.0.1:1"},
        {"--notice=aws", "--notice-endpoint=https://127.0.0.1:1"},
        {"--notice=aws", "--notice-endpoint=http://127.0.0.1:1/"}})
    EXPECT_THAT(refused(bad), HasSubstr("is not http://HOST[:PORT]")) << bad.back();
}

TEST(Options, TheModeOfStoredFiles) {
  const mode_t mask = umask(022);
  EXPECT_EQ(Parse({"--job=j"}).options.storage_mode, 0640u);
  EXPECT_EQ(Parse({"--job=j", "--storage-mode=600"}).options.storage_mode, 0600u);
  EXPECT_EQ(Parse({"--job=j", "--storage-mode=0644"}).options.storage_mode, 0644u);
  for (const char* bad : {"--storage-mode=0440", "--storage-mode=0750", "--storage-mode=0666",
                          "--storage-mode=00640", "--storage-mode=648", "--storage-mode=rw"})
    EXPECT_THAT(Parse({"--job=j", bad}).status.message(), HasSubstr("is not an octal mode from 0600 to 0664"))
        << bad;
  EXPECT_THAT(
      Parse({"--job=j", "--storage-mode=0660"}).status.message(),
      HasSubstr("--storage-mode 0660: the umask of this process, 0022, takes 0020 away: set umask 0002"));
  EXPECT_EQ(umask(mask), 022u) << "reading it has not changed it";
}

TEST(Sizes, AreReadAsPeopleWriteThem) {
  const auto parse = [](const char* text) {
    uint64_t bytes = 0;
    return ParseSize(text, &bytes) ? bytes : UINT64_MAX;
  };
  EXPECT_EQ(parse("4096"), 4096u);
  EXPECT_EQ(parse("512m"), 512ull << 20);
  EXPECT_EQ(parse("24GiB"), 24ull << 30);
  EXPECT_EQ(parse("1t"), 1ull << 40);
  for (const char* bad : {"", "G", "1.5G", "-1", " 1", "1 G", "1GB", "1GiBs", "17179869184G"})
    EXPECT_EQ(parse(bad), UINT64_MAX) << bad;
}

TEST(Sizes, OfAnOptionAreNotLessThanWhatIsNeeded) {
  EXPECT_EQ(SizeFlag(1), "1M");
  EXPECT_EQ(SizeFlag(384ull << 20), "384M");
  EXPECT_EQ(SizeFlag((4ull << 30) - 1), "4G");
  EXPECT_EQ(SizeFlag((11ull << 30) + 1), "12G");
}

TEST(Addresses, JoinAndSplitBothFamilies) {
  std::string host;
  uint16_t port = 0;
  ASSERT_TRUE(SplitHostPort("--x", JoinHostPort("fd00::2", 7), &host, &port).ok());
  EXPECT_EQ(host, "fd00::2");
  EXPECT_EQ(port, 7);
  ASSERT_TRUE(SplitHostPort("--x", JoinHostPort("10.0.0.1", 65535), &host, &port).ok());
  EXPECT_EQ(host, "10.0.0.1");
  EXPECT_FALSE(SplitHostPort("--x", "fd00::2:7", &host, &port).ok()) << "ambiguous without brackets";
}

}  // namespace
}  // namespace ropeteam
