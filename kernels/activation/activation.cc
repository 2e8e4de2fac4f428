#include "activation/activation.h"

#include "native/simd.h"

namespace millrace {
namespace {

Vec silu(Vec gate, Vec up) { return mul(mul(gate, sigmoid(gate)), up); }

Vec gelu(Vec gate, Vec up) {
  const Vec rest = erfc_of_size(mul(gate, set1(0.70710678118654752f)));
  // 1 + erf, without cancellation on the negative side.
  const Vec share = select(less(gate, zero()), rest, sub(set1(2.0f), rest));
  return mul(mul(mul(set1(0.5f), gate), share), up);
}

Vec gelu_tanh(Vec gate, Vec up) {
  const Vec cube = mul(mul(gate, gate), gate);
  const Vec inner = mul(set1(0.79788456080286536f), add(gate, mul(set1(0.044715f), cube)));
  return mul(mul(mul(set1(0.5f), gate), add(set1(1.0f), tanh(inner))), up);
}

Vec clamped_swiglu(Vec gate, Vec up) {
  const Vec low = min(set1(7.0f), gate);
  const Vec linear = add(max(set1(-7.0f), min(set1(7.0f), up)), set1(1.0f));
  return mul(mul(low, sigmoid(mul(set1(1.702f), low))), linear);
}

template <Vec (*kApply)(Vec gate, Vec up)>
void gate_rows(const ActivationArgs& args, int64_t num_rows, int thread, int num_threads) {
  // Rows may be few and wide: the unit of work is a piece of a row.
  constexpr int64_t kPiece = 512;
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const Range mine = share(num_rows * pieces, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t row = unit / pieces, begin = unit % pieces * kPiece;
    const int64_t end = begin + kPiece < args.width ? begin + kPiece : args.width;
    const float* gate = args.gate_up + row * 2 * args.width;
    float* out = args.out + row * args.out_stride;
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask m = first(end - i);
      store(out + i, m, kApply(load(gate + i, m), load(gate + args.width + i, m)));
    }
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void activation(const ActivationArgs& args, int thread, int num_threads) {
  const int64_t num_rows = args.num_rows ? *args.num_rows : args.step->num_tokens;
  switch (args.kind) {
    case kSilu: return gate_rows<silu>(args, num_rows, thread, num_threads);
    case kGelu: return gate_rows<gelu>(args, num_rows, thread, num_threads);
    case kGeluTanh: return gate_rows<gelu_tanh>(args, num_rows, thread, num_threads);
    case kClampedSwiglu: return gate_rows<clamped_swiglu>(args, num_rows, thread, num_threads);
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
