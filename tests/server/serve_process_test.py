#!/usr/bin/env python3
"""`lacuna serve` as a process: flags, readiness, load, and how it ends. Standard library only.

    serve_process_test.py LACUNA SOURCE_DIR
"""
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

from server_process import ServerProcess

LACUNA, SOURCE = sys.argv[1], Path(sys.argv[2])
MODEL = SOURCE / "models" / "dsa-nano"
SMALL = ["--max-model-len", "1024", "--threads", "1", "--max-num-batched-tokens", "256"]
LONG = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


def process(*flags, env=None):
    return ServerProcess(LACUNA, MODEL, *SMALL, *flags, env=env)


class ServeTest(unittest.TestCase):
    def test_wrong_flags(self):
        for flags, word in ((["-tp", "2"], "--tensor-parallel-size"),
                            (["--load-format", "dummy"], "--load-format"),
                            (["--port", "70000"], "--port"),
                            (["--reasoning-parser", "x"], "--reasoning-parser"),
                            (["--model", "other"], "--model"),
                            (["--api-key", ""], "--api-key")):
            done = subprocess.run([LACUNA, "serve", str(MODEL), *flags], capture_output=True,
                                  text=True, timeout=60)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertIn(word, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        done = subprocess.run([LACUNA, "serve", "/nowhere", "--port", "0"], capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(done.returncode, 1, done.stderr)

    def test_aliases_names_and_metrics_prefix(self):
        with process("--alias", "nano", "--max-running-requests", "4",
                     "--enable-chunked-prefill", "--no-enable-prefix-caching", "--enforce-eager",
                     "--disable-log-requests", "--metrics-prefix", "vllm:", "-tp", "1") as server:
            ready = server.lines[-1]
            for part in ("nano", "tokens of cache", "attention: ", "top-128", "2 index groups"):
                self.assertIn(part, ready)
            status, text = server.call("GET", "/v1/models")
            self.assertEqual([m["id"] for m in json.loads(text)["data"]], ["nano"])
            self.assertIn("\nvllm:num_requests_running{model_name=\"nano\"} 0\n",
                          server.call("GET", "/metrics")[1])
            self.assertEqual(server.stop(), 0)

    def test_the_key_may_come_from_the_environment(self):
        with process(env={"LACUNA_API_KEY": "k"}) as server:
            self.assertEqual(server.call("GET", "/v1/models")[0], 401)
            self.assertEqual(
                server.call("GET", "/v1/models", headers={"Authorization": "Bearer k"})[0], 200)
            self.assertNotIn("Bearer", "".join(server.lines))

    def test_term_under_load_finishes_running_requests(self):
        with process() as server:
            results = []

            def one(stream):
                results.append(server.call("POST", "/v1/completions",
                                           {**LONG, "max_tokens": 300, "stream": stream}))

            threads = [threading.Thread(target=one, args=(i % 2 == 0,)) for i in range(8)]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not re.search(
                    r"num_requests_running\{[^}]*\} 8\n", server.call("GET", "/metrics")[1]):
                time.sleep(0.01)
            self.assertEqual(server.stop(), 0)
            for thread in threads:
                thread.join()
            self.assertEqual([status for status, _ in results], [200] * 8)
            for _, text in results:
                self.assertTrue(text.endswith("data: [DONE]\n\n") or "\"length\"" in text)
        self.assertIn("shutting down", "".join(server.lines))

    def test_a_second_signal_ends_at_once(self):
        with process("--max-num-seqs", "1") as server:
            def ignore_end():
                try:
                    server.call("POST", "/v1/completions", {**LONG, "n": 20})
                except (OSError, http.client.HTTPException):
                    pass
            thread = threading.Thread(target=ignore_end)
            thread.start()
            time.sleep(0.3)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            self.assertIsNone(server.process.poll())
            server.process.send_signal(signal.SIGINT)
            self.assertEqual(server.process.wait(timeout=5), 130)
            thread.join()

    def test_silent_clients_large_bodies_and_leavers_leave_nothing_behind(self):
        with process("--max-request-bytes", "1000000") as server:
            opened = server.num_open()

            def load():
                silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10)
                          for _ in range(500)]
                for _ in range(5):
                    try:
                        status, _ = server.call("POST", "/v1/completions",
                                                {"prompt": "a" * (10 << 20)})
                        self.assertEqual(status, 413)
                    except (BrokenPipeError, ConnectionResetError):
                        pass  # refused before it was all sent
                for i in range(20):
                    leaver = socket.create_connection(("127.0.0.1", server.port), timeout=10)
                    body = json.dumps({**LONG, "stream": i % 2 == 0}).encode()
                    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
                    data = head + body
                    leaver.sendall(data[:len(data) * (i + 1) // 20])
                    time.sleep(0.005 * i)
                    leaver.close()
                started = time.monotonic()
                status, _ = server.call("POST", "/v1/completions", {**LONG, "max_tokens": 4})
                self.assertEqual(status, 200)
                self.assertLess(time.monotonic() - started, 10)
                for connection in silent:
                    connection.close()
                deadline = time.monotonic() + 60
                while server.num_open() > opened + 4 and time.monotonic() < deadline:
                    time.sleep(0.05)
                self.assertLessEqual(server.num_open(), opened + 4)

            load()
            first = server.rss_kb()
            for _ in range(3):
                load()
            self.assertLess(server.rss_kb(), first + 40_000)
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
