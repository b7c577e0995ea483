// SPDX-License-Identifier: Apache-2.0
//
// Listens on an address and gives each connection to a server. gRPC (1.51) must not listen itself: once accept() has
// failed for lack of a descriptor, it never accepts again.
//
// A stranger is a connection that the server has not admitted. Beyond a number of them, of one remote address or in
// all, the oldest is shut down, so that a node, which authenticates at once, gets in under a flood. If no descriptor is
// left, a reserved one takes the connection, which is then closed, and so is the oldest stranger.
//
//   state        leaves when
//   stranger     Admit() -> admitted; beyond a limit, no descriptor left, or Stop() -> shut down;
//                the server closes it, for example because its key is wrong -> counted and logged
//   admitted     the server closes it

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_ACCEPTOR_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_ACCEPTOR_H_

#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"

namespace ropeteam {

// Enough for 64 daemons on one address that all connect at once, twice.
inline constexpr size_t kStrangersOfAddressMax = 128;
// Strangers of one port in all: this part of RLIMIT_NOFILE. A process has up to three such ports, and its own files.
inline constexpr size_t kStrangersPart = 4;

struct StrangerLimits {
  size_t of_address = kStrangersOfAddressMax;
  size_t total = SIZE_MAX;   // and never more than RLIMIT_NOFILE / kStrangersPart
  bool authenticate = true;  // else Admit() is never called, and a close means nothing
};

class Acceptor {
 public:
  // The callee owns the descriptor. On the acceptor's thread, so it must not block.
  using Take = std::function<void(int connection)>;

  // Connections wait in the kernel's queue until Start(). Port 0: the system chooses. Errors as CheckListen().
  static Result<std::unique_ptr<Acceptor>> Listen(const std::string& address, StrangerLimits limits = {});
  ~Acceptor();  // Stop()

  uint16_t port() const { return port_; }
  const std::string& address() const { return address_; }  // as given, with the chosen port
  void Start(Take take);                                   // once
  // Closes the port and shuts down all strangers; no Take after the return. Idempotent.
  void Stop();
  // The connection is no stranger. `peer` is its remote address as gRPC writes it: "ipv4:10.0.0.1:4711". Any thread.
  void Admit(const std::string& peer);
  // Connections to any port of this process that were closed before they were admitted.
  static uint64_t Unauthenticated();

  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

 private:
  struct Stranger {
    int fd = -1;         // the server's, which may have closed it
    uint64_t inode = 0;  // of the connection, to know whether it has
    std::string port;
    uint64_t number = 0;  // rises with each connection
  };
  using Strangers = std::list<Stranger>;  // the oldest first

  Acceptor(const std::string& address, std::vector<int> listeners, StrangerLimits limits);
  void Run(const Take& take);
  void AcceptOne(int listener, const Take& take);
  // Under mutex_.
  void Enter(const sockaddr_storage& from, socklen_t length, int fd);
  void Reap(const std::string& host, Strangers* of);  // takes those away that the server has closed
  void ReapAll();
  // False: the server had closed it already.
  bool ExpelOldest(Strangers* of);
  bool ExpelOldest();  // of all
  void Log(const std::string& what);

  const std::vector<int> listeners_;
  const StrangerLimits limits_;
  const uint16_t port_;
  const std::string address_;
  int reserve_ = -1;  // the thread's
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  std::mutex mutex_;
  std::map<std::string, Strangers> strangers_;  // by remote address; no list is empty
  size_t count_ = 0;                            // of all lists
  uint64_t entered_ = 0;
  uint64_t closed_ = 0;  // before they were admitted
  TimeUs closed_logged_at_ = 0;
  TimeUs logged_at_ = 0;
  uint64_t unlogged_ = 0;
};

// Whether a socket can listen on `address` ("host:port", "[v6]:port") now. kInvalidArgument: it is not an address, or
// cannot be resolved. kIo: any other failure, with the system's reason. It leaves nothing open.
Status CheckListen(const std::string& address);
// Whether host:port is an address of this machine, whatever process listens there.
bool IsOwnAddress(const std::string& address);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_ACCEPTOR_H_
