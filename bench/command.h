// SPDX-License-Identifier: Apache-2.0
//
// A subcommand of ropeteam-bench is a file of its own and one line in commands.inc. The file defines
//
//     void AddCopyCommand(CLI::App& app, Bench& bench);
//
// which adds its subcommand with its options and a callback. The callback measures and adds rows to the
// report of bench.Start(). If it cannot measure or finds a wrong result, it throws BenchError: the message
// goes to stderr, and the exit code is 1.

#ifndef ROPETEAM_BENCH_COMMAND_H_
#define ROPETEAM_BENCH_COMMAND_H_

#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>

#include "bench/report.h"

namespace ropeteam::bench {

struct BenchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Shared by all subcommands. The fields are options of the whole program, set before a callback runs.
class Bench {
 public:
  bool json = false;
  int runs = 15;  // measured passes, after one that is discarded

  // Prints the header with the machine and `settings` ("size 256 MiB runs 15"), and creates the report. Call
  // it once.
  Report& Start(const std::string& settings) {
    report_.emplace(std::cout, json);
    (json ? std::cerr : std::cout) << Header(settings) << std::endl;
    return *report_;
  }

 private:
  std::optional<Report> report_;
};

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_COMMAND_H_
