"""Under what a result was measured: the gist for the page's head, and all that was written down as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from noria_bench.reporting.figures import NOTHING, number
from noria_bench.reporting.loaded import as_mapping
from noria_bench.reporting.tables import Table
from noria_bench.reporting.text import plain
from noria_bench.results import Result, Run

_MAIN_PACKAGES = ("noria", "torch", "nvidia-pytriton")


def gist(result: Result) -> str:
    """Machine, versions, source, model and neighbours in a line or two, as far as `noria_bench.environment` and
    `measurement` wrote them down."""
    environment = result.environment
    cpu, packages, source, model = (as_mapping(environment.get(key)) for key in ("cpu", "packages", "source", "model"))
    versions = [f"{name} {packages[name]}" for name in _MAIN_PACKAGES if name in packages]
    revision = str(source.get("revision", ""))[:12] + (", modified" if source.get("is_modified") else "")
    gpus = environment.get("gpus")
    facts = [
        *(str(gpu) for gpu in (gpus if isinstance(gpus, list) else [])),
        f"{cpu['model']}" if "model" in cpu else "",
        f"{environment['num_cores']} cores" if "num_cores" in environment else "",
        *versions,
        f"model {model['name']} in {model.get('dtype', 'an unknown type')}" if "name" in model else "",
        f"source {revision}" if revision else "",
        _neighbours(result.runs),
    ]
    return plain("; ".join(fact for fact in facts if fact), 600)


def _neighbours(runs: Sequence[Run]) -> str:
    """What others took of the machine while nothing of the measurement ran."""
    keys = ("busy_cores_before", "busy_cores_after")
    values = [run.environment[key] for run in runs for key in keys if isinstance(run.environment.get(key), int | float)]
    if not values:
        return "neighbours' load not recorded"
    return f"before and after runs others kept {number(min(values))} to {number(max(values))} cores busy"


def environment_tables(result: Result) -> list[Table]:
    whole = (
        ("Environment", result.environment),
        ("Workload", result.workload),
        ("Objectives", result.slo),
        ("Arguments", result.arguments),
    )
    of_runs = (
        ("Environment of each run", [run.environment for run in result.runs]),
        ("Engine as loaded, of each run", [run.engine for run in result.runs]),
    )
    return [
        *(Table(caption, ("", "value"), tuple(flat(values)), has_text=True) for caption, values in whole if values),
        *(_each(caption, result.runs, values) for caption, values in of_runs if any(values)),
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested mappings by their dotted keys, as text."""
    leaves = []
    for key, value in values.items():
        name = f"{prefix}{plain(key, 80)}"
        if isinstance(value, Mapping) and value:
            leaves += flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            leaves.append((name, plain(text, 1000)))
    return leaves


def _each(caption: str, runs: Sequence[Run], values: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each key, a column for each run; a single column where all runs have the same."""
    leaves = [dict(flat(one)) for one in values]
    keys = list(dict.fromkeys(key for one in leaves for key in one))
    if all(one == leaves[0] for one in leaves):
        return Table(caption, ("", "all runs"), tuple(leaves[0].items()), has_text=True)
    rows = tuple((key, *(one.get(key, NOTHING) for one in leaves)) for key in keys)
    return Table(caption, ("", *(plain(run.name, 60) for run in runs)), rows)
