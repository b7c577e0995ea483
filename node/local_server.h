// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side of the local protocol. It accepts sessions, passes their requests to the Engine as inputs, and
// passes the answers back. It decides only about the protocol's rules for connections.
//
// Loop thread only.

#ifndef ROPETEAM_NODE_LOCAL_SERVER_H_
#define ROPETEAM_NODE_LOCAL_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "api/client/local_protocol.h"
#include "core/engine/engine.h"
#include "node/device_buffers.h"
#include "node/event_loop.h"
#include "node/local_session.h"
#include "node/status_json.h"
#include "node/unique_fd.h"

namespace ropeteam {

// The ranks of a node, its tools, and a reserve; a descriptor or two each.
inline constexpr size_t kSessionsMax = 1024;
// Unanswered requests of one session: threads that wait at the same time in one rank. Each takes an entry in the
// Engine.
inline constexpr uint32_t kRequestsOutstandingMax = 1024;
// A larger manifest of a save is read off the loop's thread. One of a mebibyte takes some milliseconds.
inline constexpr uint64_t kManifestOnLoopBytesMax = 1ull << 20;

class LocalServer {
 public:
  // On the loop's thread, once; possibly within the call.
  using StorageListDone = std::function<void(const Status& status, local::StorageListReply reply)>;
  struct Config {
    std::string socket_path;
    local::HelloReply hello;                         // all fields except the incarnation
    int arena_fd = -1;                               // given to every client; must outlive the server
    DaemonFacts facts;                               // for reports
    std::function<Transport::Counters()> transport;  // likewise
    std::function<MembershipReport()> membership;    // likewise
    // `ropeteam rejoin`.
    std::function<Status(const std::string& coordinator, bool force)> rejoin;
    // `ropeteam drain`; OnDrained() follows. 0: the daemon's own limit.
    std::function<void(TimeUs within_us)> drain;
    // Lists the steps on storage, off the loop's thread. The answer may come after the timeout, or never.
    std::function<void(uint32_t steps_max, TimeUs timeout_us, StorageListDone done)> list_storage;
    // Calls `work` on another thread, then `done` on the loop's; not within the call. Null: large manifests are read on
    // the loop's thread, too.
    std::function<void(std::function<void()> work, std::function<void()> done)> off_loop;
    // Registers ranks' device memory; null: the transport cannot read any. It must outlive the server, and be stopped
    // before the loop is destroyed.
    DeviceBuffers* device_buffers = nullptr;
  };
  // Calls its argument with the Engine and the time, then carries out the outbox.
  using Drive = std::function<void(const std::function<void(Engine&, TimeUs)>&)>;
  // For kAdmin requests that read this node's own memory.
  using ObjectLister = std::function<std::vector<ShardObjects>(Step step)>;

  LocalServer(EventLoop* loop, Config config, Drive drive, ObjectLister objects);
  ~LocalServer();  // closes every session without telling the Engine, stops listening, removes the socket
                   // file

  Status Listen();
  // The job's settings, from the first view on; hellos and reports use them.
  void SetSettings(const JobSettings& settings);
  void OnAnswer(const Answer& answer);
  // Answers the clients that have drained this node, or wait for it.
  void OnDrained(const std::string& json);
  // Requests that this server answers itself also have deadlines.
  TimeUs NextTimer() const;  // EventLoop::kNever: there are none
  void OnTimer(TimeUs now);
  const std::string& socket_path() const { return config_.socket_path; }

  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

 private:
  enum class State { kNew, kHelloSent, kRank, kAdmin };
  struct GpuBuffer {
    DeviceBufferId id = 0;
    uint64_t bytes = 0;
    bool registered = false;
  };
  struct Client {
    std::unique_ptr<LocalSession> session;
    State state = State::kNew;
    bool opened = false;   // the Engine has this session
    uint32_t version = 0;  // of the local protocol, from its hello
    RequestId hello_request = 0;
    uint32_t outstanding = 0;
    std::map<RequestId, local::Admin> admin;    // pending reports, and their wanted format
    std::map<uint64_t, GpuBuffer> gpu_buffers;  // by the client's names
    uint64_t gpu_buffer_last = 0;               // its newest name
    bool said_staged = false;                   // logged once per session
    bool said_direct = false;
  };

  void OnAcceptable();
  void OnFrame(SessionId id, const local::FrameHeader& header, std::string_view payload);
  void OnClosed(SessionId id, const std::string& reason);
  void OnHello(SessionId id, Client& client, RequestId request, std::string_view payload);
  // Returns false if the frame does not match the protocol.
  bool OnRequest(SessionId id, Client& client, local::Type type, RequestId request, std::string_view payload);
  bool OnSaveRequest(SessionId id, const Client& client, local::Type type, RequestId request,
                     std::string_view payload);
  void OnSaveCommit(SessionId id, const Client& client, RequestId request, SaveCommitInput commit);
  bool OnViewRequest(SessionId id, local::Type type, RequestId request, std::string_view payload);
  bool OnDeviceRequest(SessionId id, Client& client, local::Type type, RequestId request,
                       std::string_view payload);
  void OnGpuBuffer(SessionId id, Client& client, RequestId request, const local::GpuBuffer& message);
  Status CheckGpuBuffer(const Client& client, const local::GpuBuffer& message, bool has_descriptor) const;
  void OnGpuBufferAdded(SessionId id, RequestId request, uint64_t name, const Status& status);
  void OnSaveDirect(SessionId id, Client& client, const local::SaveDirect& message);
  bool OnWait(SessionId id, Client& client, RequestId request, std::string_view payload);
  bool OnStorageList(SessionId id, RequestId request, std::string_view payload);
  bool OnAdmin(SessionId id, Client& client, RequestId request, std::string_view payload);
  bool OnRejoin(Client& client, RequestId request, std::string_view payload);
  bool OnDrain(SessionId id, Client& client, RequestId request, std::string_view payload);
  DaemonFacts Facts() const;                     // of now
  static TimeUs TimeoutUs(uint64_t timeout_ms);  // as the protocol has it, clamped to a day
  void AnswerAdmin(Client& client, const Answer& answer);
  void Reply(Client& client, RequestId request, Code code, std::string message);

  EventLoop* const loop_;
  Config config_;
  const Drive drive_;
  const ObjectLister objects_;
  UniqueFd listener_;
  // A spare descriptor. When descriptors run out, it is closed for a moment so that a connection can be accepted and
  // refused: a waiting connection would wake the loop for ever.
  UniqueFd reserve_;
  SessionId last_session_ = 0;
  std::map<SessionId, Client> clients_;
  // Pending listings of storage, and their deadlines.
  std::map<std::pair<SessionId, RequestId>, TimeUs> lists_;
  std::set<std::pair<SessionId, RequestId>> drains_;  // requests that are answered when this node leaves
  // Alive as long as this server: closures posted to the loop check it first.
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_LOCAL_SERVER_H_
