"""Responses become deltas, and deltas answers."""

from __future__ import annotations

import json

import pytest

from noria_client.errors import ServerError
from noria_client.generation import Answer, Delta, DeltaReader, collect


def outputs(texts, reasons, counts, **more):
    base = {"text_output": texts, "finish_reason": reasons, "num_input_tokens": [7], "num_output_tokens": counts}
    return base | more


def test_a_delta_per_response():
    reader = DeltaReader()
    assert reader.read(outputs(["a"], ["None"], [2])) == [Delta("a", None, 7, 2)]
    assert reader.read(outputs([""], ["length"], [1])) == [Delta("", "length", 7, 1)]
    reader.check_complete()


def test_several_answers_are_told_apart_and_old_news_is_dropped():
    reader = DeltaReader()
    assert reader.read(outputs(["a", "b"], ["stop", "None"], [1, 1])) == [
        Delta("a", "stop", 7, 1, index=0),
        Delta("b", None, 7, 1, index=1),
    ]
    # the first answer is over and says so again, the second goes on
    assert reader.read(outputs(["", "c"], ["stop", "None"], [0, 1])) == [Delta("c", None, 7, 1, index=1)]
    with pytest.raises(ServerError, match="before the answer was finished"):
        reader.check_complete()
    reader.read(outputs(["", ""], ["stop", "length"], [0, 0]))
    reader.check_complete()


def test_a_stream_without_any_response_is_incomplete():
    with pytest.raises(ServerError, match="before the answer was finished"):
        DeltaReader().check_complete()


def test_a_response_without_text_is_an_error():
    with pytest.raises(ServerError, match="without text_output: it has embedding"):
        DeltaReader().read({"embedding": [1.0]})


def test_outputs_that_a_server_leaves_out():
    assert DeltaReader().read({"text_output": ["a"]}) == [Delta("a", None, 0, 0)]


def test_collect_joins_each_answer():
    reader = DeltaReader()
    deltas = []
    for text, reason, total in (("a", "None", -1.0), ("b", "stop", -3.0)):
        logprobs = [json.dumps([{"token": text}])] * 2
        deltas += reader.read(
            outputs([text, text.upper()], [reason] * 2, [1, 1], logprobs=logprobs, cumulative_logprob=[total, total])
        )
    generation = collect(deltas)
    assert generation.texts == ("ab", "AB")
    assert generation.answers[0] == Answer("ab", "stop", 2, -3.0, [{"token": "a"}, {"token": "b"}])
    assert (generation.num_input_tokens, generation.num_output_tokens) == (7, 4)
    assert (generation.text, generation.finish_reason) == ("ab", "stop")
