"""What a prompt's text may be."""

import pytest

from noria.errors import InvalidRequest
from noria.serving.prompt import parse_messages


@pytest.mark.parametrize("text", ["Why?", "[1, 2] is a list", "[]", "[citation needed]", '"[{"'])
def test_other_text_is_one_message_of_the_user(text: str) -> None:
    assert parse_messages(text) == [{"role": "user", "content": text}]


def test_a_list_of_objects_is_a_conversation() -> None:
    text = ' [ {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]'
    assert [message["role"] for message in parse_messages(text)] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"role": "user", "content": "x"}', "text_input begins as a list of messages, but is not valid JSON"),
        ('[{"role": "user"}]', "must have the strings role and content"),
        ('[{"role": "user", "content": 1}]', "must have the strings role and content"),
        ('[{"role": "user", "content": "x", "name": "y"}]', "and nothing else"),
        ('[{"role": "user", "content": "x"}, 7]', "must have the strings role and content"),
        (r'[{"role": "user", "content": "\ud800"}]', "content in text_input is not valid Unicode"),
        (r'[{"role": "\ud800", "content": "x"}]', "role in text_input is not valid Unicode"),
    ],
)
def test_a_malformed_conversation_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_messages(text)
