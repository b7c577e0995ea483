// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "membership/agent.h"
#include "membership/credentials/credentials.h"
#include "membership/membership.h"
#include "membership/standalone/acceptor.h"
#include "membership/standalone/coordinator_server.h"
#include "membership/standalone/loop.h"
#include "membership/standalone/node_stream.h"
#include "membership/standalone/options.h"

namespace ropeteam {
namespace {

// The time for the coordinator to handle a leave message. If it is exceeded, the broken connection has the same effect,
// a probe later.
constexpr auto kLeaveMax = std::chrono::milliseconds(200);
// Attempts in a row that fail because the two ends have different keys. One such attempt may have reached a coordinator
// that was just ending.
constexpr uint32_t kKeptOutMax = 3;

class StandaloneMembership final : public Membership {
 public:
  explicit StandaloneMembership(const MembershipConfig& config) : config_(config) {}
  ~StandaloneMembership() override { Stop(); }

  Status Start(const Member& self, Callbacks callbacks) override;
  Status Rejoin(const Member& self) override;
  void ReportSuspect(NodeId member, const std::string& reason) override;
  void ReportReach(NodeId member, bool reached) override;
  void Relocate(const Place& place, bool now) override;
  void Stop() override;

 private:
  enum class Phase { kNew, kRunning, kStopping };

  // On the loop.
  void Perform(Agent::Outputs outputs);
  void OpenStream(const Agent::Open& open);
  Status StartCoordinator();
  std::string JudgeEnd(TimeUs now, uint64_t attempt, const std::string& reason);
  // On gRPC's threads.
  void OnMessage(uint64_t attempt, CoordinatorMessage message);
  void OnDone(std::shared_ptr<NodeStream> stream, const std::string& reason);

  const MembershipConfig config_;
  Callbacks callbacks_;
  std::string name_;                           // of this node
  std::unique_ptr<CoordinatorServer> server_;  // the loop's; null while no coordinator runs here
  std::unique_ptr<Agent> agent_;               // the loop's
  std::shared_ptr<NodeStream> stream_;         // the loop's; null when no connection is open
  std::string opened_;                         // the loop's; where the last attempt went
  uint32_t kept_out_ = 0;                      // the loop's; attempts in a row that ended over keys
  Loop loop_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Phase phase_ = Phase::kNew;
  bool stopped_ = false;
  size_t live_ = 0;                                 // streams whose OnDone() is to come
  std::vector<std::shared_ptr<NodeStream>> ended_;  // to be destroyed, but not on gRPC's threads
  std::set<NodeId> suspects_;                       // posted to the loop and not yet taken up
};

Status StandaloneMembership::Start(const Member& self, Callbacks callbacks) {
  ROPETEAM_RETURN_IF_ERROR(ValidateConfig(config_));
  ROPETEAM_RETURN_IF_ERROR(ValidateMember(self));
  {
    const std::lock_guard lock(mutex_);
    if (phase_ != Phase::kNew) return Error(Code::kInvalidArgument, "membership was started before");
  }
  name_ = self.name;
  if (const std::string& own = config_.coordinator_listen; !own.empty()) {
    const auto& list = config_.coordinator_addresses;
    const bool first =
        std::all_of(list.begin(), list.end(), [&own](const auto& address) { return address == own; });
    // Otherwise the other nodes are asked first. Errors that can be detected now are reported now.
    ROPETEAM_RETURN_IF_ERROR(first ? StartCoordinator() : CheckListen(own));
  }
  callbacks_ = std::move(callbacks);
  agent_ = std::make_unique<Agent>(config_, self);
  {
    // Set before the loop runs: a callback may call Rejoin() at once.
    const std::lock_guard lock(mutex_);
    phase_ = Phase::kRunning;
  }
  loop_.Post([this](TimeUs now) { Perform(agent_->Start(now)); });
  loop_.Start([this](TimeUs now) { Perform(agent_->Tick(now)); }, [this] { return agent_->NextDeadline(); });
  return OkStatus();
}

Status StandaloneMembership::Rejoin(const Member& self) {
  ROPETEAM_RETURN_IF_ERROR(ValidateMember(self));
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning) return Error(Code::kAborted, "membership is not running");
  loop_.Post([this, self](TimeUs now) { Perform(agent_->Rejoin(now, self)); });
  return OkStatus();
}

void StandaloneMembership::ReportSuspect(NodeId member, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  // A thousand failed puts to one peer count as one suspicion.
  if (phase_ != Phase::kRunning || suspects_.size() >= kSuspectsMax || !suspects_.insert(member).second)
    return;
  loop_.Post([this, member, reason = reason.substr(0, kReasonBytesMax)](TimeUs now) {
    {
      const std::lock_guard inner(mutex_);
      suspects_.erase(member);
    }
    Perform(agent_->Suspect(now, member, reason));
  });
}

void StandaloneMembership::ReportReach(NodeId member, bool reached) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning) return;
  loop_.Post([this, member, reached](TimeUs now) { Perform(agent_->Reach(now, member, reached)); });
}

void StandaloneMembership::Relocate(const Place& place, bool now) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning) return;
  loop_.Post([this, place, now](TimeUs at) { Perform(agent_->Relocate(at, place, now)); });
}

Status StandaloneMembership::StartCoordinator() {
  MembershipConfig config = config_;
  config.coordinator_node = name_;
  auto server = std::make_unique<CoordinatorServer>(config);
  ROPETEAM_RETURN_IF_ERROR(server->Start());
  server_ = std::move(server);
  return OkStatus();
}

void StandaloneMembership::Stop() {
  {
    std::unique_lock lock(mutex_);
    if (phase_ == Phase::kStopping) {
      changed_.wait(lock, [this] { return stopped_; });  // another thread is stopping it
      return;
    }
    if (phase_ == Phase::kNew) return;
    phase_ = Phase::kStopping;
  }
  ROPETEAM_CHECK(!loop_.OnLoop());
  const auto deadline = std::chrono::steady_clock::now() + kLeaveMax;
  bool left = false;
  loop_.Post([this, &left](TimeUs now) {
    Perform(agent_->Leave(now));
    const std::lock_guard lock(mutex_);
    left = true;
    changed_.notify_all();
  });
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&left] { return left; });
    changed_.wait_until(lock, deadline, [this] { return live_ == 0; });
  }
  loop_.Stop();  // from here on this thread owns what the loop owned
  if (stream_ != nullptr) stream_->Cancel();
  stream_.reset();
  std::vector<std::shared_ptr<NodeStream>> ended;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return live_ == 0; });
    ended.swap(ended_);
  }
  ended.clear();
  if (server_ != nullptr) server_->Stop();
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void StandaloneMembership::OpenStream(const Agent::Open& open) {
  opened_ = open.address;
  if (stream_ != nullptr) stream_->Cancel();
  if (open.address != config_.coordinator_listen) {
    if (server_ != nullptr) LOG_INFO("membership coordinator at %s ends", config_.coordinator_listen.c_str());
    server_.reset();
  } else if (server_ == nullptr) {
    // It failed: another process has been listening there since Start(). This node connects to that one.
    if (const Status status = StartCoordinator(); !status.ok())
      LOG_ERROR("membership coordinator does not start: %s", status.ToString().c_str());
  }
  std::vector<std::shared_ptr<NodeStream>> ended;
  {
    const std::lock_guard lock(mutex_);
    ++live_;
    ended.swap(ended_);
  }
  stream_ = NodeStream::Open(
      config_.alone && server_ != nullptr
          ? server_->Channel()
          : grpc::CreateCustomChannel(open.address, ChannelCredentialsOf(config_.credentials.get()),
                                      ChannelOptions()),
      open.attempt,
      {[this](uint64_t at, CoordinatorMessage message) { OnMessage(at, std::move(message)); },
       [this](std::shared_ptr<NodeStream> done, const std::string& reason) {
         OnDone(std::move(done), reason);
       }});
  // Destroy `ended` only now: gRPC's threads end with its last channel, and would be started again for this one.
}

void StandaloneMembership::OnMessage(uint64_t attempt, CoordinatorMessage message) {
  loop_.Post([this, attempt, message = std::move(message)](TimeUs now) {
    Perform(agent_->Received(now, attempt, message));
    if (stream_ != nullptr && stream_->attempt() == attempt) stream_->ReadNext();
  });
}

void StandaloneMembership::OnDone(std::shared_ptr<NodeStream> stream, const std::string& reason) {
  const uint64_t attempt = stream->attempt();
  loop_.Post([this, attempt, reason](TimeUs now) {
    if (stream_ != nullptr && stream_->attempt() == attempt) stream_.reset();
    Perform(agent_->Broken(now, attempt, JudgeEnd(now, attempt, reason)));
  });
  const std::lock_guard lock(mutex_);
  ended_.push_back(std::move(stream));
  --live_;
  changed_.notify_all();
}

// Replaces gRPC's reason if the keys differ. Then a node that was never in a view is refused for good, because it would
// try for ever. A node that was in a view continues, because the coordinator may be restarted with the right key.
std::string StandaloneMembership::JudgeEnd(TimeUs now, uint64_t attempt, const std::string& reason) {
  const std::string why = ExplainEnd(reason, opened_, config_.job, config_.credentials.get());
  kept_out_ = why.empty() ? 0 : kept_out_ + 1;
  if (kept_out_ >= kKeptOutMax && agent_->seen() == nullptr)
    Perform(agent_->Received(now, attempt, Refusal{Error(Code::kInvalidArgument, "%s", why.c_str())}));
  return why.empty() ? ExplainName(reason, opened_) : why;
}

void StandaloneMembership::Perform(Agent::Outputs outputs) {
  for (Agent::Output& output : outputs) {
    if (const auto* open = std::get_if<Agent::Open>(&output)) {
      OpenStream(*open);
    } else if (const auto* send = std::get_if<Agent::Send>(&output)) {
      if (stream_ != nullptr && stream_->attempt() == send->attempt) stream_->Send(send->message);
    } else if (const auto* close = std::get_if<Agent::Close>(&output)) {
      if (stream_ != nullptr && stream_->attempt() == close->attempt) {
        stream_->Cancel();
        stream_.reset();
      }
    } else if (const auto* view = std::get_if<View>(&output)) {
      if (callbacks_.on_view) callbacks_.on_view(*view);
    } else if (const auto* lease = std::get_if<Agent::Lease>(&output)) {
      if (callbacks_.on_lease) callbacks_.on_lease(lease->valid_until);
    } else if (const auto* check = std::get_if<Agent::Check>(&output)) {
      if (callbacks_.on_check) callbacks_.on_check(check->members);
    } else if (const auto* contact = std::get_if<Contact>(&output)) {
      if (callbacks_.on_contact) callbacks_.on_contact(*contact);
    } else if (callbacks_.on_refused) {
      callbacks_.on_refused(std::get<Status>(output));
    }
  }
}

}  // namespace

std::unique_ptr<Membership> CreateStandaloneMembership(const MembershipConfig& config) {
  return std::make_unique<StandaloneMembership>(config);
}

}  // namespace ropeteam
