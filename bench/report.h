// SPDX-License-Identifier: Apache-2.0
//
// Prints results: a table for people, or one JSON object per line for programs. A row is printed as soon as
// it is known. Not thread-safe.

#ifndef ROPETEAM_BENCH_REPORT_H_
#define ROPETEAM_BENCH_REPORT_H_

#include <iosfwd>
#include <string>
#include <vector>

namespace ropeteam::bench {

// One figure per pass, in the order of the passes.
using Samples = std::vector<double>;

struct Row {
  std::string name;  // "copy/fused_vs_memcpy"; names are stable because scripts use them
  std::string unit;  // of the samples and of the baseline's: "GB/s" (10^9), "ms", "count", …
  Samples samples;   // never empty
  // The baseline of the samples, measured in the same passes; both are empty if the row has no baseline.
  std::string baseline_name;
  Samples baseline;
};

// With an even number of samples, the mean of the middle two. `samples` is not empty.
double Median(Samples samples);

// The median of each pass's sample / baseline. This is robust: another process that uses half of the memory's
// bandwidth for a while slows both parts of a pass. The result may differ a little from the ratio of the two
// medians. Both have the same length and are not empty.
double Ratio(const Samples& samples, const Samples& baseline);

// {"name", "unit", "median", "min", "max", "runs", "baseline_name", "baseline_median", "ratio"} in this
// order; the last three are null if there is no baseline. No line break.
std::string JsonLine(const Row& row);

// "cpu …, cores …, kernel …, load …, date …" and the settings, in one line.
std::string Header(const std::string& settings);

class Report {
 public:
  // `out` must outlive the report.
  Report(std::ostream& out, bool json) : out_(out), json_(json) {}

  void Add(const Row& row);

 private:
  std::ostream& out_;
  const bool json_;
  bool titles_printed_ = false;
};

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_REPORT_H_
