// SPDX-License-Identifier: Apache-2.0
#include "membership/credentials/credentials.h"
#include "membership/credentials/secrets.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "core/base/log.h"
#include "membership/credentials/openssl.h"
#include "membership/credentials/watched_files.h"
#include "tests/membership/intruder.h"
#include "tests/membership/standalone_cluster.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Unhex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

class Directory {
 public:
  Directory() {
    char name[] = "/tmp/ropeteam-key-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  std::string Write(const std::string& name, const std::string& text, mode_t mode = 0600) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return path;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(JobKey, DerivesAsRfc5869Says) {
  // Appendix A.1.
  EXPECT_EQ(HkdfSha256(Unhex("000102030405060708090a0b0c"), std::string(22, '\x0b'),
                       Unhex("f0f1f2f3f4f5f6f7f8f9"), 42),
            Unhex("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"));
}

TEST(JobKey, NodesOfTwoBuildsDeriveTheSameAuthority) {
  const JobKey key = KeyForTest('7').front();
  // Computed with other programs: Python's hmac and openssl pkey.
  EXPECT_EQ(JobAuthority(key, "train"),
            Unhex("c7e9932fab7fcffc496db0fd888936e879b693319702ae8628778befa8638d14"));
  EXPECT_NE(JobAuthority(key, "train"), JobAuthority(key, "train2"))
      << "a key in two jobs makes two authorities";
  EXPECT_NE(JobAuthority(key, "train"), JobAuthority(KeyForTest('8').front(), "train"));
  EXPECT_EQ(JobKeyId(key, "train").size(), 8u);
}

TEST(JobKey, AFileMayHoldTwo) {
  const Directory directory;
  const std::string one(64, 'a');
  const std::string two(64, 'B');
  Result<std::vector<JobKey>> keys =
      ReadJobKeyFile(directory.Write("k", " " + one + "\r\n\n" + two + "\n"), "k");
  ASSERT_TRUE(keys.ok()) << keys.status().ToString();
  ASSERT_EQ(keys->size(), 2u);
  EXPECT_EQ((*keys)[0].bytes[0], 0xaa);
  EXPECT_EQ((*keys)[1].bytes[31], 0xbb);
  EXPECT_TRUE(ReadJobKeyFile(directory.Write("group", one, 0640), "group").ok());
}

TEST(JobKey, WhatIsNoKeyIsRefusedInWordsWithoutItsDigits) {
  const Directory directory;
  const std::string good(64, 'c');
  struct Case {
    std::string path;
    std::string message;
  };
  std::string letter = good;
  letter[5] = 'x';
  const Case cases[] = {
      {directory.Write("short", good.substr(1)), "holds 63 characters, a job key has 64 hexadecimal digits"},
      {directory.Write("long", good + "c"), "holds 65 characters"},
      {directory.Write("letter", letter), "holds a character that is not a hexadecimal digit"},
      {directory.Write("three", good + " " + good + " " + good), "holds more than 2 keys"},
      {directory.Write("empty", "\n"), "is empty"},
      {directory.Write("big", std::string(2000, 'c')), "has more than 1024 bytes"},
      {directory.Write("others", good, 0604), "may be read by others (mode 0604): chmod 600"},
      {directory.Write("group", good, 0620), "(mode 0620): chmod 600"},
      {directory.path(), "is not a file"},
      {directory.path() + "/none", "no such file"},
  };
  for (const Case& each : cases) {
    const Result<std::vector<JobKey>> keys = ReadJobKeyFile(each.path, "--job-key-file " + each.path);
    ASSERT_FALSE(keys.ok()) << each.path;
    EXPECT_THAT(keys.status().message(), HasSubstr("--job-key-file " + each.path));
    EXPECT_THAT(keys.status().message(), HasSubstr(each.message));
    EXPECT_THAT(keys.status().message(), Not(HasSubstr("ccc")));
  }
}

TEST(JobKey, ThoseWhoMakeTheLocalKeyAtOnceReadTheSame) {
  const Directory directory;
  const std::string path = directory.path() + "/job.key";
  constexpr size_t kRacers = 8;
  std::vector<std::string> ids(kRacers);
  {
    std::vector<std::jthread> racers;
    for (size_t i = 0; i < kRacers; ++i)
      racers.emplace_back([&, i] {
        const Result<std::vector<JobKey>> keys = ReadOrMakeJobKeyFile(path);
        if (keys.ok()) ids[i] = JobKeyId(keys->front(), "job");
      });
  }
  for (const std::string& id : ids) {
    EXPECT_EQ(id.size(), 8u);
    EXPECT_EQ(id, ids[0]);
  }
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory.path())) ++files;
  EXPECT_EQ(files, 1u) << "nothing temporary stays";
}

TEST(JobKey, ALocalKeyThatOthersMayReadOrLinkedFromElsewhereIsRefused) {
  const Directory directory;
  const std::string shared = directory.Write("shared", std::string(64, 'd'), 0640);
  EXPECT_THAT(ReadOrMakeJobKeyFile(shared).status().message(), HasSubstr("0640"));
  const std::string mine = directory.Write("mine", std::string(64, 'd'));
  std::filesystem::create_symlink(mine, directory.path() + "/link");
  EXPECT_FALSE(ReadOrMakeJobKeyFile(directory.path() + "/link").ok());
}

TEST(Secrets, TheVariablesAreTakenOutOfTheEnvironmentAndGivenBackOnRequest) {
  const std::pair<const char*, std::string Secrets::*> variables[] = {
      {"ROPETEAM_JOB_KEY", &Secrets::job_key}, {"ROPETEAM_ETCD_PASSWORD", &Secrets::etcd_password}};
  for (const auto& [name, member] : variables) {
    setenv(name, name, 1);
    const char* where = getenv(name);
    const Secrets secrets = TakeSecrets();
    EXPECT_EQ(secrets.*member, name);
    EXPECT_EQ(getenv(name), nullptr);
    EXPECT_EQ(std::string(where, 1)[0], '\0') << "overwritten in place, where /proc shows it";
    GiveSecrets(secrets);
    EXPECT_STREQ(getenv(name), name);
    EXPECT_EQ(TakeSecrets().*member, name);
  }
  EXPECT_EQ(TakeSecrets().job_key, "");
}

class CoordinatorWithKey : public ::testing::Test {
 protected:
  CoordinatorWithKey() : config_(StandaloneConfig(FreeAddress())) { config_.nodes_expected = 1; }

  std::unique_ptr<TestMember> Start(const std::string& name, NodeId id,
                                    std::shared_ptr<const Credentials> credentials, bool embed = false) {
    MembershipConfig config = config_;
    config.credentials = std::move(credentials);
    if (embed) config.coordinator_listen = config.coordinator_addresses.at(0);
    auto member = std::make_unique<TestMember>(config, StandaloneMember(name, static_cast<uint32_t>(id), id));
    const Status status = member->Start();
    EXPECT_TRUE(status.ok()) << status.ToString();
    return member;
  }

  MembershipConfig config_;
};

TEST_F(CoordinatorWithKey, LetsInWhoeverHasIt) {
  const auto first = Start("a", 1, CredentialsForTest('1'), true);
  ASSERT_TRUE(first->WaitForNames({"a"}));
  const auto second = Start("b", 2, CredentialsForTest('1'));
  ASSERT_TRUE(first->WaitForNames({"a", "b"}));
  EXPECT_TRUE(second->WaitForNames({"a", "b"}));
}

TEST_F(CoordinatorWithKey, WhileItIsReplacedBelievesBoth) {
  std::vector<JobKey> both = KeyForTest('2');
  both.push_back(KeyForTest('1').front());
  const auto first = Start("a", 1, Credentials::FromJobKey(both, "test-job", "a", "test").value(), true);
  std::swap(both[0], both[1]);
  const auto old_first = Start("b", 2, Credentials::FromJobKey(both, "test-job", "b", "test").value());
  ASSERT_TRUE(first->WaitForNames({"a", "b"}));
}

TEST_F(CoordinatorWithKey, KeepsEverybodyElseOut) {
  const auto first = Start("a", 1, CredentialsForTest('1'), true);
  ASSERT_TRUE(first->WaitForNames({"a"}));
  EXPECT_EQ(Knock(config_.coordinator_addresses.at(0), CredentialsForTest('1')->channel()).error_code(),
            grpc::StatusCode::UNIMPLEMENTED)
      << "with the key one gets in";
  for (const Intruder& intruder : Intruders('1')) {
    const grpc::Status status = Knock(config_.coordinator_addresses.at(0), intruder.credentials);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE)
        << intruder.what << ": " << status.error_message();
  }
}

// The intruder has the name of a live node, and would evict it.
TEST_F(CoordinatorWithKey, TellsAMemberWithoutItWhyAndDisturbsNobody) {
  const auto first = Start("a", 1, CredentialsForTest('1'), true);
  const auto second = Start("b", 2, CredentialsForTest('1'));
  ASSERT_TRUE(first->WaitForNames({"a", "b"}));
  const Epoch epoch = first->LastView().epoch;
  Status status;
  const auto other_key = Start("b", 3, CredentialsForTest('9'));
  ASSERT_TRUE(other_key->WaitForRefusal(&status));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("is of another job or has another job key"));
  const auto in_clear = Start("b", 4, nullptr);
  ASSERT_TRUE(in_clear->WaitForRefusal(&status));
  EXPECT_THAT(status.message(), HasSubstr("it may want the job's key (--job-key-file)"));
  EXPECT_EQ(other_key->ViewCount(), 0u) << "a view holds the addresses and region keys of all nodes";
  EXPECT_EQ(in_clear->ViewCount(), 0u);
  EXPECT_EQ(first->LastView().epoch, epoch);
  EXPECT_EQ(second->LastView().epoch, epoch);
}

TEST_F(CoordinatorWithKey, OneWithoutAKeyIsNotJoinedByNodesThatHaveOne) {
  const auto first = Start("a", 1, nullptr, true);
  ASSERT_TRUE(first->WaitForNames({"a"}));
  Status status;
  const auto second = Start("b", 2, CredentialsForTest('1'));
  ASSERT_TRUE(second->WaitForRefusal(&status));
  EXPECT_THAT(status.message(), HasSubstr("speaks without TLS: it was started with --insecure"));
}

// An operator's certificate authority and what it signs.
class Authority {
 public:
  explicit Authority(const std::string& name) : pair_(EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256")) {
    certificate_ = Sign(pair_.get(), name, pair_.get(), name, 3600, "", "critical,CA:TRUE");
  }
  std::string pem() const { return PemOf(certificate_.get()); }

  struct Leaf {
    std::string certificate, private_key;
  };
  Leaf Issue(const std::string& name, long valid_seconds = 3600,
             const std::string& usage = "serverAuth,clientAuth") const {
    const KeyPair pair(EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256"));
    const std::string issuer = NameOf();
    const Certificate leaf =
        Sign(pair.get(), name, pair_.get(), issuer, valid_seconds, usage, "critical,CA:FALSE");
    const Memory memory(BIO_new(BIO_s_mem()));
    PEM_write_bio_PKCS8PrivateKey(memory.get(), pair.get(), nullptr, nullptr, 0, nullptr, nullptr);
    return {PemOf(leaf.get()), TextOf(memory.get())};
  }

 private:
  static std::string TextOf(BIO* memory) {
    char* data = nullptr;
    const long length = BIO_get_mem_data(memory, &data);
    return {data, static_cast<size_t>(length)};
  }
  static std::string PemOf(X509* certificate) {
    const Memory memory(BIO_new(BIO_s_mem()));
    PEM_write_bio_X509(memory.get(), certificate);
    return TextOf(memory.get());
  }
  std::string NameOf() const {
    char text[64] = "";
    X509_NAME_get_text_by_NID(X509_get_subject_name(certificate_.get()), NID_commonName, text, sizeof(text));
    return text;
  }
  static void Name(X509_NAME* name, const std::string& text) {
    X509_NAME_add_entry_by_NID(name, NID_commonName, MBSTRING_UTF8,
                               reinterpret_cast<const unsigned char*>(text.c_str()), -1, -1, 0);
  }
  static Certificate Sign(EVP_PKEY* pair, const std::string& name, EVP_PKEY* by, const std::string& issuer,
                          long valid_seconds, const std::string& usage, const char* constraints) {
    static long serial = 0;
    Certificate certificate(X509_new());
    X509* const x = certificate.get();
    X509_set_version(x, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(x), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(x), -7200);
    X509_gmtime_adj(X509_getm_notAfter(x), valid_seconds);
    X509_set_pubkey(x, pair);
    Name(X509_get_subject_name(x), name);
    X509_NAME* const issuer_name = X509_NAME_new();
    Name(issuer_name, issuer);
    X509_set_issuer_name(x, issuer_name);
    X509_NAME_free(issuer_name);
    for (const auto& [nid, value] :
         {std::pair(NID_basic_constraints, std::string(constraints)), std::pair(NID_ext_key_usage, usage)}) {
      if (value.empty()) continue;
      X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, nid, value.c_str());
      X509_add_ext(x, extension, -1);
      X509_EXTENSION_free(extension);
    }
    EXPECT_NE(X509_sign(x, by, EVP_sha256()), 0);
    return certificate;
  }

  KeyPair pair_;
  Certificate certificate_;
};

class TlsFilesTest : public CoordinatorWithKey {
 protected:
  // Replaces a file as an operator's tool does: writes it under another name, then renames it.
  void Replace(const std::string& path, const std::string& text) {
    directory_.Write("new", text);
    std::filesystem::rename(directory_.path() + "/new", path);
  }
  TlsFiles Write(const Authority::Leaf& leaf, const std::string& roots, const std::string& prefix) {
    return {directory_.Write(prefix + ".crt", leaf.certificate),
            directory_.Write(prefix + ".key", leaf.private_key), directory_.Write(prefix + ".ca", roots)};
  }
  std::shared_ptr<const Credentials> Make(const TlsFiles& files, const std::string& peer_name = "") {
    Result<std::shared_ptr<const Credentials>> made =
        Credentials::FromFiles(files, peer_name, std::chrono::milliseconds(50));
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    return *made;
  }
  // Whether the server accepts these credentials. Waits for the expected result as long as gRPC may take to
  // notice new files.
  bool GetsIn(const Credentials& credentials, bool expected) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      const bool in = Knock(config_.coordinator_addresses[0], credentials.channel()).error_code() ==
                      grpc::StatusCode::UNIMPLEMENTED;
      if (in == expected || std::chrono::steady_clock::now() > deadline) return in;
    }
  }

  const Directory directory_;
  const Authority authority_{"our ca"};
};

TEST_F(TlsFilesTest, WhatCannotServeIsRefusedByName) {
  const Authority other("other ca");
  const Authority::Leaf good = authority_.Issue("node-0");
  const auto message = [&](const Authority::Leaf& leaf, const std::string& roots) {
    const Result<CheckedTls> checked = ReadTlsFiles(Write(leaf, roots, "n"));
    return checked.ok() ? "good" : checked.status().message();
  };
  EXPECT_EQ(message(good, authority_.pem()), "good");
  EXPECT_EQ(message(good, other.pem() + authority_.pem()), "good");
  EXPECT_THAT(message({good.certificate, authority_.Issue("x").private_key}, authority_.pem()),
              HasSubstr("do not belong together"));
  EXPECT_THAT(message(good, other.pem()), HasSubstr("is not signed by --tls-ca"));
  EXPECT_THAT(message(authority_.Issue("node-0", -3600), authority_.pem()), HasSubstr("expired on 20"));
  EXPECT_THAT(message(authority_.Issue("node-0", 3600, "serverAuth"), authority_.pem()),
              HasSubstr("may not be used by a client (extended key usage)"));
  EXPECT_THAT(message(authority_.Issue("node-0", 3600, "clientAuth"), authority_.pem()),
              HasSubstr("may not be used by a server"));
  EXPECT_THAT(message({"nothing", good.private_key}, authority_.pem()),
              HasSubstr("holds no certificate in PEM"));
  EXPECT_THAT(message({good.certificate, "nothing"}, authority_.pem()),
              HasSubstr("holds no private key in PEM"));
  EXPECT_THAT(message(good, ""), HasSubstr("--tls-ca"));
  // Who can read the key can join the job.
  const TlsFiles files = Write(good, authority_.pem(), "n");
  for (const mode_t mode : {mode_t{0644}, mode_t{0604}, mode_t{0660}}) {
    ASSERT_EQ(chmod(files.private_key.c_str(), mode), 0);
    char shown[16];
    std::snprintf(shown, sizeof(shown), "%04o", mode);
    EXPECT_THAT(ReadTlsFiles(files).status().message(),
                HasSubstr("--tls-key " + files.private_key + " may be read by others (mode " + shown +
                          "): chmod 600 " + files.private_key));
  }
  ASSERT_EQ(chmod(files.private_key.c_str(), 0640), 0);
  EXPECT_TRUE(ReadTlsFiles(files).ok());
  EXPECT_THAT(ReadTlsFiles({"/none", "/none", "/none"}).status().message(),
              HasSubstr("--tls-cert /none: No such file"));
}

TEST_F(TlsFilesTest, NodesOfOneAuthorityMeetAndOthersStayOut) {
  const Authority other("other ca");
  const auto ours = Make(Write(authority_.Issue("node-0"), authority_.pem(), "a"), "node-0");
  const auto first = Start("a", 1, ours, true);
  ASSERT_TRUE(first->WaitForNames({"a"}));
  EXPECT_THAT(ours->description(), HasSubstr("certificate of node-0 expires 20"));
  EXPECT_TRUE(GetsIn(*ours, true));
  const auto foreign = Make(Write(other.Issue("node-0"), other.pem() + authority_.pem(), "b"));
  EXPECT_FALSE(GetsIn(*foreign, false)) << "signed by another authority";
  const auto named = Make(Write(authority_.Issue("node-9"), authority_.pem(), "c"));
  EXPECT_FALSE(GetsIn(*named, false)) << "not the name of --tls-name";
  EXPECT_FALSE(GetsIn(*CredentialsForTest('1'), false));
}

TEST_F(TlsFilesTest, ReplacedFilesAreTakenWhenTheyAreGoodAndWhole) {
  const TlsFiles files = Write(authority_.Issue("old"), authority_.pem(), "a");
  const auto server = Make(files);
  const auto first = Start("a", 1, server, true);
  const auto old_client = Make(Write(authority_.Issue("client"), authority_.pem(), "b"));
  const auto standing = Start("b", 2, old_client);
  ASSERT_TRUE(first->WaitForNames({"a", "b"}));

  const Authority next("next ca");
  const Authority::Leaf leaf = next.Issue("new");
  const auto new_client = Make(Write(next.Issue("client"), next.pem(), "c"));
  const auto uses = [&](const std::string& name) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (server->description().find("certificate of " + name) == std::string::npos)
      if (std::chrono::steady_clock::now() > deadline) return false;
    return true;
  };
  // A new certificate with the old key, then no key at all: the last good files stay in use.
  std::atomic<int> warnings{0};
  SetLogSink(
      [&warnings](LogLevel, std::string_view text) {
        if (text.find("cannot be used, those from before stay") != std::string_view::npos) ++warnings;
      },
      LogLevel::kWarning);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  Replace(files.certificate, leaf.certificate);
  while (warnings == 0) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  std::filesystem::remove(files.private_key);
  while (warnings == 1) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  SetLogSink(nullptr, LogLevel::kWarning);
  EXPECT_TRUE(GetsIn(*old_client, true));
  EXPECT_FALSE(GetsIn(*new_client, false));
  EXPECT_TRUE(uses("old"));
  Replace(files.roots, next.pem());
  Replace(files.private_key, leaf.private_key);
  EXPECT_TRUE(uses("new"));
  EXPECT_TRUE(GetsIn(*new_client, true));
  EXPECT_FALSE(GetsIn(*old_client, false));
  EXPECT_EQ(first->LastView().members.size(), 2u) << "connections that stand are kept";
}

// gRPC's watcher reads the paths until gRPC destroys it, some time after the Credentials. It aborts the
// process if a path has become a pipe.
TEST_F(TlsFilesTest, TheMemoryFilesOutliveTheirOwnerAndAreUsedAgain) {
  const TlsFiles files = Write(authority_.Issue("node-0"), authority_.pem(), "a");
  const auto open = [&files] { return WatchedFiles::Open(files, std::chrono::hours(1)).value(); };
  const auto text_of = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  auto one = open();
  auto two = open();
  EXPECT_NE(one->identity_path(), two->identity_path());
  const std::vector<std::string> paths = {one->identity_path(), one->roots_path()};
  const std::vector<std::string> texts = {text_of(paths[0]), text_of(paths[1])};
  EXPECT_THAT(texts[0], HasSubstr("PRIVATE KEY"));
  EXPECT_THAT(texts[1], HasSubstr("CERTIFICATE"));

  one.reset();
  int pipes[2][2];  // they get the lowest free descriptors
  for (int(&pipe)[2] : pipes) ASSERT_EQ(pipe2(pipe, O_CLOEXEC), 0);
  for (size_t i = 0; i < paths.size(); ++i) {
    ASSERT_TRUE(std::filesystem::is_regular_file(paths[i])) << paths[i];
    EXPECT_EQ(text_of(paths[i]), texts[i]);
  }
  one = open();
  EXPECT_EQ(one->identity_path(), paths[0]);
  EXPECT_EQ(one->roots_path(), paths[1]);
  for (const int(&pipe)[2] : pipes)
    for (const int fd : pipe) close(fd);
}

TEST(ExplainEnd, SaysNothingOfOtherEnds) {
  EXPECT_EQ(ExplainEnd("failed to connect to all addresses: Connection refused", "h:1", "t", nullptr), "");
  EXPECT_EQ(ExplainEnd("Socket closed", "h:1", "t", CredentialsForTest('1').get()), "");
}

}  // namespace
}  // namespace ropeteam
