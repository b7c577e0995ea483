// SPDX-License-Identifier: Apache-2.0
//
// A connection of a rank or the command line. It cuts the byte stream into frames and writes frames back, both bounded.
// local_server interprets the frames. Five events end this session, and no other session: invalid bytes, a frame over
// the limit, a peer that does not read, the end of the stream, and the end of the peer's process.
//
// The end of the process is watched in addition to the end of the stream (pidfd), because a forked child may hold the
// socket open long after the rank is dead. With SO_PEERPIDFD (Linux 6.5) this is exact. On older kernels the pid of
// SO_PEERCRED is opened at accept(). If the rank dies and its pid is reused between its connect() and our accept(),
// another process is watched, and only the end of the stream is noticed.
//
// Loop thread only.

#ifndef ROPETEAM_NODE_LOCAL_SESSION_H_
#define ROPETEAM_NODE_LOCAL_SESSION_H_

#include <deque>
#include <functional>
#include <string>
#include <string_view>

#include "api/client/local_protocol.h"
#include "node/event_loop.h"
#include "node/unique_fd.h"

namespace ropeteam {

// Answers that the session has not read yet: eight of the largest frames, because a client requests one at a time.
inline constexpr size_t kSessionOutputBytesMax = 8ull * local::kFrameBytesMax;
// Bytes read from one session before other sessions get their turn.
inline constexpr size_t kSessionReadBytesPerTurn = 256 * 1024;

class LocalSession {
 public:
  struct Callbacks {
    // `payload` is valid during the call, which may call Send(), TakeDescriptor() and Close().
    std::function<void(const local::FrameHeader& header, std::string_view payload)> on_frame;
    // Called once with the reason. The session must stay alive until the callback has returned to the loop.
    std::function<void(const std::string& reason)> on_closed;
  };

  // `peer_pid` 0: unknown, so the end of the process is not watched.
  LocalSession(EventLoop* loop, UniqueFd socket, pid_t peer_pid, Callbacks callbacks);
  ~LocalSession();  // closes without a callback

  Status Start();

  // Queues a frame. `fd`, if not negative, is sent with it and must stay open until the session has closed. Ignored
  // after Close(). A frame over the limit is a bug of the daemon: kInternal is sent instead.
  void Send(local::Type type, uint64_t request, std::string_view payload, int fd = -1);
  // Ends the session after the queue has been written, or at once if that is not possible.
  void CloseAfterSend(std::string reason);
  void Close(const std::string& reason);

  // No frame is handled between the two, and frames that arrive stay in the socket. If the client closes the connection
  // meanwhile, they are lost. Resume() must not be called within on_frame.
  void Hold();
  void Resume();

  // The descriptor that came with the current frame; invalid if there was none. If no frame takes a descriptor, the
  // session ends.
  UniqueFd TakeDescriptor();
  // Descriptors were lost on the way: this process has reached its limit, or too many were sent at once.
  bool descriptors_lost() const { return descriptors_lost_; }

  bool closed() const { return !socket_.valid(); }
  pid_t peer_pid() const { return peer_pid_; }

  LocalSession(const LocalSession&) = delete;
  LocalSession& operator=(const LocalSession&) = delete;

 private:
  struct Frame {
    std::string bytes;
    int fd = -1;
  };
  void OnEvents(uint32_t epoll_events);
  void Read();
  ssize_t Receive(char* buffer, size_t length);
  void HandleFrames();
  void Flush();
  void WatchProcess();
  void WatchSocket();

  EventLoop* const loop_;
  UniqueFd socket_;
  UniqueFd process_;  // pidfd of the peer
  const pid_t peer_pid_;
  Callbacks callbacks_;
  std::string input_;
  std::deque<UniqueFd> descriptors_;  // in the order of the frames that they came with
  bool descriptors_lost_ = false;
  std::deque<Frame> output_;
  size_t output_bytes_ = 0;
  size_t sent_ = 0;  // of output_.front()
  bool writable_wanted_ = false;
  bool held_ = false;
  bool closing_ = false;
  std::string closing_reason_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_LOCAL_SESSION_H_
