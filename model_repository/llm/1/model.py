"""Triton's entry point: wires the service, forwards to it, closes it. No logic here; see noria.serving."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

try:
    from noria.serving.service import GenerationService
except ImportError as error:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise ImportError(
        f"{error}. Triton's stub runs Python {version} with the packages of {sys.prefix}: put a Python {version} "
        "environment in which noria[serve] is installed first on PATH (PYTHONPATH is ignored)"
    ) from error


class TritonPythonModel:
    """One model instance; Triton calls these methods on its own thread."""

    def initialize(self, args: dict[str, str]) -> None:
        self._service = GenerationService.start(
            model_config=json.loads(args["model_config"]),
            model_name=args["model_name"],
            model_version=args["model_version"],
            engine_json=Path(args["model_repository"]) / args["model_version"] / "engine.json",
        )

    def execute(self, requests: list[Any]) -> list[Any] | None:
        return self._service.execute(requests)

    def finalize(self) -> None:
        self._service.close()
