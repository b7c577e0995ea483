// SPDX-License-Identifier: Apache-2.0
//
// The job key: 32 random bytes that only the nodes of a job have. It is never sent. Each process derives the job's
// certificate authority from it, and makes its own certificate, signed by this authority. So a process with such a
// certificate has the key.
//
//   PRK       = HKDF-Extract-SHA256(salt "ropeteam job key 1", key)          RFC 5869
//   derive(L) = HKDF-Expand-SHA256(PRK, L || 0x00 || name of the job)
//   CA key    = Ed25519 key whose seed is derive("tls ca")                   RFC 8032
//
// The job's name is part of the derivation: one key in two jobs makes two authorities. The derivation is a format:
// nodes of different builds must derive the same authority.
//
// Pure functions, except those that read and make files; any thread. No message contains a digit of a key.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_JOB_KEY_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_JOB_KEY_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace ropeteam {

inline constexpr size_t kJobKeyBytes = 32;
// The job's key and, during a replacement, also the next or the former one.
inline constexpr size_t kJobKeysMax = 2;
// Two lines with room for white space. A longer file is not a key file.
inline constexpr size_t kSecretFileBytesMax = 1024;
// The subject alternative name of every certificate made from a job key.
inline constexpr char kJobKeyTlsName[] = "node.ropeteam.internal";

struct JobKey {
  std::array<unsigned char, kJobKeyBytes> bytes{};
  JobKey() = default;
  JobKey(const JobKey&) = default;
  JobKey& operator=(const JobKey&) = default;
  ~JobKey();  // wipes the bytes
};

// One or two keys of 64 hexadecimal digits, separated by white space. The first is this node's identity, all are
// trusted. `source` names the origin of the text in messages. kInvalidArgument.
Result<std::vector<JobKey>> ParseJobKeys(std::string_view text, const std::string& source);
// The text of a file that only its owner may write and only owner and group may read. kInvalidArgument, also if it has
// more than `bytes_max`; kIo, kNotFound.
Result<std::string> ReadSecretFile(const std::string& path, const std::string& source,
                                   size_t bytes_max = kSecretFileBytesMax);
// ParseJobKeys() of such a file.
Result<std::vector<JobKey>> ReadJobKeyFile(const std::string& path, const std::string& source);
// For the nodes of one user on one machine: reads `path`, a file that only this user may access, and creates it (mode
// 0600) if it is missing. If two processes create it at once, one wins, and both read the same key. The directory must
// exist, and only this user may access it. kInvalidArgument, kIo.
Result<std::vector<JobKey>> ReadOrMakeJobKeyFile(const std::string& path);

// HKDF with SHA-256, extract and expand (RFC 5869); at most 255 * 32 bytes.
std::string HkdfSha256(std::string_view salt, std::string_view key, std::string_view info, size_t bytes);
// derive(label) as defined above.
std::string DeriveFromJobKey(const JobKey& key, const std::string& job, std::string_view label, size_t bytes);
// The public key of the job's authority, 32 bytes.
std::string JobAuthority(const JobKey& key, const std::string& job);
// The first 16 hexadecimal digits of the authority's SHA-256 as a number, never 0. It tells two keys apart, and reveals
// nothing of them.
uint64_t JobKeyNumber(const JobKey& key, const std::string& job);
// The first 8 of those digits, to be shown.
std::string JobKeyId(const JobKey& key, const std::string& job);

// The certificate and key of one process, and the roots that it trusts, as PEM.
struct TlsIdentity {
  std::string certificate;  // with the certificates between it and the root, if any
  std::string private_key;
  std::string roots;
};
// Draws a key pair and makes a certificate for node `node`, signed by the authority of keys[0]. The roots are the
// authorities of all keys. `keys` is not empty. kInternal: libcrypto refused.
Result<TlsIdentity> MakeTlsIdentity(const std::vector<JobKey>& keys, const std::string& job,
                                    const std::string& node);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_JOB_KEY_H_
