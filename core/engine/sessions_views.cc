// SPDX-License-Identifier: Apache-2.0
//
// Reads by the ranks of this node: views, whole and partial. sessions.cc has the rest of the sessions.
#include "core/engine/parts.h"
#include "core/engine/sessions.h"

namespace ropeteam::engine {

void Sessions::ViewOpen(SessionId id, RequestId request, Step step, Rank rank, TimeUs timeout_us,
                        bool partial) {
  const Session* session = &SessionOf(id);
  // An operator's session has no incarnation.
  if (session->is_rank() && Admitted(id, request) == nullptr) return;
  if (session->views.size() >= kViewsOpenMax)
    return AnswerStatusTo(
        id, request,
        Error(Code::kNoSpace, "%zu views are open, limit %zu", session->views.size(), kViewsOpenMax));
  const uint64_t pending = AddPending(id, request, Deadline(timeout_us));
  if (pending == 0) return;
  const LocateQuestion question{step, rank, 0, session->incarnation};
  parts_.asker.Ask(Question::Topic::kLocate, Encode(question), Deadline(timeout_us),
                   [this, pending, partial](const Result<std::string>& reply) {
                     LocateReply located;
                     if (reply.ok() && Decode(*reply, located, parts_.context.protocol))
                       return OpenLocated(pending, located, partial);
                     const std::optional<Pending> open = TakePending(pending);
                     if (!open) return;
                     AnswerStatusTo(open->session, open->request,
                                    reply.ok() ? Error(Code::kInternal, "the leader's answer cannot be read")
                                               : reply.status());
                   });
}

void Sessions::OpenLocated(uint64_t pending, const LocateReply& located, bool partial) {
  const Context& context = parts_.context;
  // Ranged reads need plaintext and protocol 9. Storage is read as a whole.
  const bool by_ranges = partial && !context.config.encrypts() && context.protocol >= 9 && !located.stored &&
                         context.store.Find(located.shard) == nullptr;
  const Origin origin = context.store.Find(located.shard) != nullptr ? Origin::kHere
                        : located.stored                             ? Origin::kStorage
                                                                     : Origin::kPeers;
  return by_ranges ? OpenPartly(pending, located) : OpenWhole(pending, located.shard, origin);
}

void Sessions::OpenPartly(uint64_t pending, const LocateReply& located) {
  const auto open = pending_.find(pending);
  if (open == pending_.end()) return;
  const RangeReader::Source source{located.shard, 0, located.holders};
  const auto described = [this, pending, source](const Status& status, const RangeReader::Bytes& bytes) {
    parts_.range_reader.Release(bytes.read);
    if (!status.ok()) return OpenWhole(pending, source.shard, Origin::kPeers);
    const std::optional<Pending> answered = TakePending(pending);
    if (!answered) return;
    const ViewId view = next_view_++;
    OpenView& opened = SessionOf(answered->session).views[view];
    opened = {source.shard, 0, source, bytes.meta, 0};
    opened.source->content = bytes.content;
    AnswerTo(answered->session, answered->request, AnswerView{view, bytes.meta, {}, {}, Origin::kPeers});
  };
  parts_.range_reader.Read(source, {PackedPart()}, open->second.deadline, described);
}

void Sessions::OpenWhole(uint64_t pending, const ShardId& shard, Origin origin) {
  if (const auto open = pending_.find(pending); open != pending_.end()) open->second.fetched = shard;
  const auto here = [this, pending, shard, origin](const Status& status) {
    const std::optional<Pending> open = TakePending(pending);
    if (!open) return;
    if (!status.ok()) return AnswerStatusTo(open->session, open->request, status);
    GrantView(open->session, open->request, shard, origin);
  };
  parts_.fetcher.Fetch(shard, [this, shard, here](const Status& status) {
    if (!status.ok() || !parts_.context.config.encrypts()) return here(status);
    parts_.converter.Convert(shard, kPlaintext, here);
  });
}

void Sessions::GrantView(SessionId id, RequestId request, const ShardId& shard, Origin origin) {
  Result<Store::LeaseToken> lease = parts_.context.store.Lease(shard);
  if (!lease.ok()) return AnswerStatusTo(id, request, lease.status());
  const SealedShard* sealed = parts_.context.store.Leased(*lease);
  ROPETEAM_CHECK(sealed != nullptr && sealed->meta.id == shard);
  const ViewId view = next_view_++;
  const bool fresh = SessionOf(id).views.try_emplace(view, OpenView{shard, *lease, {}, {}, 0}).second;
  ROPETEAM_CHECK(fresh);
  AnswerTo(id, request, AnswerView{view, sealed->meta, sealed->extents, sealed->crcs, origin});
}

void Sessions::ViewRepair(SessionId id, RequestId request, ViewId view, const std::vector<uint32_t>& chunks,
                          TimeUs timeout_us) {
  Session* session = &SessionOf(id);
  const auto open_view = session->views.find(view);
  if (open_view == session->views.end())
    return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such view is open"));
  if (open_view->second.source)
    return AnswerStatusTo(id, request, Error(Code::kInvalidArgument, "the view is partial: nothing is here"));
  const ShardId shard = open_view->second.shard;
  const SealedShard* sealed = parts_.context.store.Leased(open_view->second.lease);
  ROPETEAM_CHECK(sealed != nullptr && sealed->meta.id == shard);
  for (const uint32_t chunk : chunks)
    if (chunk >= sealed->crcs.size())
      return AnswerStatusTo(
          id, request,
          Error(Code::kInvalidArgument, "chunk %u of a shard of %zu", chunk, sealed->crcs.size()));
  // The shard was released, or moved to other chunks (converter.h).
  if (parts_.context.store.Find(shard) != sealed)
    return AnswerStatusTo(id, request,
                          Error(Code::kCorrupt, "%s is bad here and was released: nothing to repair it from",
                                shard.ToString().c_str()));
  const uint64_t pending = AddPending(id, request, Deadline(timeout_us));
  if (pending == 0) return;
  parts_.fetcher.Repair(shard, chunks, [this, pending](const Status& status) {
    const std::optional<Pending> open = TakePending(pending);
    if (open) AnswerStatusTo(open->session, open->request, status);
  });
}

void Sessions::ViewClose(SessionId id, ViewId view) {
  Session* session = &SessionOf(id);
  const auto open = session->views.find(view);
  if (open == session->views.end()) return;
  EndView(&open->second);
  session->views.erase(open);
}

void Sessions::EndView(OpenView* view) {
  if (!view->source) return parts_.context.store.EndLease(view->lease);
  if (view->read != 0) parts_.range_reader.Release(std::exchange(view->read, 0));
}

void Sessions::ViewRead(SessionId id, RequestId request, ViewId view, const std::vector<PackedPart>& parts,
                        TimeUs timeout_us) {
  Session* session = &SessionOf(id);
  const auto open = session->views.find(view);
  if (open == session->views.end() || !open->second.source)
    return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such partial view is open"));
  OpenView& opened = open->second;
  EndView(&opened);
  if (parts.empty()) return AnswerStatusTo(id, request, OkStatus());
  const bool valid =
      parts.size() <= kPackedPartsMax && std::all_of(parts.begin(), parts.end(), [&](const PackedPart& part) {
        return !part.pieces.empty() && ValidPart(part, opened.meta);
      });
  if (!valid)
    return AnswerStatusTo(
        id, request,
        Error(Code::kInvalidArgument, "the ranges do not fit %s", opened.shard.ToString().c_str()));
  if (parts_.context.store.Find(opened.shard) != nullptr || parts_.context.protocol < 9)
    return AnswerStatusTo(
        id, request, Error(Code::kUnavailable, "%s is to be opened whole", opened.shard.ToString().c_str()));
  const uint64_t pending =
      AddPending(id, request, Deadline(timeout_us), "ranges of the shard were being read");
  if (pending == 0) return;
  parts_.range_reader.Read(*opened.source, parts, Deadline(timeout_us),
                           [this, pending, view](const Status& status, const RangeReader::Bytes& bytes) {
                             OnRangesRead(pending, view, status, bytes);
                           });
}

void Sessions::OnRangesRead(uint64_t pending, ViewId view, const Status& status,
                            const RangeReader::Bytes& bytes) {
  const std::optional<Pending> asked = TakePending(pending);
  Session* session = asked ? &SessionOf(asked->session) : nullptr;
  const bool open = asked && session->views.contains(view);
  if (!status.ok() || !open) parts_.range_reader.Release(bytes.read);
  if (!asked) return;
  if (!status.ok() || !open)
    return AnswerStatusTo(asked->session, asked->request,
                          open ? status : Error(Code::kNotFound, "the view was closed"));
  OpenView& opened = session->views.at(view);
  EndView(&opened);  // of an overlapping read
  opened.read = bytes.read;
  AnswerTo(asked->session, asked->request, AnswerRanges{bytes.chunks, bytes.crcs});
}

}  // namespace ropeteam::engine
