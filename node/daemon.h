// SPDX-License-Identifier: Apache-2.0
//
// The daemon's process: the arena and membership, which exist as long as the process, the signals, and the current
// Node.

#ifndef ROPETEAM_NODE_DAEMON_H_
#define ROPETEAM_NODE_DAEMON_H_

#include <memory>
#include <string>

#include "core/base/status.h"
#include "membership/membership.h"
#include "node/arena_file.h"
#include "node/event_loop.h"
#include "node/metrics.h"
#include "node/node.h"
#include "node/options.h"
#include "node/supervisor_link.h"

namespace ropeteam {

class Daemon {
 public:
  explicit Daemon(Options options)
      : options_(std::move(options)), supervisor_(options_.ready_fd, options_.supervised) {}

  // Runs until SIGTERM or SIGINT (ok), or until it cannot continue: start-up failed, the job refused this node, or a
  // restart of its own failed. A signal before the daemon is ready ends the process at once; so does one a second or
  // more after the first signal. With --supervised, a SIGTERM counts only from the parent, or at its death: launchers
  // signal all processes, and the ranks save once more then. Once per process.
  Status Run();
  // Run() returned because the job refused this node. An immediate restart would not help, or would harm another node.
  bool refused() const { return refused_; }
  // Run() returned because this node was drained: DrainExitCode(). Otherwise 0.
  int drained() const { return drained_; }
  // Run() returned because no coordinator has answered within --join-timeout.
  bool alone() const { return alone_; }
  // Run() returned because an option that only the start can check is wrong.
  bool misused() const { return misused_; }
  // Run() returned, but a thread hangs in storage and still uses parts of this Daemon: end the process with _exit().
  bool hangs() const { return hangs_; }

 private:
  Status Start();
  Status MakeCredentials();
  Status UseCredentials(std::shared_ptr<const Credentials> credentials);
  Status StartMembership();
  Status ChooseCoordinator();
  Status NewNode();
  void EndNode();
  void OnTermination();
  // `within_us` 0: --notice-seconds.
  void BeginDrain(TimeUs within_us, const std::string& why);
  void OnDrained(const DrainReport& report);
  void OnRefused(const Status& status);
  Status StartTicking();
  void OnTick();
  void OnJoined();
  void TellReady();

  Options options_;
  // Declared first, so that the members that show it are destroyed before it.
  std::shared_ptr<const Credentials> credentials_;
  SupervisorLink supervisor_;
  EventLoop loop_;
  UniqueFd tick_;
  std::unique_ptr<ArenaFile> arena_;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<CoordinatorWatch> watch_;
  FabricChoice first_fabric_;  // opened before the arena, for the first Node
  std::unique_ptr<Node> node_;
  std::unique_ptr<MetricsServer> metrics_;
  Status end_;  // the reason why Run() returns
  bool refused_ = false;
  bool alone_ = false;
  bool misused_ = false;
  bool joined_ = false;  // a view had this node in it
  bool trouble_noted_ = false;
  TimeUs joining_since_ = 0;
  Contact contact_;  // the last contact
  bool hangs_ = false;
  std::unique_ptr<NoticeWatch> notices_;
  TimeUs drain_until_ = EventLoop::kNever;  // kNever: no drain has begun
  int drained_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_DAEMON_H_
