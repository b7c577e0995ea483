// SPDX-License-Identifier: Apache-2.0
//
// A process that a measurement needs beside itself: a target, or a tool of the fabric's own. It does not
// outlive this one's Child. Not thread-safe.

#ifndef ROPETEAM_BENCH_CHILD_H_
#define ROPETEAM_BENCH_CHILD_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::bench {

class Child {
 public:
  Child() = default;
  ~Child() { Kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // `command[0]` is looked for on PATH. Its standard input and output are ours, its standard error stays this
  // process's, or goes where its output goes. kUnsupported when there is no such program.
  Status Start(const std::vector<std::string>& command, bool errors_too = false);
  // One line without its end; empty when the output has ended.
  std::string ReadLine();
  // Everything up to the end of the output.
  std::string ReadAll();
  bool Write(const std::string& text);
  // The exit code, waiting for it; 128 + signal when it was killed.
  int Wait();
  void Kill();
  // Asks it to end with SIGTERM.
  void Terminate();
  pid_t pid() const { return pid_; }

 private:
  void CloseDescriptors();

  pid_t pid_ = -1;
  int commands_ = -1;
  int answers_ = -1;
  std::string ahead_;  // read and not yet handed out
};

// Seconds of processor time that the process has used, its threads together; 0 when it is gone.
double ProcessorSecondsOf(pid_t pid);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_CHILD_H_
