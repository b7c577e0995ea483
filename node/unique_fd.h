// SPDX-License-Identifier: Apache-2.0
//
// A file descriptor with one owner, closed when the owner goes. Not thread-safe.

#ifndef ROPETEAM_NODE_UNIQUE_FD_H_
#define ROPETEAM_NODE_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

namespace ropeteam {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    // The result of close() is of no use here: on Linux the descriptor is gone whatever it says.
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_UNIQUE_FD_H_
