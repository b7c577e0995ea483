// SPDX-License-Identifier: Apache-2.0
#include "node/status_json.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "api/client/local_protocol.h"
#include "node/drain.h"

namespace ropeteam {
namespace {

using Json = nlohmann::ordered_json;

// Leaves room for the AdminReply around it, a string's length.
constexpr size_t kJsonBytesMax = local::kFrameBytesMax - 64;
// A listing is shown on a screen; programs get all objects through the API.
constexpr size_t kObjectsListedMax = 4000;

std::string Hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

Json ToJson(const ShardId& id) {
  return {{"incarnation", IncarnationNumber(id.incarnation)}, {"step", id.step}, {"rank", id.rank}};
}

const char* RoleName(Role role) {
  switch (role) {
    case Role::kOwn:
      return "own";
    case Role::kReplica:
      return "replica";
    case Role::kCache:
      return "cache";
  }
  return "unknown";
}

Json ToJson(const NodeCounters& c) {
  return {{"saves_begun", c.saves_begun},
          {"saves_sealed", c.saves_sealed},
          {"saves_aborted", c.saves_aborted},
          {"saves_refused", c.saves_refused},
          {"replica_bytes_sent", c.replica_bytes_sent},
          {"replica_bytes_held", c.replica_bytes_held},
          {"fetch_bytes", c.fetch_bytes},
          {"chunks_bad", c.chunks_bad},
          {"chunks_repaired", c.chunks_repaired},
          {"messages_stale", c.messages_stale},
          {"last_replicated_us", c.last_replicated_us},
          {"table_repairs", c.table_repairs},
          {"persisted_bytes", c.persisted_bytes},
          {"loaded_bytes", c.loaded_bytes}};
}

Json ToJson(const ScrubReport& s) {
  return {{"bytes_per_s", s.bytes_per_s},
          {"passes", s.passes},
          {"pass_ended_us_ago", s.pass_ended_us_ago},
          {"pass_us", s.pass_us},
          {"pass_bytes", s.pass_bytes}};
}

Json ToJson(const SessionReport& s) {
  return {{"rank", s.rank},
          {"world_size", s.world_size},
          {"incarnation", IncarnationNumber(s.incarnation)},
          {"token", Hex(s.token)},
          {"has_ended", s.has_ended},
          {"oldest_ended", s.oldest_ended},
          {"newest_ended", s.newest_ended},
          {"open_steps", s.open_steps}};
}

Json ToJson(const CopyReport& c) {
  return {{"id", ToJson(c.id)},
          {"world_size", c.world_size},
          {"replicas", c.replicas},
          {"stream_bytes", c.stream_bytes},
          {"role", RoleName(c.role)},
          {"committed", c.committed},
          {"bad", c.bad},
          {"key", c.key == kPlaintext ? Json() : Json(KeyName(c.key))},
          {"readable", c.readable}};
}

Json KeyNames(const std::vector<KeyId>& keys) {
  Json names = Json::array();
  for (const KeyId key : keys) names.push_back(KeyName(key));
  return names;
}

// Copies that the node is to encrypt again with its first key.
uint64_t CopiesOfOtherKeys(const NodeReport& n) {
  return static_cast<uint64_t>(std::count_if(n.copies.begin(), n.copies.end(), [&](const CopyReport& copy) {
    return copy.key != kPlaintext && copy.readable && copy.key != n.keys.front();
  }));
}

// Every key of the job: which nodes have it, and how many copies are encrypted with it.
Json KeysOf(const ClusterReport& r) {
  struct Known {
    Json first_on = Json::array(), on = Json::array(), absent_on = Json::array();
    uint64_t copies = 0, unreadable = 0;
  };
  std::map<KeyId, Known> keys;
  for (const NodeReport& node : r.nodes) {
    for (const KeyId key : node.keys) {
      if (key == node.keys.front()) keys[key].first_on.push_back(node.name);
      keys[key].on.push_back(node.name);
    }
    for (const CopyReport& copy : node.copies) {
      if (copy.key == kPlaintext) continue;
      Known& known = keys[copy.key];
      ++known.copies;
      if (copy.readable) continue;
      ++known.unreadable;
      if (known.absent_on.empty() || known.absent_on.back() != node.name)
        known.absent_on.push_back(node.name);
    }
  }
  // A node of the roster that is away may have copies that need any key.
  const bool all_here = r.roster.missing == 0;
  const bool one_first = std::any_of(keys.begin(), keys.end(), [&](const auto& known) {
    return known.second.first_on.size() == r.nodes.size();
  });
  Json list = Json::array();
  for (const auto& [key, known] : keys)
    list.push_back({{"key", KeyName(key)},
                    {"first_on", known.first_on},
                    {"on", known.on},
                    {"copies", known.copies},
                    {"unreadable", known.unreadable},
                    {"absent_on", known.absent_on},
                    {"removable", known.first_on.empty() && known.copies == 0 && one_first && all_here}});
  return list;
}

Json ToJson(const NodeReport& n) {
  Json sessions = Json::array();
  for (const SessionReport& session : n.sessions) sessions.push_back(ToJson(session));
  Json copies = Json::array();
  for (const CopyReport& copy : n.copies) copies.push_back(ToJson(copy));
  Json lost_links = Json::array();
  for (const LostLinkReport& link : n.lost_links)
    lost_links.push_back({{"peer", link.name},
                          {"reason", link.reason},
                          {"lost_for_us", link.lost_for_us},
                          {"control", link.control},
                          {"data", link.data}});
  return {{"id", Hex(n.id)},
          {"name", n.name},
          {"chunk_bytes", n.chunk_bytes},
          {"chunks_total", n.chunks_total},
          {"chunks_free", n.chunks_free},
          {"sessions", std::move(sessions)},
          {"copies", std::move(copies)},
          {"counters", ToJson(n.counters)},
          {"scrub", ToJson(n.scrub)},
          {"has_lease", n.has_lease},
          {"leaving", n.leaving},
          {"lost_links", std::move(lost_links)},
          {"keep_rules", n.keep_rules},
          {"keys", KeyNames(n.keys)},
          {"reencrypted", n.reencrypted},
          {"reencrypt_left", CopiesOfOtherKeys(n)}};
}

Json ToJson(const StepReport& s) {
  return {{"incarnation", IncarnationNumber(s.incarnation)},
          {"step", s.step},
          {"world_size", s.world_size},
          {"ranks_sealed", s.ranks_sealed},
          {"ranks_replicated", s.ranks_replicated},
          {"committed", s.committed},
          {"persisted", s.persisted},
          {"producible", s.producible},
          {"copies_min", s.copies_min},
          {"bytes", s.bytes},
          {"restores", s.restores},
          {"quarantined", s.quarantined}};
}

Json ToJson(const MembershipReport& r) {
  const auto seconds = [](TimeUs us) { return us / 1'000'000; };
  Json tried = Json::array();
  for (const auto& each : r.tried) tried.push_back({{"address", each.address}, {"reason", each.reason}});
  Json missing = Json::array();
  for (const auto& each : r.missing)
    missing.push_back({{"node", each.node}, {"for_s", seconds(each.for_us)}, {"in_view", each.in_view}});
  return {{"kind", r.kind},
          {"coordinator", r.coordinator},
          {"registered", r.registered},
          {"for_s", seconds(r.for_us)},
          {"tried", std::move(tried)},
          {"missing", std::move(missing)},
          {"missing_total", r.missing_total},
          {"blocked", r.blocked},
          {"do", r.advice}};
}

Json ToJson(const DaemonFacts& f) {
  return {{"version", f.version},
          {"node", f.node},
          {"leader", f.leader},
          {"pid", f.pid},
          {"socket", f.socket},
          {"control", f.control},
          {"security", {{"control", f.security ? f.security() : ""}, {"data", f.data_security}}},
          {"data", f.data},
          {"arena", f.arena},
          {"arena_bytes", f.arena_bytes},
          {"replicas", f.replicas},
          {"keep_steps", f.keep_steps},
          {"transport", f.transport},
          {"devices", f.capabilities.devices},
          {"data_address", f.capabilities.address},
          {"link_mbps", f.capabilities.link_mbps},
          {"rdma", f.capabilities.rdma},
          {"dmabuf", f.capabilities.dmabuf},
          {"rdma_fallback", f.fallback},
          {"drain", f.drain.begun ? Json::parse(DrainJson(f.drain, false)) : Json()},
          {"membership", ToJson(f.membership)}};
}

// `…_by` names the origin of a value: "rank 0", "flag", or null if it is not set.
Json ToJson(const PolicyReport& p) {
  const RankPolicy& ranks = p.ranks;
  const auto by = [](bool flag, bool rank, Rank who) {
    return flag ? Json("flag") : rank ? Json("rank " + std::to_string(who)) : Json();
  };
  const bool every_flag = p.persist_every != 0;
  const bool keep_flag = !p.keep_rules.empty();
  std::string keep = p.keep_rules;
  if (keep.empty() && ranks.keep_on_storage != 0)
    keep = "--keep-on-storage " + std::to_string(ranks.keep_on_storage);
  return {{"persist_every", every_flag ? p.persist_every : ranks.persist_every},
          {"persist_every_seconds", p.persist_every_seconds},
          {"persist_every_by", by(every_flag, ranks.persist_every != 0, ranks.persist_by)},
          {"keep", keep},
          {"keep_by", by(keep_flag, ranks.keep_on_storage != 0, ranks.keep_by)},
          {"doubt", p.doubt},
          {"trouble", p.trouble}};
}

Json Head(const ClusterReport& r) {
  Json json = {{"job", r.job},
               {"epoch", r.epoch},
               {"leader", r.leader},
               {"nodes_expected", r.nodes_expected},
               {"incarnation", IncarnationNumber(r.incarnation)},
               {"world_size", r.world_size},
               {"ranks_open", r.ranks_open},
               {"incarnation_token", r.incarnation_token},
               {"has_latest", r.has_latest}};
  json["latest"] = r.has_latest ? ToJson(r.latest) : Json(nullptr);
  json["policy"] = r.policy.has_storage ? ToJson(r.policy) : Json(nullptr);
  json["roster"] = {{"nodes", r.roster.nodes},
                    {"missing", r.roster.missing},
                    {"missing_names", r.roster.missing_names},
                    {"waiting", r.roster.waiting}};
  json["keys"] = KeysOf(r);
  return json;
}

// Names come from training programs. Bytes that are not UTF-8 are replaced and never cause a failure.
std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

using Pointers = std::vector<Json::json_pointer>;

// Cuts the arrays to at most half the length of the longest one. False: all are empty.
bool CutLongest(Json* json, const Pointers& pointers) {
  size_t longest = 0;
  for (const auto& pointer : pointers)
    if (json->contains(pointer)) longest = std::max(longest, (*json)[pointer].size());
  const size_t keep = longest / 2;
  for (const auto& pointer : pointers) {
    if (!json->contains(pointer)) continue;
    Json& array = (*json)[pointer];
    while (array.size() > keep) array.erase(array.size() - 1);
  }
  return longest != 0;
}

// Cuts the arrays named by `pointers` until the document fits, then those named by `last`.
std::string DumpBounded(Json json, const Pointers& pointers, const Pointers& last = {}) {
  std::string text = Dump(json);
  while (text.size() > kJsonBytesMax) {
    // If nothing can be cut, LocalSession::Send() answers kInternal.
    if (!CutLongest(&json, pointers) && !CutLongest(&json, last)) break;
    json["truncated"] = true;
    text = Dump(json);
  }
  return text;
}

Pointers DetailsOf(size_t nodes) {
  Pointers pointers;
  for (size_t i = 0; i < nodes; ++i)
    for (const char* array : {"/copies", "/sessions"})
      pointers.emplace_back("/nodes/" + std::to_string(i) + array);
  return pointers;
}

}  // namespace

std::string StatusJson(const ClusterReport& report, const DaemonFacts& facts) {
  Json json = Head(report);
  json["nodes"] = Json::array();
  for (const NodeReport& node : report.nodes) json["nodes"].push_back(ToJson(node));
  json["steps"] = Json::array();
  for (const StepReport& step : report.steps) json["steps"].push_back(ToJson(step));
  json["daemon"] = ToJson(facts);
  return DumpBounded(std::move(json), DetailsOf(report.nodes.size()),
                     {Json::json_pointer("/steps"), Json::json_pointer("/nodes")});
}

std::string NodeJson(const NodeReport& report, const DaemonFacts& facts,
                     const Transport::Counters& transport) {
  Json json = ToJson(report);
  json["transport"] = {{"registrations", transport.registrations},
                       {"put_bytes", transport.put_bytes},
                       {"get_bytes", transport.get_bytes},
                       {"puts", transport.puts},
                       {"gets", transport.gets},
                       {"failures", transport.failures}};
  json["daemon"] = ToJson(facts);
  return DumpBounded(std::move(json), {Json::json_pointer("/copies"), Json::json_pointer("/sessions")});
}

std::string ListJson(const ClusterReport& report, const Step* step,
                     const std::vector<ShardObjects>& objects) {
  Json json = Head(report);
  json["steps"] = Json::array();
  for (const StepReport& each : report.steps)
    if (step == nullptr || each.step == *step) json["steps"].push_back(ToJson(each));
  if (step == nullptr) return DumpBounded(std::move(json), {Json::json_pointer("/steps")});

  json["copies"] = Json::array();
  for (const NodeReport& node : report.nodes)
    for (const CopyReport& copy : node.copies) {
      if (copy.id.step != *step) continue;
      Json entry = {{"node", node.name}};
      entry.update(ToJson(copy));
      json["copies"].push_back(std::move(entry));
    }
  json["objects"] = Json::array();
  for (const ShardObjects& shard : objects)
    for (const Object& object : shard.objects) {
      if (json["objects"].size() == kObjectsListedMax) {
        json["truncated"] = true;
        break;
      }
      json["objects"].push_back({{"id", ToJson(shard.id)},
                                 {"name", object.name},
                                 {"offset", object.offset},
                                 {"length", object.length}});
    }
  return DumpBounded(std::move(json), {Json::json_pointer("/objects"), Json::json_pointer("/copies")});
}

std::string VerifyJson(const VerifyReport& report) {
  Json json = {{"incarnation", IncarnationNumber(report.incarnation)},
               {"step", report.step},
               {"nodes_asked", report.nodes_asked}};
  Json copies = Json::array();
  uint64_t chunks = 0;
  uint64_t bad = 0;
  // Copies that are not good come first, so that they are cut last.
  for (const bool wanted_bad : {true, false})
    for (const VerifiedCopy& copy : report.copies) {
      if ((copy.bad.empty() && copy.readable) == wanted_bad) continue;
      chunks += copy.chunks;
      bad += copy.bad.size();
      copies.push_back({{"node", copy.node},
                        {"id", ToJson(copy.id)},
                        {"role", RoleName(copy.role)},
                        {"chunks", copy.chunks},
                        {"bad", copy.bad},
                        {"key", copy.key == kPlaintext ? Json() : Json(KeyName(copy.key))},
                        {"readable", copy.readable}});
    }
  json["chunks"] = chunks;
  json["chunks_bad"] = bad;
  json["copies"] = std::move(copies);
  return DumpBounded(std::move(json), {Json::json_pointer("/copies")});
}

}  // namespace ropeteam
