# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
# ///
"""lm-eval's local-completions, on a task of a few questions that is written here.

It asks the server for its tokenizer, scores answers by `echo` and `logprobs`, and must arrive at the sums that the
server's own scores of the same texts have. Where the program and the model are known (PUNA and PUNA_MODEL), these must be
what comes of the logits of `puna eval`, and texts must be its likeliest tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL = sys.argv[1]
END = "<|im_end|>"
QUESTIONS = [
    ("What is the capital of Peru?", ["Lima", "Paris", "Madrid"], 0),
    ("How many legs has a dog?", ["a hundred", "four", "eleven"], 1),
    ("Which is a colour?", ["seven", "quickly", "blue"], 2),
    ("What do cows eat?", ["stones", "grass", "glass and iron"], 1),
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: {target}
{more}
metadata: {{version: 1}}
"""


def ask(path, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def ids(text):
    return ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def evaluate(tokens, *options):
    """The tensors that `puna eval` makes of tokens; None where it is not known."""
    if "PUNA" not in os.environ:
        return None
    with tempfile.NamedTemporaryFile() as out:
        command = [os.environ["PUNA"], "eval", os.environ["PUNA_MODEL"], "--tokens", ",".join(map(str, tokens))]
        subprocess.run([*command, *options, "--out", out.name], check=True, stderr=subprocess.DEVNULL)
        # As the format has it: the length of the header, the header, bytes.
        data = Path(out.name).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    kinds = {"F32": "<f4", "I64": "<i8"}
    return {
        name: np.frombuffer(data[begin:][slice(*at["data_offsets"])], kinds[at["dtype"]]).reshape(at["shape"])
        for name, at in header.items()
        if name != "__metadata__"
    }


def score(context, answer):
    """The sum of the answer's log-probabilities after the context, and whether each of its tokens was the likeliest."""
    whole, begin = ids(context + answer), len(ids(context))
    body = {"prompt": whole, "echo": True, "logprobs": 1, "max_tokens": 0}
    scored = ask("/v1/completions", body)["choices"][0]["logprobs"]
    tops = [max(top.values()) for top in scored["top_logprobs"][begin:]]
    own = scored["token_logprobs"][begin:]
    if (found := evaluate(whole)) is not None:
        logits = found["logits"][begin - 1 : -1].astype(np.float64)
        best = logits.max(axis=1)
        said = logits[np.arange(len(own)), whole[begin:]]
        expected = said - best - np.log(np.exp(logits - best[:, None]).sum(axis=1))
        assert np.abs(expected - own).max() < 1e-5, (whole, own, expected)
        assert (said == best).tolist() == [a == b for a, b in zip(own, tops)], (whole, own, tops)
    return sum(own), own == tops


def continuation(context):
    """What comes after the context, up to the end of the line."""
    body = {"prompt": context, "max_tokens": 8, "temperature": 0, "stop": ["\n"]}
    text = ask("/v1/completions", body)["choices"][0]["text"]
    if (found := evaluate(ids(context), "--greedy", "8")) is not None:
        likeliest = ask("/detokenize", {"tokens": found["greedy"].tolist()})["prompt"]
        # It goes on after the token that ends an answer.
        assert likeliest.split(END)[0].split("\n")[0] == text, (context, likeliest, text)
    return text


def main(folder):
    data = folder / "questions.jsonl"
    lines = [dict(question=question, choices=choices, answer=answer) for question, choices, answer in QUESTIONS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    choice = "doc_to_choice: choices\nmetric_list: [{metric: acc}, {metric: acc_norm}]"
    until = 'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]'
    tasks = [
        TASK.format(name="puna_choice", data=data, kind="multiple_choice", target="answer", more=choice),
        TASK.format(name="puna_text", data=data, kind="generate_until", target="'{{choices[answer]}}'", more=until),
    ]
    for i, text in enumerate(tasks):
        (folder / f"{i}.yaml").write_text(text)
    results = simple_evaluate(
        model="local-completions",
        model_args=dict(
            model="small",
            base_url=f"{URL}/v1/completions",
            auth_token=os.environ["OPENAI_API_KEY"],
            num_concurrent=4,
            max_retries=1,
            timeout=600,
        ),
        tasks=["puna_choice", "puna_text"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    right = 0
    for sample, (question, choices, answer) in zip(results["samples"]["puna_choice"], QUESTIONS, strict=True):
        context = f"Question: {question}\nAnswer:"
        expected = [score(context, f" {choice}") for choice in choices]
        for (found, greedy), (sum_, is_greedy) in zip(sample["filtered_resps"], expected, strict=True):
            assert abs(float(found) - sum_) < 1e-9 and str(greedy) == str(is_greedy), (sample, expected)
        sums = [sum_ for sum_, _ in expected]
        right += sums.index(max(sums)) == answer
    assert results["results"]["puna_choice"]["acc,none"] == right / len(QUESTIONS), results["results"]
    for sample, (question, *_) in zip(results["samples"]["puna_text"], QUESTIONS, strict=True):
        assert sample["resps"][0][0] == continuation(f"Question: {question}\nAnswer:"), sample
    print(f"{right} of {len(QUESTIONS)} right")


with tempfile.TemporaryDirectory() as folder:
    main(Path(folder))
