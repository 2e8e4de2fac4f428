#include "ranks/ranks.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "native/processor.h"

using namespace millrace;

namespace {

// A rank that waits for another one spins so long before it sleeps, in microseconds: ranks are through with the parts of a
// product at about the same time where each has cores of its own, and where it has none the other one needs this core.
constexpr uint64_t kSpinUs = 60;
// Between two steps: the first rank draws and plans meanwhile.
constexpr uint64_t kIdleSpinUs = 160;
// A sleep is at most so long, in milliseconds: then it is looked whether all is over.
constexpr int64_t kSleepMs = 20;
constexpr int64_t kForward = 0;
// Numbers of a step's micro-batches are below this.
constexpr uint32_t kMicroBatches = 128;
// Floats that are summed at a time, in the first cache.
constexpr int64_t kPiece = 1024;

uint32_t* word_at(uint32_t* words, int64_t index) { return words + index * kWordStride; }
uint32_t look(uint32_t* words, int64_t index) { return __atomic_load_n(word_at(words, index), __ATOMIC_ACQUIRE); }
bool is_over(uint32_t* words) { return look(words, kOverWord) != 0; }

// Not private futexes: the words are in memory of several processes.
void wake_sleepers(uint32_t* words, int64_t index) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (look(words, kSleepersWord))
    syscall(SYS_futex, word_at(words, index), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void put(uint32_t* words, int64_t index, uint32_t value) {
  __atomic_store_n(word_at(words, index), value, __ATOMIC_SEQ_CST);
  wake_sleepers(words, index);
}

// Until the word has come to `wanted`, or beyond; false where all is over, or the time, at which is looked after each nap.
bool wait_for(uint32_t* words, int64_t index, uint32_t wanted, uint64_t spin_us, int64_t nap_ms, int64_t limit_ms) {
  const auto reached = [&] { return static_cast<int32_t>(look(words, index) - wanted) >= 0; };
  const uint64_t start = ticks(), most = ticks_of(spin_us);
  do {
    if (reached()) return true;
    relax();
  } while (ticks() - start < most);
  for (int64_t slept_ms = 0; !is_over(words) && slept_ms < limit_ms; slept_ms += nap_ms) {
    const timespec nap{nap_ms / 1000, nap_ms % 1000 * 1000000};
    __atomic_add_fetch(word_at(words, kSleepersWord), 1, __ATOMIC_SEQ_CST);
    const uint32_t seen = __atomic_load_n(word_at(words, index), __ATOMIC_SEQ_CST);
    // Whoever changes the word after this look finds a sleeper, and the system one that has seen another value.
    if (static_cast<int32_t>(seen - wanted) < 0)
      syscall(SYS_futex, word_at(words, index), FUTEX_WAIT, seen, &nap, nullptr, 0);
    __atomic_sub_fetch(word_at(words, kSleepersWord), 1, __ATOMIC_SEQ_CST);
    if (reached()) return true;
  }
  return false;
}

// This rank has come to the round; each thread of the op says so, since all of what it did before is done.
uint32_t enter(uint32_t* words, const int64_t* round, int64_t rank) {
  const uint32_t number = static_cast<uint32_t>(round[0] + 1);
  if (look(words, kFirstRankWord + rank) != number) put(words, kFirstRankWord + rank, number);
  return number;
}

// Until each of so many words has come to the number, or beyond; false where all is over.
bool all_reach(uint32_t* words, int64_t first, int64_t count, uint32_t number) {
  for (int64_t index = first; index < first + count; ++index)
    if (!wait_for(words, index, number, kSpinUs, kSleepMs, INT64_MAX - kSleepMs)) return false;
  return true;
}

// The ranks behind the first are through with the step that was handed over last: it stays that until they are.
bool others_are_done(uint32_t* words, int64_t num_ranks) {
  return all_reach(words, kFirstDoneWord + 1, num_ranks - 1, look(words, kStepWord));
}

void say_done(uint32_t* words, int64_t rank) { put(words, kFirstDoneWord + rank, look(words, kStepWord)); }

// What a stage says when it has sent that micro-batch of the present step.
uint32_t sent_number(const RankRowsArgs& args) {
  return look(args.words, kStepWord) * kMicroBatches + static_cast<uint32_t>(args.index) + 1;
}

// The floats of a micro-batch that this thread copies: where they begin among its own, and how many; and where the micro-batch
// begins among those of the step.
struct Piece {
  int64_t first, begin, count;
};
Piece piece_of(const RankRowsArgs& args, int thread, int num_threads) {
  const Range rows = share(args.step->num_tokens, static_cast<int>(args.index), static_cast<int>(args.count));
  const Range own = share((rows.end - rows.begin) * args.width, thread, num_threads);
  return {rows.begin * args.width, own.begin, own.end - own.begin};
}

// The last thread ends the round; nobody looks at its number after that, in this op.
void leave(int64_t* round, int num_threads) {
  if (__atomic_add_fetch(&round[1], 1, __ATOMIC_ACQ_REL) != num_threads) return;
  round[1] = 0;
  ++round[0];
}

int64_t* copy(const int64_t* from, int64_t count, int64_t room, int64_t* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(int64_t));
  return to + room;
}

// The rows of a micro-batch that have adapters, in the order of all, and their blocks.
void pick_adapters(const RankMicroBatchArgs& args, Range rows) {
  const Step& step = *args.step;
  int64_t num_rows = 0, num_blocks = 0;
  for (int64_t index = 0; index < step.num_adapter_blocks; ++index) {
    const int64_t* block = step.adapter_blocks + 3 * index;
    const int64_t first = num_rows;
    for (int64_t place = block[0]; place < block[0] + block[1]; ++place) {
      const int64_t row = step.adapter_rows[place];
      if (rows.begin <= row && row < rows.end) args.adapter_rows[num_rows++] = row - rows.begin;
    }
    if (num_rows == first) continue;
    int64_t* own = args.adapter_blocks + 3 * num_blocks++;
    own[0] = first;
    own[1] = num_rows - first;
    own[2] = block[2];
  }
  args.micro_batch->num_adapter_blocks = num_blocks;
  args.micro_batch->adapter_rows = args.adapter_rows;
  args.micro_batch->adapter_blocks = args.adapter_blocks;
}

// Where the states of a micro-batch's sequences lie, of which `first` is the first one, and the snapshots that its rows leave.
void pick_states(const RankMicroBatchArgs& args, Range rows, int64_t first) {
  const Step& step = *args.step;
  Step& own = *args.micro_batch;
  own.state_slots = step.state_slots + first;
  int64_t begin = step.snapshot_starts[first], count = 0;
  const int64_t end = step.snapshot_starts[first + own.num_sequences];
  // Those of its first sequence may belong to rows before it.
  while (begin < end && step.snapshot_rows[begin] < rows.begin) ++begin;
  for (int64_t sequence = 0; sequence < own.num_sequences; ++sequence) {
    args.snapshot_starts[sequence] = count;
    const int64_t behind = step.snapshot_starts[first + sequence + 1];
    for (; begin + count < behind && step.snapshot_rows[begin + count] < rows.end; ++count)
      args.snapshot_rows[count] = step.snapshot_rows[begin + count] - rows.begin;
  }
  args.snapshot_starts[own.num_sequences] = count;
  own.snapshot_starts = args.snapshot_starts;
  own.snapshot_rows = args.snapshot_rows;
  own.snapshot_slots = step.snapshot_slots + begin;
}

// What the others are told of states; -1 where there are none, else the number of snapshots.
int64_t hand_over_states(const RankStepArgs& args) {
  const Step& step = *args.step;
  if (args.kind != kForward || !step.state_slots) return -1;
  const int64_t count = step.snapshot_starts[step.num_sequences];
  int64_t* to = copy(step.state_slots, step.num_sequences, args.most_sequences, args.states);
  to = copy(step.snapshot_starts, step.num_sequences + 1, args.most_sequences + 1, to);
  to = copy(step.snapshot_rows, count, 2 * args.most_tokens, to);
  copy(step.snapshot_slots, count, 0, to);
  return count;
}

}  // namespace

extern "C" void rank_step(const RankStepArgs& args, int thread, int) {
  if (thread != 0) return;
  const Step& step = *args.step;
  others_are_done(args.words, args.num_ranks);
  const int64_t numbers[] = {args.kind,       step.num_tokens,     step.num_sequences,
                             step.max_blocks, step.num_logit_rows, *args.messages,
                             step.num_adapter_blocks, hand_over_states(args)};
  std::memcpy(args.numbers, numbers, sizeof(numbers));
  if (args.kind == kForward) {
    int64_t* to = args.arrays;
    for (const int64_t* each : {step.token_ids, step.positions, step.slots})
      to = copy(each, step.num_tokens, args.most_tokens, to);
    to = copy(step.query_starts, step.num_sequences + 1, args.most_sequences + 1, to);
    to = copy(step.context_lens, step.num_sequences, args.most_sequences, to);
    to = step.recent_rows ? copy(step.recent_rows, step.num_sequences, args.most_sequences, to) : to + args.most_sequences;
    copy(step.block_tables, step.num_sequences * step.max_blocks, 0, to);
    if (step.num_adapter_blocks) {
      const int64_t* last = step.adapter_blocks + 3 * (step.num_adapter_blocks - 1);
      copy(step.adapter_rows, last[0] + last[1], 0, args.adapter_rows);
      copy(step.adapter_blocks, 3 * step.num_adapter_blocks, 0, args.adapter_blocks);
    }
  } else {
    copy(step.logit_rows, step.num_logit_rows, 0, args.rows);
  }
  put(args.words, kStepWord, look(args.words, kStepWord) + 1);
}

extern "C" void rank_done(const RankDoneArgs& args, int thread, int) {
  if (thread == 0) say_done(args.words, args.rank);
}

extern "C" void rank_micro_batch(const RankMicroBatchArgs& args, int thread, int) {
  if (thread != 0) return;
  const Step& step = *args.step;
  const Range rows = share(step.num_tokens, static_cast<int>(args.index), static_cast<int>(args.count));
  const int64_t* starts = step.query_starts;
  const int64_t first = std::upper_bound(starts + 1, starts + step.num_sequences + 1, rows.begin) - (starts + 1);
  int64_t count = 0;
  args.query_starts[0] = 0;
  for (int64_t sequence = first; sequence < step.num_sequences && starts[sequence] < rows.end; ++sequence, ++count) {
    const int64_t end = std::min(starts[sequence + 1], rows.end);
    args.context_lens[count] = step.context_lens[sequence] - (starts[sequence + 1] - end);
    args.query_starts[count + 1] = end - rows.begin;
  }
  Step& own = *args.micro_batch;
  own.num_tokens = rows.end - rows.begin;
  own.num_sequences = count;
  own.max_blocks = step.max_blocks;
  own.token_ids = step.token_ids + rows.begin;
  own.positions = step.positions + rows.begin;
  own.slots = step.slots + rows.begin;
  own.query_starts = args.query_starts;
  own.context_lens = args.context_lens;
  own.block_tables = step.block_tables + first * step.max_blocks;
  own.recent_rows = step.recent_rows ? step.recent_rows + first : nullptr;
  pick_adapters(args, rows);
  if (step.state_slots) pick_states(args, rows, first);
}

extern "C" void rank_send(const RankRowsArgs& args, int thread, int num_threads) {
  const Piece piece = piece_of(args, thread, num_threads);
  std::copy_n(args.rows + piece.begin, piece.count, args.room + piece.first + piece.begin);
  if (__atomic_add_fetch(args.num_threads_through, 1, __ATOMIC_ACQ_REL) != num_threads) return;
  *args.num_threads_through = 0;
  put(args.words, kFirstSentWord + args.stage, sent_number(args));
}

extern "C" void rank_receive(const RankRowsArgs& args, int thread, int num_threads) {
  if (!all_reach(args.words, kFirstSentWord + args.stage, 1, sent_number(args)) || !args.rows) return;
  const Piece piece = piece_of(args, thread, num_threads);
  std::copy_n(args.room + piece.first + piece.begin, piece.count, args.rows + piece.begin);
}

extern "C" void rank_sum(const RankSumArgs& args, int thread, int num_threads) {
  const uint32_t number = enter(args.words, args.round, args.rank);
  if (all_reach(args.words, kFirstRankWord + args.first_rank, args.num_ranks, number)) {
    const Range range = share(args.step->num_tokens * args.width, thread, num_threads);
    float sums[kPiece];
    for (int64_t begin = range.begin; begin < range.end; begin += kPiece) {
      const int64_t count = std::min(kPiece, range.end - begin);
      std::copy_n(args.parts + begin, count, sums);
      for (int64_t rank = 1; rank < args.num_parts; ++rank) {
        const float* part = args.parts + rank * args.part_stride + begin;
        for (int64_t i = 0; i < count; ++i) sums[i] += part[i];
      }
      float* out = args.out + begin;
      if (args.accumulate)
        for (int64_t i = 0; i < count; ++i) out[i] += sums[i];
      else
        std::copy_n(sums, count, out);
    }
  }
  leave(args.round, num_threads);
}

extern "C" void rank_logits(const RankLogitsArgs& args, int thread, int num_threads) {
  if (!args.out) {
    if (thread == 0) say_done(args.words, args.rank);
    return;
  }
  if (others_are_done(args.words, args.num_ranks)) {
    const Range rows = share(args.step->num_logit_rows, thread, num_threads);
    for (int64_t rank = 1; rank < args.num_ranks; ++rank) {
      const Range columns = share(args.width, static_cast<int>(rank), static_cast<int>(args.num_ranks));
      const int64_t count = columns.end - columns.begin;
      const float* part = args.parts + (rank - 1) * args.part_stride;
      for (int64_t row = rows.begin; row < rows.end; ++row)
        std::copy_n(part + row * count, count, args.out + row * args.width + columns.begin);
    }
  }
}

MILLRACE_OP(rank_step, RankStepArgs)
MILLRACE_OP(rank_done, RankDoneArgs)
MILLRACE_OP(rank_micro_batch, RankMicroBatchArgs)
MILLRACE_OP(rank_send, RankRowsArgs)
MILLRACE_OP(rank_receive, RankRowsArgs)
MILLRACE_OP(rank_sum, RankSumArgs)
MILLRACE_OP(rank_logits, RankLogitsArgs)

extern "C" {

// For a rank behind the first: 1 once a step after the one of that number was handed over, 0 when all is over or so many
// milliseconds are.
int64_t millrace_rank_wait(uint32_t* words, int64_t step, int64_t limit_ms) {
  return wait_for(words, kStepWord, static_cast<uint32_t>(step + 1), kIdleSpinUs, limit_ms, limit_ms);
}

// Whoever sleeps until a step is handed over looks around: there is something to read beside the memory.
void millrace_rank_wake(uint32_t* words) { wake_sleepers(words, kStepWord); }

// All is over: whoever waits goes on at once, and finds that out.
void millrace_rank_end(uint32_t* words) {
  put(words, kOverWord, 1);
  for (int64_t index = 0; index < kNumWords; ++index) wake_sleepers(words, index);
}
}
