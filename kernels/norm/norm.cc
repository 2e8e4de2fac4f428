#include "norm/norm.h"

#include "native/simd.h"

namespace millrace {
namespace {

// The mean of `term` over x. Four chains of lanes, joined in one order whatever the width; beyond the width lie
// lanes of zero.
template <typename Term>
float mean_of(const float* x, int64_t width, const Term& term) {
  Vec total[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int chain = 0; chain < 4; ++chain) total[chain] = term(load(x + i + chain * kLanes), total[chain]);
  }
  for (int chain = 0; i < width; i += kLanes, ++chain) {
    const Mask m = first(width - i);
    total[chain] = select(m, term(load(x + i, m), total[chain]), total[chain]);
  }
  return sum(add(add(total[0], total[1]), add(total[2], total[3]))) / static_cast<float>(width);
}

// What is taken away from a row, and what it is multiplied by then.
struct Moments {
  float mean, scale;
};

Moments moments(const RmsNormArgs& args, const float* x) {
  const float mean = args.centered ? mean_of(x, args.width, [](Vec v, Vec sum) { return add(sum, v); }) : 0.0f;
  const Vec middle = set1(mean);
  const float square = mean_of(x, args.width, [middle](Vec v, Vec sum) {
    const Vec apart = sub(v, middle);
    return fma(apart, apart, sum);
  });
  return {mean, 1.0f / std::sqrt(square + args.eps)};
}

// Elements of a row, normed, at i.
Vec normed(Vec v, const Moments& row, const float* weight, const float* bias, int64_t i, Mask m) {
  v = mul(mul(sub(v, set1(row.mean)), set1(row.scale)), load(weight + i, m));
  return bias ? add(v, load(bias + i, m)) : v;
}

// stream = x + change (or + its norm), times the gain; returns where the stream's row lies.
const float* add_change(const RmsNormArgs& args, const float* x, const float* change, float* into) {
  const int64_t width = args.width;
  const Moments row = args.change_weight ? moments(args, change) : Moments{};
  const Vec gain = set1(args.gain != 0.0f ? args.gain : 1.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    Vec v = load(change + i, m);
    if (args.change_weight) v = normed(v, row, args.change_weight, args.change_bias, i, m);
    store(into + i, m, mul(add(load(x + i, m), v), gain));
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
  const Moments row = moments(args, stream);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    store(out + i, m, normed(load(stream + i, m), row, args.weight, args.bias, i, m));
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
