#include "greedy.h"

#include <cstring>

using namespace millrace;

namespace {

constexpr int64_t kLanes = 64;

// Lane by lane, so that the compiler makes vectors of it: the first index of each lane's largest value.
void scan(const float* row, int64_t width, int64_t* token, uint8_t* finite) {
  alignas(64) float best[kLanes];
  alignas(64) int32_t index[kLanes];
  alignas(64) uint32_t broken[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    best[lane] = -__builtin_inff();
    index[lane] = 0;
    broken[lane] = 0;
  }
  int64_t begin = 0;
  for (; begin + kLanes <= width; begin += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = row[begin + lane];
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      broken[lane] |= (bits & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
      index[lane] = value > best[lane] ? static_cast<int32_t>(begin + lane) : index[lane];
      best[lane] = value > best[lane] ? value : best[lane];
    }
  float largest = -__builtin_inff();
  int64_t found = 0;
  uint32_t any = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    any |= broken[lane];
    if (best[lane] > largest || (best[lane] == largest && index[lane] < found)) {
      largest = best[lane];
      found = index[lane];
    }
  }
  for (; begin < width; ++begin) {
    any |= __builtin_isfinite(row[begin]) ? 0u : 1u;
    if (row[begin] > largest) {
      largest = row[begin];
      found = begin;
    }
  }
  *token = found;
  *finite = any == 0;
}

}  // namespace

extern "C" void greedy(const GreedyArgs& args, int, int) {
  for (int64_t row = op_take(); row < args.step->num_logit_rows; row = op_take())
    scan(args.logits + row * args.width, args.width, args.tokens + row, args.finite + row);
}

MILLRACE_OP(greedy, GreedyArgs)
