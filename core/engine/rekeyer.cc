// SPDX-License-Identifier: Apache-2.0
#include "core/engine/rekeyer.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

void Rekeyer::Begin() const {
  const Context& context = parts_.context;
  std::map<KeyId, uint64_t> absent;
  for (const auto& [id, shard] : context.store.shards())
    if (!context.Readable(*shard)) ++absent[shard->encryption.key];
  std::string ours;
  for (const KeyId key : context.config.keys) ours += (ours.empty() ? "" : ", ") + KeyName(key);
  for (const auto& [key, copies] : absent)
    LOG_WARNING(
        "%llu copies in this arena do not count: they are encrypted with key %s, which is not among the keys "
        "of "
        "this node (%s): put it back, second in the key file, and restart this daemon",
        static_cast<unsigned long long>(copies), KeyName(key).c_str(), ours.c_str());
}

bool Rekeyer::IsLeft(const SealedShard& shard) const {
  return shard.encrypted() && shard.encryption.key != parts_.context.config.key() &&
         parts_.context.Readable(shard);
}

const Rekeyer::Copies& Rekeyer::CountCopies() const {
  const Context& context = parts_.context;
  if (!context.config.encrypts() || counted_at_ == context.store.changes()) return counted_;
  counted_at_ = context.store.changes();
  counted_ = Copies();
  for (const auto& [id, shard] : context.store.shards()) {
    counted_.left += IsLeft(*shard) ? 1 : 0;
    counted_.unreadable += context.Readable(*shard) ? 0 : 1;
  }
  return counted_;
}

void Rekeyer::OnTimer() {
  const Context& context = parts_.context;
  if (NextTimer() > context.now) return;
  next_ = context.now + kLookUs;
  if (!context.announced.heard || context.announced.key != context.config.key()) return;
  const auto& shards = context.store.shards();
  auto at = std::make_reverse_iterator(cursor_ ? shards.lower_bound(*cursor_) : shards.end());
  while (at != shards.rend() && !IsLeft(*at->second)) ++at;
  if (at == shards.rend()) {
    if (failed_) next_ = context.now + kAgainUs;
    cursor_.reset();
    failed_ = false;
    return;
  }
  if (parts_.sessions.filling_chunks() + parts_.holder.granted_chunks() != 0) return;
  cursor_ = at->first;
  if (context.store.chunks_free() < at->second->crcs.size()) {  // nothing is evicted for this
    failed_ = true;
    next_ = context.now;
    return;
  }
  running_ = true;
  parts_.converter.Convert(*cursor_, context.config.key(),
                           [this, id = *cursor_, bytes = at->second->meta.stream_bytes](
                               const Status& status) { OnDone(id, bytes, status); });
}

void Rekeyer::OnDone(const ShardId& shard, uint64_t bytes, const Status& status) {
  Context& context = parts_.context;
  running_ = false;
  next_ = context.now + bytes / kBytesPerUs;
  failed_ = failed_ || (!status.ok() && context.store.Find(shard) != nullptr);
  if (!status.ok()) return;
  ++reencrypted_;
  context.inventory_dirty = context.counters_dirty = true;
  if (left() != 0 && told_ + kToldEveryUs > context.now) return;
  told_ = context.now;
  LOG_INFO("re-encrypted %llu of %llu copies with key %s", static_cast<unsigned long long>(reencrypted_),
           static_cast<unsigned long long>(reencrypted_ + left()), KeyName(context.config.key()).c_str());
}

TimeUs Rekeyer::NextTimer() const {
  return running_ || parts_.context.config.keys.size() < 2 ? kNever : next_;
}

}  // namespace ropeteam::engine
