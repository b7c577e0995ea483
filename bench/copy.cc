// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench copy: the cost of a save in the rank, where one pass copies into the arena and computes the
// CRC32C. Its baselines are libc's memcpy, memcpy followed by a CRC, and a copy around the cache without a
// CRC. All of these use one thread. The same pass is then measured with as many threads as a rank here would
// use.

#include <isa-l.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api/client/copy_team.h"
#include "api/client/environment.h"
#include "bench/command.h"
#include "bench/measure.h"
#include "core/base/checksum.h"

namespace ropeteam::bench {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct CopyOptions {
  // Much larger than any cache, so that the figures are those of the memory.
  size_t bytes = 256 * kMiB;
  // A save fills one chunk after the other, so memcpy would also be called once per chunk.
  size_t chunk_bytes = 4 * kMiB;
  bool huge_pages = false;
  uint32_t threads = 0;  // 0: as many as a rank uses
};

// Keeps the compiler from removing a checksum that is not used.
volatile uint32_t checksum_sink;

uint32_t IsalCrc32c(const uint8_t* data, size_t length) {
  constexpr size_t kPieceBytes = size_t{1} << 30;  // ISA-L takes the length as an int
  uint32_t raw = ~uint32_t{0};
  for (size_t done = 0; done < length; done += kPieceBytes) {
    const size_t piece = std::min(kPieceBytes, length - done);
    raw = crc32_iscsi(const_cast<uint8_t*>(data) + done, static_cast<int>(piece), raw);
  }
  return ~raw;
}

// Copies as a save does.
uint32_t CopyByTeam(client::CopyTeam& team, uint8_t* to, const uint8_t* from, size_t bytes) {
  const ropeteam_part_t part{from, bytes, nullptr, 0};
  client::CopyTeam::Turn turn(&team, {&part, 1}, bytes);
  if (!turn.taken()) return CopyCrc32c(to, from, bytes);
  uint32_t crc = 0;
  size_t handed_out = 0;
  for (size_t taken = 0; taken < bytes;) {
    while (turn.HasRoom()) {
      handed_out += turn.HandOut(reinterpret_cast<std::byte*>(to) + handed_out, bytes - handed_out, true);
    }
    const client::CopyTeam::Piece piece = turn.Take();
    crc = Crc32cCombine(crc, piece.crc, piece.bytes);
    taken += piece.bytes;
  }
  return crc;
}

// Checks that every candidate copies correctly, before anything is measured.
void CheckResults(client::CopyTeam& team, uint8_t* to, const uint8_t* from, size_t bytes) {
  const uint32_t expected = IsalCrc32c(from, bytes);
  if (Crc32c(from, bytes) != expected) throw BenchError("Crc32c differs from ISA-L's");
  std::memset(to, 0, bytes);
  if (CopyCrc32c(to, from, bytes) != expected) throw BenchError("CopyCrc32c differs from ISA-L's CRC");
  if (std::memcmp(to, from, bytes) != 0) throw BenchError("CopyCrc32c copied other bytes");
  std::memset(to, 0, bytes);
  if (CopyByTeam(team, to, from, bytes) != expected || std::memcmp(to, from, bytes) != 0)
    throw BenchError("a copy with several threads made other bytes, or another CRC than ISA-L's");
  std::memset(to, 0, bytes);
  CopyNonTemporal(to, from, bytes);
  if (std::memcmp(to, from, bytes) != 0) throw BenchError("CopyNonTemporal copied other bytes");
}

std::vector<Candidate> Candidates(client::CopyTeam& team, uint8_t* to, const uint8_t* from,
                                  const CopyOptions& options) {
  const size_t bytes = options.bytes;
  const size_t chunk = options.chunk_bytes;
  const auto in_chunks = [=](auto copy) {
    for (size_t at = 0; at < bytes; at += chunk) copy(to + at, from + at, std::min(chunk, bytes - at));
  };
  return {
      BandwidthOf("memcpy", bytes, [=] { std::memcpy(to, from, bytes); }),
      BandwidthOf("memcpy_by_chunk", bytes, [=] { in_chunks([](auto... is) { std::memcpy(is...); }); }),
      BandwidthOf("nontemporal", bytes, [=] { CopyNonTemporal(to, from, bytes); }),
      BandwidthOf("crc32c", bytes, [=] { checksum_sink = Crc32c(from, bytes); }),
      BandwidthOf("crc32c_isal", bytes, [=] { checksum_sink = IsalCrc32c(from, bytes); }),
      BandwidthOf("memcpy_then_crc32c", bytes,
                  [=] {
                    std::memcpy(to, from, bytes);
                    checksum_sink = Crc32c(from, bytes);
                  }),
      BandwidthOf("memcpy_then_crc32c_isal", bytes,
                  [=] {
                    std::memcpy(to, from, bytes);
                    checksum_sink = IsalCrc32c(from, bytes);
                  }),
      BandwidthOf("fused", bytes, [=] { checksum_sink = CopyCrc32c(to, from, bytes); }),
      BandwidthOf("fused_by_chunk", bytes,
                  [=] { in_chunks([](auto... is) { checksum_sink = CopyCrc32c(is...); }); }),
      BandwidthOf("fused_by_team", bytes, [=, &team] { checksum_sink = CopyByTeam(team, to, from, bytes); }),
  };
}

void MeasureCopy(Bench& bench, const CopyOptions& options) {
  if (options.bytes == 0 || options.chunk_bytes == 0)
    throw CLI::ValidationError(options.bytes == 0 ? "--size" : "--chunk", "0 bytes cannot be measured");
  const Result<uint32_t> as_a_rank = client::CopyThreadsFromEnvironment();
  if (!as_a_rank.ok()) throw BenchError(as_a_rank.status().ToString());
  client::CopyTeam team(options.threads != 0 ? options.threads : *as_a_rank);
  Report& report = bench.Start(
      "copy of " + std::to_string(options.bytes) + " bytes, chunk " + std::to_string(options.chunk_bytes) +
      ", threads " + std::to_string(team.threads()) + ", runs " + std::to_string(bench.runs) +
      ", huge pages " + (options.huge_pages ? "asked for" : "refused") + ", kernel " + ChecksumKernelName());
  const Buffer from(options.bytes, 1, options.huge_pages);
  const Buffer to(options.bytes, 2, options.huge_pages);
  CheckResults(team, to.data(), from.data(), options.bytes);
  const std::vector<Candidate> candidates = Candidates(team, to.data(), from.data(), options);
  std::map<std::string, Samples> samples = MeasureInTurns(candidates, bench.runs);
  for (const Candidate& candidate : candidates)
    report.Add({"copy/" + candidate.name, "GB/s", samples[candidate.name], "", {}});

  const auto compare = [&](const std::string& name, const std::string& what, const std::string& baseline) {
    report.Add({"copy/" + name, "GB/s", samples[what], baseline, samples[baseline]});
  };
  compare("fused_vs_memcpy", "fused", "memcpy");
  compare("fused_vs_memcpy_by_chunk", "fused_by_chunk", "memcpy_by_chunk");
  // The baseline is the faster of our CRC and ISA-L's: a slow baseline would flatter the fused copy.
  const bool own_is_faster =
      Median(samples["memcpy_then_crc32c"]) > Median(samples["memcpy_then_crc32c_isal"]);
  compare("fused_vs_memcpy_then_crc", "fused",
          own_is_faster ? "memcpy_then_crc32c" : "memcpy_then_crc32c_isal");
  compare("fused_vs_memcpy_then_crc_isal", "fused", "memcpy_then_crc32c_isal");
  compare("fused_vs_nontemporal", "fused", "nontemporal");
  compare("fused_by_team_vs_fused", "fused_by_team", "fused");
  compare("crc32c_vs_isal", "crc32c", "crc32c_isal");
}

}  // namespace

void AddCopyCommand(CLI::App& app, Bench& bench) {
  const auto options = std::make_shared<CopyOptions>();
  CLI::App* command = app.add_subcommand("copy", "the copy into the arena with its checksum");
  command->add_option("--size", options->bytes, "bytes to copy, such as 256MiB")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("256MiB");
  command->add_option("--chunk", options->chunk_bytes, "bytes per call in the rows by_chunk")
      ->transform(CLI::AsSizeValue(false))
      ->default_str("4MiB");
  command
      ->add_option("--threads", options->threads,
                   "of the row fused_by_team; without it as many as a rank takes")
      ->check(CLI::Range(1u, client::kCopyThreadsMax));
  command->add_flag("--huge-pages", options->huge_pages, "ask for huge pages; without it they are refused");
  command->callback([options, &bench] { MeasureCopy(bench, *options); });
}

}  // namespace ropeteam::bench
