// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/credentials.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/log.h"
#include "storage/s3/xml.h"

namespace ropeteam::storage::s3 {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Metadata services are one hop away. If no service answers in this time, this machine has none. A laptop
// must not wait long.
constexpr milliseconds kMetadataConnect{1000};
constexpr seconds kMetadataTotal{3};
constexpr seconds kStsTotal{20};
constexpr const char* kInstanceEndpoint = "http://169.254.169.254";
constexpr const char* kContainerEndpoint = "http://169.254.170.2";
constexpr size_t kTokenBytesMax = 64 << 10;  // of a token file

Deadline Within(Deadline deadline, seconds total) {
  return std::min(deadline, std::chrono::steady_clock::now() + total);
}

Result<std::string> ReadToken(const std::string& path, const char* what) {
  std::ifstream file(path, std::ios::binary);
  std::string token(kTokenBytesMax, '\0');
  if (!file || !(file.read(token.data(), static_cast<std::streamsize>(token.size())) || file.eof()))
    return Error(Code::kInvalidArgument, "cannot read %s, which %s names", path.c_str(), what);
  token.resize(static_cast<size_t>(file.gcount()));
  while (!token.empty() && (token.back() == '\n' || token.back() == '\r')) token.pop_back();
  if (token.empty() || token.find_first_of("\r\n") != std::string::npos)
    return Error(Code::kInvalidArgument, "%s, which %s names, has no token of one line", path.c_str(), what);
  return token;
}

// Parses the reply of a container's endpoint or of the instance's metadata service.
Result<Credentials> ParseJson(const std::string& body, const std::string& url) {
  const auto json = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  const auto text = [&json](const char* name) {
    return json.is_object() && json.contains(name) && json[name].is_string() ? json[name].get<std::string>()
                                                                             : std::string();
  };
  Credentials credentials{text("AccessKeyId"), text("SecretAccessKey"), text("Token"), 0};
  const std::optional<int64_t> expires = ParseIsoTime(text("Expiration"));
  if (credentials.key_id.empty() || credentials.secret.empty())
    return Error(Code::kUnavailable, "the reply of %s has no AccessKeyId and SecretAccessKey", url.c_str());
  if (!credentials.token.empty() && !expires)
    return Error(Code::kUnavailable, "the reply of %s has no Expiration", url.c_str());
  credentials.expires = expires.value_or(0);
  return credentials;
}

Result<std::string> FetchText(const Fetch& fetch, const HttpRequest& request) {
  const Result<HttpReply> reply = fetch(request);
  if (!reply.ok())
    return Error(
        reply.status().code() == Code::kDeadlineExceeded ? Code::kUnavailable : reply.status().code(),
        "%s: %s", request.url.c_str(), reply.status().message().c_str());
  if (reply->status != 200)
    return Error(Code::kUnavailable, "%s answered %d", request.url.c_str(), reply->status);
  return reply->body;
}

class FixedSource : public CredentialSource {
 public:
  FixedSource(Credentials credentials, std::string origin)
      : credentials_(std::move(credentials)), origin_(std::move(origin)) {}
  std::string Describe() const override { return origin_; }
  Result<Credentials> Load(Deadline) override { return credentials_; }

 private:
  const Credentials credentials_;
  const std::string origin_;
};

// Reads the files again each time, so that keys renewed by another program take effect.
class ProfileSource : public CredentialSource {
 public:
  ProfileSource(const Environment& environment, const Profile& profile)
      : environment_(environment), profile_(profile) {}
  std::string Describe() const override {
    return "profile " + profile_.name + " of " + profile_.credentials_file;
  }
  Result<Credentials> Load(Deadline) override {
    const Result<Profile> profile = LoadProfile(environment_, profile_.name);
    if (!profile.ok()) return profile.status();
    Credentials credentials{profile->setting("aws_access_key_id"), profile->setting("aws_secret_access_key"),
                            profile->setting("aws_session_token"), 0};
    if (credentials.key_id.empty() || credentials.secret.empty())
      return Error(Code::kInvalidArgument,
                   "profile %s of %s and %s needs both aws_access_key_id and aws_secret_access_key",
                   profile->name.c_str(), profile->credentials_file.c_str(), profile->config_file.c_str());
    return credentials;
  }

 private:
  const Environment environment_;
  const Profile profile_;
};

class ContainerSource : public CredentialSource {
 public:
  ContainerSource(const Environment& environment, std::string url, Fetch fetch)
      : environment_(environment), url_(std::move(url)), fetch_(std::move(fetch)) {}
  std::string Describe() const override { return "the container's endpoint " + url_; }
  Result<Credentials> Load(Deadline deadline) override {
    HttpRequest request;
    request.url = url_;
    request.proxies = false;
    request.connect_timeout = kMetadataConnect;
    request.deadline = Within(deadline, kMetadataTotal);
    if (const auto file = environment_.NonEmpty("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")) {
      const Result<std::string> token = ReadToken(*file, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
      if (!token.ok()) return token.status();
      request.headers.emplace_back("authorization", *token);
    } else if (const auto token = environment_.NonEmpty("AWS_CONTAINER_AUTHORIZATION_TOKEN")) {
      if (token->find_first_of("\r\n") != std::string::npos)
        return Error(Code::kInvalidArgument, "AWS_CONTAINER_AUTHORIZATION_TOKEN has more than one line");
      request.headers.emplace_back("authorization", *token);
    }
    const Result<std::string> body = FetchText(fetch_, request);
    if (!body.ok()) return body.status();
    return ParseJson(*body, url_);
  }

 private:
  const Environment environment_;
  const std::string url_;
  const Fetch fetch_;
};

// IMDSv2: requests a token by PUT, then the name of the role, then its keys. The older version without a
// token is not used: an attacker can reach it by forged requests.
class InstanceSource : public CredentialSource {
 public:
  InstanceSource(std::string endpoint, std::string tried, Fetch fetch)
      : endpoint_(std::move(endpoint)), tried_(std::move(tried)), fetch_(std::move(fetch)) {}
  std::string Describe() const override { return "the instance's role at " + endpoint_; }
  Result<Credentials> Load(Deadline deadline) override {
    HttpRequest request;
    request.method = "PUT";
    request.url = endpoint_ + "/latest/api/token";
    request.has_body = true;
    request.headers = {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}};
    request.proxies = false;
    request.connect_timeout = kMetadataConnect;
    request.deadline = Within(deadline, kMetadataTotal);
    Result<std::string> token = FetchText(fetch_, request);
    if (!token.ok()) return Failure(token.status());
    if (token->empty() || token->find_first_of("\r\n") != std::string::npos)
      return Failure(Error(Code::kUnavailable, "%s gave no token", request.url.c_str()));
    request.method = "GET";
    request.has_body = false;
    request.headers = {{"x-aws-ec2-metadata-token", *token}};
    const std::string folder = endpoint_ + "/latest/meta-data/iam/security-credentials/";
    request.url = folder;
    Result<std::string> role = FetchText(fetch_, request);
    if (!role.ok()) return Failure(role.status());
    const std::string name = role->substr(0, role->find_first_of("\r\n"));
    if (name.empty()) return Failure(Error(Code::kInvalidArgument, "this instance has no role"));
    request.url = folder + UriEncode(name, false);
    const Result<std::string> body = FetchText(fetch_, request);
    if (!body.ok()) return Failure(body.status());
    return ParseJson(*body, request.url);
  }

 private:
  // This source is the last of the chain, so its error names the other sources.
  Status Failure(const Status& status) const {
    return Error(status.code(), "no credentials: %s, and %s", tried_.c_str(), status.message().c_str());
  }

  const std::string endpoint_;
  const std::string tried_;
  const Fetch fetch_;
};

// A service account of Kubernetes. Its token is exchanged for keys of a role.
class WebIdentitySource : public CredentialSource {
 public:
  struct Settings {
    std::string endpoint, token_file, role, session;
  };
  WebIdentitySource(Settings settings, Fetch fetch)
      : settings_(std::move(settings)), fetch_(std::move(fetch)) {}
  std::string Describe() const override { return "web identity for " + settings_.role; }
  Result<Credentials> Load(Deadline deadline) override {
    const Result<std::string> token = ReadToken(settings_.token_file, "AWS_WEB_IDENTITY_TOKEN_FILE");
    if (!token.ok()) return token.status();
    const std::string form = CanonicalQuery({{"Action", "AssumeRoleWithWebIdentity"},
                                             {"Version", "2011-06-15"},
                                             {"RoleArn", settings_.role},
                                             {"RoleSessionName", settings_.session},
                                             {"WebIdentityToken", *token}});
    const Piece piece{reinterpret_cast<const std::byte*>(form.data()), form.size()};
    HttpRequest request;
    request.method = "POST";
    request.url = settings_.endpoint + "/";
    request.headers = {{"content-type", "application/x-www-form-urlencoded"}};
    request.body = {&piece, 1};
    request.has_body = true;
    request.deadline = Within(deadline, kStsTotal);
    const Result<HttpReply> reply = fetch_(request);
    if (!reply.ok())
      return Error(reply.status().code(), "%s: %s", request.url.c_str(), reply.status().message().c_str());
    if (reply->status != 200) {
      const ErrorReply error = ParseError(reply->body);
      return Error(reply->status >= 500 ? Code::kUnavailable : Code::kInvalidArgument,
                   "%s refused the web identity for %s: %d %s", request.url.c_str(), settings_.role.c_str(),
                   reply->status, error.code.c_str());
    }
    const Result<StsReply> keys = ParseSts(reply->body);
    if (!keys.ok()) return keys.status();
    return Credentials{keys->key_id, keys->secret, keys->token, keys->expires};
  }

 private:
  const Settings settings_;
  const Fetch fetch_;
};

// Over plain HTTP, a bearer token is sent only to this machine or to the addresses of AWS's agents.
bool ContainerUrlIsAllowed(const std::string& url) {
  if (url.starts_with("https://")) return true;
  if (!url.starts_with("http://")) return false;
  const std::string_view rest = std::string_view(url).substr(7);
  const std::string_view host =
      rest.starts_with('[') ? rest.substr(0, rest.find(']') + 1) : rest.substr(0, rest.find_first_of(":/?#"));
  return host == "localhost" ||
         (host.starts_with("127.") && host.find_first_not_of("0123456789.") == host.npos) ||
         host == "[::1]" || host == "169.254.170.2" || host == "169.254.170.23" || host == "[fd00:ec2::23]";
}

using Source = Result<std::unique_ptr<CredentialSource>>;

// This function and the next three return null if there are no settings of their kind.
Source FromVariables(const Environment& environment) {
  const auto key = environment.NonEmpty("AWS_ACCESS_KEY_ID");
  const auto secret = environment.NonEmpty("AWS_SECRET_ACCESS_KEY");
  if (!key && !secret) return std::unique_ptr<CredentialSource>();
  if (!key || !secret)
    return Error(Code::kInvalidArgument, "%s is set, but %s is not",
                 key ? "AWS_ACCESS_KEY_ID" : "AWS_SECRET_ACCESS_KEY",
                 key ? "AWS_SECRET_ACCESS_KEY" : "AWS_ACCESS_KEY_ID");
  Credentials credentials{*key, *secret, environment.NonEmpty("AWS_SESSION_TOKEN").value_or(""), 0};
  return std::unique_ptr<CredentialSource>(
      std::make_unique<FixedSource>(std::move(credentials), "AWS_ACCESS_KEY_ID"));
}

Source FromWebIdentity(const Environment& environment, const Profile& profile, const std::string& region,
                       const Fetch& fetch) {
  const auto file = environment.NonEmpty("AWS_WEB_IDENTITY_TOKEN_FILE");
  const auto role = environment.NonEmpty("AWS_ROLE_ARN");
  WebIdentitySource::Settings settings;
  settings.token_file = file.value_or(profile.setting("web_identity_token_file"));
  settings.role = role.value_or(profile.setting("role_arn"));
  if (settings.token_file.empty()) return std::unique_ptr<CredentialSource>();
  if (settings.role.empty())
    return Error(Code::kInvalidArgument,
                 "a web identity's token file is named, but no role: set AWS_ROLE_ARN");
  settings.session = environment.NonEmpty("AWS_ROLE_SESSION_NAME").value_or("ropeteam");
  settings.endpoint =
      environment.NonEmpty("AWS_ENDPOINT_URL_STS")
          .value_or("https://sts." + region + ".amazonaws.com" + (region.starts_with("cn-") ? ".cn" : ""));
  while (settings.endpoint.ends_with('/')) settings.endpoint.pop_back();
  return std::unique_ptr<CredentialSource>(std::make_unique<WebIdentitySource>(std::move(settings), fetch));
}

Source FromProfile(const Environment& environment, const Profile& profile) {
  if (!profile.setting("aws_access_key_id").empty() || !profile.setting("aws_secret_access_key").empty()) {
    auto source = std::make_unique<ProfileSource>(environment, profile);
    const Result<Credentials> now = source->Load(Deadline::max());
    if (!now.ok()) return now.status();
    return std::unique_ptr<CredentialSource>(std::move(source));
  }
  for (const char* name :
       {"role_arn", "credential_process", "sso_session", "sso_start_url", "login_session"}) {
    if (!profile.setting(name).empty())
      return Error(
          Code::kUnsupported,
          "profile %s of %s takes its credentials by %s, which is not supported: put keys into %s, or "
          "into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
          profile.name.c_str(), profile.config_file.c_str(), name, profile.credentials_file.c_str());
  }
  return std::unique_ptr<CredentialSource>();
}

Source FromContainer(const Environment& environment, const Fetch& fetch) {
  std::string url;
  if (const auto relative = environment.NonEmpty("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")) {
    url = kContainerEndpoint + *relative;
  } else if (const auto full = environment.NonEmpty("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
    if (!ContainerUrlIsAllowed(*full))
      return Error(Code::kInvalidArgument,
                   "AWS_CONTAINER_CREDENTIALS_FULL_URI %s is neither https nor on this machine",
                   full->c_str());
    url = *full;
  } else {
    return std::unique_ptr<CredentialSource>();
  }
  return std::unique_ptr<CredentialSource>(std::make_unique<ContainerSource>(environment, url, fetch));
}

Source FromInstance(const Environment& environment, const Profile& profile, Fetch fetch) {
  std::string tried = "AWS_ACCESS_KEY_ID is not set";
  for (const std::string& file : {profile.credentials_file, profile.config_file})
    if (!file.empty()) tried += ", " + file + " has no keys of profile " + profile.name;
  std::string disabled = environment.NonEmpty("AWS_EC2_METADATA_DISABLED").value_or("");
  for (char& c : disabled) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (disabled == "true")
    return Error(Code::kInvalidArgument, "no credentials: %s, and AWS_EC2_METADATA_DISABLED is true",
                 tried.c_str());
  std::string endpoint =
      environment.NonEmpty("AWS_EC2_METADATA_SERVICE_ENDPOINT").value_or(kInstanceEndpoint);
  while (endpoint.ends_with('/')) endpoint.pop_back();
  return std::unique_ptr<CredentialSource>(
      std::make_unique<InstanceSource>(std::move(endpoint), std::move(tried), std::move(fetch)));
}

}  // namespace

Source ChooseCredentialSource(const Environment& environment, const Profile& profile, bool profile_in_url,
                              const std::string& region, Fetch fetch) {
  if (!profile_in_url) {
    Source source = FromVariables(environment);
    if (!source.ok() || *source != nullptr) return source;
    source = FromWebIdentity(environment, profile, region, fetch);
    if (!source.ok() || *source != nullptr) return source;
  } else if (!profile.setting("web_identity_token_file").empty()) {
    Environment without = environment;  // the variables belong to another role
    without.variable = [variable = environment.variable](const std::string& name) {
      return name == "AWS_WEB_IDENTITY_TOKEN_FILE" || name == "AWS_ROLE_ARN" ? std::nullopt : variable(name);
    };
    return FromWebIdentity(without, profile, region, fetch);
  }
  Source source = FromProfile(environment, profile);
  if (!source.ok() || *source != nullptr) return source;
  if (profile_in_url)
    return Error(Code::kInvalidArgument, "profile %s has no aws_access_key_id, neither in %s nor in %s",
                 profile.name.c_str(), profile.credentials_file.c_str(), profile.config_file.c_str());
  source = FromContainer(environment, fetch);
  if (!source.ok() || *source != nullptr) return source;
  return FromInstance(environment, profile, std::move(fetch));
}

CredentialCache::CredentialCache(std::unique_ptr<CredentialSource> source, std::function<int64_t()> now)
    : source_(std::move(source)), now_(std::move(now)) {}

bool CredentialCache::Usable() const {
  return current_ != nullptr && (current_->expires == 0 || now_() < current_->expires - kUnusableBeforeS);
}

bool CredentialCache::Fresh() const {
  return Usable() &&
         (current_->expires == 0 || now_() < current_->expires - kRefreshBeforeS || now_() < not_before_);
}

Result<std::shared_ptr<const Credentials>> CredentialCache::Get(Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (!Fresh()) {
    if (!loading_) break;
    if (Usable()) return current_;
    if (changed_.wait_until(lock, std::min(deadline, std::chrono::steady_clock::now() +
                                                         std::chrono::hours(1))) == std::cv_status::timeout &&
        std::chrono::steady_clock::now() >= deadline)
      return Error(Code::kDeadlineExceeded, "waiting for credentials of %s", Describe().c_str());
  }
  if (Fresh()) return current_;
  loading_ = true;
  lock.unlock();
  Result<Credentials> loaded = source_->Load(deadline);
  lock.lock();
  loading_ = false;
  changed_.notify_all();
  if (loaded.ok()) {
    current_ = std::make_shared<const Credentials>(std::move(loaded).value());
    // Some endpoints return keys that are about to expire until they have new ones.
    not_before_ = now_() + kRefreshPauseS;
    LOG_DEBUG("s3: loaded credentials of %s", Describe().c_str());
    return current_;
  }
  if (!Usable()) return loaded.status();
  LOG_WARNING("s3: cannot renew the credentials of %s, going on with those that expire in %lld s: %s",
              Describe().c_str(), static_cast<long long>(current_->expires - now_()),
              loaded.status().message().c_str());
  not_before_ = now_() + kRefreshPauseS;
  return current_;
}

void CredentialCache::Expire(const std::shared_ptr<const Credentials>& used) {
  const std::lock_guard lock(mutex_);
  if (current_ == used) current_.reset();
}

}  // namespace ropeteam::storage::s3
