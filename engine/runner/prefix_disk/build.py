"""Opens the disk tier of an engine: its folder, its key, and the fingerprint of what its blocks depend on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import msgspec

from checkpoint.files import find, is_gguf
from engine.config import CacheConfig, EngineConfig
from engine.model.kv_memory import chosen_kv_dtypes
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.prefix_disk.entries import EntryFiles
from engine.runner.prefix_disk.tier import DiskTier
from engine.types import MemoryPlan, ModelFacts
from runtime.config import ModelConfig
from runtime.errors import ConfigError

_MIN_KEY = 32
# Of each file of the checkpoint, so many bytes are read beside its size and time.
_HEAD_BYTES = 1 << 20
# What holds weights, or says how they are used.
_SUFFIXES = {".safetensors", ".gguf", ".json", ".bin"}


def open_disk(
    config: EngineConfig,
    model: ModelConfig,
    memory: MemoryPlan,
    facts: ModelFacts,
    blocks: Callable[[], BlockBytes] | None,
) -> DiskTier | None:
    """The tier, its threads started; None where it is off. Raises ConfigError naming the key at fault."""
    cache = config.cache
    if not cache.disk_path:
        return None
    if blocks is None:
        raise ConfigError(
            "engine.cache.disk_path: this engine has no keys and values to keep; leave it empty"
        )
    key = _key(cache)
    sizes = blocks()
    files = EntryFiles(
        Path(cache.disk_path),
        fingerprint(config, model, memory, facts, _of_this_disk, key).hex(),
        entry_bytes=sizes.num_bytes,
        state_bytes=sizes.num_state_bytes,
        max_bytes=cache.disk_bytes,
        key=key,
    )
    if cache.disk_bytes < files.file_bytes:
        raise ConfigError(
            f"engine.cache.disk_bytes = {cache.disk_bytes}: one {_largest(sizes, memory)} takes "
            f"{files.file_bytes} bytes; raise it, or leave engine.cache.disk_path empty"
        )
    return DiskTier(files, blocks)


def _largest(sizes: BlockBytes, memory: MemoryPlan) -> str:
    is_state = sizes.num_state_bytes > sizes.num_bytes
    return "state of a sequence" if is_state else f"block of {memory.block_size} tokens"


def check_disk(cache: CacheConfig) -> None:
    """Raises ConfigError where folder or key cannot be used, before anything is loaded."""
    if not cache.disk_path:
        return
    _key(cache)
    root = Path(cache.disk_path)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ConfigError(
            f"engine.cache.disk_path = {str(root)!r}: {error}; give a folder that the engine may write to"
        ) from error


def _key(cache: CacheConfig) -> bytes:
    """What encrypts, 32 bytes; empty for plain entries. Raises ConfigError."""
    if not cache.disk_key_file:
        return b""
    where = f"engine.cache.disk_key_file = {cache.disk_key_file!r}"
    try:
        text = Path(cache.disk_key_file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}; give a file with a key that the engine may read") from error
    if len(text) < _MIN_KEY:
        raise ConfigError(
            f"{where}: a key of at least {_MIN_KEY} characters is needed, it has {len(text)}; write one with "
            "openssl rand -base64 32"
        )
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=b"millrace prefix cache").derive(text.encode())


def fingerprint(
    config: EngineConfig,
    model: ModelConfig,
    memory: MemoryPlan,
    facts: ModelFacts,
    told_by: Callable[[Path], bytes],
    key: bytes = b"",
) -> bytes:
    """Digest, 16 bytes, of everything that a block depends on beside its hash: the checkpoint, how it is
    computed, how blocks lie in memory, and the key. Engines with the same one may read each other's blocks.
    `told_by` gives what a file of the checkpoint is known by.
    """
    digest = blake2b(digest_size=16, person=b"millrace-kvdisk")
    computed_by = {
        "version": metadata.version("millrace"),
        "block_size": memory.block_size,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "state_bytes": memory.state_bytes // max(1, memory.num_states),
        # Tables of rotary angles may depend on it.
        "max_model_len": memory.max_model_len,
        "facts": (facts.dtype, facts.attention_backend, facts.level, facts.device.partition(":")[0]),
        "kv_dtypes": chosen_kv_dtypes(config.cache, facts.num_layers, facts.dtype),
        "quantize": (config.quantize, msgspec.to_builtins(config.quantization)),
        "key": blake2b(key, digest_size=16).hexdigest() if key else "",
    }
    digest.update(msgspec.json.encode(computed_by))
    for path in _files(find(model.path)):
        digest.update(told_by(path))
    return digest.digest()


def _of_this_disk(path: Path) -> bytes:
    """A file of this machine: it is another one once it was written to."""
    status = path.stat()
    with path.open("rb") as file:
        head = blake2b(file.read(_HEAD_BYTES)).digest()
    return msgspec.json.encode((path.name, status.st_size, status.st_mtime_ns)) + head


def _files(checkpoint: Path) -> list[Path]:
    if not is_gguf(checkpoint):
        return sorted(path for path in checkpoint.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    # A split file is named -00001-of-0000N; its parts lie beside it.
    stem, _, parts = checkpoint.stem.partition("-00001-of-")
    found = checkpoint.parent.glob(f"{stem}-*-of-{parts}.gguf") if parts else [checkpoint]
    return sorted(found)
