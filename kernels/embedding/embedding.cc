#include "embedding/embedding.h"

#include "native/simd.h"

using namespace millrace;

namespace {

template <typename Element, typename Widen>
void look_up(const EmbeddingArgs& args, const Range& rows, const Widen& widen) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t id = args.step->token_ids[row], at = args.num_rows && id >= args.num_rows ? 0 : id;
    const Element* from = static_cast<const Element*>(args.table) + at * args.width;
    float* out = args.out + row * args.width;
    for (int64_t i = 0; i < args.width; ++i) out[i] = widen(from[i]) * args.scale;
    if (!args.positions) continue;
    const float* more = args.positions + args.step->positions[row] * args.width;
    for (int64_t i = 0; i < args.width; ++i) out[i] += more[i];
  }
}

}  // namespace

extern "C" void embedding(const EmbeddingArgs& args, int thread, int num_threads) {
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  switch (args.type) {
    case 1: return look_up<uint16_t>(args, rows, [](uint16_t bits) { return from_bfloat16(bits); });
    case 2: return look_up<uint16_t>(args, rows, [](uint16_t bits) { return from_float16(bits); });
    default: return look_up<float>(args, rows, [](float value) { return value; });
  }
}

MILLRACE_OP(embedding, EmbeddingArgs)
