// Memory for packed weights: large mappings on huge pages, given out piece by piece.
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// Untouched pages of a mapping cost nothing, so small models may map as much as this, too.
constexpr int64_t kMappingBytes = int64_t{256} << 20;
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

class Arena {
 public:
  ~Arena() {
    for (const Mapping& mapping : mappings_) munmap(mapping.base, mapping.bytes);
  }

  void* take(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes = round_up(bytes, kAlignment);
    if (mappings_.empty() || used_ + bytes > limit_) {
      if (!map(bytes)) return nullptr;
    }
    char* piece = aligned_ + used_;
    used_ += bytes;
    total_ += bytes;
    return piece;
  }

  int64_t total() const { return total_; }

 private:
  struct Mapping {
    void* base;
    size_t bytes;
  };

  bool map(int64_t needed) {
    const int64_t bytes = round_up(needed > kMappingBytes ? needed : kMappingBytes, kHugePage) + kHugePage;
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return false;
    // Advice only: a kernel without transparent huge pages serves small ones.
    madvise(base, bytes, MADV_HUGEPAGE);
    mappings_.push_back({base, static_cast<size_t>(bytes)});
    // Bytes just before a piece can be read, too.
    aligned_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(base) + kAlignment, kHugePage));
    used_ = 0;
    limit_ = bytes - kHugePage;
    return true;
  }

  std::mutex mutex_;
  std::vector<Mapping> mappings_;
  char* aligned_ = nullptr;
  int64_t used_ = 0, limit_ = 0, total_ = 0;
};

}  // namespace

extern "C" {
void* millrace_arena_create() { return new Arena(); }
// Unmaps everything that the arena gave out.
void millrace_arena_destroy(void* arena) { delete static_cast<Arena*>(arena); }
// Zeroed memory on a cache line's border; null when the system has none left.
void* millrace_arena_take(void* arena, int64_t bytes) { return static_cast<Arena*>(arena)->take(bytes); }
// Bytes given out.
int64_t millrace_arena_total(void* arena) { return static_cast<Arena*>(arena)->total(); }
}
