// SPDX-License-Identifier: Apache-2.0
//
// The sources of credentials, in the order of AWS's own tools: variables, web identity, profiles of the shared
// files, a container's endpoint, the instance's metadata. If a profile is named in the URL, only that is used.
//
// Secrets are only in Credentials: no message, log line or Describe() has one.

#ifndef ROPETEAM_STORAGE_S3_CREDENTIALS_H_
#define ROPETEAM_STORAGE_S3_CREDENTIALS_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/base/status.h"
#include "storage/s3/environment.h"
#include "storage/s3/http.h"

namespace ropeteam::storage::s3 {

struct Credentials {
  std::string key_id;
  std::string secret;
  std::string token;    // of a session; may be empty
  int64_t expires = 0;  // seconds since 1970; 0: never
};

// Sections of a file like ~/.aws/config; "[profile x]" of it is "x". Names and values are trimmed, nested settings
// (indented lines) are skipped. kInvalidArgument: a line that is neither, with file and line number, without its text:
// it may be a secret.
using Profiles = std::map<std::string, std::map<std::string, std::string>>;
Result<Profiles> ParseProfiles(const std::string& text, const std::string& file);

// The settings of one profile, of both shared files, those of the credentials file first.
struct Profile {
  std::string name;
  bool named = false;  // by the URL or AWS_PROFILE, so that it must be there
  std::string credentials_file, config_file;
  std::map<std::string, std::string> settings;
  const std::string& setting(const std::string& name) const;
};
// `wanted`: from the URL, or empty: AWS_PROFILE, then "default". A missing file is an empty one. kInvalidArgument: the
// profile was named but is in neither file, or a file cannot be read.
Result<Profile> LoadProfile(const Environment& environment, const std::string& wanted);

// One request without retries; for credentials only. A test has its own.
using Fetch = std::function<Result<HttpReply>(const HttpRequest& request)>;

class CredentialSource {
 public:
  virtual ~CredentialSource() = default;
  virtual std::string Describe() const = 0;  // "of AWS_ACCESS_KEY_ID", "of the instance's role"
  // kInvalidArgument: permanent until an operator changes something; other codes are transient.
  virtual Result<Credentials> Load(Deadline deadline) = 0;
};

// Chooses a source by the configuration, without a request. kInvalidArgument: the configuration cannot work;
// kUnsupported: a feature that this build does not have (source_profile, credential_process, sso).
// `region`: of STS.
Result<std::unique_ptr<CredentialSource>> ChooseCredentialSource(const Environment& environment,
                                                                 const Profile& profile, bool profile_in_url,
                                                                 const std::string& region, Fetch fetch);

// Keeps the credentials of one source fresh. Thread-safe.
class CredentialCache {
 public:
  // Refreshed this long before they expire: enough for two attempts a minute apart, and for a request that was signed
  // just before that.
  static constexpr int64_t kRefreshBeforeS = 300;
  // Not used in this time before they expire: a request needs time to arrive.
  static constexpr int64_t kUnusableBeforeS = 15;
  // After a refresh that failed while the old ones are good.
  static constexpr int64_t kRefreshPauseS = 60;

  CredentialCache(std::unique_ptr<CredentialSource> source, std::function<int64_t()> now);

  // One thread at a time asks the source. Others use the present credentials while they are good, else they wait.
  Result<std::shared_ptr<const Credentials>> Get(Deadline deadline);
  // The store reports that these have expired: the next Get() asks the source.
  void Expire(const std::shared_ptr<const Credentials>& used);
  std::string Describe() const { return source_->Describe(); }

 private:
  bool Usable() const;  // mutex_ is held
  bool Fresh() const;   // mutex_ is held

  const std::unique_ptr<CredentialSource> source_;
  const std::function<int64_t()> now_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const Credentials> current_;
  bool loading_ = false;
  int64_t not_before_ = 0;  // the next refresh of credentials that are good
};

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_CREDENTIALS_H_
