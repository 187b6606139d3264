"""Recorded requests in the formats that others publish them in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noria_bench.errors import BenchError
from noria_bench.traces import TraceRow, measured, read_trace, recognise, within

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = f"""{HEADER}
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,3960,0
2023-11-16 18:16:46.6805900,12,900
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 14, 15]}
{"timestamp": 3500, "input_length": 600, "output_length": 0, "hash_ids": [0, 16]}

{"timestamp": 3000, "input_length": 20, "output_length": 3}
"""
VLLM = """{"prompt": "What is the capital of India?", "output_tokens": 12}
{"prompt": "Name three rivers.", "answer": "not read"}
"""
TURNS = [
    {"from": "gpt", "value": "Greetings."},
    {"from": "human", "value": "Why is the sky blue?"},
    {"from": "gpt", "value": "Light scatters."},
    {"from": "human", "value": "And red?"},
    {"from": "gpt", "value": "It does so less."},
]
SHAREGPT = json.dumps(
    [{"id": "a", "conversations": TURNS}, {"id": "b", "conversations": TURNS[:2]}, {"conversations": []}]
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    assert recognise(path) == "azure"
    # an answer of no tokens is one: every engine gives at least that
    assert read_trace(path) == [TraceRow(0, 374, 44), TraceRow(4.25, 3960, 1), TraceRow(60, 12, 900)]


def test_mooncake_is_in_milliseconds_and_put_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)
    assert recognise(path) == "mooncake"
    assert read_trace(path) == [
        TraceRow(0, 1100, 500, hash_ids=(0, 14, 15)),
        TraceRow(2, 20, 3),
        TraceRow(2.5, 600, 1, hash_ids=(0, 16)),
    ]


def test_vllm(tmp_path: Path) -> None:
    path = write(tmp_path, VLLM)
    assert recognise(path) == "vllm"
    assert read_trace(path) == [
        TraceRow(prompt="What is the capital of India?", num_output_tokens=12),
        TraceRow(prompt="Name three rivers."),
    ]


@pytest.mark.parametrize("text", [SHAREGPT, f"\n  {json.dumps(json.loads(SHAREGPT), indent=1)}"])
def test_sharegpt_takes_the_first_question_and_its_answer(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert recognise(path) == "sharegpt"
    assert read_trace(path) == [TraceRow(prompt="Why is the sky blue?", answer="Light scatters.")]


def test_tokens_of_prompts_and_answers_are_counted() -> None:
    rows = [TraceRow(prompt="a b c", answer="d e"), TraceRow(prompt="a b", num_output_tokens=7), TraceRow(0, 5, 6)]
    counted = measured(rows, lambda text: len(text.split()), has_outputs=True)
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in counted] == [(3, 2), (2, 7), (5, 6)]
    with pytest.raises(BenchError, match="'a b' has no output_tokens"):
        list(measured([TraceRow(prompt="a b")], len, has_outputs=True))
    assert [row.num_output_tokens for row in measured([TraceRow(prompt="a b")], len, has_outputs=False)] == [1]


def test_long_requests_are_cut_or_left_out(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE))
    assert list(within(rows, None, None)) == rows
    cut = list(within(rows, 1000, 100))
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in cut] == [(374, 44), (1000, 1), (12, 100)]
    assert list(within(rows, 1000, 100, is_clipping=False)) == rows[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n", "line 1: the column GeneratedTokens is missing"),
        (f"{HEADER}\n", "holds no request"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,1\nyesterday,1,1\n", "line 3: TIMESTAMP must be like"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", "line 3: TIMESTAMP must not lie before"),
        (f"{HEADER}\n2023-11-16 18:15:46,0,1\n", "line 2: ContextTokens must be a whole number of at least 1"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,-3\n", "line 2: GeneratedTokens must be a whole number of at least 0"),
        (f"{HEADER}\n2023-11-16 18:15:46,1\n", "line 2: GeneratedTokens must be"),
        (
            '{"timestamp": "1", "input_length": 1, "output_length": 1}',
            "line 1: timestamp must be a finite number of milli",
        ),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 1: input_length must be a whole number"),
        ('{"timestamp": 1, "input_length": 1}', "line 1: output_length must be a whole number of at least 0, not None"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be a list"),
        ('{"prompt": ""}', "line 1: prompt must be a text"),
        ('{"prompt": "a"}\n{"prompt": ["a"]}', "line 2: prompt must be a text"),
        ('{"prompt": "a", "output_tokens": -1}', "line 1: output_tokens must be a whole number of at least 0"),
        ('{"prompt": "a"}\n3', "line 2: must be a JSON object, not '3'"),
        ("[{]", "is no JSON"),
        ('[{"turns": 3}]', "conversation 0: conversations must be a list of turns"),
        ("[]", "holds no request"),
        ("", "no trace of a known format"),
        ("Timestamp,Request tokens\n", "azure, mooncake, vllm, sharegpt"),
        ('{"text": "a"}', "no trace of a known format"),
    ],
)
def test_what_is_wrong_in_a_trace_is_named_by_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        # a missing column keeps a file from being recognised by it, not from being read as what it is said to be
        read_trace(write(tmp_path, text))


def test_a_format_may_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a", "input_length": 3, "output_tokens": 2}')
    assert recognise(path) == "mooncake"
    assert read_trace(path, "vllm") == [TraceRow(prompt="a", num_output_tokens=2)]
    with pytest.raises(BenchError, match="must be one of azure, mooncake, vllm, sharegpt, not 'burst'"):
        read_trace(path, "burst")


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(BenchError, match="cannot read"):
        read_trace(tmp_path / "none.csv", "azure")
