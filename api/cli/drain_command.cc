// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/storage_progress.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam drain: removes this node from the job without losing redundancy. No save begins on it, its "
    "shards are\n"
    "                copied to other nodes, due steps are written to storage; then its daemon ends\n"
    "  --notice-seconds S  it leaves after S seconds in any case [as its daemon's --notice-seconds: "
    "30]\n"
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH       the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this "
    "machine]\n"
    "  --timeout SECONDS   how long the daemon may take to answer [10]\n"
    "  --json              print the outcome as JSON\n"
    "\n"
    "Exit codes: 0 all that is kept is redundant on other nodes, and what was due is on storage; 5 the "
    "newest\n"
    "committed step can be restored without this node, but something is missing; 6 it cannot, or this is "
    "unknown;\n"
    "1 the daemon could not be asked, or ended before it had left; 2 a wrong option.\n";

// Interval of progress requests to the daemon. The bar moves, and the cost is negligible.
constexpr auto kLookPause = std::chrono::milliseconds(200);
// The daemon's own time limit is not known here. It is at most a day.
constexpr int64_t kDayMs = 86'400'000;

// The progress bar. A step that is committed meanwhile adds to what is left; the bar never moves back.
class DrainProgress {
 public:
  void Show(const nlohmann::json& drain) {
    if (!drain.is_object() || !drain.at("heard").get<bool>()) return;
    const auto most = drain.at("bytes_most").get<uint64_t>();
    const auto left = drain.at("bytes_left").get<uint64_t>();
    if (progress_ == nullptr) progress_ = std::make_unique<Progress>("copied to other nodes", total_ = most);
    const uint64_t done = total_ - std::min(left, total_);
    if (done > done_) progress_->Add(done - std::exchange(done_, done));
  }

  // A drain that ended before the first progress request has no bar, because its rate would be wrong.
  void End(const nlohmann::json& drain) {
    if (progress_ != nullptr) Show(drain);
  }

 private:
  std::unique_ptr<Progress> progress_;
  uint64_t total_ = 0;
  uint64_t done_ = 0;
};

Result<nlohmann::json> Drain(const AskOptions& options) {
  int64_t timeout_ms = 0;
  Result<std::unique_ptr<AdminClient>> client = Connect(options, &timeout_ms);
  if (!client.ok()) return client.status();
  local::Drain drain;
  drain.within_ms = static_cast<uint64_t>(std::ceil(options.notice_s * 1000));
  const int64_t wait_ms =
      options.notice_s == 0 ? kDayMs : std::min(kDayMs, static_cast<int64_t>(drain.within_ms) + timeout_ms);
  std::future<Result<std::string>> outcome =
      std::async(std::launch::async, [&] { return (*client)->Drain(drain, wait_ms); });
  local::Admin node;
  node.command = local::AdminCommand::kNode;
  node.timeout_ms = static_cast<uint64_t>(timeout_ms);
  DrainProgress progress;
  while (outcome.wait_for(kLookPause) != std::future_status::ready) {
    const Result<std::string> answer = (*client)->Request(node);
    if (answer.ok() && !options.json) progress.Show(nlohmann::json::parse(*answer).at("daemon").at("drain"));
  }
  const Result<std::string> text = outcome.get();
  if (!text.ok()) return text.status();
  const nlohmann::json parsed = nlohmann::json::parse(*text);
  progress.End(parsed);
  // Waits until the connection ends: then the daemon has left the job.
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while ((*client)->Request(node).ok() && std::chrono::steady_clock::now() < until) {
  }
  return parsed;
}

}  // namespace

int DrainCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kNotice);
  int code = 0;
  if (DoneWithOptions("drain", options, kHelp, &code)) return code;
  try {
    const Result<nlohmann::json> outcome = Drain(*options);
    if (!outcome.ok()) return Fail("drain", outcome.status());
    const std::string text = outcome->at("text").get<std::string>();
    std::printf("%s\n",
                options->json ? outcome->dump().c_str() : ("this node has left the job: " + text).c_str());
    return outcome->at("exit_code").get<int>();
  } catch (const nlohmann::json::exception& error) {
    std::fprintf(stderr, "ropeteam drain: the daemon's answer is not as expected: %s\n", error.what());
    return kExitFailed;
  }
}

}  // namespace ropeteam::cli
