#include "recurrent/recurrent.h"

#include "native/simd.h"

namespace millrace {
namespace {

// The tokens of one sequence in this step, and where its state is.
struct Row {
  int64_t begin, end;
  int64_t slot;
  bool is_fresh;
  int64_t first_snapshot, end_snapshots;
};

Row row_of(const Step& step, int64_t sequence) {
  const int64_t begin = step.query_starts[sequence];
  return {begin,
          step.query_starts[sequence + 1],
          step.state_slots[sequence],
          step.positions[begin] == 0,
          step.snapshot_starts[sequence],
          step.snapshot_starts[sequence + 1]};
}

constexpr int64_t kPiece = 256;

// Channels [from, to) of one sequence.
void convolve(const ShortConvolutionArgs& args, const Row& row, int64_t from, int64_t to) {
  const int64_t channels = args.channels, kept = args.taps - 1;
  float* state = args.states + row.slot * kept * channels;
  // The input of a token of this row, or one before it, which is a row of the state.
  const auto input = [&](int64_t token, int64_t i, Mask m) {
    if (token < row.begin) {
      return row.is_fresh ? zero() : load(state + (kept + token - row.begin) * channels + i, m);
    }
    const Vec x = load(args.x + token * args.x_stride + i, m);
    return args.input_gate ? mul(x, load(args.input_gate + token * args.x_stride + i, m)) : x;
  };
  for (int64_t token = row.begin; token < row.end; ++token) {
    for (int64_t i = from; i < to; i += kLanes) {
      const Mask m = first(to - i);
      Vec sum = args.bias ? load(args.bias + i, m) : zero();
      for (int64_t tap = 0; tap < args.taps; ++tap) {
        sum = fma(load(args.weight + tap * channels + i, m), input(token - kept + tap, i, m), sum);
      }
      if (args.activates) sum = mul(sum, sigmoid(sum));
      if (args.output_gate) sum = mul(sum, load(args.output_gate + token * args.x_stride + i, m));
      store(args.out + token * channels + i, m, sum);
    }
  }
  // A row shorter than the state moves it up; what is read lies behind what is written.
  const auto keep = [&](float* to_state, int64_t end) {
    for (int64_t index = 0; index < kept; ++index) {
      for (int64_t i = from; i < to; i += kLanes) {
        const Mask m = first(to - i);
        store(to_state + index * channels + i, m, input(end - kept + index, i, m));
      }
    }
  };
  for (int64_t each = row.first_snapshot; each < row.end_snapshots; ++each) {
    keep(args.states + args.step->snapshot_slots[each] * kept * channels, args.step->snapshot_rows[each] + 1);
  }
  keep(state, row.end);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// log(1 + e^x) = max(x, 0) + log(1 + u), where u = e^-|x| and log(1 + u) = 2 artanh(u / (2 + u)).
Vec softplus(Vec x) {
  const Vec u = exp(sub(zero(), abs(x))), s = div(u, add(set1(2.0f), u)), square = mul(s, s);
  Vec series = set1(1.0f / 15.0f);
  for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, set1(1.0f / static_cast<float>(odd)));
  return fma(add(s, s), series, max(zero(), x));
}

// x / sqrt(sum x^2 + 1e-6) * scale, in place.
void to_length(float* x, int64_t width, float scale) {
  Vec total = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i, first(width - i));
    total = fma(v, v, total);
  }
  const Vec factor = set1(scale / std::sqrt(sum(total) + 1e-6f));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    store(x + i, m, mul(load(x + i, m), factor));
  }
}

// Vectors of a state's row that are computed together: their chains of additions hide each other's latency.
constexpr int kStrip = 4;
// Rows of so many tokens compute in a copy of their strip, because rows of the state that lie far apart share few
// places of the first cache.
constexpr int64_t kFewTokens = 3;
// Tokens by which inputs are asked for ahead.
constexpr int64_t kAhead = 2;
constexpr int64_t kLineFloats = 16;

// What one head takes in and gives, token by token.
struct HeadInputs {
  const ScanArgs& args;
  int64_t head, group, from;

  const float* query(int64_t token) const {
    return args.queries + token * args.row_stride + group * args.key_dim;
  }
  const float* key(int64_t token) const { return args.keys + token * args.row_stride + group * args.key_dim; }
  const float* value(int64_t token) const {
    return args.values + token * args.row_stride + head * args.value_dim + from;
  }
  const float* factors(int64_t token) const { return args.factors + 2 * (token * args.num_heads + head); }
  const float* decays(int64_t token) const { return args.decays + token * args.decay_stride + head * args.key_dim; }
  float* out(int64_t token) const { return args.out + (token * args.num_heads + head) * args.value_dim + from; }

  // Rows of tokens lie pages apart, which processors do not foresee.
  void prefetch(int64_t token, int64_t width) const {
    for (int64_t k = 0; k < args.key_dim; k += kLineFloats) {
      __builtin_prefetch(query(token) + k, 0, kFirstCache);
      __builtin_prefetch(key(token) + k, 0, kFirstCache);
    }
    if (args.kind == kScanChannels) {
      for (int64_t k = 0; k < args.key_dim; k += kLineFloats) __builtin_prefetch(decays(token) + k, 0, kFirstCache);
    }
    for (int64_t i = 0; i < width; i += kLineFloats) __builtin_prefetch(value(token) + i, 0, kFirstCache);
  }
};

// Part of a head's state: `keys` rows of whole vectors, `stride` floats apart.
struct Strip {
  float* at;
  int64_t stride, keys;
};

// known = key . state, whose channels decay first where each has a decay of its own.
template <int kVectors, bool kByChannel>
inline void look_up(const Strip& strip, const HeadInputs& head, int64_t token, Vec* known) {
  const float *key = head.key(token), *decays = kByChannel ? head.decays(token) : nullptr;
  Vec sums[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = zero();
  for (int64_t k = 0; k < strip.keys; ++k) {
    const Vec each = set1(kByChannel ? key[k] * decays[k] : key[k]);
    for (int v = 0; v < kVectors; ++v) sums[v] = fma(each, load(strip.at + k * strip.stride + v * kLanes), sums[v]);
  }
  for (int v = 0; v < kVectors; ++v) known[v] = sums[v];
}

// state = decay state + key (x) change; out = query . state; and, while the state is at hand, what the next key looks
// up.
template <int kVectors, bool kLooksAhead, bool kByChannel>
inline void take_in(const Strip& strip, const HeadInputs& head, int64_t token, const Vec* change, Vec* out,
                    Vec* known) {
  const float *query = head.query(token), *key = head.key(token), *next = kLooksAhead ? head.key(token + 1) : nullptr;
  const float* decays = kByChannel ? head.decays(token) : nullptr;
  const float* next_decays = kByChannel && kLooksAhead ? head.decays(token + 1) : nullptr;
  const Vec decay_of_all = set1(head.factors(token)[0]);
  Vec sums[kVectors], found[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = found[v] = zero();
  for (int64_t k = 0; k < strip.keys; ++k) {
    const Vec each = set1(key[k]), asked = set1(query[k]), decay = kByChannel ? set1(decays[k]) : decay_of_all;
    float* row = strip.at + k * strip.stride;
    for (int v = 0; v < kVectors; ++v) {
      const Vec state = fma(each, change[v], mul(decay, load(row + v * kLanes)));
      store(row + v * kLanes, state);
      sums[v] = fma(asked, state, sums[v]);
      if constexpr (kLooksAhead) {
        found[v] = fma(set1(kByChannel ? next[k] * next_decays[k] : next[k]), state, found[v]);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) out[v] = sums[v];
  if constexpr (kLooksAhead) {
    for (int v = 0; v < kVectors; ++v) known[v] = found[v];
  }
}

// Tokens [begin, end) over `width` values. The delta rule passes over the state once a token: what the next key finds
// is added up, in the same order, while the state takes this one in.
template <int kVectors, bool kByChannel>
void scan_strip(const HeadInputs& head, int64_t begin, int64_t end, int64_t width, const Strip& strip) {
  const ScanArgs& args = head.args;
  const bool is_delta = args.kind != kScanMamba2;
  Mask masks[kVectors];
  for (int v = 0; v < kVectors; ++v) masks[v] = first(width - v * kLanes);
  Vec known[kVectors] = {};
  if (is_delta && begin < end) look_up<kVectors, kByChannel>(strip, head, begin, known);
  for (int64_t token = begin; token < end; ++token) {
    if (token + kAhead < end) head.prefetch(token + kAhead, width);
    const float *value = head.value(token), *factors = head.factors(token);
    // Where channels decay, what is known has done so already.
    const Vec decay = set1(kByChannel ? 1.0f : factors[0]), gain = set1(factors[1]);
    Vec taken[kVectors], change[kVectors], out[kVectors];
    for (int v = 0; v < kVectors; ++v) taken[v] = load(value + v * kLanes, masks[v]);
    for (int v = 0; v < kVectors; ++v) {
      change[v] = mul(gain, is_delta ? fnma(decay, known[v], taken[v]) : taken[v]);
    }
    if (is_delta && token + 1 < end) {
      take_in<kVectors, true, kByChannel>(strip, head, token, change, out, known);
    } else {
      take_in<kVectors, false, kByChannel>(strip, head, token, change, out, nullptr);
    }
    float* to = head.out(token);
    for (int v = 0; v < kVectors; ++v) {
      store(to + v * kLanes, masks[v], args.skip ? fma(set1(args.skip[head.head]), taken[v], out[v]) : out[v]);
    }
  }
}

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t width) {
  for (int64_t k = 0; k < rows; ++k) std::memcpy(to + k * to_stride, from + k * from_stride, sizeof(float) * width);
}

// One head and one strip of its values, over the whole row; leaves snapshots on the way.
void scan_row(const ScanArgs& args, const Row& row, int64_t head, int64_t from) {
  const int64_t keys = args.key_dim, values = args.value_dim;
  const int64_t width = values - from < kStrip * kLanes ? values - from : kStrip * kLanes;
  const int64_t vectors = (width + kLanes - 1) / kLanes;
  const auto state_of = [&](int64_t slot) {
    return args.states + (slot * args.num_heads + head) * keys * values + from;
  };
  float* own = state_of(row.slot);
  alignas(64) float room[kMostKeys * kStrip * kLanes];
  const bool copies = row.end - row.begin >= kFewTokens || width % kLanes;
  const Strip strip = copies ? Strip{room, vectors * kLanes, keys} : Strip{own, values, keys};
  // Lanes beyond the width hold zeros.
  if (copies && (row.is_fresh || width % kLanes)) std::memset(room, 0, sizeof(float) * keys * strip.stride);
  if (!copies && row.is_fresh) {
    for (int64_t k = 0; k < keys; ++k) std::memset(own + k * values, 0, sizeof(float) * width);
  }
  if (copies && !row.is_fresh) copy_rows(own, values, room, strip.stride, keys, width);
  const HeadInputs inputs{args, head, head / (args.num_heads / args.num_groups), from};
  const auto scan_to = [&](int64_t begin, int64_t end) {
    with_constant<kStrip>(vectors, [&](auto count) {
      constexpr int kVectors = decltype(count)::value;
      const auto scan = args.kind == kScanChannels ? scan_strip<kVectors, true> : scan_strip<kVectors, false>;
      scan(inputs, begin, end, width, strip);
    });
  };
  int64_t begin = row.begin;
  for (int64_t each = row.first_snapshot; each < row.end_snapshots; ++each) {
    const int64_t end = args.step->snapshot_rows[each] + 1;
    scan_to(begin, end);
    copy_rows(strip.at, strip.stride, state_of(args.step->snapshot_slots[each]), values, keys, width);
    begin = end;
  }
  scan_to(begin, row.end);
  if (copies) copy_rows(room, strip.stride, own, values, keys, width);
}

// Channels [from, to) of one head of a row's units.
void advance_units(const RgLruArgs& args, const Row& row, int64_t head, int64_t from, int64_t to) {
  const int64_t size = args.head_dim, heads = args.channels / size, at = head * size;
  const float *bias = args.bias + 2 * at, *rate = args.rate + at;
  const auto state_of = [&](int64_t slot) { return args.states + slot * args.channels + at; };
  float* own = state_of(row.slot);
  int64_t each = row.first_snapshot;
  for (int64_t token = row.begin; token < row.end; ++token) {
    const float* x = args.x + token * args.channels + at;
    const float* gates = args.gates + (token * heads + head) * 2 * size;
    float* out = args.out + token * args.channels + at;
    const bool begins = row.is_fresh && token == row.begin;
    for (int64_t i = from; i < to; i += kLanes) {
      const Mask m = first(to - i);
      const Vec opened = sigmoid(add(load(gates + i, m), load(bias + i, m)));
      Vec state = mul(load(x + i, m), opened);
      if (!begins) {
        const Vec share = sigmoid(add(load(gates + size + i, m), load(bias + size + i, m)));
        const Vec exponent = mul(load(rate + i, m), share);
        const Vec rest = sub(set1(1.0f), exp(add(exponent, exponent)));
        // NaN stays NaN, as max returns its second operand then.
        state = fma(exp(exponent), load(own + i, m), mul(state, sqrt(max(zero(), rest))));
      }
      store(own + i, m, state);
      store(out + i, m, state);
    }
    if (each < row.end_snapshots && args.step->snapshot_rows[each] == token) {
      std::memcpy(state_of(args.step->snapshot_slots[each]) + from, own + from, sizeof(float) * (to - from));
      ++each;
    }
  }
}

// The e^... of recurrent.h that a head's channels keep of the state, in place.
void find_decays(const ScanInputsArgs& args, int64_t token, int64_t head) {
  float* decays = args.decays + token * args.decay_stride + head * args.key_dim;
  const float* bias = args.bias + head * args.key_dim;
  const Vec rate = set1(args.rate[head]);
  for (int64_t k = 0; k < args.key_dim; k += kLanes) {
    const Mask m = first(args.key_dim - k);
    const Vec x = add(load(decays + k, m), load(bias + k, m));
    const Vec exponent =
        args.floor < 0.0f ? mul(set1(args.floor), sigmoid(mul(sub(zero(), rate), x))) : mul(rate, softplus(x));
    store(decays + k, m, exp(exponent));
  }
}

Vec gate_of(const GatedRowArgs& args, const float* gate, int64_t i, Mask m) {
  const Vec g = args.shares_gate ? set1(*gate) : load(gate + i, m);
  if (args.gate_kind == kGateSoftplus) return softplus(g);
  if (args.gate_kind == kGateGeluTanh) return gelu_tanh(g);
  const Vec share = sigmoid(g);
  return args.gate_kind == kGateSilu ? mul(g, share) : share;
}

// Channels [from, to) of a row's selective scan.
void select_channels(const SelectiveScanArgs& args, const Row& row, int64_t from, int64_t to) {
  const int64_t channels = args.channels, keys = args.key_dim;
  const auto state_of = [&](int64_t slot) { return args.states + slot * keys * channels + from; };
  float* own = state_of(row.slot);
  if (row.is_fresh) {
    for (int64_t k = 0; k < keys; ++k) std::memset(own + k * channels, 0, sizeof(float) * (to - from));
  }
  int64_t each = row.first_snapshot;
  for (int64_t token = row.begin; token < row.end; ++token) {
    const float *key = args.keys + token * keys, *query = args.queries + token * keys;
    for (int64_t i = from; i < to; i += kLanes) {
      const Mask m = first(to - i);
      const Vec x = load(args.x + token * channels + i, m);
      const Vec dt = softplus(load(args.steps + token * channels + i, m)), taken = mul(dt, x);
      Vec out = mul(load(args.skip + i, m), x);
      for (int64_t k = 0; k < keys; ++k) {
        float* at = own + k * channels + i - from;
        const Vec decay = exp(mul(load(args.rate + k * channels + i, m), dt));
        const Vec state = fma(decay, load(at, m), mul(set1(key[k]), taken));
        store(at, m, state);
        out = fma(set1(query[k]), state, out);
      }
      store(args.out + token * channels + i, m, out);
    }
    if (each < row.end_snapshots && args.step->snapshot_rows[each] == token) {
      copy_rows(own, channels, state_of(args.step->snapshot_slots[each]), channels, keys, to - from);
      ++each;
    }
  }
}

// Shares out all channels of each sequence, heads of `size` in pieces: compute(row, head, from, to) within a head.
template <typename Args, typename Compute>
void each_piece(const Args& args, int64_t size, int thread, int num_threads, const Compute& compute) {
  const int64_t pieces = (size + kPiece - 1) / kPiece, per_sequence = args.channels / size * pieces;
  const Range mine = share(args.step->num_sequences * per_sequence, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t part = unit % per_sequence, from = part % pieces * kPiece;
    const int64_t to = from + kPiece < size ? from + kPiece : size;
    compute(row_of(*args.step, unit / per_sequence), part / pieces, from, to);
  }
}

// Elements of a group of a row that is normed, perhaps under a gate.
struct RowGroup {
  const GatedRowArgs& args;
  int64_t token, group;

  int64_t first() const { return group * args.size; }
  Vec gate(int64_t i, Mask m) const {
    return gate_of(args, args.gate + token * args.gate_stride + (args.shares_gate ? group : first()), i, m);
  }
  Vec value(int64_t i, Mask m) const {
    const Vec v = load(args.x + token * args.x_stride + first() + i, m);
    return args.gate && args.gate_first ? mul(v, gate(i, m)) : v;
  }
  float squares() const {
    Vec total = zero();
    for (int64_t i = 0; i < args.size; i += kLanes) {
      const Mask m = millrace::first(args.size - i);
      const Vec v = value(i, m);
      total = select(m, fma(v, v, total), total);
    }
    return sum(total);
  }
  float* whole_squares() const { return args.squares + token * (args.width / args.size) + group; }
};

void norm_group(const RowGroup& row) {
  const GatedRowArgs& args = row.args;
  Vec scale = set1(1.0f);
  if (args.weight) {
    const float squares = args.squares ? *row.whole_squares() : row.squares();
    const int64_t size = args.squares ? args.whole : args.size;
    scale = set1(1.0f / std::sqrt(squares / static_cast<float>(size) + args.eps));
  }
  const float* weight = args.weight ? args.weight + (args.shares_weight ? 0 : row.first()) : nullptr;
  float* out = args.out + row.token * args.width + row.first();
  for (int64_t i = 0; i < args.size; i += kLanes) {
    const Mask m = first(args.size - i);
    Vec v = row.value(i, m);
    if (weight) v = mul(mul(v, scale), load(weight + i, m));
    if (args.gate && !args.gate_first) v = mul(v, row.gate(i, m));
    store(out + i, m, v);
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void short_convolution(const ShortConvolutionArgs& args, int thread, int num_threads) {
  each_piece(args, args.channels, thread, num_threads, [&](const Row& row, int64_t, int64_t from, int64_t to) {
    convolve(args, row, from, to);
  });
}

extern "C" void scan_inputs(const ScanInputsArgs& args, int thread, int num_threads) {
  const int64_t groups = args.num_groups, per_group = args.num_heads / groups;
  const Range mine = share(args.step->num_tokens * groups, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t token = unit / groups, group = unit % groups;
    const bool is_delta = args.kind != kScanMamba2;
    if (is_delta) {
      const int64_t at = token * args.row_stride + group * args.key_dim;
      to_length(args.queries + at, args.key_dim, args.query_scale);
      to_length(args.keys + at, args.key_dim, 1.0f);
    }
    for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
      float* factors = args.factors + 2 * (token * args.num_heads + head);
      if (is_delta) {
        factors[1] = args.gain_scale / (1.0f + std::exp(-args.gains[token * args.gain_stride + head]));
      }
      if (args.kind == kScanChannels) {
        find_decays(args, token, head);
        continue;
      }
      float dt = softplus(args.decays[token * args.decay_stride + head] + args.bias[head]);
      if (!is_delta) {
        dt = dt < args.least_step ? args.least_step : dt > args.largest_step ? args.largest_step : dt;
        factors[1] = dt;
      }
      factors[0] = std::exp(args.rate[head] * dt);
    }
  }
}

extern "C" void state_scan(const ScanArgs& args, int thread, int num_threads) {
  const int64_t strips = (args.value_dim + kStrip * kLanes - 1) / (kStrip * kLanes);
  const int64_t per_sequence = args.num_heads * strips;
  const Range mine = share(args.step->num_sequences * per_sequence, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t part = unit % per_sequence;
    scan_row(args, row_of(*args.step, unit / per_sequence), part / strips, part % strips * kStrip * kLanes);
  }
}

extern "C" void rg_lru(const RgLruArgs& args, int thread, int num_threads) {
  each_piece(args, args.head_dim, thread, num_threads, [&](const Row& row, int64_t head, int64_t from, int64_t to) {
    advance_units(args, row, head, from, to);
  });
}

extern "C" void selective_scan(const SelectiveScanArgs& args, int thread, int num_threads) {
  each_piece(args, args.channels, thread, num_threads, [&](const Row& row, int64_t, int64_t from, int64_t to) {
    select_channels(args, row, from, to);
  });
}

namespace {
template <typename Compute>
void each_group(const GatedRowArgs& args, int thread, int num_threads, const Compute& compute) {
  const int64_t groups = args.width / args.size;
  const Range mine = share(args.step->num_tokens * groups, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) compute(RowGroup{args, unit / groups, unit % groups});
}
}  // namespace

extern "C" void gated_norm(const GatedRowArgs& args, int thread, int num_threads) {
  each_group(args, thread, num_threads, norm_group);
}

extern "C" void gated_squares(const GatedRowArgs& args, int thread, int num_threads) {
  each_group(args, thread, num_threads, [](const RowGroup& row) { *row.whole_squares() = row.squares(); });
}

MILLRACE_OP(short_convolution, ShortConvolutionArgs)
MILLRACE_OP(scan_inputs, ScanInputsArgs)
MILLRACE_OP(state_scan, ScanArgs)
MILLRACE_OP(rg_lru, RgLruArgs)
MILLRACE_OP(selective_scan, SelectiveScanArgs)
MILLRACE_OP(gated_norm, GatedRowArgs)
MILLRACE_OP(gated_squares, GatedRowArgs)
