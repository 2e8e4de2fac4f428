#include "native/decode.h"

#include <algorithm>

#include "sampling/noise.h"

using namespace millrace;

extern "C" void decode_inputs(const DecodeArgs& args, int thread, int) {
  if (thread != 0) return;
  for (int64_t i = 0; i < args.num_sequences; ++i) {
    const int64_t row = args.rows[i], position = ++args.positions[i], output = ++args.outputs[i];
    ++args.context_lens[i];
    args.token_ids[i] = args.tokens[row * args.token_columns + position];
    if (position % args.block_size) {
      ++args.slots[i];
      if (args.window_slots) ++args.window_slots[i];
    } else {
      const int64_t block = args.blocks[row * args.block_columns + position / args.block_size];
      int64_t* const table = args.block_tables + i * args.columns;
      // Blocks that it does not look at have no column, so its history says which one is next.
      int64_t column = (args.context_lens[i] - 1) / args.block_size;
      if (args.sinks && args.sinks[i] >= 0) {
        // Those behind the one that it leaves move up.
        std::copy(table + args.sinks[i] + 1, table + column, table + args.sinks[i]);
        args.context_lens[i] -= args.block_size;
        args.recent_rows[i] ^= 1;
        --column;
      }
      table[column] = block;
      args.slots[i] = block * args.block_size;
      if (args.window_slots) {
        const int64_t kept = args.window_blocks[block];
        args.window_tables[i * args.columns + column] = kept;
        args.window_slots[i] = kept * args.block_size;
      }
    }
    if (args.draws) args.draws[i].key = static_cast<int64_t>(mixed(args.streams[i], output));
  }
}

extern "C" void decode_tokens(const DecodeArgs& args, int thread, int) {
  if (thread != 0) return;
  *args.appended = 0;
  for (int64_t i = 0; i < args.num_sequences; ++i) {
    if (!args.finite[i] || !args.allowed[i]) return;
  }
  for (int64_t i = 0; i < args.num_sequences; ++i) {
    const int64_t row = args.rows[i];
    args.tokens[row * args.token_columns + args.num_tokens[row]++] = args.drawn[i];
  }
  *args.appended = 1;
}

MILLRACE_OP(decode_inputs, DecodeArgs)
MILLRACE_OP(decode_tokens, DecodeArgs)
