// SPDX-License-Identifier: Apache-2.0
#include "api/cli/storage_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <utility>

#include "api/cli/text.h"
#include "api/client/local_protocol.h"
#include "core/base/sizes.h"
#include "storage/sink.h"
#include "storage/steps/steps.h"

namespace ropeteam::cli {
namespace {

Result<uint64_t> ParseCount(const std::string& option, const std::string& text, uint64_t limit) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number == 0 || number > limit)
    return Error(Code::kInvalidArgument, "%s \"%.80s\" is not a whole number from 1 to %llu", option.c_str(),
                 text.c_str(), static_cast<unsigned long long>(limit));
  return number;
}

// A path may be relative on the command line, but sinks accept only absolute paths.
std::string AbsoluteUrl(const std::string& text) {
  if (text.empty() || text.find("://") != std::string::npos) return text;
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(text, error);
  return error ? text : path.lexically_normal().string();
}

bool IsNumber(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Accepts sizes as in transformers ("5GB", "500MB", powers of 1000), and as elsewhere here ("4G", "512M",
// powers of 1024).
bool ParseShardSize(const std::string& text, uint64_t* bytes) {
  constexpr std::pair<const char*, uint64_t> kUnits[] = {
      {"KB", 1000}, {"MB", 1000'000}, {"GB", 1000'000'000}, {"TB", 1000'000'000'000}};
  for (const auto& [unit, factor] : kUnits) {
    if (!text.ends_with(unit)) continue;
    const char* const end = text.data() + text.size() - 2;
    const auto [rest, error] = std::from_chars(text.data(), end, *bytes);
    return error == std::errc() && rest == end && !__builtin_mul_overflow(*bytes, factor, bytes);
  }
  return ParseSize(text, bytes);
}

// The options of export --format hf.
Result<bool> TakeHf(const std::string& option, const std::string& value, HfOptions* options) {
  if (option == "--format") {
    options->chosen = value == "hf";
    if (!options->chosen) return Error(Code::kInvalidArgument, "--format \"%.80s\" is not hf", value.c_str());
    return true;
  }
  if (option == "--model") {
    options->model = value;
    return true;
  }
  if (option == "--config") {
    options->config = value;
    return true;
  }
  if (option != "--max-shard-size") return false;
  if (!ParseShardSize(value, &options->shard_bytes_max) || options->shard_bytes_max == 0)
    return Error(Code::kInvalidArgument, "--max-shard-size \"%.80s\" is not a size such as 5GB or 512M",
                 value.c_str());
  return true;
}

Result<bool> TakeRanks(const std::string& value, StorageOptions* options) {
  const size_t dash = value.find('-');
  uint32_t ends[2] = {};
  bool good = dash != std::string::npos;
  for (int i = 0; good && i < 2; ++i) {
    const std::string text = i == 0 ? value.substr(0, dash) : value.substr(dash + 1);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ends[i]);
    good = !text.empty() && error == std::errc() && end == text.data() + text.size();
  }
  if (!good || ends[0] > ends[1])
    return Error(Code::kInvalidArgument, "--ranks \"%.80s\" is not A-B, such as 0-7", value.c_str());
  options->rank_first = ends[0];
  options->rank_last = ends[1];
  return true;
}

// Takes one option with its value. False: no option of this name takes a value.
Result<bool> TakeValue(const std::string& option, const std::string& value, StorageCommand command,
                       StorageOptions* options) {
  const bool prune = command == StorageCommand::kPrune;
  const auto take = [&](const Result<uint64_t>& parsed, uint64_t* out) -> Result<bool> {
    if (!parsed.ok())
      return parsed.status().message().starts_with(option)
                 ? parsed.status()
                 : Error(Code::kInvalidArgument, "%s %s", option.c_str(), parsed.status().message().c_str());
    *out = *parsed;
    return true;
  };
  if (option == "--storage" && (command == StorageCommand::kList || command == StorageCommand::kExport)) {
    options->url = value;
    if (value.empty()) return Error(Code::kInvalidArgument, "--storage has no value");
    return true;
  }
  if (option == "--socket" && (command == StorageCommand::kExport || command == StorageCommand::kImport)) {
    options->socket = value;
    return true;
  }
  if (option == "--incarnation-token" && command == StorageCommand::kImport) {
    options->incarnation_token = value;
    if (value.empty() || value.size() > local::kIncarnationTokenBytesMax)
      return Error(Code::kInvalidArgument, "--incarnation-token of %zu bytes, limits 1 and %u", value.size(),
                   local::kIncarnationTokenBytesMax);
    return true;
  }
  if (option == "--ranks" && command == StorageCommand::kImport) return TakeRanks(value, options);
  if (command == StorageCommand::kExport) {
    const Result<bool> taken = TakeHf(option, value, &options->hf);
    if (!taken.ok() || *taken) return taken;
  }
  if (option == "--job") {
    const Status name = storage::CheckFileName(value);
    if (!name.ok())
      return Error(Code::kInvalidArgument, "--job names a folder on storage: %s", name.message().c_str());
    options->job = value;
    return true;
  }
  if (option == "--timeout") {
    uint64_t seconds = 0;
    const Result<bool> taken =
        take(ParseCount(option, value, static_cast<uint64_t>(kStorageTimeoutMax.count())), &seconds);
    options->timeout = std::chrono::seconds(seconds);
    return taken;
  }
  if (option == "--keep-on-storage" && prune)
    return take(ParseCount(option, value, storage::kKeepNewestMax), &options->rules.keep_newest);
  if (option == "--audit-log" && prune) {
    options->audit_log = value;
    return true;
  }
  if (option == "--keep-every" && prune)
    return take(ParseCount(option, value, UINT64_MAX), &options->rules.keep_every);
  if (option == "--keep-within" && prune)
    return take(storage::ParseDuration(value), &options->rules.keep_within_s);
  if (option == "--keep-best" && prune) {
    Result<storage::KeepBest> best = storage::ParseKeepBest(value);
    if (!best.ok())
      return Error(Code::kInvalidArgument, "%s %s", option.c_str(), best.status().message().c_str());
    options->rules.keep_best = std::move(*best);
    return true;
  }
  return false;
}

bool TakesValue(const std::string& option) {
  constexpr const char* kOptions[] = {
      "--storage",   "--job",    "--timeout",           "--keep-on-storage", "--keep-every", "--keep-within",
      "--keep-best", "--socket", "--incarnation-token", "--ranks",           "--audit-log",  "--format",
      "--model",     "--config", "--max-shard-size"};
  return std::find(std::begin(kOptions), std::end(kOptions), option) != std::end(kOptions);
}

bool TakeFlag(const std::string& option, StorageCommand command, StorageOptions* options) {
  const bool prune = command == StorageCommand::kPrune;
  if (option == "--json" && (command == StorageCommand::kList || command == StorageCommand::kVerify))
    return options->json = true;
  if (option == "--best" && command == StorageCommand::kExport) return options->hf.best = true;
  if (option == "--dry-run" && prune) return options->dry_run = true;
  if (option == "--yes" && prune) return options->yes = true;
  if (option == "--unfinished" && prune) return options->unfinished = true;
  return false;
}

Status CheckWhole(const std::vector<std::string>& words, StorageCommand command, StorageOptions* options) {
  size_t least = 0;
  size_t most = 0;
  const char* what = "";
  switch (command) {
    case StorageCommand::kList:
      what = "--storage URL";
      break;
    case StorageCommand::kVerify:
      least = 1, most = 2, what = "URL [STEP]";
      break;
    case StorageCommand::kPrune:
      least = most = 1, what = "one URL";
      break;
    case StorageCommand::kExport:
      least = most = 2, what = "STEP, and DIR or URL";
      break;
    case StorageCommand::kImport:
      least = most = 1, what = "DIR or URL";
      break;
  }
  if (words.size() > most)
    return Error(Code::kInvalidArgument, "%.80s was not expected, only %s", words[most].c_str(), what);
  if (words.size() < least) return Error(Code::kInvalidArgument, "%s must be given", what);
  if (command == StorageCommand::kExport) {
    options->step = words[0];
    options->destination = AbsoluteUrl(words[1]);
    options->url = AbsoluteUrl(options->url);
    if (!options->hf.chosen && options->hf != HfOptions())
      return Error(Code::kInvalidArgument,
                   "--best, --model, --config and --max-shard-size go with --format hf");
    if (options->hf.chosen && options->destination.find("://") != std::string::npos)
      return Error(Code::kInvalidArgument, "--format hf writes a directory of this machine, not %.80s",
                   options->destination.c_str());
    if (!options->url.empty() && !options->socket.empty())
      return Error(Code::kInvalidArgument, "--socket is for a step in memory, --storage for one on storage");
    return OkStatus();
  } else if (command == StorageCommand::kImport) {
    const Result<storage::StepSource> source = storage::ParseStepSource(AbsoluteUrl(words[0]));
    if (!source.ok()) return source.status();
    options->url = source->url;
    if (source->step) options->step = std::to_string(*source->step);
    if (options->rank_first && options->incarnation_token.empty())
      return Error(
          Code::kInvalidArgument,
          "--ranks needs --incarnation-token, the same token on all nodes that import a part of the step");
    return OkStatus();
  } else if (!words.empty()) {
    options->url = words[0];
    if (words.size() > 1) options->step = words[1];
  }
  if (options->url.empty()) return Error(Code::kInvalidArgument, "%s must be given", what);
  options->url = AbsoluteUrl(options->url);
  if (command != StorageCommand::kPrune) return OkStatus();
  if (options->dry_run == options->yes)
    return Error(Code::kInvalidArgument,
                 "exactly one of --dry-run (say what would be removed) and --yes (remove it) must be given");
  if (!options->rules.Any() && !options->unfinished)
    return Error(Code::kInvalidArgument,
                 "no rule says what stays: give --keep-on-storage, --keep-every, --keep-best, --keep-within, "
                 "or --unfinished alone");
  return OkStatus();
}

}  // namespace

Result<StorageOptions> ParseStorageOptions(const std::vector<std::string>& arguments,
                                           StorageCommand command) {
  StorageOptions options;
  GivenOnce given;
  std::vector<std::string> words;
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::string argument = arguments[i];
    if (!argument.starts_with("-")) {
      words.push_back(argument);
      continue;
    }
    if (argument == "--help" || argument == "-h") {
      options.help = true;
      return options;
    }
    if (TakeFlag(argument, command, &options)) continue;
    std::string value;
    const size_t equals = argument.find('=');
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
      argument.resize(equals);
    } else if (TakesValue(argument)) {
      if (i + 1 == arguments.size())
        return Error(Code::kInvalidArgument, "%s has no value", argument.c_str());
      value = arguments[++i];
    }
    const Result<bool> taken = TakeValue(argument, value, command, &options);
    if (!taken.ok()) return taken.status();
    if (!*taken) return Error(Code::kInvalidArgument, "%.80s was not expected", argument.c_str());
    ROPETEAM_RETURN_IF_ERROR(given.Add(argument));
  }
  ROPETEAM_RETURN_IF_ERROR(CheckWhole(words, command, &options));
  return options;
}

bool MeansStorage(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--storage" || argument.starts_with("--storage=")) return true;
    if (argument == "--socket" || argument == "--timeout" || argument == "--job" || argument == "--node")
      ++i;  // its value
    else if (!argument.starts_with("-") && !IsNumber(argument))
      return true;
  }
  return false;
}

}  // namespace ropeteam::cli
