"""The page as a browser shows it, of the real service; what a model says is never markup there."""

from __future__ import annotations

import json

import pytest

from tests.deploy.http.page.browser import CHROMEDRIVER, CHROMIUM, MISSING, browser

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None or CHROMEDRIVER is None, reason=MISSING),
]

MARKUP = "<img src=x onerror=\"document.title='run'\">"
PROMPT = "def read_lines(path):"
END = "document.getElementById('run').disabled === false && {}"
SUMMARY, PROBLEM = (f"document.getElementById('{name}').textContent" for name in ("summary", "problem"))
SOURCES = "return [...document.querySelectorAll('.token')].map((token) => token.dataset.source)"
FITS = "return document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture
def page(tab, running, cluster):
    """Freshly loaded, and asked for its models."""
    tab.look(1180, 1000)
    tab.open(f"http://localhost:{cluster.http_port}/")
    tab.wait("document.getElementById('model').options.length")
    tab.complaints()
    yield tab
    assert [each for each in tab.complaints() if "400" not in each] == []


def run(page, prompt=PROMPT, num_tokens=60, more=None):
    page.enter("#prompt", prompt)
    page.enter("#max-tokens", str(num_tokens))
    page.enter("#more", json.dumps(more) if more else "")
    page.click("#run")


def test_a_completion_is_streamed_and_its_tokens_are_coloured(page):
    run(page)
    assert "60 tokens in" in page.wait(END.format(SUMMARY))
    sources = page.run(SOURCES)
    assert {"target", "draft"} <= set(sources)
    assert page.text("#output").startswith(PROMPT)
    colour = "getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    colours = [page.run(f"return {colour}", f".origin-{name}") for name in ("draft", "target")]
    assert len(set(colours)) == 2
    assert "the draft" in page.text("#legend")


def test_rounds_are_drawn_as_a_time_line_and_as_a_tree(page):
    run(page)
    page.wait(END.format(SUMMARY))
    page.wait("document.querySelectorAll('#timeline .round').length > 1")
    assert page.run("return document.querySelectorAll('#tree .node.own').length") == 1
    title = page.text("#round-title")
    page.click("#previous")
    assert page.text("#round-title") != title


def test_markup_in_an_output_is_text(page):
    run(page, MARKUP, more={"guided_choice": [MARKUP]})
    page.wait(END.format(SUMMARY))
    assert page.text("#output") == MARKUP + MARKUP
    assert page.run("return document.querySelectorAll('#output img').length") == 0
    assert page.run("return document.title") == "Outrider"


def test_without_speculation_all_tokens_are_the_targets(page):
    page.click("#speculation")
    run(page, num_tokens=20)
    page.wait(END.format(SUMMARY))
    assert set(page.run(SOURCES)) == {"target"}


def test_stop_ends_a_stream(page):
    run(page, num_tokens=400)
    page.wait("document.querySelector('.token')")
    page.click("#stop")
    assert page.wait(END.format(SUMMARY)) == "Stopped."


@pytest.mark.parametrize(
    ("more", "told"), [({"top_p": 2}, "top_p: must be in (0, 1]"), ({"nonsense": 1}, "is not a field")]
)
def test_errors_are_said_in_words(page, more, told):
    run(page, more=more)
    assert told in page.wait(END.format(PROBLEM))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_window(page, scheme):
    run(page)
    page.wait(END.format(SUMMARY))
    page.look(360, 740, scheme)
    assert page.wait(FITS.removeprefix("return "))
    assert (page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 244)") == (
        scheme == "light"
    )


def test_keys_reach_and_run_it(page):
    page.enter("#max-tokens", "8")
    page.run("document.getElementById('prompt').focus()")
    key = "new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true, bubbles: true})"
    page.run(f"document.activeElement.dispatchEvent({key})")
    assert "8 tokens in" in page.wait(END.format(SUMMARY))
    unreachable = (
        "[...document.querySelectorAll('button, input, select, textarea')].filter((each) => each.tabIndex < 0)"
    )
    assert page.run(f"return {unreachable}.length") == 0
