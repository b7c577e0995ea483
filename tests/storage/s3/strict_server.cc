// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/s3/strict_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>

extern char** environ;

namespace ropeteam::storage::test {
namespace {

constexpr size_t kReplyBytesMax = 256 << 20;

// The bytes up to a newline, or up to the end if there is no newline.
std::string ReadLine(int fd) {
  std::string line;
  char c;
  while (read(fd, &c, 1) == 1 && c != '\n') line.push_back(c);
  return line;
}

}  // namespace

std::string StrictServer::Absent() {
  return std::system("python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1") == 0
             ? ""
             : "no python3 of version 3.11";
}

std::unique_ptr<StrictServer> StrictServer::Start(const std::vector<std::string>& options) {
  std::unique_ptr<StrictServer> server(new StrictServer);
  if (!server->Run(options)) {
    ADD_FAILURE() << "the strict server does not start";
    return nullptr;
  }
  return server;
}

bool StrictServer::Run(const std::vector<std::string>& options) {
  std::vector<std::string> words = {"python3",      ROPETEAM_STRICT_S3,    "--bucket", kBucket,
                                    "other-bucket", "--access-key",        kKey,       "--secret-key",
                                    kSecret,        "--until-stdin-closes"};
  words.insert(words.end(), options.begin(), options.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0) return false;
  if (pipe2(out, O_CLOEXEC) != 0) return false;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  const int error = posix_spawnp(&pid_, "python3", &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  stdin_ = in[1];
  const std::string line = error == 0 ? ReadLine(out[0]) : "";
  close(out[0]);
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return false;
  port_ = json.value("port", 0);
  return port_ != 0;
}

StrictServer::~StrictServer() {
  if (stdin_ >= 0) close(stdin_);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

std::string StrictServer::Url(const std::string& path, const std::string& more) const {
  return std::string("s3://") + kBucket + (path.empty() ? "" : "/" + path) + "?endpoint=" + endpoint() + more;
}

std::map<std::string, std::string> StrictServer::Variables() const {
  return {{"AWS_ACCESS_KEY_ID", kKey}, {"AWS_SECRET_ACCESS_KEY", kSecret}};
}

s3::HttpReply StrictServer::Ask(const std::string& method, const std::string& path, const std::string& body) {
  const Piece piece{reinterpret_cast<const std::byte*>(body.data()), body.size()};
  s3::HttpRequest request;
  request.method = method;
  request.url = endpoint() + "/_control/" + path;
  request.proxies = false;
  if (method == "POST") {
    request.body = {&piece, 1};
    request.has_body = true;
  }
  request.reply_bytes_max = kReplyBytesMax;
  s3::HttpReply reply;
  s3::HttpFailure failure;
  EXPECT_TRUE(http_.Send(request, &reply, &failure)) << failure.status.ToString();
  return reply;
}

nlohmann::json StrictServer::Control(const std::string& name, const nlohmann::json& document) {
  const s3::HttpReply reply = Ask("POST", name, document.dump());
  EXPECT_EQ(reply.status, 200) << reply.body;
  return nlohmann::json::parse(reply.body, nullptr, false);
}

nlohmann::json StrictServer::State() {
  return nlohmann::json::parse(Ask("GET", "state?log=1000", "").body, nullptr, false);
}

int StrictServer::Count(const std::string& operation) { return State()["requests"].value(operation, 0); }

std::optional<std::string> StrictServer::Object(const std::string& key) {
  s3::HttpReply reply =
      Ask("GET", std::string("object?bucket=") + kBucket + "&key=" + s3::UriEncode(key, false), "");
  if (reply.status != 200) return std::nullopt;
  return std::move(reply.body);
}

s3::Environment EnvironmentOf(std::map<std::string, std::string> variables) {
  s3::Environment environment;
  environment.variable = [variables =
                              std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
  environment.now = [] { return static_cast<int64_t>(std::time(nullptr)); };
  return environment;
}

s3::ClientTimes ShortTimes() {
  s3::ClientTimes times;
  times.retry.base = std::chrono::milliseconds(1);
  times.retry.cap = std::chrono::milliseconds(20);
  times.connect_timeout = std::chrono::milliseconds(5000);
  return times;
}

}  // namespace ropeteam::storage::test
