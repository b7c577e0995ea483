// SPDX-License-Identifier: Apache-2.0
//
// The configuration from an s3:// or gs:// URL, the environment and the shared files: host, bucket and options.

#ifndef ROPETEAM_STORAGE_S3_CONFIG_H_
#define ROPETEAM_STORAGE_S3_CONFIG_H_

#include <string>
#include <string_view>

#include "core/base/status.h"
#include "storage/s3/credentials.h"
#include "storage/s3/environment.h"
#include "storage/s3/sigv4.h"
#include "storage/url.h"

namespace ropeteam::storage::s3 {

enum class ChecksumPolicy {
  kAuto,      // CRC32C where the store checks it, else Content-MD5
  kRequired,  // CRC32C, or nothing is written
  kNone,      // neither: compared with memory before it is sent, and after that TCP's and TLS's
};

struct Config {
  std::string url;  // without parameters, for messages
  bool google = false;
  std::string bucket;
  std::string prefix;  // without slashes at either end; may be empty
  bool tls = true;
  std::string
      endpoint;  // "host" or "host:port", without the port that goes without saying; empty: AWS's, by region
  bool path_style = false;
  std::string region;
  std::string sse;             // "AES256", "aws:kms" or empty
  std::string sse_kms_key_id;  // of aws:kms; may be empty
  std::string storage_class;   // may be empty
  std::string ca_file;
  ChecksumPolicy checksum = ChecksumPolicy::kAuto;
  bool anonymous = false;
  Profile profile;
  bool profile_in_url = false;

  const Dialect& dialect() const { return google ? kGoogle : kAmazon; }
  // The host that serves the bucket of `region`; Host is signed as it stands here.
  std::string Host(const std::string& in_region) const;
  // "/bucket/key" or "/key", encoded once. Without a key: of the bucket.
  std::string Path(const std::string& key) const;
  // What a file of the sink is called in the bucket.
  std::string Key(const std::string& name) const { return prefix.empty() ? name : prefix + "/" + name; }
};

// Whether the text can be the name of a region: 1 to 63 letters, digits, '-' and '_'. A region becomes a label of a host
// name and a part of what is signed, and a reply of the store may name it.
bool IsRegion(std::string_view region);

// kInvalidArgument: no bucket, a parameter that is not known or has a value that is not, a CA file that cannot be read,
// a profile that is not there. Makes no connection.
Result<Config> ReadConfig(const Url& url, const Environment& environment);

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_CONFIG_H_
