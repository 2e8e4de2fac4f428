// The rotation of values of four bits (kernels/paged_cache/four_bits): signs, then Hadamard matrices.
#pragma once

#include <algorithm>
#include <cmath>

#include "native/simd.h"

namespace millrace {

constexpr int64_t kMostTurned = 1024;

// Rows of a Hadamard matrix within a vector, whose lanes are in blocks of kBlock: [factor's lane][lane].
template <int kBlock>
struct HadamardRows {
  alignas(64) float rows[kLanes][kLanes];

  constexpr HadamardRows() : rows{} {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kLanes; ++j)
        rows[i][j] = i / kBlock != j / kBlock ? 0.0f : __builtin_parity(i & j & (kBlock - 1)) ? -1.0f : 1.0f;
  }
};

struct RudinShapiroSigns {
  alignas(64) float signs[kMostTurned];

  constexpr RudinShapiroSigns() : signs{} {
    for (unsigned i = 0; i < kMostTurned; ++i) signs[i] = __builtin_parity(i & (i >> 1)) ? -1.0f : 1.0f;
  }
};

// Not inside a function: there all levels that a process loads would share one table, and lanes differ between them.
constexpr HadamardRows<8> kRowsOfEight;
constexpr HadamardRows<kLanes> kRowsOfVector;
constexpr RudinShapiroSigns kTurnSigns;

// x [dim] times Hadamard matrices, in place, in blocks of the largest power of two that divides dim, at least 8; not
// yet divided by the root of its size.
inline int64_t hadamard(float* x, int64_t dim) {
  const int64_t block = dim & -dim, within = std::min<int64_t>(block, kLanes);
  const float(*const rows)[kLanes] = within == 8 ? kRowsOfEight.rows : kRowsOfVector.rows;
  for (int64_t at = 0; at < dim; at += kLanes) {
    Vec total = zero();
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, dim - at); ++i) total = fma(set1(x[at + i]), load(rows[i]), total);
    store(x + at, first(dim - at), total);
  }
  for (int64_t half = within; half < block; half *= 2) {
    for (int64_t at = 0; at < dim; at += 2 * half) {
      for (int64_t i = at; i < at + half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + i + half);
        store(x + i, add(a, b));
        store(x + i + half, sub(a, b));
      }
    }
  }
  return block;
}

// x [dim], rotated, to `out`.
inline void turn(const float* x, int64_t dim, float* out) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    store(out + i, m, mul(load(x + i, m), load(kTurnSigns.signs + i, m)));
  }
  const Vec factor = set1(1.0f / std::sqrt(static_cast<float>(hadamard(out, dim))));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    store(out + i, m, mul(load(out + i, m), factor));
  }
}

// Undoes it, in place.
inline void turn_back(float* x, int64_t dim) {
  const Vec factor = set1(1.0f / std::sqrt(static_cast<float>(hadamard(x, dim))));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    store(x + i, m, mul(mul(load(x + i, m), factor), load(kTurnSigns.signs + i, m)));
  }
}

}  // namespace millrace
