#!/usr/bin/env python3
"""An outside load tool, locust, at a running `lacuna serve`: 1, 8 and 64 streams at a time; each
answer whole, none refused.

    load_test.py LACUNA SOURCE_DIR VENV_DIR [--seconds S]

VENV_DIR is made and filled by pip when it is missing. Exit code 77 (skipped) when that fails.
guidellm and aiperf measure the same but bring torch, or transformers and a Kubernetes client.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

from server_process import ServerProcess, python_with

STREAMS = (1, 8, 64)
MAX_TOKENS = 16

LOCUSTFILE = '''
import json
import time

from locust import HttpUser, events, task

MAX_TOKENS = %d


class Reader(HttpUser):
    @task
    def read(self):
        body = {"prompt": "#12+30=", "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True,
                "ignore_eos": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        first, usage, last = None, None, None
        with self.client.post("/v1/completions", json=body, stream=True,
                              catch_response=True, name="completion") as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            for line in response.iter_lines():
                if not line.startswith(b"data: "):
                    continue
                last = line[6:]
                if first is None:
                    first = time.perf_counter() - started
                if last != b"[DONE]":
                    usage = json.loads(last).get("usage") or usage
            if last != b"[DONE]" or not usage or usage["completion_tokens"] != MAX_TOKENS:
                response.failure(f"cut short: usage {usage}, last {last!r}")
                return
            response.success()
        for name, seconds in (("first token", first), ("whole", time.perf_counter() - started)):
            events.request.fire(request_type="SSE", name=name, response_time=1000 * seconds,
                                response_length=0, exception=None, context={})
''' % MAX_TOKENS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lacuna")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("venv", type=pathlib.Path)
    parser.add_argument("--seconds", type=int, default=8)
    flags = parser.parse_args()
    python = python_with(flags.venv, "locust", ["locust>=2.30"], "import locust")
    with ServerProcess(flags.lacuna, flags.source / "models/dsa-nano", "--threads", "1",
                       "--max-num-seqs", str(max(STREAMS)), "--max-model-len", "512") as server:
        with tempfile.TemporaryDirectory(prefix="lacuna_load_") as folder:
            locustfile = pathlib.Path(folder) / "locustfile.py"
            locustfile.write_text(LOCUSTFILE)
            for streams in STREAMS:
                # Exit code 1 is locust's for any failed request.
                done = subprocess.run(
                    [python, "-m", "locust", "-f", locustfile, "--headless", "--json",
                     "--only-summary", "-u", str(streams), "-r", str(streams),
                     "--run-time", f"{flags.seconds}s", "--stop-timeout", "30",
                     "--host", server.url],
                    capture_output=True, text=True, timeout=300, cwd=folder)
                assert done.returncode == 0, done.stdout + done.stderr
                stats = {row["name"]: row for row in json.loads(done.stdout)}
                whole, first = stats["whole"], stats["first token"]
                assert stats["completion"]["num_failures"] == 0
                assert whole["num_requests"] >= streams, whole
                mean = {name: row["total_response_time"] / row["num_requests"]
                        for name, row in stats.items()}
                rate = MAX_TOKENS * whole["num_requests"] / (
                    whole["last_request_timestamp"] - whole["start_time"])
                print(f"{streams:3} streams: {whole['num_requests']} answers, 0 failures, "
                      f"{rate:.0f} tokens/s, first token after {mean['first token']:.1f} ms "
                      f"(mean), at most {first['max_response_time']:.1f} ms, "
                      f"whole {mean['whole']:.1f} ms", flush=True)
        code = server.stop()
    assert code == 0, f"the server ended with {code}"
    print("passed")


if __name__ == "__main__":
    main()
