// SPDX-License-Identifier: Apache-2.0
//
// A cable that can be cut unnoticed: relays TCP connections to another address until they are frozen. Later
// connections work.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_TCP_RELAY_H_
#define ROPETEAM_TESTS_MEMBERSHIP_TCP_RELAY_H_

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ropeteam {

class TcpRelay {
 public:
  // Listens on a free port of `host`.
  TcpRelay(const std::string& host, const std::string& target);
  ~TcpRelay();

  const std::string& address() const { return address_; }
  void FreezeConnections();
  // Waits until that many connections have been made in total.
  bool WaitForConnections(size_t count, int ms);

 private:
  struct Pair {
    int near = -1;
    int far = -1;
    bool frozen = false;
  };
  void Run();
  void Accept();
  // False: the connection has ended.
  static bool Move(int from, int to);

  const std::string target_;
  std::string address_;
  int listener_ = -1;
  int wake_[2] = {-1, -1};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Pair> pairs_;
  std::thread thread_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_MEMBERSHIP_TCP_RELAY_H_
