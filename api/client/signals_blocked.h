// SPDX-License-Identifier: Apache-2.0
//
// For the start of our own threads. They must not take signals meant for the training process's threads, and a thread
// inherits the mask of its creator. Signals by which the processor reports a fault of the thread itself stay unblocked.
// Otherwise the kernel would end the process without a call of its handler, and Python's faulthandler, for example,
// would not show where a save read invalid memory.

#ifndef ROPETEAM_API_CLIENT_SIGNALS_BLOCKED_H_
#define ROPETEAM_API_CLIENT_SIGNALS_BLOCKED_H_

#include <pthread.h>
#include <signal.h>

#include <initializer_list>

namespace ropeteam::client {

// Blocks all other signals for this thread while it exists.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_SIGNALS_BLOCKED_H_
