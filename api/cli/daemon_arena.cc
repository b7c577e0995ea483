// SPDX-License-Identifier: Apache-2.0
#include "api/cli/daemon_arena.h"

#include <charconv>
#include <utility>

#include "api/cli/sockets.h"

namespace ropeteam::cli {
namespace {

StorageWorkers::Config ConfigOf(const client::Arena& arena, std::shared_ptr<storage::Sink> sink,
                                std::string job, std::function<void(uint64_t bytes)> moved) {
  StorageWorkers::Config config;
  config.sink = std::move(sink);
  config.job = std::move(job);
  config.memory = {arena.chunk(0), arena.chunks_total() * arena.chunk_bytes()};
  config.chunk_bytes = arena.chunk_bytes();
  config.moved = std::move(moved);
  return config;
}

}  // namespace

SocketChoice DaemonOf(const StorageOptions& options) {
  const std::string job = options.url.empty() ? options.job : "";  // with a URL the job is one on storage
  return {options.socket, job, "", job.empty()};
}

Result<DaemonArena> OpenDaemonArena(const StorageOptions& options) {
  const Result<std::string> socket =
      ChooseSocket(DaemonOf(options), std::chrono::milliseconds(options.timeout).count());
  if (!socket.ok()) return socket.status();
  local::Hello hello;
  hello.kind = local::ClientKind::kAdmin;
  const auto deadline = client::Deadline::In(std::chrono::milliseconds(options.timeout).count());
  Result<std::shared_ptr<client::Link>> link = client::MakeLink(*socket, hello, deadline, nullptr);
  if (!link.ok()) return link.status();
  Result<std::shared_ptr<client::Arena>> arena =
      client::Arena::Map((*link)->channel->TakeDescriptor(), (*link)->hello);
  if (!arena.ok()) return arena.status();
  (*link)->arena = *arena;
  return DaemonArena{std::move(*link), std::move(*arena)};
}

Result<Step> StepInMemory(const DaemonArena& daemon, const StorageOptions& options) {
  const std::string& text = options.step;
  const int64_t timeout_ms = std::chrono::milliseconds(options.timeout).count();
  if (text == kLatestStep) {
    local::Latest latest;
    latest.timeout_ms = static_cast<uint64_t>(timeout_ms);
    local::LatestReply reply;
    client::FrameBuffers frames;
    ROPETEAM_RETURN_IF_ERROR(
        daemon.link->channel->Call(local::Type::kLatest, latest, local::Type::kLatestReply, &reply,
                                   client::Deadline::In(timeout_ms).Plus(client::kAnswerGraceMs), &frames));
    return reply.step;
  }
  Step step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  if (error != std::errc() || end != text.data() + text.size())
    return Error(Code::kInvalidArgument, "step \"%.80s\" is neither a whole number nor latest", text.c_str());
  return step;
}

Status CheckGrantedChunks(const client::Arena& arena, const std::vector<Extent>& extents,
                          uint64_t stream_bytes, const char* what) {
  ROPETEAM_RETURN_IF_ERROR(arena.CheckExtents(extents));
  const uint64_t need = ChunksFor(stream_bytes, arena.chunk_bytes());
  if (need == 0 || need > kChunksPerShardMax || ChunkCount(extents) != need)
    return Error(Code::kInternal, "the daemon granted %llu chunks for %s of %llu bytes",
                 static_cast<unsigned long long>(ChunkCount(extents)), what,
                 static_cast<unsigned long long>(stream_bytes));
  return OkStatus();
}

ArenaStorage::ArenaStorage(const client::Arena& arena, std::shared_ptr<storage::Sink> sink, std::string job,
                           std::function<void(uint64_t bytes)> moved)
    : workers_(ConfigOf(arena, std::move(sink), std::move(job), std::move(moved)),
               [this](uint64_t, Status status, StorageDone done) {
                 *done_ = std::move(done);
                 status_.set_value(std::move(status));
               }) {}

Status ArenaStorage::Run(StorageWork work, StorageDone* done) {
  done_ = done;
  status_ = std::promise<Status>();
  std::future<Status> status = status_.get_future();
  workers_.Submit({0, std::move(work)});
  return status.get();
}

}  // namespace ropeteam::cli
