// SPDX-License-Identifier: Apache-2.0
//
// A rank's view of the node's arena: the chunks of the file received from the daemon, mapped once, shared. The tables
// before them are not mapped, so a stray pointer of this process cannot damage them (docs/arena.md has the exception,
// and what else a rank can reach). The daemon has faulted the memory in; a rank only needs its own page-table entries.
// These are made ahead: for granted chunks before the grant is used, for the others in the background. So a save causes
// no page fault.
//
// Safe from any thread. The bytes belong to the holder of the daemon's grant.

#ifndef ROPETEAM_API_CLIENT_ARENA_H_
#define ROPETEAM_API_CLIENT_ARENA_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "api/client/arena_pin.h"
#include "api/client/cuda_driver.h"
#include "api/client/local_protocol.h"
#include "api/client/unique_fd.h"
#include "core/base/status.h"

namespace ropeteam::client {

// A contiguous address range over chunks that are not contiguous in the arena. Its destructor unmaps it.
class Window {
 public:
  Window() = default;
  Window(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  Window(Window&& other) noexcept;
  Window& operator=(Window&& other) noexcept;
  ~Window();
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Whether each chunk directly follows the previous one, so that no window is needed. `chunks` is not empty.
inline bool IsContiguous(std::span<const uint32_t> chunks) {
  for (size_t i = 1; i < chunks.size(); ++i) {
    if (chunks[i] != chunks[i - 1] + 1) return false;
  }
  return true;
}

class Arena {
 public:
  // Takes the descriptor. kInvalidArgument: the file, or the geometry in `hello`, cannot be mapped; the message has
  // both.
  static Result<std::shared_ptr<Arena>> Map(UniqueFd fd, const local::HelloReply& hello);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Whether `fd` is this same file and `hello` has the same geometry: a restarted daemon has the same arena.
  bool IsOf(const UniqueFd& fd, const local::HelloReply& hello) const;

  uint64_t bytes() const { return bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t chunks_total() const { return chunks_total_; }
  std::byte* chunk(uint32_t chunk) const { return chunks_ + chunk * chunk_bytes_; }

  // kInternal: an extent is empty or outside the arena; the message has the extent and the arena.
  Status CheckExtents(const std::vector<Extent>& extents) const;
  // Makes the missing page-table entries of the extents' chunks. kNoSpace: the file has no memory behind them and
  // cannot get any.
  Status Populate(const std::vector<Extent>& extents);

  // The first call begins to page-lock the arena for CUDA in the background. The other call ends it for the context
  // that it was begun with; it does nothing for any other context.
  void Pin(const CudaDriver& driver, CuContext context);
  void Unpin(CuContext context);
  // Page-locks this chunk's part of the arena first.
  void PreferPinned(uint32_t chunk);

  // Maps `chunks` in this order, one after the other. Writable windows are populated.
  Result<Window> MapWindow(std::span<const uint32_t> chunks, bool writable) const;

 private:
  Arena() = default;
  Status PopulateRun(uint64_t first, uint64_t count);
  void PopulateAll();

  UniqueFd fd_;
  std::span<std::byte> mapped_;
  std::byte* chunks_ = nullptr;  // chunk 0
  uint64_t bytes_ = 0;           // of the file, tables included
  uint64_t chunks_begin_ = 0;
  uint64_t chunk_bytes_ = 0;
  uint64_t chunks_total_ = 0;
  std::vector<std::atomic<uint8_t>> populated_;  // by chunk
  std::atomic<bool> stop_ = false;
  std::thread background_;
  std::mutex pin_mutex_;
  std::unique_ptr<ArenaPin> pin_;  // guarded by pin_mutex_
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_ARENA_H_
