// Codes of 2 to 6 bits for int8, taken apart by blocks of inputs while they are in the nearest cache.
//
// A panel goes by pieces of kCodedPiece inputs, eight fours of them for each output. A code's bits lie in planes: the
// lowest four bits (two, of codes of two or three bits) of all eight fours, then the bits above them. A plane of b bits
// is lines of [outputs of the panel][4] bytes, 8 / b fours to a line, the first four in the lowest bits. So a piece is as
// many lines as a code has bits.
//
// What a group's sums are multiplied by is a factor of its own, one byte, times a number for its span; likewise its
// minimum. That is how K-quants, IQ4_XS, MXFP4 and NVFP4 store them.
#pragma once

#include <utility>

#include "linear/gemm.h"
#include "linear/gemm_wide.h"

namespace millrace {

constexpr int64_t kCodedPiece = 32;
// Fewest inputs that share a factor.
constexpr int64_t kLeastGroup = 16;

// --- bytes side by side ---

#if defined(__AVX512F__)
using CodeBytes = __m512i;
inline CodeBytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void store_bytes(uint8_t* to, CodeBytes bytes) { _mm512_storeu_si512(to, bytes); }
inline CodeBytes both_of(CodeBytes a, CodeBytes b) { return _mm512_or_si512(a, b); }
// Bits `kMask` of each byte after it went up by kUp bits (down where negative).
template <int kUp, int kMask>
inline CodeBytes bits_of_bytes(CodeBytes bytes) {
  if constexpr (kUp > 0) bytes = _mm512_slli_epi16(bytes, kUp);
  if constexpr (kUp < 0) bytes = _mm512_srli_epi16(bytes, -kUp);
  return _mm512_and_si512(bytes, _mm512_set1_epi8(kMask));
}
inline CodeBytes spread_codebook(const uint8_t* book) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(book)));
}
inline CodeBytes look_up(CodeBytes book, CodeBytes codes) { return _mm512_shuffle_epi8(book, codes); }
#elif defined(__AVX2__)
using CodeBytes = __m256i;
inline CodeBytes load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_bytes(uint8_t* to, CodeBytes bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes); }
inline CodeBytes both_of(CodeBytes a, CodeBytes b) { return _mm256_or_si256(a, b); }
// Bits `kMask` of each byte after it went up by kUp bits (down where negative).
template <int kUp, int kMask>
inline CodeBytes bits_of_bytes(CodeBytes bytes) {
  if constexpr (kUp > 0) bytes = _mm256_slli_epi16(bytes, kUp);
  if constexpr (kUp < 0) bytes = _mm256_srli_epi16(bytes, -kUp);
  return _mm256_and_si256(bytes, _mm256_set1_epi8(kMask));
}
inline CodeBytes spread_codebook(const uint8_t* book) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(book)));
}
inline CodeBytes look_up(CodeBytes book, CodeBytes codes) { return _mm256_shuffle_epi8(book, codes); }
#else
using CodeBytes = uint8x16_t;
inline CodeBytes load_bytes(const uint8_t* from) { return vld1q_u8(from); }
inline void store_bytes(uint8_t* to, CodeBytes bytes) { vst1q_u8(to, bytes); }
inline CodeBytes both_of(CodeBytes a, CodeBytes b) { return vorrq_u8(a, b); }
// Bits `kMask` of each byte after it went up by kUp bits (down where negative).
template <int kUp, int kMask>
inline CodeBytes bits_of_bytes(CodeBytes bytes) {
  if constexpr (kUp > 0) bytes = vshlq_n_u8(bytes, kUp);
  if constexpr (kUp < 0) bytes = vshrq_n_u8(bytes, -kUp);
  return vandq_u8(bytes, vdupq_n_u8(kMask));
}
inline CodeBytes spread_codebook(const uint8_t* book) { return vld1q_u8(book); }
inline CodeBytes look_up(CodeBytes book, CodeBytes codes) { return vqtbl1q_u8(book, codes); }
#endif

// --- codes ---

// Plane of kBits bits at `from`: those of four kFour, in their places of a code from bit kPlace on.
template <int kBits, int kFour, int kPlace>
inline CodeBytes plane_bits(const uint8_t* from, int64_t line) {
  constexpr int kLot = 8 / kBits;
  return bits_of_bytes<kPlace - kFour % kLot * kBits, ((1 << kBits) - 1) << kPlace>(
      load_bytes(from + kFour / kLot * line));
}

template <int kBits, bool kBook, int... kFour>
inline void expand_piece(const uint8_t* panel, int64_t line, CodeBytes book, uint8_t* to,
                         std::integer_sequence<int, kFour...>) {
  constexpr int kBase = kBits >= 4 ? 4 : 2, kAbove = kBits - kBase;
  const auto one = [&](auto four, int64_t at) {
    CodeBytes code = plane_bits<kBase, decltype(four)::value, 0>(panel + at, line);
    if constexpr (kAbove > 0)
      code = both_of(code, plane_bits<kAbove, decltype(four)::value, kBase>(panel + kBase * line + at, line));
    if constexpr (kBook) code = look_up(book, code);
    store_bytes(to + four * line + at, code);
  };
  for (int64_t at = 0; at < line; at += static_cast<int64_t>(sizeof(CodeBytes)))
    (one(std::integral_constant<int, kFour>(), at), ...);
}

template <int kBits, bool kBook>
inline void expand_pieces(const uint8_t* panel, int64_t width, int64_t inputs, const uint8_t* codebook, uint8_t* to) {
  const int64_t line = 4 * width;
  CodeBytes book{};
  if constexpr (kBook) book = spread_codebook(codebook);
  for (int64_t input = 0; input < inputs; input += kCodedPiece, panel += kBits * line, to += 8 * line)
    expand_piece<kBits, kBook>(panel, line, book, to, std::make_integer_sequence<int, 8>());
}

// A panel's codes for `inputs` inputs as ByteKind's weights: the codes themselves, or what a codebook has for them.
inline void expand_codes(const uint8_t* panel, int64_t bits, int64_t width, int64_t inputs, const uint8_t* codebook,
                         uint8_t* to) {
  if (codebook) return expand_pieces<4, true>(panel, width, inputs, codebook, to);
  switch (bits) {
    case 2: return expand_pieces<2, false>(panel, width, inputs, nullptr, to);
    case 3: return expand_pieces<3, false>(panel, width, inputs, nullptr, to);
    case 4: return expand_pieces<4, false>(panel, width, inputs, nullptr, to);
    case 5: return expand_pieces<5, false>(panel, width, inputs, nullptr, to);
    default: return expand_pieces<6, false>(panel, width, inputs, nullptr, to);
  }
}

// --- scales ---

// kLanes bytes of steps as floats.
template <StepKind kKind>
inline Vec load_steps(const uint8_t* from) {
  if constexpr (kKind == kWholeStep) return load_int8(reinterpret_cast<const int8_t*>(from));
  if constexpr (kKind == kPowerStep) return load_powers(from);
  return load_float8(from);
}

template <StepKind kKind>
inline void expand_steps(const PackedWeight& weight, int64_t column, int64_t width, int64_t first, int64_t count,
                         float* scales) {
  const int64_t per_span = weight.span / weight.group_size;
  const float* spans = weight.scales + column * (weight.inputs / weight.span);
  const uint8_t* steps = weight.steps + column * (weight.inputs / weight.group_size) + first * width;
  for (int64_t g = 0; g < count; ++g, steps += width, scales += width) {
    const float* from = spans + (first + g) / per_span * width;
    for (int64_t v = 0; v < width; v += kLanes) store(scales + v, mul(load(from + v), load_steps<kKind>(steps + v)));
  }
}

// Scales of `count` groups from group `first` on, and minimums where there are any, for the panel at `column`:
// [count, width].
inline void expand_scales(const PackedWeight& weight, int64_t column, int64_t width, int64_t first, int64_t count,
                          float* scales, float* minimums) {
  const int64_t per_span = weight.span / weight.group_size, groups = weight.inputs / weight.group_size;
  const int64_t spans = column * (weight.inputs / weight.span);
  if (!weight.steps) {
    for (int64_t g = 0; g < count; ++g)
      std::memcpy(scales + g * width, weight.scales + spans + (first + g) / per_span * width, width * sizeof(float));
  } else if (weight.step_kind == kWholeStep) {
    expand_steps<kWholeStep>(weight, column, width, first, count, scales);
  } else if (weight.step_kind == kPowerStep) {
    expand_steps<kPowerStep>(weight, column, width, first, count, scales);
  } else {
    expand_steps<kFloatStep>(weight, column, width, first, count, scales);
  }
  if (!weight.minimums) return;
  for (int64_t g = 0; g < count; ++g, minimums += width) {
    const float* from = weight.minimums + spans + (first + g) / per_span * width;
    const int8_t* lows = weight.lows ? weight.lows + column * groups + (first + g) * width : nullptr;
    for (int64_t v = 0; v < width; v += kLanes)
      store(minimums + v, lows ? mul(load(from + v), load_int8(lows + v)) : load(from + v));
  }
}

}  // namespace millrace
