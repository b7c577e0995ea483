// SPDX-License-Identifier: Apache-2.0
//
// Checks what leaves a node of a job that encrypts: no chunk in plaintext, and no nonce for two plaintexts. Checks also
// that its store admits the transfers of peers for as long as they last.
#include <algorithm>
#include <cstring>

#include "tests/simulation/checker.h"
#include "tests/toy_cipher.h"

namespace ropeteam::simulation {
namespace {

uint64_t Fingerprint(const char* bytes, size_t length) {
  uint64_t print = length;
  for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof(word), length - at));
    print = ToyMix(print, word);
  }
  return print;
}

}  // namespace

void Checker::OnContent(const Content& content) {
  if (!options_.encrypts) return;
  const uint64_t chunk_bytes = options_.chunk_bytes;
  for (uint64_t at = 0; at < content.stream.size(); at += chunk_bytes)
    plaintext_.insert(
        Fingerprint(content.stream.data() + at, std::min<uint64_t>(chunk_bytes, content.stream.size() - at)));
}

void Checker::OnWire(const Transfer& transfer, const std::byte* bytes) {
  if (!options_.encrypts || network_.Refuses(transfer)) return;
  if (transfer.device != nullptr)
    return Fail("%s takes plaintext from device memory", transfer.ToString().c_str());
  if (bytes != nullptr &&
      plaintext_.contains(Fingerprint(reinterpret_cast<const char*>(bytes), transfer.length)))
    Fail("%s moves a chunk in clear", transfer.ToString().c_str());
  CheckAdmitted(transfer);
}

// A fabric that guards chunks also fences. On another one, a node that was removed from the view may go on reading.
void Checker::CheckAdmitted(const Transfer& transfer) {
  if (!options_.encrypts || !network_.options().fences || network_.Refuses(transfer)) return;
  const Host& target = *hosts_[transfer.target];
  const PeerAccess& access = *target.store->peer_access();
  const auto kind = transfer.get ? PeerAccess::Kind::kRead : PeerAccess::Kind::kWrite;
  const uint64_t begin = transfer.remote_offset, end = begin + transfer.length;
  for (uint32_t chunk = ChunkOf(target, begin); chunk <= ChunkOf(target, end - 1); ++chunk)
    if (access.Of(chunk) != kind)
      Fail("%s is not admitted by its target: chunk %u", transfer.ToString().c_str(), chunk);
}

void Checker::OnCipher(const Host& host, const StartCheck::Range& range) {
  const ChunkCipher& cipher = *range.cipher;
  for (const KeyId key : {cipher.from_key, cipher.to_key})
    if (key != kPlaintext && std::find(host.keys.begin(), host.keys.end(), key) == host.keys.end())
      return Fail("host %zu uses key %s, which it lacks", host.index, KeyName(key).c_str());
  if (cipher.to_key == kPlaintext) return;
  const EncryptionSalt& salt = cipher.salt;
  if (salt.count == 0) return Fail("host %zu encrypts without a salt", host.index);
  const auto nonce =
      std::make_tuple(cipher.to_key, salt.instance[0], salt.instance[1], salt.count, cipher.chunk);
  const std::pair<uint32_t, uint64_t> plaintext{range.crc, range.length};
  if (nonces_.try_emplace(nonce, plaintext).first->second != plaintext)
    Fail("host %zu encrypts chunk %u of %s under a nonce that another plaintext had", host.index,
         cipher.chunk, cipher.shard.ToString().c_str());
}

}  // namespace ropeteam::simulation
