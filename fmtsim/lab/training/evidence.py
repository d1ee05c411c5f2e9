# SPDX-License-Identifier: Apache-2.0
"""What ``fmtsim train --check native`` leaves behind: a JSON record and a text that says the same."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.products.native import card_description
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.training.artifacts import about
from fmtsim.lab.training.config import TrainConfig
from fmtsim.lab.training.corpus import Corpus
from fmtsim.lab.training.lockstep import HEAD_FORMAT, Lockstep, Mismatch, emulates_head
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec, record_to_dict
from fmtsim.support.files import write_folder

RECORD, TEXT = "check.json", "check.txt"


def make_check_record(config: TrainConfig, corpus: Corpus, result: Lockstep) -> dict[str, Any]:
    """Return everything about a run in lockstep as JSON types."""
    target = None if config.simulated.target is None else get_target(config.simulated.target)
    timed = (*result.labels, "optimizer and comparison")
    record = about(config, corpus, card_description(config.device))
    record["config"]["head"] = HEAD_FORMAT if emulates_head(config) else "high precision or the recipe's"
    return record | {
        "target": None if target is None else {"name": target.name, "library": target.library},
        "sides": list(result.labels),
        "optimizer": str(config.simulated.states),
        "parameters": result.parameters,
        "steps": result.steps,
        "equal": result.equal,
        "numbers_compared": result.compared,
        "mismatch": None if result.mismatch is None else _mismatch(result.mismatch),
        "stopped": result.stopped,
        "losses": result.losses,
        "seconds": {name: round(taken, 3) for name, taken in zip(timed, result.seconds, strict=True)},
        "weights_sha256": list(result.digest),
        "products": [_product(call, found) for call, found in result.products],
        "guesses": result.guesses,
    }


def check_text(record: dict[str, Any]) -> str:
    """Return a record as a text for people."""
    config = record["config"]
    scheme, model = config["simulated"], config["model"]
    machine = ", ".join(str(value) for value in record["machine"].values() if value)
    target = (record["target"] or {"name": "none"})["name"]
    fast = {(False, False): "slow", (True, False): "fast forward, slow backward", (True, True): "fast"}
    if scheme["recipe"] is not None:
        products = {"recipe": scheme["recipe"]["name"]}
    else:
        products = {"formats": f"{scheme['format']}, gradients {scheme['grad_format'] or 'as usual beside it'}",
                    "gemm": fast[scheme["fast_accum"], scheme["fast_backward"]]}  # fmt: skip
    rows = {
        "result": _verdict(record),
        "sides": f"{' against '.join(record['sides'])}; target {target}",
        "machine": f"{machine}, torch {record['torch']}",
        "model": f"{record['parameters']:,} parameters: " + ", ".join(f"{name} {size}" for name, size in model.items()),
        "batch": f"{config['batch_size']} windows, lr {config['lr']}, seed {config['seed']}"
        + (f", {config['ranks']} ranks, gradients by {scheme['reduction']}" if config["ranks"] > 1 else ""),
        "optimizer": record["optimizer"],
        **products,
        "head": f"{config['head']}; attention in {scheme['autocast'] or 'float32'}, the same code on both sides",
        "compared": f"{record['numbers_compared']:,} numbers: every loss, gradient and weight of every step",
        "losses": f"{record['losses'][0]:.4f} to {record['losses'][-1]:.4f}" if record["losses"] else "none",
        "weights": ", ".join(f"SHA-256 {code[:16]}" for code in record["weights_sha256"]),
        "plans": _bases(record),
        "time": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record["seconds"].items()),
    }
    lines = [f"{name:<9} {text}" for name, text in rows.items()]
    lines += ["", "products:", *(f"  {product['text']}" for product in record["products"])]
    return "\n".join(lines + [f"guess: {guess}" for guess in record["guesses"]])


def _verdict(record: dict[str, Any]) -> str:
    if record["mismatch"] is not None:
        return f"DIFFERENT at {record['mismatch']['text']}"
    agree = f"no bit differs after {record['steps']:,} steps"
    if record["stopped"] is None:
        return agree
    return f"{agree}, then {record['stopped']}" if record["equal"] else f"stopped: {record['stopped']}"


def _bases(record: dict[str, Any]) -> str:
    """Count what stands behind the plans of the products."""
    bases = Counter(product["basis"] for product in record["products"])
    return ", ".join(f"{count} {basis}" for basis, count in sorted(bases.items())) or "none asked"


def write_check(out: Path, record: dict[str, Any], text: str, dump: Callable[[Any], str]) -> list[Path]:
    """Write both files to a folder, all or nothing; ``dump`` makes text of a record."""
    return write_folder(out, {RECORD: dump(record) + "\n", TEXT: text + "\n"})


def _mismatch(mismatch: Mismatch) -> dict[str, Any]:
    return {
        "step": mismatch.step, "kind": mismatch.kind, "tensor": mismatch.tensor, "product": mismatch.product,
        "text": str(mismatch), **mismatch.comparison.to_dict(),
    }  # fmt: skip


def _product(call: GemmCall, found: GemmSpec) -> dict[str, Any]:
    out = dtype_name(call.out)
    fast = f", fast_accum={call.fast_accum}" if call.operation == "scaled_mm" else ""
    layouts = f"{call.a_layout} x {call.b_layout}"
    return {
        "text": f"{call.operation} [{call.m}, {call.k}] {call.a} x [{call.k}, {call.n}] {call.b} -> {out}{fast}, "
        f"{layouts}, split {found.plan.split}: {found.basis}",
        "basis": found.basis,
        "unit": found.unit,
        "plan": record_to_dict(found.plan),
    }
