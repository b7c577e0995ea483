// SPDX-License-Identifier: Apache-2.0
//
// Asks a peer's kernel, by a bare TCP connection to the address the peer listens on, whether a process still
// listens there. It tells a peer that is stopped or busy from a host that no packet reaches. The connection carries no
// bytes.

#ifndef ROPETEAM_TRANSPORT_PEER_PROBE_H_
#define ROPETEAM_TRANSPORT_PEER_PROBE_H_

#include "core/base/ids.h"
#include "transport/ip_address.h"

namespace ropeteam {

class PeerProbe {
 public:
  enum class Answer {
    kPending,  // nothing heard yet, or only that the network has no route: that may pass
    kAlive,    // the connection stands
    kRefused,  // no process listens
  };

  PeerProbe() = default;
  ~PeerProbe() { Stop(); }
  PeerProbe(const PeerProbe&) = delete;
  PeerProbe& operator=(const PeerProbe&) = delete;

  // Non-blocking. `source` is where our end binds, so that the probe takes the same device as the data.
  void Start(const IpAddress& source, const IpAddress& target, TimeUs now);
  bool started() const { return started_; }
  TimeUs start_us() const { return start_us_; }
  Answer Step();
  void Stop();

 private:
  Answer Open();

  IpAddress source_, target_;
  int fd_ = -1;
  bool started_ = false;
  TimeUs start_us_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_PEER_PROBE_H_
