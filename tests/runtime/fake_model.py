"""A tiny deterministic model for tests of the engine and the command: the decoder's interface without its mathematics.

The next token depends on every token before it, read back through the block tables: a wrong block, position or length
changes it. Blocks that were not written, or were given back, hold rubbish that fails a check when read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tutel_pack.artifact import Artifact, Manifest, describe_file, write_manifest
from tutel_pack.errors import ResourceError
from tutel_pack.runtime.engine import chat, generate
from tutel_pack.spec import ModelSpec

RUBBISH = -(10**9)
VOCAB = 259
"""256 bytes and the three special tokens of `byte_tokenizer`."""
BOS, EOS, TURN = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[turn]{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[turn]assistant: {% endif %}"
)


class FakeCache:
    """Stores token ids where a real one stores keys and values, and all of a sequence's where a real one has its states."""

    def __init__(self, blocks: int, block_size: int, slots: float = math.inf):
        self.block_size = block_size
        self.states: dict[int, list[int]] = {}
        self._slots = slots
        self.store = torch.full((blocks, block_size), RUBBISH)
        self._free = list(range(blocks))[::-1]
        self.most_taken = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        assert n <= len(self._free)
        taken = [self._free.pop() for _ in range(n)]
        self.most_taken = max(self.most_taken, len(self.store) - len(self._free))
        return taken

    def free(self, ids) -> None:
        for block in list(ids):
            assert block not in self._free
            self.store[block] = RUBBISH
            self._free.append(block)

    def allocate_slot(self) -> int:
        if len(self.states) >= self._slots:
            raise ResourceError(f"More than {self._slots} states do not fit.")
        slot = next(slot for slot in range(len(self.states) + 1) if slot not in self.states)
        self.states[slot] = []
        return slot

    def free_slot(self, slot: int) -> None:
        del self.states[slot]


class FakeDecoder:
    """next_token: (tuple of all ids so far) -> the id whose logit is largest; None draws logits from a hash of them,
    and never EOS.

    memory: tokens that caches may have, beyond which they raise ResourceError; slots: states likewise. `batches` has what
    was run, as [(past, new tokens) of each sequence], `caches` every cache that was made.
    """

    device = "cpu"

    def __init__(self, context: int = 512, vocab: int = VOCAB, next_token=None, memory=math.inf, slots=math.inf):
        self.spec = ModelSpec("fake", 8, vocab, context, 1e-5, True, ())
        self._next_token, self._memory, self._slots = next_token, memory, slots
        self.batches: list[list[tuple[int, int]]] = []
        self.caches: list[FakeCache] = []

    def new_cache(self, blocks: int, block_size: int = 64) -> FakeCache:
        if blocks * block_size > self._memory:
            raise ResourceError(f"A cache of {blocks * block_size} tokens does not fit.")
        self.caches.append(FakeCache(blocks, block_size, self._slots))
        return self.caches[-1]

    def forward(self, batch, cache: FakeCache) -> torch.Tensor:
        logits, spans = torch.empty(len(batch.tokens), self.spec.vocab), []
        for s, table in enumerate(batch.block_tables):
            span = slice(batch.starts[s], batch.starts[s + 1])
            positions = batch.positions[span]
            assert positions[-1] < self.spec.context
            table = torch.tensor(table)
            cache.store[table[positions // cache.block_size], positions % cache.block_size] = batch.tokens[span]
            past = cache.store[table].flatten()[: int(positions[-1]) + 1].tolist()
            assert min(past) >= 0, "a position that was never written"
            state = cache.states[batch.slots[s]]
            assert state == past[: int(positions[0])], "a state that is another's, or not of now"
            state += past[int(positions[0]) :]
            logits[span.stop - 1] = self._logits(tuple(past))
            spans.append((int(positions[0]), len(positions)))
        self.batches.append(spans)
        return logits[batch.rows]

    def _logits(self, past: tuple[int, ...]) -> torch.Tensor:
        if self._next_token is None:
            logits = torch.randn(self.spec.vocab, generator=torch.Generator().manual_seed(hash(past) % 2**62)) * 3
            return logits.index_fill(0, torch.tensor([EOS]), -math.inf)
        logits = torch.zeros(self.spec.vocab)
        logits[self._next_token(past)] = 50
        return logits


def says(answer: bytes | list[int], prompt: int):
    """A `next_token` that answers a prompt of that many tokens with these ids, then with EOS."""
    return lambda past: answer[len(past) - prompt] if len(past) - prompt < len(answer) else EOS


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: the ids 0 … 255 are the bytes themselves, then <s>, </s> and <turn>."""
    # The same table as GPT-2's: printable bytes stand for themselves, the others for U+0100 and on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocab = {chr(b if b in printable else next(others)): b for b in range(256)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<turn>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Llama's kind: ▁ for spaces, bytes as <0xNN> where there is no word, and no space before a text's first word."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


class FakeModel:
    """What load_packed gives, as far as the engine uses it."""

    def __init__(self, folder: Path, decoder: FakeDecoder | None = None, tokenizer=None):
        self.artifact = SimpleNamespace(path=folder)
        self.decoder, self.tokenizer, self.path = decoder or FakeDecoder(), tokenizer, "native"
        self.spec, self.device = self.decoder.spec, torch.device("cpu")

    def generate(self, prompts, **options):
        return generate(self, prompts, **options)

    def chat(self, messages, **options):
        return chat(self, messages, **options)


def write_json(folder: Path, **files: dict) -> Path:
    """`name={…}` writes name.json."""
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def write_artifact(folder: Path) -> Path:
    """An artifact without tensors, which opens."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder, config={"eos_token_id": EOS})
    spec = ModelSpec("fake", 8, VOCAB, 512, 1e-5, True, ())
    files = {"config.json": describe_file(folder / "config.json")}
    write_manifest(folder, Manifest({"repo": "fake", "commit": None}, spec, {}, {}, files))
    return folder


def answers_turns(past: tuple[int, ...]) -> int:
    """A `next_token` that answers "1 turns 🦙" to a conversation with one user's message, "2 turns 🦙" with two, …"""
    turns = bytes(t for t in past if t < 256).count(b"[turn]user: ")
    answer = f"{turns} turns 🦙".encode()
    said = next(n for n in range(len(answer), -1, -1) if past[len(past) - n :] == tuple(answer[:n]))
    return answer[said] if said < len(answer) else EOS


def fake_load_packed(path, **options) -> FakeModel:
    """load_packed of an artifact that exists, with a fake decoder behind it."""
    return FakeModel(Artifact(path).path, FakeDecoder(next_token=answers_turns), byte_tokenizer(TEMPLATE))
