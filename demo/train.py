#!/usr/bin/env python3
"""Train the demo model: a small Mixture-of-Experts language model that writes English.

    python demo/train.py --out demo/model

The script does everything: it downloads two Debian packages with public-domain text, cleans the
text, holds out every 100th chapter, trains a byte-level BPE tokenizer and a Qwen3-MoE model on the
rest, saves an ordinary Hugging Face folder in BF16, and measures its perplexity on the held-out
text. It writes OUT/ (the model) and, beside it, heldout.txt and perplexity.json.

Needs: torch, transformers, tokenizers, safetensors, numpy, tqdm, and a Debian-like system
(apt-get, dpkg-deb). Nothing is installed and no root is needed.
"""

import argparse
import json
import math
import re
import struct
import subprocess
import tempfile
import time
import zlib
from html import unescape
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

PACKAGES = ["sword-text-web", "r-cran-janeaustenr"]
EOS, PAD = "<|endoftext|>", "<|pad|>"
WINDOW = 512  # longest training context, and the window of the perplexity measurement

# A plain-text model knows no roles: the assistant continues the user's text.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ ' ' + message['content'] | trim + '\n\n' }}
{%- else -%}
{{ message['content'] | trim }}
{%- if message['role'] == 'system' -%}{{ '\n\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}"""


# ---------------------------------------------------------------- text


def fetch(folder: Path) -> None:
    """Download the Debian packages into `folder` (unless they are there) and unpack them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=folder, check=True)
        deb = sorted(folder.glob(f"{name}_*.deb"))[-1]
        subprocess.run(["dpkg-deb", "-x", deb.name, "."], cwd=folder, check=True)


def plain(text: str) -> str:
    """ASCII punctuation, single spaces, paragraphs divided by one empty line."""
    for old, new in {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "_": ""}.items():
        text = text.replace(old, new)
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
    return "\n\n".join(p for p in paragraphs if p)


def bible_chapters(folder: Path) -> list[str]:
    """Chapters of the World English Bible from its SWORD module (zlib blocks of OSIS markup)."""
    chapters = []
    for part in ("ot", "nt"):
        index = next(folder.rglob(f"engWEB*/{part}.bzs"))
        data = index.with_suffix(".bzz").read_bytes()
        for start, size, _ in struct.iter_unpack("<III", index.read_bytes()):
            markup = zlib.decompress(data[start : start + size]).decode()
            for body in re.findall(r"<chapter [^>]*sID=[^>]*>(.*?)<chapter eID=", markup, re.S):
                body = re.sub(r"<(note|title|speaker|list)\b.*?</\1>", " ", body, flags=re.S)
                body = re.sub(r'<(div [^>]*type="x-p"|lg|lb)[^>]*>', "\n\n", body)
                body = re.sub(r"<l [^>]*>", " ", body)
                body = plain(unescape(re.sub(r"<[^>]+>", "", body)))
                chapters.append(re.sub(r" +([,.;:!?])", r"\1", body))
    return [c for c in chapters if len(c) > 200]


def austen_chapters(folder: Path) -> list[str]:
    """Chapters of Jane Austen's novels from an R data file (serialised character vectors)."""
    data = next(folder.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    chapters = []
    while data:
        stream = zlib.decompressobj()
        raw = stream.decompress(data[4:])  # 4 bytes of length, then one zlib stream per novel
        data = stream.unused_data
        (skip,) = struct.unpack_from(">i", raw, 14)  # length of the name of the encoding
        at = 18 + skip + 4
        (count,) = struct.unpack_from(">i", raw, at)
        at, lines = at + 4, []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", raw, at + 4)
            lines.append(raw[at + 8 : at + 8 + length].decode())
            at += 8 + length
        book = re.sub(r"(?m)^\s*(VOLUME .*|FINIS|THE END|END OF .*)\s*$", "", "\n".join(lines))
        chapters += re.split(r"(?mi)^\s*CHAPTER +[IVXLC\d]+\.?\s*$", book)[1:]
    return [plain(c) for c in chapters]


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(chapters: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        chapters,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=WINDOW,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------- model


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=640,
        moe_intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.02,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")  # much faster than "eager" on CPUs
    return model


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder as it would be published: BF16, two shards and their index."""
    state = {k: v.detach().to(torch.bfloat16) for k, v in model.state_dict().items()}
    copy = Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.95,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    copy.save_pretrained(out, max_shard_size="4MB")
    tokenizer.save_pretrained(out, save_jinja_files=False)


@torch.no_grad()
def perplexity(model: Qwen3MoeForCausalLM, ids: list[int]) -> tuple[float, int]:
    """Windows of WINDOW tokens side by side; every token but the first of its window is scored."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if window.shape[1] < 2:
            break
        logits = model(window).logits[0, :-1].float()
        total += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    model.train()
    return math.exp(total / count), count


def train(model: Qwen3MoeForCausalLM, ids: np.ndarray, heldout: list[int], args, checkpoint) -> None:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    # Warm up, hold, then fall linearly to zero over the last 30 % of the steps.
    decay_from = int(0.7 * args.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / args.warmup, 1.0, (args.steps - step) / (args.steps - decay_from)),
    )
    config = model.config
    random = np.random.default_rng(args.seed)
    bar = tqdm(range(1, args.steps + 1), desc="training", mininterval=5)
    for step in bar:
        # Half windows first (faster), full ones while the rate falls; a step's tokens stay the same.
        window = WINDOW // 2 if step <= decay_from else WINDOW
        starts = random.integers(0, len(ids) - window, size=args.batch_tokens // window)
        batch = torch.from_numpy(np.stack([ids[s : s + window] for s in starts]))
        result = model(batch, output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(result.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        # Each layer is balanced on its own: transformers' own loss mixes the layers, and then most
        # experts of a layer can die as long as those of other layers make up for them.
        balance = sum(
            load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
            for logits in result.router_logits
        )
        (loss + config.router_aux_loss_coef * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if step % args.check_every == 0 or step == args.steps:
            tqdm.write(f"step {step}: held-out perplexity {perplexity(model, heldout)[0]:.3f}")
            checkpoint()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--text", type=Path, help="folder to keep the downloaded packages in")
    parser.add_argument("--init", type=Path, help="folder of a saved model to go on from")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-tokens", type=int, default=2048, help=f"tokens in a step, a multiple of {WINDOW}")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--check-every", type=int, default=400, help="steps between saved checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.text or Path(scratch)
        fetch(folder)
        chapters = bible_chapters(folder) + austen_chapters(folder)
    held, kept = chapters[50::100], [c for i, c in enumerate(chapters) if i % 100 != 50]
    heldout_text = "\n\n".join(held) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    (args.out.parent / "heldout.txt").write_text(heldout_text)

    tokenizer = train_tokenizer(kept, args.vocab)
    eos = tokenizer.eos_token_id
    ids = np.array([t for c in tokenizer(kept)["input_ids"] for t in [*c, eos]], dtype=np.int64)
    heldout = tokenizer(heldout_text)["input_ids"]
    print(
        f"{len(kept)} chapters, {sum(map(len, kept)):,} characters, {len(ids):,} tokens to train on; "
        f"{len(held)} chapters, {len(heldout_text):,} characters, {len(heldout):,} tokens held out"
    )

    model = new_model(tokenizer)
    if args.init:
        model.load_state_dict(Qwen3MoeForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    started = time.time()
    train(model, ids, heldout, args, lambda: save(model, tokenizer, args.out))
    minutes = (time.time() - started) / 60

    # What is published is measured: the BF16 weights from the folder, computed in float32.
    model = Qwen3MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    value, scored = perplexity(model, heldout)
    report = {
        "bf16_perplexity": round(value, 4),
        "tokens": scored,
        "window": WINDOW,
        "stride": WINDOW,
        "compute": "float32",
        "training": {
            "steps": args.steps,
            "tokens": args.steps * args.batch_tokens,
            "tokens_in_text": len(ids),
            "minutes": round(minutes, 1),
        },
    }
    (args.out.parent / "perplexity.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
