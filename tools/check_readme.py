#!/usr/bin/env python3
"""Keeps README.md true.

    check_readme.py --build-dir DIR

Each line of a ```sh block that starts with ./run or build/ must name a command that exists: for
./run, one that its help lists; for a program, one whose --help succeeds and knows every option that
the line uses, and which then runs (but for servers). build/PRESET stands for DIR. A ```cpp block that has a main function must be, byte
for byte, a file of examples/.
"""
import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(text, language):
    """Yields (line number, body) of each fenced block of that language."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, match.start()) + 2, match.group(1)


def output_of(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def check_run(words):
    code, text = output_of(["./run", "--help"])
    if code != 0:
        return f"./run --help exits with {code}"
    if len(words) > 1 and not re.search(rf"^  {re.escape(words[1])}\b", text, re.M):
        return f"./run has no command {words[1]}"
    return None


def check_program(words, build_dir):
    program = re.sub(r"^build/[^/]+", str(build_dir), words[0])
    if not Path(program).is_file():
        return f"{program} does not exist"
    subcommand = [word for word in words[1:2] if not word.startswith("-")]
    code, text = output_of([program, *subcommand, "--help"])
    if code != 0:
        return f"{' '.join([words[0], *subcommand])} --help exits with {code}"
    for word in words[1:]:
        option = re.match(r"--[a-z0-9-]+", word)
        if option and not re.search(rf"(?<![\w-]){re.escape(option.group(0))}(?![\w-])", text):
            return f"{' '.join([words[0], *subcommand])} has no option {option.group(0)}"
    if subcommand == ["serve"]:
        return None  # would not end; the server's tests start it
    done = subprocess.run([program, *words[1:]], cwd=ROOT, capture_output=True, text=True,
                          timeout=250, check=False)
    if done.returncode != 0:
        return f"{' '.join(words)} exits with {done.returncode}: {done.stderr.strip()[-300:]}"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-dir", required=True, type=Path)
    build_dir = parser.parse_args().build_dir.resolve()
    readme = ROOT / "README.md"
    if not readme.exists():
        print("skipped: no README.md yet")
        sys.exit(77)
    text = readme.read_text(encoding="utf-8")
    errors = []
    commands = 0
    for first, body in blocks(text, "sh"):
        joined = re.sub(r"\\\n", "  ", body)
        for offset, line in enumerate(joined.splitlines()):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)  # VARIABLE=value before a command
            if not words or not re.match(r"\./run$|build/", words[0]):
                continue
            words = words[: next((i for i, w in enumerate(words) if w in "|;><&" or w == "&&"), len(words))]
            commands += 1
            error = check_run(words) if words[0] == "./run" else check_program(words, build_dir)
            if error:
                errors.append(f"README.md:{first + offset}: {error}")
    examples = {file.read_text(encoding="utf-8"): file for file in (ROOT / "examples").glob("*.cc")}
    for first, body in blocks(text, "cpp"):
        if re.search(r"\bmain\(", body) and body not in examples:
            errors.append(f"README.md:{first}: this program is no file of examples/, byte for byte")
    print("\n".join(errors) or f"README.md: {commands} commands exist")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
