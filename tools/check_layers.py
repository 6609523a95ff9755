#!/usr/bin/env python3
"""Who may include whom: the table of ARCHITECTURE.md, held over every C++ file.

    check_layers.py [ROOT]       checks the tree; prints each violation as FILE:LINE
    check_layers.py --self-test  checks that the checker finds violations planted in a made-up tree

Two smaller rules of the house live here too: a file opens with a comment that says what it is for,
and no file is named after the absence of an idea (util, common, helper, misc).
"""
import re
import sys
import tempfile
from pathlib import Path

OPS = ["core", "ops"]
CASES = ["support", "reference"]  # the library lacuna_cases
MODEL = OPS + ["kvcache", "parallel", "attention", "model"]

# Folder (the longest match counts) -> rooms whose headers it may include besides its own and the
# public ones. A row for a file stands above its folder.
ROOMS = {
    "include/lacuna": [],
    "src/core": [],
    "src/ops": ["core"],
    "src/backends/registry.cc": OPS + ["backends/*/backend.h"],
    "src/backends/registry.h": OPS,
    "src/backends/cpu": OPS,
    "src/backends/cuda": OPS,
    "src/backends/sm90": OPS + ["backends/cuda/device", "backends/cuda/launch.h",
                                "backends/cuda/runtime.h", "backends/cuda/extents.h",
                                "backends/cuda/attention/plan_shape.h",
                                "backends/cuda/attention/sparse_mla.h",
                                "backends/cuda/attention/sparse_mla.cuh"],
    "src/parallel": ["core"],
    "src/kvcache": OPS,
    "src/attention": OPS + ["kvcache", "parallel"],
    "src/model": OPS + ["kvcache", "parallel", "attention"],
    "src/engine": MODEL,
    "src/server": ["core"],
    # `lacuna logits` records what the engine computes inside, which is not public; `lacuna probe`
    # holds kernels against the oracle.
    "src/cli": ["core", "ops", "server", "engine/recorder.h", "benchmarks"] + CASES,
    "bindings": [],
    "examples": [],
    "benchmarks": OPS + ["backends/registry.h", "backends/cuda/device", "backends/cuda/launch.h",
                         "benchmarks"] + CASES,
    # Tests of a room see what the room sees, and the room.
    "tests/core": ["core"],
    "tests/ops": OPS,
    "tests/backends": OPS + ["backends"] + CASES,
    "tests/kvcache": OPS + ["kvcache"],
    "tests/attention": OPS + ["kvcache", "parallel", "attention"],
    "tests/parallel": ["core", "parallel"],
    "tests/model": MODEL + ["support/fp8_checkpoint.h"],
    "tests/engine": MODEL + ["engine", "support/fp8_checkpoint.h"],
    "tests/server": ["core", "server"],
    "tests/cli": ["core", "cli"],
    "tests/cli/captured_call_test.cc": OPS + ["cli"] + CASES,
    "tests/benchmarks": OPS + ["benchmarks"] + CASES,
    "tests/bindings": [],
    "tests/conformance": OPS + ["backends/registry.h"] + CASES,
    "tests/reference": OPS + CASES,
    "tests/support": OPS + CASES,
    "tests/support_tsan": [],
    "tests/fuzz": MODEL,
}

# Room -> the foreign headers it may include. The standard library, whose headers have no dot, is
# everybody's; headers of C and of the operating system are for whoever touches files or threads.
OS = r"(sys/|linux/|netinet/|arpa/)?[a-z]+\.h"
FOREIGN = {
    "include/lacuna": r"(?!)",
    "src/core": OS,
    "src/ops": r"(?!)",
    "src/backends/cpu": OS + r"|hwy/.*|dnnl.*|oneapi/dnnl/.*|[a-z]+intrin\.h",
    "src/backends/cuda": OS + r"|cuda.*|cublas.*",
    "src/backends/sm90": r"cuda.*",
    "src/backends": r"(?!)",
    "src/parallel": r"nccl\.h",
    "src/kvcache": r"(?!)",
    "src/attention": r"(?!)",
    "src/model": OS + r"|nlohmann/.*|pcre2\.h",
    "src/engine": OS + r"|nlohmann/.*|spdlog/.*|fmt/.*",
    "src/server": OS + r"|httplib\.h|nlohmann/.*|prometheus/.*|spdlog/.*|fmt/.*",
    "src/cli": OS + r"|CLI/.*|nlohmann/.*|spdlog/.*|fmt/.*",
    "benchmarks": OS + r"|benchmark/.*|dnnl.*|nlohmann/.*",
    "tests/benchmarks": OS + r"|gtest/.*|cuda.*",
    "tests": OS + r"|g(test|mock)/.*|nlohmann/.*|hwy/.*",
    "examples": r"lacuna/.*",
}

SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
FOLDERS = ["include", "src", "tests", "benchmarks", "examples", "bindings"]
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')
EMPTY_NAME = re.compile(r"(^|_)(utils?|common|helpers?|misc)(_|$)")


def longest(table, path):
    """The row whose key is the path or a folder above it; the longest key wins."""
    keys = [key for key in table if path == key or path.startswith(key + "/")]
    return max(keys, key=len) if keys else None


def may_include(row, header):
    if header.startswith("lacuna/"):
        return True
    own = re.sub(r"^(src|tests)/", "", row)
    allowed = ROOMS[row] + ([own] if row != "include/lacuna" else [])
    for room in allowed:
        if "*" in room:
            if re.fullmatch(room.replace("*", "[a-z0-9_]+"), header):
                return True
        elif header == room or header.startswith(room + "/"):
            return True
    return False


def check_file(path, text):
    """Yields (line number, message) for one file."""
    for part in path.split("/"):
        if EMPTY_NAME.search(part.split(".")[0]):
            yield 1, f"the name '{part}' says nothing: name what it is"
    if not text.startswith("//"):
        yield 1, "a file opens with a comment that says what it is for"
    row = longest(ROOMS, path)
    if row is None:
        yield 1, "no row for this folder in tools/check_layers.py"
        return
    foreign = longest(FOREIGN, path)
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        # Highway is the one foreign library whose headers are included with quotes.
        quoted = match.group(1) == '"' and not match.group(2).startswith("hwy/")
        header = match.group(2)
        if quoted:
            header = re.sub(r"^tests/", "", header)
            if not may_include(row, header):
                yield number, f"{row} may not include \"{header}\""
        elif "." in header or "/" in header:
            # Examples include the library as its users do.
            if not re.fullmatch(FOREIGN.get(foreign, r"(?!)"), header):
                yield number, f"{row} may not include <{header}>"


def check_tree(root):
    violations = []
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file():
                path = file.relative_to(root).as_posix()
                for line, message in check_file(path, file.read_text(encoding="utf-8")):
                    violations.append(f"{path}:{line}: {message}")
    return violations


def self_test():
    good = {
        "include/lacuna/a.h": '// A.\n#include <span>\n#include "lacuna/b.h"\n',
        "src/core/a.cc": '// A.\n#include "core/a.h"\n#include <sys/mman.h>\n#include "lacuna/a.h"\n',
        "src/ops/a.cc": '// A.\n#include "core/a.h"\n#include "ops/a.h"\n',
        "src/backends/registry.cc": '// A.\n#include "backends/cpu/backend.h"\n',
        "src/backends/cpu/a.cc": '// A.\n#include <hwy/highway.h>\n#include "ops/backend.h"\n',
        "src/cli/a.cc": '// A.\n#include <CLI/CLI.hpp>\n#include "tests/support/cases.h"\n',
        "tests/engine/a_test.cc": '// A.\n#include <gtest/gtest.h>\n#include "engine/a.h"\n',
        "examples/a.cc": "// A.\n#include \"lacuna/a.h\"\n",
    }
    bad = {
        "include/lacuna/a.h": '// A.\n#include "core/check.h"\n',
        "include/lacuna/b.h": "// A.\n#include <hwy/highway.h>\n",
        "src/core/a.cc": '// A.\n#include "ops/backend.h"\n',
        "src/ops/a.cc": '// A.\n# include "backends/cpu/kernels.h"\n',
        "src/ops/b.cc": "// A.\n#include <unistd.h>\n",
        "src/backends/registry.cc": '// A.\n#include "backends/cpu/kernels.h"\n',
        "src/backends/sm90/a.cc": '// A.\n#include "backends/cpu/backend.h"\n',
        "src/kvcache/a.cc": '// A.\n#include "attention/plan.h"\n',
        "src/kvcache/b.cc": "// A.\n#include <nlohmann/json.hpp>\n",
        "src/model/a.cc": '// A.\n#include "engine/scheduler.h"\n',
        "examples/a.cc": '// A.\n#include "core/rng.h"\n',
        "tests/core/a_test.cc": '// A.\n#include "ops/backend.h"\n',
        "src/nowhere/a.cc": "// A.\n",
        "src/core/string_utils.h": "// A.\n",
        "src/common/a.h": "// A.\n",
        "src/core/b.cc": "#include <span>\n",
    }
    for tree, wanted in ((good, 0), (bad, len(bad))):
        with tempfile.TemporaryDirectory() as folder:
            for path, text in tree.items():
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            found = check_tree(Path(folder))
            files = {violation.split(":")[0] for violation in found}
            if len(files) != wanted:
                print("\n".join(found))
                sys.exit(f"self-test: violations in {sorted(files)}, expected {wanted} files")
    print(f"self-test: {len(bad)} planted violations found, {len(good)} good files passed")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = check_tree(root)
    print("\n".join(violations) or "layers: clean")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
