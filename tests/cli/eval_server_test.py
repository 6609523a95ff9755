#!/usr/bin/env python3
"""`lacuna eval` against servers: one that is made up, whose answers are known, for GSM8K's form and
for what goes wrong; and `lacuna serve`. Standard library only.

    eval_server_test.py LACUNA SOURCE_DIR
"""
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import unittest

LACUNA, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
STOPS = ["Question", "Assistant:", "<|separator|>"]
NUM_PROBLEMS = 40


class Fake(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, value):
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "made-up"}]})
        else:
            self.reply(404, {"error": {"message": "no such page"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
        self.reply(*self.server.answer(body))


class Server:
    def __init__(self, answer):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        self.server.daemon_threads = True
        self.server.asked, self.server.answer = [], answer
        self.server.lock = threading.Lock()
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self):
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.asked = self.server.asked
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def completion(text):
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
                 "usage": {"prompt_tokens": 100, "completion_tokens": 7}}


def run(*args, env=None):
    return subprocess.run([LACUNA, "eval", *map(str, args)], capture_output=True, text=True,
                          timeout=600, env={**os.environ, **(env or {})})


def number_asked(body):
    return int(re.findall(r"What is (\d+) plus", body["prompt"])[-1])


class EvalServer(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lacuna_eval_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        shots = [{"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"}
                 for i in range(5)]
        tests = [{"question": f"What is {i} plus 1000?",
                  "answer": f"So it’s {i}+1000.\n#### {i + 1000:,}"} for i in range(NUM_PROBLEMS)]
        for name, rows in (("train_first5", shots), ("test", tests)):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        self.shots = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in shots)

    def gsm8k(self, server, *more, env=None, output="result.json"):
        return run("--task", "gsm8k", "--data-dir", self.folder, "--base-url", server.url, "-o",
                   self.folder / output, *more, env=env)

    def result(self, name="result.json"):
        return json.loads((self.folder / name).read_text())

    def test_gsm8k_is_asked_and_scored_exactly(self):
        def answer(body):
            n = number_asked(body)
            kind = n % 4
            return completion([f" It is {n}+1,000 = {n + 1000:,}.\n#### {n + 1000:,}\n\n",
                               f" {n + 1000} dollars, of which 5 are mine",  # the last one counts
                               " I do not know",
                               f" ${n + 1000}."][kind])

        with Server(answer) as server:
            done = self.gsm8k(server)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("40 problems, 50.00 % exact, ", done.stdout)
            self.assertEqual(len(server.asked), NUM_PROBLEMS)
            prompts = set()
            for path, headers, body in server.asked:
                self.assertEqual(path, "/v1/completions")
                self.assertNotIn("Authorization", headers)
                prompts.add(body.pop("prompt"))
                self.assertEqual(body, {"model": "made-up", "max_tokens": 512, "temperature": 0,
                                        "seed": 42, "stop": STOPS})
            self.assertEqual(prompts, {f"{self.shots}Question: What is {i} plus 1000?\nAnswer:"
                                       for i in range(NUM_PROBLEMS)})
        result = self.result()
        self.assertEqual(result["task"], "gsm8k")
        self.assertEqual(result["model"], "made-up")
        self.assertEqual(result["exact_percent"], 50)
        self.assertEqual(result["exact_by_id"],
                         {str(i): i % 4 in (0, 3) for i in range(NUM_PROBLEMS)})
        self.assertEqual([result["answer_by_id"][str(i)] for i in range(4)],
                         ["1000", "5", None, "1003"])
        self.assertEqual([w["id"] for w in result["wrong"]],
                         [i for i in range(NUM_PROBLEMS) if i % 4 in (1, 2)])
        self.assertEqual(result["wrong"][0], {"id": 1, "kind": "gsm8k", "expected": "1001",
                                              "answered": " 1001 dollars, of which 5 are mine"})
        self.assertEqual((result["prompt_tokens"], result["generated_tokens"]), (4000, 280))

    def test_flags_reach_the_server(self):
        with Server(lambda body: completion("1")) as server:
            server.url += "/v1/"
            done = self.gsm8k(server, "--model", "other", "--every", "10", "--max-tokens", "9",
                              "--stop", "\\n\\n", "--concurrency", "1",
                              env={"LACUNA_API_KEY": "k"})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([number_asked(body) for *_, body in server.asked], [0, 10, 20, 30])
            for path, headers, body in server.asked:
                self.assertEqual(path, "/v1/completions")
                self.assertEqual(headers["Authorization"], "Bearer k")
                self.assertEqual((body["model"], body["max_tokens"], body["stop"]),
                                 ("other", 9, ["\n\n"]))

    def test_what_goes_wrong_is_one_line(self):
        cases = (((400, {"error": {"message": "too long by 3"}}), "answered 400: too long by 3"),
                 ((500, b"oops"), "answered 500: oops"),
                 ((200, {"choices": []}), "no choices[0].text"),
                 ((200, b"{"), "no choices[0].text"))
        for reply, words in cases:
            with Server(lambda body, reply=reply: reply) as server:
                done = self.gsm8k(server)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(words, done.stderr)
            self.assertRegex(done.stderr, r"^lacuna: problem \d+: ")
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertFalse((self.folder / "result.json").exists())
        done = self.gsm8k(server)  # which is gone
        self.assertEqual(done.returncode, 1)
        self.assertIn("gave no answer", done.stderr)
        for url, words in (("https://a", "not supported"), ("a:80", "does not start with http://"),
                           ("http://a:x", "the port"), ("http://a:70000/v1", "the port"),
                           ("http://", "no host"), ("http://[::1", "']'")):
            done = run("--task", "gsm8k", "--data-dir", self.folder, "--base-url", url)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)
        for flags, words in ((("--task", "mmlu"), '--task: "mmlu"'),
                             (("--task", "gsm8k"), "--data-dir: missing"),
                             (("--data-dir", "."), "only with --task gsm8k"),
                             (("--task", "gsm8k", "--data-dir", ".", "--data", "x"), "--data: not"),
                             (("--task", "gsm8k", "--data-dir", ".", "--expect", "x"), "--expect")):
            done = run(*flags)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)

    def test_comparison_of_two_runs(self):
        def right_unless(wrong):
            def answer(body):
                n = number_asked(body)
                return completion(f"#### {n if n in wrong else n + 1000}")
            return answer

        for name, wrong in (("a.json", {1, 2, 39}), ("b.json", {2, 5, 6, 7})):
            with Server(right_unless(wrong)) as server:
                self.assertEqual(self.gsm8k(server, output=name).returncode, 0)
        done = run("--compare", self.folder / "a.json", self.folder / "b.json", "-o",
                   self.folder / "c.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("A: 37 of 40 exact (92.50 %)", done.stdout)
        self.assertIn("3 exact in A only: 5, 6, 7\n2 exact in B only: 1, 39\n", done.stdout)
        self.assertIn("p of the 5 discordant pairs: 1.000000", done.stdout)
        self.assertEqual(self.result("c.json")["only_b"], ["1", "39"])
        for name, flipped in (("a.json", range(30, 54)), ("b.json", range(30))):
            (self.folder / name).write_text(json.dumps(
                {"task": "gsm8k", "exact_by_id": {str(i): i not in flipped for i in range(1319)}}))
        done = run("--compare", self.folder / "a.json", self.folder / "b.json")
        self.assertIn("30 exact in A only", done.stdout)
        self.assertIn("24 exact in B only", done.stdout)
        self.assertIn("p of the 54 discordant pairs: 0.496617", done.stdout)
        (self.folder / "b.json").write_text('{"task": "gsm8k", "exact_by_id": {"1": true}}')
        done = run("--compare", self.folder / "a.json", self.folder / "b.json")
        self.assertEqual(done.returncode, 2)
        self.assertIn("not about the same problems", done.stderr)

    def test_the_server_answers_as_the_engine_does(self):
        server = subprocess.Popen([LACUNA, "serve", str(SOURCE / "models" / "dsa-nano"), "--port",
                                   "0", "--max-model-len", "4096", "--threads", "1"],
                                  stderr=subprocess.PIPE, text=True)
        try:
            port = next(re.search(r"ready: http://127\.0\.0\.1:(\d+) ", line).group(1)
                        for line in server.stderr if "ready: " in line)
            drain = threading.Thread(target=server.stderr.read)
            drain.start()
            data = self.folder / "data.jsonl"
            rows = (SOURCE / "models/dsa-nano/eval.jsonl").read_text().splitlines()[::200]
            rows = [json.loads(row) for row in rows]
            rows[1]["answer"] = "never"  # so that a wrong answer is in both
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            for name, more in (("server.json", ("--base-url", f"http://127.0.0.1:{port}")),
                               ("engine.json", ("--threads", "1"))):
                done = run("--data", data, "-o", self.folder / name, *more)
                self.assertEqual(done.returncode, 0, done.stderr)
            one, other = self.result("server.json"), self.result("engine.json")
            for field in ("exact_by_id", "wrong", "problems_hash", "generated_tokens",
                          "prompt_tokens"):
                self.assertEqual(one[field], other[field], field)
            self.assertEqual(one["exact_percent"], 100 * (len(rows) - 1) / len(rows))
            self.assertEqual(one["model"], "dsa-nano")
        finally:
            server.terminate()
            server.wait()
            drain.join()
            server.stderr.close()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
