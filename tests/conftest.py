"""Set before anything is imported: quiet, offline, the Triton language interpreted, and with a stand-in for the module
that only Triton's stub has.

And the echo models on a real tritonserver, for tests of whatever sends requests.
"""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# read where a kernel is defined. Servers that tests start inherit it, and on a CPU choose the same kernels as without
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

from support import fake_pb_utils
from support.echo_server import EchoServer, running_echo_server

sys.modules["triton_python_backend_utils"] = fake_pb_utils  # type: ignore[assignment]
# what a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    with running_echo_server(tmp_path_factory.mktemp("echo")) as server:
        yield server
