// SPDX-License-Identifier: Apache-2.0
//
// Reads shards from other nodes: a whole shard into new chunks, or the bad chunks of a shard that is here, in place. It
// reads from all holders at once, with a few chunks outstanding at each, so a faster holder serves more chunks. Each
// chunk is checked before it counts. If a chunk fails the check, it is read from the next holder, and the sender gets a
// report.
//
// If no holder has a chunk, the shard is read from storage. The leader chooses one node at a time for this. If the load
// stalls or fails there, another node reads the shard, and this node fetches it from there; if no other node can, it
// tries again. A fetch fails if some chunk has been tried at every source; the error names all sources.
//
// In a job that encrypts, ciphertext is read and kept. If the copy here is plaintext, or encrypted with another key,
// each chunk is decrypted, and encrypted again, in place. Plaintext is never read from another node: if the holders have
// only plaintext or ciphertext of keys that are not here, one of them is asked to encrypt its copy. Storage has
// plaintext: a whole shard becomes a plaintext copy, which also replaces a ciphertext copy that no holder can repair.

#ifndef ROPETEAM_CORE_ENGINE_FETCHER_H_
#define ROPETEAM_CORE_ENGINE_FETCHER_H_

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Fetcher {
 public:
  explicit Fetcher(Parts* parts) : parts_(*parts) {}

  using Done = std::function<void(const Status&)>;
  // When `done` gets OK, the shard is sealed here and good. One fetch per shard: a second caller joins the first.
  void Fetch(const ShardId& shard, Done done);
  // Repairs these chunks, and any other bad ones, of a shard sealed here. One repair per shard: a call during a repair
  // adds its chunks to it.
  void Repair(const ShardId& shard, const std::vector<uint32_t>& chunks, Done done);

  // What the shard's fetch or repair is told to wait for, or what it has tried in vain; empty: nothing.
  std::string Trouble(const ShardId& shard) const;

  // `encryption` without tags in a job that encrypts: the holder's copy is plaintext.
  void OnGrant(NodeId from, const FetchGrant& grant, const Encryption& encryption);
  void OnView();
  void OnPeerLink() { PumpAll(); }
  void OnTimer() { PumpAll(); }
  TimeUs NextTimer() const;
  uint64_t allocated_chunks() const;

 private:
  // Chunks outstanding at each holder: two are enough for a fast link, four cover a slow completion.
  static constexpr uint32_t kOutstandingPerHolder = 4;
  static constexpr uint32_t kLocateRoundsMax = 3;
  // Attempts to read from storage, and the time between them. The sink retries each attempt for up to a minute. After
  // each, another node has some time to read the shard.
  static constexpr uint32_t kStorageTriesMax = 5;
  static constexpr TimeUs kStorageAgainUs = 1'000'000;
  static constexpr TimeUs kStandInUs = 3'000'000;

  struct Source {
    // kForeign: the holder's copy is plaintext, or encrypted with a key that is not here. It has not been asked to
    // encrypt it with one of the keys here.
    enum class State : uint8_t { kOpening, kOpen, kForeign, kFailed } state = State::kOpening;
    uint64_t chunks_begin = 0;  // of the holder's arena
    std::vector<Extent> extents;
    Encryption encryption;
    uint32_t outstanding = 0;
    TimeUs next_send = 0;
    TimeUs lost_since = 0;  // time of the first failed get since the last good one; 0: none
    std::string trouble;    // why it failed, or what it sent
  };
  // Storage as the last source of a fetch.
  struct StorageRead {
    enum class State : uint8_t { kNotAsked, kAsked, kOffered, kTried } state = State::kNotAsked;
    LocateReply offer;  // kOffered and kTried
    Status trouble;     // of the last attempt
    uint32_t tries = 0;
    TimeUs again_at = 0;        // after a failure that may pass
    uint64_t load = 0;          // number of the running load; 0: none
    bool load_stalled = false;  // another node is to load the shard
    bool load_failed = false;   // likewise, and this node is no longer loading it
    bool by_another() const { return load_stalled || load_failed; }
    bool tried() const { return state == State::kTried || tries != 0; }
  };
  struct Job {
    uint64_t id = 0;
    TimeUs begun = 0;
    ShardId shard;
    bool repair = false;
    bool locating = false;
    uint64_t question = 0;  // if locating
    uint32_t locate_rounds = 0;
    Store::LeaseToken lease = 0;  // repair: of the shard here
    std::vector<Extent> extents;  // here
    bool have_meta = false;
    ShardMeta meta;
    std::vector<uint32_t> crcs;
    Encryption encryption;                       // of the copy here
    std::optional<uint64_t> committed;           // the content of a marked copy, or of a copy on storage
    std::set<uint32_t> wanted;                   // chunks neither being read nor good
    std::set<uint32_t> busy;                     // repair: being looked at or read
    std::map<uint32_t, std::set<NodeId>> tried;  // chunk → holders that sent bad bytes
    std::map<NodeId, Source> sources;
    uint32_t outstanding = 0;  // transfers and checks
    StorageRead storage;
    bool corrupt = false;
    bool key_absent = false;    // a holder's copy is encrypted with a key that is not here
    bool looked_again = false;  // repair: chunks that no holder could serve were checked once more
    Status failure;             // if set: the job is ending and waits for outstanding operations
    bool failing = false;
    std::vector<Done> waiters;
  };

  Job* Find(uint64_t id);
  // A job outlives its outstanding transfers and checks.
  Job& Outstanding(uint64_t id);
  static Source& SourceOf(Job* job, NodeId holder);
  Job* Running(const ShardId& shard, bool repair);
  void Look(Job* job, const std::set<uint32_t>& suspects);
  void OnLooked(uint64_t id, const std::vector<uint32_t>& looked, const std::vector<uint32_t>& bad);
  // Whether the shard that a repair leases is still sealed here, and was not released meanwhile.
  bool StillHere(const Job& job) const;
  void Locate(Job* job);
  void OnLocated(uint64_t id, const Result<std::string>& reply);
  void Pump(uint64_t id);  // may end the job
  void PumpAll();
  // Whether the data path has lost the holder, so that the fetch waits for it.
  bool IsLost(NodeId holder) const;
  bool GiveOut(Job* job);  // false: no wanted chunk has a holder left to try
  void Start(Job* job, uint32_t chunk, NodeId holder);
  void FailRead(Source* source, NodeId holder, Code code);
  void OnRead(uint64_t id, uint32_t chunk, NodeId holder, Code code);
  // `encrypted`: the chunk, if it was encrypted again.
  void OnChecked(uint64_t id, uint32_t chunk, NodeId holder, bool good,
                 const std::vector<EncryptedChunk>& encrypted);
  bool AcceptMeta(Job* job, const FetchGrant& grant, const Encryption& encryption);
  // Whether the chunks here are or will be ciphertext.
  bool KeepsCiphertext(const Job& job) const;
  bool AskToEncrypt(Job* job);  // false: no such holder is left
  void DropCiphertext(Job* job);
  StartCheck::Range RangeFor(const Job& job, uint32_t chunk, const Source& from) const;
  bool AskStorage(Job* job);  // false: it has been tried, or there is none
  void LoadFromStorage(Job* job);
  void OnLoadStalled(uint64_t id);
  void AbandonLoad(Job* job);
  void OnLoaded(uint64_t id, const std::vector<uint32_t>& chunks, const Status& status,
                const LoadedChunks& loaded);
  bool AcceptLoaded(Job* job, const LoadedChunks& loaded);
  Status Explain(const Job& job) const;
  Status SealFetched(const Job& job);
  void End(uint64_t id, const Status& status);

  Parts& parts_;
  uint64_t next_job_ = 1;
  std::map<uint64_t, Job> jobs_;
  std::map<ShardId, uint64_t> by_shard_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_FETCHER_H_
