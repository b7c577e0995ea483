// SPDX-License-Identifier: Apache-2.0
//
// TcpTransport, split by flow: open.cc listens and registers memory, listener.cc accepts connections and checks hellos,
// inbound.cc carries out the requests of peers, peers.cc connects to peers, checks and disconnects them, operations.cc
// sends puts and gets and reads their replies, progress.cc waits for sockets.
//
// The states of a peer, and of each of its lanes:
//
//   peer         means                                               leaves when
//   kIdle        no connection, and no operation needs one           first operation -> kConnecting
//   kConnecting  at least one lane is connecting, none is up         a lane is up -> kUp; all are lost -> kGone
//   kUp          pieces are sent over the lanes that are up          the last lane that is up breaks -> kConnecting;
//                                                                      it closes while idle -> kIdle
//   kGone        every operation completes with kPeerGone            Disconnect() -> kClosing
//   kClosing     operations complete with kPeerGone                  at once -> (freed)
//
//   lane         means                                               leaves when
//   kIdle        no connection                                       an operation for the peer -> kConnecting
//   kConnecting  TCP connects, then hello and welcome                a valid welcome -> kUp; no listener, another
//                                                                      instance, or the deadline passes -> kLost
//   kUp          carries pieces                                      closed, silent or a violation: with pieces in
//                                                                      flight -> kConnecting, without -> kIdle
//   kLost        left out until Disconnect()
//
// A broken lane's gets are sent again over other lanes. Its puts fail, because the target may have carried them out. A
// failed operation gets its code only after the peer was checked: kPeerGone if all lanes are lost, kLinkFailed if one
// is up. When a lane is lost, those that are up are probed first: a dead peer's other connections may look intact for a
// moment.

#ifndef ROPETEAM_TRANSPORT_TCP_INTERNAL_H_
#define ROPETEAM_TRANSPORT_TCP_INTERNAL_H_

#include <sys/uio.h>

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/base/ids.h"
#include "transport/front/front.h"
#include "transport/ip_address.h"
#include "transport/peer_probe.h"
#include "transport/rails.h"
#include "transport/tcp/admission.h"
#include "transport/tcp/codec.h"
#include "transport/tcp/tcp_transport.h"

namespace ropeteam::tcp {

using front::List;
using front::Now;
using front::RandomNumber;

// Connections that have not sent a valid hello: at most this many, of one remote address, and this long. Beyond a limit
// the oldest is closed, so that a member, whose hello comes at once, gets in under a flood.
inline constexpr size_t kStrangersMax = 256;
inline constexpr size_t kStrangersOfAddressMax = 32;
inline constexpr TimeUs kHelloTimeoutUs = 2'000'000;
// Connections of one instance to this one: its lanes, times the PeerIds that it has for it.
inline constexpr size_t kInboundOfInstanceMax = 64;
// Bytes that one connection sends or receives before others have their turn, and that one call moves.
inline constexpr uint64_t kTurnBytes = 1 << 20;
// Replies that wait to be sent; beyond it no request is read from the connection.
inline constexpr size_t kRepliesMax = kTcpDepthMax;
// Parts of one sendmsg().
inline constexpr size_t kPartsMax = 64;

// A descriptor that is closed with its owner. Closing drops what was not sent: the kernel would otherwise go on for
// minutes, and deliver a put that was reported as failed. It ends the connection even if a child process, between
// fork() and exec(), has a copy of the descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    Reset();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~Fd() { Reset(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void Reset();

 private:
  int fd_ = -1;
};

// Receives a padded greeting up to its first `wanted` bytes, of which `*received` are here. Returns what recv() returned
// last: at most 0 as long as bytes are missing.
template <typename T>
ssize_t ReceiveGreeting(int fd, T* greeting, size_t* received, size_t wanted = kGreetingBytes) {
  char padding[kGreetingBytes];
  ssize_t count = 1;
  while (*received < wanted && count > 0) {
    const bool padded = *received >= sizeof(T);
    count = padded ? recv(fd, padding, wanted - *received, 0)
                   : recv(fd, reinterpret_cast<char*>(greeting) + *received, sizeof(T) - *received, 0);
    if (count > 0) *received += static_cast<size_t>(count);
  }
  return count;
}

// For options that every supported kernel knows.
inline void SetOption(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value, sizeof value);
}
// Of a connection, at either end.
void SetConnectionOptions(int fd);

// A region as peers reach it. Both ends of a system call on its memory hold the mutex, so that the region's end waits
// for at most one call.
struct Export {
  std::mutex mutex;
  char* base = nullptr;  // null: deregistered
  uint64_t length = 0;   // constant
  // Null: peers may use all of it. Asked before each system call, because it may change during a request.
  PeerAccess* access = nullptr;
};

// Any thread.
class Exports {
 public:
  std::shared_ptr<Export> Add(uint64_t key, char* base, uint64_t length);
  std::shared_ptr<Export> Find(uint64_t key) const;  // null: no such key
  // Afterwards nothing touches the memory.
  void Remove(uint64_t key, Export* exported);

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Export>> by_key_;
};

struct Region : front::LocalRegion {
  ~Region() {
    if (exports != nullptr) exports->Remove(key, exported_as.get());
  }
  char* base = nullptr;
  uint64_t key = 0;
  Exports* exports = nullptr;  // set: `exported_as` is in it
  std::shared_ptr<Export> exported_as;
};

struct RemoteRegion : front::PeerRegion {
  uint64_t key = 0;
};

struct Operation : front::Accepted<Operation, Region, RemoteRegion> {
  uint32_t pieces = 0;  // cut and not done
};

struct Lane;

// A part of an operation: one request.
struct Piece {
  Piece* next = nullptr;
  Operation* operation = nullptr;
  uint64_t offset = 0;  // in the operation
  uint64_t length = 0;
  uint32_t breaks = 0;  // lanes that broke while they had it
  Request request;
};

// What epoll reports an event for. One that was closed stays allocated until the round's events are handled.
struct Watched {
  enum class Kind : uint8_t { kListener, kInbound, kLane };
  explicit Watched(Kind of_kind) : kind(of_kind) {}
  virtual ~Watched() = default;
  const Kind kind;
  Fd fd;
  bool watched = false;  // it is in the epoll set
  uint32_t events = 0;   // that epoll waits for
};

struct Listener : Watched {
  Listener() : Watched(Kind::kListener) {}
  IpAddress address;
  std::string interface;
  uint64_t link_mbps = 0;
  uint64_t lane_bytes = 0;  // in flight from this address, to all peers
};

// A connection that was accepted. Until `instance` is set it is a stranger's, and only its hello is read.
struct Inbound : Watched {
  explicit Inbound(IpAddress from) : Watched(Kind::kInbound), remote(from) {}
  const IpAddress remote;
  std::string host;  // without the port
  TimeUs deadline = 0;
  Hello hello;
  Welcome welcome;      // its answer
  size_t received = 0;  // of the padded hello, then of `request`

  uint64_t instance = 0;
  Request request;          // the next one, while `put` is received
  bool in_payload = false;  // of `put`
  Request put;
  std::shared_ptr<Export> target;  // null: the payload is discarded
  uint64_t rest = 0;               // of the payload
  struct Answer {
    Reply reply;
    std::shared_ptr<Export> source;  // of a get
    uint64_t offset = 0;
  };
  std::deque<Answer> answers;
  uint64_t sent = 0;  // of the first answer, with its payload
};

enum class LaneState : uint8_t { kIdle, kConnecting, kUp, kLost };
struct Peer;

struct Lane : Watched {
  Lane() : Watched(Kind::kLane) {}
  Peer* peer = nullptr;
  uint32_t index = 0;
  Listener* local = nullptr;
  IpAddress remote;
  uint64_t mbps = 0;
  LaneState state = LaneState::kIdle;
  bool was_up = false;  // it has been up before
  // kConnecting
  Hello hello;
  Welcome welcome;
  size_t welcomed = 0;       // bytes of it, with its padding
  bool greeted = false;      // the hello was sent
  bool reached = false;      // TCP has connected at least once, or this node had no means to try
  uint32_t refusals = 0;     // the last connections, in a row, that were closed in place of a welcome
  TimeUs connect_start = 0;  // by rounds_
  TimeUs retry_at = 0;       // while there is no descriptor
  const char* reason = "";   // of the last failure
  // kUp. Replies come in the order of requests.
  List<Piece> flight;
  uint32_t pieces = 0;
  uint64_t id = 0;            // of the last request
  std::deque<Piece*> unsent;  // the end of `flight`
  uint64_t sent = 0;          // of the first unsent one, with its header
  std::array<Reply, kPartsMax> replies;
  size_t replies_received = 0;  // bytes of them
  uint64_t payload = 0;         // bytes received of the first piece, a get
  bool in_payload = false;
  TimeUs heard_at =
      0;  // of the last bytes or answer to a probe, or when the first piece in flight was posted
  PeerProbe probe;
  bool doubted = false;  // another lane was lost, and this one was not probed since
};

enum class PeerState : uint8_t { kIdle, kConnecting, kUp, kGone, kClosing };

struct Peer {
  PeerId id = 0;
  PeerState state = PeerState::kIdle;
  EndpointAddress remote;
  std::string text;  // for messages
  uint64_t operation_bytes = 0;
  front::Queue<Operation> queue;
  List<Piece> redo;        // of gets whose lane broke
  List<Operation> broken;  // failed, no piece in flight, waiting until the peer was checked
  std::vector<std::unique_ptr<Lane>> lanes;
  bool listed = false;  // in active_

  bool gone() const { return state == PeerState::kGone; }
  bool closing() const { return state == PeerState::kClosing; }
};

class TcpTransport final : public front::Front<TcpTransport, Peer, Operation> {
 public:
  static Result<std::unique_ptr<TcpTransport>> Create(const TcpConfig& config);
  ~TcpTransport() override;

  void GuardRegion(RegionId region, PeerAccess* access) override;
  void SetPeers(const std::vector<std::string>& addresses) override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;

 private:
  friend Front;

  TcpTransport(const TcpConfig& config, uint64_t instance, const Secret& secret)
      : config_(config), instance_(instance), secret_(secret), admission_(instance, secret) {}

  // open.cc
  Status Open();
  Status Listen(const IpAddress& address);
  void NameSelf();
  Status MapRegion(Region* region, void* base);
  std::string EncodeKey(const Region& region) const;

  // listener.cc
  void Accept(Listener* listener);
  void DropOne(int listener);
  void Listen(bool on);
  void MakeRoom(const std::string& host);
  void Expel(Inbound* stranger);
  void ReadHello(Inbound* inbound);
  void Admit(Inbound* inbound);
  void LogRefusal(const Inbound& inbound, const char* reason);
  void ExpireStrangers(TimeUs now);
  void Close(Inbound* inbound);
  // All connections of an instance that `chosen` answers true for.
  template <typename Chosen>
  void CloseAll(Chosen chosen);

  // inbound.cc
  void Serve(Inbound* inbound, uint32_t events);
  bool ReadRequests(Inbound* inbound);
  ssize_t ReadPayload(Inbound* inbound);
  bool Begin(Inbound* inbound);
  bool SendAnswers(Inbound* inbound);

  // peers.cc
  Status DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const;
  void StartConnecting(Lane* lane, TimeUs now);
  void TryToConnect(Lane* lane, TimeUs now);
  void ConnectFailed(Lane* lane, int error, TimeUs now);
  void Retry(Lane* lane, const char* reason, TimeUs now);
  void OnConnecting(Lane* lane, TimeUs now);
  void Greet(Lane* lane, TimeUs now);
  void SetUp(Lane* lane, TimeUs now);
  void StepConnecting(TimeUs now);
  void CheckSilent(TimeUs now);
  void CheckDoubted(TimeUs now);
  void EndDoubt(Lane* lane);
  void Break(Lane* lane, const char* reason, bool reconnect = false);
  void Lose(Lane* lane, const char* reason);
  void Resolve(Peer* peer);
  void GiveUp(Peer* peer, PeerState state);
  List<Piece> CloseLane(Lane* lane, LaneState state);

  // operations.cc
  void Start(Peer* peer);
  void Pump();
  bool PostNext(Peer* peer);
  Piece* NextPiece(Peer* peer);
  void OnLane(Lane* lane, uint32_t events);
  bool Send(Lane* lane);
  bool Receive(Lane* lane);
  ssize_t ReadReplies(Lane* lane);
  ssize_t ReadPayload(Lane* lane);
  bool TakeReplies(Lane* lane);
  void Done(Lane* lane, Code code);
  void FinishPiece(Peer* peer, Piece* piece, Code code);
  void Settle(Peer* peer, Operation* operation);

  // progress.cc
  void Watch(Watched* watched, uint32_t events);
  void Unwatch(Watched* watched);
  void Progress();
  bool Busy(TimeUs now) const;
  void Sleep(TimeUs now, uint64_t timeout_us);

  const TcpConfig config_;
  const uint64_t instance_;
  const Secret secret_;
  Exports exports_;

  // [loop]
  Admission admission_;
  Fd epoll_, reserve_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::unordered_map<Inbound*, std::unique_ptr<Inbound>> inbound_;
  std::deque<Inbound*> strangers_;                // the oldest first
  std::vector<std::unique_ptr<Watched>> closed_;  // freed after the round
  uint64_t counter_ = 0;                          // of the last hello
  size_t connecting_ = 0;                         // lanes
  size_t flight_ = 0;                             // pieces
  size_t doubted_ = 0;                            // lanes
  front::RoundClock rounds_;
  front::Turns<Peer> active_;  // peers in kUp with something to send
  std::vector<Lane*> unsent_;  // lanes with new pieces
  std::vector<LinkLoad> loads_;
  front::Pool<Piece> pieces_;
  TimeUs silence_next_ = 0;
  TimeUs refusal_logged_at_ = 0;
  uint64_t refusals_unlogged_ = 0;
  TimeUs deaf_until_ = 0;  // no descriptor is left: listeners are not watched until then
  std::vector<pollfd> sleep_items_;
  std::vector<char> discarded_;  // where the payloads of refused puts go
};

template <typename Chosen>
void TcpTransport::CloseAll(Chosen chosen) {
  std::vector<Inbound*> found;
  for (const auto& [inbound, owner] : inbound_)
    if (inbound->instance != 0 && chosen(*inbound)) found.push_back(inbound);
  for (Inbound* inbound : found) Close(inbound);
}

}  // namespace ropeteam::tcp

#endif  // ROPETEAM_TRANSPORT_TCP_INTERNAL_H_
