// SPDX-License-Identifier: Apache-2.0
//
// The network between the nodes: a struct of probabilities (options.h), and the current faults of each link.
// It carries
//
//  * messages, which may be lost, repeated, reordered, clogged, cut, or dropped by a reset of their link;
//  * packets of membership's connections, in order as over TCP; a cut loses them;
//  * transfers, which are one-sided copies between two arenas. A transfer lands in pieces, in any order. Each
//    piece reads its source when it lands. The transfer completes exactly once. If the initiator dies or a
//    put fails, pieces may still land for a while. A fabric that fences refuses the puts of a disconnected
//    peer. Another lets them land while the target's process lives, even if they were started long after.
//
// Endpoints are the hosts' indices; kCoordinatorHost is the coordinator's, kSecondCoordinatorHost that of a second one.

#ifndef ROPETEAM_TESTS_SIMULATION_NETWORK_H_
#define ROPETEAM_TESTS_SIMULATION_NETWORK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "tests/simulation/options.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

inline constexpr size_t kCoordinatorHost = SIZE_MAX;
inline constexpr size_t kSecondCoordinatorHost = SIZE_MAX - 1;

// A GPU's memory with the bytes of one save. It exists while a transfer reads it, as a dmabuf does.
struct DeviceMemory {
  std::string bytes;
  bool given_back = false;  // its owner writes to it again: no transfer may read it
};

// One running StartTransfer. Offsets are from the beginning of the host's memory.
struct Transfer {
  struct Piece {
    uint64_t begin = 0;  // within the transfer
    uint64_t length = 0;
    bool landed = false;
    std::string taken;  // an orphan's bytes, read when its initiator died
  };
  uint64_t number = 0;
  uint64_t tag = 0;
  size_t initiator = 0;
  NodeId initiator_id = kNoNode;
  size_t target = 0;
  NodeId target_id = kNoNode;
  bool get = false;
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  std::shared_ptr<const DeviceMemory> device;  // a put reads from this, not from the arena
  std::vector<Piece> pieces;
  size_t unlanded = 0;
  TimeUs posted_at = 0;
  bool orphan = false;     // no completion: the initiator is dead or has it already; pieces may still land
  bool finishing = false;  // its completion is scheduled; no piece lands any more

  // Where bytes come from and go to.
  size_t reader() const { return get ? target : initiator; }
  size_t writer() const { return get ? initiator : target; }
  uint64_t read_offset() const { return get ? remote_offset : local_offset; }
  uint64_t write_offset() const { return get ? local_offset : remote_offset; }
  std::string ToString() const;
};

// Calls of the network to the hosts at its ends.
class NetworkEnds {
 public:
  virtual ~NetworkEnds() = default;
  virtual bool Alive(size_t host, NodeId instance) const = 0;
  // Null: the range is not inside the host's memory.
  virtual std::byte* Memory(size_t host, uint64_t offset, uint64_t length) = 0;
  virtual void OnLanding(const Transfer& transfer, uint64_t offset,
                         const std::string& bytes) = 0;  // before it is done
  // A transfer reads from a GPU's memory.
  virtual void OnDeviceRead(const Transfer& transfer) = 0;
  virtual void OnTransferDone(size_t host, NodeId instance, uint64_t tag, Code code) = 0;
};

class Network {
 public:
  Network(Scheduler* scheduler, Random* random, const NetworkOptions& options, NetworkEnds* ends)
      : scheduler_(*scheduler), random_(*random), options_(options), ends_(*ends) {}

  // ---- messages and packets
  // `deliver` runs later, never inside this call; zero, one or two times.
  void PostMessage(size_t from, size_t to, std::function<void()> deliver);
  // In order within `connection`; lost only by a cut. `deliver` runs later.
  void PostPacket(size_t from, size_t to, const std::pair<NodeId, uint64_t>& connection,
                  std::function<void()> deliver);

  // ---- faults
  void Clog(size_t from, size_t to, TimeUs until);
  void Cut(size_t from, size_t to, TimeUs until);  // messages and transfers are lost
  void CutPath(size_t a, size_t b, TimeUs until);  // transfers fail between them, both ways; messages arrive
  void CutMessages(size_t a, size_t b, TimeUs until);  // messages are lost, both ways; transfers work
  void Reset(size_t a, size_t b);                      // drops the messages in flight between them
  bool IsCut(size_t from, size_t to) const;
  bool PathIsCut(size_t a, size_t b) const;  // for transfers
  void HealLinks() { links_.clear(); }
  void SetOptions(const NetworkOptions& options) { options_ = options; }
  const NetworkOptions& options() const { return options_; }

  // ---- transfers
  // No byte of it will land: the target is dead, the initiator has disconnected the target, or the target has
  // disconnected the initiator and the fabric fences.
  bool Refuses(const Transfer& transfer) const;
  // Assigns the transfer's number.
  void Start(Transfer transfer);
  uint64_t next_number() const { return next_transfer_; }
  // The instance's process is dead: its gets end, its puts become orphans, transfers to it fail.
  void OnInstanceDead(size_t host, NodeId instance);
  // The instance on `host` closes its connection to the departed one. True: that ends all transfers of the
  // latter.
  bool Disconnect(size_t host, NodeId instance, NodeId departed);
  // In the order of their numbers. For checks.
  const std::map<uint64_t, Transfer>& transfers() const { return transfers_; }
  // Calls `visit` for those with an end at `host`.
  template <typename Visit>
  void ForEachAt(size_t host, Visit visit) const {
    const auto at = at_host_.find(host);
    if (at == at_host_.end()) return;
    for (const uint64_t number : at->second) visit(transfers_.at(number));
  }

 private:
  struct Link {
    TimeUs clogged_until = 0;
    TimeUs cut_until = 0;
    TimeUs path_cut_until = 0;
    TimeUs messages_cut_until = 0;
    uint64_t resets = 0;
  };
  using LinkKey = std::pair<size_t, size_t>;

  const Link* Find(size_t from, size_t to) const;
  TimeUs Delay();
  void PostOnce(size_t from, size_t to, TimeUs extra, const std::function<void()>& deliver);
  void Land(uint64_t number, size_t piece, bool late);
  void Finish(Transfer* transfer, Code code, TimeUs delay);
  void Erase(uint64_t number);
  void Orphan(Transfer* transfer);
  void LeaveBehind(const Transfer& failed);
  // Null: there is nothing to read.
  const std::byte* Source(const Transfer& transfer, const Transfer::Piece& piece);

  Scheduler& scheduler_;
  Random& random_;
  NetworkOptions options_;
  NetworkEnds& ends_;
  std::map<LinkKey, Link> links_;
  std::map<std::pair<LinkKey, std::pair<NodeId, uint64_t>>, TimeUs> last_packet_;
  uint64_t next_transfer_ = 1;
  std::map<uint64_t, Transfer> transfers_;
  std::map<size_t, std::set<uint64_t>> at_host_;
  std::set<std::pair<NodeId, NodeId>> disconnected_;  // the first has disconnected the second
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_NETWORK_H_
