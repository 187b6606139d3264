"""Reads workloads: files in JSON or YAML, and the short names that a command line takes.

docs/workloads.md explains the keys. Nothing is drawn here.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noria_bench.arrivals import MAX_CV, MIN_CV
from noria_bench.document import Section, read_document
from noria_bench.errors import BenchError
from noria_bench.length_laws import LAW_FORMS, LAW_NAMES, parse_law
from noria_bench.ramps import RampPiece
from noria_bench.schedule import check_extent, has_class_rates
from noria_bench.slo import parse_slo
from noria_bench.traces import TIMED_FORMATS, TRACE_FORMATS, recognise
from noria_bench.workload_spec import (
    ARRIVAL_LAWS,
    CLOSED,
    CONSTANT,
    DEFAULT_SAMPLING,
    GAMMA,
    POISSON,
    SEED,
    TRACE,
    Arrivals,
    Cancels,
    ClassSpec,
    SharedPrefix,
    TraceSource,
    WorkloadSpec,
)

DEFAULT_NUM_REQUESTS = 32
DEFAULT_PROMPT_TOKENS = "lognormal:128:0.8:2048"
_WORKLOAD_SUFFIXES = (".json", ".yaml", ".yml")
_TRACE_SUFFIXES = (".csv", ".jsonl")
# said elsewhere in a file, or by the load generator
_NOT_SAMPLING = ("prompt", "n", "max_tokens", "priority", "user", "cache_salt", "timeout_s", "stream")


def load_workload(name: str, prompt_tokens: str | None = None) -> WorkloadSpec:
    """name: `seed`; a workload's file (.json, .yaml, .yml); a trace (.csv, .jsonl), replayed if it has times; or the
    law of the output lengths, such as `exponential:128:512`, beside which prompt_tokens is that of the prompts'.

    Raises BenchError.
    """
    # as in a file, where a number alone is a length that all have
    name = f"constant:{name}" if name.isdecimal() else name
    if prompt_tokens is not None and prompt_tokens.isdecimal():
        prompt_tokens = f"constant:{prompt_tokens}"
    path = Path(name)
    is_law = name.partition(":")[0] in LAW_NAMES
    if prompt_tokens is not None and not is_law:
        raise BenchError("the law of the prompts' lengths needs a workload that is a law: the others have their own")
    if name == SEED:
        return parse_workload({"builtin": SEED}, name)
    if is_law:
        law = {"prompt_tokens": prompt_tokens or DEFAULT_PROMPT_TOKENS, "output_tokens": name}
        return parse_workload({"num_requests": DEFAULT_NUM_REQUESTS, "classes": [law]}, "workload")
    if path.suffix in _WORKLOAD_SUFFIXES:
        return parse_workload(read_document(path), name, path.parent)
    if path.suffix in _TRACE_SUFFIXES:
        law_of_times = TRACE if recognise(path) in TIMED_FORMATS else CLOSED
        return parse_workload({"arrivals": {"law": law_of_times}, "classes": [{"trace": {"path": name}}]}, name)
    raise BenchError(
        f"a workload is {SEED}, a file ({', '.join(_WORKLOAD_SUFFIXES)}), a trace ({', '.join(_TRACE_SUFFIXES)}) or a "
        f"law of output lengths ({LAW_FORMS}), not {name!r}"
    )


def parse_workload(document: Mapping[str, Any], source: str = "workload", folder: Path = Path()) -> WorkloadSpec:
    """source: what errors call it. folder: where relative paths in it start from. Raises BenchError."""
    top = Section(document, source)
    is_seed = top.text("builtin", None, [SEED]) == SEED
    num_requests = top.whole("num_requests", DEFAULT_NUM_REQUESTS if is_seed else None)
    sections = top.sections("classes")
    if is_seed == bool(sections):
        raise BenchError(f"{source}: give either classes, a list of at least one, or builtin: {SEED}")
    text = top.text("text", None)
    spec = WorkloadSpec(
        num_requests=num_requests,
        classes=tuple(_class(section, folder) for section in sections) or (ClassSpec(),),
        arrivals=_arrivals(top.section("arrivals")),
        duration_s=top.number("duration", None, is_above=True),
        num_warm_up=top.whole("num_warm_up", 0, 0),
        sampling={**DEFAULT_SAMPLING, **_sampling(top)},
        text=None if text is None else folder / text,
        is_seed=is_seed,
        document=_located(document, folder),
    )
    top.close()
    _check(spec, source)
    return spec


def input_hashes(spec: WorkloadSpec) -> dict[str, str]:
    """SHA-256 of the files that the workload is drawn from, traces and text, by path."""
    paths = [one.trace.path for one in spec.classes if one.trace is not None]
    paths += [spec.text] if spec.text is not None else []
    try:
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    except OSError as error:
        raise BenchError(f"cannot read {error.filename}: {error.strerror}") from None


def _located(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The document with paths that start from where this process does, for parsing it again without its file."""
    located = copy.deepcopy(dict(document))
    for values, key in [(located, "text"), *((one.get("trace"), "path") for one in located.get("classes") or ())]:
        if values and values.get(key):
            values[key] = str(folder / values[key])
    return located


def _arrivals(section: Section | None) -> Arrivals:
    if section is None:
        return Arrivals()
    law = section.text("law", POISSON, ARRIVAL_LAWS)
    rate = section.number("rate", None, is_above=True)
    burstiness = section.number("burstiness", 1.0, is_above=True)
    if not MIN_CV <= burstiness <= MAX_CV:
        raise section.error("burstiness", f"a coefficient of variation from {MIN_CV} to {MAX_CV}", burstiness)
    speed = section.number("speed", 1.0, is_above=True)
    ramp = _ramp(section)
    for key, laws in {
        "rate": (POISSON, GAMMA, CONSTANT),
        "ramp": (POISSON, GAMMA, CONSTANT),
        "burstiness": (GAMMA,),
        "speed": (TRACE,),
    }.items():
        if section.has(key) and law not in laws:
            raise BenchError(f"{section.where(key)} is for arrivals by {', '.join(laws)}, not {law}")
    section.close()
    return Arrivals(law, rate, burstiness, speed, ramp)


def _ramp(section: Section) -> tuple[RampPiece, ...]:
    pieces = []
    for piece in section.sections("ramp"):
        is_step = piece.has("rate")
        start = piece.number("rate" if is_step else "from", None)
        end = start if is_step else piece.number("to", None)
        seconds = piece.number("seconds", None, is_above=True)
        shape = "linear" if is_step else piece.text("shape", "linear", ("linear", "exponential"))
        piece.close()
        if start is None or end is None or seconds is None:
            raise BenchError(f"{piece.where(None)} must be {{rate, seconds}} or {{from, to, seconds, shape}}")
        if shape == "exponential" and min(start, end) == 0:
            raise BenchError(f"{piece.where(None)}: an exponential piece must start and end above 0")
        pieces.append(RampPiece(start, end, seconds, shape == "exponential"))
    return tuple(pieces)


def _class(section: Section, folder: Path) -> ClassSpec:
    trace = _trace(section.section("trace"), folder)
    laws = {key: section.take(key) for key in ("prompt_tokens", "output_tokens")}
    if (trace is None) != (laws["prompt_tokens"] is not None) or (trace is None and laws["output_tokens"] is None):
        raise BenchError(
            f"{section.where(None)} must have prompt_tokens and output_tokens, or a trace, beside which output_tokens "
            "may stand to replace its own"
        )
    prompt_tokens, output_tokens = (
        None if law is None else parse_law(law, section.where(key)) for key, law in laws.items()
    )
    if section.has("share") and section.has("rate"):
        raise BenchError(f"{section.where('share')} and a rate of its own exclude each other")
    slo = section.text("slo", None)
    if slo is not None:
        try:
            parse_slo(slo)
        except BenchError as error:
            raise BenchError(f"{section.where('slo')}: {error}") from None
    spec = ClassSpec(
        name=section.text("name", "default"),
        share=section.number("share", 1.0, is_above=True),
        rate=section.number("rate", None, is_above=True),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        trace=trace,
        slo=slo,
        cancels=_cancels(section.section("cancel")),
        shared_prefix=_shared_prefix(section.section("shared_prefix")),
        sampling=_sampling(section) | _scheduling(section),
    )
    section.close()
    return spec


def _trace(section: Section | None, folder: Path) -> TraceSource | None:
    if section is None:
        return None
    path = section.text("path", None)
    if path is None:
        raise section.error("path", "the path of a file", path)
    source = TraceSource(
        path=folder / path,
        format=section.text("format", None, TRACE_FORMATS),
        max_prompt_tokens=section.whole("max_prompt_tokens", None),
        max_output_tokens=section.whole("max_output_tokens", None),
        is_clipping=section.text("longer", "cut", ("cut", "drop")) == "cut",
    )
    section.close()
    return source


def _cancels(section: Section | None) -> Cancels | None:
    if section is None:
        return None
    share, after_tokens = section.share("share", 1.0), section.take("after_tokens")
    section.close()
    return Cancels(share, parse_law(after_tokens, section.where("after_tokens")))


def _shared_prefix(section: Section | None) -> SharedPrefix | None:
    if section is None:
        return None
    num_tokens = section.whole("tokens", None)
    if num_tokens is None:
        raise section.error("tokens", "a whole number of at least 1", None)
    prefix = SharedPrefix(num_tokens, section.share("share", 1.0), section.whole("groups", 1))
    section.close()
    return prefix


def _scheduling(section: Section) -> dict[str, Any]:
    values = {
        "priority": section.whole("priority", None, 0),
        "user": section.text("user", None),
        "cache_salt": section.text("cache_salt", None),
    }
    return {key: value for key, value in values.items() if value is not None}


def _sampling(section: Section) -> dict[str, Any]:
    values = section.take("sampling")
    if values is None:
        return {}
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BenchError(f"{section.where('sampling')}: {error}") from None
    if not isinstance(values, Mapping) or any(key in values for key in _NOT_SAMPLING):
        raise section.error(
            "sampling", f"a mapping of sampling parameters, {', '.join(_NOT_SAMPLING)} not among them", values
        )
    return dict(values)


def _check(spec: WorkloadSpec, source: str) -> None:
    """What keys ask of each other. Raises BenchError."""
    names = [one.name for one in spec.classes]
    for place, one in enumerate(spec.classes):
        where = f"{source}: classes[{place}]"
        if one.name in names[:place]:
            raise BenchError(f"{where}.name must differ from the other classes', not {one.name!r}")
        if has_class_rates(spec.classes) and one.rate is None:
            raise BenchError(f"{where}.rate must be given, as other classes have rates")
        if one.rate is not None and spec.arrivals.law not in (POISSON, GAMMA, CONSTANT):
            raise BenchError(f"{where}.rate needs arrivals.law to be {POISSON}, {GAMMA} or {CONSTANT}")
        if spec.arrivals.law == TRACE and one.trace is None:
            raise BenchError(f"{where}.trace must be given, as arrivals.law is {TRACE}")
    if spec.arrivals.ramp and spec.duration_s is not None:
        raise BenchError(f"{source}: duration: the ramp's seconds say how long it is")
    if spec.num_requests is not None and spec.num_warm_up >= spec.num_requests:
        raise BenchError(f"{source}: num_warm_up must be less than num_requests, not {spec.num_warm_up}")
    try:
        check_extent(spec)
    except BenchError as error:
        raise BenchError(f"{source}: {error}") from None
