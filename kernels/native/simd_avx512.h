// Vectors of AVX-512: 16 lanes.
#pragma once

// GCC 12 takes the undefined sources of its own AVX-512 intrinsics for mistakes (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>


#include <cstdint>
#include <cstring>

namespace millrace {

using Vec = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Mask first(int64_t n) { return n >= 16 ? Mask(0xffff) : Mask((1u << n) - 1); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, Mask m, Vec v) { _mm512_mask_storeu_ps(p, m, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// The second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec sign_of(Vec a, Vec magnitude) {
  return _mm512_or_ps(_mm512_and_ps(a, _mm512_set1_ps(-0.0f)), magnitude);
}
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec round(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v * 2^n for whole n, with overflow to infinity and underflow to zero.
inline Vec scale_by_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }

inline Vec widen_bf16(__m256i raw) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline Vec load_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load_bf16(const uint16_t* p, Mask m) { return widen_bf16(_mm256_maskz_loadu_epi16(m, p)); }
inline Vec load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Vec load_int8(const int8_t* p, Mask m) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, p)));
}
// float8_e4m3 as the float16 of the same bits, which is 1/256 of it; no NaN.
inline Vec load_float8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(-32768));
  const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(127)), 7);
  return _mm512_cvtph_ps(_mm256_or_si256(sign, size));
}
inline Vec load_float8(const uint8_t* p, Mask m) {
  alignas(16) uint8_t part[16];
  _mm_store_si128((__m128i*)part, _mm_maskz_loadu_epi8(m, p));
  return load_float8(part);
}
// Codes c of 4 bits as 2 c - 15: low halves of four bytes, then their high ones. Partial loads are of 8.
inline Vec load_int4(const uint8_t* p, Mask m = 0xffff) {
  const __m128i words = _mm_cvtepu32_epi64(_mm_maskz_loadu_epi32(m >> 8 ? 3 : 1, p));
  const __m128i both = _mm_or_si128(words, _mm_slli_epi64(words, 28));
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15)));
  return _mm512_fmadd_ps(set1(2.0f), _mm512_cvtepi32_ps(codes), set1(-15.0f));
}
// Two to each byte less 127; bytes from 1 to 254.
inline Vec load_powers(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23));
}
// Rounds to nearest even; NaN stays NaN.
inline __m512i bf16_bits(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc00000)), 16);
}
inline void store_bf16(uint16_t* p, Mask m, Vec v) {
  _mm256_mask_storeu_epi16(p, m, _mm512_cvtepi32_epi16(bf16_bits(v)));
}
// Lanes within [-128, 127] after rounding.
inline void store_int8(int8_t* p, Mask m, Vec v) {
  _mm_mask_storeu_epi8(p, m, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
// Pairs of bfloat16 in 32 bits each: the lower and the upper ones as floats.
inline Vec lower_half(Vec pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
inline Vec upper_half(Vec pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-65536)));
}
// One of the four int8 of each 32 bits.
template <int kByte>
inline Vec signed_byte(Vec words) {
  const __m512i up = _mm512_slli_epi32(_mm512_castps_si512(words), 24 - 8 * kByte);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(up, 24));
}

// One of the eight codes of 4 bits of each 32, as 2 c - 15.
template <int kHalf>
inline Vec half_byte(Vec words) {
  const Vec levels = _mm512_setr_ps(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_castps_si512(words), 4 * kHalf), levels);
}
// One of the four float8_e4m3 of each 32 bits; no NaN.
template <int kByte>
inline Vec float8_byte(Vec words) {
  const __m512i up = _mm512_slli_epi32(_mm512_castps_si512(words), 24 - 8 * kByte);
  const __m512i bits = _mm512_and_si512(_mm512_srai_epi32(up, 4), _mm512_set1_epi32(static_cast<int>(0x87f00000)));
  return mul(_mm512_castsi512_ps(bits), set1(0x1p120f));
}

// Lanes of two vectors in turn, a0 b0 a1 b1 …, and back.
inline void zip(Vec a, Vec b, Vec out[2]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  out[0] = _mm512_permutex2var_ps(a, low, b);
  out[1] = _mm512_permutex2var_ps(a, high, b);
}
inline void unzip(Vec a, Vec b, Vec out[2]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  out[0] = _mm512_permutex2var_ps(a, even, b);
  out[1] = _mm512_permutex2var_ps(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), b);
}

inline float from_float16(uint16_t bits) { return _cvtsh_ss(bits); }

using Ints = __m512i;
inline Ints set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_ints(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints byte_up(Ints a) { return _mm512_slli_epi32(a, 8); }
inline Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
// Rounds to nearest even.
inline Ints to_ints(Vec v) { return _mm512_cvtps_epi32(v); }

}  // namespace millrace
