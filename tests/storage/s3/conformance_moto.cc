// SPDX-License-Identifier: Apache-2.0
//
// The suite of all sinks against another implementation of S3: moto, if tests/python/test_moto.py has started
// it and passed its address. moto accepts wrong signatures and checksums. For a file of parts it returns
// another CRC32C, so checksums are off.

#include <gtest/gtest.h>

#include <cstdlib>
#include <pugixml.hpp>

#include "storage/s3/http.h"
#include "storage/s3/s3_sink.h"
#include "tests/storage/conformance.h"
#include "tests/storage/s3/strict_server.h"

namespace ropeteam::storage::test {
namespace {

std::string Endpoint() {
  const char* endpoint = std::getenv("ROPETEAM_MOTO");
  return endpoint == nullptr ? "" : endpoint;
}

// A prefix of its own in the shared bucket.
class MotoPlace : public SinkPlace {
 public:
  Result<std::unique_ptr<Sink>> Open() override {
    const Result<Url> url = ParseUrl(
        "s3://bucket/" + path_ + "?region=us-east-1&path_style=true&checksum=none&endpoint=" + Endpoint());
    return OpenS3Sink(*url, EnvironmentOf({{"AWS_ACCESS_KEY_ID", "k"}, {"AWS_SECRET_ACCESS_KEY", "s"}}),
                      ShortTimes());
  }

  std::vector<std::string> Everything() override {
    std::vector<std::string> names;
    for (const char* what : {"list-type=2&max-keys=1000&prefix=", "uploads&prefix="}) {
      s3::HttpRequest request;
      request.url = Endpoint() + "/bucket?" + what + path_;
      request.proxies = false;
      request.reply_bytes_max = 16 << 20;
      s3::HttpReply reply;
      s3::HttpFailure failure;
      EXPECT_TRUE(http_.Send(request, &reply, &failure)) << failure.status.ToString();
      pugi::xml_document document;
      EXPECT_TRUE(document.load_string(reply.body.c_str())) << reply.body;
      for (const pugi::xpath_node& key : document.select_nodes("//Contents/Key | //Upload/Key")) {
        const std::string name = key.node().child_value();
        if (name.starts_with(path_ + "/")) names.push_back(name.substr(path_.size() + 1));
      }
    }
    return names;
  }

 private:
  static inline int places_ = 0;
  const std::string path_ = "place-" + std::to_string(++places_);
  s3::Http http_{s3::Http::Options{}};
};

const bool kRegistered =
    Endpoint().empty() || RegisterSinkKind({.name = "moto",
                                            .make = [] { return std::make_unique<MotoPlace>(); },
                                            .part_bytes = 5 << 20,
                                            .resumes = false,
                                            .keeps_folders = false});

}  // namespace
}  // namespace ropeteam::storage::test
