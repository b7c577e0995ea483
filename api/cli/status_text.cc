// SPDX-License-Identifier: Apache-2.0
#include "api/cli/status_text.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <vector>

#include "api/cli/text.h"
#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

using Json = nlohmann::json;

uint64_t Number(const Json& json, const char* key) { return json.at(key).get<uint64_t>(); }
std::string NumberText(const Json& json, const char* key) { return std::to_string(Number(json, key)); }
std::string Bytes(const Json& json, const char* key) { return FormatSize(Number(json, key)); }

// The policy. A daemon of another build may not report it.
std::string PolicyLine(const Json& status) {
  if (!status.contains("policy") || status.at("policy").is_null()) return "";
  const Json& policy = status.at("policy");
  const auto from = [&policy](const char* key) {
    const Json& by = policy.at(key);
    return by.is_null() ? std::string() : " (" + by.get<std::string>() + ")";
  };
  const uint64_t every = Number(policy, "persist_every");
  const std::string keep = policy.at("keep");
  const std::string doubt = policy.at("doubt");
  const std::string trouble = policy.value("trouble", "");
  const char* unit = policy.at("persist_every_seconds").get<bool>() ? " s" : " steps";
  return "storage persists " + (every == 0 ? "what is asked for" : "every " + std::to_string(every) + unit) +
         from("persist_every_by") + "   keeps " + (keep.empty() ? "all steps" : keep) + from("keep_by") +
         (doubt.empty() ? "" : "   DELETES NOTHING: " + doubt) + "\n" +
         (trouble.empty() ? "" : "NOT PERSISTED: " + trouble + "\n");
}

std::string Head(const Json& status) {
  std::string text = "job " + status.at("job").get<std::string>();
  text += "   epoch " + NumberText(status, "epoch") + "   leader " + status.at("leader").get<std::string>();
  if (status.contains("nodes"))
    text +=
        "   nodes " + std::to_string(status.at("nodes").size()) + "/" + NumberText(status, "nodes_expected");
  text += "   incarnation " + NumberText(status, "incarnation");
  text += "   ranks " + NumberText(status, "ranks_open") + "/" + NumberText(status, "world_size") + "\n" +
          PolicyLine(status) + RosterText(status) + LatestText(status);
  for (const Json& step : status.at("steps"))
    if (step.value("quarantined", false))
      text += "quarantined step " + NumberText(step, "step") + "   restored " +
              std::to_string(step.value("restores", uint64_t{0})) +
              " times without a newer commit   offer it again: ropeteam quarantine --undo " +
              NumberText(step, "step") + "; debug with it: --quarantine-after 0\n";
  return text;
}

// The level that all ranks of the step have reached.
std::string StepLevel(const Json& step) {
  if (step.value("quarantined", false)) return "quarantined";
  if (step.at("persisted").get<bool>()) return "persisted";
  if (step.at("committed").get<bool>()) return "committed";
  const uint64_t world = Number(step, "world_size");
  if (Number(step, "ranks_replicated") >= world) return "replicated";
  if (Number(step, "ranks_sealed") >= world) return "local";
  return "partial";
}

std::string StepTable(const Json& steps) {
  Table table({"STEP", "INCARNATION", "<LEVEL", "SEALED", "REPLICATED", "COPIES", "BYTES", "<READABLE"});
  for (const Json& step : steps) {
    const std::string world = "/" + NumberText(step, "world_size");
    table.Add({NumberText(step, "step"), NumberText(step, "incarnation"), StepLevel(step),
               NumberText(step, "ranks_sealed") + world, NumberText(step, "ranks_replicated") + world,
               NumberText(step, "copies_min"), Bytes(step, "bytes"),
               step.at("producible").get<bool>() ? "yes" : "no"});
  }
  return steps.empty() ? "no steps\n" : table.Render();
}

std::string RankList(const Json& node) {
  std::vector<uint64_t> ranks;
  for (const Json& session : node.at("sessions")) ranks.push_back(Number(session, "rank"));
  std::sort(ranks.begin(), ranks.end());
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(ranks[i]);
    if (last != i) text += "-" + std::to_string(ranks[last]);
    i = last;
  }
  return text.empty() ? "-" : text;
}

// The rate since the earlier answer of the same instance. A restarted daemon counts from zero.
std::string Rate(const Json& node, const Json* before, double seconds, const char* counter) {
  if (before == nullptr || seconds <= 0) return "-";
  for (const Json& other : before->at("nodes")) {
    if (other.at("id") != node.at("id")) continue;
    const uint64_t now = Number(node.at("counters"), counter);
    const uint64_t then = Number(other.at("counters"), counter);
    return FormatSize(now > then ? static_cast<double>(now - then) / seconds : 0) + "/s";
  }
  return "-";
}

// When the last complete scrub of a node's sealed shards ended, and how fast it was.
std::string Scrubbed(const Json& node) {
  if (!node.contains("scrub")) return "-";  // a daemon of another build
  const Json& scrub = node.at("scrub");
  if (Number(scrub, "bytes_per_s") == 0) return "off";
  if (Number(scrub, "passes") == 0) return "not yet";
  const uint64_t seconds = Number(scrub, "pass_ended_us_ago") / 1'000'000;
  std::string text = seconds < 120    ? std::to_string(seconds) + " s ago"
                     : seconds < 7200 ? std::to_string(seconds / 60) + " min ago"
                                      : std::to_string(seconds / 3600) + " h ago";
  const double pass_us = scrub.at("pass_us").get<double>();
  if (pass_us > 0) text += ", " + FormatSize(scrub.at("pass_bytes").get<double>() * 1e6 / pass_us) + "/s";
  return text;
}

std::vector<std::string> NodeCells(const Json& node, const std::string& sending) {
  const uint64_t chunk = Number(node, "chunk_bytes");
  const uint64_t total = Number(node, "chunks_total");
  const uint64_t free = Number(node, "chunks_free");
  uint64_t own = 0;
  uint64_t replicas = 0;
  uint64_t cached = 0;
  for (const Json& copy : node.at("copies")) {
    const std::string role = copy.at("role").get<std::string>();
    (role == "own" ? own : role == "replica" ? replicas : cached) += 1;
  }
  const Json& counters = node.at("counters");
  return {node.at("name").get<std::string>(),
          RankList(node),
          FormatSize(total * chunk),
          FormatSize((total - free) * chunk),
          std::to_string(own) + "/" + std::to_string(replicas) + "/" + std::to_string(cached),
          Bytes(counters, "replica_bytes_sent"),
          Bytes(counters, "replica_bytes_held"),
          Bytes(counters, "fetch_bytes"),
          sending,
          std::to_string(Number(counters, "last_replicated_us") / 1000),
          NumberText(counters, "saves_refused"),
          NumberText(counters, "chunks_bad") + "/" + NumberText(counters, "chunks_repaired"),
          Scrubbed(node)};
}

std::string NodeTable(const Json& nodes, const Json* before, double seconds) {
  Table table({"<NODE", "<RANKS", "ARENA", "USED", "OWN/COPY/CACHE", "SENT", "HELD", "FETCHED", "SENDING",
               "REPLICATED_MS", "REFUSED", "BAD/REPAIRED", "<SCRUBBED"});
  for (const Json& node : nodes)
    table.Add(NodeCells(node, Rate(node, before, seconds, "replica_bytes_sent")));
  return table.Render();
}

// Which nodes do not reach each other, one line for each pair: its two ends may both report it.
std::string Apart(const Json& nodes, const std::string& leader) {
  std::map<std::pair<std::string, std::string>, std::pair<std::string, uint64_t>> pairs;
  for (const Json& node : nodes)
    for (const Json& link : node.value("lost_links", Json::array())) {
      if (!link.value("control", false)) continue;
      const std::string name = node.at("name");
      const std::string peer = link.at("peer");
      auto& [paths, seconds] = pairs[std::minmax(name, peer)];
      paths = link.value("data", false) || paths == "control and data" ? "control and data" : "control";
      seconds = std::max(seconds, Number(link, "lost_for_us") / 1'000'000);
    }
  const auto shown = [&leader](const std::string& name) {
    return name + (name == leader ? " (leader)" : "");
  };
  std::string text;
  for (const auto& [pair, lost] : pairs)
    text += shown(pair.first) + " and " + shown(pair.second) + " do not reach each other (" + lost.first +
            "), " + std::to_string(lost.second) + " s\n";
  return text;
}

// What keeps nodes from replicating, one line each.
std::string Troubles(const Json& nodes, const std::string& leader) {
  std::string text = Apart(nodes, leader);
  for (const Json& node : nodes) {
    const std::string name = node.at("name").get<std::string>();
    if (node.value("leaving", false))
      text += name + " is drained: no save begins there, and it leaves the job\n";
    if (!node.value("has_lease", true))
      text += name +
              " has no lease: it does not reach the coordinator, or the coordinator has just begun or does "
              "not reach "
              "etcd; its saves stay local\n";
    for (const Json& link : node.value("lost_links", Json::array()))
      if (!link.value("control", false))
        text += name + " has not reached " + link.at("peer").get<std::string>() + " for " +
                std::to_string(Number(link, "lost_for_us") / 1'000'000) + " s (" +
                link.at("reason").get<std::string>() + "): new copies go to other nodes, if there are any\n";
  }
  return text.empty() ? text : "\n" + text;
}

std::string Join(const Json& values) {
  std::string text;
  for (const Json& value : values)
    text += (text.empty() ? "" : ",") + (value.is_string() ? value.get<std::string>() : value.dump());
  return text;
}

// In a job that encrypts its replicas: its keys, and the copies that need them. A daemon of another build may not
// report them.
std::string KeyLines(const Json& status) {
  std::string text;
  for (const Json& key : status.value("keys", Json::array())) {
    text += "key " + key.at("key").get<std::string>();
    if (!key.at("first_on").empty())
      text += "   encrypts on " + Join(key.at("first_on"));
    else if (!key.at("on").empty())
      text += "   second on " + Join(key.at("on"));
    text += "   copies " + NumberText(key, "copies");
    if (key.at("removable").get<bool>())
      text += ": it may be removed";
    else if (key.at("first_on").empty() && !key.at("on").empty())
      text += ": keep it until no copy needs it and all nodes are here";
    text += "\n";
    if (Number(key, "unreadable") != 0)
      text += "  " + NumberText(key, "unreadable") + " copies DO NOT COUNT: the key is not on " +
              Join(key.at("absent_on")) + "; put it back there, second in the key file\n";
  }
  for (const Json& node : status.at("nodes"))
    if (const uint64_t left = node.value("reencrypt_left", uint64_t{0}); left != 0)
      text += node.at("name").get<std::string>() + " has re-encrypted " + NumberText(node, "reencrypted") +
              " of " + std::to_string(Number(node, "reencrypted") + left) + " copies\n";
  return text.empty() ? text : "\n" + text;
}

std::string KeyText(const Json& copy) {
  const Json key = copy.value("key", Json());
  return key.is_null() ? "-" : key.get<std::string>();
}

std::string ShardCells(const Json& id) {
  return "step " + NumberText(id, "step") + " rank " + NumberText(id, "rank") + " incarnation " +
         NumberText(id, "incarnation");
}

// The transport of the node that was asked. A daemon of another build may not report all of it.
std::string TransportLine(const Json& daemon) {
  const double mbps = daemon.value("link_mbps", 0.0);
  char link[64] = "speed unknown";
  if (mbps > 0)
    std::snprintf(link, sizeof(link), mbps < 1000 ? "%.0f Mb/s" : "%.1f Gb/s",
                  mbps < 1000 ? mbps : mbps / 1000);
  const std::string devices = daemon.value("devices", "");
  return "transport " + daemon.value("transport", "") + "   devices " + (devices.empty() ? "-" : devices) +
         "   link " + link + (daemon.value("rdma", false) ? "   RDMA" : "   no RDMA") + "\n";
}

// The access control of the ports. A daemon of another build may not report it.
std::string SecurityLine(const Json& daemon) {
  if (!daemon.contains("security")) return "";
  const Json& security = daemon.at("security");
  return "security control " + security.value("control", "") + "   data " + security.value("data", "") + "\n";
}

std::string FallbackLine(const Json& daemon) {
  const std::string reason = daemon.value("rdma_fallback", "");
  return reason.empty() ? "" : "without RDMA: " + reason + "\n";
}

// The coordinator, the missing nodes, what is blocked by that, and what to do. A daemon of another build may
// not report them.
std::string MembershipLines(const Json& daemon) {
  const auto found = daemon.find("membership");
  if (found == daemon.end() || found->is_null()) return "";
  const Json& membership = *found;
  const std::string address = membership.at("coordinator");
  std::string text = "coordinator " + (address.empty() ? "not known yet" : address);
  if (!membership.at("registered").get<bool>())
    text += "   NO ANSWER for " + NumberText(membership, "for_s") + " s";
  text += "\n";
  for (const Json& tried : membership.at("tried"))
    text +=
        "  " + tried.at("address").get<std::string>() + ": " + tried.at("reason").get<std::string>() + "\n";
  for (const Json& missing : membership.at("missing"))
    text += "missing " + missing.at("node").get<std::string>() + " for " + NumberText(missing, "for_s") +
            " s" + (missing.at("in_view").get<bool>() ? " (still in the view)" : "") + "\n";
  if (const uint64_t all = Number(membership, "missing_total"); all > membership.at("missing").size())
    text += "missing " + std::to_string(all) + " in all\n";
  for (const auto& [key, word] : {std::pair{"blocked", "so "}, {"do", "do "}})
    if (const std::string line = membership.at(key); !line.empty()) text += word + line + "\n";
  return text;
}

}  // namespace

std::string LatestText(const Json& status) {
  if (!status.at("has_latest").get<bool>()) return "latest none\n";
  const Json& latest = status.at("latest");
  return "latest step " + NumberText(latest, "step") + "   incarnation " + NumberText(latest, "incarnation") +
         "   bytes " + Bytes(latest, "bytes") + "   copies " + NumberText(latest, "copies_min") + "\n";
}

// A daemon of another build may not report it.
std::string RosterText(const Json& status) {
  if (!status.contains("roster")) return "";
  const Json& roster = status.at("roster");
  const uint64_t nodes = Number(roster, "nodes");
  if (nodes == 0 || Number(roster, "missing") == 0) return "";
  const std::string waiting = roster.at("waiting");
  return "MISSING " + NumberText(roster, "missing") + " of the " + std::to_string(nodes) +
         " nodes that know of the newest commit: " + roster.at("missing_names").get<std::string>() + "\n" +
         (waiting.empty() ? "" : "WAITING: " + waiting + "\n");
}

std::string RenderStatus(const Json& status, const Json* before, double seconds) {
  std::string text = Head(status) + "\n" + NodeTable(status.at("nodes"), before, seconds) +
                     Troubles(status.at("nodes"), status.at("leader").get<std::string>()) + KeyLines(status) +
                     "\n" + StepTable(status.at("steps"));
  const Json& daemon = status.at("daemon");
  return text + "\nasked " + daemon.at("node").get<std::string>() + "   socket " +
         daemon.at("socket").get<std::string>() + "   data " + daemon.at("data").get<std::string>() + "\n" +
         TransportLine(daemon) + FallbackLine(daemon) + SecurityLine(daemon) + MembershipLines(daemon);
}

std::string RenderNode(const Json& node) {
  const Json& daemon = node.at("daemon");
  std::string text =
      NodeTable(Json::array({node}), nullptr, 0) + Troubles(Json::array({node}), daemon.value("leader", ""));
  for (const char* key : {"version", "socket", "control", "data", "arena"})
    text += std::string(key) + " " + daemon.at(key).get<std::string>() + "\n";
  text += TransportLine(daemon) + FallbackLine(daemon) + SecurityLine(daemon) + MembershipLines(daemon);
  const std::string trouble = node.value("leader_error", "");
  return trouble.empty() ? text : text + "the leader does not answer: " + trouble + "\n";
}

std::string RenderList(const Json& list) {
  std::string text = Head(list) + "\n" + StepTable(list.at("steps"));
  if (!list.contains("copies")) return text;
  Table copies({"<NODE", "RANK", "INCARNATION", "<ROLE", "BYTES", "<BAD CHUNKS", "<KEY"});
  for (const Json& copy : list.at("copies")) {
    const Json& id = copy.at("id");
    copies.Add({copy.at("node").get<std::string>(), NumberText(id, "rank"), NumberText(id, "incarnation"),
                copy.at("role").get<std::string>(), Bytes(copy, "stream_bytes"),
                copy.at("bad").empty() ? "none" : Join(copy.at("bad")),
                KeyText(copy) + (copy.value("readable", true) ? "" : ", ABSENT: the copy does not count")});
  }
  text += "\n" + copies.Render();
  const Json& objects = list.at("objects");
  if (objects.empty()) return text + "\nno manifest of this step is on this node\n";
  Table table({"RANK", "INCARNATION", "BYTES", "<OBJECT"});
  for (const Json& object : objects)
    table.Add({NumberText(object.at("id"), "rank"), NumberText(object.at("id"), "incarnation"),
               NumberText(object, "length"), object.at("name").get<std::string>()});
  return text + "\n" + table.Render();
}

std::string RenderVerify(const Json& verify) {
  std::string text;
  uint64_t bad_copies = 0;
  for (const Json& copy : verify.at("copies")) {
    const bool readable = copy.value("readable", true);
    if (!readable)
      text += "unreadable: node " + copy.at("node").get<std::string>() + " " + ShardCells(copy.at("id")) +
              " is encrypted with key " + KeyText(copy) + ", which the node lacks (" +
              copy.at("role").get<std::string>() + ")\n";
    bad_copies += readable && copy.at("bad").empty() ? 0 : 1;
    if (copy.at("bad").empty()) continue;
    text += "bad: node " + copy.at("node").get<std::string>() + " " + ShardCells(copy.at("id")) + " chunks " +
            Join(copy.at("bad")) + " of " + NumberText(copy, "chunks") + " (" +
            copy.at("role").get<std::string>() + ")\n";
  }
  for (const Json& rank : verify.value("missing", Json::array()))
    text += "missing: step " + NumberText(verify, "step") + " rank " + NumberText(rank, "rank") + " has " +
            NumberText(rank, "copies") + " of " + NumberText(rank, "wanted") + " copies\n";
  const uint64_t ranks_short = verify.value("ranks_short", uint64_t{0});
  text += "step " + NumberText(verify, "step") + " incarnation " + NumberText(verify, "incarnation") +
          ": nodes " + std::to_string(verify.at("nodes_asked").size()) + ", copies " +
          std::to_string(verify.at("copies").size()) + ", chunks " + NumberText(verify, "chunks") +
          ", bad chunks " + NumberText(verify, "chunks_bad");
  if (ranks_short != 0) text += ", ranks that lack copies " + std::to_string(ranks_short);
  return text + (bad_copies == 0 && ranks_short == 0 ? ", all good\n" : "\n");
}

void AddMissingCopies(const Json& list, Json* verify) {
  (*verify)["missing"] = Json::array();
  const auto of_step = [&](const Json& id) { return id.at("incarnation") == verify->at("incarnation"); };
  uint64_t world_size = 0;
  uint64_t wanted = 0;
  for (const Json& step : list.at("steps")) {
    if (!of_step(step)) continue;
    world_size = Number(step, "world_size");
    (*verify)["ranks_short"] = world_size - std::min(world_size, Number(step, "ranks_replicated"));
  }
  for (const Json& copy : list.at("copies"))
    if (of_step(copy.at("id"))) wanted = 1 + Number(copy, "replicas");
  if (wanted == 0 || verify->value("truncated", false)) return;
  // The nodes have just read their copies, which is newer than the leader's knowledge.
  std::map<uint64_t, std::set<std::string>> nodes_of;
  for (const Json& copy : verify->at("copies"))
    if (copy.at("role") != "cache" && copy.value("readable", true))
      nodes_of[Number(copy.at("id"), "rank")].insert(copy.at("node"));
  for (uint64_t rank = 0; rank < world_size; ++rank)
    if (const size_t copies = nodes_of[rank].size(); copies < wanted)
      (*verify)["missing"].push_back({{"rank", rank}, {"copies", copies}, {"wanted", wanted}});
  (*verify)["ranks_short"] = (*verify)["missing"].size();
}

std::string Redraw(const std::string& text, size_t rows, size_t columns) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line.substr(0, columns));
  if (lines.size() >= rows && rows > 1) {  // the cursor's line stays free
    const size_t left_out = lines.size() - (rows - 2);
    lines.resize(rows - 2);
    lines.push_back(("… " + std::to_string(left_out) + " more lines").substr(0, columns));
  }
  std::string screen = "\x1b[H";
  for (const std::string& line : lines) screen += line + "\x1b[K\n";
  return screen + "\x1b[J";
}

}  // namespace ropeteam::cli
