// Attention's products over bfloat16 keys and values in float16 multiply-adds, which take 32 products at once.
//
// Keys and values become float16 times a fixed power of two, exactly but for elements far below what counts; queries
// get a power of two each (largest magnitude in [2^-6, 2^-5)), and weights, at most 1, become 2^-5 of themselves.
// A chain of products is added up in float16 and its sum to a float32 total; chains begin at fixed places of the inner
// axis, so a result is the same in a tile of many rows and in one of few. A key goes in pairs of elements, whose even and
// odd ones are chains of kKeyChain each: they are short, as an error of a score is one of its weight. A value's chain
// goes over kPanel positions. No partial sum passes 64 * 2^-5 * 2^14 = 2^15, half of what float16 holds.
//
// A key or value that does not fit (an element too large, or not finite; a key that is small as a whole) is multiplied
// in float32, whichever rows look at it: its score anew, its weighted value after the chain of its panel.
#pragma once

#include "attention_math.h"
#include "attention_stream.h"

#if defined(__AVX512FP16__)

namespace millrace {

constexpr int64_t kKeyChain = 16;
constexpr int kHalves = 32;  // lanes
// What keys and values are multiplied by, as powers of two, and the magnitudes in bfloat16 that they must stay below:
// 2^10 and 2^7, so that both are below 2^14 in float16. Elements below 2^-18 and 2^-21 may be lost as a whole.
constexpr int kKeyShift = 4, kValueShift = 7;
constexpr int kKeyLimit = (127 + 14 - kKeyShift) << 7, kValueLimit = (127 + 14 - kValueShift) << 7;
// A key whose largest magnitude lies below 2^-8 (and is not 0) does not fit: what may be lost would be more than 2^-11.
constexpr int kLeastKey = (127 - 8) << 7;
constexpr int kQueryExponent = -6, kWeightExponent = -5;

inline float power_of_two(int n) {
  const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

[[gnu::always_inline]] inline __m512i magnitudes(__m512i pairs) {
  return _mm512_and_si512(pairs, _mm512_set1_epi16(0x7FFF));
}

// bfloat16, whose magnitudes are given, times 2^kShift in float16: the exponent in another bias, all else moved.
template <int kShift>
[[gnu::always_inline]] inline __m512i to_half(__m512i pairs, __m512i magnitude) {
  const __m512i moved =
      _mm512_slli_epi16(_mm512_subs_epu16(magnitude, _mm512_set1_epi16((112 - kShift) << 7)), 3);
  return _mm512_ternarylogic_epi32(moved, pairs, _mm512_set1_epi16(-0x8000), 0xD8);  // the sign of `pairs`
}

[[gnu::always_inline]] inline __m512h step_of_halves(__m512h total, int32_t factors, __m512i halves) {
  return _mm512_fmadd_ph((__m512h)_mm512_set1_epi32(factors), (__m512h)halves, total);
}

// x [dim] times factor in float16, scaled by a power of two, zeros up to whole vectors; returns the scale of a product
// with a key, NaN where an element is not finite.
inline float half_query(const float* x, int64_t dim, float factor, uint16_t* to) {
  Vec most = zero(), poison = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec v = mul(load(x + i, first(dim - i)), set1(factor));
    most = max(most, abs(v));
    poison = fma(v, zero(), poison);
  }
  const float largest_one = largest(most), faults = sum(poison);
  uint32_t bits;
  std::memcpy(&bits, &largest_one, sizeof(bits));
  const int exponent = faults == 0.0f ? std::max(-100, std::min(100, static_cast<int>(bits >> 23) - 127)) : 0;
  const Vec by = set1(static_cast<float>(kQueryExponent - exponent));
  for (int64_t i = 0; i < (dim + 31) / 32 * 32; i += kLanes) {
    const Mask m = i < dim ? first(dim - i) : Mask(0);
    const Vec v = scale_by_power(mul(load(x + i, m), set1(factor)), by);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return power_of_two(exponent - kQueryExponent - kKeyShift) + faults;
}

// Weights in float16, each twice, as a load that spreads 32 bits needs no unit that multiplies.
[[gnu::always_inline]] inline void store_half_weights(int32_t* to, Vec weights) {
  const __m512i twice = _mm512_set_epi32(0xF000F, 0xE000E, 0xD000D, 0xC000C, 0xB000B, 0xA000A, 0x90009, 0x80008, 0x70007,
                                         0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0);
  const __m256i halves = _mm512_cvtps_ph(mul(weights, set1(power_of_two(kWeightExponent))),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(halves)));
}

constexpr int kValueExponent = kWeightExponent + kValueShift;

// Sums of 16 pairs in float32: of the first eight, even and odd ones in turns, and of the others.
struct PairSums {
  Vec first, second;

  // Adds chains, which lie in memory, or begins with them.
  [[gnu::always_inline]] void take(const __m512h* kept, bool fresh) {
    const auto* halves = reinterpret_cast<const __m256i*>(kept);
    const Vec a = _mm512_cvtph_ps(_mm256_load_si256(halves)), b = _mm512_cvtph_ps(_mm256_load_si256(halves + 1));
    first = fresh ? a : add(first, a);
    second = fresh ? b : add(second, b);
  }

  [[gnu::always_inline]] Vec of_pairs() const {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    return add(_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second));
  }
};

// Keys that do not fit, by the largest of each lane's two halves.
[[gnu::always_inline]] inline Mask unfit_keys(__m512i most) {
  const __m512i largest_of =
      _mm512_and_si512(_mm512_max_epu16(most, _mm512_srli_epi32(most, 16)), _mm512_set1_epi32(0xFFFF));
  const Mask small = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(largest_of, _mm512_set1_epi32(1)),
                                             _mm512_set1_epi32(kLeastKey - 1));
  return small | _mm512_cmpge_epu32_mask(largest_of, _mm512_set1_epi32(kKeyLimit));
}

inline bool value_fits(const char* value, int64_t dim) {
  const __m512i limit = _mm512_set1_epi16(kValueLimit);
  __mmask32 beyond = 0;
  for (int64_t i = 0; i < dim; i += kHalves) {
    const __mmask32 m = dim - i >= kHalves ? ~0u : (1u << (dim - i)) - 1;
    beyond |= _mm512_cmpge_epu16_mask(magnitudes(_mm512_maskz_loadu_epi16(m, value + 2 * i)), limit);
  }
  return !beyond;
}

// In float32: a query's score against a key, and a value taken into weighted ones.
inline float plain_score(const float* q, float factor, const char* key, int64_t dim) {
  Vec total = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    total = fma(mul(load(q + i, m), set1(factor)), Bfloat16Cache::values(key + 2 * i, m), total);
  }
  return sum(total);
}

inline void add_plainly(float weight, const char* value, int64_t dim, float* sums) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    store(sums + i, m, fma(set1(weight), Bfloat16Cache::values(value + 2 * i, m), load(sums + i, m)));
  }
}

// Adds sums of a chain of values to weighted ones [width].
[[gnu::always_inline]] inline void promote_values(const __m256i* halves, int64_t width, bool fresh, float* to) {
  const Vec factor = set1(power_of_two(-kValueExponent));
  for (int64_t i = 0; i < width; i += kLanes) {
    store(to + i, fma(_mm512_cvtph_ps(_mm256_load_si256(halves + i / kLanes)), factor, fresh ? zero() : load(to + i)));
  }
}

// --- many rows, against packed columns ---

// Keys of kLanes positions to columns of `packed` [words of dim, kPanel] in float16; says which do not fit.
inline Mask pack_half_keys(const char* const* rows, Ahead& ahead, int64_t dim, int32_t* packed, int64_t stride) {
  const int64_t words = (dim + 1) / 2, calls = calls_beside(dim, kHalves);
  __m512i most = _mm512_setzero_si512();
  for (int64_t at = 0; at < words; at += kLanes) {
    Vec columns[kLanes];
    ahead.call(calls);
    transpose(rows, at * 4, std::min<int64_t>(64, 2 * dim - at * 4), columns);
    const int64_t count = std::min<int64_t>(kLanes, words - at);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i pairs = _mm512_castps_si512(columns[i]), magnitude = magnitudes(pairs);
      most = _mm512_max_epu16(most, magnitude);
      _mm512_storeu_si512(packed + (at + i) * stride, to_half<kKeyShift>(pairs, magnitude));
    }
  }
  return unfit_keys(most);
}

// Values of `count` positions to `packed` [positions, width] in float16, those that do not fit as zeros; says which.
inline uint64_t pack_half_values(const char* const* rows, Ahead& ahead, int64_t count, int64_t dim, uint16_t* packed,
                                 int64_t width) {
  uint64_t unfit = 0;
  for (int64_t row = 0; row < count; ++row, packed += width) {
    ahead.call(1);
    if (!value_fits(rows[row], dim)) {
      unfit |= 1ull << row;
      std::memset(packed, 0, 2 * width);
      continue;
    }
    for (int64_t i = 0; i < dim; i += kHalves) {
      const __mmask32 m = dim - i >= kHalves ? ~0u : (1u << (dim - i)) - 1;
      const __m512i pairs = _mm512_maskz_loadu_epi16(m, rows[row] + 2 * i);
      _mm512_storeu_si512(packed + i, to_half<kValueShift>(pairs, magnitudes(pairs)));
    }
  }
  return unfit;
}

// Chains of `steps` words of kRows rows and kVectors vectors of columns, left in memory.
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void half_chains(const int32_t* rows, int64_t row_stride, const int32_t* columns,
                                               int64_t column_stride, int64_t steps, __m512h kept[kRows][kVectors]) {
  __m512h total[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) total[i][j] = _mm512_setzero_ph();
  for (int64_t k = 0; k < steps; ++k, columns += column_stride) {
    __m512i column[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) column[j] = _mm512_loadu_si512(columns + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const int32_t factors = rows[i * row_stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) total[i][j] = step_of_halves(total[i][j], factors, column[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) kept[i][j] = total[i][j];
  asm("" : : "r"(kept) : "memory");
}

template <int kRows, int kVectors>
inline void half_scores(const int32_t* queries, int64_t stride, const float* scales, const int32_t* packed,
                        int64_t packed_stride, int64_t words, float* scores, int64_t scores_stride) {
  alignas(64) __m512h kept[kRows][kVectors];
  alignas(64) PairSums sums[kRows][kVectors];
  for (int64_t at = 0; at < words; at += kKeyChain) {
    half_chains<kRows, kVectors>(queries + at, stride, packed + at * packed_stride, packed_stride,
                                 std::min(kKeyChain, words - at), kept);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[i][j].take(&kept[i][j], at == 0);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      store(scores + i * scores_stride + j * kLanes, mul(sums[i][j].of_pairs(), set1(scales[i])));
}

// Columns in vectors of kHalves, of which `left` elements (a multiple of kLanes) are wanted.
template <int kRows, int kVectors>
inline void half_values(const int32_t* weights, int64_t stride, const int32_t* packed, int64_t packed_stride,
                        int64_t count, int64_t left, float* out, int64_t out_stride, bool fresh) {
  alignas(64) __m512h kept[kRows][kVectors];
  half_chains<kRows, kVectors>(weights, stride, packed, packed_stride, count, kept);
  for (int i = 0; i < kRows; ++i) {
    promote_values(reinterpret_cast<const __m256i*>(kept[i]), std::min<int64_t>(left, kVectors * kHalves), fresh,
                   out + i * out_stride);
  }
}

// --- few rows, straight from the cache ---

// Scores of kRows queries against two chunks of keys (see `few_scores`), and which of these do not fit.
template <int kRows>
inline void few_half_scores(const int32_t* queries, int64_t stride, const float* scales, const TwoOf& chunks,
                            float* const scores[2], int64_t row_bytes, int64_t dim, int64_t scores_stride, bool single,
                            Mask unfit[2]) {
  constexpr int64_t kHalf = kLanes / 2, kPieces = kKeyChain / kLanes;
  const int64_t pieces = (dim + kHalves - 1) / kHalves;
  TwoChunks words[2];
  __m512h total[kRows][2];
  PairSums whole[kRows][2];
  __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const auto take = [&](TwoChunks& to, int64_t piece, int64_t which) {
    if (piece >= pieces) return;
    to.take(which, Strided{chunks.keys[which], row_bytes}, 64 * piece, std::min<int64_t>(64, 2 * dim - 64 * piece));
  };
  take(words[0], 0, 0);
  take(words[0], 0, 1);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    if (piece % kPieces == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = _mm512_setzero_ph();
    }
    const TwoChunks& now = words[piece % 2];
    const int32_t* query = queries + piece * kLanes;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      take(words[(piece + 1) % 2], piece + 1, half);
      // A piece of a chunk is a line of each row: two for each word.
      const char* near = chunks.soon[half] + piece * kChunk * 64;
      const char* far = chunks.ahead[half] + piece * kChunk * 64;
#pragma GCC unroll 8
      for (int64_t word = 0; word < kHalf; ++word) {
        const int64_t line = word * 128, i = half * kHalf + word;
        call_near(near + line);
        call_near(near + line + 64);
        if (!half || !single) {
          call_far(far + line);
          call_far(far + line + 64);
        }
        __m512i key[2];
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
          const __m512i pairs = _mm512_load_si512(now.words[i] + g * kLanes), magnitude = magnitudes(pairs);
          most[g] = _mm512_max_epu16(most[g], magnitude);
          key[g] = to_half<kKeyShift>(pairs, magnitude);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
          for (int g = 0; g < 2; ++g) total[r][g] = step_of_halves(total[r][g], query[r * stride + i], key[g]);
      }
    }
    if ((piece + 1) % kPieces == 0 || piece + 1 == pieces) {
      alignas(64) __m512h kept[kRows][2];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
          kept[r][g] = total[r][g];
          asm("" : : "r"(&kept[r][g]) : "memory");
          whole[r][g].take(&kept[r][g], piece < kPieces);
        }
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < 2; ++g) {
    unfit[g] = unfit_keys(most[g]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) store(scores[g] + r * scores_stride, mul(whole[r][g].of_pairs(), set1(scales[r])));
  }
}

// Whether all of `count` values, `dim` (a multiple of kHalves) wide, fit.
inline bool values_fit(const Strided& values, int64_t count, int64_t dim) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t at = 0; at < count; ++at) {
    for (int64_t i = 0; i < dim; i += kHalves) {
      most = _mm512_max_epu16(most, magnitudes(_mm512_loadu_si512(values[at] + 2 * i)));
    }
  }
  return !_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(kValueLimit));
}

// Goes on with the chains of kRows rows and kVectors vectors, `sums` [rows, stride], over `count` values; asks for as
// much at `ahead`.
template <int kRows, int kVectors>
inline void few_half_values(const int32_t* weights, int64_t weights_stride, const Strided& values, int64_t count,
                            int64_t column, const char* ahead, uint16_t* sums, int64_t stride, bool fresh) {
  __m512h total[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      total[r][j] = fresh ? _mm512_setzero_ph() : (__m512h)_mm512_load_si512(sums + r * stride + j * kHalves);
  for (int64_t at = 0; at < count; ++at) {
    const char* from = values[at] + 2 * column;
    const char* const far = ahead + at * values.stride + 2 * column;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      call_far(far + 64 * j);
      const __m512i pairs = _mm512_loadu_si512(from + 64 * j);
      const __m512i value = to_half<kValueShift>(pairs, magnitudes(pairs));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r][j] = step_of_halves(total[r][j], weights[r * weights_stride + at], value);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) _mm512_store_si512(sums + r * stride + j * kHalves, (__m512i)total[r][j]);
}

// Values of any width that is a multiple of kHalves.
template <int kRows>
inline void few_half_products(const int32_t* weights, int64_t weights_stride, const Strided& values, int64_t count,
                              int64_t width, const char* ahead, uint16_t* sums, bool fresh) {
  int64_t column = 0;
  for (; column + 4 * kHalves <= width; column += 4 * kHalves)
    few_half_values<kRows, 4>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
  for (; column < width; column += kHalves)
    few_half_values<kRows, 1>(weights, weights_stride, values, count, column, ahead, sums + column, width, fresh);
}

}  // namespace millrace

#endif
