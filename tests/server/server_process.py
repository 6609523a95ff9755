"""What the tests of a running `lacuna serve` share: the process itself, and virtual environments
with other people's clients. Standard library only."""
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path


class ServerProcess:
    """`lacuna serve MODEL --port 0 FLAGS`, ready when the constructor returns."""

    def __init__(self, lacuna, model, *flags, env=None):
        self.process = subprocess.Popen(
            [lacuna, "serve", str(model), "--port", "0", *flags], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})})
        self.lines = []  # of stderr; the last one when it is ready says so
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"ready: (http://127\.0\.0\.1:(\d+)) ", line)
            if found:
                self.url, self.port = found.group(1), int(found.group(2))
                break
        else:
            raise SystemExit(f"the server ended with {self.process.wait()}: {self.lines}")
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends it at once if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()

    def stop(self, timeout=60):
        """Asks it to end; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=timeout)

    def call(self, method, path, body=None, headers=None, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def rss_kb(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1))

    def num_open(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def skip(why, process):
    """Ends the test as skipped (exit code 77), with the last words of a process that failed."""
    lines = (process.stderr or process.stdout).strip().splitlines() or ["no reason given"]
    print(f"skipped: {why}: {lines[-1]}")
    sys.exit(77)


def python_with(venv, name, packages, imports, pip_flags=(), trim=None, env=None):
    """The Python of an environment in folder `venv` that can run the statement `imports`; made and
    filled by pip when it can not. `trim(site_packages)` may take away what is never read. The test
    is skipped when the packages can not be had."""
    venv = Path(venv).resolve()
    python = venv / "bin" / "python"
    environment = {**os.environ, **(env or {})}

    def loads():
        return subprocess.run([python, "-c", imports], capture_output=True, text=True,
                              env=environment)

    if python.exists() and loads().returncode == 0:
        return python
    for command in ([sys.executable, "-m", "venv", venv],
                    [python, "-m", "pip", "install", "-q", "--no-compile",
                     "--disable-pip-version-check", *pip_flags, *packages]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            skip(f"{name} could not be installed", done)
    if trim is not None:
        trim(next((venv / "lib").glob("python*/site-packages")))
    done = loads()
    if done.returncode != 0:
        skip(f"the installed {name} does not load", done)
    return python
