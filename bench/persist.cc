// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench persist: a shard goes from a daemon's memory to storage and back into the memory of a new
// daemon. The baseline is dd or an S3 client. Also measured: how much saves slow down meanwhile, and the
// daemon's memory beyond its arena.

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "bench/cluster.h"
#include "bench/command.h"
#include "bench/measure.h"
#include "bench/persist_yardsticks.h"

namespace ropeteam::bench {
namespace {

namespace fs = std::filesystem;

struct PersistOptions : ShardOptions {
  std::string sink = "posix";
  std::string directory;
  std::string source_tree;
  std::string client_checksum = "crc32c";
};

// A restore starts a daemon with its arena, which takes some seconds.
constexpr int kRestoreRunsMax = 7;
// The shard being written is this many times as large as the shards whose saves are measured meanwhile.
constexpr uint64_t kStallShare = 4;
constexpr int kMemoryEveryMs = 10;

// The daemon's peak memory beyond its arena, from construction to the end.
class MemoryWatch {
 public:
  explicit MemoryWatch(pid_t pid)
      : thread_([this, pid] {
          do {
            peak_mib_ = std::max(peak_mib_, UseOf(pid).memory_beyond_arena_mib);
            poll(nullptr, 0, kMemoryEveryMs);
          } while (!end_);
        }) {}
  ~MemoryWatch() {
    if (thread_.joinable()) End();
  }
  double End() {
    end_ = true;
    thread_.join();
    return peak_mib_;
  }

 private:
  std::atomic<bool> end_{false};
  double peak_mib_ = 0;  // owned by the thread until it is joined
  std::thread thread_;
};

// One daemon, one rank, one store.
class Job {
 public:
  Job(const Buffer& source, uint64_t objects, const std::string& url)
      : source_(source), objects_(objects), cluster_(Options(source.size(), url)) {
    Open();
  }

  void Save() { rank_->Save(++step_, source_.data(), source_.size(), objects_); }
  uint64_t SaveCommitted() {
    Save();
    rank_->Wait(step_, ROPETEAM_COMMITTED);
    return step_;
  }
  double PersistSeconds() {
    const uint64_t step = SaveCommitted();
    const double begin = SecondsNow();
    rank_->Persist(step);
    rank_->Wait(step, ROPETEAM_PERSISTED);
    return SecondsNow() - begin;
  }
  // Median times of small saves, in ms. `on`: while a step is being written; `off`: as many while nothing is
  // written. `saves`: how many ended before the step was persisted. `on` counts only these, or one save if
  // none did.
  struct Stall {
    double on = 0, off = 0, saves = 0;
  };
  // `off_first`: first measures `off_count` saves while nothing is written.
  Stall MeasureStall(bool off_first, size_t off_count) {
    const auto milliseconds = [&] {
      const double begin = SecondsNow();
      rank_->Save(++step_, source_.data(), source_.size() / kStallShare, objects_);
      const double taken = (SecondsNow() - begin) * 1e3;
      rank_->Wait(step_, ROPETEAM_COMMITTED);
      return taken;
    };
    Samples on, off;
    double saves = 0;
    milliseconds();  // touches the memory of its chunks
    while (off_first && off.size() < off_count) off.push_back(milliseconds());
    // Persist() returns once every node has recorded the request: a newer save then cannot release its
    // copies.
    const uint64_t persisted = SaveCommitted();
    rank_->Persist(persisted);
    while (true) {
      const double taken = milliseconds();
      const bool written = rank_->Reached(persisted, ROPETEAM_PERSISTED);
      if (!written) ++saves;
      if (!written || on.empty()) on.push_back(taken);
      if (written) break;
    }
    while (!off_first && off.size() < on.size()) off.push_back(milliseconds());
    return {Median(on), Median(off), saves};
  }
  // Restores the newest step into the memory of a new daemon.
  double RestoreSeconds(Buffer* target) {
    rank_.reset();
    cluster_.Lose(0);
    cluster_.Replace(0);
    Open();
    if (rank_->Latest() != step_) throw BenchError("the persisted step is not the latest");
    const double begin = SecondsNow();
    ropeteam_view_t* view = rank_->OpenView(step_, 0);
    const double seconds = SecondsNow() - begin;
    std::memset(target->data(), 0, target->size());
    rank_->ReadAll(view, target->data());
    if (std::memcmp(source_.data(), target->data(), source_.size()) != 0)
      throw BenchError("other bytes came back");
    return seconds;
  }
  pid_t daemon() const { return cluster_.pid(0); }

 private:
  static ClusterOptions Options(uint64_t bytes, const std::string& url) {
    ClusterOptions options;
    options.nodes = 1;
    options.replicas = 0;
    // One step is being written, one is the newest, one is being saved, one is not yet released; and their
    // tables.
    options.memory_bytes = 5 * bytes + (64ull << 20);
    options.arguments = {"--storage", url};
    return options;
  }
  void Open() {
    rank_ = std::make_unique<BenchRank>(cluster_.socket(0), 0, 1, "bench-persist-" + std::to_string(++runs_));
  }

  const Buffer& source_;
  const uint64_t objects_;
  Cluster cluster_;
  std::unique_ptr<BenchRank> rank_;
  uint64_t step_ = 0;
  int runs_ = 0;
};

// What persisting is measured against, and the work before each pass, outside the measured time.
struct Yardstick {
  std::string name;
  std::function<double()> write_seconds;
  std::function<double()> read_seconds;
  std::function<void()> before_write = [] {};
  std::function<void()> before_read = [] {};
};

void MeasureWrites(Report& report, const Bench& bench, const std::string& row, Job& job, uint64_t bytes,
                   const Yardstick& yardstick) {
  Samples memory;
  const auto figures = MeasureInTurns({{"persist",
                                        [&] {
                                          yardstick.before_write();
                                          MemoryWatch watch(job.daemon());
                                          const double seconds = job.PersistSeconds();
                                          memory.push_back(watch.End());
                                          return Bandwidth(bytes, seconds);
                                        }},
                                       {yardstick.name,
                                        [&] {
                                          yardstick.before_write();
                                          return Bandwidth(bytes, yardstick.write_seconds());
                                        }}},
                                      bench.runs);
  report.Add({"persist/" + row, "GB/s", figures.at("persist"), yardstick.name, figures.at(yardstick.name)});
  report.Add({"persist/memory_beyond_arena_mib", "MiB", memory, "", {}});
}

void MeasureStall(Report& report, const Bench& bench, Job& job, const Yardstick& yardstick) {
  Samples on, off, saves;
  size_t count = 1;
  for (int round = 0; round <= bench.runs; ++round) {
    yardstick.before_write();
    // The order alternates, so that after-effects of one do not always hit the other.
    const Job::Stall stall = job.MeasureStall(round % 2 == 1, count);
    count = std::max<size_t>(1, static_cast<size_t>(stall.saves));
    if (round == 0) continue;
    on.push_back(stall.on);
    off.push_back(stall.off);
    saves.push_back(stall.saves);
  }
  report.Add({"persist/save_stall_ratio", "ms", on, "persisting_off", off});
  report.Add({"persist/saves_while_writing", "count", saves, "", {}});
}

void MeasureRestores(Report& report, const Bench& bench, const std::string& row, Job& job, uint64_t bytes,
                     const Yardstick& yardstick) {
  Buffer target(bytes, 2, true);
  const auto figures = MeasureInTurns({{"restore",
                                        [&] {
                                          yardstick.before_read();
                                          return Bandwidth(bytes, job.RestoreSeconds(&target));
                                        }},
                                       {yardstick.name,
                                        [&] {
                                          yardstick.before_read();
                                          return Bandwidth(bytes, yardstick.read_seconds());
                                        }}},
                                      std::min(bench.runs, kRestoreRunsMax));
  report.Add({"restore/" + row, "GB/s", figures.at("restore"), yardstick.name, figures.at(yardstick.name)});
}

std::vector<fs::path> LargeFilesIn(const std::string& directory, uint64_t bytes_min) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file() && entry.file_size() >= bytes_min) files.push_back(entry.path());
  return files;
}

void DropFromPageCache(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(fd);
}

void RunPosix(Bench& bench, const PersistOptions& options, const std::string& settings) {
  const uint64_t bytes = options.size_mib << 20;
  const std::string parent = options.directory.empty()
                                 ? fs::read_symlink("/proc/self/exe").parent_path().string()
                                 : fs::canonical(options.directory).string();
  const std::string file_system = FileSystemOf(parent);
  if (options.directory.empty() && file_system == "tmpfs")
    throw BenchError(parent + " is memory, not a disk; --directory names another");
  Report& report = bench.Start(settings + " on " + file_system);
  const ScratchDirectory scratch(parent);
  const Buffer source(bytes, 1, true);
  const MemoryFile file(source);
  const std::string store = scratch.path() + "/store", dd_file = scratch.path() + "/dd";
  fs::create_directory(store);
  Yardstick dd;
  dd.name = "dd";
  dd.write_seconds = [&] { return DdWriteSeconds(file.path(), dd_file); };
  // Both get the same free space: files of earlier passes are removed, and sync() waits for pending writes.
  dd.before_write = [&] {
    for (const fs::path& old : LargeFilesIn(store, bytes)) fs::remove(old);
    fs::remove(dd_file);
    sync();
  };
  std::string restored;
  dd.before_read = [&] { DropFromPageCache(restored); };
  dd.read_seconds = [&] { return DdReadSeconds(restored); };
  Job job(source, options.objects, store);
  MeasureWrites(report, bench, "posix_vs_dd", job, bytes, dd);
  MeasureStall(report, bench, job, dd);
  dd.before_write();
  job.PersistSeconds();
  const std::vector<fs::path> files = LargeFilesIn(store, bytes);
  if (files.size() != 1) throw BenchError("the store has not one file of the shard");
  restored = files[0];
  MeasureRestores(report, bench, "posix_vs_dd", job, bytes, dd);
}

void RunS3(Bench& bench, const PersistOptions& options, const std::string& settings) {
  const uint64_t bytes = options.size_mib << 20;
  const S3Tools tools(options.source_tree);
  Report& report =
      bench.Start(settings + " client awscrt checksum " + options.client_checksum + " server strict_s3.py");
  if (!tools.lacking().empty()) {
    std::cerr << "skipped: persist --sink s3: " << tools.lacking() << std::endl;
    return;
  }
  const Buffer source(bytes, 1, true);
  const MemoryFile file(source);
  Yardstick awscrt;
  awscrt.name = "awscrt";
  {
    const S3Server server(tools, S3Server::Kind::kDiscard);
    S3Client client(tools, server, file.path(), options.client_checksum);
    awscrt.write_seconds = [&] { return client.PutSeconds(); };
    Job job(source, options.objects, server.url());
    MeasureWrites(report, bench, "s3_vs_client", job, bytes, awscrt);
  }
  {
    const S3Server server(tools, S3Server::Kind::kElsewhere);
    Job job(source, options.objects, server.url());
    MeasureStall(report, bench, job, awscrt);
  }
  const S3Server server(tools, S3Server::Kind::kKeep);
  S3Client client(tools, server, file.path(), options.client_checksum);
  awscrt.read_seconds = [&] { return client.GetSeconds(false); };
  Job job(source, options.objects, server.url());
  job.PersistSeconds();
  client.PutSeconds();
  client.GetSeconds(true);
  MeasureRestores(report, bench, "s3_vs_client", job, bytes, awscrt);
}

void Run(Bench& bench, const PersistOptions& options) {
  const std::string settings = "sink " + options.sink + " size " + std::to_string(options.size_mib) +
                               " MiB objects " + std::to_string(options.objects) + " runs " +
                               std::to_string(bench.runs);
  if (options.sink == "posix") {
    RunPosix(bench, options, settings);
  } else {
    RunS3(bench, options, settings);
  }
}

}  // namespace

void AddPersistCommand(CLI::App& app, Bench& bench) {
  CLI::App* command =
      app.add_subcommand("persist", "a shard to storage and back, beside dd or a client of S3");
  const auto options = std::make_shared<PersistOptions>();
  options->size_mib = 512;
  command->add_option("--sink", options->sink, "posix or s3")
      ->check(CLI::IsMember({"posix", "s3"}))
      ->capture_default_str();
  command
      ->add_option("--directory", options->directory,
                   "posix: where to write [beside this program, which must not be memory]")
      ->check(CLI::ExistingDirectory);
  command->add_option("--source", options->source_tree,
                      "s3: the source tree with .venv, tests/ and bench/ [the one around this program]");
  command
      ->add_option("--client-checksum", options->client_checksum,
                   "s3: what the yardstick sends with each part")
      ->check(CLI::IsMember({"crc32c", "none"}))
      ->capture_default_str();
  AddShardOptions(command, options.get());
  command->callback([&bench, options] { Run(bench, *options); });
}

}  // namespace ropeteam::bench
