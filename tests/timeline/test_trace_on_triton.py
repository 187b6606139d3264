"""`noria trace` with real servers and the real model, end to end."""

from pathlib import Path

import pytest

from noria.cli import main
from noria.timeline.recorded_trace import read_trace
from noria.timeline.slots import SpanKind, lay_out


@pytest.mark.slow
def test_the_modes_are_recorded_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--modes", "static,inflight", "--num-requests", "5", "--scale", "0.05", "--output", str(tmp_path)]
    assert main(["trace", *arguments]) == 0
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert all(path.stat().st_size > 0 for path in written)
    assert {path.name for path in written} >= {"static.trace.json", "inflight.trace.json", "slots.svg", "slots.png"}
    lengths = []
    for mode in ("static", "inflight"):
        trace = read_trace(tmp_path / f"{mode}.jsonl")
        timeline = lay_out(trace)
        assert trace.mode == mode
        assert {request.finish_reason for request in timeline.requests.values()} == {"length"}
        has_padding = any(span.kind is SpanKind.PADDING for stay in timeline.stays for span in stay.spans)
        assert has_padding == (mode == "static")
        lengths.append(sorted((one.num_prompt_tokens, one.num_output_tokens) for one in timeline.requests.values()))
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) == 5
