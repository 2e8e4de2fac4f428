// Shape letters: R query rows of a unit, D key dim, E value dim (rounded up to whole vectors in scratch).
#include "attention.h"

#include <cstdlib>

#include "attention_few.h"
#include "attention_math.h"
#include "attention_plan.h"

namespace millrace {
namespace {

// Positions whose keys or values are packed at once: a panel stays in the first cache for all rows.
constexpr int64_t kPanel = 64;
// A vector of this many bytes of zeros stands for positions that nobody looks at.
constexpr int64_t kLargestVectorBytes = 8192;
alignas(64) const char kNothing[kLargestVectorBytes] = {};

class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = floats + floats / 4;
      data_ = static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * size_ + 63) / 64 * 64));
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Where the keys and values of one part lie. Positions outside [begin, end) read zeros.
struct Places {
  int64_t begin, end;
  const char* keys[kPartTokens];
  const char* values[kPartTokens];
  alignas(64) float key_scales[kPartTokens];
  alignas(64) float value_scales[kPartTokens];
};

// What a thread needs from unit to unit.
struct Scratch {
  Buffer queries, scores, packed, weighted, running;
  std::vector<int64_t> positions;   // [R]
  std::vector<float> maxima, sums;  // [R] of the part
  std::vector<float> running_maxima, running_sums;
  Places places[2];  // of the part in work, and of the one after it
};

struct Positions {
  int64_t first, last;
};

float exp_of(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// A maximum to subtract: 0 where a row has seen nothing, so that its weights are 0 and not NaN.
float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Takes a part's result (maximum, sum, weighted values) into a row's running one.
void merge_row(float maximum, float total, const float* weighted, float& running_maximum, float& running_total,
               float* running, int64_t dim) {
  if (total == 0.0f) return;  // nothing of the part was visible
  const float joint = running_maximum < maximum ? maximum : running_maximum;
  const float old_weight = exp_of(running_maximum - base_of(joint));
  const float new_weight = exp_of(maximum - base_of(joint));
  const bool fresh = running_maximum == -INFINITY && running_total == 0.0f;
  const Vec keep = set1(old_weight), take = set1(new_weight);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec before = fresh ? zero() : load(running + i);
    store(running + i, fma(load(weighted + i), take, mul(before, keep)));
  }
  running_total = std::fma(total, new_weight, running_total * old_weight);
  running_maximum = joint;
}

void finish_row(float maximum, float total, const float* running, const float* sink, float* out, int64_t dim) {
  float weight = 1.0f;
  if (sink) {
    const float joint = maximum < *sink ? *sink : maximum;
    weight = exp_of(maximum - base_of(joint));
    total = total * weight + exp_of(*sink - base_of(joint));
  }
  const Vec factor = set1(weight / total);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    store(out + i, m, mul(load(running + i, m), factor));
  }
}

template <typename Math, typename Cache>
class Worker {
#if defined(__AVX512F__)
  // Whether few rows are multiplied without packing.
  static constexpr bool kDirect = Math::kPerWord == 1 && Cache::kBytes >= 2;
#else
  static constexpr bool kDirect = false;
#endif

 public:
  Worker(const AttentionArgs& args, Scratch& scratch)
      : args_(args),
        step_(*args.step),
        plan_(*args.plan),
        cache_(args.cache),
        scratch_(scratch),
        group_(plan_.group()),
        key_dim_(cache_.key_dim),
        value_dim_(cache_.values ? cache_.value_dim : cache_.shared_value_dim),
        wide_((value_dim_ + 15) / 16 * 16),
        words_((key_dim_ + Math::kPerWord - 1) / Math::kPerWord) {}

  // Computes one unit; then, if there is one, `next` is what the thread does after it.
  void run(const Unit& unit, int64_t head, const Unit* next, int64_t next_head) {
    head_ = head;
    members_ = plan_.members.data() + unit.first_member;
    num_members_ = unit.num_members;
    take_rows();
    if (unit.part == kWholeTile) {
      whole_tile(unit);
      located_ = false;
      return;
    }
    if (!located_) locate(here(), unit, head, unit.part);
    located_ = next && next->part != kWholeTile;
    there().end = 0;
    if (located_) locate(there(), *next, next_head, next->part);
    compute_part(unit.part);
    settle(unit.part);
    if (located_) turn_ = !turn_;
  }

 private:
  // Packs the unit's queries, scaled, and notes their positions.
  void take_rows() {
    rows_ = 0;
    for (int64_t i = 0; i < num_members_; ++i) rows_ += plan_.tiles[members_[i]].num_tokens * group_;
    few_values_ = kDirect && rows_ <= kFewRows && value_dim_ % 64 == 0;
    queries_ = scratch_.queries.get(rows_ * words_);
    scores_ = scratch_.scores.get(rows_ * kPartTokens);
    weighted_ = scratch_.weighted.get(rows_ * wide_);
    packed_ = scratch_.packed.get(kPanel * std::max(words_, wide_));
    scratch_.positions.resize(rows_);
    scratch_.maxima.resize(rows_);
    scratch_.sums.resize(rows_);
    const Vec scale = set1(args_.scale);
    int64_t row = 0;
    for (int64_t i = 0; i < num_members_; ++i) {
      const Tile& tile = plan_.tiles[members_[i]];
      for (int64_t token = 0; token < tile.num_tokens; ++token) {
        const float* q = args_.q + (tile.token + token) * args_.q_stride + head_ * group_ * key_dim_;
        for (int64_t g = 0; g < group_; ++g, ++row, q += key_dim_) {
          scratch_.positions[row] = tile.position + token;
          float* to = queries_ + row * words_;
          to[words_ - 1] = 0.0f;
          for (int64_t d = 0; d < key_dim_; d += kLanes) {
            const Mask m = first(key_dim_ - d);
            Math::store_row(to, d, m, mul(load(q + d, m), scale));
          }
        }
      }
    }
  }

  Places& here() { return scratch_.places[turn_]; }
  Places& there() { return scratch_.places[!turn_]; }

  // Positions of the first and the last query of a unit.
  Positions span(const Unit& unit) const {
    Positions all = {INT64_MAX, 0};
    for (int64_t i = 0; i < unit.num_members; ++i) {
      const Tile& tile = plan_.tiles[plan_.members[unit.first_member + i]];
      all.first = std::min(all.first, tile.position);
      all.last = std::max(all.last, tile.position + tile.num_tokens - 1);
    }
    return all;
  }

  int64_t first_visible(int64_t position) const {
    return args_.window && position >= args_.window ? position - args_.window + 1 : 0;
  }

  // Finds what a unit sees of a part: positions [begin, end) of it.
  void locate(Places& places, const Unit& unit, int64_t head, int64_t part) const {
    const Positions queries = span(unit);
    const int64_t origin = part * kPartTokens, block_size = cache_.block_size;
    places.begin = std::max<int64_t>(0, first_visible(queries.first) - origin);
    places.end = std::min(kPartTokens, queries.last + 1 - origin);
    if (places.begin >= places.end) return;
    const int64_t sequence = plan_.tiles[plan_.members[unit.first_member]].sequence;
    const int64_t* table = step_.block_tables + sequence * step_.max_blocks;
    const int64_t key_bytes = key_dim_ * Cache::kBytes;
    const int64_t value_bytes = cache_.values ? cache_.value_dim * Cache::kBytes : key_bytes;
    const char* values = static_cast<const char*>(cache_.values ? cache_.values : cache_.keys);
    const int64_t from = places.begin / kPanel * kPanel;
    const int64_t to = std::min(kPartTokens, (places.end + kPanel - 1) / kPanel * kPanel);
    clear(places, from, places.begin);
    for (int64_t at = places.begin; at < places.end;) {
      const int64_t place = at % block_size, count = std::min(block_size - place, places.end - at);
      const int64_t row = (table[(origin + at) / block_size] * cache_.num_heads + head) * block_size + place;
      const char* key = static_cast<const char*>(cache_.keys) + row * key_bytes;
      const char* value = values + row * value_bytes;
      for (int64_t i = 0; i < count; ++i) places.keys[at + i] = key + i * key_bytes;
      for (int64_t i = 0; i < count; ++i) places.values[at + i] = value + i * value_bytes;
      if (cache_.scales) {
        const float* scales = cache_.scales + 2 * row;
        for (int64_t i = 0; i < count; ++i) places.key_scales[at + i] = scales[2 * i];
        for (int64_t i = 0; i < count; ++i) places.value_scales[at + i] = scales[2 * i + (cache_.values ? 1 : 0)];
      }
      at += count;
    }
    clear(places, places.end, to);
  }

  static void clear(Places& places, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      places.keys[at] = places.values[at] = kNothing;
      places.key_scales[at] = places.value_scales[at] = 0.0f;
    }
  }

  // What is computed two panels later: a part's keys, its values, then the next part's keys.
  Ahead ahead(int64_t step, int64_t panels) {
    const Places& now = here();
    const Places& later = there();
    const int64_t place = step + 2, key_bytes = key_dim_ * Cache::kBytes;
    const char* const* keys = now.keys + now.begin / kPanel * kPanel;
    if (place < panels) return Ahead(keys + place * kPanel, kPanel, key_bytes);
    if (place < 2 * panels) {
      if (!cache_.values) return Ahead(nullptr, 0, 0);
      const int64_t from = now.begin / kPanel * kPanel + (place - panels) * kPanel;
      return Ahead(now.values + from, kPanel, value_dim_ * Cache::kBytes);
    }
    const int64_t from = later.begin / kPanel * kPanel + (place - 2 * panels) * kPanel;
    if (later.begin >= later.end || from >= later.end) return Ahead(nullptr, 0, 0);
    return Ahead(later.keys + from, kPanel, key_bytes);
  }

  // Maximum, sum and weighted values of every row over the part that is located here.
  void compute_part(int64_t part) {
    const Places& places = here();
    const int64_t origin = part * kPartTokens, begin = places.begin, end = places.end;
    if (begin >= end) {
      for (int64_t row = 0; row < rows_; ++row) {
        scratch_.maxima[row] = -INFINITY;
        scratch_.sums[row] = 0.0f;
      }
      return;
    }
    const int64_t from = begin / kPanel * kPanel, panels = (end - from + kPanel - 1) / kPanel;
    for (int64_t at = from, step = 0; at < end; at += kPanel, ++step) {
      Ahead later = ahead(step, panels);
      score(places.keys + at, (std::min(kPanel, end - at) + kLanes - 1) / kLanes, later, scores_ + at);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t position = scratch_.positions[row];
      weigh(row, from, end, std::max(begin, first_visible(position) - origin),
            std::min(end, position + 1 - origin));
    }
    for (int64_t at = from, step = panels; at < end; at += kPanel, ++step) {
      Ahead later = ahead(step, panels);
      add_values(scores_ + at / Math::kPerWord, places.values + at, std::min(kPanel, end - at), later, at == from);
    }
    if (few_values_) {
      for (int64_t row = 0; row < rows_; ++row) put_in_order(weighted_ + row * wide_);
    }
  }

  // Scores of all rows against `vectors` times kLanes positions.
  void score(const char* const* keys, int64_t vectors, Ahead& later, float* scores) {
#if defined(__AVX512F__)
    if constexpr (kDirect) {
      switch (rows_) {
        case 1: return few_scores<Cache, 1>(queries_, keys, vectors, later, key_dim_, scores, kPartTokens);
        case 2: return few_scores<Cache, 2>(queries_, keys, vectors, later, key_dim_, scores, kPartTokens);
        case 3: return few_scores<Cache, 3>(queries_, keys, vectors, later, key_dim_, scores, kPartTokens);
        case 4: return few_scores<Cache, 4>(queries_, keys, vectors, later, key_dim_, scores, kPartTokens);
      }
    }
#endif
    for (int64_t v = 0; v < vectors; ++v) {
      pack_keys<Math, Cache>(keys + v * kLanes, later, key_dim_, packed_ + v * kLanes, kPanel);
    }
    product<Math>(rows_, vectors, queries_, words_, packed_, kPanel, words_, scores, kPartTokens, true);
  }

  // Adds the weighted values of up to kPanel positions to every row's sums, or begins them.
  void add_values(const float* weights, const char* const* values, int64_t count, Ahead& later, bool fresh) {
#if defined(__AVX512F__)
    if constexpr (kDirect) {
      if (few_values_) {
        const auto with = [&](auto products) {
          products(weights, kPartTokens, values, count, wide_, later, weighted_, fresh);
        };
        switch (rows_) {
          case 1: return with(few_products<Cache, 1>);
          case 2: return with(few_products<Cache, 2>);
          case 3: return with(few_products<Cache, 3>);
          case 4: return with(few_products<Cache, 4>);
        }
      }
    }
#endif
    pack_values<Math, Cache>(values, later, count, value_dim_, packed_, wide_);
    product<Math>(rows_, wide_ / kLanes, weights, kPartTokens, packed_, wide_,
                  (count + Math::kPerWord - 1) / Math::kPerWord, weighted_, wide_, fresh);
  }

  void put_in_order(float* sums) {
#if defined(__AVX512F__)
    if constexpr (kDirect) few_sums_in_order<Cache>(sums, wide_);
#endif
  }

  // Turns a row's scores [from, end) into weights, 0 outside the visible [low, high).
  void weigh(int64_t row, int64_t from, int64_t end, int64_t low, int64_t high) {
    float* scores = scores_ + row * kPartTokens;
    const Vec nothing = set1(-INFINITY);
    Vec most = nothing;
    for (int64_t i = from; i < end; i += kLanes) {
      Vec s = load(scores + i);
      if (cache_.scales) s = mul(s, load(here().key_scales + i));
      if (args_.soft_cap != 0.0f) s = mul(set1(args_.soft_cap), tanh(div(s, set1(args_.soft_cap))));
      if (i < low) s = select(first(low - i), nothing, s);
      if (i + kLanes > high) s = select(first(high > i ? high - i : 0), s, nothing);
      store(scores + i, s);
      most = max(most, s);
    }
    const float maximum = largest(most);
    const Vec base = set1(base_of(maximum));
    Vec total = zero();
    for (int64_t i = from; i < end; i += kLanes) {
      Vec weight = exp(sub(load(scores + i), base));
      total = add(total, weight);
      if (cache_.scales) weight = mul(weight, load(here().value_scales + i));
      Math::store_row(scores, i, first(kLanes), weight);
    }
    scratch_.maxima[row] = maximum;
    scratch_.sums[row] = sum(total);
  }

  // All parts of a tile of many rows, one after another.
  void whole_tile(const Unit& unit) {
    const Tile& tile = plan_.tiles[members_[0]];
    start_running();
    there().end = 0;
    for (int64_t part = first_visible(tile.position) / kPartTokens; part < tile.num_parts; ++part) {
      locate(here(), unit, head_, part);
      compute_part(part);
      for (int64_t row = 0; row < rows_; ++row) {
        merge_row(scratch_.maxima[row], scratch_.sums[row], weighted_ + row * wide_,
                  scratch_.running_maxima[row], scratch_.running_sums[row], running_ + row * wide_, wide_);
      }
    }
    finish(tile, rows_);
  }

  void start_running() {
    running_ = scratch_.running.get(rows_ * wide_);
    scratch_.running_maxima.assign(rows_, -INFINITY);
    scratch_.running_sums.assign(rows_, 0.0f);
  }

  // Stores each member's rows of one part; whoever brings a member's last part merges them all.
  void settle(int64_t part) {
    int64_t row = 0;
    for (int64_t i = 0; i < num_members_; ++i) {
      const Tile& tile = plan_.tiles[members_[i]];
      const int64_t rows = tile.num_tokens * group_;
      for (int64_t r = 0; r < rows; ++r, ++row) {
        float* to = partial(tile, part, r);
        to[0] = scratch_.maxima[row];
        to[1] = scratch_.sums[row];
        if (to[1] != 0.0f) std::memcpy(to + kPartialValues, weighted_ + row * wide_, sizeof(float) * wide_);
      }
      std::atomic<int32_t>& done = plan_.done[tile.done_counter + head_];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == tile.num_parts) {
        done.store(0, std::memory_order_relaxed);
        merge_parts(tile, rows);
      }
    }
  }

  float* partial(const Tile& tile, int64_t part, int64_t row) {
    const int64_t rows = tile.num_tokens * group_;
    const int64_t index = tile.partial_row + (head_ * tile.num_parts + part) * rows + row;
    return plan_.partials.data() + index * plan_.partial_stride;
  }

  void merge_parts(const Tile& tile, int64_t rows) {
    start_running();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t part = 0; part < tile.num_parts; ++part) {
        const float* from = partial(tile, part, row);
        merge_row(from[0], from[1], from + kPartialValues, scratch_.running_maxima[row],
                  scratch_.running_sums[row], running_ + row * wide_, wide_);
      }
    }
    finish(tile, rows);
  }

  void finish(const Tile& tile, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = tile.token + row / group_, head = head_ * group_ + row % group_;
      finish_row(scratch_.running_maxima[row], scratch_.running_sums[row], running_ + row * wide_,
                 args_.sinks ? args_.sinks + head : nullptr,
                 args_.out + token * args_.out_stride + head * value_dim_, value_dim_);
    }
  }

  const AttentionArgs& args_;
  const Step& step_;
  AttentionPlan& plan_;
  const KvCache& cache_;
  Scratch& scratch_;
  const int64_t group_, key_dim_, value_dim_, wide_, words_;
  int64_t head_ = 0, rows_ = 0, num_members_ = 0;
  bool located_ = false, turn_ = false, few_values_ = false;
  const int64_t* members_ = nullptr;
  float *queries_ = nullptr, *scores_ = nullptr, *packed_ = nullptr, *weighted_ = nullptr, *running_ = nullptr;
};

template <typename Math, typename Cache>
void attend(const AttentionArgs& args) {
  static thread_local Scratch scratch;
  Worker<Math, Cache> worker(args, scratch);
  const AttentionPlan& plan = *args.plan;
  const int64_t heads = plan.num_kv_heads, count = static_cast<int64_t>(plan.units.size()) * heads;
  // A thread knows its next unit while it computes one, so that it can call for its keys in time.
  int64_t taken = op_take();
  while (taken < count) {
    const int64_t after = op_take();
    const Unit* next = after < count ? &plan.units[after / heads] : nullptr;
    worker.run(plan.units[taken / heads], taken % heads, next, after % heads);
    taken = after;
  }
}

#if defined(__AVX512BF16__)
// Intel's processors issue a dot product of bfloat16 pairs every other cycle, which is half as many products as two
// float32 multiply-adds a cycle; AMD's issue two a cycle.
const bool kPairsPay = [] {
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
}();
#endif

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void attention(const AttentionArgs& args, int, int) {
#if defined(__AVX512BF16__)
  if (kPairsPay && args.cache.type == kKvBfloat16) return attend<Bfloat16Math, Bfloat16Cache>(args);
  if (kPairsPay && args.cache.type == kKvInt8) return attend<Bfloat16Math, Int8Cache>(args);
#endif
  switch (args.cache.type) {
    case kKvFloat32: return attend<Float32Math, Float32Cache>(args);
    case kKvBfloat16: return attend<Float32Math, Bfloat16Cache>(args);
    case kKvInt8: return attend<Float32Math, Int8Cache>(args);
  }
}

MILLRACE_OP(attention, AttentionArgs)
