// SPDX-License-Identifier: Apache-2.0
//
// OfiTransport, split by flow: endpoint.cc opens the fabric and registers memory, dmabuf.cc registers device
// memory, peers.cc connects to peers, checks and disconnects them, operations.cc accepts puts and gets and
// posts their fragments, progress.cc reads completions and sleeps. grants.cc has the keys of peers,
// hang_up.cc ends connections. rails.cc makes one transport of several.
//
// The states of a peer:
//
//   state        means                                                   leaves when
//   kIdle        connected by name only, no endpoint yet                 first operation -> kConnecting
//   kConnecting  reading the peer's hello (its instance number) over a   the hello names the right instance,
//                new connection, then asking for the keys to its           and the keys are granted -> kUp
//                memory (grants.h); operations wait; those that a        another instance, no listener, or
//                broken connection cut short wait, too                     the deadline passes -> kGone
//   kUp          fragments are posted                                    an operation fails -> kConnecting
//   kGone        every operation completes with kPeerGone                Disconnect() -> kClosing
//   kClosing     nothing is accepted; the device still holds buffers     the last fragment comes back
//                (shared endpoint only)                                    -> (freed)
//
// So a failed operation gets its code only after the peer was checked again: kPeerGone if it is dead or another
// instance; kLinkFailed if it is alive (or kInvalidArgument if the provider says that the range was refused).

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

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/base/ids.h"
#include "transport/front/front.h"
#include "transport/ip_address.h"
#include "transport/ofi/codec.h"
#include "transport/ofi/dmabuf.h"
#include "transport/ofi/grants.h"
#include "transport/ofi/ofi_transport.h"
#include "transport/peer_probe.h"

namespace ropeteam::ofi {

using front::List;
using front::Now;
using front::RandomNumber;

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

// The libfabric interface this code is written to; where it can register dmabufs it asks for kDmabufVersion.
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
// Likewise the key of the table of answers to knocks (grants.h), which peers may read.
inline constexpr uint64_t kAnswersKey = 0x52546b65792e616e;

// Where a peer's hello and answers are read into.
struct HelloRead {
  Hello hello;
  uint64_t answers[kAnswerWindow];
};

// A receive buffer for one knock. The device knows it by the address of its first member.
struct KnockBuffer {
  fi_context2 context{};
  Knock knock;
};
// Posted at a time. A peer that finds none waits in the provider's queue and asks again after a while.
inline constexpr size_t kKnockBuffers = 32;

// How often silent peers are looked for.
inline constexpr TimeUs kSilenceStepUs = 50'000;
// Reads of a queue in one Poll(), so that a flood of completions cannot keep the caller from its other work.
inline constexpr size_t kReadsPerPoll = 4;

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

struct Region : front::LocalRegion {
  ~Region() {
    if (grants != nullptr) grants->RemoveRegion(key);
  }
  char* base = nullptr;
  Fid<fid_mr> memory;  // null for a region of length 0
  void* descriptor = nullptr;
  uint64_t key = 0;          // as exported
  Grants* grants = nullptr;  // set: peers' keys are made from `key`
};

struct RemoteRegion : front::PeerRegion {
  RegionKey key;  // ours, where the peer grants keys
};

struct Operation : front::Accepted<Operation, Region, RemoteRegion> {
  uint32_t fragments = 0;  // posted, not yet completed by the device
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
  uint32_t slot = 0;  // of the table that hellos are read into
  Link link;          // empty with a shared endpoint, and while there is no connection
  front::Queue<Operation> queue;
  List<Operation> broken;         // failed, no fragment outstanding, waiting until the peer was checked
  Fragment* fragments = nullptr;  // outstanding at the device, also the hello
  uint32_t outstanding = 0;
  bool failed = false;       // a fragment failed since the state was entered: the link is to be looked at
  bool listed = false;       // in active_
  TimeUs heard_at = 0;       // kUp: when it last completed something, or had nothing outstanding
  TimeUs blocked_since = 0;  // when posting began to answer "again" with nothing outstanding; 0: it does not
  // kConnecting
  bool hello_posted = false;
  bool hello_answered = false;
  bool met = false;           // the hello has named the right instance: the peer is asked for keys
  bool reconnecting = false;  // it has been up before
  bool heard = false;         // its kernel has answered the probe
  TimeUs connect_start = 0;  // by rounds_
  TimeUs hello_next = 0, knock_next = 0;
  PeerProbe probe;
  const char* gone_reason = "";  // kGone

  bool gone() const { return state == PeerState::kGone; }
  bool closing() const { return state == PeerState::kClosing; }
};

class OfiTransport final : public front::Front<OfiTransport, Peer, Operation> {
 public:
  // `instance`: the number by which peers know this instance; 0: a random one.
  static Result<std::unique_ptr<OfiTransport>> Create(const OfiConfig& config, uint64_t instance = 0);
  ~OfiTransport() override;

  Result<RegionId> RegisterDmabuf(int fd, uint64_t offset, uint64_t length) override;
  void SetPeers(const std::vector<std::string>& addresses) override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;

 private:
  friend Front;
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
  Status OpenGrants();
  void PostKnockBuffer(KnockBuffer* buffer);
  Status RegisterMemory(void* base, uint64_t length, uint64_t access, uint64_t key, Fid<fid_mr>* memory);
  void NameSelf();
  uint64_t RemoteBase(const void* base) const;
  Status MapRegion(Region* region, void* base);
  std::string EncodeKey(const Region& region) const;

  // dmabuf.cc
  bool WantsDmabuf() const;
  void ProbeDmabuf();
  Status MapDmabuf(Region* region, int fd, uint64_t offset);

  // operations.cc
  void Start(Peer* peer);
  void Pump();
  bool PostNext(Peer* peer);
  ssize_t PostFragment(Peer* peer, Operation* operation, Fragment* fragment);
  void Complete(Operation* operation, Code code);
  Fragment* NewFragment(Peer* peer, Operation* operation, uint64_t length);
  void FreeFragment(Fragment* fragment);
  void FinishFragment(Fragment* fragment, Code code);
  void FailOperation(Peer* peer, Operation* operation, Code code);

  // Over TCP no other signal comes for minutes if packets do not get through. With a shared endpoint the link
  // to a single peer cannot be broken.
  bool watches_silence() const { return probes_ && !shared_; }

  // peers.cc
  void Admit(const std::unordered_set<uint64_t>& instances);
  Status DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const;
  const Link& LinkOf(Peer* peer) const { return shared_ ? listener_ : peer->link; }
  fid_ep* EndpointOf(Peer* peer) const { return LinkOf(peer).endpoint.get(); }
  void StartConnecting(Peer* peer, TimeUs now);
  void StepPeers(TimeUs now);
  void StepConnecting(Peer* peer, TimeUs now);
  bool HelloSays(Peer* peer, TimeUs now);
  void SendKnock(Peer* peer, TimeUs now);
  void PostHello(Peer* peer, TimeUs now);
  void Suspect(Peer* peer);
  void Check(PeerId peer);
  PeerState StateOf(PeerId peer) const;
  const char* WhyGone(PeerId peer) const;
  void CheckFailed(TimeUs now);
  void CheckSilent(TimeUs now);
  void BreakLink(Peer* peer, TimeUs now);
  void EndConnection(Peer* peer);
  void CloseLink(Peer* peer);
  void SetUp(Peer* peer);
  void SetGone(Peer* peer, const char* reason);
  void GiveUp(Peer* peer, PeerState state);
  void FinishDisconnect(Peer* peer);
  void Fence(const Peer& departed);

  // progress.cc
  size_t ReadCompletions(const Queue& queue, size_t reads_max);
  void ReadError(const Queue& queue);
  KnockBuffer* KnockBufferOf(void* context);
  void TakeKnock(KnockBuffer* buffer);
  void Progress();
  bool Busy(TimeUs now) const;
  void Sleep(TimeUs now, uint64_t timeout_us);
  bool PrepareSleep(TimeUs now, uint64_t* timeout_us, std::vector<pollfd>* items);
  void FinishSleep(const pollfd* items, size_t count);

  const OfiConfig config_;
  IpAddress listen_;  // length 0: a provider without IP addresses
  uint64_t instance_ = 0;
  size_t name_bytes_ = 0;     // of the listener's name
  std::string no_dmabuf_;     // why not; empty: capabilities_.dmabuf
  bool shared_ = false;       // one endpoint for all peers
  bool probes_ = false;       // who listens at a peer's address can be asked by TCP
  bool grants_keys_ = false;  // each peer has keys of its own

  // In the order of opening; closed in the reverse.
  Info info_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> addresses_;

  Hello hello_;
  std::unique_ptr<HelloRead[]> hellos_read_;  // one slot a peer
  Fid<fid_mr> hello_memory_, hellos_read_memory_;
  std::unique_ptr<Grants> grants_;  // with grants_keys_
  Fid<fid_mr> answers_memory_;
  std::unique_ptr<KnockBuffer[]> knocks_;

  Link listener_;  // after the memory: an endpoint is closed before the regions that it serves

  std::vector<uint32_t> slots_free_;
  size_t outstanding_ = 0;           // fragments at the device
  uint32_t connecting_ = 0;          // peers in kConnecting
  front::RoundClock rounds_;
  front::Turns<Peer> active_;        // peers in kUp with a queue
  std::vector<Peer*> linked_;        // peers with a link of their own
  std::vector<fid*> sleep_objects_;  // Sleep()'s scratch, kept so that it allocates nothing
  std::vector<pollfd> sleep_items_;
  std::vector<PeerId> failed_;  // peers to look at; ids, for one may be freed while it stands here
  front::Pool<Fragment> fragments_;
  TimeUs busy_at_ = 0;       // when work was last seen, ours or inbound
  TimeUs silence_next_ = 0;  // when to look for silent peers
};

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_INTERNAL_H_
