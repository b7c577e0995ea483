// SPDX-License-Identifier: Apache-2.0
//
// A CudaFill is the part of one save that comes from devices: the chunks that still wait for copies, their checksums as
// soon as they are complete, and the announcements of those. The save's own thread adds and seals; the threads of the
// lanes (cuda_lane.h) report what has arrived.
//
// A chunk is checksummed when it is sealed (the stream has passed its end) and its last copy has completed, never
// before. The thread that observes the later of the two events does it.
//
// Safe from any thread, except Begin() and what it resets: only the save calls it, when nothing is outstanding.

#ifndef ROPETEAM_API_CLIENT_CUDA_FILL_H_
#define ROPETEAM_API_CLIENT_CUDA_FILL_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "api/client/cuda_driver.h"
#include "api/client/link.h"
#include "core/base/status.h"

namespace ropeteam::client {

// One copy: a part of one chunk, never of two.
struct CudaPiece {
  CuDevicePtr source = 0;
  std::byte* target = nullptr;
  uint64_t bytes = 0;
  uint32_t chunk = 0;  // of the stream
  bool seals = false;  // it is the chunk's last piece
};

// Whole, consecutive chunks of the stream that are in a buffer that the daemon has (cuda_exports.h).
struct CudaDirect {
  uint64_t buffer = 0;
  uint64_t offset = 0;
  uint32_t first = 0;
  uint32_t count = 0;  // 0: no chunk
};

class CudaFill {
 public:
  // A new save on this link, which outlives it.
  void Begin(Link* link, uint64_t save);

  // ---- the save's thread
  // Adds pieces that are about to be queued in a lane. Each must come back through Finished() or Dropped().
  void Add(std::span<const CudaPiece> pieces, uint64_t chunk_bytes);
  // All bytes of the chunk, the last of them not from a device, are written or being copied. Returns true if nothing is
  // outstanding: the caller computes the checksum. Returns false if it will be computed and announced here.
  bool Seal(uint32_t chunk, const std::byte* data, uint64_t bytes);
  // Waits until nothing is outstanding. Returns the first failure of a copy, if any.
  Status Wait();
  // Whether device memory was announced to the daemon. After Wait().
  bool told_direct();
  // The present result of Wait(), without waiting.
  Status failure();
  // Returns true and sets *crc if the checksum of a sealed chunk was computed here. After Wait().
  bool TakeCrc(uint32_t chunk, uint32_t* crc);
  // From here on nothing is announced, and copies that have not begun are not wanted. After this and the lanes' Drop(),
  // Wait() takes only as long as the copies that the device already has.
  void Cancel();

  // ---- lanes' threads
  // Whether copies for this save are still useful: it was not cancelled and has not failed, and the daemon that granted
  // the chunks is alive. Another daemon may have granted them to another save. One system call.
  bool Wanted();
  // The device memory has its final bytes, so the daemon may read it. Called before the first of their pieces is given
  // to the device, so that the network card and the copy engine work at the same time.
  void TellDirect(const CudaDirect& direct);
  void Finished(std::span<const CudaPiece> pieces, const Status& status);
  void Dropped(uint64_t pieces);

 private:
  struct Chunk {
    uint64_t pending = 0;  // outstanding pieces
    const std::byte* data = nullptr;
    uint64_t bytes = 0;  // 0: not sealed
    uint32_t crc = 0;
    bool has_crc = false;
  };
  struct Filled {
    uint32_t chunk;
    uint32_t crc;
  };

  void FinishPiece(const CudaPiece& piece, const Status& status);
  void Settle(uint64_t pieces);
  Status Announce(std::vector<Filled>* filled);

  Link* link_ = nullptr;
  uint64_t save_ = 0;

  std::mutex mutex_;
  std::condition_variable settled_;
  // Guarded by mutex_:
  bool cancelled_ = false;
  bool told_direct_ = false;
  Status failure_;
  uint64_t outstanding_ = 0;    // pieces added and not finished or dropped
  uint32_t announcing_ = 0;     // threads in Announce()
  std::vector<Chunk> chunks_;   // by chunk of the stream
  std::vector<Filled> filled_;  // checksummed but not announced

  std::mutex announce_mutex_;  // one thread announces at a time
  // Guarded by announce_mutex_:
  std::vector<Filled> announcement_;
  local::SaveFilled frame_;
  FrameBuffers buffers_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CUDA_FILL_H_
