// SPDX-License-Identifier: Apache-2.0
#include "core/engine/range_reader.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

RangeReader::Job* RangeReader::Find(uint64_t id) {
  const auto job = jobs_.find(id);
  return job == jobs_.end() ? nullptr : &job->second;
}

void RangeReader::Read(const Source& source, std::vector<PackedPart> parts, TimeUs deadline, Done done) {
  ROPETEAM_CHECK(!parts.empty() && parts.size() <= kPackedPartsMax);
  Job& job = jobs_[next_job_];
  job.id = next_job_++;
  job.result.read = job.id;
  job.source = source;
  job.deadline = deadline;
  job.done = std::move(done);
  for (PackedPart& part : parts) {
    Part& each = job.parts.emplace_back();
    each.pieces = std::move(part);
    each.bytes = each.pieces.bytes();
    ROPETEAM_CHECK(each.bytes != 0 || parts.size() == 1);
  }
  waiting_.push_back(job.id);
  StartWaiting();
}

void RangeReader::StartWaiting() {
  while (!waiting_.empty()) {
    Job* job = Find(waiting_.front());
    if (job == nullptr || job->over) {
      waiting_.pop_front();
      continue;
    }
    const size_t chunks = job->parts.front().bytes != 0 ? job->parts.size() : 0;
    if (bounces_ + chunks > kBouncesMax) return;
    waiting_.pop_front();
    if (chunks != 0) {
      Result<std::vector<Extent>> bounce = parts_.memory.Allocate(chunks);
      if (!bounce.ok()) {
        End(job, bounce.status());
        continue;
      }
      job->bounce = std::move(*bounce);
      bounces_ += chunks;
    }
    job->started = true;
    Pump(job->id);
  }
}

// Asks a holder for every part that has no holder yet.
void RangeReader::Pump(uint64_t id) {
  Job* job = Find(id);
  if (job == nullptr || job->over || !job->started) return;
  Context& context = parts_.context;
  size_t good = 0;
  for (size_t i = 0; i < job->parts.size(); ++i) {
    Part& part = job->parts[i];
    if (part.state == Part::State::kGood) ++good;
    if (part.state == Part::State::kAsked &&
        (!context.Contains(part.holder) || context.unreachable.contains(part.holder)))
      Fail(&part, false);
    if (part.state == Part::State::kWanted && part.next_send <= context.now && !Ask(job, &part)) {
      std::string tried = job->trouble.empty() ? "no holder is in reach" : job->trouble;
      return End(job, Error(Code::kUnavailable, "ranges of %s cannot be read: %s",
                            job->source.shard.ToString().c_str(), tried.c_str()));
    }
    if (part.state != Part::State::kAsked || part.next_send > context.now) continue;
    part.pause = std::min(kRepeatMaxUs, part.pause == 0 ? kRepeatUs : 2 * part.pause);
    part.next_send = context.now + part.pause;
    attempts_[part.number] = {id, i};
    context.Send(part.holder, RangesOpen{part.number, {job->source.shard}, job->source.content, part.pieces});
  }
  if (good != job->parts.size()) return;
  for (size_t i = 0; i < job->parts.size() && !job->bounce.empty(); ++i) {
    job->result.chunks.push_back(PlaceOf(*job, i));
    job->result.crcs.push_back(job->parts[i].crc);
  }
  End(job, OkStatus());
}

// Chooses the holder with the fewest parts of this read.
bool RangeReader::Ask(Job* job, Part* part) {
  const Context& context = parts_.context;
  size_t fewest = SIZE_MAX;
  for (const NodeId holder : job->source.holders) {
    if (holder == context.config.self || !context.Contains(holder) || context.unreachable.contains(holder) ||
        part->tried.contains(holder))
      continue;
    const auto busy = std::count_if(job->parts.begin(), job->parts.end(), [&](const Part& each) {
      return each.holder == holder && each.state != Part::State::kWanted;
    });
    if (static_cast<size_t>(busy) >= fewest) continue;
    fewest = static_cast<size_t>(busy);
    part->holder = holder;
  }
  if (fewest == SIZE_MAX) return false;
  part->state = Part::State::kAsked;
  part->number = next_number_++;
  part->next_send = context.now;
  part->pause = 0;
  return true;
}

void RangeReader::Fail(Part* part, bool again) {
  attempts_.erase(part->number);
  if (!again) part->tried.insert(part->holder);
  part->state = Part::State::kWanted;
  part->next_send = parts_.context.now + (again ? kRepeatUs : 0);
}

void RangeReader::OnGrant(NodeId from, const RangesGrant& grant) {
  Context& context = parts_.context;
  const auto attempt = attempts_.find(grant.read);
  Job* job = attempt == attempts_.end() ? nullptr : Find(attempt->second.first);
  if (job == nullptr) {
    if (grant.code == Code::kOk) context.Send(from, RangesClose{grant.read});
    return;
  }
  const size_t index = attempt->second.second;
  Part& part = job->parts[index];
  if (part.holder != from || part.state != Part::State::kAsked) return;
  const ShardMeta& meta = grant.meta;
  const uint64_t chunk_bytes = context.store.chunk_bytes();
  const uint64_t chunks = ChunksFor(meta.stream_bytes, chunk_bytes);
  const bool fits = meta.id == job->source.shard && meta.chunk_bytes == chunk_bytes && chunks != 0 &&
                    chunks <= kChunksPerShardMax && meta.manifest_offset < meta.stream_bytes &&
                    (job->source.content == 0 || job->source.content == grant.content);
  if (grant.code != Code::kOk || !fits) {
    job->trouble = context.NameOf(from) + ": " + (fits ? grant.message : "its copy is of another shard");
    if (grant.code == Code::kOk) context.Send(from, RangesClose{grant.read});
    Fail(&part, grant.code == Code::kUnavailable);
    return Pump(job->id);
  }
  job->result.meta = meta;
  job->result.content = grant.content;
  if (part.bytes == 0) {
    attempts_.erase(attempt);
    part.state = Part::State::kGood;
    return Pump(job->id);
  }
  part.state = Part::State::kReading;
  part.crc = grant.crc;
  ++job->outstanding;
  StartTransfer transfer;
  transfer.peer = from;
  transfer.get = true;
  transfer.local_offset = context.store.chunk_offset(PlaceOf(*job, index));
  transfer.remote_offset = grant.place;
  transfer.length = part.bytes;
  parts_.transfers.Start(
      Transfers::Priority::kFetch, transfer,
      [this, id = job->id, index](Code code, const EncryptedChunk*) { OnRead(id, index, code); });
}

void RangeReader::OnRead(uint64_t id, size_t index, Code code) {
  Job* job = Find(id);
  ROPETEAM_CHECK(job != nullptr && job->outstanding > 0 && job->parts[index].state == Part::State::kReading);
  Context& context = parts_.context;
  Part& part = job->parts[index];
  context.Send(part.holder, RangesClose{part.number});
  if (code == Code::kOk && !job->over) {
    const uint64_t offset = context.store.chunk_offset(PlaceOf(*job, index));
    parts_.transfers.Check(
        {{offset, part.bytes, part.crc}},
        [this, id, index](const std::vector<uint32_t>& bad) { OnChecked(id, index, bad.empty()); });
    return;
  }
  --job->outstanding;
  if (job->over) return Settle(id);
  ++context.local.reads_retried;
  context.out.suspicions.push_back({part.holder, std::string("a get failed: ") + CodeName(code)});
  job->trouble = context.NameOf(part.holder) + ": " + CodeName(code);
  Fail(&part, false);
  Pump(id);
}

void RangeReader::OnChecked(uint64_t id, size_t index, bool good) {
  Job* job = Find(id);
  ROPETEAM_CHECK(job != nullptr && job->outstanding > 0);
  --job->outstanding;
  if (job->over) return Settle(id);
  Context& context = parts_.context;
  Part& part = job->parts[index];
  if (good) {
    attempts_.erase(part.number);
    part.state = Part::State::kGood;
    context.counters.fetch_bytes += part.bytes;
    context.CountTraffic(part.holder, &PeerTraffic::fetched, part.bytes, 1);
    context.counters_dirty = true;
  } else {
    ++context.local.reads_retried;
    LOG_WARNING("ranges of %s from %s do not match their checksum", job->source.shard.ToString().c_str(),
                context.NameOf(part.holder).c_str());
    job->trouble = context.NameOf(part.holder) + ": checksum mismatch";
    Fail(&part, false);
  }
  Pump(id);
}

void RangeReader::End(Job* job, const Status& status) {
  ROPETEAM_CHECK(!job->over);
  job->over = true;
  job->released = !status.ok();
  for (const Part& part : job->parts) {
    // A part that is being read is closed after its get.
    if (part.state == Part::State::kAsked && part.bytes != 0 && attempts_.contains(part.number))
      parts_.context.Send(part.holder, RangesClose{part.number});
    attempts_.erase(part.number);
  }
  const uint64_t id = job->id;
  const Done done = std::move(job->done);
  const Bytes result = job->result;
  done(status, result);
  Settle(id);
}

void RangeReader::Release(uint64_t read) {
  Job* job = Find(read);
  if (job == nullptr) return;
  ROPETEAM_CHECK(job->over);
  job->released = true;
  Settle(read);
}

void RangeReader::Settle(uint64_t id) {
  Job* job = Find(id);
  if (job == nullptr || !job->over || !job->released || job->outstanding != 0) return;
  const uint64_t chunks = ChunkCount(job->bounce);
  ROPETEAM_CHECK(bounces_ >= chunks);
  bounces_ -= chunks;
  if (chunks != 0) parts_.context.store.Free(job->bounce);
  jobs_.erase(id);
  StartWaiting();
}

void RangeReader::OnView() {
  std::vector<uint64_t> ids;
  for (auto& [id, job] : jobs_) {
    ids.push_back(id);
    for (Part& part : job.parts) part.next_send = std::min(part.next_send, parts_.context.now);
  }
  for (const uint64_t id : ids) Pump(id);
}

void RangeReader::OnTimer() {
  std::vector<uint64_t> ids;
  for (const auto& [id, job] : jobs_) ids.push_back(id);
  for (const uint64_t id : ids) {
    Job* job = Find(id);
    if (job != nullptr && !job->over && job->deadline <= parts_.context.now) {
      End(job, Error(Code::kDeadlineExceeded, "ranges of %s were being read",
                     job->source.shard.ToString().c_str()));
    } else {
      Pump(id);
    }
  }
}

TimeUs RangeReader::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, job] : jobs_) {
    if (job.over) continue;
    due = std::min(due, job.deadline);
    for (const Part& part : job.parts)
      if (job.started && (part.state == Part::State::kWanted || part.state == Part::State::kAsked))
        due = std::min(due, part.next_send);
  }
  return due;
}

}  // namespace ropeteam::engine
