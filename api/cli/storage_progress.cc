// SPDX-License-Identifier: Apache-2.0
#include "api/cli/storage_progress.h"
#include "core/base/sizes.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace ropeteam::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Five updates of the bar per second, so that a person sees it move. Lines go to log files, where one in ten
// seconds is enough.
constexpr std::chrono::milliseconds kBarInterval{200};
constexpr std::chrono::seconds kLineInterval{10};
constexpr size_t kColumnsDefault = 80;
constexpr size_t kBarColumnsMax = 40;
constexpr size_t kBarColumnsMin = 10;  // with fewer columns there is no bar

size_t TerminalColumns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kColumnsDefault;
}

}  // namespace

std::string DurationText(double seconds) {
  const auto whole = static_cast<uint64_t>(std::min(seconds + 0.5, 1e9));
  char text[64];
  if (whole < 60)
    std::snprintf(text, sizeof(text), "%llu s", static_cast<unsigned long long>(whole));
  else if (whole < 3600)
    std::snprintf(text, sizeof(text), "%llu min %02llu s", static_cast<unsigned long long>(whole / 60),
                  static_cast<unsigned long long>(whole % 60));
  else
    std::snprintf(text, sizeof(text), "%llu h %02llu min", static_cast<unsigned long long>(whole / 3600),
                  static_cast<unsigned long long>(whole % 3600 / 60));
  return text;
}

Progress::Progress(std::string what, uint64_t total, std::string unit)
    : what_(std::move(what)),
      total_(total),
      unit_(std::move(unit)),
      terminal_(isatty(STDERR_FILENO) != 0),
      begin_(Clock::now()),
      next_(begin_ + (terminal_ ? Clock::duration(kBarInterval) : Clock::duration(kLineInterval))) {}

Progress::~Progress() { Finish(); }

std::string Progress::Amount(uint64_t amount) const {
  return unit_.empty() ? FormatSize(amount) : std::to_string(amount);
}

std::string Progress::Line(double seconds, size_t columns) const {
  const double rate = seconds > 0 ? static_cast<double>(done_) / seconds : 0;
  std::string text = Amount(done_) + " of " + Amount(total_) + (unit_.empty() ? "" : " " + unit_);
  if (unit_.empty()) text += ", " + FormatSize(rate) + "/s";
  if (done_ < total_ && rate > 0)
    text += ", " + DurationText(static_cast<double>(total_ - done_) / rate) + " left";
  if (done_ >= total_) text += ", " + DurationText(seconds);
  const size_t used = what_.size() + text.size() + 6;  // blanks, brackets, and one free column at the end
  if (columns < used + kBarColumnsMin) return what_ + ": " + text;
  const size_t width = std::min(columns - used, kBarColumnsMax);
  const double part = total_ == 0 ? 1 : static_cast<double>(done_) / static_cast<double>(total_);
  const auto full = std::min(width, static_cast<size_t>(part * static_cast<double>(width)));
  return what_ + " [" + std::string(full, '#') + std::string(width - full, '.') + "] " + text;
}

void Progress::Print(const std::string& line, bool last) const {
  if (terminal_)
    std::fprintf(stderr, "\r%s\x1b[K%s", line.c_str(), last ? "\n" : "");
  else
    std::fprintf(stderr, "%s\n", line.c_str());
  std::fflush(stderr);
}

void Progress::Add(uint64_t done) {
  const std::lock_guard lock(mutex_);
  done_ += done;
  const Clock::time_point now = Clock::now();
  if (now < next_ || finished_) return;
  next_ = now + (terminal_ ? Clock::duration(kBarInterval) : Clock::duration(kLineInterval));
  const std::chrono::duration<double> since = now - begin_;
  Print(Line(since.count(), terminal_ ? TerminalColumns() : 0), false);
}

void Progress::Finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  if (!unit_.empty() && terminal_) std::fputs("\r\x1b[K", stderr);
  if (total_ == 0 || !unit_.empty()) return;
  const std::chrono::duration<double> since = Clock::now() - begin_;
  Print(Line(since.count(), terminal_ ? TerminalColumns() : 0), true);
}

}  // namespace ropeteam::cli
