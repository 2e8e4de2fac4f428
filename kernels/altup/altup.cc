#include "altup/altup.h"

#include "native/simd.h"

namespace millrace {
namespace {

constexpr int64_t kMaxStreams = 16;

// out[i] = tanh(routed) . weight[i], for `count` rows of the weight.
void coefficients(const float* routed, const float* weight, int64_t streams, int64_t count, float* out) {
  alignas(64) float turned[kMaxStreams];
  for (int64_t i = 0; i < streams; i += kLanes) {
    const Mask m = first(streams - i);
    store(turned + i, m, tanh(load(routed + i, m)));
  }
  for (int64_t i = 0; i < count; ++i) {
    float total = 0.0f;
    for (int64_t j = 0; j < streams; ++j) total += weight[i * streams + j] * turned[j];
    out[i] = total;
  }
}

// The mean of x, or of the squares of what is apart from `middle`.
float mean(const float* x, int64_t width) {
  Vec total = zero();
  for (int64_t i = 0; i < width; i += kLanes) total = add(total, load(x + i, first(width - i)));
  return sum(total) / static_cast<float>(width);
}

float mean_square(const float* x, int64_t width, float middle = 0.0f) {
  Vec total = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    const Vec apart = sub(load(x + i, m), set1(middle));
    total = select(m, fma(apart, apart, total), total);
  }
  return sum(total) / static_cast<float>(width);
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void altup_predict(const AltUpPredictArgs& args, int thread, int num_threads) {
  const int64_t streams = args.num_streams, width = args.width;
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float shares[kMaxStreams * kMaxStreams];
    coefficients(args.routed + row * streams, args.weight, streams, streams * streams, shares);
    for (int64_t to = 0; to < streams; ++to) {
      float* out = args.predicted + to * args.stream_stride + row * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const Mask m = first(width - i);
        Vec total = zero();
        for (int64_t from = 0; from < streams; ++from) {
          const Vec v = load(args.streams + from * args.stream_stride + row * width + i, m);
          total = fma(set1(shares[to * streams + from]), v, total);
        }
        total = add(total, load(args.streams + to * args.stream_stride + row * width + i, m));
        store(out + i, m, total);
        if (to == args.active) store(args.active_out + row * width + i, m, total);
      }
    }
  }
}

extern "C" void altup_correct(const AltUpCorrectArgs& args, int thread, int num_threads) {
  const int64_t streams = args.num_streams, width = args.width;
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float shares[kMaxStreams];
    coefficients(args.routed + row * streams, args.weight, streams, streams, shares);
    const float* activated = args.activated + row * width;
    const float* before = args.predicted + args.active * args.stream_stride + row * width;
    for (int64_t to = 0; to < streams; ++to) {
      const int64_t at = to * args.stream_stride + row * width;
      const Vec part = set1(shares[to] + 1.0f);
      for (int64_t i = 0; i < width; i += kLanes) {
        const Mask m = first(width - i);
        const Vec change = sub(load(activated + i, m), load(before + i, m));
        const Vec v = fma(change, part, load(args.predicted + at + i, m));
        store(args.streams + at + i, m, v);
        if (to != args.active) continue;
        store(args.active_out + row * width + i, m, args.scale ? mul(v, load(args.scale + i, m)) : v);
      }
    }
  }
}

extern "C" void match_magnitude(const MagnitudeArgs& args, int thread, int num_threads) {
  const int64_t width = args.width;
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* x = args.x + row * width;
    const Vec wanted = set1(std::sqrt(mean_square(args.like + row * width, width)));
    const float square = mean_square(x, width);
    // What is not a number stays so.
    const Vec found = set1(std::sqrt(square < 1e-5f ? 1e-5f : square));
    for (int64_t i = 0; i < width; i += kLanes) {
      const Mask m = first(width - i);
      store(x + i, m, div(mul(load(x + i, m), wanted), found));
    }
  }
}

extern "C" void stream_mean(const StreamMeanArgs& args, int thread, int num_threads) {
  const int64_t width = args.width;
  const Vec count = set1(static_cast<float>(args.num_streams));
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const Mask m = first(width - i);
      Vec total = load(args.first + row * width + i, m);
      for (int64_t other = 0; other + 1 < args.num_streams; ++other) {
        total = add(total, load(args.others + other * args.stream_stride + row * width + i, m));
      }
      store(args.out + row * width + i, m, div(total, count));
    }
  }
}

extern "C" void cut_off(const CutOffArgs& args, int thread, int num_threads) {
  const int64_t width = args.width;
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* gates = args.gate_up + row * 2 * width;
    const float middle = mean(gates, width);
    const Vec least = set1(middle + std::sqrt(mean_square(gates, width, middle)) * args.deviations);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Mask m = first(width - i);
      // NaN stays NaN, as max returns its second operand then.
      store(gates + i, m, max(zero(), sub(load(gates + i, m), least)));
    }
  }
}

MILLRACE_OP(altup_predict, AltUpPredictArgs)
MILLRACE_OP(altup_correct, AltUpCorrectArgs)
MILLRACE_OP(match_magnitude, MagnitudeArgs)
MILLRACE_OP(stream_mean, StreamMeanArgs)
MILLRACE_OP(cut_off, CutOffArgs)
