// SPDX-License-Identifier: Apache-2.0
//
// For the start of threads of ours. They must not take signals that are meant for the training process's own
// threads, and a thread begins with the mask of the one that starts it. The signals by which the processor reports
// a fault of the thread itself stay: the kernel would end the process without calling its handler, and Python's
// faulthandler, for one, would not print where a save read memory that is not there.

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
