// Products of rows that are grouped by expert.
#include "experts/experts.h"
#include "linear/gemm_panel.h"

namespace millrace {
namespace {

// Where an expert's converted rows lie: each has its places, and room for a whole tile beyond them.
Copy copy_of(const ExpertGemmArgs& args, int64_t most_bytes, int64_t expert) {
  const int64_t before = args.starts[expert] - args.starts[0] + expert * kTileRows;
  const int64_t offset = (before * most_bytes + 63) / 64 * 64 + expert * 64;
  const int64_t count = args.starts[expert + 1] - args.starts[expert];
  return copy_at(args.weights[expert], static_cast<char*>(args.workspace) + offset, count);
}

// Experts may differ in format.
int64_t most_row_bytes(const ExpertGemmArgs& args) {
  int64_t most = 0;
  for (int64_t expert = 0; expert < args.num_experts; ++expert)
    most = std::max(most, row_bytes(args.weights[expert]));
  return most;
}

// Panels that a part takes at once, and rows of one take.
struct Cut {
  int64_t group, rows, pieces, row_pieces;
};

Cut cut_of(const PackedWeight& weight, int64_t num_rows) {
  constexpr int64_t kPieceBytes = 128 << 10, kMostRows = 192;
  const int64_t panels = (padded_outputs(weight) + kPanel - 1) / kPanel;
  const int64_t panel_bytes = packed_bytes(weight.format, kPanel, weight.padded_inputs);
  Cut cut;
  cut.group = std::clamp<int64_t>(kPieceBytes / panel_bytes, 1, panels);
  cut.rows = std::min(num_rows, kMostRows);
  cut.row_pieces = (num_rows + cut.rows - 1) / cut.rows;
  cut.pieces = (panels + cut.group - 1) / cut.group * cut.row_pieces;
  return cut;
}

}  // namespace
}  // namespace millrace

using namespace millrace;

extern "C" void expert_rows(const ExpertGemmArgs& args, int thread, int num_threads) {
  const int64_t base = args.starts[0];
  const Range mine = share(args.starts[args.num_experts] - base, thread, num_threads);
  if (mine.begin == mine.end) return;
  const int64_t most_bytes = most_row_bytes(args);
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    const int64_t first = args.starts[expert] - base;
    const int64_t begin = std::max(first, mine.begin), end = std::min(args.starts[expert + 1] - base, mine.end);
    if (begin >= end) continue;
    const Copy copy = copy_of(args, most_bytes, expert);
    for (int64_t place = begin; place < end; ++place) {
      const int64_t row = args.places ? args.places[place] / args.num_active : place;
      convert_to(args.weights[expert], args.x + row * args.x_stride, copy, place - first);
    }
  }
}

extern "C" void expert_gemm(const ExpertGemmArgs& args, int, int) {
  int64_t piece = op_take(), before = 0;
  const int64_t most_bytes = most_row_bytes(args);
  [[maybe_unused]] const TileShapes shapes;
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    const int64_t first = args.starts[expert], count = args.starts[expert + 1] - first;
    if (count == 0) continue;
    const PackedWeight& weight = args.weights[expert];
    const Cut cut = cut_of(weight, count);
    if (piece < before + cut.pieces) {
      const int64_t panels = (padded_outputs(weight) + kPanel - 1) / kPanel;
      const Rows rows = rows_of(weight, copy_of(args, most_bytes, expert));
      const int64_t row = args.among_all ? first : first - args.starts[0];
      const Results results{args.out + row * args.out_stride, args.out_stride, false, false};
      for (; piece < before + cut.pieces; piece = op_take()) {
        const int64_t part = piece - before;
        const int64_t from = part / cut.row_pieces * cut.group, begin = part % cut.row_pieces * cut.rows;
        const int64_t last = std::min(from + cut.group, panels);
        for (int64_t panel = from; panel < last; ++panel)
          panel_product(weight, results, rows, panel * kPanel, begin, std::min(begin + cut.rows, count),
                        std::min(panel + 1, panels - 1) * kPanel);
      }
    }
    before += cut.pieces;
  }
}

MILLRACE_OP(expert_rows, ExpertGemmArgs)
MILLRACE_OP(expert_gemm, ExpertGemmArgs)

// Bytes of workspace for products of up to max_places places.
extern "C" int64_t millrace_expert_workspace(int64_t max_places, int64_t num_experts, int64_t padded_inputs) {
  // A row of floats, with a scale and a sum for every four inputs, is the largest.
  const int64_t row = padded_inputs * (static_cast<int64_t>(sizeof(float)) + 2) + 128;
  return (max_places + num_experts * kTileRows) * row + (num_experts + 1) * 128;
}
