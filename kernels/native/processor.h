// Instructions of processors beside arithmetic, each architecture in its own words.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace millrace {

#if defined(__x86_64__)

// Rounding to nearest, no trap, denormals kept.
constexpr uint64_t kPlainFloats = 0x1F80;
inline uint64_t float_control() { return _mm_getcsr(); }
inline void set_float_control(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
// Between two looks at what another thread changes.
inline void relax() { _mm_pause(); }
// Between a sequentially consistent store and a load of something else, which that store orders already.
inline void store_before_load() {}
inline uint64_t ticks() { return __rdtsc(); }
// About: such counters run at 2 to 3 GHz.
inline uint64_t ticks_of(uint64_t microseconds) { return microseconds * 2500; }

// Ask for a line in the first or the second cache. As assembly, since GCC 12 takes a function that does nothing else for
// one without effects, and leaves its calls out.
[[gnu::always_inline]] inline void call_near(const char* line) { asm volatile("prefetcht0 %0" : : "m"(*line)); }
[[gnu::always_inline]] inline void call_far(const char* line) { asm volatile("prefetcht1 %0" : : "m"(*line)); }

#else

constexpr uint64_t kPlainFloats = 0;
inline uint64_t float_control() {
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
inline void set_float_control(uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
inline void relax() { asm volatile("isb" : : : "memory"); }
// The architecture orders such a store and such a load by themselves; QEMU 7 does not.
inline void store_before_load() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline uint64_t ticks() {
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
}
inline uint64_t ticks_of(uint64_t microseconds) {
  uint64_t hertz;
  asm("mrs %0, cntfrq_el0" : "=r"(hertz));
  return microseconds * hertz / 1000000;
}

[[gnu::always_inline]] inline void call_near(const char* line) { asm volatile("prfm pldl1keep, [%0]" : : "r"(line)); }
[[gnu::always_inline]] inline void call_far(const char* line) { asm volatile("prfm pldl2keep, [%0]" : : "r"(line)); }

#endif

}  // namespace millrace
