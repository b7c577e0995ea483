// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-simulation: runs seeds, and prints which one failed and how to run it again (docs/testing.md).
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <chrono>
#include <new>
#include <string>
#include <vector>

#include "tests/simulation/simulation.h"

namespace {

using ropeteam::simulation::Options;
using ropeteam::simulation::Outcome;

constexpr size_t kTraceTail = 120;  // lines: about the last tenth of a second of a small cluster
constexpr size_t kTraceAll = SIZE_MAX;
constexpr uint64_t kProgressSeeds = 1000;  // between two lines of progress: about a minute

struct Arguments {
  uint64_t from = 1;
  uint64_t count = 1;
  uint32_t nodes = 0;
  bool verbose = false;  // the whole trace
  bool twice = false;    // every seed twice: both runs must be the same
  bool keep_going = false;
  size_t tail = kTraceTail;
  ropeteam::simulation::TroubleOdds odds;
};

// For the signal handler: a failed ROPETEAM_CHECK aborts inside the run.
uint64_t running_seed = 0;
std::vector<std::string> running_flags;  // --nodes and those of the trouble
const char* program = nullptr;
bool tracing = false;

int Usage() {
  std::fprintf(
      stderr,
      "usage: ropeteam-simulation [--seed N | --seeds COUNT [--from N]] [--nodes N] [--verbose] "
      "[--tail LINES]\n"
      "                           [--twice] [--keep-going] [--trouble NAME=PERCENT | --only NAME]...\n"
      "  --seed N       run this seed\n"
      "  --seeds COUNT  run COUNT seeds, from 1 or --from N\n"
      "  --nodes N      with so many nodes, whatever the seed says\n"
      "  --verbose      print every line of the trace (a seed runs the same with and without)\n"
      "  --tail LINES   print so many of the last lines of the trace when a seed fails\n"
      "  --twice        run every seed twice and compare\n"
      "  --keep-going   do not stop at the first seed that fails, nor when one ends the process; says how\n"
      "                 far it is now and then\n"
      "  --trouble NAME=PERCENT  of seeds that have this kind of trouble; 0: none, 100: all\n"
      "  --only NAME    all seeds have this kind of trouble and those of other --only, and no other fault\n"
      "kinds of trouble, with their percentages:\n");
  const ropeteam::simulation::TroubleOdds odds;
  for (size_t kind = 0; kind < ropeteam::simulation::kTroubles; ++kind)
    std::fprintf(stderr, "  %s=%u\n", TroubleName(static_cast<ropeteam::simulation::Trouble>(kind)),
                 odds.percent[kind]);
  return 2;
}

bool Parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--verbose") {
      arguments->verbose = true;
      continue;
    }
    if (flag == "--twice") {
      arguments->twice = true;
      continue;
    }
    if (flag == "--keep-going") {
      arguments->keep_going = true;
      continue;
    }
    if (i + 1 == argc) return false;
    if (flag == "--nodes" || flag == "--trouble" || flag == "--only") {
      running_flags.push_back(flag);
      running_flags.push_back(argv[i + 1]);
    }
    if (flag == "--trouble") {
      if (!arguments->odds.Set(argv[++i])) return false;
      continue;
    }
    if (flag == "--only") {
      if (!arguments->odds.alone) arguments->odds.percent.fill(0);
      arguments->odds.alone = true;
      if (!arguments->odds.Set(std::string(argv[++i]) + "=100")) return false;
      continue;
    }
    char* end = nullptr;
    const uint64_t value = std::strtoull(argv[++i], &end, 10);
    if (*end != '\0' || end == argv[i]) return false;
    if (flag == "--seed") {
      arguments->from = value;
      arguments->count = 1;
    } else if (flag == "--seeds") {
      arguments->count = value;
    } else if (flag == "--from") {
      arguments->from = value;
    } else if (flag == "--tail") {
      arguments->tail = value;
    } else if (flag == "--nodes" && value >= 2 && value <= 4096) {
      arguments->nodes = static_cast<uint32_t>(value);
    } else {
      return false;
    }
  }
  return true;
}

std::string Reproduce(uint64_t seed) {
  std::string line = program;
  line += " --seed ";
  line += std::to_string(seed);
  for (const std::string& flag : running_flags) line += " " + flag;
  return line;
}

void PrintTrace(const std::deque<std::string>& trace) {
  for (const std::string& line : trace) std::fprintf(stderr, "  %s\n", line.c_str());
}

// The state is lost, but the seed is known: the program runs it again with its trace kept.
void OnAbort(int) {
  if (tracing) {
    if (const auto* trace = ropeteam::simulation::TraceOfRunning()) PrintTrace(*trace);
    std::fprintf(stderr, "seed %llu failed: a check failed (above)\nreproduce: %s --verbose\n",
                 static_cast<unsigned long long>(running_seed), Reproduce(running_seed).c_str());
    _exit(1);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  char seed[24];
  std::snprintf(seed, sizeof(seed), "%llu", static_cast<unsigned long long>(running_seed));
  setenv("ROPETEAM_SIMULATION_TRACE", "1", 1);
  std::vector<const char*> line = {program, "--seed", seed};
  for (const std::string& flag : running_flags) line.push_back(flag.c_str());
  line.push_back(nullptr);
  execv("/proc/self/exe", const_cast<char* const*>(line.data()));
  _exit(134);
}

void PrintOutcome(const Options& options, const Outcome& outcome, double seconds) {
  const auto& s = outcome.statistics;
  std::printf(
      "seed %llu: nodes %u, %.1f s in %.2f s, inputs %llu, launches %llu, sealed %llu, replicated %llu, "
      "committed %llu, "
      "latest %llu (found %llu), views %llu, ranges %llu, repairs %llu, refused %llu for space %llu as "
      "stale, flips %llu, "
      "memories lost %llu, drains %llu, persisted %llu, restored from storage %llu, disagreed %llu, dropped "
      "%llu, policies %llu, pruned by them %llu, digest "
      "%016llx\n",
      static_cast<unsigned long long>(options.seed), options.nodes,
      static_cast<double>(outcome.virtual_us) / 1e6, seconds, static_cast<unsigned long long>(outcome.inputs),
      static_cast<unsigned long long>(outcome.launches), static_cast<unsigned long long>(s.sealed),
      static_cast<unsigned long long>(s.replicated), static_cast<unsigned long long>(s.committed),
      static_cast<unsigned long long>(s.latest_answers), static_cast<unsigned long long>(s.latest_found),
      static_cast<unsigned long long>(s.views), static_cast<unsigned long long>(s.ranges),
      static_cast<unsigned long long>(s.repairs), static_cast<unsigned long long>(s.refused_for_space),
      static_cast<unsigned long long>(s.refused_as_stale), static_cast<unsigned long long>(s.flips),
      static_cast<unsigned long long>(s.memories_lost), static_cast<unsigned long long>(s.drains),
      static_cast<unsigned long long>(s.persisted), static_cast<unsigned long long>(s.restored_from_storage),
      static_cast<unsigned long long>(s.disagreed), static_cast<unsigned long long>(s.dropped),
      static_cast<unsigned long long>(s.policies), static_cast<unsigned long long>(s.pruned),
      static_cast<unsigned long long>(outcome.digest));
}

bool RunSeed(const Arguments& arguments, uint64_t seed, Outcome* outcome) {
  const Options options = ropeteam::simulation::DrawOptions(seed, arguments.nodes, arguments.odds);
  running_seed = seed;
  const auto begin = std::chrono::steady_clock::now();
  *outcome = ropeteam::simulation::RunSimulation(
      options, tracing ? (arguments.verbose ? kTraceAll : arguments.tail) : 0);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (arguments.count == 1 || arguments.verbose) PrintOutcome(options, *outcome, seconds);
  if (arguments.twice && outcome->failure.empty() &&
      ropeteam::simulation::RunSimulation(options, 0).digest != outcome->digest)
    outcome->failure = "two runs of this seed differ";
  if (arguments.verbose) PrintTrace(outcome->trace);
  if (outcome->failure.empty()) return true;
  if (!arguments.verbose) {
    tracing = true;
    PrintTrace(ropeteam::simulation::RunSimulation(options, arguments.tail).trace);
    tracing = arguments.verbose;
  }
  std::fprintf(stderr, "%s\nseed %llu failed: %s\nreproduce: %s --verbose\n",
               ropeteam::simulation::Describe(options).c_str(), static_cast<unsigned long long>(seed),
               outcome->failure.c_str(), Reproduce(seed).c_str());
  return false;
}

// Sums over all seeds so far, in memory that outlives the process that runs the seeds.
struct Totals {
  uint64_t next = 0;  // the seed that runs, or is to run
  uint64_t failed = 0;
  uint64_t inputs = 0;
  uint64_t committed = 0;
  double cpu_seconds = 0;
  bool done = false;
};

uint64_t SeedsRun(const Arguments& arguments, const Totals& totals) { return totals.next - arguments.from; }

void PrintTotals(const Arguments& arguments, const Totals& totals) {
  const uint64_t run = SeedsRun(arguments, totals);
  std::printf("seeds %llu from %llu, failed %llu, inputs %llu, steps committed %llu, mean cpu %.4f s\n",
              static_cast<unsigned long long>(run), static_cast<unsigned long long>(arguments.from),
              static_cast<unsigned long long>(totals.failed), static_cast<unsigned long long>(totals.inputs),
              static_cast<unsigned long long>(totals.committed),
              run == 0 ? 0 : totals.cpu_seconds / static_cast<double>(run));
  std::fflush(stdout);
}

void RunSeeds(const Arguments& arguments, Totals* totals) {
  std::clock_t begin = std::clock();
  while (SeedsRun(arguments, *totals) < arguments.count) {
    Outcome outcome;
    const bool passed = RunSeed(arguments, totals->next, &outcome);
    const std::clock_t end = std::clock();
    totals->cpu_seconds += static_cast<double>(end - begin) / CLOCKS_PER_SEC;
    begin = end;
    totals->failed += passed ? 0 : 1;
    totals->inputs += outcome.inputs;
    totals->committed += outcome.statistics.committed;
    ++totals->next;
    if (!passed && !arguments.keep_going) break;
    if (arguments.keep_going && SeedsRun(arguments, *totals) % kProgressSeeds == 0)
      PrintTotals(arguments, *totals);
  }
  totals->done = true;
}

// Runs the seeds in a child. If a seed ends the child (a failed ROPETEAM_CHECK, a sanitizer, a crash),
// another child continues with the next seed.
int KeepGoing(const Arguments& arguments, Totals* totals) {
  while (!totals->done) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child < 0) {
      std::perror("fork");
      return 2;
    }
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a stop of the campaign also stops this process
      RunSeeds(arguments, totals);
      std::fflush(nullptr);
      _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child) {
      std::perror("waitpid");
      return 2;
    }
    if (totals->done) break;
    std::fprintf(stderr, "seed %llu ended the process, status %d\n",
                 static_cast<unsigned long long>(totals->next), status);
    ++totals->failed;
    ++totals->next;
    totals->done = SeedsRun(arguments, *totals) >= arguments.count;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  program = argv[0];
  if (!Parse(argc, argv, &arguments)) return Usage();
  tracing = arguments.verbose || std::getenv("ROPETEAM_SIMULATION_TRACE") != nullptr;
  std::signal(SIGABRT, OnAbort);
  void* shared = mmap(nullptr, sizeof(Totals), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::perror("mmap");
    return 2;
  }
  Totals* totals = new (shared) Totals();
  totals->next = arguments.from;
  if (!arguments.keep_going) {
    RunSeeds(arguments, totals);
  } else if (const int trouble = KeepGoing(arguments, totals); trouble != 0) {
    return trouble;
  }
  PrintTotals(arguments, *totals);
  return totals->failed == 0 ? 0 : 1;
}
