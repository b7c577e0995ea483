// SPDX-License-Identifier: Apache-2.0
//
// VerbsTransport, split by flow: open.cc opens the devices, regions.cc registers memory, operations.cc
// accepts puts and gets and posts their pieces, links.cc makes connections and handles broken ones,
// inbound.cc answers the peers' requests for connections, progress.cc reads completions and sleeps.
//
// A connection has an initiator, which posts operations, and a responder, whose queue pair only serves them.
// Two nodes that write to each other have one connection in each direction. A peer has a link for each pair
// of rails:
//
//   link         means                                               leaves when
//   kIdle        not used yet                                        the peer's first operation
//                                                                      -> kConnecting
//   kConnecting  a request is sent until it is answered; pieces      accepted -> kUp
//                left by the last connection are held                the timeout ends, or the peer has no
//                                                                      such rail -> kDown
//   kUp          pieces are posted                                   a piece fails, the port goes down,
//                                                                      nothing completes -> kDraining
//   kDraining    the device is returning the pieces                  all are returned, or the timeout ends
//                                                                      -> kConnecting
//   kDown        its rail is left out                                time for the next try -> kConnecting
//
//   peer         means                                               leaves when
//   kIdle        connected by name only                              first operation -> kConnecting
//   kConnecting  no link is up; operations wait                      a link comes up -> kUp
//                                                                    all links are down, or the peer
//                                                                      refuses this node -> kGone
//   kUp          a link is up                                        the last one breaks -> kConnecting
//   kGone        every operation completes with kPeerGone            Disconnect() -> kClosing
//   kClosing     links drain                                         all have drained -> (freed)
//
// Pieces that a broken connection left undone are posted again, on this rail or another. This happens only
// after the peer has confirmed that the old responder is destroyed (kAccept of a request that supersedes it,
// or kClosed). Until then the network may still deliver the old bytes. If no other link is up, the operation
// whose piece failed fails too. So nothing is retried for ever.

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

// Operations are cut into pieces of this many bytes: large enough that the cost per piece is negligible,
// small enough to spread one chunk over rails.
inline constexpr uint64_t kOperationBytes = 1 << 20;
// Pieces outstanding on one link: the depth of its send queue.
inline constexpr uint32_t kLinkPieces = 128;
// Bytes outstanding on one link: many times the bandwidth-delay product of the fastest link. If a rail
// becomes slow, it delays at most these.
inline constexpr uint64_t kLinkBytes = 32 << 20;
// Pieces posted for a peer in one call (a batch); only the last of them is signalled.
inline constexpr uint32_t kTurnPieces = 16;
inline constexpr uint64_t kTurnBytes = kOperationBytes;
static_assert(kLinkPieces >= 2 * kTurnPieces && kLinkBytes >= 2 * kTurnBytes);
// A put of at most this many bytes is copied into the work request if the device allows it. This spares the
// card a read.
inline constexpr uint32_t kInlineBytes = 64;
// Entries of a rail's completion queue. Every outstanding piece may need one, so they limit a rail's pieces.
inline constexpr uint32_t kRailPieces = 8192;
// Entries of these that are reserved for the empty writes that check whether peers are alive.
inline constexpr uint32_t kRailProbes = 64;
static_assert(kRailPieces > 2 * kRailProbes);
// The timeout of connecting while nothing suggests that the peer is dead: its program may be busy …
inline constexpr TimeUs kTimeoutAliveUs = 3'000'000;
// … and its least value after the peer was silent during all retries of the device.
inline constexpr TimeUs kTimeoutSilentMinUs = 300'000;
// The least time that those retries take: see kTimeout and kRetries in links.cc.
inline constexpr TimeUs kDeviceSilenceUs = 470'000;
// A link counts as broken if for this long the device has neither completed nor failed its oldest piece.
// Devices should report a failure after their retries. Linux 6.1's Soft-RoCE sometimes does not when its
// interface goes down (docs/verbs.md).
inline constexpr TimeUs kStuckUs = 5'000'000;
inline constexpr TimeUs kStuckLookUs = 1'000'000;
// Reads outstanding on one connection. Cards of the last ten years support this many.
inline constexpr uint8_t kReads = 16;
// Peers that this transport connects to, and connections that other nodes have to it. A node connects only to
// the few nodes that it writes to or reads from. Cards have 128 Ki queue pairs and more.
inline constexpr size_t kPeersMax = 16 * 1024;
inline constexpr size_t kInboundMax = 64 * 1024;
// Instances that this node has disconnected and not connected to again: their requests are refused. If there
// are more, the oldest is forgotten.
inline constexpr size_t kFencedMax = 16 * 1024;
static_assert(kPeersMax >= kNodesMax && kFencedMax >= kNodesMax);

// A port of a device that this transport uses.
struct Rail {
  uint8_t index = 0;
  Port port;
  // How many pieces may be outstanding.
  uint32_t pieces_max() const {
    return queue_entries > 2 * kRailProbes ? queue_entries - kRailProbes : queue_entries / 2;
  }
  // In the order of creation; they are destroyed in reverse.
  Handle<ibv_context> context;
  Handle<ibv_pd> domain;
  Handle<ibv_comp_channel> channel;
  Mailbox mailbox;
  Handle<ibv_cq> queue;  // of all its reliable queue pairs
  uint32_t queue_entries = 0;
  std::map<std::pair<uint64_t, uint64_t>, std::shared_ptr<ibv_ah>>
      paths;            // by GID and InfiniBand's LID
  bool up = true;       // the port; while it is down, no link that is down is tried again
  bool dead = false;    // the device has failed: it returns no pieces, queue pairs are destroyed at once
  uint32_t pieces = 0;  // outstanding, of all links
  uint64_t bytes = 0;
};

struct Region : front::LocalRegion {
  uint64_t base = 0;                   // the device's address of offset 0
  std::vector<Handle<ibv_mr>> memory;  // one per rail; empty for a region of length 0
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
  uint64_t superseded = 0;  // the last connection, if the peer has not confirmed its end; 0: none
  uint64_t mbps = 0;        // of the slower end
  uint32_t inline_bytes = 0;
  List<Piece> pieces;  // at the device, in the order of posting
  uint32_t piece_count = 0;
  uint32_t piece_next = 0;  // number of the next piece; the oldest has piece_next - piece_count
  uint64_t bytes = 0;
  uint32_t oldest = 0;       // number of the oldest piece at the last BreakStuckLinks() …
  TimeUs oldest_since = 0;   // … and since when it has been the oldest
  List<Piece> held;          // returned by the device, waiting for the confirmation of `superseded`
  bool timed = false;        // in timed_
  TimeUs timeout = 0;        // of the next kConnecting
  // kConnecting: when the timeout ends, by rounds_. kDraining: the same, by the clock. kDown: when to try again.
  TimeUs deadline = 0;
  TimeUs send_next = 0;      // kConnecting: when to repeat the request …
  TimeUs send_interval = 0;  // … and the time from that to the next one
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
  Message request;  // has the address for answers
  uint8_t reads = 0;
  uint32_t sequence = 0;
  bool probing = false;  // an empty write is outstanding, which checks whether the initiator is alive
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
  std::optional<std::unordered_set<uint64_t>> admitted_;  // instances; no value: all

  std::unordered_map<uint32_t, Link*> tags_;         // the links that have a queue pair
  std::unordered_map<uint64_t, Link*> connections_;  // the same links
  uint32_t tag_next_ = 1;

  size_t outstanding_ = 0;      // pieces at devices
  front::Turns<Peer> active_;   // peers in kUp with something to post
  std::vector<Link*> timed_;    // links in kConnecting, kDraining, kDown
  front::RoundClock rounds_;
  std::vector<PeerId> closed_;  // peers in kClosing
  front::Pool<Piece> pieces_;
  std::vector<LinkLoad> loads_;      // LinkForNext()'s scratch
  std::vector<pollfd> sleep_items_;  // Sleep()'s
  TimeUs busy_at_ = 0;               // when there was last work
  TimeUs events_next_ = 0;           // when to read the devices' events
  TimeUs stuck_next_ = 0;            // when to check for stuck links
  uint32_t polls_ = 0;
};

// Makes a reliable queue pair on the rail, not connected yet. `inline_bytes` (may be null) is set to the
// number of bytes that a put may carry in its work request.
Status MakeQueuePair(Rail* rail, Handle<ibv_qp>* queue_pair, uint32_t* inline_bytes);
// Connects it to the queue pair that `remote` names, a request or an acceptance. `sequence` is the number of
// its own first packet. Returns an errno.
int ConnectQueuePair(Rail* rail, ibv_qp* queue_pair, const Message& remote, uint32_t sequence,
                     uint8_t reads_served, uint8_t reads_made);
uint32_t NewSequence();

}  // namespace ropeteam::verbs

#endif  // ROPETEAM_TRANSPORT_VERBS_INTERNAL_H_
