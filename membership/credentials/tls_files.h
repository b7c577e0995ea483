// SPDX-License-Identifier: Apache-2.0
//
// Certificates that an operator made: three PEM files, checked before they are used. Any thread; nothing is kept.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_TLS_FILES_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_TLS_FILES_H_

#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "membership/credentials/job_key.h"

namespace ropeteam {

// A chain of a few certificates, or the roots of a large organisation.
inline constexpr size_t kTlsFileBytesMax = 1 << 20;

// The paths that --tls-cert, --tls-key and --tls-ca name.
struct TlsFiles {
  std::string certificate;  // the node's own first, then those between it and the root
  std::string private_key;  // without a passphrase
  std::string roots;
};

struct CheckedTls {
  TlsIdentity identity;
  std::string name;     // the certificate's CN
  std::string expires;  // "2027-01-31"
  int64_t seconds_left = 0;
};
// The files' contents, if they can serve as client and server: the key is the certificate's, the certificate comes from the
// roots, is in its dates and may be used for both. The message says which is not so, by the options' names.
// kInvalidArgument, kIo.
Result<CheckedTls> ReadTlsFiles(const TlsFiles& files);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_TLS_FILES_H_
