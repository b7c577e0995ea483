// SPDX-License-Identifier: Apache-2.0
//
// Tells whether a transport on this host is alive. UCX's shared memory notices a peer's death only by its
// keepalive, seconds later. So this watches the process of a peer on the same host: a pidfd becomes readable
// when the process ends. A peer in this process is looked up by its instance number. UCX watches peers on
// other hosts.

#ifndef ROPETEAM_TRANSPORT_UCX_LIVENESS_H_
#define ROPETEAM_TRANSPORT_UCX_LIVENESS_H_

#include <cstdint>

namespace ropeteam::ucx {

// Identifies a process, uniquely among all hosts and over all time.
struct ProcessIdentity {
  // A checksum of the boot and the process-id namespace. 0: unknown, not equal to any other.
  uint64_t host = 0;
  // When the process started, in clock ticks after boot. It distinguishes processes with the same id.
  uint64_t start = 0;
  int32_t process = 0;  // its id
};

ProcessIdentity ThisProcess();

// The instances in this process. Any thread.
void AddInstance(uint64_t instance);
void RemoveInstance(uint64_t instance);

// Watches one peer. Loop thread.
class PeerWatch {
 public:
  PeerWatch() = default;
  ~PeerWatch() { Stop(); }
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  void Start(const ProcessIdentity& peer, uint64_t instance);
  void Stop();
  // True: it is certainly dead. False: it is alive, or its state is unknown.
  bool Dead();
  // Whether it is watched, so that !Dead() means that it is alive.
  bool watching() const { return inside_ || fd_ >= 0; }
  // Readable when the peer is dead; -1: call Dead() at intervals instead.
  int fd() const { return fd_; }

 private:
  uint64_t instance_ = 0;
  bool inside_ = false;  // in this process
  bool dead_ = false;
  int fd_ = -1;
};

}  // namespace ropeteam::ucx

#endif  // ROPETEAM_TRANSPORT_UCX_LIVENESS_H_
