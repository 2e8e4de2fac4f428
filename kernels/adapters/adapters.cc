#include "adapters/adapters.h"

#include <algorithm>

#include "native/simd.h"

namespace millrace {
namespace {

// Rows of one slot that are computed together (kernels/adapters/rows.py cuts blocks so).
constexpr int kAdapterRows = 8;
// Vectors of columns that one unit of work computes of a row.
constexpr int kVectors = 4;
// Outputs that one unit of adapter_expand computes.
constexpr int64_t kChunk = kVectors * kLanes;

struct Block {
  const int64_t* rows;
  int64_t num_rows, slot;
};

Block block_of(const Step& step, int64_t index) {
  const int64_t* found = step.adapter_blocks + 3 * index;
  return {step.adapter_rows + found[0], found[1], found[2]};
}

inline Vec load_weight(const float* p) { return load(p); }
inline Vec load_weight(const float* p, Mask m) { return load(p, m); }
inline Vec load_weight(const uint16_t* p) { return load_bf16(p); }
inline Vec load_weight(const uint16_t* p, Mask m) { return load_bf16(p, m); }

// total[i] = sum over k of x[i][k] * weight[k * stride], a vector of columns.
template <int kRows, bool kWhole, typename Weight>
inline void multiply(const float* const* x, int64_t inputs, const Weight* weight, int64_t stride, Mask m, Vec* total) {
  UNROLLED for (int i = 0; i < kRows; ++i) total[i] = zero();
  for (int64_t k = 0; k < inputs; ++k, weight += stride) {
    const Vec w = kWhole ? load_weight(weight) : load_weight(weight, m);
    UNROLLED for (int i = 0; i < kRows; ++i) total[i] = fma(set1(x[i][k]), w, total[i]);
  }
}

// The same sums of one row for several vectors of columns, at `columns`: each alone would wait for its own additions.
template <int kVectors, typename Weight>
inline void multiply_row(const float* x, int64_t inputs, const Weight* weight, int64_t stride, const int64_t* columns,
                         Vec* total) {
  UNROLLED for (int i = 0; i < kVectors; ++i) total[i] = zero();
  for (int64_t k = 0; k < inputs; ++k, weight += stride) {
    const Vec value = set1(x[k]);
    UNROLLED for (int i = 0; i < kVectors; ++i) total[i] = fma(value, load_weight(weight + columns[i]), total[i]);
  }
}

// The columns of inner from `column` on, kVectors of them at most, that a slot's ranks reach.
int64_t used_columns(const AdapterArgs& args, int64_t slot, int64_t column, int64_t* columns) {
  const int64_t end = std::min(column + kVectors * kLanes, args.num_parts * args.width);
  int64_t count = 0;
  for (; column < end; column += kLanes) {
    const int64_t part = column / args.width;
    if (column % args.width < args.ranks[slot * args.num_parts + part]) columns[count++] = column;
  }
  return count;
}

template <typename Weight>
void shrink(const AdapterArgs& args, int thread, int num_threads) {
  const int64_t width = args.num_parts * args.width, step = kVectors * kLanes, units = (width + step - 1) / step;
  const Range mine = share(args.step->num_adapter_blocks * units, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const Block block = block_of(*args.step, unit / units);
    const Weight* down = reinterpret_cast<const Weight*>(args.down) + block.slot * args.inputs * width;
    int64_t columns[kVectors];
    const int64_t count = used_columns(args, block.slot, unit % units * step, columns);
    if (!count) continue;
    if (block.num_rows == 1) {
      float* inner = args.inner + block.rows[0] * width;
      with_constant<kVectors>(count, [&](auto vectors) {
        Vec total[decltype(vectors)::value];
        multiply_row<decltype(vectors)::value>(args.x + block.rows[0] * args.x_stride, args.inputs, down, width, columns,
                                               total);
        for (int64_t i = 0; i < count; ++i) store(inner + columns[i], total[i]);
      });
      continue;
    }
    with_constant<kAdapterRows>(block.num_rows, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const float* x[kRows];
      Vec total[kRows];
      for (int i = 0; i < kRows; ++i) x[i] = args.x + block.rows[i] * args.x_stride;
      for (int64_t c = 0; c < count; ++c) {
        multiply<kRows, true>(x, args.inputs, down + columns[c], width, first(kLanes), total);
        for (int i = 0; i < kRows; ++i) store(args.inner + block.rows[i] * width + columns[c], total[i]);
      }
    });
  }
}

// Adds outputs [begin, end) of a part to the block's rows.
template <int kRows, typename Weight>
void expand_rows(const AdapterArgs& args, const Block& block, int64_t part, int64_t begin, int64_t end) {
  const int64_t inner_width = args.num_parts * args.width, rank = args.ranks[block.slot * args.num_parts + part];
  const Weight* up = reinterpret_cast<const Weight*>(args.up) + block.slot * args.width * args.outputs;
  const float* inner[kRows];
  Vec total[kRows];
  for (int i = 0; i < kRows; ++i) inner[i] = args.inner + block.rows[i] * inner_width + part * args.width;
  if (kRows == 1 && end - begin == kChunk) {
    const int64_t columns[kVectors] = {0, kLanes, 2 * kLanes, 3 * kLanes};
    float* out = args.out + block.rows[0] * args.out_stride + begin;
    Vec sums[kVectors];
    multiply_row<kVectors>(inner[0], rank, up + begin, args.outputs, columns, sums);
    for (int i = 0; i < kVectors; ++i) store(out + columns[i], add(load(out + columns[i]), sums[i]));
    return;
  }
  for (int64_t n = begin; n < end; n += kLanes) {
    const Mask m = first(end - n);
    if (end - n >= kLanes)
      multiply<kRows, true>(inner, rank, up + n, args.outputs, m, total);
    else
      multiply<kRows, false>(inner, rank, up + n, args.outputs, m, total);
    for (int i = 0; i < kRows; ++i) {
      float* out = args.out + block.rows[i] * args.out_stride + n;
      store(out, m, add(load(out, m), total[i]));
    }
  }
}

template <typename Weight>
void expand(const AdapterArgs& args, int thread, int num_threads) {
  int64_t units = 0;
  for (int64_t part = 0; part < args.num_parts; ++part)
    units += (args.starts[part + 1] - args.starts[part] + kChunk - 1) / kChunk;
  const Range mine = share(args.step->num_adapter_blocks * units, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const Block block = block_of(*args.step, unit / units);
    int64_t chunk = unit % units, part = 0;
    for (;; ++part) {
      const int64_t chunks = (args.starts[part + 1] - args.starts[part] + kChunk - 1) / kChunk;
      if (chunk < chunks) break;
      chunk -= chunks;
    }
    if (!args.ranks[block.slot * args.num_parts + part]) continue;
    const int64_t begin = args.starts[part] + chunk * kChunk, end = std::min(begin + kChunk, args.starts[part + 1]);
    with_constant<kAdapterRows>(block.num_rows, [&](auto rows) {
      expand_rows<decltype(rows)::value, Weight>(args, block, part, begin, end);
    });
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void adapter_shrink(const AdapterArgs& args, int thread, int num_threads) {
  if (args.bfloat16)
    shrink<uint16_t>(args, thread, num_threads);
  else
    shrink<float>(args, thread, num_threads);
}

extern "C" void adapter_expand(const AdapterArgs& args, int thread, int num_threads) {
  if (args.bfloat16)
    expand<uint16_t>(args, thread, num_threads);
  else
    expand<float>(args, thread, num_threads);
}

MILLRACE_OP(adapter_shrink, AdapterArgs)
MILLRACE_OP(adapter_expand, AdapterArgs)
