// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/damaged.h"

#include <algorithm>

namespace ropeteam::storage {
namespace {

Deadline After(std::chrono::seconds timeout) { return std::chrono::steady_clock::now() + timeout; }

std::string PathOf(const std::string& job, const StepName& name, std::string_view file) {
  return StepPath(job, name) + "/" + std::string(file);
}

}  // namespace

Status MarkDamaged(Sink* sink, const std::string& job, const StepName& name, const std::string& why,
                   std::chrono::seconds call_timeout) {
  const Result<FileInfo> manifest = sink->Stat(PathOf(job, name, kManifestName), After(call_timeout));
  if (!manifest.ok()) return manifest.status().code() == Code::kNotFound ? OkStatus() : manifest.status();
  const std::string path = PathOf(job, name, kDamagedName), text = why.substr(0, kDamageBytesMax - 1) + "\n";
  Status put = sink->Put(path, text, PutMode::kIfAbsent, After(call_timeout));
  if (put.code() == Code::kUnsupported) put = sink->Put(path, text, PutMode::kReplace, After(call_timeout));
  return put.code() == Code::kAlreadyExists ? OkStatus() : put;
}

Result<std::string> DamageOf(Sink* sink, const std::string& job, const StepName& name, const FileSizes& sizes,
                             std::chrono::seconds call_timeout) {
  const auto at =
      std::lower_bound(sizes.begin(), sizes.end(), std::pair(std::string(kDamagedName), uint64_t{0}));
  if (at == sizes.end() || at->first != kDamagedName) return std::string();
  std::string why(std::min<uint64_t>(at->second, kDamageBytesMax), '\0');
  const Target target{reinterpret_cast<std::byte*>(why.data()), why.size()};
  ROPETEAM_RETURN_IF_ERROR(sink->Read(PathOf(job, name, kDamagedName), 0, {&target, 1}, After(call_timeout)));
  // It goes into logs and onto terminals, and a person may have written it.
  std::replace_if(
      why.begin(), why.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; }, ' ');
  why.erase(why.find_last_not_of(' ') + 1);
  return why.empty() ? "no reason is given" : why;
}

}  // namespace ropeteam::storage
