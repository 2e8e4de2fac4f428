// Vectors of float32 lanes for the level that a file is compiled for. Each function is a fixed sequence of
// operations, so that a value does not depend on where it is inlined.
//
// A level's header has `Vec` of kLanes floats, `Ints` of as many int32, `Mask` and their arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// For a loop over values that must become registers, with a constant number of iterations.
#define UNROLLED _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
#include "native/simd_avx512.h"
#elif defined(__AVX2__)
#include "native/simd_avx2.h"
#else
#include "native/simd_neon.h"
#endif

namespace millrace {

// The cache that memory is asked to come to, as __builtin_prefetch numbers them.
constexpr int kFirstCache = 3, kSecondCache = 2;

// Calls body(n as a constant) for an n from 1 to kMost.
template <int kMost, typename Body>
inline void with_constant(int64_t n, const Body& body) {
  if (n == kMost)
    body(std::integral_constant<int, kMost>());
  else if constexpr (kMost > 1)
    with_constant<kMost - 1>(n, body);
}

// What `load_float8` has to be multiplied by.
constexpr float kFloat8Unit = 256.0f;

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

constexpr float kLog2OfE = 1.44269504088896341f;

// e^x for `exp`: `bounded` is x within what a float's exponent takes, n the whole number nearest to bounded / ln 2.
inline Vec exp_of_parts(Vec x, Vec bounded, Vec n) {
  Vec r = fnma(n, set1(0.693359375f), bounded);
  r = fnma(n, set1(-2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, set1(1.0f));
  return select(less(x, set1(-87.0f)), zero(), scale_by_power(p, n));
}

// e^x within 2 units in the last place; 0 below e^-87, NaN for NaN. Results that are no normal numbers would take
// processors hundreds of cycles a vector, and masked scores are many.
inline Vec exp(Vec x) {
  // The bounds go first, as min and max return their second operand where one is NaN.
  const Vec bounded = max(set1(-87.0f), min(set1(89.0f), x));
  return exp_of_parts(x, bounded, round(mul(bounded, set1(kLog2OfE))));
}

inline Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Within 3 units in the last place.
inline Vec tanh(Vec x) {
  const Vec size = abs(x);
  const Vec square = mul(x, x);
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const Vec near = fma(mul(p, square), x, x);
  const Vec far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
  return select(less(size, set1(0.625f)), near, sign_of(x, far));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
inline Vec gelu_tanh(Vec x) {
  const Vec cube = mul(mul(x, x), x);
  const Vec inner = mul(set1(0.79788456080286536f), add(x, mul(set1(0.044715f), cube)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

// 1 - erf(|x|) within 1e-6 of itself (Numerical Recipes, third edition, section 6.2.2).
inline Vec erfc_of_size(Vec x) {
  const Vec size = abs(x);
  const Vec t = div(set1(1.0f), fma(set1(0.5f), size, set1(1.0f)));
  Vec p = set1(0.17087277f);
  p = fma(p, t, set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  return mul(t, exp(fnma(size, size, p)));
}

}  // namespace millrace
