// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-manifest.json as it is on storage. An accepted step must stay the same when written and read
// again.

#include "storage/format/manifest.h"

#include <cstdio>

#include "core/base/checksum.h"
#include "storage/format/names.h"
#include "storage/steps/steps.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

using storage::RankEntry;
using storage::StepHead;

constexpr char kTail[] = "\"manifest_crc32c\": \"";

Result<StepHead> Parse(std::string_view text, std::vector<RankEntry>* ranks) {
  return storage::ParseStepManifest(text, [&](RankEntry&& rank) {
    ranks->push_back(std::move(rank));
    return OkStatus();
  });
}

std::string Write(const StepHead& head, const std::vector<RankEntry>& ranks) {
  storage::StepManifestWriter writer(head);
  for (const RankEntry& rank : ranks) ROPETEAM_CHECK(writer.Add(rank).ok());
  return writer.Finish().value();
}

// Input: the text without its last lines, which have the checksum of the others.
void RunStepManifest(std::string_view input) {
  char tail[64];
  std::snprintf(tail, sizeof(tail), "%s%08x\"\n}\n", kTail, Crc32c(input.data(), input.size()));
  std::vector<RankEntry> ranks;
  const std::string text = std::string(input) + tail;
  const Result<StepHead> head = Parse(text, &ranks);
  if (!head.ok()) return;
  std::vector<RankEntry> again;
  const std::string written = Write(*head, ranks);
  const Result<StepHead> second = Parse(written, &again);
  // The program's metadata is kept as compact JSON, so it may change the first time that it is written.
  ROPETEAM_CHECK(second.ok() && again == ranks && Write(*second, again) == written);
  const storage::StepName name = {head->step, head->incarnation};
  ROPETEAM_CHECK(storage::ParseManifestOf(head->job, name, text, {}).ok());
  ROPETEAM_CHECK(storage::ParseStepFolder(storage::StepFolder(name)) == name);
}

std::vector<std::string> StepManifestSeeds() {
  StepHead head;
  head.job = "llama";
  head.step = 100;
  head.incarnation = 3;
  head.chunk_bytes = 4096;
  head.time_s = 1'760'000'000;
  std::vector<RankEntry> ranks;
  std::vector<std::string> seeds;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    head.world_size = rank + 1;
    head.user = rank == 0 ? "{}" : R"({"loss": 1.25e0, "tags": ["a", null, true], "x": {"y": -1}})";
    ranks.push_back({rank, 10'000, 0x123456789abcdef0, {}});
    ranks.back().files.push_back({storage::RankFileName(rank), 8192, 1, 4096, 2});
    ranks.back().files.push_back({".metadata", 77, 3, 0, 0});
    const std::string text = Write(head, ranks);
    seeds.push_back(text.substr(0, text.rfind(kTail)));
  }
  return seeds;
}

const Target kStepManifest("step_manifest", RunStepManifest, StepManifestSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
