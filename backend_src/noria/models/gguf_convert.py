"""Writes a GGUF file as a Hugging Face directory that `safetensors_loader`, `tokenizer` and transformers read.

Knows nothing of caches: where the directory lies and when it is written is `model_store`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from noria.models.gguf_loader import read_gguf
from noria.models.gguf_tokenizer import save_gguf_tokenizer
from noria.models.model_config import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelConfig
from noria.models.safetensors_loader import INDEX_FILE, WEIGHTS_FILE

# bounds the memory of a conversion, whatever the size of the model
_MAX_SHARD_BYTES = 4 * 2**30
_PROGRESS_EVERY_TENSORS = 50


def convert_gguf(
    gguf_path: Path,
    directory: Path,
    dtype: str,
    progress: Callable[[str], None],
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Writes config, weights in `dtype` (float32, bfloat16, float16) and tokenizer to `directory`, which exists.

    Raises ConfigError, naming the file, if it cannot be read as a supported model.
    """
    progress(f"reading {gguf_path.name}")
    gguf = read_gguf(gguf_path)
    _write_json(directory / CONFIG_FILE, gguf.config.to_hf(dtype))
    _write_json(directory / GENERATION_CONFIG_FILE, _generation_config(gguf.config))
    progress("converting the tokenizer")
    save_gguf_tokenizer(gguf_path, directory, gguf.pre_tokenizer)
    writer = _ShardWriter(directory, max_shard_bytes)
    for count, (name, array) in enumerate(gguf.weights()):
        if count % _PROGRESS_EVERY_TENSORS == 0:
            progress(f"converting the weights to {dtype}: {count} of {gguf.num_weights}")
        # what was not dequantised still lies in the mapped file, read-only, which torch does not take
        writer.add(name, torch.from_numpy(np.require(array, requirements="W")).to(getattr(torch, dtype)))
    writer.finish()


class _ShardWriter:
    """Collects tensors and writes a safetensors file whenever they reach max_shard_bytes; at the end the index."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        if self._num_files == 0:
            save_file(self._pending, self._directory / WEIGHTS_FILE, {"format": "pt"})
            return
        self._flush()
        _write_json(self._directory / INDEX_FILE, {"metadata": {}, "weight_map": self._file_of})

    def _flush(self) -> None:
        self._num_files += 1
        file_name = f"model-{self._num_files:05}.safetensors"
        save_file(self._pending, self._directory / file_name, {"format": "pt"})
        self._file_of |= dict.fromkeys(self._pending, file_name)
        self._pending = {}
        self._pending_bytes = 0


def _generation_config(config: ModelConfig) -> dict[str, object]:
    return {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
