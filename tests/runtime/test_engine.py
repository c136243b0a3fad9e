"""The engine over a fake decoder whose every token depends on all tokens before it, through the block tables."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.fake_model import (
    BOS,
    EOS,
    RUBBISH,
    TEMPLATE,
    TURN,
    FakeDecoder,
    FakeModel,
    byte_tokenizer,
    says,
    write_json,
)

from tutel_pack.errors import InputError, ResourceError
from tutel_pack.runtime.engine import Engine, Event
from tutel_pack.runtime.sampling import SamplingParams

GREEDY = SamplingParams(max_new_tokens=30)


def ids(text: str, count: int) -> list[int]:
    """A prompt of `count` tokens that no other text shares."""
    return list((text * count).encode()[:count])


def run(prompts, params=GREEDY, decoder=None, **options) -> list[list[int]]:
    """Tokens of every prompt; params for all of them, or a list."""
    engine = Engine(decoder or FakeDecoder(), end_tokens={EOS}, **options)
    params = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, p in zip(prompts, params):
        engine.add(prompt, p)
    results = {event.index: event.result.tokens for event in engine.run() if event.result}
    return [results[i] for i in range(len(prompts))]


def alone(prompts, params=GREEDY) -> list[list[int]]:
    params = params if isinstance(params, list) else [params] * len(prompts)
    return [run([prompt], p)[0] for prompt, p in zip(prompts, params)]


@pytest.fixture
def model(tmp_path):
    return FakeModel(tmp_path, tokenizer=byte_tokenizer())


def test_prompts_of_12_and_3_tokens_give_the_same_together_as_alone():
    prompts = [ids("a long one", 12), ids("short", 3)]
    decoder = FakeDecoder()
    assert run(prompts, decoder=decoder) == alone(prompts)
    assert decoder.batches[0] == [(0, 12), (0, 3)], "no padding is run"


def test_16_prompts_with_their_own_markers_do_not_see_each_other():
    prompts = [ids(f"marker {i}: ", 5 + 7 * i) for i in range(16)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=20 + i) for i in range(16)]
    decoder = FakeDecoder()
    assert run(prompts, params, decoder, block_size=8) == alone(prompts, params)
    assert max(map(len, decoder.batches)) == 16


def test_the_fake_decoder_sees_cross_talk():
    """The negative control of the tests above: a changed token of the past changes what comes."""
    decoder = FakeDecoder()
    assert not torch.equal(decoder._logits((1, 2, 3)), decoder._logits((1, 9, 3)))
    engine = Engine(decoder)
    for prompt in (ids("one", 9), ids("two", 9)):
        engine.add(prompt, GREEDY)
    engine.step()
    stored = decoder.caches[0].store
    stored[0, 2] = stored[1, 2]
    decoder.caches[0].states[0][2] = stored[1, 2].item()
    first = [event.tokens[0] for event in engine.step()]
    expected = [tokens[1] for tokens in alone([ids("one", 9), ids("two", 9)])]
    assert first[0] != expected[0] and first[1] == expected[1]


def test_requests_of_10_and_26_tokens_both_finish():
    prompts = [ids("x", 10), ids("y", 26)]
    params = [SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=26)]
    tokens = run(prompts, params)
    assert tokens == alone(prompts, params)
    assert [len(t) for t in tokens] == [10, 26]


@pytest.mark.parametrize("max_active", [1, 2, 5])
def test_waiting_sequences_join_as_others_leave(max_active):
    prompts = [ids(f"{i}", 4 + i) for i in range(7)]
    params = [SamplingParams(max_new_tokens=3 + 5 * (i % 3)) for i in range(7)]
    decoder = FakeDecoder()
    assert run(prompts, params, decoder, max_active=max_active) == alone(prompts, params)
    started = 0
    for batch in decoder.batches:
        started += sum(past == 0 for past, _ in batch)
        assert len(batch) == max_active or started == 7, "places are filled while others wait"


@pytest.mark.parametrize("step_tokens", [1, 5, 16])
def test_prompts_run_in_parts_and_nobody_waits_for_a_long_one(step_tokens):
    prompts = [ids("hi", 2), ids("a very long prompt", 60), ids("yo", 3)]
    decoder = FakeDecoder()
    assert run(prompts, decoder=decoder, step_tokens=step_tokens) == alone(prompts)
    assert max(sum(count for _, count in batch) for batch in decoder.batches) <= step_tokens
    if step_tokens > 1:
        assert any(len(batch) > 1 and batch[0][1] == 1 and batch[1][1] > 1 for batch in decoder.batches)


def test_every_block_is_given_back():
    decoder = FakeDecoder()
    run([ids(f"{i}", 9 * i + 1) for i in range(9)], decoder=decoder, block_size=4, max_active=3)
    assert decoder.caches[-1].most_taken > 10
    for cache in decoder.caches:
        assert cache.free_blocks == len(cache.store) and (cache.store == RUBBISH).all() and not cache.states


def test_blocks_follow_the_tokens_that_there_are():
    """Not those that may come: 20 sequences without a limit fit where one could fill the context."""
    decoder = FakeDecoder(context=100_000, next_token=says(b"ok", 10))
    run([ids("a", 10)] * 20, SamplingParams(), decoder)
    assert decoder.caches[0].most_taken == 20


def test_the_cache_grows_when_it_is_full_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr("tutel_pack.runtime.engine.HEADROOM", 8)
    prompts = [ids(f"{i}", 5 + i) for i in range(5)]
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=60) for i in range(5)]
    decoder = FakeDecoder()
    assert run(prompts, params, decoder, block_size=4) == alone(prompts, params)
    sizes = [len(cache.store) for cache in decoder.caches]
    assert len(sizes) > 1 and sizes == sorted(sizes)


def test_where_the_cache_cannot_grow_the_youngest_waits():
    prompts = [ids(f"{i}", 20) for i in range(4)]
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=40) for i in range(4)]
    decoder = FakeDecoder(memory=100)
    engine = Engine(decoder, end_tokens={EOS}, block_size=4)
    for prompt, p in zip(prompts, params):
        engine.add(prompt, p)
    events = list(engine.run())
    results = {event.index: event.result.tokens for event in events if event.result}
    assert [results[i] for i in range(4)] == alone(prompts, params)
    assert list(results) == [0, 1, 2, 3]
    for i in range(4):
        assert [t for event in events if event.index == i for t in event.tokens] == results[i], "no token comes twice"


def test_times_are_of_the_first_start_and_count_what_was_computed_again(monkeypatch):
    """By a clock that counts steps."""
    decoder = FakeDecoder(memory=100)
    monkeypatch.setattr("tutel_pack.runtime.engine.time.perf_counter", lambda: len(decoder.batches))
    engine = Engine(decoder, block_size=4)
    for i in range(4):
        engine.add(ids(f"{i}", 20), SamplingParams(max_new_tokens=40))
    results = [event.result for event in engine.run() if event.result]
    assert [(r.prompt_seconds, r.seconds) for r in results[:1]] == [(1, 39)]
    assert sum(r.prompt_seconds for r in results) == 4 and results[1].seconds > 40


@pytest.mark.parametrize("slots", [1, 3])
def test_sequences_wait_for_a_place_for_their_states(slots):
    prompts = [ids(f"{i}", 4 + i) for i in range(7)]
    decoder = FakeDecoder(slots=slots)
    assert run(prompts, decoder=decoder) == alone(prompts)
    assert max(map(len, decoder.batches)) == slots


def test_states_that_fit_for_nobody_are_a_resource_error():
    decoder = FakeDecoder(slots=0)
    with pytest.raises(ResourceError, match="states do not fit"):
        run([ids("a", 5)], decoder=decoder)
    assert decoder.caches[0].free_blocks == len(decoder.caches[0].store)


def test_a_sequence_that_is_computed_again_starts_with_a_new_state():
    """The fake decoder's check of states is what sees it; without the engine's new slot it fails."""
    engine = Engine(FakeDecoder(), block_size=4)
    engine.add(ids("a", 9), GREEDY)
    engine.step()
    engine._put_back(list(engine._active))
    engine.step()
    engine._active[0].done = 0  # computed again, but with the state of all tokens
    with pytest.raises(AssertionError, match="a state that is another's"):
        engine.step()


def test_a_sequence_that_cannot_fit_is_a_resource_error():
    with pytest.raises(ResourceError, match="does not fit"):
        run([ids("a", 20)], SamplingParams(max_new_tokens=90), FakeDecoder(memory=100), block_size=4)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_block_borders(length):
    """Prompts that end just before, at and after the end of a block, with a block's size of 64."""
    decoder = FakeDecoder()
    assert len(run([ids("b", length)], SamplingParams(max_new_tokens=70), decoder)[0]) == 70


def test_a_prompt_that_leaves_no_room_names_both_numbers():
    for length in (32, 33):
        with pytest.raises(InputError, match=rf"has {length} tokens.* context is 32"):
            run([ids("a", length)], decoder=FakeDecoder(context=32))


@pytest.mark.parametrize("length", [31, 5])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(max_new_tokens=1000)])
def test_generation_ends_at_the_context(length, params):
    engine = Engine(FakeDecoder(context=32))
    engine.add(ids("a", length), params)
    result = [event.result for event in engine.run()][-1]
    assert len(result.tokens) == 32 - length and result.finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([[]], "empty"),
        ([1, 259], "259 is not in"),
        ([-1], "-1 is not in"),
        ([1, "a"], "text or a list"),
        ([[1, 2.5]], "text or a list"),
    ],
)
def test_wrong_prompts_are_refused(model, prompt, message):
    with pytest.raises(InputError, match=message):
        model.generate(prompt)


def test_logits_that_are_not_finite_end_the_run():
    decoder = FakeDecoder()
    decoder._logits = lambda past: torch.full((259,), torch.nan)
    with pytest.raises(InputError, match="no finite logits"):
        run([[1, 2]], decoder=decoder)


def test_a_failed_sequence_is_named_before_anything_runs(model):
    with pytest.raises(InputError, match="empty"):
        model.generate(["fine", []])
    assert not model.decoder.batches


@pytest.mark.parametrize("end", [1, 106, 2])
def test_every_end_token_of_the_files_stops(tmp_path, end):
    """config.json says [1, 106], the tokenizer 2."""
    write_json(tmp_path, config={"eos_token_id": [1, 106]})
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    model = FakeModel(tmp_path, FakeDecoder(next_token=says([65, 66, end, 67], 2)), tokenizer)
    result = model.generate("ab")
    assert (result.tokens, result.text, result.finish_reason) == ([65, 66, end], "AB", "stop")


def test_a_token_that_ends_nothing_does_not_stop(tmp_path):
    model = FakeModel(tmp_path, FakeDecoder(next_token=says([65, 1, 106, 2], 2)), byte_tokenizer())
    assert model.generate("ab").tokens == [65, 1, 106, 2, EOS]


def test_results_come_in_the_order_of_the_prompts(model):
    prompts = ["a longer prompt than the rest", "b", "a prompt"]
    results = model.generate(prompts, max_new_tokens=12)
    assert [r.prompt_tokens for r in results] == [len(p) for p in prompts]
    assert [r.tokens for r in results] == [model.generate(p, max_new_tokens=12).tokens for p in prompts]
    assert all(r.finish_reason == "length" and r.prompt_seconds > 0 and r.seconds > 0 for r in results)


def test_one_prompt_gives_one_result_and_a_list_a_list(model):
    text = model.generate("abc", max_new_tokens=3)
    assert model.generate([97, 98, 99], max_new_tokens=3).tokens == text.tokens
    assert [r.tokens for r in model.generate([[97, 98, 99]], max_new_tokens=3)] == [text.tokens]
    assert model.generate(torch.tensor([97, 98, 99]), max_new_tokens=3).tokens == text.tokens
    assert [r.tokens for r in model.generate(torch.tensor([[97, 98, 99]] * 2), max_new_tokens=3)] == [text.tokens] * 2
    assert model.generate([]) == []


def test_the_same_seed_gives_the_same_text_in_any_company(model):
    options = {"temperature": 1.0, "seed": 7, "max_new_tokens": 12}
    one = model.generate("a", **options).tokens
    two = model.generate(["zzz", "a", "a"], **options)
    assert [r.tokens for r in two[1:]] == [one, one]
    assert model.generate("a", temperature=1.0, max_new_tokens=12).tokens != one


def test_streamed_events_add_up_to_the_results(tmp_path):
    answer = "a 🦙, né".encode()
    model = FakeModel(tmp_path, FakeDecoder(next_token=says(answer, 3)), byte_tokenizer())
    events = list(model.generate(["abc", "xyz"], stream=True))
    assert all(isinstance(e, Event) for e in events)
    for index in (0, 1):
        own = [e for e in events if e.index == index]
        assert "".join(e.text for e in own) == own[-1].result.text == "a 🦙, né"
        assert [t for e in own for t in e.tokens] == own[-1].result.tokens == [*answer, EOS]
        assert [e.finish_reason for e in own] == [None] * len(answer) + ["stop"]
    assert [e.index for e in events[:4]] == [0, 1, 0, 1], "both advance together"


def test_a_stop_string_ends_the_text_before_it(tmp_path):
    model = FakeModel(tmp_path, FakeDecoder(next_token=says(b"one END two", 1)), byte_tokenizer())
    result = model.generate("x", stop="END")
    assert (result.text, result.finish_reason) == ("one ", "stop")
    assert bytes(result.tokens) == b"one END"
    assert model.generate("x", stop=["two", "ne"]).text == "o"
    assert model.generate("x", stop=["TWO"]).text == "one END two"


@pytest.mark.parametrize("answer, stop, text", [("ab🦙", (), "ab"), ("abEND", ("END",), "abEN")])
def test_what_is_held_back_comes_out_at_the_limit(tmp_path, answer, stop, text):
    model = FakeModel(tmp_path, FakeDecoder(next_token=says(answer.encode(), 1)), byte_tokenizer())
    result = model.generate("x", stop=stop, max_new_tokens=4)
    assert (result.text, result.finish_reason) == (text, "length")


def test_without_a_tokenizer_ids_are_continued(tmp_path):
    model = FakeModel(tmp_path, FakeDecoder(next_token=says([5, 6], 2)))
    result = model.generate([1, 2], max_new_tokens=2)
    assert (result.tokens, result.text) == ([5, 6], "")
    with pytest.raises(InputError, match="no tokenizer"):
        model.generate("text")
    with pytest.raises(InputError, match="need a tokenizer"):
        model.generate([1, 2], stop="x")
    with pytest.raises(InputError, match="no chat template"):
        model.chat("Hi")


def test_options_are_checked_before_anything_runs(model):
    with pytest.raises(InputError, match="top_p must be"):
        model.generate("a", top_p=2.0, stream=True)
    with pytest.raises(TypeError, match="top_x"):
        model.generate("a", top_x=2.0)
    assert not model.decoder.batches


def test_chat_answers_the_rendered_conversation(tmp_path):
    model = FakeModel(tmp_path, tokenizer=byte_tokenizer(TEMPLATE))
    options = {"max_new_tokens": 8}
    text = "[turn]system: Be kind\n[turn]user: Hi\n[turn]assistant: "
    result = model.chat("Hi", system="Be kind", **options)
    assert result.tokens == model.generate(text, **options).tokens
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    assert model.chat(messages, **options).tokens == result.tokens
    assert "".join(e.text for e in model.chat(messages, stream=True, **options)) == result.text
    assert model.chat("Hi", **options).tokens != result.tokens


def test_an_abandoned_stream_leaves_the_model_usable(model):
    events = model.generate("abc", stream=True)
    next(events)
    events.close()
    assert model.generate("abc", max_new_tokens=3).finish_reason == "length"


def test_special_tokens_are_generated_but_not_shown(tmp_path):
    model = FakeModel(tmp_path, FakeDecoder(next_token=says([TURN, 65, BOS, 66], 1)), byte_tokenizer())
    result = model.generate("x")
    assert (result.text, result.tokens) == ("AB", [TURN, 65, BOS, 66, EOS])
