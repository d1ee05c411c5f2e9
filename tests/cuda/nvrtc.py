"""Whether kernels can be compiled here, GPU or not."""

import pytest


def reason():
    """Return why kernels cannot be compiled; None where they can."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program  # noqa: F401

        nvrtc.nvrtcVersion()
    except Exception as error:  # what is missing decides the type
        return f"kernels cannot be compiled: {error}; pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
    return None


_REASON = reason()
needs_nvrtc = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
