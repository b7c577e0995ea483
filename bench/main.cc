// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench measures every figure that Ropeteam claims, together with its baseline in one run.

#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "bench/bare_fi.h"
#include "bench/command.h"
#include "bench/remote.h"
#include "bench/transport_loop.h"
#include "bench/yardsticks.h"

namespace ropeteam::bench {
#define ROPETEAM_BENCH_COMMAND(Name) void Add##Name##Command(CLI::App& app, Bench& bench);
#include "bench/commands.inc"
#undef ROPETEAM_BENCH_COMMAND

namespace {

constexpr int kExitUsage = 2;

int Main(int argc, char** argv) {
  CLI::App app{"Measures Ropeteam beside its baselines."};
  app.require_subcommand(1);
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    std::string text = "ropeteam-bench: ";
    const std::vector<std::string> words = failed->remaining();
    const bool unknown = error.get_name() == "RequiredError" && !words.empty() && words.front()[0] != '-';
    text += unknown ? '"' + words.front() + "\" is not a command" : error.what();
    return text + "\nropeteam-bench --help lists the commands and the options.\n";
  });
  app.fallthrough();  // so that `ropeteam-bench copy --json` finds the options of the whole program;
                      // subcommands inherit it
  Bench bench;
  app.add_flag("--json", bench.json, "one JSON object per row on stdout; the header goes to stderr");
  app.add_option("--runs", bench.runs, "measured passes, after one that is discarded")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
#define ROPETEAM_BENCH_COMMAND(Name) Add##Name##Command(app, bench);
#include "bench/commands.inc"
#undef ROPETEAM_BENCH_COMMAND
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 has an exit code for each kind of error; all our programs return 2 instead.
    return app.exit(error) == 0 ? 0 : kExitUsage;
  } catch (const std::exception& error) {
    std::cerr << "ropeteam-bench: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace ropeteam::bench

int main(int argc, char** argv) {
  std::vector<std::string> unpacked;
  std::vector<char*> words;
  if (argc == 3 && std::string_view(argv[1]) == ropeteam::bench::kPackedCommand) {
    unpacked = ropeteam::bench::Unpack(argv[2]);
    words.push_back(argv[0]);
    for (std::string& word : unpacked) words.push_back(word.data());
    argc = static_cast<int>(words.size());
    words.push_back(nullptr);
    argv = words.data();
  }
  if (argc > 1 && std::string_view(argv[1]) == ropeteam::bench::kBareFiTargetCommand)
    return ropeteam::bench::BareFiTargetMain(argc - 2, argv + 2);
  if (argc > 1 && std::string_view(argv[1]) == ropeteam::bench::kTransportTargetCommand)
    return ropeteam::bench::TransportTargetMain(argc - 2, argv + 2);
  if (argc > 1 && std::string_view(argv[1]) == ropeteam::bench::kSocketTargetCommand)
    return ropeteam::bench::SocketTargetMain(argc - 2, argv + 2);
  return ropeteam::bench::Main(argc, argv);
}
