// Weights of 8 and 4 bits that stand for floats, as such, by some inputs at a time: each is the float32 that its format
// says, and rows are float32, too.
//
// float8_e4m3 lies as bytes, [inputs][outputs of the panel]; codes of 16 floats (NF4, FP4) lie two inputs to a byte, the
// first in the lower half.
#pragma once

#include "linear/gemm_rows.h"

namespace millrace {

// 16 floats, and those of them that codes mean.
#if defined(__AVX512F__)
struct FloatBook {
  Vec values;
  explicit FloatBook(const float* from) : values(load(from)) {}
  Vec look_up(Ints codes) const { return _mm512_permutexvar_ps(codes, values); }
};
inline Ints load_codes(const uint8_t* from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline Ints lower_codes(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi32(15)); }
inline Ints upper_codes(Ints bytes) { return _mm512_srli_epi32(bytes, 4); }
#elif defined(__AVX2__)
struct FloatBook {
  Vec low, high;
  explicit FloatBook(const float* from) : low(load(from)), high(load(from + 8)) {}
  Vec look_up(Ints codes) const {
    const Vec is_high = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), is_high);
  }
};
inline Ints load_codes(const uint8_t* from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline Ints lower_codes(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi32(15)); }
inline Ints upper_codes(Ints bytes) { return _mm256_srli_epi32(bytes, 4); }
#else
struct FloatBook {
  const float* values;
  explicit FloatBook(const float* from) : values(from) {}
  Vec look_up(Ints codes) const {
    int32_t at[kLanes];
    float found[kLanes];
    store_ints(at, codes);
    for (int i = 0; i < kLanes; ++i) found[i] = values[at[i]];
    return load(found);
  }
};
inline Ints load_codes(const uint8_t* from) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(from));
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(wide)))};
}
inline Ints lower_codes(Ints bytes) {
  return {vandq_s32(bytes.low, vdupq_n_s32(15)), vandq_s32(bytes.high, vdupq_n_s32(15))};
}
inline Ints upper_codes(Ints bytes) { return {vshrq_n_s32(bytes.low, 4), vshrq_n_s32(bytes.high, 4)}; }
#endif

// Weights of inputs [begin, begin + count), of which the panel's are at `panel`, times their groups' scales
// [G, width]: floats [count, width]. Codes need `begin` and `count` to be even.
inline void expand_narrow(const PackedWeight& weight, const uint8_t* panel, int64_t begin, int64_t count,
                          int64_t width, const float* scales, float* to) {
  if (weight.format == kFloat8) {
    const Vec up = set1(kFloat8Unit);
    for (int64_t input = 0; input < count; ++input, panel += width, to += width) {
      const float* scale = scales + (begin + input) / weight.group_size * width;
      for (int64_t v = 0; v < width; v += kLanes)
        store(to + v, mul(mul(load_float8(panel + v), up), load(scale + v)));
    }
    return;
  }
  const FloatBook book(static_cast<const float*>(weight.codebook));
  for (int64_t input = 0; input < count; input += 2, panel += width, to += 2 * width) {
    const float* scale = scales + (begin + input) / weight.group_size * width;
    for (int64_t v = 0; v < width; v += kLanes) {
      const Ints bytes = load_codes(panel + v);
      const Vec factor = load(scale + v);
      store(to + v, mul(book.look_up(lower_codes(bytes)), factor));
      store(to + width + v, mul(book.look_up(upper_codes(bytes)), factor));
    }
  }
}

}  // namespace millrace
