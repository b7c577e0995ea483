// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/steps.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>

#include "core/base/log.h"
#include "storage/parallel.h"
#include "storage/url.h"

namespace ropeteam::storage {
namespace {

Deadline After(std::chrono::seconds timeout) { return std::chrono::steady_clock::now() + timeout; }

std::string LastPart(const std::string& folder) { return folder.substr(folder.rfind('/') + 1); }

// Calls `each` for every page of the direct contents of `folder`.
Status ForEachPage(Sink* sink, const std::string& folder, std::chrono::seconds call_timeout,
                   const std::function<Status(const ListPage&)>& each) {
  std::string page;
  do {
    const Result<ListPage> listed = sink->List(folder, page, After(call_timeout));
    if (!listed.ok()) return listed.status();
    ROPETEAM_RETURN_IF_ERROR(each(*listed));
    page = listed->next;
  } while (!page.empty());
  return OkStatus();
}

}  // namespace

Result<StepSource> ParseStepSource(const std::string& text) {
  StepSource source{text, std::nullopt};
  const size_t at = text.rfind('@');
  const std::string number = at == std::string::npos ? "" : text.substr(at + 1);
  if (!number.empty() && number.find_first_not_of("0123456789") == std::string::npos) {
    source.url.resize(at);
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), source.step.emplace());
    if (error != std::errc())
      return Error(Code::kInvalidArgument, "%s: step %.80s is over 2^64 - 1", text.c_str(), number.c_str());
  }
  const Result<Url> url = ParseUrl(source.url);
  if (!url.ok()) return url.status();
  return source;
}

std::string StepPath(const std::string& job, const StepName& name) {
  return job.empty() ? StepFolder(name) : job + "/" + StepFolder(name);
}

std::string ManifestPath(const std::string& job, const StepName& name) {
  return StepPath(job, name) + "/" + std::string(kManifestName);
}

Result<std::vector<StepName>> ListStepNames(Sink* sink, const std::string& job,
                                            std::chrono::seconds call_timeout) {
  std::vector<StepName> names;
  const Status status = ForEachPage(sink, job, call_timeout, [&](const ListPage& page) {
    for (const std::string& folder : page.folders) {
      const auto name = ParseStepFolder(LastPart(folder));
      if (name && names.size() == kStepsListedMax)
        return Error(Code::kCorrupt, "%s has more than %zu steps", job.c_str(), kStepsListedMax);
      if (name) names.push_back(*name);
    }
    return OkStatus();
  });
  if (!status.ok()) return status;
  return names;
}

Result<std::vector<StepPlace>> ListSteps(Sink* sink, const std::string& job,
                                         std::chrono::seconds call_timeout) {
  const Result<std::vector<StepName>> names = ListStepNames(sink, job, call_timeout);
  if (!names.ok()) return names.status();
  // There is one request per step. A thousand in sequence would take a minute at a store's latency.
  std::vector<StepPlace> steps(names->size());
  ROPETEAM_RETURN_IF_ERROR(RunParallel(steps.size(), kStorageThreads, [&](size_t index, size_t) {
    const StepName& name = (*names)[index];
    const Result<FileInfo> manifest = sink->Stat(ManifestPath(job, name), After(call_timeout));
    if (!manifest.ok() && manifest.status().code() != Code::kNotFound) return manifest.status();
    steps[index] = {name, manifest.ok()};
    return OkStatus();
  }));
  return steps;
}

Result<std::vector<std::string>> FindJobs(Sink* sink, std::chrono::seconds call_timeout) {
  std::vector<std::string> jobs;
  std::vector<std::pair<std::string, int>> open = {{"", 0}};  // folders, with the number of parts of the name
  for (size_t searched = 0; !open.empty(); ++searched) {
    const auto [folder, parts] = std::move(open.back());
    open.pop_back();
    if (searched == kFoldersSearchedMax)
      return Error(Code::kInvalidArgument, "%s has more than %zu folders: say which job's steps are meant",
                   sink->Describe().c_str(), kFoldersSearchedMax);
    bool has_step = false;
    const Status status = ForEachPage(sink, folder, call_timeout, [&, parts = parts](const ListPage& page) {
      for (const std::string& inner : page.folders) {
        if (ParseStepFolder(LastPart(inner)))
          has_step = true;
        else if (parts < kJobPartsMax && open.size() < kFoldersSearchedMax)
          open.emplace_back(inner, parts + 1);
      }
      return OkStatus();
    });
    const bool refused = status.code() == Code::kIo || status.code() == Code::kInvalidArgument;
    if (!status.ok() && (folder.empty() || !refused)) return status;
    if (!status.ok())
      LOG_WARNING("%s is not searched for steps: %s", folder.c_str(), status.message().c_str());
    if (has_step && folder.empty())
      return Error(Code::kInvalidArgument,
                   "%s has steps directly in it: it is the folder of a job, give the one above it",
                   sink->Describe().c_str());
    if (has_step) jobs.push_back(folder);
  }
  std::sort(jobs.begin(), jobs.end());
  return jobs;
}

Result<std::string> ReadManifestText(Sink* sink, const std::string& job, const StepName& name,
                                     std::chrono::seconds call_timeout) {
  const std::string path = ManifestPath(job, name);
  const Result<FileInfo> info = sink->Stat(path, After(call_timeout));
  if (!info.ok()) return info.status();
  if (info->bytes == 0 || info->bytes > kStepManifestBytesMax)
    return Error(Code::kCorrupt, "%s has %" PRIu64 " bytes, limit %" PRIu64, path.c_str(), info->bytes,
                 kStepManifestBytesMax);
  std::string text(info->bytes, '\0');
  const Target target{reinterpret_cast<std::byte*>(text.data()), text.size()};
  ROPETEAM_RETURN_IF_ERROR(sink->Read(path, 0, {&target, 1}, After(call_timeout)));
  return text;
}

Result<StepHead> ParseManifestOf(const std::string& job, const StepName& name, std::string_view text,
                                 const std::function<Status(RankEntry&&)>& each) {
  Result<StepHead> head = ParseStepManifest(text, each);
  if (head.ok() && ((!job.empty() && head->job != job) || head->step != name.step ||
                    head->incarnation != name.incarnation))
    return Error(Code::kCorrupt, "the manifest in %s is of job %s, step %" PRIu64 ", incarnation %" PRIu64,
                 StepPath(job, name).c_str(), head->job.c_str(), head->step, head->incarnation);
  return head;
}

Result<FileSizes> ListFileSizes(Sink* sink, const std::string& job, const StepName& name,
                                std::chrono::seconds call_timeout) {
  FileSizes sizes;
  const std::string root = StepPath(job, name);
  std::vector<std::pair<std::string, int>> folders = {{root, 0}};
  while (!folders.empty()) {
    const auto [folder, depth] = std::move(folders.back());
    folders.pop_back();
    ROPETEAM_RETURN_IF_ERROR(
        ForEachPage(sink, folder, call_timeout, [&, depth = depth](const ListPage& page) {
          for (const FileInfo& file : page.files)
            sizes.emplace_back(file.name.substr(root.size() + 1), file.bytes);
          if (depth < kFolderDepthMax)
            for (const std::string& inner : page.folders) folders.emplace_back(inner, depth + 1);
          return sizes.size() > kStepFilesListedMax || folders.size() > kStepFilesListedMax
                     ? Error(Code::kCorrupt, "%s has more than %zu files", root.c_str(), kStepFilesListedMax)
                     : OkStatus();
        }));
  }
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

Status CheckFileSize(const std::string& folder, const FileSizes& sizes, const FileEntry& file) {
  const auto at =
      std::lower_bound(sizes.begin(), sizes.end(), file.path,
                       [](const auto& size, const std::string& path) { return size.first < path; });
  if (at == sizes.end() || at->first != file.path)
    return Error(Code::kCorrupt, "%s lacks %s", folder.c_str(), file.path.c_str());
  if (at->second != file.bytes)
    return Error(Code::kCorrupt, "%s/%s has %" PRIu64 " bytes, its manifest says %" PRIu64, folder.c_str(),
                 file.path.c_str(), at->second, file.bytes);
  return OkStatus();
}

}  // namespace ropeteam::storage
