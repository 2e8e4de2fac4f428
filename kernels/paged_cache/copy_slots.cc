#include "paged_cache/copy_slots.h"

#include <cstring>

namespace millrace {
namespace {

int64_t bits_of(int64_t type) {
  switch (type) {
    case kKvFloat32: return 32;
    case kKvBfloat16: return 16;
    case kKvKivi4: return 4;
    default: return 8;
  }
}

// One head's row of `bytes` bytes; rows of a store lie one behind the other.
void copy_row(void* store, int64_t bytes, int64_t from, int64_t to) {
  char* base = static_cast<char*>(store);
  std::memcpy(base + to * bytes, base + from * bytes, bytes);
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void copy_slots(const CopySlotsArgs& args, int thread, int num_threads) {
  const Step& step = *args.step;
  const KvCache& cache = args.cache;
  const int64_t size = cache.block_size, bits = bits_of(cache.type);
  const bool by_channel = cache.type == kKvKivi4;
  const Range mine = share(step.num_slot_copies, thread, num_threads);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t source = step.slot_copies[2 * i], target = step.slot_copies[2 * i + 1];
    for (int64_t head = 0; head < cache.num_heads; ++head) {
      const int64_t from = (source / size * cache.num_heads + head) * size + source % size;
      const int64_t to = (target / size * cache.num_heads + head) * size + target % size;
      if (!by_channel) copy_row(cache.keys, cache.key_dim * bits / 8, from, to);
      if (cache.values) copy_row(cache.values, cache.value_dim * bits / 8, from, to);
      if (cache.scales) copy_row(cache.scales, (by_channel ? 1 : 2) * sizeof(float), from, to);
    }
  }
}

MILLRACE_OP(copy_slots, CopySlotsArgs)
