// SPDX-License-Identifier: Apache-2.0
#include "node/check_workers.h"

#include <algorithm>

#include "core/base/checksum.h"

namespace ropeteam {

CheckWorkers::CheckWorkers(std::span<std::byte> memory, std::shared_ptr<const ReplicaCipher> cipher,
                           uint32_t threads, Done done)
    : memory_(memory), cipher_(std::move(cipher)), done_(std::move(done)) {
  for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

CheckWorkers::~CheckWorkers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CheckWorkers::Submit(StartCheck check) {
  if (check.ranges.empty()) {
    done_(check.tag, {}, {});
    return;
  }
  auto job = std::make_shared<Job>();
  job->remaining = check.ranges.size();
  const StartCheck::Range& first = check.ranges[0];
  if (first.pack || (first.cipher && first.cipher->to_key != kPlaintext))
    job->encrypted.resize(check.ranges.size());
  job->check = std::move(check);
  const bool many = job->remaining > 1;
  Add(std::move(job), many);
}

void CheckWorkers::Run(std::function<void()> task) {
  auto job = std::make_shared<Job>();
  job->task = std::move(task);
  Add(std::move(job), false);
}

void CheckWorkers::Add(std::shared_ptr<Job> job, bool many) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  if (many) {
    wake_.notify_all();
  } else {
    wake_.notify_one();
  }
}

bool CheckWorkers::Matches(const StartCheck::Range& range, EncryptedChunk* encrypted) const {
  const auto in_memory = [&](uint64_t offset) {
    return offset <= memory_.size() && range.length <= memory_.size() - offset;
  };
  if (!in_memory(range.offset)) return false;
  if (range.cipher)
    return cipher_ != nullptr && in_memory(range.cipher->to) &&
           cipher_->CarryOut(memory_.data(), range, encrypted);
  std::byte* const memory = memory_.data();
  if (!range.pack) return Crc32c(memory + range.offset, range.length) == range.crc;
  return PackIfGood(memory + range.pack->to, memory + range.offset, range.length, range.crc,
                    range.pack->pieces, &encrypted->crc);
}

void CheckWorkers::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Job> job = jobs_.front();
    if (job->task) {
      jobs_.pop_front();
      lock.unlock();
      job->task();
      lock.lock();
      continue;
    }
    const auto index = static_cast<uint32_t>(job->next++);
    if (job->next == job->check.ranges.size()) jobs_.pop_front();
    lock.unlock();
    EncryptedChunk encrypted;
    const bool good = Matches(job->check.ranges[index], &encrypted);
    lock.lock();
    if (!job->encrypted.empty()) job->encrypted[index] = encrypted;
    if (!good) job->bad.push_back(index);
    if (--job->remaining != 0 || stop_) continue;
    lock.unlock();
    std::sort(job->bad.begin(), job->bad.end());
    done_(job->check.tag, std::move(job->bad), std::move(job->encrypted));
    lock.lock();
  }
}

}  // namespace ropeteam
