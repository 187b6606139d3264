"""What `noria bench` knows of the model that its servers load: which files, what is in them, its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from noria.commands.common import engine_config, say
from noria.config import EMBEDDED_MODEL, default_cache_dir
from noria.models.model_store import embedded_model_path, file_sha256, resolve_model
from noria.models.tokenizer import TOKENIZER_FILE
from noria.serving.server import ServerOptions, server_environment
from noria.serving.triton_install import find_triton
from noria_bench.environment import VARIABLES

# of a Hugging Face directory
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors")


def engine_facts(options: ServerOptions) -> dict[str, Any]:
    """The model as named, the SHA-256 of each of its files by name, the precision it is computed in, and what decides
    how the server's threads wait."""
    config = engine_config(options)
    source = embedded_model_path() if config.model == EMBEDDED_MODEL else Path(config.model)
    environment = server_environment(options, find_triton(default_cache_dir()), os.environ)
    paths = [source] if source.is_file() else sorted(path for pattern in _FILES for path in source.glob(pattern))
    return {
        "name": config.model if config.model == EMBEDDED_MODEL else source.name,
        "files": {path.name: file_sha256(path) for path in paths},
        "tokenizer": file_sha256(model_directory(options) / TOKENIZER_FILE),
        "dtype": config.dtype,
        "variables": {name: environment[name] for name in VARIABLES if name in environment},
        # a quantised file is expanded when it is converted
        "quantisation": "none",
    }


def model_directory(options: ServerOptions) -> Path:
    """Of the model that a server with these options loads, converted. Raises ConfigError."""
    config = engine_config(options)
    return resolve_model(config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, say)
