// SPDX-License-Identifier: Apache-2.0
//
// A forked child inherits the socket to the daemon. While it lives, the daemon would not see the rank's
// death: the end of a connection is the fastest signal of it. So every child closes its copies at birth; the
// parent's stay open. (A child that was made by vfork or posix_spawn loses them at exec: they are
// close-on-exec.)
//
// Safe from any thread.

#ifndef ROPETEAM_API_CLIENT_FORK_GUARD_H_
#define ROPETEAM_API_CLIENT_FORK_GUARD_H_

namespace ropeteam::client {

// From now on forked children close `fd`. It stays the caller's to close here, after ForgetInChildren().
void CloseInChildren(int fd);
void ForgetInChildren(int fd);

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_FORK_GUARD_H_
