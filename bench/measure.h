// SPDX-License-Identifier: Apache-2.0
//
// For fair measurements: memory is touched before the clock starts, and a candidate and its baseline run in
// turns, so that a disturbance affects both. Not thread-safe.

#ifndef ROPETEAM_BENCH_MEASURE_H_
#define ROPETEAM_BENCH_MEASURE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/report.h"

namespace ropeteam::bench {

// Anonymous memory at a page boundary. Every page is touched, because a first touch would cost more than what
// is measured. Owns the mapping. Throws BenchError if the memory cannot be mapped.
class Buffer {
 public:
  // `seed` determines the bytes. With `huge_pages` the system is asked for huge pages; without it they are
  // refused, so that runs do not differ by chance.
  Buffer(size_t bytes, uint64_t seed, bool huge_pages);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  size_t bytes_;
  uint8_t* data_;
};

// Something to measure. `pass` runs it once and returns the figure in the unit of the row.
struct Candidate {
  std::string name;
  std::function<double()> pass;
};

// `runs` samples of every candidate by name. A round runs each candidate once; the first round is discarded.
// Each round begins with the next candidate, so that no candidate is always first.
std::map<std::string, Samples> MeasureInTurns(const std::vector<Candidate>& candidates, int runs);

// Seconds on a monotonic clock.
double SecondsNow();

// In GB/s of 10^9 bytes.
inline double Bandwidth(uint64_t bytes, double seconds) { return static_cast<double>(bytes) / seconds / 1e9; }

// A candidate whose figure is the bandwidth of `work` over `bytes`.
Candidate BandwidthOf(std::string name, size_t bytes, std::function<void()> work);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_MEASURE_H_
