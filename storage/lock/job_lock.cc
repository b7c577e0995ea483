// SPDX-License-Identifier: Apache-2.0
#include "storage/lock/job_lock.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "core/base/log.h"
#include "storage/format/manifest.h"
#include "storage/format/names.h"

namespace ropeteam::storage {
namespace {

// Every lock file has this many bytes, so that it can be read without a query of its size while it is being
// replaced. The names of node and host take at most 130.
constexpr size_t kLockFileBytes = 1024;
constexpr std::string_view kEnding = ".json";
constexpr size_t kEpochDigits = 10;
constexpr size_t kEpochDigitsMax = 18;  // below 2^63, so the next epoch does not overflow
constexpr size_t kTokenDigits = 32;
constexpr size_t kHostBytesMax = 64;
// The most files of former holders that one call deletes.
constexpr size_t kLowerDeletedMax = 16;
// Claims in one call. The second one follows if another node was faster with the first.
constexpr int kClaimsMax = 2;

std::string RandomToken() {
  std::random_device random;
  char text[kTokenDigits + 1];
  std::snprintf(text, sizeof(text), "%08x%08x%08x%08x", random(), random(), random(), random());
  return text;
}

std::string HostName() {
  char name[kHostBytesMax + 1] = "";
  return gethostname(name, kHostBytesMax) == 0 ? name : "unknown";
}

// No value unless PathOf() prints exactly this.
std::optional<uint64_t> ParseEpoch(std::string_view file) {
  if (!file.ends_with(kEnding)) return std::nullopt;
  file.remove_suffix(kEnding.size());
  uint64_t epoch = 0;
  const auto [end, error] = std::from_chars(file.data(), file.data() + file.size(), epoch);
  if (error != std::errc() || end != file.data() + file.size() || epoch == 0 || file.size() < kEpochDigits ||
      file.size() > kEpochDigitsMax || (file.size() > kEpochDigits && file[0] == '0'))
    return std::nullopt;
  return epoch;
}

struct ParsedProof {
  uint64_t epoch = 0;
  std::string_view token;
};
// No value unless Proof() prints exactly this. A proof comes from another node, and its epoch becomes a part of a path.
std::optional<ParsedProof> ParseProof(std::string_view proof) {
  const size_t colon = proof.find(':');
  if (colon == 0 || colon == proof.npos || colon > kEpochDigitsMax || proof[0] == '0') return std::nullopt;
  ParsedProof parsed{0, proof.substr(colon + 1)};
  const auto [end, error] = std::from_chars(proof.data(), proof.data() + colon, parsed.epoch);
  if (error != std::errc() || end != proof.data() + colon || parsed.token.size() != kTokenDigits ||
      parsed.token.find_first_not_of("0123456789abcdef") != proof.npos)
    return std::nullopt;
  return parsed;
}

// Callers take kUnavailable for another holder that may be alive, and wait for it. Where the store itself is away, another
// node may reach it.
Status OfStore(Status status) {
  return status.code() == Code::kUnavailable ? Status(Code::kLinkFailed, status.message()) : status;
}

bool MayHaveLanded(Code code) {
  return code == Code::kDeadlineExceeded || code == Code::kLinkFailed || code == Code::kUnavailable;
}

}  // namespace

JobLock::JobLock(Config config)
    : config_(std::move(config)), token_(RandomToken()), take_over_(config_.take_over) {}

JobLock::~JobLock() {
  {
    const std::lock_guard lock(thread_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void JobLock::Run() {
  std::unique_lock lock(thread_mutex_);
  while (!wake_.wait_for(lock, kRenewEvery, [this] { return stop_; })) {
    lock.unlock();
    Renew();
    lock.lock();
  }
}

std::string JobLock::PathOf(uint64_t epoch) const {
  char name[32];
  std::snprintf(name, sizeof(name), "%010" PRIu64 ".json", epoch);
  return config_.job + "/" + std::string(kLockFolder) + "/" + name;
}

std::string JobLock::Content() const {
  const ProcessMark& process = config_.process;
  const nlohmann::ordered_json json = {{"format", "ropeteam-lock"},
                                       {"version", 1},
                                       {"node", config_.node},
                                       {"host", HostName()},
                                       {"since", since_},
                                       {"renewed", renewed_},
                                       {"token", token_},
                                       {"boot", process.boot},
                                       {"pid_namespace", process.pid_namespace},
                                       {"pid", process.pid},
                                       {"started", process.started}};
  std::string text = json.dump(1, ' ', true, nlohmann::json::error_handler_t::replace);
  text.resize(kLockFileBytes - 1, ' ');
  return text + "\n";
}

std::string JobLock::Holder::Text() const {
  if (token.empty()) return "an unknown holder, whose lock file cannot be read";
  return "node " + node + " of host " + host + " since " + since;
}

Result<JobLock::Seen> JobLock::Look(Deadline deadline) {
  Seen seen;
  std::string page;
  do {
    const Result<ListPage> listed =
        config_.sink->List(config_.job + "/" + std::string(kLockFolder), page, deadline);
    if (!listed.ok()) return OfStore(listed.status());
    for (const FileInfo& file : listed->files) {
      const std::optional<uint64_t> epoch = ParseEpoch(file.name.substr(file.name.rfind('/') + 1));
      if (!epoch) continue;
      const uint64_t lower = std::min(*epoch, seen.epoch);
      seen.epoch = std::max(*epoch, seen.epoch);
      if (lower != 0 && seen.lower.size() < kLowerDeletedMax) seen.lower.push_back(lower);
    }
    page = listed->next;
  } while (!page.empty());
  if (seen.epoch == 0) return seen;
  Result<std::string> text = ReadFile(seen.epoch, deadline);
  if (text.status().code() == Code::kNotFound)
    return Error(Code::kUnavailable, "%s vanished while it was read", PathOf(seen.epoch).c_str());
  if (!text.ok()) return OfStore(text.status());
  seen.text = std::move(*text);
  seen.holder = ParseHolder(seen.text);
  return seen;
}

Result<std::string> JobLock::ReadFile(uint64_t epoch, Deadline deadline) const {
  std::string text(kLockFileBytes, '\0');
  const Target target{reinterpret_cast<std::byte*>(text.data()), text.size()};
  const Status read = config_.sink->Read(PathOf(epoch), 0, {&target, 1}, deadline);
  if (read.code() == Code::kCorrupt) return std::string();
  if (!read.ok()) return read;
  return text;
}

JobLock::Holder JobLock::ParseHolder(const std::string& content) {
  const nlohmann::json json = nlohmann::json::parse(content, nullptr, false);
  if (!json.is_object()) return {};
  const auto text = [&json](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  const auto number = [&json](const char* key) -> uint64_t {
    const auto found = json.find(key);
    return found != json.end() && found->is_number_unsigned() ? found->get<uint64_t>() : 0;
  };
  return {text("token"),
          text("host"),
          text("node"),
          text("since"),
          {text("boot"), text("pid_namespace"), static_cast<int64_t>(number("pid")), number("started")}};
}

Status JobLock::Hold() {
  const std::lock_guard lock(mutex_);
  used_ = true;
  if (!lost_.ok()) return lost_;
  asked_ = true;
  if (config_.renew_by_itself && !thread_.joinable()) thread_ = std::thread([this] { Run(); });
  return HoldLocked();
}

Status JobLock::Check() {
  const std::lock_guard lock(mutex_);
  if (!used_) return OkStatus();
  if (held_) return HoldLocked();
  if (!lost_.ok()) return lost_;
  return Error(Code::kUnavailable, "this node does not hold the storage of job %s", config_.job.c_str());
}

Result<std::string> JobLock::Proof() {
  const std::lock_guard lock(mutex_);
  if (held_) return std::to_string(epoch_) + ":" + token_;
  return Error(Code::kUnavailable, "this node does not hold the storage of job %s", config_.job.c_str());
}

Status JobLock::Prove(std::string_view proof) const {
  const std::optional<ParsedProof> parsed = ParseProof(proof);
  if (!parsed)
    return Error(Code::kInvalidArgument, "storage of job %s: a proof of %zu bytes that is not EPOCH:TOKEN",
                 config_.job.c_str(), proof.size());
  const std::string path = PathOf(parsed->epoch);
  const Result<std::string> text = ReadFile(parsed->epoch, In(kCallTimeout));
  const bool there = text.ok();
  if (!there && text.status().code() != Code::kNotFound) return text.status();
  if (there && ParseHolder(*text).token == parsed->token) return OkStatus();
  if (!there) ROPETEAM_RETURN_IF_ERROR(NotBeingRenewed(path));
  return Error(Code::kNotFound,
               "%s of %s %s: this node does not see the store that the job's lock is in, is it mounted here?",
               path.c_str(), config_.sink->Describe().c_str(),
               there ? "is of another process" : "is not there");
}

// Some stores cannot rename: there a renewal deletes the file and writes it in place.
Status JobLock::NotBeingRenewed(const std::string& path) const {
  std::string page;
  do {
    const Result<ListPage> listed =
        config_.sink->List(config_.job + "/" + std::string(kLockFolder), page, In(kCallTimeout));
    if (!listed.ok()) return listed.status();
    const auto is_it = [&path](const FileInfo& file) { return file.name == path; };
    if (std::any_of(listed->files.begin(), listed->files.end(), is_it) ||
        std::find(listed->unfinished.begin(), listed->unfinished.end(), path) != listed->unfinished.end())
      return Error(Code::kUnavailable, "%s is being renewed", path.c_str());
    page = listed->next;
  } while (!page.empty());
  return OkStatus();
}

Status JobLock::HoldLocked() {
  Status claimed;
  for (int claims = 0;; ++claims) {
    const Result<Seen> seen = Look(In(kCallTimeout));
    if (!seen.ok()) {
      watched_epoch_ = 0;
      return claimed.ok() ? seen.status() : claimed;
    }
    if (IsOurs(*seen)) return Keep(*seen);
    if (held_ && seen->epoch >= epoch_ && !IsOfThisProcess(*seen)) return Lose(*seen);
    // An operator has deleted our file, or another directory is here than before: the mount was lost, or is back. A proof
    // of the next hold must differ, because other nodes may not see this directory.
    if (std::exchange(held_, false)) token_ = RandomToken();
    if (!claimed.ok()) return claimed;
    ROPETEAM_RETURN_IF_ERROR(Judge(*seen));
    if (claims == kClaimsMax)
      return Error(Code::kUnavailable, "storage of job %s: others claim it at the same moment",
                   config_.job.c_str());
    claimed = Claim(seen->epoch + 1);
    if (!claimed.ok() && !MayHaveLanded(claimed.code())) return claimed;
  }
}

Status JobLock::Claim(uint64_t epoch) {
  since_ = PrintTime(static_cast<uint64_t>(std::time(nullptr)));
  sure_at_.reset();
  Status put = config_.sink->Put(PathOf(epoch), Content(), PutMode::kIfAbsent, In(kCallTimeout));
  if (put.code() == Code::kUnsupported) {
    if (!std::exchange(weak_told_, true))
      LOG_WARNING(
          "storage of job %s: protection from a second allocation is weak, two that start together may both "
          "write: "
          "%s",
          config_.job.c_str(), put.message().c_str());
    put = config_.sink->Put(PathOf(epoch), Content(), PutMode::kReplace, In(kCallTimeout));
    sure_at_ = config_.now() + kDeadAfter;
  }
  // If it is there already, the next Look() shows which node has it.
  return put.code() == Code::kAlreadyExists ? OkStatus() : OfStore(put);
}

Status JobLock::Keep(const Seen& seen) {
  if (sure_at_ && config_.now() < *sure_at_)
    return Error(
        Code::kUnavailable,
        "storage of job %s: waiting for %lld s whether another allocation claims it, as this store has no "
        "conditional writes",
        config_.job.c_str(), static_cast<long long>(kDeadAfter.count()));
  if (!held_)
    LOG_INFO("storage of job %s is held by this node, epoch %" PRIu64, config_.job.c_str(), seen.epoch);
  held_ = true;
  take_over_ = false;
  epoch_ = seen.epoch;
  watched_epoch_ = 0;
  for (const uint64_t lower : seen.lower) {
    const Status deleted = config_.sink->Delete(PathOf(lower), In(kCallTimeout));
    if (!deleted.ok()) LOG_DEBUG("%s stays: %s", PathOf(lower).c_str(), deleted.message().c_str());
  }
  return OkStatus();
}

Status JobLock::Lose(const Seen& seen) {
  held_ = asked_ = false;
  lost_ = Error(
      Code::kAlreadyExists,
      "the storage of job %s was taken over by %s: this allocation writes and deletes nothing there any more",
      config_.job.c_str(), seen.holder.Text().c_str());
  LOG_WARNING("%s", lost_.message().c_str());
  return lost_;
}

Status JobLock::Judge(const Seen& seen) {
  if (seen.epoch == 0) return OkStatus();
  const std::string holder = seen.holder.Text();
  if (IsOfThisProcess(seen)) {
    LOG_INFO("storage of job %s was held by this process before, epoch %" PRIu64, config_.job.c_str(),
             seen.epoch);
    return OkStatus();
  }
  if (IsGone(seen.holder.process, config_.process)) {
    LOG_INFO("storage of job %s was held by %s, whose process is gone", config_.job.c_str(), holder.c_str());
    return OkStatus();
  }
  const Time now = config_.now();
  const bool watched = watched_epoch_ != 0 && now - seen_at_ <= kDeadAfter;
  const bool changed = watched_epoch_ != 0 && (watched_epoch_ != seen.epoch || watched_text_ != seen.text);
  // If this node has not read the file for kDeadAfter, it may have been paused together with the holder.
  if (!watched || changed) unchanged_since_ = now;
  alive_ = changed || (watched && alive_);
  watched_epoch_ = seen.epoch;
  watched_text_ = seen.text;
  seen_at_ = now;
  if (now - unchanged_since_ >= kDeadAfter) {
    LOG_WARNING("storage of job %s was held by %s, which has been silent for %lld s", config_.job.c_str(),
                holder.c_str(), static_cast<long long>(kDeadAfter.count()));
    return OkStatus();
  }
  if (take_over_) {
    LOG_WARNING("storage of job %s is taken over from %s, as --take-over-storage says", config_.job.c_str(),
                holder.c_str());
    return OkStatus();
  }
  if (!alive_)
    return Error(Code::kUnavailable,
                 "the storage of job %s is held by %s; whether it is alive is known after %lld s",
                 config_.job.c_str(), holder.c_str(), static_cast<long long>(kDeadAfter.count()));
  return Error(Code::kAlreadyExists,
               "the storage of job %s is held by %s, which is alive: stop that allocation, give this one "
               "another --job or "
               "--storage, or start it with --take-over-storage",
               config_.job.c_str(), holder.c_str());
}

void JobLock::Renew() {
  const std::lock_guard lock(mutex_);
  if (!asked_) return;
  const Result<Seen> seen = Look(In(kCallTimeout));
  Status status = seen.status();
  if (!seen.ok()) {
    watched_epoch_ = 0;
  } else if (IsOurs(*seen)) {
    (void)Keep(*seen);
    ++renewed_;
    status = config_.sink->Put(PathOf(seen->epoch), Content(), PutMode::kReplace, In(kCallTimeout));
  } else if (held_ && seen->epoch >= epoch_ && !IsOfThisProcess(*seen)) {
    (void)Lose(*seen);
    return;
  } else {
    (void)Judge(*seen);
  }
  if (held_ && !status.ok() && !std::exchange(failure_told_, true))
    LOG_WARNING("storage of job %s: the lock is not renewed, after %lld s another allocation may take it: %s",
                config_.job.c_str(), static_cast<long long>(kDeadAfter.count()), status.ToString().c_str());
  if (status.ok()) failure_told_ = false;
}

Status JobLock::Release() {
  const std::lock_guard lock(mutex_);
  return ReleaseLocked(kCallTimeout);
}

void JobLock::Leave() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) (void)ReleaseLocked(kLeaveTimeout);  // other nodes notice after kDeadAfter
}

Status JobLock::ReleaseLocked(std::chrono::seconds timeout) {
  lost_ = OkStatus();
  held_ = false;
  watched_epoch_ = 0;
  if (!std::exchange(asked_, false)) return OkStatus();
  const Deadline deadline = In(timeout);
  const Result<Seen> seen = Look(deadline);
  if (!seen.ok()) return seen.status();
  return IsOurs(*seen) ? config_.sink->Delete(PathOf(seen->epoch), deadline) : OkStatus();
}

}  // namespace ropeteam::storage
