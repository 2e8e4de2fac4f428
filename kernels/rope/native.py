"""Args of the native rotation with cache write (rope_cache.h)."""

from __future__ import annotations

from kernels.native.mirror import structure

# Values of QkNorm.
QK_NORMS = {"none": 0, "head": 1, "full": 2}
# Values of ValueKind.
VALUE_KINDS = {"plain": 0, "normed": 1, "of_keys": 2}
RopeCacheArgs = structure("RopeCacheArgs")
LatentCacheArgs = structure("LatentCacheArgs")
HeadProductArgs = structure("HeadProductArgs")
