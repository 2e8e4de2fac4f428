// Copies keys and values between slots of a layer's cache: rows that share a beginning inside a block each have
// that block for themselves, so attention reads every row's history in its usual order. (Of kivi4 the values alone: keys
// are copied whole, by copy_recent.)
#pragma once

#include "native/op.h"
#include "paged_cache/kv_cache.h"

namespace millrace {

struct CopySlotsArgs {
  const Step* step;  // slot_copies, in which no slot is both source and destination
  KvCache cache;
};

}  // namespace millrace
