"""What the commands that start servers share: their arguments, the configuration those amount to, servers by mode.

Knows what the user typed; how a server runs is `serving.server`'s business.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from noria.config import EMBEDDED_MODEL, EngineConfig
from noria.config_sources import load_engine_config
from noria.errors import ConfigError
from noria.serving.machine import free_ports
from noria.serving.server import (
    RunningServer,
    ServerOptions,
    check_mode,
    config_parameters,
    default_repository,
    engine_environment,
)
from noria_bench.measurement import ServerUrls

# those that batch differently; a repository may have further configs
MODES = ("static", "dynamic", "inflight")

ServerStarter = Callable[[str], AbstractContextManager[ServerUrls]]


def say(text: str) -> None:
    print(f"noria: {text}", file=sys.stderr, flush=True)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `server_options` reads."""
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face directory or a .gguf file (default: the embedded)"
    )
    parser.add_argument("--repository", type=Path, metavar="DIR", help="model repository (default: the project's)")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="KEY=VALUE", help="overrides engine.json; may be repeated"
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """What was typed, checked. Raises ConfigError for what would fail in the server's log otherwise."""
    engine: dict[str, Any] = dict(_key_value(text) for text in args.engine)
    if args.model is not None:
        engine["model"] = args.model
    # tritonserver runs in another directory
    if isinstance(engine.get("model"), str) and engine["model"] not in ("", EMBEDDED_MODEL):
        engine["model"] = str(Path(engine["model"]).resolve())
    for key in ("cache_dir", "trace_path"):
        if isinstance(engine.get(key), str):
            engine[key] = str(Path(engine[key]).resolve())
    mode = getattr(args, "mode", "inflight")
    options = ServerOptions(args.repository or default_repository(), mode, engine=engine)
    check_mode(options.repository, mode)
    engine_config(options)
    return options


def _key_value(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--engine takes KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def engine_config(options: ServerOptions) -> EngineConfig:
    """The configuration that a server with these options will load. Raises ConfigError."""
    path = options.repository / "llm" / "1" / "engine.json"
    parameters = config_parameters(options.repository, options.mode)
    return load_engine_config(path, parameters, engine_environment(options.engine, os.environ))


def prepare_model(options: ServerOptions) -> None:
    """Convert the model, where it needs that, before a server starts: in front of the user, and once."""
    # imports torch when there is something to convert
    from noria.models.model_store import resolve_model

    config = engine_config(options)
    resolve_model(config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, say)


@contextmanager
def server_starter(options: ServerOptions) -> Iterator[ServerStarter]:
    """A function from a mode to a running server on free ports. Its logs go when no longer needed."""
    with tempfile.TemporaryDirectory(prefix="noria-") as folder:

        @contextmanager
        def start(mode: str) -> Iterator[ServerUrls]:
            # not the usual ones, which another that starts at this moment would take as well
            http_port, grpc_port, metrics_port = free_ports(options.host, (0, 0, 0))
            own = replace(options, mode=mode, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
            with RunningServer(own, Path(folder) / f"{mode}.log") as server:
                yield ServerUrls(server.grpc_url, server.http_url, server.metrics_address)

        yield start


def check_can_write(option: str, path: Path) -> None:
    """Raises ConfigError, naming the option, unless a file can be written there: known before what goes into it."""
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"{option} {path} cannot be written")
