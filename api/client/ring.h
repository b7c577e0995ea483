// SPDX-License-Identifier: Apache-2.0
//
// A queue in one block of memory that grows by doubling and never shrinks. Queuing up to the largest size so far
// allocates nothing, which std::deque does not guarantee. Not thread-safe.

#ifndef ROPETEAM_API_CLIENT_RING_H_
#define ROPETEAM_API_CLIENT_RING_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "core/base/check.h"

namespace ropeteam::client {

template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T& operator[](size_t index) { return slots_[(head_ + index) & (slots_.size() - 1)]; }
  T& front() { return (*this)[0]; }

  void push_back(T value) {
    if (size_ == slots_.size()) Grow();
    ++size_;
    (*this)[size_ - 1] = std::move(value);
  }
  T pop_front() {
    ROPETEAM_CHECK(size_ > 0);
    T value = std::move(front());
    head_ = (head_ + 1) & (slots_.size() - 1);
    --size_;
    return value;
  }

 private:
  void Grow() {
    std::vector<T> bigger(slots_.empty() ? 16 : slots_.size() * 2);  // powers of two: the mask above
    for (size_t i = 0; i < size_; ++i) bigger[i] = std::move((*this)[i]);
    slots_ = std::move(bigger);
    head_ = 0;
  }

  std::vector<T> slots_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_RING_H_
