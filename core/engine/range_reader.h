// SPDX-License-Identifier: Apache-2.0
//
// The reader's side of ranged reads. It asks holders for parts of a shard that is not here, gets the packed parts into
// bounce chunks of this arena, and checks them. It asks all holders at once, each for other parts. A holder that
// refuses, leaves, or sends bytes with a wrong checksum is not asked for that part again. If no holder can serve a
// part, the read fails. The caller can then fetch the whole shard from any source (fetcher.h).

#ifndef ROPETEAM_CORE_ENGINE_RANGE_READER_H_
#define ROPETEAM_CORE_ENGINE_RANGE_READER_H_

#include <deque>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class RangeReader {
 public:
  explicit RangeReader(Parts* parts) : parts_(*parts) {}

  struct Source {
    ShardId shard;
    uint64_t content = 0;  // 0: any
    std::vector<NodeId> holders;
  };
  struct Bytes {
    uint64_t read = 0;             // for Release(), also after an error
    std::vector<uint32_t> chunks;  // one per part, of this arena; they belong to the caller until Release()
    std::vector<uint32_t> crcs;
    ShardMeta meta;  // of a read without pieces
    uint64_t content = 0;
  };
  using Done = std::function<void(const Status&, const Bytes&)>;
  // Either all parts have pieces, or there is one part without pieces: it requests only meta and content. `done` is
  // called once, at the deadline at the latest. kUnavailable: no holder can serve some part; kNoSpace;
  // kDeadlineExceeded.
  void Read(const Source& source, std::vector<PackedPart> parts, TimeUs deadline, Done done);
  void Release(uint64_t read);

  void OnGrant(NodeId from, const RangesGrant& grant);
  void OnView();
  void OnTimer();
  TimeUs NextTimer() const;
  uint64_t allocated_chunks() const { return bounces_; }

 private:
  // Bounce chunks for all ranks of this node: 8 ranks may read at once, others wait.
  static constexpr uint64_t kBouncesMax = 8 * kPackedPartsMax;

  struct Part {
    enum class State : uint8_t { kWanted, kAsked, kReading, kGood } state = State::kWanted;
    PackedPart pieces;
    uint64_t bytes = 0;
    uint64_t number = 0;  // of the attempt
    NodeId holder = kNoNode;
    std::set<NodeId> tried;
    TimeUs next_send = 0;
    TimeUs pause = 0;
    uint32_t crc = 0;
  };
  struct Job {
    uint64_t id = 0;
    Source source;
    std::vector<Part> parts;
    std::vector<Extent> bounce;
    bool started = false;
    bool over = false;         // `done` was called
    bool released = false;     // free the bounce chunks when nothing is outstanding
    uint32_t outstanding = 0;  // transfers and checks
    TimeUs deadline = 0;
    std::string trouble;
    Bytes result;
    Done done;
  };
  Job* Find(uint64_t id);
  void StartWaiting();
  void Pump(uint64_t id);          // may end the job
  bool Ask(Job* job, Part* part);  // false: no holder is left
  void Fail(Part* part, bool again);
  void OnRead(uint64_t id, size_t index, Code code);
  void OnChecked(uint64_t id, size_t index, bool good);
  void End(Job* job, const Status& status);
  void Settle(uint64_t id);  // frees what is released
  uint32_t PlaceOf(const Job& job, size_t index) const { return ChunkAt(job.bounce, index); }

  Parts& parts_;
  uint64_t next_job_ = 1;
  uint64_t next_number_ = 1;
  std::map<uint64_t, Job> jobs_;
  // jobs waiting for bounce chunks; may contain jobs that are gone
  std::deque<uint64_t> waiting_;
  std::map<uint64_t, std::pair<uint64_t, size_t>> attempts_;  // by number of the attempt: job and part
  uint64_t bounces_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_RANGE_READER_H_
