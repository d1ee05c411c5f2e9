# SPDX-License-Identifier: Apache-2.0
"""Miniatures of the headline claims of published schemes: what the source says, what comes out here, pass or not."""

from fmtsim.lab.reproduce.claim import Claim as Claim
from fmtsim.lab.reproduce.claim import Expected as Expected
from fmtsim.lab.reproduce.claim import Measured as Measured
from fmtsim.lab.reproduce.run import Result as Result
from fmtsim.lab.reproduce.run import get_claims as get_claims
from fmtsim.lab.reproduce.run import run_claim as run_claim
from fmtsim.lab.reproduce.run import run_claims as run_claims

__all__ = ["Claim", "Expected", "Measured", "Result", "get_claims", "run_claim", "run_claims"]
