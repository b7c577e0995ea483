// SPDX-License-Identifier: Apache-2.0
//
// A View is what membership tells core: which nodes are alive, which one leads, in which epoch. Views are values.
// A newer one replaces the older whole.

#ifndef ROPETEAM_CORE_BASE_VIEW_H_
#define ROPETEAM_CORE_BASE_VIEW_H_

#include <algorithm>
#include <string>
#include <vector>

#include "core/base/ids.h"

namespace ropeteam {

// Nodes of one job. A whole view of them is some 5 MiB on the wire, 38 MiB with every string at its limit.
inline constexpr size_t kNodesMax = 16'384;
inline constexpr size_t kNodeNameBytesMax = 63;  // a DNS label
inline constexpr size_t kDomainBytesMax = 255;   // "rack=r7,zone=b"
// A transport's endpoint name; the longest known is UCX's, ~500
inline constexpr size_t kAddressBytesMax = 1024;

// The version of what nodes tell each other, and the oldest that this build still speaks: a job goes on while its daemons
// are replaced one after the other. HACKING.md says how a message is changed.
inline constexpr uint32_t kProtocolVersion = 9;
inline constexpr uint32_t kProtocolOldest = 8;
static_assert(kProtocolOldest < kProtocolVersion);

struct Member {
  NodeId id = kNoNode;          // this run of the node's daemon
  std::string name;             // stable over restarts; unique among the living
  uint32_t ordinal = 0;         // position given by the launcher (node rank); orders the members
  std::string domain;           // failure domain label, empty when unknown
  std::string control_address;  // host:port of the node's gRPC service
  std::string data_address;     // opaque bytes of the transport's endpoint (Transport::LocalAddress)
  uint32_t protocol = 0;        // the newest version that it speaks; membership sets it. 0: kProtocolVersion
  friend bool operator==(const Member&, const Member&) = default;
};

inline constexpr uint32_t kReplicasMax = 8;      // more copies cost more memory than any failure is worth
inline constexpr uint32_t kKeepStepsMax = 1000;  // a listing of steps stays readable

// A machine that was restarted, or a network that was repaired, is usually back by then.
inline constexpr TimeUs kWaitForMissingDefaultUs = 300'000'000;
inline constexpr TimeUs kWaitForMissingMaxUs = 30ull * 24 * 3600 * 1'000'000;

// The settings of a job that its promises rest on. All members of a view have the same.
struct JobSettings {
  uint32_t replicas = 1;    // R: verified copies on other nodes that REPLICATED means
  uint32_t keep_steps = 2;  // K: committed steps that retention keeps
  uint32_t nodes = 1;  // that the launcher starts; `latest` need not wait for more ranks once they are there
  // URL of where committed steps are persisted; empty: nowhere.
  std::string storage = {};
  // A committed step is due to be persisted when so many steps, or seconds, have passed since the last one that was
  // due; 0: only those that a program names.
  uint64_t persist_every = 0;
  bool persist_every_seconds = false;
  // URL[@STEP] of another job's folder on storage: where neither memory nor `storage` has a step, ranks restore from
  // there. It is never written to. Empty: there is none.
  std::string restore_from = {};
  // How long an incarnation waits for missing nodes before it restores an older step without what they may know.
  TimeUs wait_for_missing_us = kWaitForMissingDefaultUs;
  // Whether steps may lie on storage. Only `storage` says whether any are written.
  bool reads_storage() const { return !storage.empty() || !restore_from.empty(); }
  friend bool operator==(const JobSettings&, const JobSettings&) = default;
};
inline constexpr size_t kStorageUrlBytesMax = 1024;

struct View {
  Epoch epoch = 0;
  NodeId leader = kNoNode;      // one of the members, or kNoNode when there are none
  std::vector<Member> members;  // ordered by (ordinal, name), ids and names unique
  JobSettings settings;
  // After a member has received this view, no instance outside it holds a lease for longer than this, and no member
  // leads that has led before and does not lead in this view. A leader that is new in this view decides nothing
  // before.
  TimeUs settle_us = 0;
  // The epoch in which the leader's present lead began. A node that led in an older view begins from nothing: another
  // one may have led in between.
  Epoch led_since = 0;
  friend bool operator==(const View&, const View&) = default;

  const Member* Find(NodeId id) const {
    for (const Member& member : members)
      if (member.id == id) return &member;
    return nullptr;
  }
  bool Contains(NodeId id) const { return Find(id) != nullptr; }
  // What its members tell each other in this epoch: the newest version that all of them speak.
  uint32_t protocol() const {
    uint32_t lowest = kProtocolVersion;
    for (const Member& member : members)
      if (member.protocol != 0) lowest = std::min(lowest, member.protocol);
    return lowest;
  }
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_VIEW_H_
