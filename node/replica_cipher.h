// SPDX-License-Identifier: Apache-2.0
//
// AES-256-GCM (NIST SP 800-38D) of the chunks that leave a node, with keys derived from the job's (docs/security.md):
//
//   PRK    = derive("replicas")                                       membership/credentials/job_key.h
//   KeyId  = JobKeyNumber(), of the same key                          likewise
//   key    = HKDF-Expand-SHA256(PRK, "ropeteam shard" || salt)        RFC 5869; one a shard
//   nonce  = the chunk's number, 96 bits little-endian
//   AAD    = "ropeteam chunk 1" || incarnation || step || rank || chunk, little-endian
//
// A salt is drawn only once, and the plaintext under it never changes. So no key and nonce encrypt two plaintexts.
//
// Thread-safe.

#ifndef ROPETEAM_NODE_REPLICA_CIPHER_H_
#define ROPETEAM_NODE_REPLICA_CIPHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "membership/credentials/job_key.h"

namespace ropeteam {

class ReplicaCipher {
 public:
  ReplicaCipher(const std::vector<JobKey>& keys, const std::string& job);
  ~ReplicaCipher();  // wipes the keys

  std::vector<KeyId> key_ids() const;  // in the order of the keys

  // Decrypts and encrypts the range, in `memory`, as its cipher says. Returns false if the checksum or tag does not
  // match, or if a key is not here. Both ends must be in the memory. The bytes are read once, in small pieces, into memory of
  // this thread. So the encrypted bytes are the checked ones.
  bool CarryOut(std::byte* memory, const StartCheck::Range& range, EncryptedChunk* encrypted) const;

  ReplicaCipher(const ReplicaCipher&) = delete;
  ReplicaCipher& operator=(const ReplicaCipher&) = delete;

 private:
  struct Key {
    KeyId id = kPlaintext;
    std::string prk;
  };
  const std::string* Find(KeyId id) const;

  std::vector<Key> keys_;
};

// Random, for EngineConfig::salt.
EncryptionSalt NewEncryptionSalt();

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_REPLICA_CIPHER_H_
