// Lays a weight out for gemm.cc, once at load.
#include <algorithm>
#include <cstring>

#include "gemm.h"
#include "gemm_fp16.h"
#include "simd.h"

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
// As put_panel, in float16 and with a scale for each output (gemm_fp16.h).
void put_fp16_panel(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  uint16_t* panel = static_cast<uint16_t*>(weight.data) + first * weight.padded_inputs;
  const int64_t columns = std::min(width, weight.outputs - first), inputs = weight.inputs;
  const float* floats = static_cast<const float*>(args.source);
  const uint16_t* halves = static_cast<const uint16_t*>(args.source);
  constexpr int64_t kPiece = 64;
  alignas(64) float values[kPiece];
  alignas(64) uint16_t piece[kPanel][kPiece];
  float exponents[kPanel];
  const auto read = [&](int64_t column, int64_t begin, int64_t count) -> const float* {
    const int64_t source = (first + column) * inputs + begin;
    if (args.source_bytes == 4) return floats + source;
    for (int64_t i = 0; i < count; ++i) values[i] = from_bfloat16(halves[source + i]);
    return values;
  };
  for (int64_t column = 0; column < columns; ++column) {
    float most = exponent_of(nullptr, 0);
    for (int64_t begin = 0; begin < inputs && most == most; begin += kPiece) {
      const int64_t count = std::min(kPiece, inputs - begin);
      const float found = exponent_of(read(column, begin, count), count);
      most = found <= most ? most : found;
    }
    exponents[column] = most;
    weight.scales[first + column] = power_of(most);
  }
  // By pieces of inputs, so that the lines which are written stay in the cache for all columns.
  for (int64_t begin = 0; begin < inputs; begin += kPiece) {
    const int64_t count = std::min(kPiece, inputs - begin);
    for (int64_t column = 0; column < columns; ++column) {
      const float* from = read(column, begin, count);
      for (int64_t i = 0; i < count; i += kLanes)
        _mm256_store_si256(reinterpret_cast<__m256i*>(piece[column] + i),
                           to_halves(from + i, millrace::first(count - i), set1(-exponents[column])));
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t column = 0; column < columns; ++column) panel[(begin + i) * width + column] = piece[column][i];
  }
}
#endif

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
    case kBfloat16:
#if defined(__AVX512FP16__)
      put_fp16_panel(args, first, width);
#else
      if (wide)
        put_panel<uint16_t, 2>(weight, first, width, [=](int64_t i) { return to_bfloat16(floats[i]); });
      else
        put_panel<uint16_t, 2>(weight, first, width, [=](int64_t i) { return halves[i]; });
#endif
      break;
    case kInt4Grouped: put_levels(args, first, width); break;
    default: put_panel<uint8_t, 4>(weight, first, width, [=](int64_t i) { return bytes[i] ^ 0x80; });
  }
}

void put_scales(const PackArgs& args, int64_t first, int64_t width) {
  const PackedWeight& weight = args.weight;
  const int64_t groups = weight.group_size ? weight.inputs / weight.group_size : 1;
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
  switch (format) {
    case kFloat32: return elements * 4;
    case kBfloat16: return elements * 2;
    case kInt4Grouped: return elements / 2;
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

// Scales that packing finds itself: per output, of a weight whose source has none.
extern "C" int64_t millrace_own_scales(int64_t format) { return kScaledHalves && format == kBfloat16; }

extern "C" int64_t millrace_packed_bytes(int64_t format, int64_t outputs, int64_t padded_inputs) {
  return packed_bytes(format, outputs, padded_inputs);
}
