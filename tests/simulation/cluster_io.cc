// SPDX-License-Identifier: Apache-2.0
//
// The engines' inputs and outputs, and the sessions.
#include <algorithm>
#include <cinttypes>

#include "core/base/checksum.h"
#include "core/engine/messages.h"
#include "tests/simulation/cluster.h"
#include "tests/toy_cipher.h"

namespace ropeteam::simulation {
namespace {

// A request is answered at most this long after its deadline: timers may be late, and bytes may be checked.
constexpr TimeUs kAnswerSlackUs = 300 * kMs;
// Requests without a timeout need only this node. The longest one is the check of a manifest.
constexpr TimeUs kLocalAnswerUs = 1 * kSecond;

const char* AnswerName(const Answer& answer) {
  constexpr const char* kNames[] = {"status", "hello",  "grant",  "latest", "view",
                                    "ranges", "report", "verify", "trace"};
  return kNames[answer.body.index()];
}

}  // namespace

const char* RequestName(RequestKind kind) {
  constexpr const char* kNames[] = {
      "hello",      "save_begin",  "save_extend", "save_commit", "save_abort",  "wait",    "latest",
      "view_open",  "view_repair", "report",      "verify",      "save_settle", "persist", "latest_persisted",
      "quarantine", "ranges_open", "ranges_read", "drop",        "set_policy"};
  return kNames[static_cast<size_t>(kind)];
}

void Cluster::Give(Host* host, const char* what, const Drive& drive) {
  if (!host->daemon_runs() || checker_.failed()) return;
  ++inputs_;
  const uint64_t free_before = host->store->chunks_free();
  const uint64_t dropped_before = checker_.dropped();
  drive(*host->engine, host->clock.Local(now()));
  Outbox out = std::move(host->engine->outbox());
  host->engine->outbox().clear();
  checker_.Observe(*host);
  for (const LevelEvent& event : out.events) {
    if (tracing())
      Trace("host %zu %s: %s of %s", host->index, what, LevelName(event.level),
            event.shard.rank == LevelEvent::kNoRank ? StepOf(event.shard).ToString().c_str()
                                                    : event.shard.ToString().c_str());
    Digest(
        Mix(event.shard.incarnation, event.shard.step, event.shard.rank, static_cast<uint64_t>(event.level)));
    checker_.OnEvent(*host, event);
    if (on_event) on_event(host->index, event);
  }
  checker_.JudgeDrops(*host);
  const bool crash = random_.Chance(crash_in_input_ppm_);
  const size_t outputs = out.messages.size() + out.transfers.size() + out.checks.size() + out.storage.size() +
                         out.answers.size();
  CarryOut(host, out, crash ? random_.Below(outputs + 1) : SIZE_MAX, free_before, dropped_before);
  if (checker_.failed()) Trace("host %zu failed on input %s", host->index, what);
  if (crash && host->up) {
    Trace("host %zu daemon dies in input %s", host->index, what);
    const size_t index = host->index;
    EndDaemon(host, true);
    scheduler_.After(random_.Between(options_.faults.daemon_back_min_us, options_.faults.daemon_back_max_us),
                     [this, index] { StartDaemon(index); });
    return;
  }
  if (random_.Chance(options_.invariants_ppm)) {
    host->engine->CheckInvariants();
    host->store->CheckInvariants();
  }
  ArmTimer(host);
  if (host->drains_since != 0 && host->drains_since != kForever && host->engine->drain().done)
    scheduler_.After(0, [this, index = host->index, instance = host->id] { LeaveJob(index, instance); });
}

// Executes the first `limit` outputs. The daemon dies before the others.
void Cluster::CarryOut(Host* host, const Outbox& out, size_t limit, uint64_t free_before,
                       uint64_t dropped_before) {
  size_t done = 0;
  for (const StartTransfer& start : out.transfers)
    if (done++ < limit) CarryTransfer(host, start);
  for (const StartCheck& check : out.checks)
    if (done++ < limit) CarryCheck(host, check);
  for (const StartStorage& start : out.storage)
    if (done++ < limit) {
      Digest(Mix(now(), host->id, start.tag, start.work.index()));
      storage_.Start(*host, start);
    }
  for (const Answer& answer : out.answers)
    if (done++ < limit) CarryAnswer(host, answer, free_before, dropped_before);
  for (const SendMessage& message : out.messages)
    if (done++ < limit) CarryMessage(host, message);
  for (const auto& suspicion : out.suspicions) {
    Trace("host %zu suspects %" PRIx64 ": %s", host->index, suspicion.peer, suspicion.reason.c_str());
    membership_->Suspect(host->id, suspicion.peer, suspicion.reason);
  }
  for (const PeerReached& peer : out.reached) {
    Trace("host %zu %s %" PRIx64, host->index, peer.reached ? "reaches" : "does not reach", peer.peer);
    membership_->Reach(host->id, peer.peer, peer.reached);
  }
}

void Cluster::CarryMessage(Host* host, const SendMessage& message) {
  Digest(Mix(now(), host->id, message.to, message.envelope.size()));
  checker_.OnMessage(*host, host->has_lease(now()), message);
  const auto at = instances_.find(message.to);
  if (at == instances_.end()) return;
  const size_t to = at->second;
  const auto envelope = std::make_shared<const std::string>(message.envelope);
  network_.PostMessage(host->index, to,
                       [this, to, from = host->id, instance = message.to, epoch = host->engine->view().epoch,
                        envelope] { DeliverMessage(to, from, instance, epoch, envelope); });
}

// What is committed comes to a leader in inventories, and to the members in its announcements.
bool Cluster::TellsCommits(const std::string& envelope) {
  Envelope opened;
  if (!Decode(envelope, opened)) return false;
  const Kind kind = opened.kind;
  return kind == Kind::kInventory || kind == Kind::kInventoryDelta || kind == Kind::kLeaderState;
}

void Cluster::DeliverMessage(size_t to, NodeId from, NodeId instance, Epoch epoch,
                             const std::shared_ptr<const std::string>& envelope) {
  Host& target = *hosts_[to];
  const NodeId taker = target.id;
  if (!target.daemon_runs() || (taker != instance && !random_.Chance(network_.options().misdeliver_ppm)))
    return;
  if (target.paused)
    return WhenAwake(&target, [=, this] { DeliverMessage(to, from, instance, epoch, envelope); });
  const Host* sender = taker == instance ? FindInstance(from) : nullptr;
  if (sender != nullptr && TellsCommits(*envelope)) {
    if (epoch > target.engine->view().epoch) {
      target.knows_early[epoch].insert(sender->knows.steps().begin(), sender->knows.steps().end());
    } else if (sender != &target) {
      target.knows.Hear(sender->knows);
    }
  }
  const bool stale = taker != instance || epoch < target.engine->view().epoch;
  const uint64_t refused = stale ? target.engine->Report().counters.messages_stale : 0;
  Give(&target, "message", [&](Engine& engine, TimeUs local) { engine.OnMessage(local, from, *envelope); });
  if (stale && target.id == taker && target.engine->Report().counters.messages_stale == refused)
    checker_.Fail("host %zu took a message for another instance or of an epoch that is over", to);
}

void Cluster::CarryTransfer(Host* host, const StartTransfer& start) {
  Digest(Mix(now(), host->id, start.tag, start.length));
  if (!start.get && !host->has_lease(now()))
    return checker_.Fail("host %zu starts a put to %" PRIx64 " without a lease", host->index, start.peer);
  const TimeUs post_max = network_.options().post_max_us;
  if (post_max == 0) return PostTransfer(host->index, host->id, start);
  scheduler_.After(random_.Below(post_max), [this, index = host->index, instance = host->id, start] {
    if (hosts_[index]->id == instance)
      WhenAwake(hosts_[index].get(), [=, this] { PostTransfer(index, instance, start); });
  });
}

void Cluster::PostTransfer(size_t index, NodeId instance, const StartTransfer& start) {
  Host* host = hosts_[index].get();
  if (host->id != instance) return;
  // As the driver does before each batch: a put starts only under a lease.
  if (!start.get && !host->has_lease(now())) {
    Trace("host %zu put tag %" PRIu64 " does not leave: the lease has run out", index, start.tag);
    scheduler_.After(random_.Between(1, kMs), [this, index, instance, tag = start.tag] {
      OnTransferDone(index, instance, tag, Code::kStale);
    });
    return;
  }
  if (host->lost_links.contains(start.peer)) {
    scheduler_.After(random_.Between(1, kMs), [this, index, instance, tag = start.tag] {
      OnTransferDone(index, instance, tag, Code::kPeerGone);
    });
    return;
  }
  host->transfers[start.tag] = start.peer;
  Transfer transfer;
  transfer.number = network_.next_number();
  transfer.tag = start.tag;
  transfer.initiator = host->index;
  transfer.initiator_id = host->id;
  transfer.target_id = start.peer;
  transfer.get = start.get;
  transfer.local_offset = start.local_offset;
  transfer.length = start.length;
  const auto at = instances_.find(start.peer);
  transfer.target = at == instances_.end() ? host->index : at->second;
  transfer.remote_offset = hosts_[transfer.target]->chunks_begin + start.remote_offset;
  Trace("host %zu starts %s", host->index, transfer.ToString().c_str());
  if (start.buffer != 0) {
    const auto buffer = device_buffers_.find(start.buffer);
    if (buffer == device_buffers_.end() || random_.Chance(network_.options().device_refused_ppm)) {
      scheduler_.After(random_.Between(1, kMs),
                       [this, index = host->index, instance = host->id, tag = start.tag] {
                         OnTransferDone(index, instance, tag, Code::kNotFound);
                       });
      return;
    }
    transfer.device = buffer->second;
    const size_t bytes = transfer.device->bytes.size();
    if (start.get || start.local_offset > bytes || start.length > bytes - start.local_offset)
      return checker_.Fail("host %zu: %s is outside of device memory of %zu bytes", host->index,
                           transfer.ToString().c_str(), bytes);
  } else if (start.local_offset < host->chunks_begin ||
             start.local_offset + start.length > host->memory_bytes) {
    return checker_.Fail("host %zu: %s is outside of its own chunks", host->index,
                         transfer.ToString().c_str());
  }
  checker_.OnTransferStart(transfer);
  if (!start.get) {
    checker_.OnWire(transfer, Memory(host->index, start.local_offset, start.length));
  } else if (at != instances_.end() && hosts_[at->second]->id == start.peer) {
    checker_.OnWire(transfer, Memory(at->second, transfer.remote_offset, start.length));
  }
  if (on_transfer) on_transfer(transfer);
  network_.Start(std::move(transfer));
}

void Cluster::CarryCheck(Host* host, const StartCheck& check) {
  const NetworkOptions& network = network_.options();
  scheduler_.After(random_.Between(network.check_min_us, network.check_max_us),
                   [this, index = host->index, instance = host->id, check] {
                     Host& at = *hosts_[index];
                     if (at.id != instance) return;
                     WhenAwake(&at, [this, index, check] { FinishCheck(index, check); });
                   });
}

void Cluster::ConnectStorage() {
  storage_.find_host = [this](size_t index, NodeId instance) {
    Host* host = hosts_[index].get();
    return host->id == instance && host->daemon_runs() ? host : nullptr;
  };
  storage_.answer = [this](size_t index, NodeId instance, uint64_t tag, const Status& status,
                           const StorageDone& done) {
    Host* host = hosts_[index].get();
    if (host->id != instance) return;
    Trace("host %zu storage work %" PRIu64 ": %s", index, tag, status.ToString().c_str());
    Give(host, "storage done",
         [&](Engine& engine, TimeUs local) { engine.OnStorageDone(local, tag, status, done); });
  };
  storage_.stalled = [this](size_t index, NodeId instance, uint64_t tag) {
    Host* host = hosts_[index].get();
    if (host->id != instance) return;
    Trace("host %zu storage work %" PRIu64 " stalls", index, tag);
    Give(host, "storage stalled", [&](Engine& engine, TimeUs local) { engine.OnStorageStalled(local, tag); });
  };
  storage_.stray = [this](size_t index, uint64_t memory_generation, uint32_t chunk,
                          const std::string& bytes) { StrayWrite(index, memory_generation, chunk, bytes); };
  storage_.on_stored = [this](const StepId& id, const StoredStep& step) {
    Trace("storage has %s", id.ToString().c_str());
    checker_.OnStored(id, step);
  };
  storage_.on_prune = [this](size_t index, const PruneStored& prune) {
    Trace("host %zu deletes on storage, keeps %" PRIu64, index, prune.keep_newest);
    checker_.OnPrune(*hosts_[index], prune);
  };
  storage_.on_pruned = [this](size_t index, const std::vector<StepId>& newest_first,
                              const std::vector<StepId>& gone) {
    for (const StepId& id : gone) Trace("storage deletes %s", id.ToString().c_str());
    checker_.OnPruned(*hosts_[index], newest_first, gone);
  };
  storage_.on_violation = [this](const std::string& what) { checker_.Fail("%s", what.c_str()); };
}

void Cluster::FinishCheck(size_t index, const StartCheck& check) {
  Host& at = *hosts_[index];
  for (const StartCheck::Range& range : check.ranges) {
    if (Memory(index, range.offset, range.length) == nullptr ||
        (range.cipher && Memory(index, range.cipher->to, range.length) == nullptr))
      return checker_.Fail("host %zu checks bytes outside of its arena", index);
  }
  const ToyChecked checked = ToyCheckAll(at.memory.get(), check);
  for (uint32_t i = 0; i < check.ranges.size(); ++i)
    if (check.ranges[i].cipher && !std::binary_search(checked.bad.begin(), checked.bad.end(), i))
      checker_.OnCipher(at, check.ranges[i]);
  Give(&at, "check done", [&](Engine& engine, TimeUs local) {
    engine.OnCheckDone(local, check.tag, checked.bad, checked.encrypted);
  });
}

void Cluster::CarryAnswer(Host* host, const Answer& answer, uint64_t free_before, uint64_t dropped_before) {
  Digest(Mix(now(), answer.session, answer.request, answer.body.index()));
  const auto at = sessions_.find(answer.session);
  if (at == sessions_.end() || at->second.client == nullptr)
    return;  // the client has closed; the engine will learn it
  Session& session = at->second;
  const auto pending = session.pending.find(answer.request);
  if (pending == session.pending.end() || pending->second.answered || session.host != host->index)
    return checker_.Fail("host %zu answers request %" PRIu64 " of session %" PRIu64 ", which is not open",
                         host->index, answer.request, answer.session);
  Pending& request = pending->second;
  request.answered = true;
  const auto* status = std::get_if<AnswerStatus>(&answer.body);
  Trace("host %zu rank %u %s: %s", host->index, session.rank, RequestName(request.kind),
        status != nullptr ? status->status.ToString().c_str() : AnswerName(answer));
  if (const auto* hello = std::get_if<AnswerHello>(&answer.body)) {
    checker_.OnAdmitted(session, hello->incarnation, sessions_);
    session.incarnation = hello->incarnation;
    Trace("rank %u of launch %" PRIu64 " is in incarnation %" PRIu64, session.rank, session.launch,
          hello->incarnation);
  }
  if (const auto* latest = std::get_if<AnswerLatest>(&answer.body))
    Trace("rank %u latest %s", session.rank, latest->step.ToString().c_str());
  checker_.OnAnswer(*host, session, request, answer);
  if (status != nullptr && status->status.code() == Code::kNoSpace &&
      (request.kind == RequestKind::kSaveBegin || request.kind == RequestKind::kSaveExtend))
    checker_.OnRefusedForSpace(*host, status->status, free_before, dropped_before);
  session.to_client_at = std::max(session.to_client_at, now() + random_.Between(1, 30));
  scheduler_.At(session.to_client_at, [this, answer] {
    const auto open = sessions_.find(answer.session);
    if (open == sessions_.end() || open->second.client == nullptr) return;
    const auto asked = open->second.pending.find(answer.request);
    if (asked == open->second.pending.end()) return;
    const auto done = std::move(asked->second.done);
    open->second.pending.erase(asked);
    if (done) done(&answer);
  });
}

void Cluster::ArmTimer(Host* host) {
  if (!host->daemon_runs()) return;
  const TimeUs next = host->clock.When(now(), host->engine->NextTimer());
  if (next == kForever || next >= host->timer_at) return;
  const TimeUs late = options_.timer_late_max_us == 0 ? 0 : random_.Below(options_.timer_late_max_us);
  host->timer_at = std::max(next, now()) + late;
  scheduler_.At(host->timer_at, [this, index = host->index, instance = host->id, when = host->timer_at] {
    Host& at = *hosts_[index];
    if (at.id != instance || at.timer_at != when) return;
    WhenAwake(&at, [this, &at] {
      at.timer_at = kForever;
      if (at.engine->NextTimer() > at.clock.Local(now())) return ArmTimer(&at);
      Give(&at, "timer", [](Engine& engine, TimeUs local) { engine.OnTimer(local); });
    });
  });
}

// ---- sessions

SessionId Cluster::OpenSession(size_t index, Client* client, uint64_t launch, Rank rank,
                               uint32_t world_size) {
  Host& host = *hosts_[index];
  if (!host.daemon_runs()) return 0;
  const SessionId id = next_session_++;
  Session& session = sessions_[id];
  session.id = id;
  session.host = index;
  session.daemon = host.id;
  session.client = client;
  session.launch = launch;
  session.rank = rank;
  session.world_size = world_size;
  session.open_at_engine = true;
  DeliverToEngine(
      id, "session opened",
      [](Engine& engine, TimeUs now, const Session& opened, RequestId) {
        engine.OnSessionOpened(now, opened.id);
      },
      0);
  return id;
}

void Cluster::CloseSession(SessionId id) {
  const auto at = sessions_.find(id);
  if (at == sessions_.end()) return;
  at->second.client = nullptr;
  at->second.pending.clear();
  // For the daemon the session exists until it notices the end.
  DeliverToEngine(
      id, "session closed",
      [this](Engine& engine, TimeUs now, const Session& closed, RequestId) {
        checker_.OnSessionEnd(closed);
        sessions_[closed.id].open_at_engine = false;
        engine.OnSessionClosed(now, closed.id);
      },
      0);
  scheduler_.At(at->second.to_engine_at, [this, id] {
    const auto closing = sessions_.find(id);
    if (closing == sessions_.end()) return;
    Host& host = *hosts_[closing->second.host];
    if (host.id != closing->second.daemon) {
      sessions_.erase(closing);
    } else {
      WhenAwake(&host, [this, id] { sessions_.erase(id); });
    }
  });
}

void Cluster::DeliverToEngine(SessionId id, const char* what, const Input& input, RequestId request) {
  Session& session = sessions_.at(id);
  session.to_engine_at = std::max(session.to_engine_at, now() + random_.Between(1, 30));
  scheduler_.At(session.to_engine_at, [this, id, what, input, request] {
    const auto at = sessions_.find(id);
    if (at == sessions_.end()) return;
    Host& host = *hosts_[at->second.host];
    if (host.id != at->second.daemon) return;  // the daemon died meanwhile
    WhenAwake(&host, [this, &host, id, what, input, request] {
      const auto open = sessions_.find(id);
      if (open == sessions_.end()) return;
      Give(&host, what, [&](Engine& engine, TimeUs local) {
        // A copy: the input may end the session.
        const Session seen = open->second;
        input(engine, local, seen, request);
      });
    });
  });
}

void Cluster::Ask(SessionId id, Pending request, Input input) {
  const auto at = sessions_.find(id);
  if (at == sessions_.end() || at->second.client == nullptr) {
    // Later, like every answer: a client must not be called back from inside its own call.
    if (request.done) scheduler_.After(1, [done = std::move(request.done)] { done(nullptr); });
    return;
  }
  Session& session = at->second;
  const RequestId number = ++session.last_request;
  const RequestKind kind = request.kind;
  request.asked_at = now();
  session.pending[number] = std::move(request);
  DeliverToEngine(
      id, RequestName(kind),
      [this, kind, input = std::move(input)](Engine& engine, TimeUs when, const Session& session_now,
                                             RequestId request_now) {
        if (kind == RequestKind::kLatest) checker_.OnLatestInput(*hosts_[session_now.host], session_now);
        WatchDeadline(session_now.id, request_now);
        input(engine, when, session_now, request_now);
      },
      number);
}

void Cluster::Tell(SessionId id, Input input) {
  const auto at = sessions_.find(id);
  if (at == sessions_.end() || at->second.client == nullptr) return;
  DeliverToEngine(id, "tell", input, 0);
}

// The time runs from when the engine gets the request.
void Cluster::WatchDeadline(SessionId id, RequestId number) {
  const auto at = sessions_.find(id);
  if (at == sessions_.end()) return;
  const auto asked = at->second.pending.find(number);
  if (asked == at->second.pending.end()) return;
  const TimeUs time =
      asked->second.timeout_us == 0 ? kLocalAnswerUs : asked->second.timeout_us + kAnswerSlackUs;
  // On a slow clock a deadline comes late.
  const TimeUs slack = options_.timer_late_max_us + time * options_.clock_drift_ppm / kMillion;
  scheduler_.After(time + slack, [this, id, number, time] { CheckDeadline(id, number, time); });
}

void Cluster::CheckDeadline(SessionId id, RequestId number, TimeUs time) {
  const auto session = sessions_.find(id);
  if (session == sessions_.end() || !session->second.open_at_engine) return;
  const auto still = session->second.pending.find(number);
  if (still == session->second.pending.end() || still->second.answered) return;
  const Host& host = *hosts_[session->second.host];
  // A paused daemon answers nothing. After the pause it gets the whole time again.
  if (host.paused || host.resumed_at + time > now()) {
    scheduler_.After(time, [this, id, number, time] { CheckDeadline(id, number, time); });
    return;
  }
  checker_.Fail("host %zu has not answered %s (step %" PRIu64 ", timeout %" PRIu64 " us) of rank %u",
                session->second.host, RequestName(still->second.kind), still->second.step,
                still->second.timeout_us, session->second.rank);
}

const Session* Cluster::FindSession(SessionId id) const {
  const auto at = sessions_.find(id);
  return at == sessions_.end() ? nullptr : &at->second;
}

std::vector<OpenWait> Cluster::OpenWaits() const {
  std::vector<OpenWait> waits;
  for (const auto& [id, session] : sessions_) {
    if (!session.open_at_engine || session.client == nullptr) continue;
    for (const auto& [number, request] : session.pending)
      if (request.kind == RequestKind::kWait && !request.answered)
        waits.push_back({session.host, {session.incarnation, request.step, session.rank}, request.level});
  }
  return waits;
}

std::byte* Cluster::ClientMemory(SessionId id, uint32_t chunk) {
  const auto at = sessions_.find(id);
  if (at == sessions_.end() || !at->second.open_at_engine) return nullptr;
  return hosts_[at->second.host]->chunk(chunk);
}

// ---- calls of the network

std::byte* Cluster::Memory(size_t index, uint64_t offset, uint64_t length) {
  Host& host = *hosts_[index];
  if (offset > host.memory_bytes || length > host.memory_bytes - offset) return nullptr;
  return host.memory.get() + offset;
}

void Cluster::OnLanding(const Transfer& transfer, uint64_t offset, const std::string& bytes) {
  checker_.OnLanding(transfer, offset, bytes);
}

DeviceBufferId Cluster::ShareDevice(std::shared_ptr<const DeviceMemory> memory) {
  device_buffers_[next_device_buffer_] = std::move(memory);
  return next_device_buffer_++;
}

void Cluster::OnDeviceRead(const Transfer& transfer) {
  if (transfer.device->given_back && Alive(transfer.initiator, transfer.initiator_id))
    checker_.Fail("%s reads device memory that was given back to its owner", transfer.ToString().c_str());
}

void Cluster::OnTransferDone(size_t index, NodeId instance, uint64_t tag, Code code) {
  Host& host = *hosts_[index];
  if (host.id != instance) return;
  if (host.paused)
    return WhenAwake(&host,
                     [this, index, instance, tag, code] { OnTransferDone(index, instance, tag, code); });
  const auto posted = host.transfers.extract(tag);
  const bool lost = code == Code::kLinkFailed && !posted.empty() && host.view.Contains(posted.mapped()) &&
                    random_.Chance(network_.options().link_lost_ppm);
  if (lost) code = Code::kPeerGone;
  Trace("host %zu transfer %" PRIu64 " done: %s", index, tag, CodeName(code));
  Give(&host, "transfer done",
       [&](Engine& engine, TimeUs local) { engine.OnTransferDone(local, tag, code); });
  if (lost && host.id == instance) LoseLink(&host, posted.mapped());
}

// As the data plane does when its fabric reports a member as gone.
void Cluster::LoseLink(Host* host, NodeId peer) {
  if (!host->daemon_runs() || !host->lost_links.insert(peer).second) return;
  Trace("host %zu loses its connection to %" PRIx64, host->index, peer);
  const NodeId instance = host->id;
  Give(host, "link lost",
       [&](Engine& engine, TimeUs local) { engine.OnPeerLink(local, peer, false, "lost"); });
  Reconnect(host->index, instance, peer);
}

void Cluster::Reconnect(size_t index, NodeId instance, NodeId peer) {
  scheduler_.After(random_.Between(kMs, kSecond), [this, index, instance, peer] {
    WhenAwake(hosts_[index].get(), [this, index, instance, peer] {
      Host& host = *hosts_[index];
      if (host.id != instance || !host.lost_links.contains(peer)) return;
      const auto at = instances_.find(peer);
      if (at == instances_.end() || network_.PathIsCut(index, at->second))
        return Reconnect(index, instance, peer);
      host.lost_links.erase(peer);
      Give(&host, "link up", [&](Engine& engine, TimeUs local) { engine.OnPeerLink(local, peer, true, ""); });
    });
  });
}

}  // namespace ropeteam::simulation
