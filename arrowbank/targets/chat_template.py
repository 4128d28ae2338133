"""Chat templates, run in a child process with limits: a template is a program that came with somebody's tokenizer.

Jinja's sandbox keeps a template away from files and from Python's own objects. It does not keep it from looping for ever, or from
taking all memory (`'a' * 10**10`). The child has SECONDS for each text, and MEMORY_BYTES beyond what it needs itself; the kernel ends it
in time, whatever it is doing. Requests and answers are JSON, one per line. The child ends when its input does."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import arrowbank

SECONDS = 10
MEMORY_BYTES = 2 << 30
CHARACTERS = 1 << 28
SHOWN = 300  # characters of what a template says about itself
TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # such a template marks what the assistant says

Spans = list[tuple[int, int]]


class TemplateError(Exception):
    """Why a template gave no text: the end of a sentence whose subject is the template."""


class Renderer:
    """Renders conversations in a child process: started when it is first needed, and again after it was ended. `seconds` is what one
    text may take."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._child: _RendererProcess | None = None
        self._owner = os.getpid()  # a fork of this process has the pipes, too: it must not speak with the child
        self._one_at_a_time = threading.Lock()

    def render(self, template: str, **variables: Any) -> tuple[str, Spans]:
        """The text for `variables` (messages, tools, add_generation_prompt, special tokens), and the spans of it that the template
        marks as the assistant's: none where it marks nothing. Raises TemplateError."""
        request = (
            json.dumps({"seconds": self._seconds, "template": template, "variables": variables}, default=str).encode() + b"\n"
        )
        with self._one_at_a_time:
            if self._child is None or self._owner != os.getpid():
                self._child, self._owner = _RendererProcess(), os.getpid()
                weakref.finalize(self, self._child.end)
            line = self._child.ask(request)
            if not line.endswith(b"\n"):
                code, self._child = self._child.end(), None
                late = f"did not give a text within {self._seconds} seconds"
                raise TemplateError(late if code == -signal.SIGALRM else f"ended its process with exit code {code}")
        answer = json.loads(line)
        if "refused" in answer:
            raise OSError(*answer["refused"])
        if "error" in answer:
            raise TemplateError(answer["error"][:SHOWN])
        return answer["text"], [(start, end) for start, end in answer["spans"]]


@functools.cache
def shared_renderer() -> Renderer:
    """The one of this process: its child takes half a second to start."""
    return Renderer()


class _RendererProcess:
    """The child process and the pipes to it."""

    def __init__(self) -> None:
        root = Path(arrowbank.__file__).parents[1]  # -m puts the current folder first among those to import from
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def ask(self, request: bytes) -> bytes:
        """The answer to a request; without its line feed where the child ended before."""
        pipes = self._process.stdin, self._process.stdout
        line = b""
        with suppress(BrokenPipeError):
            if pipes[0] is not None and pipes[1] is not None:
                pipes[0].write(request)
                pipes[0].flush()
                line = pipes[1].readline()
        return line

    def end(self) -> int:
        """End the process, if it has not ended; its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return self._process.wait()


# the child


def main() -> None:
    """Answer requests until the input ends."""
    try:
        import transformers.utils.chat_template_utils  # noqa: F401  # before memory is limited and time is counted
    except OSError as error:  # of the disk, not of the template
        sys.stdin.readline()
        print(json.dumps({"refused": [error.errno, error.strerror, error.filename]}))
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    _limit_memory()
    with open(0, "rb") as requests, open(1, "wb") as answers:
        for request in requests:
            answers.write(json.dumps(_answer(json.loads(request))).encode() + b"\n")
            answers.flush()


def _limit_memory() -> None:
    """Limit what this process may take beyond what it has; nothing where the system does not say how much that is."""
    import resource

    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import jinja2

    signal.alarm(request["seconds"])
    try:
        text, spans = _render(request["template"], request["variables"])
    except MemoryError:
        return {"error": f"takes more than {MEMORY_BYTES >> 20:,} MiB of memory"}
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return {"error": f"does not take this conversation ({error})"}
    finally:
        signal.alarm(0)
    if len(text) > CHARACTERS:
        return {"error": f"gives a text of {len(text):,} characters, expected at most {CHARACTERS:,}"}
    return {"text": text, "spans": spans}


def _render(template: str, variables: dict[str, Any]) -> tuple[str, Spans]:
    """As the tokenizer's own `apply_chat_template` renders."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tagged = TAG.search(template) is not None
    texts, spans = render_jinja_template(
        conversations=[variables.pop("messages")],
        chat_template=template,
        return_assistant_tokens_mask=tagged,
        **variables,
    )
    return texts[0], spans[0] if tagged else []


if __name__ == "__main__":
    main()
