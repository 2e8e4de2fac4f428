#include "attention/attention_plan.h"

#include <algorithm>
#include <cstring>

namespace millrace {
namespace {

// Intel's processors issue a dot product of bfloat16 pairs every other cycle, which is half as many products as two
// float32 multiply-adds a cycle; AMD's issue two a cycle. Multiply-adds of float16 are issued as those of float32; tiles
// multiply sixteen times as much.
bool pairs_pay() {
#if defined(__AVX512FP16__) || defined(__AMX_TILE__) || defined(MILLRACE_EMULATE_TILES)
  return true;
#elif defined(__AVX512BF16__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Planner {
 public:
  Planner(const Step& step, AttentionPlan& plan, int64_t ahead) : step_(step), plan_(plan), ahead_(ahead) {}

  void run() {
    plan_.tiles.clear();
    plan_.members.clear();
    plan_.units.clear();
    std::vector<int64_t> split;
    for (int64_t sequence = 0; sequence < step_.num_sequences; ++sequence) cut(sequence, split);
    // Whole tiles come first, those with the longest history at the very first: they take longest.
    std::stable_sort(plan_.units.begin(), plan_.units.end(), [this](const Unit& a, const Unit& b) {
      return tile_of(a).num_parts > tile_of(b).num_parts;
    });
    allocate(split);
    const auto whole = static_cast<int64_t>(plan_.units.size());
    if (plan_.share) {
      share_from(split, 0);
    } else {
      for (int64_t tile : split) add_alone(tile, 0);
    }
    const auto begin = plan_.units.begin() + whole;
    const auto few = std::stable_partition(begin, plan_.units.end(), [&](const Unit& unit) { return num_rows(unit) > kFewRows; });
    plan_.num_many = few - plan_.units.begin();
    // Long units come first: what is left at the end is short.
    std::stable_partition(few, plan_.units.end(), [&](const Unit& unit) { return covers(plan_.members[unit.first_member], unit.part); });
  }

 private:
  const Tile& tile_of(const Unit& unit) const { return plan_.tiles[plan_.members[unit.first_member]]; }

  int64_t num_rows(const Unit& unit) const {
    int64_t tokens = 0;
    for (int64_t i = 0; i < unit.num_members; ++i) tokens += plan_.tiles[plan_.members[unit.first_member + i]].num_tokens;
    return tokens * plan_.group();
  }

  void cut(int64_t sequence, std::vector<int64_t>& split) {
    const int64_t begin = step_.query_starts[sequence], end = step_.query_starts[sequence + 1];
    const int64_t start = step_.context_lens[sequence] - (end - begin), group = plan_.group();
    const bool votes = step_.votes && step_.votes[sequence].sums;
    // Votes are counted where a tile's rows see all of their history.
    const int64_t few = votes ? 0 : std::max<int64_t>(1, kSplitRows / group);
    const bool many = (end - begin) * group / kMostRows * plan_.num_kv_heads >= kManyUnits;
    const int64_t rows = votes ? std::min(kMaxRows, kKeptWeights / step_.context_lens[sequence]) : many ? kMostRows : kMaxRows;
    const int64_t most = end - begin <= few ? few : std::max<int64_t>(1, rows / group);
    for (int64_t token = begin; token < end; token += most) {
      Tile tile = {};
      tile.sequence = sequence;
      tile.token = token;
      tile.num_tokens = std::min(most, end - token);
      tile.position = start + token - begin;
      tile.length = step_.context_lens[sequence];
      tile.num_parts = divide_up(std::min(tile.length, tile.position + tile.num_tokens + ahead_), kPartTokens);
      const int64_t index = static_cast<int64_t>(plan_.tiles.size());
      plan_.tiles.push_back(tile);
      if (end - begin <= few) {
        split.push_back(index);
      } else {
        add_unit(&index, 1, kWholeTile);
      }
    }
  }

  void add_unit(const int64_t* tiles, int64_t count, int64_t part) {
    plan_.units.push_back({static_cast<int64_t>(plan_.members.size()), count, part});
    plan_.members.insert(plan_.members.end(), tiles, tiles + count);
  }

  void add_alone(int64_t tile, int64_t from) {
    for (int64_t part = from; part < plan_.tiles[tile].num_parts; ++part) add_unit(&tile, 1, part);
  }

  // Results of split tiles, and counters of the parts that are done.
  void allocate(const std::vector<int64_t>& split) {
    int64_t rows = 0, counters = 0;
    for (int64_t index : split) {
      Tile& tile = plan_.tiles[index];
      tile.partial_row = rows;
      tile.done_counter = counters;
      rows += plan_.num_kv_heads * tile.num_parts * tile.num_tokens * plan_.group();
      counters += plan_.num_kv_heads;
    }
    const size_t floats = static_cast<size_t>(rows * plan_.partial_stride);
    if (plan_.partials.size() < floats) plan_.partials.resize(floats + floats / 4);
    if (plan_.num_done < counters) {
      plan_.num_done = 2 * counters;
      plan_.done.reset(new std::atomic<int32_t>[plan_.num_done]);
    }
    for (int64_t i = 0; i < counters; ++i) plan_.done[i].store(0, std::memory_order_relaxed);
  }

  const int64_t* blocks_of(int64_t tile, int64_t part) const {
    const int64_t per_part = kPartTokens / plan_.block_size;
    return step_.block_tables + plan_.tiles[tile].sequence * step_.max_blocks + part * per_part;
  }

  // Whether all of the tile's rows look at the whole part, as far as causality goes.
  bool covers(int64_t tile, int64_t part) const {
    return (part + 1) * kPartTokens <= plan_.tiles[tile].position + 1;
  }

  // Groups tiles by the blocks that hold a part; those who share one may share the next.
  void share_from(std::vector<int64_t> tiles, int64_t part) {
    const size_t bytes = sizeof(int64_t) * (kPartTokens / plan_.block_size);
    const auto compare = [&](int64_t a, int64_t b) {
      return std::memcmp(blocks_of(a, part), blocks_of(b, part), bytes);
    };
    const auto middle = std::stable_partition(tiles.begin(), tiles.end(),
                                              [&](int64_t tile) { return covers(tile, part); });
    std::for_each(middle, tiles.end(), [&](int64_t tile) { add_alone(tile, part); });
    std::stable_sort(tiles.begin(), middle, [&](int64_t a, int64_t b) { return compare(a, b) < 0; });
    for (auto begin = tiles.begin(); begin != middle;) {
      const auto end = std::find_if(begin + 1, middle, [&](int64_t tile) { return compare(*begin, tile); });
      if (end - begin == 1) {
        add_alone(*begin, part);
      } else {
        add_shared(&*begin, end - begin, part);
        share_from(std::vector<int64_t>(begin, end), part + 1);
      }
      begin = end;
    }
  }

  void add_shared(const int64_t* tiles, int64_t count, int64_t part) {
    for (int64_t begin = 0; begin < count;) {
      int64_t rows = 0, end = begin;
      while (end < count) {
        const int64_t more = plan_.tiles[tiles[end]].num_tokens * plan_.group();
        if (end > begin && rows + more > kMaxRows) break;
        rows += more;
        ++end;
      }
      add_unit(tiles + begin, end - begin, part);
      begin = end;
    }
  }

  const Step& step_;
  AttentionPlan& plan_;
  const int64_t ahead_;
};

}  // namespace
}  // namespace millrace

using namespace millrace;

// num_heads and num_kv_heads as in the model (latent attention: one kv head); value_dim is E of the op's output;
// block_size as in the cache. share: whether rows whose sequences share blocks are computed together.
extern "C" AttentionPlan* attention_plan_create(int64_t num_heads, int64_t num_kv_heads, int64_t value_dim,
                                                int64_t block_size, int64_t share) {
  AttentionPlan* plan = new AttentionPlan();
  plan->num_heads = num_heads;
  plan->num_kv_heads = num_kv_heads;
  plan->value_dim = value_dim;
  plan->block_size = block_size;
  plan->share = share;
  plan->pairs = pairs_pay();
  plan->partial_stride = kPartialValues + divide_up(value_dim, 16) * 16;
  return plan;
}

// Whether bfloat16 is multiplied in pairs (level avx512_fp16: values in float16); at first it is where the processor
// gains by it.
extern "C" void attention_plan_use_pairs(AttentionPlan* plan, int64_t pairs) { plan->pairs = pairs != 0; }

extern "C" void attention_plan_destroy(AttentionPlan* plan) { delete plan; }

extern "C" void attention_plan(const AttentionPlanArgs& args, int thread, int) {
  if (thread == 0) Planner(*args.step, *args.plan, args.ahead).run();
}

MILLRACE_OP(attention_plan, AttentionPlanArgs)
