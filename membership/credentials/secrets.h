// SPDX-License-Identifier: Apache-2.0
//
// The variables of the environment that hold secrets. Only ropeteamd needs them. A process reads them once, at its start,
// and no program that it starts inherits them. Experiment trackers upload their environment, and each process of the same
// user can read the environment with which another one was started, in /proc/PID/environ.
//
// Not thread-safe: call these functions before other threads run, or in a child before exec.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_SECRETS_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_SECRETS_H_

#include <string>

namespace ropeteam {

struct Secrets {              // empty: the variable is not set
  std::string job_key;        // ROPETEAM_JOB_KEY
  std::string etcd_password;  // ROPETEAM_ETCD_PASSWORD
};

// Returns the values, overwrites them where /proc shows them, and unsets the variables.
Secrets TakeSecrets();

// Sets the variables again, for ropeteamd alone.
void GiveSecrets(const Secrets& secrets);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_SECRETS_H_
