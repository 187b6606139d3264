"""A conversation on the terminal: the whole history goes through the model's chat template at each turn.

Knows nothing of argparse; input and output are handed in, so that a test can hold the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO

from noria_client.client import Client
from noria_client.errors import UNKNOWN, ServerError

EXIT_COMMAND = "/exit"
PROMPT = "you> "


@dataclass
class Conversation:
    """The messages so far. A turn that fails leaves them as they were; one that is cut short keeps what was said."""

    client: Client
    sampling: Mapping[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def reply(self, text: str) -> Generator[str, None, None]:
        """The answer's pieces. Closing the generator cancels the answer on the server."""
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            with closing(self.client.stream(messages, **self.sampling)) as deltas:
                for delta in deltas:
                    pieces.append(delta.text)
                    yield delta.text
        except ServerError:
            raise
        except BaseException:
            if pieces:
                self._keep(messages, pieces)
            raise
        self._keep(messages, pieces)

    def _keep(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def chat(conversation: Conversation, ask: Callable[[str], str], out: TextIO) -> int:
    """Asks and answers until `/exit`, the end of the input or Ctrl-C at the prompt.

    Ctrl-C during an answer cancels it. Returns 1 if the server failed a turn, otherwise 0.
    """
    exit_code = 0
    while True:
        try:
            text = ask(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return exit_code
        if text == EXIT_COMMAND:
            return exit_code
        if not text:
            continue
        try:
            with closing(conversation.reply(text)) as pieces:
                for piece in pieces:
                    out.write(piece)
                    out.flush()
            out.write("\n")
        except KeyboardInterrupt:
            out.write(" [cancelled]\n")
        except ServerError as error:
            out.write(f"{error_line(error)}\n")
            exit_code = 1


def error_line(error: ServerError) -> str:
    """A server's error as one line, whatever the server wrote."""
    text = " ".join(str(error).split())
    return "error: " + text.removeprefix(f"{UNKNOWN}: ")
