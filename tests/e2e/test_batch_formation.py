"""Who forms the batch, and what it costs: measured by the server's own metrics, on a tiny model.

The numbers are set where a user sets them, in a copy of the pbtxt files.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from noria.serving.machine import free_ports
from noria.serving.server import RunningServer, ServerOptions, default_repository
from support.raw_triton import RawStream, text_inputs
from support.server_figures import figures
from support.tiny_models import tiny_model_dir

HOST = "127.0.0.1"
Serve = Callable[..., RunningServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """serve(mode, max_batch_size=, preferred=, delay_us=): a server whose pbtxt says so, with a tiny model."""
    model = tiny_model_dir(tmp_path / "model", "llama", max_position_embeddings=1024)
    repository = tmp_path / "repository"
    shutil.copytree(default_repository(), repository)
    with ExitStack() as stack:

        def start(mode: str, max_batch_size: int, preferred: list[int], delay_us: int) -> RunningServer:
            path = repository / "llm" / "configs" / f"{mode}.pbtxt"
            text = path.read_text()
            for pattern, value in (
                (r"max_batch_size: \d+", f"max_batch_size: {max_batch_size}"),
                (r"preferred_batch_size: \[.*?\]", f"preferred_batch_size: {preferred}"),
                (r"max_queue_delay_microseconds: \d+", f"max_queue_delay_microseconds: {delay_us}"),
            ):
                text, count = re.subn(pattern, value, text)
                assert count == 1
            path.write_text(text)
            http_port, grpc_port, metrics_port = free_ports(HOST, (0, 0, 0))
            engine = {"model": str(model), "kv_cache_gib": 0.05}
            options = ServerOptions(repository, mode, HOST, http_port, grpc_port, metrics_port, engine)
            return stack.enter_context(RunningServer(options, tmp_path / "server.log"))

        yield start


def run(server: RunningServer, lengths: list[int]) -> None:
    """Requests of so many output tokens, all at once."""
    sampling = {"ignore_eos": True, "temperature": 0}
    streams = [
        RawStream(server.grpc_url, text_inputs("hello", sampling | {"max_tokens": length}, stream=True))
        for length in lengths
    ]
    for stream in streams:
        assert all(response.error is None for response in stream.all())


def settled_metrics(server: RunningServer) -> dict[str, float]:
    """Once its counters no longer change: it publishes four times a second. An idle engine's heartbeat never rests."""
    before, now = {}, figures(server)
    while _counters(now) != _counters(before):
        time.sleep(0.6)
        before, now = now, figures(server)
    return now


def _counters(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.endswith("_total")}


def test_static_the_longest_of_four_holds_the_batch_and_a_third_of_the_slots_is_useful(serve: Serve) -> None:
    server = serve("static", max_batch_size=4, preferred=[4], delay_us=5_000_000)
    run(server, [20, 50, 100, 500])
    counted = settled_metrics(server)
    assert counted["steps_total"] == 500
    assert counted["slot_steps_total"] == counted["rows_total"] == 2000
    assert counted["useful_slot_steps_total"] == 670
    assert counted["slot_utilisation"] == pytest.approx(0.335)
    assert counted["generation_tokens_total"] == 670


def test_in_flight_the_same_work_takes_no_padding_row(start_server: Serve) -> None:
    server = start_server("inflight", max_num_seqs=4)
    before = figures(server)
    # the longest first: the others join while it runs, however late they come
    run(server, [200, 15, 10, 5])
    after = settled_metrics(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["rows_total"] == grown["useful_slot_steps_total"] == 230
    assert grown["steps_total"] <= 200 + 3


def test_dynamic_batches_follow_the_preferred_sizes(serve: Serve) -> None:
    # eight requests at once: with a preferred size of 2 four batches run, one after the other
    server = serve("dynamic", max_batch_size=2, preferred=[2], delay_us=3_000_000)
    run(server, [10] * 8)
    counted = settled_metrics(server)
    assert counted["rows_total"] == 80
    assert counted["steps_total"] == 40


def test_dynamic_batches_follow_the_maximal_size_and_delay(serve: Serve) -> None:
    server = serve("dynamic", max_batch_size=8, preferred=[8], delay_us=3_000_000)
    run(server, [10] * 8)
    counted = settled_metrics(server)
    assert counted["rows_total"] == 80
    assert counted["steps_total"] == 10
    # three are less than a batch: they run when the delay is over, and together
    run(server, [10] * 3)
    counted = settled_metrics(server)
    assert counted["rows_total"] == 110
    assert counted["steps_total"] == 20
