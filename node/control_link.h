// SPDX-License-Identifier: Apache-2.0
//
// A ControlLink carries messages to one peer: a queue, and a stream that empties it. Any thread may call Send() and
// Stop(). gRPC may call back from within a Start…() call, so such calls are made without the mutex.
//
// A link must be idle before it is destroyed, and must never be destroyed on one of gRPC's threads. When the last
// channel of a process is destroyed, gRPC (1.51) joins its callback threads, and a thread that joins itself frees its
// own stack.

#ifndef ROPETEAM_NODE_CONTROL_LINK_H_
#define ROPETEAM_NODE_CONTROL_LINK_H_

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "core/base/view.h"
#include "membership/credentials/credentials.h"
#include "node/control.grpc.pb.h"
#include "node/control_plane.h"

namespace ropeteam {

// Counts the outstanding gRPC callbacks of all links; Stop() of the plane waits for zero.
class StreamCount {
 public:
  void Add();
  void Remove();
  void WaitForZero();

 private:
  std::mutex mutex_;
  std::condition_variable zero_;
  size_t count_ = 0;
};

class ControlLink {
 public:
  // `credentials` may be null: unencrypted. It and `on_answer` (may be empty) must outlive the link.
  ControlLink(NodeId self, const Member& peer, const Credentials* credentials, StreamCount* count,
              const ControlPlane::OnAnswer* on_answer);

  void Send(std::string envelope);
  void Ask();  // requests the address of the peer's coordinator
  // Since when a needed stream is missing (EventLoop::Now()); 0: the stream exists or is not needed.
  TimeUs unreached_since();
  void Stop();  // cancels; `count` falls when gRPC makes no more callbacks
  const Member& peer() const { return peer_; }
  // After Stop(): whether no callback will come any more.
  bool idle() const { return pending_.load() == 0; }

 private:
  // One instance of the stream, from its start to its end.
  class Stream : public grpc::ClientBidiReactor<control::Envelope, control::Answer> {
   public:
    Stream(ControlLink* link, control::Control::Stub* stub);
    void Begin(std::shared_ptr<Stream> self);
    void Write(control::Envelope message);
    void Cancel() { context_.TryCancel(); }
    void OnReadInitialMetadataDone(bool ok) override;
    void OnReadDone(bool ok) override;
    void OnWriteDone(bool ok) override;
    void OnDone(const grpc::Status& status) override;

   private:
    friend class ControlLink;
    ControlLink* const link_;
    std::shared_ptr<Stream> self_;  // from Begin() to OnDone(): gRPC's share
    grpc::ClientContext context_;
    control::Envelope message_;  // gRPC's from Write() to OnWriteDone()
    control::Answer answer_;
    // Guarded by link_->mutex_.
    bool writing_ = false;
    bool broken_ = false;  // no more writes; the hold goes with the last one
  };

  void Connect();
  // Sends the queued messages, now or once there is a stream.
  void Wake();
  // Enclose everything that gRPC will call back. Do not touch the link after Release().
  void Hold();
  void Release();
  // Under the mutex: whether the front of the queue may be sent; moves it to `message`.
  bool TakeNext(control::Envelope* message);
  void OnStreamDone(Stream* stream, const grpc::Status& status);

  const NodeId self_;
  const Member peer_;
  const Credentials* const credentials_;
  StreamCount* const count_;
  const ControlPlane::OnAnswer* const on_answer_;
  std::atomic<uint32_t> pending_{0};
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<control::Control::Stub> stub_;

  std::mutex mutex_;
  std::deque<std::string> queue_;
  size_t queue_bytes_ = 0;
  uint64_t dropped_ = 0;
  bool ask_ = false;    // to be sent
  bool asked_ = false;  // sent, and one answer is expected
  TimeUs unreached_since_ = 0;
  std::shared_ptr<Stream> stream_;
  bool stopped_ = false;
  uint32_t backoff_ms_ = 0;
  grpc::Alarm alarm_;  // the next attempt
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_CONTROL_LINK_H_
