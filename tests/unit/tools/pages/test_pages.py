"""TensorBoard's pages and the report in a real browser, as a reader sees them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mega_rl.errors import InputError
from mega_rl.observe.metrics.declared import SECTIONS
from mega_rl.observe.sinks.tensorboard import PAGE, heading
from tests import browser
from tests.launching.launch import REPO, started
from tests.recorded.observed_run import SECTIONS_LOGGED, leave_run

needs_browser = pytest.mark.skipif(
    browser.executable() is None, reason="no browser: none of chromium, chromium-browser, google-chrome starts"
)
# The texts of all elements that a selector finds, inside of shadow roots too.
TEXTS = """((selector) => {
  const found = [];
  const walk = (root) => {
    for (const element of root.querySelectorAll("*")) {
      if (element.matches(selector)) found.push(element.textContent.trim());
      if (element.shadowRoot) walk(element.shadowRoot);
    }
  };
  walk(document);
  return found;
})"""
HEADINGS = [heading(section) for section in SECTIONS if section.key in SECTIONS_LOGGED]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", REPO / "tools" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    folder = tmp_path_factory.mktemp("pages")
    leave_run(folder / "fast")
    leave_run(folder / "slow", num_steps=5, rate=0.1)
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.started() as program:
        yield program


@needs_browser
@pytest.mark.slow
def test_tensorboard_lists_the_sections_in_reading_order(runs: Path, chromium: browser.Browser) -> None:
    command = (sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--host", "127.0.0.1", "--port", "0")
    with started(command) as server:
        server.wait_for("(Press CTRL+C to quit)", timeout=120)
        found = re.search(r"http://127\.0\.0\.1:\d+/", server.output())
        assert found
        # The page that opens by itself, and the one that is laid out.
        for where, selector in (("", ".group-title"), (PAGE, ".category-name")):
            with chromium.page() as page:
                page.open(found[0] + where)
                numbered = f"{TEXTS}('{selector}').filter((text) => /^\\d/.test(text))"
                page.wait_for(f"{numbered}.length >= {len(HEADINGS)}")
                assert page.evaluate(numbered) == HEADINGS
                if where == PAGE:  # the patterns of the charts find the tags of both runs
                    for curve in ("1 learning/reward/mean (fast/tensorboard)", "9 AQN/aqn/sigma (slow/tensorboard)"):
                        page.wait_for(f"{TEXTS}('.match-list-entry').some((text) => text.endsWith('{curve}'))")
                assert page.errors() == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_is_readable_on_a_phone(runs: Path, chromium: browser.Browser, dark: bool) -> None:
    out = runs / "both.html"
    assert tool.main([str(runs / "fast"), str(runs / "slow"), "-o", str(out)]) == 0
    with chromium.page(390, 844, mobile=True, dark=dark) as page:
        page.open(out.as_uri())
        width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width == [390, 390], "nothing is wider than the screen"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is not dark
        assert page.errors() == [] and page.evaluate("document.title") == "fast, slow - mega_rl report"


@needs_browser
def test_the_report_draws_curves_and_colours_tokens(runs: Path, chromium: browser.Browser) -> None:
    out = runs / "one.html"
    assert tool.main([str(runs / "fast"), "-o", str(out)]) == 0
    with chromium.page() as page:
        page.open(out.as_uri())
        assert page.evaluate("[...document.querySelectorAll('h2')].length") == len(SECTIONS_LOGGED) + 5
        sizes = "[...document.querySelectorAll('.curve > path:first-child')].map((path) => path.getTotalLength())"
        lengths = page.evaluate(sizes)
        assert len(lengths) > 15 and all(length > 50 for length in lengths)
        colour = "getComputedStyle(document.querySelector('.response .p{}')).backgroundColor"
        colours = [page.evaluate(colour.format(number)) for number in range(5)]
        assert len(set(colours)) == 5
        # Under the pointer the legend has the values.
        page.evaluate("document.querySelector('svg.chart').scrollIntoView({block: 'center'})")
        box = page.evaluate(
            "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
            "(document.querySelector('svg.chart').getBoundingClientRect())"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        page.wait_for("document.querySelector('.legend b').textContent.includes('@')")
        assert page.errors() == [] and page.evaluate("document.title") == "fast - mega_rl report"


def test_the_tool_says_what_it_did(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(runs / "fast")]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(rf"report: {runs}/fast/report.html \(0\.\d MB\)\n", out)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/no/such"], "/no/such is no directory: name the output directory of a run"),
        (["RUN", "--names", "a", "b"], "--names has 2 names for 1 runs"),
        (["RUN", "RUN", "--names", "a", "a"], "--names has a name twice"),
        (["RUN", "--samples", "-1"], r"--samples -1 is not in 0\.\.200"),
        (["RUN"] * 17, "17 runs are too many"),
        (["RUN", "-o", "RUN"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(runs: Path, arguments: list[str], part: str) -> None:
    with pytest.raises(InputError, match=part):
        tool.main([str(runs / "fast") if argument == "RUN" else argument for argument in arguments])
