"""What `noria bench` knows of the model that its servers load: which files, what is in them, its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from noria.commands.common import engine_config, say
from noria.config import EMBEDDED_MODEL
from noria.models.model_store import embedded_model_path, resolve_model
from noria.models.tokenizer import TOKENIZER_FILE
from noria.serving.server import ServerOptions
from noria_bench.environment import file_digest

# of a Hugging Face directory
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors")


def engine_facts(options: ServerOptions) -> dict[str, Any]:
    """The model as named, the SHA-256 of each of its files by name, and the precision it is computed in."""
    config = engine_config(options)
    source = embedded_model_path() if config.model == EMBEDDED_MODEL else Path(config.model)
    paths = [source] if source.is_file() else sorted(path for pattern in _FILES for path in source.glob(pattern))
    return {
        "name": config.model if config.model == EMBEDDED_MODEL else source.name,
        "files": {path.name: file_digest(path) for path in paths},
        "tokenizer": file_digest(model_directory(options) / TOKENIZER_FILE),
        "dtype": config.dtype,
        # a quantised file is expanded when it is converted
        "quantisation": "none",
    }


def model_directory(options: ServerOptions) -> Path:
    """Of the model that a server with these options loads, converted. Raises ConfigError."""
    config = engine_config(options)
    return resolve_model(config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, say)
