// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "bench/command.h"

namespace ropeteam::bench {

Buffer::Buffer(size_t bytes, uint64_t seed, bool huge_pages) : bytes_(bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw BenchError("map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  data_ = static_cast<uint8_t*>(memory);
  // The result is ignored: a system without huge pages gives small pages, as its users get.
  static_cast<void>(madvise(memory, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
  // xorshift64: fast, and its bytes cannot be compressed or deduplicated.
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (size_t i = 0; i < bytes; i += sizeof(state)) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(data_ + i, &state, bytes - i < sizeof(state) ? bytes - i : sizeof(state));
  }
}

Buffer::~Buffer() { munmap(data_, bytes_); }

std::map<std::string, Samples> MeasureInTurns(const std::vector<Candidate>& candidates, int runs) {
  std::map<std::string, Samples> samples;
  for (int round = 0; round <= runs; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      const Candidate& candidate = candidates[(i + static_cast<size_t>(round)) % candidates.size()];
      const double figure = candidate.pass();
      if (round > 0) samples[candidate.name].push_back(figure);
    }
  }
  return samples;
}

double SecondsNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Candidate BandwidthOf(std::string name, size_t bytes, std::function<void()> work) {
  return {std::move(name), [bytes, work = std::move(work)] {
            const double begin = SecondsNow();
            work();
            return Bandwidth(bytes, SecondsNow() - begin);
          }};
}

}  // namespace ropeteam::bench
