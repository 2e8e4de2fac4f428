#include "native/streaming.h"

#include <algorithm>

#include "native/simd.h"

using namespace millrace;

namespace {
constexpr int64_t kPiece = int64_t{1} << 20;
constexpr int64_t kAhead = 4096;
}  // namespace

extern "C" void stream(const StreamArgs& args, int, int) {
  const int64_t pieces = (args.bytes + kPiece - 1) / kPiece;
  uint64_t sums[8] = {};
  for (int64_t piece = op_take(); piece < pieces; piece = op_take()) {
    const int64_t end = std::min((piece + 1) * kPiece, args.bytes) / 64 * 64;
    for (int64_t at = piece * kPiece; at < end; at += 64) {
      const char* line = static_cast<const char*>(args.data) + at;
      __builtin_prefetch(line + kAhead, 0, kFirstCache);
      for (int word = 0; word < 8; ++word) sums[word] += reinterpret_cast<const uint64_t*>(line)[word];
    }
  }
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  __atomic_fetch_add(const_cast<int64_t*>(&args.sum), static_cast<int64_t>(total), __ATOMIC_RELAXED);
}

MILLRACE_OP(stream, StreamArgs)
