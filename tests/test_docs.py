# SPDX-License-Identifier: Apache-2.0
"""What the pages say can be followed: links, headings, names and files exist, and the examples run."""

import ast
import contextlib
import copy
import importlib.util
import json
import re
import runpy
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim.recipes import recipe_registry

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("notebooks/*.md"), *ROOT.glob("benchmarks/*.md")]
)
HOW_TO = ("cast", "loss_scaling", "memory", "observe", "product", "ptq", "search", "train")


def headings(page):
    """Return the anchors that GitHub gives a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in found}


def broken_links(text, page):
    """Return the links of a text to files or headings that are not there, as seen from a page."""
    found = []
    html = re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for link in [*re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text), *html]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and (not target.exists() or (anchor and anchor not in headings(target))):
            found.append(link)
    return found


def unknown_names(text):
    """Return what a text calls ``fmtsim.a.b`` and Python does not find after ``import fmtsim``."""
    found = []
    text = re.sub(r"^::: .*$", "", text, flags=re.MULTILINE)  # the site's own paths: its build reads them
    for name in sorted(set(re.findall(r"\bfmtsim(?:\.\w+)+", text))):
        thing, parts = fmtsim, name.split(".")[1:]
        for depth, part in enumerate(parts, 1):
            if not hasattr(thing, part) and isinstance(thing, ModuleType):
                with contextlib.suppress(ImportError):
                    importlib.import_module(".".join(("fmtsim", *parts[:depth])))
            if not hasattr(thing, part):  # also where a verb hides the module of its name
                found.append(name)
                break
            thing = getattr(thing, part)
    return found


def unknown_imports(code):
    """Return what code imports from modules of fmtsim and Python does not find."""
    nodes = ast.walk(ast.parse(re.sub("^%.*$", "", code, flags=re.MULTILINE)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module.startswith("fmtsim")]
    names = [(importlib.import_module(node.module), name.name) for node in imports for name in node.names]
    return [f"{module.__name__}.{name}" for module, name in names if not hasattr(module, name)]


def missing_files(text):
    """Return the paths of this repository in backquotes that lead nowhere."""
    paths = set(re.findall(r"`((?:fmtsim|tests|docs|notebooks|benchmarks)/[\w/.\-]+)`", text))
    return sorted(path for path in paths if not (ROOT / path).exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    assert broken_links(text, page) == [] and unknown_names(text) == [] and missing_files(text) == []


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_names_exists(notebook):
    """Of the notebooks that train models the default run sees no more than this (notebooks/conftest.py)."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert unknown_imports(code) == [] and unknown_names(code) == []


def not_on_the_site(nav):
    """Return the pages of docs/ that the site's navigation leaves out."""
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    return sorted(pages - set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", nav, re.MULTILINE)))


def without_reference(names, reference):
    """Return the names that no ``:::`` line of the API reference shows."""
    return sorted(set(names) - {line.rpartition(".")[2] for line in re.findall(r"^::: \S+$", reference, re.MULTILINE)})


def test_the_site_has_every_page_and_every_public_name():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    reference = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/api/*.md")))
    names = set(fmtsim.__all__) - {"optim", "cuda", "errors"}  # which have pages of their own
    assert not_on_the_site(nav) == [] and without_reference(names, reference) == []
    assert not_on_the_site(nav.replace("howto/cast.md", "howto/caste.md")) == ["howto/cast.md"]
    assert without_reference(names | {"casts"}, reference) == ["casts"]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 900
    assert f"| {len(fmtsim.list_recipes(kind='training'))} names: " in text


def test_the_readme_names_what_the_package_requires():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch_version = next(name.removeprefix("torch>=") for name in project["dependencies"] if name.startswith("torch>="))
    python_version = project["requires-python"].removeprefix(">=")
    assert f"Python {python_version} and torch {torch_version} or later (2.11 or later under `torch.compile`)" in text
    assert any(name.startswith("cuda-core") for name in project["optional-dependencies"]["cuda"])
    assert project["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:recipe te_nvfp4", "ignore::fmtsim.support.errors.PlanUnknownWarning")
def test_the_recipes_of_the_table_of_machines_train_on_its_targets():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [HB]\d00.* \| (`.*`) \| `(\w+)`(.*) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    for names, target, remark in rows:
        assert ("a guess" in str(fmtsim.explain_mm(x.half(), x.half().T, target=target))) == bool(remark)
        for name in re.findall(r"`(\w+)`", names):
            model = fmtsim.convert(nn.Linear(128, 128), recipe=name, target=target)
            assert str(fmtsim.report(model).summary).startswith(f"{name} on {target}: ")
            model(x).sum().backward()
            assert model.weight.grad.isfinite().all() and model.weight.grad.any()


def test_what_does_not_exist_is_found():
    page = ROOT / "README.md"
    assert broken_links("[a](docs/nothing.md) [b](README.md#nowhere) [c](docs/ptq.md#memory)", page) == [
        "docs/nothing.md", "README.md#nowhere",
    ]  # fmt: skip
    assert broken_links('<img src="docs/assets/underflow.jpg">', page) == ["docs/assets/underflow.jpg"]
    assert unknown_names("fmtsim.mm, fmtsim.quantise, fmtsim.ptq.QuantisedCache, fmtsim.recipes.recipe_registry") == [
        "fmtsim.ptq.QuantisedCache", "fmtsim.quantise",
    ]  # fmt: skip
    assert unknown_imports("from fmtsim.optim import AdamW, Adagrad; from torch import nn") == ["fmtsim.optim.Adagrad"]
    assert missing_files("`docs/ptq.md` and `tests/nothing.py`") == ["tests/nothing.py"]


def words_of(drawing):
    """Return the texts of an SVG file, one after another."""
    svg = (ROOT / "docs" / "assets" / drawing).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", " ".join(re.findall(r"<text[^>]*>(.*?)</text>", svg)))


def test_the_drawings_show_what_is_computed():
    factors = torch.zeros(2, 1, 32)
    factors[:, 0, :4] = torch.tensor([[1.75, 0.28125, 0.05859375, 0.0234375], [1.75, 0.15625, 0.05078125, 0.078125]])
    c = torch.tensor([[1 + 0b1001001101011 / 2**13]]) / 4
    a, b = factors.to(torch.float8_e4m3fn)
    assert torch.equal(torch.stack([a, b]).float(), factors)
    text, total = words_of("datapath.svg"), (factors[0].double() @ factors[1].double().T + c).item()
    accumulator = fmtsim.mma(a, b, c, target="hopper.wgmma").item()
    assert all(f"{x:.10g} × {y:.10g}" in text for x, y in zip(*factors[:, 0, :4].tolist(), strict=True))
    assert f"= {accumulator}" in text and f"{total:.8f}" in text and f"lost {total - accumulator:.8f}" in text

    x = torch.zeros(1, 32)
    x[0, :16] = torch.tensor(
        [0.5, -1.3, 0.1, 0.9, -0.2, 0.05, 0.7, -0.6, 1.0, 0.3, -0.35, 0.8, -0.02, 0.45, -1.1, 0.25]
    )
    x[0, 16] = 12.0
    q = fmtsim.encode(x, "nvfp4")
    assert q.scales.view(torch.float8_e4m3fn)[0, 0] == 48 and q.tensor_scale == torch.tensor(1 / 224)
    elements = (q.decode()[0, :16] * (224 / 48)).round(decimals=3)
    assert elements.tolist() == [2, -6, 0.5, 4, -1, 0, 3, -3, 4, 1.5, -1.5, 4, 0, 2, -6, 1]
    assert "2 −6 ½ 4 −1 0 3 −3 4 1½ −1½ 4 −0 2 −6 1 s = 48" in words_of("nvfp4.svg")


class Block(nn.Module):
    """Hold what recipes count as a block."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def not_printed(page, printed):
    """Return the lines of a page's sample outputs that its examples do not print, but for numbers and spaces."""

    def words(line):
        return re.sub(r"[-+\d.,]+(e[-+]\d+)?", "0", "".join(line.split()))

    lines = "\n".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)).splitlines()
    every = {words(line) for line in printed.splitlines()} | {"", words("...")}
    return [line for line in lines if words(line) not in every]


def test_a_sample_output_that_is_not_printed_is_found():
    page = "```text\nlayer  SQNR dB\n0  18.5\n...\n```"
    assert not_printed(page, "layer SQNR dB\n0 18.49\n") == []
    assert not_printed(page, "layer SNR dB\n0 18.49\n") == ["layer  SQNR dB"]


@pytest.mark.parametrize(
    "name", [*("attribution", "models", "optim", "ptq", "recipes"), *(f"howto/{n}" for n in HOW_TO)]
)
def test_the_examples_run(name, tmp_path, monkeypatch, capsys):
    """One after the other, with a model, batches and a loss as a reader has them."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    model = nn.Sequential(Block(), Block())
    batches = [torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    names = {"model": model, "batches": batches}
    if name == "optim":
        other = fmtsim.optim.AdamW(model.parameters(), state="coat")
        model(batches[1]).sum().backward()
        other.step()
        other.zero_grad()
        names |= {"state": other.state_dict(), "loss": model(batches[0]).square().mean()}
    monkeypatch.setattr(recipe_registry, "_registered", {})
    for block in blocks:
        if name == "ptq":
            names["model"] = copy.deepcopy(model)
        exec(compile(block, f"{name}.md", "exec"), names)
    assert not_printed((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), capsys.readouterr().out) == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("page", ["README.md", "docs/howto/kernels.md"])
def test_the_kernels_of_a_page_run(page, tmp_path, capsys):
    """Triton reads a kernel's source from a file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "fmtsim.launch(" in block]
    try:
        fmtsim.launch('extern "C" __global__ void nothing() {}', 1, block=32)
    except fmtsim.errors.DeviceError:  # NVRTC is missing
        blocks = [block for block in blocks if "__global__" not in block]
    (tmp_path / "page.py").write_text("\n".join(["import torch, fmtsim", *blocks]), encoding="utf-8")
    runpy.run_path(str(tmp_path / "page.py"))
    printed = capsys.readouterr().out
    assert "row_sum on h100: every bit" in printed
    assert page == "README.md" or not_printed(text, printed) == []


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "site" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "cell", "other"),
    [("recipes", r"(\|`mu_s`\|)e4m3", r"\1e5m2"), ("performance", r"(\|`te_current`\|)\d", r"\g<1>9")],
)
def test_the_tables_of_the_pages_are_those_of_the_records(name, cell, other, tables, tmp_path, monkeypatch, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    planted = tmp_path / "docs" / f"{name}.md"
    planted.parent.mkdir()
    planted.write_text(re.sub(cell, other, page), encoding="utf-8")
    monkeypatch.setattr(tables, "DOCS", planted.parent)
    assert tables.main(["--check"]) == 1 and f"docs/{name}.md is stale" in capsys.readouterr().err
    assert tables.main([]) == 0 and planted.read_text(encoding="utf-8") == page


def test_every_table_of_measurements_is_made_of_records_that_say_how_to_make_them_again(tables, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert {*re.findall(r"<!-- table: (\w+) -->", page)} == {*tables.MEASURED, "missed"}
    by_hand = re.sub(r"<!-- table: .*?<!-- end -->", "", page, flags=re.DOTALL)
    assert "|---" not in by_hand
    record = json.loads((tables.RECORDS / "layers_h200.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    columns = [["ratio", "some", "llama default {}", "{ratio:.2f}"]]

    def table(case="te_current", **machine):
        text = json.dumps(record | {"machine": {**record["machine"], **machine}})
        (tmp_path / "some.json").write_text(text, encoding="utf-8")
        return tables.measured_table("recipe", columns, [["one", case], ["all", "*"]])

    assert table().splitlines()[2:4] == ["|one|1.21|", "|all|1.15 to 1.84|"]
    for commit in ("unknown", "1234567-dirty"):
        with pytest.raises(ValueError, match="cannot be made again"):
            table(commit=commit)
    with pytest.raises(ValueError, match="no record of the table has"):
        table(case="te_curent")
    del record["machine"]["date"]
    with pytest.raises(KeyError, match="date"):
        table()
