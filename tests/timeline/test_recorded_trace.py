"""Damaged recordings: what a killed server leaves is read, anything else is named by its line."""

from pathlib import Path

import pytest

from noria.errors import ConfigError
from noria.timeline.recorded_trace import read_trace
from support.engines import make_request
from support.recordings import record_run


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    record_run(tmp_path / "trace", [make_request(max_tokens=5)])
    return tmp_path / "trace"


def test_a_last_line_that_breaks_off_is_left_out(recording: Path) -> None:
    whole = read_trace(recording)
    lines = recording.read_text().splitlines(keepends=True)
    assert '"reason"' in lines[-1]
    recording.write_text("".join(lines[:-2]) + lines[-2][:20])
    cut = read_trace(recording)
    assert cut.steps == whole.steps[:-1]
    assert cut.ends == ()


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (1, "{}", "line 1: must be the header of a 'noria trace' of version 1"),
        (1, '{"format": "noria trace", "version": 2}', "line 1: must be the header"),
        (3, '{"step": 2,', "line 3: "),
        (3, "[]", "line 3: must be a JSON object"),
        (3, '{"step": 2, "start": 1, "rows": []}', "line 3: has no 'end'"),
        (3, '{"step": 2, "start": 1, "end": 2, "rows": [[1, 2, 3]]}', "line 3: "),
        (3, '{"step": 2, "start": 1, "end": 2, "rows": [[1, 2, 3, 9]]}', "line 3: 9 is not a valid RowKind"),
        (4, '{"request": 1}', "line 4: has no 'end'"),
    ],
)
def test_a_damaged_line_is_named(recording: Path, number: int, line: str, message: str) -> None:
    lines = recording.read_text().splitlines()
    lines[number - 1] = line
    recording.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(recording)


def test_files_with_nothing_to_draw(recording: Path) -> None:
    header = recording.read_text().splitlines()[0]
    recording.write_text(header + "\n")
    with pytest.raises(ConfigError, match="no step was recorded"):
        read_trace(recording)
    recording.write_text("")
    with pytest.raises(ConfigError, match="line 1: must be the header"):
        read_trace(recording)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(recording.parent / "absent")
