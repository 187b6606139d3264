"""What a running server says of itself and of a model: versions, and the model's config as Triton loaded it."""

from __future__ import annotations

import http.client
import json
import urllib.error
from typing import Any

from noria_bench.server_metrics import direct_opener
from noria_client.errors import UNAVAILABLE, ServerError

# tensors are the contract's, the same everywhere
_LEFT_OUT = ("input", "output", "batch_input", "batch_output", "model_warmup")


def server_facts(http_url: str, model: str) -> dict[str, Any]:
    """`server`: its name and version. `config`: the model's, without its tensors. Raises ServerError."""
    base = f"http://{http_url.removeprefix('http://').rstrip('/')}/v2"
    about = _get(base)
    config = _get(f"{base}/models/{model}/config")
    return {
        "server": {key: about[key] for key in ("name", "version") if key in about},
        "config": {key: value for key, value in config.items() if key not in _LEFT_OUT and value not in ("", [], {})},
    }


def _get(address: str) -> dict[str, Any]:
    try:
        with direct_opener().open(address, timeout=10) as response:
            return dict(json.loads(response.read()))
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ServerError(f"{address}: {error}", UNAVAILABLE) from None
