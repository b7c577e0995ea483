// SPDX-License-Identifier: Apache-2.0
//
// ropeteam export STEP DIR|URL, without --storage: exports from the memory of a running job. The node's
// daemon makes the ranks' shards readable here, one at a time. This process writes them as the daemon would,
// while training continues.

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/daemon_arena.h"
#include "api/cli/storage_progress.h"
#include "api/cli/storage_steps.h"
#include "core/base/sizes.h"
#include "core/shard/file_names.h"

namespace ropeteam::cli {
namespace {

using local::Type;

// In each repair the daemon fetches the chunks from another node. If three do not help, a fourth would not.
constexpr int kRepairsMax = 3;

class MemoryExport {
 public:
  MemoryExport(const StorageOptions& options, DaemonArena daemon, StoragePlace to)
      : options_(options), daemon_(std::move(daemon)), to_(std::move(to)), job_(daemon_.link->hello.job) {}

  Status Run() {
    const Result<Step> step = StepInMemory(daemon_, options_);
    if (!step.ok()) return step.status();
    step_.id.step = *step;
    Result<local::ViewGrant> view = OpenView(0);
    if (!view.ok()) return view.status();
    step_.id = StepOf(view->meta.id);
    step_.world_size = view->meta.world_size;
    step_.chunk_bytes = view->meta.chunk_bytes;
    name_ = {step_.id.step, step_.id.incarnation};
    ROPETEAM_RETURN_IF_ERROR(ReadThere());
    Progress progress("export step " + std::to_string(name_.step), there_.empty() ? BytesOf(step_.id) : 0);
    std::atomic<uint64_t> moved{0};  // bytes of the rank that is being written
    ArenaStorage storage(*daemon_.arena, to_.sink, job_, [&](uint64_t bytes) {
      moved += bytes;
      progress.Add(bytes);
    });
    for (Rank rank = 0; rank < step_.world_size; ++rank) {
      if (rank != 0) view = OpenView(rank);
      if (!view.ok()) return view.status();
      moved = 0;
      const Status status = there_.empty() ? Write(*view, &storage) : Compare(*view);
      Close(*view);
      ROPETEAM_RETURN_IF_ERROR(status);
      // Adds the files that an interrupted export has already written.
      progress.Add(view->meta.stream_bytes - std::min<uint64_t>(moved, view->meta.stream_bytes));
    }
    const std::string text = StepText(job_, name_);
    if (!there_.empty()) {
      std::printf("%s is in %s already\n", text.c_str(), to_.url.c_str());
      return OkStatus();
    }
    const auto written = storage.Do(WriteManifest{std::make_shared<StoredStep>(step_)});
    if (!written.ok()) return written.status();
    progress.Finish();
    std::printf("%s: %zu files, %s, are in %s/%s\n", text.c_str(), files_.size(), FormatSize(bytes_).c_str(),
                to_.url.c_str(), storage::StepPath(job_, name_).c_str());
    return OkStatus();
  }

 private:
  template <typename Request, typename Answer>
  Status Call(Type type, const Request& request, Type answer_type, Answer* answer) {
    const auto deadline = client::Deadline::In(std::chrono::milliseconds(options_.timeout).count());
    return daemon_.link->channel->Call(type, request, answer_type, answer,
                                       deadline.Plus(client::kAnswerGraceMs), &frames_);
  }
  uint64_t timeout_ms() const {
    return static_cast<uint64_t>(std::chrono::milliseconds(options_.timeout).count());
  }

  // The size of all ranks' shards, from the leader; only for the progress bar.
  uint64_t BytesOf(const StepId& id) const {
    AskOptions options;
    options.socket.path = daemon_.link->channel->socket();
    const Result<std::string> answer = Ask(options, local::AdminCommand::kStatus);
    const nlohmann::json status =
        answer.ok() ? nlohmann::json::parse(*answer, nullptr, false) : nlohmann::json();
    if (!status.is_object() || !status.contains("steps")) return 0;
    for (const nlohmann::json& step : status["steps"])
      if (step.value("step", uint64_t{0}) == id.step &&
          step.value("incarnation", uint64_t{0}) == IncarnationNumber(id.incarnation))
        return step.value("bytes", uint64_t{0});
    return 0;
  }

  Result<local::ViewGrant> OpenView(Rank rank) {
    local::ViewGrant view;
    ROPETEAM_RETURN_IF_ERROR(
        Call(Type::kViewOpen, local::ViewOpen{step_.id.step, rank, timeout_ms()}, Type::kViewGrant, &view));
    const ShardMeta& meta = view.meta;
    ROPETEAM_RETURN_IF_ERROR(CheckGrantedChunks(*daemon_.arena, view.extents, meta.stream_bytes, "a view"));
    if (meta.chunk_bytes != daemon_.arena->chunk_bytes() || view.crcs.size() != ChunkCount(view.extents) ||
        meta.id.rank != rank || meta.world_size == 0)
      return Error(Code::kInternal, "the daemon granted a view of %s", meta.id.ToString().c_str());
    if (rank != 0 && (StepOf(meta.id) != step_.id || meta.world_size != step_.world_size))
      return Error(Code::kAborted, "%s has been saved again meanwhile: export it again",
                   step_.id.ToString().c_str());
    return view;
  }
  void Close(const local::ViewGrant& view) {
    // Ignore errors: the view ends with the connection.
    (void)daemon_.link->channel->Post(Type::kViewClose, local::ViewClose{view.view},
                                      client::Deadline::In(client::kLocalAnswerMs), &frames_);
  }

  // Reads the manifest at the destination. A step that is finished there is compared and never written.
  Status ReadThere() {
    const Result<std::string> text = storage::ReadManifestText(to_.sink.get(), job_, name_, options_.timeout);
    if (text.status().code() == Code::kNotFound) return OkStatus();
    if (!text.ok()) return text.status();
    return storage::ParseManifestOf(job_, name_, *text,
                                    [this](storage::RankEntry&& rank) {
                                      there_.push_back(std::move(rank));
                                      return OkStatus();
                                    })
        .status();
  }
  Status Compare(const local::ViewGrant& view) {
    const Rank rank = view.meta.id.rank;
    if (there_.size() == step_.world_size && there_[rank].stream_bytes == view.meta.stream_bytes &&
        there_[rank].digest == ContentDigest(view.meta, view.crcs))
      return OkStatus();
    return Error(Code::kAlreadyExists, "%s has %s already, with other contents; nothing was written",
                 to_.url.c_str(), storage::StepPath(job_, name_).c_str());
  }

  Status Write(const local::ViewGrant& view, ArenaStorage* storage) {
    WriteShard write;
    write.shard = {view.meta, view.extents, view.crcs};
    for (int repairs = 0;; ++repairs) {
      std::vector<uint32_t> bad;
      const Status status = TryWrite(&write, storage, &bad);
      // If the daemon has ended, others may own the chunks.
      ROPETEAM_RETURN_IF_ERROR(daemon_.link->channel->Check());
      if (bad.empty() || repairs == kRepairsMax) return status;
      const local::ViewRepair repair{view.view, bad, timeout_ms()};
      ROPETEAM_RETURN_IF_ERROR(daemon_.link->channel->Call(
          Type::kViewRepair, repair,
          client::Deadline::In(std::chrono::milliseconds(options_.timeout).count())
              .Plus(client::kAnswerGraceMs),
          &frames_));
    }
  }
  Status TryWrite(WriteShard* write, ArenaStorage* storage, std::vector<uint32_t>* bad) {
    const Rank rank = write->shard.meta.id.rank;
    if (step_.ranks.size() == rank) {
      const Result<FileNames> names = storage->Do<FileNames>(write->shard, bad);
      if (!names.ok()) return names.status();
      write->taken = TakeFileNames(names->names, &names_);
      step_.ranks.emplace_back();
    }
    Result<StoredRank> stored = storage->Do<StoredRank>(*write, bad);
    if (!stored.ok()) return stored.status();
    for (const StoredFile& file : stored->files) {
      files_.insert(file.path);
      bytes_ += file.bytes;
    }
    if (step_.metadata.empty()) step_.metadata = stored->metadata;
    step_.ranks.back() = std::move(*stored);
    return OkStatus();
  }

  const StorageOptions& options_;
  const DaemonArena daemon_;
  const StoragePlace to_;
  const std::string job_;
  storage::StepName name_;
  StoredStep step_;
  std::vector<storage::RankEntry> there_;  // of the destination's manifest, if any
  std::set<std::string> names_;            // file names of all ranks so far
  std::set<std::string> files_;
  uint64_t bytes_ = 0;
  client::FrameBuffers frames_;
};

}  // namespace

Status ExportFromMemory(const StorageOptions& options) {
  Result<DaemonArena> daemon = OpenDaemonArena(options);
  if (!daemon.ok()) return daemon.status();
  Result<StoragePlace> to = OpenDestination(options.destination, options.timeout);
  if (!to.ok()) return to.status();
  return MemoryExport(options, std::move(*daemon), std::move(*to)).Run();
}

}  // namespace ropeteam::cli
