// SPDX-License-Identifier: Apache-2.0
//
// Decrypts and encrypts copies in a job that encrypts. A copy from another node stays ciphertext until it is read here.
// Then it is decrypted into other chunks and stays plaintext. A copy is encrypted, or encrypted with another key, if
// other nodes need the shard and can read no copy, and while a key is being replaced (rekeyer.h). The shard stays
// readable (Store::Replace()), and needs twice its chunks meanwhile.

#ifndef ROPETEAM_CORE_ENGINE_CONVERTER_H_
#define ROPETEAM_CORE_ENGINE_CONVERTER_H_

#include <functional>
#include <map>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Converter {
 public:
  explicit Converter(Parts* parts) : parts_(*parts) {}

  using Done = std::function<void(const Status&)>;
  // After OK the shard is here, good, and encrypted with this key of the node, or plaintext. Bad chunks are repaired
  // first. Errors: kNotFound if the shard is not here or was released meanwhile; kNoSpace; kUnavailable if it is
  // encrypted with a key that the node lacks; kCorrupt if a chunk cannot be repaired, or differs from what its source
  // encrypted.
  void Convert(const ShardId& shard, KeyId key, Done done) { Start(shard, key, false, std::move(done)); }
  bool running(const ShardId& shard) const { return jobs_.contains(shard); }
  uint64_t allocated_chunks() const;

 private:
  struct Job {
    KeyId key = kPlaintext;
    bool repaired = false;  // bad chunks were repaired, and the conversion was started a second time
    Store::LeaseToken lease = 0;
    std::vector<Extent> extents;
    std::vector<Done> waiters;
  };
  void Start(const ShardId& shard, KeyId key, bool repaired, Done done);
  void OnDone(const ShardId& shard, const std::vector<uint32_t>& bad,
              const std::vector<EncryptedChunk>& encrypted);

  Parts& parts_;
  std::map<ShardId, Job> jobs_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_CONVERTER_H_
