"""`noria generate` and `noria chat` against a real tritonserver."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys
import time

import pytest

from noria_client import cli
from noria_client.chat import Conversation, chat
from noria_client.client import Client

COMMAND = """
import argparse, sys
from noria_client import cli
parser = argparse.ArgumentParser(prog="noria")
subparsers = parser.add_subparsers(required=True)
cli.add_generate(subparsers)
cli.add_chat(subparsers)
args = parser.parse_args()
sys.exit(args.run(args))
"""


def run(*arguments):
    parser = argparse.ArgumentParser(prog="noria")
    subparsers = parser.add_subparsers(required=True)
    cli.add_generate(subparsers)
    cli.add_chat(subparsers)
    args = parser.parse_args(arguments)
    return args.run(args)


def server_flags(echo_server, protocol="grpc", model="stream"):
    return ["--url", echo_server.url(protocol), "--protocol", protocol, "--model", model]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_generate(echo_server, protocol, stream, capsys):
    assert run("generate", *server_flags(echo_server, protocol), stream, "--max-tokens", "2", "a b c") == 0
    assert capsys.readouterr().out == "a b \n"


def test_generate_from_standard_input(echo_server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped in"))
    assert run("generate", *server_flags(echo_server), "-") == 0
    assert capsys.readouterr().out == "piped in \n"


def test_generate_passes_the_flags_that_are_given(echo_server, capsys):
    flags = ["--temperature", "0", "--top-k", "3", "--stop", "x", "--stop", "y", "--ignore-eos", "--timeout", "9"]
    assert run("generate", *server_flags(echo_server), *flags, "!request") == 0
    received = json.loads(capsys.readouterr().out)
    assert json.loads(received["inputs"]["sampling_parameters"]) == {
        "max_tokens": 128,
        "temperature": 0.0,
        "top_k": 3,
        "stop": ["x", "y"],
        "ignore_eos": True,
    }
    assert received["timeout_us"] == 9_000_000


def test_generate_through_the_chat_template(echo_server, capsys):
    assert run("generate", *server_flags(echo_server), "--chat", "hi") == 0
    assert json.loads(capsys.readouterr().out) == [{"role": "user", "content": "hi"}]


def test_an_error_is_one_line(echo_server, capsys):
    assert run("generate", *server_flags(echo_server), "!error two\nlines") == 1
    captured = capsys.readouterr()
    assert captured.err == "error: two lines\n"


def test_chat_without_a_server(capsys):
    assert run("chat", "--url", "127.0.0.1:1") == 1
    assert capsys.readouterr().err.startswith("error: UNAVAILABLE: ")


def test_interrupted_generate_cancels_on_the_server(echo_server):
    prompt = "!endless from the command line"
    command = [sys.executable, "-c", COMMAND, "generate", *server_flags(echo_server), "--max-tokens", "9999", prompt]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.read(5) == b"word "
    process.send_signal(signal.SIGINT)
    # reads on: a process whose pipe is full cannot end
    process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    with Client(echo_server.grpc, model="stream") as client:
        deadline = time.monotonic() + 5
        while prompt not in client.generate("!cancelled").text.splitlines():
            assert time.monotonic() < deadline, "the server never saw the cancellation"
            time.sleep(0.05)


class Typist:
    """Answers a chat's prompts, then ends the input."""

    def __init__(self, *texts):
        self._texts = iter(texts)

    def __call__(self, prompt):
        try:
            return next(self._texts)
        except StopIteration:
            raise EOFError from None


@pytest.fixture
def conversation(echo_server):
    with Client(echo_server.grpc, model="stream") as client:
        yield Conversation(client, {"max_tokens": 64}, [{"role": "system", "content": "Be brief."}])


def test_chat_sends_the_whole_history(conversation):
    out = io.StringIO()
    assert chat(conversation, Typist("one", "", "two", "/exit", "never"), out) == 0
    first, second = out.getvalue().splitlines()
    assert json.loads(first) == conversation.messages[:2]
    assert json.loads(second) == conversation.messages[:4]
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]
    assert conversation.messages[3]["content"] == "two"


class InterruptedOutput(io.StringIO):
    """Ctrl-C as the first piece of an answer is written."""

    has_interrupted = False

    def flush(self):
        if not self.has_interrupted:
            self.has_interrupted = True
            raise KeyboardInterrupt


def test_ctrl_c_cancels_the_answer_and_the_chat_goes_on(conversation):
    out = InterruptedOutput()
    assert chat(conversation, Typist("one", "two"), out) == 0
    assert " [cancelled]\n" in out.getvalue()
    contents = [message["content"] for message in conversation.messages]
    # what was said before the interrupt stays part of the conversation
    assert contents[1] == "one"
    assert contents[2].startswith("[{")
    assert contents[3] == "two"


def test_a_failed_turn_is_not_part_of_the_conversation(conversation):
    conversation.client.close()
    with Client("127.0.0.1:1") as absent:
        conversation.client = absent
        out = io.StringIO()
        assert chat(conversation, Typist("one"), out) == 1
    assert out.getvalue().startswith("error: UNAVAILABLE: ")
    assert [message["role"] for message in conversation.messages] == ["system"]
