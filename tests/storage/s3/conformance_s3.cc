// SPDX-License-Identifier: Apache-2.0
//
// The suite of all sinks over the strict server: with all features, and without those that older stores lack.

#include <gtest/gtest.h>

#include "storage/s3/s3_sink.h"
#include "tests/storage/conformance.h"
#include "tests/storage/s3/strict_server.h"

namespace ropeteam::storage::test {
namespace {

class S3Place : public SinkPlace {
 public:
  S3Place(const std::vector<std::string>& options, std::string path, std::string more)
      : server_(StrictServer::Start(options)), path_(std::move(path)), more_(std::move(more)) {}

  Result<std::unique_ptr<Sink>> Open() override {
    if (server_ == nullptr) return Error(Code::kUnavailable, "no server");
    const Result<Url> url = ParseUrl(server_->Url(path_, more_));
    return OpenS3Sink(*url, EnvironmentOf(server_->Variables()), ShortTimes());
  }

  std::vector<std::string> Everything() override {
    std::vector<std::string> names;
    const auto state = server_->State();
    const auto add = [&](const std::string& key) {
      if (key.starts_with(path_)) names.push_back(path_.empty() ? key : key.substr(path_.size() + 1));
    };
    for (const auto& [key, value] : state["objects"][StrictServer::kBucket].items()) add(key);
    for (const auto& upload : state["uploads"][StrictServer::kBucket]) add(upload["key"].get<std::string>());
    return names;
  }

 private:
  const std::unique_ptr<StrictServer> server_;
  const std::string path_, more_;
};

SinkKind Kind(const std::string& name, const std::vector<std::string>& options, const std::string& path,
              const std::string& more = "") {
  SinkKind kind;
  kind.name = name;
  kind.absent = StrictServer::Absent;
  kind.make = [=]() -> std::unique_ptr<SinkPlace> { return std::make_unique<S3Place>(options, path, more); };
  kind.part_bytes = 5 << 20;
  kind.keeps_folders = false;
  return kind;
}

SinkKind WithoutChecksums() {
  SinkKind kind = Kind("s3_without_checksums", {"--no-checksums"}, "prefix");
  kind.resumes = false;  // Has() needs the parts' checksums
  return kind;
}

SinkKind WithoutConditions() {
  SinkKind kind = Kind("s3_without_conditions", {"--no-conditional"}, "");
  kind.put_if_absent = false;
  return kind;
}

const bool kRegistered = RegisterSinkKind(Kind("s3", {}, "a/prefix of+many&parts")) &&
                         RegisterSinkKind(WithoutChecksums()) && RegisterSinkKind(WithoutConditions());

}  // namespace
}  // namespace ropeteam::storage::test
