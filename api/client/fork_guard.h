// SPDX-License-Identifier: Apache-2.0
//
// A forked child inherits the socket to the daemon. As long as the child lives, the daemon would not notice the rank's
// death, because the end of a connection is its fastest signal. So every child closes its copies after the fork; the
// parent's stay open. (A child of vfork or posix_spawn loses them at exec, because they are close-on-exec.)
//
// Safe from any thread.

#ifndef ROPETEAM_API_CLIENT_FORK_GUARD_H_
#define ROPETEAM_API_CLIENT_FORK_GUARD_H_

namespace ropeteam::client {

// From now on forked children close `fd`. The caller still closes it here, after ForgetInChildren().
void CloseInChildren(int fd);
void ForgetInChildren(int fd);

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_FORK_GUARD_H_
