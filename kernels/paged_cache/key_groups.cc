#include "paged_cache/key_groups.h"

#include <algorithm>
#include <cstring>

#include "native/simd.h"
#include "paged_cache/codes.h"

namespace millrace {
namespace {

constexpr int64_t kMostElements = 1024;

// Keys [kKeyGroup, D] of one block, wherever they lie.
struct WholeKeys {
  const uint16_t* recent;  // all places; those before `first` are used
  const float* rows;       // that of `first`
  int64_t first, stride, dim;

  Vec at(int64_t place, int64_t element) const {
    const Mask m = millrace::first(dim - element);
    if (place < first) return load_bf16(recent + place * dim + element, m);
    return load(rows + (place - first) * stride + element, m);
  }
};

// Rounds a block for one head.
void close(const WholeKeys& keys, uint16_t* channels, uint8_t* codes) {
  const int64_t dim = keys.dim;
  alignas(64) float middles[kMostElements], halves[kMostElements];
  for (int64_t i = 0; i < dim; i += kLanes) {
    Vec least = set1(INFINITY), most = set1(-INFINITY), poison = zero();
    for (int64_t place = 0; place < kKeyGroup; ++place) {
      const Vec v = keys.at(place, i);
      least = min(v, least);
      most = max(v, most);
      poison = fma(v, zero(), poison);
    }
    const Mask m = first(dim - i);
    // The sum of the halves, as the whole may be too large. What is stored is what codes are made with.
    store_bf16(channels + i, m, fma(least, set1(0.5f), mul(most, set1(0.5f))));
    const Vec middle = load_bf16(channels + i, m);
    const Vec widest = max(sub(most, middle), sub(middle, least));
    store_bf16(channels + dim + i, m, add(div(widest, set1(15.0f)), poison));
    const Vec half = load_bf16(channels + dim + i, m);
    const Mask usable = less(zero(), half);
    store(middles + i, middle);
    store(halves + i, select(less(half, set1(INFINITY)), select(usable, half, set1(1.0f)), set1(1.0f)));
  }
  alignas(64) int8_t levels[kMostElements];
  for (int64_t place = 0; place < kKeyGroup; ++place) {
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Vec level = div(sub(keys.at(place, i), load(middles + i)), load(halves + i));
      store_code(levels + i, first(dim - i), level);
    }
    pack_codes(levels, dim, codes + place * dim / 2);
  }
}

// Positions [begin, end) of a sequence that a step computes.
struct Span {
  int64_t token, begin, end;

  Span(const Step& step, int64_t sequence) {
    token = step.query_starts[sequence];
    end = step.context_lens[sequence];
    begin = end - (step.query_starts[sequence + 1] - token);
  }
};

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void close_groups(const KeyGroupsArgs& args, int thread, int num_threads) {
  const Step& step = *args.step;
  const KvCache& cache = args.cache;
  const int64_t dim = cache.key_dim;
  int64_t unit = 0;
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
    const Span span(step, sequence);
    const int64_t* table = step.block_tables + sequence * step.max_blocks;
    for (int64_t index = span.begin / kKeyGroup; index < span.end / kKeyGroup; ++index) {
      const int64_t origin = index * kKeyGroup, place = std::max<int64_t>(0, span.begin - origin);
      const float* rows = args.keys + (span.token + origin + place - span.begin) * args.key_stride;
      for (int64_t head = 0; head < cache.num_heads; ++head, ++unit) {
        if (unit % num_threads != thread) continue;
        const uint16_t* recent = recent_of(cache, step.recent_rows[sequence], index, head);
        const int64_t row = (table[index] * cache.num_heads + head) * kKeyGroup;
        close({recent, rows + head * dim, place, args.key_stride, dim}, channels_of(cache, table[index], head),
              static_cast<uint8_t*>(cache.keys) + row * dim / 2);
      }
    }
  }
}

extern "C" void keep_recent(const KeyGroupsArgs& args, int thread, int num_threads) {
  const Step& step = *args.step;
  const KvCache& cache = args.cache;
  const int64_t dim = cache.key_dim, heads = cache.num_heads;
  const Range mine = share(step.num_sequences * heads, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t sequence = unit / heads, head = unit % heads;
    const Span span(step, sequence);
    const int64_t from = std::max(span.begin, ((span.end - 1) / kKeyGroup - 1) * kKeyGroup);
    for (int64_t at = from; at < span.end; ++at) {
      uint16_t* to = recent_of(cache, step.recent_rows[sequence], at / kKeyGroup, head) + at % kKeyGroup * dim;
      const float* key = args.keys + (span.token + at - span.begin) * args.key_stride + head * dim;
      for (int64_t i = 0; i < dim; i += kLanes) store_bf16(to + i, first(dim - i), load(key + i, first(dim - i)));
    }
  }
}

extern "C" void copy_recent(const KeyGroupsArgs& args, int thread, int num_threads) {
  const Step& step = *args.step;
  const KvCache& cache = args.cache;
  const int64_t dim = cache.key_dim, heads = cache.num_heads;
  const Range mine = share(step.num_slot_copies * heads, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t* pair = step.recent_copies + unit / heads * 2;
    const int64_t head = unit % heads;
    const auto at = [&](int64_t place) {
      return cache.recent + ((place / kKeyGroup * heads + head) * kKeyGroup + place % kKeyGroup) * dim;
    };
    uint16_t* to = at(pair[1]);
    if (pair[0] < 0) {
      std::memcpy(to, at(~pair[0]), dim * sizeof(uint16_t));
      continue;
    }
    const float* key = args.keys + pair[0] * args.key_stride + head * dim;
    for (int64_t i = 0; i < dim; i += kLanes) store_bf16(to + i, first(dim - i), load(key + i, first(dim - i)));
  }
}

MILLRACE_OP(close_groups, KeyGroupsArgs)
MILLRACE_OP(copy_recent, KeyGroupsArgs)
MILLRACE_OP(keep_recent, KeyGroupsArgs)
