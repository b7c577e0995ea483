// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/client.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "core/base/checksum.h"
#include "core/shard/manifest.h"

namespace ropeteam::simulation {

struct Client::SaveRun {
  Step step = 0;
  Content content;
  SaveScript script;
  StatusDone done;
  uint64_t connection = 0;
  SaveId save = 0;
  std::vector<Extent> extents;
  std::vector<uint32_t> order;  // in which chunks are filled
  size_t filled = 0;
  bool paused = false;
  std::shared_ptr<DeviceMemory> device;
};

struct Client::ReadRun {
  TimeUs deadline = 0;
  TimeUs hold = 0;
  ReadDone done;
  uint64_t connection = 0;
  AnswerView view;
  uint32_t attempts = 0;
  bool held = false;
};

Client::Client(Cluster* cluster, const Identity& identity)
    : cluster_(*cluster), identity_(identity), token_(cluster->random().Next() | 1) {}

bool Client::connected() const {
  const Session* session = cluster_.FindSession(session_);
  return session != nullptr && session->open_at_engine && session->incarnation != 0;
}

bool Client::Connect() {
  if (cluster_.FindSession(session_) != nullptr) return true;
  session_ =
      cluster_.OpenSession(identity_.host, this, identity_.launch, identity_.rank, identity_.world_size);
  ++connections_;
  return session_ != 0;
}

void Client::Close() {
  ++connections_;
  for (const DeviceBufferId buffer : device_buffers_) cluster_.DropDevice(buffer);
  device_buffers_.clear();
  cluster_.CloseSession(session_);
  session_ = 0;
}

Status Client::StatusOf(const Answer* answer) const {
  if (answer == nullptr) return Error(Code::kUnavailable, "the session was cut");
  const auto* status = std::get_if<AnswerStatus>(&answer->body);
  return status == nullptr ? OkStatus() : status->status;
}

void Client::AskForStatus(RequestKind kind, Step step, TimeUs timeout, StatusDone done,
                          Cluster::Input input) {
  Pending request;
  request.kind = kind;
  request.step = step;
  request.timeout_us = timeout;
  request.done = [this, done = std::move(done)](const Answer* answer) { done(StatusOf(answer)); };
  cluster_.Ask(session_, std::move(request), std::move(input));
}

void Client::Hello(TimeUs timeout, StatusDone done) {
  Connect();
  HelloInput hello;
  hello.rank = identity_.rank;
  hello.world_size = identity_.world_size;
  hello.token = token_;
  hello.incarnation_token = identity_.incarnation_token;
  hello.timeout_us = timeout;
  hello.incarnation = incarnation_;
  hello.policy = policy_;
  Pending request;
  request.kind = RequestKind::kHello;
  request.timeout_us = timeout;
  request.done = [this, done](const Answer* answer) {
    if (answer != nullptr)
      if (const auto* admitted = std::get_if<AnswerHello>(&answer->body))
        incarnation_ = admitted->incarnation;
    done(StatusOf(answer));
  };
  cluster_.Ask(session_, std::move(request),
               [hello](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnHello(now, session.id, id, hello);
               });
}

void Client::Latest(Level level, TimeUs timeout, LatestDone done) {
  Pending request;
  request.kind = level == Level::kPersisted ? RequestKind::kLatestPersisted : RequestKind::kLatest;
  request.timeout_us = timeout;
  request.done = [this, done](const Answer* answer) {
    const auto* latest = answer == nullptr ? nullptr : std::get_if<AnswerLatest>(&answer->body);
    done(StatusOf(answer), latest == nullptr ? AnswerLatest() : *latest);
  };
  cluster_.Ask(session_, std::move(request),
               [level, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnLatest(now, session.id, id, level, timeout);
               });
}

void Client::Drop(Step step, TimeUs timeout, StatusDone done) {
  AskForStatus(RequestKind::kDrop, step, timeout, std::move(done),
               [this, step, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 cluster_.checker().OnDropInput(session, step);
                 engine.OnDrop(now, session.id, id, step, timeout);
               });
}

void Client::Persist(Step step, TimeUs timeout, StatusDone done) {
  AskForStatus(RequestKind::kPersist, step, timeout, std::move(done),
               [step, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnPersist(now, session.id, id, step, timeout);
               });
}

void Client::SetPolicy(const PolicyInput& policy, TimeUs timeout, StatusDone done) {
  Pending request;
  request.kind = RequestKind::kSetPolicy;
  request.policy = policy;
  request.timeout_us = timeout;
  request.done = [this, policy, done](const Answer* answer) {
    const Status status = StatusOf(answer);
    if (status.ok() && policy.persist_every != 0) policy_.persist_every = policy.persist_every;
    if (status.ok() && policy.keep_on_storage != 0) policy_.keep_on_storage = policy.keep_on_storage;
    done(status);
  };
  cluster_.Ask(session_, std::move(request),
               [this, policy, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 cluster_.checker().OnPolicyInput(session, policy);
                 engine.OnSetPolicy(now, session.id, id, policy, timeout);
               });
}

void Client::Wait(Step step, Level level, TimeUs timeout, StatusDone done) {
  Pending request;
  request.kind = RequestKind::kWait;
  request.step = step;
  request.level = level;
  request.timeout_us = timeout;
  request.done = [this, done](const Answer* answer) { done(StatusOf(answer)); };
  cluster_.Ask(session_, std::move(request),
               [step, level, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnWait(now, session.id, id, step, level, timeout);
               });
}

// ---- saving

void Client::Save(Step step, const Content& content, const SaveScript& script, StatusDone done) {
  cluster_.checker().OnContent(content);
  auto run = std::make_shared<SaveRun>();
  run->step = step;
  run->content = content;
  run->script = script;
  run->done = std::move(done);
  run->connection = connections_;
  const uint64_t chunk_bytes = cluster_.options().chunk_bytes;
  const uint64_t less = script.understated_chunks * chunk_bytes;
  const uint64_t announced = content.stream.size() > less ? content.stream.size() - less : 1;
  for (uint32_t i = 0; i < content.crcs.size(); ++i) run->order.push_back(i);
  if (script.announce)
    for (size_t i = run->order.size(); i > 1; --i)
      std::swap(run->order[i - 1], run->order[cluster_.random().Below(i)]);
  Pending request;
  request.kind = RequestKind::kSaveBegin;
  request.step = step;
  request.done = [this, run](const Answer* answer) { Granted(run, answer); };
  cluster_.Ask(session_, std::move(request),
               [this, step, announced, agreement = script.agreement](Engine& engine, TimeUs now,
                                                                     const Session& session, RequestId id) {
                 cluster_.checker().OnSaveBeginInput(session, step);
                 engine.OnSaveBegin(now, session.id, id, step, announced, agreement);
               });
}

void Client::Granted(const std::shared_ptr<SaveRun>& run, const Answer* answer) {
  const auto* grant = answer == nullptr ? nullptr : std::get_if<AnswerGrant>(&answer->body);
  if (grant == nullptr) {
    const Status status = StatusOf(answer);
    // If an extension was refused, the save can only be aborted.
    if (run->save != 0 && answer != nullptr) Abort(run);
    return run->done(status);
  }
  run->save = grant->save;
  run->extents.insert(run->extents.end(), grant->extents.begin(), grant->extents.end());
  const uint64_t have = ChunkCount(run->extents);
  const uint64_t wanted = run->content.crcs.size();
  if (have >= wanted) return run->script.device ? OfferDevice(run) : FillNext(run);
  Pending request;
  request.kind = RequestKind::kSaveExtend;
  request.step = run->step;
  request.save = run->save;
  request.done = [this, run](const Answer* more) { Granted(run, more); };
  cluster_.Ask(session_, std::move(request),
               [save = run->save, more = wanted - have](Engine& engine, TimeUs now, const Session& session,
                                                        RequestId id) {
                 engine.OnSaveExtend(now, session.id, id, save, more);
               });
}

// Whole chunks may be put directly from the device's memory. They are copied into the arena later.
void Client::OfferDevice(const std::shared_ptr<SaveRun>& run) {
  Random& random = cluster_.random();
  const std::string& stream = run->content.stream;
  const uint64_t chunk_bytes = cluster_.options().chunk_bytes;
  const uint64_t before = random.Below(chunk_bytes);
  run->device = std::make_shared<DeviceMemory>();
  run->device->bytes = std::string(before, 'x') + stream;
  const DeviceBufferId buffer = cluster_.ShareDevice(run->device);
  device_buffers_.insert(buffer);
  const uint32_t whole = static_cast<uint32_t>(stream.size() / chunk_bytes);
  for (uint32_t first = 0; first < whole;) {
    const uint32_t count = static_cast<uint32_t>(random.Between(1, whole - first));
    const SaveDirectInput direct{run->save, buffer, before + first * chunk_bytes, first, count};
    if (random.Chance(kMillion / 10 * 9))
      cluster_.Tell(session_, [direct](Engine& engine, TimeUs now, const Session& session, RequestId) {
        engine.OnSaveDirect(now, session.id, direct);
      });
    first += count;
  }
  cluster_.scheduler().After(random.Between(1, cluster_.options().network.transfer_max_us),
                             [this, run] { FillNext(run); });
}

// After the answer no put reads the device's memory any more. Only then it is written again.
void Client::Settle(const std::shared_ptr<SaveRun>& run) {
  const TimeUs timeout = cluster_.random().Between(0, kSecond);
  Pending request;
  request.kind = RequestKind::kSaveSettle;
  request.step = run->step;
  request.save = run->save;
  request.timeout_us = timeout;
  request.done = [this, run](const Answer* answer) {
    const Status status = StatusOf(answer);
    if (answer == nullptr) return run->done(status);
    if (status.code() == Code::kDeadlineExceeded) return Settle(run);
    if (!status.ok()) return run->done(status);
    run->device->given_back = true;
    run->device->bytes.assign(run->device->bytes.size(), '!');
    run->device.reset();
    return run->script.abort ? Abort(run) : Commit(run);
  };
  cluster_.Ask(session_, std::move(request),
               [save = run->save, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnSaveSettle(now, session.id, id, save, timeout);
               });
}

void Client::FillNext(const std::shared_ptr<SaveRun>& run) {
  if (run->connection != connections_) return;
  if (run->filled >= run->script.stop_after_chunks) return;
  if (run->filled >= run->script.pause_after_chunks && !std::exchange(run->paused, true)) {
    cluster_.scheduler().After(run->script.pause_us, [this, run] { FillNext(run); });
    return;
  }
  if (run->filled == run->order.size()) {
    if (run->device != nullptr) return Settle(run);
    return run->script.abort ? Abort(run) : Commit(run);
  }
  // Consecutive chunks of the stream are announced together.
  const uint32_t first = run->order[run->filled];
  std::vector<uint32_t> crcs;
  const uint64_t chunk_bytes = cluster_.options().chunk_bytes;
  while (run->filled < run->order.size() && run->filled < run->script.stop_after_chunks &&
         (run->paused || run->filled < run->script.pause_after_chunks) &&
         run->order[run->filled] == first + crcs.size()) {
    const uint32_t index = run->order[run->filled];
    std::byte* chunk = cluster_.ClientMemory(session_, ChunkAt(run->extents, index));
    if (chunk == nullptr) {
      // The library checks before each chunk whether its daemon is alive. So a copy may go on.
      const JobOptions& job = cluster_.options().job;
      if (job.stray_ppm != 0 && cluster_.random().Chance(job.stray_ppm)) {
        const size_t begin = index * chunk_bytes;
        cluster_.scheduler().After(
            cluster_.random().Below(job.stray_max_us),
            [&cluster = cluster_, host = identity_.host, at = ChunkAt(run->extents, index),
             generation = cluster_.host(identity_.host).memory_generation,
             bytes = run->content.stream.substr(begin, chunk_bytes)] {
              cluster.StrayWrite(host, generation, at, bytes);
            });
      }
      return run->done(Error(Code::kUnavailable, "the session was cut"));
    }
    const std::string& stream = run->content.stream;
    std::memcpy(chunk, stream.data() + index * chunk_bytes,
                std::min<size_t>(chunk_bytes, stream.size() - index * chunk_bytes));
    crcs.push_back(run->content.crcs[index]);
    ++run->filled;
    if (cluster_.random().Chance(kMillion / 3)) break;
  }
  if (run->script.announce && cluster_.random().Chance(kMillion / 10 * 9))
    cluster_.Tell(session_, [save = run->save, first, crcs](Engine& engine, TimeUs now,
                                                            const Session& session, RequestId) {
      engine.OnSaveFilled(now, session.id, save, first, crcs);
    });
  cluster_.scheduler().After(
      cluster_.random().Between(1, std::max<TimeUs>(1, run->script.chunk_us * crcs.size())),
      [this, run] { FillNext(run); });
}

void Client::Commit(const std::shared_ptr<SaveRun>& run) {
  SaveCommitInput commit;
  commit.save = run->save;
  commit.stream_bytes = run->content.stream.size();
  commit.manifest_offset = run->content.manifest_offset;
  commit.object_count = run->content.object_count;
  commit.crcs = run->content.crcs;
  Pending request;
  request.kind = RequestKind::kSaveCommit;
  request.step = run->step;
  request.save = run->save;
  request.done = [this, run](const Answer* answer) { run->done(StatusOf(answer)); };
  cluster_.Ask(session_, std::move(request),
               [this, commit, step = run->step, agreement = run->script.agreement](
                   Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 cluster_.checker().OnCommitInput(session, step, commit, cluster_.options().chunk_bytes,
                                                  agreement);
                 engine.OnSaveCommit(now, session.id, id, commit);
               });
}

void Client::Abort(const std::shared_ptr<SaveRun>& run) {
  Pending request;
  request.kind = RequestKind::kSaveAbort;
  request.step = run->step;
  request.save = run->save;
  if (run->script.abort)
    request.done = [this, run](const Answer* answer) {
      const Status status = StatusOf(answer);
      run->done(status.ok() ? Error(Code::kAborted, "by the script") : status);
    };
  cluster_.Ask(session_, std::move(request),
               [save = run->save](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnSaveAbort(now, session.id, id, save);
               });
}

// ---- reading

void Client::Read(Step step, Rank rank, TimeUs timeout, TimeUs hold, ReadDone done) {
  OpenView(RequestKind::kViewOpen, step, rank, timeout, std::move(done),
           [this, hold](const std::shared_ptr<ReadRun>& run) {
             run->hold = hold;
             CheckView(run);
           });
}

void Client::ReadRanges(Step step, Rank rank, TimeUs timeout, ReadDone done) {
  OpenView(RequestKind::kRangesOpen, step, rank, timeout, std::move(done),
           [this](const std::shared_ptr<ReadRun>& run) {
             if (!run->view.extents.empty()) return CheckView(run);
             ReadPart(run, static_cast<uint32_t>(cluster_.random().Below(3)));
           });
}

void Client::OpenView(RequestKind kind, Step step, Rank rank, TimeUs timeout, ReadDone done,
                      std::function<void(const std::shared_ptr<ReadRun>&)> opened) {
  auto run = std::make_shared<ReadRun>();
  run->deadline = cluster_.now() + timeout;
  run->done = std::move(done);
  run->connection = connections_;
  Pending request;
  request.kind = kind;
  request.step = step;
  request.rank = rank;
  request.timeout_us = timeout;
  request.done = [this, run, opened = std::move(opened)](const Answer* answer) {
    const auto* view = answer == nullptr ? nullptr : std::get_if<AnswerView>(&answer->body);
    if (view == nullptr) return run->done(StatusOf(answer), {});
    run->view = *view;
    opened(run);
  };
  cluster_.Ask(session_, std::move(request),
               [step, rank, timeout, partial = kind == RequestKind::kRangesOpen](
                   Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnViewOpen(now, session.id, id, step, rank, timeout, partial);
               });
}

std::vector<PackedPart> Client::RandomParts(const ShardMeta& meta) {
  Random& random = cluster_.random();
  std::vector<PackedPart> parts(random.Between(1, 3));
  for (PackedPart& part : parts) {
    uint64_t left = meta.chunk_bytes;
    for (uint32_t chunk = 0; chunk < ChunksFor(meta.stream_bytes, meta.chunk_bytes); ++chunk) {
      const uint64_t bytes = ChunkLength(meta.stream_bytes, meta.chunk_bytes, chunk);
      ChunkPiece piece{chunk, static_cast<uint32_t>(random.Below(bytes)), 0, 1, 0};
      const uint64_t room = std::min(bytes - piece.begin, left);
      if (room == 0 || (!part.pieces.empty() && random.Chance(kMillion / 2))) continue;
      piece.length = static_cast<uint32_t>(random.Between(1, room));
      if (random.Chance(kMillion / 2) && piece.length > 8) {
        piece.stride = piece.length / 4;
        piece.length = static_cast<uint32_t>(random.Between(1, piece.stride));
        piece.count = 4;
      }
      left -= piece.bytes();
      part.pieces.push_back(piece);
    }
  }
  return parts;
}

void Client::ReadPart(const std::shared_ptr<ReadRun>& run, uint32_t more) {
  if (run->connection != connections_) return;
  const TimeUs timeout = run->deadline > cluster_.now() ? run->deadline - cluster_.now() : 0;
  const std::vector<PackedPart> parts = RandomParts(run->view.meta);
  Pending request;
  request.kind = RequestKind::kRangesRead;
  request.step = run->view.meta.id.step;
  request.view = run->view.view;
  request.timeout_us = timeout;
  request.done = [this, run, parts, more](const Answer* answer) {
    const Status status = StatusOf(answer);
    if (answer == nullptr) return run->done(status, {});
    const auto* ranges = std::get_if<AnswerRanges>(&answer->body);
    if (ranges != nullptr) TakeRanges(run, parts, *ranges);
    if (ranges != nullptr && more != 0) return ReadPart(run, more - 1);
    const ShardMeta meta = run->view.meta;
    if (ranges != nullptr || status.code() == Code::kDeadlineExceeded) return FinishRead(run, status);
    const ReadDone done = std::exchange(run->done, [](const Status&, const ShardMeta&) {});
    FinishRead(run, status);
    Read(meta.id.step, meta.id.rank, run->deadline > cluster_.now() ? run->deadline - cluster_.now() : 0, 0,
         done);
  };
  cluster_.Ask(session_, std::move(request),
               [view = run->view.view, parts, timeout](Engine& engine, TimeUs now, const Session& session,
                                                       RequestId id) {
                 engine.OnViewRead(now, session.id, id, view, parts, timeout);
               });
}

// A write of a dead process may change the bytes unnoticed. If they do not match, they are not used.
void Client::TakeRanges(const std::shared_ptr<ReadRun>& run, const std::vector<PackedPart>& parts,
                        const AnswerRanges& ranges) {
  std::vector<std::string> packed;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::byte* chunk = cluster_.ClientMemory(session_, ranges.chunks.at(i));
    if (chunk == nullptr || Crc32c(chunk, parts[i].bytes()) != ranges.crcs.at(i)) return;
    packed.emplace_back(reinterpret_cast<const char*>(chunk), parts[i].bytes());
  }
  cluster_.checker().OnRanges(*cluster_.FindSession(session_), run->view.meta.id, parts, packed);
}

std::vector<uint32_t> Client::BadChunks(const ReadRun& run) const {
  std::vector<uint32_t> bad;
  const ShardMeta& meta = run.view.meta;
  for (uint32_t i = 0; i < run.view.crcs.size(); ++i) {
    const std::byte* chunk = cluster_.ClientMemory(session_, ChunkAt(run.view.extents, i));
    if (chunk == nullptr ||
        Crc32c(chunk, ChunkLength(meta.stream_bytes, meta.chunk_bytes, i)) != run.view.crcs[i])
      bad.push_back(i);
  }
  return bad;
}

void Client::CheckView(const std::shared_ptr<ReadRun>& run) {
  constexpr uint32_t kAttemptsMax = 3;
  if (run->connection != connections_) return;
  if (!connected()) return run->done(Error(Code::kUnavailable, "the session was cut"), {});
  const std::vector<uint32_t> bad = BadChunks(*run);
  if (bad.empty()) {
    if (run->held) return FinishRead(run, OkStatus());
    run->held = true;
    cluster_.scheduler().After(run->hold + 1, [this, run] { CheckView(run); });
    return;
  }
  cluster_.checker().OnViewBytes(*cluster_.FindSession(session_), run->view.view, bad);
  if (++run->attempts > kAttemptsMax || cluster_.now() >= run->deadline)
    return FinishRead(run, Error(Code::kCorrupt, "chunk %u still does not match", bad[0]));
  const TimeUs timeout = run->deadline - cluster_.now();
  Pending request;
  request.kind = RequestKind::kViewRepair;
  request.step = run->view.meta.id.step;
  request.view = run->view.view;
  request.timeout_us = timeout;
  request.done = [this, run](const Answer* answer) {
    const Status status = StatusOf(answer);
    if (answer == nullptr) return run->done(status, {});
    if (!status.ok()) return FinishRead(run, status);
    CheckView(run);
  };
  cluster_.Ask(session_, std::move(request),
               [view = run->view.view, bad, timeout](Engine& engine, TimeUs now, const Session& session,
                                                     RequestId id) {
                 engine.OnViewRepair(now, session.id, id, view, bad, timeout);
               });
}

void Client::FinishRead(const std::shared_ptr<ReadRun>& run, const Status& status) {
  cluster_.Tell(session_,
                [this, view = run->view.view](Engine& engine, TimeUs now, const Session& session, RequestId) {
                  cluster_.checker().OnViewClosed(session, view);
                  engine.OnViewClose(now, session.id, view);
                });
  run->done(status, run->view.meta);
}

// ---- operators

void Client::Quarantine(Step step, bool undo, TimeUs timeout, StatusDone done) {
  Connect();
  AskForStatus(RequestKind::kQuarantine, step, timeout, std::move(done),
               [step, undo, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnQuarantine(now, session.id, id, step, undo, timeout);
               });
}

void Client::Forget(const std::string& node, TimeUs timeout, StatusDone done) {
  Connect();
  AskForStatus(RequestKind::kQuarantine, 0, timeout, std::move(done),
               [node, timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnForget(now, session.id, id, node, timeout);
               });
}

void Client::Report(TimeUs timeout, ReportDone done) {
  Connect();
  Pending request;
  request.kind = RequestKind::kReport;
  request.timeout_us = timeout;
  request.done = [this, done](const Answer* answer) {
    const auto* report = answer == nullptr ? nullptr : std::get_if<AnswerReport>(&answer->body);
    done(StatusOf(answer), report == nullptr ? ClusterReport() : report->report);
  };
  cluster_.Ask(session_, std::move(request),
               [timeout](Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnReport(now, session.id, id, timeout);
               });
}

void Client::Verify(const Step* step, TimeUs timeout, VerifyDone done) {
  Connect();
  Pending request;
  request.kind = RequestKind::kVerify;
  request.timeout_us = timeout;
  request.done = [this, done](const Answer* answer) {
    const auto* report = answer == nullptr ? nullptr : std::get_if<AnswerVerify>(&answer->body);
    done(StatusOf(answer), report == nullptr ? VerifyReport() : report->report);
  };
  cluster_.Ask(session_, std::move(request),
               [timeout, has = step != nullptr, which = step == nullptr ? 0 : *step](
                   Engine& engine, TimeUs now, const Session& session, RequestId id) {
                 engine.OnVerify(now, session.id, id, has ? &which : nullptr, timeout);
               });
}

}  // namespace ropeteam::simulation
