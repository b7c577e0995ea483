// SPDX-License-Identifier: Apache-2.0
#include "storage/audit/audit.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "storage/format/manifest.h"
#include "storage/format/names.h"
#include "storage/forwarding_sink.h"

namespace ropeteam::storage {
namespace {

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool MayHaveHappened(const Status& status) {
  return status.code() == Code::kDeadlineExceeded || status.code() == Code::kLinkFailed ||
         status.code() == Code::kUnavailable;
}

const char* CauseOf(const std::string& name) {
  const std::string_view base = std::string_view(name).substr(name.rfind('/') + 1);
  if (base == kManifestName) return "manifest";
  if (base == kRestoredName) return "restored";
  return base == kDamagedName ? "damaged" : "persist";
}

std::string Sized(uint64_t bytes, uint32_t crc32c) {
  char text[64];
  std::snprintf(text, sizeof(text), ",\"bytes\":%" PRIu64 ",\"crc32c\":\"%08x\"", bytes, crc32c);
  return text;
}

class AuditedUpload final : public Upload {
 public:
  AuditedUpload(std::unique_ptr<Upload> below, std::shared_ptr<AuditLog> log, std::string name,
                uint64_t bytes)
      : Upload(bytes, below->part_bytes()),
        below_(std::move(below)),
        log_(std::move(log)),
        name_(std::move(name)) {}

  bool Has(uint32_t index, uint32_t crc32c) const override { return below_->Has(index, crc32c); }
  Status PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c, Deadline deadline) override {
    return below_->PutPart(index, pieces, crc32c, deadline);
  }
  Status Finish(uint32_t crc32c, Deadline deadline) override {
    Status status = below_->Finish(crc32c, deadline);
    log_->Add({"write", CauseOf(name_), name_, Sized(bytes_, crc32c), status});
    return status;
  }
  Status Abort(Deadline deadline) override { return below_->Abort(deadline); }

 private:
  const std::unique_ptr<Upload> below_;
  const std::shared_ptr<AuditLog> log_;
  const std::string name_;
};

class Audited final : public ForwardingSink {
 public:
  Audited(std::shared_ptr<Sink> below, std::shared_ptr<AuditLog> log, const char* deleted)
      : ForwardingSink(std::move(below)), log_(std::move(log)), deleted_(deleted) {}

  Result<std::unique_ptr<Upload>> Begin(const std::string& name, uint64_t bytes, uint64_t part_bytes_wanted,
                                        Deadline deadline) override {
    Result<std::unique_ptr<Upload>> upload = below().Begin(name, bytes, part_bytes_wanted, deadline);
    if (!upload.ok()) return upload;
    return std::unique_ptr<Upload>(std::make_unique<AuditedUpload>(std::move(*upload), log_, name, bytes));
  }
  Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) override {
    Status status = below().Put(name, bytes, mode, deadline);
    log_->Add(
        {"write", CauseOf(name), name, Sized(bytes.size(), Crc32c(bytes.data(), bytes.size())), status});
    return status;
  }
  Status Delete(const std::string& name, Deadline deadline) override {
    Status status = below().Delete(name, deadline);
    log_->Add({"delete", deleted_, name, "", status});
    return status;
  }
  Result<uint64_t> AbortUploads(const std::string& folder, std::chrono::seconds age,
                                Deadline deadline) override {
    Result<uint64_t> aborted = below().AbortUploads(folder, age, deadline);
    if (aborted.ok() && *aborted != 0)
      log_->Add({"abort", "unfinished", folder, ",\"files\":" + std::to_string(*aborted), OkStatus()});
    return aborted;
  }

 private:
  const std::shared_ptr<AuditLog> log_;
  const char* const deleted_;
};

}  // namespace

AuditLog::AuditLog(int fd, std::string path, std::string job, std::string node)
    : fd_(fd), path_(std::move(path)), job_(std::move(job)), node_(std::move(node)) {}

AuditLog::~AuditLog() { close(fd_); }

Result<std::shared_ptr<AuditLog>> AuditLog::Open(const std::string& path, std::string job, std::string node) {
  const int fd = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoError(errno, "--audit-log %s", path.c_str());
  return std::shared_ptr<AuditLog>(new AuditLog(fd, path, std::move(job), std::move(node)));
}

void AuditLog::Add(const Entry& entry) {
  if (!entry.status.ok() && !MayHaveHappened(entry.status)) return;
  std::string line = "{\"time\":\"" + PrintTime(static_cast<uint64_t>(std::time(nullptr))) +
                     "\",\"event\":\"" + entry.event + "\",\"job\":" + Quoted(job_) +
                     ",\"name\":" + Quoted(entry.name) + entry.more + ",\"cause\":\"" + entry.cause +
                     "\",\"node\":" + Quoted(node_);
  if (!entry.status.ok()) line += ",\"outcome\":\"unknown\"";
  line += "}\n";
  const std::lock_guard lock(mutex_);
  if (torn_) line.insert(0, "\n");
  ssize_t written = -1;
  do {
    written = write(fd_, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  const bool whole = written == static_cast<ssize_t>(line.size());
  if (!whole && !std::exchange(told_, true))
    LOG_WARNING("--audit-log: lines are lost: %s",
                ErrnoError(written < 0 ? errno : ENOSPC, "write %s", path_.c_str()).message().c_str());
  if (whole) told_ = false;
  if (whole || written > 0) torn_ = !whole;
}

std::unique_ptr<Sink> AuditedSink(std::shared_ptr<Sink> below, std::shared_ptr<AuditLog> log,
                                  const char* deleted) {
  return std::make_unique<Audited>(std::move(below), std::move(log), deleted);
}

}  // namespace ropeteam::storage
