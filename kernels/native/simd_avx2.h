// Vectors of AVX2: 8 lanes.
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

using Vec = __m256;
constexpr int kLanes = 8;
// Lanes that take part: all bits of a lane set or none.
struct Mask {
  __m256i lanes;
};

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Mask first(int64_t n) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n > 8 ? 8 : static_cast<int>(n)), index)};
}
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const float* p, Mask m) { return _mm256_maskload_ps(p, m.lanes); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline int64_t count(Mask m) { return __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(m.lanes))); }
inline bool is_empty(Mask m) { return _mm256_movemask_ps(_mm256_castsi256_ps(m.lanes)) == 0; }
inline bool is_whole(Mask m) { return _mm256_movemask_ps(_mm256_castsi256_ps(m.lanes)) == 0xFF; }
// Whole vectors go apart, here and below: masked stores take some processors tens of cycles.
inline void store(float* p, Mask m, Vec v) {
  if (is_whole(m)) return store(p, v);
  _mm256_maskstore_ps(p, m.lanes, v);
}
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Vec sign_of(Vec a, Vec magnitude) {
  return _mm256_or_ps(_mm256_and_ps(a, _mm256_set1_ps(-0.0f)), magnitude);
}
inline Mask less(Vec a, Vec b) { return {_mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ))}; }
inline Mask at_least(Vec a, Vec b) { return {_mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GE_OQ))}; }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m.lanes)); }
inline float sum(Vec v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float largest(Vec v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
inline Vec round(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// In two halves, as one exponent does not reach the ends of the range. |n| <= 252.
inline Vec scale_by_power(Vec v, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return mul(mul(v, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

inline Vec widen_bf16(__m128i raw) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline Vec load_bf16(const uint16_t* p) { return widen_bf16(_mm_loadu_si128((const __m128i*)p)); }
// Masks of partial loads and stores of small types are `first(n)`.
inline Vec load_bf16(const uint16_t* p, Mask m) {
  if (is_whole(m)) return load_bf16(p);
  alignas(16) uint16_t part[8] = {};
  std::memcpy(part, p, 2 * count(m));
  return load_bf16(part);
}
inline Vec load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Vec load_int8(const int8_t* p, Mask m) {
  if (is_whole(m)) return load_int8(p);
  alignas(16) int8_t part[16] = {};
  std::memcpy(part, p, count(m));
  return load_int8(part);
}
// float8_e4m3 as the float16 of the same bits, which is 1/256 of it; no NaN.
inline Vec load_float8(const uint8_t* p) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(-32768));
  const __m128i size = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(127)), 7);
  return _mm256_cvtph_ps(_mm_or_si128(sign, size));
}
inline Vec load_float8(const uint8_t* p, Mask m) {
  if (is_whole(m)) return load_float8(p);
  alignas(16) uint8_t part[16] = {};
  std::memcpy(part, p, count(m));
  return load_float8(part);
}
// Codes c of 4 bits as 2 c - 15: low halves of four bytes, then their high ones. Never a part of a vector.
inline Vec load_int4(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  const uint64_t both = (word | static_cast<uint64_t>(word) << 28) & 0x0f0f0f0f0f0f0f0full;
  const __m256i codes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(both)));
  return fma(set1(2.0f), _mm256_cvtepi32_ps(codes), set1(-15.0f));
}
inline Vec load_int4(const uint8_t* p, Mask) { return load_int4(p); }
// Two to each byte less 127; bytes from 1 to 254.
inline Vec load_powers(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23));
}
inline __m256i bf16_bits(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
inline void store_bf16(uint16_t* p, Mask m, Vec v) {
  const __m256i bits = bf16_bits(v);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  if (is_whole(m)) return _mm_storeu_si128((__m128i*)p, halves);
  std::memcpy(p, &halves, 2 * count(m));
}
inline void store_int8(int8_t* p, Mask m, Vec v) {
  const __m256i levels = _mm256_cvtps_epi32(v);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1));
  const __m128i bytes = _mm_packs_epi16(pairs, pairs);
  if (is_whole(m)) return _mm_storel_epi64((__m128i*)p, bytes);
  std::memcpy(p, &bytes, count(m));
}
inline Vec lower_half(Vec pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
inline Vec upper_half(Vec pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(-65536)));
}
template <int kByte>
inline Vec signed_byte(Vec words) {
  const __m256i up = _mm256_slli_epi32(_mm256_castps_si256(words), 24 - 8 * kByte);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(up, 24));
}

// One of the eight codes of 4 bits of each 32, as 2 c - 15.
template <int kHalf>
inline Vec half_byte(Vec words) {
  const __m256i shifted = _mm256_srli_epi32(_mm256_castps_si256(words), 4 * kHalf);
  return fma(set1(2.0f), _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15))), set1(-15.0f));
}
// One of the four float8_e4m3 of each 32 bits; no NaN.
template <int kByte>
inline Vec float8_byte(Vec words) {
  const __m256i up = _mm256_slli_epi32(_mm256_castps_si256(words), 24 - 8 * kByte);
  const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(up, 4), _mm256_set1_epi32(static_cast<int>(0x87f00000)));
  return mul(_mm256_castsi256_ps(bits), set1(0x1p120f));
}

// Lanes of two vectors in turn, a0 b0 a1 b1 …, and back.
inline void zip(Vec a, Vec b, Vec out[2]) {
  const Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  out[0] = _mm256_permute2f128_ps(low, high, 0x20);
  out[1] = _mm256_permute2f128_ps(low, high, 0x31);
}
inline void unzip(Vec a, Vec b, Vec out[2]) {
  out[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xD8));
  out[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xDD)), 0xD8));
}

inline float from_float16(uint16_t bits) { return _cvtsh_ss(bits); }

using Ints = __m256i;
inline Ints set1_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_ints(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_ints(int32_t* p, Ints v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints byte_up(Ints a) { return _mm256_slli_epi32(a, 8); }
inline Vec to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
// Rounds to nearest even.
inline Ints to_ints(Vec v) { return _mm256_cvtps_epi32(v); }

}  // namespace millrace
