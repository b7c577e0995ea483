// SPDX-License-Identifier: Apache-2.0
#include "membership/credentials/watched_files.h"

#include <openssl/crypto.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/base/log.h"

namespace ropeteam {
namespace {

using std::chrono::steady_clock;

constexpr int64_t kSecondsPerDay = 86'400;
constexpr int64_t kExpiryWarnedDays = 14;  // a fortnight is enough to renew by hand
constexpr auto kWarnedAgain = std::chrono::hours(24);

}  // namespace

// Files of ended WatchedFiles. A gRPC watcher that still reads them has no users left (credentials.h), so it does no
// harm if it sees the next owner's certificates.
struct WatchedFiles::Spares {
  static Spares& Get() {
    static Spares* const spares = new Spares;  // never destroyed: gRPC's threads run until the process ends
    return *spares;
  }

  MemoryFiles Take() {
    const std::lock_guard lock(mutex);
    if (files.empty()) return {};
    const MemoryFiles taken = files.back();
    files.pop_back();
    return taken;
  }
  void Return(const MemoryFiles& returned) {
    const std::lock_guard lock(mutex);
    files.push_back(returned);
  }

  std::mutex mutex;
  std::vector<MemoryFiles> files;  // guarded by mutex
};

WatchedFiles::WatchedFiles(const TlsFiles& files) : files_(files), memory_(Spares::Get().Take()) {}

Result<std::unique_ptr<WatchedFiles>> WatchedFiles::Open(const TlsFiles& files,
                                                         std::chrono::milliseconds interval) {
  std::unique_ptr<WatchedFiles> watched(new WatchedFiles(files));
  watched->stamps_ = watched->Look();
  Result<CheckedTls> checked = ReadTlsFiles(files);
  if (!checked.ok()) return checked.status();
  ROPETEAM_RETURN_IF_ERROR(watched->Take(std::move(*checked)));
  watched->thread_ = std::thread([watched = watched.get(), interval] { watched->Watch(interval); });
  return watched;
}

WatchedFiles::~WatchedFiles() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  ending_.notify_all();
  if (thread_.joinable()) thread_.join();
  Spares::Get().Return(memory_);
}

std::string WatchedFiles::Describe() const {
  const std::lock_guard lock(mutex_);
  return "certificate of " + in_use_.name + " expires " + in_use_.expires;
}

// gRPC may read at any time. PEM may end with empty lines, so the file never gets shorter. A read during the one write
// gives wrong contents for a second, until the next read.
Status WatchedFiles::Fill(MemoryFile* file, const char* name, std::string text) {
  if (file->fd < 0) file->fd = memfd_create(name, MFD_CLOEXEC);
  if (file->fd < 0) return ErrnoError(errno, "memfd_create");
  text.resize(std::max(text.size(), file->bytes), '\n');
  const ssize_t written = pwrite(file->fd, text.data(), text.size(), 0);
  OPENSSL_cleanse(text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size()))
    return ErrnoError(errno, "write %zu bytes of memory", text.size());
  file->bytes = text.size();
  return OkStatus();
}

WatchedFiles::Stamps WatchedFiles::Look() const {
  Stamps stamps;
  const std::string* const paths[] = {&files_.certificate, &files_.private_key, &files_.roots};
  for (size_t i = 0; i < stamps.size(); ++i) {
    struct stat info {};
    if (stat(paths[i]->c_str(), &info) == 0)
      stamps[i] = {info.st_ino, info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_size};
  }
  return stamps;
}

Status WatchedFiles::Take(CheckedTls checked) {
  TlsIdentity& identity = checked.identity;
  ROPETEAM_RETURN_IF_ERROR(Fill(&memory_.roots, "ropeteam-tls-roots", std::move(identity.roots)));
  ROPETEAM_RETURN_IF_ERROR(
      Fill(&memory_.identity, "ropeteam-tls-identity", identity.private_key + "\n" + identity.certificate));
  OPENSSL_cleanse(identity.private_key.data(), identity.private_key.size());
  const std::lock_guard lock(mutex_);
  in_use_ = {{}, std::move(checked.name), std::move(checked.expires), checked.seconds_left};
  taken_at_ = steady_clock::now();
  return OkStatus();
}

void WatchedFiles::Watch(std::chrono::milliseconds interval) {
  std::unique_lock lock(mutex_);
  while (!ending_.wait_for(lock, interval, [this] { return end_; })) {
    lock.unlock();
    WarnOfExpiry();
    if (const Stamps stamps = Look(); stamps != stamps_) {
      stamps_ = stamps;
      Result<CheckedTls> checked = ReadTlsFiles(files_);
      const Status status = checked.ok() ? Take(std::move(*checked)) : checked.status();
      if (status.ok())
        LOG_INFO("certificate files were replaced, new connections use %s", Describe().c_str());
      else
        LOG_WARNING("certificate files were replaced and cannot be used, those from before stay: %s",
                    status.message().c_str());
    }
    lock.lock();
  }
}

void WatchedFiles::WarnOfExpiry() {
  const auto now = steady_clock::now();
  if (warned_at_ != steady_clock::time_point() && now - warned_at_ < kWarnedAgain) return;
  int64_t left = 0;
  {
    const std::lock_guard lock(mutex_);
    left = in_use_.seconds_left - std::chrono::duration_cast<std::chrono::seconds>(now - taken_at_).count();
  }
  if (left >= kExpiryWarnedDays * kSecondsPerDay) return;
  warned_at_ = now;
  LOG_WARNING("%s: in %lld days no new connection will be made with it; replace the files",
              Describe().c_str(), static_cast<long long>(std::max<int64_t>(left, 0) / kSecondsPerDay));
}

}  // namespace ropeteam
