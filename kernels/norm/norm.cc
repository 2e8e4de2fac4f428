#include "norm/norm.h"

#include "native/simd.h"

namespace millrace {
namespace {

// 1 / sqrt(mean(x^2) + eps). Four chains of lanes, joined in one order whatever the width.
float inverse_rms(const float* x, int64_t width, float eps) {
  Vec total[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int chain = 0; chain < 4; ++chain) {
      const Vec v = load(x + i + chain * kLanes);
      total[chain] = fma(v, v, total[chain]);
    }
  }
  for (int chain = 0; i < width; i += kLanes, ++chain) {
    const Vec v = load(x + i, first(width - i));
    total[chain] = fma(v, v, total[chain]);
  }
  const float squares = sum(add(add(total[0], total[1]), add(total[2], total[3])));
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// stream = x + change (or + its norm); returns where the stream's row lies.
const float* add_change(const RmsNormArgs& args, const float* x, const float* change, float* into) {
  const int64_t width = args.width;
  const float scale = args.change_weight ? inverse_rms(change, width, args.eps) : 1.0f;
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    Vec v = load(change + i, m);
    if (args.change_weight) v = mul(mul(v, set1(scale)), load(args.change_weight + i, m));
    store(into + i, m, add(load(x + i, m), v));
  }
  return into;
}

void norm_row(const RmsNormArgs& args, int64_t from, int64_t to) {
  const int64_t width = args.width;
  const float* stream = args.x + from * width;
  float* residual = args.residual ? args.residual + to * width : nullptr;
  float* out = args.out ? args.out + to * width : nullptr;
  if (args.change) {
    stream = add_change(args, stream, args.change + from * width, residual ? residual : out);
  } else if (residual && residual != stream) {
    std::memcpy(residual, stream, sizeof(float) * width);
  }
  if (!out) return;
  const Vec scale = set1(inverse_rms(stream, width, args.eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    store(out + i, m, mul(mul(load(stream + i, m), scale), load(args.weight + i, m)));
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void rms_norm(const RmsNormArgs& args, int thread, int num_threads) {
  const int64_t rows = args.logit_rows ? args.step->num_logit_rows : args.step->num_tokens;
  const Range mine = share(rows, thread, num_threads);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    norm_row(args, args.logit_rows ? args.step->logit_rows[row] : row, row);
  }
}

MILLRACE_OP(rms_norm, RmsNormArgs)
