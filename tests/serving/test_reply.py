"""When a reply has something to send."""

from noria.engine.outputs import RequestOutput
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SampledToken
from noria.sequence import FinishReason, Request
from noria.serving.reply import Reply, ReplyOptions


def reply(is_streamed: bool = True, n: int = 1) -> Reply:
    requests = [Request(index, (1, 2), SamplingParams(), seed=0) for index in range(n)]
    return Reply(ReplyOptions(is_streamed=is_streamed), requests, ["ab"], n)


def chunks(target: Reply, interval: int, texts: list[str], request_id: int = 0) -> list[str]:
    """What is sent while one token after the other comes, the last of which ends the answer."""
    sent = []
    for index, text in enumerate(texts):
        reason = FinishReason.LENGTH if index == len(texts) - 1 else None
        target.take(RequestOutput(request_id, text, (SampledToken(7),), reason))
        if target.has_news(interval):
            sent.append("".join(part.text for part in target.pop_chunk()))
    return sent


def test_the_first_token_is_sent_at_once_then_so_many_together_then_the_rest() -> None:
    assert chunks(reply(), 1, list("abcd")) == ["a", "b", "c", "d"]
    assert chunks(reply(), 3, list("abcdefghi")) == ["a", "bcd", "efg", "hi"]
    assert chunks(reply(), 100, list("abcd")) == ["a", "bcd"]


def test_tokens_without_text_yet_wait_and_count() -> None:
    assert chunks(reply(), 2, ["", "ab", "", "", "c", "d", ""]) == ["ab", "c", "d"]


def test_an_answer_that_is_not_streamed_is_sent_at_its_end_whatever_the_interval() -> None:
    assert chunks(reply(is_streamed=False), 1, list("abcd")) == ["abcd"]
    assert chunks(reply(is_streamed=False), 2, list("abcd")) == ["abcd"]


def test_of_several_answers_the_one_that_is_due_takes_the_others_along() -> None:
    target = reply(n=2)
    target.take(RequestOutput(0, "a", (SampledToken(7),)))
    assert target.has_news(3)
    target.pop_chunk()
    target.take(RequestOutput(1, "x", (SampledToken(7),)))
    assert chunks(target, 3, list("bcde"), request_id=0) == ["bcdx", "e"]
    assert not target.has_news(3)
    assert chunks(target, 3, list("y"), request_id=1) == ["y"]


def test_an_answer_that_ends_does_not_wait_for_the_others() -> None:
    target = reply(n=2)
    assert chunks(target, 5, list("ab"), request_id=0) == ["a", "b"]
    for text in "xyz":
        target.take(RequestOutput(1, text, (SampledToken(7),)))
        assert not target.has_news(5)
