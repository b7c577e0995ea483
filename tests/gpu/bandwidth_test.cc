// SPDX-License-Identifier: Apache-2.0
//
// The rate of saving device memory into the arena, compared with the driver's best rate into page-locked
// memory. It prints figures without a bound; the reader judges them.

#include <algorithm>
#include <chrono>

#include "tests/api/api_fixture.h"
#include "tests/gpu/cuda_rig.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kChunk = 4 << 20;
constexpr uint64_t kBytes = 1ull << 30;
constexpr int kRounds = 7;

template <typename Work>
double SecondsOf(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(BandwidthTest, ASaveBesideThePageLockedCopy) {
  std::string why;
  RealRig* rig = TheRealRig(&why);
  if (rig == nullptr) GTEST_SKIP() << why;
  FakeDaemon daemon(kChunk, kBytes / kChunk + 2);
  void* device = rig->Alloc(0, kBytes, CudaRig::Kind::kDevice);
  const std::string bytes = RandomBytes(kBytes, 1);
  rig->Write(device, bytes);
  void* locked = rig->Alloc(0, kBytes, CudaRig::Kind::kHost);
  void* stream = rig->MakeStream(0, true);

  double best_copy = 1e9;
  for (int round = 0; round <= kRounds; ++round) {
    const double seconds = SecondsOf([&] {
      rig->CopyOut(locked, device, kBytes, stream);
      rig->Synchronize(stream);
    });
    if (round > 0) best_copy = std::min(best_copy, seconds);
  }

  const ropeteam_open_options_t options = OptionsFor(daemon.socket());
  ropeteam_t* opened = nullptr;
  ASSERT_OK(ropeteam_open(&options, &opened));
  const Handle handle(opened);
  const auto begin = [&](uint64_t step) {
    const ropeteam_save_options_t wanted{sizeof(wanted), kBytes, 1, 0};
    ropeteam_save_t* save = nullptr;
    EXPECT_OK(ropeteam_save_begin(handle.get(), step, &wanted, &save));
    return SaveHandle(save);
  };
  std::vector<double> saves;
  for (int round = 0; round <= kRounds; ++round) {
    const SaveHandle save = begin(static_cast<uint64_t>(round + 1));
    const double seconds = SecondsOf([&] { EXPECT_OK(ropeteam_save_put(save.get(), "x", device, kBytes)); });
    if (round > 0) saves.push_back(seconds);
    ASSERT_OK(ropeteam_save_abort(save.get()));
    // The chunks are free again only when the daemon has received the abort.
    ASSERT_TRUE(daemon.WaitFor([&](const FakeCounts& counts) { return counts.aborts == round + 1; }));
  }
  std::sort(saves.begin(), saves.end());
  const double gib = static_cast<double>(kBytes) / (1 << 30);
  std::printf(
      "gpu/pinned_copy_gib_s %.2f\ngpu/save_put_gib_s %.2f (median of %zu, best "
      "%.2f)\ngpu/save_put_vs_pinned_copy %.3f\n",
      gib / best_copy, gib / saves[saves.size() / 2], saves.size(), gib / saves.front(),
      best_copy / saves[saves.size() / 2]);
  const SaveHandle save = begin(100);
  ASSERT_OK(ropeteam_save_put(save.get(), "x", device, kBytes));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_TRUE(daemon.ObjectBytes(100, kRank, "x") == bytes);
  rig->DestroyStream(stream);
  rig->Free(locked, CudaRig::Kind::kHost);
  rig->Free(device, CudaRig::Kind::kDevice);
}

}  // namespace
}  // namespace ropeteam::test
