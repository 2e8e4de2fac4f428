// Attention's products over int8 and kivi4 keys and values, in integers (AVX-512 VNNI).
//
// Queries and weights become levels of 16 bits, each the sum of a high and a low byte, so a product is two dot products
// of bytes; keys and values are taken as they lie in the cache, those of four bits as the bytes that they stand for. Integer sums are exact: their order decides no bit.
// No sum overflows: a query's levels are bounded by `query_limit`, weights by kMostLevel over kPartTokens positions.
#pragma once

#include "attention/attention_math.h"
#include "attention/attention_stream.h"

namespace millrace {

// A word is four bytes along the inner axis.
struct IntegerMath {
  static constexpr int64_t kPerWord = 4;
};

#if defined(__AVX512VNNI__)

// Largest level of a weight, because 65535 * 128 * 256 is less than 2^31.
constexpr float kMostLevel = 65535.0f;
constexpr int64_t kLineBytes = 64;

inline int64_t whole_lines(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

inline __m512i dot_bytes(__m512i total, __m512i no_signs, __m512i with_signs) {
  // Inline assembly, because GCC 12 moves the sums of the intrinsic from register to register.
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(no_signs), "v"(with_signs));
  return total;
}

// Largest level of a query of `dim` elements: sums with keys of up to 128 stay within 31 bits, the high byte within 7.
inline float query_limit(int64_t dim) {
  return static_cast<float>(std::min<int64_t>(32639, INT32_MAX / (128 * dim)));
}

struct QueryLevels {
  float scale;   // of a level; not finite where an element is not
  int32_t bias;  // what a product has too much because keys are taken as 0 to 255
};

// Levels of x [dim] times factor: high bytes at `high`, low ones at `low`, zeros up to a whole line.
inline QueryLevels query_levels(const float* x, int64_t dim, float factor, int8_t* high, int8_t* low) {
  Vec most = zero(), poison = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec v = mul(load(x + i, first(dim - i)), set1(factor));
    most = max(most, abs(v));
    poison = fma(v, zero(), poison);
  }
  const float largest_level = query_limit(dim), range = largest(most);
  QueryLevels levels = {range / largest_level + sum(poison), 0};
  const bool usable = range > 0.0f && levels.scale < INFINITY;
  const Vec inverse = set1(usable ? largest_level / range * factor : 0.0f);
  const Vec bound = set1(largest_level);
  __m512i total = _mm512_setzero_si512();
  for (int64_t i = 0; i < whole_lines(dim); i += kLanes) {
    const Vec v = usable ? mul(load(x + i, first(dim > i ? dim - i : 0)), inverse) : zero();
    const __m512i level = _mm512_cvtps_epi32(max(min(v, bound), sub(zero(), bound)));
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(level, _mm512_set1_epi32(128)), 8);
    _mm_store_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
    _mm_store_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(level));
    total = _mm512_add_epi32(total, level);
  }
  levels.bias = 128 * _mm512_reduce_add_epi32(total);
  return levels;
}

// Weights [count] (a multiple of kLanes, padded with zeros) to levels; returns the factor of a level.
inline float weight_levels(const float* weights, int64_t count, uint8_t* high, uint8_t* low) {
  Vec most = zero(), poison = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec v = load(weights + i);
    most = max(most, v);
    poison = fma(v, zero(), poison);
  }
  const float range = largest(most), faults = sum(poison);
  const bool usable = range > 0.0f && faults == 0.0f;
  const Vec inverse = set1(usable ? kMostLevel / range : 0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec v = usable ? min(mul(load(weights + i), inverse), set1(kMostLevel)) : zero();
    const __m512i level = _mm512_cvtps_epi32(v);
    _mm_store_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(level, 8)));
    _mm_store_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(level));
  }
  return range / kMostLevel + faults;
}

inline __m512i both(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

// Sums of kRows rows of bytes with kVectors vectors of words. A row's high bytes are followed, `low` words later, by
// its low ones. kUnsigned: the columns, else the rows, are the bytes without signs. All loops over sums are unrolled:
// GCC 12 else moves them through memory where a tile is not inlined.
template <bool kUnsigned, int kRows, int kVectors>
inline void integer_tile(const int32_t* rows, int64_t row_stride, int64_t low, const int32_t* columns,
                         int64_t column_stride, int64_t steps, __m512i out[kRows][kVectors]) {
  __m512i high_sum[kRows][kVectors], low_sum[kRows][kVectors];
  UNROLLED for (int i = 0; i < kRows; ++i) {
    UNROLLED for (int j = 0; j < kVectors; ++j) high_sum[i][j] = low_sum[i][j] = _mm512_setzero_si512();
  }
  for (int64_t k = 0; k < steps; ++k, columns += column_stride) {
    __m512i column[kVectors];
    UNROLLED for (int j = 0; j < kVectors; ++j) column[j] = _mm512_loadu_si512(columns + j * kLanes);
    UNROLLED for (int i = 0; i < kRows; ++i) {
      const __m512i a = _mm512_set1_epi32(rows[i * row_stride + k]);
      const __m512i b = _mm512_set1_epi32(rows[i * row_stride + low + k]);
      UNROLLED for (int j = 0; j < kVectors; ++j) {
        high_sum[i][j] = kUnsigned ? dot_bytes(high_sum[i][j], column[j], a) : dot_bytes(high_sum[i][j], a, column[j]);
        low_sum[i][j] = kUnsigned ? dot_bytes(low_sum[i][j], column[j], b) : dot_bytes(low_sum[i][j], b, column[j]);
      }
    }
  }
  UNROLLED for (int i = 0; i < kRows; ++i) {
    UNROLLED for (int j = 0; j < kVectors; ++j) out[i][j] = both(high_sum[i][j], low_sum[i][j]);
  }
}

// Scores from a query's integer sums.
inline Vec scores_of(__m512i sums, const QueryLevels& levels) {
  return mul(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(levels.bias))), set1(levels.scale));
}

// --- many rows, against packed columns ---

template <int kRows, int kVectors>
inline void integer_scores(const int32_t* queries, int64_t stride, const QueryLevels* levels, const int32_t* packed,
                           int64_t packed_stride, int64_t words, float* scores, int64_t scores_stride) {
  __m512i sums[kRows][kVectors];
  integer_tile<true, kRows, kVectors>(queries, stride, stride / 2, packed, packed_stride, words, sums);
  UNROLLED for (int i = 0; i < kRows; ++i) {
    UNROLLED for (int j = 0; j < kVectors; ++j)
      store(scores + i * scores_stride + j * kLanes, scores_of(sums[i][j], levels[i]));
  }
}

template <int kRows>
inline void integer_values(const int32_t* weights, int64_t stride, const int32_t* packed, int64_t packed_stride,
                           int64_t words, int32_t* out, int64_t out_stride, bool fresh) {
  __m512i sums[kRows][4];
  integer_tile<false, kRows, 4>(weights, stride, stride / 2, packed, packed_stride, words, sums);
  UNROLLED for (int i = 0; i < kRows; ++i) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      int32_t* to = out + i * out_stride + j * kLanes;
      const __m512i before = fresh ? _mm512_setzero_si512() : _mm512_loadu_si512(to);
      _mm512_storeu_si512(to, _mm512_add_epi32(before, sums[i][j]));
    }
  }
}

// Lines from element `at` on, one of each of four positions, to four vectors of words: lane l of vector j holds elements 16 l + 4 j to
// 16 l + 4 j + 3.
template <typename Cache, typename Rows>
inline void interleave(const Rows& rows, int64_t at, int64_t left, __m512i out[4]) {
  __m512i r[4];
  for (int i = 0; i < 4; ++i) r[i] = Cache::line(rows[i], at, left);
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  out[0] = _mm512_unpacklo_epi16(a, c);
  out[1] = _mm512_unpackhi_epi16(a, c);
  out[2] = _mm512_unpacklo_epi16(b, d);
  out[3] = _mm512_unpackhi_epi16(b, d);
}

// Values of `words` times four positions to packed [words, width]; width is dim up to whole lines.
template <typename Cache>
inline void pack_value_words(const char* const* rows, Ahead& ahead, int64_t words, int64_t dim, int32_t* packed,
                             int64_t width) {
  for (int64_t word = 0; word < words; ++word, packed += width) {
    ahead.call(4);
    for (int64_t at = 0; at < dim; at += kLineBytes) {
      __m512i out[4];
      interleave<Cache>(rows + 4 * word, at, dim - at, out);
      for (int j = 0; j < 4; ++j) _mm512_storeu_si512(packed + at + j * kLanes, out[j]);
    }
  }
}

// Integer sums [width] as `interleave` orders them to floats [dim] in the order of the elements.
inline void values_in_order(const int32_t* sums, float factor, int64_t dim, float* out) {
  for (int64_t at = 0; at < dim; at += kLineBytes) {
    __m512i s[4], half[4];
    for (int j = 0; j < 4; ++j) s[j] = _mm512_loadu_si512(sums + at + j * kLanes);
    for (int j = 0; j < 2; ++j) {
      half[j] = _mm512_shuffle_i32x4(s[2 * j], s[2 * j + 1], 0x44);      // lanes 0 and 1 of both
      half[2 + j] = _mm512_shuffle_i32x4(s[2 * j], s[2 * j + 1], 0xee);  // lanes 2 and 3
    }
    for (int lane = 0; lane < 4 && at + lane * kLanes < dim; ++lane) {
      const __m512i low = half[lane / 2 * 2], high = half[lane / 2 * 2 + 1];
      const __m512i whole = lane % 2 ? _mm512_shuffle_i32x4(low, high, 0xdd) : _mm512_shuffle_i32x4(low, high, 0x88);
      store(out + at + lane * kLanes, mul(_mm512_cvtepi32_ps(whole), set1(factor)));
    }
  }
}

// --- few rows, straight from the cache ---

// The sums of four vectors within each quarter: lane 4 q + i of the result is that of quarter q of vector i.
[[gnu::always_inline]] inline __m512i quarter_sums(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// Lane 4 i + j of the result is the sum over quarters of lanes 4 q + j of vector i.
[[gnu::always_inline]] inline __m512i sums_of_quarters(const __m512i v[4]) {
  const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88), _mm512_shuffle_i32x4(v[0], v[1], 0xdd));
  const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x88), _mm512_shuffle_i32x4(v[2], v[3], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// Integer sums of kRows queries against 16 positions; asks for as much at `ahead`. Keys have kLines whole lines, and
// all levels stay in registers; or, where kLines is 0, any dim. A sum takes the high bytes first: shifted by a byte, it
// goes on with the low ones.
template <typename Cache, int kRows, int kLines>
[[gnu::always_inline]] inline void few_integer_sums(const int32_t* queries, int64_t stride, const Strided& keys,
                                                    int64_t dim, const char* ahead, __m512i out[kRows]) {
  const __m512i flip = _mm512_set1_epi8(-128);
  __m512i level[2][kRows][kLines + 1];
  UNROLLED for (int half = 0; half < 2; ++half)
    UNROLLED for (int r = 0; r < kRows; ++r)
      UNROLLED for (int line = 0; line < kLines; ++line)
        level[half][r][line] = _mm512_load_si512(queries + r * stride + half * (stride / 2) + line * kLanes);
  __m512i quarters[kRows][4];
  UNROLLED for (int four = 0; four < 4; ++four) {
    __m512i sum[kRows][4];
    UNROLLED for (int i = 0; i < 4; ++i) {
      const char* from = keys[4 * four + i];
      const char* far = ahead + (4 * four + i) * keys.stride;
      UNROLLED for (int r = 0; r < kRows; ++r) sum[r][i] = _mm512_setzero_si512();
      if constexpr (kLines > 0) {
        __m512i key[kLines];
        UNROLLED for (int line = 0; line < kLines; ++line) {
          if (bytes_of<Cache>(line * kLineBytes) % kLineBytes == 0) call_far(far + bytes_of<Cache>(line * kLineBytes));
          key[line] = _mm512_xor_si512(Cache::line(from, line * kLineBytes, kLineBytes), flip);
        }
        UNROLLED for (int half = 0; half < 2; ++half)
          UNROLLED for (int r = 0; r < kRows; ++r) {
            UNROLLED for (int line = 0; line < kLines; ++line)
              sum[r][i] = dot_bytes(sum[r][i], key[line], level[half][r][line]);
            if (half == 0) sum[r][i] = _mm512_slli_epi32(sum[r][i], 8);
          }
      } else {
        __m512i low[kRows];
        for (int r = 0; r < kRows; ++r) low[r] = _mm512_setzero_si512();
        for (int64_t at = 0; at < dim; at += kLineBytes) {
          call_far(far + bytes_of<Cache>(at));
          const __m512i key = _mm512_xor_si512(Cache::line(from, at, dim - at), flip);
          for (int r = 0; r < kRows; ++r) {
            const int32_t* query = queries + r * stride + at / 4;
            sum[r][i] = dot_bytes(sum[r][i], key, _mm512_load_si512(query));
            low[r] = dot_bytes(low[r], key, _mm512_load_si512(query + stride / 2));
          }
        }
        for (int r = 0; r < kRows; ++r) sum[r][i] = both(sum[r][i], low[r]);
      }
    }
    UNROLLED for (int r = 0; r < kRows; ++r)
      quarters[r][four] = quarter_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
  UNROLLED for (int r = 0; r < kRows; ++r) out[r] = sums_of_quarters(quarters[r]);
}

// Scores of kRows queries against 16 positions.
template <typename Cache, int kRows>
inline void few_integer_scores(const int32_t* queries, int64_t stride, const QueryLevels* levels,
                               const Strided& keys, int64_t dim, const char* ahead, float* scores,
                               int64_t scores_stride) {
  __m512i sums[kRows];
  switch (dim) {
    case kLineBytes: few_integer_sums<Cache, kRows, 1>(queries, stride, keys, dim, ahead, sums); break;
    case 2 * kLineBytes: few_integer_sums<Cache, kRows, 2>(queries, stride, keys, dim, ahead, sums); break;
    default: few_integer_sums<Cache, kRows, 0>(queries, stride, keys, dim, ahead, sums);
  }
  UNROLLED for (int r = 0; r < kRows; ++r) store(scores + r * scores_stride, scores_of(sums[r], levels[r]));
}

// Adds the weighted values of `count` chunks, whose levels of places that nobody sees are zero; asks for as much at the
// addresses `ahead` of as many.
template <typename Cache, int kRows>
inline void few_integer_values(const int32_t* weights, int64_t stride, const Strided* chunks, int64_t count,
                               int64_t dim, const char* const* ahead, int32_t* out, int64_t out_stride, bool fresh) {
  constexpr int kWords = kChunk / 4;
  for (int64_t at = 0; at < dim; at += kLineBytes) {
    __m512i high[kRows][4], low[kRows][4];
    UNROLLED for (int r = 0; r < kRows; ++r) {
      UNROLLED for (int j = 0; j < 4; ++j) high[r][j] = low[r][j] = _mm512_setzero_si512();
    }
    for (int64_t which = 0; which < count; ++which) {
      const char* from = chunks[which].base;
      const int64_t row_bytes = chunks[which].stride;
      // Line after line, while the values are taken across them.
      constexpr int64_t kBytes = bytes_of<Cache>(kLineBytes);
      const char* far = ahead[which] + bytes_of<Cache>(at) * kChunk;
      const int32_t* const levels = weights + which * kWords;
      UNROLLED for (int word = 0; word < kWords; ++word) {
        UNROLLED for (int i = 0; i < 4; ++i)
          if (i * kBytes % kLineBytes == 0) call_far(far + (4 * word + i) * kBytes);
        __m512i value[4];
        interleave<Cache>(Strided{from, row_bytes}, at, dim - at, value);
        from += 4 * row_bytes;
        UNROLLED for (int r = 0; r < kRows; ++r) {
          const __m512i a = _mm512_set1_epi32(levels[r * stride + word]);
          const __m512i b = _mm512_set1_epi32(levels[r * stride + stride / 2 + word]);
          UNROLLED for (int j = 0; j < 4; ++j) {
            high[r][j] = dot_bytes(high[r][j], a, value[j]);
            low[r][j] = dot_bytes(low[r][j], b, value[j]);
          }
        }
      }
    }
    UNROLLED for (int r = 0; r < kRows; ++r) {
      UNROLLED for (int j = 0; j < 4; ++j) {
        int32_t* to = out + r * out_stride + at + j * kLanes;
        const __m512i before = fresh ? _mm512_setzero_si512() : _mm512_loadu_si512(to);
        _mm512_storeu_si512(to, _mm512_add_epi32(before, both(high[r][j], low[r][j])));
      }
    }
  }
}

#endif

}  // namespace millrace
