// SPDX-License-Identifier: Apache-2.0
//
// The node's arena as a rank sees it: the chunks of the file that the daemon handed over, mapped once,
// shared. The tables before them are not mapped, so a stray pointer of this process cannot damage them
// (docs/arena.md has the exception and what else a rank can reach). The daemon has faulted its memory in;
// what a rank still has to pay are its own page-table entries. They are made ahead: for granted chunks before
// the grant is used, for the rest in the background, so that a save takes no page fault.
//
// Safe from any thread. The bytes themselves are whoever's the daemon granted them to.

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

// A contiguous range of addresses over chunks that are not contiguous in the arena. Unmaps itself.
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

// Whether each chunk follows the one before it, so that they can be used without a window. `chunks` is not
// empty.
inline bool IsContiguous(std::span<const uint32_t> chunks) {
  for (size_t i = 1; i < chunks.size(); ++i) {
    if (chunks[i] != chunks[i - 1] + 1) return false;
  }
  return true;
}

class Arena {
 public:
  // Takes the descriptor. kInvalidArgument: the file or the geometry in `hello` is not one that can be
  // mapped, both named.
  static Result<std::shared_ptr<Arena>> Map(UniqueFd fd, const local::HelloReply& hello);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // True when `fd` is this very file and `hello` describes it the same: a daemon that came back with the same
  // arena.
  bool IsOf(const UniqueFd& fd, const local::HelloReply& hello) const;

  uint64_t bytes() const { return bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t chunks_total() const { return chunks_total_; }
  std::byte* chunk(uint32_t chunk) const { return chunks_ + chunk * chunk_bytes_; }

  // kInternal: an extent is empty or outside the arena; the message has both.
  Status CheckExtents(const std::vector<Extent>& extents) const;
  // Makes the page-table entries of the extents' chunks, those that are not there yet. kNoSpace: the file has
  // no memory behind them and cannot get any.
  Status Populate(const std::vector<Extent>& extents);

  // Begins to page-lock the arena for CUDA, in the background, unless that was done; and ends it, for the
  // context that it was done in (nothing for any other).
  void Pin(const CudaDriver& driver, CuContext context);
  void Unpin(CuContext context);
  // This chunk's part of the arena first.
  void PreferPinned(uint32_t chunk);

  // Maps `chunks`, in this order, one behind the other. Writable windows are populated.
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
