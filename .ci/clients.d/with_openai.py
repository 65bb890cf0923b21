# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""The package openai: what it makes of answers, streams, tools, schemas, vectors, scores and errors.

The model is small: what is checked is the form of what it says, and that the same is said by other ways.
"""

import asyncio
import json
import math
import sys
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

URL, SHORT = sys.argv[1], "--short" in sys.argv
OPTIONS = dict(base_url=f"{URL}/v1", max_retries=0, timeout=600)
client = OpenAI(**OPTIONS)
MODEL = client.models.list().data[0].id
PERU = [{"role": "user", "content": "What is the capital of Peru?"}]


def chat(messages=PERU, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **options})


def models():
    (model,) = client.models.list().data
    assert model.object == "model" and model.owned_by == "puna" and model.max_model_len > 0, model
    assert client.models.retrieve(MODEL) == model


def answers():
    answer = chat()
    (choice,) = answer.choices
    assert "Lima" in choice.message.content and choice.message.role == "assistant", answer
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.logprobs is None, answer
    assert answer.object == "chat.completion" and answer.model == MODEL, answer
    assert answer.system_fingerprint.startswith("puna-"), answer
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens, usage

    short = chat(max_completion_tokens=3, max_tokens=50)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3, short
    stopped = chat(stop=["Lima", "Peru"])
    text = choice.message.content
    assert stopped.choices[0].message.content == text[: min(map(text.index, ["Lima", "Peru"]))], stopped
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert chat(parts, max_tokens=8).choices[0].message == chat(plain, max_tokens=8).choices[0].message


def seeds():
    """Answer i of several is what the seed plus i gives alone."""
    options = dict(temperature=1, max_tokens=12)
    three = chat(seed=7, n=3, **options)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in three.choices]
    assert texts == [chat(seed=7 + i, **options).choices[0].message.content for i in range(3)]
    assert len(set(texts)) > 1, texts


def streams():
    whole = chat(logprobs=True, top_logprobs=3)
    options = dict(logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True})
    *pieces, usage = chat(**options)
    assert {piece.id for piece in pieces} == {usage.id} and {piece.object for piece in pieces} == {
        "chat.completion.chunk"
    }
    deltas = [piece.choices[0].delta for piece in pieces]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["stop"], reasons
    # A piece a token, but for the one that ends the answer, and one that says why it ended.
    assert usage.choices == [] and usage.usage.completion_tokens == len(pieces), (usage, len(pieces))
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens
    entries = [entry for piece in pieces if piece.choices[0].logprobs for entry in piece.choices[0].logprobs.content]
    assert entries == whole.choices[0].logprobs.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token, entry
        scores = [top.logprob for top in entry.top_logprobs]
        assert scores == sorted(scores, reverse=True) and entry.logprob == scores[0] <= 0, entry
    assert bytes(b for entry in entries for b in entry.bytes).decode() == whole.choices[0].message.content

    with client.chat.completions.stream(model=MODEL, messages=PERU, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content


def together():
    """Beside others an answer is what it is alone."""
    prompts = [[{"role": "user", "content": f"Write about the number {i}."}] for i in range(4 if SHORT else 12)]

    async def all_of_them():
        async with AsyncOpenAI(**OPTIONS) as others:
            create = others.chat.completions.create
            options = dict(model=MODEL, temperature=1, seed=3, max_tokens=24)
            return await asyncio.gather(*(create(messages=prompt, **options) for prompt in prompts))

    for prompt, answer in zip(prompts, asyncio.run(all_of_them())):
        alone = chat(prompt, temperature=1, seed=3, max_tokens=24)
        assert alone.choices[0].message.content == answer.choices[0].message.content, prompt


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


class Sum(BaseModel):
    """Adds whole numbers."""

    numbers: list[int] = Field(min_length=2, max_length=3)


TOOLS = [pydantic_function_tool(Weather, name="weather"), pydantic_function_tool(Sum, name="sum")]
ASK = [{"role": "user", "content": "What is the weather in Lima, in celsius?"}]
CALL = dict(tools=TOOLS, max_tokens=120, parallel_tool_calls=False)


def tools():
    def call(choice):
        answer = chat(ASK, tool_choice=choice, **CALL).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None, answer
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.id, call
        {"weather": Weather, "sum": Sum}[call.function.name].model_validate_json(call.function.arguments)
        return call

    call("required")
    assert call({"type": "function", "function": {"name": "sum"}}).function.name == "sum"
    asked = call({"type": "function", "function": {"name": "weather"}})
    assert asked.function.name == "weather"
    none = chat(ASK, tool_choice="none", **CALL).choices[0]
    assert none.message.tool_calls is None and none.message.content, none
    auto = chat(ASK, tool_choice="auto", **CALL).choices[0]
    assert auto.message.content or auto.message.tool_calls, auto

    # What was called, and what came of it, as messages.
    said = {"role": "assistant", "content": None, "tool_calls": [asked.model_dump()]}
    result = {"role": "tool", "tool_call_id": asked.id, "content": '{"temperature": 19}'}
    answer = chat([*ASK, said, result], tools=TOOLS, tool_choice="none", max_tokens=30)
    assert answer.choices[0].message.content, answer


def streamed_tools():
    for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
        whole = chat(ASK, tool_choice=choice, **CALL).choices[0].message.tool_calls[0]
        pieces = list(chat(ASK, tool_choice=choice, stream=True, **CALL))
        assert pieces[-1].choices[0].finish_reason == "tool_calls", pieces[-1]
        assert not any(piece.choices[0].delta.content for piece in pieces)
        calls = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
        assert len(calls) > 2 and {call.index for call in calls} == {0}, calls
        first, *rest = calls
        assert first.id and first.type == "function" and first.function.name == whole.function.name, first
        assert all(call.id is None and call.type is None and call.function.name is None for call in rest), rest
        assert "".join(call.function.arguments for call in calls) == whole.function.arguments

    with client.chat.completions.stream(
        model=MODEL, messages=ASK, temperature=0, tool_choice="required", **CALL
    ) as stream:
        (done,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert isinstance(done.parsed_arguments, (Weather, Sum)), done


def parsed_tools():
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, temperature=0, tool_choice="required", **CALL)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, (Weather, Sum)), call


class Place(BaseModel):
    name: str = Field(max_length=12)
    metres: int = Field(ge=0, le=9000)


class Animal(BaseModel):
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    diet: Literal["plants", "meat", "both"]
    colours: list[Literal["brown", "white", "black"]] = Field(min_length=1, max_length=2)
    home: Place
    wild: bool


def schemas():
    messages = [{"role": "user", "content": "Describe a llama as JSON."}]
    options = dict(model=MODEL, messages=messages, temperature=0, response_format=Animal)
    answer = client.chat.completions.parse(max_tokens=400, **options).choices[0]
    assert isinstance(answer.message.parsed, Animal) and answer.finish_reason == "stop", answer
    with client.chat.completions.stream(max_tokens=400, **options) as stream:
        (done,) = [event for event in stream if event.type == "content.done"]
    assert done.parsed == answer.message.parsed, done
    expect(openai.LengthFinishReasonError, lambda: client.chat.completions.parse(max_tokens=3, **options))

    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 50}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    kind = {"type": "json_schema", "json_schema": {"name": "number", "strict": True, "schema": schema}}
    answer = chat(
        [{"role": "user", "content": "A number."}], response_format=kind, max_tokens=60, temperature=1, seed=1
    )
    assert json.loads(answer.choices[0].message.content)["n"] in range(5, 51, 5), answer
    kind["json_schema"]["schema"] = {"type": "array", "items": {}, "contains": {"const": 1}}
    refused = expect(openai.BadRequestError, lambda: chat(response_format=kind))
    assert "contains" in refused.message and refused.code == "unsupported_schema", refused


def embeddings():
    texts = ["Llamas live in the Andes.", "Alpacas live in the mountains of Peru.", "The invoice is due on Monday."]
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    base64 = client.embeddings.create(model=MODEL, input=texts)
    assert [item.index for item in base64.data] == [0, 1, 2] and base64.usage == plain.usage
    for a, b in zip(plain.data, base64.data):
        assert max(abs(x - y) for x, y in zip(a.embedding, b.embedding, strict=True)) < 1e-7
        assert abs(math.hypot(*b.embedding) - 1) < 1e-5
    alone = client.embeddings.create(model=MODEL, input=texts[1], encoding_format="float")
    assert alone.data[0].embedding == plain.data[1].embedding
    half = (
        client.embeddings.create(model=MODEL, input=texts[1], dimensions=100, encoding_format="float").data[0].embedding
    )
    length = math.hypot(*alone.data[0].embedding[:100])
    assert len(half) == 100 and all(abs(x - y / length) < 1e-6 for x, y in zip(half, alone.data[0].embedding))
    ids = client.post("/../tokenize", body={"prompt": texts[1]}, cast_to=object)["tokens"]
    by_ids = client.embeddings.create(model=MODEL, input=[ids], encoding_format="float")
    assert by_ids.data[0].embedding == alone.data[0].embedding


def completions():
    def complete(prompt, **options):
        return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, **options})

    prompt = "The Andes are a mountain range in South"
    scored = complete(prompt, echo=True, logprobs=2, max_tokens=4)
    (choice,) = scored.choices
    lists = choice.logprobs
    assert choice.text.startswith(prompt) and "".join(lists.tokens) == choice.text, choice
    count = scored.usage.total_tokens
    assert [len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs), len(lists.text_offset)] == [
        count
    ] * 4
    assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None, lists
    assert all(x <= 0 for x in lists.token_logprobs[1:]), lists
    for token, score, top, offset in list(
        zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset)
    )[1:]:
        assert top[token] == score and 2 <= len(top) <= 3, (token, top)
        assert choice.text[offset:].startswith(token), (token, offset)

    # The prompt alone has the scores that it has with an answer, and an answer those that it has as a prompt.
    alone = complete(prompt, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert alone.text == prompt and alone.logprobs.token_logprobs == lists.token_logprobs[: len(alone.logprobs.tokens)]
    again = complete(choice.text, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert again.logprobs.token_logprobs == lists.token_logprobs, (again, lists)

    several = complete(["One, two,", "A, B,"], max_tokens=4, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[2].text == several.choices[3].text == complete("A, B,", max_tokens=4).choices[0].text
    pieces = complete("A, B,", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == several.choices[2].text


def expect(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind} was not raised")


def errors():
    def bad(**options):
        error = expect(openai.BadRequestError, lambda: chat(**options))
        assert error.status_code == 400 and error.type == "invalid_request_error", error
        return error

    assert bad(temperature=3).param == "temperature"
    assert bad(messages=[{"role": "nobody", "content": ""}]).param == "messages[0].role"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert bad(messages=[{"role": "user", "content": [picture]}]).param == "messages[0].content[0].type"
    error = bad(messages=[{"role": "user", "content": "word " * 9000}])
    assert error.code == "context_length_exceeded" and "9" in error.message, error
    error = expect(openai.NotFoundError, lambda: client.models.retrieve("nobody"))
    assert error.code == "model_not_found", error
    wrong = OpenAI(**OPTIONS, api_key="wrong")
    assert expect(openai.AuthenticationError, wrong.models.list).code == "invalid_api_key"
    late = client.with_options(timeout=0.3).chat.completions
    story = dict(model=MODEL, messages=PERU, max_tokens=8000, extra_body={"ignore_eos": True})
    expect(openai.APITimeoutError, lambda: late.create(**story))
    nobody = OpenAI(base_url="http://127.0.0.1:9/v1", max_retries=0)
    expect(openai.APIConnectionError, nobody.models.list)
    named = client.models.with_raw_response.list(extra_headers={"x-request-id": "of-openai"})
    assert named.headers["x-request-id"] == "of-openai"


def too_many():
    """As many answers as run and wait: the next one is told when to come again, and comes then."""
    limits = json.loads(client.get("/../props", cast_to=str))["limits"]
    options = dict(model=MODEL, prompt="Once", n=128, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    streams = [client.completions.create(**options) for _ in range(1 + limits["queue"] // 128)]
    refused = expect(openai.RateLimitError, lambda: client.completions.create(**options))
    assert 1 <= int(refused.response.headers["retry-after"]) <= 60, refused.response.headers
    for stream in streams:
        stream.close()
    patient = client.with_options(max_retries=20)
    assert patient.completions.create(model=MODEL, prompt="Once", n=100, max_tokens=1).choices[99].index == 99


CHECKS = [models, answers, streams, tools, streamed_tools, schemas, embeddings, completions, errors]
for check in CHECKS + ([] if SHORT else [seeds, together, parsed_tools, too_many]):
    check()
    print(check.__name__, flush=True)
