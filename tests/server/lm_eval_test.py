#!/usr/bin/env python3
"""EleutherAI's lm-eval, `local-completions`, against a running `lacuna serve`: its accuracy on
dsa-nano's problems is the one that `lacuna eval` reports, problem by problem.

    lm_eval_test.py LACUNA SOURCE_DIR VENV_DIR [--every N]

VENV_DIR is made and filled by pip when it is missing: without what only lm-eval's own task files
and other metrics need (scikit-learn, scipy, nltk and others), which is most of its weight. Exit
code 77 (skipped) when that fails. Nothing is asked of a hub.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from server_process import ServerProcess, python_with

PACKAGES = """lm-eval==0.4.13 datasets>=3 pyarrow pandas numpy dill multiprocess xxhash fsspec
huggingface_hub httpx2 httpcore2 h11 anyio truststore filelock packaging pyyaml requests urllib3
certifi charset-normalizer idna tqdm aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict
propcache yarl tenacity jinja2 markupsafe typing_extensions python-dateutil pytz six sacrebleu
portalocker regex tabulate colorama lxml more-itertools word2number sqlitedict cloudpickle
click pytablewriter chardet<6 DataProperty mbstrdecoder pathvalidate tabledata tcolorpy typepy
setuptools""".split()
IMPORTS = "import lm_eval.models.openai_completions, lm_eval.evaluator, pytablewriter"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

TASK = """task: dsa_nano
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 0
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
  do_sample: false
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def drop_unread(site):
    # A quarter of the folder: tests, headers and other people's tasks.
    for part in ("pandas/tests", "pyarrow/tests", "pyarrow/include", "pyarrow/src"):
        shutil.rmtree(site / part, ignore_errors=True)
    for task in (site / "lm_eval" / "tasks").iterdir():
        if task.is_dir() and task.name != "__pycache__":
            shutil.rmtree(task)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lacuna")
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("venv", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=40)
    flags = parser.parse_args()
    python = python_with(flags.venv, "lm-eval", PACKAGES, IMPORTS, ["--no-deps"], drop_unread,
                         OFFLINE)
    with tempfile.TemporaryDirectory(prefix="lacuna_lm_eval_") as name:
        folder = pathlib.Path(name)
        rows = (flags.source / "models/dsa-nano/eval.jsonl").read_text().splitlines()
        problems = [json.loads(row) for row in rows][::flags.every]
        # Two wrong expectations, so that equality is not between two times 100 %.
        for problem in problems[1:3]:
            problem["answer"] = "never"
        data = folder / "data.jsonl"
        data.write_text("".join(
            json.dumps({key: p[key] for key in ("id", "kind", "prompt", "answer")}) + "\n"
            for p in problems))
        (folder / "tasks").mkdir()
        (folder / "tasks" / "dsa_nano.yaml").write_text(TASK.format(data=data))
        ours_file = folder / "ours.json"
        subprocess.run([flags.lacuna, "eval", "--data", data, "-o", ours_file, "--threads", "1"],
                       check=True, capture_output=True, timeout=900)
        ours = json.loads(ours_file.read_text())
        with ServerProcess(flags.lacuna, flags.source / "models/dsa-nano", "--threads", "1",
                           "--max-num-seqs", "4") as server:
            model_args = (f"model=dsa-nano,base_url={server.url}/v1/completions,"
                          "tokenizer_backend=None,tokenized_requests=False,num_concurrent=4,"
                          "max_retries=1,max_length=8192")
            done = subprocess.run(
                [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
                 model_args, "--tasks", "dsa_nano", "--include_path", folder / "tasks",
                 "--output_path", folder / "out", "--log_samples", "--batch_size", "1"],
                capture_output=True, text=True, timeout=900,
                env={**os.environ, **OFFLINE, "HF_HOME": str(folder / "hf")})
            assert done.returncode == 0, done.stdout + done.stderr
        results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
        theirs = 100 * results["results"]["dsa_nano"]["exact_match,none"]
        samples = [json.loads(line) for line in
                   next((folder / "out").rglob("samples_*.jsonl")).read_text().splitlines()]
        by_id = {str(s["doc"]["id"]): bool(s["exact_match"]) for s in samples}
        assert by_id == ours["exact_by_id"], (by_id, ours["exact_by_id"])
        assert abs(theirs - ours["exact_percent"]) < 1e-9, (theirs, ours["exact_percent"])
        print(f"passed: {len(problems)} problems, {theirs:.4f} % exact by lm-eval and by "
              "lacuna eval")


if __name__ == "__main__":
    main()
