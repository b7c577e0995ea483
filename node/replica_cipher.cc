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
Context Begin(const std::string& prk, const ChunkCipher& cipher, bool encrypt) {
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
                                   encrypt ? 1 : 0) == 1 &&
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

// Whether the bytes are those that the tag was made for.
bool Authentic(EVP_CIPHER_CTX* context, const ChunkTag& tag) {
  unsigned char end[kTagBytes];
  int length = 0;
  std::array<uint64_t, 2> expected = tag.tag;
  return EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, kTagBytes, expected.data()) == 1 &&
         EVP_CipherFinal_ex(context, end, &length) == 1;
}

ChunkTag TagOf(EVP_CIPHER_CTX* context, uint32_t plain) {
  unsigned char end[kTagBytes];
  int length = 0;
  ChunkTag tag;
  tag.crc = plain;
  ROPETEAM_CHECK(EVP_CipherFinal_ex(context, end, &length) == 1 &&
                 EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_GET_TAG, kTagBytes, tag.tag.data()) == 1);
  return tag;
}

}  // namespace

ReplicaCipher::ReplicaCipher(const std::vector<JobKey>& keys, const std::string& job) {
  ROPETEAM_CHECK(!keys.empty());
  for (const JobKey& key : keys)
    keys_.push_back({JobKeyNumber(key, job), DeriveFromJobKey(key, job, "replicas", kKeyBytes)});
}

ReplicaCipher::~ReplicaCipher() {
  for (Key& key : keys_) OPENSSL_cleanse(key.prk.data(), key.prk.size());
}

std::vector<KeyId> ReplicaCipher::key_ids() const {
  std::vector<KeyId> ids;
  for (const Key& key : keys_) ids.push_back(key.id);
  return ids;
}

const std::string* ReplicaCipher::Find(KeyId id) const {
  const auto found = std::find_if(keys_.begin(), keys_.end(), [id](const Key& key) { return key.id == id; });
  return found == keys_.end() ? nullptr : &found->prk;
}

bool ReplicaCipher::CarryOut(std::byte* memory, const StartCheck::Range& range,
                             EncryptedChunk* encrypted) const {
  ROPETEAM_CHECK(range.cipher.has_value());
  const ChunkCipher& cipher = *range.cipher;
  const bool decrypts = cipher.from_key != kPlaintext;
  const bool encrypts = cipher.to_key != kPlaintext;
  const std::string* const from_key = decrypts ? Find(cipher.from_key) : nullptr;
  const std::string* const to_key = encrypts ? Find(cipher.to_key) : nullptr;
  if ((decrypts && from_key == nullptr) || (encrypts && to_key == nullptr)) return false;
  const Context from = decrypts ? Begin(*from_key, cipher, false) : nullptr;
  const Context into = encrypts ? Begin(*to_key, cipher, true) : nullptr;
  thread_local const auto buffer = std::make_unique<std::byte[]>(kPieceBytes);
  std::byte* const piece = buffer.get();
  uint32_t plain = 0;
  uint32_t crc = 0;
  for (uint64_t at = 0; at < range.length; at += kPieceBytes) {
    const size_t count = std::min<uint64_t>(kPieceBytes, range.length - at);
    std::memcpy(piece, memory + range.offset + at, count);
    if (decrypts) Update(from.get(), piece, count);
    if (encrypts) {
      plain = Crc32c(piece, count, plain);
      Update(into.get(), piece, count);
    }
    crc = CopyCrc32c(memory + cipher.to + at, piece, count, crc);
  }
  if (encrypts) *encrypted = {crc, TagOf(into.get(), plain)};
  if (!encrypts) plain = crc;
  if ((!decrypts || Authentic(from.get(), cipher.tag)) && plain == range.crc) return true;
  // This plaintext is not the one that belongs to the nonce. Nobody may see two ciphertexts under one nonce.
  if (encrypts) std::memset(memory + cipher.to, 0, range.length);
  return false;
}

EncryptionSalt NewEncryptionSalt() {
  EncryptionSalt salt;
  // getrandom() never returns a part of 16 bytes.
  while (getrandom(salt.instance.data(), sizeof(salt.instance), 0) != sizeof(salt.instance)) continue;
  return salt;
}

}  // namespace ropeteam
