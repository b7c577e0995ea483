// SPDX-License-Identifier: Apache-2.0
#include "api/cli/hang_watch.h"

#include <fstream>
#include <sstream>
#include <utility>

namespace ropeteam::cli {

ThreadSample SampleMainThread(int pid) {
  const std::string id = std::to_string(pid);
  std::ifstream file("/proc/" + id + "/task/" + id + "/stat");
  std::string line;
  std::getline(file, line);
  // The program's name is in parentheses and may contain any character.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  ThreadSample sample;
  fields >> sample.state;
  constexpr int kFieldsBeforeUtime = 10;
  std::string skipped;
  for (int i = 0; i < kFieldsBeforeUtime; ++i) fields >> skipped;
  uint64_t user = 0;
  uint64_t system = 0;
  fields >> user >> system;
  sample.cpu_ticks = user + system;
  return sample;
}

void HangWatch::Starting() {
  starting_ = true;
  silent_ = 0;
}

void HangWatch::Alive() {
  starting_ = false;
  silent_ = 0;
}

bool HangWatch::Tick(uint64_t now_us, const ThreadSample& sample) {
  const bool late = now_us - std::exchange(ticked_at_us_, now_us) > 2 * kHangTickUs;
  const bool ran = std::exchange(cpu_ticks_, sample.cpu_ticks) != sample.cpu_ticks;
  const bool could_speak = sample.state == 'S' || (sample.state == 'R' && ran);
  if (!late && could_speak) ++silent_;
  // Greater, not equal: daemon and watcher each tick once a second, and may miss each other once.
  return limit_ != 0 && silent_ > limit_s();
}

}  // namespace ropeteam::cli
