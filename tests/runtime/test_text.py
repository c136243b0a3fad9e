"""Text that arrives a token at a time equals text decoded at once, in whole characters, up to a stop string."""

from __future__ import annotations

import random

import pytest
from tests.runtime.fake_model import TEMPLATE, byte_tokenizer, sentencepiece_tokenizer

from tutel_pack.errors import InputError
from tutel_pack.runtime.chat import as_messages, render
from tutel_pack.runtime.text import StopStrings, TextStream, encode

LLAMA = "🦙".encode()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def pieces(tokenizer, tokens, prompt=b"A prompt:", stop=()):
    """What each token lets out, and last what the end does."""
    stream = TextStream(tokenizer, list(prompt), stop)
    return [stream.push(t) for t in tokens] + [stream.finish()]


def test_the_tokenizer_splits_characters(tokenizer):
    assert tokenizer("🦙").input_ids == list(LLAMA) == [0xF0, 0x9F, 0xA6, 0x99]
    assert tokenizer.decode([0xF0]) == "\ufffd"


def test_four_tokens_of_one_character_come_out_as_one_piece(tokenizer):
    assert pieces(tokenizer, LLAMA) == ["", "", "", "🦙", ""]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_truncated_end_is_dropped(tokenizer, count):
    assert "".join(pieces(tokenizer, b"ab" + LLAMA[:count])) == "ab"


def test_bytes_that_are_no_character_do_not_block_the_text(tokenizer):
    assert "".join(pieces(tokenizer, b"a\xff\x9fb")) == "a\ufffd\ufffdb"


def test_a_character_that_the_prompt_begins_is_completed(tokenizer):
    assert "".join(pieces(tokenizer, LLAMA[2:] + b"!", prompt=b"x" + LLAMA[:2])) == "🦙!"


def test_a_prompt_longer_than_the_context_may_be_cut_inside_a_character(tokenizer):
    assert "".join(pieces(tokenizer, "né🦙".encode(), prompt=LLAMA + LLAMA)) == "né🦙"


def test_special_tokens_are_not_text(tokenizer):
    assert pieces(tokenizer, [258, *b"a", 258, *b"b", 257]) == ["", "a", "", "b", "", ""]


def test_any_text_comes_out_unchanged(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice("ab .\nñß中文🦙👩‍👩‍👧\u200d\u0301") for _ in range(30))
        parts = pieces(tokenizer, text.encode())
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_spaces_between_words_of_a_sentencepiece_tokenizer_are_kept():
    tokenizer = sentencepiece_tokenizer(["▁Why", "▁blue", "▁sky", "s", "▁"])
    ids = dict(zip(["▁Why", "▁blue", "▁sky", "s", "▁"], range(257, 262)))
    stream = TextStream(tokenizer, [ids["▁Why"]])
    words = ["▁blue", "▁sky", "s", "▁", "▁blue"]
    assert [stream.push(ids[w]) for w in words] == [" blue", " sky", "s", " ", " blue"]
    assert tokenizer.decode([ids["▁blue"]]) == "blue", "alone, a word loses its space: what the stream must not show"


def test_byte_fallback_tokens_of_a_sentencepiece_tokenizer():
    tokenizer = sentencepiece_tokenizer(["▁a"])
    assert pieces(tokenizer, [257, *(b + 1 for b in LLAMA), 257], prompt=[257])[:-1] == [" a", "", "", "", "🦙", " a"]


def test_work_per_token_does_not_grow_with_the_text(tokenizer):
    lengths = []

    class Spy:
        def decode(self, ids, **options):
            lengths.append(len(ids))
            return tokenizer.decode(ids, **options)

    pieces(Spy(), b"word " * 100)
    assert max(lengths) < 16


@pytest.mark.parametrize(
    "stop, text, expected",
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN two", "one EN two"),  # only looked like one
        (["END"], "one EN", "one EN"),  # held back until the end
        (["END"], "EENEND", "EEN"),  # a new start inside a failed one
        (["aab"], "aaab", "a"),
        (["two", "one"], "zero one two", "zero "),  # the first in the text, not in the list
        (["🦙"], "a🦙b", "a"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["x"], "xyz", ""),
        ([], "abc", "abc"),
    ],
)
def test_the_text_ends_before_a_stop_string(tokenizer, stop, text, expected):
    parts = pieces(tokenizer, text.encode(), stop=stop)
    assert "".join(parts) == expected
    whole = StopStrings(stop)
    assert whole.push(text) + whole.finish() == expected
    assert whole.met == any(s in text for s in stop)


def test_the_first_part_of_a_stop_string_waits(tokenizer):
    assert pieces(tokenizer, b"aENb", stop=["END"]) == ["a", "", "", "ENb", ""]


def test_without_a_tokenizer_there_is_no_text():
    assert pieces(None, [1, 2]) == ["", "", ""]
    assert encode(None, [1, 2]) == [1, 2]
    with pytest.raises(InputError, match="no tokenizer"):
        encode(None, "text")


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(InputError, match="not valid Unicode"):
        encode(tokenizer, "a\udcff")


def test_a_conversation_is_rendered_by_the_models_template():
    tokenizer = byte_tokenizer(TEMPLATE)
    ids = render(tokenizer, as_messages("Hi", system="Be kind"))
    assert bytes(ids).decode() == "[turn]system: Be kind\n[turn]user: Hi\n[turn]assistant: "


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "a"}], ["a"], [{"role": 1, "content": "a"}]])
def test_a_message_without_role_or_content_is_refused(messages):
    with pytest.raises(InputError, match="A message must be"):
        render(byte_tokenizer(TEMPLATE), messages)


def test_an_empty_conversation_is_refused():
    with pytest.raises(InputError, match="makes nothing"):
        render(byte_tokenizer("{{ '' }}"), as_messages("Hi"))


def test_what_the_template_refuses_is_said():
    with pytest.raises(InputError, match="refuses these messages: no tools here"):
        render(byte_tokenizer(TEMPLATE), [{"role": "tool", "content": "1"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack):
    with pytest.raises(InputError, match="refuses"):
        render(byte_tokenizer(attack), as_messages("Hi"))


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()], ids=["no tokenizer", "no template"])
def test_without_a_template_there_is_no_chat(tokenizer):
    with pytest.raises(InputError, match="no chat template"):
        render(tokenizer, as_messages("Hi"))
