// x W^T (+ b) over weights that were packed once.
//
// A packed weight is a row of panels of kPanel outputs (the last one narrower, a multiple of kLane). Inside a
// panel, inputs go in groups of as many as one multiply-accumulate instruction takes, outputs side by side:
// [inputs / group][outputs of the panel][group], group = 1 (float32), 2 (bfloat16) or 4 (int8, as w + 128). Two
// groups of 4-bit levels share their bytes, the first in the lower halves; weights of 12 bits share words of 16, codes of
// fewer than 8 bits share bytes (gemm_coded.h). Panels follow each other without gap, so a product reads the weight as
// one stream.
//
// Every output is one chain of additions over the inputs in ascending order, whatever the number of rows: rows
// are independent bit for bit. (With AMX the chain is the tile instruction's; all row counts use it.)
//
// Shape letters: M rows, N outputs, K inputs.
#pragma once

#include "native/op.h"

namespace millrace {

constexpr int64_t kPanel = 64;
constexpr int64_t kLane = 16;

enum Format : int64_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  // int8 with a scale per output; rows are rounded to 16 bits by blocks of inputs (gemm_wide.h).
  kInt8 = 2,
  // The same weights; rows are quantized to int8 with a scale each, products are exact in int32.
  kInt8Dynamic = 3,
  // 4 bits (levels 0 to 15, standing for level - 8), scaled by groups of inputs; rows are rounded to 16 bits.
  kInt4Grouped = 4,
  // int8, scaled by groups of inputs; rows are rounded to 16 bits.
  kInt8Grouped = 5,
  // bfloat16 that lose nothing, or next to nothing, in 12 bits (gemm_float12.h, gemm_float12_avx2.h; no other level).
  kFloat12 = 6,
  // float8_e4m3, scaled by groups of inputs; rows stay float32 (gemm_narrow.h).
  kFloat8 = 7,
  // 4-bit codes of 16 floats, scaled by groups of inputs; rows stay float32 (gemm_narrow.h).
  kFloatCodes = 8,
  // float32 as two bfloat16, what it rounds to and what is left; rows likewise (gemm_tiles.h's level alone). A panel has
  // all its rounded inputs first.
  kHalfPairs = 9,
  // Plus 2, 3, 4, 5 or 6: codes of so many bits for int8, scaled by groups of inputs in two steps; rows are rounded to
  // 16 bits (gemm_coded.h).
  kCoded = 16,
};

// What a byte of kCoded's steps stands for.
enum StepKind : int64_t {
  kWholeStep = 0,  // an int8
  kPowerStep = 1,  // two to it less 127 (e8m0); 1 to 254
  kFloatStep = 2,  // a float8_e4m3, over 256
};

// Scales, minimums and bias are padded with zeros to N rounded up to kLane. G = inputs / group_size.
struct PackedWeight {
  int64_t format;
  int64_t outputs;        // N
  int64_t inputs;         // K
  int64_t padded_inputs;  // K rounded up with zeros (not for float32)
  int64_t group_size;     // inputs per scale (grouped formats), a multiple of 4 (int4: of 8)
  int64_t span;           // kCoded: inputs per number of `scales` and `minimums`, whole groups
  int64_t step_kind;      // kCoded
  int64_t code_zero;      // kCoded without codebook: what codes are larger by than what they stand for
  void* data;
  float* scales;             // int8: [N]; grouped: [G][outputs of the panel] for each panel
  float* minimums;           // grouped: likewise, times the sum of the group's inputs, or null
  // kCoded, whose scales and minimums are for each span instead: factors for each group, in the same order, or null.
  const uint8_t* steps;
  const int8_t* lows;
  // What 4-bit codes stand for, 16 of them: int8 + 128 (kCoded) or floats (kFloatCodes), or null.
  const void* codebook;
  float* bias;               // [N] or null
  const float* smoothing;    // [K], inputs are multiplied by it, or null
  const int64_t* order;      // [K], stored input i is input order[i] of the row, or null
};

struct GemmArgs {
  const int64_t* num_rows;  // M, read when the op runs
  const float* x;           // [M, K], rows x_stride apart
  float* out;               // [M, N], rows out_stride apart
  int64_t x_stride;
  int64_t out_stride;
  int64_t accumulate;  // add to what `out` holds
  // Converted rows; room for workspace_bytes(largest M, K) (see gemm_workspace_bytes).
  void* workspace;
  PackedWeight weight;
};

struct PackArgs {
  // [N, K]: float32 or bfloat16 (source_bytes 4 or 2), int8, float8 or a code (1), or [N, K / 2] bytes of two levels
  // each.
  const void* source;
  int64_t source_bytes;
  const float* bias;             // [N] or null
  const float* source_scales;    // int8: [N]; grouped: [N, G]; kCoded: [N, spans]
  const float* source_minimums;  // likewise or null; what level 0 stands for
  const uint8_t* source_steps;   // kCoded: [N, G] or null
  const int8_t* source_lows;     // kCoded: [N, G] or null
  PackedWeight weight;           // its memory is allocated and zero
};

struct WidthArgs {
  const void* source;  // [N, K] bfloat16
  int64_t outputs;
  int64_t inputs;
  int64_t count;  // of outputs; added to
};

// Bytes of a packed weight's data.
int64_t packed_bytes(int64_t format, int64_t outputs, int64_t padded_inputs);

}  // namespace millrace
