"""The client's part of the `noria` command: generate and chat.

Each subcommand's parser carries `run`, a function of the parsed arguments that returns the exit code.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from noria_client.chat import Conversation, chat, error_line
from noria_client.client import DEFAULT_MODEL, PROTOCOLS, Client
from noria_client.errors import ServerError
from noria_client.text_request import Prompt

DEFAULT_URLS = {"grpc": "localhost:8001", "http": "localhost:8000"}
INTERRUPTED = 130

_SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("min_tokens", int, "no end before so many tokens"),
    ("temperature", float, "0 takes the likeliest token each time; the model's own distribution is 1"),
    ("top_k", int, "draw from the K likeliest tokens; 0 from all"),
    ("top_p", float, "draw from the likeliest tokens that have this probability together"),
    ("min_p", float, "draw from tokens of at least this share of the likeliest one's probability"),
    ("repetition_penalty", float, "above 1 makes tokens of prompt and answer less likely"),
    ("presence_penalty", float, "above 0 makes tokens of the answer less likely"),
    ("frequency_penalty", float, "the same, per occurrence"),
    ("seed", int, "equal seeds give equal answers"),
)


def add_generate(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "generate",
        help="complete a text",
        description="Completes TEXT and prints the answer as it comes. Ctrl-C cancels it on the server.",
    )
    parser.add_argument("text", metavar="TEXT", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="put TEXT as a user's message to the chat template")
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="print tokens as they come (default: yes)"
    )
    _add_server_arguments(parser)
    _add_sampling_arguments(parser, default_max_tokens=128)
    parser.set_defaults(run=run_generate)


def add_chat(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with an instruct model",
        description="A conversation through the model's chat template. Ctrl-C cancels an answer, /exit ends.",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _add_server_arguments(parser)
    # a small model is at its best with the likeliest tokens
    _add_sampling_arguments(parser, default_max_tokens=512, default_temperature=0.0)
    parser.set_defaults(run=run_chat)


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse type for finite numbers above 0."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
        return number

    return parse


def run_generate(args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.text == "-" else args.text
    prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
    try:
        with _client(args) as client:
            if args.stream:
                _print_stream(client, prompt, args)
            else:
                print(client.generate(prompt, timeout_s=args.timeout, **_sampling(args)).text)
    except ServerError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def run_chat(args: argparse.Namespace) -> int:
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with _client(args) as client:
        try:
            # says at once, not after the first message, that there is no such server or model
            client.traits()
        except ServerError as error:
            print(error_line(error), file=sys.stderr)
            return 1
        sampling = _sampling(args) | {"timeout_s": args.timeout}
        return chat(Conversation(client, sampling, messages), input, sys.stdout)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--protocol", choices=PROTOCOLS, default="grpc", help="default: grpc")
    urls = ", ".join(f"{url} for {protocol}" for protocol, url in DEFAULT_URLS.items())
    parser.add_argument("--url", metavar="HOST:PORT", help=f"of the server (default: {urls})")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"name on the server (default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--timeout", type=positive(float), metavar="SECONDS", help="the server ends the request after so long"
    )


def _add_sampling_arguments(
    parser: argparse.ArgumentParser, default_max_tokens: int, default_temperature: float | None = None
) -> None:
    group = parser.add_argument_group("sampling", "What is not given and has no default here is left to the server.")
    group.add_argument(
        "--max-tokens", type=int, default=default_max_tokens, metavar="N", help=f"default: {default_max_tokens}"
    )
    for name, kind, help_text in _SAMPLING_FLAGS:
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", help=help_text)
    group.set_defaults(temperature=default_temperature)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's own end")


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The client leaves out what is None."""
    names = ["max_tokens", *(name for name, _, _ in _SAMPLING_FLAGS), "stop", "ignore_eos"]
    return {name: getattr(args, name) for name in names}


def _client(args: argparse.Namespace) -> Client:
    return Client(args.url or DEFAULT_URLS[args.protocol], args.protocol, args.model)


def _print_stream(client: Client, prompt: Prompt, args: argparse.Namespace) -> None:
    has_begun = False
    try:
        with closing(client.stream(prompt, timeout_s=args.timeout, **_sampling(args))) as deltas:
            for delta in deltas:
                print(delta.text, end="", flush=True)
                has_begun = True
    finally:
        # an error, too, begins on a line of its own
        if has_begun:
            print(flush=True)
