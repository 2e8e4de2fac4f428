// Element types of products.
//
// A kind multiplies a group of inputs in kParts parts, one after another: so few registers hold weights that none of
// the sums has to leave its own. kStored elements are a group of one output's weights.
#pragma once

#include <cstring>

#include "native/simd.h"

namespace millrace {

// Sums of all kinds but exact ones.
struct FloatSums {
  using Total = float;
  using Sum = Vec;
  static Sum none() { return zero(); }
  static Sum resume(const Total* from) { return load(from); }
  static void save(Total* to, Sum value) { store(to, value); }
};

// float32 rows and weights.
struct FloatKind : FloatSums {
  using Weight = float;
  using Row = float;
  static constexpr int kGroup = 1, kStored = 1, kParts = 1;
  static Vec spread_row(const Row* row, int) { return set1(*row); }
  static Vec column(const Weight* from, int) { return load(from); }
  static Sum step(Sum sum, Vec row, Vec column) { return fma(row, column, sum); }
};

#if defined(__AVX512FP16__)
// bfloat16 weights as float16, and rows of which each value lies there twice (gemm_fp16.h).
struct HalfKind {
  using Weight = uint16_t;
  using Row = uint32_t;
};
// Whether the products of bfloat16 weights have a scale for each row and each output.
constexpr bool kScaledHalves = true;
#elif defined(__AVX512BF16__)
constexpr bool kScaledHalves = false;
// bfloat16 rows and weights, by pairs.
struct HalfKind : FloatSums {
  using Weight = uint16_t;
  using Row = uint16_t;
  static constexpr int kGroup = 2, kStored = 2, kParts = 1;
  static __m512i spread_row(const Row* row, int) {
    int32_t pair;
    std::memcpy(&pair, row, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static __m512i column(const Weight* from, int) { return _mm512_loadu_si512(from); }
  static Sum step(Sum sum, __m512i row, __m512i column) {
    // Inline assembly, because compilers move the intrinsic's sums from register to register in every step.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(row), "v"(column));
    return sum;
  }
};
#elif defined(__ARM_FEATURE_BF16)
constexpr bool kScaledHalves = false;
// bfloat16 rows and weights, by pairs.
struct HalfKind : FloatSums {
  using Weight = uint16_t;
  using Row = uint16_t;
  static constexpr int kGroup = 2, kStored = 2, kParts = 1;
  static bfloat16x8_t spread_row(const Row* row, int) {
    uint32_t pair;
    std::memcpy(&pair, row, sizeof(pair));
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }
  struct Pairs {
    bfloat16x8_t low, high;
  };
  static Pairs column(const Weight* from, int) {
    return {vreinterpretq_bf16_u16(vld1q_u16(from)), vreinterpretq_bf16_u16(vld1q_u16(from + 8))};
  }
  static Sum step(Sum sum, bfloat16x8_t row, Pairs column) {
    return {vbfdotq_f32(sum.low, column.low, row), vbfdotq_f32(sum.high, column.high, row)};
  }
};
#else
constexpr bool kScaledHalves = false;
// bfloat16 weights by pairs; rows stay float32, as there is no instruction to gain from rounding them.
struct HalfKind : FloatSums {
  using Weight = uint16_t;
  using Row = float;
  static constexpr int kGroup = 2, kStored = 2, kParts = 2;
  static Vec spread_row(const Row* row, int part) { return set1(row[part]); }
  static Vec column(const Weight* from, int part) {
    const Vec pairs = load(reinterpret_cast<const float*>(from));
    return part ? upper_half(pairs) : lower_half(pairs);
  }
  static Sum step(Sum sum, Vec row, Vec column) { return fma(row, column, sum); }
};
#endif

// Whether bfloat16 weights can lie in 12 bits.
#if defined(__AVX512FP16__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool kHasFloat12 = true;
#else
constexpr bool kHasFloat12 = false;
#endif

// The same, leaving the expanded weights where more rows find them.
struct KeepingKind : HalfKind {};

// 8-bit weights (stored without sign, as w + 128 or as the level of a 4-bit one) and int8 rows, by fours, exact.
//
// Sums are those of the stored weights less kFlip; what that adds is a multiple of the row's own sum.
struct ByteSums {
  using Weight = uint8_t;
  using Total = int32_t;
  using Sum = Ints;
  static constexpr int kGroup = 4, kStored = 4;
  static Sum none() { return set1_int(0); }
  static Sum resume(const Total* from) { return load_ints(from); }
  static void save(Total* to, Sum value) { store_ints(to, value); }
};

// Four inputs of a row.
inline int32_t four_of(const int8_t* row) {
  int32_t four;
  std::memcpy(&four, row, sizeof(four));
  return four;
}

#if defined(__AVX512VNNI__)
#define MILLRACE_BYTE_DOTS
struct ByteKind : ByteSums {
  using Row = int8_t;
  using Bytes = __m512i;
  static constexpr int kParts = 1, kFlip = 0;
  static void arrange(Row*, int64_t) {}
  static Bytes spread_row(const Row* row, int = 0) { return _mm512_set1_epi32(four_of(row)); }
  static Bytes column(const Weight* from, int = 0) { return _mm512_loadu_si512(from); }
  static Bytes lower_levels(const Weight* from) { return _mm512_and_si512(column(from), _mm512_set1_epi8(15)); }
  static Bytes upper_levels(const Weight* from) {
    return _mm512_and_si512(_mm512_srli_epi16(column(from), 4), _mm512_set1_epi8(15));
  }
  static Sum step(Sum sum, Bytes row, Bytes column) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(column), "v"(row));
    return sum;
  }
};
#elif defined(__AVXVNNI__) || defined(MILLRACE_EMULATE_BYTE_DOTS)
#define MILLRACE_BYTE_DOTS
// The same instruction over 32 bytes, which processors without AVX-512 have.
struct ByteKind : ByteSums {
  using Row = int8_t;
  using Bytes = __m256i;
  static constexpr int kParts = 1, kFlip = 0;
  static void arrange(Row*, int64_t) {}
  static Bytes spread_row(const Row* row, int = 0) { return _mm256_set1_epi32(four_of(row)); }
  static Bytes column(const Weight* from, int = 0) { return _mm256_loadu_si256(reinterpret_cast<const Bytes*>(from)); }
  static Bytes lower_levels(const Weight* from) { return _mm256_and_si256(column(from), _mm256_set1_epi8(15)); }
  static Bytes upper_levels(const Weight* from) {
    return _mm256_and_si256(_mm256_srli_epi16(column(from), 4), _mm256_set1_epi8(15));
  }
#if defined(MILLRACE_EMULATE_BYTE_DOTS)
  // Even and odd bytes as words: both products are exact, as vpdpbusd is.
  static Sum step(Sum sum, Bytes row, Bytes column) {
    const Bytes even = _mm256_madd_epi16(_mm256_and_si256(column, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(row, 8), 8));
    const Bytes odd = _mm256_madd_epi16(_mm256_srli_epi16(column, 8), _mm256_srai_epi16(row, 8));
    return add(sum, add(even, odd));
  }
#else
  static Sum step(Sum sum, Bytes row, Bytes column) {
    // Assemblers take AVX-512's encoding where they may choose.
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(column), "x"(row));
    return sum;
  }
#endif
};
#elif defined(__ARM_FEATURE_DOTPROD)
#define MILLRACE_BYTE_DOTS
struct ByteKind : ByteSums {
  using Row = int8_t;
  struct Bytes {
    uint8x16_t low, high;
  };
  static constexpr int kParts = 1;
  static void arrange(Row*, int64_t) {}
  static int8x16_t spread_row(const Row* row, int = 0) { return vreinterpretq_s8_s32(vdupq_n_s32(four_of(row))); }
  static Bytes stored(const Weight* from) { return {vld1q_u8(from), vld1q_u8(from + 16)}; }
  static Bytes lower_levels(const Weight* from) {
    const Bytes both = stored(from);
    return {vandq_u8(both.low, vdupq_n_u8(15)), vandq_u8(both.high, vdupq_n_u8(15))};
  }
  static Bytes upper_levels(const Weight* from) {
    const Bytes both = stored(from);
    return {vshrq_n_u8(both.low, 4), vshrq_n_u8(both.high, 4)};
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int kFlip = 0;
  static Bytes column(const Weight* from, int = 0) { return stored(from); }
  static Sum step(Sum sum, int8x16_t row, Bytes column) {
    return {vusdotq_s32(sum.low, column.low, row), vusdotq_s32(sum.high, column.high, row)};
  }
#else
  // There is no product of bytes without and with sign, so weights get theirs back.
  static constexpr int kFlip = 128;
  static Bytes column(const Weight* from, int = 0) {
    const Bytes both = stored(from);
    return {veorq_u8(both.low, vdupq_n_u8(128)), veorq_u8(both.high, vdupq_n_u8(128))};
  }
  static Sum step(Sum sum, int8x16_t row, Bytes column) {
    return {vdotq_s32(sum.low, vreinterpretq_s8_u8(column.low), row),
            vdotq_s32(sum.high, vreinterpretq_s8_u8(column.high), row)};
  }
#endif
};
#elif defined(__AVX2__)
// Rows have 16 bits, and lie as `arrange` says: the bytes of a weight fall into even and odd ones.
struct ByteKind : ByteSums {
  using Row = int16_t;
  static constexpr int kParts = 2, kFlip = 0;
  // Four inputs become 0, 2, 1, 3; `count` is a multiple of four.
  static void arrange(Row* row, int64_t count) {
    for (Row* four = row; four < row + count; four += 4) {
      const __m128i inputs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(four));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(four), _mm_shufflelo_epi16(inputs, 0xD8));
    }
  }
  static __m256i spread_row(const Row* row, int part) {
    int32_t pair;
    std::memcpy(&pair, row + 2 * part, sizeof(pair));
    return _mm256_set1_epi32(pair);
  }
  static __m256i column(const Weight* from, int part) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return part ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF));
  }
  static Sum step(Sum sum, __m256i row, __m256i column) {
    // Inline assembly, because compilers would add products up first, for which registers are too few.
    const __m256i products = _mm256_madd_epi16(row, column);
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
  }
};

// 4-bit levels, two fours of inputs in the same bytes.
struct LevelKind : ByteKind {
  static constexpr int kGroup = 8, kParts = 4;
  static __m256i column(const Weight* from, int part) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (part == 3) return _mm256_srli_epi16(bytes, 12);
    const __m256i down = part == 0 ? bytes : _mm256_srli_epi16(bytes, part == 1 ? 8 : 4);
    return _mm256_and_si256(down, _mm256_set1_epi16(15));
  }
};
#else
// Rows have 16 bits; one input of the four is multiplied after the other.
struct ByteKind : ByteSums {
  using Row = int16_t;
  static constexpr int kParts = 4, kFlip = 0;
  static void arrange(Row*, int64_t) {}
  static int16x4_t spread_row(const Row* row, int part) { return vdup_n_s16(row[part]); }
  // Bits [shift, shift + 8) or less of each output's 32, of 8 outputs.
  static int16x8_t bits(const Weight* from, int shift, int32_t mask) {
    const int32x4_t down = vdupq_n_s32(-shift), wanted = vdupq_n_s32(mask);
    const auto some = [&](const Weight* four) {
      return vmovn_s32(vandq_s32(vshlq_s32(vreinterpretq_s32_u8(vld1q_u8(four)), down), wanted));
    };
    return vcombine_s16(some(from), some(from + 16));
  }
  static int16x8_t column(const Weight* from, int part) { return bits(from, 8 * part, 255); }
  static Sum step(Sum sum, int16x4_t row, int16x8_t column) {
    return {vmlal_s16(sum.low, vget_low_s16(column), row), vmlal_s16(sum.high, vget_high_s16(column), row)};
  }
};

// 4-bit levels, two fours of inputs in the same bytes.
struct LevelKind : ByteKind {
  static constexpr int kGroup = 8, kParts = 8;
  static int16x8_t column(const Weight* from, int part) { return bits(from, 8 * (part % 4) + part / 4 * 4, 15); }
};
#endif

// Exact sums less a number, as floats.
inline Vec to_floats(Ints sums, int32_t less) { return to_floats(sub(sums, set1_int(less))); }

}  // namespace millrace
