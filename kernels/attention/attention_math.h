// Inner products of attention: arithmetic and packing of operands.
//
// Operands are arrays of 32-bit words. With Float32Math a word is a float and a step of a product is one
// fused multiply-add; with Bfloat16Math a word is a pair of bfloat16 neighbours along the inner axis, and a step
// is a dot product of pairs added to a float32. A result is one chain over the inner axis, first to last,
// starting at zero or at what is there: so it does not matter in how many pieces, nor beside which other rows,
// it was made, and inner positions whose factor is zero change nothing.
#pragma once

#include <algorithm>

#include "paged_cache/kv_cache.h"
#include "native/simd.h"

namespace millrace {

struct Float32Math {
  static constexpr int64_t kPerWord = 1;
  static Vec step(Vec total, Vec a, Vec b) { return fma(a, b, total); }
  static void store_row(float* words, int64_t at, Mask m, Vec v) { store(words + at, m, v); }
};

#if defined(__AVX512BF16__)
struct Bfloat16Math {
  static constexpr int64_t kPerWord = 2;
  static Vec step(Vec total, Vec a, Vec b) { return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b); }
  static void store_row(float* words, int64_t at, Mask m, Vec v) {
    store_bf16(reinterpret_cast<uint16_t*>(words) + at, m, v);
  }
};
#endif

// e^x of what is at most 0, as 2 to the power of x / ln 2: within 2^-22 of itself, and another |x| 2^-24. 0 below
// e^-87, NaN for NaN.
inline Vec exp_of_negative(Vec x) {
  const Vec y = mul(x, set1(kLog2OfE));
  // Rounds to whole numbers, as sums so large have no other.
  const Vec large = set1(12582912.0f);
  const Vec n = sub(add(y, large), large), r = sub(y, n);
  Vec p = set1(1.3264727e-3f);
  p = fma(p, r, set1(9.6715127e-3f));
  p = fma(p, r, set1(5.5507337e-2f));
  p = fma(p, r, set1(2.40222421e-1f));
  p = fma(p, r, set1(6.93146978e-1f));
  p = fma(p, r, set1(1.0f));
  return select(less(x, set1(-87.0f)), zero(), scale_by_power(p, n));
}

// Sums that stay in registers. Shapes with more loads for each product are slower where another thread shares the core.
constexpr int kRowsAtOnce = 6;
#if defined(__AVX512F__)
constexpr int kVectorsAtOnce = 4;
#else
constexpr int kVectorsAtOnce = 2;
#endif
// Packed columns lie in groups of so many, each [words, kGroup]: what a tile passes over is one stream.
constexpr int64_t kGroup = kVectorsAtOnce * kLanes;

// c[i, j] (+)= sum over k of a[i, k] b[k, j] for kRows rows and kVectors vectors of a group of columns; k counts
// words. All loops over sums are unrolled: GCC 12 else moves them through memory before and after the loop.
template <typename Math, int kRows, int kVectors>
inline void product_tile(const float* a, int64_t a_stride, const float* b, int64_t steps, float* c,
                         int64_t c_stride, bool fresh) {
  // A pointer for each four rows: the processor adds up to three strides itself.
  constexpr int kPointers = (kRows + 3) / 4;
  const float* rows[kPointers];
  Vec total[kRows][kVectors];
  UNROLLED for (int i = 0; i < kPointers; ++i) rows[i] = a + 4 * i * a_stride;
  UNROLLED for (int i = 0; i < kRows; ++i)
    UNROLLED for (int j = 0; j < kVectors; ++j) total[i][j] = zero();
  if (!fresh) {
    UNROLLED for (int i = 0; i < kRows; ++i)
      UNROLLED for (int j = 0; j < kVectors; ++j) total[i][j] = load(c + i * c_stride + j * kLanes);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < steps; ++k, b += kGroup) {
    Vec column[kVectors];
    UNROLLED for (int j = 0; j < kVectors; ++j) column[j] = load(b + j * kLanes);
    UNROLLED for (int i = 0; i < kRows; ++i) {
      const Vec factor = set1(rows[i / 4][i % 4 * a_stride + k]);
      UNROLLED for (int j = 0; j < kVectors; ++j) total[i][j] = Math::step(total[i][j], factor, column[j]);
    }
  }
  UNROLLED for (int i = 0; i < kRows; ++i)
    UNROLLED for (int j = 0; j < kVectors; ++j) store(c + i * c_stride + j * kLanes, total[i][j]);
}

template <typename Math, int kVectors>
inline void product_rows(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t steps, float* c,
                         int64_t c_stride, bool fresh) {
  for (; rows >= kRowsAtOnce; rows -= kRowsAtOnce, a += kRowsAtOnce * a_stride, c += kRowsAtOnce * c_stride) {
    product_tile<Math, kRowsAtOnce, kVectors>(a, a_stride, b, steps, c, c_stride, fresh);
  }
  with_constant<kRowsAtOnce - 1>(rows, [&](auto left) {
    product_tile<Math, left, kVectors>(a, a_stride, b, steps, c, c_stride, fresh);
  });
}

// c [rows, vectors * kLanes] (+)= a [rows, steps] b [groups of columns, steps, kGroup].
template <typename Math>
inline void product(int64_t rows, int64_t vectors, const float* a, int64_t a_stride, const float* b, int64_t steps,
                    float* c, int64_t c_stride, bool fresh) {
  for (; vectors >= kVectorsAtOnce; vectors -= kVectorsAtOnce, b += steps * kGroup, c += kGroup) {
    product_rows<Math, kVectorsAtOnce>(rows, a, a_stride, b, steps, c, c_stride, fresh);
  }
  with_constant<kVectorsAtOnce - 1>(vectors, [&](auto left) {
    product_rows<Math, left>(rows, a, a_stride, b, steps, c, c_stride, fresh);
  });
}

// Cache lines that will be needed soon, called for a few at a time between other work: calls in bulk beyond the
// processor's miss buffers are dropped. They go through memory in ascending order, as its prefetchers like it.
class Ahead {
 public:
  // The first num_bytes of each of `count` rows.
  Ahead(const char* const* rows, int64_t count, int64_t num_bytes)
      : row_(rows), end_(rows + count), num_bytes_(num_bytes) {}

  // Calls for the next rows.
  void call(int64_t rows) {
    for (; rows > 0 && row_ != end_; --rows, ++row_) {
      const char* row = *row_;
      for (int64_t at = 0; at < num_bytes_; at += 64) __builtin_prefetch(row + at, 0, kSecondCache);
    }
  }

 private:
  const char* const* row_;
  const char* const* end_;
  int64_t num_bytes_;
};

// --- keys: [positions, D] to columns of positions, [words of D, positions] ---

#if defined(__AVX512F__)

// kLanes rows of up to as many words each to columns; absent words are zero.
template <typename Rows>
inline void transpose(const Rows& rows, int64_t offset, int64_t num_bytes, Vec out[16]) {
  __m512 r[16], t[16];
  if (num_bytes >= 64) {
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i] + offset);
  } else {
    const __mmask64 m = (1ull << num_bytes) - 1;
    for (int i = 0; i < 16; ++i) r[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi8(m, rows[i] + offset));
  }
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    out[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);
    out[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);
    out[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);
    out[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

#else

#if defined(__AVX2__)
// Whole rows. Halves of rows meet while they are loaded, which takes none of the units that shuffle.
template <typename Rows>
[[gnu::always_inline]] inline void transpose(const Rows& rows, int64_t offset, Vec out[8]) {
  UNROLLED for (int half = 0; half < 2; ++half) {
    const auto words = [&](int row) {
      const auto at = [&](int which) { return reinterpret_cast<const float*>(rows[which] + offset) + 4 * half; };
      return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at(row))), _mm_loadu_ps(at(row + 4)), 1);
    };
    const Vec a = words(0), b = words(1), c = words(2), d = words(3);
    const Vec ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    out[4 * half] = _mm256_shuffle_ps(ab, cd, 0x44);
    out[4 * half + 1] = _mm256_shuffle_ps(ab, cd, 0xee);
    const Vec above = _mm256_unpackhi_ps(a, b), below = _mm256_unpackhi_ps(c, d);
    out[4 * half + 2] = _mm256_shuffle_ps(above, below, 0x44);
    out[4 * half + 3] = _mm256_shuffle_ps(above, below, 0xee);
  }
}
#else
// Four rows by four words.
inline void transpose_four(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float32x4_t out[4]) {
  const float32x4x2_t ab = vtrnq_f32(a, b), cd = vtrnq_f32(c, d);
  for (int i = 0; i < 2; ++i) {
    out[i] = vcombine_f32(vget_low_f32(ab.val[i]), vget_low_f32(cd.val[i]));
    out[2 + i] = vcombine_f32(vget_high_f32(ab.val[i]), vget_high_f32(cd.val[i]));
  }
}

// Whole rows.
template <typename Rows>
inline void transpose(const Rows& rows, int64_t offset, Vec out[8]) {
  Vec r[8];
  for (int i = 0; i < kLanes; ++i) r[i] = load(reinterpret_cast<const float*>(rows[i] + offset));
  float32x4_t top[8], bottom[8];
  transpose_four(r[0].low, r[1].low, r[2].low, r[3].low, top);
  transpose_four(r[0].high, r[1].high, r[2].high, r[3].high, top + 4);
  transpose_four(r[4].low, r[5].low, r[6].low, r[7].low, bottom);
  transpose_four(r[4].high, r[5].high, r[6].high, r[7].high, bottom + 4);
  for (int i = 0; i < 8; ++i) out[i] = {top[i], bottom[i]};
}
#endif

// kLanes rows of up to as many words each to columns; absent words are zero.
template <typename Rows>
[[gnu::always_inline]] inline void transpose(const Rows& rows, int64_t offset, int64_t num_bytes, Vec out[8]) {
  constexpr int64_t kBytes = 4 * kLanes;
  if (num_bytes >= kBytes) return transpose(rows, offset, out);
  alignas(32) char parts[kLanes][kBytes] = {};
  const char* at[kLanes];
  for (int i = 0; i < kLanes; ++i) at[i] = static_cast<const char*>(std::memcpy(parts[i], rows[i] + offset, num_bytes));
  transpose(at, 0, out);
}

#endif

// Element types of a cache: how many of them a word of 32 bits holds, and how a transposed vector of words becomes words
// of an arithmetic.
template <typename Cache>
constexpr int64_t bytes_of(int64_t elements) {
  return elements * 4 / Cache::kPerWord;
}

struct Float32Cache {
  static constexpr int64_t kPerWord = 1;
  template <typename Math>
  static void expand(Vec words, Vec* out) {
    out[0] = words;
  }
  // The `at`th element of each word.
  static Vec element(Vec words, int) { return words; }
  static Vec values(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vec values(const char* p, Mask m) { return load(reinterpret_cast<const float*>(p), m); }
};

struct Bfloat16Cache {
  static constexpr int64_t kPerWord = 2;
  template <typename Math>
  static void expand(Vec words, Vec* out) {
    if constexpr (Math::kPerWord == 2) {
      out[0] = words;
    } else {
      for (int at = 0; at < 2; ++at) out[at] = element(words, at);
    }
  }
  static Vec element(Vec words, int at) { return at ? upper_half(words) : lower_half(words); }
  static Vec values(const char* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }
  static Vec values(const char* p, Mask m) { return load_bf16(reinterpret_cast<const uint16_t*>(p), m); }
#if defined(__AVX512F__)
  // Elements of two positions side by side; the second may be absent.
  static Vec value_pair(const char* low, const char* high, Mask m) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, low));
    if (!high) return _mm512_castsi512_ps(a);
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, high));
    return _mm512_castsi512_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
  }
#endif
};

struct Int8Cache {
  static constexpr int64_t kPerWord = 4;
  template <typename Math>
  static void expand(Vec words, Vec* out) {
#if defined(__AVX512F__)
    if constexpr (Math::kPerWord == 4) {
      // Bytes from 0 to 255, as the dot products of bytes take them.
      out[0] = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(words), _mm512_set1_epi8(-128)));
      return;
    }
#endif
    for (int at = 0; at < 4; ++at) out[at] = element(words, at);
  }
  static Vec element(Vec words, int at) {
    return at == 0   ? signed_byte<0>(words)
           : at == 1 ? signed_byte<1>(words)
           : at == 2 ? signed_byte<2>(words)
                     : signed_byte<3>(words);
  }
  static Vec values(const char* p) { return load_int8(reinterpret_cast<const int8_t*>(p)); }
  static Vec values(const char* p, Mask m) { return load_int8(reinterpret_cast<const int8_t*>(p), m); }
#if defined(__AVX512F__)
  // Elements [at, at + 64) of a row, of which `left` are there, as bytes.
  static __m512i line(const char* row, int64_t at, int64_t left) {
    if (left >= 64) return _mm512_loadu_si512(row + at);
    return _mm512_maskz_loadu_epi8((1ull << left) - 1, row + at);
  }
#endif
};

// Codes c of 4 bits that stand for 2 c - 15, as kernels/paged_cache/four_bits packs them: the low halves of a word's
// bytes are its first four elements, the high ones the others. Rows have multiples of 8 elements.
//
// Keys are by channel (paged_cache/key_groups.h): their steps and middles go into the queries.
struct Kivi4Cache {
  static constexpr int64_t kPerWord = 8;
  template <typename Math>
  static void expand(Vec words, Vec* out) {
#if defined(__AVX512F__)
    if constexpr (Math::kPerWord == 4) {
      const __m512i low = _mm512_castps_si512(words), flip = _mm512_set1_epi8(-128);
      out[0] = _mm512_castsi512_ps(_mm512_xor_si512(levels_of(low), flip));
      out[1] = _mm512_castsi512_ps(_mm512_xor_si512(levels_of(_mm512_srli_epi32(low, 4)), flip));
      return;
    }
#endif
    for (int at = 0; at < 8; ++at) out[at] = element(words, at);
  }
  static Vec element(Vec words, int at) {
    switch (at) {
      case 0: return half_byte<0>(words);
      case 1: return half_byte<2>(words);
      case 2: return half_byte<4>(words);
      case 3: return half_byte<6>(words);
      case 4: return half_byte<1>(words);
      case 5: return half_byte<3>(words);
      case 6: return half_byte<5>(words);
      default: return half_byte<7>(words);
    }
  }
  static Vec values(const char* p) { return load_int4(reinterpret_cast<const uint8_t*>(p)); }
  static Vec values(const char* p, Mask m) { return load_int4(reinterpret_cast<const uint8_t*>(p), m); }
#if defined(__AVX512F__)
  // Levels of the low halves of bytes.
  static __m512i levels_of(__m512i codes) {
    const __m512i levels = _mm512_broadcast_i32x4(_mm_setr_epi8(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15));
    return _mm512_shuffle_epi8(levels, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
  }
  static __m512i line(const char* row, int64_t at, int64_t left) {
    const char* from = row + at / 2;
    const __m256i packed = left >= 64 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                                      : _mm256_maskz_loadu_epi32((1u << left / 8) - 1, from);
    const __m512i words = _mm512_cvtepu32_epi64(packed);
    return levels_of(_mm512_or_si512(words, _mm512_slli_epi64(words, 28)));
  }
#endif
};

template <typename Cache>
constexpr bool by_channel = std::is_same<Cache, Kivi4Cache>::value;

// float8_e4m3.
struct Float8Cache {
  static constexpr int64_t kPerWord = 4;
  template <typename Math>
  static void expand(Vec words, Vec* out) {
    for (int at = 0; at < 4; ++at) out[at] = element(words, at);
  }
  static Vec element(Vec words, int at) {
    return at == 0   ? float8_byte<0>(words)
           : at == 1 ? float8_byte<1>(words)
           : at == 2 ? float8_byte<2>(words)
                     : float8_byte<3>(words);
  }
  static Vec values(const char* p) {
    return mul(load_float8(reinterpret_cast<const uint8_t*>(p)), set1(kFloat8Unit));
  }
  static Vec values(const char* p, Mask m) {
    return mul(load_float8(reinterpret_cast<const uint8_t*>(p), m), set1(kFloat8Unit));
  }
};

// Rows to call for beside each of the pieces that kLanes rows of dim elements are transposed in.
inline int64_t calls_beside(int64_t dim, int64_t elements) {
  const int64_t pieces = (dim + elements - 1) / elements;
  return (kLanes + pieces - 1) / pieces;
}

// Keys of kLanes positions (rows points at them) to columns of `packed` [words of dim, stride]; calls for `ahead`.
template <typename Math, typename Cache>
inline void pack_keys(const char* const* rows, Ahead& ahead, int64_t dim, float* packed, int64_t stride) {
  constexpr int64_t kElements = kLanes * Cache::kPerWord;  // of one transposed piece
  constexpr int64_t kOut = Cache::kPerWord / Math::kPerWord;  // vectors that a vector of words becomes
  const int64_t words = (dim + Math::kPerWord - 1) / Math::kPerWord;
  const int64_t calls = calls_beside(dim, kElements);
  for (int64_t at = 0; at < dim; at += kElements) {
    Vec columns[kLanes];
    ahead.call(calls);
    transpose(rows, bytes_of<Cache>(at), bytes_of<Cache>(std::min(kElements, dim - at)), columns);
    const int64_t begin = at / Math::kPerWord;
    float* to = packed + begin * stride;
    // Two loops: a comparison for every vector makes cached attention slower.
    const auto put = [&](auto whole) {
      for (int i = 0; i < kLanes; ++i) {
        Vec out[kOut];
        Cache::template expand<Math>(columns[i], out);
        for (int j = 0; j < kOut; ++j) {
          if (whole || begin + i * kOut + j < words) store(to + (i * kOut + j) * stride, out[j]);
        }
      }
    };
    if (begin + kLanes * kOut <= words)
      put(std::true_type());
    else
      put(std::false_type());
  }
}

// Values of `count` positions to `packed` [groups of dim, words of positions, kGroup].
template <typename Math, typename Cache>
inline void pack_values(const char* const* rows, Ahead& ahead, int64_t count, int64_t dim, float* packed) {
  const int64_t group = (count + Math::kPerWord - 1) / Math::kPerWord * kGroup;
  for (int64_t row = 0; row < count; row += Math::kPerWord, packed += kGroup) {
    ahead.call(Math::kPerWord);
    const bool single = Math::kPerWord == 2 && row + 1 == count;
    float* to = packed;
    for (int64_t i = 0; i < dim; i += kLanes) {
      const char* from = rows[row] + bytes_of<Cache>(i);
      if constexpr (Math::kPerWord == 2)
        store(to, Cache::value_pair(from, single ? nullptr : rows[row + 1] + bytes_of<Cache>(i), first(dim - i)));
      else
        store(to, i + kLanes <= dim ? Cache::values(from) : Cache::values(from, first(dim - i)));
      to += (i + kLanes) % kGroup ? kLanes : group - (kGroup - kLanes);
    }
  }
}

}  // namespace millrace
