#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "gemm_micro.h"
#include "gemm_rows.h"
#include "gemm_tiles.h"

namespace millrace {
namespace {

// Rows that share one pass over a panel; their totals stay in the nearest cache.
constexpr int64_t kRowBlock = 96;
// Inputs of a panel that are multiplied before the next ones: their weights stay in the second cache.
constexpr int64_t kInputBlock = 4096;
// Inputs of a quantized panel that are expanded at once.
constexpr int64_t kExpandBlock = 128;
// A thread takes panels by pieces of about so many bytes.
constexpr int64_t kPieceBytes = 256 << 10;
// Rows of so many elements together are converted by every thread for itself, which saves a barrier.
constexpr int64_t kPrivateElements = 16 << 10;

struct alignas(64) Scratch {
  float totals[kRowBlock * kPanel];
  uint16_t halves[kExpandBlock * kPanel];
  float floats[kExpandBlock * kPanel];
};

thread_local Scratch scratch;

int64_t padded_outputs(const PackedWeight& weight) { return (weight.outputs + kLane - 1) / kLane * kLane; }

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
  int64_t stride, count;  // columns that exist
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
void plain_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const typename Kind::Weight* panel,
                 int64_t width, int64_t inputs, typename Kind::Total* totals, const void* next) {
  const auto* data = static_cast<const typename Kind::Row*>(rows.data) + first_row * rows.stride;
  for (int64_t begin = 0; begin < inputs; begin += kInputBlock) {
    const int64_t count = std::min(kInputBlock, inputs - begin);
    multiply_rows<Kind>(data + begin, rows.stride, num_rows, panel + begin * width, width, count / Kind::kGroup,
                        totals, begin == 0, static_cast<const char*>(next));
  }
}

void int8_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const int8_t* panel, int64_t width,
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
void grouped_panel(const Rows& rows, int64_t first_row, int64_t num_rows, const PackedWeight& weight,
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
void panel_product(const GemmArgs& args, const Rows& rows, int64_t column, int64_t begin, int64_t end, int64_t next) {
  const PackedWeight& weight = args.weight;
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
      const Output output{args.out + (first + row) * args.out_stride + column, args.out_stride,
                          std::min(width, weight.outputs - column), args.accumulate != 0};
      finish_row(sums, rows.scales ? rows.scales[first + row] : 1.0f, scales,
                 weight.bias ? weight.bias + column : nullptr, output);
    }
  }
}

// --- rows ---

int64_t workspace_stride(const PackedWeight& weight) { return weight.padded_inputs * row_element_bytes(weight); }

// Where a copy of converted rows and what belongs to them lie.
struct Copy {
  char* rows;
  float* scales;
  float* sums;
};

int64_t num_sums(const PackedWeight& weight) { return weight.minimums ? weight.inputs / weight.group_size : 0; }

void convert_rows(const GemmArgs& args, const Copy& copy, int64_t begin, int64_t end) {
  const PackedWeight& weight = args.weight;
  const int64_t stride = workspace_stride(weight), groups = num_sums(weight);
  thread_local std::vector<float> arranged;
  for (int64_t row = begin; row < end; ++row) {
    const float* from = args.x + row * args.x_stride;
    if (weight.order || weight.smoothing) {
      arranged.resize(weight.inputs);
      arrange_row(from, weight, arranged.data());
      from = arranged.data();
    }
    char* to = copy.rows + row * stride;
    if (weight.format == kInt8Dynamic) {
      copy.scales[row] = quantize_row(from, reinterpret_cast<uint8_t*>(to), weight.inputs, weight.padded_inputs);
    } else {
      auto* halves = reinterpret_cast<HalfKind::Row*>(to);
      convert_row(from, halves, weight.inputs, weight.padded_inputs);
      if (groups) sum_groups(halves, groups, weight.group_size, copy.sums + row * groups);
    }
  }
}

// Tiles read whole tile heights, so the rows after the last one must be there.
int64_t padded_rows(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// Whether every part of a product converts the rows for itself; gemm_rows does it once for all otherwise.
bool converts_alone(const PackedWeight& weight, int64_t num_rows) {
  return num_rows * weight.padded_inputs <= kPrivateElements;
}

Copy copy_of(const GemmArgs& args, int64_t num_rows, int64_t part) {
  const PackedWeight& weight = args.weight;
  const int64_t height = padded_rows(num_rows), extra = (1 + num_sums(weight)) * static_cast<int64_t>(sizeof(float));
  const int64_t bytes = (height * (workspace_stride(weight) + extra) + 63) / 64 * 64;
  Copy copy;
  copy.rows = static_cast<char*>(args.workspace) + part * bytes;
  copy.scales = reinterpret_cast<float*>(copy.rows + height * workspace_stride(weight));
  copy.sums = copy.scales + height;
  return copy;
}

Rows prepare_rows(const GemmArgs& args, int64_t num_rows, int part) {
  const PackedWeight& weight = args.weight;
  if (!converts(weight)) return {args.x, args.x_stride, nullptr, nullptr};
  const bool alone = converts_alone(weight, num_rows);
  const Copy copy = copy_of(args, num_rows, alone ? part : 0);
  if (alone) convert_rows(args, copy, 0, num_rows);
  return {copy.rows, weight.padded_inputs, weight.format == kInt8Dynamic ? copy.scales : nullptr, copy.sums};
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void gemm_rows(const GemmArgs& args, int thread, int num_threads) {
  const int64_t num_rows = *args.num_rows;
  if (!converts(args.weight) || converts_alone(args.weight, num_rows)) return;
  const Range rows = share(num_rows, thread, num_threads);
  convert_rows(args, copy_of(args, num_rows, 0), rows.begin, rows.end);
}

MILLRACE_OP(gemm_rows, GemmArgs)

extern "C" void gemm(const GemmArgs& args, int thread, int num_threads) {
  const int64_t num_rows = *args.num_rows;
  if (num_rows == 0) return;
  const PackedWeight& weight = args.weight;
  const int64_t panels = (padded_outputs(weight) + kPanel - 1) / kPanel;
  // Pieces of several panels while rows are few; of one panel and some rows where panels alone are too few.
  const int64_t panel_bytes = packed_bytes(weight.format, kPanel, weight.padded_inputs);
  const int64_t most = std::max<int64_t>(1, panels / (4 * num_threads));
  const int64_t group = std::clamp<int64_t>(kPieceBytes / panel_bytes / std::max<int64_t>(1, num_rows / 16), 1, most);
  int64_t row_piece = num_rows;
  if (panels < 4 * num_threads && num_rows > kRowBlock) row_piece = kRowBlock;
  const int64_t row_pieces = (num_rows + row_piece - 1) / row_piece;
  const int64_t pieces = (panels + group - 1) / group * row_pieces;
  int64_t piece = op_take();
  if (piece >= pieces) return;
  const Rows rows = prepare_rows(args, num_rows, thread);
  [[maybe_unused]] const TileShapes shapes;
  while (piece < pieces) {
    // The next piece is taken ahead, so that it can be fetched while this one is computed.
    const int64_t after = op_take();
    const int64_t first = piece / row_pieces * group, begin = piece % row_pieces * row_piece;
    const int64_t last = std::min(first + group, panels);
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t next = panel + 1 < last ? panel + 1 : after < pieces ? after / row_pieces * group : panel;
      panel_product(args, rows, panel * kPanel, begin, std::min(begin + row_piece, num_rows), next * kPanel);
    }
    piece = after;
  }
}

MILLRACE_OP(gemm, GemmArgs)

// Bytes of workspace that products of up to max_rows rows and padded_inputs inputs need.
extern "C" int64_t millrace_gemm_workspace(int64_t max_rows, int64_t padded_inputs, int64_t num_threads) {
  // A row, its scale, and a sum for every four inputs at most.
  const int64_t row = padded_inputs * static_cast<int64_t>(sizeof(HalfKind::Row)) + 4 + padded_inputs;
  const int64_t alone = padded_rows(std::max<int64_t>(1, kPrivateElements / padded_inputs)) * row + 64;
  return std::max(padded_rows(max_rows) * row, alone * num_threads) + 64;
}

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Asks the system for what the level needs, once per process and before the first product. 0 when granted.
extern "C" int64_t millrace_prepare() {
#if defined(__AMX_TILE__)
  // ARCH_REQ_XCOMP_PERM for the state of tiles; threads that start later have it, too.
  return syscall(SYS_arch_prctl, 0x1023, 18);
#else
  return 0;
#endif
}
