#!/usr/bin/env python3
"""`lacuna bench serve` against a server that this test starts, and the offline benches.

    bench_serve_test.py LACUNA SOURCE_DIR

What the numbers are is not judged, only that they are there and belong together.
"""
import json
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

LACUNA, SOURCE = sys.argv[1], Path(sys.argv[2])
MODEL = SOURCE / "models" / "dsa-nano"
# The arguments of vLLM #67468, with what one CPU changes: devices, context and lengths.
SERVE = ["--tensor-parallel-size", "1", "--max-num-batched-tokens", "128", "--max-num-seqs", "128",
         "--max-model-len", "1024", "--kv-cache-dtype", "bfloat16", "--block-size", "64",
         "--enable-chunked-prefill", "--no-enable-prefix-caching", "--kv-cache-memory-bytes",
         "100000000", "--gpu-memory-utilization", "0.85", "--trust-remote-code"]
BENCH = ["--backend", "vllm", "--endpoint", "/v1/completions", "--model", str(MODEL),
         "--tokenizer", str(MODEL), "--dataset-name", "random", "--random-input-len", "48",
         "--random-output-len", "12", "--random-range-ratio", "0", "--request-rate", "inf",
         "--max-concurrency", "4", "--num-prompts", "8", "--num-warmups", "4", "--seed", "42",
         "--ignore-eos", "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el",
         "--metric-percentiles", "50,90,99", "--save-result", "--trust-remote-code",
         "--disable-tqdm"]


def bench_with(*args):
    """BENCH, but with other values for the flags in `args`."""
    kept = list(BENCH)
    for flag in args:
        if flag in kept:
            del kept[kept.index(flag):kept.index(flag) + 2]
    return [*kept, *args]


def run(*args):
    return subprocess.run([LACUNA, "bench", *args], capture_output=True, text=True, timeout=120,
                          check=False)


class BenchServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = subprocess.Popen(
            [LACUNA, "serve", str(MODEL), "--port", "0", "--threads", "1", *SERVE],
            stderr=subprocess.PIPE, text=True)
        cls.url = None
        for line in cls.server.stderr:
            if found := re.search(r"ready: (http://127\.0\.0\.1:\d+) ", line):
                cls.url = found.group(1)
                break
        cls.reader = threading.Thread(target=cls.server.stderr.read)
        cls.reader.start()

    @classmethod
    def tearDownClass(cls):
        cls.server.terminate()
        cls.server.wait(60)
        cls.reader.join()
        cls.server.stderr.close()

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lacuna_bench_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def bench(self, *args):
        done = run("serve", "--base-url", self.url, "--result-dir", str(self.folder),
                   "--result-filename", "r.json", *bench_with(*args))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads((self.folder / "r.json").read_text()), done.stdout

    def check_run(self, one, prompts=8, tokens_in=48, tokens_out=12):
        self.assertEqual((one["completed"], one["failed"], one["errors"]), (prompts, 0, []))
        self.assertEqual(one["total_input_tokens"], prompts * tokens_in)
        self.assertEqual(one["total_output_tokens"], prompts * tokens_out)
        self.assertGreater(one["output_throughput"], 0)
        for name in ("ttft", "tpot", "itl", "e2el"):
            self.assertLessEqual(one[f"p50_{name}_ms"], one[f"p99_{name}_ms"])
        self.assertGreaterEqual(one["mean_e2el_ms"], one["mean_ttft_ms"])
        server = one["server"]
        self.assertEqual(server["requests_ended"], prompts)
        self.assertEqual((server["preemptions"], server["prefix_hits"]), (0, 0))
        self.assertGreater(server["kernel_calls"]["cpu/sparse_mla"], 0)
        self.assertIn("late_kernels", server)

    def test_one_server(self):
        result, out = self.bench("--save-detailed")
        self.check_run(result)
        self.assertEqual(len(result["requests"]), 8)
        for request in result["requests"]:
            self.assertEqual((request["output_len_asked"], request["output_len"]), (12, 12))
            self.assertLessEqual(request["ttft"], request["e2el"])
            self.assertAlmostEqual(request["ttft"] + sum(request["itl"]), request["e2el"], 6)
        version = result["arms"]["A"]["version"]
        self.assertRegex(version["binary_hash"], r"^[0-9a-f]{16}$")
        self.assertEqual(version["binary_hash"], result["client_binary_hash"])
        self.assertIn("cpu/sparse_mla", version["kernels"])
        self.assertIn("output tokens/s", out)
        again, _ = self.bench()
        self.assertEqual(again["prompt_hash"], result["prompt_hash"])
        other, _ = self.bench("--seed", "1")
        self.assertNotEqual(other["prompt_hash"], result["prompt_hash"])

    def test_paired_with_itself(self):
        result, out = self.bench("--second-url", self.url, "--label", "base", "--second-label",
                                 "cand")
        rounds = result["rounds"]
        self.assertGreaterEqual(len(rounds), 3)
        for number, entry in enumerate(rounds):
            self.assertEqual(entry["order"], [["base", "cand"], ["cand", "base"]][number % 2])
            self.assertIsNone(entry["no_ratio"])
            for label in ("base", "cand"):
                self.check_run(entry["runs"][label])
            self.assertEqual(len({one["prompt_hash"] for one in entry["runs"].values()}), 1)
        self.assertEqual(result["ratio_of"], ["cand", "base"])
        every = result["ratios_with_disturbed_rounds"]
        self.assertEqual(len(every["output_throughput"]["rounds"]), len(rounds))
        for name in ("output_throughput", "median_ttft", "median_tpot", "median_e2el"):
            low, high = every[name]["range"]
            self.assertLessEqual(low, every[name]["median"])
            self.assertLessEqual(every[name]["median"], high)
        self.assertIn("cand over base", out)

    def test_failed_requests_have_no_ratio(self):
        # The context has no room for it: the server refuses.
        done = run("serve", "--base-url", self.url, "--second-url", self.url, "--rounds", "1",
                   "--reruns", "0", "--output", str(self.folder / "r.json"),
                   *bench_with("--random-output-len", "2000"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("requests failed", done.stderr)
        result = json.loads((self.folder / "r.json").read_text())
        self.assertEqual(result["ratios"], {})
        self.assertIn("failed", result["rounds"][0]["no_ratio"])
        self.assertTrue(result["rounds"][0]["disturbed"])
        self.assertIn("context", result["rounds"][0]["runs"]["A"]["errors"][0])

    def test_rate_and_jsonl(self):
        data = self.folder / "prompts.jsonl"
        data.write_text('{"prompt": "#12+30="}\n{"prompt": [65, 66, 67], "output_len": 3}\n')
        result, _ = self.bench("--dataset-name", "jsonl", "--dataset-path", str(data),
                               "--output-len", "5", "--request-rate", "50", "--burstiness", "2")
        self.assertEqual(result["completed"], 8)
        self.assertEqual(result["total_output_tokens"], 4 * 5 + 4 * 3)
        self.assertEqual(result["request_rate"], "50")

    def test_refusals(self):
        dead = "http://127.0.0.1:1"
        target = str(self.folder / "r.json")
        cases = [
            (["--base-url", dead], 1, f"preflight: GET {dead}/v1/models"),
            (["--base-url", self.url, "--second-url", dead], 1, f"preflight: GET {dead}/v1/models"),
            (["--base-url", "https://a"], 2, "https://a"),
            (["--base-url", "http://a:99999"], 2, "port"),
            (["--dataset-name", "sonnet"], 2, "--dataset-name: \"sonnet\", expected random or"),
            (["--dataset-name", "sharegpt"], 2, "--dataset-name: \"sharegpt\""),
            (["--dataset-name", "jsonl"], 2, "--dataset-path"),
            (["--backend", "triton"], 2, "--backend: \"triton\""),
            (["--request-rate", "0"], 2, "--request-rate"),
            (["--percentile-metrics", "tps"], 2, "--percentile-metrics"),
            (["--base-url", self.url, "--model", "other"], 2, "--model: \"other\""),
            (["--endpoint", "/v1/chat/completions"], 2, "--endpoint"),
        ]
        for args, code, message in cases:
            done = run("serve", *args, "--output", target)
            self.assertEqual(done.returncode, code, args)
            self.assertIn(message, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertEqual(list(self.folder.iterdir()), [])

    def test_latency(self):
        target = self.folder / "l.json"
        done = run("latency", "--model", str(MODEL), "--threads", "1", "--input-len", "40",
                   "--output-len", "8", "--batch-size", "3", "--num-iters", "2",
                   "--num-iters-warmup", "1", "--profile", "--output-json", str(target))
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(target.read_text())
        self.assertEqual(len(result["latencies"]), 2)
        self.assertEqual(result["engine"]["steps"], 2 * 8)
        self.assertGreater(result["decode_tokens_per_second"], 0)
        self.assertGreater(result["engine"]["scheduler_share_percent"], 0)
        self.assertGreater(result["engine"]["kernels"][0]["seconds"], 0)
        self.assertIn("scheduler", done.stdout)
        long = run("latency", "--model", str(MODEL), "--input-len", "9000")
        self.assertEqual(long.returncode, 2)
        self.assertIn("--input-len", long.stderr)

    def test_throughput(self):
        target = self.folder / "t.json"
        data = self.folder / "prompts.jsonl"
        data.write_text('{"prompt": "#12+30="}\n')
        for extra, tokens_in in ((["--input-len", "20"], 6 * 20),
                                 (["--dataset", "jsonl", "--dataset-path", str(data)], 6 * 7)):
            done = run("throughput", "--model", str(MODEL), "--threads", "1", "--num-prompts", "6",
                       "--output-len", "5", "--max-num-seqs", "2", "--output-json", str(target),
                       *extra)
            self.assertEqual(done.returncode, 0, done.stderr)
            result = json.loads(target.read_text())
            self.assertEqual(result["total_input_tokens"], tokens_in)
            self.assertEqual(result["total_output_tokens"], 30)
            self.assertGreater(result["tokens_per_second"], result["output_tokens_per_second"])
            self.assertNotIn("seconds", result["engine"]["kernels"][0])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
