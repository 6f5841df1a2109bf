"""Answers: texts, token ids and conversations, alone and in lists."""

from __future__ import annotations

import json
import math
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import stolon
from conftest import GOAT, TENT, wait_until
from stolon.errors import (
    DeadlineError,
    InvalidValueError,
    NotSupportedError,
    OverloadedError,
    StolonError,
)

ENCODERS = Path(__file__).parents[3] / "models/checkpoint/tests/fixtures/encoders"
LOOP = {"ignore_eos": True, "max_tokens": 24}


def test_a_chat_is_answered_and_counted(engine: stolon.Engine) -> None:
    tent = engine.chat(TENT, max_tokens=16)
    assert "45" in tent.text
    assert tent.finish_reason == "stop"
    assert tent.usage.cached_tokens == 0
    assert tent.usage.completion_tokens == len(tent.token_ids)
    assert 0 <= tent.timings.queue <= tent.timings.first_token <= tent.timings.total
    hint = engine.cache.query_match_len(GOAT)
    assert hint > 0
    goat = engine.chat(GOAT, max_tokens=16)
    assert "Ottilie" in goat.text
    assert goat.usage.cached_tokens == hint


def test_a_list_has_its_answers_in_order(engine: stolon.Engine) -> None:
    prompts = [f"Once upon a time, there were {number}" for number in range(40)]
    alone = [engine.generate(prompt, **LOOP) for prompt in prompts]
    engine.cache.flush()
    together = engine.generate(prompts, **LOOP)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert len({answer.text for answer in alone}) > 1
    assert engine.generate([]) == []
    assert [answer.text for answer in engine.chat([TENT, GOAT], max_tokens=16)] == [
        engine.chat(TENT, max_tokens=16).text,
        engine.chat(GOAT, max_tokens=16).text,
    ]


def test_token_ids_are_prompts(engine: stolon.Engine) -> None:
    ids = engine.tokenize("The violet tent")
    assert engine.prompt_tokens("The violet tent") == ids
    assert engine.detokenize(ids) == "The violet tent"
    text = engine.generate("The violet tent", **LOOP)
    assert engine.generate([ids], **LOOP)[0].token_ids == text.token_ids


def test_more_prompts_than_the_queue_holds() -> None:
    """A batch waits where single requests would be refused."""
    with stolon.Engine("demo", kv_memory=64 << 20, max_queued_requests=4, max_running=2) as engine:
        answers = engine.generate([f"number {n}" for n in range(60)], max_tokens=2)
    assert len(answers) == 60


def test_one_prompt_is_refused_by_a_full_queue() -> None:
    with stolon.Engine("demo", kv_memory=64 << 20, max_queued_requests=1, max_running=1) as engine:
        with engine.stream("The", ignore_eos=True) as first:
            next(first)
            with engine.stream("The", ignore_eos=True):
                wait_until(lambda: engine.stats()["waiting"] == 1)
                with pytest.raises(OverloadedError) as caught:
                    engine.generate("The", max_tokens=1)
        assert caught.value.retry_after is not None and caught.value.retry_after >= 0


def test_an_error_names_the_prompt(engine: stolon.Engine) -> None:
    with pytest.raises(InvalidValueError, match=r"^prompts\[1\]: token id 999999999"):
        engine.generate([[5, 6], [5, 999999999]], max_tokens=2)


def test_unknown_options_are_refused_by_name(engine: stolon.Engine) -> None:
    with pytest.raises(TypeError, match="'temprature': did you mean 'temperature'"):
        engine.generate("a", temprature=1.0)
    with pytest.raises(TypeError, match="'kv_memry': did you mean 'kv_memory'"):
        stolon.Engine("demo", kv_memry=1)
    with pytest.raises(TypeError, match="'x': expected one of adapter, "):
        engine.stream("a", x=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected a finite number of at least 0"),
        ({"temperature": "hot"}, r"temperature: invalid type: string \"hot\", expected f32"),
        ({"max_tokens": -1}, "^max_tokens: invalid value: integer `-1`, expected usize"),
        ({"top_p": 2.0}, "top_p: expected above 0 and at most 1, got 2"),
        ({"timeout": -1.0}, "timeout: expected a number of seconds"),
        ({"regex": "a", "choice": ["b"]}, "one form of the answer, got `regex` and `choice`"),
        ({"tools": [{}]}, "tools: expected a conversation"),
        ({"adapter": "none"}, "adapter"),
        ({"images": [b"no image"]}, "image"),
    ],
)
def test_impossible_values_are_refused(
    engine: stolon.Engine, options: Any, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message) as caught:
        engine.generate("a", **options)
    assert isinstance(caught.value, (StolonError, ValueError))
    assert caught.value.retry_after is None


def test_hostile_values_are_refused(engine: stolon.Engine) -> None:
    nested: list[Any] = []
    for _ in range(500):
        nested = [nested]
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidValueError, match="recursion limit"):
        engine.generate("a", json_schema={"enum": nested})
    with pytest.raises(ValueError, match="Circular"):
        engine.generate("a", json_schema={"enum": circle})
    with pytest.raises(ValueError, match="surrogates not allowed"):
        engine.generate("a \ud800 b")
    with pytest.raises(ValueError):
        engine.generate("a", temperature=math.nan)
    with pytest.raises(InvalidValueError, match="expected u32"):
        engine.generate([[1, -5]])


@pytest.mark.parametrize("prompt", [5, b"text", {"role": "user"}, None])
def test_what_is_no_prompt_is_refused(engine: stolon.Engine, prompt: Any) -> None:
    with pytest.raises(TypeError, match="expected a"):
        engine.generate(prompt)
    with pytest.raises(TypeError, match="expected a"):
        engine.generate([prompt])


def test_every_option_is_known_to_both_sides(engine: stolon.Engine) -> None:
    """The types of the package list exactly what the native module reads."""

    def listed(error: pytest.ExceptionInfo[InvalidValueError]) -> set[str]:
        names = str(error.value).split("expected one of ")[1]
        return {name.strip("` ") for name in names.split(",")}

    with pytest.raises(InvalidValueError) as error:
        engine._native.complete('[{"prompt": {"text": "a"}, "options": {"none": 1}}]', [], None)
    names = set(stolon.RequestOptions.__annotations__) - {"images"}
    assert listed(error) == names
    with pytest.raises(InvalidValueError) as error:
        type(engine._native)("demo", '{"none": 1}')
    assert listed(error) == set(stolon.EngineOptions.__annotations__)


def test_sampling(engine: stolon.Engine) -> None:
    def sampled(seed: int) -> list[int]:
        return engine.generate("The", temperature=1.5, seed=seed, **LOOP).token_ids

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(8)}) > 1
    greedy = engine.generate("The", **LOOP).token_ids
    assert engine.generate("The", temperature=1.5, top_k=1, seed=3, **LOOP).token_ids == greedy
    banned = engine.generate("The", logit_bias={greedy[0]: -100}, **LOOP).token_ids
    assert banned[0] != greedy[0]


def test_log_probabilities(engine: stolon.Engine) -> None:
    answer = engine.generate("The violet", logprobs=2, prompt_logprobs=1, **LOOP)
    assert len(answer.logprobs) == len(answer.token_ids)
    for entry, token in zip(answer.logprobs, answer.token_ids):
        assert (entry.token_id, entry.rank) == (token, 1)
        assert entry.top[0] == (token, entry.logprob)
        assert len(entry.top) == 2 and -math.inf < entry.logprob <= 0
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert engine.generate("The violet", **LOOP).logprobs == []


def test_what_ends_an_answer(engine: stolon.Engine) -> None:
    whole = engine.generate("The violet tent", **LOOP)
    assert (whole.finish_reason, whole.stop) == ("length", None)
    word = whole.text.split()[1]
    cut = engine.generate("The violet tent", stop=word, **LOOP)
    assert (cut.finish_reason, cut.stop) == ("stop", word)
    assert whole.text.startswith(cut.text) and word not in cut.text
    token = whole.token_ids[2]
    cut = engine.generate("The violet tent", stop_ids=[token], **LOOP)
    assert (cut.finish_reason, cut.stop) == ("stop", token)


def test_a_json_schema_from_a_dict_and_from_pydantic(engine: stolon.Engine) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Price(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        crowns: int = pydantic.Field(ge=0, le=99)

    answer = engine.chat(TENT, json_schema=Price, max_tokens=64)
    assert Price.model_validate(answer.json()).crowns >= 0
    schema = Price.model_json_schema()
    assert engine.chat(TENT, json_schema=schema, max_tokens=64).text == answer.text
    assert engine.chat(TENT, choice=["blue", "green"], max_tokens=9).text in ("blue", "green")
    with pytest.raises(ValueError, match="cut off after 1 tokens"):
        engine.chat(TENT, json_schema=schema, max_tokens=1).json()
    with pytest.raises(TypeError, match="json_schema: expected a dict or a class of pydantic"):
        engine.chat(TENT, json_schema=int)


def test_tools_are_described_and_called(engine: stolon.Engine) -> None:
    parameters = {
        "type": "object",
        "properties": {"item": {"enum": ["tent", "goat"]}},
        "required": ["item"],
        "additionalProperties": False,
    }
    function = {"name": "price", "description": "The price.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    without = engine.prompt_tokens(TENT)
    assert len(engine.prompt_tokens(TENT, tools=tools)) > len(without)
    answer = engine.chat(TENT, tools=tools, tool_choice="required", max_tokens=200)
    call = answer.tool_calls[0]
    assert call.name == "price"
    assert call.parsed()["item"] in ("tent", "goat")
    assert json.loads(call.arguments) == call.parsed()
    either = engine.chat(TENT, tools=tools, choice=["blue", "green"], max_tokens=200)
    assert either.tool_calls or either.text in ("blue", "green")
    for wrong in ({}, {"tools": tools, "regex": "a"}):
        with pytest.raises(InvalidValueError, match="tool_choice: expected only tools"):
            engine.chat(TENT, tool_choice="required", **wrong)
    with pytest.raises(InvalidValueError, match=r"tools\[0\]: missing field `name`"):
        engine.chat(TENT, tools=[{"function": {}}])


def test_embeddings(engine: stolon.Engine) -> None:
    one = engine.embed("The violet tent")
    assert len(one.values) == engine.model_info["embedding"]["size"]
    assert math.isclose(sum(value * value for value in one.values), 1.0, rel_tol=1e-5)
    many = engine.embed(["The violet tent", "The speckled goat"])
    assert many[0].values == one.values and many[1].values != one.values
    assert len(engine.embed("The violet tent", dimensions=8).values) == 8
    with pytest.raises(InvalidValueError):
        engine.embed("a", task="retrieval.query")
    with stolon.Engine("demo", kv_memory=64 << 20) as other:
        with pytest.raises(NotSupportedError, match="not meant for embeddings"):
            other.embed("a")


def test_labels_of_a_language_model(engine: stolon.Engine) -> None:
    answer = engine.chat(TENT, max_tokens=4).text
    labels = ["60 crowns", answer, "nothing"]
    tent = engine.classify(TENT, labels)
    assert list(tent) == labels
    assert math.isclose(sum(tent.values()), 1.0, rel_tol=1e-5)
    assert max(tent, key=lambda label: tent[label]) == answer
    many = engine.classify([TENT, GOAT], labels)
    assert many[0] == tent and many[1] != tent
    assert engine.classify("The violet tent", ["a", "b"]).keys() == {"a", "b"}
    for wrong in ([], ["a", ""]):
        with pytest.raises(InvalidValueError, match="label"):
            engine.classify("The", wrong)
    with pytest.raises(NotSupportedError, match="cannot score"):
        engine.classify("The")
    with pytest.raises(TypeError, match="labels: expected a list of strings"):
        engine.classify("The", "ab")


def test_rerankers_and_classifiers() -> None:
    query = "What is a stolon?"
    with stolon.Engine(ENCODERS / "bert_reranker") as model:
        pairs = json.loads((ENCODERS / "bert_reranker/expected.json").read_text())["pairs"]
        ranked = model.rerank(query, [pair["document"] for pair in pairs])
        assert [entry.score for entry in ranked] == sorted(
            (entry.score for entry in ranked), reverse=True
        )
        for entry in ranked:
            assert math.isclose(entry.score, pairs[entry.index]["score"], abs_tol=1e-5)
            assert entry.prompt_tokens > 0
        assert model.rerank(query, []) == []
        with pytest.raises(InvalidValueError, match="instruction"):
            model.rerank(query, ["a"], instruction="Find stems")
    judge = {"rerank_tokens": ["yes", "no"], "kv_memory": 16 << 20}
    with stolon.Engine(ENCODERS / "qwen3_judge", **judge) as model:
        (plain,) = model.rerank(query, ["the stem"])
        (told,) = model.rerank(query, ["the stem"], instruction="Find stems")
        assert plain.score != told.score and told.prompt_tokens < plain.prompt_tokens
    with stolon.Engine(ENCODERS / "mpnet_classifier") as model:
        case = json.loads((ENCODERS / "mpnet_classifier/expected.json").read_text())["texts"][0]
        found = model.classify(case["text"])
        assert list(found) == ["contradiction", "entailment", "neutral"]
        for value, expected in zip(found.values(), case["scores"], strict=True):
            assert math.isclose(value, expected, abs_tol=1e-5)
        with pytest.raises(NotSupportedError, match="cannot score"):
            model.rerank(query, ["a"])
    with pytest.raises(InvalidValueError, match="rerank_tokens"):
        stolon.Engine(ENCODERS / "qwen3_judge", rerank_tokens=["a", "b", "c"])


def test_deadlines(engine: stolon.Engine) -> None:
    with pytest.raises(DeadlineError) as caught:
        engine.generate("a", ignore_eos=True, timeout=0.0)
    assert isinstance(caught.value, TimeoutError)


def test_threads_are_batched_and_the_interpreter_runs_meanwhile(engine: stolon.Engine) -> None:
    answers: list[stolon.Completion] = []
    threads = [
        threading.Thread(
            target=lambda n: answers.append(engine.generate(f"number {n}", **LOOP)), args=(n,)
        )
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    ticks = 0
    while any(thread.is_alive() for thread in threads):
        ticks += 1
        threads[0].join(timeout=0.001)
    for thread in threads:
        thread.join()
    assert len(answers) == 16
    # If a call kept the lock, this thread would have run between calls only.
    assert ticks > 5


def test_progress_is_shown_if_tqdm_is_there(
    engine: stolon.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    class Bar:
        """As much of tqdm as is used."""

        last: Bar

        def __init__(self, total: int, unit: str) -> None:
            self.total, self.n, self.closed = total, 0, False
            Bar.last = self

        def update(self, count: int) -> None:
            self.n += count

        def close(self) -> None:
            self.closed = True

    module = types.ModuleType("tqdm")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", module)
    engine.generate(["a", "b", "c"], progress=True, max_tokens=2)
    assert (Bar.last.total, Bar.last.n, Bar.last.closed) == (3, 3, True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert len(engine.generate(["a"], progress=True, max_tokens=2)) == 1


def test_images_are_read_from_any_form(tmp_path: Path) -> None:
    """The same picture has the same answer, whether it is an array, a file or its bytes."""
    numpy = pytest.importorskip("numpy")
    y, x = numpy.mgrid[:64, :64]
    is_disc = (x - 32) ** 2 + (y - 32) ** 2 < 16**2
    pixels = numpy.where(is_disc[..., None], [224, 32, 32], [255, 255, 255]).astype(numpy.uint8)
    picture = _bmp(pixels)
    (tmp_path / "disc.bmp").write_bytes(picture)
    question = [{"role": "user", "content": "What color is the circle?"}]
    with stolon.Engine("demo-vision", kv_memory=64 << 20) as engine:
        answer = engine.chat(question, images=[picture], max_tokens=16, logprobs=1)
        assert answer.usage.image_tokens > 0
        for image in (tmp_path / "disc.bmp", str(tmp_path / "disc.bmp"), pixels):
            again = engine.chat(question, images=[image], max_tokens=16, logprobs=1)
            assert (again.text, again.logprobs) == (answer.text, answer.logprobs)
            # It is the same picture to the cache, too.
            assert again.usage.cached_tokens > 0
        blue = engine.chat(question, images=[pixels[..., ::-1]], max_tokens=16, logprobs=1)
        assert blue.logprobs != answer.logprobs
        tokens = engine.stream(question, images=[picture], max_tokens=16)
        assert "".join(token.text for token in tokens) == answer.text
        for alike in (pixels[..., 0], numpy.dstack([pixels, pixels[..., :1]])):
            assert engine.chat(question, images=[alike], max_tokens=4).usage.image_tokens > 0
        with pytest.raises(TypeError, match="images: expected the bytes of a file"):
            engine.chat(question, images=[5])
        for wrong in (pixels[0, 0], pixels.astype(float), pixels[:0], pixels[..., :2]):
            with pytest.raises(ValueError, match="images: expected an array of uint8"):
                engine.chat(question, images=[wrong])


def _bmp(pixels: Any) -> bytes:
    """A file without compression: the rows from the last one on, in the order blue, green, red."""
    height, width, _ = pixels.shape
    rows = pixels[::-1, :, ::-1].tobytes()
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(rows), 0, 0, 54) + header + rows
