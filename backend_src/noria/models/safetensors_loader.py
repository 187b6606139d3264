"""Loads the weights of a Hugging Face directory: one safetensors file, or many and their index. Never a pickle.

Strict: `check_weights` has accepted every name and shape before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noria.errors import ConfigError
from noria.models.json_fields import JsonFields
from noria.models.model_config import ModelConfig
from noria.models.weights import EMBEDDING, HEAD, check_weights, expected_weights

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = ("F32", "F16", "BF16")


def load_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """The tensors that `expected_weights(config)` names, in `dtype` on `device`.

    On a CPU a tensor stored in that dtype is a view of the mapped file, read when first used: treat it as read-only,
    and do not shorten the file while the tensors live (replacing it by another is fine).
    Raises ConfigError, naming the file, for one that is missing, truncated, corrupt or of another format, and for
    weights that are missing, left over, misshapen or not floating point.
    """
    with ExitStack() as stack:
        shard_of: dict[str, Any] = {}
        for path in _weight_files(directory):
            shard = stack.enter_context(_opened(path, device))
            # an opened file has keys, but is no mapping
            for name in shard.keys():  # noqa: SIM118
                if name in shard_of:
                    raise ConfigError(f"{path} holds {name}, which another file of {directory} holds too")
                shard_of[name] = shard
        _check(shard_of, config, directory)
        weights = {name: shard_of[name].get_tensor(name).to(device, dtype) for name in expected_weights(config)}
        if config.tie_word_embeddings and HEAD in shard_of:
            head = shard_of[HEAD].get_tensor(HEAD).to(device, dtype)
            if not torch.equal(head, weights[EMBEDDING]):
                raise ConfigError(f"{directory}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}")
    return weights


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ConfigError(
            f"{directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: weights are read from safetensors and .gguf "
            "files only, never from a pickle (pytorch_model.bin, .pt, .pth)"
        )
    fields = JsonFields.read(index)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fields.error("weight_map", "an object of weight and file names")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: weight_map must name .safetensors files of the same directory, not {name!r:.100}"
            )
        if not (directory / name).is_file():
            raise ConfigError(f"{directory / name} is missing, {INDEX_FILE} names it")
    return [directory / name for name in names]


@contextmanager
def _opened(path: Path, device: torch.device | str) -> Iterator[Any]:
    try:
        shard = safe_open(path, framework="pt", device=str(device))
    except (OSError, SafetensorError) as error:
        # a header that cannot be read, or that disagrees with the size of the file
        raise ConfigError(f"cannot read {path}: not a whole safetensors file ({error})") from None
    with shard:
        yield shard


def _check(shard_of: dict[str, Any], config: ModelConfig, directory: Path) -> None:
    shapes = {}
    for name, shard in shard_of.items():
        view = shard.get_slice(name)
        shapes[name] = tuple(view.get_shape())
        if view.get_dtype() not in _DTYPES:
            raise ConfigError(f"{directory}: {name} must be one of {', '.join(_DTYPES)}, not {view.get_dtype()}")
    check_weights(shapes, config, str(directory))
