// SPDX-License-Identifier: Apache-2.0
//
// Questions to the current leader. Each question is repeated until it is answered or its deadline has passed.

#ifndef ROPETEAM_CORE_ENGINE_ASKER_H_
#define ROPETEAM_CORE_ENGINE_ASKER_H_

#include <functional>
#include <map>
#include <string>

#include "core/engine/context.h"

namespace ropeteam::engine {

class Asker {
 public:
  explicit Asker(Context* context) : context_(*context) {}

  // `done` gets the payload of the leader's reply, or the error status of the reply. After the deadline it gets
  // kDeadlineExceeded with the last reason that the leader gave.
  using Done = std::function<void(const Result<std::string>&)>;
  uint64_t Ask(Question::Topic topic, std::string payload, TimeUs deadline, Done done);
  // Cancels an open question: its `done` is never called.
  void Forget(uint64_t number);
  // Why the leader has not answered the open question yet.
  const std::string& Reason(uint64_t number) const { return questions_.at(number).reason; }
  uint64_t next_number() const { return next_number_; }
  size_t open() const { return questions_.size(); }

  void OnReply(NodeId from, const Reply& reply);
  // The leader may have changed: repeats all questions at once. But a new leader would take "forget all missing nodes"
  // for another question, since the former one may be missing by now: its `done` gets kUnavailable.
  void OnView();
  void OnTimer();
  TimeUs NextTimer() const;

 private:
  // A question that the leader cannot answer yet is repeated after an eighth of the time that it has waited so far. So
  // an answer is at most 12 % late, and many readers that wait for the same shard do not load the leader.
  static constexpr TimeUs kWaitShare = 8;
  static constexpr TimeUs kWaitMaxUs = 5'000'000;

  struct Open {
    Question question;
    TimeUs asked_at = 0;
    TimeUs deadline = 0;
    TimeUs next_send = 0;
    bool waits = false;  // the leader has replied "not yet"
    NodeId sent_to = kNoNode;
    std::string reason = "no leader has answered";
    Done done;
  };
  void Send(Open* open);
  Context& context_;
  uint64_t next_number_ = 1;
  std::map<uint64_t, Open> questions_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_ASKER_H_
