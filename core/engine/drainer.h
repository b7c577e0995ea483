// SPDX-License-Identifier: Apache-2.0
//
// Drains this node: it leaves the job without losing redundancy. It says so in its inventory, and from then on
//
//  * no save begins on it; saves that are open go on;
//  * it accepts no replica, so their sources choose other nodes;
//  * the leader orders no copies to it. Copies that it has count as copies but not as redundancy: kept shards get
//    1 + R copies on nodes that stay, or as many as there are such nodes;
//  * this class asks the leader, again and again, what is still missing.
//
// The node may leave when every kept shard that it has is redundant elsewhere, and the steps that were being persisted
// when it had settled are on storage or abandoned. It has settled when its saves have ended, no copy is on its way here,
// and its shards of the current incarnation are committed or released. It waits for that kSettleUs at most: a rank on
// another node may be stuck.
//
// All of this is soft state. A later leader learns from the inventory that this node leaves. A daemon that is started
// again is another instance, which stays. Several nodes may leave at once, also the leader, and even all of them.

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
  // `known`: the leader knows all that there is here.
  void OnTimer(bool known);
  TimeUs NextTimer() const { return report_.begun && !asking_ ? ask_at_ : kNever; }
  const DrainReport& report() const { return report_; }

 private:
  // Between an answer and the next question: short enough for a progress bar; a copy of 1 GB takes as long at 10 GB/s.
  static constexpr TimeUs kAskEveryUs = 100'000;
  static constexpr TimeUs kAskTimeoutUs = 2'000'000;
  // A save of 32 GB takes so long at 10 GB/s, and its commit some messages more.
  static constexpr TimeUs kSettleUs = 5'000'000;

  bool Settled() const;
  void OnReply(const DrainReply& reply, bool settled);

  Parts& parts_;
  DrainReport report_;
  TimeUs begun_at_ = 0;
  bool asking_ = false;
  TimeUs ask_at_ = kNever;
  bool awaits_ = false;           // `awaited_` is known
  std::vector<StepKey> awaited_;  // to be persisted
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_DRAINER_H_
