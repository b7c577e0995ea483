// SPDX-License-Identifier: Apache-2.0
//
//     ropeteam-fuzz --list
//     ropeteam-fuzz --write-seeds DIR          # DIR/TARGET/seed-N
//     ropeteam-fuzz TARGET …                   # clang: libFuzzer's arguments; else the files and folders to replay
//
// Without libFuzzer a target also gets its seeds, and each seed cut after every byte and with every byte changed.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/base/log.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

std::vector<const Target*>& Targets() {
  static std::vector<const Target*> targets;
  return targets;
}

const Target* chosen = nullptr;

void List() {
  for (const Target* target : Targets()) std::printf("%s\n", target->name);
}

void WriteSeeds(const std::filesystem::path& directory) {
  for (const Target* target : Targets()) {
    std::filesystem::create_directories(directory / target->name);
    size_t number = 0;
    for (const std::string& seed : target->seeds()) {
      std::ofstream file(directory / target->name / ("seed-" + std::to_string(number++)), std::ios::binary);
      file << seed;
      if (!file.flush()) std::printf("cannot write below %s\n", directory.c_str()), std::exit(2);
    }
  }
}

// Removes our own arguments. The others are for libFuzzer or for Replay().
void Begin(int* argc, char** argv) {
  const auto sort = [](const Target* a, const Target* b) { return std::strcmp(a->name, b->name) < 0; };
  std::sort(Targets().begin(), Targets().end(), sort);
  const std::string first = *argc > 1 ? argv[1] : "";
  if (first == "--list") List(), std::exit(0);
  if (first == "--write-seeds" && *argc == 3) WriteSeeds(argv[2]), std::exit(0);
  for (const Target* target : Targets())
    if (target->name == first) chosen = target;
  if (chosen == nullptr) {
    std::printf("usage: %s TARGET …, --list, or --write-seeds DIR; targets:\n", argv[0]);
    List();
    std::exit(2);
  }
  std::copy(argv + 2, argv + *argc + 1, argv + 1);
  --*argc;
  // Log messages are formatted, because that uses decoded values, but not shown.
  SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kDebug);
}

#ifndef ROPETEAM_LIBFUZZER

// Prints which input runs, so that the output of a crash names it.
void RunOne(const std::string& what, std::string_view input) {
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  chosen->run(std::string(input));  // a copy of exactly this size, so that a sanitizer sees reads beyond it
}

void ReplaySeeds() {
  size_t number = 0;
  for (const std::string& seed : chosen->seeds()) {
    const std::string name = "seed-" + std::to_string(number++);
    RunOne(name, seed);
    // Long seeds are changed only at some places, to keep a target below a second.
    const size_t step = 1 + seed.size() / 256;
    for (size_t i = 0; i < seed.size(); i += step) {
      chosen->run(std::string(seed, 0, i));
      std::string changed = seed;
      changed[i] = static_cast<char>(~changed[i]);
      chosen->run(changed);
    }
  }
}

void ReplayFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) std::printf("cannot read %s\n", path.c_str()), std::exit(2);
  RunOne(path.string(), std::string(std::istreambuf_iterator<char>(file), {}));
}

int Replay(int argc, char** argv) {
  ReplaySeeds();
  for (int i = 1; i < argc; ++i) {
    if (std::filesystem::is_regular_file(argv[i])) ReplayFile(argv[i]);
    if (!std::filesystem::is_directory(argv[i])) continue;
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) ReplayFile(entry.path());
  }
  return 0;
}

#endif

}  // namespace

Target::Target(const char* target_name, Run target_run, Seeds target_seeds)
    : name(target_name), run(target_run), seeds(target_seeds) {
  Targets().push_back(this);
}

}  // namespace ropeteam::fuzz

#ifdef ROPETEAM_LIBFUZZER

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  ropeteam::fuzz::Begin(argc, *argv);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ropeteam::fuzz::chosen->run({reinterpret_cast<const char*>(data), size});
  return 0;
}

#else

int main(int argc, char** argv) {
  ropeteam::fuzz::Begin(&argc, argv);
  return ropeteam::fuzz::Replay(argc, argv);
}

#endif
