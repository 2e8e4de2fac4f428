#include "experts/experts.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "native/simd.h"

namespace millrace {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct RouteScratch {
  std::vector<float> scores, eligible, merit;
  std::vector<int64_t> groups;
};
thread_local RouteScratch scratch;

// The indices of the `wanted` largest, largest first, of equal ones the first. What is NaN counts as less than
// all else, so that there are always enough.
void take_best(float* values, int64_t count, int64_t wanted, int64_t* best) {
  for (int64_t n = 0; n < wanted; ++n) {
    int64_t found = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (std::find(best, best + n, i) != best + n) continue;
      if (found < 0 || values[i] > values[found] || (values[found] != values[found] && values[i] == values[i]))
        found = i;
    }
    best[n] = found;
  }
}

// exp(logit - largest) over `count` logits, with their sum.
float exponentials(const float* logits, int64_t count, float* to) {
  float most = kMinusInfinity;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, logits[i]);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first(count - i);
    store(to + i, m, exp(sub(load(logits + i, m), set1(most))));
  }
  for (int64_t i = 0; i < count; ++i) sum += to[i];
  return sum;
}

void close_groups(const RouteArgs& args, float* eligible) {
  const int64_t size = args.num_experts / args.num_groups;
  std::vector<float>& merit = scratch.merit;
  merit.resize(args.num_groups);
  for (int64_t group = 0; group < args.num_groups; ++group) {
    float best = kMinusInfinity, second = kMinusInfinity;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      if (eligible[i] > best) {
        second = best;
        best = eligible[i];
      } else if (eligible[i] > second) {
        second = eligible[i];
      }
    }
    merit[group] = args.group_score == kBest ? best : best + second;
  }
  scratch.groups.resize(args.num_active_groups);
  int64_t* open = scratch.groups.data();
  take_best(merit.data(), args.num_groups, args.num_active_groups, open);
  for (int64_t group = 0; group < args.num_groups; ++group)
    if (std::find(open, open + args.num_active_groups, group) == open + args.num_active_groups)
      std::fill(eligible + group * size, eligible + (group + 1) * size, kMinusInfinity);
}

// Each choice is weighed by a softmax over what is left and near it.
void mix_sparsely(const RouteArgs& args, const float* logits, const int64_t* ids, float* shares) {
  for (int64_t a = 0; a < args.num_active; ++a) {
    const float most = logits[ids[a]];
    float sum = 0.0f;
    for (int64_t i = 0; i < args.num_experts; ++i) {
      if (std::find(ids, ids + a, i) != ids + a) continue;
      const bool is_far = (most - logits[i]) / std::max(std::abs(logits[i]), most) > args.tolerance;
      if (!is_far) sum += std::exp(logits[i] - most);
    }
    shares[a] = 1.0f / sum;
  }
}

void route_row(const RouteArgs& args, const float* logits, int64_t* ids, float* shares) {
  const int64_t count = args.num_experts, active = args.num_active;
  std::vector<float>&scores = scratch.scores, &eligible = scratch.eligible;
  scores.resize(count + kLanes);
  eligible.resize(count + kLanes);
  if (args.scoring == kSoftmaxOfBest) {
    std::copy(logits, logits + count, eligible.begin());
    take_best(eligible.data(), count, active, ids);
    for (int64_t a = 0; a < active; ++a) eligible[a] = logits[ids[a]];
    const float sum = exponentials(eligible.data(), active, scores.data());
    for (int64_t a = 0; a < active; ++a) shares[a] = scores[a] / sum;
    return;
  }
  if (args.scoring == kSparseMixer) {
    std::copy(logits, logits + count, eligible.begin());
    take_best(eligible.data(), count, active, ids);
    return mix_sparsely(args, logits, ids, shares);
  }
  if (args.scoring == kSoftmax) {
    const float sum = exponentials(logits, count, scores.data());
    for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
  } else {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Mask m = first(count - i);
      store(scores.data() + i, m, sigmoid(load(logits + i, m)));
    }
  }
  for (int64_t i = 0; i < count; ++i) eligible[i] = args.correction ? scores[i] + args.correction[i] : scores[i];
  if (args.num_groups) close_groups(args, eligible.data());
  take_best(eligible.data(), count, active, ids);
  float sum = 0.0f;
  for (int64_t a = 0; a < active; ++a) sum += shares[a] = scores[ids[a]];
  const float divisor = args.normalized ? sum + 1e-20f : 1.0f;
  for (int64_t a = 0; a < active; ++a) shares[a] = shares[a] / divisor * args.scaling;
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void route(const RouteArgs& args, int thread, int num_threads) {
  const Range rows = share(*args.num_rows, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    int64_t* ids = args.ids + row * args.num_active;
    float* shares = args.shares + row * args.num_active;
    route_row(args, args.logits + row * args.num_experts, ids, shares);
    for (int64_t a = 0; args.expert_scales && a < args.num_active; ++a) shares[a] *= args.expert_scales[ids[a]];
  }
}

extern "C" void expert_plan(const ExpertPlanArgs& args, int, int) {
  // By one part: it takes a microsecond for a thousand choices.
  if (op_take() != 0) return;
  const int64_t count = *args.num_rows * args.num_active;
  std::fill(args.starts, args.starts + args.num_experts + 1, 0);
  const auto position = [&](int64_t expert) { return args.positions ? args.positions[expert] : expert; };
  for (int64_t i = 0; i < count; ++i) ++args.starts[position(args.ids[i]) + 1];
  for (int64_t i = 0; args.counts && i < count; ++i) ++args.counts[args.ids[i]];
  for (int64_t each = 0; each < args.num_experts; ++each) args.starts[each + 1] += args.starts[each];
  const int64_t held = args.num_held ? args.num_held : args.num_experts;
  const int64_t begin = args.starts[args.first_held], end = args.starts[args.first_held + held];
  *args.num_places = end - begin;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = args.starts[position(args.ids[i])]++;
    if (place >= begin && place < end) args.places[place - begin] = i;
    args.ranks[i] = place;
  }
  // Each start has moved to the end of its own places.
  for (int64_t each = args.num_experts; each > 0; --each) args.starts[each] = args.starts[each - 1];
  args.starts[0] = 0;
}

extern "C" void expert_sum(const ExpertSumArgs& args, int thread, int num_threads) {
  // Rows may be few and wide: the unit of work is a piece of a row.
  constexpr int64_t kPiece = 512;
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const Range mine = share(*args.num_rows * pieces, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t row = unit / pieces, begin = unit % pieces * kPiece;
    const int64_t end = std::min(begin + kPiece, args.width);
    const float* shares = args.shares ? args.shares + row * args.num_active : nullptr;
    const int64_t* ranks = args.ranks + row * args.num_active;
    float* out = args.out + row * args.out_stride;
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask m = first(end - i);
      Vec total = zero();
      for (int64_t a = 0; a < args.num_active; ++a) {
        const float* given = args.rows + ranks[a] * args.rows_stride + i;
        Vec row = load(given, m);
        for (int64_t part = 1; part < args.num_parts; ++part) row = add(row, load(given + part * args.part_stride, m));
        total = add(total, mul(set1(shares ? shares[a] : 1.0f), row));
      }
      if (args.accumulate) total = add(load(out + i, m), total);
      store(out + i, m, total);
    }
  }
}

MILLRACE_OP(route, RouteArgs)
MILLRACE_OP(expert_plan, ExpertPlanArgs)
MILLRACE_OP(expert_sum, ExpertSumArgs)
