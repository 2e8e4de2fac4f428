// Converts the rows of a product to the type that its weight wants.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/gemm.h"
#include "linear/gemm_float12_avx2.h"
#include "linear/gemm_fp16.h"
#include "linear/gemm_micro.h"
#include "linear/gemm_wide.h"

namespace millrace {

// Rows in the form that a product reads.
struct Rows {
  const void* data;
  int64_t stride;        // in elements
  const float* scales;   // [M] of int8 and float16 rows, [M, blocks] of 16-bit ones
  const int32_t* sums;   // of levels, as many as scales
};

// Whether rows are rounded to 16 bits by blocks of inputs.
inline bool is_wide(const PackedWeight& weight) {
  return weight.format == kInt8 || weight.format == kInt8Grouped || weight.format == kInt4Grouped ||
         weight.format > kCoded;
}

// Whether rows stay float32.
inline bool keeps_floats(const PackedWeight& weight) {
  return weight.format == kFloat32 || weight.format == kFloat8 || weight.format == kFloatCodes;
}

// Whether a row has one scale, which its results are multiplied by.
inline bool has_row_scales(const PackedWeight& weight) {
  return weight.format == kInt8Dynamic || weight.format == kFloat12 || (kScaledHalves && weight.format == kBfloat16);
}

// Whether rows are copied to the workspace. Several rows always are: their own stride may be a power of two, which
// maps all of them to the same few places of the nearest cache.
inline bool converts(const PackedWeight& weight, int64_t num_rows) {
  if (num_rows > 1 || has_row_scales(weight) || is_wide(weight)) return true;
#if defined(__AVX512BF16__) || defined(__AVX512FP16__) || defined(__ARM_FEATURE_BF16)
  if (!keeps_floats(weight)) return true;
#endif
  return weight.inputs != weight.padded_inputs;
}

// Bytes of an element of a copied row.
inline int64_t element_bytes(const PackedWeight& weight) {
  if (is_wide(weight)) return sizeof(WideRow);
  if (weight.format == kInt8Dynamic) return sizeof(ByteKind::Row);
  return keeps_floats(weight) ? sizeof(float) : sizeof(HalfKind::Row);
}

// Bytes from one copied row to the next: an odd number of cache lines, so that rows lie in different sets.
inline int64_t workspace_stride(const PackedWeight& weight) {
  const int64_t each = is_wide(weight) ? 2 : weight.format == kHalfPairs ? 4 : element_bytes(weight);
  const int64_t bytes = weight.padded_inputs * each;
  return ((bytes + 63) / 64 | 1) * 64;
}

// Scales of a row, and sums.
inline int64_t num_scales(const PackedWeight& weight) {
  if (has_row_scales(weight)) return 1;
  return is_wide(weight) ? blocks_of(weight).count : 0;
}

#if defined(__AVX512FP16__)
inline void convert_row(const float* from, uint32_t* to, int64_t inputs, int64_t padded, float* scale) {
  *scale = convert_fp16_row(from, to, inputs, padded);
}
#elif defined(__AVX512BF16__)
inline void convert_row(const float* from, uint16_t* to, int64_t inputs, int64_t padded, float*) {
  int64_t i = 0;
  for (; i + 16 <= inputs; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  for (; i < padded; i += 16) {
    const __mmask16 mask = inputs <= i ? 0 : static_cast<__mmask16>((1u << (inputs - i)) - 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i)));
  }
}
#elif defined(__ARM_FEATURE_BF16)
inline void convert_row(const float* from, uint16_t* to, int64_t inputs, int64_t padded, float*) {
  const Mask all = first(kLanes);
  for (int64_t i = 0; i < inputs; i += kLanes)
    store_bf16(to + i, padded - i >= kLanes ? all : first(padded - i), load(from + i, first(inputs - i)));
}
#else
inline void convert_row(const float* from, float* to, int64_t inputs, int64_t padded, float*) {
  std::memcpy(to, from, inputs * sizeof(float));
  for (int64_t i = inputs; i < padded; ++i) to[i] = 0.0f;
}
#endif

#if defined(TILE_LOAD)
// What a row's inputs round to, and after all of them what is left of each, rounded. Bits beyond 16 are lost.
inline void split_row(const float* from, uint16_t* to, int64_t inputs, int64_t padded) {
  const auto put = [](uint16_t* place, Vec value) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(value);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), halves);
    return widen_bf16(halves);
  };
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec value = load(from + i, first(std::max<int64_t>(0, inputs - i)));
    const Vec rounded = put(to + i, value);
    put(to + padded + i, sub(value, rounded));
  }
}
#endif

// How inputs become levels: their largest magnitude is `most_level`.
struct Rounding {
  float scale;    // what a level of one stands for; not finite where an input is not, so that the fault shows
  float inverse;  // 0 where all levels are 0
};

inline Rounding rounding_of(const float* from, int64_t count, float most_level) {
  const uint32_t most_bits = largest_of(from, count);
  float most;
  std::memcpy(&most, &most_bits, sizeof(most));
  if (most_bits >= 0x7F800000) return {__builtin_nanf(""), 0.0f};
  // Below this the inverse could overflow, and nothing is lost.
  if (most < 1e-30f) return {0.0f, 0.0f};
  return {most / most_level, most_level / most};
}

// Half to even: adding and taking away 1.5 * 2^23 leaves no fraction.
inline int32_t level_of(float value, float inverse, int32_t most_level) {
  const float level = value * inverse + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &level, sizeof(bits));
  bits -= 0x4B400000;
  return bits > most_level ? most_level : bits < -most_level ? -most_level : bits;
}

// A row in levels of 8 bits, zeros up to `padded`. Returns its scale.
inline float quantize_row(const float* from, ByteKind::Row* to, int64_t inputs, int64_t padded, int32_t* sum) {
  const Rounding rounding = rounding_of(from, inputs, 127.0f);
  int32_t total = 0;
  std::memset(to, 0, padded * sizeof(*to));
  if (rounding.inverse > 0.0f) {
    for (int64_t i = 0; i < inputs; ++i) {
      const int32_t level = level_of(from[i], rounding.inverse, 127);
      to[i] = static_cast<ByteKind::Row>(level);
      total += level;
    }
    ByteKind::arrange(to, padded);
  }
  *sum = total;
  return rounding.scale;
}

// A row in 16 bits, zeros up to the padded inputs; a scale and a sum for each block.
inline void widen_row(const float* from, const PackedWeight& weight, WideRow* to, float* scales, int32_t* sums) {
  const Blocks blocks = blocks_of(weight);
  std::memset(to, 0, weight.padded_inputs * 2);
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t begin = blocks.begin(block), end = std::min(blocks.end(block), weight.inputs);
    const Rounding rounding = rounding_of(from + begin, end - begin, static_cast<float>(kMostWide));
    int32_t total = 0;
    if (rounding.inverse > 0.0f) {
      alignas(64) int32_t levels[kBlockInputs];
      for (int64_t i = begin; i < end; ++i) {
        levels[i - begin] = level_of(from[i], rounding.inverse, kMostWide);
        total += levels[i - begin];
      }
      store_wide(to + begin, weight.padded_inputs, levels, end - begin);
    }
    scales[block] = rounding.scale;
    sums[block] = total;
  }
}

// A row as the stored weight wants it: in stored order, smoothed.
inline void arrange_row(const float* from, const PackedWeight& weight, float* to) {
  for (int64_t i = 0; i < weight.inputs; ++i) {
    const int64_t input = weight.order ? weight.order[i] : i;
    to[i] = weight.smoothing ? from[input] * weight.smoothing[input] : from[input];
  }
}

// Where a copy of converted rows and what belongs to them lie.
struct Copy {
  char* rows;
  float* scales;
  int32_t* sums;
};

// With internal linkage: an inline variable would be one for all levels that a process has loaded.
static thread_local std::vector<float> arranged;

// Row `row` of a copy from the inputs at `from`.
inline void convert_to(const PackedWeight& weight, const float* from, const Copy& copy, int64_t row) {
  const int64_t scales = num_scales(weight);
  if (weight.order || weight.smoothing) {
    arranged.resize(weight.inputs);
    arrange_row(from, weight, arranged.data());
    from = arranged.data();
  }
  char* to = copy.rows + row * workspace_stride(weight);
  if (keeps_floats(weight))
    std::memcpy(to, from, weight.inputs * sizeof(float));
  else if (weight.format == kInt8Dynamic)
    copy.scales[row] =
        quantize_row(from, reinterpret_cast<ByteKind::Row*>(to), weight.inputs, weight.padded_inputs, copy.sums + row);
#if defined(__AVX2__) && !defined(__AVX512F__)
  else if (weight.format == kFloat12)
    copy.scales[row] = convert_scaled_row(from, reinterpret_cast<float*>(to), weight.inputs, weight.padded_inputs);
#endif
#if defined(TILE_LOAD)
  else if (weight.format == kHalfPairs)
    split_row(from, reinterpret_cast<uint16_t*>(to), weight.inputs, weight.padded_inputs);
#endif
  else if (is_wide(weight))
    widen_row(from, weight, reinterpret_cast<WideRow*>(to), copy.scales + row * scales, copy.sums + row * scales);
  else
    convert_row(from, reinterpret_cast<HalfKind::Row*>(to), weight.inputs, weight.padded_inputs,
                copy.scales + row * scales);
}

// Tiles read whole tile heights, so the rows after the last one must be there.
inline int64_t padded_rows(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// Bytes of a converted row with its scales and sums.
inline int64_t row_bytes(const PackedWeight& weight) { return workspace_stride(weight) + 8 * num_scales(weight); }

// How a copy of num_rows rows lies in a workspace; `at` is a multiple of 64.
inline Copy copy_at(const PackedWeight& weight, void* at, int64_t num_rows) {
  const int64_t height = padded_rows(num_rows);
  Copy copy;
  copy.rows = static_cast<char*>(at);
  copy.scales = reinterpret_cast<float*>(copy.rows + height * workspace_stride(weight));
  copy.sums = reinterpret_cast<int32_t*>(copy.scales + height * num_scales(weight));
  return copy;
}

inline Rows rows_of(const PackedWeight& weight, const Copy& copy) {
  return {copy.rows, workspace_stride(weight) / element_bytes(weight), copy.scales, copy.sums};
}

}  // namespace millrace
