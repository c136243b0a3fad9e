"""What can be converted, as a page: `python -m tutel_pack.convert.catalog > docs/models.md`."""

from __future__ import annotations

from importlib import import_module

from tutel_pack.convert import dialects, families
from tutel_pack.quant.recipe import FORMAT_CHOICES

HEAD = """# Models and source formats

Made by `python -m tutel_pack.convert.catalog` from the registries of `convert/families/` and `convert/dialects/`.

## Families that run natively

From a description of their own, with kernels that take packed weights.

| family | `model_type` in config.json |
|---|---|
"""

GENERAL = """
## All other Mixture-of-Experts models that transformers knows

Any `model_type` that transformers builds, and whose experts it keeps fused, is converted by the same rules and runs through its
transformers module with packed experts and linear layers: the general path, which is slower. `tutel-run doctor ARTIFACT` and
the loader say which path a model takes. Of a model that sees or hears (Qwen3-VL-MoE, GLM-4.5V, Llama 4, …) the text part is
converted, and the report lists what was left out. What cannot be mapped is refused before a weight is read, by name.

## Source formats

Each tensor is taken for what its header says, so a checkpoint may mix them. What is in the wanted format already is passed
through bit for bit; `--fmt source` keeps every tensor so. The one exception is the global scale of compressed-tensors'
NVFP4, which divides: the float32 nearest to its reciprocal is kept, because a value here is always a product.

| format | as it is stored |
|---|---|
"""

FOOT = """
AWQ, GPTQ, GGUF and other formats that were made from an original checkpoint are refused: convert the original.

## Formats to convert to

`--fmt` takes {choices}; see the [README](../README.md#formats).
"""


def page() -> str:
    """The page in Markdown."""
    native = [_family_row(name) for name in families.MODULES]
    sources = [f"| `{name}` | {_sentence(import_module(f'{dialects.__name__}.{name}'))} |" for name in dialects.DIALECTS]
    choices = ", ".join(f"`{choice}`" for choice in FORMAT_CHOICES)
    return HEAD + "\n".join(sorted(native)) + "\n" + GENERAL + "\n".join(sources) + "\n" + FOOT.format(choices=choices)


def _family_row(name: str) -> str:
    module = import_module(f"{families.__name__}.{name}")
    return f"| {_sentence(module)} | {', '.join(f'`{t}`' for t in module.FAMILY.model_types)} |"


def _sentence(module) -> str:
    """The first paragraph of a module's docstring."""
    return " ".join(module.__doc__.strip().split("\n\n")[0].split())


if __name__ == "__main__":
    print(page(), end="")
