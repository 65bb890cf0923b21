# /// script
# dependencies = ["schemathesis==4.32.5"]
# [tool.puna]
# serve = ["--max-tokens", "4", "--allow-uploads"]
# ///
"""schemathesis: requests made up from the server's own description. None may end in a fault of the server, and all
answers must be as described."""

import os
import subprocess
import sys
from pathlib import Path

URL, SHORT = sys.argv[1], "--short" in sys.argv
CHECKS = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
CHECKS += ["response_headers_conformance", "ignored_auth", "unsupported_method", "allow_header_conformance"]
CHECKS += ["use_after_free"]
command = [
    Path(sys.executable).with_name("schemathesis"),
    "run",
    f"{URL}/openapi.json",
    f"--header=Authorization: Bearer {os.environ['OPENAI_API_KEY']}",
    f"--checks={','.join(CHECKS)}",
    f"--phases={'fuzzing' if SHORT else 'coverage,fuzzing,stateful'}",
    f"--max-examples={3 if SHORT else 20}",
    "--seed=1",
    "--generation-database=:memory:",
    "--request-timeout=120",
    "--warnings=off",
    "--no-color",
]
sys.exit(subprocess.run(command).returncode)
