// The memory that a unit of few rows reads, in the order of its addresses, prefetched ahead of its use.
//
// Such a unit takes several neighbouring heads, as their pieces of a block are neighbours in memory, and goes through
// it block by block. A core holds too few misses of its own to keep the memory busy, but its prefetcher adds some
// where addresses ascend: longer runs, in this order, come at the rate of plain reading.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "native/processor.h"
#include "native/simd.h"

namespace millrace {

// Positions whose keys or values are computed at once; blocks hold whole chunks.
constexpr int64_t kChunk = 16;
// Runs of memory that are worth taking heads together for.
constexpr int64_t kRunBytes = 16 << 10;
// Distance between the bytes that are prefetched and those in use.
constexpr int64_t kLeadBytes = 32 << 10;

inline int64_t lead_of(int64_t row_bytes) {
  return std::min<int64_t>(32, std::max<int64_t>(8, kLeadBytes / (kChunk * row_bytes)));
}

// Positions [begin, end) of a part, of neighbouring heads.
struct Span {
  const int64_t* blocks;  // of the part
  int64_t begin, end;     // begin is that of a chunk
  int64_t head, num_heads;
};

inline const char* row_of(const KvCache& cache, const void* base, int64_t bytes, const Span& span, int64_t head,
                          int64_t at) {
  // The block size is a power of two.
  const int shift = __builtin_ctzll(static_cast<unsigned long long>(cache.block_size));
  const int64_t block = span.blocks[at >> shift];
  const int64_t row = ((block * cache.num_heads + span.head + head) << shift) + (at & (cache.block_size - 1));
  return static_cast<const char*>(base) + row * bytes;
}

// Says what memory to ask for beside which chunk, in the order of memory. The inner loops get an address a chunk and
// ask for as much as they use: anything less even, or a branch among them, costs more than it brings.
class Stream {
 public:
  // A thread's lists of chunks, keys then values: of the present span and of the next.
  using Lists = std::vector<const char*>[2];

  Stream(const KvCache& cache, int64_t key_bytes, int64_t value_bytes, Lists& lists)
      : cache_(cache), key_bytes_(key_bytes), value_bytes_(value_bytes), lead_(lead_of(key_bytes)), lists_(lists) {}

  // The span that is computed now; it was announced by `then`, or is asked for from here on.
  void now(const Span& span) {
    const bool announced = has_next_;
    has_next_ = false;
    at_ = static_cast<size_t>(lead_);
    if (announced) {
      turn_ = !turn_;
      return;
    }
    list(span, lists_[turn_]);
    const auto& chunks = lists_[turn_];
    for (size_t i = 0; i < chunks.size() && i < static_cast<size_t>(lead_); ++i) {
      for (int64_t byte = 0; byte < kChunk * key_bytes_; byte += 64) call_far(chunks[i] + byte);
    }
  }

  // The span that follows.
  void then(const Span& span) {
    list(span, lists_[!turn_]);
    has_next_ = true;
  }

  // Address to prefetch beside the next chunk; `instead` where nothing follows.
  const char* ahead(const char* instead) {
    const auto& here = lists_[turn_];
    const auto& there = lists_[!turn_];
    const size_t at = at_++;
    if (at < here.size()) return here[at];
    return has_next_ && at - here.size() < there.size() ? there[at - here.size()] : instead;
  }

 private:
  void list(const Span& span, std::vector<const char*>& chunks) const {
    chunks.clear();
    list(span, cache_.keys, key_bytes_, chunks);
    list(span, cache_.values, value_bytes_, chunks);
  }

  void list(const Span& span, const void* base, int64_t bytes, std::vector<const char*>& chunks) const {
    for (int64_t at = span.begin; at < span.end;) {
      const int64_t end = std::min(span.end, (at | (cache_.block_size - 1)) + 1);
      const char* row = row_of(cache_, base, bytes, span, 0, at);
      for (int64_t head = 0; head < span.num_heads; ++head, row += cache_.block_size * bytes) {
        for (int64_t place = at; place < end; place += kChunk) chunks.push_back(row + (place - at) * bytes);
      }
      at = end;
    }
  }

  const KvCache& cache_;
  const int64_t key_bytes_, value_bytes_;
  const int64_t lead_;  // chunks
  Lists& lists_;
  bool turn_ = false, has_next_ = false;
  size_t at_ = 0;
};

// Rows at equal distances, where functions take anything that an index turns into a row.
struct Strided {
  const char* base;
  int64_t stride;
  const char* operator[](int64_t i) const { return base + i * stride; }
};

}  // namespace millrace
