// bfloat16 weights in 12 bits, multiplied as float16.
//
// gemm_fp16.h brings an output's largest weight to [1, 2), so of float16's five bits of exponent the first is 0, and
// of its ten bits of fraction bfloat16 fills seven: sign, four bits of exponent, seven of fraction are all there is
// of every weight down to 2^-14 of its output's largest. Smaller ones are rounded to multiples of 2^-21 (as float16
// rounds those below 2^-17 to multiples of 2^-24). A quarter less is kept in memory, and read for every product.
//
// Four inputs share three words of 16 bits: [inputs / 4][3][outputs of the panel]. Word i holds input i in its upper
// 12 bits, and in its lower 4 a part of input 3, highest bits first.
#pragma once

#include "linear/gemm_fp16.h"

#if defined(__AVX512FP16__)

namespace millrace {

// Inputs that share their words, and how many words these are.
constexpr int64_t kSharing = 4, kShared = 3;
// One in so many weights of an output may be rounded; with more the weight stays in 16 bits.
constexpr int64_t kMostRounded = 16;

// Whether 12 bits lose too much of one output's weights (bfloat16).
inline bool is_too_wide(const uint16_t* from, int64_t inputs) {
  const float exponent = exponent_of(largest_of(from, inputs));
  int64_t count = 0;
  for (int64_t i = 0; i < inputs; i += kLanes) {
    // Multiples of 2^-21 are whole then; what is not finite is no number less than another.
    const Vec units = scale_by_power(load_bf16(from + i, first(inputs - i)), set1(21 - exponent));
    const Mask small = less(abs(units), set1(128.0f)), exact = _mm512_cmp_ps_mask(units, round(units), _CMP_EQ_OQ);
    count += __builtin_popcount(static_cast<Mask>(small & ~exact));
  }
  return count * kMostRounded > inputs;
}

// float16 bits, whose second one is 0 -> the upper 12 bits of a word, half to even.
inline __m512i to_upper(__m512i halves) {
  const __m512i size = _mm512_and_si512(halves, _mm512_set1_epi16(0x7FFF));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(size, 3), _mm512_set1_epi16(1));
  const __m512i rounded = _mm512_add_epi16(size, _mm512_add_epi16(odd, _mm512_set1_epi16(3)));
  return _mm512_or_si512(_mm512_and_si512(halves, _mm512_set1_epi16(INT16_MIN)),
                         _mm512_and_si512(_mm512_slli_epi16(rounded, 1), _mm512_set1_epi16(0x7FF0)));
}

// `count` inputs of `width` columns, a multiple of kSharing, from float16 [count, width].
inline void put_float12(const uint16_t* from, int64_t count, int64_t width, uint16_t* to) {
  for (int64_t input = 0; input < count; input += kSharing, from += kSharing * width, to += kShared * width)
    for (int64_t column = 0; column < width; column += kHalfLanes) {
      const __mmask32 mask = width - column < kHalfLanes ? 0xFFFF : ~__mmask32{0};
      const auto upper = [&](int64_t i) {
        return to_upper(_mm512_maskz_loadu_epi16(mask, from + i * width + column));
      };
      const __m512i last = upper(3), lowest = _mm512_set1_epi16(15);
      const __m512i parts[kShared] = {_mm512_srli_epi16(last, 12),
                                      _mm512_and_si512(_mm512_srli_epi16(last, 8), lowest),
                                      _mm512_and_si512(_mm512_srli_epi16(last, 4), lowest)};
      for (int64_t i = 0; i < kShared; ++i)
        _mm512_mask_storeu_epi16(to + i * width + column, mask, _mm512_or_si512(upper(i), parts[i]));
    }
}

// Upper 12 bits of each word -> float16: all but the sign go one place down.
inline __m512i half_of_upper(__m512i words) {
  return _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(static_cast<int16_t>(0xBFF8)));
}

// The first tile of a chunk: as fp16_tile, out of 12 bits. Leaves the weights in float16 at `kept` [kChunk, width]
// for the other tiles where kKeep.
template <int MR, int NV, bool kNarrow, bool kKeep, int64_t kWidth, int kLines>
inline void float12_tile(const uint32_t* rows, int64_t row_stride, const uint16_t* panel, int64_t any_width,
                         float* totals, bool first, const char* next, int64_t ahead, uint16_t* kept) {
  constexpr int kBases = (MR + 2) / 3;
  const int64_t width = kWidth ? kWidth : any_width, row_bytes = row_stride * static_cast<int64_t>(sizeof(*rows));
  __m512h sums[MR][NV];
  UNROLLED for (int m = 0; m < MR; ++m)
    UNROLLED for (int v = 0; v < NV; ++v) sums[m][v] = _mm512_setzero_ph();
  // One pointer for three rows, as an address is a base and once or twice an index.
  const char* bases[kBases];
  UNROLLED for (int b = 0; b < kBases; ++b) bases[b] = reinterpret_cast<const char*>(rows) + 3 * b * row_bytes;
  for (int64_t input = 0; input < kChunk; input += kSharing) {
    // Hidden from the compiler, which would make one pointer for each row, more than there are registers.
    UNROLLED for (int b = 0; b < kBases; ++b) asm("" : "+r"(bases[b]));
    UNROLLED for (int v = 0; v < NV; ++v) {
      __m512i words[kShared], columns[kSharing];
      UNROLLED for (int i = 0; i < kShared; ++i) {
        const uint16_t* from = panel + i * width + v * kHalfLanes;
        words[i] = kNarrow && v == NV - 1
                       ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
                       : _mm512_loadu_si512(from);
      }
      columns[3] = _mm512_shrdi_epi16(_mm512_slli_epi16(words[2], 12), words[1], 4);
      columns[3] = half_of_upper(_mm512_shrdi_epi16(columns[3], words[0], 4));
      UNROLLED for (int i = 0; i < kShared; ++i) columns[i] = half_of_upper(words[i]);
      if constexpr (kKeep) {
        UNROLLED for (int u = 0; u < kSharing; ++u) {
          uint16_t* to = kept + u * width + v * kHalfLanes;
          if (kNarrow && v == NV - 1)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(columns[u]));
          else
            _mm512_storeu_si512(to, columns[u]);
        }
      }
      UNROLLED for (int line = 0; line < kLines; ++line) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
      next += ahead;
      UNROLLED for (int u = 0; u < kSharing; ++u)
        UNROLLED for (int m = 0; m < MR; ++m) {
          int32_t pair;
          std::memcpy(&pair, bases[m / 3] + (m % 3) * row_bytes + u * sizeof(*rows), sizeof(pair));
          sums[m][v] = _mm512_fmadd_ph((__m512h)_mm512_set1_epi32(pair), (__m512h)columns[u], sums[m][v]);
        }
    }
    panel += kShared * width;
    if constexpr (kKeep) kept += kSharing * width;
    UNROLLED for (int b = 0; b < kBases; ++b) bases[b] += kSharing * sizeof(*rows);
  }
  promote<MR, NV, kNarrow>(sums, totals, first);
}

// MR rows against all `width` columns. `ahead` bytes further with each vector of four inputs.
template <int MR, bool kKeep, int kLines>
inline void float12_tile_rows(const uint32_t* rows, int64_t row_stride, const uint16_t* panel, int64_t width,
                              float* totals, bool first, const char* next, int64_t ahead, uint16_t* kept) {
  if (width == kPanel) {
    float12_tile<MR, 2, false, kKeep, kPanel, kLines>(rows, row_stride, panel, width, totals, first, next, ahead,
                                                      kept);
    return;
  }
  int64_t column = 0;
  for (; column + kHalfLanes <= width; column += kHalfLanes)
    float12_tile<MR, 1, false, kKeep, 0, 1>(rows, row_stride, panel + column, width, totals + column, first, next,
                                            ahead, kept + column);
  if (column < width)
    float12_tile<MR, 1, true, kKeep, 0, 1>(rows, row_stride, panel + column, width, totals + column, first, next,
                                           ahead, kept + column);
}

}  // namespace millrace

#endif
