#!/usr/bin/env python3
"""The page of `lacuna serve` in real Chromium, by its keyboard. Standard library only; exit code 77
where Chromium or its driver is missing (Debian: chromium, chromium-driver).

    page_test.py LACUNA SOURCE_DIR OUT_DIR [--update-screenshot]

Screenshots go to OUT_DIR; --update-screenshot also writes docs/images/page_attention.png.
"""
import base64
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

from server_process import ServerProcess

UPDATE = "--update-screenshot" in sys.argv
LACUNA, SOURCE, OUT = [Path(argument) for argument in sys.argv[1:4]]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name of a reference
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Left": "\ue012", "Up": "\ue013",
        "Right": "\ue014", "Down": "\ue015", "Home": "\ue011", "End": "\ue010", "PageUp": "\ue00e",
        "PageDown": "\ue00f"}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode()[:600]}") from None


def wait_for(what, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.05)


class Browser:
    """The part of WebDriver that the test needs."""

    def __init__(self, profile):
        port = free_port()
        self.process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        self.root = f"http://127.0.0.1:{port}"
        self.session = None
        wait_for("chromedriver", self.is_up)
        flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                 "--hide-scrollbars", "--window-size=1280,900", f"--user-data-dir={profile}"]
        self.session = call(self.root + "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags}}}})["value"]["sessionId"]

    def is_up(self):
        try:
            return call(self.root + "/status")["value"]["ready"]
        except (urllib.error.URLError, ConnectionError):
            return False

    def close(self):
        if self.session:
            request = urllib.request.Request(f"{self.root}/session/{self.session}", method="DELETE")
            urllib.request.urlopen(request, timeout=30).close()
        self.process.terminate()
        self.process.wait()

    def do(self, path, **body):
        return call(f"{self.root}/session/{self.session}/{path}", body)["value"]

    def open(self, url):
        self.do("url", url=url)

    def run(self, script, *arguments):
        return self.do("execute/sync", script=script, args=list(arguments))

    def press(self, *keys):
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.do("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def point_at(self, selector):
        element = self.do("element", using="css selector", value=selector)[ELEMENT]
        self.do("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [
            {"type": "pointerMove", "origin": {ELEMENT: element}, "x": 0, "y": 0}]}])

    def emulate(self, command, **parameters):
        self.do("goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self, path):
        request = f"{self.root}/session/{self.session}/screenshot"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(call(request)["value"]))

    def complaints(self):
        return [entry["message"] for entry in self.do("se/log", type="browser")
                if entry["level"] in ("WARNING", "SEVERE")]

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def focused(self):
        return self.run("const e = document.activeElement; return e.id || e.innerText;")

    def tab_to(self, name):
        """Moves the focus with Tab to the element with this id or text."""
        for _ in range(40):
            if self.focused() == name:
                return
            self.press("Tab")
        raise AssertionError(f"Tab does not reach {name}")


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(cls.profile.cleanup)
        server = ServerProcess(LACUNA, SOURCE / "models" / "dsa-nano")
        cls.addClassCleanup(server.close)
        cls.url = server.url
        cls.browser = Browser(cls.profile.name)
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.browser.emulate("Emulation.setEmulatedMedia",
                             features=[{"name": "prefers-color-scheme", "value": "light"}])
        self.browser.open("about:blank")
        self.browser.open(self.url + "/")
        wait_for("the model's name", lambda: "dsa-nano" in self.browser.text("#model"))
        self.browser.complaints()

    def tearDown(self):
        self.assertEqual(self.browser.complaints(), [])

    def send_example(self, name):
        """Chooses an example and sends it, by keyboard; waits for the answer."""
        b = self.browser
        b.tab_to(name)
        b.press("Enter")
        self.assertEqual(b.focused(), "prompt")
        b.press("Enter")
        wait_for("the answer", lambda: b.run(
            "return document.querySelector('.message.model .foot').innerText !== ''"))

    def selection(self):
        newest = call(self.url + "/v1/lacuna/requests")["data"][0]["id"]
        return call(f"{self.url}/v1/lacuna/requests/{newest}/selection")

    def open_attention(self):
        b = self.browser
        b.press("Tab")  # from the prompt
        b.run("document.querySelector('.message.model .foot a').focus()")
        b.press("Enter")
        wait_for("the tokens", lambda: b.focused() == "tokens")

    def shown(self):
        return self.browser.run("""
            const marked = document.querySelectorAll('#tokens .key');
            return {cursor: Number(document.querySelector('#tokens .cursor').dataset.i),
                    keys: [...marked].map((span) => Number(span.dataset.i))};""")

    def expect_keys(self, selection, position, layers):
        """The highlighted tokens are those of the JSON."""
        keys = set()
        for layer in selection["layers"]:
            if layer["layer"] in layers:
                row = next((r for r in layer["rows"] if r["position"] == position), None)
                if row is not None:
                    keys.update(range(position + 1) if row["keys"] is None else row["keys"])
        shown = self.shown()
        self.assertEqual(shown["cursor"], position)
        self.assertEqual(shown["keys"], sorted(keys))
        return keys

    def test_chat_and_attention_by_keyboard(self):
        b = self.browser
        self.send_example("Recall two and add")
        self.assertEqual(b.text(".message.model .text"), "55+10=065")
        foot = b.text(".message.model .foot")
        self.assertRegex(foot, r"^[\d,]+ tokens/s · first token [\d,]+ ms · 993 prompt tokens")
        self.assertIn(" · stop · Attention", foot)
        b.screenshot(OUT / "chat_light.png")

        self.open_attention()
        selection = self.selection()
        last_of_prompt = selection["prompt_tokens"] - 1
        self.assertEqual(len(self.expect_keys(selection, last_of_prompt, {0})), 128)
        facts = b.text("#facts")
        self.assertIn("128 of 993 keys", facts)
        self.assertIn("sparse MQA, prefill step 1", facts)
        b.press("Right", "Right")
        self.expect_keys(selection, last_of_prompt + 2, {0})
        self.assertIn("decode step 3", b.text("#facts"))
        b.press("2")
        self.expect_keys(selection, last_of_prompt + 2, {2})
        b.press("0")
        both = self.expect_keys(selection, last_of_prompt + 2, {0, 2})
        weak = b.run("return document.querySelectorAll('#tokens .weak').length")
        self.assertEqual(weak, 2 * len(both) - 256)  # those that one of the two groups chose
        b.screenshot(OUT / "attention_light.png")
        b.press("1", "Left")
        self.expect_keys(selection, last_of_prompt + 1, {0})
        b.press("PageUp")
        self.expect_keys(selection, last_of_prompt + 1 - selection["block_size"], {0})
        b.press("Home")
        self.assertEqual(self.expect_keys(selection, 0, {0}), {0})
        b.press("Left")
        self.assertEqual(self.shown()["cursor"], 0)
        b.press("End")
        self.assertEqual(self.expect_keys(selection, len(selection["tokens"]) - 1, {0}), set())
        self.assertIn("never read", b.text("#facts"))
        b.press("Up", "Down")
        self.assertGreater(self.shown()["cursor"], last_of_prompt)
        b.point_at("#t960")
        self.expect_keys(selection, 960, {0})
        b.emulate("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark"}])
        b.screenshot(OUT / "attention_dark.png")
        # The groups are one stop of Tab, arrows choose.
        b.run("document.querySelector('#group-0').focus()")
        b.press("Right")
        self.assertEqual(b.focused(), "group-1")
        self.expect_keys(selection, 960, {2})

    def test_long_context(self):
        b = self.browser
        self.send_example("Recall in 4,054 tokens")
        self.assertEqual(b.text(".message.model .text"), "47")
        self.open_attention()
        selection = self.selection()
        b.press("2")
        position = selection["prompt_tokens"] - 1
        self.assertEqual(len(self.expect_keys(selection, position, {2})), 128)
        self.assertIn("128 of 4,054 keys", b.text("#facts"))
        b.screenshot(OUT / "attention_long.png")
        if UPDATE:
            shutil.copy(OUT / "attention_long.png", SOURCE / "docs" / "images" /
                        "page_attention.png")

    def test_dense_rows_and_characters_of_several_tokens(self):
        b = self.browser
        b.run("document.querySelector('#raw').checked = true;"
              "document.querySelector('#max_tokens').value = 4;"
              "document.querySelector('#prompt').focus();")
        b.press(*"ab\u20ac=", "Enter")
        wait_for("the answer", lambda: b.text(".message.model .foot"))
        self.open_attention()
        selection = self.selection()
        self.assertEqual(selection["tokens"][2]["bytes"], [0xe2])
        # The last of the three bytes shows the character.
        self.assertEqual(b.run("return document.querySelector('#t4').innerText"), "\u20ac")
        row = selection["layers"][0]["rows"][5]
        self.assertIsNone(row["keys"], "six tokens fit top-128 and are read densely")
        self.assertEqual(len(self.expect_keys(selection, 5, {0})), 6)
        self.assertIn("dense: all keys", b.text("#facts"))
        self.assertIn("dense MHA, prefill step 1", b.text("#facts"))

    def test_the_prefix_cache_hides_no_row(self):
        b = self.browser
        for _ in range(2):
            call(self.url + "/v1/completions", {"prompt": "x=1;" * 60, "max_tokens": 2,
                                                "temperature": 0, "record_selection": True})
        selection = self.selection()
        b.run("location.hash = 'attention/' + arguments[0]", selection["id"])
        wait_for("the tokens", lambda: b.focused() == "tokens")
        self.expect_keys(selection, selection["prompt_tokens"] - 1, {0})
        b.press("Home")
        self.assertEqual(self.expect_keys(selection, 0, {0}), {0})

    def test_a_running_request_is_shown_when_it_ends(self):
        b = self.browser
        thread = threading.Thread(target=call, args=(self.url + "/v1/completions", {
            "prompt": "q", "max_tokens": 1500, "ignore_eos": True, "record_selection": True}))
        thread.start()
        try:
            def running():
                data = call(self.url + "/v1/lacuna/requests")["data"]
                return data[0]["id"] if data and not data[0]["finish_reason"] else None

            b.run("location.hash = 'attention/' + arguments[0]",
                  wait_for("the request", running))
            wait_for("its state", lambda: b.text("#scene-note").startswith("Running: 1 + "))
            wait_for("its tokens", lambda: b.focused() == "tokens", 300)
        finally:
            thread.join()
        self.expect_keys(self.selection(), 0, {0})

    def test_a_narrow_window(self):
        b = self.browser
        b.emulate("Emulation.setDeviceMetricsOverride", width=390, height=844,
                  deviceScaleFactor=1, mobile=False)
        try:
            self.send_example("Add")
            self.assertEqual(b.text(".message.model .text"), "123")
            b.screenshot(OUT / "chat_narrow.png")
            self.open_attention()
            self.assertLessEqual(b.run("return document.documentElement.scrollWidth"), 390)
            b.screenshot(OUT / "attention_narrow.png")
        finally:
            b.emulate("Emulation.clearDeviceMetricsOverride")

    def ask_for_a_long_answer(self):
        b = self.browser
        b.run("document.querySelector('#raw').checked = true;"
              "document.querySelector('#stop_strings').value = '';"
              "document.querySelector('#max_tokens').value = 8000;"
              "document.querySelector('#temperature').value = 1.5;"
              "document.querySelector('#prompt').focus();")
        b.press(*"a", "Enter")
        wait_for("some text", lambda: b.text(".message.model:last-child .text") != "")

    def test_escape_stops(self):
        b = self.browser
        # The model may end by itself before the key is pressed; it does not do so every time.
        for _ in range(5):
            self.ask_for_a_long_answer()
            b.press("Escape")
            foot = wait_for("the end", lambda: b.text(".message.model:last-child .foot"))
            reason = wait_for("the server's end", lambda: call(
                self.url + "/v1/lacuna/requests")["data"][0]["finish_reason"])
            if "stopped" in foot:
                text = b.text(".message.model:last-child .text")
                time.sleep(0.3)
                self.assertEqual(b.text(".message.model:last-child .text"), text)
                return
            self.assertRegex(foot, rf"generated · {reason}\b")
            b.run("document.querySelector('#clear').click()")
        self.fail("five answers ended before Escape did anything")

    def test_escape_stops_an_answer_that_has_arrived(self):
        b = self.browser
        # What the browser has received already can not be aborted: this body does not hear of it.
        b.run("""
            window.fetch = async () => new Response(new ReadableStream({
              sent: 0,
              async pull(controller) {
                await new Promise((done) => setTimeout(done, 1));
                const choice = {index: 0, text: 'x', finish_reason: null};
                const event = {id: 'cmpl-1', choices: [choice]};
                controller.enqueue(new TextEncoder().encode(
                    ++this.sent <= 60000 ? `data: ${JSON.stringify(event)}\\n\\n`
                                         : 'data: [DONE]\\n\\n'));
              },
            }));""")
        self.ask_for_a_long_answer()
        b.press("Escape")
        foot = wait_for("the end", lambda: b.text(".message.model .foot"), 20)
        self.assertIn("stopped", foot)
        self.assertEqual(b.run("return document.querySelector('#stop').disabled"), True)

    def test_errors_are_shown(self):
        b = self.browser
        b.run("document.querySelector('#raw').checked = true;"
              "document.querySelector('#max_tokens').value = 100000;"
              "document.querySelector('#prompt').focus();")
        b.press("a", "Enter")
        foot = wait_for("the error", lambda: b.text(".message.failed .foot"))
        self.assertIn("max_tokens", foot)
        # Chromium itself notes the status 400.
        self.assertEqual(len(b.complaints()), 1)


if __name__ == "__main__":
    if not CHROMIUM or not DRIVER:
        print("skipped: chromium or chromedriver is missing (Debian: chromium chromium-driver)")
        sys.exit(77)
    if UPDATE:
        sys.argv.remove("--update-screenshot")
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
