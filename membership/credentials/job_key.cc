// SPDX-License-Identifier: Apache-2.0
#include "membership/credentials/job_key.h"

#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "membership/credentials/openssl.h"

namespace ropeteam {
namespace {

constexpr char kSalt[] = "ropeteam job key 1";
constexpr size_t kDigits = 2 * kJobKeyBytes;
constexpr mode_t kOthersReadGroupWrites = 0027;
// Any node's clock is inside this interval: the key decides which nodes are admitted, not the date.
constexpr char kNotBefore[] = "20250101000000Z";
constexpr char kNotAfter[] = "99991231235959Z";

const unsigned char* Bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string Hex(std::string_view bytes) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    text += kHex[static_cast<unsigned char>(c) >> 4];
    text += kHex[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

Status CryptoError(const char* what) {
  char text[256];
  ERR_error_string_n(ERR_get_error(), text, sizeof(text));
  return Error(Code::kInternal, "%s: %s", what, text);
}

// Reads the whole of a small open file. Closes nothing.
Result<std::string> ReadSmall(int fd, const std::string& source, size_t bytes_max) {
  std::string text(bytes_max + 1, '\0');
  size_t length = 0;
  while (length < text.size()) {
    const ssize_t count = read(fd, text.data() + length, text.size() - length);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoError(errno, "%s", source.c_str());
    if (count == 0) break;
    length += static_cast<size_t>(count);
  }
  if (length > bytes_max)
    return Error(Code::kInvalidArgument, "%s has more than %zu bytes", source.c_str(), bytes_max);
  text.resize(length);
  return text;
}

Result<std::string> ReadSecret(const std::string& path, const std::string& source, int flags,
                               mode_t forbidden, size_t bytes_max) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
  if (fd < 0)
    return errno == ENOENT ? Error(Code::kNotFound, "%s: no such file", source.c_str())
                           : ErrnoError(errno, "%s", source.c_str());
  struct stat info {};
  Result<std::string> text = Error(Code::kIo, "%s cannot be examined", source.c_str());
  if (fstat(fd, &info) == 0) {
    if (!S_ISREG(info.st_mode)) {
      text = Error(Code::kInvalidArgument, "%s is not a file", source.c_str());
    } else if ((flags & O_NOFOLLOW) != 0 && info.st_uid != geteuid()) {
      text = Error(Code::kInvalidArgument, "%s belongs to uid %u, not to uid %u", source.c_str(), info.st_uid,
                   geteuid());
    } else if ((info.st_mode & forbidden) != 0) {
      text = Error(Code::kInvalidArgument, "%s may be read by others (mode %04o): chmod 600 %s",
                   source.c_str(), static_cast<unsigned>(info.st_mode & 07777), path.c_str());
    } else {
      text = ReadSmall(fd, source, bytes_max);
    }
  }
  close(fd);
  return text;
}

Result<std::vector<JobKey>> ReadKeys(const std::string& path, const std::string& source, int flags,
                                     mode_t forbidden) {
  Result<std::string> text = ReadSecret(path, source, flags, forbidden, kSecretFileBytesMax);
  if (!text.ok()) return text.status();
  Result<std::vector<JobKey>> keys = ParseJobKeys(*text, source);
  OPENSSL_cleanse(text->data(), text->size());
  return keys;
}

KeyPair AuthorityOf(const JobKey& key, const std::string& job) {
  std::string seed = DeriveFromJobKey(key, job, "tls ca", kJobKeyBytes);
  KeyPair pair(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, Bytes(seed), seed.size()));
  OPENSSL_cleanse(seed.data(), seed.size());
  ROPETEAM_CHECK(pair != nullptr);  // any 32 bytes are a seed
  return pair;
}

std::string PublicKeyOf(EVP_PKEY* pair) {
  std::string bytes(kJobKeyBytes, '\0');
  size_t length = bytes.size();
  ROPETEAM_CHECK(EVP_PKEY_get_raw_public_key(pair, reinterpret_cast<unsigned char*>(bytes.data()), &length) ==
                 1);
  return bytes;
}

std::string HashOf(const std::string& public_key) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  ROPETEAM_CHECK(EVP_Digest(public_key.data(), public_key.size(), digest, &length, EVP_sha256(), nullptr) ==
                 1);
  return Hex({reinterpret_cast<const char*>(digest), length});
}

// The name has the key's hash, so that a verifier that trusts two authorities tries the right one.
std::string AuthorityName(EVP_PKEY* authority) {
  return "ropeteam job ca " + HashOf(PublicKeyOf(authority)).substr(0, 16);
}

bool AddName(X509_NAME* name, const std::string& text) {
  return X509_NAME_add_entry_by_NID(name, NID_commonName, MBSTRING_UTF8, Bytes(text),
                                    static_cast<int>(text.size()), -1, 0) == 1;
}

bool AddExtension(X509* certificate, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
  const bool added = extension != nullptr && X509_add_ext(certificate, extension, -1) == 1;
  X509_EXTENSION_free(extension);
  return added;
}

// A certificate of `subject` for the public half of `pair`; null: libcrypto refuses.
Certificate Certify(EVP_PKEY* pair, const std::string& subject, EVP_PKEY* authority) {
  Certificate certificate(X509_new());
  uint64_t serial = 1;
  const bool is_authority = pair == authority;
  if (certificate == nullptr ||
      (!is_authority && RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial)) != 1))
    return nullptr;
  X509* const x = certificate.get();
  bool good = X509_set_version(x, X509_VERSION_3) == 1 &&
              ASN1_INTEGER_set_uint64(X509_get_serialNumber(x), (serial >> 1) | 1) == 1 &&
              ASN1_TIME_set_string_X509(X509_getm_notBefore(x), kNotBefore) == 1 &&
              ASN1_TIME_set_string_X509(X509_getm_notAfter(x), kNotAfter) == 1 &&
              X509_set_pubkey(x, pair) == 1 && AddName(X509_get_subject_name(x), subject);
  X509_NAME* const issuer = X509_NAME_new();
  good = good && issuer != nullptr && AddName(issuer, AuthorityName(authority)) &&
         X509_set_issuer_name(x, issuer) == 1;
  X509_NAME_free(issuer);
  if (is_authority) {
    good = good && AddExtension(x, NID_basic_constraints, "critical,CA:TRUE") &&
           AddExtension(x, NID_key_usage, "critical,keyCertSign");
  } else {
    good = good && AddExtension(x, NID_basic_constraints, "critical,CA:FALSE") &&
           AddExtension(x, NID_subject_alt_name, (std::string("DNS:") + kJobKeyTlsName).c_str()) &&
           AddExtension(x, NID_ext_key_usage, "serverAuth,clientAuth");
  }
  if (!good || X509_sign(x, authority, nullptr) == 0) return nullptr;
  return certificate;
}

std::string TextOf(const Memory& memory) {
  char* data = nullptr;
  const long length = BIO_get_mem_data(memory.get(), &data);
  return {data, static_cast<size_t>(length)};
}

}  // namespace

JobKey::~JobKey() { OPENSSL_cleanse(bytes.data(), bytes.size()); }

Result<std::vector<JobKey>> ParseJobKeys(std::string_view text, const std::string& source) {
  constexpr std::string_view kWhite = " \t\r\n";
  std::vector<JobKey> keys;
  for (size_t begin = text.find_first_not_of(kWhite); begin != std::string_view::npos;
       begin = text.find_first_not_of(kWhite, begin)) {
    const size_t end = std::min(text.find_first_of(kWhite, begin), text.size());
    const std::string_view digits = text.substr(begin, end - begin);
    begin = end;
    if (keys.size() == kJobKeysMax)
      return Error(Code::kInvalidArgument, "%s holds more than %zu keys", source.c_str(), kJobKeysMax);
    if (digits.size() != kDigits)
      return Error(
          Code::kInvalidArgument,
          "%s holds %zu characters, a job key has %zu hexadecimal digits: openssl rand -hex %zu makes one",
          source.c_str(), digits.size(), kDigits, kJobKeyBytes);
    JobKey key;
    for (size_t i = 0; i < kJobKeyBytes; ++i) {
      const int high = HexDigit(digits[2 * i]);
      const int low = HexDigit(digits[2 * i + 1]);
      if (high < 0 || low < 0)
        return Error(
            Code::kInvalidArgument,
            "%s holds a character that is not a hexadecimal digit: openssl rand -hex %zu makes a key",
            source.c_str(), kJobKeyBytes);
      key.bytes[i] = static_cast<unsigned char>(high << 4 | low);
    }
    keys.push_back(key);
  }
  if (keys.empty())
    return Error(Code::kInvalidArgument, "%s is empty: openssl rand -hex %zu makes a job key", source.c_str(),
                 kJobKeyBytes);
  return keys;
}

Result<std::string> ReadSecretFile(const std::string& path, const std::string& source, size_t bytes_max) {
  return ReadSecret(path, source, 0, kOthersReadGroupWrites, bytes_max);
}

Result<std::vector<JobKey>> ReadJobKeyFile(const std::string& path, const std::string& source) {
  return ReadKeys(path, source, 0, kOthersReadGroupWrites);
}

Result<std::vector<JobKey>> ReadOrMakeJobKeyFile(const std::string& path) {
  Result<std::vector<JobKey>> keys = ReadKeys(path, path, O_NOFOLLOW, 0077);
  if (keys.ok() || keys.status().code() != Code::kNotFound) return keys;
  JobKey key;
  if (getrandom(key.bytes.data(), key.bytes.size(), 0) != static_cast<ssize_t>(key.bytes.size()))
    return ErrnoError(errno, "draw a job key");
  std::string text = Hex({reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()}) + "\n";
  std::string temporary = path + ".XXXXXX";
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);  // mode 0600
  if (fd < 0) return ErrnoError(errno, "make %s", temporary.c_str());
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int write_error = errno;
  close(fd);
  OPENSSL_cleanse(text.data(), text.size());
  // A link and not a rename: the first process keeps the name.
  const int link_error = !written || link(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;
  unlink(temporary.c_str());
  if (!written) return ErrnoError(write_error, "write %s", temporary.c_str());
  if (link_error != 0 && link_error != EEXIST) return ErrnoError(link_error, "make %s", path.c_str());
  return ReadKeys(path, path, O_NOFOLLOW, 0077);
}

std::string HkdfSha256(std::string_view salt, std::string_view key, std::string_view info, size_t bytes) {
  const OpensslOwner<EVP_KDF, EVP_KDF_free> kdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  const OpensslOwner<EVP_KDF_CTX, EVP_KDF_CTX_free> context(EVP_KDF_CTX_new(kdf.get()));
  char digest[] = "SHA256";
  const auto octets = [](const char* name, std::string_view text) {
    return OSSL_PARAM_construct_octet_string(name, const_cast<char*>(text.data()), text.size());
  };
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
                                   octets(OSSL_KDF_PARAM_KEY, key), octets(OSSL_KDF_PARAM_SALT, salt),
                                   octets(OSSL_KDF_PARAM_INFO, info), OSSL_PARAM_construct_end()};
  std::string out(bytes, '\0');
  ROPETEAM_CHECK(context != nullptr &&
                 EVP_KDF_derive(context.get(), reinterpret_cast<unsigned char*>(out.data()), out.size(),
                                parameters) == 1);
  return out;
}

std::string DeriveFromJobKey(const JobKey& key, const std::string& job, std::string_view label,
                             size_t bytes) {
  std::string info(label);
  info += '\0';
  info += job;
  return HkdfSha256(kSalt, {reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()}, info, bytes);
}

std::string JobAuthority(const JobKey& key, const std::string& job) {
  return PublicKeyOf(AuthorityOf(key, job).get());
}

uint64_t JobKeyNumber(const JobKey& key, const std::string& job) {
  const uint64_t number = std::stoull(HashOf(JobAuthority(key, job)).substr(0, 16), nullptr, 16);
  return number == 0 ? 1 : number;
}

std::string JobKeyId(const JobKey& key, const std::string& job) {
  return HashOf(JobAuthority(key, job)).substr(0, 8);
}

Result<TlsIdentity> MakeTlsIdentity(const std::vector<JobKey>& keys, const std::string& job,
                                    const std::string& node) {
  ROPETEAM_CHECK(!keys.empty());
  const Memory roots(BIO_new(BIO_s_mem()));
  for (const JobKey& key : keys) {
    const KeyPair authority = AuthorityOf(key, job);
    const Certificate root = Certify(authority.get(), AuthorityName(authority.get()), authority.get());
    if (root == nullptr || PEM_write_bio_X509(roots.get(), root.get()) != 1)
      return CryptoError("make the job's certificate authority");
  }
  const KeyPair authority = AuthorityOf(keys.front(), job);
  const KeyPair pair(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"));
  if (pair == nullptr) return CryptoError("draw a key pair");
  const Certificate leaf = Certify(pair.get(), node, authority.get());
  const Memory certificate(BIO_new(BIO_s_mem()));
  const Memory private_key(BIO_new(BIO_s_secmem()));
  if (leaf == nullptr || PEM_write_bio_X509(certificate.get(), leaf.get()) != 1 ||
      PEM_write_bio_PKCS8PrivateKey(private_key.get(), pair.get(), nullptr, nullptr, 0, nullptr, nullptr) !=
          1)
    return CryptoError("make this node's certificate");
  return TlsIdentity{TextOf(certificate), TextOf(private_key), TextOf(roots)};
}

}  // namespace ropeteam
