// SPDX-License-Identifier: Apache-2.0
//
// A Client acts as libropeteam for one rank: it talks to its host's daemon as the library does, writes a
// save's bytes into the granted chunks, and checks what it reads. Every call answers once, later, by its
// callback; if the session is cut, with kUnavailable. After Close() the outstanding calls are not answered.

#ifndef ROPETEAM_TESTS_SIMULATION_CLIENT_H_
#define ROPETEAM_TESTS_SIMULATION_CLIENT_H_

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/simulation/cluster.h"
#include "tests/simulation/content.h"

namespace ropeteam::simulation {

// How a save goes, beyond its bytes.
struct SaveScript {
  uint64_t understated_chunks = 0;       // save_begin announces this many fewer; the rest is requested later
  bool announce = true;                  // chunks as they fill (save_filled); else all in save_commit
  bool abort = false;                    // instead of the commit
  bool device = false;                   // the bytes are first in a GPU's memory, and may be put from there
  size_t stop_after_chunks = SIZE_MAX;   // then it hangs: no commit, no callback
  TimeUs chunk_us = 100;                 // time to fill one chunk, at most
  size_t pause_after_chunks = SIZE_MAX;  // then it does nothing for pause_us, once
  TimeUs pause_us = 0;
  uint64_t agreement = 0;
};

class Client {
 public:
  struct Identity {
    size_t host = 0;
    uint64_t launch = 0;
    Rank rank = 0;
    uint32_t world_size = 1;
    std::string incarnation_token;
  };
  using StatusDone = std::function<void(const Status&)>;

  Client(Cluster* cluster, const Identity& identity);
  ~Client() { Close(); }

  const Identity& identity() const { return identity_; }
  Incarnation incarnation() const { return incarnation_; }
  // The next hello is that of a handle that was admitted to this incarnation before.
  void SetIncarnation(Incarnation incarnation) { incarnation_ = incarnation; }
  bool connected() const;

  // Connects if necessary, and says hello with this handle's token. kUnavailable: no daemon, or it died.
  void Hello(TimeUs timeout, StatusDone done);
  // The process may also have died.
  void Close();

  using LatestDone = std::function<void(const Status&, const AnswerLatest&)>;
  void Latest(TimeUs timeout, LatestDone done) { Latest(Level::kNone, timeout, std::move(done)); }
  void Latest(Level level, TimeUs timeout, LatestDone done);
  void Save(Step step, const Content& content, const SaveScript& script, StatusDone done);
  void Wait(Step step, Level level, TimeUs timeout, StatusDone done);
  void Quarantine(Step step, bool undo, TimeUs timeout, StatusDone done);  // by an operator
  void Forget(const std::string& node, TimeUs timeout, StatusDone done);   // likewise
  void Drop(Step step, TimeUs timeout, StatusDone done);
  void DropAsOperator(Step step, TimeUs timeout, StatusDone done) {
    Connect();
    Drop(step, timeout, std::move(done));
  }
  void Persist(Step step, TimeUs timeout, StatusDone done);
  void SetPolicy(const PolicyInput& policy, TimeUs timeout, StatusDone done);
  // Opens the shard, checks every chunk, has bad ones repaired, holds the view for a while, checks again,
  // closes. kCorrupt: bytes stay wrong.
  using ReadDone = std::function<void(const Status&, const ShardMeta&)>;
  void Read(Step step, Rank rank, TimeUs timeout, TimeUs hold, ReadDone done);
  // Reads random ranges of the shard without fetching it. If that is not possible, works as Read().
  void ReadRanges(Step step, Rank rank, TimeUs timeout, ReadDone done);
  using ReportDone = std::function<void(const Status&, const ClusterReport&)>;
  void Report(TimeUs timeout, ReportDone done);
  using VerifyDone = std::function<void(const Status&, const VerifyReport&)>;
  void Verify(const Step* step, TimeUs timeout, VerifyDone done);

 private:
  struct SaveRun;
  struct ReadRun;

  Status StatusOf(const Answer* answer) const;
  void AskForStatus(RequestKind kind, Step step, TimeUs timeout, StatusDone done, Cluster::Input input);
  // False: there is no session. A request is then answered with kUnavailable.
  bool Connect();
  void Granted(const std::shared_ptr<SaveRun>& run, const Answer* answer);
  void FillNext(const std::shared_ptr<SaveRun>& run);
  void OfferDevice(const std::shared_ptr<SaveRun>& run);
  void Settle(const std::shared_ptr<SaveRun>& run);
  void Commit(const std::shared_ptr<SaveRun>& run);
  void Abort(const std::shared_ptr<SaveRun>& run);
  void OpenView(RequestKind kind, Step step, Rank rank, TimeUs timeout, ReadDone done,
                std::function<void(const std::shared_ptr<ReadRun>&)> opened);
  void ReadPart(const std::shared_ptr<ReadRun>& run, uint32_t more);
  std::vector<PackedPart> RandomParts(const ShardMeta& meta);
  void TakeRanges(const std::shared_ptr<ReadRun>& run, const std::vector<PackedPart>& parts,
                  const AnswerRanges& ranges);
  void CheckView(const std::shared_ptr<ReadRun>& run);
  void FinishRead(const std::shared_ptr<ReadRun>& run, const Status& status);
  std::vector<uint32_t> BadChunks(const ReadRun& run) const;

  Cluster& cluster_;
  const Identity identity_;
  const uint64_t token_;
  SessionId session_ = 0;
  Incarnation incarnation_ = 0;
  PolicyInput policy_;  // as set
  std::set<DeviceBufferId> device_buffers_;
  uint64_t connections_ = 0;  // grows with each connection and Close(); work of an older connection stops
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CLIENT_H_
