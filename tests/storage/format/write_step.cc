// SPDX-License-Identifier: Apache-2.0
//
// Writes a step in its format on storage, from objects in files. tests/python/test_format_on_storage.py reads
// it with the libraries that users have.
//
//     ropeteam-write-step SHARDS STEP
//
// SHARDS/0, SHARDS/1, … are the ranks. Each has a file `names`, with a zero byte after every name, and the
// objects' bytes in files 0, 1, …, in the order of the names.

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "shard_builder.h"
#include "storage/format/checksums.h"
#include "storage/format/names.h"

namespace ropeteam::storage {
namespace {

std::string Read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  ROPETEAM_CHECK(file.good());
  return bytes.str();
}

void Write(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  file.close();
  ROPETEAM_CHECK(file.good());
}

NamedBytes ReadObjects(const std::filesystem::path& folder) {
  NamedBytes named;
  std::istringstream names(Read(folder / "names"));
  for (std::string name; std::getline(names, name, '\0');)
    named.emplace_back(name, Read(folder / std::to_string(named.size())));
  return named;
}

// The lowest rank keeps a name. If a higher rank has other bytes under it, its file is in its own folder.
Result<RankEntry> WriteRank(uint32_t rank, const TestShard& shard, const std::filesystem::path& step,
                            std::map<std::string, uint32_t>* crcs) {
  const ShardStream stream = shard.Stream();
  std::set<std::string> taken;
  for (const StreamObject& object : shard.objects()) {
    const auto found = crcs->find(object.name);
    if (found != crcs->end() && found->second != Crc32c(shard.bytes().data() + object.offset, object.length))
      taken.insert(object.name);
  }
  Result<std::vector<FilePlan>> files = LayOut(rank, shard.objects(), stream, taken, nullptr);
  if (!files.ok()) return files.status();
  RankEntry entry = EntryOf(rank, shard, *files);
  // Checksums as a daemon computes them: from the chunks' checksums, in parts.
  PartChecksums checksums(*files, stream, std::vector<uint64_t>(files->size(), 10000));
  for (size_t i = 0; i < files->size(); ++i) {
    const Result<uint32_t> crc = checksums.File(i, nullptr);
    if (!crc.ok()) return crc.status();
    entry.files[i].crc32c = *crc;
    crcs->emplace((*files)[i].path, *crc);
    Write(step / (*files)[i].path, FileBytes((*files)[i], stream));
  }
  return entry;
}

Status WriteStep(const std::filesystem::path& shards, const std::filesystem::path& step) {
  constexpr uint64_t kChunk = 4096;
  uint32_t world = 0;
  while (std::filesystem::exists(shards / std::to_string(world))) ++world;
  StepManifestWriter manifest(
      {"train", 100, 3, world, kChunk, 1795332624, R"({"loss": 0.25, "tags": ["a"]})"});
  std::map<std::string, uint32_t> crcs;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const TestShard shard(ReadObjects(shards / std::to_string(rank)), kChunk);
    const Result<RankEntry> entry = WriteRank(rank, shard, step, &crcs);
    if (!entry.ok()) return entry.status();
    ROPETEAM_RETURN_IF_ERROR(manifest.Add(*entry));
  }
  const Result<std::string> text = manifest.Finish();
  if (!text.ok()) return text.status();
  Write(step / kManifestName, *text);
  return OkStatus();
}

}  // namespace
}  // namespace ropeteam::storage

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: ropeteam-write-step SHARDS STEP\n");
    return 2;
  }
  const ropeteam::Status status = ropeteam::storage::WriteStep(argv[1], argv[2]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
