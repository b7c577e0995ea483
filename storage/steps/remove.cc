// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/remove.h"

#include <unordered_set>

#include "core/base/log.h"
#include "storage/steps/steps.h"

namespace ropeteam::storage {

Status RemoveStep(Sink* sink, const std::string& job, const StepName& name,
                  std::chrono::seconds call_timeout) {
  const auto deadline = [call_timeout] { return std::chrono::steady_clock::now() + call_timeout; };
  const std::string folder = StepPath(job, name);
  const Result<std::string> text = ReadManifestText(sink, job, name, call_timeout);
  if (!text.ok()) return text.status();
  std::unordered_set<std::string> named;
  const Result<StepHead> head = ParseManifestOf(job, name, *text, [&](RankEntry&& entry) {
    for (const FileEntry& file : entry.files) named.insert(file.path);
    return OkStatus();
  });
  if (!head.ok()) return head.status();
  const Result<FileSizes> sizes = ListFileSizes(sink, job, name, call_timeout);
  if (!sizes.ok()) return sizes.status();
  ROPETEAM_RETURN_IF_ERROR(sink->Delete(folder + "/" + std::string(kManifestName), deadline()));
  for (const auto& [path, bytes] : *sizes)
    if (path != kManifestName && (named.contains(path) || IsReservedName(path)))
      ROPETEAM_RETURN_IF_ERROR(sink->Delete(folder + "/" + path, deadline()));
  // Who may delete objects may not be allowed to list uploads.
  const Result<uint64_t> aborted = sink->AbortUploads(folder, std::chrono::seconds(0), deadline());
  if (!aborted.ok())
    LOG_WARNING("unfinished uploads of %s are left: %s", folder.c_str(), aborted.status().message().c_str());
  return sink->DeleteFolder(folder, deadline());
}

}  // namespace ropeteam::storage
