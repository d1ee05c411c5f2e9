# SPDX-License-Identifier: Apache-2.0
"""Where vectors and calls recorded on GPUs lie: beside the project, or beside a folder above it."""

from pathlib import Path

import pytest

_BESIDE = [folder / "shared" for folder in Path(__file__).resolve().parents[2].parents]
SHARED = next((folder for folder in _BESIDE if folder.is_dir()), _BESIDE[0])
VECTORS, GOLDEN = SHARED / "vectors", SHARED / "golden"

needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason="no recorded vectors beside the project")
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no recorded calls beside the project")
