// SPDX-License-Identifier: Apache-2.0
//
// OfiTransport, split by flow: endpoint.cc opens the fabric and registers memory, peers.cc connects, verifies
// and gives up peers, operations.cc accepts puts and gets and posts their fragments, progress.cc reads
// completions and sleeps.
//
// A peer's life:
//
//   state        means                                          leaves when
//   kIdle        connected by name only, no endpoint yet        first operation                        ->
//   kConnecting kConnecting  reading the peer's hello (its instance         the hello names the right
//   instance     -> kUp
//                number) over a new connection; operations      it names another one, nobody listens,
//                wait; those that a broken connection cut       or the deadline passes                 ->
//                kGone short wait for the verdict too
//   kUp          fragments are posted                           an operation fails                     ->
//   kConnecting kGone        every operation completes with kPeerGone       Disconnect() -> kClosing kClosing
//   nothing is accepted; the device still holds    the last fragment comes back           -> (freed)
//                buffers (shared endpoint only)
//
// So a failed operation gets its code only after a fresh look at the peer: kPeerGone when it is dead or
// another instance, kLinkFailed (or kInvalidArgument where the provider says that the range was refused) when
// it is well.

#ifndef ROPETEAM_TRANSPORT_OFI_INTERNAL_H_
#define ROPETEAM_TRANSPORT_OFI_INTERNAL_H_

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <poll.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/ids.h"
#include "transport/ip_address.h"
#include "transport/ofi/codec.h"
#include "transport/ofi/ofi_transport.h"
#include "transport/ofi/probe.h"

namespace ropeteam::ofi {

struct FidCloser {
  template <typename T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
};
template <typename T>
using Fid = std::unique_ptr<T, FidCloser>;
struct InfoCloser {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, InfoCloser>;

// The libfabric interface this code is written to.
inline constexpr uint32_t kFabricVersion = FI_VERSION(1, 15);

// What this code asks of a provider, by EFA's rules; of any provider when `provider` is empty.
Info Hints(const std::string& provider);
bool HasIpAddresses(const fi_info* info);
// Of the network card, by its PCI address; -1: unknown.
int NumaNodeOf(const fi_info* info);
// Whether a network card moves the bytes.
bool IsRdma(const std::string& provider);
inline constexpr uint64_t kBitsPerMegabit = 1'000'000;

// What a peer reads to learn which instance lives at an address.
struct Hello {
  uint64_t magic = 0;
  uint64_t instance = 0;
};
inline constexpr uint64_t kHelloMagic = 0x6f6c6c6568745452;  // "RThello"
// The hello's key where keys are ours to choose. The same for all, so that a new instance at an old address
// can be read and recognised instead of refusing the read; it opens 16 bytes that anyone may read and nobody
// write.
inline constexpr uint64_t kHelloKey = 0x52546b65792e6869;

// A completion queue and the descriptor to sleep on.
struct Queue {
  Fid<fid_cq> completions;
  int fd = -1;  // the provider's own; -1: it has none
};

// One endpoint and its queue. ofi_rxm (1.17) never takes a closed endpoint out of its queue's wait list, so a
// queue must not be slept on after one of its endpoints is closed: each has a queue of its own and they go
// together.
struct Link {
  Queue queue;
  Fid<fid_ep> endpoint;  // closed first
};

struct Region {
  char* base = nullptr;
  uint64_t length = 0;
  Fid<fid_mr> memory;  // null for a region of length 0
  void* descriptor = nullptr;
  uint64_t key = 0;
  std::atomic<uint64_t> operations{0};  // accepted, not yet handed out as completed
};

struct RemoteRegion {
  PeerId peer = 0;
  RegionKey key;
};

// One accepted Put(), Get() or Disconnect(). Lives in a slab, in exactly one list or (all fragments posted)
// in none.
struct Operation {
  Operation* next = nullptr;
  OperationKind kind = OperationKind::kPut;
  Code code = Code::kOk;
  bool queued = false;  // in its peer's queue: not all fragments are posted
  PeerId peer = 0;
  uint32_t fragments = 0;  // posted, not yet completed by the device
  uint64_t context = 0;
  char* local = nullptr;
  Region* region = nullptr;
  uint64_t remote_address = 0;
  uint64_t remote_key = 0;
  uint64_t length = 0;
  uint64_t posted = 0;  // bytes
};

class OperationList {
 public:
  bool empty() const { return head_ == nullptr; }
  Operation* head() const { return head_; }
  void Push(Operation* operation) {
    operation->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = operation;
    tail_ = operation;
  }
  Operation* Pop() {
    Operation* operation = head_;
    head_ = operation->next;
    operation->next = nullptr;
    return operation;
  }

 private:
  Operation* head_ = nullptr;
  Operation* tail_ = nullptr;
};

struct Peer;

// One libfabric operation. The device knows it by the address of its first member.
struct Fragment {
  fi_context2 context{};
  Operation* operation = nullptr;  // null: the peer's hello
  Peer* peer = nullptr;
  uint64_t length = 0;
  Fragment* previous = nullptr;
  Fragment* next = nullptr;
};

enum class PeerState : uint8_t { kIdle, kConnecting, kUp, kGone, kClosing };

struct Peer {
  PeerId id = 0;
  PeerState state = PeerState::kIdle;
  EndpointAddress remote;
  IpAddress probe_target;  // length 0: the peer has no IP address to probe
  std::string text;        // for people
  fi_addr_t address = FI_ADDR_UNSPEC;
  uint32_t slot = 0;              // of the table that hellos are read into
  Link link;                      // empty with a shared endpoint, and while there is no connection
  OperationList queue;            // not wholly posted; only the head may be partly
  OperationList broken;           // failed, no fragment outstanding, waiting for the verdict on the peer
  Fragment* fragments = nullptr;  // outstanding at the device, also the hello
  uint32_t outstanding = 0;
  bool failed = false;       // a fragment failed since the state was entered: the link is to be looked at
  bool listed = false;       // in active_
  TimeUs blocked_since = 0;  // when posting began to answer "again" with nothing outstanding; 0: it does not
  // kConnecting
  bool hello_posted = false;
  bool hello_answered = false;
  bool reconnecting = false;  // it has been up before
  bool heard = false;         // its kernel has answered the probe
  TimeUs connect_start = 0, hello_next = 0;
  PeerProbe probe;
};

class OfiTransport final : public Transport {
 public:
  // `instance`: the number by which peers know this life; 0: a random one.
  static Result<std::unique_ptr<OfiTransport>> Create(const OfiConfig& config, uint64_t instance = 0);
  ~OfiTransport() override;

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::string LocalAddress() const override { return local_address_; }
  std::string Describe() const override { return description_; }
  Result<RegionId> RegisterRegion(void* base, uint64_t length) override;
  Status DeregisterRegion(RegionId region) override;
  std::string ExportRegion(RegionId region) const override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;
  Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) override;
  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return Submit(OperationKind::kPut, peer, local, local_offset, remote, remote_offset, length, context);
  }
  Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return Submit(OperationKind::kGet, peer, local, local_offset, remote, remote_offset, length, context);
  }
  size_t Poll(Completion* out, size_t capacity) override;
  void Wait(uint64_t timeout_us) override;
  void Wake() override;
  Counters counters() const override;

 private:
  friend class OfiRails;  // drives several of these as one

  explicit OfiTransport(const OfiConfig& config) : config_(config) {}

  // endpoint.cc
  Status Open();
  Status ChooseListen();
  Status ChooseInfo();
  Status OpenFabric();
  Status OpenQueue(size_t entries, Queue* queue);
  Status OpenEndpoint(bool listening, Link* link);
  Status RegisterHello();
  Status RegisterMemory(void* base, uint64_t length, uint64_t access, uint64_t key, Fid<fid_mr>* memory);
  void NameSelf();
  uint64_t RemoteBase(const void* base) const;

  // operations.cc
  Status Submit(OperationKind kind, PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
                uint64_t remote_offset, uint64_t length, uint64_t context);
  void Pump();
  bool PostNext(Peer* peer);
  ssize_t PostFragment(Peer* peer, Operation* operation, Fragment* fragment);
  void Complete(Operation* operation, Code code);
  Operation* NewOperation();
  void FreeOperation(Operation* operation);
  Fragment* NewFragment(Peer* peer, Operation* operation, uint64_t length);
  void FreeFragment(Fragment* fragment);
  void FinishFragment(Fragment* fragment, Code code);
  void FailOperation(Peer* peer, Operation* operation, Code code);
  void List(Peer* peer);
  void Unlist(Peer* peer);

  // peers.cc
  fid_ep* EndpointOf(Peer* peer) { return (shared_ ? listener_ : peer->link).endpoint.get(); }
  void StartConnecting(Peer* peer, TimeUs now);
  void StepPeers(TimeUs now);
  void StepConnecting(Peer* peer, TimeUs now);
  void PostHello(Peer* peer, TimeUs now);
  void Suspect(Peer* peer);
  void Look(PeerId peer);
  PeerState StateOf(PeerId peer) const;
  void LookAtFailed(TimeUs now);
  void BreakLink(Peer* peer, TimeUs now);
  void CloseLink(Peer* peer);
  void SetUp(Peer* peer);
  void SetGone(Peer* peer, const char* reason);
  void GiveUp(Peer* peer, PeerState state);
  void FinishDisconnect(Peer* peer);

  // progress.cc
  size_t ReadCompletions(const Queue& queue, size_t reads_max);
  void ReadError(const Queue& queue);
  bool Progress();
  bool Busy(TimeUs now) const;
  bool PrepareSleep(TimeUs now, uint64_t* timeout_us, std::vector<pollfd>* items);
  void FinishSleep(const pollfd* items, size_t count);
  bool ConsumeWake();

  const OfiConfig config_;
  TransportCapabilities capabilities_;
  std::string local_address_, description_;
  IpAddress listen_;  // length 0: a provider without IP addresses
  uint64_t instance_ = 0;
  size_t name_bytes_ = 0;  // of the listener's name
  bool shared_ = false;    // one endpoint for all peers
  bool probes_ = false;    // who listens at a peer's address can be asked by TCP

  // In the order of opening; closed in the reverse.
  Info info_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> addresses_;
  int wake_fd_ = -1;
  std::atomic<bool> wake_{false};

  Hello hello_;
  std::unique_ptr<Hello[]> hellos_read_;  // one slot a peer
  Fid<fid_mr> hello_memory_, hellos_read_memory_;

  mutable std::mutex regions_mutex_;
  std::unordered_map<RegionId, std::unique_ptr<Region>> regions_;
  RegionId region_next_ = 1;

  Link listener_;  // after the memory: an endpoint is closed before the regions that it serves

  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId peer_next_ = 1;
  std::vector<uint32_t> slots_free_;
  std::unordered_map<RemoteRegionId, RemoteRegion> remote_regions_;
  RemoteRegionId remote_region_next_ = 1;

  OperationList completed_;
  size_t accepted_ = 0;              // operations not yet handed out
  size_t outstanding_ = 0;           // fragments at the device
  uint32_t connecting_ = 0;          // peers in kConnecting
  std::vector<Peer*> active_;        // peers in kUp with a queue
  size_t active_next_ = 0;           // whose turn it is
  std::vector<Peer*> linked_;        // peers with a link of their own
  std::vector<fid*> sleep_objects_;  // Sleep()'s scratch, kept so that it allocates nothing
  std::vector<pollfd> sleep_items_;
  std::vector<PeerId> failed_;  // peers to look at; ids, for one may be freed while it stands here
  std::vector<std::unique_ptr<Operation[]>> operation_slabs_;
  OperationList operations_free_;
  std::vector<std::unique_ptr<Fragment[]>> fragment_slabs_;
  Fragment* fragments_free_ = nullptr;
  TimeUs busy_at_ = 0;  // when work was last seen, ours or inbound

  std::atomic<uint64_t> registrations_{0}, put_bytes_{0}, get_bytes_{0}, puts_{0}, gets_{0}, failures_{0};
};

// While work is in sight Wait() spins this long before it sleeps: a sleep and its wake-up cost 20 to 50 µs on a virtual
// machine, and the next fragment of a transfer in progress is usually nearer than that.
inline constexpr TimeUs kSpinUs = 100;
// Until one of them is ready or the time is over; UINT64_MAX: no limit.
void SleepOn(std::vector<pollfd>* items, uint64_t timeout_us);

TimeUs Now();
uint64_t RandomNumber();  // never 0

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_INTERNAL_H_
