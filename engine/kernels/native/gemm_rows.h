// Converts the rows of a product to the type that its weight wants.
#pragma once

#include <cstring>
#include <vector>

#include "gemm.h"
#include "gemm_micro.h"

namespace millrace {

// Rows in the form that a product reads.
struct Rows {
  const void* data;
  int64_t stride;       // in elements
  const float* scales;  // [M] of int8 rows, or null
  const float* sums;    // [M, G] of rows under a weight with minimums, or null
};

// Whether a format's rows are copied to the workspace at all.
inline bool converts(const PackedWeight& weight) {
  if (weight.format == kFloat32) return false;
  if (weight.format == kInt8Dynamic || weight.smoothing || weight.order || weight.minimums) return true;
#if defined(__AVX512BF16__)
  return true;
#else
  return weight.inputs != weight.padded_inputs;
#endif
}

inline int64_t row_element_bytes(const PackedWeight& weight) {
  if (weight.format == kFloat32) return sizeof(float);
  return weight.format == kInt8Dynamic ? 1 : sizeof(HalfKind::Row);
}

#if defined(__AVX512BF16__)
inline void convert_row(const float* from, uint16_t* to, int64_t inputs, int64_t padded) {
  int64_t i = 0;
  for (; i + 16 <= inputs; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  for (; i < padded; i += 16) {
    const __mmask16 mask = inputs <= i ? 0 : static_cast<__mmask16>((1u << (inputs - i)) - 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i)));
  }
}
#else
inline void convert_row(const float* from, float* to, int64_t inputs, int64_t padded) {
  std::memcpy(to, from, inputs * sizeof(float));
  for (int64_t i = inputs; i < padded; ++i) to[i] = 0.0f;
}
#endif

// Largest magnitude to 127. A row with NaN or infinity gets a scale that is not finite, so the fault shows.
inline float quantize_row(const float* from, uint8_t* to, int64_t inputs, int64_t padded) {
  // Magnitudes order like their bits, and whatever is not finite lies above all that is.
  uint32_t most_bits = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    bits &= 0x7FFFFFFF;
    most_bits = bits > most_bits ? bits : most_bits;
  }
  float most;
  std::memcpy(&most, &most_bits, sizeof(most));
  const bool finite = most_bits < 0x7F800000;
  const float scale = finite ? most / 127.0f : __builtin_nanf("");
  int64_t i = 0;
  if (finite && scale > 0.0f) {
    for (; i < inputs; ++i) {
      // Adding and taking away 1.5 * 2^23 rounds half to even.
      const float level = from[i] / scale + 12582912.0f;
      int32_t bits;
      std::memcpy(&bits, &level, sizeof(bits));
      bits -= 0x4B400000;
      bits = bits > 127 ? 127 : bits < -127 ? -127 : bits;
      to[i] = static_cast<uint8_t>(bits + 128);
    }
  }
  for (; i < padded; ++i) to[i] = 128;
  return scale;
}

// The sum of each group of a converted row.
inline void sum_groups(const HalfKind::Row* row, int64_t groups, int64_t group_size, float* sums) {
  for (int64_t g = 0; g < groups; ++g) {
    float sum = 0.0f;
    for (int64_t i = 0; i < group_size; ++i) {
      if constexpr (sizeof(HalfKind::Row) == 2)
        sum += from_bfloat16(static_cast<uint16_t>(row[g * group_size + i]));
      else
        sum += static_cast<float>(row[g * group_size + i]);
    }
    sums[g] = sum;
  }
}

// A row as the stored weight wants it: in stored order, smoothed.
inline void arrange_row(const float* from, const PackedWeight& weight, float* to) {
  for (int64_t i = 0; i < weight.inputs; ++i) {
    const int64_t input = weight.order ? weight.order[i] : i;
    to[i] = weight.smoothing ? from[input] * weight.smoothing[input] : from[input];
  }
}

inline int64_t workspace_stride(const PackedWeight& weight) {
  return weight.padded_inputs * row_element_bytes(weight);
}

// Where a copy of converted rows and what belongs to them lie.
struct Copy {
  char* rows;
  float* scales;
  float* sums;
};

inline int64_t num_sums(const PackedWeight& weight) {
  return weight.minimums ? weight.inputs / weight.group_size : 0;
}

// Row `row` of a copy from the inputs at `from`.
inline void convert_to(const PackedWeight& weight, const float* from, const Copy& copy, int64_t row) {
  const int64_t groups = num_sums(weight);
  thread_local std::vector<float> arranged;
  if (weight.order || weight.smoothing) {
    arranged.resize(weight.inputs);
    arrange_row(from, weight, arranged.data());
    from = arranged.data();
  }
  char* to = copy.rows + row * workspace_stride(weight);
  if (weight.format == kFloat32) {
    std::memcpy(to, from, weight.inputs * sizeof(float));
  } else if (weight.format == kInt8Dynamic) {
    copy.scales[row] = quantize_row(from, reinterpret_cast<uint8_t*>(to), weight.inputs, weight.padded_inputs);
  } else {
    auto* halves = reinterpret_cast<HalfKind::Row*>(to);
    convert_row(from, halves, weight.inputs, weight.padded_inputs);
    if (groups) sum_groups(halves, groups, weight.group_size, copy.sums + row * groups);
  }
}

// Tiles read whole tile heights, so the rows after the last one must be there.
inline int64_t padded_rows(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// How a copy of num_rows rows lies in a workspace; `at` is a multiple of 64.
inline Copy copy_at(const PackedWeight& weight, void* at, int64_t num_rows) {
  const int64_t height = padded_rows(num_rows);
  Copy copy;
  copy.rows = static_cast<char*>(at);
  copy.scales = reinterpret_cast<float*>(copy.rows + height * workspace_stride(weight));
  copy.sums = copy.scales + height;
  return copy;
}

inline Rows rows_of(const PackedWeight& weight, const Copy& copy) {
  return {copy.rows, weight.padded_inputs, weight.format == kInt8Dynamic ? copy.scales : nullptr, copy.sums};
}

}  // namespace millrace
