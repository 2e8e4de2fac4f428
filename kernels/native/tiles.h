// AMX tiles: their instructions, by macros as tile numbers are constants, and their shapes.
//
// A tile is up to 16 rows of 64 bytes. TILE_DOT_HALVES(c, a, b) adds to c [M, N] float32 the products of a [M, K] with b
// [K / 2, N, 2] in bfloat16, K up to 32; TILE_DOT_BYTES(c, a, b) to c in int32 those of a int8 [M, K] with b uint8
// [K / 4, N, 4], K up to 64; TILE_DOT_LEVELS those of uint8 a with int8 b. The order of the additions is the
// instruction's own, and the same whichever operand is a. Shapes must fit one another.
#pragma once

#include <cstdint>

#if defined(MILLRACE_EMULATE_TILES)
#include "native/tile_emulation.h"
#elif defined(__AMX_TILE__)
#include <immintrin.h>
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_DOT_HALVES(sum, rows, columns) _tile_dpbf16ps(sum, rows, columns)
#define TILE_DOT_BYTES(sum, rows, columns) _tile_dpbsud(sum, rows, columns)
#define TILE_DOT_LEVELS(sum, rows, columns) _tile_dpbusd(sum, rows, columns)
#endif

namespace millrace {

constexpr int64_t kTile = 16;
constexpr int64_t kTileBytes = kTile * 64;

struct TileShape {
  int64_t rows = kTile;
  int64_t row_bytes = 64;
};

#if defined(TILE_LOAD)

// Tells the processor the shapes of the tiles; until the end of the scope. Every part of an op has one.
class TileShapes {
 public:
  TileShapes() {
    const TileShape whole[8];
    set(whole);
  }
  ~TileShapes() {
#if !defined(MILLRACE_EMULATE_TILES)
    _tile_release();
#endif
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

  // What the tiles hold is lost.
  static void set(const TileShape (&tiles)[8]) {
#if defined(MILLRACE_EMULATE_TILES)
    for (int tile = 0; tile < 8; ++tile) {
      emulated[tile].rows = tiles[tile].rows;
      emulated[tile].row_bytes = tiles[tile].row_bytes;
    }
#else
    struct alignas(64) Shapes {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = static_cast<uint16_t>(tiles[tile].row_bytes);
      shapes.rows[tile] = static_cast<uint8_t>(tiles[tile].rows);
    }
    // GCC 12 takes only the first 8 bytes for read by the instruction and drops the other stores without this.
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
#endif
  }
};

#else

struct TileShapes {};

#endif

}  // namespace millrace
