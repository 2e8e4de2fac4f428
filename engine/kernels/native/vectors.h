// The widest float vector of the level that is being compiled, and conversions that all levels share.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace millrace {

#if defined(__AVX512F__)
using Vector = __m512;
constexpr int kWidth = 16;
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector spread(float value) { return _mm512_set1_ps(value); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
// Pairs of bfloat16 in 32 bits each: the lower and the upper ones as floats.
inline Vector lower_half(const void* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline Vector upper_half(const void* pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(0xFFFF0000)));
}
#else
using Vector = __m256;
constexpr int kWidth = 8;
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector spread(float value) { return _mm256_set1_ps(value); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector lower_half(const void* pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(pairs)), 16));
}
inline Vector upper_half(const void* pairs) {
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(pairs));
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF0000)));
}
#endif

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace millrace
