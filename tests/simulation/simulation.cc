// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/simulation.h"

#include <algorithm>
#include <cinttypes>
#include <cstdlib>
#include <cstring>

#include "core/base/log.h"
#include "tests/simulation/cluster.h"
#include "tests/simulation/faults.h"
#include "tests/simulation/rank.h"

namespace ropeteam::simulation {
namespace {

const Cluster* running = nullptr;

// A cluster without new faults has one view within this time: detection, a view, inventories.
constexpr TimeUs kOneViewUs = 15 * kSecond;
// Right after healing all may have one view from before the faults although a member is about to be declared
// dead: that takes 1 s of silence, and a coordinator that has returned waits as long for its members.
constexpr TimeUs kMissedUs = 3 * kSecond;
constexpr TimeUs kRedundancyUs = 60 * kSecond;
// When nobody saves, waits are answered within this time. Inventories and new copies take the longest.
constexpr TimeUs kSilenceUs = 30 * kSecond;
constexpr TimeUs kSilenceBeforeHealUs = 2 * kSecond;
constexpr TimeUs kComeToRestUs = kSecond;
constexpr TimeUs kAtOnceUs = 50 * kMs;
constexpr TimeUs kSlowInSilenceUs = 300 * kMs;
constexpr uint64_t kSilenceSalt = 0x73696c656e636501;  // "silence"
constexpr TimeUs kAdminUs = 5 * kSecond;
// An operator waits this long for other nodes to confirm the damage that one node has found.
constexpr TimeUs kDoubtUs = 30 * kSecond;
// The time between two evaluations of conditions that are costly: over all copies of all nodes.
constexpr TimeUs kAskEveryUs = 20 * kMs;

class Simulation {
 public:
  explicit Simulation(const Options& options)
      : options_(options),
        cluster_(options),
        launcher_(&cluster_),
        faults_(&cluster_, &launcher_),
        silence_(Mix(options.seed, kSilenceSalt)) {
    Listen(nullptr);
    cluster_.on_host = [this](size_t host, bool up) { launcher_.OnHost(host, up); };
    running = &cluster_;
  }
  ~Simulation() {
    running = nullptr;
    Listen(nullptr);
  }

  Outcome Run(size_t trace_lines) {
    cluster_.KeepTrace(trace_lines);
    if (trace_lines != 0) Listen(&cluster_);
    const TimeUs begin = cluster_.now();
    for (size_t i = 0; i < cluster_.host_count(); ++i)
      cluster_.scheduler().After(cluster_.random().Below(300 * kMs), [this, i] { cluster_.StartHost(i); });
    launcher_.Start();
    cluster_.RunFor(500 * kMs);
    faults_.Start();
    // In half of the seeds the silence begins during the faults, in the others after progress.
    const TimeUs troubled =
        options_.pause_to_heal ? 0 : std::min(silence_.Below(kSilenceBeforeHealUs), options_.fault_phase_us);
    cluster_.RunFor(options_.fault_phase_us - troubled);
    if (!options_.pause_to_heal && !options_.starved) BeginSilence();
    cluster_.RunFor(troubled);
    Heal();
    if (options_.pause_to_heal && !options_.starved) {
      BeginSilence();
      EndSilence();
    }
    LoseEverything();
    if (!cluster_.checker().failed()) Finish();
    Outcome outcome;
    outcome.failure = cluster_.checker().failure();
    outcome.statistics = cluster_.checker().statistics();
    outcome.faults = faults_.counts();
    outcome.launches = launcher_.launch();
    outcome.inputs = cluster_.inputs();
    outcome.events = cluster_.scheduler().events();
    outcome.digest = cluster_.digest();
    outcome.virtual_us = cluster_.now() - begin;
    outcome.trace = cluster_.trace();
    return outcome;
  }

 private:
  // The engines' log goes into the trace, or is dropped: they log every loss, and here losses are intended.
  static void Listen(Cluster* cluster) {
    if (cluster == nullptr) return SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    SetLogSink(
        [cluster](LogLevel, std::string_view line) {
          cluster->Trace("  %.*s", static_cast<int>(line.size()), line.data());
        },
        LogLevel::kDebug);
  }
  Checker& checker() { return cluster_.checker(); }

  void Heal() {
    if (checker().failed()) return;
    faults_.Stop();
    cluster_.Heal();
    launcher_.KillZombies();
    launcher_.Hold(options_.pause_to_heal);
    if (options_.pause_to_heal) cluster_.RunFor(kMissedUs);
    if (!AwaitOneView()) return;
    GiveUpLostNodes(options_.wait_for_missing_us + kSecond);
    if (!options_.pause_to_heal && !options_.starved) EndSilence();
    if (options_.pause_to_heal) {
      RestoreRedundancy();
      launcher_.Hold(false);
    }
    if (!options_.starved) Progress();
  }

  // Every host is up. A node that is still missing has lost its memory, and an operator says so after the wait. Where
  // the job says that a step can be given up, the operator does so if its bytes are really gone.
  void GiveUpLostNodes(TimeUs after) {
    cluster_.scheduler().After(after, [this] {
      GiveUpLostNodes(10 * kSecond);
      if (!cluster_.AllInOneView()) return;  // a daemon that has just died comes back with its memory
      // Also if this is a repeat, which is answered with OK until the next commit.
      Person().Forget("", kAdminUs, [this](const Status&) {
        if (const std::optional<Step> lost = LostStep())
          Person().Quarantine(*lost, false, kAdminUs, [](const Status&) {});
      });
    });
  }

  std::optional<Step> LostStep() {
    const std::string& why = checker().why_it_waits();
    const bool now = checker().waits_at() + 6 * kSecond > cluster_.now();  // ranks ask every five seconds
    if (!now || why.find("`ropeteam quarantine") == std::string::npos) return std::nullopt;
    for (const char* before : {"committed step ", "the newest is step ", "`ropeteam quarantine "}) {
      const size_t at = why.find(before);
      if (at == std::string::npos) continue;
      const Step step = std::strtoull(why.c_str() + at + std::strlen(before), nullptr, 10);
      if (step == 0) continue;
      const std::vector<StepId> kept = checker().KeptSteps();
      const bool held = std::any_of(kept.begin(), kept.end(), [&](const StepId& id) {
        return id.step == step && checker().Producible(id);
      });
      if (held || cluster_.storage().HasSound(step)) continue;
      if (*before != '`') return step;
      if (doubted_ != step) doubted_at_ = cluster_.now();
      doubted_ = step;
      if (doubted_at_ + kDoubtUs <= cluster_.now()) return step;
    }
    return std::nullopt;
  }

  bool AwaitOneView() {
    if (cluster_.RunUntil([this] { return cluster_.AllInOneView(); }, kOneViewUs, 1 * kMs)) return true;
    checker().Fail("the cluster has healed, and its nodes do not come to one view");
    return false;
  }

  // Every rank saves up to one step and waits for what it has saved. Meanwhile daemons restart. No later save
  // can end a forgotten wait.
  void BeginSilence() {
    if (checker().failed()) return;
    crashes_ = silence_.Below(4);
    launcher_.on_silent = [this] {
      if (silence_.Chance(kMillion / 4)) CrashOne(2 * options_.network.transfer_max_us);
    };
    // At the moment when messages about the step are in flight.
    cluster_.on_event = [this](size_t, const LevelEvent& event) {
      const StepId step = StepOf(event.shard);
      if (event.level == Level::kReplicated && step == checker().newest_saved() &&
          checker().FullyReplicated(step))
        CrashOne(5 * options_.network.delay_max_us);
    };
    cluster_.Trace("the world falls silent");
    launcher_.Silence();
  }

  void CrashOne(TimeUs within) {
    if (crashes_ == 0) return;
    --crashes_;
    ++down_;
    cluster_.scheduler().After(silence_.Below(within), [this] {
      const size_t host = silence_.Below(cluster_.host_count());
      cluster_.CrashDaemon(host);
      const FaultOptions& faults = options_.faults;
      // Either at once, so that its rank is back before the daemon knows any peer, or later.
      const TimeUs most = silence_.Chance(kMillion / 2) ? kAtOnceUs : faults.daemon_back_max_us;
      const TimeUs back = silence_.Between(faults.daemon_back_min_us, most);
      cluster_.scheduler().After(back, [this, host] {
        cluster_.StartDaemon(host);
        --down_;
        // The messages of one peer come late, maybe after the leader's announcement.
        const TimeUs late = cluster_.now() + silence_.Below(kComeToRestUs);
        cluster_.network().Clog(silence_.Below(cluster_.host_count()), host, late);
      });
    });
  }

  // So answers may overtake announcements, and the other way round.
  void SlowDown(uint32_t ppm) {
    NetworkOptions network = cluster_.network().options();
    network.slow_ppm = ppm;
    network.slow_max_us = kSlowInSilenceUs;
    cluster_.network().SetOptions(network);
  }

  // The last waits begin when nothing happens any more.
  void EndSilence() {
    SlowDown(static_cast<uint32_t>(silence_.Below(kMillion / 4)));
    const auto silent = [this] { return down_ == 0 && launcher_.AllSilent() && cluster_.AllInOneView(); };
    if (!cluster_.RunUntil(silent, options_.heal_limit_us, kMs))
      checker().Fail("the cluster has healed, and its ranks do not finish their last step in %" PRIu64 " s",
                     options_.heal_limit_us / kSecond);
    EndWaits();
    cluster_.RunFor(kComeToRestUs);
    launcher_.AskWaits();
    EndWaits();
    SlowDown(0);
    launcher_.on_silent = nullptr;
    cluster_.on_event = nullptr;
    cluster_.Trace("the world goes on");
    launcher_.EndSilence();
  }

  // The checker knows which waits must end. The others end at their deadlines, which are later.
  void EndWaits() {
    std::optional<OpenWait> open;
    const auto ended = [&] {
      open.reset();
      for (const OpenWait& wait : cluster_.OpenWaits())
        if (checker().MustEnd(wait)) open = wait;
      return !open.has_value();
    };
    if (checker().failed() || cluster_.RunUntil(ended, kSilenceUs, kAskEveryUs) || !open) return;
    checker().Fail("host %zu: nobody has saved anything for %" PRIu64
                   " s, and %s is still waited for, level %s",
                   open->host, kSilenceUs / kSecond, open->shard.ToString().c_str(), LevelName(open->level));
  }

  // Nobody saves. The kept steps must get their copies back. All flipped bits must be found and repaired.
  void RestoreRedundancy() {
    if (checker().failed() || options_.starved) return;
    std::vector<StepId> kept;
    for (const StepId& step : checker().KeptSteps()) {
      const bool found = !checker().Flipped(step) || !checker().Shadowed(step);
      if (checker().Producible(step) && found) kept.push_back(step);
    }
    for (const StepId& step : kept)
      if (checker().Flipped(step)) Verify(&step.step);
    const size_t wanted = std::min<size_t>(options_.replicas + 1, cluster_.hosts_in_job());
    // A step that was saved before the ranks stopped may be committed only now, and retire an older one.
    const auto lacks = [&](const StepId& step) {
      return !checker().Retired(step) && checker().CopiesMin(step) < wanted;
    };
    const auto restored = [&] { return std::none_of(kept.begin(), kept.end(), lacks); };
    if (cluster_.RunUntil(restored, kRedundancyUs, kAskEveryUs) || checker().failed()) return;
    for (const StepId& step : kept)
      if (lacks(step))
        return checker().Fail("%s is kept, has %zu copies of a shard after %" PRIu64
                              " s in peace, and should have %zu%s",
                              step.ToString().c_str(), checker().CopiesMin(step), kRedundancyUs / kSecond,
                              wanted, checker().DescribeCopies(step, wanted).c_str());
  }

  // Ranks must start, restore, and commit more steps than retention keeps.
  void Progress() {
    if (checker().failed()) return;
    BeginStaying();
    // A step that was saved before may be committed now. That is not progress.
    const StepId before = checker().newest_saved();
    const size_t wanted = options_.keep_steps + 1;
    // A job that waits for nodes that are gone says so, and goes on after its time.
    const TimeUs limit =
        options_.heal_limit_us +
        (options_.wait_for_missing_us <= options_.heal_limit_us ? options_.wait_for_missing_us : 0);
    const bool done = cluster_.RunUntil([&] { return checker().CommittedAfter(before) >= wanted; }, limit);
    if (!done)
      checker().Fail(
          "the cluster has healed, and in %" PRIu64 " s only %zu new steps were committed%s%s",
          limit / kSecond, checker().CommittedAfter(before),
          checker().why_it_waits().empty() ? "" : "; `latest` last said: ", checker().why_it_waits().c_str());
    EndStaying();
  }

  // One link or one host's storage fails for good, and progress is demanded nevertheless.
  void BeginStaying() {
    const std::optional<size_t> leader = cluster_.LeaderHost();
    if (!leader || (!options_.pair_stays && !options_.stuck_stays)) return;
    if (options_.stuck_stays) cluster_.storage().Hang(*leader);
    if (!options_.pair_stays) return;
    const size_t other = (*leader + 1) % cluster_.host_count();
    if (cluster_.host(other).gone) return;
    cluster_.Trace("hosts %zu and %zu are apart for good", *leader, other);
    cluster_.network().CutMessages(*leader, other, kForever);
    if (options_.seed % 2 == 0) cluster_.network().CutPath(*leader, other, kForever);
  }

  void EndStaying() {
    cluster_.network().HealLinks();
    if (!options_.stuck_stays) return;
    for (size_t host = 0; host < cluster_.host_count(); ++host) cluster_.storage().GoOn(host);
  }

  // Afterwards only storage has steps. The checker sees that `latest` is as new as what was persisted.
  void LoseEverything() {
    if (!options_.storage.used || options_.starved || checker().failed() || options_.seed % 3 != 0) return;
    for (size_t host = 0; host < cluster_.host_count(); ++host) cluster_.StopHost(host, false);
    cluster_.membership().StopCoordinator();  // it was one of them
    cluster_.RunFor(300 * kMs);
    cluster_.StartCoordinator();
    for (size_t host = 0; host < cluster_.host_count(); ++host) cluster_.StartHost(host);
    if (AwaitOneView()) Progress();
  }

  void Finish() {
    launcher_.StopForGood();
    // Each host at some time, not all at once: copies that cannot be repaired are tried again and again.
    std::set<size_t> busy;
    for (size_t i = 0; i < cluster_.host_count(); ++i) busy.insert(i);
    const auto rest = [&] {
      std::erase_if(busy, [&](size_t i) {
        return !cluster_.host(i).daemon_runs() || Checker::AtRest(cluster_.host(i));
      });
      return busy.empty();
    };
    cluster_.RunUntil(rest, options_.quarantine_us + kRedundancyUs, kAskEveryUs);
    for (size_t i = 0; i < cluster_.host_count() && !checker().failed(); ++i) {
      const Host& host = cluster_.host(i);
      if (busy.contains(i)) checker().CheckNoLeak(host);
      if (!host.daemon_runs()) continue;
      host.engine->CheckInvariants();
      host.store->CheckInvariants();
    }
    checker().CheckAllBytes();
    cluster_.RunFor(kMissedUs);
    if (checker().failed() || !AwaitOneView()) return;
    Report();
    if (!options_.starved) Verify(nullptr);
  }

  void Report() {
    bool done = false;
    Person().Report(kAdminUs, [&](const Status& status, const ClusterReport& report) {
      done = true;
      if (!status.ok()) return checker().Fail("no report: %s", status.ToString().c_str());
      if (report.nodes.size() != cluster_.hosts_in_job())
        return checker().Fail("the report has %zu nodes of %zu", report.nodes.size(),
                              cluster_.hosts_in_job());
      const auto newest = checker().newest_committed();
      if (options_.starved || !newest.has_value() || !checker().Producible(*newest)) return;
      const StepId latest{report.latest.incarnation, report.latest.step};
      if (!report.has_latest || latest < *newest)
        return checker().Fail("the report says latest %s, and %s is committed", latest.ToString().c_str(),
                              newest->ToString().c_str());
    });
    cluster_.RunUntil([&] { return done; }, kAdminUs + kSecond);
  }

  // On a host that is not gone.
  Client& Person() {
    Client::Identity identity;
    while (cluster_.host(identity.host).gone) ++identity.host;
    if (person_ == nullptr || person_->identity().host != identity.host)
      person_ = std::make_unique<Client>(&cluster_, identity);
    return *person_;
  }

  bool IsKept(Step step) {
    const std::vector<StepId> kept = checker().KeptSteps();
    return std::any_of(kept.begin(), kept.end(), [&](const StepId& id) { return id.step == step; });
  }

  void Verify(const Step* step) {
    bool done = false;
    Person().Verify(step, kAdminUs, [&](const Status& status, const VerifyReport& report) {
      done = true;
      // It has been retired in the meantime.
      if (status.code() == Code::kNotFound && step != nullptr && !IsKept(*step)) return;
      if (!status.ok()) return checker().Fail("no verify: %s", status.ToString().c_str());
      if (report.nodes_asked.size() != cluster_.hosts_in_job())
        return checker().Fail("verify asked %zu nodes of %zu", report.nodes_asked.size(),
                              cluster_.hosts_in_job());
      for (const VerifiedCopy& copy : report.copies)
        if (!copy.bad.empty() && !checker().Flipped({copy.id.incarnation, copy.id.step}))
          return checker().Fail("verify found bad chunks in %s, of which no bit was flipped",
                                copy.id.ToString().c_str());
    });
    cluster_.RunUntil([&] { return done; }, kAdminUs + kSecond);
  }

  const Options options_;
  Cluster cluster_;
  Launcher launcher_;
  Faults faults_;
  std::unique_ptr<Client> person_;
  Random silence_;        // a generator of its own
  uint64_t crashes_ = 0;  // to come in the silence
  uint64_t down_ = 0;     // daemons, by these
  Step doubted_ = 0;      // an operator is told that this step may have to be given up
  TimeUs doubted_at_ = 0;
};

}  // namespace

Outcome RunSimulation(const Options& options, size_t trace_lines) {
  return Simulation(options).Run(trace_lines);
}

const std::deque<std::string>* TraceOfRunning() { return running == nullptr ? nullptr : &running->trace(); }

}  // namespace ropeteam::simulation
