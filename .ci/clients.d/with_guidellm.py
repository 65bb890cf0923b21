# /// script
# dependencies = ["guidellm==0.8.1"]
# ///
"""guidellm: a short benchmark, of which every request must succeed.

It needs torch, which PyPI has with all of its libraries for graphics cards: an environment of several gigabytes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, SHORT = sys.argv[1], "--short" in sys.argv
REQUESTS, TOKENS = 4 if SHORT else 16, 12


def benchmark(folder, route):
    """Runs one, and gives its report."""
    data, report, config = folder / "prompts.jsonl", folder / "report.json", folder / "config.json"
    prompts = [{"prompt": f"Say something about the number {i}."} for i in range(REQUESTS)]
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    backend = {"kind": "openai_http", "target": URL, "request_format": route, "max_tokens": TOKENS}
    backend |= {"api_key": os.environ["OPENAI_API_KEY"], "extras": {"body": {"ignore_eos": True}}}
    spec = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [4]},
        "constraints": [{"kind": "max_requests", "count": REQUESTS}],
        "data": [{"kind": "json_file", "path": str(data)}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }
    config.write_text(json.dumps({"spec": spec}))
    guidellm = Path(sys.executable).with_name("guidellm")
    subprocess.run([guidellm, "run", "--config", config, "--disable-console-interactive"], check=True)
    (found,) = json.loads(report.read_text())["benchmarks"]
    return found["metrics"]


for route in ["/v1/chat/completions", "/v1/completions"]:
    with tempfile.TemporaryDirectory() as folder:
        metrics = benchmark(Path(folder), route)
    totals = metrics["request_totals"]
    assert totals["successful"] == REQUESTS and not totals["errored"] and not totals["incomplete"], totals
    counts = metrics["output_token_count"]["successful"]
    assert counts["mean"] == TOKENS and counts["std_dev"] == 0, counts
    for name in ["time_to_first_token_ms", "inter_token_latency_ms"]:
        assert metrics[name]["successful"]["mean"] > 0, (name, metrics[name])
