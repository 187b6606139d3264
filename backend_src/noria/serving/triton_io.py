"""Between Triton's tensors and Noria's requests: the text contract of Triton's vLLM backend.

The inputs and outputs are listed in model_repository/llm/config.pbtxt; the README says what each means.
Bad input raises InvalidRequest naming the input or parameter; nothing here touches the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from noria.engine.request_limits import RequestLimits
from noria.errors import DeadlineExceeded, InvalidRequest, NoriaError, Overloaded, Unsupported
from noria.sampling_params import SamplingParams, parse_sampling_params, sampling_params_from
from noria.serving.prompt import PromptEncoder
from noria.serving.reply import ChunkPart, Reply, ReplyOptions

MAX_TIMEOUT_US = 2**63 - 1
_FLAGS = {
    "return_finish_reason": "returns_finish_reason",
    "return_cumulative_logprob": "returns_cumulative_logprob",
    "return_logprobs": "returns_logprobs",
    "return_num_input_tokens": "returns_num_input_tokens",
    "return_num_output_tokens": "returns_num_output_tokens",
}
_REFUSED = {"image": "images", "embedding_request": "embedding requests"}


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """One prompt of a client request."""

    prompt_text: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client request, checked. timeout_s: its own time limit in seconds, None for none. n is common to all rows."""

    rows: tuple[ParsedRow, ...]
    n: int
    options: ReplyOptions
    timeout_s: float | None


def parse_request(request: Any, encoder: PromptEncoder, limits: RequestLimits, is_batched: bool) -> ParsedRequest:
    """A pb_utils.InferenceRequest as the client meant it. Copies all it keeps. Raises InvalidRequest or Unsupported."""
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    for name, words in _REFUSED.items():
        if name in tensors:
            raise Unsupported(f"{name}: this model takes text only, {words} are not supported")
    texts = _texts(tensors, "text_input")
    if not texts:
        raise InvalidRequest("text_input must hold at least one prompt")
    options = _options(tensors, is_batched)
    parameters = _request_parameters(request)
    all_params = _sampling_params(tensors, parameters, len(texts), options)
    if len({params.n for params in all_params}) > 1:
        raise InvalidRequest("n must be the same for all prompts of one request")
    rows = tuple(_row(text, params, encoder, limits) for text, params in zip(texts, all_params, strict=True))
    return ParsedRequest(rows, all_params[0].n, options, _timeout_s(request, parameters))


def _row(text: str, params: SamplingParams, encoder: PromptEncoder, limits: RequestLimits) -> ParsedRow:
    token_ids = tuple(encoder.encode(text, params.apply_chat_template))
    limits.check(token_ids, params)
    return ParsedRow(text, token_ids, params)


def _texts(tensors: Mapping[str, Any], name: str) -> list[str]:
    if name not in tensors:
        raise InvalidRequest(f"{name} is required")
    texts = []
    for value in tensors[name].as_numpy().reshape(-1):
        if not isinstance(value, (bytes, str)):
            raise InvalidRequest(f"{name} must be of type BYTES")
        try:
            texts.append(value if isinstance(value, str) else value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None
    return texts


def _flag(tensors: Mapping[str, Any], name: str) -> bool | None:
    """A BOOL input, None when absent. With several rows they must agree: one response has one form."""
    if name not in tensors:
        return None
    values = {bool(value) for value in tensors[name].as_numpy().reshape(-1)}
    if len(values) != 1:
        raise InvalidRequest(f"{name} must hold one value, the same for every prompt of the request")
    return values.pop()


def _options(tensors: Mapping[str, Any], is_batched: bool) -> ReplyOptions:
    is_streamed = bool(_flag(tensors, "stream"))
    excludes_prompt = _flag(tensors, "exclude_input_in_output")
    if is_streamed and excludes_prompt is False:
        raise InvalidRequest("exclude_input_in_output must be true, or be left out, when stream is true")
    return ReplyOptions(
        is_streamed=is_streamed,
        includes_prompt=not is_streamed and not excludes_prompt,
        is_batched=is_batched,
        **{field: bool(_flag(tensors, name)) for name, field in _FLAGS.items()},
    )


def _request_parameters(request: Any) -> dict[str, Any]:
    values = json.loads(request.parameters() or "{}")
    return values if isinstance(values, dict) else {}


def _sampling_params(
    tensors: Mapping[str, Any], parameters: Mapping[str, Any], num_rows: int, options: ReplyOptions
) -> list[SamplingParams]:
    """One for each row: from the tensor if there is one, else from the request's parameters.

    HTTP's `generate` puts `priority` among the latter, beside the tensor or not.
    """
    if "sampling_parameters" in tensors:
        texts = _texts(tensors, "sampling_parameters")
        if len(texts) != num_rows:
            raise InvalidRequest(f"sampling_parameters must hold one JSON object for each of {num_rows} prompts")
        beside = sampling_params_from({"priority": parameters.get("priority", 0)}).priority
        all_params = [_with_priority(parse_sampling_params(text), beside) for text in texts]
    else:
        all_params = [sampling_params_from(parameters, ignore_unknown=True)] * num_rows
    if options.returns_logprobs or options.returns_cumulative_logprob:
        return [params if params.logprobs is not None else replace(params, logprobs=0) for params in all_params]
    # nobody will see them, so they need not be computed
    return [replace(params, logprobs=None) for params in all_params]


def _with_priority(params: SamplingParams, priority: int) -> SamplingParams:
    """Also of a priority among the request's parameters; 0 says nothing in either place."""
    if not priority or params.priority == priority:
        return params
    if params.priority:
        raise InvalidRequest(
            f"priority is {params.priority} in sampling_parameters and {priority} among the request's parameters: "
            "give one, or the same"
        )
    return replace(params, priority=priority)


def _timeout_s(request: Any, parameters: Mapping[str, Any]) -> float | None:
    """gRPC's and infer's timeout come with the request, HTTP `generate`'s as a parameter; both in microseconds."""
    timeout_us = request.timeout() or parameters.get("timeout") or 0
    if isinstance(timeout_us, str) and timeout_us.isascii() and timeout_us.isdigit() and len(timeout_us) < 20:
        timeout_us = int(timeout_us)
    if not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or not 0 <= timeout_us <= MAX_TIMEOUT_US:
        raise InvalidRequest(f"timeout must be from 0 to {MAX_TIMEOUT_US} microseconds, not {timeout_us!r:.100}")
    return timeout_us / 1e6 if timeout_us else None


def response_for(reply: Reply, chunk: list[ChunkPart], decode: Callable[[int], str]) -> Any:
    """A pb_utils.InferenceResponse that says what `chunk` says; the optional outputs only if they were asked for."""
    options = reply.options
    shape = (reply.num_rows, reply.n) if options.is_batched else (reply.n,)
    tensors = [_strings("text_output", [part.text for part in chunk], shape)]
    if options.returns_finish_reason:
        reasons = [part.finish_reason.value if part.finish_reason else "None" for part in chunk]
        tensors.append(_strings("finish_reason", reasons, shape))
    if options.returns_cumulative_logprob:
        values = [part.cumulative_logprob for part in chunk]
        tensors.append(pb_utils.Tensor("cumulative_logprob", np.array(values, np.float32).reshape(shape)))
    if options.returns_logprobs:
        tensors.append(_strings("logprobs", [_logprobs_json(part, decode) for part in chunk], shape))
    if options.returns_num_input_tokens:
        rows_shape = (reply.num_rows, 1) if options.is_batched else (1,)
        counts = np.array(reply.num_input_tokens, np.uint32).reshape(rows_shape)
        tensors.append(pb_utils.Tensor("num_input_tokens", counts))
    if options.returns_num_output_tokens:
        counts = np.array([len(part.tokens) for part in chunk], np.uint32).reshape(shape)
        tensors.append(pb_utils.Tensor("num_output_tokens", counts))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _strings(name: str, values: list[str], shape: tuple[int, ...]) -> Any:
    array = np.array([value.encode("utf-8") for value in values], dtype=np.object_).reshape(shape)
    return pb_utils.Tensor(name, array)


def _logprobs_json(part: ChunkPart, decode: Callable[[int], str]) -> str:
    """A list with an object per token: {token id: {logprob, rank, decoded_token}}, the chosen token first.

    rank is 1 for the likeliest.
    """

    def value(token_id: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": decode(token_id)}

    entries = []
    for token in part.tokens:
        entry = {str(token.token_id): value(token.token_id, token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top_logprobs, start=1):
            entry.setdefault(str(token_id), value(token_id, logprob, rank))
        entries.append(entry)
    return json.dumps(entries)


def error_response(error: NoriaError) -> Any:
    """A pb_utils.InferenceResponse that carries `error` under the code that its kind has."""
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error), _code(error)))


def cancelled_response() -> Any:
    error = pb_utils.TritonError("the request was cancelled", pb_utils.TritonError.CANCELLED)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def _code(error: NoriaError) -> int:
    codes = pb_utils.TritonError
    if isinstance(error, Unsupported):
        return codes.UNSUPPORTED
    if isinstance(error, InvalidRequest):
        return codes.INVALID_ARG
    if isinstance(error, (Overloaded, DeadlineExceeded)):
        return codes.UNAVAILABLE
    return codes.INTERNAL
