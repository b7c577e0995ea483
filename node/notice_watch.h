// SPDX-License-Identifier: Apache-2.0
//
// Watches for the notice that this machine will be reclaimed: an interruption of a spot instance, maintenance, or a
// file or command of the operator's.
//
//   file:PATH    the file exists
//   cmd:COMMAND  `sh -c COMMAND` ends with 0; its first line of output is the reason
//   aws          spot/instance-action or events/recommendations/rebalance is there, by IMDSv2
//                (docs.aws.amazon.com: "Spot Instance interruption notices", "rebalance recommendations")
//   gcp          instance/preempted is TRUE, or instance/maintenance-event is TERMINATE_ON_HOST_MAINTENANCE
//                (cloud.google.com: "Preemptible VM instances", "Monitor and plan for a host maintenance event")
//   azure        a scheduled event of kind Preempt, Terminate, Redeploy or Reboot names this machine
//                (learn.microsoft.com: "Azure Metadata Service: Scheduled Events")

#ifndef ROPETEAM_NODE_NOTICE_WATCH_H_
#define ROPETEAM_NODE_NOTICE_WATCH_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/base/status.h"

namespace ropeteam {

struct NoticeSource {
  enum class Kind { kNone, kFile, kCommand, kAws, kGcp, kAzure };
  Kind kind = Kind::kNone;
  std::string what;      // the path, or the command
  std::string endpoint;  // of the instance's metadata, without a slash at the end
};

// `text` and `endpoint` of --notice and --notice-endpoint; empty: not given. kInvalidArgument names the option.
Status ParseNotice(const std::string& text, const std::string& endpoint, NoticeSource* source);

// One look after another. One thread at a time, but for Stop().
class NoticeReader {
 public:
  explicit NoticeReader(NoticeSource source);
  ~NoticeReader();
  // The reason why the machine will be reclaimed; no value: it will not. A status: the source could not be asked. Takes
  // some seconds at most.
  Result<std::optional<std::string>> Look();
  void Stop();  // a Look() that runs ends within about a second; any thread

 private:
  class Metadata;
  Result<std::optional<std::string>> RunCommand();

  const NoticeSource source_;
  std::unique_ptr<Metadata> metadata_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;  // guarded by mutex_
};

// A thread that looks every kLookEvery until there is a notice.
class NoticeWatch {
 public:
  // AWS gives two minutes and recommends to look every 5 s, Google and Azure give 30 s.
  static constexpr std::chrono::milliseconds kLookEvery{1000};

  // `on_notice` is called once, from the watch's thread.
  NoticeWatch(NoticeSource source, std::function<void(const std::string& why)> on_notice);
  ~NoticeWatch();  // no call comes after it; takes about a second

 private:
  void Run();

  NoticeReader reader_;
  const std::function<void(const std::string&)> on_notice_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;  // guarded by mutex_
  std::thread thread_;    // the last member: it uses the others
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_NOTICE_WATCH_H_
