#!/usr/bin/env python3
"""Tracked text must hold nothing of the machine it was written on: no absolute paths of a checkout
or a home folder, no hosts of package registries. Prints each find as FILE:LINE.
"""
import re
import subprocess
import sys
from pathlib import Path

# Written so that no pattern matches itself.
FORBIDDEN = [
    (re.compile(r"(?<![\w.])/(?:wor[k]|roo[t])/"), "a path of one machine"),
    (re.compile(r"(?<![\w.])/(?:hom[e]|User[s])/\w"), "a home folder"),
    (re.compile(r"(?<![\w.])/tm[p]/[A-Z]"), "a temporary file of one machine"),
    (re.compile(r"\b(?:pypi|registry|deb|archive|proxy|files)\.[\w.]*\b(?:org|com|io|net)\b"),
     "a host of a package registry"),
]


def main():
    root = Path(__file__).resolve().parent.parent
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    if listing.returncode != 0:
        print("skipped: not a git checkout")
        sys.exit(77)
    finds = []
    for name in listing.stdout.decode().split("\0"):
        file = root / name
        if not name or not file.is_file() or file.stat().st_size > 4 << 20:
            continue
        data = file.read_bytes()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), 1):
            for pattern, what in FORBIDDEN:
                if pattern.search(line):
                    finds.append(f"{name}:{number}: {what}: {line.strip()[:100]}")
    print("\n".join(finds) or "text: clean")
    sys.exit(1 if finds else 0)


if __name__ == "__main__":
    main()
