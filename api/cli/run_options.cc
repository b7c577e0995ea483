// SPDX-License-Identifier: Apache-2.0
#include "api/cli/run_options.h"

#include <algorithm>
#include <charconv>

#include "api/cli/launcher.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

constexpr uint32_t kReadyTimeoutSecondsMax = 86400;
constexpr uint32_t kWatchdogSecondsMin = 2;  // the daemon reports once a second that it is alive
constexpr uint32_t kWatchdogSecondsMax = 86400;

bool IsOneOf(const std::string& name, const std::vector<std::string>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool Seconds(const std::string& text, uint32_t low, uint32_t high, uint32_t* seconds) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *seconds);
  return error == std::errc() && end == text.data() + text.size() && *seconds >= low && *seconds <= high;
}

Status SetValue(const std::string& name, const std::string& value, RunOptions* options) {
  if (name == "config") {
    options->config = value;
  } else if (name == "daemon") {
    options->daemon = value;
  } else if (name == "start-etcd") {
    options->start_etcd = value;
  } else if (name == "python-path") {
    options->python_path = value;
  } else if (name == "ready-timeout") {
    if (!Seconds(value, 1, kReadyTimeoutSecondsMax, &options->ready_timeout_s))
      return Error(Code::kInvalidArgument,
                   "--ready-timeout \"%.80s\" is not a number of seconds from 1 to %u", value.c_str(),
                   kReadyTimeoutSecondsMax);
  } else if (name == "watchdog") {
    if (value == "0")
      options->watchdog_s = 0;
    else if (!Seconds(value, kWatchdogSecondsMin, kWatchdogSecondsMax, &options->watchdog_s))
      return Error(Code::kInvalidArgument,
                   "--watchdog \"%.80s\" is not a number of seconds from %u to %u, or 0 for none",
                   value.c_str(), kWatchdogSecondsMin, kWatchdogSecondsMax);
  } else {
    options->daemon_values[name] = value;
  }
  return OkStatus();
}

bool SetFlag(const std::string& name, RunOptions* options) {
  if (name == "remove-arena-at-exit") {
    options->remove_arena_at_exit = true;
  } else if (name == "required") {
    options->required = true;
  } else if (name == "quiet") {
    options->quiet = true;
  } else if (name == "help") {
    options->help = true;
  } else if (IsOneOf(name, FlagOptions())) {
    options->daemon_flags.push_back(name);
  } else {
    return false;
  }
  return true;
}

}  // namespace

const char kRunHelp[] =
    "ropeteam run [options] -- COMMAND [ARGUMENT...]\n"
    "\n"
    "Starts ropeteamd, waits until it is ready, runs COMMAND with ROPETEAM_SOCKET and ROPETEAM_JOB set, "
    "passes\n"
    "signals on to it, restarts the daemon should it die or hang, and ends with COMMAND's exit code. The "
    "arena\n"
    "stays for the next run.\n"
    "\n"
    "Job, node, counts, coordinator and address come from the launcher's variables unless given here.\n"
    "\n"
    "  --daemon PATH            the ropeteamd to start [ROPETEAMD, beside this program, PATH]\n"
    "  --ready-timeout SECONDS  how long it may take to be ready [600]\n"
    "  --required               no COMMAND without it: where the job refuses the daemon, or no coordinator "
    "answers\n"
    "                           within --join-timeout [120 then], end with the daemon's exit code\n"
    "  --watchdog SECONDS       kill and restart a daemon that has hung for so long; 0: never [30]\n"
    "  --start-etcd HOSTS       keep the membership in an etcd of the job's own, with members on these three "
    "nodes, "
    "the\n"
    "                           first ones: HOST[:PORT],HOST[:PORT],HOST[:PORT], the same on every node. One "
    "host: "
    "lost\n"
    "                           with it. auto: SkyPilot's nodes, or a single node [ROPETEAM_START_ETCD]\n"
    "  --python-path DIR        put DIR before COMMAND's PYTHONPATH\n"
    "  --remove-arena-at-exit   leave nothing in memory when COMMAND has ended\n"
    "  --quiet                  print neither what was chosen nor warnings nor how far the start is\n"
    "  --config FILE            a file for ropeteamd; nothing is then taken from launchers' variables\n"
    "\n"
    "and ropeteamd's own options, which may also be given as ROPETEAM_... in the environment (--chunk-size "
    "is\n"
    "ROPETEAM_CHUNK_SIZE). These are ropeteamd's:\n"
    "\n";

Result<RunOptions> ParseRunOptions(const std::vector<std::string>& arguments) {
  RunOptions options;
  GivenOnce given;
  size_t i = 0;
  for (; i < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string& argument = arguments[i];
    if (argument == "-h") {
      options.help = true;
      continue;
    }
    if (!argument.starts_with("--"))
      return Error(Code::kInvalidArgument,
                   "\"%.80s\": the command goes behind --, as in: ropeteam run -- %.80s", argument.c_str(),
                   argument.c_str());
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    if (IsOneOf(name, ValueOptions()) ||
        IsOneOf(name, {"config", "daemon", "python-path", "ready-timeout", "start-etcd", "watchdog"})) {
      std::string value;
      if (equals != std::string::npos) {
        value = argument.substr(equals + 1);
      } else if (i + 1 < arguments.size() && arguments[i + 1] != "--") {
        value = arguments[++i];
      } else {
        return Error(Code::kInvalidArgument, "--%s has no value", name.c_str());
      }
      ROPETEAM_RETURN_IF_ERROR(given.Add("--" + name));
      ROPETEAM_RETURN_IF_ERROR(SetValue(name, value, &options));
    } else if (equals != std::string::npos || !SetFlag(name, &options)) {
      return Error(Code::kInvalidArgument, "%.80s is no option of ropeteam run or ropeteamd",
                   argument.c_str());
    }
  }
  if (options.help) return options;
  if (i + 1 >= arguments.size())
    return Error(Code::kInvalidArgument, "no command: ropeteam run [options] -- COMMAND [ARGUMENT...]");
  options.command.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1, arguments.end());
  return options;
}

}  // namespace ropeteam::cli
