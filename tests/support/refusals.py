# SPDX-License-Identifier: Apache-2.0
"""One line for a message, and the call that is refused with it."""

from collections.abc import Callable
from typing import Any

import pytest

from fmtsim.support.errors import ArgumentError


def refused(
    message: str, call: Callable[..., Any], *arguments: Any, error: type[Exception] = ArgumentError, **options: Any
):
    """Fail unless a call raises the error; the regular expression ``message`` is found in its text."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)
