// SPDX-License-Identifier: Apache-2.0
//
// The strict S3 server of server/, in a process of its own that ends with this object.

#ifndef ROPETEAM_TESTS_STORAGE_S3_STRICT_SERVER_H_
#define ROPETEAM_TESTS_STORAGE_S3_STRICT_SERVER_H_

#include <sys/types.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "storage/s3/environment.h"
#include "storage/s3/http.h"
#include "storage/s3/s3_sink.h"

namespace ropeteam::storage::test {

class StrictServer {
 public:
  static constexpr const char* kBucket = "bucket";
  static constexpr const char* kKey = "AKIATEST";
  static constexpr const char* kSecret = "a/secret+of=tests";

  // Why it cannot run here; empty: it can.
  static std::string Absent();
  // `options`: further options of the server. If it does not start, the test fails and the result is null.
  static std::unique_ptr<StrictServer> Start(const std::vector<std::string>& options = {});
  ~StrictServer();

  int port() const { return port_; }
  std::string endpoint() const { return "http://127.0.0.1:" + std::to_string(port_); }
  // "s3://bucket/<path>?endpoint=…", followed by `more`, as "&name=value".
  std::string Url(const std::string& path = "prefix", const std::string& more = "") const;
  // The server's keys only.
  std::map<std::string, std::string> Variables() const;

  // POST /_control/<name>.
  nlohmann::json Control(const std::string& name, const nlohmann::json& document);
  void Fault(const nlohmann::json& fault) { Control("fault", fault); }
  void ClearFaults() { Control("fault", {{"clear", true}}); }
  nlohmann::json State();
  // The number of requests of an operation ("UploadPart").
  int Count(const std::string& operation);
  // The bytes under a key of the bucket; nullopt: none.
  std::optional<std::string> Object(const std::string& key);

 private:
  StrictServer() = default;
  bool Run(const std::vector<std::string>& options);
  s3::HttpReply Ask(const std::string& method, const std::string& path, const std::string& body);

  pid_t pid_ = -1;
  int stdin_ = -1;
  int port_ = 0;
  s3::Http http_{s3::Http::Options{}};
};

// An environment with these variables only; `now` is the system's clock.
s3::Environment EnvironmentOf(std::map<std::string, std::string> variables);
// Pauses of milliseconds and timeouts of seconds.
s3::ClientTimes ShortTimes();

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_S3_STRICT_SERVER_H_
