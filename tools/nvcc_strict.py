#!/usr/bin/env python3
"""Runs a compiler command and fails when it prints one of ptxas's advisories C75xx.

    nvcc_strict.py COMMAND...    ("wgmma serialized", "setmaxnreg ignored": slow code, not an error)
"""
import re
import subprocess
import sys


def main():
    done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sys.stderr.write(done.stdout)
    advisory = re.search(r"\bC75\d\d\b.*", done.stdout)
    if done.returncode == 0 and advisory:
        sys.exit(f"advisory taken as an error: {advisory.group(0)}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
