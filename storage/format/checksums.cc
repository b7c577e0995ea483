// SPDX-License-Identifier: Apache-2.0
#include "storage/format/checksums.h"

#include <algorithm>
#include <tuple>

#include "core/base/checksum.h"

namespace ropeteam::storage {
namespace {

// For fewer bytes, reading them again from the cache is cheaper than combining checksums.
constexpr uint64_t kCombineBytesMin = 16 << 10;

}  // namespace

PartChecksums::PartChecksums(const std::vector<FilePlan>& files, const ShardStream& stream,
                             std::vector<uint64_t> part_bytes)
    : files_(files), stream_(stream), part_bytes_(std::move(part_bytes)) {
  ROPETEAM_CHECK(CheckStream(stream).ok() && part_bytes_.size() == files.size());
  for (uint32_t i = 0; i < files.size(); ++i) {
    ROPETEAM_CHECK(part_bytes_[i] != 0 || files[i].bytes == 0);
    if (files[i].ranges.size() == 1) single_.push_back(i);
    if (files[i].ranges.size() > 1) several_.push_back(i);
  }
  std::sort(single_.begin(), single_.end(), [&](uint32_t a, uint32_t b) {
    return files_[a].ranges[0].stream_offset < files_[b].ranges[0].stream_offset;
  });
}

uint32_t PartChecksums::part_count(size_t file) const {
  const uint64_t bytes = files_[file].bytes;
  return bytes == 0 ? 1 : static_cast<uint32_t>((bytes - 1) / part_bytes_[file] + 1);
}

uint64_t PartChecksums::PartEnd(size_t file, uint32_t part) const {
  const uint64_t begin = PartBegin(file, part);
  const uint64_t bytes = files_[file].bytes;
  return bytes - begin < part_bytes_[file] ? bytes : begin + part_bytes_[file];
}

void PartChecksums::AddSlices(uint32_t file, uint64_t begin, uint64_t end, std::vector<Slice>* slices) const {
  const std::vector<FileRange>& ranges = files_[file].ranges;
  auto range = std::partition_point(ranges.begin(), ranges.end(), [&](const FileRange& candidate) {
    return candidate.stream_offset + candidate.length <= begin;
  });
  for (; range != ranges.end() && range->stream_offset < end; ++range) {
    uint64_t at = std::max(begin, range->stream_offset);
    const uint64_t range_end = std::min(end, range->stream_offset + range->length);
    while (at < range_end) {
      const uint64_t in_file = range->file_offset + (at - range->stream_offset);
      const uint64_t part = in_file / part_bytes_[file];
      const uint64_t part_left = part_bytes_[file] - in_file % part_bytes_[file];
      const uint64_t length = std::min(range_end - at, part_left);
      slices->push_back({at, length, file, static_cast<uint32_t>(part)});
      at += length;
    }
  }
}

std::vector<PartChecksums::Slice> PartChecksums::Slices(uint64_t begin, uint64_t end) const {
  std::vector<Slice> slices;
  for (const uint32_t file : several_) AddSlices(file, begin, end, &slices);
  auto single = std::partition_point(single_.begin(), single_.end(), [&](uint32_t candidate) {
    const FileRange& range = files_[candidate].ranges[0];
    return range.stream_offset + range.length <= begin;
  });
  for (; single != single_.end() && files_[*single].ranges[0].stream_offset < end; ++single)
    AddSlices(*single, begin, end, &slices);
  const auto before = [](const Slice& a, const Slice& b) { return a.begin < b.begin; };
  if (!std::is_sorted(slices.begin(), slices.end(), before)) std::sort(slices.begin(), slices.end(), before);
  return slices;
}

Result<const std::vector<PartChecksums::Run>*> PartChecksums::Runs(uint64_t chunk,
                                                                   std::optional<uint64_t>* bad_chunk) {
  if (const auto found = runs_.find(chunk); found != runs_.end()) return &found->second;
  const std::span<const std::byte> bytes = stream_.chunk(chunk);
  const uint64_t offset = chunk * stream_.chunk_bytes;
  ROPETEAM_CHECK(bytes.size() == stream_.ChunkLength(chunk));

  std::vector<Run> runs;
  std::unordered_map<uint32_t, size_t> last;  // by file: a file's parts follow one another in the stream
  uint32_t chunk_crc = 0;
  uint64_t at = 0;  // in the chunk
  Status zeros;     // returned only if the chunk's checksum is right
  const auto skip_to = [&](uint64_t next) {
    if (next == at) return;
    if (zeros.ok()) zeros = CheckPadding(bytes, offset, at);
    chunk_crc = Crc32c(bytes.data() + at, next - at, chunk_crc);
    at = next;
  };
  for (const Slice& slice : Slices(offset, offset + bytes.size())) {
    skip_to(slice.begin - offset);
    const auto [found, first] = last.try_emplace(slice.file, runs.size());
    if (first || runs[found->second].part != slice.part) {
      found->second = runs.size();
      runs.push_back({slice.file, slice.part, 0, 0});
    }
    Run& run = runs[found->second];
    const std::byte* data = bytes.data() + at;
    if (slice.length < kCombineBytesMin) {
      chunk_crc = Crc32c(data, slice.length, chunk_crc);
      run.crc = Crc32c(data, slice.length, run.crc);
    } else {
      const uint32_t crc = Crc32c(data, slice.length);
      chunk_crc = Crc32cCombine(chunk_crc, crc, slice.length);
      run.crc = Crc32cCombine(run.crc, crc, slice.length);
    }
    run.bytes += slice.length;
    at += slice.length;
  }
  skip_to(bytes.size());
  if (chunk_crc != stream_.crcs[chunk]) return ChunkMismatch(stream_, chunk, chunk_crc, bad_chunk);
  if (!zeros.ok()) return zeros;
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return std::tie(a.file, a.part) < std::tie(b.file, b.part); });
  return &runs_.emplace(chunk, std::move(runs)).first->second;
}

Result<uint32_t> PartChecksums::Part(size_t file, uint32_t part, std::optional<uint64_t>* bad_chunk) {
  ROPETEAM_CHECK(file < files_.size() && part < part_count(file));
  const FilePlan& plan = files_[file];
  uint64_t at = PartBegin(file, part);
  const uint64_t end = PartEnd(file, part);
  uint32_t crc = 0;
  if (at < plan.head.size()) {
    const uint64_t length = std::min<uint64_t>(end, plan.head.size()) - at;
    crc = Crc32c(plan.head.data() + at, length);
    at += length;
  }
  size_t i = FindRange(plan.ranges, at);
  while (at < end) {
    while (plan.ranges[i].file_offset + plan.ranges[i].length <= at) ++i;
    const FileRange& range = plan.ranges[i];
    const uint64_t in_stream = range.stream_offset + (at - range.file_offset);
    const uint64_t chunk = in_stream / stream_.chunk_bytes;
    const uint64_t left = std::min(end, range.file_offset + range.length) - at;
    if (in_stream % stream_.chunk_bytes == 0 && left >= stream_.ChunkLength(chunk)) {
      crc = Crc32cCombine(crc, stream_.crcs[chunk], stream_.ChunkLength(chunk));
      at += stream_.ChunkLength(chunk);
      continue;
    }
    const Result<const std::vector<Run>*> runs = Runs(chunk, bad_chunk);
    if (!runs.ok()) return runs.status();
    const auto run = std::partition_point((*runs)->begin(), (*runs)->end(), [&](const Run& candidate) {
      return candidate.file < file || (candidate.file == file && candidate.part < part);
    });
    ROPETEAM_CHECK(run != (*runs)->end() && run->file == file && run->part == part);
    crc = Crc32cCombine(crc, run->crc, run->bytes);
    at += run->bytes;
  }
  ROPETEAM_CHECK(at == end);
  return crc;
}

Result<uint32_t> PartChecksums::File(size_t file, std::optional<uint64_t>* bad_chunk) {
  uint32_t crc = 0;
  for (uint32_t part = 0; part < part_count(file); ++part) {
    const Result<uint32_t> of_part = Part(file, part, bad_chunk);
    if (!of_part.ok()) return of_part;
    crc = Crc32cCombine(crc, *of_part, PartEnd(file, part) - PartBegin(file, part));
  }
  return crc;
}

}  // namespace ropeteam::storage
