// SPDX-License-Identifier: Apache-2.0
//
// The files that decide about access: certificates, private keys and roots in PEM, and the job's key.

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>

#include "core/base/check.h"
#include "membership/credentials/job_key.h"
#include "membership/credentials/tls_files.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

// Between the three texts of an input.
constexpr char kSeparator = '\x1e';

// A certificate until the year 9999, its key, and the authority that signed it.
constexpr char kCertificate[] =
    "-----BEGIN CERTIFICATE-----\n"
    "MIH5MIGsoAMCAQICAQcwBQYDK2VwMA0xCzAJBgNVBAMMAmNhMCAXDTI1MDEwMTAw\n"
    "MDAwMFoYDzk5OTkxMjMxMDAwMDAwWjANMQswCQYDVQQDDAJuMTAqMAUGAytlcAMh\n"
    "AHm1Vi6P5lT5QHixEuipi6eQH4U65pW+1+DjkQutBJZkoy8wLTAMBgNVHRMBAf8E\n"
    "AjAAMB0GA1UdJQQWMBQGCCsGAQUFBwMBBggrBgEFBQcDAjAFBgMrZXADQQDwvU4Y\n"
    "HY2BnJbkuN2LgNM9Xjqcx+Jpi4GyQkKrdN3vQVVNNRQiqVA0jdpNHMWmKoeAzoxd\n"
    "W3Vi5o2rTH3Fi6MM\n"
    "-----END CERTIFICATE-----\n";
constexpr char kKey[] =
    "-----BEGIN PRIVATE KEY-----\n"
    "MC4CAQAwBQYDK2VwBCIEIAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8g\n"
    "-----END PRIVATE KEY-----\n";
constexpr char kRoot[] =
    "-----BEGIN CERTIFICATE-----\n"
    "MIHdMIGQoAMCAQICAQcwBQYDK2VwMA0xCzAJBgNVBAMMAmNhMCAXDTI1MDEwMTAw\n"
    "MDAwMFoYDzk5OTkxMjMxMDAwMDAwWjANMQswCQYDVQQDDAJjYTAqMAUGAytlcAMh\n"
    "AAOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4oxMwETAPBgNVHRMBAf8E\n"
    "BTADAQH/MAUGAytlcANBAGve1eD5Uyl9F5Cmm0F51OiyRAqBS+0bcsilAkuxpkDo\n"
    "3trJiEKIag0AvSxNERbgTNTjFgXmRxZ3FWHCizPCSwM=\n"
    "-----END CERTIFICATE-----\n";

// A file in memory, of mode 0600.
class File {
 public:
  File() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) { ROPETEAM_CHECK(fd_ >= 0 && fchmod(fd_, 0600) == 0); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }
  void Fill(std::string_view text) const {
    ROPETEAM_CHECK(ftruncate(fd_, 0) == 0 &&
                   pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  }

 private:
  const int fd_;
};

void RunPem(std::string_view input) {
  static const File* const kFiles = new File[3];
  std::string_view texts[3];
  for (size_t i = 0; i < 3; ++i) {
    const size_t end = i == 2 ? input.size() : std::min(input.find(kSeparator), input.size());
    texts[i] = input.substr(0, end);
    input.remove_prefix(std::min(end + 1, input.size()));
    kFiles[i].Fill(texts[i]);
  }
  const Result<CheckedTls> checked = ReadTlsFiles({kFiles[0].path(), kFiles[1].path(), kFiles[2].path()});
  if (!checked.ok()) {
    ROPETEAM_CHECK(checked.status().code() == Code::kInvalidArgument);
    return;
  }
  const TlsIdentity& identity = checked->identity;
  ROPETEAM_CHECK(identity.certificate == texts[0] && identity.private_key == texts[1] &&
                 identity.roots == texts[2]);
  ROPETEAM_CHECK(checked->seconds_left >= 0 && !checked->expires.empty());
}

std::vector<std::string> PemSeeds() {
  const auto files = [](const std::string& certificate, const std::string& key, const std::string& root) {
    return certificate + kSeparator + key + kSeparator + root;
  };
  return {files(kCertificate, kKey, kRoot), files(std::string(kCertificate) + kRoot, kKey, kRoot),
          files(kRoot, kKey, kRoot),
          files("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n", "", "x")};
}

bool IsHex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

void RunJobKey(std::string_view input) {
  static const File* const kFile = new File;
  kFile->Fill(input);
  const Result<std::vector<JobKey>> keys = ReadJobKeyFile(kFile->path(), "FILE");
  if (keys.ok()) {
    ROPETEAM_CHECK(!keys->empty() && keys->size() <= kJobKeysMax);
    ROPETEAM_CHECK(input.size() >= 2 * kJobKeyBytes && input.size() <= kSecretFileBytesMax);
    return;
  }
  // No message has digits of a key.
  constexpr size_t kDigits = 8;
  const std::string message = keys.status().ToString();
  for (size_t at = 0, run = 0; at < input.size(); ++at) {
    run = IsHex(input[at]) ? run + 1 : 0;
    if (run >= kDigits)
      ROPETEAM_CHECK(message.find(input.substr(at + 1 - kDigits, kDigits)) == std::string::npos);
  }
}

std::vector<std::string> JobKeySeeds() {
  const std::string key = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";
  return {key, key + "\n", "\t" + key + "\r\n " + key.substr(8) + "01234567\n", key + key, key.substr(1)};
}

const Target kPem("pem", RunPem, PemSeeds);
const Target kJobKey("job_key", RunJobKey, JobKeySeeds);

}  // namespace
}  // namespace ropeteam::fuzz
