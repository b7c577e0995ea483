// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/config.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <iterator>

#include "storage/sink.h"

namespace ropeteam::storage::s3 {
namespace {

constexpr const char* kParameters[] = {"anonymous", "ca_file", "checksum", "endpoint",       "path_style",
                                       "profile",   "region",  "sse",      "sse_kms_key_id", "storage_class"};
constexpr size_t kKeyBytesMax = 1024;    // S3's limit
constexpr size_t kBucketBytesMax = 222;  // Google's limit for names with dots; S3's is lower
constexpr const char* kGoogleEndpoint = "https://storage.googleapis.com";

std::string Parameter(const Url& url, const char* name) {
  const auto found = url.parameters.find(name);
  return found == url.parameters.end() ? std::string() : found->second;
}

Status CheckParameters(const Url& url, const std::string& text) {
  std::string known;
  for (const char* name : kParameters) known += (known.empty() ? "" : ", ") + std::string(name);
  for (const auto& [name, value] : url.parameters) {
    if (std::find(std::begin(kParameters), std::end(kParameters), name) == std::end(kParameters))
      return Error(Code::kInvalidArgument, "storage URL %s: unknown parameter %s, there are %s", text.c_str(),
                   name.c_str(), known.c_str());
    const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
    if (value.empty() || std::any_of(value.begin(), value.end(), is_control))
      return Error(Code::kInvalidArgument,
                   "storage URL %s: the parameter %s is empty or has control characters", text.c_str(),
                   name.c_str());
  }
  return OkStatus();
}

Status OneOf(const std::string& url, const char* name, const std::string& value,
             std::initializer_list<const char*> allowed) {
  std::string known;
  for (const char* one : allowed) {
    if (value.empty() || value == one) return OkStatus();
    known += (known.empty() ? "" : ", ") + std::string(one);
  }
  return Error(Code::kInvalidArgument, "storage URL %s: %s is %s, must be one of %s", url.c_str(), name,
               value.c_str(), known.c_str());
}

Status CheckNames(const Url& url, const std::string& text) {
  const auto is_bucket = [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_' || c == '.'; };
  const std::string& bucket = url.authority;
  if (bucket.empty()) return Error(Code::kInvalidArgument, "storage URL %s names no bucket", text.c_str());
  if (bucket.size() > kBucketBytesMax || bucket.size() < 3 ||
      !std::all_of(bucket.begin(), bucket.end(), is_bucket) || bucket.find("..") != std::string::npos)
    return Error(Code::kInvalidArgument,
                 "storage URL %s: a bucket's name has 3 to %zu letters, digits, dots and dashes",
                 text.c_str(), kBucketBytesMax);
  if (url.path.empty()) return OkStatus();
  const Status prefix = CheckFileName(url.path);
  if (!prefix.ok())
    return Error(Code::kInvalidArgument, "storage URL %s: %s", text.c_str(), prefix.message().c_str());
  constexpr size_t kPrefixBytesMax = kKeyBytesMax - kFileNameBytesMax - 1;
  if (url.path.size() > kPrefixBytesMax)
    return Error(Code::kInvalidArgument, "storage URL %s: a prefix of %zu bytes, limit %zu", text.c_str(),
                 url.path.size(), kPrefixBytesMax);
  return OkStatus();
}

// `endpoint` is "https://host:9000/" or similar; `origin` says where it was set.
Status SetEndpoint(const std::string& endpoint, const std::string& origin, Config* config) {
  const auto fail = [&](const char* why) {
    return Error(Code::kInvalidArgument, "the endpoint %s (of %s) %s", endpoint.c_str(), origin.c_str(), why);
  };
  if (endpoint.find('@') != std::string::npos)  // not repeated in the message: it may contain a password
    return Error(Code::kInvalidArgument, "the endpoint of %s has a user name in it", origin.c_str());
  std::string rest;
  if (endpoint.starts_with("https://")) {
    rest = endpoint.substr(8);
  } else if (endpoint.starts_with("http://")) {
    config->tls = false;
    rest = endpoint.substr(7);
  } else {
    return fail("begins with neither https:// nor http://");
  }
  while (rest.ends_with('/')) rest.pop_back();
  const auto is_host = [](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == ':' || c == '[' || c == ']';
  };
  if (rest.empty() || !std::all_of(rest.begin(), rest.end(), is_host))
    return fail("is not a host, or a host and a port; a path is not supported");
  for (char& c : rest) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const std::string usual = config->tls ? ":443" : ":80";
  if (rest.ends_with(usual) && !rest.ends_with("]" + usual + "]")) rest.resize(rest.size() - usual.size());
  config->endpoint = rest;
  return OkStatus();
}

Status ChooseEndpoint(const Url& url, const Environment& environment, Config* config) {
  if (const std::string endpoint = Parameter(url, "endpoint"); !endpoint.empty())
    return SetEndpoint(endpoint, "the URL " + config->url, config);
  if (config->google) return SetEndpoint(kGoogleEndpoint, "gs://", config);
  if (environment.NonEmpty("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") == "true") return OkStatus();
  for (const char* name : {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"})
    if (const auto endpoint = environment.NonEmpty(name)) return SetEndpoint(*endpoint, name, config);
  if (const std::string& endpoint = config->profile.setting("endpoint_url"); !endpoint.empty())
    return SetEndpoint(endpoint, "profile " + config->profile.name, config);
  return OkStatus();
}

void ChooseRegion(const Url& url, const Environment& environment, Config* config) {
  config->region = Parameter(url, "region");
  if (config->google) {
    if (config->region.empty()) config->region = "auto";
    return;
  }
  for (const char* name : {"AWS_REGION", "AWS_DEFAULT_REGION"})
    if (config->region.empty()) config->region = environment.NonEmpty(name).value_or("");
  if (config->region.empty()) config->region = config->profile.setting("region");
  // If the bucket is in another region, the store's reply names it.
  if (config->region.empty()) config->region = "us-east-1";
}

Status ChooseCaFile(const Url& url, const Environment& environment, Config* config) {
  std::string origin = "the URL " + config->url;
  config->ca_file = Parameter(url, "ca_file");
  if (config->ca_file.empty()) {
    config->ca_file = environment.NonEmpty("AWS_CA_BUNDLE").value_or("");
    origin = "AWS_CA_BUNDLE";
  }
  if (config->ca_file.empty()) {
    config->ca_file = config->profile.setting("ca_bundle");
    origin = "profile " + config->profile.name;
  }
  if (!config->ca_file.empty() && access(config->ca_file.c_str(), R_OK) != 0)
    return Error(Code::kInvalidArgument, "%s (of %s)",
                 ErrnoError(errno, "cannot read the CA file %s", config->ca_file.c_str()).message().c_str(),
                 origin.c_str());
  return OkStatus();
}

}  // namespace

bool IsRegion(std::string_view region) {
  constexpr size_t kBytesMax = 63;  // of a label of a host name
  return !region.empty() && region.size() <= kBytesMax &&
         std::all_of(region.begin(), region.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                  c == '_';
         });
}

Environment ProcessEnvironment() {
  Environment environment;
  environment.variable = [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
  environment.now = [] { return static_cast<int64_t>(std::time(nullptr)); };
  return environment;
}

std::string Config::Host(const std::string& in_region) const {
  if (!endpoint.empty()) return path_style ? endpoint : bucket + "." + endpoint;
  const std::string host = "s3." + in_region + ".amazonaws.com" + (in_region.starts_with("cn-") ? ".cn" : "");
  return path_style ? host : bucket + "." + host;
}

std::string Config::Path(const std::string& key) const {
  std::string path = path_style ? "/" + bucket : "";
  if (!key.empty() || !path_style) path += "/" + UriEncode(key, true);
  return path;
}

Result<Config> ReadConfig(const Url& url, const Environment& environment) {
  Config config;
  config.google = url.scheme == "gs";
  config.url = url.scheme + "://" + url.authority + (url.path.empty() ? "" : "/" + url.path);
  ROPETEAM_RETURN_IF_ERROR(CheckParameters(url, config.url));
  ROPETEAM_RETURN_IF_ERROR(CheckNames(url, config.url));
  config.bucket = url.authority;
  config.prefix = url.path;
  const std::string wanted_profile = Parameter(url, "profile");
  config.profile_in_url = !wanted_profile.empty();
  Result<Profile> profile = LoadProfile(environment, wanted_profile);
  if (!profile.ok()) return profile.status();
  config.profile = std::move(profile).value();
  ROPETEAM_RETURN_IF_ERROR(ChooseEndpoint(url, environment, &config));
  ChooseRegion(url, environment, &config);
  if (!IsRegion(config.region))
    return Error(Code::kInvalidArgument,
                 "%s: %.100s is not a region's name: 1 to 63 letters, digits, - and _", config.url.c_str(),
                 config.region.c_str());
  ROPETEAM_RETURN_IF_ERROR(ChooseCaFile(url, environment, &config));

  const std::string path_style = Parameter(url, "path_style");
  ROPETEAM_RETURN_IF_ERROR(OneOf(config.url, "path_style", path_style, {"true", "false", "auto"}));
  // If a bucket has dots in its name, no certificate covers it as a host name: AWS's wildcard covers one
  // label.
  const bool dots = config.bucket.find('.') != std::string::npos && config.tls;
  config.path_style = path_style == "true" || (path_style != "false" && (!config.endpoint.empty() || dots));
  config.sse = Parameter(url, "sse");
  ROPETEAM_RETURN_IF_ERROR(OneOf(config.url, "sse", config.sse, {"AES256", "aws:kms"}));
  config.sse_kms_key_id = Parameter(url, "sse_kms_key_id");
  if (!config.sse_kms_key_id.empty() && config.sse != "aws:kms")
    return Error(Code::kInvalidArgument, "%s: sse_kms_key_id goes with sse=aws:kms", config.url.c_str());
  if (config.google && !config.sse.empty())
    return Error(Code::kInvalidArgument, "%s: sse is of S3; a bucket of Google has its key set on the bucket",
                 config.url.c_str());
  config.storage_class = Parameter(url, "storage_class");
  const std::string checksum = Parameter(url, "checksum");
  ROPETEAM_RETURN_IF_ERROR(OneOf(config.url, "checksum", checksum, {"auto", "required", "none"}));
  config.checksum = checksum == "required" ? ChecksumPolicy::kRequired
                    : checksum == "none"   ? ChecksumPolicy::kNone
                                           : ChecksumPolicy::kAuto;
  const std::string anonymous = Parameter(url, "anonymous");
  ROPETEAM_RETURN_IF_ERROR(OneOf(config.url, "anonymous", anonymous, {"true", "false"}));
  config.anonymous = anonymous == "true";
  return config;
}

}  // namespace ropeteam::storage::s3
