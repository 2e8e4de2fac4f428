"""How a cache is divided between layers that look at everything and layers with a sliding window. No torch.

A sequence keeps a block of the former for all of its tokens, and of the latter for its window and what a step
computes. Each kind has blocks of its own. Their division is chosen before anybody knows how long sequences
will be, for those of a few windows, and then follows the load: what one kind lacks and the other does not
need goes from here to there (engine/kv).
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.model.spec import ModelSpec
from engine.types.memory import blocks_in_window

# Length, in windows, of the sequences for which both kinds of blocks run out at the same time.
LENGTH_WINDOWS = 4


class WindowRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What layers with a window need; nothing where they keep the same blocks as all others."""

    # Tokens that they look back on, and of how many bytes their keys and values are for each.
    window: int = 0
    bytes_per_token: int = 0
    # Why they keep all blocks though they look at few; empty where there is no such layer, or no reason.
    why_not: str = ""
    # Blocks of a sequence, of one that is computing its prompt, and of all sequences that there may be.
    each: int = 0
    least: int = 0
    most: int = 0
    # Blocks of a sequence for which both kinds run out at the same time.
    usual: int = 0

    def num_blocks(
        self, cache_bytes: int, bytes_per_block: int, block_size: int, sequence_blocks: int
    ) -> int:
        """Window blocks of a cache of so many bytes, not below `least`, where the other layers' blocks take
        `bytes_per_block` and there must be `sequence_blocks` of these.
        """
        if not self.window:
            return 0
        size = self.bytes_per_token * block_size
        left = cache_bytes - (self.least - self.each) * size
        each = min(self.usual, self.each)
        num_sequences = left / (self.usual * bytes_per_block + each * size)
        wanted = int(num_sequences * each) + self.least - self.each
        fitting = (cache_bytes - sequence_blocks * bytes_per_block) // size
        return max(self.least, min(wanted, self.most, fitting))

    def num_ids(
        self, cache_bytes: int, bytes_per_block: int, block_size: int, sequence_blocks: int
    ) -> tuple[int, int]:
        """Most blocks and most window blocks that there may come to be, with the least of the other kind:
        memory goes from one to the other with the load. Zeros where there are no window blocks.
        """
        if not self.window:
            return 0, 0
        size = self.bytes_per_token * block_size
        windows = (cache_bytes - sequence_blocks * bytes_per_block) // size
        return (cache_bytes - self.least * size) // bytes_per_block, min(self.most, windows)


def window_room(
    spec: ModelSpec, config: EngineConfig, *, device: str, max_model_len: int, bytes_per_token: int
) -> WindowRoom:
    """What the layers with a window of a model need, which store so many bytes for each token."""
    if not spec.sliding_layers:
        return WindowRoom()
    cache, scheduler = config.cache, config.scheduler
    size, longest = cache.block_size, -(-max_model_len // cache.block_size)
    each = blocks_in_window(spec.sliding_reach, size)
    chunk = -(-min(scheduler.max_num_batched_tokens, max_model_len) // size)
    why_not = ""
    if device != "cpu":
        why_not = "captured steps of a GPU read one table of blocks"
    elif cache.host_bytes:
        why_not = "engine.cache.host_bytes keeps whole blocks"
    elif cache.disk_path:
        why_not = "engine.cache.disk_path keeps whole blocks"
    elif config.role != "both":
        why_not = f"engine.role = {config.role!r} hands whole blocks over"
    elif config.parallel.degrees.size > 1:
        why_not = "ranks (engine.parallel) are told of one table of blocks"
    elif longest <= each + chunk:
        # Nothing would ever be let go.
        return WindowRoom()
    if why_not:
        return WindowRoom(why_not=why_not)
    return WindowRoom(
        window=spec.sliding_reach,
        bytes_per_token=bytes_per_token,
        each=each,
        least=each + chunk,
        most=scheduler.max_num_seqs * each + chunk,
        usual=-(-min(max_model_len, LENGTH_WINDOWS * spec.sliding_reach) // size),
    )
