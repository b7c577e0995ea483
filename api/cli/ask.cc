// SPDX-License-Identifier: Apache-2.0
#include "api/cli/ask.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "api/cli/commands.h"
#include "api/cli/text.h"
#include "api/client/admin_client.h"

namespace ropeteam::cli {
namespace {

constexpr double kWatchSecondsDefault = 2;

Status ParseSeconds(const char* flag, const std::string& text, double* seconds) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value > 0) || value > kTimeoutSecondsMax)
    return Error(Code::kInvalidArgument, "%s \"%.80s\" is not a number of seconds above 0 and up to %.0f",
                 flag, text.c_str(), kTimeoutSecondsMax);
  *seconds = value;
  return OkStatus();
}

Status ParseNumber(const char* what, const std::string& text, uint64_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size())
    return Error(Code::kInvalidArgument, "%s \"%.80s\" is not a whole number from 0 to %llu", what,
                 text.c_str(), static_cast<unsigned long long>(UINT64_MAX));
  return OkStatus();
}

bool LooksLikeSeconds(const std::string& text) { return !text.empty() && text[0] >= '0' && text[0] <= '9'; }

}  // namespace

Result<AskOptions> ParseAskOptions(const std::vector<std::string>& arguments, Takes takes) {
  AskOptions options;
  GivenOnce given;
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::string argument = arguments[i];
    std::string value;
    const size_t equals = argument.find('=');
    const bool has_value = argument.starts_with("--") && equals != std::string::npos;
    if (has_value) {
      value = argument.substr(equals + 1);
      argument.resize(equals);
    }
    const bool wants_value = argument == "--socket" || argument == "--job" || argument == "--node" ||
                             argument == "--timeout" || argument == "--count" || argument == "--output" ||
                             argument == "--coordinator" || argument == "--notice-seconds";
    if (wants_value && !has_value) {
      if (i + 1 == arguments.size())
        return Error(Code::kInvalidArgument, "%s has no value", argument.c_str());
      value = arguments[++i];
    }
    // An unset shell variable must not select a different daemon than the intended one.
    if (wants_value && value.empty())
      return Error(Code::kInvalidArgument, "%s has no value", argument.c_str());
    if (wants_value) ROPETEAM_RETURN_IF_ERROR(given.Add(argument));
    if (argument == "--socket") {
      options.socket.path = value;
    } else if (argument == "--job") {
      options.socket.job = value;
    } else if (argument == "--node") {
      options.socket.node = value;
    } else if (argument == "--timeout") {
      ROPETEAM_RETURN_IF_ERROR(ParseSeconds("--timeout", value, &options.timeout_s));
    } else if (argument == "--notice-seconds" && takes == Takes::kNotice) {
      ROPETEAM_RETURN_IF_ERROR(ParseSeconds("--notice-seconds", value, &options.notice_s));
    } else if (argument == "--coordinator" && takes == Takes::kCoordinator) {
      options.coordinator = value;
    } else if (argument == "--force" && !has_value && takes == Takes::kCoordinator) {
      options.force = true;
    } else if (argument == "--undo" && !has_value && takes == Takes::kStepAndUndo) {
      options.undo = true;
    } else if (argument == "--all" && !has_value && takes == Takes::kName) {
      options.all = true;
    } else if (takes == Takes::kName && !argument.starts_with("-") && options.name.empty()) {
      options.name = argument;
    } else if (argument == "--count" && takes == Takes::kWatch) {
      ROPETEAM_RETURN_IF_ERROR(ParseNumber("--count", value, &options.watch_count));
    } else if (argument == "--watch" && takes == Takes::kWatch) {
      options.watch_s = kWatchSecondsDefault;
      if (!has_value && i + 1 < arguments.size() && LooksLikeSeconds(arguments[i + 1]))
        value = arguments[++i];
      if (!value.empty() || has_value)
        ROPETEAM_RETURN_IF_ERROR(ParseSeconds("--watch", value, &options.watch_s));
    } else if (argument == "--output" && takes == Takes::kStepAndOutput) {
      options.output = value;
    } else if (argument == "--json" && !has_value &&
               (takes == Takes::kStep || takes == Takes::kWatch || takes == Takes::kNotice)) {
      options.json = true;
    } else if (argument == "--local" && !has_value && takes == Takes::kWatch) {
      options.local = true;
    } else if ((argument == "--help" || argument == "-h") && !has_value) {
      options.help = true;
    } else if (takes != Takes::kWatch && takes != Takes::kNotice && takes != Takes::kCoordinator &&
               takes != Takes::kName && !argument.starts_with("-") && !options.has_step) {
      ROPETEAM_RETURN_IF_ERROR(ParseNumber("step", argument, &options.step));
      options.has_step = true;
    } else {
      return Error(Code::kInvalidArgument, "%.80s was not expected", arguments[i].c_str());
    }
  }
  if (options.watch_count != 0 && options.watch_s == 0) options.watch_s = kWatchSecondsDefault;
  if (options.help) return options;
  if ((takes == Takes::kStepAndUndo || takes == Takes::kStepAlone) && !options.has_step)
    return Error(Code::kInvalidArgument, "STEP is missing");
  if (takes == Takes::kCoordinator && options.coordinator.empty())
    return Error(Code::kInvalidArgument, "--coordinator HOST:PORT is missing");
  if (takes == Takes::kName && options.name.empty() == !options.all)
    return Error(Code::kInvalidArgument, "give one NODE, or --all");
  return options;
}

Result<std::unique_ptr<AdminClient>> Connect(const AskOptions& options, int64_t* timeout_ms) {
  *timeout_ms = static_cast<int64_t>(options.timeout_s * 1000);
  const Result<std::string> socket = ChooseSocket(options.socket, *timeout_ms);
  if (!socket.ok()) return socket.status();
  return AdminClient::Connect(*socket, *timeout_ms);
}

Result<std::string> Ask(const AskOptions& options, local::AdminCommand command) {
  int64_t timeout_ms = 0;
  Result<std::unique_ptr<AdminClient>> client = Connect(options, &timeout_ms);
  if (!client.ok()) return client.status();
  local::Admin admin;
  admin.command = command;
  admin.has_step = options.has_step;
  admin.step = options.step;
  admin.timeout_ms = static_cast<uint64_t>(timeout_ms);
  return (*client)->Request(admin);
}

Status AskToRejoin(const AskOptions& options) {
  int64_t timeout_ms = 0;
  Result<std::unique_ptr<AdminClient>> client = Connect(options, &timeout_ms);
  if (!client.ok()) return client.status();
  return (*client)->Rejoin({options.coordinator, options.force}, timeout_ms);
}

Status AskToQuarantine(const AskOptions& options) {
  int64_t timeout_ms = 0;
  Result<std::unique_ptr<AdminClient>> client = Connect(options, &timeout_ms);
  if (!client.ok()) return client.status();
  return (*client)->Quarantine({options.step, options.undo, static_cast<uint64_t>(timeout_ms)});
}

int PrintAnswer(const char* name, const AskOptions& options, const Result<std::string>& answer,
                std::string (*render)(const nlohmann::json&), Result<int> (*judge)(const nlohmann::json&)) {
  if (!answer.ok()) return Fail(name, answer.status());
  try {
    const nlohmann::json json = nlohmann::json::parse(*answer);
    const Result<int> code = judge(json);
    if (!code.ok()) return Fail(name, code.status());
    const std::string text = options.json ? *answer + "\n" : render(json);
    std::fputs(text.c_str(), stdout);
    if (json.value("truncated", false))
      std::fprintf(stderr, "ropeteam %s: the answer was too long, part of it was left out\n", name);
    return *code;
  } catch (const nlohmann::json::exception& error) {
    std::fprintf(stderr, "ropeteam %s: the daemon's answer is not as expected: %s\n", name, error.what());
    return kExitFailed;
  }
}

}  // namespace ropeteam::cli
