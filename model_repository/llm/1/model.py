"""Triton's entry point: wires the service, forwards to it, closes it. No logic here; see noria.serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noria.serving.service import GenerationService


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
