// SPDX-License-Identifier: Apache-2.0
#include "storage/sinks.h"

#include "storage/posix/posix_sink.h"
#include "storage/url.h"
#ifdef ROPETEAM_HAVE_S3
#include "storage/s3/s3_sink.h"
#endif

namespace ropeteam::storage {
namespace {

using Open = Result<std::unique_ptr<Sink>> (*)(const Url& url, mode_t file_mode);

#ifndef ROPETEAM_HAVE_S3
Result<std::unique_ptr<Sink>> OpenS3Sink(const Url& url) {
  return Error(Code::kUnsupported, "%s://: this build has no %s, which S3 needs", url.scheme.c_str(),
               ROPETEAM_S3_MISSING);
}
#endif

// A bucket's own rules say who reads its objects.
Result<std::unique_ptr<Sink>> OpenBucket(const Url& url, mode_t) { return OpenS3Sink(url); }

struct Scheme {
  const char* name;
  Open open;
};
constexpr Scheme kSchemes[] = {
    {"file", OpenPosixSink},
    {"s3", OpenBucket},
    {"gs", OpenBucket},
};

}  // namespace

Result<std::unique_ptr<Sink>> OpenSink(const std::string& text, mode_t file_mode) {
  Result<Url> url = ParseUrl(text);
  if (!url.ok()) return url.status();
  std::string known;
  for (const Scheme& scheme : kSchemes) {
    if (url->scheme == scheme.name) return scheme.open(*url, file_mode);
    known += std::string(known.empty() ? "" : ", ") + scheme.name + "://";
  }
  return Error(Code::kInvalidArgument, "storage URL %s: unknown scheme, there are a path, %s", text.c_str(),
               known.c_str());
}

}  // namespace ropeteam::storage
