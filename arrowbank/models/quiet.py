"""transformers reports on standard error while it loads; what of that matters, arrowbank says itself, as an error.

A model's folder may hold anything, and transformers, tokenizers and Jinja let any exception through: `refusing` makes each of them
an InputError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from arrowbank.errors import ArrowbankError, InputError


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines below errors and no progress bars from transformers inside the block; the settings are put back."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def refusing(explain: Callable[[str], str]) -> Iterator[None]:
    """Whatever a library raises inside the block is an InputError, whose message `explain` makes of the library's reason."""
    try:
        yield
    except ArrowbankError:
        raise
    except Exception as error:
        raise InputError(explain(str(error).strip() or repr(error))) from error
