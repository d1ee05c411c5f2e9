# SPDX-License-Identifier: Apache-2.0
"""Miniatures of the headline claims of published schemes: what the source says, what comes out here, pass or not."""

from studies.claims.claim import Claim as Claim
from studies.claims.claim import Expected as Expected
from studies.claims.claim import Measured as Measured
from studies.claims.run import Result as Result
from studies.claims.run import get_claims as get_claims
from studies.claims.run import run_claim as run_claim
from studies.claims.run import run_claims as run_claims

__all__ = ["Claim", "Expected", "Measured", "Result", "get_claims", "run_claim", "run_claims"]
