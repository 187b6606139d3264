"""The picture: the same request keeps its colour, and files come out whole and the same each time."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from noria.cli import main
from noria.commands import trace as trace_command
from noria.errors import ConfigError
from noria.timeline import picture
from noria.timeline.picture import draw_slots, match_requests
from noria.timeline.recorded_trace import read_trace
from noria.timeline.slots import TracedRequest
from support.engines import make_request
from support.recordings import record_run


def test_requests_are_matched_by_their_lengths_whatever_their_order() -> None:
    first = {5: TracedRequest(5, 10, 20), 6: TracedRequest(6, 11, 20), 7: TracedRequest(7, 10, 20)}
    second = {
        1: TracedRequest(1, 11, 20),
        2: TracedRequest(2, 10, 20),
        3: TracedRequest(3, 99, 1),
        4: TracedRequest(4, 10, 20),
    }
    assert match_requests([first, second]) == [{5: 0, 6: 1, 7: 2}, {1: 1, 2: 0, 3: 3, 4: 2}]


def test_a_missing_matplotlib_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install noria\[plots\]"):
        draw_slots({}, [])


def test_recordings_become_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    recordings = []
    for mode in ("static", "inflight"):
        requests = [make_request(range(9), 3 + 5 * index % 11) for index in range(9)]
        path = tmp_path / f"{mode}.jsonl"
        record_run(path, requests, num_blocks=16, batching_mode=mode, max_num_batched_tokens=8)
        recordings.append(path)
    folder = tmp_path / "out"
    assert main(["trace", "--from", *map(str, recordings), "--output", str(folder)]) == 0
    names = ["static.trace.json", "inflight.trace.json", "slots.svg", "slots.png"]
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    assert (folder / "slots.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "slots.svg").read_bytes()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    draw_slots({path.stem: read_trace(path) for path in recordings}, [folder / "again.svg"])
    assert (folder / "again.svg").read_bytes() == svg
    assert main(["trace", "--from", str(recordings[0]), str(recordings[0]), "--output", str(folder)]) == 1
    assert "different names" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "static,fast"], "mode must be one of"),
        (["--scale", "0"], "scale must be a finite number above 0"),
        (["--from", "absent.jsonl"], "cannot read absent.jsonl"),
    ],
)
def test_what_is_wrong_is_said_before_a_server_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(trace_command, "_record_mode", lambda *_: pytest.fail("a server was started"))
    assert main(["trace", *arguments, "--output", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
