"""From messages to a prompt, by the model's own chat template, in the immutable sandbox that transformers sets up."""

from __future__ import annotations

from collections.abc import Sequence

from tutel_pack.errors import InputError
from tutel_pack.runtime.text import check_unicode


def has_template(tokenizer) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def as_messages(messages: str | Sequence[dict], system: str | None = None) -> list[dict]:
    """Messages {"role", "content"} from a user's text or such messages, a system prompt in front if there is one."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, *messages]


def require_template(tokenizer) -> None:
    """InputError if there is no chat template."""
    if not has_template(tokenizer):
        raise InputError(
            "This artifact has no chat template: continue a plain text (`tutel-run generate --raw`, or `generate` in "
            "Python), or put the model's chat_template.jinja into its folder."
        )


def render(tokenizer, messages: Sequence[dict]) -> list[int]:
    """Token ids of the conversation, up to where the assistant's answer starts.

    InputError if there is no template, if a message is malformed, or if the template refuses the messages.
    """
    require_template(tokenizer)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f'A message must be {{"role": …, "content": …}}, not {message!r}.')
        if isinstance(message["content"], str):
            check_unicode(message["content"])
    from jinja2 import TemplateError

    try:
        # Not verbose: a conversation that is too long gets a sentence of ours.
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False, tokenizer_kwargs={"verbose": False}
        )
    except (TemplateError, TypeError) as e:
        raise InputError(f"The model's chat template refuses these messages: {e}") from e
    if not ids:
        raise InputError("The model's chat template makes nothing of these messages.")
    return list(ids)
