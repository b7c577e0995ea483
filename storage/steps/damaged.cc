// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/damaged.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace ropeteam::storage {
namespace {

Deadline After(std::chrono::seconds timeout) { return std::chrono::steady_clock::now() + timeout; }

std::string PathOf(const std::string& job, const StepName& name, std::string_view file) {
  return StepPath(job, name) + "/" + std::string(file);
}

// A folder without a manifest is not a step.
Result<bool> IsStep(Sink* sink, const std::string& job, const StepName& name,
                    std::chrono::seconds call_timeout) {
  const Result<FileInfo> manifest = sink->Stat(ManifestPath(job, name), After(call_timeout));
  if (manifest.ok()) return true;
  if (manifest.status().code() == Code::kNotFound) return false;
  return manifest.status();
}

// The file's text, up to kDamageBytesMax bytes; no value: the step has no such file.
Result<std::optional<std::string>> ReadText(Sink* sink, const std::string& job, const StepName& name,
                                            std::string_view file, const FileSizes& sizes,
                                            std::chrono::seconds call_timeout) {
  const auto at = std::lower_bound(sizes.begin(), sizes.end(), std::pair(std::string(file), uint64_t{0}));
  if (at == sizes.end() || at->first != file) return std::optional<std::string>();
  std::string text(std::min<uint64_t>(at->second, kDamageBytesMax), '\0');
  const Target target{reinterpret_cast<std::byte*>(text.data()), text.size()};
  const Status read = sink->Read(PathOf(job, name, file), 0, {&target, 1}, After(call_timeout));
  // A shorter text has replaced the listed one. The step itself is not damaged.
  if (read.code() == Code::kCorrupt)
    return Error(Code::kUnavailable, "%s, try again", read.message().c_str());
  if (!read.ok()) return read;
  return std::optional(std::move(text));
}

}  // namespace

Status MarkDamaged(Sink* sink, const std::string& job, const StepName& name, const std::string& why,
                   std::chrono::seconds call_timeout) {
  const Result<bool> step = IsStep(sink, job, name, call_timeout);
  if (!step.ok() || !*step) return step.status();
  const std::string path = PathOf(job, name, kDamagedName), text = why.substr(0, kDamageBytesMax - 1) + "\n";
  Status put = sink->Put(path, text, PutMode::kIfAbsent, After(call_timeout));
  if (put.code() == Code::kUnsupported) put = sink->Put(path, text, PutMode::kReplace, After(call_timeout));
  return put.code() == Code::kAlreadyExists ? OkStatus() : put;
}

Result<std::string> DamageOf(Sink* sink, const std::string& job, const StepName& name, const FileSizes& sizes,
                             std::chrono::seconds call_timeout) {
  Result<std::optional<std::string>> text = ReadText(sink, job, name, kDamagedName, sizes, call_timeout);
  if (!text.ok()) return text.status();
  if (!*text) return std::string();
  std::string why = std::move(**text);
  // The text is shown in logs and on terminals, and its author is unknown.
  std::replace_if(
      why.begin(), why.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; }, ' ');
  why.erase(why.find_last_not_of(' ') + 1);
  return why.empty() ? "no reason is given" : why;
}

Status NoteRestores(Sink* sink, const std::string& job, const StepName& name, const StepRestores& note,
                    std::chrono::seconds call_timeout) {
  const Result<bool> step = IsStep(sink, job, name, call_timeout);
  if (!step.ok() || !*step) return step.status();
  char text[256];
  std::snprintf(text, sizeof(text),
                "restores %" PRIu32 "\nlast incarnation %" PRIu64
                "\nquarantined %d\nby hand %d\nrevision %" PRIu32 "\n",
                note.restores, note.counted, note.quarantined ? 1 : 0, note.by_hand ? 1 : 0, note.revision);
  return sink->Put(PathOf(job, name, kRestoredName), text, PutMode::kReplace, After(call_timeout));
}

Result<StepRestores> RestoresOf(Sink* sink, const std::string& job, const StepName& name,
                                const FileSizes& sizes, std::chrono::seconds call_timeout) {
  const Result<std::optional<std::string>> text =
      ReadText(sink, job, name, kRestoredName, sizes, call_timeout);
  if (!text.ok()) return text.status();
  StepRestores note;
  int quarantined = 0, by_hand = 0;
  if (!*text || std::sscanf((*text)->c_str(),
                            "restores %" SCNu32 " last incarnation %" SCNu64
                            " quarantined %d by hand %d revision %" SCNu32,
                            &note.restores, &note.counted, &quarantined, &by_hand, &note.revision) != 5)
    return StepRestores();
  note.quarantined = quarantined == 1;
  note.by_hand = by_hand == 1;
  return note;
}

}  // namespace ropeteam::storage
