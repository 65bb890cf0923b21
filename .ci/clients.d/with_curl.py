"""curl: how events are framed, and what a client that goes away leaves behind."""

import json
import os
import subprocess
import sys
import time

URL = sys.argv[1]
CHAT = {"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "temperature": 0, "max_tokens": 12}


def curl(path, body=None, *options, key=os.environ["OPENAI_API_KEY"]):
    """What it says of the response (status and headers), and the body."""
    command = ["curl", "--silent", "--include", "--no-buffer", "--max-time", "300", *options]
    command += ["--header", f"Authorization: Bearer {key}", URL + path]
    if body is not None:
        # Whoever says nothing of the content's type sends a form's.
        command += ["--data-binary", "@-"]
    text = json.dumps(body) if isinstance(body, dict) else body
    done = subprocess.run(command, input=text and text.encode(), capture_output=True)
    head, _, rest = done.stdout.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, rest


def frames(text):
    """The objects of a stream, each in a line of its own, and nothing after the end."""
    *events, last = text.split("\n\n")
    assert last == "" and events[-1] == "data: [DONE]", text[-200:]
    assert all("\n" not in event for event in events), text
    data = [event.removeprefix("data: ") for event in events[:-1] if not event.startswith(":")]
    return [json.loads(event) for event in data]


def streams():
    status, headers, text = curl(
        "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), headers
    assert headers["cache-control"] == "no-cache" and headers["transfer-encoding"] == "chunked", headers
    *pieces, finish, usage = frames(text)
    assert len({(piece["id"], piece["created"], piece["object"]) for piece in [*pieces, finish, usage]}) == 1
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:]), deltas
    assert "Lima" in "".join(delta["content"] for delta in deltas), deltas
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces)
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "stop", finish
    # A piece a token; the last token ends the answer and is no part of it.
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(pieces) + 1, (usage, len(pieces))

    completion = {"prompt": "One, two,", "max_tokens": 5, "temperature": 0, "stream": True}
    pieces = frames(curl("/v1/completions", completion)[2])
    assert {piece["object"] for piece in pieces} == {"text_completion"}
    assert pieces[-1]["choices"][0]["finish_reason"] == "length", pieces[-1]
    whole = json.loads(curl("/v1/completions", {**completion, "stream": False})[2])
    assert whole["choices"][0]["text"] == "".join(piece["choices"][0]["text"] for piece in pieces)


def errors():
    def error(status, *request, **options):
        found, _, text = curl(*request, **options)
        assert found == status, (found, text)
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error

    assert error(400, "/v1/chat/completions", {**CHAT, "temperature": "hot"})["param"] == "temperature"
    assert error(400, "/v1/chat/completions", "{]")["code"] == "invalid_json"
    assert error(400, "/v1/completions", {"prompt": "word " * 9000})["code"] == "context_length_exceeded"
    assert error(404, "/v1/nothing")["code"] == "unknown_url"
    assert error(405, "/v1/chat/completions")["code"] == "method_not_allowed"
    assert error(401, "/v1/models", key="wrong")["type"] == "authentication_error"


def going_away():
    """curl gives up in the middle of a stream: the server stops working on it."""
    story = {"prompt": "A very long story:", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    status, _, text = curl("/v1/completions", story, "--max-time", "2")
    assert status == 200 and "[DONE]" not in text
    for _ in range(600):
        models = json.loads(curl("/slots")[2])["models"]
        if not any(model["slots"] or model["running"] for model in models):
            return
        time.sleep(0.1)
    raise AssertionError(models)


def headers():
    status, headers, text = curl("/health", None, "--header", "X-Request-Id: of-curl")
    assert (status, headers["x-request-id"], json.loads(text)) == (200, "of-curl", {"status": "ok"})
    status, headers, _ = curl("/health", None, "--head")
    assert status == 200
    text = curl("/metrics")[2]
    for name in ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]:
        assert f"\n{name}{{" in text, f"{name} is not in\n{text}"
    # A body in pieces, whose length is not told before.
    status, _, text = curl("/v1/chat/completions", CHAT, "--header", "Transfer-Encoding: chunked")
    assert status == 200 and "Lima" in json.loads(text)["choices"][0]["message"]["content"], text


def prefixes():
    system = {"role": "system", "content": "You know the capitals of all countries of South America. " * 8}
    status, _, text = curl("/v1/prefixes/capitals", {"messages": [system]}, "--request", "PUT")
    prefix = json.loads(text)
    assert status == 200 and prefix["id"] == "capitals" and prefix["tokens"] % 32 == 0 < prefix["tokens"], text
    assert json.loads(curl("/v1/prefixes")[2])["data"] == [prefix]
    asked = {**CHAT, "messages": [system, *CHAT["messages"]], "prefix": "capitals"}
    answer = json.loads(curl("/v1/chat/completions", asked)[2])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= prefix["tokens"], answer
    assert curl("/v1/prefixes/capitals", None, "--request", "DELETE")[0] == 200
    status, _, text = curl("/v1/chat/completions", asked)
    assert status == 404 and json.loads(text)["error"]["param"] == "prefix", text


for check in [streams, errors, going_away, headers, prefixes]:
    check()
