// SPDX-License-Identifier: Apache-2.0
//
// The URLs of sinks: scheme://authority/path?name=value&… . Pure functions.

#ifndef ROPETEAM_STORAGE_URL_H_
#define ROPETEAM_STORAGE_URL_H_

#include <map>
#include <string>

#include "core/base/status.h"

namespace ropeteam::storage {

struct Url {
  std::string scheme;     // lower case; "file" for a bare path
  std::string authority;  // what stands between "//" and the next slash: a bucket
  std::string path;       // a file's from its first slash on; otherwise without slashes at either end
  std::map<std::string, std::string> parameters;  // values are percent-decoded
};

// A text that begins with a slash is a path as it stands, with no parameters. kInvalidArgument: no scheme and not an
// absolute path, a parameter without "=", or twice, or with a broken percent escape; the message names the URL.
Result<Url> ParseUrl(const std::string& text);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_URL_H_
