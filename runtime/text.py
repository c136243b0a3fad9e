"""From token ids to text while they arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from tutel_pack.errors import InputError

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are no character (yet)."""
CONTEXT = 6
"""Prompt tokens that are decoded before the first new one: decoders drop the space before a text's first word."""


def encode(tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt, with the tokenizer's own start tokens; ids are taken as they are.

    InputError if it is neither, a text without a tokenizer, or text with lone surrogates (what bytes on a command line
    become that are no text).
    """
    if not isinstance(prompt, str):
        return _checked(prompt)
    if tokenizer is None:
        raise InputError("This artifact has no tokenizer: give the prompt as token ids.")
    check_unicode(prompt)
    # Not verbose: a prompt that is too long gets a sentence of ours.
    return list(tokenizer(prompt, verbose=False).input_ids)


def check_unicode(text: str) -> None:
    """InputError for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InputError(f"The prompt is not valid Unicode ({e.reason} at character {e.start}).") from e


def _checked(ids) -> list[int]:
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) for i in ids):
        raise InputError(f"A prompt must be text or a list of token ids, not {reprlib.repr(ids)}.")
    return list(ids)


class TextStream:
    """The text of one sequence, a token at a time. All pieces joined are its text.

    tokenizer: transformers' tokenizer, or None: all pieces are empty.  prompt: token ids before the first new one.
    stop: strings that end the text.  `stopped` turns true when one of them was met.
    """

    def __init__(self, tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = StopStrings(stop)
        # Decoding only from the last border on is what keeps a long text linear. `_shown` is the text of the first
        # `_read` of `_ids`, which went out already and is there as context.
        self._ids = list(prompt[-CONTEXT:])
        self._read = len(self._ids)
        self._shown = self._decode().rstrip(REPLACEMENT)

    @property
    def stopped(self) -> bool:
        return self._stop.met

    def push(self, token: int) -> str:
        """What the next token lets out: often a word, sometimes nothing."""
        self._ids.append(token)
        text = self._decode()
        if text.endswith(REPLACEMENT) or len(text) <= len(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode()
        return self._stop.push(piece)

    def finish(self) -> str:
        """What was held back. Half a character at the very end is dropped."""
        piece = self._decode()[len(self._shown) :].rstrip(REPLACEMENT)
        return self._stop.push(piece) + self._stop.finish()

    def _decode(self) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Lets a text through up to the first stop string. What could be the start of one is held back until it is not."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""
        self.met = False

    def push(self, piece: str) -> str:
        if self.met:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        self.met = bool(found)
        out = text[: min(found) if found else len(text) - self._started(text)]
        self._held = "" if found else text[len(out) :]
        return out

    def finish(self) -> str:
        out, self._held = self._held, ""
        return out

    def _started(self, text: str) -> int:
        """Characters at the end of text that are the start of a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
