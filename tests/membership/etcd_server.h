// SPDX-License-Identifier: Apache-2.0
//
// The distribution's etcd, as one member on loopback with its data in memory, to be killed, stopped and wiped.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_ETCD_SERVER_H_
#define ROPETEAM_TESTS_MEMBERSHIP_ETCD_SERVER_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace ropeteam {

class EtcdServer {
 public:
  // Why there can be none here; empty: there can.
  static std::string Missing();

  // `options`: further ones of etcd's. `tls`: certificates are made, and clients need one of them.
  explicit EtcdServer(std::vector<std::string> options = {}, bool tls = false);
  ~EtcdServer();  // Kill(); its data goes

  void Start();  // returns when it answers
  void Signal(int signal);
  void Kill();  // SIGKILL, and reaped
  void Wipe();  // its data; not while it runs

  const std::string& endpoint() const { return endpoint_; }
  const std::string& folder() const { return folder_; }  // ca.pem, node.pem and node.key with `tls`
  // etcdctl with these words; whether it did it.
  bool Control(const std::string& words) const;

 private:
  const std::vector<std::string> options_;
  const bool tls_;
  std::string folder_;
  std::string endpoint_;
  std::string peer_;
  pid_t pid_ = -1;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_MEMBERSHIP_ETCD_SERVER_H_
