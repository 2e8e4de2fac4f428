"""Into which groups the inputs of a layer fall. No torch."""

GROUP_SIZES = (128, 64, 32)


def group_size_for(inputs: int, wanted: int) -> int:
    """The largest group size up to `wanted` into which `inputs` fall; 0 when none does."""
    return next((size for size in GROUP_SIZES if size <= wanted and inputs % size == 0), 0)
