// SPDX-License-Identifier: Apache-2.0
#include "node/notice_watch.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "core/base/log.h"
#include "node/unique_fd.h"
#ifdef ROPETEAM_HAVE_HTTP
#include "storage/s3/http.h"
#endif

extern char** environ;

namespace ropeteam {
namespace {

using Found = Result<std::optional<std::string>>;
using Kind = NoticeSource::Kind;

// A command that takes longer is killed, which counts as an error.
constexpr std::chrono::seconds kCommandMax{10};
constexpr std::chrono::milliseconds kCommandPoll{20};
constexpr size_t kReasonBytesMax = 200;
#ifdef ROPETEAM_HAVE_HTTP
// The metadata service runs on this host and answers within milliseconds.
constexpr std::chrono::seconds kRequestMax{3};
#endif

Found None() { return std::optional<std::string>(); }

// Returns one short, printable line, for logs and terminals.
std::string Reason(std::string text) {
  text.resize(std::min({text.size(), text.find('\n'), kReasonBytesMax}));
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text;
}

}  // namespace

Status ParseNotice(const std::string& text, const std::string& endpoint, NoticeSource* source) {
  *source = {};
  const auto begins = [&](const char* prefix, Kind kind) {
    const std::string start = prefix;
    if (!text.starts_with(start) || text.size() == start.size()) return false;
    source->kind = kind;
    source->what = text.substr(start.size());
    return true;
  };
  if (text == "aws" || text == "azure") {
    source->kind = text == "aws" ? Kind::kAws : Kind::kAzure;
    source->endpoint = "http://169.254.169.254";
  } else if (text == "gcp") {
    source->kind = Kind::kGcp;
    source->endpoint = "http://metadata.google.internal";
  } else if (!begins("file:/", Kind::kFile) && !begins("cmd:", Kind::kCommand) && !text.empty()) {
    return Error(Code::kInvalidArgument,
                 "--notice \"%.80s\" is not file:/PATH, cmd:COMMAND, aws, gcp or azure", text.c_str());
  }
  if (source->kind == Kind::kFile) source->what.insert(0, 1, '/');  // the prefix contained it
#ifndef ROPETEAM_HAVE_HTTP
  if (!source->endpoint.empty())
    return Error(Code::kInvalidArgument, "--notice %s needs libcurl, which this build does not have",
                 text.c_str());
#endif
  if (endpoint.empty()) return OkStatus();
  if (source->endpoint.empty() || !endpoint.starts_with("http://") || endpoint.ends_with("/"))
    return Error(Code::kInvalidArgument,
                 "--notice-endpoint \"%.80s\" is not http://HOST[:PORT], with --notice aws, gcp or azure",
                 endpoint.c_str());
  source->endpoint = endpoint;
  return OkStatus();
}

#ifdef ROPETEAM_HAVE_HTTP
class NoticeReader::Metadata {
 public:
  explicit Metadata(const NoticeSource& source) : source_(source), http_({}) {}

  void Stop() { http_.Stop(); }
  Found Look() {
    switch (source_.kind) {
      case Kind::kAws:
        return LookAtAws();
      case Kind::kGcp:
        return LookAtGcp();
      default:
        return LookAtAzure();
    }
  }

 private:
  using Headers = storage::s3::NameValues;

  // Returns the body of a 200, and no value for a 404. Any other answer is an error.
  Found Get(const std::string& path, const Headers& headers, const char* method = "GET") {
    storage::s3::HttpRequest request;
    request.method = method;
    request.url = source_.endpoint + path;
    request.headers = headers;
    request.has_body = request.method == "PUT";
    request.deadline = storage::Deadline::clock::now() + kRequestMax;
    request.connect_timeout = kRequestMax;
    request.proxies = false;
    storage::s3::HttpReply reply;
    storage::s3::HttpFailure failure;
    if (!http_.Send(request, &reply, &failure))
      return Error(failure.status.code(), "%s: %s", request.url.c_str(), failure.status.message().c_str());
    if (reply.status == 200) return std::optional<std::string>(std::move(reply.body));
    if (reply.status == 404) return None();
    if (reply.status == 401) token_.clear();
    return Error(Code::kUnavailable, "%s: status %d", request.url.c_str(), reply.status);
  }

  Found LookAtAws() {
    if (token_.empty()) {
      Found token = Get("/latest/api/token", {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}}, "PUT");
      if (!token.ok()) return token;
      token_ = token->value_or("");
      if (token_.empty() || token_.find_first_of("\r\n") != std::string::npos) {
        token_.clear();
        return Error(Code::kUnavailable, "%s/latest/api/token gave no token", source_.endpoint.c_str());
      }
    }
    const Headers headers = {{"x-aws-ec2-metadata-token", token_}};
    for (const char* what : {"spot/instance-action", "events/recommendations/rebalance"}) {
      const Found found = Get(std::string("/latest/meta-data/") + what, headers);
      if (!found.ok()) return found;
      if (*found) return std::optional<std::string>(Reason(std::string("aws ") + what + " " + **found));
    }
    return None();
  }

  Found LookAtGcp() {
    const Headers headers = {{"metadata-flavor", "Google"}};
    const Found preempted = Get("/computeMetadata/v1/instance/preempted", headers);
    if (!preempted.ok()) return preempted;
    if (preempted->value_or("").starts_with("TRUE"))
      return std::optional<std::string>("gcp instance/preempted TRUE");
    const Found event = Get("/computeMetadata/v1/instance/maintenance-event", headers);
    if (!event.ok()) return event;
    // A machine that is migrated live keeps running.
    if (event->value_or("").starts_with("TERMINATE"))
      return std::optional<std::string>(Reason("gcp instance/maintenance-event " + **event));
    return None();
  }

  Found LookAtAzure() {
    const Headers headers = {{"metadata", "true"}};
    if (name_.empty()) {
      Found name = Get("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers);
      if (!name.ok()) return name;
      name_ = name->value_or("");
      if (name_.empty())
        return Error(Code::kUnavailable, "%s does not know this machine's name", source_.endpoint.c_str());
    }
    const Found text = Get("/metadata/scheduledevents?api-version=2020-07-01", headers);
    if (!text.ok() || !*text) return text;
    const nlohmann::json json = nlohmann::json::parse(**text, nullptr, false);
    if (!json.is_object() || !json.contains("Events") || !json["Events"].is_array())
      return Error(Code::kUnavailable, "%s/metadata/scheduledevents gave no events",
                   source_.endpoint.c_str());
    for (const nlohmann::json& event : json["Events"]) {
      if (!event.is_object() || !event.contains("Resources") || !event["Resources"].is_array()) continue;
      const auto type = event.find("EventType");
      if (type == event.end() || !type->is_string()) continue;
      const auto kind = type->get<std::string>();
      // A frozen machine continues after some seconds.
      if (kind != "Preempt" && kind != "Terminate" && kind != "Redeploy" && kind != "Reboot") continue;
      const nlohmann::json& names = event["Resources"];
      // The events are for all machines of a group. In scale sets, the names begin with an underscore.
      if (std::none_of(names.begin(), names.end(), [&](const nlohmann::json& name) {
            return name.is_string() &&
                   (name.get<std::string>() == name_ || name.get<std::string>() == "_" + name_);
          }))
        continue;
      return std::optional<std::string>(Reason("azure scheduled event " + kind));
    }
    return None();
  }

  const NoticeSource& source_;
  storage::s3::Http http_;
  std::string token_;  // for AWS
  std::string name_;   // of this machine, for Azure
};
#else
class NoticeReader::Metadata {
 public:
  explicit Metadata(const NoticeSource&) {}
  void Stop() {}
  Found Look() { return None(); }
};
#endif

NoticeReader::NoticeReader(NoticeSource source) : source_(std::move(source)) {
  if (!source_.endpoint.empty()) metadata_ = std::make_unique<Metadata>(source_);
}

NoticeReader::~NoticeReader() = default;

void NoticeReader::Stop() {
  if (metadata_ != nullptr) metadata_->Stop();
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  stop_.notify_all();
}

Found NoticeReader::Look() {
  if (metadata_ != nullptr) return metadata_->Look();
  if (source_.kind == Kind::kCommand) return RunCommand();
  if (source_.kind == Kind::kFile && access(source_.what.c_str(), F_OK) == 0)
    return std::optional<std::string>(source_.what + " exists");
  return None();
}

Found NoticeReader::RunCommand() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return ErrnoError(errno, "pipe");
  const UniqueFd output(ends[0]);
  UniqueFd writer(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, writer.get(), STDOUT_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // so that kill() also reaches its children
  const char* argv[] = {"sh", "-c", source_.what.c_str(), nullptr};
  pid_t child = 0;
  const int error =
      posix_spawn(&child, "/bin/sh", &actions, &attributes, const_cast<char* const*>(argv), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  writer.reset();
  if (error != 0) return ErrnoError(error, "--notice cmd: /bin/sh");
  const auto until = std::chrono::steady_clock::now() + kCommandMax;
  int status = 0;
  for (pid_t ended = 0; (ended = waitpid(child, &status, WNOHANG)) != child;) {
    if (ended < 0 && errno != EINTR) return ErrnoError(errno, "--notice cmd: waitpid");
    std::unique_lock lock(mutex_);
    stop_.wait_for(lock, kCommandPoll, [this] { return stopped_; });
    if (!stopped_ && std::chrono::steady_clock::now() < until) continue;
    kill(-child, SIGKILL);
    waitpid(child, &status, 0);
    if (stopped_) return None();
    return Error(Code::kDeadlineExceeded, "--notice cmd:%.80s has not ended within %lld s",
                 source_.what.c_str(), static_cast<long long>(kCommandMax.count()));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return None();
  char text[kReasonBytesMax];
  const ssize_t bytes = read(output.get(), text, sizeof(text));
  const std::string said = Reason(std::string(text, bytes > 0 ? static_cast<size_t>(bytes) : 0));
  return std::optional<std::string>(said.empty() ? Reason("cmd:" + source_.what) : said);
}

NoticeWatch::NoticeWatch(NoticeSource source, std::function<void(const std::string& why)> on_notice)
    : reader_(std::move(source)), on_notice_(std::move(on_notice)), thread_([this] { Run(); }) {}

NoticeWatch::~NoticeWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    stop_.notify_all();
  }
  reader_.Stop();
  thread_.join();
}

void NoticeWatch::Run() {
  bool trouble = false;
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    lock.unlock();
    const Found found = reader_.Look();
    lock.lock();
    if (stopped_) return;
    if (found.ok() && *found) return on_notice_(**found);
    if (!found.ok() && !trouble)
      LOG_WARNING("notices cannot be read, trying again: %s", found.status().ToString().c_str());
    if (found.ok() && trouble) LOG_INFO("notices can be read again");
    trouble = !found.ok();
    stop_.wait_for(lock, kLookEvery, [this] { return stopped_; });
  }
}

}  // namespace ropeteam
