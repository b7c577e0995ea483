// SPDX-License-Identifier: Apache-2.0
//
// A fuzz target is a function that gives any bytes to one of our decoders. It must always return: a crash, a
// failed ROPETEAM_CHECK, a hang or a large allocation is a bug. Most targets also check the accepted bytes,
// for instance that they are encoded to the same bytes again.
//
// One program has all targets (main.cc). Built with clang it is a libFuzzer program; built with any other compiler it
// replays inputs. docs/testing.md says how to run it and how to add a target.

#ifndef ROPETEAM_TESTS_FUZZ_FUZZ_H_
#define ROPETEAM_TESTS_FUZZ_FUZZ_H_

#include <string>
#include <string_view>
#include <vector>

namespace ropeteam::fuzz {

using Run = void (*)(std::string_view input);
// Initial inputs, made by our own encoders.
using Seeds = std::vector<std::string> (*)();

// One object per target, in its source file. `name` is used on the command line, and as a folder of corpus/.
struct Target {
  Target(const char* name, Run run, Seeds seeds);
  const char* const name;
  const Run run;
  const Seeds seeds;
};

}  // namespace ropeteam::fuzz

#endif  // ROPETEAM_TESTS_FUZZ_FUZZ_H_
