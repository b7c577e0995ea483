// SPDX-License-Identifier: Apache-2.0
//
// ropeteam trace: collects every node's events of a step through one daemon, and writes them as one timeline.
// docs/operations.md describes its content.

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/perfetto.h"
#include "api/cli/text.h"
#include "api/client/admin_client.h"

namespace ropeteam::cli {
namespace {

using What = TraceEvent::What;

constexpr char kHelp[] =
    "ropeteam trace [STEP]: writes what all nodes have noted of a step [the newest committed one] to a file "
    "for\nui.perfetto.dev\n"
    "  --output FILE      [ropeteam-step-STEP.pftrace]\n"
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long each node's answer may take [10]\n";

// Each node's clock is read this often. The fastest answer is the most exact one, and questions may be lost.
constexpr int kQuestions = 5;
constexpr uint64_t kNsPerUs = 1000;
constexpr uint32_t kWholeCopy = UINT32_MAX;  // used instead of a chunk

struct NodeTrace {
  NodeId id = kNoNode;
  std::string name;
  std::vector<TraceEvent> events;
  int64_t offset_us = 0;               // of its clock from the asked daemon's clock
  TimeUs uncertainty_us = UINT64_MAX;  // half of the round-trip time
};

// Computes the offset as NTP does (RFC 5905, section 8): the node's clock at its answer, minus the middle
// between the daemon's question and the answer's arrival.
Status AskNode(AdminClient* client, Step step, double timeout_s, NodeTrace* node) {
  Status status;
  bool answered = false;
  const auto timeout_ms = static_cast<uint64_t>(timeout_s * 1000 / kQuestions);
  for (int i = 0; i < kQuestions; ++i) {
    Result<local::TraceReply> reply = client->Trace({node->id, !answered, step, timeout_ms});
    if (!reply.ok()) {
      status = reply.status();
      continue;
    }
    if (!answered) node->events = std::move(reply->events);
    answered = true;
    const TimeUs uncertainty = (reply->answered_at - reply->asked_at + 1) / 2;
    if (uncertainty >= node->uncertainty_us) continue;
    node->uncertainty_us = uncertainty;
    node->offset_us = static_cast<int64_t>(reply->node_at - (reply->asked_at + reply->answered_at) / 2);
  }
  return answered ? OkStatus() : status;
}

std::string ChunksText(const TraceEvent& event) {
  if (event.count <= 1) return "chunk " + std::to_string(event.first);
  return "chunks " + std::to_string(event.first) + " to " + std::to_string(event.first + event.count - 1);
}

// An id that connects two nodes' events of one chunk or copy. FNV-1a.
uint64_t FlowOf(NodeId source, NodeId holder, Rank rank, uint32_t chunk) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t part : {source, holder, uint64_t{rank}, uint64_t{chunk}})
    hash = (hash ^ part) * 0x100000001b3;
  return hash | 1;  // 0 is not an id
}

class NodeTimeline {
 public:
  NodeTimeline(const NodeTrace& node, const std::map<NodeId, std::string>& names, PerfettoTrace* trace)
      : node_(node), names_(names), trace_(*trace) {
    std::string title = node.name;
    if (node.uncertainty_us != 0)  // 0: this is the asked daemon
      title += " (clock moved by " + std::to_string(-node.offset_us) + " us, give or take " +
               std::to_string(node.uncertainty_us) + " us)";
    process_ = trace_.AddProcess(title);
  }

  void Draw() {
    DrawSaves();
    for (const TraceEvent& event : node_.events) DrawEvent(event);
  }

 private:
  struct Lane {
    PerfettoTrace::Track track = 0;
    uint64_t free_at_ns = 0;
  };

  uint64_t BeginNs(const TraceEvent& event) const {
    return (event.at - static_cast<TimeUs>(node_.offset_us)) * kNsPerUs;
  }
  uint64_t EndNs(const TraceEvent& event) const { return BeginNs(event) + event.duration_us * kNsPerUs; }
  std::string NameOf(NodeId node) const {
    const auto name = names_.find(node);
    return name != names_.end() ? name->second : "a node that has left";
  }
  // Overlapping slices get different lanes.
  PerfettoTrace::Track LaneFor(const std::string& name, uint64_t begin_ns, uint64_t end_ns) {
    std::vector<Lane>& lanes = lanes_[name];
    auto lane = std::find_if(lanes.begin(), lanes.end(),
                             [&](const Lane& each) { return each.free_at_ns <= begin_ns; });
    if (lane == lanes.end()) lane = lanes.insert(lanes.end(), {trace_.AddTrack(process_, name), 0});
    lane->free_at_ns = std::max(end_ns, begin_ns + 1);
    return lane->track;
  }
  PerfettoTrace::Track TrackNamed(const std::string& name) {
    const auto [track, fresh] = tracks_.try_emplace(name, 0);
    if (fresh) track->second = trace_.AddTrack(process_, name);
    return track->second;
  }
  static std::string RankName(Rank rank) {
    return rank == TraceEvent::kNoRank ? "step" : "rank " + std::to_string(rank);
  }

  // Draws each rank's save, from its begin to its last event.
  void DrawSaves() {
    struct Span {
      uint64_t begin_ns = 0, end_ns = 0;
    };
    std::map<ShardId, Span> saves;
    for (const TraceEvent& event : node_.events)
      if (event.what == What::kBegin) saves.try_emplace(event.shard, Span{BeginNs(event), 0});
    for (const TraceEvent& event : node_.events)
      if (const auto save = saves.find(event.shard); save != saves.end())
        save->second.end_ns = std::max(save->second.end_ns, EndNs(event));
    for (const auto& [shard, span] : saves)
      trace_.AddSlice(TrackNamed(RankName(shard.rank)), span.begin_ns, span.end_ns,
                      {"save", shard.ToString(), 0});
  }

  void Slice(const std::string& lane, const TraceEvent& event, const std::string& name, uint64_t flow) {
    trace_.AddSlice(
        LaneFor(lane, BeginNs(event), EndNs(event)), BeginNs(event), EndNs(event),
        {name + " " + ChunksText(event) + (event.failed ? ", failed" : ""), event.shard.ToString(), flow});
  }
  void Instant(const std::string& track, const TraceEvent& event, const std::string& name,
               uint64_t flow = 0) {
    trace_.AddInstant(TrackNamed(track), BeginNs(event), {name, event.shard.ToString(), flow});
  }

  void DrawEvent(const TraceEvent& event) {
    const Rank rank = event.shard.rank;
    const std::string peer = NameOf(event.peer);
    switch (event.what) {
      case What::kBegin:
        return Instant(RankName(rank), event, "begin");
      case What::kFilled:
        return Instant(RankName(rank), event, "filled " + ChunksText(event));
      case What::kPut:
        return Slice("put to " + peer, event, "put", FlowOf(node_.id, event.peer, rank, event.first));
      case What::kCheck:
        return Slice("check from " + peer, event, "check", FlowOf(event.peer, node_.id, rank, event.first));
      case What::kHeld:
        return Instant("copies from " + peer, event, "held", FlowOf(event.peer, node_.id, rank, kWholeCopy));
      case What::kAck:
        return Instant(RankName(rank), event, (event.failed ? "refused by " : "acknowledged by ") + peer,
                       FlowOf(node_.id, event.peer, rank, kWholeCopy));
      case What::kLevel:
        return Instant(RankName(rank), event, event.first < kLevels.size() ? kLevels[event.first] : "level");
      case What::kFetch:
        return Instant("fetch from " + peer, event, "fetched " + ChunksText(event));
      case What::kAbort:
        return Instant(RankName(rank), event, "aborted");
    }
  }

  static constexpr std::array<const char*, 5> kLevels = {"NONE", "LOCAL", "REPLICATED", "COMMITTED",
                                                         "PERSISTED"};  // ropeteam_level_t
  const NodeTrace& node_;
  const std::map<NodeId, std::string>& names_;
  PerfettoTrace& trace_;
  PerfettoTrace::Track process_ = 0;
  std::map<std::string, std::vector<Lane>> lanes_;
  std::map<std::string, PerfettoTrace::Track> tracks_;
};

// Returns the nodes of the view. Sets the newest committed step if no step was named.
Result<std::vector<NodeTrace>> FindNodes(AdminClient* client, AskOptions* options) {
  local::Admin admin;
  admin.timeout_ms = static_cast<uint64_t>(options->timeout_s * 1000);
  const Result<std::string> answer = client->Request(admin);
  if (!answer.ok()) return answer.status();
  const nlohmann::json status = nlohmann::json::parse(*answer);
  if (!options->has_step) {
    if (!status.at("has_latest").get<bool>())
      return Error(Code::kNotFound, "no step is committed: say which one to trace");
    options->step = status.at("latest").at("step").get<Step>();
  }
  std::vector<NodeTrace> nodes;
  for (const nlohmann::json& each : status.at("nodes")) {
    NodeTrace& node = nodes.emplace_back();
    node.name = each.at("name").get<std::string>();
    const std::string id = each.at("id").get<std::string>();
    std::from_chars(id.data(), id.data() + id.size(), node.id, 16);
  }
  return nodes;
}

// Keeps only events of the step's newest incarnation. An older incarnation's step of this number is a
// different step.
void KeepNewest(std::vector<NodeTrace>* nodes) {
  Incarnation newest = 0;
  for (const NodeTrace& node : *nodes)
    for (const TraceEvent& event : node.events) newest = std::max(newest, event.shard.incarnation);
  for (NodeTrace& node : *nodes) {
    std::erase_if(node.events, [&](const TraceEvent& event) { return event.shard.incarnation != newest; });
    std::stable_sort(node.events.begin(), node.events.end(),
                     [](const TraceEvent& a, const TraceEvent& b) { return a.at < b.at; });
  }
}

Status WriteTrace(const std::vector<NodeTrace>& nodes, const AskOptions& options) {
  std::map<NodeId, std::string> names;
  size_t events = 0;
  TimeUs uncertainty_us = 0;
  for (const NodeTrace& node : nodes) {
    names[node.id] = node.name;
    events += node.events.size();
    if (!node.events.empty()) uncertainty_us = std::max(uncertainty_us, node.uncertainty_us);
  }
  if (events == 0)
    return Error(
        Code::kNotFound,
        "no node has recorded events of step %llu: it was never saved, or the %zu events that each node "
        "keeps are newer",
        static_cast<unsigned long long>(options.step), kTraceEventsMax);
  PerfettoTrace trace;
  for (const NodeTrace& node : nodes)
    if (!node.events.empty()) NodeTimeline(node, names, &trace).Draw();
  const std::string path =
      options.output.empty() ? "ropeteam-step-" + std::to_string(options.step) + ".pftrace" : options.output;
  std::ofstream file(path, std::ios::binary);
  file << trace.Take();
  file.close();
  if (!file) return ErrnoError(errno, "write %s", path.c_str());
  std::printf(
      "step %llu: %zu events of %zu nodes, clocks aligned to %llu us, are in %s; ui.perfetto.dev opens it\n",
      static_cast<unsigned long long>(options.step), events, nodes.size(),
      static_cast<unsigned long long>(uncertainty_us), path.c_str());
  return OkStatus();
}

Status Run(AskOptions options) {
  const Result<std::string> socket =
      ChooseSocket(options.socket, static_cast<int64_t>(options.timeout_s * 1000));
  if (!socket.ok()) return socket.status();
  Result<std::unique_ptr<AdminClient>> client =
      AdminClient::Connect(*socket, static_cast<int64_t>(options.timeout_s * 1000));
  if (!client.ok()) return client.status();
  Result<std::vector<NodeTrace>> nodes = FindNodes(client->get(), &options);
  if (!nodes.ok()) return nodes.status();
  for (NodeTrace& node : *nodes)
    if (const Status status = AskNode(client->get(), options.step, options.timeout_s, &node); !status.ok())
      std::fprintf(stderr, "ropeteam trace: %s is left out: %s\n", node.name.c_str(),
                   status.ToString().c_str());
  KeepNewest(&*nodes);
  return WriteTrace(*nodes, options);
}

}  // namespace

int TraceCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kStepAndOutput);
  int code = 0;
  if (DoneWithOptions("trace", options, kHelp, &code)) return code;
  try {
    const Status status = Run(*options);
    return status.ok() ? 0 : Fail("trace", status);
  } catch (const nlohmann::json::exception& error) {
    std::fprintf(stderr, "ropeteam trace: the daemon's answer is not as expected: %s\n", error.what());
    return kExitFailed;
  }
}

}  // namespace ropeteam::cli
