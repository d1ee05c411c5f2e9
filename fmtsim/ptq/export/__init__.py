# SPDX-License-Identifier: Apache-2.0
"""Hand a quantised model over to other libraries: their files, with the codes and scales that fmtsim rounded with."""

from fmtsim.ptq.export.checkpoint_files import Export, export, open_checkpoint, read_export

__all__ = ["Export", "export", "open_checkpoint", "read_export"]
