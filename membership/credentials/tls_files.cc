// SPDX-License-Identifier: Apache-2.0
#include "membership/credentials/tls_files.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <ctime>
#include <fstream>

#include "membership/credentials/openssl.h"

namespace ropeteam {
namespace {

using Certificates =
    OpensslOwner<STACK_OF(X509), [](STACK_OF(X509) * stack) { sk_X509_pop_free(stack, X509_free); }>;
constexpr int64_t kSecondsPerDay = 86'400;

Result<std::string> ReadFile(const char* option, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kTlsFileBytesMax + 1, '\0');
  if (!file) return ErrnoError(errno, "%s %s", option, path.c_str());
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return ErrnoError(errno, "%s %s", option, path.c_str());
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kTlsFileBytesMax)
    return Error(Code::kInvalidArgument, "%s %s has more than %zu bytes", option, path.c_str(),
                 kTlsFileBytesMax);
  return text;
}

Memory MemoryOf(const std::string& text) {
  return Memory(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// All certificates of a PEM text.
Certificates ParseCertificates(const std::string& text) {
  Certificates certificates(sk_X509_new_null());
  const Memory memory = MemoryOf(text);
  while (X509* certificate = PEM_read_bio_X509(memory.get(), nullptr, nullptr, nullptr))
    sk_X509_push(certificates.get(), certificate);
  ERR_clear_error();  // the end of the text is an error
  return certificates;
}

// Never ask for a passphrase on a terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

std::string DateOf(const ASN1_TIME* time) {
  tm date{};
  char text[16] = "?";
  if (ASN1_TIME_to_tm(time, &date) == 1) std::strftime(text, sizeof(text), "%Y-%m-%d", &date);
  return text;
}

std::string NameOf(X509* certificate) {
  char text[256] = "";
  X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, text, sizeof(text));
  return text;
}

// Checks the chain as a server checks a client, or a client a server.
Status CheckPurpose(const TlsFiles& files, const Certificates& chain, const Certificates& roots, int purpose,
                    const char* role) {
  const OpensslOwner<X509_STORE, X509_STORE_free> store(X509_STORE_new());
  for (int i = 0; i < sk_X509_num(roots.get()); ++i)
    X509_STORE_add_cert(store.get(), sk_X509_value(roots.get(), i));
  const OpensslOwner<X509_STORE_CTX, X509_STORE_CTX_free> context(X509_STORE_CTX_new());
  X509* const own = sk_X509_value(chain.get(), 0);
  if (X509_STORE_CTX_init(context.get(), store.get(), own, chain.get()) != 1 ||
      X509_STORE_CTX_set_purpose(context.get(), purpose) != 1)
    return Error(Code::kInternal, "libcrypto cannot check certificates");
  if (X509_verify_cert(context.get()) == 1) return OkStatus();
  const int error = X509_STORE_CTX_get_error(context.get());
  const std::string certificate = "--tls-cert " + files.certificate;
  if (error == X509_V_ERR_CERT_HAS_EXPIRED && X509_STORE_CTX_get_error_depth(context.get()) == 0)
    return Error(Code::kInvalidArgument, "%s expired on %s", certificate.c_str(),
                 DateOf(X509_get0_notAfter(own)).c_str());
  if (error == X509_V_ERR_CERT_NOT_YET_VALID)
    return Error(Code::kInvalidArgument, "%s is valid from %s only, by this host's clock",
                 certificate.c_str(), DateOf(X509_get0_notBefore(own)).c_str());
  if (error == X509_V_ERR_INVALID_PURPOSE)
    return Error(Code::kInvalidArgument, "%s may not be used by a %s (extended key usage): a node is both",
                 certificate.c_str(), role);
  return Error(Code::kInvalidArgument, "%s is not signed by --tls-ca %s: %s", certificate.c_str(),
               files.roots.c_str(), X509_verify_cert_error_string(error));
}

}  // namespace

Result<CheckedTls> ReadTlsFiles(const TlsFiles& files) {
  Result<std::string> certificate = ReadFile("--tls-cert", files.certificate);
  if (!certificate.ok()) return certificate.status();
  Result<std::string> private_key =
      ReadSecretFile(files.private_key, "--tls-key " + files.private_key, kTlsFileBytesMax);
  if (!private_key.ok()) return private_key.status();
  Result<std::string> root_text = ReadFile("--tls-ca", files.roots);
  if (!root_text.ok()) return root_text.status();
  const Certificates chain = ParseCertificates(*certificate);
  const Certificates roots = ParseCertificates(*root_text);
  for (const auto& [option, path, parsed] :
       {std::tuple("--tls-cert", &files.certificate, &chain), std::tuple("--tls-ca", &files.roots, &roots)})
    if (sk_X509_num(parsed->get()) == 0)
      return Error(Code::kInvalidArgument, "%s %s holds no certificate in PEM", option, path->c_str());
  const KeyPair pair(PEM_read_bio_PrivateKey(MemoryOf(*private_key).get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (pair == nullptr)
    return Error(Code::kInvalidArgument, "--tls-key %s holds no private key in PEM, or one with a passphrase",
                 files.private_key.c_str());
  X509* const own = sk_X509_value(chain.get(), 0);
  if (X509_check_private_key(own, pair.get()) != 1) {
    ERR_clear_error();
    return Error(Code::kInvalidArgument, "--tls-cert %s and --tls-key %s do not belong together",
                 files.certificate.c_str(), files.private_key.c_str());
  }
  ROPETEAM_RETURN_IF_ERROR(CheckPurpose(files, chain, roots, X509_PURPOSE_SSL_CLIENT, "client"));
  ROPETEAM_RETURN_IF_ERROR(CheckPurpose(files, chain, roots, X509_PURPOSE_SSL_SERVER, "server"));
  CheckedTls checked{{std::move(*certificate), std::move(*private_key), std::move(*root_text)},
                     NameOf(own),
                     DateOf(X509_get0_notAfter(own)),
                     0};
  int days = 0;
  int seconds = 0;
  if (ASN1_TIME_diff(&days, &seconds, nullptr, X509_get0_notAfter(own)) == 1)
    checked.seconds_left = days * kSecondsPerDay + seconds;
  return checked;
}

}  // namespace ropeteam
