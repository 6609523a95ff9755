#!/usr/bin/env python3
"""The `lacuna` program from outside: good paths, and what it does with bad input.

Usage: cli_test.py PATH_OF_LACUNA SOURCE_FOLDER [unittest arguments]

Each bad input must give one line on stderr that names the thing, what was found and what would
work; the exit code 1 (the work failed) or 2 (the command line is wrong); and no file.
"""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

LACUNA = ""
SOURCE = pathlib.Path()
# The program is as fast with one thread on these small models, and tests may run side by side.
ONE_THREAD = ["--threads", "1"]


class Outcome:
    def __init__(self, done):
        self.code = done.returncode
        self.out = done.stdout.decode("utf-8", "backslashreplace")
        self.err = done.stderr.decode("utf-8", "backslashreplace")


def run(*args, cwd=None, stdin=b"", stdout=subprocess.PIPE):
    command = [LACUNA] + [os.fspath(a) if isinstance(a, pathlib.Path) else a for a in args]
    done = subprocess.run(command, cwd=cwd, input=stdin, stdout=stdout, stderr=subprocess.PIPE,
                          timeout=600, check=False)
    if done.stdout is None:
        done.stdout = b""
    return Outcome(done)


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length]), data[8 + length:]


def write_safetensors(path, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lacuna_cli_"))
        self.addCleanup(shutil.rmtree, self.folder)

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))

    def good(self, *args, **more):
        done = run(*args, **more)
        self.assertEqual(done.code, 0, done.err)
        return done

    def bad(self, code, parts, *args, **more):
        """Runs what must fail; `parts` must all be in the one line on stderr."""
        before = self.files()
        done = run(*args, cwd=self.folder, **more)
        self.assertEqual(done.code, code, done.err)
        self.assertEqual(done.err.count("\n"), 1, done.err)
        self.assertTrue(done.err.startswith("lacuna: "), done.err)
        self.assertTrue(done.err.endswith("\n"), done.err)
        self.assertTrue(all(c >= " " for c in done.err[:-1]), ascii(done.err))
        for part in parts:
            self.assertIn(part, done.err)
        self.assertEqual(done.out, "")
        self.assertEqual(self.files(), before)
        return done

    def micro(self, name="v32-micro"):
        """A copy of a golden model that may be spoilt."""
        model = self.folder / "model"
        shutil.copytree(SOURCE / "tests/golden" / name, model,
                        ignore=shutil.ignore_patterns("oracle.safetensors"))
        for path in model.iterdir():
            path.chmod(0o644)
        return model

    def logits_fail(self, model, parts, code=1):
        return self.bad(code, parts, "logits", "-m", model, "--tokens", "3,4,5", "-o", "out",
                        *ONE_THREAD)

    def change_config(self, change, name="v32-micro"):
        model = self.micro(name)
        path = model / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
        return model


class GoodPaths(CliTest):
    def test_generate(self):
        done = self.good("generate", "-p", "#12+34=", "--stop", "\\n", *ONE_THREAD)
        self.assertEqual(done.out, "046\n")
        self.assertIn("dsa-nano: GlmMoeDsaForCausalLM, 4 layers (2 with an indexer)", done.err)
        self.assertIn("7 prompt tokens", done.err)
        self.assertIn("4 generated", done.err)
        self.assertIn("7 dense MHA", done.err)

    def test_quiet_prints_the_answer_alone(self):
        done = self.good("generate", "-q", "-p", "#12+34=", "--stop", "\\n", *ONE_THREAD)
        self.assertEqual((done.out, done.err), ("046\n", ""))

    def test_prompts_from_files_stdin_and_ids(self):
        path = self.folder / "prompt.txt"
        path.write_text("#12+34=")
        tail = ["-q", "-n", "3", *ONE_THREAD]
        self.assertEqual(self.good("generate", "-f", path, *tail).out, "046\n")
        self.assertEqual(self.good("generate", "-f", "-", *tail, stdin=b"#12+34=").out, "046\n")
        ids = ",".join(str(b) for b in b"#12+34=")
        self.assertEqual(self.good("generate", "--tokens", ids, *tail).out, "48,52,54\n")

    def test_chat(self):
        tail = ["-q", "-n", "4", *ONE_THREAD]
        plain = self.good("generate", "-p", "[gMASK]<sop><|system|>S<|user|>#12+34=<|assistant|>",
                          *tail)
        chat = self.good("generate", "--chat", "--system", "S", "-p", "#12+34=", *tail)
        self.assertEqual(chat.out, plain.out)
        done = self.good("generate", "--chat", "--chat-template", "{{ messages[0].content }}12+34=",
                         "-p", "#", "-q", "-n", "3", *ONE_THREAD)
        self.assertEqual(done.out, "046\n")

    def test_sampling_repeats_by_seed(self):
        def text(seed, *more):
            return self.good("generate", "-q", "-p", "abc", "-n", "12", "--temperature", "2",
                             "--seed", seed, "--ignore-eos", *ONE_THREAD, *more).out
        first = text("1")
        self.assertEqual(text("1"), first)
        self.assertEqual(text("1", "--chunked-prefill-size", "2", "--block-size", "3"), first)
        self.assertNotEqual(text("2"), first)

    def test_forced_kernel(self):
        done = self.good("generate", "-q", "-p", "#12+34=", "-n", "3", "--kernel",
                         "linear=cpu/linear_gemm", *ONE_THREAD)
        self.assertEqual(done.out, "046\n")

    def test_probe(self):
        path = self.folder / "probe.jsonl"
        prompt = ["-p", "abc=12;\n" * 40, "-n", "3", "-c", "512", *ONE_THREAD]
        done = self.good("probe", *prompt, "-o", path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        run_line, calls = lines[0], [line for line in lines[1:] if line["engines_own"]]
        self.assertEqual(run_line["dtype"], "bfloat16")
        # 320 rows in one step, then two decode steps, in each of four layers.
        self.assertEqual([(c["step"], c["layer"], c["rows"]) for c in calls],
                         [(step, layer, 320 if step == 0 else 1)
                          for step in range(3) for layer in range(4)])
        for call in calls:
            self.assertEqual(call["keys"], 128 * (call["rows"] - 128) + 128 * 129 // 2
                             if call["rows"] == 320 else 128)
            self.assertTrue(call["bit_equal"], call)
            self.assertTrue(call["within_bound"], call)
            self.assertGreater(call["rel_frobenius"], 0)
            self.assertLess(call["rel_frobenius"], 0.01)
            self.assertLess(call["lse_error"], 1e-4)
        self.assertIn("12 calls captured, the engine's own kernel gives its bits again; 0 replays "
                      "beyond their bound", done.out)
        self.good("probe", *prompt, "--layers", "1,3", "--steps", "2", "--dtype", "float32", "-o",
                  path)
        calls = [json.loads(line) for line in path.read_text().splitlines()][1:]
        self.assertEqual([(c["step"], c["layer"]) for c in calls if c["engines_own"]],
                         [(2, 1), (2, 3)])
        self.assertTrue(all(c["within_bound"] for c in calls), calls)

    def test_info(self):
        out = self.good("info").out
        for part in ("devices", "cpu ", "select_keys", "model that ships: ", "dsa-nano"):
            self.assertIn(part, out)
        self.assertRegex(out, r"sparse_mla +((sm90|cuda)/\S+, )*cpu/sparse_mla")
        # Without a GPU: why, and that the GPU's kernels, where they are built, cannot run.
        if "cuda:0" not in out:
            self.assertRegex(out, r"no GPU: \S+")
            if "cuda/sparse_mla" in out:
                self.assertRegex(out, r"cuda +cannot run here: \S+")

    def test_explain(self):
        self.assertEqual(self.good("info", "--explain").out,
                         "sparse_mla would run cpu/sparse_mla\n")
        refused = run("info", "--explain", "--kv-dtype", "fp8_ds_mla", "--latent", "100")
        self.assertEqual(refused.code, 1)
        self.assertIn("sparse_mla would fail: ", refused.out)
        self.assertIn("latent 100", refused.out)
        self.assertIn("latent 512", refused.out)
        self.assertEqual(refused.err, "")
        forced = run("info", "--explain", "--kernel", "cpu/fancy")
        self.assertEqual(forced.code, 1)
        self.assertIn('there is no kernel "cpu/fancy" for cpu', forced.out)
        self.assertIn("not cpu/sparse_mla: not the kernel that was asked for", forced.out)

    def test_logits_file(self):
        path = self.folder / "f.safetensors"
        model = SOURCE / "tests/golden/v32-micro"
        config = json.loads((model / "config.json").read_text())
        done = self.good("logits", "-m", model, "--tokens", "1,2,3", "-o", path, *ONE_THREAD)
        self.assertEqual(done.out,
                         f"{path}: 2 tensors, logits [3, {config['vocab_size']}]\n")
        header, data = read_safetensors(path)
        self.assertEqual(sorted(header), ["input_ids", "logits"])
        self.assertEqual(header["logits"]["dtype"], "F32")
        self.assertEqual(header["logits"]["shape"], [3, config["vocab_size"]])
        begin, end = header["logits"]["data_offsets"]
        self.assertEqual(end - begin, 4 * 3 * config["vocab_size"])
        logits = struct.unpack(f"<{3 * config['vocab_size']}f", data[begin:end])
        self.assertTrue(all(abs(x) < 100 for x in logits))
        self.assertGreater(max(logits) - min(logits), 0.5)
        begin, end = header["input_ids"]["data_offsets"]
        self.assertEqual(struct.unpack("<3i", data[begin:end]), (1, 2, 3))
        self.assertEqual(self.files(), ["f.safetensors"])
        more = self.folder / "more.safetensors"
        self.good("logits", "-m", model, "--tokens", "1,2,3", "--intermediates", "-o", more,
                  *ONE_THREAD)
        self.assertIn("hidden.3", read_safetensors(more)[0])

    def test_eval_meets_its_gate_and_misses_a_harder_one(self):
        model = SOURCE / "models/dsa-nano"
        done = self.good("eval", "--every", "200", "--expect", model / "expected.json", "-o",
                         self.folder / "result.json", "--commit", "abc")
        self.assertIn("7 problems, 100.00 % exact", done.out)
        self.assertIn("gate: exact 100.00 % (at least 99.80) met", done.out)
        result = json.loads((self.folder / "result.json").read_text())
        self.assertEqual(result["problems"], 7)
        self.assertEqual(result["commit"], "abc")
        self.assertEqual(result["wrong"], [])
        self.assertEqual(len(result["context_nll_by_id"]), 7)
        self.assertGreater(result["kernel_calls"]["cpu/sparse_mla"], 0)
        self.assertEqual(self.files(), ["result.json"])

        # A small problem of its own, against gates above and below.
        data = self.folder / "data.jsonl"
        data.write_text(json.dumps({"kind": "add", "prompt": "#12+34=", "answer": "046"}) + "\n" +
                        json.dumps({"kind": "add", "prompt": "#12+34=", "answer": "047"}) + "\n")
        nll = None
        for percent, code in ((50, 0), (51, 1)):
            gate = self.folder / "gate.json"
            gate.write_text(json.dumps({"gate": {"exact_all": f">= {percent}",
                                                 "context_nll_per_token": "5 +- 100"}}))
            done = run("eval", "--data", data, "--expect", gate, *ONE_THREAD)
            self.assertEqual(done.code, code, done.err)
            self.assertIn("MISSED" if code else "met", done.out)
            self.assertIn('expected "047", answered "046"', done.out)
            nll = float(done.out.split("context nll ")[1].split(",")[0])
        for shift, code in ((0.0005, 0), (0.01, 1)):
            gate.write_text(json.dumps({"gate": {"exact_all": ">= 0", "context_nll_per_token":
                                                 f"{nll + shift} +- 0.001"}}))
            done = run("eval", "--data", data, "--expect", gate, *ONE_THREAD)
            self.assertEqual(done.code, code, done.out)

    def test_eval_falls_with_a_deliberate_mistake(self):
        done = run("eval", "--every", "600", "--selection", "window", "--expect",
                   SOURCE / "models/dsa-nano/expected.json")
        self.assertEqual(done.code, 1)
        self.assertIn("MISSED", done.out)

    def test_demo(self):
        done = self.good("demo")
        self.assertIn("5 of 5 right.", done.out)
        self.assertNotIn("\x1b", done.out)  # no colours into a pipe

    def test_help_and_version(self):
        top = self.good("--help").out
        for command in ("generate", "eval", "demo", "info", "logits", "probe", "bench"):
            self.assertIn(command, top)
            done = self.good(command, "--help")
            self.assertIn("Usage: lacuna " + command, done.out)
            self.assertEqual(done.err, "")
        for part in ("attention", "indexer", "prefill"):
            self.assertIn(part, self.good("bench", "--help").out)
            self.assertIn("--csv", self.good("bench", part, "--help").out)
        self.assertRegex(self.good("--version").out, r"^lacuna \d+\.\d+\.\d+\n$")


class CommandLine(CliTest):
    def test_commands(self):
        known = "expected one of: generate, serve, eval, demo, info, logits, probe, bench, tune (see lacuna --help)"
        self.bad(2, ['there is no command "nope"', known], "nope")
        self.bad(2, ["no command was given", known])
        self.bad(2, ['there is no command "--nope"', known], "--nope")
        self.bad(2, ['there is no command "nope"', "attention, indexer, prefill, latency, throughput, serve (see lacuna bench --help)"],
                 "bench", "nope")
        self.bad(2, ["no command was given", "attention, indexer, prefill"], "bench")

    def test_unknown_flags(self):
        for command in ("generate", "demo", "info", "eval"):
            args = ["-p", "x"] if command == "generate" else []
            self.bad(2, ["--nope", f"(see lacuna {command} --help)"], command, *args, "--nope")
        self.bad(2, ["extra"], "info", "extra")
        self.bad(2, ["extra\\nline"], "info", "extra\nline")

    def test_missing_and_doubled_flags(self):
        self.bad(2, ["Exactly 1 option from", "--prompt", "--prompt-file", "--tokens"], "generate")
        self.bad(2, ["--prompt", "--tokens"], "generate", "-p", "x", "--tokens", "1")
        self.bad(2, ["--prompt", "received 2"], "generate", "-p", "x", "-p", "y")
        self.bad(2, ["--max-tokens", "missing"], "generate", "-p", "x", "-n")
        self.bad(2, ["--output"], "logits", "--tokens", "1")
        self.bad(2, ["--rows", "--explain"], "info", "--rows", "3")

    def test_numbers(self):
        def bad(parts, *args):
            self.bad(2, parts, "generate", "-p", "x", *ONE_THREAD, *args)
        bad(["--max-tokens = abc", "expected an integer"], "-n", "abc")
        bad(["--max-tokens = 1.5", "expected an integer"], "-n", "1.5")
        bad(["max_tokens: 0"], "-n", "")
        bad(["--top-k = 99999999999", "expected an integer in its range"], "--top-k",
            "99999999999")
        bad(["--temperature = hot", "expected a number"], "--temperature", "hot")
        bad(["--seed = x", "expected an integer from 0"], "--seed", "x")
        bad(["max_tokens: 0", "at least 1"], "-n", "0")
        bad(["temperature: -1", "0 (greedy) or more"], "--temperature=-1")
        bad(["temperature: nan"], "--temperature", "nan")
        bad(["top_p: 2", "at most 1"], "--top-p", "2")
        bad(["top_k: -5"], "--top-k=-5")
        bad(["min_p: 1.5", "0 to 1"], "--min-p", "1.5")
        bad(["block_size: 0", "1 to 4096"], "--block-size", "0")
        bad(["max_num_batched_tokens: 0", "1 to 1048576"], "--max-num-batched-tokens", "0")
        bad(["max_model_len: 9999999", "8192"], "-c", "9999999")
        bad(["max_model_len: -3", "8192"], "--max-model-len=-3")
        bad(["stop: an empty string"], "--stop", "")
        for threads in ("-1", "1000000"):
            self.bad(2, ["num_threads: " + threads, "0 (one per core) to "], "generate", "-p", "x",
                     "--threads=" + threads)

    def test_words(self):
        def bad(parts, *args):
            self.bad(2, parts, "generate", "-p", "x", *ONE_THREAD, *args)
        bad(['--dtype: "int8"', "bfloat16 or float32"], "--dtype", "int8")
        bad(['kv_cache_dtype: "int4"', "fp8_ds_mla"], "--kv-cache-dtype", "int4")
        bad(['index_cache_dtype: "int4"', "bfloat16, float32 or fp8"], "--index-cache-dtype",
            "int4")
        self.bad(2, ['--selection: "best"', "indexer, random, window or dense"], "eval",
                 "--selection", "best")
        self.bad(2, ['--device: "tpu"', "cpu or cuda"], "info", "--explain", "--device", "tpu")
        self.bad(2, ['--kv-dtype: "int4"'], "info", "--explain", "--kv-dtype", "int4")
        self.bad(2, ["--rows", "0, 16, 512, 64, 2048"], "info", "--explain", "--rows", "0")

    def test_probe(self):
        def bad(parts, *args):
            self.bad(2, parts, "probe", "-p", "#12+34=", "-o", "out", *args, *ONE_THREAD)
        bad(['--layers: "0,x"', "expected all or numbers"], "--layers", "0,x")
        bad(['--steps: ""'], "--steps", "")
        bad(["--layers: 4, the model has layers 0 to 3"], "--layers", "1,4")
        # These are known at the end, after the line about what was loaded.
        for part, *args in [("--layers, --steps: name none of the 4 calls", "-n", "2", "--steps", "77"),
                            ("no step attended over a list", "-n", "1")]:
            done = run("probe", "-p", "#12+34=", "-o", "out", *args, *ONE_THREAD, cwd=self.folder)
            self.assertEqual(done.code, 2)
            self.assertIn("lacuna: ", done.err.splitlines()[-1])
            self.assertIn(part, done.err.splitlines()[-1])
            self.assertEqual(self.files(), [])

    def test_kernels(self):
        def bad(code, parts, kernel):
            self.bad(code, parts, "generate", "-p", "x", "--kernel", kernel, *ONE_THREAD)
        bad(1, ['sparse_mla has no kernel "nope"', "it has cpu/sparse_mla"], "sparse_mla=nope")
        bad(1, ['there is no operation "nope"', "there are sparse_mla, ", "token_logprobs"],
            "nope=x")
        for text in ("sparse_mla", "sparse_mla=", "=cpu/sparse_mla"):
            bad(2, [f'--kernel: "{text}"', "expected OPERATION=NAME"], text)

    def test_token_ids(self):
        for text in ("1,,2", "1,x", "x", "1;2", "99999999999", "1 2"):
            self.bad(2, [f'--tokens: "{text}"', "expected ids like 1,2,3"], "logits", "--tokens",
                     text, "-o", "out")
        self.bad(2, ["token 1 is 99999", "expected 0 to 287"], "logits", "--tokens", "1,99999",
                 "-o", "out")
        self.bad(2, ["token 0 is -4", "expected 0 to 287"], "logits", "--tokens=-4,1", "-o", "out")


class Prompts(CliTest):
    def test_too_long(self):
        self.bad(2, ["prompt: 50 tokens", "context of 40 tokens"], "generate", "-p", "a" * 50, "-c",
                 "40", *ONE_THREAD)
        self.bad(2, ["prompt: 40 tokens", "context of 40 tokens"], "logits", "--tokens",
                 ",".join(["7"] * 40), "-c", "40", "-o", "out", *ONE_THREAD)

    def test_empty(self):
        self.bad(2, ["prompt: no tokens", "at least one"], "generate", "-p", "")
        (self.folder / "empty").write_text("")
        self.bad(2, ["prompt: no tokens"], "generate", "-f", "empty")

    def test_not_utf8(self):
        (self.folder / "bad.txt").write_bytes(b"ab\xff\xfe")
        self.bad(2, ["bad.txt: ", "not valid UTF-8 at byte 2"], "generate", "-f", "bad.txt")
        self.bad(2, ["stdin: ", "not valid UTF-8 at byte 0"], "generate", "-f", "-",
                 stdin=b"\x80")

    def test_chat_template(self):
        self.bad(2, ["chat template line 2: no"], "generate", "--chat", "-p", "x",
                 "--chat-template", "\n{{ raise_exception('no') }}", *ONE_THREAD)
        self.bad(1, ["chat template line 1: {{ is not closed"], "generate", "--chat", "-p", "x",
                 "--chat-template", "{{ x", *ONE_THREAD)
        self.bad(1, ["nowhere.jinja: No such file"], "generate", "--chat", "-p", "x",
                 "--chat-template", "nowhere.jinja", *ONE_THREAD)
        self.bad(2, ["--system: ", "not valid UTF-8"], "generate", "--chat", "-p", "x", "--system",
                 b"\xff", *ONE_THREAD)
        self.bad(2, ["--chat"], "generate", "--chat", "--tokens", "1,2")
        self.bad(2, ["--chat"], "generate", "--system", "S", "-p", "x")

    def test_files_that_can_not_be_read(self):
        self.bad(1, ["nowhere.txt: No such file"], "generate", "-f", "nowhere.txt")
        self.bad(1, [".: not a regular file but a folder"], "generate", "-f", ".")


class Models(CliTest):
    def test_the_copy_is_good(self):
        for name in ("v32-micro", "glm-dsa-micro"):
            model = self.micro(name)
            self.good("logits", "-m", model, "--tokens", "3,4,5", "-o", self.folder / "out",
                      *ONE_THREAD)
            shutil.rmtree(model)

    def test_folders(self):
        self.logits_fail("nowhere", ["nowhere: no such folder", "what loads: a folder with"])
        self.logits_fail("two\nlines\x1b[31m", ["two\\nlines\\x1b[31m: no such folder"])
        self.logits_fail("", ["--model: empty", "expected a model folder"], code=2)
        (self.folder / "empty").mkdir()
        self.logits_fail("empty", ["empty: no config.json", "what loads: "])
        (self.folder / "file").write_text("")
        self.logits_fail("file", ["file: a file, expected the model's folder"], code=2)
        model = self.micro()
        (model / "model.safetensors").unlink()
        self.logits_fail(model, ["safetensors", "what loads: "])

    def test_other_formats(self):
        for name, parts in (("model.gguf", ["only GGUF files", "not supported", "what loads: "]),
                            ("pytorch_model.bin", ["only PyTorch files", "what loads: "])):
            model = self.folder / name.split(".")[0]
            model.mkdir()
            (model / name).write_bytes(b"GGUF")
            self.logits_fail(model, parts)
        (self.folder / "x.gguf").write_bytes(b"GGUF")
        self.logits_fail("x.gguf", ["x.gguf: GGUF files are not supported", "what loads: "])

    def test_no_tokenizer(self):
        model = self.micro()
        self.bad(1, ["no tokenizer.json", "what loads: "], "generate", "-m", model, "-p", "x")

    def test_truncated_weights(self):
        model = self.micro()
        path = model / "model.safetensors"
        whole = path.read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        for size in (0, 5, 8, 100, 8 + length - 1, 8 + length, 8 + length + 1, len(whole) // 2,
                     len(whole) - 1):
            path.write_bytes(whole[:size])
            self.logits_fail(model, ["model.safetensors"])
        path.write_bytes(whole + b"x")
        self.logits_fail(model, ["model.safetensors"])
        path.write_bytes(struct.pack("<Q", 1 << 62) + whole[8:])
        self.logits_fail(model, ["model.safetensors"])

    def spoil(self, change):
        model = self.micro()
        path = model / "model.safetensors"
        header, data = read_safetensors(path)
        change(header)
        write_safetensors(path, header, data)
        return model

    def test_missing_tensor(self):
        name = "model.layers.1.self_attn.kv_b_proj.weight"
        model = self.spoil(lambda header: header.update(renamed=header.pop(name)))
        self.logits_fail(model, [name, "missing", "expected shape ["])

    def test_wrong_shape(self):
        name = "model.layers.2.self_attn.o_proj.weight"

        def swap(header):
            header[name]["shape"] = header[name]["shape"][::-1]
        model = self.spoil(swap)
        self.logits_fail(model, [name, "has shape [96, 64]", "config.json asks for [64, 96]"],
                         code=2)

    def test_wrong_dtype(self):
        name = "model.layers.0.input_layernorm.weight"

        def change(header):
            self.assertEqual(header[name]["dtype"], "BF16")
            header[name]["dtype"] = "I16"
        self.logits_fail(self.spoil(change), [name, "I16", "supported: F32, F16, BF16"])

    def test_fp8_tensor(self):
        name = "model.layers.0.self_attn.q_a_proj.weight"

        def change(header):
            header[name]["dtype"] = "F8_E4M3"
            header[name]["shape"][1] *= 2  # as many bytes
        self.logits_fail(self.spoil(change), [name, "F8_E4M3", "quantization_config"])

    def test_architectures(self):
        model = self.change_config(lambda c: c.update(architectures=["LlamaForCausalLM"],
                                                      model_type="llama"))
        self.logits_fail(model, ["config.json", "LlamaForCausalLM", "DeepseekV32ForCausalLM",
                                 "GlmMoeDsaForCausalLM"])
        shutil.rmtree(model)
        model = self.change_config(lambda c: c.update(architectures=["DeepseekV3ForCausalLM"],
                                                      model_type="deepseek_v3"))
        self.logits_fail(model, ["DeepseekV3ForCausalLM", "no indexer", "supported: "])

    def test_quantised_models(self):
        for config, part in (({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
                             ({"quant_method": "gptq", "bits": 4}, "gptq"),
                             ({"quant_method": "fp8", "fmt": "e4m3",
                               "weight_block_size": [64, 64]}, "weight_block_size")):
            model = self.change_config(lambda c, q=config: c.update(quantization_config=q))
            self.logits_fail(model, ["quantization_config", part])
            shutil.rmtree(model)

    def test_first_layer_shared(self):
        model = self.change_config(
            lambda c: c.update(indexer_types=["shared", "full", "full", "full"]), "glm-dsa-micro")
        self.logits_fail(model, ["indexer_types", "layer 0 is shared", "it must be full"], code=2)

    def test_config_values(self):
        model = self.micro()
        path = model / "config.json"
        config = json.loads(path.read_text())
        for text, parts in (("{\"a\": ", ["config.json"]), ("", ["config.json"]),
                            ("[1]", ["config.json"]), ("\xff", ["config.json"])):
            path.write_bytes(text.encode("latin-1"))
            done = run("logits", "-m", model, "--tokens", "3", "-o", "out", cwd=self.folder)
            self.assertIn(done.code, (1, 2))
            self.logits_fail(model, parts, code=done.code)
        for field, value, parts in (("num_attention_heads", 0, ["0, expected an integer in 1.."]),
                                    ("kv_lora_rank", "many", ['"many"', "expected an integer"]),
                                    ("index_topk", -8, ["-8", "expected an integer"]),
                                    ("vocab_size", None, ["missing"])):
            spoilt = dict(config)
            spoilt[field] = value
            if value is None:
                del spoilt[field]
            path.write_text(json.dumps(spoilt))
            self.logits_fail(model, ["config.json", field, *parts], code=2)

    def test_cache_format_of_another_width(self):
        self.bad(1, ["fp8_ds_mla holds latent 512", "the model has 32 and 8", "would work"],
                 "logits", "-m", self.micro(), "--tokens", "3", "-o", "out", "--kv-cache-dtype",
                 "fp8_ds_mla")


class DataAndOutput(CliTest):
    def test_problem_files(self):
        good = json.dumps({"kind": "add", "prompt": "#12+34=", "answer": "046"})
        path = self.folder / "data.jsonl"

        def bad(text, parts):
            path.write_text(text)
            self.bad(1, parts, "eval", "--data", "data.jsonl")
        self.bad(1, ["nowhere.jsonl: No such file"], "eval", "--data", "nowhere.jsonl")
        self.bad(1, [".: not a regular file but a folder"], "eval", "--data", ".")
        bad("", ["data.jsonl: no problems"])
        bad(good + "\n\n{nonsense}\n", ["data.jsonl line 3: not a JSON object"])
        bad(good + "\n[1]\n", ["data.jsonl line 2: not a JSON object"])
        bad(good + "\n" + good.replace("answer", "reply"),
            ['data.jsonl line 2: field "answer" is missing or not text'])
        bad(json.dumps({"kind": "add", "prompt": 3, "answer": "x"}),
            ['data.jsonl line 1: field "prompt" is missing or not text'])
        if os.geteuid() != 0:
            path.chmod(0)
            self.bad(1, ["data.jsonl", "Permission denied"], "eval", "--data", "data.jsonl")

    def test_bench_devices(self):
        has_gpu = "cuda:0" in self.good("info").out
        for part in ("attention", "indexer", "prefill"):
            self.bad(2, ['--device: "tpu"', "expected auto, cpu or cuda"], "bench", part, "--device",
                     "tpu")
            if not has_gpu:
                self.bad(1, ["--device cuda: there is no usable GPU: "], "bench", part, "--device",
                         "cuda")
        for device in ("cpu",) if has_gpu else ("cpu", "auto"):
            self.bad(1, [f"--device {device}: the indexer is measured on a GPU only"], "bench",
                     "indexer", "--device", device)
        for flag, value in (("--peer", "libx.so"), ("--counts", "0")):
            self.bad(2, [f"{flag}: measured on a GPU only"], "bench", "attention", "--device", "cpu",
                     flag, value)

    def test_tune(self):
        for flag, value, most in (("--heads", "33", "32"), ("--rows", "0", "65536"),
                                  ("--topk", "0", "1048576")):
            self.bad(2, [f"{flag}: {value}, expected values from 1 to {most}"], "tune", flag, value)
        self.bad(2, ["--rounds", "0"], "tune", "--rounds", "0")
        if "cuda:0" not in self.good("info").out:
            self.bad(1, ["tune: there is no usable GPU: "], "tune", "-o", "table.csv")

    def test_tuning_file(self):
        table = self.folder / "table.csv"
        self.bad(1, ["tuning_file: ", "table.csv: No such file"], "generate", "-p", "x",
                 "--tuning-file", table)
        table.write_text("# device: none of these\n# sm_count: 7\nheads,rows,keys,splits\n")
        for command in (["generate", "-p", "x", "--device", "cpu"], ["info"]):
            self.bad(2, ["tuning_file: ", "table.csv was measured on none of these with 7 SMs",
                         "lacuna tune"], *command, "--tuning-file", table)
        table.write_text(table.read_text() + "16,1,2048\n")
        self.bad(2, ['line 4: "16,1,2048"', "heads,rows,keys,splits"], "info", "--tuning-file", table)

    def test_bench_flags(self):
        for part in ("attention", "indexer", "prefill"):
            self.bad(2, ["--timing", "sideways", "graph,event"], "bench", part, "--timing",
                     "sideways")
            self.bad(2, ["--rounds", "0"], "bench", part, "--rounds", "0")
            heads = "--heads: 0, expected values from 1 to 1024"
            self.bad(2, [heads], "bench", part, "--device", "cuda", "--heads", "16,0")

        def attention(parts, *args):
            self.bad(2, parts, "bench", "attention", "--device", "cpu", *args)
        attention(["--d-qk: 100", "576", "512"], "--d-qk", "100")
        attention(['--dtype: "int4"', "bf16, f32 or fp8_ds_mla"], "--dtype", "int4")
        attention(["--topk: 2048", "--context 64"], "--context", "64")
        attention(["--repeats: 0", "from 1"], "--repeats", "0")
        attention(["--counts: -1, expected values from 0 to 128"], "--topk", "128", "--counts",
                  "0,-1")
        attention(["--counts: 2051, expected values from 0 to 128"], "--topk", "2176,128",
                  "--counts", "128,2051")
        attention(["--counts", "many"], "--counts", "many")

        def indexer(parts, *args):
            self.bad(2, parts, "bench", "indexer", *args)
        indexer(['--ops: "sort"', "index_logits, top_k, select_keys, translate_indices"], "--ops",
                "top_k,sort")
        indexer(['--dtype: "f32"', "bf16, fp8, fp8_bf16q"], "--dtype", "f32")
        indexer(["--context: 1000", "multiples of a block, 64 tokens"], "--context", "2048,1000")
        indexer(["--prefill-rows: 1024", "the shortest --context, 512"], "--context", "512")
        indexer(["--rows: 2000", "0 to 1024"], "--rows", "2000")
        indexer(["--kernel: cuda/top_k", "--ops"], "--kernel", "cuda/top_k")

        def prefill(parts, *args):
            self.bad(2, parts, "bench", "prefill", "--device", "cuda", *args)
        prefill(["--d-qk: 576", "192 (values of 128) or 256 (values of 256)"], "--d-qk", "576")
        prefill(["--rows: 2048", "the shortest --context, 1024"], "--rows", "2048")
        prefill(["--context: 200000", "from 1 to 131072"], "--context", "200000")
        prefill(['--kernel: "top_k=cuda/top_k"', "mha=NAME"], "--kernel", "top_k=cuda/top_k")

    def test_eval_flags(self):
        self.bad(2, ["--every: 0", "at least 1"], "eval", "--every", "0")
        self.bad(1, ["nowhere.json: No such file"], "eval", "--expect", "nowhere.json")
        gate = self.folder / "gate.json"
        for text in ("", "{}", '{"gate": 3}', '{"gate": {"exact_all": 99}}',
                     '{"gate": {"exact_all": "most", "context_nll_per_token": "1 +- 1"}}',
                     '{"gate": {"exact_all": ">= 9", "context_nll_per_token": "low"}}'):
            gate.write_text(text)
            self.bad(1, ["gate.json: ", 'expected {"gate": '], "eval", "--expect", "gate.json")

    def test_outputs_that_can_not_be_written(self):
        (self.folder / "there").mkdir()
        for command in (["logits", "--tokens", "1,2", "-o"], ["eval", "--every", "200", "-o"],
                        ["bench", "attention", "--csv"], ["bench", "prefill", "--csv"]):
            self.bad(1, ["nowhere/out: can not be written: No such file or directory"], *command,
                     "nowhere/out")
            self.bad(1, ['"there": a folder, expected the name of a file'], *command, "there")

    def test_a_failure_leaves_an_old_output_alone(self):
        path = self.folder / "out"
        path.write_text("old")
        self.bad(2, ["token 0 is 999"], "logits", "--tokens", "999", "-o", "out")
        self.bad(2, ["prompt: no tokens"], "logits", "-p", "", "-o", "out")
        self.assertEqual(path.read_text(), "old")

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_a_full_disk(self):
        for args in (["info"], ["--help"], ["generate", "-q", "-p", "#12+34=", "-n", "3"]):
            with open("/dev/full", "wb") as full:
                done = run(*args, stdout=full)
            self.assertEqual(done.code, 1)
            self.assertEqual(done.err, "lacuna: the output could not be written: "
                                       "No space left on device\n")


if __name__ == "__main__":
    LACUNA = os.path.abspath(sys.argv[1])
    SOURCE = pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:], verbosity=2)
