# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""litellm, as a library: what gateways that are built on it send and read."""

import json
import os
import sys

# Prices come from the package and not from the net.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402

litellm.suppress_debug_info = True
URL = f"{sys.argv[1]}/v1"
OPTIONS = dict(api_base=URL, api_key=os.environ["OPENAI_API_KEY"], max_retries=0, timeout=600)
PERU = [{"role": "user", "content": "What is the capital of Peru?"}]


def chat(messages=PERU, **options):
    return litellm.completion(model="openai/small", messages=messages, **{**OPTIONS, "temperature": 0, **options})


def answers():
    answer = chat()
    (choice,) = answer.choices
    assert "Lima" in choice.message.content and choice.finish_reason == "stop", answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer
    pieces = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == choice.message.content, pieces
    whole = litellm.stream_chunk_builder(pieces, messages=PERU)
    assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "stop", whole
    assert whole.usage.completion_tokens == answer.usage.completion_tokens, whole


def hosted():
    """The way that it has for vLLM, and fields that are not OpenAI's."""
    options = dict(
        **OPTIONS, messages=PERU, max_tokens=6, extra_body={"top_k": 1, "min_p": 0, "repetition_penalty": 1.0}
    )
    answer = litellm.completion(model="hosted_vllm/small", **options)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 6, answer
    text = litellm.text_completion(model="text-completion-openai/small", prompt="One, two,", max_tokens=4, **OPTIONS)
    assert text.choices[0].text and text.choices[0].finish_reason == "length", text


def tools():
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    parameters["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    options = dict(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    question = [{"role": "user", "content": "What is the weather in Lima?"}]
    answer = chat(question, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "weather", answer
    assert list(json.loads(call.function.arguments)) == ["city"], call
    whole = litellm.stream_chunk_builder(list(chat(question, stream=True, **options)), messages=question)
    (streamed,) = whole.choices[0].message.tool_calls
    assert streamed.function == call.function and streamed.id, streamed


def schemas():
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    schema["additionalProperties"] = False
    kind = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}
    answer = chat([{"role": "user", "content": "Describe a llama."}], response_format=kind, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["legs"] in (2, 4), answer


def embeddings():
    texts = ["Llamas live in the Andes.", "The invoice is due on Monday."]
    answer = litellm.embedding(model="openai/small", input=texts, encoding_format="float", **OPTIONS)
    assert [item["index"] for item in answer.data] == [0, 1] and answer.usage.total_tokens > 0, answer
    assert len(answer.data[0]["embedding"]) == len(answer.data[1]["embedding"]) > 0


def errors():
    def expect(kind, **options):
        try:
            chat(**options)
        except kind as error:
            return str(error)
        raise AssertionError(f"{kind} was not raised")

    assert "temperature" in expect(litellm.BadRequestError, temperature=7)
    # It knows a prompt that is too long by what the message says.
    expect(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "word " * 9000}])
    expect(litellm.AuthenticationError, api_key="wrong")


for check in [answers, hosted, tools, schemas, embeddings, errors]:
    check()
    print(check.__name__, flush=True)
