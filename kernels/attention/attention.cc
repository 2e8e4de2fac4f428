// Shape letters: R query rows of a unit, D key dim, E value dim (rounded up to whole vectors in scratch).
#include "attention/attention.h"

#include "attention/attention_fp16.h"
#include "attention/attention_plan.h"
#include "attention/attention_products.h"
#include "attention/attention_tiles.h"
#include "attention/attention_votes.h"
#include "native/past_caches.h"
#include "paged_cache/key_groups.h"

namespace millrace {
namespace {

// A vector of this many bytes of zeros stands for positions that nobody looks at.
constexpr int64_t kLargestVectorBytes = 8192;
alignas(64) const char kNothing[kLargestVectorBytes] = {};

// Where the keys and values of one part lie. Positions outside [begin, end) read zeros.
struct Places {
  int64_t begin, end;
  const char* keys[kPartTokens];
  const char* values[kPartTokens];
  alignas(64) float key_scales[kPartTokens];
  alignas(64) float value_scales[kPartTokens];
};

// Buffers that a thread keeps from unit to unit.
struct Scratch {
  ProductScratch products;
  Buffer running;
  std::vector<int64_t> positions;   // [R]
  std::vector<int64_t> tokens, sequences;  // [R]
  std::vector<float> maxima, sums;  // [R] of the part
  std::vector<float> running_maxima, running_sums;
  Places places[2];  // of the part in work, and of the one after it
  Stream::Lists asked;
  std::vector<Chunk> chunks;
  Buffer key_scales, value_scales;  // [heads, kPartTokens] of a streamed unit
  Ballot ballot;
};

// A unit for some neighbouring heads. Streamed: of few rows, read in the order of memory (attention_stream.h).
struct Work {
  const Unit* unit;
  int64_t head, num_heads;
  bool streamed;
};

struct Positions {
  int64_t first, end;
};

float exp_of_negative(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, millrace::exp_of_negative(set1(x)));
  return lanes[0];
}

// A maximum to subtract: 0 where a row has seen nothing, so that its weights are 0 and not NaN.
float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Factor of sums whose weights were made with `maximum`, beside those made with `joint`.
float weight_beside(float maximum, float joint) {
  const float above = maximum - base_of(joint);
  return above == 0.0f ? 1.0f : exp_of_negative(above);
}

// Takes a part's result (maximum, sum, weighted values) into a row's running one.
void merge_row(float maximum, float total, const float* weighted, float& running_maximum, float& running_total,
               float* running, int64_t dim) {
  if (total == 0.0f) return;  // nothing of the part was visible
  const float joint = running_maximum < maximum ? maximum : running_maximum;
  const float old_weight = weight_beside(running_maximum, joint), new_weight = weight_beside(maximum, joint);
  const bool fresh = running_maximum == -INFINITY && running_total == 0.0f;
  const Vec keep = set1(old_weight), take = set1(new_weight);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec before = fresh ? zero() : load(running + i);
    store(running + i, fma(load(weighted + i), take, mul(before, keep)));
  }
  running_total = std::fma(total, new_weight, running_total * old_weight);
  running_maximum = joint;
}

void finish_row(float maximum, float total, const float* running, const float* sink, float* out, int64_t dim,
                bool past_caches) {
  float weight = 1.0f;
  if (sink) {
    const float joint = maximum < *sink ? *sink : maximum;
    weight = weight_beside(maximum, joint);
    total = total * weight + weight_beside(*sink, joint);
  }
  const Vec factor = set1(weight / total);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Mask m = first(dim - i);
    const Vec value = mul(load(running + i, m), factor);
    if (past_caches)
      store_past_caches(out + i, value);
    else
      store(out + i, m, value);
  }
}

// Rows of many that products take in one go, part by part; 0 where they take all.
template <typename Products, typename = void>
constexpr int64_t rows_at_once = 0;
template <typename Products>
constexpr int64_t rows_at_once<Products, std::void_t<decltype(Products::kRowsAtOnce)>> = Products::kRowsAtOnce;

template <typename Products>
class Worker {
  using Cache = typename Products::CacheType;
  // Tokens whose queries are called for ahead of the one that is taken.
  static constexpr int64_t kQueriesAhead = 4;
  // Of each position, where there are any.
  static constexpr int64_t kScales = by_channel<Cache> ? 1 : 2;

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
        past_caches_(goes_past_caches(args.out, args.out_stride, step_.query_starts[step_.num_sequences],
                                      plan_.num_heads * value_dim_) &&
                     value_dim_ == wide_ && !turns_back()),
        products_({key_dim_, value_dim_, wide_}, scratch.products),
        stream_(cache_, bytes_of<Cache>(key_dim_), bytes_of<Cache>(cache_.value_dim), scratch.asked) {}

  // Neighbouring heads that a unit of few rows takes together; 0 where it is not streamed. Each thread should find a
  // few of them.
  int64_t heads_together(int num_threads) const {
    const int64_t heads = plan_.num_kv_heads, units = static_cast<int64_t>(plan_.units.size()) - plan_.num_many;
    if (!cache_.values || cache_.block_size < kChunk || !products_.streams()) return 0;
    int64_t most = 1;
    for (int64_t count = 2; count <= heads; ++count) {
      const bool short_runs = count * cache_.block_size * bytes_of<Cache>(key_dim_) <= kRunBytes;
      if (heads % count == 0 && short_runs && units * (heads / count) >= 4 * num_threads) most = count;
    }
    return most;
  }

  // Computes one unit; then, if there is one, `next` is what the thread does after it.
  void run(const Work& work, const Work* next) {
    const Unit& unit = *work.unit;
    head_ = work.head;
    num_heads_ = work.num_heads;
    members_ = plan_.members.data() + unit.first_member;
    num_members_ = unit.num_members;
    table_ = table_of(unit);
    take_rows(work.streamed);
    if (unit.part == kWholeTile) {
      whole_tile(unit);
      located_ = false;
    } else if (work.streamed) {
      stream_part(work, next);
      settle(unit.part);
      located_ = false;
    } else {
      if (!located_) locate(here(), unit, head_, unit.part);
      located_ = next && next->unit->part != kWholeTile && !next->streamed;
      there().end = 0;
      if (located_) locate(there(), *next->unit, next->head, next->unit->part);
      compute_part(unit.part, [](int64_t, int64_t) {});
      settle(unit.part);
      if (located_) turn_ = !turn_;
    }
  }

  void done() const {
    if (past_caches_) past_caches_done();
  }

 private:
  // Whether values lie rotated.
  static constexpr bool turns_back() { return by_channel<Cache>; }

  // Packs the unit's queries, scaled, and notes their positions.
  void take_rows(bool streamed) {
    rows_each_ = 0;
    for (int64_t i = 0; i < num_members_; ++i) rows_each_ += plan_.tiles[members_[i]].num_tokens * group_;
    rows_ = rows_each_ * num_heads_;
    products_.begin(rows_, streamed ? rows_each_ : 0);
    for (auto* each : {&scratch_.positions, &scratch_.tokens, &scratch_.sequences}) each->resize(rows_each_);
    scratch_.maxima.resize(rows_);
    scratch_.sums.resize(rows_);
    for (int64_t head = 0, row = 0; head < num_heads_; ++head) {
      for (int64_t i = 0, own = 0; i < num_members_; ++i) {
        const Tile& tile = plan_.tiles[members_[i]];
        for (int64_t token = 0; token < tile.num_tokens; ++token) {
          const float* q = args_.q + (tile.token + token) * args_.q_stride + (head_ + head) * group_ * key_dim_;
          call_queries(q + kQueriesAhead * args_.q_stride);
          for (int64_t g = 0; g < group_; ++g, ++row, ++own, q += key_dim_) {
            scratch_.positions[own] = tile.position + token;
            scratch_.tokens[own] = tile.token + token;
            scratch_.sequences[own] = tile.sequence;
            products_.take_query(row, q, args_.scale);
          }
        }
      }
    }
  }

  // Queries of a token's heads, which lie far from those of the token before. A prefetch beyond the last ones does nothing.
  void call_queries(const float* from) const {
    for (int64_t i = 0; i < group_ * key_dim_; i += 16) __builtin_prefetch(from + i);
  }

  Places& here() { return scratch_.places[turn_]; }
  Places& there() { return scratch_.places[!turn_]; }

  // Position of the first query of a unit, and the end of what its queries see.
  Positions span(const Unit& unit) const {
    Positions all = {INT64_MAX, 0};
    for (int64_t i = 0; i < unit.num_members; ++i) {
      const Tile& tile = plan_.tiles[plan_.members[unit.first_member + i]];
      all.first = std::min(all.first, tile.position);
      all.end = std::max(all.end, std::min(tile.length, tile.position + tile.num_tokens + args_.ahead));
    }
    return all;
  }

  int64_t first_visible(int64_t position) const {
    const int64_t begin = args_.window && position >= args_.window ? position - args_.window + 1 : 0;
    return args_.chunk ? std::max(begin, position / args_.chunk * args_.chunk) : begin;
  }

  // Positions [begin, end) of a part that a unit sees.
  Range seen(const Unit& unit, int64_t part) const {
    const Positions queries = span(unit);
    const int64_t origin = part * kPartTokens;
    return {std::max<int64_t>(0, first_visible(queries.first) - origin), std::min(kPartTokens, queries.end - origin)};
  }

  const int64_t* table_of(const Unit& unit) const {
    return step_.block_tables + plan_.tiles[plan_.members[unit.first_member]].sequence * step_.max_blocks;
  }

  // Finds what a unit sees of a part.
  void locate(Places& places, const Unit& unit, int64_t head, int64_t part) const {
    const Range range = seen(unit, part);
    const int64_t origin = part * kPartTokens, block_size = cache_.block_size;
    places.begin = range.begin;
    places.end = range.end;
    if (places.begin >= places.end) return;
    const int64_t* table = table_of(unit);
    const int64_t key_bytes = bytes_of<Cache>(key_dim_);
    const int64_t value_bytes = cache_.values ? bytes_of<Cache>(cache_.value_dim) : key_bytes;
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
        const float* scales = cache_.scales + kScales * row;
        for (int64_t i = 0; i < count; ++i) places.key_scales[at + i] = scales[kScales * i];
        for (int64_t i = 0; i < count; ++i) places.value_scales[at + i] = scales[kScales * i + (cache_.values ? kScales - 1 : 0)];
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

  // Memory needed two panels later: a part's keys, its values, then the next part's keys.
  Ahead ahead(int64_t step, int64_t panels) {
    const Places& now = here();
    const Places& later = there();
    const int64_t place = step + 2, key_bytes = bytes_of<Cache>(key_dim_);
    const char* const* keys = now.keys + now.begin / kPanel * kPanel;
    if (place < panels) return Ahead(keys + place * kPanel, kPanel, key_bytes);
    if (place < 2 * panels) {
      if (!cache_.values) return Ahead(nullptr, 0, 0);
      const int64_t from = now.begin / kPanel * kPanel + (place - panels) * kPanel;
      return Ahead(now.values + from, kPanel, bytes_of<Cache>(value_dim_));
    }
    const int64_t from = later.begin / kPanel * kPanel + (place - 2 * panels) * kPanel;
    if (later.begin >= later.end || from >= later.end) return Ahead(nullptr, 0, 0);
    return Ahead(later.keys + from, kPanel, key_bytes);
  }

  // Maximum, sum and weighted values of every row over the part that is located here; calls done(first row, end) for
  // rows that have them.
  template <typename Done>
  void compute_part(int64_t part, const Done& done) {
    const Places& places = here();
    const int64_t origin = part * kPartTokens, begin = places.begin, end = places.end;
    if (begin >= end) return nothing_seen(0, rows_);
    const int64_t from = begin / kPanel * kPanel, panels = (end - from + kPanel - 1) / kPanel;
    if constexpr (rows_at_once<Products> != 0) {
      take_panels(from, end, panels);
      for (int64_t row = 0; row < rows_; row += rows_at_once<Products>) {
        const int64_t last = std::min(rows_, row + rows_at_once<Products>);
        compute_rows(row, last, origin, from, {begin, end});
        done(row, last);
      }
    } else {
      compute_all(part, origin, from, panels);
      done(0, rows_);
    }
  }

  // Packs all keys and values of the part.
  void take_panels(int64_t from, int64_t end, int64_t panels) {
    const Places& places = here();
    for (int64_t at = from, step = 0; at < end; at += kPanel, ++step) {
      Ahead later = ahead(step, panels);
      products_.take_keys(at, places.keys + at, (std::min(kPanel, end - at) + kLanes - 1) / kLanes, later);
    }
    for (int64_t at = from, step = panels; at < end; at += kPanel, ++step) {
      Ahead later = ahead(step, panels);
      products_.take_values(at, places.values + at, std::min(kPanel, end - at), later, at == from);
    }
  }

  // Rows [row, last) over the places [from, seen.end) that are packed.
  void compute_rows(int64_t row, int64_t last, int64_t origin, int64_t from, const Range& seen) {
    const auto positions = scratch_.positions.begin();
    const int64_t most = *std::max_element(positions + row, positions + last) + args_.ahead + 1 - origin;
    if (most <= from) return nothing_seen(row, last);
    products_.score_rows(row, from, std::min(seen.end, most));
    for (int64_t each = row; each < last; ++each) weigh_row(each, origin, from, seen);
    products_.add_rows(row);
  }

  void weigh_row(int64_t row, int64_t origin, int64_t from, const Range& seen) {
    const Places& places = here();
    const int64_t position = scratch_.positions[row], last = position + args_.ahead - origin;
    const int64_t read = last < from ? from : std::min(seen.end, last / kPanel * kPanel + kPanel);
    weigh(row, origin, {from, read}, seen, position, places.key_scales, places.value_scales);
  }

  // All rows, a panel of keys, then of values, after the other.
  void compute_all(int64_t part, int64_t origin, int64_t from, int64_t panels) {
    const Places& places = here();
    const int64_t end = places.end;
    for (int64_t at = from, step = 0; at < end; at += kPanel, ++step) {
      Ahead later = ahead(step, panels);
      const int64_t vectors = (std::min(kPanel, end - at) + kLanes - 1) / kLanes;
      const int64_t row = rows_before(origin + at);
      if constexpr (by_channel<Cache>) products_.take_channels(row, rows_, channels_at(part, at, head_));
      products_.score(row, at, places.keys + at, vectors, later);
      add_bias(row, rows_, at, vectors);
    }
    score_own(origin);
    for (int64_t row = 0; row < rows_; ++row) weigh_row(row, origin, from, {places.begin, end});
    for (int64_t at = from, step = panels; at < end; at += kPanel, ++step) {
      Ahead later = ahead(step, panels);
      products_.add_values(rows_before(origin + at), at, places.values + at, std::min(kPanel, end - at), later, at == from);
    }
    products_.finish();
  }

  // Channels of the block at a place of a part.
  const uint16_t* channels_at(int64_t part, int64_t at, int64_t head) const {
    return channels_of(cache_, table_[(part * kPartTokens + at) / kKeyGroup], head);
  }

  // Completes the scores that products gave for the block whose channels they took.
  void add_bias(int64_t begin, int64_t end, int64_t at, int64_t vectors) {
    if constexpr (by_channel<Cache>)
      for (int64_t row = begin; row < end; ++row) products_.plain().add_bias(row, products_.scores(row) + at, vectors);
  }

  // Of keys by channel: each row's scores of its own block up to itself, whose keys are whole.
  void score_own(int64_t origin) {
    if constexpr (by_channel<Cache>)
      for (int64_t row = 0; row < rows_; ++row) score_own(origin, row);
  }

  void score_own(int64_t origin, int64_t row) {
    const int64_t own = row % rows_each_, position = scratch_.positions[own], index = position / kKeyGroup;
    if (position < origin || position >= origin + kPartTokens) return;
    const int64_t sequence = scratch_.sequences[own], token = scratch_.tokens[own], head = head_ + row / rows_each_;
    // The first position whose key is of this step.
    const int64_t fresh = position - (token - step_.query_starts[sequence]);
    const uint16_t* recent = recent_of(cache_, step_.recent_rows[sequence], index, head);
    const float* q = products_.plain().row(row);
    for (int64_t at = std::max(index * kKeyGroup, first_visible(position)); at <= position; ++at) {
      const float* key = args_.k + (token - (position - at)) * args_.k_stride + head * key_dim_;
      Vec total = zero();
      for (int64_t i = 0; i < key_dim_; i += kLanes) {
        const Mask m = first(key_dim_ - i);
        const Vec k = at >= fresh ? load(key + i, m) : load_bf16(recent + at % kKeyGroup * key_dim_ + i, m);
        total = fma(load(q + i, m), k, total);
      }
      products_.scores(row)[at - origin] = sum(total);
    }
  }

  // How many rows, from the first on, look at nothing from a position on.
  int64_t rows_before(int64_t position) const {
    int64_t row = 0;
    while (row < rows_ && scratch_.positions[row] + args_.ahead < position) ++row;
    return row;
  }

  void nothing_seen(int64_t row, int64_t last) {
    std::fill(scratch_.maxima.begin() + row, scratch_.maxima.begin() + last, -INFINITY);
    std::fill(scratch_.sums.begin() + row, scratch_.sums.begin() + last, 0.0f);
  }

  // The part of a streamed unit of work, chunk by chunk.
  void stream_part(const Work& work, const Work* next) {
    const int64_t part = work.unit->part, origin = part * kPartTokens;
    const Range range = seen(*work.unit, part);
    if (range.begin >= range.end) return nothing_seen(0, rows_);
    const Span span = span_of(work, range);
    stream_.now(span);
    if (next && next->streamed) {
      const Range later = seen(*next->unit, next->unit->part);
      if (later.begin < later.end) stream_.then(span_of(*next, later));
    }
    take_scales(span, range);
    score_span(span);
    score_own(origin);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t scales = row / rows_each_ * kPartTokens;
      weigh(row, origin, {span.begin, range.end}, range, scratch_.positions[row % rows_each_], key_scales_ + scales,
            value_scales_ + scales);
    }
    add_span(span, range.begin);
    products_.finish_chunks();
  }

  Span span_of(const Work& work, const Range& range) const {
    const int64_t* blocks = table_of(*work.unit) + work.unit->part * (kPartTokens / cache_.block_size);
    return {blocks, range.begin / kChunk * kChunk, range.end, work.head, work.num_heads};
  }

  // Scales of all heads; 0 outside the range.
  void take_scales(const Span& span, const Range& range) {
    if (!cache_.scales) return;
    key_scales_ = scratch_.key_scales.get(num_heads_ * kPartTokens);
    value_scales_ = scratch_.value_scales.get(num_heads_ * kPartTokens);
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      const Mask before = first(std::max<int64_t>(0, range.begin - at)), seen = first(std::max<int64_t>(0, range.end - at));
      for (int64_t head = 0; head < num_heads_; ++head) {
        const auto* from = reinterpret_cast<const float*>(row_of(cache_, cache_.scales, kScales * sizeof(float), span, head, at));
        Vec scales[2];
        if (kScales == 1)
          scales[0] = scales[1] = load(from);
        else
          unzip(load(from), load(from + kLanes), scales);
        const auto place = head * kPartTokens + at;
        store(key_scales_ + place, select(before, zero(), select(seen, scales[0], zero())));
        store(value_scales_ + place, select(before, zero(), select(seen, scales[1], zero())));
      }
    }
  }

  Chunk chunk_of(const Span& span, const void* base, int64_t dim, int64_t head, int64_t at) const {
    const int64_t bytes = bytes_of<Cache>(dim);
    return {{row_of(cache_, base, bytes, span, head, at), bytes}, head * rows_each_, at};
  }

  // Calls `use(chunks, count)` for up to kTogether chunks of a head at a time, block by block.
  template <int64_t kTogether, typename Use>
  void go_through(const Span& span, const void* base, int64_t dim, const Use& use) const {
    const int64_t step = std::max(cache_.block_size, kTogether * kChunk);
    for (int64_t place = span.begin; place < span.end;) {
      const int64_t to = std::min(span.end, (place & -step) + step);
      for (int64_t head = 0; head < num_heads_; ++head) {
        for (int64_t at = place; at < to;) {
          Chunk chunks[kTogether];
          int64_t count = 0;
          // Those that lie together from a multiple of their number on.
          do {
            chunks[count++] = chunk_of(span, base, dim, head, at);
            at += kChunk;
          } while (at < to && at % (kTogether * kChunk));
          use(chunks, count);
        }
      }
      place = to;
    }
  }

  void score_span(const Span& span) {
    std::vector<Chunk>& pairs = scratch_.chunks;
    pairs.clear();
    go_through<2>(span, cache_.keys, key_dim_, [&](const Chunk* chunks, int64_t count) {
      pairs.push_back(chunks[0]);
      pairs.push_back(chunks[count - 1]);
    });
    const size_t count = pairs.size();
    for (int i = 0; i < 2; ++i) pairs.push_back(pairs[count - 1]);
    for (size_t i = 0; i < count; i += 2) {
      const Chunk &one = pairs[i], &other = pairs[i + 1];
      const int64_t end = one.row + rows_each_;
      if constexpr (by_channel<Cache>) {
        const bool same = i && pairs[i - 1].row == one.row && pairs[i - 1].at / kKeyGroup == one.at / kKeyGroup;
        const int64_t head = span.head + one.row / rows_each_, block = span.blocks[one.at / kKeyGroup];
        if (!same) products_.take_channels(one.row, end, channels_of(cache_, block, head));
      }
      products_.score_chunks(&one, &pairs[i + 2], rows_each_, stream_);
      add_bias(one.row, end, one.at, kChunk / kLanes);
      if (other.at != one.at) add_bias(one.row, end, other.at, kChunk / kLanes);
    }
  }

  void add_span(const Span& span, int64_t begin) {
    go_through<Products::kChunksOfValues>(span, cache_.values, value_dim_, [&](const Chunk* chunks, int64_t count) {
      const int64_t at = chunks->at, end = std::min(span.end, at + count * kChunk);
      products_.add_chunks(chunks, std::max(at, begin), end, rows_each_, stream_, at == span.begin);
    });
  }

  // Turns a row's scores of the places that are read into weights, 0 for what it does not see of them.
  void weigh(int64_t row, int64_t origin, const Range& read, const Range& seen, int64_t position,
             const float* key_scales, const float* value_scales) {
    // Two vectors go together, as one maximum and one sum would wait for themselves; which place is of which
    // does not depend on what is read.
    constexpr int64_t kPair = 2 * kLanes;
    const int64_t low = std::max(seen.begin, first_visible(position) - origin);
    const int64_t high = std::min(seen.end, position + args_.ahead + 1 - origin);
    // A row with a window may see nothing of the part.
    const int64_t begin = std::min(kPartTokens, std::max(read.begin, low) / kPair * kPair);
    float* scores = products_.scores(row);
    float* const votes = scratch_.ballot.weights(row);
    const Vec nothing = set1(-INFINITY);
    const bool as_they_are = !cache_.scales && args_.soft_cap == 0.0f;
    Vec most[2] = {nothing, nothing}, total[2] = {zero(), zero()};
    for (int64_t i = begin; i < high; i += kPair) {
      const bool whole = as_they_are && i >= low && i + kPair <= high;
      for (int half = 0; half < 2; ++half) {
        const int64_t at = i + half * kLanes;
        Vec s = load(scores + at);
        if (!whole) {
          s = changed(s, at, key_scales);
          if (at < low) s = select(first(low - at), nothing, s);
          if (at + kLanes > high) s = select(first(high > at ? high - at : 0), s, nothing);
          store(scores + at, s);
        }
        most[half] = max(most[half], s);
      }
    }
    const float maximum = largest(max(most[0], most[1]));
    const Vec base = set1(base_of(maximum));
    for (int64_t i = begin; i < high; i += kPair) {
      for (int half = 0; half < 2; ++half) {
        const int64_t at = i + half * kLanes;
        Vec weight = Products::weight_of(load(scores + at), base);
        total[half] = add(total[half], weight);
        if (votes) store(votes + at, weight);
        if (cache_.scales) weight = mul(weight, load(value_scales + at));
        products_.set_weights(row, at, weight);
      }
    }
    for (int64_t at = read.begin; at < begin; at += kLanes) products_.set_weights(row, at, zero());
    const int64_t after = std::max(begin, (high + kPair - 1) / kPair * kPair);
    for (int64_t at = after; at < read.end; at += kLanes) products_.set_weights(row, at, zero());
    products_.weights_are_set(row, read.begin, read.end);
    if (votes) {
      std::fill(votes, votes + begin, 0.0f);
      std::fill(votes + after, votes + kPartTokens, 0.0f);
    }
    scratch_.maxima[row] = maximum;
    scratch_.sums[row] = sum(add(total[0], total[1]));
  }

  // Scores from place `at` on with the keys' scales and the soft cap.
  Vec changed(Vec s, int64_t at, const float* key_scales) const {
    if (cache_.scales && !by_channel<Cache>) s = mul(s, load(key_scales + at));
    const Vec cap = set1(args_.soft_cap);
    return args_.soft_cap == 0.0f ? s : mul(cap, tanh(div(s, cap)));
  }

  // All parts of a tile of many rows, one after another.
  void whole_tile(const Unit& unit) {
    const Tile& tile = plan_.tiles[members_[0]];
    start_running(rows_);
    there().end = 0;
    const int64_t first = first_visible(tile.position) / kPartTokens;
    Ballot& ballot = scratch_.ballot;
    const Votes* votes = step_.votes && step_.votes[tile.sequence].sums ? step_.votes + tile.sequence : nullptr;
    ballot.open(votes, tile, group_, first);
    for (int64_t part = first; part < tile.num_parts; ++part) {
      locate(here(), unit, head_, part);
      compute_part(part, [&](int64_t row, int64_t last) {
        for (; row < last; ++row) take_part(row, row);
      });
      ballot.end_part(scratch_.maxima.data());
    }
    finish(tile, rows_);
    if (ballot.is_open()) count(*votes);
    ballot.close();
  }

  // Adds up what the rows of a whole tile paid to each key.
  void count(const Votes& votes) {
    const auto factor = [&](int64_t row, float maximum) {
      return weight_beside(maximum, scratch_.running_maxima[row]) / scratch_.running_sums[row];
    };
    scratch_.ballot.count(votes.sums + (args_.vote_row + head_) * votes.size, votes.size, factor);
  }

  void start_running(int64_t rows) {
    running_ = scratch_.running.get(rows * wide_);
    scratch_.running_maxima.assign(rows, -INFINITY);
    scratch_.running_sums.assign(rows, 0.0f);
  }

  // Stores each member's rows of one part; whoever brings a member's last part merges them all.
  void settle(int64_t part) {
    const int64_t first_head = head_;
    for (int64_t row = 0; head_ < first_head + num_heads_; ++head_) {
      for (int64_t i = 0; i < num_members_; ++i) {
        const Tile& tile = plan_.tiles[members_[i]];
        const int64_t rows = tile.num_tokens * group_;
        settle_rows(tile, part, row, rows);
        row += rows;
      }
    }
  }

  void settle_rows(const Tile& tile, int64_t part, int64_t row, int64_t rows) {
    if (tile.num_parts == 1) {
      start_running(rows);
      for (int64_t r = 0; r < rows; ++r) take_part(row + r, r);
      return finish(tile, rows);
    }
    for (int64_t r = 0; r < rows; ++r, ++row) {
      float* to = partial(tile, part, r);
      to[0] = scratch_.maxima[row];
      to[1] = scratch_.sums[row];
      if (to[1] != 0.0f) std::memcpy(to + kPartialValues, products_.weighted(row), sizeof(float) * wide_);
    }
    std::atomic<int32_t>& done = plan_.done[tile.done_counter + head_];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == tile.num_parts) {
      done.store(0, std::memory_order_relaxed);
      merge_parts(tile, rows);
    }
  }

  // Merges a row's part into a running row.
  void take_part(int64_t row, int64_t running) {
    merge_row(scratch_.maxima[row], scratch_.sums[row], products_.weighted(row), scratch_.running_maxima[running],
              scratch_.running_sums[running], running_ + running * wide_, wide_);
  }

  float* partial(const Tile& tile, int64_t part, int64_t row) {
    const int64_t rows = tile.num_tokens * group_;
    const int64_t index = tile.partial_row + (head_ * tile.num_parts + part) * rows + row;
    return plan_.partials.data() + index * plan_.partial_stride;
  }

  void merge_parts(const Tile& tile, int64_t rows) {
    start_running(rows);
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
      float* out = args_.out + token * args_.out_stride + head * value_dim_;
      finish_row(scratch_.running_maxima[row], scratch_.running_sums[row], running_ + row * wide_,
                 args_.sinks ? args_.sinks + head : nullptr, out, value_dim_, past_caches_);
      if (turns_back()) turn_back(out, value_dim_);
    }
  }

  const AttentionArgs& args_;
  const Step& step_;
  AttentionPlan& plan_;
  const KvCache& cache_;
  Scratch& scratch_;
  const int64_t group_, key_dim_, value_dim_, wide_;
  const bool past_caches_;  // whether results go there
  Products products_;
  Stream stream_;
  // rows_: of all heads; rows_each_: of one.
  int64_t head_ = 0, num_heads_ = 1, rows_ = 0, rows_each_ = 0, num_members_ = 0;
  bool located_ = false, turn_ = false;
  const int64_t *members_ = nullptr, *table_ = nullptr;
  float *running_ = nullptr, *key_scales_ = nullptr, *value_scales_ = nullptr;
};

template <typename Products>
void attend(const AttentionArgs& args, int num_threads) {
  static thread_local Scratch scratch;
  [[maybe_unused]] const TileShapes shapes;
  Worker<Products> worker(args, scratch);
  const AttentionPlan& plan = *args.plan;
  const int64_t together = worker.heads_together(num_threads), each = std::max<int64_t>(1, together);
  const int64_t heads = plan.num_kv_heads, groups = heads / each;
  const int64_t many = plan.num_many * heads;
  const int64_t count = many + (static_cast<int64_t>(plan.units.size()) - plan.num_many) * groups;
  const auto work_of = [&](int64_t index) -> Work {
    if (index < many) return {&plan.units[index / heads], index % heads, 1, false};
    index -= many;
    return {&plan.units[plan.num_many + index / groups], index % groups * each, each, together > 0};
  };
  // A thread knows its next unit while it computes one, so that it can call for its keys in time.
  int64_t taken = op_take();
  while (taken < count) {
    const int64_t after = op_take();
    const Work work = work_of(taken), next = after < count ? work_of(after) : Work{};
    worker.run(work, after < count ? &next : nullptr);
    taken = after;
  }
  worker.done();
}

// Products over levels of 8 or 4 bits.
#if defined(TILE_LOAD)
template <typename Cache>
using LevelProducts = IntegerTiles<Cache>;
#elif defined(__AVX512VNNI__)
template <typename Cache>
using LevelProducts = IntegerProducts<Cache>;
#else
template <typename Cache>
using LevelProducts = FloatProducts<Float32Math, Cache>;
#endif

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void attention(const AttentionArgs& args, int, int num_threads) {
  switch (args.cache.type) {
    case kKvFloat32: return attend<FloatProducts<Float32Math, Float32Cache>>(args, num_threads);
    case kKvBfloat16:
#if defined(TILE_LOAD)
      if (args.plan->pairs) return attend<TileProducts>(args, num_threads);
#elif defined(__AVX512FP16__)
      if (args.plan->pairs) return attend<HalfValues>(args, num_threads);
#elif defined(__AVX512BF16__)
      if (args.plan->pairs) return attend<FloatProducts<Bfloat16Math, Bfloat16Cache>>(args, num_threads);
#endif
      return attend<FloatProducts<Float32Math, Bfloat16Cache>>(args, num_threads);
    case kKvInt8: return attend<LevelProducts<Int8Cache>>(args, num_threads);
    case kKvKivi4: return attend<LevelProducts<Kivi4Cache>>(args, num_threads);
    case kKvFloat8: return attend<FloatProducts<Float32Math, Float8Cache>>(args, num_threads);
  }
}

MILLRACE_OP(attention, AttentionArgs)
