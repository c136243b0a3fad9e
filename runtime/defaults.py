"""What a checkpoint says of its own generation: the files config.json and generation_config.json beside the weights."""

from __future__ import annotations

import json
from pathlib import Path

from tutel_pack.errors import InputError
from tutel_pack.runtime.sampling import SamplingParams

FILTERS = ("top_k", "top_p", "min_p")
GENERATION = "generation_config.json"


def end_tokens(folder: Path, tokenizer=None) -> frozenset[int]:
    """Every token id that ends a text: those of both files and of the tokenizer together.

    Files disagree in practice (a chat model's end of turn is often in one of them only), and each of them is meant.
    """
    config, generation = _read(folder, "config.json"), _read(folder, GENERATION)
    ids = set()
    for name, data in (("config.json", config), ("config.json", config.get("text_config")), (GENERATION, generation)):
        ids |= _ids(folder / name, (data or {}).get("eos_token_id"))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def sampling_params(folder: Path, **options) -> SamplingParams:
    """The checkpoint's own parameters, overridden by the caller's (fields of SamplingParams; None is not given).

    When neither sets a temperature it is 1 if one of them asks for sampling, by `do_sample` or a filter, and else 0.
    `stop` may be one string. InputError names the parameter that is wrong.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(stop := given.get("stop", ()), (str, list)):
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return SamplingParams(**_with_temperature({**_checkpoint_params(folder), **given}))


def _checkpoint_params(folder: Path) -> dict:
    data = _read(folder, GENERATION)
    names = ["repetition_penalty", "max_new_tokens"]
    if data.get("do_sample") is not False:
        names += ["temperature", *FILTERS]
    params = {name: data[name] for name in names if data.get(name) is not None}
    if data.get("do_sample"):
        params.setdefault("temperature", 1.0)
    try:
        SamplingParams(**params)
    except InputError as e:
        raise InputError(f"{folder / GENERATION}: {e}") from e
    return params


def _with_temperature(params: dict) -> dict:
    return {"temperature": float(any(name in params for name in FILTERS)), **params}


def _ids(file: Path, value) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise InputError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}.")
    return set(ids)


def _read(folder: Path, name: str) -> dict:
    """The JSON object in a file, {} if there is no such file."""
    try:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise InputError(f"{folder / name} is damaged ({e}): copy or convert the model again.") from e
    if not isinstance(data, dict):
        raise InputError(f"{folder / name} is damaged (not a JSON object): copy or convert the model again.")
    return data
