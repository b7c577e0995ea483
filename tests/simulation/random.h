// SPDX-License-Identifier: Apache-2.0
//
// The simulation's only random generator: xoshiro256** seeded by splitmix64. Integers only, so that a seed
// gives the same run on every machine and compiler (the standard library's distributions do not promise
// that). A value; not thread-safe.

#ifndef ROPETEAM_TESTS_SIMULATION_RANDOM_H_
#define ROPETEAM_TESTS_SIMULATION_RANDOM_H_

#include <cstdint>

namespace ropeteam::simulation {

inline constexpr uint32_t kMillion = 1'000'000;  // probabilities are parts per million

inline uint64_t SplitMix(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// A hash of all arguments, for values that must not depend on the order of events.
inline uint64_t Mix(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
  uint64_t state = a;
  uint64_t mixed = SplitMix(&state);
  for (const uint64_t next : {b, c, d}) {
    state = mixed ^ next;
    mixed = SplitMix(&state);
  }
  return mixed;
}

class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) word = SplitMix(&seed);
  }
  uint64_t Next() {
    const uint64_t result = Rotate(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = Rotate(state_[3], 45);
    return result;
  }
  // In [0, limit); `limit` must not be 0. The bias is below 2^-32 for every limit used here.
  uint64_t Below(uint64_t limit) { return Next() % limit; }
  uint64_t Between(uint64_t low, uint64_t high) { return low + Below(high - low + 1); }  // both ends included
  bool Chance(uint32_t ppm) { return ppm != 0 && Below(kMillion) < ppm; }

 private:
  static uint64_t Rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }
  uint64_t state_[4];
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_RANDOM_H_
