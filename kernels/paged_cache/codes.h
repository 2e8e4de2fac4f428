// Codes of 4 bits: c from 0 to 15 stands for 2 c - 15 (kernels/paged_cache/four_bits says how they are packed).
#pragma once

#include <cstdint>

#include "native/simd.h"

namespace millrace {

// The codes of levels between -15 and 15, a byte each.
inline void store_code(int8_t* to, Mask m, Vec level) {
  const Vec code = round(mul(add(level, set1(15.0f)), set1(0.5f)));
  store_int8(to, m, max(min(code, set1(15.0f)), zero()));
}

// Codes [width], a multiple of 8, to bytes [width / 2].
inline void pack_codes(const int8_t* codes, int64_t width, uint8_t* to) {
  for (int64_t i = 0; i < width; i += 8) {
    for (int64_t j = 0; j < 4; ++j) to[i / 2 + j] = static_cast<uint8_t>(codes[i + j] | codes[i + 4 + j] << 4);
  }
}

}  // namespace millrace
