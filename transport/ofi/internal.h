// SPDX-License-Identifier: Apache-2.0
//
// OfiTransport, split by flow: endpoint.cc opens the fabric and registers memory, dmabuf.cc registers device
// memory, peers.cc connects to peers, checks and disconnects them, operations.cc accepts puts and gets and
// posts their fragments, progress.cc reads completions and sleeps. rails.cc makes one transport of several.
//
// One endpoint serves all peers, as EFA wants it, whatever the provider.
//
// The states of a peer:
//
//   state        means                                                   leaves when
//   kIdle        connected by name only, nothing posted yet              first operation -> kConnecting
//   kConnecting  reading the peer's hello (its instance number);         the hello names the right instance
//                operations wait; those that failed wait, too              -> kUp
//                                                                        another instance, or the deadline
//                                                                          passes -> kGone
//   kUp          fragments are posted                                    an operation fails -> kConnecting
//   kGone        every operation completes with kPeerGone                Disconnect() -> kClosing
//   kClosing     nothing is accepted; the device still holds buffers     the last fragment comes back
//                                                                          -> (freed)
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
#include <vector>

#include "core/base/ids.h"
#include "transport/front/front.h"
#include "transport/ip_address.h"
#include "transport/ofi/codec.h"
#include "transport/ofi/dmabuf.h"
#include "transport/ofi/ofi_transport.h"

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
// Reads of a queue in one Poll(), so that a flood of completions cannot keep the caller from its other work.
inline constexpr size_t kReadsPerPoll = 4;

struct Region : front::LocalRegion {
  char* base = nullptr;
  Fid<fid_mr> memory;  // null for a region of length 0
  void* descriptor = nullptr;
  uint64_t key = 0;
};

struct RemoteRegion : front::PeerRegion {
  RegionKey key;
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
  std::string text;  // for people
  fi_addr_t address = FI_ADDR_UNSPEC;
  uint32_t slot = 0;  // of the table that hellos are read into
  front::Queue<Operation> queue;
  List<Operation> broken;         // failed, no fragment outstanding, waiting until the peer was checked
  Fragment* fragments = nullptr;  // outstanding at the device, also the hello
  uint32_t outstanding = 0;
  bool failed = false;       // a fragment failed since the state was entered: the link is to be looked at
  bool listed = false;       // in active_
  TimeUs blocked_since = 0;  // when posting began to answer "again" with nothing outstanding; 0: it does not
  // kConnecting
  bool hello_posted = false;
  bool hello_answered = false;
  bool reconnecting = false;  // it has been up before
  TimeUs connect_start = 0;   // by rounds_
  TimeUs hello_next = 0;
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
  Status OpenQueue();
  Status OpenEndpoint();
  Status RegisterHello();
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

  // peers.cc
  Status DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const;
  void StartConnecting(Peer* peer, TimeUs now);
  void StepPeers(TimeUs now);
  void StepConnecting(Peer* peer, TimeUs now);
  void PostHello(Peer* peer);
  void Suspect(Peer* peer);
  void Check(PeerId peer);
  PeerState StateOf(PeerId peer) const;
  const char* WhyGone(PeerId peer) const;
  void CheckFailed(TimeUs now);
  void BreakLink(Peer* peer, TimeUs now);
  void SetUp(Peer* peer);
  void SetGone(Peer* peer, const char* reason);
  void GiveUp(Peer* peer, PeerState state);
  void FinishDisconnect(Peer* peer);

  // progress.cc
  size_t ReadCompletions();
  void ReadError();
  void Progress();
  bool Busy(TimeUs now) const;
  void Sleep(TimeUs now, uint64_t timeout_us);
  bool PrepareSleep(TimeUs now, uint64_t* timeout_us, std::vector<pollfd>* items);
  void FinishSleep(const pollfd* items, size_t count);

  const OfiConfig config_;
  IpAddress listen_;  // length 0: a provider without IP addresses
  uint64_t instance_ = 0;
  size_t name_bytes_ = 0;  // of the endpoint's name
  std::string no_dmabuf_;  // why not; empty: capabilities_.dmabuf

  // In the order of opening; closed in the reverse.
  Info info_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> addresses_;

  Hello hello_;
  std::unique_ptr<Hello[]> hellos_read_;  // one slot a peer
  Fid<fid_mr> hello_memory_, hellos_read_memory_;

  Fid<fid_cq> queue_;
  int queue_fd_ = -1;     // the provider's, to sleep on; -1: it has none
  Fid<fid_ep> endpoint_;  // after the memory: it is closed before the regions that it serves

  std::vector<uint32_t> slots_free_;
  size_t outstanding_ = 0;   // fragments at the device
  uint32_t connecting_ = 0;  // peers in kConnecting
  front::RoundClock rounds_;
  front::Turns<Peer> active_;        // peers in kUp with a queue
  std::vector<pollfd> sleep_items_;  // Sleep()'s scratch, kept so that it allocates nothing
  std::vector<PeerId> failed_;       // peers to look at; ids, for one may be freed while it stands here
  front::Pool<Fragment> fragments_;
  TimeUs busy_at_ = 0;  // when work was last seen, ours or inbound
};

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_INTERNAL_H_
