#include "activation/activation.h"

#include "native/past_caches.h"
#include "native/simd.h"

namespace millrace {
namespace {

// Called with an `up` of one where there is none: a product with one is exact.
Vec silu(Vec gate, Vec up) { return mul(mul(gate, sigmoid(gate)), up); }

// NaN stays NaN, as max returns its second operand then.
Vec relu(Vec gate, Vec up) { return mul(max(zero(), gate), up); }

Vec relu2(Vec gate, Vec up) {
  const Vec positive = max(zero(), gate);
  return mul(mul(positive, positive), up);
}

Vec gelu(Vec gate, Vec up) {
  const Vec rest = erfc_of_size(mul(gate, set1(0.70710678118654752f)));
  // 1 + erf, without cancellation on the negative side.
  const Vec share = select(less(gate, zero()), rest, sub(set1(2.0f), rest));
  return mul(mul(mul(set1(0.5f), gate), share), up);
}

Vec clamped_swiglu(Vec gate, Vec up) {
  const Vec low = min(set1(7.0f), gate);
  const Vec linear = add(max(set1(-7.0f), min(set1(7.0f), up)), set1(1.0f));
  return mul(mul(low, sigmoid(mul(set1(1.702f), low))), linear);
}

// e^x - 1 where x <= 0, without cancellation near zero.
Vec expm1_of_negative(Vec x) {
  constexpr float kSeries[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f};
  Vec near = set1(1.0f / 5040);
  for (const float c : kSeries) near = fma(near, x, set1(c));
  return select(less(set1(-0.35f), x), mul(near, x), sub(exp(x), set1(1.0f)));
}

Vec xielu(Vec x, const float* c) {
  const Vec line = mul(set1(c[2]), x);
  const Vec above = fma(mul(set1(c[0]), x), x, line);
  const Vec below = fma(sub(expm1_of_negative(min(set1(c[3]), x)), x), set1(c[1]), line);
  return select(less(zero(), x), above, below);
}

template <typename Apply>
void gate_rows(const ActivationArgs& args, int64_t num_rows, int thread, int num_threads, const Apply& apply) {
  // Rows may be few and wide: the unit of work is a piece of a row.
  constexpr int64_t kPiece = 512;
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const Range mine = share(num_rows * pieces, thread, num_threads);
  const bool past_caches = goes_past_caches(args.out, args.out_stride, num_rows, args.width);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t row = unit / pieces, begin = unit % pieces * kPiece;
    const int64_t end = begin + kPiece < args.width ? begin + kPiece : args.width;
    const float* gate = args.gate_up + row * (args.plain || args.up ? 1 : 2) * args.width;
    const float* beside = args.up ? args.up + row * args.up_stride : gate + args.width;
    const Vec factor = set1(args.factors ? args.factors[args.places[row]] : 1.0f);
    const Vec share = args.gates ? sigmoid(set1(args.gates[row])) : set1(1.0f);
    float* out = args.out + row * args.out_stride;
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask m = first(end - i);
      const Vec up = args.plain ? set1(1.0f) : mul(factor, load(beside + i, m));
      const Vec value = mul(share, apply(mul(factor, load(gate + i, m)), up));
      if (past_caches)
        store_past_caches(out + i, value);
      else
        store(out + i, m, value);
    }
  }
  if (past_caches) past_caches_done();
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void activation(const ActivationArgs& args, int thread, int num_threads) {
  const int64_t num_rows = args.num_rows ? *args.num_rows : args.step->num_tokens;
  switch (args.kind) {
    case kSilu: return gate_rows(args, num_rows, thread, num_threads, silu);
    case kGelu: return gate_rows(args, num_rows, thread, num_threads, gelu);
    case kGeluTanh:
      return gate_rows(args, num_rows, thread, num_threads,
                       [](Vec gate, Vec up) { return mul(gelu_tanh(gate), up); });
    case kClampedSwiglu: return gate_rows(args, num_rows, thread, num_threads, clamped_swiglu);
    case kRelu2: return gate_rows(args, num_rows, thread, num_threads, relu2);
    case kRelu: return gate_rows(args, num_rows, thread, num_threads, relu);
    case kXielu:
      return gate_rows(args, num_rows, thread, num_threads,
                       [&](Vec gate, Vec up) { return mul(xielu(gate, args.coefficients), up); });
  }
}

extern "C" void soft_cap(const SoftCapArgs& args, int thread, int num_threads) {
  const int64_t count = args.step->num_logit_rows * args.width;
  const int64_t vectors = (count + kLanes - 1) / kLanes;
  const Range mine = share(vectors, thread, num_threads);
  const Vec cap = set1(args.cap);
  for (int64_t i = mine.begin * kLanes; i < mine.end * kLanes && i < count; i += kLanes) {
    const Mask m = first(count - i);
    const Vec x = load(args.logits + i, m);
    store(args.logits + i, m, select(less(x, set1(kNeverDrawn)), x, mul(cap, tanh(div(x, cap)))));
  }
}

MILLRACE_OP(activation, ActivationArgs)
MILLRACE_OP(soft_cap, SoftCapArgs)
