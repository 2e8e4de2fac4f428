#include "linear/gemm.h"

#include <algorithm>

#include "linear/gemm_panel.h"

namespace millrace {
namespace {

// A thread takes panels by pieces of about so many bytes.
constexpr int64_t kPieceBytes = 256 << 10;
// Bytes that the rows of a piece may take: of the second cache, but that with tiles weights which come again from memory
// cost more than rows from the third.
constexpr int64_t kNearBytes = int64_t{kTileRows == 32 ? 3328 : 1536} << 10;
// Rows of so many elements together are converted by every thread for itself, which saves a barrier.
constexpr int64_t kPrivateElements = 16 << 10;

// Whether every part of a product converts the rows for itself; gemm_rows does it once for all otherwise.
bool converts_alone(const PackedWeight& weight, int64_t num_rows) {
  return num_rows * weight.padded_inputs <= kPrivateElements;
}

// Rows of one piece: pieces of about equal height, whose rows stay in the second cache.
int64_t row_piece_of(const PackedWeight& weight, int64_t num_rows) {
  const int64_t near = kNearBytes / workspace_stride(weight);
  // With tiles of 32 rows, fewer would have to wait for weights.
  constexpr int64_t kLeast = kTileRows == 32 ? 2 * kRowBlock : kRowBlock;
  return even_height(num_rows, std::max(kLeast, near));
}

Copy copy_of(const GemmArgs& args, int64_t num_rows, int64_t part) {
  const PackedWeight& weight = args.weight;
  const int64_t bytes = (padded_rows(num_rows) * row_bytes(weight) + 63) / 64 * 64;
  return copy_at(weight, static_cast<char*>(args.workspace) + part * bytes, num_rows);
}

void convert_rows(const GemmArgs& args, const Copy& copy, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) convert_to(args.weight, args.x + row * args.x_stride, copy, row);
}

Rows prepare_rows(const GemmArgs& args, int64_t num_rows, int part) {
  const PackedWeight& weight = args.weight;
  if (!converts(weight, num_rows)) return {args.x, args.x_stride, nullptr, nullptr};
  const bool alone = converts_alone(weight, num_rows);
  const Copy copy = copy_of(args, num_rows, alone ? part : 0);
  if (alone) convert_rows(args, copy, 0, num_rows);
  return rows_of(weight, copy);
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void gemm_rows(const GemmArgs& args, int thread, int num_threads) {
  const int64_t num_rows = *args.num_rows;
  if (!converts(args.weight, num_rows) || converts_alone(args.weight, num_rows)) return;
  const Range rows = share(num_rows, thread, num_threads);
  convert_rows(args, copy_of(args, num_rows, 0), rows.begin, rows.end);
}

MILLRACE_OP(gemm_rows, GemmArgs)

extern "C" void gemm(const GemmArgs& args, int thread, int num_threads) {
  const int64_t num_rows = *args.num_rows;
  if (num_rows == 0) return;
  const PackedWeight& weight = args.weight;
  const int64_t panels = (padded_outputs(weight) + kPanel - 1) / kPanel;
  // Pieces of several panels while rows are few; of one panel and some rows where panels alone are too few.
  const int64_t panel_bytes = packed_bytes(weight.format, kPanel, weight.padded_inputs);
  const int64_t most = std::max<int64_t>(1, panels / (4 * num_threads));
  const int64_t group = std::clamp<int64_t>(kPieceBytes / panel_bytes / std::max<int64_t>(1, num_rows / 16), 1, most);
  // Many rows go by pieces that stay in the second cache while panel after panel passes.
  const int64_t row_piece = row_piece_of(weight, num_rows);
  const int64_t row_pieces = (num_rows + row_piece - 1) / row_piece;
  const int64_t panel_pieces = (panels + group - 1) / group, pieces = panel_pieces * row_pieces;
  int64_t piece = op_take();
  if (piece >= pieces) return;
  const Rows rows = prepare_rows(args, num_rows, thread);
  const bool past_caches = !args.accumulate && goes_past_caches(args.out, args.out_stride, num_rows, weight.outputs);
  const Results results{args.out, args.out_stride, args.accumulate != 0, past_caches};
  [[maybe_unused]] const TileShapes shapes;
  while (piece < pieces) {
    // The next piece is taken ahead, so that it can be fetched while this one is computed.
    const int64_t after = op_take();
    const int64_t first = piece % panel_pieces * group, begin = piece / panel_pieces * row_piece;
    const int64_t last = std::min(first + group, panels);
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t next = panel + 1 < last ? panel + 1 : after < pieces ? after % panel_pieces * group : panel;
      panel_product(weight, results, rows, panel * kPanel, begin, std::min(begin + row_piece, num_rows), next * kPanel);
    }
    piece = after;
  }
  if (past_caches) past_caches_done();
}

MILLRACE_OP(gemm, GemmArgs)

// Bytes of workspace that products of up to max_rows rows and padded_inputs inputs need.
extern "C" int64_t millrace_gemm_workspace(int64_t max_rows, int64_t padded_inputs, int64_t num_threads) {
  // A row of floats, with a scale and a sum for every four inputs, is the largest.
  const int64_t row = padded_inputs * (static_cast<int64_t>(sizeof(float)) + 2) + 128;
  const int64_t alone = padded_rows(std::max<int64_t>(1, kPrivateElements / padded_inputs)) * row + 64;
  return std::max(padded_rows(max_rows) * row, alone * num_threads) + 64;
}

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Asks the system for what the level needs, once per process and before the first product. 0 when granted.
extern "C" int64_t millrace_prepare() {
#if defined(__AMX_TILE__)
  // ARCH_REQ_XCOMP_PERM for the state of tiles; threads that start later have it, too.
  return syscall(SYS_arch_prctl, 0x1023, 18);
#else
  return 0;
#endif
}
