// SPDX-License-Identifier: Apache-2.0
//
// Transports of one process that reach each other through a shared InprocFabric. Operations are carried out
// by memcpy inside the initiator's Poll(), in the order in which they were accepted, so that a test which
// calls everything from one thread has the same run every time. The fabric can be told to misbehave.
//
// Any two transports of a fabric may run in different threads. A transport must not outlive its fabric's
// shared_ptr, which it holds itself.

#ifndef ROPETEAM_TRANSPORT_INPROC_INPROC_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_INPROC_INPROC_TRANSPORT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam {

class InprocTransport;

// Safe from any thread.
class InprocFabric : public std::enable_shared_from_this<InprocFabric> {
 public:
  static std::shared_ptr<InprocFabric> Create() { return std::shared_ptr<InprocFabric>(new InprocFabric); }

  // A transport that listens under `name`. kAlreadyExists while another living one does; kInvalidArgument
  // when the name is empty or longer than 255 bytes.
  Result<std::unique_ptr<Transport>> CreateTransport(const std::string& name);

  // As kill -9 of the process that owns the transport: its peers' outstanding operations complete with
  // kPeerGone, it makes no more progress itself, and its name is free for a new instance. The object may be
  // deleted whenever.
  void Kill(const std::string& name);

  // Holds back operations towards `name`: they stay outstanding until Release(). Disconnect() and Kill()
  // still end them.
  void Hold(const std::string& name);
  void Release(const std::string& name);

  // The next `count` operations towards `name` complete with `code` and move no bytes.
  void FailNext(const std::string& name, uint64_t count, Code code);

  // At most this many operations of one transport are carried out by one Poll(); SIZE_MAX (the default): all.
  void LimitPerPoll(size_t operations);

 private:
  friend class InprocTransport;
  InprocFabric() = default;

  struct Member {
    InprocTransport* transport = nullptr;  // null: dead, and the rest is for the next instance of the name
    bool held = false;
    uint64_t fail_next = 0;
    Code fail_code = Code::kOk;
  };

  std::mutex mutex_;  // over this, and over the memory table and the death of every transport
  std::map<std::string, Member> members_;
  uint64_t instance_next_ = 1;
  size_t operations_per_poll_ = SIZE_MAX;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_INPROC_INPROC_TRANSPORT_H_
