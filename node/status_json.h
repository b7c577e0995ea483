// SPDX-License-Identifier: Apache-2.0
//
// Reports as JSON, for `ropeteam status --json`, `ls` and `verify` and for scripts. Keys are the structs' field names
// (core/engine/report.h). Node ids and tokens are strings of 16 hexadecimal digits, because not every JSON reader has
// 64-bit numbers. Keys are only ever added. docs/operations.md shows the documents.
//
// An answer must fit into a frame. A larger document is cut, details first, and then has "truncated": true. Pure
// functions.

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
  std::string leader = {};  // of this node's view, in reports of this node alone
  pid_t pid = 0;
  std::string socket;
  std::string control;  // host:port
  // Of the control connections now: "mutual TLS, job key …". May be empty.
  std::function<std::string()> security;
  std::string data_security;  // of the data ports: "members only"
  std::string data;           // Transport::Describe()
  std::string transport;      // DataPlane::transport_name()
  std::string fallback;       // why RDMA is not used; else empty
  TransportCapabilities capabilities;
  std::string arena;  // path
  uint64_t arena_bytes = 0;
  uint32_t replicas = 0;
  uint32_t keep_steps = 0;
  MembershipReport membership;
  DrainReport drain;
};

// The objects of a shard whose manifest is on this node.
struct ShardObjects {
  ShardId id;
  std::vector<Object> objects;
};

std::string StatusJson(const ClusterReport& report, const DaemonFacts& facts);
std::string NodeJson(const NodeReport& report, const DaemonFacts& facts,
                     const Transport::Counters& transport);
// `ls`: the steps. With `step`: that step's copies, and the objects that this node has.
std::string ListJson(const ClusterReport& report, const Step* step, const std::vector<ShardObjects>& objects);
std::string VerifyJson(const VerifyReport& report);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STATUS_JSON_H_
