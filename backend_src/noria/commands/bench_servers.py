"""The servers that `noria bench` measures: one started for each run, one that reloads its model, or one that runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from noria.commands.common import engine_config, server_starter
from noria.config import EngineConfig
from noria.errors import ConfigError, EngineFailure
from noria.serving.server import ServerOptions, check_mode, read_model_config
from noria_bench.measurement import ServerUrls
from noria_bench.session import Variant

LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the configurations to be compared. engine: overrides of engine.json, over those that all have."""

    label: str
    mode: str
    engine: Mapping[str, Any]

    def options(self, common: ServerOptions) -> ServerOptions:
        check_mode(common.repository, self.mode)
        return replace(common, mode=self.mode, engine={**common.engine, **self.engine})

    def config(self, common: ServerOptions) -> EngineConfig:
        """As the server will load it. Raises ConfigError."""
        return engine_config(self.options(common))


def fresh_servers(common: ServerOptions, candidates: Sequence[Candidate]) -> list[Variant]:
    """A server is started for each use of a variant, and stopped after it."""

    def variant(candidate: Candidate) -> Variant:
        options = candidate.options(common)

        @contextmanager
        def start() -> Iterator[ServerUrls]:
            with server_starter(options) as start_server, start_server(options.mode) as urls:
                yield urls

        return Variant(candidate.label, start, asdict(candidate.config(common)))

    return [variant(candidate) for candidate in candidates]


@contextmanager
def reloading_server(common: ServerOptions, candidates: Sequence[Candidate]) -> Iterator[list[Variant]]:
    """One server for all, whose model is loaded anew, through Triton's repository API, for each use of a variant."""
    extra = [*common.extra_arguments, "--model-control-mode=explicit"]
    with server_starter(replace(common, extra_arguments=extra)) as start_server, start_server(common.mode) as urls:
        yield reloaded_variants(urls, common, candidates)


def reloaded_variants(urls: ServerUrls, common: ServerOptions, candidates: Sequence[Candidate]) -> list[Variant]:
    """On a server that runs with --model-control-mode=explicit and has this repository."""

    def variant(candidate: Candidate) -> Variant:
        options = candidate.options(common)
        config = read_model_config(options.repository, options.mode)
        # which go over engine.json; the environment of a server that runs already cannot be set
        overrides = {key: {"string_value": _text(value)} for key, value in options.engine.items()}
        config["parameters"] = config.get("parameters", {}) | overrides

        @contextmanager
        def start() -> Iterator[ServerUrls]:
            _load(urls.http, config)
            yield urls

        return Variant(candidate.label, start, asdict(candidate.config(common)))

    return [variant(candidate) for candidate in candidates]


def running_server(urls: ServerUrls, label: str) -> Variant:
    """As it is; what it loaded is asked of Triton with each run."""

    @contextmanager
    def start() -> Iterator[ServerUrls]:
        yield urls

    start_running: Callable[[], AbstractContextManager[ServerUrls]] = start
    return Variant(label, start_running)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _load(http_url: str, config: Mapping[str, Any]) -> None:
    """Raises EngineFailure with the server's reason."""
    client = triton.InferenceServerClient(http_url, connection_timeout=LOAD_TIMEOUT_S, network_timeout=LOAD_TIMEOUT_S)
    name = str(config["name"])
    try:
        if client.is_model_ready(name):
            client.unload_model(name)
        client.load_model(name, config=json.dumps(config))
    except InferenceServerException as error:
        hint = f"it must run with --model-control-mode=explicit --load-model={name}"
        raise EngineFailure(f"{http_url} did not load {name} anew: {error.message()}; {hint}") from None
    except OSError as error:
        raise ConfigError(f"no server answers on {http_url}: {error}") from None
    finally:
        client.close()
