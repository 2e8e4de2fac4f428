// Vectors of float32 lanes for the level that a file is compiled for. Each function is a fixed sequence of
// operations, so that a value does not depend on where it is inlined.
#pragma once

// GCC 12 takes the undefined sources of its own AVX-512 intrinsics for mistakes (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Of a loop over what must become registers, whose number of turns is a constant.
#define UNROLLED _Pragma("GCC unroll 16")

namespace millrace {

// Calls body(n as a constant) for an n from 1 to kMost.
template <int kMost, typename Body>
inline void with_constant(int64_t n, const Body& body) {
  if (n == kMost)
    body(std::integral_constant<int, kMost>());
  else if constexpr (kMost > 1)
    with_constant<kMost - 1>(n, body);
}

#if defined(__AVX512F__)

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

#else

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

constexpr float kLog2OfE = 1.44269504088896341f;

// e^x for `exp`: `bounded` is x within what a float's exponent takes, n the whole number nearest to bounded / ln 2.
inline Vec exp_of_parts(Vec x, Vec bounded, Vec n) {
  Vec r = fnma(n, set1(0.693359375f), bounded);
  r = fnma(n, set1(-2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, set1(1.0f));
  return select(less(x, set1(-87.0f)), zero(), scale_by_power(p, n));
}

// e^x within 2 units in the last place; 0 below e^-87, NaN for NaN. Results that are no normal numbers would take
// processors hundreds of cycles a vector, and masked scores are many.
inline Vec exp(Vec x) {
  // The bounds go first, as min and max return their second operand where one is NaN.
  const Vec bounded = max(set1(-87.0f), min(set1(89.0f), x));
  return exp_of_parts(x, bounded, round(mul(bounded, set1(kLog2OfE))));
}

inline Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Within 3 units in the last place.
inline Vec tanh(Vec x) {
  const Vec size = abs(x);
  const Vec square = mul(x, x);
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const Vec near = fma(mul(p, square), x, x);
  const Vec far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
  return select(less(size, set1(0.625f)), near, sign_of(x, far));
}

// 1 - erf(|x|) within 1e-6 of itself (Numerical Recipes, third edition, section 6.2.2).
inline Vec erfc_of_size(Vec x) {
  const Vec size = abs(x);
  const Vec t = div(set1(1.0f), fma(set1(0.5f), size, set1(1.0f)));
  Vec p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  return mul(t, exp(fnma(size, size, p)));
}

}  // namespace millrace
