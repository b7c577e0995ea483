// SPDX-License-Identifier: Apache-2.0
#include "core/engine/storage_hold.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/base/log.h"

namespace ropeteam::engine {

void StorageHold::Confirm(Then then) {
  waiting_.push_back(std::move(then));
  if (asking_) return;
  asking_ = asked_ = true;
  ++request_;
  order_ = keeper_.Start(
      HoldStorage{}, [this](const Status& status, const StorageDone& done) { OnHeld(status, done); },
      [this] {
        trouble_ = "taking hold of storage has made no progress for a minute";
        LOG_WARNING("storage hangs: %s", trouble_.c_str());
        keeper_.PassOn(trouble_);
      });
}

void StorageHold::OnHeld(const Status& status, const StorageDone& done) {
  trouble_.clear();
  if (status.ok()) {
    const auto* proof = std::get_if<StorageProof>(&done.result);
    if (proof == nullptr || proof->text.empty())
      return Answer(Error(Code::kUnavailable, "storage is held without a proof"));
    return proof->text == proof_ ? Answer(OkStatus()) : FindWitness(proof->text);
  }
  const bool by_lock = status.code() == Code::kUnavailable || status.code() == Code::kAlreadyExists;
  if (!by_lock) keeper_.PassOn(status.ToString());
  Answer(status);
}

void StorageHold::FindWitness(const std::string& proof) {
  std::vector<NodeId> nodes = keeper_.nodes();
  nodes.erase(nodes.begin());
  if (nodes.empty()) return LookAlone(proof);
  std::rotate(nodes.begin(), nodes.begin() + static_cast<ptrdiff_t>(witnesses_failed_ % nodes.size()),
              nodes.end());
  nodes.resize(std::min(nodes.size(), kWitnessesMax));
  const auto left = std::make_shared<size_t>(nodes.size());
  const auto answered = [this, request = request_, keeper = keeper_.keeper(), proof,
                         left](const Status& status) {
    if (request != request_ || !asking_) return;
    if (keeper != keeper_.keeper())
      return Answer(Error(Code::kUnavailable, "storage has got another keeper"));
    if (status.ok()) return Count(proof);
    ++witnesses_failed_;
    if (--*left != 0) return;
    const std::string why = "no other node sees the lock that it has taken there: " + status.ToString();
    keeper_.PassOn(why);
    Answer(Error(Code::kUnavailable, "%s", why.c_str()));
  };
  for (const NodeId node : nodes) {
    const auto first = std::make_shared<bool>(true);  // a node that hangs and answers later counts once
    const auto once = [answered, first](const Status& status) {
      if (std::exchange(*first, false)) answered(status);
    };
    keeper_.StartAt(
        node, ProveStorage{proof}, [once](const Status& status, const StorageDone&) { once(status); },
        [once] { once(Error(Code::kUnavailable, "it makes no progress for a minute")); });
  }
}

// What a list of steps says may be of a node that has left. So the step is read.
void StorageHold::LookAlone(const std::string& proof) {
  const std::optional<StepId> step = step_to_see_();
  if (step == StepId()) return Count(proof);
  const auto answer = [this](const std::string& why) {
    Answer(Error(Code::kUnavailable,
                 "this node is alone%s: no other node can say whether this is the job's store", why.c_str()));
  };
  if (!step) return answer(", and no step is known to others");
  keeper_.Start(ReadStored{*step},
                [this, answer, proof, request = request_](const Status& status, const StorageDone&) {
                  if (request != request_ || !asking_) return;
                  const StoredWord word = WordOf(status.code());
                  if (word == StoredWord::kGood || word == StoredWord::kBad) return Count(proof);
                  answer(", and does not see a step that others have seen (" + status.ToString() + ")");
                });
}

void StorageHold::Count(const std::string& proof) {
  proof_ = proof;
  witnesses_failed_ = 0;
  Answer(OkStatus());
}

void StorageHold::Answer(const Status& status) {
  asking_ = false;
  if (!status.ok()) proof_.clear();
  for (const Then& then : std::exchange(waiting_, {})) then(status);
}

void StorageHold::Begin() {
  waiting_.clear();
  keeper_.GiveUp(order_);
  ++request_;
  asking_ = asked_ = false;
  proof_.clear();
  trouble_.clear();
}

void StorageHold::Release() {
  const bool asked = asked_;
  Begin();
  if (asked) keeper_.Start(ReleaseStorage{}, [](const Status&, const StorageDone&) {});
}

}  // namespace ropeteam::engine
