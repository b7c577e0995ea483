// SPDX-License-Identifier: Apache-2.0
//
// The sources of keys, regions and endpoints: the test's environment and files, and simulated answers of
// metadata services.

#include "storage/s3/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <latch>
#include <thread>

#include "storage/s3/config.h"
#include "storage/s3/s3_sink.h"

namespace ropeteam::storage::s3 {
namespace {

using testing::HasSubstr;
using testing::Not;

class CredentialsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "ropeteam-s3-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    home_ = pattern;
    variables_["HOME"] = home_;
    variables_["AWS_EC2_METADATA_DISABLED"] = "true";
  }
  void TearDown() override { std::filesystem::remove_all(home_); }

  std::string WriteFile(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(home_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return path;
  }
  Environment Env() {
    return {[this](const std::string& name) -> std::optional<std::string> {
              const auto found = variables_.find(name);
              if (found == variables_.end()) return std::nullopt;
              return found->second;
            },
            [this] { return now_.load(); }};
  }
  Result<Config> Read(const std::string& url) {
    const Result<Url> parsed = ParseUrl(url);
    return ReadConfig(parsed.value(), Env());
  }
  Result<std::unique_ptr<CredentialSource>> Choose(const std::string& profile_of_url = "") {
    const Result<Profile> profile = LoadProfile(Env(), profile_of_url);
    if (!profile.ok()) return profile.status();
    return ChooseCredentialSource(Env(), *profile, !profile_of_url.empty(), "us-east-1",
                                  [this](const HttpRequest& request) { return Answer(request); });
  }
  Result<Credentials> Load(const std::string& profile_of_url = "") {
    auto source = Choose(profile_of_url);
    if (!source.ok()) return source.status();
    origin_ = (*source)->Describe();
    return (*source)->Load(Deadline::max());
  }
  // Answers from `answers_` by "METHOD url"; records requests with their headers and bodies.
  Result<HttpReply> Answer(const HttpRequest& request) {
    std::string line = request.method + " " + request.url;
    requests_ += line;
    for (const auto& [name, value] : request.headers) requests_ += " " + name + "=" + value;
    for (const Piece& piece : request.body)
      requests_ += " " + std::string(reinterpret_cast<const char*>(piece.data), piece.bytes);
    requests_ += "\n";
    const auto found = answers_.find(line);
    if (found == answers_.end()) return Error(Code::kUnavailable, "connection refused");
    HttpReply reply;
    reply.status = found->second.starts_with("!") ? std::stoi(found->second.substr(1)) : 200;
    reply.body = found->second;
    return reply;
  }

  std::string home_, origin_, requests_;
  std::map<std::string, std::string> variables_, answers_;
  std::atomic<int64_t> now_{1000000000};
};

TEST_F(CredentialsTest, VariablesComeFirst) {
  WriteFile(".aws/credentials", "[default]\naws_access_key_id = F\naws_secret_access_key = f\n");
  variables_["AWS_ACCESS_KEY_ID"] = "A";
  variables_["AWS_SECRET_ACCESS_KEY"] = "secret";
  variables_["AWS_SESSION_TOKEN"] = "token";
  const Result<Credentials> credentials = Load();
  ASSERT_TRUE(credentials.ok()) << credentials.status().ToString();
  EXPECT_EQ(credentials->key_id, "A");
  EXPECT_EQ(credentials->secret, "secret");
  EXPECT_EQ(credentials->token, "token");
  EXPECT_EQ(origin_, "AWS_ACCESS_KEY_ID");
}

TEST_F(CredentialsTest, HalfAPairOfVariablesIsAnError) {
  variables_["AWS_ACCESS_KEY_ID"] = "A";
  EXPECT_EQ(Load().status().code(), Code::kInvalidArgument);
  EXPECT_THAT(Load().status().message(), HasSubstr("AWS_SECRET_ACCESS_KEY is not"));
}

TEST_F(CredentialsTest, ProfilesOfBothFiles) {
  WriteFile(".aws/credentials",
            "# comment\n[default]\naws_access_key_id=D\naws_secret_access_key=d\n\n[other]\n"
            "aws_access_key_id = O \naws_secret_access_key =\to/+=x\naws_session_token = t\n");
  WriteFile(
      ".aws/config",
      "[default]\nregion = eu-west-1\n[profile other]\nregion = ap-south-1\ns3 =\n  addressing_style = path\n"
      "[profile \"in config\"]\naws_access_key_id = C\naws_secret_access_key = c\n");
  EXPECT_EQ(Load()->key_id, "D");
  EXPECT_EQ(Load("other")->secret, "o/+=x");
  EXPECT_EQ(Load("other")->token, "t");
  EXPECT_EQ(Load("in config")->key_id, "C");
  EXPECT_EQ(Read("s3://bucket")->region, "eu-west-1");
  EXPECT_EQ(Read("s3://bucket?profile=other")->region, "ap-south-1");
  variables_["AWS_PROFILE"] = "other";
  EXPECT_EQ(Load()->key_id, "O");
  EXPECT_EQ(Read("s3://bucket")->region, "ap-south-1");
}

TEST_F(CredentialsTest, AProfileOfTheUrlGoesBeforeVariables) {
  WriteFile(".aws/credentials", "[p]\naws_access_key_id=P\naws_secret_access_key=p\n");
  variables_["AWS_ACCESS_KEY_ID"] = "A";
  variables_["AWS_SECRET_ACCESS_KEY"] = "a";
  EXPECT_EQ(Load("p")->key_id, "P");
  EXPECT_THAT(origin_, HasSubstr("profile p of " + home_ + "/.aws/credentials"));
}

TEST_F(CredentialsTest, FilesCanLieElsewhere) {
  variables_["AWS_SHARED_CREDENTIALS_FILE"] =
      WriteFile("elsewhere", "[default]\naws_access_key_id=E\naws_secret_access_key=e\n");
  variables_["AWS_CONFIG_FILE"] = WriteFile("config", "[default]\nendpoint_url = http://localhost:9000/\n");
  EXPECT_EQ(Load()->key_id, "E");
  EXPECT_EQ(Read("s3://bucket")->endpoint, "localhost:9000");
}

TEST_F(CredentialsTest, AProfileThatIsNamedMustBeThere) {
  variables_["AWS_PROFILE"] = "nobody";
  const Status status = Load().status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("nobody"));
  EXPECT_THAT(status.message(), HasSubstr(home_ + "/.aws/credentials"));
}

TEST_F(CredentialsTest, ABrokenLineIsNamedButNotShown) {
  const std::string file = WriteFile(".aws/credentials", "[default]\nwJalrXUtnFEMI\n");
  const Status status = Load().status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr(file + " line 2"));
  EXPECT_THAT(status.message(), Not(HasSubstr("wJalrXUtnFEMI")));
}

TEST_F(CredentialsTest, WhatAProfileAsksForAndIsNotHereIsSaid) {
  WriteFile(".aws/config", "[profile r]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = y\n");
  const Status status = Load("r").status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("role_arn"));
}

TEST_F(CredentialsTest, NoCredentialsNamesAllThatWasTried) {
  const Status status = Load().status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("AWS_ACCESS_KEY_ID is not set"));
  EXPECT_THAT(status.message(), HasSubstr(home_ + "/.aws/credentials"));
  EXPECT_THAT(status.message(), HasSubstr("AWS_EC2_METADATA_DISABLED"));
}

constexpr const char* kKeys =
    "{\"AccessKeyId\":\"K\",\"SecretAccessKey\":\"S\",\"Token\":\"T\",\"Expiration\":\"2001-09-09T02:46:"
    "40Z\"}";

TEST_F(CredentialsTest, AContainersEndpointIsAskedWithItsToken) {
  variables_["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = "http://127.0.0.1:1234/creds";
  variables_["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = WriteFile("token", "bearer\n");
  answers_["GET http://127.0.0.1:1234/creds"] = kKeys;
  const Result<Credentials> credentials = Load();
  ASSERT_TRUE(credentials.ok()) << credentials.status().ToString();
  EXPECT_EQ(credentials->key_id, "K");
  EXPECT_EQ(credentials->token, "T");
  EXPECT_EQ(credentials->expires, 1000003600);
  EXPECT_EQ(requests_, "GET http://127.0.0.1:1234/creds authorization=bearer\n");
}

TEST_F(CredentialsTest, ARelativeUriIsAtTheAgentsAddress) {
  variables_["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = "/v2/x";
  answers_["GET http://169.254.170.2/v2/x"] = kKeys;
  EXPECT_EQ(Load()->key_id, "K");
}

TEST_F(CredentialsTest, ATokenIsNotSentInTheClearToStrangers) {
  for (const char* url :
       {"http://example.com/", "http://127.0.0.1.example.com/", "http://127.x.org/", "ftp://localhost/"}) {
    variables_["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = url;
    EXPECT_EQ(Choose().status().code(), Code::kInvalidArgument) << url;
  }
  for (const char* url :
       {"https://example.com/", "http://localhost:1/", "http://[::1]:1/x", "http://169.254.170.23/v1"}) {
    variables_["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = url;
    EXPECT_TRUE(Choose().ok()) << url;
  }
}

TEST_F(CredentialsTest, TheInstancesRoleByItsSecondVersion) {
  variables_["AWS_EC2_METADATA_DISABLED"] = "false";
  variables_["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = "http://127.0.0.1:99/";
  answers_["PUT http://127.0.0.1:99/latest/api/token"] = "tok";
  answers_["GET http://127.0.0.1:99/latest/meta-data/iam/security-credentials/"] = "my-role\n";
  answers_["GET http://127.0.0.1:99/latest/meta-data/iam/security-credentials/my-role"] = kKeys;
  const Result<Credentials> credentials = Load();
  ASSERT_TRUE(credentials.ok()) << credentials.status().ToString();
  EXPECT_EQ(credentials->secret, "S");
  EXPECT_THAT(
      requests_,
      HasSubstr("PUT http://127.0.0.1:99/latest/api/token x-aws-ec2-metadata-token-ttl-seconds=21600\n"));
  EXPECT_THAT(requests_, HasSubstr("my-role x-aws-ec2-metadata-token=tok\n"));
}

TEST_F(CredentialsTest, AnInstanceThatDoesNotAnswerIsTheLastOfTheChain) {
  variables_.erase("AWS_EC2_METADATA_DISABLED");
  const Status status = Load().status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("AWS_ACCESS_KEY_ID is not set"));
  EXPECT_THAT(status.message(), HasSubstr("169.254.169.254"));
}

TEST_F(CredentialsTest, AWebIdentityIsExchanged) {
  variables_["AWS_WEB_IDENTITY_TOKEN_FILE"] = WriteFile("jwt", "a.b+c");
  variables_["AWS_ROLE_ARN"] = "arn:aws:iam::1:role/x";
  answers_["POST https://sts.us-east-1.amazonaws.com/"] =
      "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>W</"
      "AccessKeyId>"
      "<SecretAccessKey>w</SecretAccessKey><SessionToken>s</SessionToken><Expiration>2001-09-09T02:46:40Z</"
      "Expiration>"
      "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>";
  const Result<Credentials> credentials = Load();
  ASSERT_TRUE(credentials.ok()) << credentials.status().ToString();
  EXPECT_EQ(credentials->key_id, "W");
  EXPECT_THAT(requests_, HasSubstr("RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fx"));
  EXPECT_THAT(requests_, HasSubstr("WebIdentityToken=a.b%2Bc"));
}

TEST_F(CredentialsTest, RegionsAndEndpointsOfVariables) {
  variables_["AWS_DEFAULT_REGION"] = "eu-north-1";
  EXPECT_EQ(Read("s3://bucket/p")->Host("eu-north-1"), "bucket.s3.eu-north-1.amazonaws.com");
  EXPECT_EQ(Read("s3://bucket/p")->region, "eu-north-1");
  variables_["AWS_REGION"] = "eu-west-3";
  EXPECT_EQ(Read("s3://bucket/p")->region, "eu-west-3");
  EXPECT_EQ(Read("s3://bucket/p?region=x-1")->region, "x-1");
  variables_["AWS_ENDPOINT_URL"] = "https://general:443";
  EXPECT_EQ(Read("s3://bucket/p")->endpoint, "general");
  variables_["AWS_ENDPOINT_URL_S3"] = "http://special:80/";
  EXPECT_EQ(Read("s3://bucket/p")->Host("r"), "special");
  EXPECT_EQ(Read("s3://bucket/p")->Path("a b"), "/bucket/a%20b");
  EXPECT_EQ(Read("s3://bucket/p?path_style=false")->Host("r"), "bucket.special");
  EXPECT_EQ(Read("s3://bucket/p?path_style=false")->Path("a/b"), "/a/b");
  EXPECT_EQ(Read("gs://bucket/p")->Host("r"), "storage.googleapis.com");
}

TEST_F(CredentialsTest, BucketsOfChinaAndBucketsWithDots) {
  EXPECT_EQ(Read("s3://bucket")->Host("cn-north-1"), "bucket.s3.cn-north-1.amazonaws.com.cn");
  EXPECT_EQ(Read("s3://my.bucket")->Host("us-east-1"), "s3.us-east-1.amazonaws.com");
  EXPECT_EQ(Read("s3://my.bucket")->Path("k"), "/my.bucket/k");
}

TEST_F(CredentialsTest, UrlsThatAreRefused) {
  const std::pair<std::string, const char*> bad[] = {
      {"s3://", "names no bucket"},
      {"s3:///prefix", "names no bucket"},
      {"s3://user:pass@bucket/p", "3 to 222"},
      {"s3://bucket/a/../b", "a/../b"},
      {"s3://bucket?regoin=x", "unknown parameter regoin, there are anonymous, ca_file"},
      {"s3://bucket?region=", "empty"},
      {"s3://bucket?region=a%0d%0ab", "control"},
      {"s3://bucket?region=a/b", "not a region"},
      {"s3://bucket?region=" + std::string(64, 'a'), "not a region"},
      {"s3://bucket?path_style=maybe", "true, false, auto"},
      {"s3://bucket?sse=DES", "AES256, aws:kms"},
      {"s3://bucket?sse_kms_key_id=k", "sse=aws:kms"},
      {"s3://bucket?checksum=md5", "auto, required, none"},
      {"s3://bucket?anonymous=1", "true, false"},
      {"s3://bucket?endpoint=localhost:9000", "https://"},
      {"s3://bucket?endpoint=http://u:secretpw@h", "user name"},
      {"s3://bucket?endpoint=http://h/path", "path is not supported"},
      {"s3://bucket?ca_file=/nowhere/ca.pem", "/nowhere/ca.pem"},
      {"gs://bucket?sse=AES256", "S3"},
  };
  for (const auto& [url, why] : bad) {
    const Status status = Read(url).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << url;
    EXPECT_THAT(status.message(), HasSubstr(why)) << url;
    EXPECT_THAT(status.message(), Not(HasSubstr("secretpw")));
  }
  const Status status = Read("s3://bucket/" + std::string(124, 'p')).status();
  EXPECT_THAT(status.message(), HasSubstr("124 bytes, limit 123"));
}

TEST_F(CredentialsTest, DescribeHasTheOriginAndNoSecret) {
  variables_["AWS_ACCESS_KEY_ID"] = "AKIA";
  variables_["AWS_SECRET_ACCESS_KEY"] = "hush";
  variables_["AWS_SESSION_TOKEN"] = "quiet";
  const Result<Url> url = ParseUrl("s3://bucket/prefix?region=eu-west-1");
  const auto sink = OpenS3Sink(*url, Env(), ClientTimes());
  ASSERT_TRUE(sink.ok()) << sink.status().ToString();
  const std::string line = (*sink)->Describe();
  EXPECT_EQ(
      line,
      "s3://bucket/prefix at https://bucket.s3.eu-west-1.amazonaws.com, region eu-west-1, credentials of "
      "AWS_ACCESS_KEY_ID");
}

// A source that returns a new set of keys with each load, and can be blocked.
class StubSource : public CredentialSource {
 public:
  std::string Describe() const override { return "stub"; }
  Result<Credentials> Load(Deadline) override {
    const int count = ++loads;
    if (entered != nullptr) {
      entered->count_down();
      release->wait();
    }
    if (!failure.ok()) return failure;
    return Credentials{"key" + std::to_string(count), "s", "t", expires};
  }
  std::atomic<int> loads{0};
  std::atomic<int64_t> expires{0};
  Status failure;
  std::latch* entered = nullptr;
  std::latch* release = nullptr;
};

class CredentialCacheTest : public testing::Test {
 protected:
  CredentialCacheTest()
      : source_(new StubSource),
        cache_(std::unique_ptr<CredentialSource>(source_), [this] { return now_.load(); }) {
    source_->expires = 4600;
  }
  std::string Key() {
    const auto credentials = cache_.Get(Deadline::max());
    return credentials.ok() ? (*credentials)->key_id : credentials.status().message();
  }
  std::atomic<int64_t> now_{1000};
  StubSource* source_;
  CredentialCache cache_;
};

TEST_F(CredentialCacheTest, KeysAreRenewedBeforeTheyExpire) {
  EXPECT_EQ(Key(), "key1");
  now_ = 4600 - CredentialCache::kRefreshBeforeS - 1;
  EXPECT_EQ(Key(), "key1");
  now_ = 4600 - CredentialCache::kRefreshBeforeS;
  source_->expires = 8200;
  EXPECT_EQ(Key(), "key2");
  EXPECT_EQ(Key(), "key2");
}

TEST_F(CredentialCacheTest, AFailedRenewalIsNoHarmWhileTheOldOnesAreGood) {
  EXPECT_EQ(Key(), "key1");
  now_ = 4400;
  source_->failure = Error(Code::kUnavailable, "down");
  EXPECT_EQ(Key(), "key1");
  EXPECT_EQ(Key(), "key1");
  EXPECT_EQ(source_->loads, 2) << "asked again before the pause was over";
  now_ = 4400 + CredentialCache::kRefreshPauseS;
  EXPECT_EQ(Key(), "key1");
  EXPECT_EQ(source_->loads, 3);
  now_ = 4600 - CredentialCache::kUnusableBeforeS;
  EXPECT_EQ(Key(), "down");
}

TEST_F(CredentialCacheTest, WhatTheStoreCallsExpiredIsLoadedAgain) {
  const auto first = cache_.Get(Deadline::max());
  ASSERT_TRUE(first.ok());
  cache_.Expire(*first);
  EXPECT_EQ(Key(), "key2");
  cache_.Expire(*first);  // from a slower thread: these keys were replaced already
  EXPECT_EQ(Key(), "key2");
}

TEST_F(CredentialCacheTest, OthersGoOnWithTheOldKeysWhileOneThreadRenews) {
  EXPECT_EQ(Key(), "key1");
  now_ = 4400;
  source_->expires = 8000;
  std::latch entered(1), release(1);
  source_->entered = &entered;
  source_->release = &release;
  std::thread renewing([this] { EXPECT_EQ(Key(), "key2"); });
  entered.wait();
  EXPECT_EQ(Key(), "key1");
  EXPECT_EQ(source_->loads, 2);
  release.count_down();
  renewing.join();
  EXPECT_EQ(Key(), "key2");
}

TEST_F(CredentialCacheTest, OthersWaitForTheFirstKeysAndForTheirDeadline) {
  std::latch entered(1), release(1);
  source_->entered = &entered;
  source_->release = &release;
  std::thread loading([this] { EXPECT_EQ(Key(), "key1"); });
  entered.wait();
  const auto late = cache_.Get(std::chrono::steady_clock::now() + std::chrono::milliseconds(1));
  EXPECT_EQ(late.status().code(), Code::kDeadlineExceeded);
  std::thread waiting([this] { EXPECT_EQ(Key(), "key1"); });
  release.count_down();
  loading.join();
  waiting.join();
  EXPECT_EQ(source_->loads, 1);
}

}  // namespace
}  // namespace ropeteam::storage::s3
