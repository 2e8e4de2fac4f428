#include "sampling/sampling.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "sampling/noise.h"
#include "native/simd.h"

namespace millrace {
namespace {

struct Best {
  float value = -INFINITY;
  int64_t token = 0;
};

struct Scratch {
  std::vector<float> scaled, shares, likely, kept;
};

float maximum(const float* x, int64_t count) {
  const Vec lowest = set1(-INFINITY);
  Vec most = lowest;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first(count - i);
    most = max(most, select(m, load(x + i, m), lowest));
  }
  return largest(most);
}

// The first that equals `most`, which is the largest: of a stretch that has it, as comparing one by one is slow.
int64_t place_of(float most, const float* x, int64_t size) {
  constexpr int64_t kStretch = 256;
  int64_t i = 0;
  while (i + kStretch < size && maximum(x + i, kStretch) < most) i += kStretch;
  return std::find(x + i, x + size, most) - x;
}

// The first of the largest.
Best most_likely(const float* x, int64_t count) {
  const float most = maximum(x, count);
  return {most, place_of(most, x, count)};
}

// Like `most_likely`, where all are finite; false where one is not.
bool find_finite(const float* x, int64_t count, Best& best) {
  constexpr int kChains = 4;
  Vec most[kChains], poison[kChains];
  for (int chain = 0; chain < kChains; ++chain) {
    most[chain] = set1(-INFINITY);
    poison[chain] = zero();
  }
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      const Vec v = load(x + i + chain * kLanes);
      most[chain] = max(most[chain], v);
      poison[chain] = fma(v, zero(), poison[chain]);
    }
  }
  for (; i < count; i += kLanes) {
    const Mask m = first(count - i);
    const Vec v = load(x + i, m);
    most[0] = max(most[0], select(m, v, set1(-INFINITY)));
    poison[0] = fma(v, zero(), poison[0]);
  }
  if (sum(add(add(poison[0], poison[1]), add(poison[2], poison[3]))) != 0.0f) return false;
  best.value = largest(max(max(most[0], most[1]), max(most[2], most[3])));
  best.token = place_of(best.value, x, count);
  return true;
}

// --- penalties, biases, masks ---

float penalized(const SampleRow& row, float value, int32_t count, bool seen) {
  if (seen) value = value > 0.0f ? value / row.repetition_penalty : value * row.repetition_penalty;
  value = value - static_cast<float>(count) * row.frequency_penalty;
  return value - (count > 0 ? row.presence_penalty : 0.0f);
}

void penalize(const SampleArgs& args, const SampleRow& row, const float* logits, float* out) {
  for (int64_t i = 0; i < args.vocab_size; ++i) out[i] = penalized(row, logits[i], row.counts[i], row.seen[i]);
  const int64_t* drafts = args.draft_tokens + row.first_draft;
  for (int64_t i = 0; i < row.num_drafts; ++i) {
    const int64_t token = drafts[i];
    const int32_t more = static_cast<int32_t>(std::count(drafts, drafts + row.num_drafts, token));
    out[token] = penalized(row, logits[token], row.counts[token] + more, true);
  }
}

bool allows(const int32_t* mask, int64_t token) {
  return static_cast<uint32_t>(mask[token / 32]) >> (token % 32) & 1;
}

void apply_grammar(const SampleRow& row, int64_t vocab_size, float* out) {
  float most = -INFINITY;
  for (int64_t word = 0; word * 32 < vocab_size; ++word) {
    const uint32_t bits = static_cast<uint32_t>(row.mask[word]);
    const int64_t end = std::min(vocab_size, word * 32 + 32);
    if (bits == 0) {
      std::fill(out + word * 32, out + end, -INFINITY);
      continue;
    }
    for (int64_t i = word * 32; i < end; ++i) {
      if (!(bits >> (i % 32) & 1)) out[i] = -INFINITY;
      most = std::max(most, out[i]);
    }
  }
  if (most > -INFINITY || row.num_stops == 0) return;
  // Where the grammar leaves only the end and it is too early for that, the grammar wins.
  for (int64_t i = 0; i < vocab_size; ++i) out[i] = allows(row.mask, i) ? 0.0f : -INFINITY;
}

bool changes(const SampleRow& row) { return row.counts || row.bias || row.mask || row.num_stops; }

void process(const SampleArgs& args, const SampleRow& row, const float* logits, float* out) {
  const int64_t vocab_size = args.vocab_size;
  if (row.counts) {
    penalize(args, row, logits, out);
  } else {
    std::memcpy(out, logits, sizeof(float) * vocab_size);
  }
  if (row.bias) {
    for (int64_t i = 0; i < vocab_size; ++i) out[i] += row.bias[i];
  }
  for (int64_t i = 0; i < row.num_stops; ++i) out[args.stop_ids[row.first_stop + i]] = -INFINITY;
  if (row.mask) apply_grammar(row, vocab_size, out);
}

// --- filters: the smallest logit that stays ---

// The last of the values, sorted best first, before which less than top_p of their mass lies.
float last_within(const float* sorted, int64_t count, double top_p, double before, double total, double most) {
  float last = sorted[0];
  for (int64_t i = 0; i < count; ++i) {
    if (i && !(before < top_p * total)) break;
    last = sorted[i];
    before += std::exp(static_cast<double>(sorted[i]) - most);
  }
  return last;
}

// Values at or above `edge`, in their order.
void collect(const float* x, int64_t count, float edge, std::vector<float>& out) {
  const Vec bound = set1(edge);
  out.resize(count + kLanes);
  int64_t number = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first(count - i);
#if defined(__AVX512F__)
    const Vec v = load(x + i, m);
    const Mask chosen = at_least(v, bound) & m;
    store(out.data() + number, _mm512_maskz_compress_ps(chosen, v));
    number += __builtin_popcount(chosen);
#else
    if (is_empty(at_least(load(x + i, m), bound))) continue;
    for (int64_t j = i; j < std::min(count, i + kLanes); ++j) {
      if (x[j] >= edge) out[number++] = x[j];
    }
#endif
  }
  out.resize(number);
}

// Bins by distance from the largest value: a value of bin b is at most b / kBinsPerUnit below it.
constexpr int64_t kBinsPerUnit = 32, kBins = 4096;

int64_t bin_of(float value, float most) {
  const float distance = (most - value) * kBinsPerUnit;
  return distance < kBins - 1 ? static_cast<int64_t>(distance) : kBins - 1;
}

// Below every value but minus infinity.
constexpr float kLowest = std::numeric_limits<float>::lowest();
// No value lies further below the largest than this and still has a share.
constexpr float kDeepest = 128.0f;

// Sum of the shares (or ones, where there are none) of the values at or above `edge`.
double mass_above(const float* x, const float* shares, int64_t count, float edge) {
  double total = 0.0;
  const Vec bound = set1(edge);
  for (int64_t begin = 0; begin < count; begin += 4096) {
    const int64_t end = std::min(count, begin + 4096);
    Vec part = zero();
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask m = first(end - i);
      const Vec v = select(m, load(x + i, m), set1(-INFINITY));
      const Vec share = shares ? load(shares + i, m) : set1(1.0f);
      part = add(part, select(at_least(v, bound), share, zero()));
    }
    total += sum(part);
  }
  return total;
}

// A value at or above which lies at least `enough` of the mass; few values lie above it that need not.
float edge_of(const float* x, const float* shares, int64_t count, double enough, float most) {
  const auto reaches = [&](float depth) { return mass_above(x, shares, count, most - depth) >= enough; };
  float above = 0.0f, depth = 4.0f;
  while (depth <= kDeepest && !reaches(depth)) {
    above = depth;
    depth *= 2.0f;
  }
  if (depth > kDeepest) return kLowest;
  for (int halving = 0; halving < 4; ++halving) {
    const float middle = 0.5f * (above + depth);
    (reaches(middle) ? depth : above) = middle;
  }
  return most - depth;
}

// The k-th largest value (k <= number of values above minus infinity, else minus infinity).
float kth_largest(const float* x, int64_t count, int64_t k, float most, std::vector<float>& kept) {
  collect(x, count, edge_of(x, nullptr, count, static_cast<double>(k), most), kept);
  if (static_cast<int64_t>(kept.size()) < k) return -INFINITY;
  std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end(), std::greater<float>());
  return kept[k - 1];
}

// e^(value - most).
void shares_of(const float* x, int64_t count, float most, std::vector<float>& shares) {
  shares.resize(count + kLanes);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first(count - i);
    store(shares.data() + i, select(m, exp(sub(load(x + i, m), set1(most))), zero()));
  }
}

float threshold_of_top_p(const float* x, int64_t count, double top_p, float most, Scratch& scratch) {
  std::vector<float>&shares = scratch.shares, &likely = scratch.likely, &kept = scratch.kept;
  shares_of(x, count, most, shares);
  const double total = mass_above(x, shares.data(), count, kLowest);
  // Only values that may stay are looked at one by one. A little more than top_p, as sums are rounded.
  collect(x, count, edge_of(x, shares.data(), count, (top_p + 1e-5) * total, most), likely);
  const int64_t number = static_cast<int64_t>(likely.size());
  if (number == 0) return -INFINITY;
  shares_of(likely.data(), number, most, shares);
  std::vector<double> mass(kBins);
  for (int64_t i = 0; i < number; ++i) mass[bin_of(likely[i], most)] += shares[i];
  // All bins before this one stay as a whole; the border lies in it.
  int64_t bin = 0;
  double before = 0.0;
  while (bin + 1 < kBins && before + mass[bin] < top_p * total) before += mass[bin++];
  kept.clear();
  for (float value : likely) {
    if (bin_of(value, most) == bin) kept.push_back(value);
  }
  if (kept.empty()) return -INFINITY;
  std::sort(kept.begin(), kept.end(), std::greater<float>());
  return last_within(kept.data(), static_cast<int64_t>(kept.size()), top_p, before, total, most);
}

float filter_threshold(const SampleRow& row, const float* x, int64_t count, float most, Scratch& scratch) {
  const double top_p = row.top_p;
  if (row.top_k <= 0 || row.top_k >= count) {
    return top_p >= 1.0 ? -INFINITY : threshold_of_top_p(x, count, top_p, most, scratch);
  }
  const float last = kth_largest(x, count, row.top_k, most, scratch.kept);
  if (top_p >= 1.0) return last;
  std::vector<float>& kept = scratch.kept;
  collect(x, count, last > -INFINITY ? last : kLowest, kept);
  std::sort(kept.begin(), kept.end(), std::greater<float>());
  const int64_t number = std::min<int64_t>(row.top_k, static_cast<int64_t>(kept.size()));
  double total = 0.0;
  for (int64_t i = 0; i < number; ++i) total += std::exp(static_cast<double>(kept[i]) - most);
  return last_within(kept.data(), number, top_p, 0.0, total, most);
}

// --- the draw ---

uint64_t noise_bits(uint64_t key, int64_t token) { return mixed(key, token) >> 11; }

double gumbel(uint64_t bits) {
  return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-53));
}

// 1 - u of the tokens from `token` on, for uniform noise u.
inline void complements(uint64_t key, int64_t token, float* out) {
#if defined(__AVX512DQ__)
  const __m512i step = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
  for (int half = 0; half < 2; ++half) {
    const __m512i index = _mm512_add_epi64(_mm512_set1_epi64(token + 8 * half), step);
    __m512i bits = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(key)),
                                    _mm512_mullo_epi64(index, _mm512_set1_epi64(static_cast<int64_t>(kGolden))));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 30));
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(static_cast<int64_t>(kFirst)));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 27));
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(static_cast<int64_t>(kSecond)));
    bits = _mm512_srli_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 31)), 11);
    const __m512i rest = _mm512_sub_epi64(_mm512_set1_epi64((int64_t{1} << 53) - 1), bits);
    _mm256_storeu_ps(out + 8 * half, _mm256_mul_ps(_mm512_cvtepu64_ps(rest), _mm256_set1_ps(0x1p-53f)));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    out[i] = static_cast<float>((uint64_t{1} << 53) - 1 - noise_bits(key, token + i)) * 0x1p-53f;
  }
#endif
}

// The token with the largest logit + Gumbel noise among those at or above `floor`. Noise is a logarithm of a
// logarithm, too dear for every token; but it can lift a token over the best so far only if 1 - u is at most
// e^(logit - best), since 1 - e^-y <= y. What passes that test is judged exactly.
int64_t draw(const float* x, int64_t count, float floor, uint64_t key, int64_t start) {
  int64_t winner = start;
  double best = x[start] + gumbel(noise_bits(key, start));
  alignas(64) float rest[kLanes], bound[kLanes];
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first(count - i);
    // Room for rounding, in the exponential and in the noise.
    const Vec chance = mul(exp(sub(load(x + i, m), set1(static_cast<float>(best)))), set1(1.0001f));
    complements(key, i, rest);
#if defined(__AVX512F__)
    if ((at_least(chance, load(rest)) & m) == 0) continue;
#endif
    store(bound, chance);
    for (int64_t j = 0; j < kLanes && i + j < count; ++j) {
      if (!(bound[j] >= rest[j]) || x[i + j] < floor || i + j == start) continue;
      const double score = static_cast<double>(x[i + j]) + gumbel(noise_bits(key, i + j));
      if (score > best || (score == best && i + j < winner)) {
        best = score;
        winner = i + j;
      }
    }
  }
  return winner;
}

int64_t draw_row(const SampleRow& row, const float* logits, int64_t count, Scratch& scratch) {
  scratch.scaled.resize(count + kLanes);
  float* x = scratch.scaled.data();
  const Vec temperature = set1(row.temperature);
  for (int64_t i = 0; i < count; i += kLanes) store(x + i, div(load(logits + i, first(count - i)), temperature));
  const Best best = most_likely(x, count);
  float floor = -INFINITY;
  if (row.min_p > 0.0f) {
    floor = best.value + std::log(row.min_p);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec v = load(x + i);
      store(x + i, select(less(v, set1(floor)), set1(-INFINITY), v));
    }
  }
  if (row.top_k > 0 || row.top_p < 1.0f) {
    floor = std::max(floor, filter_threshold(row, x, count, best.value, scratch));
  }
  return draw(x, count, floor, static_cast<uint64_t>(row.key), best.token);
}

void sample_row(const SampleArgs& args, int64_t index, Scratch& scratch) {
  const SampleRow& row = args.rows[index];
  const int64_t count = args.vocab_size;
  const float* logits = args.logits + index * count;
  float* processed = args.processed ? args.processed + index * count : nullptr;
  Best best;
  args.finite[index] = find_finite(logits, count, best);
  args.tokens[index] = 0;
  args.allowed[index] = 1;
  if (!args.finite[index]) {
    if (processed) std::fill(processed, processed + count, 0.0f);
    return;
  }
  if (processed) {
    if (changes(row)) {
      process(args, row, logits, processed);
    } else {
      std::memcpy(processed, logits, sizeof(float) * count);
    }
    logits = processed;
    best = most_likely(logits, count);
  }
  args.allowed[index] = best.value > -INFINITY && best.value < INFINITY;
  args.tokens[index] = best.token;
  if (row.temperature > 0.0f && args.allowed[index]) args.tokens[index] = draw_row(row, logits, count, scratch);
}

void report_row(const LogprobArgs& args, int64_t index) {
  const int64_t count = args.vocab_size;
  const float* x = args.logits + index * count;
  const uint8_t* excluded = args.excluded ? args.excluded + index * count : nullptr;
  const float most = maximum(x, count);
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += 4096) {
    const int64_t end = std::min(count, begin + 4096);
    Vec part = zero();
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask m = first(end - i);
      part = add(part, select(m, exp(sub(load(x + i, m), set1(most))), zero()));
    }
    total += sum(part);
  }
  const float shift = most + static_cast<float>(std::log(total));
  args.chosen[index] = x[args.tokens[index]] - shift;
  float* best = args.best + index * args.num_best;
  int64_t* ids = args.best_ids + index * args.num_best;
  int64_t found = 0;
  for (int64_t i = 0; args.num_best && i < count; ++i) {
    if (!(x[i] > (found == args.num_best ? best[found - 1] : -INFINITY))) continue;
    if (excluded && excluded[i]) continue;
    int64_t at = found < args.num_best ? found++ : found - 1;
    for (; at > 0 && best[at - 1] < x[i]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = x[i];
    ids[at] = i;
  }
  for (int64_t at = 0; at < args.num_best; ++at) {
    if (at < found) {
      best[at] -= shift;
    } else {
      ids[at] = -1;
    }
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void sample(const SampleArgs& args, int, int) {
  static thread_local Scratch scratch;
  for (int64_t row = op_take(); row < args.num_rows; row = op_take()) sample_row(args, row, scratch);
}

extern "C" void logprobs(const LogprobArgs& args, int, int) {
  for (int64_t row = op_take(); row < args.num_rows; row = op_take()) report_row(args, row);
}

MILLRACE_OP(sample, SampleArgs)
MILLRACE_OP(logprobs, LogprobArgs)
