// SPDX-License-Identifier: Apache-2.0
#include "api/client/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace ropeteam::client {
namespace {

struct Guarded {
  std::mutex mutex;
  std::vector<int> fds;
};

// Leaked on purpose: another thread may still fork while the process exits.
Guarded& TheGuarded() {
  static Guarded* guarded = [] {
    auto* made = new Guarded;
    // The lock is held across the fork, so that the child does not see a half-changed vector. If the handlers
    // cannot be registered (no memory), children keep the descriptor. Then the daemon notices the end of the
    // session later.
    pthread_atfork([] { TheGuarded().mutex.lock(); }, [] { TheGuarded().mutex.unlock(); },
                   [] {
                     for (const int fd : TheGuarded().fds) ::close(fd);
                     TheGuarded().fds.clear();
                     TheGuarded().mutex.unlock();
                   });
    return made;
  }();
  return *guarded;
}

}  // namespace

void CloseInChildren(int fd) {
  Guarded& guarded = TheGuarded();
  const std::lock_guard lock(guarded.mutex);
  guarded.fds.push_back(fd);
}

void ForgetInChildren(int fd) {
  Guarded& guarded = TheGuarded();
  const std::lock_guard lock(guarded.mutex);
  std::erase(guarded.fds, fd);
}

}  // namespace ropeteam::client
