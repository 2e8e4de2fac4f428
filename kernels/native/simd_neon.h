// Vectors of NEON: two registers make one of 8 lanes, so that shapes and order of sums are those of AVX2.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace millrace {

struct Vec {
  float32x4_t low, high;
};
struct Ints {
  int32x4_t low, high;
};
constexpr int kLanes = 8;
// Lanes that take part: all bits of a lane set or none.
struct Mask {
  uint32x4_t low, high;
};

inline Vec both(float32x4_t x) { return {x, x}; }
inline Vec zero() { return both(vdupq_n_f32(0.0f)); }
inline Vec set1(float x) { return both(vdupq_n_f32(x)); }
inline Mask first(int64_t n) {
  const uint32x4_t index = vcombine_u32(vcreate_u32(uint64_t{1} << 32), vcreate_u32(uint64_t{3} << 32 | 2));
  const uint32x4_t count = vdupq_n_u32(n > 8 ? 8 : n < 0 ? 0 : static_cast<uint32_t>(n));
  return {vcltq_u32(index, count), vcltq_u32(vaddq_u32(index, vdupq_n_u32(4)), count)};
}
inline bool is_whole(Mask m) { return vminvq_u32(vandq_u32(m.low, m.high)) != 0; }
inline bool is_empty(Mask m) { return vmaxvq_u32(vorrq_u32(m.low, m.high)) == 0; }
// Lanes of a mask that is `first(n)`: n.
inline int64_t count(Mask m) { return vaddvq_u32(vaddq_u32(vshrq_n_u32(m.low, 31), vshrq_n_u32(m.high, 31))); }
inline Vec select(Mask m, Vec yes, Vec no) {
  return {vbslq_f32(m.low, yes.low, no.low), vbslq_f32(m.high, yes.high, no.high)};
}
inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, Vec v) {
  vst1q_f32(p, v.low);
  vst1q_f32(p + 4, v.high);
}
// Masks of loads and stores are `first(n)`: what lies beyond may not be there.
inline Vec load(const float* p, Mask m) {
  if (is_whole(m)) return load(p);
  float part[8] = {};
  std::memcpy(part, p, 4 * count(m));
  return load(part);
}
inline void store(float* p, Mask m, Vec v) {
  if (is_whole(m)) return store(p, v);
  float part[8];
  store(part, v);
  std::memcpy(p, part, 4 * count(m));
}
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
// The second operand where either is NaN.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return {max(a.low, b.low), max(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) {
  return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
}
inline Vec sqrt(Vec a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
inline Vec abs(Vec a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline Vec sign_of(Vec a, Vec magnitude) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  return {vbslq_f32(sign, a.low, magnitude.low), vbslq_f32(sign, a.high, magnitude.high)};
}
inline Mask less(Vec a, Vec b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
inline Mask at_least(Vec a, Vec b) { return {vcgeq_f32(a.low, b.low), vcgeq_f32(a.high, b.high)}; }
inline float sum(Vec v) {
  const float32x4_t half = vaddq_f32(v.low, v.high);
  const float32x2_t pair = vadd_f32(vget_low_f32(half), vget_high_f32(half));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
inline float largest(Vec v) {
  const float32x4_t half = max(v.low, v.high);
  const float32x4_t pair = max(half, vextq_f32(half, half, 2));
  const float a = vgetq_lane_f32(pair, 0), b = vgetq_lane_f32(pair, 1);
  return a > b ? a : b;
}
inline Vec round(Vec v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }
inline float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
inline float32x4_t scale_by_power(float32x4_t v, float32x4_t n) {
  const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  return vmulq_f32(vmulq_f32(v, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
}
// In two halves, as one exponent does not reach the ends of the range. |n| <= 252.
inline Vec scale_by_power(Vec v, Vec n) { return {scale_by_power(v.low, n.low), scale_by_power(v.high, n.high)}; }

inline Vec load_bf16(const uint16_t* p) {
  const uint16x8_t raw = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(raw)), 16)),
          vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(raw)), 16))};
}
inline Vec load_bf16(const uint16_t* p, Mask m) {
  if (is_whole(m)) return load_bf16(p);
  uint16_t part[8] = {};
  std::memcpy(part, p, 2 * count(m));
  return load_bf16(part);
}
inline Vec load_int8(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
inline Vec load_int8(const int8_t* p, Mask m) {
  if (is_whole(m)) return load_int8(p);
  int8_t part[8] = {};
  std::memcpy(part, p, count(m));
  return load_int8(part);
}
// float8_e4m3 as the float16 of the same bits, which is 1/256 of it; no NaN.
inline Vec load_float8(const uint8_t* p) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(p));
  const uint16x8_t sign = vandq_u16(vshlq_n_u16(wide, 8), vdupq_n_u16(0x8000));
  const uint16x8_t size = vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(127)), 7);
  const float16x8_t halves = vreinterpretq_f16_u16(vorrq_u16(sign, size));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}
inline Vec load_float8(const uint8_t* p, Mask m) {
  if (is_whole(m)) return load_float8(p);
  uint8_t part[8] = {};
  std::memcpy(part, p, count(m));
  return load_float8(part);
}
// Codes c of 4 bits as 2 c - 15: low halves of four bytes, then their high ones. Never a part of a vector.
inline Vec load_int4(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  const uint64_t both = (word | static_cast<uint64_t>(word) << 28) & 0x0f0f0f0f0f0f0f0full;
  const int16x8_t codes = vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(both)));
  const int16x8_t levels = vsubq_s16(vshlq_n_s16(codes, 1), vdupq_n_s16(15));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(levels))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(levels)))};
}
inline Vec load_int4(const uint8_t* p, Mask) { return load_int4(p); }
// Two to each byte less 127; bytes from 1 to 254.
inline Vec load_powers(const uint8_t* p) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(p));
  return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(wide)), 23)),
          vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(wide)), 23))};
}
// Rounds to nearest even; NaN stays NaN.
inline uint16x4_t bf16_bits(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc00000)), 16);
}
inline void store_bf16(uint16_t* p, Mask m, Vec v) {
  const uint16x8_t halves = vcombine_u16(bf16_bits(v.low), bf16_bits(v.high));
  if (is_whole(m)) return vst1q_u16(p, halves);
  uint16_t part[8];
  vst1q_u16(part, halves);
  std::memcpy(p, part, 2 * count(m));
}
// Lanes within [-128, 127] after rounding.
inline void store_int8(int8_t* p, Mask m, Vec v) {
  const int16x8_t pairs = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(v.low)), vqmovn_s32(vcvtnq_s32_f32(v.high)));
  const int8x8_t bytes = vqmovn_s16(pairs);
  if (is_whole(m)) return vst1_s8(p, bytes);
  int8_t part[8];
  vst1_s8(part, bytes);
  std::memcpy(p, part, count(m));
}

// Lanes of two vectors in turn, a0 b0 a1 b1 …, and back.
inline void zip(Vec a, Vec b, Vec out[2]) {
  out[0] = {vzip1q_f32(a.low, b.low), vzip2q_f32(a.low, b.low)};
  out[1] = {vzip1q_f32(a.high, b.high), vzip2q_f32(a.high, b.high)};
}
inline void unzip(Vec a, Vec b, Vec out[2]) {
  out[0] = {vuzp1q_f32(a.low, a.high), vuzp1q_f32(b.low, b.high)};
  out[1] = {vuzp2q_f32(a.low, a.high), vuzp2q_f32(b.low, b.high)};
}

inline float from_float16(uint16_t bits) {
  __fp16 value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline Ints set1_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Ints load_ints(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
inline void store_ints(int32_t* p, Ints v) {
  vst1q_s32(p, v.low);
  vst1q_s32(p + 4, v.high);
}
inline Ints add(Ints a, Ints b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
inline Ints sub(Ints a, Ints b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
inline Ints byte_up(Ints a) { return {vshlq_n_s32(a.low, 8), vshlq_n_s32(a.high, 8)}; }
inline Vec to_floats(Ints a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
// Rounds to nearest even.
inline Ints to_ints(Vec v) { return {vcvtnq_s32_f32(v.low), vcvtnq_s32_f32(v.high)}; }
inline Ints bits_of(Vec v) { return {vreinterpretq_s32_f32(v.low), vreinterpretq_s32_f32(v.high)}; }
inline Vec of_bits(Ints v) { return {vreinterpretq_f32_s32(v.low), vreinterpretq_f32_s32(v.high)}; }

// Pairs of bfloat16 in 32 bits each: the lower and the upper ones as floats.
inline Vec lower_half(Vec pairs) {
  const Ints bits = bits_of(pairs);
  return of_bits({vshlq_n_s32(bits.low, 16), vshlq_n_s32(bits.high, 16)});
}
inline Vec upper_half(Vec pairs) {
  const Ints bits = bits_of(pairs);
  const int32x4_t upper = vdupq_n_s32(-65536);
  return of_bits({vandq_s32(bits.low, upper), vandq_s32(bits.high, upper)});
}
// One of the four int8 of each 32 bits.
template <int kByte>
inline Vec signed_byte(Vec words) {
  const Ints bits = bits_of(words);
  constexpr int kUp = 24 - 8 * kByte;
  return to_floats({vshrq_n_s32(vshlq_n_s32(bits.low, kUp), 24), vshrq_n_s32(vshlq_n_s32(bits.high, kUp), 24)});
}
// One of the eight codes of 4 bits of each 32, as 2 c - 15.
template <int kHalf>
inline Vec half_byte(Vec words) {
  const Ints bits = bits_of(words);
  const auto level = [](int32x4_t half) {
    // The code to the top, then to the place where it counts twice.
    const uint32x4_t top = vshlq_n_u32(vreinterpretq_u32_s32(half), 28 - 4 * kHalf);
    return vsubq_s32(vshlq_n_s32(vreinterpretq_s32_u32(vshrq_n_u32(top, 28)), 1), vdupq_n_s32(15));
  };
  return to_floats({level(bits.low), level(bits.high)});
}
// One of the four float8_e4m3 of each 32 bits; no NaN.
template <int kByte>
inline Vec float8_byte(Vec words) {
  const Ints bits = bits_of(words);
  const int32x4_t mask = vdupq_n_s32(static_cast<int32_t>(0x87f00000u));
  constexpr int kUp = 24 - 8 * kByte;
  const int32x4_t low = vandq_s32(vshrq_n_s32(vshlq_n_s32(bits.low, kUp), 4), mask);
  const int32x4_t high = vandq_s32(vshrq_n_s32(vshlq_n_s32(bits.high, kUp), 4), mask);
  return mul(of_bits({low, high}), set1(0x1p120f));
}

}  // namespace millrace
