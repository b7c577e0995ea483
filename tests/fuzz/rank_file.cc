// SPDX-License-Identifier: Apache-2.0
//
// The header of a rank's safetensors file, and the plan that makes a stream from the rank's files. The plan's
// pieces must be in order, and within the stream and the files.

#include <cstring>

#include "core/base/checksum.h"
#include "storage/format/names.h"
#include "storage/format/rank_file.h"
#include "storage/format/restore.h"
#include "storage/format/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

using storage::RankEntry;
using storage::RestorePiece;

void CheckPlan(const storage::RestorePlan& plan, const RankEntry& entry) {
  uint64_t end = 0;
  for (const RestorePiece& piece : plan.pieces) {
    ROPETEAM_CHECK(piece.stream_offset >= end && piece.length != 0);
    end = piece.stream_offset + piece.length;
    const bool texts = piece.file == RestorePiece::kTexts;
    ROPETEAM_CHECK(texts || piece.file < entry.files.size());
    const uint64_t source_bytes = texts ? plan.texts.size() : entry.files[piece.file].bytes;
    ROPETEAM_CHECK(piece.source_offset <= source_bytes && piece.length <= source_bytes - piece.source_offset);
  }
  ROPETEAM_CHECK(end <= plan.manifest_offset && plan.manifest_offset < entry.stream_bytes);
}

// Input: a byte for the number of the program's own files, then the JSON header of the rank's file.
void RunRankFile(std::string_view input) {
  if (input.empty()) return;
  const size_t files = static_cast<uint8_t>(input[0]) % 4;
  const std::string_view json = input.substr(1);
  const uint64_t json_bytes = json.size();
  std::string head(reinterpret_cast<const char*>(&json_bytes), sizeof(json_bytes));
  head += json;
  const Result<storage::SafetensorsHeader> header = storage::ParseSafetensors(head);
  const uint64_t data_bytes = header.ok() ? header->data_bytes : 64;

  RankEntry entry;
  entry.files.push_back(
      {storage::RankFileName(0), head.size() + data_bytes, 1, head.size(), Crc32c(head.data(), head.size())});
  for (size_t i = 0; i < files; ++i)
    entry.files.push_back({"f" + std::to_string(i) + ".pt", 100 * i, 2, 0, 0});
  entry.stream_bytes = data_bytes + head.size() + 100000;
  const Result<storage::RestorePlan> plan = storage::PlanRestore(entry, head);
  if (plan.ok()) CheckPlan(*plan, entry);
}

std::vector<std::string> RankFileSeeds() {
  std::vector<std::string> seeds;
  for (const char* order : {"t2 f2 j1", "t2", "j1"}) {
    storage::SafetensorsWriter writer;
    const auto add = [&](std::string_view key, std::string_view value) {
      ROPETEAM_CHECK(writer.AddMetadata(key, value).ok());
    };
    const bool all = order[2] != '\0' && order[2] == ' ';
    add(storage::kVersionKey, storage::kRankFileVersion);
    add(storage::kOrderKey, order);
    if (all) add(storage::kNamesKey, R"({"ropeteam.object.1": "w%FF"})");
    if (all) add(storage::kDtypesKey, R"({"z": {"dtype": "complex64", "shape": [2]}})");
    if (order[0] == 'j' || all) add("lr", "0.1");
    if (order[0] == 't') {
      ROPETEAM_CHECK(writer.AddTensor("w", "BF16", {2, 3}, 12).ok());
      ROPETEAM_CHECK(writer.AddTensor(all ? "ropeteam.object.1" : "v", "U8", {5}, 5).ok());
    }
    seeds.push_back(std::string(1, all ? '\2' : '\0') + writer.Finish().value().substr(sizeof(uint64_t)));
    const size_t end = seeds.back().find_last_not_of(' ');
    seeds.back().resize(end + 1);  // without the padding: changes there test nothing
  }
  return seeds;
}

const Target kRankFile("rank_file", RunRankFile, RankFileSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
