// SPDX-License-Identifier: Apache-2.0
//
// ropeteam export STEP DIR|URL --storage URL: copies a step file by file, and its manifest last. Without
// --storage, the step comes from memory: memory_export.cc. For --format hf: hf_export.cc.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api/cli/arenas.h"
#include "api/cli/commands.h"
#include "api/cli/daemon_arena.h"
#include "api/cli/storage_progress.h"
#include "api/cli/storage_steps.h"
#include "core/base/checksum.h"
#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam export STEP|latest DIR|URL [--storage URL]: copies a step, from the memory of a running job or "
    "from storage,\n"
    "to a directory, which is made if it is missing, or to another URL. It then lies in DIR/JOB/step-…/, as "
    "if "
    "the job had "
    "persisted it\n"
    "there, so that DIR is storage like any other. Every byte is checked on the way, and the manifest is "
    "written "
    "last; an\n"
    "export that was cut off can be given again. From memory it takes the room of one shard at a time in "
    "this "
    "node's arena.\n"
    "With --job JOB, JOB may have ended: a daemon of its own then reads the arena that it has left on this "
    "node.\n"
    "With --format hf it becomes a directory that Hugging Face's from_pretrained opens: whole tensors out of "
    "all ranks'\n"
    "parts, the configuration and the tokenizer. DIR must be empty, or missing.\n"
    "  --best             the weights of the best step, which a Trainer with load_best_model_at_end has "
    "saved "
    "with\n"
    "                     this one\n"
    "  --model NAME       of a step with several models: this one [all that was saved below model/]\n"
    "  --config PATH      config.json, or a directory with it and other small files; they replace the "
    "step's\n"
    "  --max-shard-size N of one file of tensors [5GB]\n"
    "  --storage URL      where the step lies; without it the job's daemon is asked\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this "
    "machine]\n";

// Limits memory for parts if a store requires larger ones than kStorageRangeBytes (S3: at most 10,000 per
// file).
constexpr uint64_t kPartsBytesMax = 256ull << 20;

class StepExport {
 public:
  StepExport(const StoragePlace& from, const StoragePlace& to, std::string job, storage::StepName name)
      : from_(from), to_(to), job_(std::move(job)), name_(name), folder_(storage::StepPath(job_, name_)) {}

  Status Run() {
    const Result<std::string> text = storage::ReadManifestText(from_.sink.get(), job_, name_, from_.timeout);
    if (!text.ok()) return text.status();
    Result<std::vector<storage::FileEntry>> files = FilesOf(job_, name_, *text);
    if (!files.ok()) return files.status();
    files_ = std::move(*files);
    const Result<std::string> there = storage::ReadManifestText(to_.sink.get(), job_, name_, to_.timeout);
    if (there.ok() && *there == *text) {
      std::printf("%s is in %s already\n", StepText(job_, name_).c_str(), to_.url.c_str());
      return OkStatus();
    }
    if (there.ok() || there.status().code() == Code::kCorrupt)
      return Error(Code::kAlreadyExists, "%s has %s already, with another manifest; nothing was written",
                   to_.url.c_str(), folder_.c_str());
    if (there.status().code() != Code::kNotFound) return there.status();
    ROPETEAM_RETURN_IF_ERROR(CheckSizes());
    ROPETEAM_RETURN_IF_ERROR(CopyAll());
    ROPETEAM_RETURN_IF_ERROR(to_.sink->Put(folder_ + "/" + std::string(storage::kManifestName), *text,
                                           storage::PutMode::kIfAbsent, to_.CallDeadline()));
    std::printf("%s: %zu files, %s, are in %s/%s\n", StepText(job_, name_).c_str(), files_.size(),
                FormatSize(bytes_).c_str(), to_.url.c_str(), folder_.c_str());
    return OkStatus();
  }

 private:
  // Called before anything is written.
  Status CheckSizes() {
    const Result<storage::FileSizes> sizes =
        storage::ListFileSizes(from_.sink.get(), job_, name_, from_.timeout);
    if (!sizes.ok()) return sizes.status();
    for (const storage::FileEntry& file : files_) {
      ROPETEAM_RETURN_IF_ERROR(storage::CheckFileSize(folder_, *sizes, file));
      bytes_ += file.bytes;
    }
    return OkStatus();
  }

  // Copies small files in parallel, then large ones one by one with their parts in parallel.
  Status CopyAll() {
    Progress progress("export step " + std::to_string(name_.step), bytes_);
    std::vector<const storage::FileEntry*> small;
    for (const storage::FileEntry& file : files_)
      if (file.bytes <= kStorageRangeBytes) small.push_back(&file);
    ROPETEAM_RETURN_IF_ERROR(RunParallel(
        small.size(), kStorageThreads, [&](size_t i, size_t) { return CopyFile(*small[i], 1, &progress); }));
    for (const storage::FileEntry& file : files_)
      if (file.bytes > kStorageRangeBytes)
        ROPETEAM_RETURN_IF_ERROR(CopyFile(file, kStorageThreads, &progress));
    return OkStatus();
  }

  Status CopyFile(const storage::FileEntry& file, size_t threads, Progress* progress) {
    const std::string path = folder_ + "/" + file.path;
    const Result<storage::FileInfo> there = to_.sink->Stat(path, to_.CallDeadline());
    if (there.ok() && there->bytes == file.bytes && there->crc32c == file.crc32c) {
      progress->Add(file.bytes);  // from an interrupted export
      return OkStatus();
    }
    if (!there.ok() && there.status().code() != Code::kNotFound) return there.status();
    Result<std::unique_ptr<storage::Upload>> begun =
        to_.sink->Begin(path, file.bytes, kStorageRangeBytes, to_.CallDeadline());
    if (!begun.ok()) return begun.status();
    storage::Upload* upload = begun->get();
    threads = std::clamp<size_t>(kPartsBytesMax / upload->part_bytes(), 1,
                                 std::min<size_t>(threads, upload->part_count()));
    std::vector<RangeBuffer> buffers;
    for (size_t i = 0; i < threads; ++i) buffers.emplace_back(upload->PartLength(0));
    std::vector<uint32_t> crcs(upload->part_count());
    ROPETEAM_RETURN_IF_ERROR(RunParallel(crcs.size(), threads, [&](size_t i, size_t thread) {
      const auto part = static_cast<uint32_t>(i);
      const size_t length = upload->PartLength(part);
      const storage::Target target{buffers[thread].data(), length};
      if (length != 0)
        ROPETEAM_RETURN_IF_ERROR(
            from_.sink->Read(path, part * upload->part_bytes(), {&target, 1}, from_.CallDeadline()));
      crcs[i] = Crc32c(target.data, length);
      const storage::Piece piece{target.data, length};
      if (!upload->Has(part, crcs[i]))
        ROPETEAM_RETURN_IF_ERROR(upload->PutPart(part, {&piece, 1}, crcs[i], to_.CallDeadline()));
      progress->Add(length);
      return OkStatus();
    }));
    uint32_t crc = 0;
    for (uint32_t part = 0; part < crcs.size(); ++part)
      crc = Crc32cCombine(crc, crcs[part], upload->PartLength(part));
    if (crc == file.crc32c) return upload->Finish(crc, to_.CallDeadline());
    const Status aborted = upload->Abort(to_.CallDeadline());
    return Error(Code::kCorrupt,
                 "%s in %s has the checksum %08x, its manifest says %08x; the step is not exported%s%s",
                 path.c_str(), from_.url.c_str(), crc, file.crc32c, aborted.ok() ? "" : ", ",
                 aborted.message().c_str());
  }

  const StoragePlace& from_;
  const StoragePlace& to_;
  const std::string job_;
  const storage::StepName name_;
  const std::string folder_;
  std::vector<storage::FileEntry> files_;
  uint64_t bytes_ = 0;
};

Status Export(const StorageOptions& options) {
  const Result<StoragePlace> from = OpenStorage(options.url, options.timeout);
  if (!from.ok()) return from.status();
  const Result<ChosenStep> step = FindStep(*from, options.job, options.step);
  if (!step.ok()) return step.status();
  const Result<StoragePlace> to = OpenDestination(options.destination, options.timeout);
  if (!to.ok()) return to.status();
  return StepExport(*from, *to, step->job, step->name).Run();
}

// Those of this job on this node.
std::vector<ArenaListing> ArenasOf(const std::string& job) {
  std::vector<ArenaListing> arenas = ListArenas(ArenaDirectory());
  std::erase_if(arenas, [&](const ArenaListing& each) { return each.job != job; });
  return arenas;
}

// The arena that the job of the options has left on this node. kUnavailable: there is none, or there are several.
Result<ArenaListing> FindEnded(const StorageOptions& options) {
  const std::string directory = ArenaDirectory();
  const std::vector<ArenaListing> arenas = ArenasOf(options.job);
  if (arenas.size() == 1) return arenas.front();
  if (arenas.empty())
    return Error(Code::kUnavailable,
                 "job %s neither runs here nor has left an arena in %s (ROPETEAM_ARENA_PATH)",
                 options.job.c_str(), directory.c_str());
  std::string nodes;
  for (const ArenaListing& each : arenas) nodes += (nodes.empty() ? "" : ", ") + each.node;
  return Error(
      Code::kUnavailable,
      "job %s has ended, and several of its nodes have left arenas in %s (%s): start them again with "
      "`ropeteam run`",
      options.job.c_str(), directory.c_str(), nodes.c_str());
}

// Exports under a daemon of its own, as a job of one node, which keeps the arena as it is.
int ExportFromEnded(const ArenaListing& arena, const std::vector<std::string>& arguments) {
  // What the environment says belongs to another job: storage, nodes, ports.
  std::vector<std::string> others;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string name(*each, std::strcspn(*each, "="));
    if (name.starts_with("ROPETEAM_") && !name.starts_with("ROPETEAM_JOB_KEY")) others.push_back(name);
  }
  for (const std::string& name : others) unsetenv(name.c_str());
  std::vector<std::string> run = {"--quiet",
                                  "--job",
                                  arena.job,
                                  "--node",
                                  arena.node,
                                  "--nodes",
                                  "1",
                                  "--ordinal",
                                  "0",
                                  "--replicas",
                                  "0",
                                  "--keep-steps",  // nothing is released
                                  std::to_string(kKeepStepsMax),
                                  "--arena-path",
                                  arena.path.substr(0, arena.path.rfind('/')),
                                  "--",
                                  "/proc/self/exe",
                                  "export"};
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--job")
      ++i;  // its value; the daemon is found by ROPETEAM_SOCKET
    else if (!arguments[i].starts_with("--job="))
      run.push_back(arguments[i]);
  }
  std::fprintf(stderr, "ropeteam export: job %s has ended: reading the arena %s that it has left\n",
               arena.job.c_str(), arena.path.c_str());
  return RunCommand(run);
}

}  // namespace

int StorageExportCommand(const std::vector<std::string>& arguments) {
  const Result<StorageOptions> options = ParseStorageOptions(arguments, StorageCommand::kExport);
  int code = 0;
  if (DoneWithOptions("export", options, kHelp, &code)) return code;
  if (options->url.empty() && options->socket.empty() && !options->job.empty()) {
    const auto timeout_ms = std::chrono::milliseconds(options->timeout).count();
    const std::vector<ArenaListing> arenas = ArenasOf(options->job);
    const bool runs = std::any_of(arenas.begin(), arenas.end(), [](const auto& each) { return each.in_use; });
    if (!runs && !ChooseSocket(DaemonOf(*options), timeout_ms).ok()) {
      const Result<ArenaListing> ended = FindEnded(*options);
      return ended.ok() ? ExportFromEnded(*ended, arguments) : Fail("export", ended.status());
    }
  }
  const Status status = options->hf.chosen     ? ExportHf(*options)
                        : options->url.empty() ? ExportFromMemory(*options)
                                               : Export(*options);
  return status.ok() ? 0 : Fail("export", status);
}

}  // namespace ropeteam::cli
