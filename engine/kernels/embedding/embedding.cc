#include "embedding/embedding.h"

#include <immintrin.h>

#include <cstring>

using namespace millrace;

extern "C" void embedding(const EmbeddingArgs& args, int thread, int num_threads) {
  const Range rows = share(args.step->num_tokens, thread, num_threads);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t token = args.step->token_ids[row];
    float* out = args.out + row * args.width;
    if (args.type == 1) {
      const uint16_t* from = static_cast<const uint16_t*>(args.table) + token * args.width;
      for (int64_t i = 0; i < args.width; ++i) {
        const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        out[i] = value * args.scale;
      }
    } else if (args.type == 2) {
      const uint16_t* from = static_cast<const uint16_t*>(args.table) + token * args.width;
      for (int64_t i = 0; i < args.width; ++i) out[i] = _cvtsh_ss(from[i]) * args.scale;
    } else {
      const float* from = static_cast<const float*>(args.table) + token * args.width;
      for (int64_t i = 0; i < args.width; ++i) out[i] = from[i] * args.scale;
    }
  }
}

MILLRACE_OP(embedding, EmbeddingArgs)
