// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "core/base/check.h"

namespace ropeteam::bench {
namespace {

std::string CpuModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string Kernel() {
  utsname name{};
  return uname(&name) == 0 ? name.release : "unknown";
}

std::string DateUtc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32];
  gmtime_r(&now, &parts);
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

template <typename... Values>
std::string Format(const char* format, Values... values) {
  char text[512];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

}  // namespace

double Median(Samples samples) {
  ROPETEAM_CHECK(!samples.empty());
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  return samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
}

double Ratio(const Samples& samples, const Samples& baseline) {
  ROPETEAM_CHECK(samples.size() == baseline.size());
  Samples ratios(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) ratios[i] = samples[i] / baseline[i];
  return Median(ratios);
}

std::string JsonLine(const Row& row) {
  const auto [min, max] = std::minmax_element(row.samples.begin(), row.samples.end());
  nlohmann::ordered_json line = {{"name", row.name},
                                 {"unit", row.unit},
                                 {"median", Median(row.samples)},
                                 {"min", *min},
                                 {"max", *max},
                                 {"runs", row.samples.size()},
                                 {"baseline_name", nullptr},
                                 {"baseline_median", nullptr},
                                 {"ratio", nullptr}};
  if (!row.baseline.empty()) {
    line["baseline_name"] = row.baseline_name;
    line["baseline_median"] = Median(row.baseline);
    line["ratio"] = Ratio(row.samples, row.baseline);
  }
  return line.dump();
}

std::string Header(const std::string& settings) {
  double load = 0;
  const bool load_known = getloadavg(&load, 1) == 1;
  return "cpu " + CpuModel() + ", cores " + std::to_string(std::thread::hardware_concurrency()) +
         ", kernel " + Kernel() + ", load " + (load_known ? Format("%.2f", load) : "unknown") + ", date " +
         DateUtc() + ", " + settings;
}

void Report::Add(const Row& row) {
  if (json_) {
    out_ << JsonLine(row) << std::endl;
    return;
  }
  if (!titles_printed_) {
    out_ << Format("%-34s %-7s %10s %10s %10s %5s  %10s %6s  %s", "name", "unit", "median", "min", "max",
                   "runs", "baseline", "ratio", "baseline name")
         << std::endl;
    titles_printed_ = true;
  }
  const auto [min, max] = std::minmax_element(row.samples.begin(), row.samples.end());
  std::string line = Format("%-34s %-7s %10.3f %10.3f %10.3f %5zu", row.name.c_str(), row.unit.c_str(),
                            Median(row.samples), *min, *max, row.samples.size());
  if (!row.baseline.empty()) {
    line += Format("  %10.3f %6.3f  %s", Median(row.baseline), Ratio(row.samples, row.baseline),
                   row.baseline_name.c_str());
  }
  out_ << line << std::endl;
}

}  // namespace ropeteam::bench
