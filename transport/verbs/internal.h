// SPDX-License-Identifier: Apache-2.0
//
// VerbsTransport, split by flow: open.cc opens the devices, regions.cc registers memory, operations.cc
// accepts puts and gets and posts their pieces, links.cc makes connections and handles broken ones, inbound.cc
// answers the peers' requests for connections, progress.cc reads completions and sleeps.
//
// A connection has an initiator, which posts, and a responder, whose queue pair only serves. Two nodes that
// write to each other have one each way. A peer has a link for each pair of rails:
//
//   link         means                                               leaves when
//   kIdle        nothing was asked of it                             the peer's first operation
//                                                                      -> kConnecting
//   kConnecting  a request is sent until it is answered; pieces      accepted -> kUp
//                left by the last connection are held                its time is over, or no such rail
//                                                                      there -> kDown
//   kUp          pieces are posted                                   a piece fails, the port goes down,
//                                                                      nothing completes -> kDraining
//   kDraining    the device is returning the pieces                  it has, or its time is over
//                                                                      -> kConnecting
//   kDown        its rail is left out                                the time to try again -> kConnecting
//
//   peer         means                                               leaves when
//   kIdle        connected by name only                              first operation -> kConnecting
//   kConnecting  no link is up; operations wait                      a link is -> kUp
//                                                                    none is trying any more, or the peer
//                                                                      refuses this node -> kGone
//   kUp          a link is                                           none is -> kConnecting
//   kGone        every operation completes with kPeerGone            Disconnect() -> kClosing
//   kClosing     links drain                                         all have -> (freed)
//
// Pieces that a broken connection left undone are posted again, on this rail or another, only after the peer has
// confirmed that the old responder is destroyed (kAccept of a request that supersedes it, or kClosed): until then the
// network may still deliver the old bytes. If no other rail can take the piece that broke the connection, its
// operation fails. So every break fails an operation, and nothing is retried for ever.

#ifndef ROPETEAM_TRANSPORT_VERBS_INTERNAL_H_
#define ROPETEAM_TRANSPORT_VERBS_INTERNAL_H_

#include <poll.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/base/ids.h"
#include "core/base/view.h"
#include "transport/front/front.h"
#include "transport/rails.h"
#include "transport/verbs/codec.h"
#include "transport/verbs/device.h"
#include "transport/verbs/mailbox.h"

namespace ropeteam::verbs {

using front::List;
using front::Now;
using front::RandomNumber;

// Operations are cut into pieces of this many bytes: large enough that a piece costs nothing beside its
// bytes, small enough to spread one chunk over rails.
inline constexpr uint64_t kOperationBytes = 1 << 20;
// Pieces outstanding on one link, which is its send queue's depth.
inline constexpr uint32_t kLinkPieces = 128;
// And their bytes: many times what the fastest link has under way, and few enough that a rail that becomes
// slow delays only this much.
inline constexpr uint64_t kLinkBytes = 32 << 20;
// Pieces posted for a peer in one call (a batch); only the last of them is signalled.
inline constexpr uint32_t kTurnPieces = 16;
inline constexpr uint64_t kTurnBytes = kOperationBytes;
static_assert(kLinkPieces >= 2 * kTurnPieces && kLinkBytes >= 2 * kTurnBytes);
// A put of at most this is copied into the work request, where the device allows it: it spares the card a
// read.
inline constexpr uint32_t kInlineBytes = 64;
// Entries of a rail's completion queue. Every piece outstanding may need one, so they bound all of a rail's
// pieces.
inline constexpr uint32_t kRailPieces = 8192;
// Of which these many are kept for the empty writes that look after peers.
inline constexpr uint32_t kRailProbes = 64;
static_assert(kRailPieces > 2 * kRailProbes);
// How long a link may take to be made while nothing suggests that its peer is dead: its program may be busy …
inline constexpr TimeUs kTimeoutAliveUs = 3'000'000;
// … and after the device has found the peer silent for all its retries, at least.
inline constexpr TimeUs kTimeoutSilentMinUs = 300'000;
// What those retries take at least: see kTimeout and kRetries in links.cc.
inline constexpr TimeUs kDeviceSilenceUs = 470'000;
// A link is broken when the device has completed none of its pieces for so long, although it has reported no failure.
// Devices should report a failure after their retries; Linux 6.1's Soft-RoCE sometimes does neither when its interface
// goes down (docs/verbs.md).
inline constexpr TimeUs kStuckUs = 5'000'000;
inline constexpr TimeUs kStuckLookUs = 1'000'000;
// Reads outstanding on one connection; cards of the last ten years support so many.
inline constexpr uint8_t kReads = 16;
// Peers that this transport connects to, and connections that others have to it. A node connects to those that it
// writes to or reads from, which are few; cards have 128 Ki queue pairs and more.
inline constexpr size_t kPeersMax = 16 * 1024;
inline constexpr size_t kInboundMax = 64 * 1024;
// Instances that were disconnected and not connected to again: their requests are refused. The oldest is forgotten first.
inline constexpr size_t kFencedMax = 16 * 1024;
static_assert(kPeersMax >= kNodesMax && kFencedMax >= kNodesMax);

// A rail is a device's port in use.
struct Rail {
  uint8_t index = 0;
  Port port;
  // How many pieces may be outstanding.
  uint32_t pieces_max() const {
    return queue_entries > 2 * kRailProbes ? queue_entries - kRailProbes : queue_entries / 2;
  }
  // In the order of making; destroyed in the reverse.
  Handle<ibv_context> context;
  Handle<ibv_pd> domain;
  Handle<ibv_comp_channel> channel;
  Mailbox mailbox;
  Handle<ibv_cq> queue;  // of all its reliable queue pairs
  uint32_t queue_entries = 0;
  std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<ibv_ah>>
      paths;            // by GID; InfiniBand's LID goes with it
  bool up = true;       // the port; while it is down nothing new is begun on it
  bool dead = false;    // the device: it returns no pieces any more, queue pairs are destroyed at once
  uint32_t pieces = 0;  // outstanding, of all links
  uint64_t bytes = 0;
};

struct Region : front::LocalRegion {
  uint64_t base = 0;                   // what the device adds offsets to
  std::vector<Handle<ibv_mr>> memory;  // one a rail; none for a region of no bytes
};

struct RemoteRegion : front::PeerRegion {
  RegionKey key;
};

struct Operation : front::Accepted<Operation, Region, RemoteRegion> {
  uint32_t pieces = 0;  // cut and not yet done: at a device, held by a link, or to be redone
};

struct Piece {
  Piece* next = nullptr;
  Operation* operation = nullptr;
  uint64_t offset = 0;
  uint32_t length = 0;
};

enum class LinkState : uint8_t { kIdle, kConnecting, kUp, kDraining, kDown };
enum class PeerState : uint8_t { kIdle, kConnecting, kUp, kGone, kClosing };

struct Peer;

struct Link {
  Peer* peer = nullptr;
  Rail* rail = nullptr;
  uint8_t remote_rail = 0;
  LinkState state = LinkState::kIdle;
  uint32_t tag = 0;           // of its queue pair's work requests; a new one for each queue pair
  Handle<ibv_qp> queue_pair;  // kConnecting, kUp, kDraining
  uint32_t sequence = 0;      // of its first packet
  uint64_t connection = 0;
  uint64_t superseded = 0;  // the last connection, not known to be destroyed at the peer; 0: none
  uint64_t mbps = 0;        // of the slower end
  uint32_t inline_bytes = 0;
  List<Piece> pieces;  // at the device, in the order of posting
  uint32_t piece_count = 0;
  uint32_t piece_next = 0;  // number of the next piece; the oldest has piece_next - piece_count
  uint64_t bytes = 0;
  uint32_t oldest = 0;       // piece's number when BreakStuckLinks() last looked, …
  TimeUs oldest_since = 0;   // … and since when it has been the oldest
  List<Piece> held;          // returned by the device, waiting for the confirmation of `superseded`
  bool timed = false;        // in timed_
  TimeUs timeout = 0;        // of the next connecting
  TimeUs deadline = 0;       // kConnecting, kDraining: when the timeout ends; kDown: when to try again
  TimeUs send_next = 0;      // kConnecting: when to repeat the request, …
  TimeUs send_interval = 0;  // … and how long after that the next
};

struct Peer {
  PeerId id = 0;
  PeerState state = PeerState::kIdle;
  TransportAddress remote;
  std::string text;  // for people
  std::vector<Link> links;
  uint32_t links_up = 0;
  front::Queue<Operation> queue;
  List<Piece> redo;
  bool listed = false;  // in active_

  bool gone() const { return state == PeerState::kGone; }
  bool closing() const { return state == PeerState::kClosing; }
};

// The responder's end of a peer's link.
struct Inbound {
  uint64_t connection = 0;
  uint64_t instance = 0;  // the initiator's
  Rail* rail = nullptr;
  uint32_t tag = 0;
  Handle<ibv_qp> queue_pair;
  Message request;  // it says where answers go
  uint8_t reads = 0;
  uint32_t sequence = 0;
  bool probing = false;  // an empty write is on its way, to see whether the initiator is there
};

class VerbsTransport final : public front::Front<VerbsTransport, Peer, Operation> {
 public:
  static Result<std::unique_ptr<Transport>> Create(const VerbsConfig& config);
  ~VerbsTransport() override;

  Result<RegionId> RegisterDmabuf(int fd, uint64_t offset, uint64_t length) override;
  void SetPeers(const std::vector<std::string>& addresses) override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;

 private:
  friend Front;

  VerbsTransport() = default;

  // open.cc
  Status Open(const VerbsConfig& config);
  Status OpenRail(const Port& port);
  void ProbeDmabuf();
  void NameSelf();

  // regions.cc
  Status MapRegion(Region* region, void* base);
  Status MapDmabuf(Region* region, int fd);
  std::string EncodeKey(const Region& region) const;

  // operations.cc
  void Start(Peer* peer);
  void Pump();
  bool PostTurn(Peer* peer);
  Link* LinkForNext(Peer* peer);
  Piece* NextPiece(Peer* peer);
  void Post(Link* link, Piece** pieces, uint32_t count);
  void FinishPieces(Link* link, uint32_t number, ibv_wc_status status);
  void FailPiece(Link* link, Piece* piece, ibv_wc_status status);
  Piece* TakePiece(Link* link);
  void DropPiece(Piece* piece);
  void FailOperation(Peer* peer, Operation* operation, Code code);
  void FinishOperation(Operation* operation);
  void Activate(Peer* peer);

  // links.cc
  Status DecodeKey(const Peer& peer, const std::string& bytes, RemoteRegion* remote) const;
  void SetTimer(Link* link);
  void StartConnecting(Link* link, TimeUs timeout, TimeUs now);
  void StepLinks(TimeUs now);
  void StepLink(Link* link, TimeUs now);
  void SendRequest(Link* link, TimeUs now);
  void SendClose(const Link& over, uint64_t connection);
  void BreakLink(Link* link, TimeUs timeout, TimeUs now);
  void BreakStuckLinks(TimeUs now);
  void FinishDraining(Link* link, TimeUs now);
  void DropQueuePair(Link* link);
  void ReleaseHeld(Link* link);
  void TakeDown(Link* link, const char* reason, TimeUs now);
  void OnAccept(Rail* rail, const Message& message);
  void OnRefuse(const Message& message);
  void OnClosed(const Message& message);
  void SetGone(Peer* peer, const char* reason);
  void GiveUp(Peer* peer, PeerState state);
  void FinishDisconnect(Peer* peer);
  void FinishClosed();

  // inbound.cc
  void OnMessage(Rail* rail, std::string_view bytes);
  void OnRequest(Rail* rail, const Message& message);
  Refusal Accept(Rail* rail, const Message& message, Inbound** made);
  void SendAccept(const Inbound& inbound);
  void SendRefuse(Rail* rail, const Message& to, Refusal refusal);
  void Answer(Rail* rail, const Message& to, MessageKind kind);
  void Send(Rail* rail, const RailAddress& to, uint32_t key, Message message);
  std::shared_ptr<ibv_ah> PathFor(Rail* rail, const PortAddress& to);
  void DestroyInbound(uint64_t connection, uint64_t instance);
  void CutInstance(uint64_t instance);
  void FenceInstance(uint64_t instance);
  void ProbeInbound();

  // progress.cc
  size_t Advance();
  void Progress() { (void)Advance(); }
  bool Busy(TimeUs now) const;
  size_t ReadCompletions(Rail* rail, size_t reads_max);
  void OnCompletion(Rail* rail, const ibv_wc& completion);
  void ReadEvents(TimeUs now);
  void OnEvent(Rail* rail, const ibv_async_event& event, TimeUs now);
  void OnPort(Rail* rail, bool up, TimeUs now);
  void Arm();
  void DrainChannels();
  TimeUs NextTimer() const;
  void Sleep(TimeUs now, uint64_t timeout_us);

  uint64_t instance_ = 0;
  uint32_t datagram_key_ = 0;
  TimeUs timeout_silent_ = kTimeoutSilentMinUs;  // how long a silent peer is asked for a new connection

  std::vector<std::unique_ptr<Rail>> rails_;  // destroyed last of the devices' objects

  std::unordered_map<uint64_t, std::unique_ptr<Inbound>> inbound_;  // by connection
  std::unordered_map<uint32_t, Inbound*> inbound_tags_;
  std::deque<uint64_t> probe_order_;
  std::deque<uint64_t> fenced_;                           // instances
  std::optional<std::unordered_set<uint64_t>> admitted_;  // instances; no value: everybody

  std::unordered_map<uint32_t, Link*> tags_;         // of the queue pairs there are
  std::unordered_map<uint64_t, Link*> connections_;  // the same
  uint32_t tag_next_ = 1;

  size_t outstanding_ = 0;      // pieces at devices
  front::Turns<Peer> active_;   // peers in kUp with something to post
  std::vector<Link*> timed_;    // links in kConnecting, kDraining, kDown
  std::vector<PeerId> closed_;  // in kClosing, perhaps with nothing left at the devices
  front::Pool<Piece> pieces_;
  std::vector<LinkLoad> loads_;      // LinkForNext()'s scratch
  std::vector<pollfd> sleep_items_;  // Sleep()'s
  TimeUs busy_at_ = 0;               // when work was last seen
  TimeUs events_next_ = 0;           // when to look for the devices' events
  TimeUs stuck_next_ = 0;            // when to look for links that are stuck
  uint32_t polls_ = 0;
};

// A reliable queue pair on the rail, not connected yet. `inline_bytes` (may be null): how much a put may
// carry in its work request.
Status MakeQueuePair(Rail* rail, Handle<ibv_qp>* queue_pair, uint32_t* inline_bytes);
// Connects it to the one that `remote`, a request or an acceptance, names. `sequence` is of its own first
// packet. Returns an errno.
int ConnectQueuePair(Rail* rail, ibv_qp* queue_pair, const Message& remote, uint32_t sequence,
                     uint8_t reads_served, uint8_t reads_made);
uint32_t NewSequence();

}  // namespace ropeteam::verbs

#endif  // ROPETEAM_TRANSPORT_VERBS_INTERNAL_H_
