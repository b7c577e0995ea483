// SPDX-License-Identifier: Apache-2.0
//
// Reports as JSON, for `ropeteam status --json`, `ls` and `verify` and for scripts. Keys are the
// structs' field names (core/engine/report.h); node ids and tokens are strings of 16 hexadecimal digits,
// because 64 random bits do not fit a JSON number everywhere. Keys are only ever added. docs/operations.md
// shows the documents.
//
// An answer may not be larger than a frame. A larger document is cut, details first, and then has "truncated": true.
// Pure functions.

#ifndef ROPETEAM_NODE_STATUS_JSON_H_
#define ROPETEAM_NODE_STATUS_JSON_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/engine/report.h"
#include "core/shard/manifest.h"
#include "node/coordinator_watch.h"
#include "transport/transport.h"

namespace ropeteam {

// Facts about this daemon itself.
struct DaemonFacts {
  std::string version;
  std::string node;
  pid_t pid = 0;
  std::string socket;
  std::string control;  // host:port
  // Of the control connections, as it is when it is asked: "mutual TLS, job key …". May be empty.
  std::function<std::string()> security;
  std::string data_security;  // of the data ports: "members only"
  std::string data;           // Transport::Describe()
  std::string transport;      // DataPlane::transport_name()
  std::string fallback;       // why RDMA was passed over; empty when it was not
  TransportCapabilities capabilities;
  std::string arena;  // path
  uint64_t arena_bytes = 0;
  uint32_t replicas = 0;
  uint32_t keep_steps = 0;
  MembershipReport membership;
  DrainReport drain;
};

// The objects of a shard whose manifest lies on this node.
struct ShardObjects {
  ShardId id;
  std::vector<Object> objects;
};

std::string StatusJson(const ClusterReport& report, const DaemonFacts& facts);
std::string NodeJson(const NodeReport& report, const DaemonFacts& facts,
                     const Transport::Counters& transport);
// `ls`: the steps; with `step`, that step's copies, and the objects that are at hand.
std::string ListJson(const ClusterReport& report, const Step* step, const std::vector<ShardObjects>& objects);
std::string VerifyJson(const VerifyReport& report);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STATUS_JSON_H_
