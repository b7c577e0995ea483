// SPDX-License-Identifier: Apache-2.0
//
// A child process that a measurement needs: a target, or a tool of the fabric. Child's destructor kills it.
// Not thread-safe.

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

  // Looks for `command[0]` on PATH. Its standard input and output are pipes to this process. Its standard
  // error is this process's, or with `errors_too` the same pipe as its output. kUnsupported if it cannot be
  // started.
  Status Start(const std::vector<std::string>& command, bool errors_too = false);
  // One line without its line break; empty if the output has ended.
  std::string ReadLine();
  // Everything up to the end of the output.
  std::string ReadAll();
  bool Write(const std::string& text);
  // Waits for the process to end and returns its exit code; 128 + signal if a signal killed it.
  int Wait();
  void Kill();
  void Terminate();  // sends SIGTERM
  pid_t pid() const { return pid_; }

 private:
  void CloseDescriptors();

  pid_t pid_ = -1;
  int commands_ = -1;
  int answers_ = -1;
  std::string ahead_;  // read from the pipe, not yet returned
};

// Processor time in seconds that all threads of the process have used; 0 if the process has ended.
double ProcessorSecondsOf(pid_t pid);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_CHILD_H_
