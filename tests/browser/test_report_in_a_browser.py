"""The page of `fedopt report` and `fedopt watch` in a real browser."""

from __future__ import annotations

import json
import math
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import write_run_at_work
from processes import QUICK, Processes, fedopt, wait_until, write_config

from fedopt_flwr.rounds.record import RoundRecord, as_json
from fedopt_flwr.run.report.page import Report

if TYPE_CHECKING:
    from conftest import Opened
    from playwright.sync_api import Page

DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
}
FAILING = """
import torch
from sklearn.datasets import load_digits


class Lost(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        raise OSError("the disk </script><script>document.title = 'owned'</script> went away")


def load(num_clients, seed):
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    parts = [(x[i :: num_clients + 1], y[i :: num_clients + 1]) for i in range(num_clients + 1)]
    parts[3] = (parts[3][0] * float("nan"), parts[3][1])
    data = [torch.utils.data.TensorDataset(*part) for part in parts]
    data[1] = Lost(*parts[1])
    return data[:-1], data[-1]
"""
pytestmark = pytest.mark.slow


def column(page: Page, table: str, number: int) -> list[str]:
    cells = page.locator(f"#{table} tbody tr > :nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


def lines_drawn(page: Page) -> int:
    return page.locator("#plot-curves .scatterlayer .trace path.js-line").count()


def shown(page: Page, condition: str) -> None:
    """Wait for a condition; not as playwright does, by `eval`, which the page's policy forbids."""
    wait_until(lambda: bool(page.evaluate(condition)), lambda: condition)


def require_no_overflow(page: Page) -> None:
    """Nothing is wider than the screen but what scrolls by itself."""
    width = page.viewport_size["width"] if page.viewport_size else 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def require_self_contained(opened: Opened, *files: Path) -> None:
    asked = {url for url in opened.requests if not url.startswith("data:")}
    assert asked == {file.as_uri() for file in files}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison of three rules and two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    rules = ("--algorithms", "fedavg,scaffold_m,padamfed", "--seeds", "0,1")
    ended = fedopt("compare", *rules, "--set", "output.directory=out", *QUICK, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    ended = fedopt("report", "out", cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder / "report.html"


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_comparison_is_drawn_sorted_and_hidden(
    compared: Path, opened: Opened, screen: dict[str, Any]
) -> None:
    page = opened.open(compared.as_uri(), **screen)
    require_no_overflow(page)
    assert page.locator("h1").all_inner_texts() == ["6 runs, 3 curves on digits"]
    names = column(page, "table-results", 1)
    assert sorted(names) == ["fedavg", "padamfed", "scaffold_m"]
    heading = page.get_by_role("columnheader", name="configuration")
    heading.get_by_role("button").click()
    assert column(page, "table-results", 1) == sorted(names)
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.get_by_role("button").press("Enter")  # a keyboard does
    assert column(page, "table-results", 1) == sorted(names, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    before = lines_drawn(page)
    assert before == 9  # a line and both edges of a band for each rule
    button = page.locator("#legend").get_by_role("button", name="fedavg")
    button.click()
    shown(page, "document.querySelectorAll('#plot-curves path.js-line').length === 6")
    assert button.get_attribute("aria-pressed") == "false"
    page.locator("#legend").get_by_role("button", name="fedavg").press("Space")
    shown(page, "document.querySelectorAll('#plot-curves path.js-line').length === 9")
    require_self_contained(opened, compared)


def test_numbers_sort_as_numbers(tmp_path: Path, opened: Opened) -> None:
    for rule, megabytes in {"fedavg": 10, "fedprox": 1000, "scaffold": 9}.items():
        record = RoundRecord(1, [0], test_loss=1.0, uplink_bytes=megabytes * 10**6)
        sections = {"algorithm": {"name": rule}, "data": {"name": "own:load"}}
        write_run_at_work(tmp_path / rule, record, **sections)
    folders = sorted(tmp_path.iterdir())
    (tmp_path / "page.html").write_bytes(Report(folders).html())
    page = opened.open((tmp_path / "page.html").as_uri(), **DESKTOP)
    page.locator("#table-results").get_by_role("button", name="MB").click()
    place = [*column_headings(page, "table-results")].index("MB") + 1
    assert column(page, "table-results", place) == ["9", "10", "1,000"]


def test_curves_hide_and_axes_change(compared: Path, opened: Opened) -> None:
    page = opened.open(compared.as_uri(), **DESKTOP)
    page.get_by_role("button", name="hide all").click()
    shown(page, "document.querySelectorAll('#plot-curves path.js-line').length === 0")
    page.get_by_role("button", name="show all").click()
    shown(page, "document.querySelectorAll('#plot-curves path.js-line').length === 9")
    page.get_by_label("bytes", exact=True).check()
    title = "document.querySelector('#plot-curves').layout.xaxis.title.text"
    assert page.evaluate(title) == "bytes down and up, all clients"
    scale = "document.querySelector('#plot-curves').layout.yaxis.type"
    assert page.evaluate(scale) == "log"
    page.get_by_label("log axis").uncheck()
    assert page.evaluate(scale) == "linear"
    page.get_by_label("Measure").select_option("train_loss")
    assert page.evaluate(scale) == "log"
    page.locator("#run").select_option("padamfed-seed1")
    page.mouse.move(*centre_of(page, "#plot-participation"))
    page.wait_for_selector("#plot-participation .hovertext")


def column_headings(page: Page, table: str) -> list[str]:
    return [text.split("\xa0")[0] for text in page.locator(f"#{table} thead th").all_inner_texts()]


def centre_of(page: Page, selector: str) -> tuple[float, float]:
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize("count", [9, 12])
def test_of_many_curves_the_one_whose_name_is_pointed_at_stands_out(
    tmp_path: Path, opened: Opened, count: int
) -> None:
    for number in range(count):
        records = [RoundRecord(n, [0], test_loss=number + 1 / n) for n in (1, 2)]
        sections = {"training": {"batch_size": number + 1}, "data": {"name": "own:load"}}
        write_run_at_work(tmp_path / f"{number:02}", *records, **sections)
    folders = sorted(tmp_path.iterdir())
    (tmp_path / "page.html").write_bytes(Report(folders).html())
    page = opened.open((tmp_path / "page.html").as_uri(), **DESKTOP)
    data = "document.querySelector('#plot-curves').data"
    lines = f"{data}.map(({{ name, line }}) => [name, line.width, line.dash])"
    name = f"batch_size={count}"
    assert [name, 1, "solid"] in page.evaluate(lines)  # grey, as all but the first eight
    button = page.locator("#legend").get_by_role("button", name=name)
    for begin, end in ((button.hover, page.locator("h1").hover), (button.focus, button.blur)):
        begin()
        shown(page, f"{lines}.some(([name, width]) => name === '{name}' && width === 4)")
        end()
        shown(page, f"{lines}.every(([, width]) => width < 4)")


def test_paper_is_light_where_the_screen_is_dark(compared: Path, opened: Opened) -> None:
    page = opened.open(compared.as_uri(), **DESKTOP, color_scheme="dark")
    assert "The lighter the more" in page.locator("#note-labels").inner_text()
    ground = "document.querySelector('#plot-curves').layout.paper_bgcolor"
    assert page.evaluate(ground) == "#15171b"
    seen = "window.seen = []; addEventListener('beforeprint', () => seen.push(" + ground + "))"
    page.evaluate(seen)
    page.pdf(format="A4")
    assert page.evaluate("seen") == ["#fff"]
    shown(page, f"{ground} === '#15171b'")


def test_parts_have_names_for_those_who_do_not_see_them(compared: Path, opened: Opened) -> None:
    page = opened.open(compared.as_uri(), **DESKTOP)
    for role in ("banner", "main", "navigation"):
        assert page.get_by_role(role).count() == 1  # type: ignore[arg-type]
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    for plot in page.locator(".plot:visible").all():
        assert plot.get_attribute("role") == "img"
        assert plot.get_attribute("aria-label")
    tables = page.locator("table")
    assert tables.count() == page.locator("table > caption").count() == 3
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the summary"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a launch of five clients of which two fail in every round."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "failing.py").write_text(FAILING)
    started = ("launch", "--clients", "5", "--processes", "2", "--algorithm", "fedavg")
    asked = ("--set", "federation.num_rounds=6", "--set", "federation.clients_per_round=5")
    places = ("--set", "data.name=failing:load", "--set", "output.directory=run")
    ended = fedopt(*started, *asked, *places, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert fedopt("report", "run", cwd=folder).returncode == 0
    return folder / "report.html"


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_launch_with_two_failing_clients_says_who_and_why(
    failing: Path, opened: Opened, screen: dict[str, Any]
) -> None:
    page = opened.open(failing.as_uri(), **screen)
    require_no_overflow(page)
    assert "owned" not in page.title()
    summary = page.locator("#summary").inner_text()
    assert "Client 1 failed 6 times: DataError" in summary
    assert "<script>document.title = 'owned'</script> went away" in summary
    assert "Client 3 failed 6 times: reported loss nan" in summary
    assert column(page, "table-clients", 1)[:2] == ["1", "3"]
    assert column(page, "table-clients", 3)[:3] == ["6", "6", "0"]
    require_self_contained(opened, failing)


def test_texts_of_a_run_stay_texts(tmp_path: Path, opened: Opened) -> None:
    bad = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'<b>&amp;"
    records = [
        RoundRecord(
            n,
            [f"a {bad}"],
            failures=1,
            test_loss=1.0 / n,
            test_metric=0.5,
            test_metrics={bad: 0.5 * n},
            errors=[{"client": f"b {bad}", "phase": "train", "error": f"{bad} \x1b[1m"}],
        )
        for n in (1, 2)
    ]
    folder = tmp_path / "a <b>&'\""
    write_run_at_work(
        folder,
        *records,
        data={"name": f"own:{bad}"},
        algorithm={"name": f"own:{bad}"},
        federation={"client_ids": "names"},
    )
    file = tmp_path / "page.html"
    file.write_bytes(Report([folder]).html())
    page = opened.open(file.as_uri(), **DESKTOP)
    assert page.locator("script").count() == 3
    assert page.locator("img, main b").count() == 0
    assert page.title() == f"own:{bad}: a <b>&'\" on own:{bad}"
    clients = column(page, "table-clients", 1)
    assert clients == [f"b {bad}", f"a {bad}"]
    assert bad in page.locator("#summary").inner_text()
    options = page.locator("#measure option").all_inner_texts()
    assert f"Test {bad}" in options
    page.get_by_label("Measure").select_option(bad)
    page.mouse.move(*centre_of(page, "#plot-participation"))
    page.wait_for_selector("#plot-participation .hovertext")
    hover = page.locator("#plot-participation .hovertext").text_content() or ""
    assert re.search("client [ab] </script><script>document.title='ow", hover)
    assert page.locator("img, main b").count() == 0
    require_self_contained(opened, file)


def test_long_names_of_clients_leave_room_on_a_phone(tmp_path: Path, opened: Opened) -> None:
    names = [f"{number} hospital of a town with a long name" for number in (1, 2)]
    record = RoundRecord(1, names, test_loss=1.0)
    write_run_at_work(
        tmp_path, record, data={"name": "own:load"}, federation={"client_ids": "names"}
    )
    (tmp_path / "page.html").write_bytes(Report([tmp_path]).html())
    page = opened.open((tmp_path / "page.html").as_uri(), **PHONE)
    box = page.locator("#plot-participation .heatmaplayer image").bounding_box()
    assert box is not None
    assert box["width"] > PHONE["viewport"]["width"] / 2
    cell = page.locator("#settings tbody td").first.bounding_box()
    assert cell is not None
    assert cell["x"] + cell["width"] <= PHONE["viewport"]["width"]  # seen without scrolling


def test_a_zero_does_not_stretch_the_log_axis_of_a_run_that_diverged(
    tmp_path: Path, opened: Opened
) -> None:
    losses = enumerate([2.0, 0.5, 0.0, math.nan], 1)
    records = [RoundRecord(n, [0], test_loss=loss, test_metric=0.5) for n, loss in losses]
    write_run_at_work(tmp_path, *records, data={"name": "own:load"})
    (tmp_path / "page.html").write_bytes(Report([tmp_path]).html())
    page = opened.open((tmp_path / "page.html").as_uri(), **DESKTOP)
    axis = page.evaluate("document.querySelector('#plot-curves').layout.yaxis")
    assert axis["type"] == "log"
    assert axis["range"] == pytest.approx([-0.301, 0.301], abs=0.05)


def full_record(number: int, draw: np.random.Generator, last: np.ndarray) -> RoundRecord:
    """A round of 40 of 200 clients with all that is recorded of each; two of them fail. `last` has
    the last round of each client."""
    asked = sorted(draw.choice(200, 40, replace=False).tolist())
    clients, lost = asked[2:], asked[:2]
    last[clients] = number
    each: dict[str, dict[str, float | None]] = {
        str(client): {"rounds_away": float(number - last[client])} for client in range(200)
    }
    for client in clients:
        for key in ("update_norm", "drift", "control_norm", "test_loss", "test_accuracy"):
            each[str(client)][key] = draw.random()
    return RoundRecord(
        number,
        clients,
        failures=2,
        test_loss=draw.random(),
        drift=draw.random(),
        each_client=each,
        seconds=1.0,
        seconds_by_client={str(client): draw.random() for client in clients},
        examples_by_client={str(client): 100 + client for client in clients},
        errors=[{"client": i, "phase": "train", "error": f"reported loss {i}"} for i in lost],
    )


def test_200_clients_and_2000_rounds_fit(tmp_path: Path, opened: Opened) -> None:
    draw = np.random.default_rng(0)
    write_run_at_work(tmp_path, federation={"num_clients": 200, "clients_per_round": 40})
    last = np.zeros(200, dtype=int)
    with (tmp_path / "rounds.jsonl").open("w") as file:
        for number in range(1, 2001):
            record = full_record(number, draw, last)
            file.write(json.dumps(as_json(record.to_dict())) + "\n")
    data = Report([tmp_path]).html()
    assert len(data) < 15e6
    (tmp_path / "page.html").write_bytes(data)
    begun = time.monotonic()
    page = opened.open((tmp_path / "page.html").as_uri(), **DESKTOP)
    page.wait_for_selector("#plot-values .heatmaplayer image")
    assert time.monotonic() - begun < 5
    assert "2000" in page.locator("#note-curves").inner_text()
    assert "Orange: a reply failed." in page.locator("#note-participation").inner_text()
    assert page.locator("#plot-participation .scatterlayer path").count() == 0  # thousands of marks
    headings = column_headings(page, "table-clients")
    assert {"seconds, mean", "examples", "rounds away, most"} <= set(headings)
    assert len(column(page, "table-clients", 1)) == 200


def test_what_was_chosen_stays_when_another_run_appears_before_it(
    tmp_path: Path, processes: Processes, opened: Opened
) -> None:
    def write(name: str, algorithm: str, **values: Any) -> None:
        record = RoundRecord(1, [0], test_loss=1.0, **values)
        sections = {"algorithm": {"name": algorithm}, "data": {"name": "own:load"}}
        write_run_at_work(tmp_path / "runs" / name, record, **sections)

    write("b", "fedavg", uplink_bytes=9_000_000)
    write("c", "fedprox", uplink_bytes=10_000_000)
    watch = processes.start("watch", "watch", "runs", "--address", "127.0.0.1:0")
    watch.wait_for("until Ctrl-C")
    page = opened.open(watch.log.split(" at ")[1].split(" until ")[0], **DESKTOP)
    assert page.title() == page.locator("h1").inner_text() == "2 runs on own:load"
    page.locator("#run").select_option("c")
    for _ in range(2):
        page.locator("#table-results").get_by_role("button", name="MB").click()
    page.locator("#legend").get_by_role("button", name="fedprox").focus()
    write("a", "scaffold", test_metric=0.5, test_accuracy=0.5, test_metrics={"accuracy": 0.5})
    shown(page, "document.title === '3 runs on own:load'")
    assert page.locator("h1").inner_text() == "3 runs on own:load"
    assert "test loss, last" in column_headings(page, "table-results")  # a column more before MB
    assert page.locator("#run").evaluate("select => select.selectedOptions[0].text") == "c"
    assert column(page, "table-results", 1) == ["fedprox", "fedavg", "scaffold"]
    sorted_by = page.locator("#table-results th[aria-sort]")
    assert sorted_by.get_attribute("aria-sort") == "descending"
    assert sorted_by.inner_text().startswith("MB")
    assert page.evaluate("document.activeElement.textContent") == "fedprox"


def is_shown(page: Page, number: int) -> bool:
    found = re.search("([0-9]+) of 200 rounds are over", page.locator("#summary").inner_text())
    return found is not None and int(found[1]) >= number


def num_rounds(records: Path) -> int:
    return records.read_bytes().count(b"\n")


def has_round(records: Path, number: int) -> bool:
    return num_rounds(records) >= number


def test_watch_shows_a_round_within_two_seconds_of_its_end(
    tmp_path: Path, processes: Processes, opened: Opened
) -> None:
    sections = {"federation": {"num_rounds": 200}, "training": {"local_steps": 5}}
    config = write_config(tmp_path, "fedavg", **sections)
    records = tmp_path / "run" / "rounds.jsonl"
    training = processes.start("train", "simulate", config)
    wait_until(lambda: records.exists() and records.stat().st_size > 0, lambda: training.log)
    watch = processes.start("watch", "watch", "run", "--address", "127.0.0.1:0")
    watch.wait_for("until Ctrl-C")
    page = opened.open(watch.log.split(" at ")[1].split(" until ")[0], **DESKTOP)
    page.locator("#legend button").first.click()  # what a reader has chosen stays
    for _ in range(4):
        number = num_rounds(records) + 1
        wait_until(partial(has_round, records, number), lambda: training.log)
        ended = time.monotonic()
        wait_until(partial(is_shown, page, number), lambda: watch.log)
        assert time.monotonic() - ended < 2
    assert page.locator("#legend button").first.get_attribute("aria-pressed") == "false"
    assert training.process.poll() is None
    assert len({url.split("?")[0] for url in opened.requests if "data:" not in url}) == 2
    watch.kill()
    shown(page, "document.querySelector('#state').innerText.includes('not answer')")
    opened.complaints.clear()  # of the browser, about the server that is gone
    page.close()
