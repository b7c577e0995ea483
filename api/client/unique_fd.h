// SPDX-License-Identifier: Apache-2.0
//
// Owns a file descriptor and closes it. Not thread-safe.

#ifndef ROPETEAM_API_CLIENT_UNIQUE_FD_H_
#define ROPETEAM_API_CLIENT_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

namespace ropeteam::client {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    // close() on Linux always frees the descriptor; no descriptor here has buffered writes to lose.
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_UNIQUE_FD_H_
