// Shape letters: R query rows of a unit, D key dim, E value dim (rounded up to whole vectors in scratch).
#include "attention.h"

#include <cstdlib>

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

// What a thread needs from unit to unit.
struct Scratch {
  Buffer queries, scores, packed, weighted, running;
  std::vector<int64_t> positions;   // [R]
  std::vector<float> maxima, sums;  // [R] of the part
  std::vector<float> running_maxima, running_sums;
  const char* keys[kPartTokens];
  const char* values[kPartTokens];
  alignas(64) float key_scales[kPartTokens];
  alignas(64) float value_scales[kPartTokens];
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

  void run(const Unit& unit, int64_t head) {
    head_ = head;
    members_ = plan_.members.data() + unit.first_member;
    num_members_ = unit.num_members;
    take_rows();
    if (unit.part == kWholeTile) {
      whole_tile(plan_.tiles[members_[0]]);
    } else {
      compute_part(unit.part);
      settle(unit.part);
    }
  }

 private:
  // Packs the unit's queries, scaled, and notes their positions.
  void take_rows() {
    rows_ = 0;
    for (int64_t i = 0; i < num_members_; ++i) rows_ += plan_.tiles[members_[i]].num_tokens * group_;
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
    const auto range = std::minmax_element(scratch_.positions.begin(), scratch_.positions.end());
    first_position_ = *range.first;
    last_position_ = *range.second;
  }

  int64_t first_visible(int64_t position) const {
    return args_.window && position >= args_.window ? position - args_.window + 1 : 0;
  }

  // Where the part's keys and values lie. Positions outside [begin, end) read zeros.
  void locate(int64_t part, int64_t begin, int64_t end) {
    const int64_t sequence = plan_.tiles[members_[0]].sequence, block_size = cache_.block_size;
    const int64_t* table = step_.block_tables + sequence * step_.max_blocks;
    const char* keys = static_cast<const char*>(cache_.keys);
    const char* values = static_cast<const char*>(cache_.values ? cache_.values : cache_.keys);
    const int64_t key_bytes = key_dim_ * Cache::kBytes;
    const int64_t value_bytes = cache_.values ? cache_.value_dim * Cache::kBytes : key_bytes;
    for (int64_t at = 0; at < kPartTokens; at += block_size) {
      const bool some = at < end && at + block_size > begin;
      const int64_t block = some ? table[(part * kPartTokens + at) / block_size] : 0;
      const int64_t row = (block * cache_.num_heads + head_) * block_size;
      for (int64_t place = 0; place < block_size; ++place) {
        const bool seen = at + place >= begin && at + place < end;
        scratch_.keys[at + place] = seen ? keys + (row + place) * key_bytes : kNothing;
        scratch_.values[at + place] = seen ? values + (row + place) * value_bytes : kNothing;
        if (cache_.scales) {
          const float* scales = cache_.scales + 2 * (row + place);
          scratch_.key_scales[at + place] = seen ? scales[0] : 0.0f;
          scratch_.value_scales[at + place] = seen ? scales[cache_.values ? 1 : 0] : 0.0f;
        }
      }
    }
  }

  // Maximum, sum and weighted values of every row over one part.
  void compute_part(int64_t part) {
    const int64_t origin = part * kPartTokens;
    const int64_t end = std::min(kPartTokens, last_position_ + 1 - origin);
    const int64_t begin = std::max<int64_t>(0, first_visible(first_position_) - origin);
    if (begin >= end) {
      for (int64_t row = 0; row < rows_; ++row) {
        scratch_.maxima[row] = -INFINITY;
        scratch_.sums[row] = 0.0f;
      }
      return;
    }
    locate(part, begin, end);
    const int64_t from = begin / kPanel * kPanel;
    for (int64_t at = from; at < end; at += kPanel) {
      const int64_t vectors = (std::min(kPanel, end - at) + kLanes - 1) / kLanes;
      for (int64_t v = 0; v < vectors; ++v) {
        pack_keys<Math, Cache>(scratch_.keys + at + v * kLanes, key_dim_, packed_ + v * kLanes, kPanel);
      }
      product<Math>(rows_, vectors, queries_, words_, packed_, kPanel, words_, scores_ + at, kPartTokens, true);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t position = scratch_.positions[row];
      weigh(row, from, end, std::max(begin, first_visible(position) - origin),
            std::min(end, position + 1 - origin));
    }
    for (int64_t at = from; at < end; at += kPanel) {
      const int64_t count = std::min(kPanel, end - at);
      pack_values<Math, Cache>(scratch_.values + at, count, value_dim_, packed_, wide_);
      product<Math>(rows_, wide_ / kLanes, scores_ + at / Math::kPerWord, kPartTokens, packed_, wide_,
                    (count + Math::kPerWord - 1) / Math::kPerWord, weighted_, wide_, at == from);
    }
  }

  // Turns a row's scores [from, end) into weights, 0 outside the visible [low, high).
  void weigh(int64_t row, int64_t from, int64_t end, int64_t low, int64_t high) {
    float* scores = scores_ + row * kPartTokens;
    const Vec nothing = set1(-INFINITY);
    Vec most = nothing;
    for (int64_t i = from; i < end; i += kLanes) {
      Vec s = load(scores + i);
      if (cache_.scales) s = mul(s, load(scratch_.key_scales + i));
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
      if (cache_.scales) weight = mul(weight, load(scratch_.value_scales + i));
      Math::store_row(scores, i, first(kLanes), weight);
    }
    scratch_.maxima[row] = maximum;
    scratch_.sums[row] = sum(total);
  }

  // All parts of a tile of many rows, one after another.
  void whole_tile(const Tile& tile) {
    start_running();
    for (int64_t part = first_visible(tile.position) / kPartTokens; part < tile.num_parts; ++part) {
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
  int64_t head_ = 0, rows_ = 0, num_members_ = 0, first_position_ = 0, last_position_ = 0;
  const int64_t* members_ = nullptr;
  float *queries_ = nullptr, *scores_ = nullptr, *packed_ = nullptr, *weighted_ = nullptr, *running_ = nullptr;
};

template <typename Math, typename Cache>
void attend(const AttentionArgs& args) {
  static thread_local Scratch scratch;
  Worker<Math, Cache> worker(args, scratch);
  const AttentionPlan& plan = *args.plan;
  const int64_t heads = plan.num_kv_heads, count = static_cast<int64_t>(plan.units.size()) * heads;
  for (int64_t taken = op_take(); taken < count; taken = op_take()) {
    worker.run(plan.units[taken / heads], taken % heads);
  }
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void attention(const AttentionArgs& args, int, int) {
#if defined(__AVX512BF16__)
  using Narrow = Bfloat16Math;
#else
  using Narrow = Float32Math;
#endif
  switch (args.cache.type) {
    case kKvFloat32: return attend<Float32Math, Float32Cache>(args);
    case kKvBfloat16: return attend<Narrow, Bfloat16Cache>(args);
    case kKvInt8: return attend<Narrow, Int8Cache>(args);
  }
}

MILLRACE_OP(attention, AttentionArgs)
