# SPDX-License-Identifier: Apache-2.0
"""Miniatures of the headline claims of published schemes: what the source says, what comes out here, pass or not."""

from fmtsim.reproduce.catalogue import get_claims as get_claims
from fmtsim.reproduce.claim import Claim as Claim
from fmtsim.reproduce.claim import Expected as Expected
from fmtsim.reproduce.claim import Measured as Measured
from fmtsim.reproduce.run import Result as Result
from fmtsim.reproduce.run import run_claim as run_claim
from fmtsim.reproduce.run import run_claims as run_claims

__all__ = ["Claim", "Expected", "Measured", "Result", "get_claims", "run_claim", "run_claims"]
