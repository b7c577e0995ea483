// SPDX-License-Identifier: Apache-2.0
//
// Decrypts and encrypts copies in a job that encrypts. A copy that came from another node is ciphertext until it is read
// here: then it is decrypted into other chunks, and is plaintext from then on. A plaintext copy is encrypted if other
// nodes need the shard and no ciphertext is left. In both cases the shard stays here all the time (Store::Replace());
// meanwhile it needs twice its chunks.

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
  // After OK the shard is here, good, and ciphertext if `encrypted`. Bad chunks are repaired first. kNotFound: it is not
  // here, or was released meanwhile; kNoSpace; kCorrupt: a chunk cannot be repaired, or is not what its source encrypted.
  void Convert(const ShardId& shard, bool encrypted, Done done) {
    Start(shard, encrypted, false, std::move(done));
  }
  bool running(const ShardId& shard) const { return jobs_.contains(shard); }
  uint64_t allocated_chunks() const;

 private:
  struct Job {
    bool encrypt = false;
    bool repaired = false;  // and converted once more
    Store::LeaseToken lease = 0;
    std::vector<Extent> extents;
    std::vector<Done> waiters;
  };
  void Start(const ShardId& shard, bool encrypt, bool repaired, Done done);
  void OnDone(const ShardId& shard, const std::vector<uint32_t>& bad,
              const std::vector<EncryptedChunk>& encrypted);

  Parts& parts_;
  std::map<ShardId, Job> jobs_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_CONVERTER_H_
