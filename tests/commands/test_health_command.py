"""`noria health` against a metrics endpoint that says what a server would say."""

import argparse
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from noria.commands.health import HEARTBEAT, add_health
from noria.serving.machine import free_ports


class Endpoint:
    def __init__(self) -> None:
        self.text = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(outer.text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def beat(self, age_s: float | None, model: str = "llm") -> None:
        """A heartbeat of that age besides; None is of a model that was unloaded."""
        value = 0.0 if age_s is None else time.time() - age_s
        self.text += f'{HEARTBEAT}{{mode="inflight",model="{model}",version="1"}} {value}\n'


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.01,))
    thread.start()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()
    thread.join()


def health(address: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_health(parser.add_subparsers())
    args = parser.parse_args(["health", "--metrics-url", address, *arguments])
    return int(args.run(args))


def test_a_fresh_heartbeat_is_healthy_and_quiet(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.beat(age_s=1.0)
    assert health(endpoint.address) == 0
    assert health(f"http://{endpoint.address}/metrics", "--max-age", "500") == 0
    assert capsys.readouterr() == ("", "")


def test_an_old_one_is_not_and_the_reason_is_said(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.beat(age_s=400.0)
    assert health(endpoint.address) == 1
    assert "the engine of model llm last turned 400." in capsys.readouterr().err
    assert health(endpoint.address, "--max-age", "500") == 0


def test_one_dead_engine_among_several_is_a_fault_and_an_unloaded_model_is_not(endpoint: Endpoint) -> None:
    endpoint.beat(age_s=1.0)
    endpoint.beat(age_s=None, model="gone")
    assert health(endpoint.address) == 0
    endpoint.beat(age_s=400.0, model="dead")
    assert health(endpoint.address) == 1


@pytest.mark.parametrize("text", ["", f'{HEARTBEAT}{{model="llm"}} 0\n', "noria_steps_total 3\n"])
def test_without_a_loaded_model_it_is_not_healthy(
    endpoint: Endpoint, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.text = text
    assert health(endpoint.address) == 1
    assert "no model is loaded" in capsys.readouterr().err


def test_no_server_and_nonsense_are_faults_with_a_reason(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.text = "<html>\n"
    assert health(endpoint.address) == 1
    assert "not a metric sample" in capsys.readouterr().err
    port = free_ports("127.0.0.1", (0, 0, 0))[0]
    assert health(f"127.0.0.1:{port}") == 1
    assert "refused" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_asked(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    endpoint.beat(age_s=0.0)
    assert health(endpoint.address) == 0
