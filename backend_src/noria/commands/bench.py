"""`noria bench`: modes and configurations under a workload, in turn, with all that is needed to judge the figures."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from noria.commands.bench_facts import engine_facts, model_directory
from noria.commands.bench_options import DEFAULT_OUTPUT, BenchOptions, add_bench_arguments, bench_options
from noria.commands.bench_servers import fresh_servers, reloaded_variants, reloading_server, running_server
from noria.commands.common import add_engine_arguments, engine_config, prepare_model, say, server_options
from noria.serving.server import ServerOptions
from noria_bench.environment import differences, machine
from noria_bench.errors import BenchError
from noria_bench.measurement import MeasuredRun, RunPlan, ServerUrls
from noria_bench.prompts import TextTokenizer, load_tokenizer
from noria_bench.records import Outcome
from noria_bench.reporting.terminal import comparison_table
from noria_bench.results import FILE, Result, Run, read_result
from noria_bench.session import ResultFolder, Variant, measure_into, run_session, turns
from noria_bench.slo import parse_slo
from noria_bench.sweep import Bracket, Probe, capacity_line, capacity_of, find_bracket, probe_of, slos_of
from noria_bench.workload import Workload
from noria_bench.workload_build import build_workload
from noria_bench.workload_file import input_hashes
from noria_bench.workload_spec import Arrivals

MIN_PROBE_REQUESTS = 10
# at a rate, where the load generator does not keep up
MAX_ATTEMPTS = 3
INTERRUPTED = 130


def add_bench(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "bench",
        help="measure modes and configurations under a workload",
        description="Sends a workload to servers that it starts, or to one that runs, and keeps every token's time "
        "stamp, the server's counters and the environment. `noria report` makes a page of the result.",
    )
    add_bench_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(run=_run_bench)


def _run_bench(args: argparse.Namespace) -> int:
    earlier = None if args.replay is None else read_result(args.replay)
    options = bench_options(args) if earlier is None else _options_of(earlier)
    if earlier is not None:
        _refuse_beside_replay(args)
        args.engine, args.model = list(earlier.arguments["engine"]), earlier.arguments["model"]
        args.repository = None if earlier.arguments["repository"] is None else Path(earlier.arguments["repository"])
    common = server_options(args)
    chosen = {"engine": args.engine, "model": args.model, "repository": args.repository and str(args.repository)}
    return _Session(options, common, chosen, args.output, args.command_line).run(earlier)


def _options_of(result: Result) -> BenchOptions:
    try:
        options = BenchOptions.from_json(result.arguments["bench"])
        # what it is made of is read later: here it is known whose fault it is
        options.spec()
        options.variants()
        return options
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BenchError(f"--replay: the result's arguments are damaged: {error!r}") from None


def _refuse_beside_replay(args: argparse.Namespace) -> None:
    """They would be ignored, silently."""
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    add_engine_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in ("replay", "output") and getattr(args, name) != default:
            raise BenchError(f"--replay runs what the result says: leave out --{name.replace('_', '-')}")


def run_bench(options: BenchOptions, common: ServerOptions, command: Sequence[str]) -> int:
    """As the command would, into the default directory. The exit code."""
    chosen: dict[str, Any] = {"engine": [], "model": None, "repository": None}
    return _Session(options, common, chosen, None, command).run()


class _Session:
    """One `noria bench` from its arguments to its result."""

    def __init__(
        self,
        options: BenchOptions,
        common: ServerOptions,
        chosen: Mapping[str, Any],
        output: Path | None,
        command: Sequence[str],
    ) -> None:
        """chosen: what a replay needs besides the options, to make `common` again."""
        self._command = command
        self.console = Console(stderr=True)
        self._options = options
        self._common = common
        self._spec = options.spec()
        if options.concurrency is not None:
            self._spec = replace(self._spec, arrivals=Arrivals(), duration_s=None)
        self._tokenizer = self._load_tokenizer()
        # the variants of a repeat follow each other with the same one, and texts of exact length take their time
        self._workload = lru_cache(maxsize=2)(self._draw)
        first = self._workload(options.seed, options.rate, None)
        self._slos = slos_of(first, None if options.slo is None else parse_slo(options.slo))
        self._path = _new_folder(output)
        self.folder = ResultFolder(self._path, self._result(first, chosen), options.keeps_records)

    def run(self, earlier: Result | None = None) -> int:
        """Exit code: 0, 1 where a run cannot be trusted or requests failed, 130 after Ctrl-C.

        earlier: a result of the same arguments, which this is to repeat.
        """
        try:
            if earlier is not None:
                self._check_repeats(earlier)
            return self._run()
        finally:
            self.folder.discard_if_empty()

    def _check_repeats(self, earlier: Result) -> None:
        now = self.folder.result
        for difference in differences(earlier.environment, now.environment):
            self.console.print(f"differs from the result: {difference}", highlight=False, markup=False)
        if earlier.workload["sha256"] != now.workload["sha256"]:
            raise BenchError("--replay: the same arguments make another workload; see what differs above")

    def _run(self) -> int:
        with self._variants() as variants:
            is_complete = self._sweep(variants) if self._options.sweep else self._compare(variants)
        if is_complete and self._options.has_engine_alone:
            self._measure_engine_alone()
        runs = self.folder.result.runs
        if runs and not self._options.sweep:
            Console().print(comparison_table(runs))
        for capacity in self.folder.result.capacities:
            Console().print(capacity_line(capacity), highlight=False, markup=False)
        if runs:
            written = f"written: {self._path / FILE}; `noria report {self._path}` makes a page of it"
            self.console.print(written, highlight=False, markup=False, soft_wrap=True)
        if not is_complete:
            self.console.print("interrupted" + ("" if runs else ", nothing was measured"), highlight=False)
            return INTERRUPTED
        # a sweep tries again where its generator did not keep up
        is_invalid = any(not run.is_valid for run in runs) and not self._options.sweep
        return 1 if is_invalid or any(run.mismatches or _num_failed(run) for run in runs) else 0

    def _load_tokenizer(self) -> TextTokenizer | None:
        """Of the model that is served; of a running server's nothing is known."""
        if self._options.url is not None or not self._options.has_exact_prompts:
            return None
        prepare_model(self._common)
        return load_tokenizer(model_directory(self._common))

    def _draw(self, seed: int, rate: float | None, num_requests: int | None) -> Workload:
        options = self._options
        return build_workload(
            self._spec,
            seed=seed,
            scale=options.scale,
            rate=rate,
            num_requests=num_requests or options.num_requests,
            tokenizer=self._tokenizer,
        )

    def _result(self, workload: Workload, chosen: Mapping[str, Any]) -> Result:
        options = self._options
        about = {
            "source": options.workload_source,
            "sha256": workload.digest(),
            "num_requests": len(workload.items),
            "output_cv": _variation([item.max_tokens for item in workload.items]),
            "inputs": input_hashes(self._spec),
            "document": dict(options.workload),
        }
        environment = machine() | ({} if options.url else {"model": engine_facts(self._common)})
        slo = {one.name: one.slo or options.slo for one in workload.classes}
        return Result(
            command=self._command,
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            arguments={"bench": options.to_json(), **chosen},
            workload=about,
            slo={name: text for name, text in slo.items() if text is not None},
            environment=environment,
        )

    @contextmanager
    def _variants(self) -> Iterator[list[Variant]]:
        options, candidates = self._options, self._options.variants()
        if options.url is not None:
            urls = ServerUrls(options.url, str(options.http_url), str(options.metrics_url))
            ports = f"gRPC {urls.grpc}, HTTP {urls.http} (--http-url), metrics {urls.metrics} (--metrics-url)"
            self.console.print(ports, highlight=False)
            running = [running_server(urls, "server")]
            yield reloaded_variants(urls, self._common, candidates) if candidates else running
        elif options.is_reloading:
            with reloading_server(self._common, candidates) as variants:
                yield variants
        else:
            yield fresh_servers(self._common, candidates)

    def _plan(self, variant: Variant, repeat: int, rate: float | None, name: str, num: int | None = None) -> RunPlan:
        options = self._options
        return RunPlan(
            name=name,
            label=variant.label,
            # equal for all variants of a repeat, which are compared in pairs
            workload=self._workload(options.seed + repeat, rate, num),
            seed=options.seed + repeat,
            repeat=repeat,
            rate=rate,
            concurrency=options.concurrency,
            timeout_s=options.timeout_s,
            objectives={name: own for name, slo in self._slos.items() if (own := slo.per_request()) is not None},
            protocol=options.protocol,
            model=options.model,
            engine=variant.engine,
        )

    def _compare(self, variants: Sequence[Variant]) -> bool:
        def plan_of(variant: Variant, repeat: int) -> RunPlan:
            return self._plan(variant, repeat, self._options.rate, f"{variant.label}-{repeat}")

        return run_session(variants, self._options.num_repeats, plan_of, self.folder, self.console)

    def _measure_engine_alone(self) -> None:
        # as in the stub, and before torch is loaded; see serving.server.server_environment
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from noria.offline import run_offline

        workload = self._workload(self._options.seed, None, None)
        run, records = run_offline(engine_config(self._common), workload, say)
        self.folder.add(MeasuredRun(run, records, []))

    def _sweep(self, variants: Sequence[Variant]) -> bool:
        assert self._options.sweep is not None
        low, high = self._options.sweep
        brackets: dict[str, list[Bracket]] = {variant.label: [] for variant in variants}
        try:
            for repeat, variant in turns(variants, self._options.num_repeats):
                with variant.start() as urls:
                    try_rate = self._prober(urls, variant, repeat)
                    brackets[variant.label].append(find_bracket(try_rate, low, high, self._options.resolution))
        except KeyboardInterrupt:
            return False
        finally:
            slo = "; ".join(f"{name}: {one}" if len(self._slos) > 1 else str(one) for name, one in self._slos.items())
            for label, found in brackets.items():
                if found:
                    self.folder.add_capacity(capacity_of(label, slo, found))
        return True

    def _prober(self, urls: ServerUrls, variant: Variant, repeat: int) -> Callable[[float], Probe]:
        def try_rate(rate: float) -> Probe:
            num = self._spec.num_warm_up + max(MIN_PROBE_REQUESTS, math.ceil(rate * self._options.probe_s))
            name = f"{variant.label}-rate{rate:.4g}-{repeat}"
            for attempt in range(MAX_ATTEMPTS):
                plan = self._plan(variant, repeat, rate, name + f"-again{attempt}" * (attempt > 0), num)
                measured = measure_into(self.folder, urls, plan, self.console)
                if measured.run.is_interrupted:
                    raise KeyboardInterrupt
                # a neighbour's moment would otherwise pass for the server's limit
                if not measured.run.generator.problems:
                    return probe_of(rate, self._slos, measured.run, measured.records)
            problem = measured.run.generator.problems[0]
            raise BenchError(f"{name}: not valid {MAX_ATTEMPTS} times: {problem}")

        return try_rate


def _variation(lengths: Sequence[int]) -> float:
    """Coefficient of variation."""
    return float(np.std(lengths) / np.mean(lengths))


def _num_failed(run: Run) -> int:
    """Refused and late requests are results; failed ones are faults."""
    return run.summary.all.outcomes.get(Outcome.FAILED.value, 0)


def _new_folder(output: Path | None) -> Path:
    path = output or DEFAULT_OUTPUT / datetime.now().strftime("%Y%m%d-%H%M%S")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BenchError(f"--output must be a new or empty directory, which {path} is not")
    return path
