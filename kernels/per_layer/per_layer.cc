#include "per_layer/per_layer.h"

#include "native/simd.h"

namespace millrace {
namespace {

void add_part(const PerLayerArgs& args, const float* x, float* to) {
  const Vec scale = set1(args.projection_scale);
  Vec total = zero();
  for (int64_t i = 0; i < args.width; i += kLanes) {
    const Vec v = mul(load(x + i, first(args.width - i)), scale);
    total = fma(v, v, total);
  }
  const Vec share = set1(1.0f / std::sqrt(sum(total) / static_cast<float>(args.width) + args.eps));
  const Vec whole = set1(args.sum_scale);
  for (int64_t i = 0; i < args.width; i += kLanes) {
    const Mask m = first(args.width - i);
    const Vec normed = mul(mul(mul(load(x + i, m), scale), share), load(args.weight + i, m));
    store(to + i, m, mul(add(normed, load(to + i, m)), whole));
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void per_layer_inputs(const PerLayerArgs& args, int thread, int num_threads) {
  const Range mine = share(args.step->num_tokens * args.num_layers, thread, num_threads);
  for (int64_t part = mine.begin; part < mine.end; ++part) {
    add_part(args, args.projected + part * args.width, args.rows + part * args.width);
  }
}

MILLRACE_OP(per_layer_inputs, PerLayerArgs)
