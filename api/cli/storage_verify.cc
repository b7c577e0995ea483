// SPDX-License-Identifier: Apache-2.0
//
// ropeteam verify URL: reads every file of a step, and compares sizes and checksums with the manifest.

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "api/cli/commands.h"
#include "api/cli/storage_progress.h"
#include "api/cli/storage_steps.h"
#include "core/base/checksum.h"
#include "core/base/sizes.h"
#include "storage/steps/damaged.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam verify URL [STEP]: reads every file of a step [the newest] on storage and compares size and "
    "CRC32C\n"
    "with its manifest; exit code 1 and a line for each problem if there is one. A daemon is not asked.\n"
    "  --json             as JSON\n";

// A range of a file, either in its header or after it.
struct Range {
  size_t file = 0;
  uint64_t begin = 0;
  uint64_t length = 0;
  uint32_t crc = 0;  // of the bytes that were read
};

class StepCheck {
 public:
  StepCheck(const StoragePlace& place, std::string job, storage::StepName name)
      : place_(place), job_(std::move(job)), name_(name), folder_(storage::StepPath(job_, name_)) {}

  // Returns an error only if the store does not answer or the manifest cannot be read.
  Status Run() {
    const Result<std::string> text =
        storage::ReadManifestText(place_.sink.get(), job_, name_, place_.timeout);
    if (!text.ok()) return text.status();
    Result<std::vector<storage::FileEntry>> files = FilesOf(job_, name_, *text);
    if (!files.ok()) return files.status();
    files_ = std::move(*files);
    ROPETEAM_RETURN_IF_ERROR(CompareSizes());
    ROPETEAM_RETURN_IF_ERROR(ReadAll());
    CompareChecksums();
    return OkStatus();
  }

  int Print(bool json) const {
    if (json) {
      nlohmann::json document = {{"storage", place_.url},
                                 {"job", job_},
                                 {"step", name_.step},
                                 {"incarnation", name_.incarnation},
                                 {"files", files_.size()},
                                 {"bytes", Bytes()},
                                 {"problems", nlohmann::json::array()}};
      for (const auto& [file, problem] : problems_)
        document["problems"].push_back({{"file", PathOf(file)}, {"problem", problem}});
      std::printf("%s\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    } else {
      for (const auto& [file, problem] : problems_) std::printf("bad: %s\n", problem.c_str());
      std::printf("%s: %zu files, %s, %s\n", StepText(job_, name_).c_str(), files_.size(),
                  FormatSize(Bytes()).c_str(),
                  problems_.empty() ? "all good" : (std::to_string(problems_.size()) + " bad").c_str());
    }
    return problems_.empty() ? 0 : kExitFailed;
  }

 private:
  uint64_t Bytes() const {
    uint64_t bytes = 0;
    for (const storage::FileEntry& file : files_) bytes += file.bytes;
    return bytes;
  }

  std::string PathOf(size_t file) const {
    return file < files_.size() ? files_[file].path : std::string(storage::kDamagedName);
  }

  // Only a file's first problem is reported. The index after the last file is the mark of a damaged step.
  void Problem(size_t file, std::string text) {
    const std::lock_guard lock(mutex_);
    problems_.emplace(file, std::move(text));
  }

  Status CompareSizes() {
    const Result<storage::FileSizes> sizes =
        storage::ListFileSizes(place_.sink.get(), job_, name_, place_.timeout);
    if (!sizes.ok()) return sizes.status();
    for (size_t i = 0; i < files_.size(); ++i) {
      const Status status = storage::CheckFileSize(folder_, *sizes, files_[i]);
      if (!status.ok()) Problem(i, status.message());
    }
    const Result<std::string> damage =
        storage::DamageOf(place_.sink.get(), job_, name_, *sizes, place_.timeout);
    if (!damage.ok()) return damage.status();
    if (!damage->empty()) Problem(files_.size(), folder_ + " is marked as damaged: " + *damage);
    return OkStatus();
  }

  void AddRanges(size_t file, uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += kStorageRangeBytes)
      ranges_.push_back({file, at, std::min(kStorageRangeBytes, end - at), 0});
  }

  Status ReadAll() {
    uint64_t bytes = 0;
    for (size_t i = 0; i < files_.size(); ++i) {
      if (problems_.contains(i)) continue;
      AddRanges(i, 0, files_[i].header_bytes);
      AddRanges(i, files_[i].header_bytes, files_[i].bytes);
      bytes += files_[i].bytes;
    }
    const size_t threads = std::min(kStorageThreads, std::max<size_t>(ranges_.size(), 1));
    std::vector<RangeBuffer> buffers;
    for (size_t i = 0; i < threads; ++i) buffers.emplace_back(kStorageRangeBytes);
    Progress progress("verify step " + std::to_string(name_.step), bytes);
    return RunParallel(ranges_.size(), threads, [&](size_t i, size_t thread) {
      Range& range = ranges_[i];
      const std::string path = folder_ + "/" + files_[range.file].path;
      const storage::Target target{buffers[thread].data(), range.length};
      const Status status = place_.sink->Read(path, range.begin, {&target, 1}, place_.CallDeadline());
      if (!status.ok() && IsOfTheFile(status))
        Problem(range.file, status.message());
      else if (!status.ok())
        return status;
      range.crc = Crc32c(target.data, target.bytes);
      progress.Add(range.length);
      return OkStatus();
    });
  }

  // The other files are still read then. If the manifest cannot be read any more either, the store refuses this process.
  // The manifest is read once, for the first failure: it may be large, and every range may fail.
  bool IsOfTheFile(const Status& status) {
    if (status.code() != Code::kIo)
      return status.code() == Code::kCorrupt || status.code() == Code::kNotFound;
    std::call_once(manifest_tried_, [this] {
      manifest_reads_ = storage::ReadManifestText(place_.sink.get(), job_, name_, place_.timeout).ok();
    });
    return manifest_reads_;
  }

  void Compare(size_t file, const char* what, uint32_t crc, uint32_t expected) {
    if (crc == expected) return;
    char text[128];
    std::snprintf(text, sizeof(text), "%s has the checksum %08x, its manifest says %08x", what, crc,
                  expected);
    Problem(file, folder_ + "/" + files_[file].path + text);
  }

  void CompareChecksums() {
    auto range = ranges_.begin();
    for (size_t i = 0; i < files_.size(); ++i) {
      if (range == ranges_.end() || range->file != i) {
        if (files_[i].bytes == 0 && !problems_.contains(i)) Compare(i, "", 0, files_[i].crc32c);
        continue;
      }
      uint32_t crc = 0;
      for (; range != ranges_.end() && range->file == i; ++range) {
        if (range->begin == files_[i].header_bytes && range->begin != 0)
          Compare(i, ": its header", crc, files_[i].header_crc32c);
        crc = Crc32cCombine(crc, range->crc, range->length);
      }
      if (files_[i].header_bytes != 0 && files_[i].header_bytes == files_[i].bytes)
        Compare(i, ": its header", crc, files_[i].header_crc32c);
      Compare(i, "", crc, files_[i].crc32c);
    }
  }

  const StoragePlace& place_;
  const std::string job_;
  const storage::StepName name_;
  const std::string folder_;
  std::vector<storage::FileEntry> files_;
  std::vector<Range> ranges_;  // by file, then by offset
  std::mutex mutex_;
  std::once_flag manifest_tried_;
  bool manifest_reads_ = false;
  std::map<size_t, std::string> problems_;  // by file; guarded by mutex_ while files are read
};

Result<int> Verify(const StorageOptions& options) {
  const Result<StoragePlace> place = OpenStorage(options.url, options.timeout);
  if (!place.ok()) return place.status();
  const Result<ChosenStep> step = FindStep(*place, options.job, options.step);
  if (!step.ok()) return step.status();
  StepCheck check(*place, step->job, step->name);
  ROPETEAM_RETURN_IF_ERROR(check.Run());
  return check.Print(options.json);
}

}  // namespace

int StorageVerifyCommand(const std::vector<std::string>& arguments) {
  const Result<StorageOptions> options = ParseStorageOptions(arguments, StorageCommand::kVerify);
  int code = 0;
  if (DoneWithOptions("verify", options, kHelp, &code)) return code;
  const Result<int> verified = Verify(*options);
  return verified.ok() ? *verified : Fail("verify", verified.status());
}

}  // namespace ropeteam::cli
