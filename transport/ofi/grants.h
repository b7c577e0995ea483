// SPDX-License-Identifier: Apache-2.0
//
// Which peers may reach this node's memory, where a provider lets us choose memory keys and registers without
// pinning (tcp). Every peer gets keys of its own, one for each region, made from the region's exported key and
// the peer's instance number. Disconnect() revokes the peer's keys: the provider then refuses what the peer
// sends, over whichever connection, also over one that libfabric makes by itself.
//
// A peer asks for its keys with a knock: a key request, sent over the connection that it is going to use. The
// answer, the reply, is the peer's instance number in a table that the peer reads. A revoked peer gets no
// answer until Connect() names it again. One that SetPeers() did not name gets none either, and is not remembered: anyone
// who reaches the port can knock.
//
//   state      means                                  knock     leaves when
//   (unknown)  has never asked, or was not named      granted   knock of one that is named -> granted; Disconnect() -> revoked
//   granted    its keys are registered                renewed   Disconnect() -> revoked; SetPeers() without it -> (unknown)
//   revoked    none of its keys is registered         ignored   Connect() -> (unknown)
//
// A fragment whose key was checked before the revocation may still be arriving. Its connection must be ended,
// too; Owns() tells which connections may be left alone.
//
// Loop thread, except for AddRegion() and RemoveRegion().

#ifndef ROPETEAM_TRANSPORT_OFI_GRANTS_H_
#define ROPETEAM_TRANSPORT_OFI_GRANTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/base/status.h"
#include "core/base/view.h"

namespace ropeteam::ofi {

// Answers in the table. A peer reads kAnswerWindow of them, from the place that its instance number says.
inline constexpr size_t kAnswers = 64 * 1024;
inline constexpr size_t kAnswerWindow = 16;
static_assert(kAnswers >= 4 * kNodesMax);  // so that a full window is very unlikely
// Revoked peers that are remembered: all members that have left during the job. The oldest is forgotten
// first.
inline constexpr size_t kRevokedMax = 64 * 1024;
// Connections of one peer that are remembered: one in use, and those before it that may still be closing.
inline constexpr size_t kSourcesMax = 8;

inline constexpr uint64_t kKnockMagic = 0x6b636f6e6b745452;  // "RTtknock"
struct Knock {
  uint64_t magic = 0;
  uint64_t instance = 0;
  char source[48] = {};  // the sender's end of the connection, "127.0.0.1:40000"; empty: unknown
};
static_assert(sizeof(Knock) == 64);  // what tcp;ofi_rxm sends without a completion

// SipHash-2-4 of eight bytes, little-endian (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012).
uint64_t SipHash24(uint64_t key_low, uint64_t key_high, uint64_t message);
// The key by which `instance` reaches the region that is exported under `key`. Keys travel in clear over tcp: from one that
// was seen, neither `key` nor another instance's follows.
uint64_t KeyOf(uint64_t key, uint64_t instance);
// Where the answers to `instance` begin; kAnswerWindow of them follow.
size_t AnswerPlace(uint64_t instance);
// Whether the window read from there says that the keys are registered.
bool Answered(const uint64_t* window, uint64_t instance);

class Grants {
 public:
  // One registration; destroying it revokes the key.
  using Registration = std::shared_ptr<void>;
  using Register = std::function<Result<Registration>(void* base, uint64_t length, uint64_t key)>;

  explicit Grants(Register register_memory)
      : register_(std::move(register_memory)), answers_(kAnswers + kAnswerWindow) {}

  // What peers read; registered by the owner, for reading only.
  const std::vector<uint64_t>& answers() const { return answers_; }

  // Any thread. Registers the region for every peer that has been granted access, and later ones.
  Status AddRegion(uint64_t key, void* base, uint64_t length);
  // Any thread. Afterwards no peer reaches the region.
  void RemoveRegion(uint64_t key);

  // A knock has arrived. False: it is not answered, because the peer is revoked or a key cannot be registered.
  bool OnKnock(const Knock& knock);
  // Only these instances have keys from now on, or get them.
  void Admit(std::unordered_set<uint64_t> instances);
  // No key of the peer's is valid afterwards, and none will be until Readmit().
  void Revoke(uint64_t instance);
  void Readmit(uint64_t instance);
  // Whether the connection from `source` belongs to a peer that may reach our memory.
  bool Owns(const std::string& source) const;
  size_t peers() const { return peers_.size(); }  // that have keys

  Grants(const Grants&) = delete;
  Grants& operator=(const Grants&) = delete;

 private:
  struct Exported {
    void* base = nullptr;
    uint64_t length = 0;
  };
  struct Peer {
    uint64_t* answer = nullptr;
    std::deque<std::string> sources;                     // the newest last
    std::unordered_map<uint64_t, Registration> regions;  // by exported key; guarded by mutex_
  };

  uint64_t* FreeAnswer(uint64_t instance);
  void Drop(uint64_t instance);
  void Attribute(uint64_t instance, Peer* peer, const std::string& source);

  const Register register_;
  std::vector<uint64_t> answers_;
  std::unordered_map<std::string, uint64_t> owners_;      // of connections, by source
  std::optional<std::unordered_set<uint64_t>> admitted_;  // no value: everybody
  std::unordered_set<uint64_t> revoked_;
  std::deque<uint64_t> revoked_order_;

  std::mutex mutex_;                                 // AddRegion() and RemoveRegion() against the rest
  std::unordered_map<uint64_t, Exported> exported_;  // by exported key; guarded by mutex_
  std::unordered_map<uint64_t, Peer> peers_;         // by instance; changed under mutex_
};

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_GRANTS_H_
