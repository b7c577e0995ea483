// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/network.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace ropeteam::simulation {
namespace {

// A fabric reports a dead peer within this time, as transport.h promises.
constexpr TimeUs kPeerGoneWithinUs = 100 * kMs;
// It reports a path that carries nothing as failed within this time.
constexpr TimeUs kLinkFailedWithinUs = 400 * kMs;
constexpr size_t kPiecesMax = 4;

}  // namespace

std::string Transfer::ToString() const {
  char text[200];
  std::snprintf(text, sizeof(text),
                "%s %" PRIu64 " tag %" PRIu64 " by host %zu local %" PRIu64 " host %zu remote %" PRIu64
                " length %" PRIu64 "%s",
                get ? "get" : "put", number, tag, initiator, local_offset, target, remote_offset, length,
                orphan ? " orphan" : "");
  return text;
}

const Network::Link* Network::Find(size_t from, size_t to) const {
  const auto at = links_.find({from, to});
  return at == links_.end() ? nullptr : &at->second;
}

TimeUs Network::Delay() {
  if (random_.Chance(options_.slow_ppm)) return random_.Between(options_.delay_max_us, options_.slow_max_us);
  return random_.Between(options_.delay_min_us, options_.delay_max_us);
}

bool Network::IsCut(size_t from, size_t to) const {
  const Link* link = Find(from, to);
  return link != nullptr && link->cut_until > scheduler_.now();
}

void Network::Clog(size_t from, size_t to, TimeUs until) {
  Link& link = links_[{from, to}];
  link.clogged_until = std::max(link.clogged_until, until);
}

bool Network::PathIsCut(size_t a, size_t b) const {
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    const Link* link = Find(from, to);
    if (IsCut(from, to) || (link != nullptr && link->path_cut_until > scheduler_.now())) return true;
  }
  return false;
}

void Network::CutPath(size_t a, size_t b, TimeUs until) {
  Link& link = links_[{a, b}];
  link.path_cut_until = std::max(link.path_cut_until, until);
}

void Network::CutMessages(size_t a, size_t b, TimeUs until) {
  for (const auto& ends : {LinkKey(a, b), LinkKey(b, a)}) {
    Link& link = links_[ends];
    link.messages_cut_until = std::max(link.messages_cut_until, until);
  }
}

void Network::Cut(size_t from, size_t to, TimeUs until) {
  Link& link = links_[{from, to}];
  link.cut_until = std::max(link.cut_until, until);
}

void Network::Reset(size_t a, size_t b) {
  ++links_[{a, b}].resets;
  ++links_[{b, a}].resets;
}

void Network::PostMessage(size_t from, size_t to, std::function<void()> deliver) {
  const Link* link = Find(from, to);
  if (link != nullptr && link->messages_cut_until > scheduler_.now()) return;
  if (IsCut(from, to) || random_.Chance(options_.loss_ppm)) return;
  PostOnce(from, to, 0, deliver);
  if (random_.Chance(options_.replay_ppm))
    PostOnce(from, to, random_.Below(2 * options_.slow_max_us + 1), deliver);
}

void Network::PostOnce(size_t from, size_t to, TimeUs extra, const std::function<void()>& deliver) {
  const Link* link = Find(from, to);
  TimeUs when = scheduler_.now() + Delay() + extra;
  if (link != nullptr && link->clogged_until > when) when = link->clogged_until + Delay();
  const uint64_t resets = link == nullptr ? 0 : link->resets;
  scheduler_.At(when, [this, from, to, resets, deliver] {
    const Link* now = Find(from, to);
    if (now != nullptr && now->resets != resets) return;
    deliver();
  });
}

void Network::PostPacket(size_t from, size_t to, const std::pair<NodeId, uint64_t>& connection,
                         std::function<void()> deliver) {
  if (IsCut(from, to)) return;
  TimeUs& last = last_packet_[{{from, to}, connection}];
  last = std::max(last, scheduler_.now() + random_.Between(options_.delay_min_us, options_.delay_max_us));
  const Link* link = Find(from, to);
  if (link != nullptr && link->clogged_until > last) last = link->clogged_until;
  scheduler_.At(last, std::move(deliver));
}

bool Network::Refuses(const Transfer& transfer) const {
  return !ends_.Alive(transfer.target, transfer.target_id) ||
         (options_.fences && disconnected_.contains({transfer.target_id, transfer.initiator_id})) ||
         disconnected_.contains({transfer.initiator_id, transfer.target_id});
}

void Network::Start(Transfer transfer) {
  transfer.number = next_transfer_++;
  transfer.posted_at = scheduler_.now();
  const uint64_t number = transfer.number;
  at_host_[transfer.initiator].insert(number);
  at_host_[transfer.target].insert(number);
  Transfer& stored = transfers_[number] = std::move(transfer);
  const size_t count =
      stored.length == 0 ? 1 : std::min<size_t>(random_.Between(1, kPiecesMax), stored.length);
  uint64_t begin = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t end = i + 1 == count ? stored.length : begin + (stored.length - begin) / (count - i);
    stored.pieces.push_back({begin, end - begin, false, {}});
    begin = end;
  }
  stored.unlanded = count;
  if (Refuses(stored)) {
    Finish(&stored, Code::kPeerGone, random_.Between(1, kPeerGoneWithinUs));
    return;
  }
  if (PathIsCut(stored.initiator, stored.target)) {
    Finish(&stored, Code::kLinkFailed, random_.Between(kLinkFailedWithinUs / 8, kLinkFailedWithinUs));
    return;
  }
  const Link* link = Find(stored.initiator, stored.target);
  const TimeUs start = link == nullptr ? scheduler_.now() : std::max(link->clogged_until, scheduler_.now());
  for (size_t i = 0; i < count; ++i)
    scheduler_.At(start + random_.Between(options_.transfer_min_us, options_.transfer_max_us),
                  [this, number, i] { Land(number, i, false); });
  if (random_.Chance(options_.transfer_fail_ppm)) {
    scheduler_.At(start + random_.Between(options_.transfer_min_us, options_.transfer_max_us),
                  [this, number] {
                    const auto at = transfers_.find(number);
                    if (at == transfers_.end() || at->second.finishing || at->second.orphan) return;
                    if (!at->second.get) LeaveBehind(at->second);
                    Finish(&at->second, Code::kLinkFailed, random_.Below(options_.transfer_max_us));
                  });
  }
}

void Network::Land(uint64_t number, size_t index, bool late) {
  const auto at = transfers_.find(number);
  if (at == transfers_.end() || at->second.finishing || at->second.orphan != late) return;
  Transfer& transfer = at->second;
  Transfer::Piece& piece = transfer.pieces[index];
  if (piece.landed) return;
  piece.landed = true;
  --transfer.unlanded;
  const bool orphan = transfer.orphan;
  const std::byte* source = orphan ? nullptr : Source(transfer, piece);
  std::byte* target = ends_.Memory(transfer.writer(), transfer.write_offset() + piece.begin, piece.length);
  if (target == nullptr || (source == nullptr && !orphan)) {
    if (orphan) return Erase(number);
    return Finish(&transfer, Code::kInvalidArgument, 1);
  }
  std::string bytes = std::move(piece.taken);
  if (!orphan) bytes.assign(reinterpret_cast<const char*>(source), piece.length);
  if (!bytes.empty()) {
    if (options_.wire_flip_ppm != 0 && random_.Chance(options_.wire_flip_ppm)) {
      const uint64_t bit = random_.Below(bytes.size() * 8);
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    }
    ends_.OnLanding(transfer, transfer.write_offset() + piece.begin, bytes);
    std::memcpy(target, bytes.data(), bytes.size());
  }
  if (transfer.unlanded != 0) return;
  if (orphan) return Erase(number);
  Finish(&transfer, Code::kOk, random_.Between(1, options_.transfer_min_us + 1));
}

const std::byte* Network::Source(const Transfer& transfer, const Transfer::Piece& piece) {
  if (transfer.device == nullptr)
    return ends_.Memory(transfer.reader(), transfer.read_offset() + piece.begin, piece.length);
  ends_.OnDeviceRead(transfer);
  return reinterpret_cast<const std::byte*>(transfer.device->bytes.data()) + transfer.local_offset +
         piece.begin;
}

void Network::Finish(Transfer* transfer, Code code, TimeUs delay) {
  if (transfer->finishing) return;
  transfer->finishing = true;
  const uint64_t number = transfer->number;
  scheduler_.After(delay, [this, number, code] {
    const auto at = transfers_.find(number);
    if (at == transfers_.end()) return;
    const Transfer done = at->second;
    Erase(number);
    if (!done.orphan) ends_.OnTransferDone(done.initiator, done.initiator_id, done.tag, code);
  });
}

void Network::Erase(uint64_t number) {
  const auto at = transfers_.find(number);
  at_host_[at->second.initiator].erase(number);
  at_host_[at->second.target].erase(number);
  transfers_.erase(at);
}

// The source memory of a dead process, or of a put that was reported as failed, may be reused at once. So the
// bytes that the card still has are copied now. None of them lands later than zombie_max_us after the post.
void Network::Orphan(Transfer* transfer) {
  const uint64_t number = transfer->number;
  transfer->orphan = true;
  transfer->unlanded = 0;
  const TimeUs gone_at = transfer->posted_at + options_.zombie_max_us;
  const TimeUs left = gone_at > scheduler_.now() ? gone_at - scheduler_.now() : 0;
  for (size_t i = 0; i < transfer->pieces.size(); ++i) {
    Transfer::Piece& piece = transfer->pieces[i];
    if (piece.landed) continue;
    const std::byte* source = Source(*transfer, piece);
    if (source == nullptr || left == 0 || !random_.Chance(options_.zombie_ppm)) {
      piece.landed = true;
      continue;
    }
    piece.taken.assign(reinterpret_cast<const char*>(source), piece.length);
    ++transfer->unlanded;
    scheduler_.After(random_.Between(1, left), [this, number, i] { Land(number, i, true); });
  }
}

// For a failed put of a living initiator: pieces that are still in flight land after the failure was
// reported.
void Network::LeaveBehind(const Transfer& failed) {
  const uint64_t number = next_transfer_++;
  Transfer& stray = transfers_[number] = failed;
  stray.number = number;
  at_host_[stray.initiator].insert(number);
  at_host_[stray.target].insert(number);
  Orphan(&stray);
  if (stray.unlanded == 0) Erase(number);
}

void Network::OnInstanceDead(size_t host, NodeId instance) {
  const auto at = at_host_.find(host);
  if (at == at_host_.end()) return;
  const std::vector<uint64_t> numbers(at->second.begin(), at->second.end());
  for (const uint64_t number : numbers) {
    Transfer& transfer = transfers_.at(number);
    const bool by_it = transfer.initiator == host && transfer.initiator_id == instance;
    const bool to_it = transfer.target == host && transfer.target_id == instance;
    if (to_it && (by_it || transfer.orphan)) {
      Erase(number);  // its memory is no longer registered with any card
    } else if (to_it) {
      Finish(&transfer, Code::kPeerGone, random_.Between(1, kPeerGoneWithinUs));
    } else if (by_it && !transfer.orphan) {
      if (transfer.get || transfer.finishing) {
        Erase(number);
        continue;
      }
      Orphan(&transfer);
      if (transfer.unlanded == 0) Erase(number);
    }
  }
}

bool Network::Disconnect(size_t host, NodeId instance, NodeId departed) {
  disconnected_.insert({instance, departed});
  const auto at = at_host_.find(host);
  if (at == at_host_.end()) return options_.fences;
  const std::vector<uint64_t> numbers(at->second.begin(), at->second.end());
  for (const uint64_t number : numbers) {
    Transfer& transfer = transfers_.at(number);
    if (transfer.initiator == host && transfer.target_id == departed && !transfer.orphan) {
      Finish(&transfer, Code::kPeerGone, random_.Between(1, kPeerGoneWithinUs));
    } else if (transfer.target == host && transfer.initiator_id == departed && options_.fences) {
      if (transfer.orphan) {
        Erase(number);
      } else {
        Finish(&transfer, Code::kPeerGone, random_.Between(1, kPeerGoneWithinUs));
      }
    }
  }
  return options_.fences;
}

}  // namespace ropeteam::simulation
