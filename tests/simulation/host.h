// SPDX-License-Identifier: Apache-2.0
//
// A host of the simulation: memory that outlives its processes, at most one daemon (an Engine over a Store),
// and the sessions of the ranks on it.

#ifndef ROPETEAM_TESTS_SIMULATION_HOST_H_
#define ROPETEAM_TESTS_SIMULATION_HOST_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "core/store/store.h"
#include "tests/simulation/clock.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_membership.h"

namespace ropeteam::simulation {

class Client;

// The key of a new job that encrypts.
inline constexpr KeyId kFirstKey = KeyId{1} << 32;

enum class RequestKind : uint8_t {
  kHello,
  kSaveBegin,
  kSaveExtend,
  kSaveCommit,
  kSaveAbort,
  kWait,
  kLatest,
  kViewOpen,
  kViewRepair,
  kReport,
  kVerify,
  kSaveSettle,
  kPersist,
  kLatestPersisted,
  kQuarantine,
  kRangesOpen,
  kRangesRead,
  kDrop,
  kSetPolicy,
};
const char* RequestName(RequestKind kind);

// A request of a client that is not answered yet.
struct Pending {
  RequestKind kind = RequestKind::kHello;
  Step step = 0;
  Rank rank = 0;
  Level level = Level::kNone;
  SaveId save = 0;
  ViewId view = 0;
  PolicyInput policy;     // of kSetPolicy
  TimeUs timeout_us = 0;  // as requested; 0: the request waits only for this node
  TimeUs asked_at = 0;
  bool answered = false;  // by the engine; the answer may still be on its way to the client
  // Called with null if the session was cut.
  std::function<void(const Answer*)> done;
};

// One connection of a rank or an operator to a daemon. It ends when either side ends.
struct Session {
  SessionId id = 0;
  size_t host = 0;
  NodeId daemon = kNoNode;
  Client* client = nullptr;     // null when the client has closed its end
  bool open_at_engine = false;  // the engine knows of it, and not of its end
  uint64_t launch = 0;
  Rank rank = 0;
  uint32_t world_size = 0;
  Incarnation incarnation = 0;  // 0 until admitted
  TimeUs to_engine_at = 0;      // when the last message arrives: each direction keeps its order
  TimeUs to_client_at = 0;
  RequestId last_request = 0;
  std::map<RequestId, Pending> pending;
};

// A rank's wait for its own shard that is not answered yet.
struct OpenWait {
  size_t host = 0;
  ShardId shard;
  Level level = Level::kNone;
};

// A set of steps that grows until it is cleared. Each set remembers what it has heard from others, because every message
// tells all of it.
class KnownCommits {
 public:
  bool contains(const StepId& step) const { return steps_.contains(step); }
  const std::set<StepId>& steps() const { return steps_; }
  void Add(const StepId& step) {
    if (steps_.insert(step).second) order_.push_back(step);
  }
  void Hear(const KnownCommits& other) {
    Heard& heard = heard_[&other];
    if (heard.cleared != other.cleared_) heard = {other.cleared_, 0};
    for (; heard.count < other.order_.size(); ++heard.count) Add(other.order_[heard.count]);
  }
  void Clear() {
    steps_.clear();
    order_.clear();
    heard_.clear();
    ++cleared_;
  }

 private:
  struct Heard {
    uint64_t cleared = 0;
    size_t count = 0;  // of the other's order_
  };
  std::set<StepId> steps_;
  std::vector<StepId> order_;
  std::map<const KnownCommits*, Heard> heard_;
  uint64_t cleared_ = 0;
};

struct Host {
  struct Release {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  size_t index = 0;
  Member member;                   // of the running or the last daemon
  bool up = false;                 // the machine is on
  bool gone = false;               // another machine has taken its place
  bool returns = false;            // the machine that is gone comes back when all is healed
  uint64_t memory_generation = 0;  // grows each time the memory is lost
  // Steps told COMMITTED in a view of which this memory was a member, and those that such memory has told it of since.
  KnownCommits knows;
  std::map<Epoch, std::set<StepId>> knows_early;  // the same of messages that wait for the view of an epoch
  bool table_damaged = false;                     // bits of the arena's tables have flipped
  std::unique_ptr<std::byte[], Release> memory;
  uint64_t memory_bytes = 0;
  uint64_t chunks_begin = 0;  // offset of chunk 0 in the memory
  uint64_t chunk_bytes = 0;
  NodeId id = kNoNode;  // of the running daemon
  std::unique_ptr<Store> store;
  std::unique_ptr<Engine> engine;
  TimeUs timer_at = kForever;  // true time
  HostClock clock;
  TimeUs lease_until = 0;                // membership's lease, on this host's clock
  std::map<uint64_t, NodeId> transfers;  // peers of the posted transfers, by tag
  std::set<NodeId> lost_links;           // members that its data path has lost
  uint32_t protocol = kProtocolVersion;  // the newest version of its next daemon
  std::vector<KeyId> keys;               // of its next daemon, in a job that encrypts
  std::optional<SimMembership::OwnSettings>
      own;              // settings of its daemon, if they differ from those of the others
  Status refused;       // by membership, permanently
  bool paused = false;  // the daemon is stopped (SIGSTOP); its inputs wait in `backlog`
  std::deque<std::function<void()>> backlog;
  TimeUs resumed_at = 0;
  View view;                // the last one given to the running engine
  uint64_t lives = 0;       // number of daemons that were started here
  TimeUs drains_since = 0;  // true time; 0: the daemon stays

  bool has_lease(TimeUs now) const { return clock.Local(now) < lease_until; }
  bool daemon_runs() const { return engine != nullptr; }
  std::span<std::byte> bytes() { return {memory.get(), memory_bytes}; }
  // Also while no daemon runs.
  std::byte* chunk(uint32_t number) const { return memory.get() + chunks_begin + number * chunk_bytes; }
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_HOST_H_
