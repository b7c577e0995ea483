// SPDX-License-Identifier: Apache-2.0
#include "api/client/client.h"

#include <sys/random.h>
#include <unistd.h>

#include <utility>

#include "core/base/log.h"

namespace ropeteam::client {
namespace {

using local::Type;

// Pause between attempts to reach a daemon that restarts. It is short compared with the daemon's start, and
// long enough not to be a busy loop.
constexpr int64_t kReconnectPauseMs = 50;

Result<uint64_t> RandomToken() {
  uint64_t token = 0;
  if (::getrandom(&token, sizeof(token), 0) != sizeof(token)) return ErrnoError(errno, "getrandom");
  return token;
}

Status Closed() { return Error(Code::kInvalidArgument, "the ropeteam handle has been closed"); }

}  // namespace

Client::Client(OpenOptions options)
    : options_(std::move(options)), pid_(::getpid()), copy_team_(options_.copy_threads) {
  // Room for all buffers that can be returned, so that ReturnBuffers() never allocates.
  buffers_.reserve(kSavesOpenMax);
}

Result<std::shared_ptr<Client>> Client::Open(OpenOptions options) {
  const Deadline deadline = Deadline::In(options.timeout_ms);
  std::shared_ptr<Client> client(new Client(std::move(options)));
  Result<uint64_t> token = RandomToken();
  if (!token.ok()) return token.status();
  client->token_ = *token;
  Result<std::shared_ptr<Link>> link = client->GetLink(deadline, Retry::kNo);
  if (!link.ok()) return link.status();
  return client;
}

void Client::Close() {
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    link = std::move(link_);
    changed_.notify_all();
  }
  if (link != nullptr) link->channel->Break(Closed());
}

bool Client::InForkedChild() const { return ::getpid() != pid_; }

Status Client::CheckProcess() const {
  if (!InForkedChild()) return OkStatus();
  return Error(
      Code::kInvalidArgument,
      "this handle was opened by process %d and cannot be used after fork() in process %d: open one here",
      static_cast<int>(pid_), static_cast<int>(::getpid()));
}

Result<std::shared_ptr<Link>> Client::GetLink(Deadline deadline, Retry retry) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (closed_) return Closed();
    if (link_ != nullptr && link_->channel->Check().ok()) return link_;
    if (!connecting_) break;
    if (changed_.wait_until(lock, deadline.at()) == std::cv_status::timeout && connecting_) {
      return Error(Code::kUnavailable, "the daemon at %s is not back yet", options_.socket.c_str());
    }
  }
  connecting_ = true;
  lock.unlock();
  Result<std::shared_ptr<Link>> link = Connect(deadline, retry);
  lock.lock();
  connecting_ = false;
  changed_.notify_all();
  if (!link.ok()) return link;
  if (closed_) return Closed();
  link_ = *link;
  return link;
}

Result<std::shared_ptr<Link>> Client::Connect(Deadline deadline, Retry retry) {
  std::shared_ptr<Arena> known;
  local::Hello hello;
  {
    const std::lock_guard lock(mutex_);
    if (link_ != nullptr) {
      known = link_->arena;
      hello.incarnation = link_->hello.incarnation;
    }
    hello.persist_every = persist_every_;
    hello.keep_on_storage = keep_on_storage_;
  }
  hello.kind = local::ClientKind::kRank;
  hello.rank = options_.rank;
  hello.world_size = options_.world_size;
  hello.token = token_;
  hello.incarnation_token = options_.incarnation_token;
  for (;;) {
    Result<std::shared_ptr<Link>> link = MakeLink(options_.socket, hello, deadline, known);
    if (link.ok() || link.status().code() != Code::kUnavailable || retry == Retry::kNo || deadline.Passed()) {
      return link;
    }
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, std::min(deadline.at(), Deadline::In(kReconnectPauseMs).at()),
                        [this] { return closed_; });
    if (closed_) return Closed();
  }
}

template <typename Request>
Status Client::CallForStep(Type type, Step step, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Result<std::shared_ptr<Link>> link = GetLink(deadline, Retry::kYes);
  if (!link.ok()) return link.status();
  FrameBuffers buffers;
  return (*link)->channel->Call(type, Request{step, deadline.RemainingMs()}, deadline.Plus(kAnswerGraceMs),
                                &buffers);
}

Status Client::Persist(Step step, int64_t timeout_ms) {
  return CallForStep<local::Persist>(Type::kPersist, step, timeout_ms);
}

Status Client::Drop(Step step, int64_t timeout_ms) {
  return CallForStep<local::Drop>(Type::kDrop, step, timeout_ms);
}

Status Client::SetPolicy(uint64_t persist_every, uint32_t keep_on_storage, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Result<std::shared_ptr<Link>> link = GetLink(deadline, Retry::kYes);
  if (!link.ok()) return link.status();
  FrameBuffers buffers;
  const local::SetPolicy policy{persist_every, keep_on_storage, deadline.RemainingMs()};
  ROPETEAM_RETURN_IF_ERROR(
      (*link)->channel->Call(Type::kSetPolicy, policy, deadline.Plus(kAnswerGraceMs), &buffers));
  const std::lock_guard lock(mutex_);
  if (persist_every != 0) persist_every_ = persist_every;
  if (keep_on_storage != 0) keep_on_storage_ = keep_on_storage;
  return OkStatus();
}

Status Client::Wait(Step step, uint8_t level, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Result<std::shared_ptr<Link>> link = GetLink(deadline, Retry::kYes);
  if (!link.ok()) return link.status();
  FrameBuffers buffers;
  return (*link)->channel->Call(Type::kWait, local::Wait{step, level, deadline.RemainingMs()},
                                deadline.Plus(kAnswerGraceMs), &buffers);
}

Result<local::LatestReply> Client::Latest(uint8_t level, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Result<std::shared_ptr<Link>> link = GetLink(deadline, Retry::kYes);
  if (!link.ok()) return link.status();
  FrameBuffers buffers;
  local::LatestReply reply;
  ROPETEAM_RETURN_IF_ERROR((*link)->channel->Call(Type::kLatest, local::Latest{level, deadline.RemainingMs()},
                                                  Type::kLatestReply, &reply, deadline.Plus(kAnswerGraceMs),
                                                  &buffers));
  return reply;
}

Result<local::StorageListReply> Client::ListStorage(uint32_t steps_max, int64_t timeout_ms) {
  const Deadline deadline = Deadline::In(timeout_ms);
  Result<std::shared_ptr<Link>> link = GetLink(deadline, Retry::kYes);
  if (!link.ok()) return link.status();
  FrameBuffers buffers;
  local::StorageListReply reply;
  ROPETEAM_RETURN_IF_ERROR(
      (*link)->channel->Call(Type::kStorageList, local::StorageList{steps_max, deadline.RemainingMs()},
                             Type::kStorageListReply, &reply, deadline.Plus(kAnswerGraceMs), &buffers));
  return reply;
}

local::HelloReply Client::hello() const {
  const std::lock_guard lock(mutex_);
  return link_ != nullptr ? link_->hello : local::HelloReply{};
}

Status Client::TakeSave() {
  const std::lock_guard lock(mutex_);
  if (saves_open_ >= kSavesOpenMax) {
    return Error(Code::kInvalidArgument, "%u saves of this handle are open, limit %u", saves_open_,
                 kSavesOpenMax);
  }
  ++saves_open_;
  return OkStatus();
}

void Client::ReturnSave() {
  const std::lock_guard lock(mutex_);
  --saves_open_;
}

Status Client::TakeView() {
  const std::lock_guard lock(mutex_);
  if (views_open_ >= kViewsOpenMax) {
    return Error(Code::kInvalidArgument, "%u views of this handle are open, limit %u", views_open_,
                 kViewsOpenMax);
  }
  ++views_open_;
  return OkStatus();
}

void Client::ReturnView() {
  const std::lock_guard lock(mutex_);
  --views_open_;
}

std::unique_ptr<SaveBuffers> Client::TakeBuffers() {
  const std::lock_guard lock(mutex_);
  if (buffers_.empty()) return std::make_unique<SaveBuffers>();
  std::unique_ptr<SaveBuffers> buffers = std::move(buffers_.back());
  buffers_.pop_back();
  return buffers;
}

void Client::ReturnBuffers(std::unique_ptr<SaveBuffers> buffers) {
  const std::lock_guard lock(mutex_);
  if (buffers_.size() < kSavesOpenMax) buffers_.push_back(std::move(buffers));
}

}  // namespace ropeteam::client
