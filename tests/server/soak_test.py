#!/usr/bin/env python3
"""Thousands of short requests at `lacuna serve` from 64 clients, some of which leave in the middle:
no 5xx, every block and sequence given back, and no memory that grows. Before that, equal prompts in
a crowd must get equal answers. Standard library only.

    soak_test.py LACUNA SOURCE_DIR [--requests N] [--small-cache] [--output RESULT.json]

The server runs with its default flags; with --small-cache in so little memory that sequences are
preempted. RSS is judged when there are more requests than the WARM first ones.
"""
import argparse
import collections
import http.client
import json
import pathlib
import random
import re
import threading
import time

from server_process import ServerProcess

CLIENTS = 64
WARM = 500
RSS_GROWTH_MAX = 0.02
PROMPTS, COPIES = 8, 64
LEAVER_TOKENS = 432
# 8192 tokens of cache, a quarter of what 64 sequences of 512 want.
SMALL_CACHE = ["--max-num-seqs", str(CLIENTS), "--max-model-len", "512", "--kv-cache-memory-bytes",
               "42000000", "--threads", "1"]


class Server(ServerProcess):
    def metrics(self):
        text = self.call("GET", "/metrics")[1]
        return {name: float(value) for name, value in
                re.findall(r"^lacuna:(\w+)\{[^}]*\} (\S+)$", text, re.M)}

    def wait_until_idle(self):
        deadline = time.monotonic() + 60
        while True:
            metrics = self.metrics()
            left = {name: metrics[name] for name in
                    ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


def post(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection, connection.getresponse()


def in_threads(count, jobs, work):
    """Calls work(job) for every job from `count` threads; the first exception is raised here."""
    todo = collections.deque(jobs)
    errors = []

    def loop():
        while not errors:
            try:
                job = todo.popleft()
            except IndexError:
                return
            try:
                work(job)
            except BaseException as error:  # shown below
                errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check_copies(port, texts):
    """Each prompt alone, then COPIES of each in a crowd: greedy answers are equal to the byte."""
    # Lengths on both sides of the 128 keys that the model's indexer picks.
    prompts = [texts[i][:24 + 28 * i] for i in range(PROMPTS)]

    def ask(prompt):
        connection, response = post(port, {"prompt": prompt, "max_tokens": 12, "temperature": 0,
                                           "ignore_eos": True})
        text = response.read().decode()
        connection.close()
        assert response.status == 200, text
        return json.loads(text)["choices"][0]["text"]

    alone = [ask(prompt) for prompt in prompts]
    answers = [collections.Counter() for _ in prompts]
    lock = threading.Lock()

    def work(which):
        text = ask(prompts[which])
        with lock:
            answers[which][text] += 1

    jobs = list(range(PROMPTS)) * COPIES
    random.Random(1).shuffle(jobs)
    in_threads(CLIENTS, jobs, work)
    for which, counts in enumerate(answers):
        assert counts == {alone[which]: COPIES}, (which, alone[which], counts)


def soak(server, texts, num_requests):
    outcomes = collections.Counter()
    lock = threading.Lock()
    done = 0
    rss_warm = None

    def work(index):
        nonlocal done, rss_warm
        rng = random.Random(index)
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 64))
        behaviour = rng.choices(("whole", "streamed", "leaves in the stream", "leaves at once"),
                                (45, 35, 12, 8))[0]
        body = {"prompt": text[start:start + rng.randint(1, 64)], "ignore_eos": True,
                "max_tokens": rng.randint(1, 12), "stream": behaviour.find("stream") >= 0,
                "temperature": rng.choice((0, 1)), "seed": index}
        if behaviour.startswith("leaves"):
            body["max_tokens"] = LEAVER_TOKENS  # there is something left to cancel
        if behaviour == "leaves at once":
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            connection.request("POST", "/v1/completions", json.dumps(body))
            time.sleep(rng.random() * 0.05)
            status = None
        else:
            connection, response = post(server.port, body)
            status = response.status
            if behaviour == "leaves in the stream":
                for _ in range(rng.randint(1, 6)):
                    response.readline()
                response.close()
            else:
                answer = response.read().decode()
                assert status >= 400 or answer.endswith("data: [DONE]\n\n") or (
                    json.loads(answer)["usage"]["completion_tokens"] == body["max_tokens"]), answer
        connection.close()
        with lock:
            outcomes[behaviour if status in (None, 200) else f"status {status}"] += 1
            done += 1
            if done == WARM:
                rss_warm = server.rss_kb()

    in_threads(CLIENTS, range(num_requests), work)
    return outcomes, rss_warm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lacuna")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--small-cache", action="store_true")
    parser.add_argument("--output", type=pathlib.Path)
    flags = parser.parse_args()
    rows = (flags.source / "models/dsa-nano/eval.jsonl").read_text().splitlines()[:64]
    texts = [json.loads(row)["prompt"] for row in rows]
    with Server(flags.lacuna, flags.source / "models/dsa-nano",
                *(SMALL_CACHE if flags.small_cache else [])) as server:
        rss_ready = server.rss_kb()
        started = time.monotonic()
        check_copies(server.port, texts)
        print(f"{COPIES} copies of {PROMPTS} prompts: equal answers, "
              f"{time.monotonic() - started:.1f} s", flush=True)
        started = time.monotonic()
        outcomes, rss_warm = soak(server, texts, flags.requests)
        seconds = time.monotonic() - started
        left = server.wait_until_idle()
        rss_end = server.rss_kb()
        result = {"requests": flags.requests, "clients": CLIENTS, "seconds": round(seconds, 1),
                  "requests_per_second": round(flags.requests / seconds, 1),
                  "outcomes": dict(sorted(outcomes.items())), "left_at_the_end": left,
                  "flags": SMALL_CACHE if flags.small_cache else "default",
                  "rss_kb_when_ready": rss_ready, f"rss_kb_after_{WARM}": rss_warm,
                  "rss_kb_at_the_end": rss_end,
                  "copies": {"prompts": PROMPTS, "copies": COPIES, "equal": True}}
        print(json.dumps(result, indent=1), flush=True)
        bad = [name for name in outcomes if name.startswith("status ")]
        assert not bad, f"answers other than 200: {bad}"
        assert not any(left.values()), f"not given back: {left}"
        if flags.requests > WARM:
            growth = rss_end / rss_warm - 1
            assert growth <= RSS_GROWTH_MAX, f"RSS grew by {growth:.1%} after {WARM} requests"
        code = server.stop()
    assert code == 0, f"the server ended with {code}: {server.lines[-5:]}"
    if flags.output:
        flags.output.write_text(json.dumps(result, indent=1) + "\n")
    print("passed")


if __name__ == "__main__":
    main()
