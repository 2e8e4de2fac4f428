#include "rope/rope_cache.h"

#include "native/simd.h"
#include "paged_cache/codes.h"
#include "paged_cache/hadamard.h"

namespace millrace {
namespace {

constexpr int64_t kMaxHead = 1024;

// x[:width], its mean taken away if it is to be `centered`, times 1 / sqrt(mean(x^2) + eps) and weight if there is
// one, in place.
void norm_in_place(float* x, const float* weight, int64_t width, float eps, bool centered = false) {
  if (centered) {
    Vec sums = zero();
    for (int64_t i = 0; i < width; i += kLanes) sums = add(sums, load(x + i, first(width - i)));
    const Vec mean = set1(sum(sums) / static_cast<float>(width));
    for (int64_t i = 0; i < width; i += kLanes) {
      const Mask m = first(width - i);
      store(x + i, m, sub(load(x + i, m), mean));
    }
  }
  Vec total = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i, first(width - i));
    total = fma(v, v, total);
  }
  const Vec scale = set1(1.0f / std::sqrt(sum(total) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    const Vec v = mul(load(x + i, m), scale);
    store(x + i, m, weight ? mul(v, load(weight + i, m)) : v);
  }
}

// Turns the first 2 * half elements of a head, in place; cos and sin of the token's position.
void rotate(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  alignas(64) float pairs[kMaxHead];
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      pairs[i] = x[2 * i];
      pairs[half + i] = x[2 * i + 1];
    }
    std::memcpy(x, pairs, sizeof(float) * 2 * half);
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const Mask m = first(half - i);
    const Vec c = load(cos + i, m), s = load(sin + i, m);
    const Vec a = load(x + i, m), b = load(x + half + i, m);
    store(x + i, m, sub(mul(a, c), mul(b, s)));
    store(x + half + i, m, add(mul(b, c), mul(a, s)));
  }
}

void multiply(float* x, float factor, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    store(x + i, m, mul(load(x + i, m), set1(factor)));
  }
}

// In place: what is kept of a key is what its own step computes with.
void round_to_bfloat16(float* x, int64_t width) {
  for (int64_t i = 0; i < width; ++i) x[i] = from_bfloat16(to_bfloat16(x[i]));
}

// The scale of a quantized vector: its largest magnitude / limit, not finite when an element is not.
float scale_of(const float* x, int64_t width, float limit) {
  Vec most = zero();
  Vec poison = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = load(x + i, first(width - i));
    most = max(most, abs(v));
    poison = fma(v, zero(), poison);
  }
  return largest(most) / limit + sum(poison);
}

Vec divisor_of(float scale) { return set1(scale > 0.0f && scale < INFINITY ? scale : 1.0f); }

void store_levels(int8_t* to, const float* x, int64_t width, float scale) {
  const Vec divisor = divisor_of(scale);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    const Vec level = round(div(load(x + i, m), divisor));
    store_int8(to + i, m, max(min(level, set1(127.0f)), set1(-127.0f)));
  }
}

// Codes of 4 bits of a rotated vector; kernels/paged_cache/four_bits says how they are packed. Returns the scale.
float store_codes(uint8_t* to, const float* x, int64_t width) {
  alignas(64) float turned[kMaxHead];
  alignas(64) int8_t codes[kMaxHead];
  turn(x, width, turned);
  const float scale = scale_of(turned, width, 15.0f);
  const Vec divisor = divisor_of(scale);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    store_code(codes + i, m, div(load(turned + i, m), divisor));
  }
  pack_codes(codes, width, to);
  return scale;
}

// The float8_e4m3 nearest to x, of two the even one; 448 is the largest.
uint8_t to_float8(float x) {
  uint32_t bits, small;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 24 & 0x80, size = std::min<uint32_t>(bits & 0x7fffffff, 0x43e00000);
  // Below 2^-6 numbers are multiples of 2^-9: what a float's last bit counts where 2^14 is added.
  float sum;
  std::memcpy(&sum, &size, sizeof(sum));
  sum += 16384.0f;
  std::memcpy(&small, &sum, sizeof(small));
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  return static_cast<uint8_t>(sign | (size < 0x3c800000 ? small & 0xff : normal));
}

// Returns the scale.
float store_float8(uint8_t* to, const float* x, int64_t width) {
  const float scale = scale_of(x, width, 448.0f);
  alignas(64) float levels[kMaxHead];
  const Vec divisor = divisor_of(scale);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Mask m = first(width - i);
    store(levels + i, m, max(min(div(load(x + i, m), divisor), set1(448.0f)), set1(-448.0f)));
  }
  for (int64_t i = 0; i < width; ++i) to[i] = to_float8(levels[i]);
  return scale;
}

// Writes one vector of one head. Returns its scale, of quantized types alone.
float write_vector(const KvCache& cache, void* store_base, int64_t row, int64_t width, const float* x) {
  if (cache.type == kKvInt8) {
    const float scale = scale_of(x, width, 127.0f);
    store_levels(static_cast<int8_t*>(store_base) + row * width, x, width, scale);
    return scale;
  }
  if (cache.type == kKvFloat8) return store_float8(static_cast<uint8_t*>(store_base) + row * width, x, width);
  if (cache.type == kKvBfloat16) {
    uint16_t* to = static_cast<uint16_t*>(store_base) + row * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const Mask m = first(width - i);
      store_bf16(to + i, m, load(x + i, m));
    }
  } else {
    std::memcpy(static_cast<float*>(store_base) + row * width, x, sizeof(float) * width);
  }
  return 0.0f;
}

void write_head(const KvCache& cache, int64_t slot, int64_t head, const float* key, const float* value) {
  const int64_t block = slot / cache.block_size, place = slot % cache.block_size;
  const int64_t row = (block * cache.num_heads + head) * cache.block_size + place;
  if (cache.type == kKvKivi4) {
    // Keys are rounded when their block is full (key_groups.h).
    cache.scales[row] = store_codes(static_cast<uint8_t*>(cache.values) + row * cache.value_dim / 2, value, cache.value_dim);
    return;
  }
  const float key_scale = write_vector(cache, cache.keys, row, cache.key_dim, key);
  float value_scale = key_scale;
  if (cache.values) value_scale = write_vector(cache, cache.values, row, cache.value_dim, value);
  if (cache.scales) {
    cache.scales[2 * row] = key_scale;
    cache.scales[2 * row + 1] = value_scale;
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

namespace {

// A head's norm and rotation, in their order.
void turn(const RopeCacheArgs& args, float* x, const float* weight, int64_t head, const float* cos,
          const float* sin) {
  const int64_t dim = args.cache.key_dim;
  const auto norm = [&] {
    norm_in_place(x, weight + head * args.norm_stride, dim, args.eps, args.norm_centered);
  };
  if (args.norm == kNormHead && !args.norm_last) norm();
  rotate(x, cos, sin, args.rotary_dim / 2, args.interleaved);
  if (args.norm == kNormHead && args.norm_last) norm();
}

// Turns a head's key and writes it with its value, which lies at v but for values of keys.
void store_head(const RopeCacheArgs& args, int64_t token, int64_t head, float* k, const float* v, const float* cos,
                const float* sin) {
  const int64_t dim = args.cache.key_dim;
  alignas(64) float value[kMaxHead];
  if (args.value_kind != kValuesPlain) {
    std::memcpy(value, args.value_kind == kValuesOfKeys ? k : v, sizeof(float) * dim);
    norm_in_place(value, nullptr, dim, args.eps);
    v = value;
  } else if (args.value_scale != 0.0f) {
    std::memcpy(value, v, sizeof(float) * args.cache.value_dim);
    multiply(value, args.value_scale, args.cache.value_dim);
    v = value;
  }
  turn(args, k, args.k_norm, head, cos, sin);
  if (args.cache.type == kKvKivi4) round_to_bfloat16(k, dim);
  write_head(args.cache, args.step->slots[token], head, k, v);
}

}  // namespace

extern "C" void rope_cache(const RopeCacheArgs& args, int thread, int num_threads) {
  const Step& step = *args.step;
  const int64_t dim = args.cache.key_dim, heads = args.num_heads, kv_heads = args.cache.num_heads;
  const int64_t half = args.rotary_dim / 2;
  // With norms per head (or none) the unit of work is a kv head and its queries; else a whole token.
  const int64_t split = args.norm == kNormFull ? 1 : kv_heads;
  const Range mine = share(step.num_tokens * split, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t token = unit / split, part = unit % split;
    float* q = args.qkv + token * args.qkv_stride;
    float* k = q + heads * dim;
    const float* v = k + kv_heads * dim;
    const int64_t value_dim = args.value_kind == kValuesPlain ? args.cache.value_dim : dim;
    const float* cos = args.cos + step.positions[token] * half;
    const float* sin = args.sin + step.positions[token] * half;
    if (args.norm == kNormFull) {
      norm_in_place(q, args.q_norm, heads * dim, args.eps, args.norm_centered);
      norm_in_place(k, args.k_norm, kv_heads * dim, args.eps, args.norm_centered);
    }
    for (int64_t head = part * heads / split; head < (part + 1) * heads / split; ++head) {
      turn(args, q + head * dim, args.q_norm, head, cos, sin);
      if (args.q_scales) multiply(q + head * dim, args.q_scales[step.positions[token]], dim);
    }
    if (!args.stores) continue;
    for (int64_t head = part * kv_heads / split; head < (part + 1) * kv_heads / split; ++head) {
      store_head(args, token, head, k + head * dim, v + head * value_dim, cos, sin);
    }
  }
}

extern "C" void latent_cache(const LatentCacheArgs& args, int thread, int num_threads) {
  const Step& step = *args.step;
  const int64_t rotary = args.rotary_dim, rank = args.cache.key_dim - rotary, half = rotary / 2;
  const int64_t query = args.nope_dim + rotary, wide = rank + rotary;
  alignas(64) float vector[kMaxHead];
  const Range mine = share(step.num_tokens, thread, num_threads);
  for (int64_t token = mine.begin; token < mine.end; ++token) {
    const float* cos = args.cos + step.positions[token] * half;
    const float* sin = args.sin + step.positions[token] * half;
    std::memcpy(vector, args.down + token * wide, sizeof(float) * wide);
    norm_in_place(vector, args.latent_norm, rank, args.eps);
    rotate(vector + rank, cos, sin, half, args.interleaved);
    write_head(args.cache, step.slots[token], 0, vector, nullptr);
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const int64_t at = token * args.num_heads + head;
      float* to = args.queries + at * wide + rank;
      std::memcpy(to, args.q + at * query + args.nope_dim, sizeof(float) * rotary);
      rotate(to, cos, sin, half, args.interleaved);
      if (args.q_scales) {
        const float scale = args.q_scales[step.positions[token]];
        multiply(args.q + at * query, scale, args.nope_dim);
        multiply(to, scale, rotary);
      }
    }
  }
}

extern "C" void head_product(const HeadProductArgs& args, int thread, int num_threads) {
  // The unit of work: one head, a tile of tokens, four vectors of outputs; inputs are added first to last.
  constexpr int64_t kTokens = 4, kWidth = 4 * kLanes;
  const int64_t tokens = args.step->num_tokens, tiles = (tokens + kTokens - 1) / kTokens;
  const int64_t columns = (args.outputs + kWidth - 1) / kWidth;
  const Range mine = share(args.num_heads * columns * tiles, thread, num_threads);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t head = unit / (columns * tiles), column = unit / tiles % columns * kWidth;
    const int64_t begin = unit % tiles * kTokens;
    const int64_t count = tokens - begin < kTokens ? tokens - begin : kTokens;
    const float* weight = args.weight + head * args.inputs * args.outputs + column;
    const float* x[kTokens];
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t token = begin + (t < count ? t : 0);
      x[t] = args.x + (token * args.num_heads + head) * args.x_stride;
    }
    Mask m[4];
    for (int v = 0; v < 4; ++v) {
      const int64_t left = args.outputs - column - v * kLanes;
      m[v] = first(left > 0 ? left : 0);
    }
    Vec total[kTokens][4];
    for (auto& row : total) {
      for (Vec& v : row) v = zero();
    }
    for (int64_t i = 0; i < args.inputs; ++i, weight += args.outputs) {
      Vec w[4];
      for (int v = 0; v < 4; ++v) w[v] = load(weight + v * kLanes, m[v]);
      for (int64_t t = 0; t < kTokens; ++t) {
        const Vec factor = set1(x[t][i]);
        for (int v = 0; v < 4; ++v) total[t][v] = fma(factor, w[v], total[t][v]);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      float* out = args.out + ((begin + t) * args.num_heads + head) * args.out_stride + column;
      for (int v = 0; v < 4; ++v) store(out + v * kLanes, m[v], total[t][v]);
    }
  }
}

MILLRACE_OP(rope_cache, RopeCacheArgs)
MILLRACE_OP(latent_cache, LatentCacheArgs)
MILLRACE_OP(head_product, HeadProductArgs)
