// Lays a weight out for gemm.cc, once at load.
#include <algorithm>
#include <cstring>

#include "linear/gemm.h"
#include "linear/gemm_coded.h"
#include "linear/gemm_float12.h"
#include "linear/gemm_float12_avx2.h"
#include "linear/gemm_fp16.h"
#include "native/simd.h"
#include "native/tiles.h"

namespace millrace {
namespace {

// Level of 4 bits that stands for zero.
constexpr float kMiddle = 8.0f;

// Writes the elements that exist of one panel; the rest of its memory is zero already.
template <class Element, int kGroup, class Read>
void put_panel(const PackedWeight& weight, int64_t first, int64_t width, Read read) {
  Element* panel = static_cast<Element*>(weight.data) + first * weight.padded_inputs;
  const int64_t columns = std::min(width, weight.outputs - first);
  // By pieces of inputs, so that the lines which are written stay in the cache for all columns.
  constexpr int64_t kPiece = 64;
  for (int64_t begin = 0; begin < weight.inputs; begin += kPiece) {
    const int64_t end = std::min(begin + kPiece, weight.inputs);
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t source = (first + column) * weight.inputs;
      for (int64_t input = begin; input < end; ++input)
        panel[(input / kGroup * width + column) * kGroup + input % kGroup] = read(source + input);
    }
  }
}

#if defined(__AVX512FP16__)
// Like put_panel, in float16 and with a scale for each output (gemm_fp16.h).
template <class Source>
void put_fp16_panel(const PackedWeight& weight, const Source* source, int64_t first, int64_t width) {
  const bool short_ones = weight.format == kFloat12;
  uint16_t* panel = static_cast<uint16_t*>(weight.data) +
                    first * weight.padded_inputs * (short_ones ? kShared : kSharing) / kSharing;
  const int64_t columns = std::min(width, weight.outputs - first), inputs = weight.inputs;
  float exponents[kPanel];
  for (int64_t column = 0; column < columns; ++column) {
    exponents[column] = exponent_of(largest_of(source + (first + column) * inputs, inputs));
    weight.scales[first + column] = power_of(exponents[column]);
  }
  constexpr int64_t kPiece = 64;
  // Columns that there are not stay zero.
  alignas(64) uint16_t piece[kPanel][kPiece] = {}, halves[kPiece * kPanel] = {};
  const __m512i places = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(2 * kPiece));
  // By pieces of inputs, so that the lines which are written stay in the cache for all columns.
  for (int64_t begin = 0; begin < inputs; begin += kPiece) {
    const int64_t count = std::min(kPiece, inputs - begin);
    for (int64_t column = 0; column < columns; ++column) {
      const Source* from = source + (first + column) * inputs + begin;
      const Vec by = set1(-exponents[column]);
      for (int64_t i = 0; i < count; i += kLanes) {
        const Mask mask = millrace::first(count - i);
        Vec values;
        if constexpr (sizeof(Source) == 4)
          values = load(from + i, mask);
        else
          values = load_bf16(from + i, mask);
        _mm256_store_si256(reinterpret_cast<__m256i*>(piece[column] + i), to_halves(values, by));
      }
    }
    uint16_t* place = short_ones ? halves : panel + begin * width;
    // Two inputs of 16 columns at a time; of an odd number the last one's neighbour is there, too, as padding.
    for (int64_t i = 0; i < count; i += 2)
      for (int64_t column = 0; column < width; column += kLanes) {
        const __m512i pairs = _mm512_i32gather_epi32(places, piece[column] + i, 1);
        uint16_t* to = place + i * width + column;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(pairs));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + width),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
      }
    if (short_ones) {
      std::memset(halves + count * width, 0, (kPiece - count) * width * sizeof(*halves));
      put_float12(halves, kPiece, width, panel + begin * width * kShared / kSharing);
    }
  }
}
#endif

// What weights round to in a panel's first half, what is left of each in its second one.
void put_half_pairs(const PackedWeight& weight, const float* source, int64_t first, int64_t width) {
  PackedWeight half = weight;
  uint16_t* panels = static_cast<uint16_t*>(weight.data);
  half.data = panels + first * weight.padded_inputs;
  put_panel<uint16_t, 2>(half, first, width, [=](int64_t i) { return to_bfloat16(source[i]); });
  half.data = panels + (first + width) * weight.padded_inputs;
  put_panel<uint16_t, 2>(half, first, width, [=](int64_t i) {
    return to_bfloat16(source[i] - from_bfloat16(to_bfloat16(source[i])));
  });
}

// A byte holds the levels of inputs i and i + 4, for four such bytes of each output side by side.
void put_levels(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  uint8_t* panel = static_cast<uint8_t*>(weight.data) + first * weight.padded_inputs / 2;
  const uint8_t* source = static_cast<const uint8_t*>(args.source);
  const int64_t columns = std::min(width, weight.outputs - first);
  for (int64_t column = 0; column < columns; ++column) {
    const uint8_t* row = source + (first + column) * (weight.inputs / 2);
    for (int64_t input = 0; input < weight.inputs; ++input) {
      const int level = row[input / 2] >> (input % 2 * 4) & 15;
      panel[(input / 8 * width + column) * 4 + input % 4] |= static_cast<uint8_t>(level << (input / 4 % 2 * 4));
    }
  }
}

// Two inputs of an output share a byte, the first in the lower half.
void put_float_codes(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  uint8_t* panel = static_cast<uint8_t*>(weight.data) + first * weight.padded_inputs / 2;
  const uint8_t* source = static_cast<const uint8_t*>(args.source);
  const int64_t columns = std::min(width, weight.outputs - first);
  for (int64_t column = 0; column < columns; ++column) {
    const uint8_t* row = source + (first + column) * weight.inputs;
    for (int64_t input = 0; input < weight.inputs; ++input)
      panel[input / 2 * width + column] |= static_cast<uint8_t>((row[input] & 15) << (input % 2 * 4));
  }
}

// In planes, as gemm_coded.h takes them apart.
void put_codes(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  const int64_t bits = weight.format - kCoded, line = 4 * width;
  uint8_t* panel = static_cast<uint8_t*>(weight.data) + first * weight.padded_inputs * bits / 8;
  const uint8_t* source = static_cast<const uint8_t*>(args.source);
  const int64_t columns = std::min(width, weight.outputs - first);
  const int base = bits >= 4 ? 4 : 2, above = static_cast<int>(bits) - base;
  // By pieces of inputs, so that the lines which are written stay in the cache for all columns.
  for (int64_t begin = 0; begin < weight.inputs; begin += kCodedPiece, panel += bits * line) {
    const int64_t end = std::min(begin + kCodedPiece, weight.inputs);
    for (int64_t column = 0; column < columns; ++column) {
      const uint8_t* row = source + (first + column) * weight.inputs;
      for (int64_t input = begin; input < end; ++input) {
        const int four = static_cast<int>(input - begin) / 4, code = row[input];
        uint8_t* to = panel + 4 * column + input % 4;
        const auto put = [&](int64_t from, int width_bits, int value) {
          const int lot = 8 / width_bits;
          to[(from + four / lot) * line] |= static_cast<uint8_t>(value << four % lot * width_bits);
        };
        put(0, base, code & ((1 << base) - 1));
        if (above) put(base, above, code >> base);
      }
    }
  }
}

// Factors of groups, by panels like scales.
void put_steps(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  const int64_t groups = weight.inputs / weight.group_size;
  for (int64_t output = first; output < std::min(first + width, weight.outputs); ++output)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t place = first * groups + g * width + output - first;
      if (weight.steps) const_cast<uint8_t*>(weight.steps)[place] = args.source_steps[output * groups + g];
      if (weight.lows) const_cast<int8_t*>(weight.lows)[place] = args.source_lows[output * groups + g];
    }
}

void put_data(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  const float* floats = static_cast<const float*>(args.source);
  const uint16_t* halves = static_cast<const uint16_t*>(args.source);
  const uint8_t* bytes = static_cast<const uint8_t*>(args.source);
  const bool wide = args.source_bytes == 4;
  switch (weight.format) {
    case kFloat32:
      if (wide)
        put_panel<float, 1>(weight, first, width, [=](int64_t i) { return floats[i]; });
      else
        put_panel<float, 1>(weight, first, width, [=](int64_t i) { return from_bfloat16(halves[i]); });
      break;
#if defined(__AVX512FP16__)
    case kFloat12:
#endif
    case kBfloat16:
#if defined(__AVX512FP16__)
      if (wide)
        put_fp16_panel(weight, floats, first, width);
      else
        put_fp16_panel(weight, halves, first, width);
#else
      if (wide)
        put_panel<uint16_t, 2>(weight, first, width, [=](int64_t i) { return to_bfloat16(floats[i]); });
      else
        put_panel<uint16_t, 2>(weight, first, width, [=](int64_t i) { return halves[i]; });
#endif
      break;
#if defined(__AVX2__) && !defined(__AVX512F__)
    case kFloat12:
      put_float12_panel(halves + first * weight.inputs, weight.inputs, std::min(width, weight.outputs - first), width,
                        static_cast<uint32_t*>(weight.data) + first * weight.padded_inputs * 3 / 8,
                        weight.scales + first);
      break;
#endif
    case kInt4Grouped: put_levels(args, first, width); break;
    case kHalfPairs: put_half_pairs(weight, floats, first, width); break;
    case kFloat8: put_panel<uint8_t, 1>(weight, first, width, [=](int64_t i) { return bytes[i]; }); break;
    case kFloatCodes: put_float_codes(args, first, width); break;
    case kCoded + 2:
    case kCoded + 3:
    case kCoded + 4:
    case kCoded + 5:
    case kCoded + 6: put_codes(args, first, width); break;
    default: put_panel<uint8_t, 4>(weight, first, width, [=](int64_t i) { return bytes[i] ^ 0x80; });
  }
}

void put_scales(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  const int64_t size = weight.format > kCoded ? weight.span : weight.group_size;
  const int64_t groups = size ? weight.inputs / size : 1;
  if (weight.format > kCoded) put_steps(args, first, width);
  for (int64_t output = first; output < std::min(first + width, weight.outputs); ++output) {
    if (weight.bias) weight.bias[output] = args.bias[output];
    for (int64_t g = 0; args.source_scales && g < groups; ++g) {
      const float scale = args.source_scales[output * groups + g];
      const int64_t place = first * groups + g * width + output - first;
      weight.scales[place] = scale;
      if (weight.minimums) {
        const float shift = weight.format == kInt4Grouped ? kMiddle * scale : 0.0f;
        weight.minimums[place] = args.source_minimums[output * groups + g] + shift;
      }
    }
  }
}

}  // namespace

int64_t packed_bytes(int64_t format, int64_t outputs, int64_t padded_inputs) {
  const int64_t elements = (outputs + kLane - 1) / kLane * kLane * padded_inputs;
  if (format > kCoded) return elements * (format - kCoded) / 8;
  switch (format) {
    case kFloat32:
    case kHalfPairs: return elements * 4;
    case kBfloat16: return elements * 2;
    case kFloat12: return elements * 3 / 2;
    case kInt4Grouped:
    case kFloatCodes: return elements / 2;
    default: return elements;
  }
}

}  // namespace millrace

using namespace millrace;

extern "C" void pack_weight(const PackArgs& args, int, int) {
  const int64_t outputs = (args.weight.outputs + kLane - 1) / kLane * kLane;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  for (int64_t panel = op_take(); panel < panels; panel = op_take()) {
    const int64_t first = panel * kPanel, width = std::min(kPanel, outputs - first);
    put_data(args, first, width);
    put_scales(args, first, width);
  }
}

MILLRACE_OP(pack_weight, PackArgs)

// Counts the outputs of a bfloat16 weight that 12 bits would round too often; all of them where the level has no
// such format.
extern "C" void count_too_wide(const WidthArgs& args, int, int) {
  int64_t count = 0;
#if defined(__AVX512FP16__) || (defined(__AVX2__) && !defined(__AVX512F__))
  constexpr int64_t kPiece = 64;
  const auto* source = static_cast<const uint16_t*>(args.source);
  for (int64_t piece = op_take(); piece * kPiece < args.outputs; piece = op_take())
    for (int64_t output = piece * kPiece; output < std::min((piece + 1) * kPiece, args.outputs); ++output)
      count += is_too_wide(source + output * args.inputs, args.inputs);
#else
  count = op_take() == 0 ? args.outputs : 0;
#endif
  __atomic_fetch_add(const_cast<int64_t*>(&args.count), count, __ATOMIC_RELAXED);
}

MILLRACE_OP(count_too_wide, WidthArgs)

// Scales that packing finds itself: per output, of a weight whose source has none.
extern "C" int64_t millrace_own_scales(int64_t format) {
  return (kScaledHalves && format == kBfloat16) || (kHasFloat12 && format == kFloat12);
}

// Whether the level multiplies float32 as pairs of bfloat16: three of its products by tiles take less than one of
// float32 by vectors.
extern "C" int64_t millrace_has_half_pairs() {
#if defined(TILE_LOAD)
  return 1;
#else
  return 0;
#endif
}

extern "C" int64_t millrace_packed_bytes(int64_t format, int64_t outputs, int64_t padded_inputs) {
  return packed_bytes(format, outputs, padded_inputs);
}
