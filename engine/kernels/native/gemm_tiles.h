// Chooses between vector tiles and AMX tiles.
#pragma once

#include "gemm_micro.h"

namespace millrace {

template <class Kind>
inline void multiply_rows(const typename Kind::Row* rows, int64_t row_stride, int64_t num_rows,
                          const typename Kind::Weight* panel, int64_t width, int64_t groups,
                          typename Kind::Total* totals, bool first, const char* next) {
  multiply<Kind>(rows, row_stride, num_rows, panel, width, groups, totals, first, next);
}

}  // namespace millrace
