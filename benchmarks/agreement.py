"""Noria's load generator beside one that nobody here wrote: NVIDIA's perf_analyzer, on the same server and requests.

    python benchmarks/agreement.py --perf-analyzer PATH [--libraries DIR] [--modes inflight] [--repeat 3] [--json FILE]

perf_analyzer 2.51.0 is a binary in the data folder of the wheel tritonclient 2.51.0; it needs libb64 (Debian:
libb64-0d) and a libcudart.so.12, for which the one in the nvidia-pytriton wheel serves under that name in --libraries.
Both keep the same number of requests under way and send the same prompts in the same order, in turn, so that what
drifts on the machine meets both. Compared are the time to the first response and responses a second, by raw time
stamps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from noria.commands.common import prepare_model, server_starter
from noria.serving.server import ServerOptions, default_repository
from noria_bench.distribution import Distribution
from noria_bench.measurement import RunPlan, ServerUrls, measure
from noria_bench.workload import WorkItem, Workload
from noria_bench.workload_build import build_workload
from noria_bench.workload_file import load_workload
from noria_client.text_request import build_request

TOLERANCE = 0.10


@dataclass(frozen=True)
class Figures:
    """Of one run by one generator: seconds to the first response, responses a second, and how many requests."""

    first_response_s: Distribution
    responses_per_s: float
    num_requests: int


def ours(urls: ServerUrls, workload: Workload, concurrency: int, console: Console) -> Figures:
    plan = RunPlan("noria", "noria", workload, concurrency=concurrency)
    measured = measure(urls, plan, console)
    if not measured.run.is_valid:
        raise SystemExit(f"our run is not valid: {measured.run.generator.problems}")
    return _figures([(record.sent_s, record.times_s) for record in measured.records])


def theirs(binary: Path, libraries: Path | None, urls: ServerUrls, workload: Workload, concurrency: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="noria-") as name:
        folder = Path(name)
        data = [_inputs(workload, item) for item in workload.items]
        (folder / "inputs.json").write_text(json.dumps({"data": data}))
        command = [
            *(str(binary), "-m", "llm", "-i", "grpc", "-u", urls.grpc, "--async", "--streaming"),
            *("--input-data", str(folder / "inputs.json"), "--concurrency-range", str(concurrency)),
            *("--request-count", str(len(workload.items)), "--profile-export-file", str(folder / "profile.json")),
            # the time limit of a measurement that a request count does not end
            *("--measurement-interval", "600000", "--stability-percentage", "999"),
        ]
        environment = dict(os.environ)
        if libraries is not None:
            environment["LD_LIBRARY_PATH"] = str(libraries)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"perf_analyzer failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        profile = json.loads((folder / "profile.json").read_text())
    (experiment,) = profile["experiments"]
    requests = experiment["requests"]
    return _figures([(one["timestamp"] / 1e9, [t / 1e9 for t in one["response_timestamps"]]) for one in requests])


def _inputs(workload: Workload, item: WorkItem) -> dict[str, list[object]]:
    """The tensors that our client sends."""
    sampling = {"max_tokens": item.max_tokens, **workload.sampling, **item.sampling}
    request = build_request(item.prompt, is_streamed=True, timeout_s=None, priority=0, sampling=sampling)
    return {name: [value] for name, value in request.inputs().items()}


def _figures(requests: Sequence[tuple[float, Sequence[float]]]) -> Figures:
    first = Distribution.of(times_s[0] - sent_s for sent_s, times_s in requests)
    assert first is not None
    begin_s = min(sent_s for sent_s, _ in requests)
    end_s = max(times_s[-1] for _, times_s in requests)
    return Figures(first, sum(len(times_s) for _, times_s in requests) / (end_s - begin_s), len(requests))


def table(mode: str, pairs: Sequence[tuple[Figures, Figures]]) -> Table:
    rich_table = Table(title=f"{mode}: noria bench and perf_analyzer in turn, medians of {len(pairs)} pairs")
    for heading in ("figure", "noria bench", "perf_analyzer", "ratio", "ratio of each pair"):
        rich_table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, read in (
        ("first response s, median", lambda one: one.first_response_s.median),
        ("first response s, p95", lambda one: one.first_response_s.p95),
        ("responses/s", lambda one: one.responses_per_s),
    ):
        both = [(read(our), read(their)) for our, their in pairs]
        ratios = [our / their for our, their in both]
        cells = (median(our for our, _ in both), median(their for _, their in both), median(ratios))
        rich_table.add_row(name, *(f"{cell:.3g}" for cell in cells), " ".join(f"{ratio:.2f}" for ratio in ratios))
    return rich_table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--perf-analyzer", type=Path, required=True, metavar="PATH")
    parser.add_argument("--libraries", type=Path, metavar="DIR", help="where perf_analyzer's libraries are")
    parser.add_argument("--modes", default="inflight", metavar="M,M")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N")
    parser.add_argument("--num-requests", type=int, default=24, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    console = Console(stderr=True)
    # a prompt that one of them has sent would be in the cache for the other
    options = ServerOptions(default_repository(), engine={"prefix_caching": False})
    prepare_model(options)
    spec = load_workload("uniform:24:40", "uniform:24:40")
    raw = {}
    with server_starter(options) as start_server:
        for mode in args.modes.split(","):
            pairs = []
            with start_server(mode) as urls:
                for repeat in range(args.repeat):
                    workload = build_workload(spec, seed=repeat, num_requests=args.num_requests)
                    our = ours(urls, workload, args.concurrency, console)
                    their = theirs(args.perf_analyzer, args.libraries, urls, workload, args.concurrency)
                    pairs.append((our, their))
            Console().print(table(mode, pairs))
            raw[mode] = [{"noria": asdict(our), "perf_analyzer": asdict(their)} for our, their in pairs]
    if args.json is not None:
        args.json.write_text(json.dumps(raw, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
