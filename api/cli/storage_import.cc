// SPDX-License-Identifier: Apache-2.0
//
// ropeteam import DIR|URL[@STEP]: saves a step's shards into a running job, as their ranks would. The ranks
// that start next restore the step. Each shard is read straight into the arena, and checked before it is
// committed.

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/daemon_arena.h"
#include "api/cli/storage_progress.h"
#include "api/cli/storage_steps.h"
#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

using local::Type;

constexpr char kHelp[] =
    "ropeteam import DIR|URL[@STEP]: saves a step [the newest] into a running job, from a directory or "
    "storage "
    "to which export or a job has written it:\n"
    "the ranks that start next restore it. DIR is a job's folder, or the one above it. No rank may be open "
    "meanwhile.\n"
    "  --ranks A-B        only these ranks [all]; others are imported on other nodes, with the same token\n"
    "  --incarnation-token TOKEN\n"
    "                     of the import's incarnation, the same on all nodes; --ranks needs it\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this "
    "machine]\n";

Result<uint64_t> RandomNumber() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) return ErrnoError(errno, "getrandom");
  return number;
}

// The step and its place.
struct Found {
  StoragePlace place;
  std::string job;  // empty: the URL is the job's folder
  storage::StepName name;
};
Result<Found> Find(const StorageOptions& options) {
  Result<StoragePlace> place = OpenStorage(options.url, options.timeout);
  if (!place.ok()) return place.status();
  Result<std::vector<storage::StepPlace>> steps = storage::ListSteps(place->sink.get(), "", options.timeout);
  if (!steps.ok()) return steps.status();
  std::string job;
  if (steps->empty() || !options.job.empty()) {
    Result<std::string> chosen = ChooseJob(*place, options.job);
    if (!chosen.ok()) return chosen.status();
    job = std::move(*chosen);
  }
  steps = StepsOf(*place, job);
  if (!steps.ok()) return steps.status();
  const Result<storage::StepName> name = ChooseStep(*steps, job, options.step);
  if (!name.ok())
    return Error(name.status().code(), "%s: %s", options.url.c_str(), name.status().message().c_str());
  return Found{std::move(*place), std::move(job), *name};
}

class Import {
 public:
  Import(const StorageOptions& options, Found from, DaemonArena daemon)
      : options_(options), from_(std::move(from)), daemon_(std::move(daemon)) {}

  Status Run() {
    Progress* bar = nullptr;
    std::atomic<uint64_t> moved{0};  // bytes of the rank that is being saved
    ArenaStorage storage(*daemon_.arena, from_.place.sink, from_.job, [&](uint64_t bytes) {
      moved += bytes;
      bar->Add(bytes);
    });
    const StepId id{from_.name.incarnation, from_.name.step};
    Result<StoredStep> step = storage.Do<StoredStep>(ReadStored{id});
    if (!step.ok())
      return Error(step.status().code(), "%s: %s", options_.url.c_str(), step.status().message().c_str());
    step_ = std::move(*step);
    const Rank first = options_.rank_first.value_or(0);
    const Rank last = options_.rank_last.value_or(step_.world_size - 1);
    if (last >= step_.world_size)
      return Error(Code::kInvalidArgument, "--ranks %u-%u of a step of %u ranks", first, last,
                   step_.world_size);
    ROPETEAM_RETURN_IF_ERROR(ChooseToken());
    uint64_t bytes = 0;
    for (Rank rank = first; rank <= last; ++rank) bytes += step_.ranks[rank].stream_bytes;
    Progress progress("import step " + std::to_string(id.step), bytes);
    bar = &progress;
    for (Rank rank = first; rank <= last; ++rank) {
      moved = 0;
      ROPETEAM_RETURN_IF_ERROR(Save(rank, &storage));
      // Adds the bytes of the shard that are not copied from its files: headers, padding, its manifest.
      progress.Add(step_.ranks[rank].stream_bytes -
                   std::min<uint64_t>(moved, step_.ranks[rank].stream_bytes));
    }
    progress.Finish();
    ROPETEAM_RETURN_IF_ERROR(WaitCommitted());
    std::printf("step %" PRIu64 ": ranks %u to %u of %u, %s, are in the memory of job %s, incarnation %llu\n",
                id.step, first, last, step_.world_size, FormatSize(bytes).c_str(),
                daemon_.link->hello.job.c_str(), IncarnationNumber(ranks_[0]->hello.incarnation));
    return OkStatus();
  }

 private:
  int64_t timeout_ms() const { return std::chrono::milliseconds(options_.timeout).count(); }

  // Refuses if ranks with another token are open: their incarnation would end when a new one begins.
  Status ChooseToken() {
    AskOptions ask;
    ask.socket.path = daemon_.link->channel->socket();
    const Result<std::string> answer = Ask(ask, local::AdminCommand::kStatus);
    if (!answer.ok()) return answer.status();
    const nlohmann::json status = nlohmann::json::parse(*answer, nullptr, false);
    if (!status.is_object()) return Error(Code::kInternal, "the daemon's status is not JSON");
    const uint64_t open = status.value("ranks_open", uint64_t{0});
    if (open != 0 && (options_.incarnation_token.empty() ||
                      status.value("incarnation_token", "") != options_.incarnation_token))
      return Error(Code::kAlreadyExists,
                   "job %s has %" PRIu64 " ranks open: end them before a step is imported, nothing was saved",
                   daemon_.link->hello.job.c_str(), open);
    const Result<uint64_t> random = RandomNumber();
    if (!random.ok()) return random.status();
    token_ =
        options_.incarnation_token.empty() ? "import-" + std::to_string(*random) : options_.incarnation_token;
    return OkStatus();
  }

  Result<std::shared_ptr<client::Link>> OpenRank(Rank rank) const {
    const Result<uint64_t> token = RandomNumber();
    if (!token.ok()) return token.status();
    local::Hello hello;
    hello.kind = local::ClientKind::kRank;
    hello.rank = rank;
    hello.world_size = step_.world_size;
    hello.token = *token;
    hello.incarnation_token = token_;
    return client::MakeLink(daemon_.link->channel->socket(), hello, client::Deadline::In(timeout_ms()),
                            daemon_.arena);
  }

  // If the save is not committed, it ends with its connection.
  Status Save(Rank rank, ArenaStorage* storage) {
    Result<std::shared_ptr<client::Link>> opened = OpenRank(rank);
    if (!opened.ok()) return opened.status();
    client::Link* link = opened->get();
    if (link->arena != daemon_.arena)
      return Error(Code::kUnavailable, "the daemon at %s has another arena now",
                   link->channel->socket().c_str());
    const uint64_t stream_bytes = step_.ranks[rank].stream_bytes;
    local::SaveGrant grant;
    ROPETEAM_RETURN_IF_ERROR(link->LocalCall(Type::kSaveBegin, local::SaveBegin{step_.id.step, stream_bytes},
                                             Type::kSaveGrant, &grant, &frames_));
    ROPETEAM_RETURN_IF_ERROR(CheckGrantedChunks(*daemon_.arena, grant.extents, stream_bytes, "a save"));
    LoadChunks load{{step_.id.incarnation, step_.id.step, rank}, stream_bytes, grant.extents, {}};
    for (uint32_t chunk = 0; chunk < ChunkCount(grant.extents); ++chunk) load.chunks.push_back(chunk);
    Result<LoadedChunks> loaded = storage->Do<LoadedChunks>(std::move(load));
    if (!loaded.ok()) return loaded.status();
    const ShardMeta& meta = loaded->meta;
    if (meta.chunk_bytes == step_.chunk_bytes &&
        ContentDigest(meta, loaded->crcs) != step_.ranks[rank].content)
      return Error(Code::kCorrupt, "the files of rank %u are not what it saved", rank);
    const local::SaveCommit commit{grant.save, stream_bytes, meta.manifest_offset, meta.object_count,
                                   std::move(loaded->crcs)};
    ROPETEAM_RETURN_IF_ERROR(link->LocalCall(Type::kSaveCommit, commit, &frames_));
    ranks_.push_back(std::move(*opened));
    return OkStatus();
  }

  // Any rank's answer is valid for all.
  Status WaitCommitted() {
    const local::Wait wait{step_.id.step, static_cast<uint8_t>(Level::kCommitted),
                           static_cast<uint64_t>(timeout_ms())};
    return ranks_[0]->channel->Call(
        Type::kWait, wait, client::Deadline::In(timeout_ms()).Plus(client::kAnswerGraceMs), &frames_);
  }

  const StorageOptions& options_;
  const Found from_;
  const DaemonArena daemon_;
  StoredStep step_;
  std::string token_;
  std::vector<std::shared_ptr<client::Link>> ranks_;  // open until the step is committed
  client::FrameBuffers frames_;
};

Status RunImport(const StorageOptions& options) {
  Result<Found> from = Find(options);
  if (!from.ok()) return from.status();
  Result<DaemonArena> daemon = OpenDaemonArena(options);
  if (!daemon.ok()) return daemon.status();
  return Import(options, std::move(*from), std::move(*daemon)).Run();
}

}  // namespace

int StorageImportCommand(const std::vector<std::string>& arguments) {
  const Result<StorageOptions> options = ParseStorageOptions(arguments, StorageCommand::kImport);
  int code = 0;
  if (DoneWithOptions("import", options, kHelp, &code)) return code;
  const Status status = RunImport(*options);
  return status.ok() ? 0 : Fail("import", status);
}

}  // namespace ropeteam::cli
