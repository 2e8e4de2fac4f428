// Many results that go to memory past the caches, which would first read the lines that they overwrite, and keep none of
// them until it is read. With AMX alone: elsewhere products take so long that memory waits for them.
#pragma once

#include <cstdint>

#include "native/simd.h"
#include "native/tiles.h"

namespace millrace {

#if defined(TILE_LOAD)
// Results of fewer bytes are kept by the caches.
constexpr int64_t kKeptBytes = int64_t{4} << 20;

// Whether rows of `count` floats, `stride` apart, go past the caches: many whole lines.
inline bool goes_past_caches(const float* out, int64_t stride, int64_t num_rows, int64_t count) {
  return num_rows * count * static_cast<int64_t>(sizeof(float)) > kKeptBytes && count % kLanes == 0 &&
         stride % kLanes == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}
inline void store_past_caches(float* to, Vec values) { _mm512_stream_ps(to, values); }
// What follows sees all that this thread stored so.
inline void past_caches_done() { _mm_sfence(); }
#else
inline bool goes_past_caches(const float*, int64_t, int64_t, int64_t) { return false; }
inline void store_past_caches(float* to, Vec values) { store(to, values); }
inline void past_caches_done() {}
#endif

}  // namespace millrace
