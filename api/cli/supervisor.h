// SPDX-License-Identifier: Apache-2.0
//
// Two children: ropeteamd, kept alive for as long as the command lives, and killed when it hangs; and the command, whose
// end is the end. Signals go to the command. The daemon ignores a SIGTERM that does not come from this process: it must
// stay while the command ends, also if a launcher signals all processes. Should this process be killed, both children get
// SIGTERM from the kernel.
//
// One thread; Linux only (pdeathsig, signal information).

#ifndef ROPETEAM_API_CLI_SUPERVISOR_H_
#define ROPETEAM_API_CLI_SUPERVISOR_H_

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api/cli/hang_watch.h"
#include "api/cli/storage_progress.h"
#include "api/client/unique_fd.h"
#include "core/base/status.h"
#include "membership/credentials/secrets.h"

namespace ropeteam::cli {

class Supervisor {
 public:
  struct Config {
    std::vector<std::string> daemon;   // program and arguments, without --ready-fd
    std::vector<std::string> restart;  // the same for restarts of the daemon
    std::vector<std::string> command;
    Secrets secrets;  // in the daemon's environment, and in no other one
    uint32_t ready_timeout_s = 0;
    uint32_t hang_timeout_s = 0;  // a daemon that has hung for so long is killed, and started again; 0: never
    bool quiet = false;           // no progress of the start
    std::string log_file;         // the daemon's, for its last lines when it fails
  };

  explicit Supervisor(Config config);
  ~Supervisor();  // stops the daemon

  // Starts the daemon and waits for its ready line. kDeadlineExceeded, kUnavailable (it ended: see
  // daemon_exit_code()), kAborted (a signal asked to end), kIo.
  Status StartDaemon();
  int daemon_exit_code() const { return daemon_exit_code_; }
  int ending_signal() const { return ending_signal_; }
  // From the ready line.
  const std::string& socket() const { return socket_; }

  // Runs the command with these variables added and returns its exit code, 128 + n for signal n; 126 and 127
  // as shells do when it cannot be started.
  int RunCommand(const std::map<std::string, std::string>& environment);

  // SIGTERM, and SIGKILL when that has not helped. Idempotent.
  void StopDaemon();

  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

 private:
  Status SpawnDaemon(const std::vector<std::string>& program);
  Status WaitReady();
  void ReadDaemon();                     // what it has said meanwhile
  void OnLine(const std::string& line);  // one line of it: node/supervisor_link.h lists them
  void OnProgress(const std::string& line);
  void WatchDaemon();  // once a tick of HangWatch
  void Reap();         // takes the ended children in
  void OnDaemonEnded(int status);
  void OnSignal(const siginfo_t& info);
  // Waits for the next signal, at most until `deadline_us` of the monotonic clock (UINT64_MAX: for ever).
  bool NextSignal(uint64_t deadline_us, siginfo_t* info) const;
  void PrintLogTail() const;

  const Config config_;
  sigset_t handled_{};
  sigset_t original_{};
  pid_t daemon_ = 0;
  pid_t command_ = 0;
  bool command_ended_ = false;
  int command_status_ = 0;
  int daemon_exit_code_ = 0;
  int ending_signal_ = 0;
  bool terminated_ = false;  // the command was told to end
  std::string socket_;
  client::UniqueFd said_;  // the daemon's lines come from here
  std::string unfinished_;
  std::string ready_line_;
  std::unique_ptr<Progress> progress_;
  uint64_t progressed_ = 0;
  HangWatch hang_watch_;
  uint64_t watch_at_us_ = UINT64_MAX;
  uint64_t daemon_started_us_ = 0;
  uint64_t restart_at_us_ = UINT64_MAX;
  uint64_t backoff_us_ = 0;
  uint64_t draining_until_us_ = 0;  // the daemon leaves the job until then; 0: it stays
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_SUPERVISOR_H_
