// Counter-based randomness: splitmix64 (engine/sampling/noise.py has the same in numpy).
#pragma once

#include <cstdint>

namespace millrace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15, kFirst = 0xBF58476D1CE4E5B9, kSecond = 0x94D049BB133111EB;

// The count-th output of the stream.
inline uint64_t mixed(uint64_t stream, int64_t count) {
  uint64_t bits = stream + static_cast<uint64_t>(count + 1) * kGolden;
  bits = (bits ^ (bits >> 30)) * kFirst;
  bits = (bits ^ (bits >> 27)) * kSecond;
  return bits ^ (bits >> 31);
}

}  // namespace millrace
