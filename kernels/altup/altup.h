// Alternating updates: several streams of which each layer computes one. reference.py says what they are.
#pragma once

#include "native/op.h"

namespace millrace {

// Shape letters: T tokens, E hidden size (`width`), A streams. Those lie stream_stride floats apart, rows of T
// behind one another.

// predicted[i] = streams[i] + sum over j of c[i, j] streams[j], with c = tanh(routed) weight^T; one of them is
// written to `active_out`, too.
struct AltUpPredictArgs {
  const Step* step;
  const float* streams;  // [A, T, E]
  const float* routed;   // [T, A]
  const float* weight;   // [A * A, A]
  float* predicted;      // [A, T, E]
  float* active_out;     // [T, E]
  int64_t num_streams;   // A
  int64_t stream_stride;
  int64_t width;
  int64_t active;
};

// streams[i] = predicted[i] + (activated - predicted[active]) (1 + c[i]), with c = tanh(routed) weight^T; the
// active one, times `scale`, is written to `active_out`.
struct AltUpCorrectArgs {
  const Step* step;
  const float* predicted;  // [A, T, E]
  const float* activated;  // [T, E]
  const float* routed;     // [T, A]
  const float* weight;     // [A, A]
  const float* scale;      // [E] or null
  float* streams;          // [A, T, E]
  float* active_out;       // [T, E]
  int64_t num_streams;     // A
  int64_t stream_stride;
  int64_t width;
  int64_t active;
};

// x[t] times the root mean square of like[t], over its own: the root of its mean square, or of 1e-5 if that is more.
struct MagnitudeArgs {
  const Step* step;
  float* x;           // [T, E], in place
  const float* like;  // [T, E]
  int64_t width;
};

// out[t] = the mean of first[t] and those of the A - 1 others.
struct StreamMeanArgs {
  const Step* step;
  const float* first;   // [T, E]
  const float* others;  // [A - 1, T, E]
  float* out;           // [T, E]
  int64_t num_streams;  // A
  int64_t stream_stride;
  int64_t width;
};

// Gates less what lies so many standard deviations above their mean, and none below that, in place.
struct CutOffArgs {
  const Step* step;
  float* gate_up;  // [T, 2 width], the gates first
  int64_t width;
  float deviations;
};

}  // namespace millrace
