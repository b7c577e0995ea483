// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/rank.h"

#include <algorithm>
#include <cinttypes>
#include <iterator>
#include <utility>

namespace ropeteam::simulation {
namespace {

constexpr TimeUs kHelloTimeoutUs = 5 * kSecond;
constexpr TimeUs kLatestTimeoutUs = 5 * kSecond;
constexpr TimeUs kReadTimeoutUs = 5 * kSecond;
constexpr TimeUs kSilentWaitUs = 100 * kSecond;
// Attempts before the process ends. A daemon is back within seconds. A step that cannot be produced may never
// be available again, and only another incarnation gets another one.
constexpr uint32_t kHelloAttemptsMax = 20;
constexpr uint32_t kLatestAttemptsMax = 3;
constexpr TimeUs kRendezvousUs = kSecond;  // an elastic launcher waits so long for more hosts

// Whether another attempt may succeed.
bool Passing(const Status& status) {
  return status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded ||
         status.code() == Code::kPeerGone || status.code() == Code::kLinkFailed;
}

}  // namespace

SimRank::SimRank(Cluster* cluster, Launcher* launcher, const Client::Identity& identity)
    : cluster_(*cluster), launcher_(*launcher), client_(cluster, identity) {}

void SimRank::After(TimeUs delay, std::function<void()> action) {
  cluster_.scheduler().After(delay, [this, action = std::move(action)] {
    if (alive_) action();
  });
}

void SimRank::Start() {
  alive_ = true;
  SayHello(0);
}

void SimRank::Kill() {
  if (!alive_) return;
  alive_ = false;
  client_.Close();
}

void SimRank::End(const char* why) {
  if (!alive_) return;
  cluster_.Trace("rank %u of launch %" PRIu64 " ends: %s", client_.identity().rank, client_.identity().launch,
                 why);
  Kill();
  launcher_.OnRankEnded(this);
}

void SimRank::SayHello(uint32_t attempt) {
  client_.Hello(kHelloTimeoutUs, [this, attempt](const Status& status) {
    if (!alive_) return;
    if (!status.ok()) {
      if (!Passing(status) || attempt >= kHelloAttemptsMax) return End(status.ToString().c_str());
      return After(cluster_.random().Between(20 * kMs, 200 * kMs),
                   [this, attempt] { SayHello(attempt + 1); });
    }
    const bool first = incarnation_ == 0;
    if (!first && incarnation_ != client_.incarnation()) return End("another incarnation began meanwhile");
    incarnation_ = client_.incarnation();
    if (restored_) return NextStep();
    const bool says = cluster_.options().storage.policy && cluster_.random().Chance(kMillion / 2);
    if (!says) return AskLatest(0);
    SayPolicy([this](const Status&) {
      if (alive_) client_.connected() ? AskLatest(0) : Reconnect();
    });
  });
}

// All ranks of an incarnation say the same. The next incarnation may say something else.
void SimRank::SayPolicy(Client::StatusDone done) {
  const StorageOptions& storage = cluster_.options().storage;
  Random drawn(Mix(cluster_.options().seed, incarnation_, 0x90));
  PolicyInput policy;
  policy.keep_on_storage = static_cast<uint32_t>(drawn.Between(1, 4));
  policy.persist_every = drawn.Between(1, 4);
  if (storage.keep != 0 && drawn.Chance(kMillion / 2))
    policy.keep_on_storage = static_cast<uint32_t>(storage.keep);
  if (storage.persist_every != 0 && drawn.Chance(kMillion / 2)) policy.persist_every = storage.persist_every;
  if (drawn.Chance(kMillion / 4)) policy.persist_every = 0;
  client_.SetPolicy(policy, cluster_.random().Between(0, 2 * kSecond), std::move(done));
}

void SimRank::Reconnect() {
  silent_ = false;
  After(cluster_.random().Between(1 * kMs, 50 * kMs), [this] { SayHello(0); });
}

void SimRank::AskLatest(uint32_t attempt) {
  client_.Latest(kLatestTimeoutUs, [this, attempt](const Status& status, const AnswerLatest& latest) {
    if (!alive_) return;
    if (status.ok()) return Restore(latest);
    if (status.code() == Code::kNotFound) {
      SetRestored();
      return NextStep();
    }
    if (!Passing(status) || attempt >= kLatestAttemptsMax) return End(status.ToString().c_str());
    if (!client_.connected()) return Reconnect();
    After(cluster_.random().Between(10 * kMs, 100 * kMs), [this, attempt] { AskLatest(attempt + 1); });
  });
}

void SimRank::Restore(const AnswerLatest& latest) {
  const Client::Identity& me = client_.identity();
  to_restore_.clear();
  if (latest.world_size == me.world_size) {
    to_restore_.push_back(me.rank);
  } else {
    for (Rank rank = me.rank; rank < latest.world_size; rank += me.world_size) to_restore_.push_back(rank);
  }
  RestoreNext(latest, 0, 0);
}

void SimRank::RestoreNext(const AnswerLatest& latest, size_t index, uint32_t attempt) {
  if (index == to_restore_.size()) {
    step_ = latest.step.step;
    SetRestored();
    return NextStep();
  }
  const TimeUs hold = cluster_.random().Below(cluster_.options().job.read_hold_max_us + 1);
  const auto done = [this, latest, index, attempt](const Status& status, const ShardMeta& meta) {
    if (!alive_) return;
    if (status.ok()) {
      if (meta.id.incarnation != latest.step.incarnation)
        return cluster_.checker().Fail("rank %u restored %s, and latest was %s", client_.identity().rank,
                                       meta.id.ToString().c_str(), latest.step.ToString().c_str());
      return RestoreNext(latest, index + 1, 0);
    }
    if (!client_.connected()) return Reconnect();
    // Some programs retry a read that has found damage.
    const bool again =
        Passing(status) || (status.code() == Code::kCorrupt && cluster_.random().Chance(kMillion / 3));
    if (!again || attempt >= 3) return End(status.ToString().c_str());
    After(cluster_.random().Between(10 * kMs, 100 * kMs),
          [this, latest, index, attempt] { RestoreNext(latest, index, attempt + 1); });
  };
  // If the world size has changed, a rank needs parts of shards.
  const bool resharded = latest.world_size != client_.identity().world_size;
  if (resharded && cluster_.random().Chance(cluster_.options().job.ranges_ppm))
    return client_.ReadRanges(latest.step.step, to_restore_[index], kReadTimeoutUs, done);
  client_.Read(latest.step.step, to_restore_[index], kReadTimeoutUs, hold, done);
}

// The collective of the next step: waits for the slower ones.
void SimRank::NextStep() {
  if (launcher_.Silences(step_)) return BeSilent();
  if (zombie_) return Compute();
  launcher_.Await(step_, [this] {
    if (alive_) Compute();
  });
}

void SimRank::Compute() {
  const JobOptions& job = cluster_.options().job;
  After(cluster_.random().Between(job.compute_min_us, job.compute_max_us), [this] { SaveStep(); });
}

void SimRank::BeSilent() {
  if (!std::exchange(silent_, true)) {
    // The others wait when everything has come to rest.
    if (cluster_.random().Chance(kMillion / 2)) AskWaits();
    if (launcher_.on_silent) launcher_.on_silent();
  }
  After(cluster_.random().Between(10 * kMs, 100 * kMs), [this] {
    if (!client_.connected()) return Reconnect();
    if (launcher_.Silences(step_)) return BeSilent();
    silent_ = false;
    NextStep();
  });
}

// Also for a step whose save ended with its daemon. The checker sees the answers. The deadlines come later.
void SimRank::AskWaits() {
  const Level highest = cluster_.options().storage.used ? Level::kPersisted : Level::kCommitted;
  for (Step step = std::max<Step>(step_, 2) - 1; step <= step_ + 1; ++step)
    for (Level level = Level::kLocal; level <= highest;
         level = static_cast<Level>(static_cast<int>(level) + 1))
      client_.Wait(step, level, kSilentWaitUs, [](const Status&) {});
}

void SimRank::SetRestored() {
  restored_ = true;
  launcher_.OnProgress();
}

void SimRank::SaveStep() {
  const Options& options = cluster_.options();
  Random& random = cluster_.random();
  const Client::Identity& me = client_.identity();
  if (!client_.connected()) return Reconnect();
  if (launcher_.Silences(step_)) return BeSilent();
  ContentShape shape = options.job.content;
  shape.chunk_bytes = options.chunk_bytes;
  SaveScript script;
  if (random.Chance(kMillion / 10)) script.understated_chunks = random.Between(1, 3);
  script.announce = !random.Chance(kMillion / 8);
  script.abort = random.Chance(options.job.abort_ppm);
  script.device = options.job.device_ppm != 0 && random.Chance(options.job.device_ppm);
  if (options.job.agree) {
    script.agreement = Mix(me.launch, step_ + 1) | 1;
    // The same at every attempt: a rank that saves a step again gives the same value.
    Random other(Mix(script.agreement, me.rank));
    if (other.Chance(options.job.disagree_ppm))
      script.agreement = other.Chance(kMillion / 2) ? 0 : other.Next();
  }
  if (options.job.long_ppm != 0 && random.Chance(options.job.long_ppm)) {
    script.pause_after_chunks = random.Below(4);
    script.pause_us = random.Below(options.job.long_max_us);
  }
  client_.Save(step_ + 1, MakeContent(shape, me.launch, step_ + 1, me.rank), script,
               [this](const Status& status) {
                 if (alive_) Saved(status);
               });
}

void SimRank::Saved(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      ++step_;
      launcher_.OnProgress();
      return AfterSave();
    case Code::kNoSpace:  // training continues without this step
    case Code::kAborted:
    case Code::kAlreadyExists:  // it is sealed, and its daemon died before the answer
      ++step_;
      launcher_.OnProgress();
      return NextStep();
    case Code::kUnavailable:
      return client_.connected() ? NextStep() : Reconnect();
    default:
      return End(status.ToString().c_str());
  }
}

void SimRank::AfterSave() {
  const JobOptions& job = cluster_.options().job;
  Random& random = cluster_.random();
  const StorageOptions& storage = cluster_.options().storage;
  if (random.Chance(job.read_other_ppm)) return ReadSomebody();
  if (job.drop_ppm != 0 && random.Chance(job.drop_ppm)) return DropOne();
  const auto go_on = [this](const Status& status) { GoOn(status); };
  if (storage.used && random.Chance(storage.ask_ppm))
    return client_.Persist(step_, random.Between(0, 2 * kSecond), [this, go_on](const Status& status) {
      if (!alive_ || !status.ok() || cluster_.random().Chance(kMillion / 2)) return go_on(status);
      client_.Wait(step_, Level::kPersisted, cluster_.random().Between(0, 2 * kSecond), go_on);
    });
  if (storage.policy && random.Chance(kMillion / 20)) return SayPolicy(go_on);
  if (storage.used && random.Chance(kMillion / 20))
    return client_.Latest(Level::kPersisted, random.Between(0, 2 * kSecond),
                          [go_on](const Status& status, const AnswerLatest&) { go_on(status); });
  if (storage.used && random.Chance(storage.wait_ppm))
    return client_.Wait(step_, Level::kPersisted, random.Between(0, 2 * kSecond), go_on);
  if (!random.Chance(job.wait_ppm)) return NextStep();
  const Level level = static_cast<Level>(random.Between(1, 3));
  client_.Wait(step_, level, random.Between(0, 2 * kSecond), go_on);
}

void SimRank::GoOn(const Status& status) {
  if (!alive_) return;
  if (status.code() == Code::kStale) return End(status.ToString().c_str());
  if (!client_.connected()) return Reconnect();
  NextStep();
}

// It may be the newest step, which most other ranks are still saving, or a step of a former incarnation.
void SimRank::DropOne() {
  Random& random = cluster_.random();
  const Step step = step_ - std::min<Step>(step_ - 1, random.Below(5));
  const TimeUs timeout = random.Between(0, 2 * kSecond);
  client_.Drop(step, timeout, [this, step](const Status& status) {
    if (!alive_ || !status.ok() || cluster_.random().Chance(kMillion / 2)) return GoOn(status);
    client_.Wait(step, Level::kCommitted, cluster_.random().Below(kSecond),
                 [this](const Status& waited) { GoOn(waited); });
  });
}

void SimRank::ReadSomebody() {
  Random& random = cluster_.random();
  const Rank rank = static_cast<Rank>(random.Below(client_.identity().world_size));
  const Step step = step_ > 2 ? step_ - random.Below(3) : step_;
  const auto done = [this](const Status& status, const ShardMeta&) { GoOn(status); };
  const TimeUs timeout = random.Between(0, 2 * kSecond);
  if (random.Chance(cluster_.options().job.ranges_ppm)) return client_.ReadRanges(step, rank, timeout, done);
  client_.Read(step, rank, timeout, random.Below(100 * kMs), done);
}

// ---- launcher

Launcher::Launcher(Cluster* cluster) : cluster_(*cluster), job_(cluster->options().job) {
  world_size_ = cluster->options().nodes * job_.ranks_per_node;
}

void Launcher::Start() {
  trouble_at_ = start_at_ = cluster_.now();
  if (polling_) return;
  polling_ = true;
  Poll();
}

void Launcher::Restart(const char* why) {
  if (stopped_ || trouble_at_ != 0) return;
  cluster_.Trace("launcher restarts the world: %s", why);
  trouble_at_ = cluster_.now();
  // A launcher needs some time to notice, and stops all processes before it starts new ones.
  start_at_ = cluster_.now() + cluster_.random().Between(10 * kMs, 400 * kMs);
  running_ = false;
  for (SimRank* rank : ranks_) {
    if (!rank->alive()) continue;
    if (job_.incarnation_tokens && cluster_.random().Chance(job_.zombie_ppm) && !cluster_.healed()) {
      rank->BecomeZombie();
      continue;
    }
    rank->Kill();
  }
  // Zombies do not wait for other ranks.
  for (auto& [done, go_on] : std::exchange(waiting_, {}))
    cluster_.scheduler().After(2 * kMs, std::move(go_on));
}

void Launcher::KillZombies() {
  for (const auto& rank : all_)
    if (rank->zombie()) rank->Kill();
}

void Launcher::Hold(bool hold) {
  held_ = hold;
  if (hold) Restart("it is to be held");
}

void Launcher::StopForGood() {
  stopped_ = true;
  running_ = false;
  for (const auto& rank : all_) rank->Kill();
}

void Launcher::OnHost(size_t host, bool up) {
  if (up) return;
  bool any = false;
  for (const auto& rank : all_) {
    if (!rank->alive() || rank->host() != host) continue;
    rank->Kill();
    any = any || !rank->zombie();
  }
  if (any) Restart("a host stopped");
}

void Launcher::OnRankEnded(SimRank* rank) {
  if (!rank->zombie()) Restart("a rank ended");
}

void Launcher::Silence() {
  silence_ = true;
  last_step_.reset();
  for (const SimRank* rank : ranks_) last_step_ = std::max(last_step_.value_or(0), rank->step());
  if (last_step_) *last_step_ += cluster_.random().Below(3);
}

bool Launcher::Silences(Step done) {
  if (!silence_) return false;
  if (!last_step_) last_step_ = done + cluster_.random().Below(3);
  return done >= *last_step_;
}

void Launcher::AskWaits() {
  for (SimRank* rank : ranks_) rank->AskWaits();
}

bool Launcher::AllSilent() const {
  return running_ &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const SimRank* rank) { return rank->silent(); });
}

void Launcher::Await(Step done, std::function<void()> go_on) {
  waiting_.emplace_back(done, std::move(go_on));
  if (MayGoOn(done)) Wake();
}

void Launcher::OnProgress() {
  Step least = UINT64_MAX;
  for (const auto& [done, go_on] : waiting_) least = std::min(least, done);
  if (!waiting_.empty() && MayGoOn(least)) Wake();
}

// A collective ends for all ranks within two milliseconds.
void Launcher::Wake() {
  Step slowest = UINT64_MAX;
  for (const SimRank* rank : ranks_) slowest = std::min(slowest, rank->step());
  std::vector<std::pair<Step, std::function<void()>>> still;
  for (auto& [done, go_on] : std::exchange(waiting_, {})) {
    if (done < slowest + job_.lag) {
      cluster_.scheduler().After(cluster_.random().Between(1, 2 * kMs), std::move(go_on));
    } else {
      still.emplace_back(done, std::move(go_on));
    }
  }
  waiting_.insert(waiting_.end(), std::make_move_iterator(still.begin()),
                  std::make_move_iterator(still.end()));
}

bool Launcher::MayGoOn(Step done) const {
  if (!running_) return false;
  for (const SimRank* rank : ranks_)
    if (!rank->restored() || rank->step() + job_.lag <= done) return false;
  return true;
}

void Launcher::KillOne(size_t index) {
  if (!running_ || index >= ranks_.size() || !ranks_[index]->alive()) return;
  cluster_.Trace("rank %zu is killed", index);
  ranks_[index]->Kill();
  Restart("a rank was killed");
}

void Launcher::Reopen() {
  if (!running_ || stopped_) return;
  Random& random = cluster_.random();
  cluster_.Trace("the ranks open again in their own processes");
  ++launch_;
  waiting_.clear();
  const std::vector<SimRank*> before = ranks_;
  MakeRanks(hosts_);
  for (size_t i = 0; i < ranks_.size(); ++i)
    cluster_.scheduler().After(random.Between(1, 50 * kMs),
                               [this, was = before[i], rank = ranks_[i], launch = launch_] {
                                 was->Kill();
                                 if (running_ && launch == launch_ && !stopped_) rank->Start();
                               });
}

// An elastic launcher takes the hosts that are up, if these are enough, or waits for the others.
void Launcher::Poll() {
  if (stopped_) return;
  if (!held_ && trouble_at_ != 0 && cluster_.now() >= start_at_) {
    const Options& options = cluster_.options();
    std::vector<size_t> hosts;
    for (size_t i = 0; i < cluster_.host_count() && hosts.size() < options.nodes; ++i)
      if (cluster_.host(i).up) hosts.push_back(i);
    const bool elastic = options.nodes_min != 0 && cluster_.now() >= start_at_ + kRendezvousUs;
    if (hosts.size() >= (elastic ? options.nodes_min : options.nodes)) Launch(hosts);
  }
  cluster_.scheduler().After(20 * kMs, [this] { Poll(); });
}

void Launcher::Launch(const std::vector<size_t>& hosts) {
  Random& random = cluster_.random();
  ++launch_;
  if (launch_ == 1 || !random.Chance(job_.token_again_ppm)) token_ = launch_;
  trouble_at_ = 0;
  running_ = true;
  last_step_.reset();
  const size_t nodes = hosts.size();
  const uint32_t full = static_cast<uint32_t>(nodes) * job_.ranks_per_node;
  if (nodes != cluster_.options().nodes) {
    world_size_ = full;
  } else if (random.Chance(job_.reshard_ppm)) {
    world_size_ = static_cast<uint32_t>(random.Between(std::max<uint32_t>(1, full / 2), full + full / 2));
  } else if (cluster_.options().nodes_min != 0) {
    world_size_ = full;
  }
  const size_t shift = random.Chance(job_.shuffle_ppm) ? random.Below(nodes) : 0;
  cluster_.Trace("launch %" PRIu64 " of %u ranks, token %" PRIu64, launch_, world_size_, token_);
  std::vector<size_t> of_ranks;
  // In blocks, as launchers assign ranks.
  for (Rank rank = 0; rank < world_size_; ++rank)
    of_ranks.push_back(hosts[(static_cast<size_t>(rank) * nodes / world_size_ + shift) % nodes]);
  MakeRanks(of_ranks);
  for (SimRank* rank : ranks_)
    cluster_.scheduler().After(random.Between(1, 20 * kMs), [this, rank, launch = launch_] {
      if (running_ && launch == launch_ && !stopped_) rank->Start();
    });
}

void Launcher::MakeRanks(const std::vector<size_t>& hosts) {
  hosts_ = hosts;
  ranks_.clear();
  for (Rank rank = 0; rank < hosts.size(); ++rank) {
    Client::Identity identity;
    identity.host = hosts[rank];
    identity.launch = launch_;
    identity.rank = rank;
    identity.world_size = static_cast<uint32_t>(hosts.size());
    if (job_.incarnation_tokens) {
      identity.incarnation_token = "run-";
      identity.incarnation_token += std::to_string(token_);
    }
    all_.push_back(std::make_unique<SimRank>(&cluster_, this, identity));
    ranks_.push_back(all_.back().get());
  }
}

}  // namespace ropeteam::simulation
