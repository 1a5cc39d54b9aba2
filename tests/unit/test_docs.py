"""The documentation agrees with the tree: paths exist, tables and configuration files are current."""

import re
import subprocess
from pathlib import Path

import pytest

from prfaas import config
from tools.reference_tables import COMPONENTS, EXAMPLES, ROOT, current_files, metric_catalogue

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
]
FOLDERS = "prfaas|docs|deploy|tests|tools|benchmarks|proto|examples|.ci"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w|[A-Z]\w+\.md|pyproject\.toml|Makefile)(?![\w/*{{<-])")


def paths_in(page: Path) -> set[str]:
    return set(PATH.findall(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_named_in_a_page_exists(page: Path) -> None:
    assert [path for path in sorted(paths_in(page)) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_names_every_page() -> None:
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {
        "docs/index.md"
    }  # First page of the site.
    assert sorted(pages - paths_in(ROOT / "README.md")) == []


@pytest.mark.parametrize("path", current_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_text_is_current(path: Path) -> None:
    assert path.read_text() == current_files()[path], "run `make docs`"


def test_every_metric_named_in_a_page_exists() -> None:
    known = {item.name for item in metric_catalogue()}
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # It also names removed metrics.
        named = set(re.findall(r"\bprfaas_(?:agent|router|manager|connector|colocate|sidecar)_\w+", page.read_text()))
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known, page


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_annotated_file_loads_to_the_defaults(component: str) -> None:
    cls = COMPONENTS[component]
    loaded = config.load(cls, component=component, file=ROOT / f"deploy/{component}.yaml", environment={})
    for name, item in config.settings(cls):
        if not item.required and name not in EXAMPLES.get(component, {}):
            assert getattr(loaded, name) == config.default(cls, name), name


def test_every_command_in_the_makefile_is_in_its_help() -> None:
    help_text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(re.findall(r"make ([\w-]+)", help_text)) >= set(phony[1].split())
