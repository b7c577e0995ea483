// SPDX-License-Identifier: Apache-2.0
//
// Texts from programs and other writers to storage: metadata and indices in JSON, names of files and folders.

#include "storage/format/index.h"
#include "storage/format/manifest.h"
#include "storage/format/names.h"
#include "storage/format/rank_file.h"
#include "storage/retention/retention.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

void RunStorageText(std::string_view input) {
  const Result<std::string> compact = storage::CompactMetadata(input);
  if (compact.ok()) {
    ROPETEAM_CHECK(storage::CompactMetadata(*compact).value() == *compact);
    (void)storage::MetadataNumber(*compact, "loss");
  }
  (void)storage::MetadataNumber(std::string(input), "loss");
  (void)storage::ParseIndex(input);
  if (const auto name = storage::ParseStepFolder(input)) ROPETEAM_CHECK(storage::StepFolder(*name) == input);
  if (const auto name = storage::UnescapeName(input)) ROPETEAM_CHECK(storage::EscapeName(*name) == input);
  ROPETEAM_CHECK(storage::UnescapeName(storage::EscapeName(input)) == input);
  if (storage::IsFileName(input))
    ROPETEAM_CHECK(storage::ObjectNameOfPath(7, storage::RankFolderPath(7, input)) == input);
  // A run may claim any length, so this loop is limited. A real reader stops after the last object.
  storage::OrderReader order(input);
  for (int i = 0; i < 1000 && order.Next() != 0; ++i) continue;
}

std::vector<std::string> StorageTextSeeds() {
  return {R"({"loss": 1.5e-3, "a": [1, -2, "x\u00e9", {"b": null}], "c": true})",
          R"({"version": 1, "objects": {"w": {"kind": "tensor", "dtype": "bfloat16", "shape": [2, 3]}}})",
          storage::StepFolder({100, 3}),
          "w%FF%25",
          "t120 f2 j1",
          "data/model.distcp"};
}

const Target kStorageText("storage_text", RunStorageText, StorageTextSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
