// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/remove.h"

#include <unordered_set>
#include <vector>

#include "core/base/log.h"
#include "storage/parallel.h"
#include "storage/steps/steps.h"

namespace ropeteam::storage {

Result<uint64_t> RemoveStep(Sink* sink, const std::string& job, const StepName& name, bool finished,
                            std::chrono::seconds call_timeout) {
  const auto deadline = [call_timeout] { return std::chrono::steady_clock::now() + call_timeout; };
  const std::string folder = StepPath(job, name);
  const std::string manifest = folder + "/" + std::string(kManifestName);
  std::unordered_set<std::string> named;
  if (finished) {
    // The manifest is read right before it is deleted, so its content is current.
    const Result<std::string> text = ReadManifestText(sink, job, name, call_timeout);
    if (!text.ok()) return text.status();
    const Result<StepHead> head = ParseManifestOf(job, name, *text, [&](RankEntry&& entry) {
      for (const FileEntry& file : entry.files) named.insert(file.path);
      return OkStatus();
    });
    if (!head.ok()) return head.status();
  }
  const Result<FileSizes> sizes = ListFileSizes(sink, job, name, call_timeout);
  if (!sizes.ok()) return sizes.status();
  std::vector<std::string> own;
  for (const auto& [path, bytes] : *sizes)
    if (path != kManifestName &&
        (named.contains(path) || IsReservedName(path) || (!finished && IsFileName(path))))
      own.push_back(folder + "/" + path);
  const uint64_t others = sizes->size() - own.size() - (finished ? 1 : 0);
  if (finished) {
    ROPETEAM_RETURN_IF_ERROR(sink->Delete(manifest, deadline()));
  } else {
    // If the step was finished meanwhile, it must stay.
    const Result<FileInfo> there = sink->Stat(manifest, deadline());
    if (there.ok())
      return Error(Code::kAborted, "%s has got a manifest meanwhile and is not removed", folder.c_str());
    if (there.status().code() != Code::kNotFound) return there.status();
  }
  ROPETEAM_RETURN_IF_ERROR(RunParallel(own.size(), kStorageThreads,
                                       [&](size_t i, size_t) { return sink->Delete(own[i], deadline()); }));
  // A user with the right to delete objects may lack the right to list uploads.
  const Result<uint64_t> aborted = sink->AbortUploads(folder, std::chrono::seconds(0), deadline());
  if (!aborted.ok())
    LOG_WARNING("unfinished uploads of %s are left: %s", folder.c_str(), aborted.status().message().c_str());
  ROPETEAM_RETURN_IF_ERROR(sink->DeleteFolder(folder, deadline()));
  return others;
}

}  // namespace ropeteam::storage
