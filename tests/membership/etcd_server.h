// SPDX-License-Identifier: Apache-2.0
//
// The distribution's etcd as one member on loopback, with its data in memory. Tests kill, stop and wipe it.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_ETCD_SERVER_H_
#define ROPETEAM_TESTS_MEMBERSHIP_ETCD_SERVER_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace ropeteam {

class EtcdServer {
 public:
  // Why etcd cannot run here; empty: it can.
  static std::string Missing();

  // `options`: further options of etcd. `tls`: makes certificates, and clients need one of them.
  explicit EtcdServer(std::vector<std::string> options = {}, bool tls = false);
  ~EtcdServer();  // Kill(); removes its data

  void Start();  // returns when etcd answers
  void Signal(int signal);
  void Kill();  // SIGKILL, and reaped
  void Wipe();  // removes its data; not while it runs

  const std::string& endpoint() const { return endpoint_; }
  const std::string& folder() const { return folder_; }  // ca.pem, node.pem and node.key with `tls`
  // Runs etcdctl with these arguments; returns whether it succeeded.
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
