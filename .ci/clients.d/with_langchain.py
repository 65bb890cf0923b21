# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///
"""langchain-openai: chats, streams, tools, structured output, embeddings and errors."""

import asyncio
import math
import sys
import warnings
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

# It warns of null where counts of tokens are added up, and of what it cannot make out.
warnings.filterwarnings("error", module="langchain")
warnings.filterwarnings("ignore", "Pydantic serializer")
URL = f"{sys.argv[1]}/v1"
chat = ChatOpenAI(base_url=URL, model="small", temperature=0, max_tokens=120, max_retries=0, timeout=600)
PERU = [SystemMessage("You are brief."), HumanMessage("What is the capital of Peru?")]


def answers():
    answer = chat.invoke(PERU)
    assert answer.content and answer.response_metadata["finish_reason"] == "stop", answer
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0, usage
    assert "cache_read" in usage["input_token_details"], usage
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(PERU)
    content = scored.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer.content == scored.content
    first, second = asyncio.run(chat.abatch([PERU, [HumanMessage("Hi")]]))
    assert first.content == answer.content and second.content, (first, second)


def streams():
    pieces = list(chat.stream(PERU, stream_usage=True))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    answer = chat.invoke(PERU)
    assert len(pieces) > 3 and whole.content == answer.content, whole
    assert whole.response_metadata["finish_reason"] == "stop", whole
    counts = ["input_tokens", "output_tokens", "total_tokens"]
    assert [whole.usage_metadata[k] for k in counts] == [answer.usage_metadata[k] for k in counts], whole


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


@tool(args_schema=Weather)
def weather(city: str, unit: str) -> str:
    """The weather in a city."""
    return f"19 degrees {unit} in {city}"


def tools():
    question = [HumanMessage("What is the weather in Lima, in celsius?")]
    bound = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(question)
    (call,) = answer.tool_calls
    assert not answer.invalid_tool_calls and call["name"] == "weather" and Weather(**call["args"]), answer
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.tool_call_id == call["id"], result
    assert chat.bind_tools([weather], tool_choice="none").invoke([*question, answer, result]).content

    pieces = list(bound.stream(question))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [c["args"] for c in whole.tool_calls] == [call["args"]] and not whole.invalid_tool_calls, whole
    named = chat.bind_tools([weather], tool_choice="weather", strict=True).invoke(question)
    assert [c["name"] for c in named.tool_calls] == ["weather"], named


class Animal(BaseModel):
    """An animal."""

    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    diet: Literal["plants", "meat", "both"]


def structures():
    for method in ["json_schema", "function_calling"]:
        animal = chat.with_structured_output(Animal, method=method).invoke("Describe a llama.")
        assert isinstance(animal, Animal), animal
    streamed = list(chat.with_structured_output(Animal, method="json_schema").stream("Describe a llama."))
    assert isinstance(streamed[-1], Animal), streamed
    raw = chat.with_structured_output(Animal, include_raw=True).invoke("Describe a llama.")
    assert raw["parsing_error"] is None and isinstance(raw["parsed"], Animal), raw


def embeddings():
    embeddings = OpenAIEmbeddings(base_url=URL, model="small", check_embedding_ctx_length=False, chunk_size=2)
    texts = ["Llamas live in the Andes.", "The invoice is due on Monday.", "Alpacas live in Peru."]
    vectors = embeddings.embed_documents(texts)
    assert len(vectors) == 3 and all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors)
    assert embeddings.embed_query(texts[2]) == vectors[2]


def errors():
    """What is too long is known as such, so that a chain can go on with another model."""
    for ask in [chat.invoke, lambda messages: list(chat.stream(messages))]:
        try:
            ask([HumanMessage("word " * 9000)])
        except ContextOverflowError as error:
            assert "9031" in str(error) and "8192" in str(error), error
        else:
            raise AssertionError("it fits")


for check in [answers, streams, tools, structures, embeddings, errors]:
    check()
    print(check.__name__, flush=True)
