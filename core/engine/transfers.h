// SPDX-License-Identifier: Apache-2.0
//
// All transfers and checks leave the engine through this queue. The most urgent go first, and no more are outstanding
// than keep a link busy.
//
// In a job that encrypts, plaintext is never put. The chunk is encrypted into a bounce chunk of the arena, and the
// bounce chunk is put. The engine keeps its bounce chunks as long as it exists. A bounce chunk keeps its content until
// another chunk needs the place, so a second holder's put of the same chunk finds it encrypted.

#ifndef ROPETEAM_CORE_ENGINE_TRANSFERS_H_
#define ROPETEAM_CORE_ENGINE_TRANSFERS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

class Transfers {
 public:
  explicit Transfers(Context* context);

  enum class Priority : uint8_t { kFetch = 0, kSave = 1, kBackground = 2 };
  static constexpr size_t kPriorities = 3;
  // 32 chunks of 4 MiB are 128 MiB: 2.5 ms on a link of 400 Gbit/s. That is more than a round trip and the handling of
  // a completion.
  static constexpr size_t kOutstandingMax = 32;
  // The limit for background work: it must not slow saves and fetches.
  static constexpr size_t kBackgroundOutstandingMax = 4;
  // The size of all bounce chunks: some are filled while others are on their way. At least two chunks, and only a small
  // part of the arena.
  static constexpr uint64_t kBounceBytes = 32ull << 20;
  static constexpr uint64_t kBouncePartMax = 16;

  // A chunk that must be encrypted before it is put.
  struct Plaintext {
    ShardId shard;
    uint32_t chunk = 0;
    EncryptionSalt salt;
    uint32_t crc = 0;
  };
  // `encrypted` is null unless plaintext was put. kCorrupt, only for plaintext: the chunk did not match its checksum,
  // and no byte of it has left this node.
  using Done = std::function<void(Code, const EncryptedChunk* encrypted)>;
  // Assigns the transfer's tag and returns it.
  uint64_t Start(Priority priority, StartTransfer transfer, Done done,
                 std::optional<Plaintext> plaintext = {});
  // Cancels a transfer whose `done` was not called yet. Returns true if it had not left the engine; its `done` is then
  // never called.
  bool Withdraw(uint64_t tag);
  // Call this when the lease is valid again: starts the waiting puts.
  void Resume() { Pump(); }
  void OnDone(uint64_t tag, Code code);

  size_t waiting(Priority priority) const { return waiting_[static_cast<size_t>(priority)].size(); }
  size_t running() const { return running_.size(); }
  size_t checking() const { return checking_.size(); }
  uint64_t bounce_chunks() const { return bounces_.size(); }

  using Checked = std::function<void(const std::vector<uint32_t>& bad)>;
  using Encrypted =
      std::function<void(const std::vector<uint32_t>& bad, const std::vector<EncryptedChunk>& encrypted)>;
  void Check(std::vector<StartCheck::Range> ranges, Checked checked);
  void Encrypt(std::vector<StartCheck::Range> ranges, Encrypted encrypted);
  void OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad,
                   const std::vector<EncryptedChunk>& encrypted);

 private:
  struct Bounce {
    uint32_t place = 0;              // chunk of the arena
    std::optional<Plaintext> holds;  // the content now, or after encryption
    bool encrypting = false;
    EncryptedChunk encrypted;
    uint32_t users = 0;   // transfers that wait for it or run from it
    uint64_t wanted = 0;  // the value of wanted_ at the last use
  };
  struct Waiting {
    StartTransfer transfer;
    Done done;
    std::optional<Plaintext> plaintext;
    Bounce* bounce = nullptr;
  };
  struct Running {
    Priority priority;
    Done done;
    Bounce* bounce = nullptr;
  };
  struct Checking {
    size_t ranges;
    Encrypted checked;
  };
  void Pump();
  void AddBounces(size_t count);
  void Prepare(Priority priority);
  Bounce* BounceFor(const Plaintext& plaintext);
  void OnBounced(Bounce* bounce, bool good, const EncryptedChunk& encrypted);
  Context& context_;
  uint64_t next_tag_ = 1;
  std::deque<Waiting> waiting_[kPriorities];
  size_t running_background_ = 0;
  std::map<uint64_t, Running> running_;
  std::map<uint64_t, Checking> checking_;
  std::deque<Bounce> bounces_;  // pointers into it stay valid
  uint64_t wanted_ = 0;
};

// The range of the arena's memory in which the stream's chunk `index` lies.
StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_TRANSFERS_H_
