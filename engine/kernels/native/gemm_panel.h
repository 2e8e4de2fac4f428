// One panel of a packed weight against rows, in every format.
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm_micro.h"
#include "gemm_rows.h"
#include "gemm_tiles.h"

namespace millrace {

// Rows that share one pass over a panel; their totals stay in the nearest cache.
constexpr int64_t kRowBlock = 96;
// Inputs of a panel that are multiplied before the next ones: their weights stay in the second cache.
constexpr int64_t kInputBlock = 4096;
// Inputs of a quantized panel that are expanded at once.
constexpr int64_t kExpandBlock = 128;
struct alignas(64) Scratch {
  float totals[kRowBlock * kPanel];
  uint16_t halves[kExpandBlock * kPanel];
  float floats[kExpandBlock * kPanel];
};

inline thread_local Scratch scratch;

inline int64_t padded_outputs(const PackedWeight& weight) { return (weight.outputs + kLane - 1) / kLane * kLane; }

// --- expansion of quantized weights, [inputs / 2][width][2] in the type that rows have ---

// An int8 panel's inputs [begin, begin + count), 16 columns at a time.
#if defined(__AVX512F__)
inline __m512i byte_of(__m512i fours, int index) {
  return _mm512_srai_epi32(_mm512_slli_epi32(fours, 24 - 8 * index), 24);
}
inline __m512i join(__m512i lower, __m512i upper) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(lower)), 16);
  const __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(upper));
  return _mm512_mask_blend_epi16(0xAAAAAAAA, low, high);
}
inline void expand_int8(const int8_t* panel, int64_t width, int64_t count, uint16_t* to) {
  for (int64_t four = 0; four < count / 4; ++four)
    for (int64_t column = 0; column < width; column += 16) {
      const __m512i bytes = _mm512_loadu_si512(panel + (four * width + column) * 4);
      uint16_t* first = to + (four * 2 * width + column) * 2;
      _mm512_storeu_si512(first, join(byte_of(bytes, 0), byte_of(bytes, 1)));
      _mm512_storeu_si512(first + width * 2, join(byte_of(bytes, 2), byte_of(bytes, 3)));
    }
}
// Levels are indices into the sixteen numbers that they stand for.
inline void expand_int4(const uint8_t* panel, int64_t width, int64_t count, uint16_t* to) {
  alignas(64) uint32_t numbers[16];
  for (int level = 0; level < 16; ++level) numbers[level] = to_bfloat16(static_cast<float>(level - 8));
  const __m512i low = _mm512_load_si512(numbers), high = _mm512_slli_epi32(low, 16);
  for (int64_t pair = 0; pair < count / 2; ++pair)
    for (int64_t column = 0; column < width; column += 16) {
      const __m512i bytes = _mm512_cvtepu8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + pair * width + column)));
      // An index's upper bits are ignored.
      const __m512i lower = _mm512_permutexvar_epi32(bytes, low);
      const __m512i upper = _mm512_permutexvar_epi32(_mm512_srli_epi32(bytes, 4), high);
      _mm512_storeu_si512(to + (pair * width + column) * 2, _mm512_or_si512(lower, upper));
    }
}
#else
inline void expand_int8(const int8_t* panel, int64_t width, int64_t count, uint16_t* to) {
  for (int64_t four = 0; four < count / 4; ++four)
    for (int64_t column = 0; column < width; ++column)
      for (int64_t i = 0; i < 4; ++i)
        to[((four * 2 + i / 2) * width + column) * 2 + i % 2] = to_bfloat16(panel[(four * width + column) * 4 + i]);
}
inline void expand_int4(const uint8_t* panel, int64_t width, int64_t count, uint16_t* to) {
  for (int64_t pair = 0; pair < count / 2; ++pair)
    for (int64_t column = 0; column < width; ++column) {
      const uint8_t byte = panel[pair * width + column];
      uint16_t* out = to + (pair * width + column) * 2;
      out[0] = to_bfloat16(static_cast<float>((byte & 15) - 8));
      out[1] = to_bfloat16(static_cast<float>((byte >> 4) - 8));
    }
}
#endif

// --- results ---

struct Output {
  float* out;
  int64_t count;  // columns that exist
  bool accumulate;
};

// Where a product's rows go.
struct Results {
  float* out;
  int64_t stride;  // in floats
  bool accumulate;
};

// One row's totals to the result: scale, bias, sum.
inline void finish_row(const float* totals, float scale, const float* scales, const float* bias, const Output& output) {
  alignas(64) float values[kPanel];
  const int64_t padded = (output.count + kLane - 1) / kLane * kLane;
  const Vector factor = spread(scale);
  for (int64_t column = 0; column < padded; column += kWidth) {
    Vector value = load(totals + column);
    if (scales) value = mul(value, mul(factor, load(scales + column)));
    if (bias) value = add(value, load(bias + column));
    if (column + kWidth <= output.count) {
      if (output.accumulate) value = add(value, load(output.out + column));
      store(output.out + column, value);
    } else {
      store(values, value);
      for (int64_t i = column; i < output.count; ++i)
        output.out[i] = output.accumulate ? output.out[i] + values[i - column] : values[i - column];
    }
  }
}

inline void subtract_offsets(int32_t* totals, const int32_t* offsets, int64_t width) {
  float* floats = reinterpret_cast<float*>(totals);
  for (int64_t column = 0; column < width; column += kWidth) {
#if defined(__AVX512F__)
    const __m512i exact = _mm512_sub_epi32(_mm512_loadu_si512(totals + column), _mm512_loadu_si512(offsets + column));
    store(floats + column, _mm512_cvtepi32_ps(exact));
#else
    const __m256i exact = _mm256_sub_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(totals + column)),
                                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(offsets + column)));
    store(floats + column, _mm256_cvtepi32_ps(exact));
#endif
  }
}

// --- one panel against a block of rows ---

template <class Kind>
inline void plain_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const typename Kind::Weight* panel,
                 int64_t width, int64_t inputs, typename Kind::Total* totals, const void* next) {
  const auto* data = static_cast<const typename Kind::Row*>(rows.data) + first_row * rows.stride;
  for (int64_t begin = 0; begin < inputs; begin += kInputBlock) {
    const int64_t count = std::min(kInputBlock, inputs - begin);
    multiply_rows<Kind>(data + begin, rows.stride, num_rows, panel + begin * width, width, count / Kind::kGroup,
                        totals, begin == 0, static_cast<const char*>(next));
  }
}

inline void int8_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const int8_t* panel, int64_t width,
                int64_t inputs, float* totals) {
  const auto* data = static_cast<const HalfKind::Row*>(rows.data) + first_row * rows.stride;
  for (int64_t begin = 0; begin < inputs; begin += kExpandBlock) {
    const int64_t count = std::min(kExpandBlock, inputs - begin);
    expand_int8(panel + begin * width, width, count, scratch.halves);
    multiply_rows<HalfKind>(data + begin, rows.stride, num_rows, scratch.halves, width, count / 2, totals,
                            begin == 0, nullptr);
  }
}

// Each group's sums are scaled before they are added up.
inline void grouped_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const PackedWeight& weight,
                   int64_t column, int64_t width, float* totals) {
  const auto* data = static_cast<const HalfKind::Row*>(rows.data) + first_row * rows.stride;
  const bool four = weight.format == kInt4Grouped;
  const int64_t padded = padded_outputs(weight), groups = weight.inputs / weight.group_size;
  const char* panel = static_cast<const char*>(weight.data) + column * weight.padded_inputs / (four ? 2 : 1);
  std::memset(totals, 0, num_rows * kPanel * sizeof(float));
  for (int64_t group = 0; group < groups; ++group) {
    const float* scales = weight.scales + group * padded + column;
    const float* minimums = weight.minimums ? weight.minimums + group * padded + column : nullptr;
    const int64_t start = group * weight.group_size, end = start + weight.group_size;
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, num_rows - row);
      for (int64_t begin = start; begin < end; begin += kExpandBlock) {
        const int64_t count = std::min(kExpandBlock, end - begin);
        // A group longer than the buffer is expanded anew for each tile.
        if (row == 0 || weight.group_size > kExpandBlock) {
          if (four)
            expand_int4(reinterpret_cast<const uint8_t*>(panel) + begin * width / 2, width, count, scratch.halves);
          else
            expand_int8(reinterpret_cast<const int8_t*>(panel) + begin * width, width, count, scratch.halves);
        }
        multiply_rows<HalfKind>(data + row * rows.stride + begin, rows.stride, height, scratch.halves, width,
                                count / 2, scratch.floats, begin == start, nullptr);
      }
      for (int64_t m = 0; m < height; ++m) {
        const Vector sum = spread(minimums ? rows.sums[(first_row + row + m) * groups + group] : 0.0f);
        for (int64_t v = 0; v < width; v += kWidth) {
          float* total = totals + (row + m) * kPanel + v;
          Vector value = fma(load(scratch.floats + m * kPanel + v), load(scales + v), load(total));
          if (minimums) value = fma(sum, load(minimums + v), value);
          store(total, value);
        }
      }
    }
  }
}

// Rows [begin, end) against the panel that starts at output `column`.
// `next` is the output at which the panel starts that the thread computes next.
inline void panel_product(const PackedWeight& weight, const Results& results, const Rows& rows, int64_t column,
                          int64_t begin, int64_t end, int64_t next) {
  const int64_t width = std::min(kPanel, padded_outputs(weight) - column);
  const int64_t offset = column * weight.padded_inputs;
  float* totals = scratch.totals;
  const char* following =
      static_cast<const char*>(weight.data) + packed_bytes(weight.format, next, weight.padded_inputs);
  for (int64_t first = begin; first < end; first += kRowBlock) {
    const int64_t count = std::min(kRowBlock, end - first);
    const float* scales = weight.format == kInt8 || weight.format == kInt8Dynamic ? weight.scales + column : nullptr;
    switch (weight.format) {
      case kFloat32:
        plain_panel<FloatKind>(rows, first, count, static_cast<const float*>(weight.data) + offset, width,
                               weight.inputs, totals, following);
        break;
      case kBfloat16:
        plain_panel<HalfKind>(rows, first, count, static_cast<const uint16_t*>(weight.data) + offset, width,
                              weight.padded_inputs, totals, following);
        break;
      case kInt8:
        int8_panel(rows, first, count, static_cast<const int8_t*>(weight.data) + offset, width,
                   weight.padded_inputs, totals);
        break;
      case kInt8Dynamic:
        plain_panel<ByteKind>(rows, first, count, static_cast<const int8_t*>(weight.data) + offset, width,
                              weight.padded_inputs, reinterpret_cast<int32_t*>(totals), following);
        break;
      default: grouped_panel(rows, first, count, weight, column, width, totals);
    }
    for (int64_t row = 0; row < count; ++row) {
      float* sums = totals + row * kPanel;
      if (weight.format == kInt8Dynamic)
        subtract_offsets(reinterpret_cast<int32_t*>(sums), weight.offsets + column, width);
      const Output output{results.out + (first + row) * results.stride + column,
                          std::min(width, weight.outputs - column), results.accumulate};
      finish_row(sums, rows.scales ? rows.scales[first + row] : 1.0f, scales,
                 weight.bias ? weight.bias + column : nullptr, output);
    }
  }
}

}  // namespace millrace
