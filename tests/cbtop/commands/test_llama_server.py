"""`cbtop llama-server` asks the real server of llama.cpp, which is part of PyPI's xllamacpp."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands.llama_server import PHASE, ask, slots_of
from cbtop.compute import demo_model
from cbtop.compute.demo_model import TINY_LLAMA, ModelShape
from cbtop.errors import CbtopError
from tests.integration.hosts import CBTOP, cbtop, eventually

needs_server = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
TOKENS = 40
SERVER = """
import sys, xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.n_ctx, given.n_parallel, given.warmup = sys.argv[1], 256, 2, False
given.endpoint_metrics, given.endpoint_slots = sys.argv[2] == "metrics", True
given.cpuparams.n_threads, given.port = 1, 0
server = xllamacpp.Server(given)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a vocabulary of single bytes, as GPT-2 writes them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]
    path, metadata = tmp_path_factory.mktemp("models") / "tiny.gguf", demo_model.metadata_of

    def with_words(shape: ModelShape) -> dict[str, Any]:
        more = [f"word{number}" for number in range(shape.vocabulary - len(letters))]
        return metadata(shape) | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": [*letters, *more],
            "tokenizer.ggml.merges": ["w o"],
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "metadata_of", with_words)
        demo_model.write_model(path, replace(TINY_LLAMA, context_length=256), lambda *progress: None)
    return path


METRICS = b"""\
llamacpp:tokens_predicted_total 12
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


@contextmanager
def answering(metrics: bytes, slots: bytes) -> Iterator[str]:
    """Run a server with these two answers. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(metrics if self.path == "/metrics" else slots)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(model: Path, how: str = "metrics") -> Iterator[str]:
    """Run the server. Yields its address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(model), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _complete(url: str, tokens: int = TOKENS) -> int:
    """Generate `tokens` tokens. Returns the number that the server reports."""
    asked = {"prompt": [5, 6, 7], "n_predict": tokens, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found: int = json.load(answer)["tokens_predicted"]
    return found


@needs_server
def test_its_tokens_are_those_of_the_server_and_its_load_is_seen(model: Path, runtime: Path) -> None:
    with served(model) as url:
        asking = [*CBTOP, "llama-server", url, "--every", "0.05"]
        with subprocess.Popen(asking, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr
            assert process.stderr.readline() == f"cbtop: asking {url} every 0.05 s; watch it with: cbtop\n"
            try:
                with ThreadPoolExecutor(3) as pool:
                    generated = sum(pool.map(lambda _: _complete(url), range(3)))
                assert generated == 3 * TOKENS == ask(url).tokens

                def source() -> dict[str, Any] | None:
                    done = cbtop("--headless", "--once", "--window=all", "--format", "json")
                    found = json.loads(done.stdout)["sources"] if done.returncode == 0 else []
                    steps = found[0]["steps"] if found else None
                    return found[0] if steps and steps["tokens"] == generated else None

                seen = eventually(source)
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait() == 0
    assert seen["phase"] == PHASE
    assert seen["bricks"] == []
    loads = seen["serving"]["loads"]
    assert (loads[-1]["running"], loads[-1]["waiting"]) == (0, 0)


@needs_server
def test_a_server_without_metrics_is_told_what_to_add(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(model, "none") as url:
        assert main(["llama-server", url]) == 1
    said = capsys.readouterr().err
    assert said == f"cbtop: {url}/metrics: 501 Not Implemented; start it with --metrics\n"


def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama-server", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("cbtop: http://127.0.0.1:1 does not answer: ")
    assert said.endswith("; is a llama-server running there?\n")
    assert said.count("\n") == 1


def test_an_address_without_http_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama-server", "127.0.0.1:8080"]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("next_token", [{"n_decoded": 7}, [{"n_decoded": 7}]], ids=["one", "a list"])
def test_slots_of_both_forms_are_read(next_token: object) -> None:
    slots = [
        {"id": 0, "id_task": 12, "is_processing": True, "next_token": next_token},
        {"id": 1, "id_task": 3, "is_processing": False, "next_token": next_token},
    ]
    assert slots_of(slots) == {(0, 12): 7}


@pytest.mark.parametrize(
    ("metrics", "slots"),
    [
        (METRICS, b"<html>"),
        (METRICS, b"[1, 2]"),
        (METRICS, b'[{"is_processing": true}]'),
        (METRICS, b'[{"is_processing": true, "id": 0, "next_token": {"n_decoded": "many"}}]'),
        (METRICS, b'[{"is_processing": true, "id": 0, "next_token": [{"n_decoded": 1e300}]}]'),
        (METRICS, b"[" * 100_000),
        (METRICS.replace(b" 12", b" 1e999"), b"[]"),
        (METRICS.replace(b" 12", b" -12"), b"[]"),
        (METRICS.replace(b" 12", b" 1.2.3"), b"[]"),
    ],
)
def test_an_answer_of_no_llama_server_is_an_error_of_one_line(metrics: bytes, slots: bytes) -> None:
    with answering(METRICS, b"[]") as url:
        assert ask(url).tokens == 12
    with answering(metrics, slots) as url, pytest.raises(CbtopError, match="no llama-server answers") as caught:
        ask(url)
    assert "\n" not in str(caught.value)
