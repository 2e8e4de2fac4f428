// bfloat16 weights in 12 bits, multiplied as float32, without AVX-512.
//
// A weight is stored with a power of two for each output that brings its largest magnitude to [2^-112, 2^-111): then
// the first four of float32's eight bits of exponent are 0, and of its fraction bfloat16 fills seven bits. Sign, four
// bits of exponent and seven of fraction are all there is of every weight down to 2^-14 of its output's largest, and
// of zero. What is smaller becomes zero or that smallest one, whichever is nearer. A row has a power of two of its
// own, which brings its largest magnitude to [2^112, 2^113): no product that counts is too small for a normal number.
// Powers of two change no other bit, so sums are those of the same weights in 16 bits.
//
// Eight inputs of an output share three words of 32 bits: [inputs / 8][outputs / 8][3][8]. The lower half of word i
// is input 2 i as bfloat16, the upper one input 2 i + 1. Where these have the four bits of exponent that are 0, the
// lower halves hold input 6, and the upper ones input 7, highest bits first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear/gemm_kinds.h"
#include "linear/gemm_micro.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace millrace {

// Exponents as float32 stores them, less which they are powers of two; of an output's largest weight, and of a row's
// largest magnitude.
constexpr int kBias = 127, kTopExponent = 15, kRowExponent = 239;
// Largest squared error of an output's rounded weights: a quarter of bfloat16's own, which is about 2^-10.
constexpr double kMostLost = 1.0 / (1 << 24);

// --- packing ---

// The exponent of an output's largest weight, as bfloat16 stores it; 255 where one is not finite.
inline int top_exponent(const uint16_t* from, int64_t inputs) {
  int most = 1;
  for (int64_t i = 0; i < inputs; ++i) most = std::max<int>(most, from[i] >> 7 & 255);
  return most;
}

// A weight as 12 bits hold it beside the largest one's exponent.
inline uint16_t round_to_float12(uint16_t weight, int top) {
  const int exponent = weight >> 7 & 255, least = std::max(1, top - kTopExponent + 1);
  if (exponent >= least) return weight;
  // Half to even, which is zero.
  const bool up = exponent == least - 1 && (weight & 127);
  return (weight & 0x8000) | (up ? least << 7 : 0);
}

// 12 bits of a weight that they hold.
inline uint32_t to_float12(uint16_t weight, int top) {
  const int exponent = weight >> 7 & 255;
  const uint32_t sign = weight >> 4 & 0x800;
  return exponent ? sign | static_cast<uint32_t>(exponent - top + kTopExponent) << 7 | (weight & 127) : sign;
}

// Whether 12 bits lose too much of an output's weights.
inline bool is_too_wide(const uint16_t* from, int64_t inputs) {
  const int top = top_exponent(from, inputs);
  if (top == 255) return true;
  double all = 0.0, lost = 0.0;
  for (int64_t i = 0; i < inputs; ++i) {
    const double value = from_bfloat16(from[i]), error = value - from_bfloat16(round_to_float12(from[i], top));
    all += value * value;
    lost += error * error;
  }
  return lost > all * kMostLost;
}

// Puts eight inputs of one output, of which `count` are there, to words that lie kLanes apart.
inline void put_eight(const uint16_t* from, int64_t count, int top, uint32_t* to) {
  uint32_t bits[8] = {};
  for (int64_t i = 0; i < count; ++i) bits[i] = to_float12(round_to_float12(from[i], top), top);
  const auto half = [&](int i, int shared, int part) {
    return (bits[i] & 0x800) << 4 | (bits[shared] >> (8 - 4 * part) & 15) << 11 | (bits[i] & 0x7FF);
  };
  for (int i = 0; i < 3; ++i) to[i * kLanes] = half(2 * i + 1, 7, i) << 16 | half(2 * i, 6, i);
}

// The weights of `columns` outputs, of the panel's `width`.
inline void put_float12_panel(const uint16_t* from, int64_t inputs, int64_t columns, int64_t width, uint32_t* panel,
                              float* scales) {
  for (int64_t column = 0; column < columns; ++column, from += inputs) {
    const int top = top_exponent(from, inputs);
    scales[column] = std::ldexp(1.0f, top - kBias);
    uint32_t* to = panel + column / kLanes * 3 * kLanes + column % kLanes;
    for (int64_t input = 0; input < inputs; input += 8, to += 3 * width)
      put_eight(from + input, std::min<int64_t>(8, inputs - input), top, to);
  }
}

// --- products ---

// A scaled row, zeros up to `padded`. Returns its scale. Where it is not finite, all is zero and the scale NaN.
inline float convert_scaled_row(const float* from, float* to, int64_t inputs, int64_t padded) {
  const uint32_t most = largest_of(from, inputs);
  if (most >= 0x7F800000) {
    std::memset(to, 0, padded * sizeof(*to));
    return __builtin_nanf("");
  }
  // Bounded so that both powers are normal numbers.
  const int exponent = std::max(static_cast<int>(most >> 23), kRowExponent - kBias);
  const Vec by = set1(std::ldexp(1.0f, kRowExponent - exponent));
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) store(to + i, mul(load(from + i), by));
  for (; i < padded; i += kLanes)
    store(to + i, inputs <= i ? zero() : mul(load(from + i, millrace::first(inputs - i)), by));
  return std::ldexp(1.0f, exponent - kBias);
}

// Vectors of words: [3] at `from`.
inline __m256i load_words(const uint32_t* from, int at, int bytes = 0) {
  const char* there = reinterpret_cast<const char*>(from + at * kLanes) + bytes;
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(there));
}

// Inputs 6 and 7 of eight, by pairs as bfloat16.
inline __m256i last_pairs(const uint32_t* from) {
  const __m256i first = _mm256_and_si256(load_words(from, 0), _mm256_set1_epi16(0x7800));
  const __m256i second = _mm256_and_si256(load_words(from, 1), _mm256_set1_epi16(0x7800));
  // Eight places further down.
  const __m256i third = _mm256_and_si256(load_words(from, 2, 1), _mm256_set1_epi16(0x0078));
  const __m256i twelve = _mm256_or_si256(_mm256_or_si256(first, third), _mm256_srli_epi16(second, 4));
  // A sign is carried over the four bits of exponent that are 0.
  const __m256i spread = _mm256_srai_epi16(_mm256_add_epi16(twelve, twelve), 4);
  return _mm256_and_si256(spread, _mm256_set1_epi16(static_cast<int16_t>(0x87FF)));
}

// Rows are floats.
struct Float12Kind : FloatSums {
  using Weight = uint32_t;
  using Row = float;
  static constexpr int kGroup = 8, kStored = 3, kParts = 8;
  static Vec spread_row(const Row* row, int part) { return set1(row[part]); }
  static Vec column(const Weight* from, int part) {
    if (part >= 6) {
      const Vec pairs = _mm256_castsi256_ps(last_pairs(from));
      return part == 6 ? lower_half(pairs) : upper_half(pairs);
    }
    // Hidden from the compiler, which would keep the words for inputs 6 and 7, for which registers are too few.
    asm("" : "+r"(from));
    // The lower half of a word is the upper one of what begins two bytes before.
    const __m256i words = load_words(from, part / 2, part % 2 ? 0 : -2);
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(0x87FF0000)));
  }
  static Sum step(Sum sum, Vec row, Vec column) {
    // Inline assembly, because compilers move the sums from register to register otherwise.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(row), "x"(column));
    return sum;
  }
};

// `inputs` inputs (a multiple of eight) of `width` outputs as bfloat16, by pairs of inputs: [inputs / 2][width][2].
inline void expand_float12(const uint32_t* panel, int64_t inputs, int64_t width, uint16_t* to) {
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0x87FF));
  for (int64_t input = 0; input < inputs; input += 8, to += 8 * width)
    for (int64_t column = 0; column < width; column += kLanes, panel += 3 * kLanes) {
      const auto put = [&](int pair, __m256i pairs) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * (pair * width + column)), pairs);
      };
      UNROLLED for (int i = 0; i < 3; ++i) put(i, _mm256_and_si256(load_words(panel, i), mask));
      put(3, last_pairs(panel));
    }
}

}  // namespace millrace

#endif
