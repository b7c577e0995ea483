// SPDX-License-Identifier: Apache-2.0
//
// Several endpoints as one transport: one for each network card of the host, as EFA requires, or for each given
// address. Each rail is an OfiTransport of its own; this class cuts operations into pieces and
// gives each to the link that would finish it first.
//
// A rail that loses a peer is left out for that peer until Connect() is called again, and the other rails check
// whether the peer is alive. If it is not, all operations end with kPeerGone. If it is, the gets that the lost rail
// had outstanding are repeated over the others. A piece of a get that fails with kLinkFailed on a rail whose link was
// re-established is repeated once over another rail: if the piece itself is the cause, it fails again. So nothing is
// retried for ever, and each operation completes once: a piece is at one rail only.
//
// A put that was at a rail ends with kLinkFailed, because the network may deliver bytes of a first attempt long after a
// second one has completed, to memory that was reused by then. Only core can prevent the reuse, by its quarantine, and
// it does so because it is told of the failure. transport/verbs also repeats puts, because there the peer confirms that
// it has closed the connection.

#ifndef ROPETEAM_TRANSPORT_OFI_RAILS_H_
#define ROPETEAM_TRANSPORT_OFI_RAILS_H_

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/front/front.h"
#include "transport/ofi/codec.h"
#include "transport/ofi/internal.h"
#include "transport/rails.h"

namespace ropeteam::ofi {

// The configurations of the rails that `config` comes to: one for each address or device named where several
// are, or for each device of a provider without IP addresses, those of this thread's NUMA node first, at most
// kRailsMax. Empty: one endpoint will do.
std::vector<OfiConfig> RailsOf(const OfiConfig& config);

namespace rails {

// A region's registration with one rail, which ends with this.
class Registration {
 public:
  Registration(OfiTransport* rail, RegionId id) : rail_(rail), id_(id) {}
  ~Registration() {
    if (rail_ != nullptr) (void)rail_->DeregisterRegion(id_);  // refused only while the transport ends
  }
  Registration(Registration&& other) noexcept : rail_(other.rail_), id_(other.id_) { other.rail_ = nullptr; }
  Registration& operator=(Registration&&) = delete;
  RegionId id() const { return id_; }

 private:
  OfiTransport* rail_;
  RegionId id_;
};

struct Region : front::LocalRegion {
  uint64_t base = 0;                // what the provider adds remote offsets to
  std::vector<Registration> rails;  // by rail
};

struct RemoteRegion : front::PeerRegion {
  std::vector<RemoteRegionId> links;  // by link of the peer
};

struct Operation : front::Accepted<Operation, Region, RemoteRegion> {
  uint32_t pieces = 0;  // cut and not yet done: at a rail, or to be redone
};

struct Peer;

struct Link {
  Peer* peer = nullptr;
  size_t index = 0;  // of the peer's
  size_t rail = 0;
  PeerId id = 0;        // of the peer, by the rail's count
  uint64_t mbps = 0;    // of the slower end
  uint32_t pieces = 0;  // at the rail
  bool down = false;    // the rail has lost the peer …
  bool told = false;    // … which has been logged
};

// A part of an operation, which one rail carries out.
struct Piece {
  Piece* next = nullptr;
  Operation* operation = nullptr;
  Link* link = nullptr;  // where it is, or has been
  uint64_t offset = 0;   // in the operation
  uint64_t length = 0;
  bool suspected = false;  // it has failed once while its link was up
};

// kJudged: a rail has lost it, and the others check whether it is alive.
enum class State : uint8_t { kUp, kJudged, kGone, kClosing };

struct Peer {
  PeerId id = 0;
  State state = State::kUp;
  size_t rails = 0;  // of its own
  uint64_t instance = 0;
  std::vector<Link> links;
  size_t disconnecting = 0;  // links
  front::Queue<Operation> queue;
  front::List<Piece> redo;
  front::List<Operation> pending;  // failed, waiting until the peer was checked
  bool listed = false;

  bool gone() const { return state == State::kGone; }
  bool closing() const { return state == State::kClosing; }
};

}  // namespace rails

class OfiRails final : public front::Front<OfiRails, rails::Peer, rails::Operation> {
 public:
  static Result<std::unique_ptr<Transport>> Create(const std::vector<OfiConfig>& configs);
  ~OfiRails() override;

  Result<RegionId> RegisterDmabuf(int fd, uint64_t offset, uint64_t length) override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;

 private:
  friend Front;
  using Link = rails::Link;
  using Operation = rails::Operation;
  using Peer = rails::Peer;
  using Piece = rails::Piece;
  using State = rails::State;

  OfiRails() = default;
  void NameSelf();
  Status MapRegion(rails::Region* region, void* base);
  template <typename Register>
  Status RegisterWithRails(rails::Region* region, Register with);
  std::string EncodeKey(const rails::Region& region) const;
  Status DecodeKey(const Peer& peer, const std::string& bytes, rails::RemoteRegion* remote);
  void Start(Peer* peer) { working_.Add(peer); }
  void Progress();
  bool Busy(TimeUs now) const;
  void Sleep(TimeUs now, uint64_t timeout_us);
  void OnRail(size_t rail, const Completion& completion);
  bool Redo(Piece* piece, Code code);
  void FailPiece(Piece* piece, Code code);
  void Settle(Peer* peer, Operation* operation);
  void LoseLink(Link* link);
  void Judge(Peer* peer);
  void GiveUp(Peer* peer, State state);
  void Pump();
  bool PostNext(Peer* peer);
  Piece* NextPiece(Peer* peer);
  void FinishDisconnect(Peer* peer);

  uint64_t instance_ = 0;
  uint32_t depth_ = 0;
  std::vector<std::unique_ptr<OfiTransport>> rails_;
  std::vector<uint64_t> rail_bytes_;  // outstanding, by rail
  std::vector<uint32_t> rail_mbps_;
  std::vector<std::unordered_map<PeerId, Peer*>> by_rail_;  // by the rail's count

  uint32_t judged_ = 0;         // peers in kJudged
  front::Turns<Peer> working_;  // peers with something to post
  front::Pool<Piece> pieces_;
  std::vector<LinkLoad> loads_;      // PostNext()'s scratch
  std::vector<pollfd> sleep_items_;  // Sleep()'s, and where each rail's begin
  std::vector<size_t> sleep_begins_;
};

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_RAILS_H_
