#!/usr/bin/env python3
"""Keeps the documents of the program's flags complete.

    check_flags.py LACUNA

Every --flag that a command's --help lists stands in one of the command's documents, and every flag
in the first column of a table of docs/serving.md is known to `lacuna serve`.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {"serve": ["serving.md"], "eval": ["measuring.md", "serving.md"],
             "probe": ["measuring.md", "serving.md"], "tune": ["measuring.md"]}
FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*"


def flags_of(lacuna, command):
    text = subprocess.run([lacuna, *command.split(), "--help"], capture_output=True, text=True,
                          timeout=60, check=True).stdout
    # An option's line begins with its names; descriptions stand further to the right.
    names = re.findall(r"^  (-\S+)", text, re.M)
    assert names, f"{command} --help lists no option"
    return {flag for name in names for flag in re.findall(FLAG, name)} - {"--help"}


def main():
    lacuna = sys.argv[1]
    errors = []
    for command, documents in DOCUMENTS.items():
        text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in documents)
        documented = set(re.findall(FLAG, text))
        errors += [f"docs/{documents[0]}: {flag} of `lacuna {command}` is missing"
                   for flag in sorted(flags_of(lacuna, command) - documented)]
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    cells = "".join(re.findall(r"^\| ([^|]*--[^|]*) \|", serving, re.M))
    known = flags_of(lacuna, "serve")
    errors += [f"docs/serving.md: `lacuna serve` has no {flag}"
               for flag in sorted(set(re.findall(FLAG, cells)) - known)]
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print(f"{sum(len(flags_of(lacuna, command)) for command in DOCUMENTS)} flags documented")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
