// SPDX-License-Identifier: Apache-2.0
#include "membership/etcd/etcd.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <utility>

#include "core/base/log.h"
#include "membership/etcd/client.h"
#include "membership/etcd/seat.h"
#include "membership/standalone/coordinator_server.h"
#include "membership/standalone/loop.h"

namespace ropeteam {
namespace {

// The time for etcd to release the role and the lease of a node that leaves. If it is exceeded, the lease expires.
constexpr auto kResignMax = std::chrono::milliseconds(500);

class EtcdMembership final : public Membership {
 public:
  EtcdMembership(const MembershipConfig& config, const EtcdConfig& etcd) : config_(config), etcd_(etcd) {}
  ~EtcdMembership() override { Stop(); }

  Status Start(const Member& self, Callbacks callbacks) override;
  Status Rejoin(const Member& self) override;
  void ReportSuspect(NodeId member, const std::string& reason) override {
    inner_->ReportSuspect(member, reason);
  }
  void ReportReach(NodeId member, bool reached) override { inner_->ReportReach(member, reached); }
  void Relocate(const Place& place, bool now) override;
  void Stop() override;

 private:
  Callbacks Inner();
  std::string Describe(const Member& member) const;
  EtcdClient::Handler FromEtcd();
  void Perform(Seat::Outputs outputs);  // on the loop
  void SayOutage(const Seat::Outage& outage);
  void PassContact(const Contact& contact);

  const MembershipConfig config_;
  const EtcdConfig etcd_;
  Callbacks callbacks_;
  std::unique_ptr<Membership> inner_;          // this node's agent; told by the seat where to register
  std::unique_ptr<CoordinatorServer> server_;  // runs a coordinator while this node has the coordinator role
  std::unique_ptr<EtcdClient> client_;         // the loop's
  std::unique_ptr<Seat> seat_;                 // the loop's
  uint64_t moves_ = 0;                         // the loop's; orders the places that the seat has seen
  Loop loop_;

  std::mutex calling_;  // one callback at a time: some come from the agent's thread, some from the loop
  Contact contact_;     // under calling_; as the agent reported it last
  std::string outage_;  // under calling_; the message about etcd while it does not answer
  bool away_ = false;   // under calling_; with outage_: it does not answer at all

  std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;
  bool resigned_ = false;
};

Status EtcdMembership::Start(const Member& self, Callbacks callbacks) {
  ROPETEAM_RETURN_IF_ERROR(ValidateMember(self));
  {
    const std::lock_guard lock(mutex_);
    if (seat_ != nullptr) return Error(Code::kInvalidArgument, "membership was started before");
  }
  callbacks_ = std::move(callbacks);
  MembershipConfig serving = config_;
  serving.coordinator_node = self.name;
  server_ = std::make_unique<CoordinatorServer>(serving, [this](const ViewStatePtr& view) {
    loop_.Post([this, view](TimeUs now) { Perform(seat_->StoreView(now, view)); });
  });
  ROPETEAM_RETURN_IF_ERROR(server_->Start());
  MembershipConfig registering = config_;
  registering.coordinator_addresses.clear();
  registering.coordinator_listen.clear();
  inner_ = CreateStandaloneMembership(registering);
  Seat::Config seat{config_.job,
                    etcd_.prefix,
                    config_.dead_after_ms,
                    config_.probe_ms,
                    server_->address(),
                    std::random_device()() | uint64_t{std::random_device()()} << 32,
                    [this](const Member& member) { return Describe(member); }};
  contact_.since = Loop::Now();
  seat_ = std::make_unique<Seat>(seat, self);
  client_ = std::make_unique<EtcdClient>(etcd_, FromEtcd());
  {
    const std::lock_guard lock(mutex_);
    running_ = true;
  }
  ROPETEAM_RETURN_IF_ERROR(inner_->Start(self, Inner()));
  loop_.Post([this](TimeUs now) { Perform(seat_->Start(now)); });
  loop_.Start([this](TimeUs now) { Perform(seat_->Tick(now)); }, [this] { return seat_->NextDeadline(); });
  return OkStatus();
}

std::string EtcdMembership::Describe(const Member& member) const {
  nlohmann::json line = {{"name", member.name},
                         {"address", member.control_address},
                         {"domain", member.domain},
                         {"ordinal", member.ordinal},
                         {"protocol", config_.protocol_version},
                         {"chunk_bytes", config_.chunk_bytes},
                         {"transport", config_.data_transport},
                         {"replicas", config_.settings.replicas},
                         {"keep_steps", config_.settings.keep_steps},
                         {"nodes", config_.settings.nodes},
                         {"storage", config_.settings.storage}};
  return line.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

EtcdClient::Handler EtcdMembership::FromEtcd() {
  EtcdClient::Handler handler;
  handler.on_answer = [this](uint64_t id, Result<StoreAnswer> answer) {
    loop_.Post(
        [this, id, answer = std::move(answer)](TimeUs now) { Perform(seat_->Answered(now, id, answer)); });
  };
  handler.on_kept_alive = [this](StoreLease lease, int64_t ttl_s) {
    loop_.Post([this, lease, ttl_s](TimeUs now) { Perform(seat_->KeptAlive(now, lease, ttl_s)); });
  };
  handler.on_changed = [this](uint64_t watch, int64_t revision, const std::string* value) {
    const auto copy = value != nullptr ? std::optional<std::string>(*value) : std::nullopt;
    loop_.Post(
        [this, watch, revision, copy](TimeUs now) { Perform(seat_->Changed(now, watch, revision, copy)); });
  };
  handler.on_watch_ended = [this](uint64_t watch, const std::string& why) {
    LOG_DEBUG("membership watch of etcd ended, reason %s", why.c_str());
    loop_.Post([this, watch](TimeUs now) { Perform(seat_->WatchEnded(now, watch)); });
  };
  return handler;
}

Membership::Callbacks EtcdMembership::Inner() {
  Callbacks inner;
  inner.on_view = [this](const View& view) {
    loop_.Post([this, view](TimeUs now) { Perform(seat_->OnView(now, view)); });
    const std::lock_guard lock(calling_);
    if (callbacks_.on_view) callbacks_.on_view(view);
  };
  inner.on_lease = [this](TimeUs valid_until) {
    const std::lock_guard lock(calling_);
    if (callbacks_.on_lease) callbacks_.on_lease(valid_until);
  };
  inner.on_check = [this](const std::vector<NodeId>& members) {
    const std::lock_guard lock(calling_);
    if (callbacks_.on_check) callbacks_.on_check(members);
  };
  inner.on_refused = [this](const Status& status) {
    loop_.Post([this](TimeUs now) { Perform(seat_->OnRefused(now)); });
    const std::lock_guard lock(calling_);
    if (callbacks_.on_refused) callbacks_.on_refused(status);
  };
  inner.on_contact = [this](const Contact& contact) {
    loop_.Post(
        [this, registered = contact.registered](TimeUs now) { Perform(seat_->OnContact(now, registered)); });
    const std::lock_guard lock(calling_);
    contact_ = contact;
    PassContact(contact);
  };
  return inner;
}

void EtcdMembership::PassContact(const Contact& contact) {
  if (!callbacks_.on_contact) return;
  Contact with = contact;
  with.trouble = outage_;
  callbacks_.on_contact(with);
}

void EtcdMembership::SayOutage(const Seat::Outage& outage) {
  const std::lock_guard lock(calling_);
  if (outage.since == 0) {
    LOG_INFO("membership %s answers again", EtcdName(etcd_).c_str());
    outage_.clear();
  } else {
    const TimeUs ago = Loop::Now() - outage.since;
    const time_t since = std::time(nullptr) - static_cast<time_t>(ago / 1'000'000);
    tm parts{};
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&since, &parts));
    away_ = !outage.refuses;
    outage_ = EtcdName(etcd_) +
              (away_ ? " does not answer since " : " refuses what is to be written since ") + text + " (" +
              outage.why + "): " +
              (away_ ? "saves stay local, no node is declared dead, reads go on"
                     : "no node can join or leave the view");
    LOG_WARNING("membership %s", outage_.c_str());
  }
  PassContact(contact_);
}

void EtcdMembership::Perform(Seat::Outputs outputs) {
  for (Seat::Output& output : outputs) {
    if (const auto* call = std::get_if<Seat::Call>(&output)) {
      client_->Call(call->id, call->request, call->deadline_ms);
    } else if (const auto* keep_alive = std::get_if<Seat::KeepAlive>(&output)) {
      client_->KeepAlive(keep_alive->lease);
    } else if (const auto* watch = std::get_if<Seat::Watch>(&output)) {
      client_->Watch(watch->number, watch->key, watch->from);
    } else if (std::holds_alternative<Seat::NextEndpoint>(output)) {
      client_->NextEndpoint();
    } else if (const auto* moved = std::get_if<Seat::Moved>(&output)) {
      inner_->Relocate({moved->address, ++moves_}, true);
    } else if (const auto* elected = std::get_if<Seat::Elected>(&output)) {
      server_->Elect(elected->inheritance);
    } else if (const auto* confirmed = std::get_if<Seat::Confirmed>(&output)) {
      server_->Confirmed(confirmed->until);
    } else if (const auto* stored = std::get_if<Seat::Stored>(&output)) {
      server_->Stored(stored->epoch);
    } else if (const auto* deposed = std::get_if<Seat::Deposed>(&output)) {
      LOG_INFO("membership this node is no longer the coordinator, reason %s", deposed->why.c_str());
      server_->Depose();
    } else if (const auto* refused = std::get_if<Seat::Refused>(&output)) {
      const std::lock_guard lock(calling_);
      if (callbacks_.on_refused) callbacks_.on_refused(refused->status);
    } else if (const auto* outage = std::get_if<Seat::Outage>(&output)) {
      SayOutage(*outage);
    } else {
      const std::lock_guard lock(mutex_);
      resigned_ = true;
      changed_.notify_all();
    }
  }
}

Status EtcdMembership::Rejoin(const Member& self) {
  ROPETEAM_RETURN_IF_ERROR(ValidateMember(self));
  const std::lock_guard lock(mutex_);
  if (!running_) return Error(Code::kAborted, "membership is not running");
  loop_.Post([this, self](TimeUs now) { Perform(seat_->Rejoin(now, self)); });
  return inner_->Rejoin(self);
}

void EtcdMembership::Relocate(const Place& place, bool) {
  const std::lock_guard lock(mutex_);
  if (!running_) return;
  // Members report the coordinator's address. etcd is more reliable, unless this node cannot reach it.
  loop_.Post([this, address = place.address](TimeUs) {
    bool away = false;
    {
      const std::lock_guard inner(calling_);
      away = away_ && !outage_.empty() && !contact_.registered;
    }
    if (away) inner_->Relocate({address, moves_}, true);
  });
}

void EtcdMembership::Stop() {
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(running_, false)) return;
  }
  inner_->Stop();
  server_->Settle();
  loop_.Post([this](TimeUs now) { Perform(seat_->Resign(now)); });
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kResignMax, [this] { return resigned_; });
  }
  loop_.Stop();
  client_->Stop();
  server_->Stop();
}

// A user's password may precede the last '@', although that is not allowed.
Status Wrong(std::string url, const char* what) {
  if (const size_t at = url.rfind('@'); at != std::string::npos) url.replace(0, at, "…");
  return Error(Code::kInvalidArgument, "\"%.200s\" is not etcd://[USER@]HOST:PORT[,HOST:PORT...]/PREFIX: %s",
               url.c_str(), what);
}

}  // namespace

Result<EtcdConfig> ParseEtcdUrl(const std::string& url) {
  EtcdConfig config;
  config.tls = url.starts_with("etcds://");
  if (!config.tls && !url.starts_with("etcd://")) return Wrong(url, "it does not begin so");
  std::string rest = url.substr(url.find("//") + 2);
  const size_t slash = rest.find('/');
  if (slash == std::string::npos) return Wrong(url, "the prefix of all keys is missing");
  config.prefix = rest.substr(slash + 1);
  while (config.prefix.ends_with('/')) config.prefix.pop_back();
  if (config.prefix.empty()) return Wrong(url, "the prefix of all keys is empty");
  if (config.prefix.size() > kEtcdPrefixBytesMax)
    return Error(Code::kInvalidArgument, "etcd prefix of %zu bytes, limit %zu", config.prefix.size(),
                 kEtcdPrefixBytesMax);
  rest.resize(slash);
  if (const size_t at = rest.rfind('@'); at != std::string::npos) {
    config.user = rest.substr(0, at);
    rest.erase(0, at + 1);
    if (config.user.find(':') != std::string::npos)
      return Error(Code::kInvalidArgument,
                   "the URL of etcd has a password in it, which would be shown: give it in a file "
                   "(--etcd-password-file) or in ROPETEAM_ETCD_PASSWORD");
  }
  for (size_t begin = 0; begin <= rest.size();) {
    const size_t end = std::min(rest.find(',', begin), rest.size());
    const std::string endpoint = rest.substr(begin, end - begin);
    const size_t colon = std::min(endpoint.rfind(':'), endpoint.size());
    const std::string host = endpoint.substr(0, colon);
    const bool v6 = host.size() > 2 && host.front() == '[' && host.back() == ']';
    const std::string port = endpoint.substr(std::min(colon + 1, endpoint.size()));
    if (host.empty() || (!v6 && host.find_first_of("[:]") != std::string::npos) || port.empty() ||
        port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos || std::stoi(port) < 1 ||
        std::stoi(port) > UINT16_MAX)
      return Wrong(url, "an endpoint is not HOST:PORT or [IPV6]:PORT");
    config.endpoints.push_back(endpoint);
    begin = end + 1;
  }
  if (config.endpoints.size() > kEtcdEndpointsMax)
    return Error(Code::kInvalidArgument, "%zu endpoints of etcd, limit %zu", config.endpoints.size(),
                 kEtcdEndpointsMax);
  return config;
}

std::string EtcdName(const EtcdConfig& config) {
  std::string name = "etcd at ";
  for (const std::string& endpoint : config.endpoints)
    name += (&endpoint == &config.endpoints.front() ? "" : ",") + endpoint;
  return name;
}

std::unique_ptr<Membership> CreateEtcdMembership(const MembershipConfig& config, const EtcdConfig& etcd) {
  return std::make_unique<EtcdMembership>(config, etcd);
}

}  // namespace ropeteam
