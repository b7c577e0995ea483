// SPDX-License-Identifier: Apache-2.0

#include "transport/peer_probe.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ropeteam {

void PeerProbe::Start(const IpAddress& source, const IpAddress& target, TimeUs now) {
  Stop();
  source_ = WithPort(source, 0);
  target_ = target;
  started_ = true;
  start_us_ = now;
}

void PeerProbe::Stop() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  started_ = false;
}

PeerProbe::Answer PeerProbe::Open() {
  fd_ = socket(target_.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  // A lack of descriptors says nothing about the peer. The next step tries again.
  if (fd_ < 0) return Answer::kPending;
  // If the source address cannot be bound, the kernel chooses one by the route to the peer.
  (void)bind(fd_, source_.get(), source_.length);
  if (connect(fd_, target_.get(), target_.length) == 0 || errno == EINPROGRESS) return Answer::kPending;
  const Answer answer = errno == ECONNREFUSED ? Answer::kRefused : Answer::kPending;
  close(fd_);
  fd_ = -1;
  return answer;
}

PeerProbe::Answer PeerProbe::Step() {
  if (fd_ < 0) return Open();
  pollfd item{fd_, POLLOUT | POLLRDHUP, 0};
  if (poll(&item, 1, 0) <= 0) return Answer::kPending;
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
  if (error == 0 && (item.revents & (POLLHUP | POLLRDHUP | POLLERR)) == 0) return Answer::kAlive;
  close(fd_);
  fd_ = -1;
  // If the connection was made and then broke, the kernel may have accepted it for a process that was just
  // dying. Try again: the next answer shows the state after that. A router's "unreachable" may pass, too.
  return error == ECONNREFUSED ? Answer::kRefused : Answer::kPending;
}

}  // namespace ropeteam
