// SPDX-License-Identifier: Apache-2.0
//
// How far a command on storage is: a bar with bytes, rate and time left where standard error is a terminal, elsewhere a
// plain line every ten seconds and one at the end. Standard output is left to the command's answer. What is counted in
// other units than bytes is preparation: its bar goes when it is done, and it has no line at the end.

#ifndef ROPETEAM_API_CLI_STORAGE_PROGRESS_H_
#define ROPETEAM_API_CLI_STORAGE_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace ropeteam::cli {

class Progress {
 public:
  // `what` begins every line. `unit`: "steps", or empty for bytes.
  Progress(std::string what, uint64_t total, std::string unit = "");
  ~Progress();  // as Finish()

  void Add(uint64_t done);  // any thread
  // The last line, once. Call it before anything else is printed. Nothing where nothing was to be done.
  void Finish();

  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  std::string Amount(uint64_t amount) const;
  std::string Line(double seconds, size_t columns) const;
  void Print(const std::string& line, bool last) const;

  const std::string what_;
  const uint64_t total_;
  const std::string unit_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point begin_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point next_;  // guarded by mutex_
  uint64_t done_ = 0;                           // guarded by mutex_
  bool finished_ = false;                       // guarded by mutex_
};

// "12 s", "3 min 05 s", "2 h 07 min".
std::string DurationText(double seconds);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_STORAGE_PROGRESS_H_
