// Layers that carry a state from token to token instead of looking back: a short causal convolution, and a matrix
// per head that decays and takes in keys and values (Mamba 2's scan, the gated delta rule), a number per channel
// (RG-LRU), or some (Mamba's selective scan).
//
// A sequence's state lies in a slot of the cache; step->state_slots names it. A row that begins at position 0 begins
// with zeros, whatever lies there. Beside its own slot a row may leave its state, as it is after some tokens, in
// others (step->snapshot_rows).
//
// Tokens are taken in one by one, so that a result does not depend on where a prompt was cut. Forms that take in
// chunks of tokens by matrix products (flash-linear-attention's chunk_gated_delta_rule, mamba_ssm's SSD) round
// differently at every place where a prompt may be cut: at ends of blocks, and by what a step has room for. And
// vectors of float32 gain little by them: for each element of the state and each token they multiply twice, plus
// a part within the chunk, where this one does so three times, and four times with the delta rule.
#pragma once

#include "native/op.h"

namespace millrace {

// Shape letters: T tokens, N slots, C channels, W taps, H heads of values, G heads of keys (H is a multiple of G),
// K key dim, V value dim.

// out[t, c] = act(bias[c] + sum_j weight[j, c] input[t - W + 1 + j, c]) output_gate[t, c], where the input is
// x input_gate.
struct ShortConvolutionArgs {
  const Step* step;
  const float* x;            // [T, x_stride]
  const float* weight;       // [W, C]
  const float* bias;         // [C] or null
  const float* input_gate;   // [T, x_stride] or null
  const float* output_gate;  // [T, x_stride] or null
  float* out;                // [T, C]
  float* states;             // [N, W - 1, C] the last inputs, oldest first
  int64_t channels;
  int64_t taps;
  int64_t x_stride;
  int64_t activates;  // whether act is x sigmoid(x); else it is x
};

enum ScanKind : int64_t {
  kScanMamba2 = 0,  // decay = exp(rate dt), gain = dt, where dt = softplus(decays + bias) within its limits
  kScanDelta = 1,   // decay = exp(rate softplus(decays + bias)), gain = gain_scale sigmoid(gains)
  // As kScanDelta, each element of a key with a decay of its own (Kimi Delta Attention, arXiv 2510.26692); with a
  // floor it is exp(floor sigmoid(-rate (decays + bias))).
  kScanChannels = 2,
};

// What a scan takes in, by token and head. With the delta rule, queries and keys are brought to length one, in place,
// and queries are multiplied by query_scale.
struct ScanInputsArgs {
  const Step* step;
  float* queries;       // [T, row_stride], the first G K
  float* keys;          // [T, row_stride], the first G K
  float* decays;        // [T, decay_stride], the first H; of channels the first H K, in whose place decays go
  const float* gains;   // [T, gain_stride], the first H; null with Mamba 2
  const float* rate;    // [H], negative
  const float* bias;    // [H], of channels [H, K]
  float* factors;       // [T, H, 2] decay, but of channels, and gain
  int64_t num_heads;
  int64_t num_groups;
  int64_t key_dim;
  int64_t row_stride;
  int64_t decay_stride;
  int64_t gain_stride;
  int64_t kind;  // ScanKind
  float query_scale;
  float gain_scale;
  float floor;  // 0 is none
  float least_step, largest_step;  // limits of dt
};

// Keys of a head there may be at most.
constexpr int64_t kMostKeys = 512;

// state = decay state + key (x) change; out = query . state + skip value, where the change is gain value (Mamba 2), or
// gain (value - key . decay state) (delta rule).
struct ScanArgs {
  const Step* step;
  const float* queries;  // [T, row_stride], the first G K
  const float* keys;     // [T, row_stride], the first G K
  const float* values;   // [T, row_stride], the first H V
  const float* factors;  // [T, H, 2] decay and gain
  const float* decays;   // [T, decay_stride], of channels; the first H K
  const float* skip;     // [H] or null
  float* out;            // [T, H V]
  float* states;         // [N, H, K, V]
  int64_t num_heads;
  int64_t num_groups;
  int64_t key_dim;
  int64_t value_dim;
  int64_t row_stride;
  int64_t decay_stride;
  int64_t kind;  // ScanKind
};

// A real-gated linear recurrent unit (RG-LRU, arXiv 2402.19427), channel by channel: state = decay state +
// sqrt(1 - decay^2) taken, where decay = exp(rate sigmoid(second gate)) and taken = x sigmoid(first gate); out = state.
// A sequence begins with what it takes.
struct RgLruArgs {
  const Step* step;
  const float* x;      // [T, C]
  const float* gates;  // [T, H, 2, C / H]
  const float* bias;   // [H, 2, C / H] of gates
  const float* rate;   // [C], negative
  float* out;          // [T, C]; may be x
  float* states;       // [N, C]
  int64_t channels;
  int64_t head_dim;  // C / H
};

// Mamba's selective scan (arXiv 2312.00752): state[k, c] = e^(rate[k, c] dt) state[k, c] + key[k] dt x[c], where dt =
// softplus(steps[c]); out[c] = sum_k query[k] state[k, c] + skip[c] x[c].
struct SelectiveScanArgs {
  const Step* step;
  const float* x;        // [T, C]
  const float* steps;    // [T, C]
  const float* keys;     // [T, K]
  const float* queries;  // [T, K]
  const float* rate;     // [K, C], negative
  const float* skip;     // [C]
  float* out;            // [T, C]; may be x
  float* states;         // [N, K, C]
  int64_t channels;
  int64_t key_dim;
};

enum RowGate : int64_t { kGateSilu = 0, kGateSigmoid = 1, kGateGeluTanh = 2, kGateSoftplus = 3 };

// out = norm(x) weight act(gate), or norm(x act(gate)) weight with gate_first, per group of `size` elements; without a
// weight, x act(gate); without a gate, norm(x) weight.
struct GatedRowArgs {
  const Step* step;
  const float* x;       // [T, x_stride], the first `width`
  const float* gate;    // [T, gate_stride], the first `width`, or one for each group with shares_gate; null
  const float* weight;  // [width], or [size] that all groups share; or null
  float* out;           // [T, width]; may be x where that is as wide
  int64_t width;
  int64_t size;
  int64_t x_stride;
  int64_t gate_stride;
  int64_t shares_weight;
  int64_t gate_first;
  int64_t gate_kind;  // RowGate
  int64_t shares_gate;
  float eps;
  // Where a group goes beyond what is here: [T, width / size] sums of the squares of its `whole` elements; else null. The op
  // gated_squares writes those of the elements that are here.
  float* squares;
  int64_t whole;
};

}  // namespace millrace
