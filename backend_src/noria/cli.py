"""The `noria` command: puts the subcommands' parsers together, runs the chosen one, turns errors into exit codes.

What a subcommand does is in `commands`; generate and chat are the client's own.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from noria.commands.bench import add_bench
from noria.commands.calibrate import add_calibrate
from noria.commands.demo import add_demo
from noria.commands.health import add_health
from noria.commands.profile import add_profile
from noria.commands.serve import add_serve
from noria.commands.simulate import add_simulate
from noria.commands.study import add_study
from noria.commands.trace import add_trace
from noria.commands.tune import add_tune
from noria.errors import NoriaError
from noria_bench.errors import BenchError
from noria_bench.report_command import add_report
from noria_client.cli import add_chat, add_generate
from noria_client.errors import ServerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a stated error, 2 wrong usage, 130 interrupted (a `serve` that was ready: the server's)."""
    own, extra = _split(sys.argv[1:] if arguments is None else list(arguments))
    parser = _parser()
    args = parser.parse_args(own)
    if extra and args.command != "serve":
        parser.error("only serve takes arguments after --")
    args.extra_arguments = extra
    args.command_line = ["noria", *own]
    # a plain kill or a closed terminal stops our servers in order, as Ctrl-C does
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return int(args.run(args))
    except (NoriaError, ServerError, BenchError) as error:
        print(f"noria: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands after the first -- is for tritonserver."""
    if "--" not in arguments:
        return arguments, []
    index = arguments.index("--")
    return arguments[:index], arguments[index + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="noria", description="Text generation inside Triton Inference Server.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in (
        add_serve,
        add_generate,
        add_chat,
        add_bench,
        add_report,
        add_demo,
        add_trace,
        add_calibrate,
        add_profile,
        add_simulate,
        add_study,
        add_tune,
        add_health,
    ):
        add_command(subparsers)
    return parser


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
