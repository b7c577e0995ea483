// SPDX-License-Identifier: Apache-2.0
//
// UcxTransport, split by flow: worker.cc opens UCX and registers memory; peers.cc connects, verifies and
// disconnects peers; operations.cc accepts puts and gets and posts their fragments; progress.cc makes
// progress and sleeps.
//
// The states of a peer:
//
//   state        means                                                   leaves when
//   kIdle        connected by name only, no endpoint                     first operation -> kConnecting
//   kConnecting  reading the peer's hello (its instance number) over a   the hello names the right instance
//                new endpoint; operations wait, and failed ones wait       -> kUp
//                for the outcome                                         it names another instance, the
//                                                                          process is dead, or the tries or
//                                                                          the time have run out -> kGone
//   kUp          fragments are posted                                    the endpoint fails -> kBroken
//   kBroken      the endpoint is being closed by force; UCX returns      the last request was returned
//                what was posted                                           -> kConnecting
//                                                                        the process is dead -> kGone
//   kGone        every operation completes with kPeerGone; one that      Disconnect() -> kClosing
//                UCX holds completes when UCX has returned it
//   kClosing     nothing is accepted; UCX still holds requests           the last was returned -> (freed)
//
// In kConnecting, kUp and kBroken a dead process (liveness.h) leads to kGone. A failed operation gets its
// code only after the peer was checked again: kPeerGone if it is dead or another instance, kLinkFailed if it
// is alive.
//
// Over UCP, a put completes in two steps. First UCX releases the buffer (the fragment's request). Then an
// endpoint flush that was started after the put's last fragment confirms that the bytes are in the target's
// memory. Puts share flushes: those that are posted while a flush is under way are gathered for the next.

#ifndef ROPETEAM_TRANSPORT_UCX_INTERNAL_H_
#define ROPETEAM_TRANSPORT_UCX_INTERNAL_H_

#include <poll.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "transport/front/front.h"
#include "transport/ucx/cma.h"
#include "transport/ucx/codec.h"
#include "transport/ucx/library.h"
#include "transport/ucx/liveness.h"

namespace ropeteam::ucx {

using front::List;
using front::Now;

struct WorkerCloser {
  void operator()(ucp_worker_h worker) const { ucp_worker_destroy(worker); }
};
using Worker = std::unique_ptr<ucp_worker, WorkerCloser>;

// What a peer reads to learn which instance lives at an address.
struct Hello {
  uint64_t magic = 0;
  uint64_t instance = 0;
};
inline constexpr uint64_t kHelloMagic = 0x6f6c6c6568755452;  // "RTuhello"

// Memory registered with UCX.
class Registration {
 public:
  Registration() = default;
  ~Registration() { Reset(); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  Status Map(ucp_context_h context, void* base, uint64_t length);
  void Reset();
  Result<std::string> PackKey() const;
  ucp_mem_h get() const { return memory_; }

 private:
  ucp_context_h context_ = nullptr;
  ucp_mem_h memory_ = nullptr;
  void* base_ = nullptr;
  uint64_t length_ = 0;
};

struct Region : front::LocalRegion {
  char* base = nullptr;
  Registration memory;  // none for a region of length 0
  std::string key;      // packed
};

struct RemoteRegion : front::PeerRegion {
  RegionKey key;
  ucp_rkey_h handle = nullptr;  // for the peer's present endpoint; null until the first operation over it
};

struct Operation : front::Accepted<Operation, Region, RemoteRegion> {
  bool gathered = false;   // a put in its peer's `unflushed`
  bool confirmed = false;  // a put whose flush is done; a get needs none
  uint32_t requests = 0;   // fragments and flushes at UCX
};

struct Peer;
class UcxTransport;

enum class RequestKind : uint8_t { kFragment, kFlush, kHello };

// One request at UCX. UCP identifies it by its address, cma by that of its first member.
struct Request {
  uct_completion_t done{};
  RequestKind kind = RequestKind::kFragment;
  UcxTransport* transport = nullptr;
  Peer* peer = nullptr;            // null: forgotten, see OrphanFlushes()
  Operation* operation = nullptr;  // kFragment
  List<Operation> flushed;         // kFlush: the puts that it confirms
  uint64_t bytes = 0;
  Request* next = nullptr;  // of the free list
};

enum class PeerState : uint8_t { kIdle, kConnecting, kUp, kBroken, kGone, kClosing };

struct Peer {
  UcxTransport* transport = nullptr;
  PeerId id = 0;
  PeerState state = PeerState::kIdle;
  WorkerAddress remote;
  std::string text;  // for people
  PeerWatch watch;
  CmaEndpoint cma;  // one of the two, or none
  ucp_ep_h endpoint = nullptr;
  void* close_request = nullptr;  // the request of closing the endpoint; null when there is none
  bool draining = false;          // closed by force, and UCX has not returned everything
  bool wired = false;             // the endpoint has carried a hello, or has failed: it can be closed
  bool parked = false;            // left open for good, see Park()
  bool failed = false;            // the endpoint or a request has failed: to be checked
  bool listed = false;            // in active_
  uint32_t requests = 0;          // at UCX, all kinds
  uint32_t fragments = 0;         // of those, fragments
  std::vector<Request*> flushing;  // of those, flushes
  front::Queue<Operation> queue;
  List<Operation> unflushed;  // puts posted as a whole, which the next flush is to confirm
  uint64_t unflushed_bytes = 0;
  List<Operation> broken;  // failed and no longer at UCX; they wait until the peer has been checked
  // kConnecting
  Hello hello;  // read into; UCX uses it during a kHello request, and for ever if parked
  Request* hello_request = nullptr;
  ucp_rkey_h hello_key = nullptr;
  bool hello_posted = false, hello_answered = false;
  bool reconnecting = false;  // it has been up before
  uint32_t tries = 0;
  TimeUs connect_start = 0;  // by rounds_
  TimeUs hello_next = 0;

  bool gone() const { return state == PeerState::kGone; }
  bool closing() const { return state == PeerState::kClosing; }
};

class UcxTransport final : public front::Front<UcxTransport, Peer, Operation> {
 public:
  static Result<std::unique_ptr<Transport>> Create(const UcxConfig& config);
  ~UcxTransport() override;

  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;

 private:
  friend Front;

  explicit UcxTransport(const UcxConfig& config) : config_(config) {}

  // worker.cc
  Status Open();
  Status OpenWorker();
  Status NameSelf();
  void DescribeSelf();
  Status MapRegion(Region* region, void* base);
  std::string EncodeKey(const Region& region) const;

  // operations.cc
  void Start(Peer* peer);
  void Pump();
  bool PostNext(Peer* peer);
  void PostFragment(Peer* peer, Operation* operation, ucp_rkey_h key);
  void StartFlush(Peer* peer);
  void Complete(Operation* operation, Code code);
  void Settle(Peer* peer, Operation* operation, Code code);
  Request* NewRequest(Peer* peer, RequestKind kind);
  void ReleaseRequest(Request* request);
  void Track(Request* request, void* handle);
  void Finish(Request* request, ucs_status_t status);
  static void OnCma(uct_completion_t* done);
  void Post(Peer* peer, Request* request, bool put, void* local, uint64_t length, uint64_t remote,
            ucp_rkey_h key);
  static void OnRequest(void* handle, ucs_status_t status, void* user_data);

  // peers.cc
  Status DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const;
  void StartConnecting(Peer* peer, TimeUs now);
  Status OpenEndpoint(Peer* peer);
  ucp_rkey_h KeyOf(Peer* peer, RemoteRegion* remote);
  void PostHello(Peer* peer, TimeUs now);
  void CloseEndpoint(Peer* peer);
  void Park(Peer* peer);
  void OrphanFlushes(Peer* peer);
  bool Drained(Peer* peer);
  void StepPeers(TimeUs now);
  void StepPeer(Peer* peer, TimeUs now);
  void BreakEndpoint(Peer* peer);
  void StepConnecting(Peer* peer, TimeUs now);
  void Suspect(Peer* peer) { peer->failed = suspects_ = true; }
  void SetUp(Peer* peer);
  void SetGone(Peer* peer, const char* reason);
  void GiveUp(Peer* peer, PeerState state);
  void FinishDisconnect(Peer* peer);
  static void OnEndpointError(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  // progress.cc
  void Progress();
  bool Busy(TimeUs now) const;
  void Sleep(TimeUs now, uint64_t timeout_us);
  bool Unsettled() const { return suspects_ || unsettled_ > 0; }

  const UcxConfig config_;
  uint64_t instance_ = 0;

  // In the order of opening; they are closed in reverse.
  Context context_;
  Hello* hello_ = nullptr;  // a page of its own
  Registration hello_memory_;
  Worker worker_;
  std::unique_ptr<Cma> cma_;  // null: not available
  int event_fd_ = -1;         // belongs to the worker

  std::vector<std::unique_ptr<Peer>> parked_;  // disconnected; UCX may still use their memory

  size_t outstanding_ = 0;           // requests at UCX
  uint32_t unsettled_ = 0;           // peers that are connecting or draining, counted by StepPeers()
  bool suspects_ = false;            // a peer has failed since StepPeers()
  front::RoundClock rounds_;
  TimeUs look_next_ = 0;             // time of the next check of the peers with work
  front::Turns<Peer> active_;        // peers in kUp with a queue or with puts to flush
  std::vector<pollfd> sleep_items_;  // Sleep()'s scratch, kept so that it allocates nothing
  front::Pool<Request> requests_;
  TimeUs busy_at_ = 0;  // when there was last work, our own or a peer's
};

}  // namespace ropeteam::ucx

#endif  // ROPETEAM_TRANSPORT_UCX_INTERNAL_H_
