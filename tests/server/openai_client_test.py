#!/usr/bin/env python3
"""The official `openai` package against a running `lacuna serve` with the model that ships.

    openai_client_test.py LACUNA SOURCE_DIR VENV_DIR

VENV_DIR is made and filled by pip when it is missing. Exit code 77 (skipped) when that fails.
"""
import os
import sys
import time
from pathlib import Path

from server_process import ServerProcess, python_with

KEY = "secret"


def expect_error(kind, status, param, call):
    try:
        call()
    except kind as error:
        assert error.status_code == status, error
        assert error.param == param, (error.param, error)
        assert error.message, error
        return
    raise AssertionError(f"expected {kind.__name__}")


def run(client, openai):
    model = client.models.list().data[0].id
    assert model == "dsa-nano"
    assert client.models.retrieve(model).id == model

    greedy = dict(model=model, temperature=0)
    done = client.completions.create(prompt="#12+30=", max_tokens=4, **greedy)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.prompt_tokens == 7 and done.usage.completion_tokens == 4
    assert done.usage.prompt_tokens_details.cached_tokens >= 0
    text = done.choices[0].text

    chunks = list(client.completions.create(prompt="#12+30=", max_tokens=4, stream=True,
                                            stream_options={"include_usage": True}, **greedy))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4

    both = client.completions.create(prompt=["#12+30=", [35, 49, 43, 49, 61]], n=2, max_tokens=3,
                                     **greedy)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]

    done = client.completions.create(prompt="#12+30=", max_tokens=8, stop=[text[1]], **greedy)
    assert done.choices[0].text == text[0] and done.choices[0].finish_reason == "stop"

    done = client.completions.create(prompt="#12+30=", max_tokens=3, logprobs=2, echo=True,
                                     **greedy)
    logprobs = done.choices[0].logprobs
    assert len(logprobs.tokens) == 10 and logprobs.token_logprobs[0] is None
    assert len(logprobs.top_logprobs[8]) >= 2, logprobs.top_logprobs[8]

    random = dict(model=model, prompt="a", max_tokens=24, temperature=2,
                  extra_body={"ignore_eos": True})
    first = client.completions.create(seed=1, **random).choices[0].text
    assert client.completions.create(seed=1, **random).choices[0].text == first
    assert client.completions.create(seed=2, **random).choices[0].text != first

    messages = [{"role": "user", "content": "#12+30="}]
    chat = client.chat.completions.create(messages=messages, max_tokens=5, logprobs=True,
                                          top_logprobs=2, extra_body={"ignore_eos": True},
                                          **greedy)
    assert chat.choices[0].message.role == "assistant"
    assert len(chat.choices[0].logprobs.content) == 5
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(messages=messages, max_completion_tokens=5, stream=True,
                                            stream_options={"include_usage": True},
                                            extra_body={"ignore_eos": True}, **greedy)
    parts, usage = [], None
    for chunk in stream:
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(parts) == chat.choices[0].message.content
    assert usage.completion_tokens == 5

    expect_error(openai.BadRequestError, 400, "temperature", lambda: client.completions.create(
        model=model, prompt="a", temperature=-1))
    expect_error(openai.BadRequestError, 400, "prompt", lambda: client.completions.create(
        model=model, prompt="a" * 2000))
    expect_error(openai.BadRequestError, 400, "tools", lambda: client.chat.completions.create(
        model=model, messages=messages,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]))
    expect_error(openai.NotFoundError, 404, "model", lambda: client.completions.create(
        model="gpt-4", prompt="a"))
    expect_error(openai.AuthenticationError, 401, None, lambda: client.with_options(
        api_key="wrong").models.list())


def main():
    lacuna, source, venv = (Path(argument) for argument in sys.argv[1:4])
    if "--in-venv" not in sys.argv:
        # Once more, with the package at hand.
        python = python_with(venv, "the openai package", ["openai>=1.50"], "import openai")
        os.execv(python, [python, *sys.argv, "--in-venv"])
    import openai
    with ServerProcess(lacuna, source / "models" / "dsa-nano", "--api-key", KEY, "--max-model-len",
                       "1024", "--threads", "1") as server:
        run(openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60),
            openai)
        started = time.monotonic()
        code = server.stop(timeout=20)
        assert code == 0, code
        print(f"passed with openai {openai.__version__}; the server ended in "
              f"{time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
