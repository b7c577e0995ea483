// SPDX-License-Identifier: Apache-2.0
//
// Drains this node: it leaves the job without loss of redundancy. Its inventory says that it leaves. From then on:
//
// * no save begins on it; open saves go on;
// * it accepts no replica, so the sources choose other nodes;
// * the leader orders no copies to it. Its copies still count as copies, but not as redundancy: kept shards get 1 + R
//   copies on nodes that stay, or as many as there are such nodes;
// * this class asks the leader repeatedly what is still missing.
//
// The node may leave when two conditions hold. Every kept shard that it has is redundant elsewhere. The steps that were
// being persisted when it had settled are on storage or abandoned. A node has settled when its saves have ended, no
// copy is on its way to it, and its shards of the current incarnation are committed or released. It waits at most
// kSettleUs to settle, because a rank on another node may be stuck.
//
// All of this is soft state. A new leader learns from the inventory that this node leaves. A restarted daemon is a new
// instance and stays. Several nodes may leave at once, the leader among them, and even all nodes.

#ifndef ROPETEAM_CORE_ENGINE_DRAINER_H_
#define ROPETEAM_CORE_ENGINE_DRAINER_H_

#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Drainer {
 public:
  explicit Drainer(Parts* parts) : parts_(*parts) {}

  void Begin();
  // `known`: the leader has acknowledged the newest inventory of this node.
  void OnTimer(bool known);
  TimeUs NextTimer() const { return report_.begun && !asking_ ? ask_at_ : kNever; }
  const DrainReport& report() const { return report_; }

 private:
  // The pause between an answer and the next question. A copy of 1 GB takes as long at 10 GB/s, and a progress bar
  // needs no more.
  static constexpr TimeUs kAskEveryUs = 100'000;
  static constexpr TimeUs kAskTimeoutUs = 2'000'000;
  // A save of 32 GB takes 3.2 s at 10 GB/s. Its commit takes a few messages more.
  static constexpr TimeUs kSettleUs = 5'000'000;

  bool Settled() const;
  void OnReply(const DrainReply& reply, bool settled);

  Parts& parts_;
  DrainReport report_;
  TimeUs begun_at_ = 0;
  bool asking_ = false;
  TimeUs ask_at_ = kNever;
  bool awaits_ = false;       // `awaited_` is known
  std::set<StepId> awaited_;  // steps that must be persisted before the node leaves
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_DRAINER_H_
