// Products of bfloat16 weights that are stored and multiplied as float16.
//
// A weight is stored with a power of two for each output that brings its largest magnitude to [1, 2): nothing is lost
// of weights down to 2^-17 of that largest one, and of smaller ones at most 2^-25 of it. Inputs lie one by one
// (group 1). A row has a power of two of its own, which brings its largest magnitude to [128, 256), and is rounded to
// float16: 2^-11 of each input, where bfloat16 loses 2^-8.
//
// kChunk products are added up in float16 and their sum to a float32 total; chunks begin at multiples of kChunk,
// whatever the rows, tiles and threads. No partial sum passes kChunk * 256 * 2 = 2^15, half of what float16 holds.
// Each addition rounds by 2^-11 of the partial sum, together about what rounding the inputs to bfloat16 costs.
//
// Numbers that are no normal ones in float16 take the units no longer, whatever the thread's control word says.
#pragma once

#include "linear/gemm_micro.h"

#if defined(__AVX512FP16__)

namespace millrace {

constexpr int64_t kChunk = 64;
// Rows are scaled to 2^kRowExponent <= largest magnitude < 2^(kRowExponent + 1).
constexpr int kRowExponent = 7;
// Rows of one tile: 24 sums, two vectors of columns and an input fill the registers.
constexpr int64_t kFp16TileRows = 12;
constexpr int kHalfLanes = 32;

// --- rows and weights in float16 ---

// The exponent of a magnitude, given by its bits, bounded so that two to it and to minus it are normal numbers. NaN
// where it is not finite.
inline float exponent_of(uint32_t magnitude) {
  if (magnitude >= 0x7F800000) return __builtin_nanf("");
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  return static_cast<float>(exponent < -118 ? -118 : exponent);
}

// Like that of floats (gemm_micro.h), for bfloat16.
inline uint32_t largest_of(const uint16_t* from, int64_t count) {
  uint16_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = from[i] & 0x7FFF;
    most = bits > most ? bits : most;
  }
  return static_cast<uint32_t>(most) << 16;
}

// 2^exponent; NaN for NaN.
inline float power_of(float exponent) { return _mm512_cvtss_f32(scale_by_power(set1(1.0f), set1(exponent))); }

// values * 2^exponent in float16, to nearest even.
inline __m256i to_halves(Vec values, Vec exponent) {
  return _mm512_cvtps_ph(scale_by_power(values, exponent), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// A row in float16, each value twice, as a load that spreads 32 bits needs no other unit; zeros up to `padded`.
// Returns its scale. Where it is not finite, all is zero and the scale NaN.
inline float convert_fp16_row(const float* from, uint32_t* to, int64_t inputs, int64_t padded) {
  const float exponent = exponent_of(largest_of(from, inputs));
  if (exponent != exponent) {
    std::memset(to, 0, padded * sizeof(uint32_t));
    return exponent;
  }
  const Vec by = set1(kRowExponent - exponent);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Mask mask = inputs <= i ? Mask(0) : millrace::first(inputs - i);
    const __m512i halves = _mm512_cvtepu16_epi32(to_halves(load(from + i, mask), by));
    _mm512_storeu_si512(to + i, _mm512_or_si512(halves, _mm512_slli_epi32(halves, 16)));
  }
  return power_of(exponent - kRowExponent);
}

// --- one tile ---

// Adds the sums of a chunk to totals [MR, kPanel].
template <int MR, int NV, bool kNarrow>
inline __attribute__((always_inline)) void promote(const __m512h (&sums)[MR][NV], float* totals, bool first) {
  // By way of memory, from which halves are widened with half the work.
  alignas(64) __m512h kept[MR][NV];
  UNROLLED for (int m = 0; m < MR; ++m)
    UNROLLED for (int v = 0; v < NV; ++v) kept[m][v] = sums[m][v];
  asm("" : : "r"(kept) : "memory");
  UNROLLED for (int m = 0; m < MR; ++m) {
    const auto* halves = reinterpret_cast<const __m256i*>(kept[m]);
    UNROLLED for (int part = 0; part < 2 * NV - (kNarrow ? 1 : 0); ++part) {
      float* to = totals + m * kPanel + part * kLanes;
      const Vec sum = _mm512_cvtph_ps(_mm256_load_si256(halves + part));
      store(to, first ? sum : add(load(to), sum));
    }
  }
}

// A chunk of kChunk inputs: MR rows against NV vectors of columns, of which the last has only 16 where kNarrow.
// kWidth is the panel's width where it is known (0 else). kLines lines from `next` on are asked for with every input.
template <int MR, int NV, bool kNarrow, int64_t kWidth, int kLines>
inline void fp16_tile(const uint32_t* rows, int64_t row_stride, const uint16_t* panel, int64_t any_width,
                      float* totals, bool first, const char* next, int64_t ahead) {
  constexpr int kBases = (MR + 2) / 3, kUnrolled = 4;
  const int64_t width = kWidth ? kWidth : any_width, row_bytes = row_stride * static_cast<int64_t>(sizeof(*rows));
  __m512h sums[MR][NV];
  UNROLLED for (int m = 0; m < MR; ++m)
    UNROLLED for (int v = 0; v < NV; ++v) sums[m][v] = _mm512_setzero_ph();
  // One pointer for three rows, as an address is a base and once or twice an index.
  const char* bases[kBases];
  UNROLLED for (int b = 0; b < kBases; ++b) bases[b] = reinterpret_cast<const char*>(rows) + 3 * b * row_bytes;
  for (int64_t input = 0; input < kChunk; input += kUnrolled) {
    // Hidden from the compiler, which would make one pointer for each row, more than there are registers.
    UNROLLED for (int b = 0; b < kBases; ++b) asm("" : "+r"(bases[b]));
    UNROLLED for (int u = 0; u < kUnrolled; ++u) {
      __m512h columns[NV];
      UNROLLED for (int v = 0; v < NV; ++v) {
        const uint16_t* from = panel + u * width + v * kHalfLanes;
        columns[v] = kNarrow && v == NV - 1
                         ? (__m512h)_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
                         : (__m512h)_mm512_loadu_si512(from);
      }
      UNROLLED for (int line = 0; line < kLines; ++line) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
      next += ahead;
      UNROLLED for (int m = 0; m < MR; ++m) {
        int32_t pair;
        std::memcpy(&pair, bases[m / 3] + (m % 3) * row_bytes + u * sizeof(*rows), sizeof(pair));
        const __m512h value = (__m512h)_mm512_set1_epi32(pair);
        UNROLLED for (int v = 0; v < NV; ++v) sums[m][v] = _mm512_fmadd_ph(value, columns[v], sums[m][v]);
      }
    }
    panel += kUnrolled * width;
    UNROLLED for (int b = 0; b < kBases; ++b) bases[b] += kUnrolled * sizeof(*rows);
  }
  promote<MR, NV, kNarrow>(sums, totals, first);
}

// MR rows against all `width` columns.
template <int MR, int kLines>
inline void fp16_tile_rows(const uint32_t* rows, int64_t row_stride, const uint16_t* panel, int64_t width,
                           float* totals, bool first, const char* next, int64_t ahead) {
  if (width == kPanel) {
    fp16_tile<MR, 2, false, kPanel, kLines>(rows, row_stride, panel, width, totals, first, next, ahead);
    return;
  }
  int64_t column = 0;
  for (; column + kHalfLanes <= width; column += kHalfLanes)
    fp16_tile<MR, 1, false, 0, 1>(rows, row_stride, panel + column, width, totals + column, first, next, ahead);
  if (column < width)
    fp16_tile<MR, 1, true, 0, 1>(rows, row_stride, panel + column, width, totals + column, first, next, ahead);
}

}  // namespace millrace

#endif
