// Attention's second product, weights by values of bfloat16, in float16 multiply-adds: twice as many at once.
//
// Weights are at most 1 and rounded to float16, 2^-12 of each. Values are multiplied by 2^kValueExponent, which
// changes none from 2^-18 up to kLeastWild; smaller ones count as nothing. Products of kPanel places (that many from
// place 0 of the part on, whoever computes them) are added up in float16, below kPanel * 2^9 = 2^15, and their sum to
// a float32 one. A line of kHalves values with one that is as large as kLeastWild, or not finite, is *wild*: it goes
// to the float32 sum by itself, with its weight in float32, before that of its panel. What is wild depends on the
// line alone, and a line whose weight is 0 changes nothing, so that bits depend on nothing but the row and the part.
#pragma once

#include "attention/attention_products.h"

#if defined(__AVX512FP16__)

namespace millrace {

// Values of a line of 64 bytes.
constexpr int64_t kHalves = 32;
constexpr int kValueExponent = 4;
// Bits of 32.
constexpr int kLeastWild = 0x4200;
// Difference of bfloat16's and float16's exponents, at bfloat16's position of them.
constexpr int kExponentsApart = (127 - 15 - kValueExponent) << 7;
// Columns that are packed side by side.
constexpr int64_t kHalfGroup = 4 * kHalves;

[[gnu::always_inline]] inline __m512i magnitudes(__m512i line) {
  return _mm512_and_si512(line, _mm512_set1_epi16(0x7FFF));
}

inline bool any_wild(__m512i most) {
  return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(kLeastWild)) != 0;
}

// Values times 2^kValueExponent, where none is wild: exponents are moved, which saturates to zero.
[[gnu::always_inline]] inline __m512h to_halves(__m512i line, __m512i magnitude) {
  const __m512i near = _mm512_subs_epu16(magnitude, _mm512_set1_epi16(kExponentsApart));
  const __m512i sign = _mm512_set1_epi16(-0x8000);
  return (__m512h)_mm512_ternarylogic_epi32(sign, line, _mm512_slli_epi16(near, 3), 0xCA);
}

[[gnu::always_inline]] inline __m512h spread(const float* word) {
  int32_t pair;
  std::memcpy(&pair, word, sizeof(pair));
  return (__m512h)_mm512_set1_epi32(pair);
}

// Adds a weight times a wild line of values to sums [kHalves].
inline void add_wild(float by, __m512i line, float* sums) {
  const Vec weight = set1(by);
  store(sums, fma(weight, widen_bf16(_mm512_castsi512_si256(line)), load(sums)));
  store(sums + kLanes, fma(weight, widen_bf16(_mm512_extracti64x4_epi64(line, 1)), load(sums + kLanes)));
}

// Adds sums in float16, at an address of 64 bytes, to those in float32 or begins them.
[[gnu::always_inline]] inline void add_halves(const void* halves, float* sums, bool fresh) {
  const Vec by = set1(1.0f / (1 << kValueExponent));
  UNROLLED for (int part = 0; part < 2; ++part) {
    const Vec sum = _mm512_cvtph_ps(_mm256_load_si256(static_cast<const __m256i*>(halves) + part));
    store(sums + part * kLanes, fma(sum, by, fresh ? zero() : load(sums + part * kLanes)));
  }
}

// Sums of kRows rows, kVectors lines each, over up to kPanel places; packed [places, kHalfGroup].
template <int kRows, int kVectors>
inline void halves_tile(const float* weights, const uint16_t* packed, int64_t count, float* sums, int64_t stride,
                        bool fresh) {
  __m512h total[kRows][kVectors];
  UNROLLED for (int i = 0; i < kRows; ++i)
    UNROLLED for (int j = 0; j < kVectors; ++j) total[i][j] = _mm512_setzero_ph();
  for (int64_t k = 0; k < count; ++k, packed += kHalfGroup) {
    __m512h column[kVectors];
    UNROLLED for (int j = 0; j < kVectors; ++j) column[j] = (__m512h)_mm512_load_si512(packed + j * kHalves);
    UNROLLED for (int i = 0; i < kRows; ++i) {
      const __m512h factor = spread(weights + i * kPartTokens + k);
      UNROLLED for (int j = 0; j < kVectors; ++j) total[i][j] = _mm512_fmadd_ph(factor, column[j], total[i][j]);
    }
  }
  // By way of memory, from which halves are widened with half the work.
  alignas(64) __m512h kept[kRows][kVectors];
  UNROLLED for (int i = 0; i < kRows; ++i)
    UNROLLED for (int j = 0; j < kVectors; ++j) kept[i][j] = total[i][j];
  asm("" : : "r"(kept) : "memory");
  UNROLLED for (int i = 0; i < kRows; ++i)
    UNROLLED for (int j = 0; j < kVectors; ++j) add_halves(&kept[i][j], sums + i * stride + j * kHalves, fresh);
}

template <int kVectors>
inline void halves_rows(int64_t rows, const float* weights, const uint16_t* packed, int64_t count, float* sums,
                        int64_t stride, bool fresh) {
  for (; rows >= kRowsAtOnce; rows -= kRowsAtOnce) {
    halves_tile<kRowsAtOnce, kVectors>(weights, packed, count, sums, stride, fresh);
    weights += kRowsAtOnce * kPartTokens;
    sums += kRowsAtOnce * stride;
  }
  with_constant<kRowsAtOnce - 1>(rows, [&](auto left) {
    halves_tile<left, kVectors>(weights, packed, count, sums, stride, fresh);
  });
}

// Adds the values of `count` places, weighted, to kRows float16 sums of kLines lines, or begins them; asks for as
// much at `ahead`. Where a line is wild, changes nothing and returns false.
template <int kRows, int kLines>
inline bool few_halves(const float* weights, const Strided& values, int64_t count, int64_t line_at, const char* ahead,
                       uint16_t* sums, int64_t stride, bool fresh) {
  __m512h total[kRows][kLines];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kLines; ++j)
      total[r][j] = fresh ? _mm512_setzero_ph() : (__m512h)_mm512_load_si512(sums + r * stride + j * kHalves);
  __m512i most = _mm512_setzero_si512();
  for (int64_t at = 0; at < count; ++at) {
    __m512h factor[kRows];
    UNROLLED for (int r = 0; r < kRows; ++r) factor[r] = spread(weights + r * kPartTokens + at);
    const char* from = values[at] + 64 * line_at;
    const char* const far = ahead + at * values.stride + 64 * line_at;
    UNROLLED for (int j = 0; j < kLines; ++j) {
      call_far(far + 64 * j);
      const __m512i line = _mm512_loadu_si512(from + 64 * j), magnitude = magnitudes(line);
      most = _mm512_max_epu16(most, magnitude);
      const __m512h column = to_halves(line, magnitude);
      UNROLLED for (int r = 0; r < kRows; ++r) total[r][j] = _mm512_fmadd_ph(factor[r], column, total[r][j]);
    }
  }
  if (any_wild(most)) return false;
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int j = 0; j < kLines; ++j) _mm512_store_si512(sums + r * stride + j * kHalves, (__m512i)total[r][j]);
  return true;
}

// Like `few_halves`, with any lines: wild ones go to `wild_sums`.
inline void few_lines(int64_t rows, const float* weights, const float* exact, const Strided& values, int64_t count,
                      int64_t line_at, int64_t lines, uint16_t* sums, float* wild_sums, int64_t stride, bool fresh) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < lines; ++j) {
      __m512h total = fresh ? _mm512_setzero_ph() : (__m512h)_mm512_load_si512(sums + j * kHalves);
      for (int64_t at = 0; at < count; ++at) {
        const __m512i line = _mm512_loadu_si512(values[at] + 64 * (line_at + j)), magnitude = magnitudes(line);
        if (any_wild(magnitude)) {
          add_wild(exact[at], line, wild_sums + j * kHalves);
        } else {
          total = _mm512_fmadd_ph(spread(weights + at), to_halves(line, magnitude), total);
        }
      }
      _mm512_store_si512(sums + j * kHalves, (__m512i)total);
    }
    weights += kPartTokens;
    exact += kPartTokens;
    sums += stride;
    wild_sums += stride;
  }
}

// Scores in float32, weighted values in float16, over bfloat16.
class HalfValues : public FloatProducts<Float32Math, Bfloat16Cache> {
  using Base = FloatProducts<Float32Math, Bfloat16Cache>;

 public:
  HalfValues(const ProductSizes& sizes, ProductScratch& scratch)
      : Base({sizes.key_dim, sizes.value_dim, (sizes.value_dim + kHalves - 1) / kHalves * kHalves}, scratch) {}

  void begin(int64_t rows, int64_t few) {
    Base::begin(rows, few);
    halves_ = reinterpret_cast<uint16_t*>(scratch_.sums.get(rows * sizes_.wide / 2));
    exact_ = scratch_.levels.get(rows * kPartTokens);
    unfinished_ = false;
  }

  // A word is a weight twice, as a load that spreads 32 bits needs no unit that multiplies.
  void set_weights(int64_t row, int64_t at, Vec weights) {
    store(exact_ + row * kPartTokens + at, weights);
    const __m256i halves = _mm512_cvtps_ph(weights, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i words = _mm512_cvtepu16_epi32(halves);
    _mm512_storeu_si512(scores(row) + at, _mm512_or_si512(words, _mm512_slli_epi32(words, 16)));
  }

  void add_values(int64_t row, int64_t at, const char* const* values, int64_t count, Ahead& later, bool fresh) {
    const int64_t wide = sizes_.wide, rows = rows_ - row;
    const float* weights = scores(row) + at;
    float* sums = weighted_ + row * wide;
    uint16_t* packed = reinterpret_cast<uint16_t*>(packed_);
    if (any_wild(pack(values, count, later, packed))) {
      if (fresh) std::fill(sums, sums + rows * wide, 0.0f);
      fresh = false;
      take_wild(rows, exact_ + row * kPartTokens + at, values, count, packed, sums);
    }
    int64_t column = 0;
    for (; column + kHalfGroup <= wide; column += kHalfGroup, packed += count * kHalfGroup) {
      halves_rows<4>(rows, weights, packed, count, sums + column, wide, fresh);
    }
    with_constant<3>((wide - column) / kHalves, [&](auto lines) {
      halves_rows<lines>(rows, weights, packed, count, sums + column, wide, fresh);
    });
  }

  // Adds the weighted values of places [begin, end), which lie in one chunk. Sums in float16 go on from chunk to
  // chunk up to the end of a panel.
  void add_chunks(const Chunk* chunk, int64_t begin, int64_t end, int64_t rows, Stream& stream, bool fresh) {
    const Strided values = {chunk->rows[begin - chunk->at], chunk->rows.stride};
    const char* ahead = stream.ahead(values.base);
    const int64_t wide = sizes_.wide, lines = wide / kHalves;
    const int64_t place = chunk->row * kPartTokens + begin;
    const Few few = {scores_ + place, exact_ + place, values, end - begin, ahead, halves_ + chunk->row * wide,
                     weighted_ + chunk->row * wide, fresh || begin % kPanel == 0};
    if (fresh) std::fill(few.sums, few.sums + rows * wide, 0.0f);
    with_constant<kFewRows>(rows, [&](auto count) { add_lines<count>(few, lines); });
    unfinished_ = end % kPanel != 0;
    if (!unfinished_) widen(chunk->row, rows);
  }

  void finish_chunks() {
    if (unfinished_) widen(0, rows_);
  }

 private:
  // Arguments with which few rows of a head add a chunk.
  struct Few {
    const float *weights, *exact;
    Strided values;
    int64_t count;
    const char* ahead;
    uint16_t* halves;
    float* sums;
    bool fresh;
  };

  // Adds the panel's sums to those of `rows` rows from `row` on.
  void widen(int64_t row, int64_t rows) {
    const int64_t wide = sizes_.wide;
    for (int64_t i = row * wide; i < (row + rows) * wide; i += kHalves) add_halves(halves_ + i, weighted_ + i, false);
  }

  template <int kRows>
  void add_lines(const Few& few, int64_t lines) {
    int64_t line = 0;
    for (; line + 4 <= lines; line += 4) add_some<kRows, 4>(few, line);
    for (; line + 2 <= lines; line += 2) add_some<kRows, 2>(few, line);
    if (line < lines) add_some<kRows, 1>(few, line);
  }

  template <int kRows, int kLines>
  void add_some(const Few& few, int64_t line) {
    uint16_t* halves = few.halves + line * kHalves;
    const int64_t wide = sizes_.wide;
    if (few_halves<kRows, kLines>(few.weights, few.values, few.count, line, few.ahead, halves, wide, few.fresh)) return;
    few_lines(kRows, few.weights, few.exact, few.values, few.count, line, kLines, halves, few.sums + line * kHalves,
              wide, few.fresh);
  }

  __m512i line_of(const char* value, int64_t column) const {
    const int64_t left = sizes_.value_dim - column;
    if (left >= kHalves) return _mm512_loadu_si512(value + 2 * column);
    return _mm512_maskz_loadu_epi16((1u << left) - 1, value + 2 * column);
  }

  // Values of `count` places to `packed` [groups of lines, places, kHalfGroup]; returns the largest magnitudes.
  __m512i pack(const char* const* values, int64_t count, Ahead& later, uint16_t* packed) const {
    __m512i most = _mm512_setzero_si512();
    for (int64_t at = 0; at < count; ++at) {
      later.call(1);
      for (int64_t column = 0; column < sizes_.wide; column += kHalves) {
        const __m512i line = line_of(values[at], column), magnitude = magnitudes(line);
        most = _mm512_max_epu16(most, magnitude);
        _mm512_store_si512(packed_line(packed, count, at, column), (__m512i)to_halves(line, magnitude));
      }
    }
    return most;
  }

  static uint16_t* packed_line(uint16_t* packed, int64_t count, int64_t at, int64_t column) {
    return packed + (column / kHalfGroup * count + at) * kHalfGroup + column % kHalfGroup;
  }

  // Adds wild lines to the sums of all rows, and packs zeros in their stead.
  void take_wild(int64_t rows, const float* weights, const char* const* values, int64_t count, uint16_t* packed,
                 float* sums) const {
    for (int64_t at = 0; at < count; ++at) {
      for (int64_t column = 0; column < sizes_.wide; column += kHalves) {
        const __m512i line = line_of(values[at], column);
        if (!any_wild(magnitudes(line))) continue;
        _mm512_store_si512(packed_line(packed, count, at, column), _mm512_setzero_si512());
        for (int64_t r = 0; r < rows; ++r) {
          add_wild(weights[r * kPartTokens + at], line, sums + r * sizes_.wide + column);
        }
      }
    }
  }

  uint16_t* halves_ = nullptr;
  float* exact_ = nullptr;  // weights as they were, for wild lines
  bool unfinished_ = false;
};

}  // namespace millrace

#endif
