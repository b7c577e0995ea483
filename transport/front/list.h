// SPDX-License-Identifier: Apache-2.0
//
// Lists and pools that stop allocating at their high-water mark, and a round-robin over peers. Only the loop's thread
// uses them.

#ifndef ROPETEAM_TRANSPORT_FRONT_LIST_H_
#define ROPETEAM_TRANSPORT_FRONT_LIST_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

namespace ropeteam::front {

// First in, first out, linked by the elements' own `next`: an element is in one list at a time. It owns nothing.
template <typename T>
class List {
 public:
  bool empty() const { return head_ == nullptr; }
  T* head() const { return head_; }
  void Push(T* element) {
    element->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = element;
    tail_ = element;
  }
  T* Pop() {  // not of an empty one
    T* element = head_;
    head_ = element->next;
    element->next = nullptr;
    return element;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
};

// Elements in slabs that live as long as the pool, so that a late callback still has valid memory behind its pointer.
template <typename T>
class Pool {
 public:
  T* New() {  // initialised as T{}
    if (free_.empty()) {
      slabs_.push_back(std::make_unique<T[]>(kPerSlab));
      for (size_t i = 0; i < kPerSlab; i++) free_.Push(&slabs_.back()[i]);
    }
    T* element = free_.Pop();
    *element = T{};
    return element;
  }
  void Free(T* element) { free_.Push(element); }

 private:
  static constexpr size_t kPerSlab = 512;  // ten to a hundred kilobytes, depending on T
  std::vector<std::unique_ptr<T[]>> slabs_;
  List<T> free_;
};

// A round-robin over the peers that have something to post. `Peer` has `bool listed`, which only this class uses.
template <typename Peer>
class Turns {
 public:
  void Add(Peer* peer) {
    if (peer->listed) return;
    peer->listed = true;
    peers_.push_back(peer);
  }
  void Remove(Peer* peer) {
    if (!peer->listed) return;
    peer->listed = false;
    peers_.erase(std::find(peers_.begin(), peers_.end(), peer));
  }
  bool empty() const { return peers_.empty(); }
  auto begin() const { return peers_.begin(); }
  auto end() const { return peers_.end(); }

  // Calls `post(peer)` for each peer, round-robin, until a whole round has posted nothing. `post` returns whether it
  // has posted. A peer that is `done(peer)` afterwards is removed. `post` may add and remove peers, its own included.
  template <typename Post, typename Done>
  void Go(Post post, Done done) {
    size_t idle_turns = 0;
    while (idle_turns < peers_.size()) {
      if (next_ >= peers_.size()) next_ = 0;
      Peer* peer = peers_[next_];
      const bool posted = post(peer);
      if (posted) idle_turns = 0;
      if (next_ >= peers_.size() || peers_[next_] != peer) continue;  // `post` has removed the peer
      if (done(peer)) {
        Remove(peer);  // the next one takes its place
      } else {
        next_++;
        if (!posted) idle_turns++;
      }
    }
  }

 private:
  std::vector<Peer*> peers_;
  size_t next_ = 0;
};

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_LIST_H_
