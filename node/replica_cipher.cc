// SPDX-License-Identifier: Apache-2.0
#include "node/replica_cipher.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "core/base/check.h"
#include "core/base/checksum.h"

namespace ropeteam {
namespace {

constexpr size_t kKeyBytes = 32;
constexpr size_t kNonceBytes = 12;
constexpr size_t kTagBytes = 16;
// A piece stays in a core's second-level cache from its copy to its last checksum.
constexpr size_t kPieceBytes = 64 * 1024;

struct FreeContext {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_CIPHER_CTX, FreeContext>;
using Key = std::array<unsigned char, kKeyBytes>;

template <typename T>
void Append(const T& value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

unsigned char* Bytes(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

// The first and only block of HKDF-Expand.
Key KeyOf(const std::string& prk, const EncryptionSalt& salt) {
  std::string info = "ropeteam shard";
  for (const uint64_t part : {salt.instance[0], salt.instance[1], salt.count}) Append(part, &info);
  info += '\1';
  Key key;
  unsigned length = 0;
  ROPETEAM_CHECK(HMAC(EVP_sha256(), prk.data(), static_cast<int>(prk.size()),
                      reinterpret_cast<const unsigned char*>(info.data()), info.size(), key.data(),
                      &length) != nullptr &&
                 length == key.size());
  return key;
}

// Returns a context ready for the chunk's bytes. libcrypto has this cipher and the arguments are valid, so
// only an allocation can fail.
Context Begin(const std::string& prk, const ChunkCipher& cipher) {
  Key key = KeyOf(prk, cipher.salt);
  std::array<unsigned char, kNonceBytes> nonce{};
  std::memcpy(nonce.data(), &cipher.chunk, sizeof(cipher.chunk));
  std::string aad = "ropeteam chunk 1";
  Append(cipher.shard.incarnation, &aad);
  Append(cipher.shard.step, &aad);
  Append(cipher.shard.rank, &aad);
  Append(cipher.chunk, &aad);
  Context context(EVP_CIPHER_CTX_new());
  int length = 0;
  ROPETEAM_CHECK(context != nullptr &&
                 EVP_CipherInit_ex(context.get(), EVP_aes_256_gcm(), nullptr, key.data(), nonce.data(),
                                   cipher.encrypt ? 1 : 0) == 1 &&
                 EVP_CipherUpdate(context.get(), nullptr, &length,
                                  reinterpret_cast<const unsigned char*>(aad.data()),
                                  static_cast<int>(aad.size())) == 1);
  OPENSSL_cleanse(key.data(), key.size());
  return context;
}

void Update(EVP_CIPHER_CTX* context, std::byte* bytes, size_t count) {
  int length = 0;
  ROPETEAM_CHECK(EVP_CipherUpdate(context, Bytes(bytes), &length, Bytes(bytes), static_cast<int>(count)) ==
                     1 &&
                 length == static_cast<int>(count));
}

// Copies each piece of the range to this thread's own memory and calls `piece` with the copy.
template <typename Piece>
void ForEachPiece(const std::byte* from, uint64_t length, const Piece& piece) {
  thread_local const auto buffer = std::make_unique<std::byte[]>(kPieceBytes);
  for (uint64_t at = 0; at < length; at += kPieceBytes) {
    const size_t count = std::min<uint64_t>(kPieceBytes, length - at);
    std::memcpy(buffer.get(), from + at, count);
    piece(buffer.get(), at, count);
  }
}

bool Encrypt(EVP_CIPHER_CTX* context, std::byte* memory, const StartCheck::Range& range,
             EncryptedChunk* encrypted) {
  std::byte* const to = memory + range.cipher->to;
  uint32_t plain = 0;
  uint32_t crc = 0;
  ForEachPiece(memory + range.offset, range.length, [&](std::byte* piece, uint64_t at, size_t count) {
    plain = Crc32c(piece, count, plain);
    Update(context, piece, count);
    crc = CopyCrc32c(to + at, piece, count, crc);
  });
  unsigned char end[kTagBytes];
  int length = 0;
  ChunkTag tag;
  tag.crc = plain;
  ROPETEAM_CHECK(EVP_CipherFinal_ex(context, end, &length) == 1 &&
                 EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_GET_TAG, kTagBytes, tag.tag.data()) == 1);
  *encrypted = {crc, tag};
  if (plain == range.crc) return true;
  // This plaintext is not the one that belongs to the nonce. Nobody may see two ciphertexts under one nonce.
  std::memset(to, 0, range.length);
  return false;
}

// With `to` null, nothing is written; the result tells whether this is the key.
bool Decrypt(EVP_CIPHER_CTX* context, const std::byte* from, uint64_t bytes, const ChunkTag& tag,
             std::byte* to, uint32_t* plain) {
  ForEachPiece(from, bytes, [&](std::byte* piece, uint64_t at, size_t count) {
    Update(context, piece, count);
    if (to != nullptr) *plain = CopyCrc32c(to + at, piece, count, *plain);
  });
  unsigned char end[kTagBytes];
  int length = 0;
  std::array<uint64_t, 2> expected = tag.tag;
  return EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, kTagBytes, expected.data()) == 1 &&
         EVP_CipherFinal_ex(context, end, &length) == 1;
}

}  // namespace

ReplicaCipher::ReplicaCipher(const std::vector<JobKey>& keys, const std::string& job) {
  ROPETEAM_CHECK(!keys.empty());
  for (const JobKey& key : keys) keys_.push_back(DeriveFromJobKey(key, job, "replicas", kKeyBytes));
}

ReplicaCipher::~ReplicaCipher() {
  for (std::string& key : keys_) OPENSSL_cleanse(key.data(), key.size());
}

bool ReplicaCipher::CarryOut(std::byte* memory, const StartCheck::Range& range,
                             EncryptedChunk* encrypted) const {
  ROPETEAM_CHECK(range.cipher.has_value());
  const ChunkCipher& cipher = *range.cipher;
  if (cipher.encrypt) return Encrypt(Begin(keys_[0], cipher).get(), memory, range, encrypted);
  const std::byte* const from = memory + range.offset;
  for (const std::string& key : keys_) {
    // While a key is being replaced, any of the keys may be the right one. Decryption in place allows one
    // try, so the key is tested first.
    if (&key != &keys_.back() &&
        !Decrypt(Begin(key, cipher).get(), from, range.length, cipher.tag, nullptr, nullptr))
      continue;
    uint32_t plain = 0;
    const bool authentic =
        Decrypt(Begin(key, cipher).get(), from, range.length, cipher.tag, memory + cipher.to, &plain);
    return authentic && plain == range.crc;
  }
  return false;
}

EncryptionSalt NewEncryptionSalt() {
  EncryptionSalt salt;
  // getrandom() never returns a part of 16 bytes.
  while (getrandom(salt.instance.data(), sizeof(salt.instance), 0) != sizeof(salt.instance)) continue;
  return salt;
}

}  // namespace ropeteam
