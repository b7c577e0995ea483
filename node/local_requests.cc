// SPDX-License-Identifier: Apache-2.0
//
// LocalServer's requests: each frame becomes one input of the Engine.

#include <algorithm>

#include "core/base/bytes.h"
#include "node/local_server.h"

namespace ropeteam {
namespace {

// ROPETEAM_TIMEOUT_MAX_MS. The limit keeps the sum of clock and timeout from overflowing.
constexpr uint64_t kTimeoutMsMax = 86'400'000;

bool WantsAnswer(local::Type type) {
  return type != local::Type::kSaveFilled && type != local::Type::kViewClose &&
         type != local::Type::kGpuBufferEnd && type != local::Type::kSaveDirect;
}

}  // namespace

TimeUs LocalServer::TimeoutUs(uint64_t timeout_ms) { return std::min(timeout_ms, kTimeoutMsMax) * 1000; }

bool LocalServer::OnRequest(SessionId id, Client& client, local::Type type, RequestId request,
                            std::string_view payload) {
  if (WantsAnswer(type)) {
    if (client.outstanding >= kRequestsOutstandingMax) {
      Reply(client, request, Code::kNoSpace,
            "needed 1 more request in waiting, limit " + std::to_string(kRequestsOutstandingMax) +
                " a session");
      return true;
    }
    ++client.outstanding;
  }
  switch (type) {
    case local::Type::kSaveBegin:
    case local::Type::kSaveExtend:
    case local::Type::kSaveFilled:
    case local::Type::kSaveCommit:
    case local::Type::kSaveAbort:
      return OnSaveRequest(id, client, type, request, payload);
    case local::Type::kGpuBuffer:
    case local::Type::kGpuBufferEnd:
    case local::Type::kSaveDirect:
    case local::Type::kSaveSettle:
      return OnDeviceRequest(id, client, type, request, payload);
    case local::Type::kDrop: {
      local::Drop drop;
      if (!Decode(payload, drop)) return false;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnDrop(now, id, request, drop.step, TimeoutUs(drop.timeout_ms));
      });
      return true;
    }
    case local::Type::kPersist: {
      local::Persist persist;
      if (!Decode(payload, persist)) return false;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnPersist(now, id, request, persist.step, TimeoutUs(persist.timeout_ms));
      });
      return true;
    }
    case local::Type::kSetPolicy: {
      local::SetPolicy policy;
      if (!Decode(payload, policy)) return false;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnSetPolicy(now, id, request, {policy.persist_every, policy.keep_on_storage},
                           TimeoutUs(policy.timeout_ms));
      });
      return true;
    }
    case local::Type::kWait:
      return OnWait(id, client, request, payload);
    case local::Type::kLatest:
    case local::Type::kViewOpen:
    case local::Type::kViewRead:
    case local::Type::kViewRepair:
    case local::Type::kViewClose:
      return OnViewRequest(id, type, request, payload);
    case local::Type::kStorageList:
      return OnStorageList(id, request, payload);
    case local::Type::kTrace: {
      local::Trace trace;
      if (!Decode(payload, trace)) return false;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnTrace(now, id, request, trace.node, trace.events, trace.step, TimeoutUs(trace.timeout_ms));
      });
      return true;
    }
    case local::Type::kQuarantine: {
      local::Quarantine quarantine;
      if (client.state != State::kAdmin || !Decode(payload, quarantine)) return false;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnQuarantine(now, id, request, quarantine.step, quarantine.undo,
                            TimeoutUs(quarantine.timeout_ms));
      });
      return true;
    }
    case local::Type::kForget: {
      local::Forget forget;
      if (client.state != State::kAdmin || !Decode(payload, forget)) return false;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnForget(now, id, request, forget.node, TimeoutUs(forget.timeout_ms));
      });
      return true;
    }
    case local::Type::kRejoin:
      return OnRejoin(client, request, payload);
    case local::Type::kDrain:
      return OnDrain(id, client, request, payload);
    case local::Type::kAdmin:
      return OnAdmin(id, client, request, payload);
    default:
      return false;
  }
}

bool LocalServer::OnSaveRequest(SessionId id, const Client& client, local::Type type, RequestId request,
                                std::string_view payload) {
  if (type == local::Type::kSaveBegin) {
    local::SaveBegin begin;
    if (!Decode(payload, begin, client.version)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnSaveBegin(now, id, request, begin.step, begin.stream_bytes, begin.agreement);
    });
  } else if (type == local::Type::kSaveExtend) {
    local::SaveExtend extend;
    if (!Decode(payload, extend)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnSaveExtend(now, id, request, extend.save, extend.chunks);
    });
  } else if (type == local::Type::kSaveFilled) {
    local::SaveFilled filled;
    if (!Decode(payload, filled)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnSaveFilled(now, id, filled.save, filled.first, filled.crcs);
    });
  } else if (type == local::Type::kSaveCommit) {
    local::SaveCommit commit;
    if (!Decode(payload, commit)) return false;
    OnSaveCommit(id, client, request,
                 {commit.save, commit.stream_bytes, commit.manifest_offset, commit.object_count,
                  std::move(commit.crcs)});
  } else {
    local::SaveAbort abort;
    if (!Decode(payload, abort)) return false;
    drive_([&](Engine& engine, TimeUs now) { engine.OnSaveAbort(now, id, request, abort.save); });
  }
  return true;
}

// While a large manifest is read, the session's further requests wait: they are answered as if it had taken no time.
void LocalServer::OnSaveCommit(SessionId id, const Client& client, RequestId request,
                               SaveCommitInput commit) {
  std::function<Status()> check;
  if (config_.off_loop && commit.manifest_offset < commit.stream_bytes &&
      commit.stream_bytes - commit.manifest_offset > kManifestOnLoopBytesMax)
    drive_([&](Engine& engine, TimeUs) { check = engine.ManifestCheck(id, commit); });
  if (!check)
    return drive_([&](Engine& engine, TimeUs now) { engine.OnSaveCommit(now, id, request, commit); });
  client.session->Hold();
  const auto input = std::make_shared<SaveCommitInput>(std::move(commit));
  config_.off_loop(
      [input, check = std::move(check)] { input->manifest = check(); },
      [this, id, request, input, alive = std::weak_ptr<int>(alive_)] {
        if (alive.expired()) return;
        const auto found = clients_.find(id);
        if (found == clients_.end() || found->second.session->closed()) return;
        drive_([&](Engine& engine, TimeUs now) { engine.OnSaveCommit(now, id, request, *input); });
        found->second.session->Resume();
      });
}

bool LocalServer::OnWait(SessionId id, Client& client, RequestId request, std::string_view payload) {
  local::Wait wait;
  if (!Decode(payload, wait)) return false;
  if (wait.level < static_cast<uint8_t>(Level::kLocal) ||
      wait.level > static_cast<uint8_t>(Level::kPersisted)) {
    --client.outstanding;
    Reply(client, request, Code::kInvalidArgument,
          "level " + std::to_string(wait.level) + " is not 1 (local) to 4 (persisted)");
    return true;
  }
  drive_([&](Engine& engine, TimeUs now) {
    engine.OnWait(now, id, request, wait.step, static_cast<Level>(wait.level), TimeoutUs(wait.timeout_ms));
  });
  return true;
}

bool LocalServer::OnViewRequest(SessionId id, local::Type type, RequestId request, std::string_view payload) {
  if (type == local::Type::kLatest) {
    local::Latest latest;
    if (!Decode(payload, latest)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnLatest(now, id, request, static_cast<Level>(latest.level), TimeoutUs(latest.timeout_ms));
    });
  } else if (type == local::Type::kViewOpen) {
    local::ViewOpen open;
    if (!Decode(payload, open, clients_.at(id).version)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnViewOpen(now, id, request, open.step, open.rank, TimeoutUs(open.timeout_ms), open.partial);
    });
  } else if (type == local::Type::kViewRead) {
    local::ViewRead read;
    if (!Decode(payload, read)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnViewRead(now, id, request, read.view, read.parts, TimeoutUs(read.timeout_ms));
    });
  } else if (type == local::Type::kViewRepair) {
    local::ViewRepair repair;
    if (!Decode(payload, repair)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnViewRepair(now, id, request, repair.view, repair.chunks, TimeoutUs(repair.timeout_ms));
    });
  } else {
    local::ViewClose close;
    if (!Decode(payload, close)) return false;
    drive_([&](Engine& engine, TimeUs now) { engine.OnViewClose(now, id, close.view); });
  }
  return true;
}

bool LocalServer::OnStorageList(SessionId id, RequestId request, std::string_view payload) {
  local::StorageList list;
  if (!Decode(payload, list) || list.steps_max == 0 || list.steps_max > local::kListedStepsMax) return false;
  const TimeUs timeout_us = TimeoutUs(list.timeout_ms);
  drive_([&](Engine&, TimeUs now) { lists_[{id, request}] = now + timeout_us; });  // also arms the timer
  config_.list_storage(list.steps_max, timeout_us,
                       [this, id, request](const Status& status, local::StorageListReply reply) {
                         if (lists_.erase({id, request}) == 0) return;
                         Client& client = clients_.at(id);
                         --client.outstanding;
                         if (!status.ok()) return Reply(client, request, status.code(), status.message());
                         client.session->Send(local::Type::kStorageListReply, request, Encode(reply));
                       });
  return true;
}

TimeUs LocalServer::NextTimer() const {
  TimeUs next = EventLoop::kNever;
  for (const auto& [list, deadline] : lists_) next = std::min(next, deadline);
  return next;
}

void LocalServer::OnTimer(TimeUs now) {
  // Searches from the beginning each time: an answer that is not read may close its session, which removes
  // the session's other requests.
  for (;;) {
    const auto late =
        std::find_if(lists_.begin(), lists_.end(), [now](const auto& list) { return list.second <= now; });
    if (late == lists_.end()) return;
    const auto [id, request] = late->first;
    lists_.erase(late);
    Client& client = clients_.at(id);
    --client.outstanding;
    Reply(client, request, Code::kDeadlineExceeded,
          "storage was not listed within the timeout: it is slow or away");
  }
}

bool LocalServer::OnRejoin(Client& client, RequestId request, std::string_view payload) {
  local::Rejoin rejoin;
  if (client.state != State::kAdmin || !Decode(payload, rejoin)) return false;
  --client.outstanding;
  const Status status = config_.rejoin ? config_.rejoin(rejoin.coordinator, rejoin.force)
                                       : Error(Code::kUnsupported, "this daemon has no membership");
  Reply(client, request, status.code(), status.message());
  return true;
}

bool LocalServer::OnDrain(SessionId id, Client& client, RequestId request, std::string_view payload) {
  local::Drain drain;
  if (client.state != State::kAdmin || !Decode(payload, drain)) return false;
  if (!config_.drain) {
    --client.outstanding;
    Reply(client, request, Code::kUnsupported, "this daemon has no membership");
    return true;
  }
  drains_.emplace(id, request);
  config_.drain(TimeoutUs(drain.within_ms));
  return true;
}

void LocalServer::OnDrained(const std::string& json) {
  for (const auto& [id, request] : std::exchange(drains_, {})) {
    Client& client = clients_.at(id);
    --client.outstanding;
    client.session->Send(local::Type::kAdminReply, request, Encode(local::AdminReply{json}));
  }
}

bool LocalServer::OnAdmin(SessionId id, Client& client, RequestId request, std::string_view payload) {
  local::Admin admin;
  if (!Decode(payload, admin)) return false;
  switch (admin.command) {
    case local::AdminCommand::kNode: {
      --client.outstanding;
      std::string json;
      drive_([&](Engine& engine, TimeUs) {
        DaemonFacts facts = Facts();
        facts.drain = engine.drain();
        if (const Member* leader = engine.view().Find(engine.view().leader)) facts.leader = leader->name;
        json = NodeJson(engine.Report(), facts, config_.transport());
      });
      client.session->Send(local::Type::kAdminReply, request, Encode(local::AdminReply{std::move(json)}));
      return true;
    }
    case local::AdminCommand::kStatus:
    case local::AdminCommand::kList:
      client.admin[request] = admin;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnReport(now, id, request, TimeoutUs(admin.timeout_ms));
      });
      return true;
    case local::AdminCommand::kVerify:
      client.admin[request] = admin;
      drive_([&](Engine& engine, TimeUs now) {
        engine.OnVerify(now, id, request, admin.has_step ? &admin.step : nullptr,
                        TimeoutUs(admin.timeout_ms));
      });
      return true;
  }
  return false;
}

}  // namespace ropeteam
