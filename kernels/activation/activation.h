// Activations of feed-forward layers, gated or plain, and the cap on logits.
#pragma once

#include "native/op.h"

namespace millrace {

enum ActivationKind : int64_t {
  kSilu = 0,           // gate * sigmoid(gate) * up
  kGelu = 1,           // with the error function
  kGeluTanh = 2,       // with its approximation by tanh
  kClampedSwiglu = 3,  // gpt-oss: min(gate, 7) * sigmoid(1.702 gate) * (clamp(up, -7, 7) + 1)
  kRelu2 = 4,          // max(gate, 0)^2
  kXielu = 5,          // arXiv 2411.13010, by the coefficients
  kRelu = 6,           // max(gate, 0)
};

// out[t, i] = act(gate_up[t, i]) * gate_up[t, width + i], or without the second factor where it is `plain`.
// A row may be multiplied before by a factor, that of choice places[t], and after by the sigmoid of a gate.
struct ActivationArgs {
  const Step* step;      // gives the number of rows T when num_rows is null
  const int64_t* num_rows;  // or null
  const float* gate_up;  // [T, 2 width], the gates first; [T, width] where it is plain, or has an `up`
  float* out;            // [T, width]; may be gate_up when out_stride is the width of its rows
  int64_t width;
  int64_t out_stride;  // floats from one row of out to the next
  int64_t kind;        // ActivationKind
  int64_t plain;
  const float* coefficients;  // of kXielu: [4] a of x > 0, a of the others, beta, largest exponent; else null
  const float* factors;       // by choice, or null
  const int64_t* places;      // [T], with factors
  const float* gates;         // [T] or null
  const float* up;            // what gates [T, width] multiply, rows up_stride apart; null: what is beside them
  int64_t up_stride;
};

// Logits below it belong to ids that are never drawn, and stay as they are.
constexpr float kNeverDrawn = -1e8f;

// logits = cap * tanh(logits / cap), in place, over the step's logit rows.
struct SoftCapArgs {
  const Step* step;
  float* logits;  // [R, width]
  int64_t width;
  float cap;
};

}  // namespace millrace
