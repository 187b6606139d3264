"""Notices that Triton is unloading this model or shutting down, while replies are still open.

Triton waits for open streams before it calls `finalize`, without a limit of its own, and tells the model nothing; so an
unload would last as long as the longest answer. But it refuses new requests to the model at once, the model's own too:
a call to itself that could never succeed shows by its error what state the model is in (about 0.6 ms a call).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import triton_python_backend_utils as pb_utils

log = logging.getLogger(__name__)

PROBE_S = 0.5
MAX_FAILURES = 3
# what tritonserver 2.51 says: "Model 'llm' is not ready." of a model that is unloaded, "Server not ready" when it stops
_UNLOADING_WORDS = ("not ready", "no available versions", "unknown model", "stopping", "exiting")


class UnloadWatch:
    """`is_unloading` may be asked at every turn; it asks Triton at most every PROBE_S seconds."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_name = model_name
        self._clock = clock
        self._next_probe = 0.0
        self._num_failures = 0

    def is_unloading(self) -> bool:
        now = self._clock()
        if self._num_failures >= MAX_FAILURES or now < self._next_probe:
            return False
        self._next_probe = now + PROBE_S
        try:
            is_unloading = self._probe()
        except Exception:
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                log.warning("an unload will wait for open streams: the server cannot be asked about it", exc_info=True)
            return False
        self._num_failures = 0
        return is_unloading

    def _probe(self) -> bool:
        # the required input is missing, so Triton refuses this before it would reach `execute`
        request = pb_utils.InferenceRequest(
            model_name=self._model_name, requested_output_names=["text_output"], inputs=[]
        )
        response = request.exec()
        return response.has_error() and any(words in response.error().message().lower() for words in _UNLOADING_WORDS)
