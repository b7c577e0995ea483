// SPDX-License-Identifier: Apache-2.0
//
// A lock on storage: of all clusters with the same job name and URL, only one node writes and deletes there. Without it
// two allocations of one job would delete each other's steps. Reading needs no lock.
//
//     JOB/ropeteam-lock/0000000007.json    epoch 7: the holder of the lock, and a counter
//
// The creator of the file with the highest epoch is the holder. An epoch is created only by Put(kIfAbsent), so one of
// several creators succeeds. Only its creator rewrites it, with a higher counter every kRenewEvery. No clock is
// compared with another machine's, and no file time is used: other nodes watch by their own clock whether the file
// changes.
//
//     the file of the highest epoch       a node that wants to hold
//     none                                creates epoch 1
//     of this process, of before its      creates the next epoch at once
//       mount was lost
//     of a process of this machine that   creates the next epoch at once
//       is gone
//     did not change for kDeadAfter       creates the next epoch
//     changed                             kAlreadyExists: the holder is alive
//     neither is known yet                kUnavailable: ask again
//
// A holder that finds a higher epoch has lost the lock. It may lose the lock between a check and the next write; no
// lock on a store can prevent that. A manifest written then has its own incarnation and replaces nothing.
//
// The holder's text "EPOCH:TOKEN" proves to the job's other nodes that they see the same store: the file of that epoch
// has that token. A directory that is not mounted, or another one, does not have it.
//
// On a store without conditional puts, the file is written by a plain put, left alone for kDeadAfter, and then read:
// the last writer is the holder. That protects from allocations that start minutes apart, but not from all that start
// together.

#ifndef ROPETEAM_STORAGE_LOCK_JOB_LOCK_H_
#define ROPETEAM_STORAGE_LOCK_JOB_LOCK_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/status.h"
#include "storage/lock/process_mark.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// Thread-safe; calls wait for one another. Every call of the sink has kCallTimeout.
class JobLock {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Each renewal is three requests to the store.
  static constexpr std::chrono::seconds kRenewEvery{5};
  // Three missed renewals: one slow request does not make the holder dead.
  static constexpr std::chrono::seconds kDeadAfter{15};
  static constexpr std::chrono::seconds kCallTimeout{10};
  // Of Leave(), at the end of a process.
  static constexpr std::chrono::seconds kLeaveTimeout{2};

  struct Config {
    std::shared_ptr<Sink> sink;
    std::string job;
    std::string node;        // of this process, for messages of other processes
    bool take_over = false;  // from a live holder, until this lock was held for the first time
    // Tests pass their own clock.
    std::function<Time()> now = [] { return std::chrono::steady_clock::now(); };
    ProcessMark process = OwnProcess();
    bool renew_by_itself =
        true;  // on a thread, from the first Hold() on; otherwise the owner of this object calls Renew()
  };

  explicit JobLock(Config config);
  ~JobLock();  // waits for the thread: stop the sink before

  // kOk: this process now holds the lock, according to the store. kAlreadyExists: another process holds it and is
  // alive, or has taken it over from this one, which cannot hold it again before Release(); the message names that
  // process and says what to do. kUnavailable: it is not known yet whether the other process is alive. Other codes come
  // from the sink: a store that cannot be written cannot be locked. The sink's kUnavailable becomes kLinkFailed: this
  // process does not reach the store, and nothing is known of a holder.
  Status Hold();
  // As Hold(), but kUnavailable if the lock is not held. kOk before the first Hold(): the lock is not used.
  Status Check();
  // The proof of the lock that this process holds. kUnavailable: it does not hold it.
  Result<std::string> Proof();
  // Whether this process sees the lock file that the proof is of. Changes no state, waits for no other call and needs no
  // Hold(). kNotFound: it does not; the message names the place. kInvalidArgument: this is not a proof. kUnavailable: its
  // holder is renewing the file. This and other codes, which come from the sink, leave the question open.
  Status Prove(std::string_view proof) const;
  // Deletes this process's own file, so that others need not wait. kOk also if another process holds the lock.
  Status Release();
  // Release() within kLeaveTimeout, and not at all while another call runs.
  void Leave();
  // A renewal by the holder, or a check by a process that wants the lock.
  void Renew();

  JobLock(const JobLock&) = delete;
  JobLock& operator=(const JobLock&) = delete;

 private:
  struct Holder {  // the content of a lock file; empty if it is not one
    std::string token, host, node, since;
    ProcessMark process;
    std::string Text() const;
  };
  struct Seen {
    uint64_t epoch = 0;  // the highest; 0: none
    std::string text;
    Holder holder;
    std::vector<uint64_t> lower;
  };
  Result<Seen> Look(Deadline deadline);
  // The file's text; empty: it is too short, so no node wrote it.
  Result<std::string> ReadFile(uint64_t epoch, Deadline deadline) const;
  // kUnavailable: the file was not there when it was read, but is there again, or is just being written.
  Status NotBeingRenewed(const std::string& path) const;
  static Holder ParseHolder(const std::string& text);
  Status HoldLocked();
  Status Keep(const Seen& seen);
  Status Lose(const Seen& seen);
  // kOk: the next epoch may be created.
  Status Judge(const Seen& seen);
  Status Claim(uint64_t epoch);
  Status ReleaseLocked(std::chrono::seconds timeout);
  std::string PathOf(uint64_t epoch) const;
  std::string Content() const;
  bool IsOurs(const Seen& seen) const { return seen.holder.token == token_; }
  // Our file with an earlier token: while its store was not mounted, this process has drawn another one.
  bool IsOfThisProcess(const Seen& seen) const {
    return !config_.process.boot.empty() && seen.holder.process == config_.process;
  }
  static Deadline In(std::chrono::seconds timeout) { return std::chrono::steady_clock::now() + timeout; }
  void Run();

  const Config config_;

  std::mutex mutex_;    // held over calls of the sink; guards all that follows but the thread's own
  std::string token_;   // random: tells this process's files from all others
  bool used_ = false;   // Hold() was called
  bool asked_ = false;  // it is wanted: not released, not lost
  bool held_ = false;
  uint64_t epoch_ = 0;  // held
  Status lost_;         // why it is not held any more; kOk: it was not lost
  bool take_over_;
  std::string since_;
  uint64_t renewed_ = 0;
  bool weak_told_ = false;
  bool failure_told_ = false;    // of a renewal, since the last one that succeeded
  std::optional<Time> sure_at_;  // a plain put has not been replaced until then
  // Of another holder's file, while it is watched.
  uint64_t watched_epoch_ = 0;  // 0: nothing has been seen, or the last look failed
  std::string watched_text_;
  Time seen_at_, unchanged_since_;
  bool alive_ = false;  // it has changed while it was watched

  std::mutex thread_mutex_;
  std::condition_variable wake_;
  bool stop_ = false;  // guarded by thread_mutex_
  std::thread thread_;
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_LOCK_JOB_LOCK_H_
