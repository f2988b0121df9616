"""Pictures: the numbers drawn are those of the records, and all that is written can be read."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedopt_flwr import RunConfig
from fedopt_flwr.rounds.record import TOO_LATE, RoundRecord
from fedopt_flwr.run.plots import look
from fedopt_flwr.run.plots.comparison import comparison_figure, draw_comparison
from fedopt_flwr.run.plots.curves import (
    TEST_ERROR,
    TEST_LOSS,
    Curve,
    Measure,
    Trace,
    Unit,
    best_first,
    measure_of,
)
from fedopt_flwr.run.plots.one_run import draw_run, run_figure
from fedopt_flwr.run.plots.participation import participation_of
from fedopt_flwr.run.plots.partition import draw_partition
from fedopt_flwr.run.plots.subject import Subject
from fedopt_flwr.run.plots.sweeps import draw_sweeps
from fedopt_flwr.run.summary import Target

DIGITS = Subject("digits", "mlp, 20 clients")


def record(number: int, accuracy: float | None, loss: float = 1.0, **values: Any) -> RoundRecord:
    """A round with a test loss and, unless it is None, an accuracy."""
    measured = {} if accuracy is None else {"accuracy": accuracy}
    return RoundRecord(
        number,
        test_loss=loss,
        test_metric=accuracy,
        test_accuracy=accuracy,
        test_metrics=measured,
        **values,
    )


def trace(accuracies: Sequence[float], diverged_at: int | None = None, **values: Any) -> Trace:
    costs: dict[str, Any] = {"uplink_bytes": 1_000_000, "downlink_bytes": 2_000_000, "seconds": 0.5}
    rounds = [record(n, a, **(costs | values)) for n, a in enumerate(accuracies, 1)]
    return Trace(rounds, diverged_at)


def rising(end: float, num_rounds: int = 20) -> list[float]:
    return [end - 0.5 * (1 - n / num_rounds) ** 2 for n in range(1, num_rounds + 1)]


def pictured(
    curves: Sequence[Curve],
    measure: Measure = TEST_ERROR,
    targets: Sequence[Target] = (),
    unit: Unit = "rounds",
) -> Figure:
    with look.drawing():
        figure = comparison_figure(curves, measure, DIGITS, targets, unit)
        FigureCanvasAgg(figure).draw()
    return figure


def drawn(figure: Figure, name: str) -> tuple[list[float], list[float]]:
    """The numbers of a curve in the upper panel."""
    (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == name]
    return list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))


def colour_of(figure: Figure, name: str) -> str:
    (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == name]
    return str(line.get_color())


def labels(figure: Figure) -> list[Text]:
    return [text for text in figure.axes[0].texts if text.get_text()]


def boxes(figure: Figure, texts: Sequence[Text]) -> list[Any]:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    return [Text.get_window_extent(text, renderer) for text in texts]


def texts_of(figure: Figure) -> Iterator[Text]:
    """All that is written and seen."""
    unseen = set()  # labels of ticks outside of the axes are there, and not drawn
    for axes in figure.axes:
        for axis, place in ((axes.xaxis, 0), (axes.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_ticklabels()
            unseen |= {t for t in ticks if not low <= t.get_position()[place] <= high}
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text().strip() and text.get_visible() and text not in unseen:
            yield text


def require_apart(figure: Figure, texts: Sequence[Text]) -> None:
    pairs = itertools.combinations(zip(texts, boxes(figure, texts), strict=True), 2)
    over = [(a.get_text(), b.get_text()) for (a, x), (b, y) in pairs if x.overlaps(y)]
    assert over == []


def require_inside(figure: Figure) -> None:
    width, height = figure.canvas.get_width_height()
    for text, box in zip(texts_of(figure), boxes(figure, [*texts_of(figure)]), strict=True):
        inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
        assert inside, (text.get_text(), box)


def test_a_curve_is_the_mean_of_its_seeds_and_the_band_reaches_from_least_to_greatest() -> None:
    seeds = [[0.5, 0.7, 0.9], [0.6, 0.8, 0.85], [0.4, 0.75, 0.95]]
    figure = pictured([Curve("rule", [trace(seed) for seed in seeds])])
    x, y = drawn(figure, "rule")
    assert x == [1, 2, 3]
    assert y == pytest.approx([0.5, 0.25, 0.1])
    (band,) = figure.axes[0].collections
    corners = band.get_paths()[0].vertices
    for number, low, high in ((1, 0.4, 0.6), (2, 0.2, 0.3), (3, 0.05, 0.15)):
        heights = corners[np.isclose(corners[:, 0], number), 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))
    assert figure.axes[0].get_yscale() == "log"
    assert any("Test error on digits" in text.get_text() for text in texts_of(figure))


@pytest.mark.parametrize(
    ("unit", "places"), [("bytes", [3.0, 6.0, 9.0]), ("seconds", [0.5, 1.0, 1.5])]
)
def test_curves_over_what_was_sent_and_over_seconds(unit: Unit, places: list[float]) -> None:
    figure = pictured([Curve("rule", [trace([0.5, 0.7, 0.9])])], unit=unit)
    assert drawn(figure, "rule")[0] == pytest.approx(places)
    heading = {"bytes": "MB down and up, all clients", "seconds": "seconds of rounds"}[unit]
    assert figure.axes[0].get_xlabel() == heading


def test_the_start_pass_and_rounds_without_an_evaluation_cost_and_are_no_points() -> None:
    rounds = [
        RoundRecord(0, downlink_bytes=10**6),
        RoundRecord(1, uplink_bytes=10**6, train_loss=2.0),
        record(2, 0.75, uplink_bytes=10**6),
    ]
    figure = pictured([Curve("rule", [Trace(rounds)])], unit="bytes")
    assert drawn(figure, "rule") == ([3.0], [0.25])


def test_best_first_the_first_eight_in_colour_the_others_grey_with_their_names() -> None:
    finals = {f"rule{number}": 0.5 + 0.01 * number for number in range(29)}
    curves = [Curve(name, [trace(rising(final))]) for name, final in finals.items()]
    random.Random(0).shuffle(curves)
    figure = pictured(curves)
    ranked = sorted(finals, key=lambda name: -finals[name])
    colours = [colour_of(figure, name) for name in ranked]
    assert len(set(colours[:8])) == 8
    assert look.GREY not in colours[:8]
    assert set(colours[8:]) == {look.GREY}
    written = [text.get_text() for text in labels(figure)]
    assert written == [
        f"{rank} {name}  {100 * (1 - finals[name]):.1f} %" for rank, name in enumerate(ranked, 1)
    ]
    rows = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert rows == [f"{rank} {name}" for rank, name in enumerate(ranked, 1)]
    require_apart(figure, labels(figure))
    require_apart(figure, figure.axes[1].get_yticklabels())
    require_inside(figure)


def test_labels_of_curves_that_end_in_one_place_are_apart_and_in_order() -> None:
    names = [f"a rule with a name of some length, client_learning_rate=0.{n}" for n in range(12)]
    curves = [Curve(name, [trace([0.5, 0.9 + 1e-6 * n])]) for n, name in enumerate(names)]
    figure = pictured(curves)
    require_apart(figure, labels(figure))
    require_inside(figure)
    heights = [box.y0 for box in boxes(figure, labels(figure))]
    assert heights == sorted(heights)  # the best has the least error, at the bottom


@pytest.mark.parametrize("seed", range(20))
def test_what_is_spread_keeps_its_order_and_its_distance(seed: int) -> None:
    draw = np.random.default_rng(seed)
    wanted = draw.choice([0.0, 1.0, 5.0], 12) + draw.normal(0, 0.2, 12)
    heights = draw.uniform(0.1, 0.6, 12)
    middles = look.spread(wanted, heights, 0.0, 8.0)
    order = np.argsort(wanted)
    low, high = (middles - heights / 2)[order], (middles + heights / 2)[order]
    assert (low[1:] >= high[:-1] - 1e-9).all()
    assert low[0] >= -1e-9
    assert high[-1] <= 8 + 1e-9
    alone = look.spread(np.array([1.0, 4.0]), np.array([0.5, 0.5]), 0.0, 8.0)
    assert list(alone) == [1.0, 4.0]  # what does not overlap stays


def test_more_curves_than_have_room_for_names_say_so() -> None:
    curves = [Curve(f"rule{n}", [trace([0.5, 0.5 + 0.001 * n])]) for n in range(80)]
    figure = pictured(curves)
    assert len(labels(figure)) == 45
    assert any("the first 45 with their names" in t.get_text() for t in texts_of(figure))
    named = [line.get_label() for line in figure.axes[0].get_lines()]
    assert {f"rule{n}" for n in range(80)} <= set(named)
    require_apart(figure, labels(figure))


def test_a_run_that_diverged_is_marked_comes_last_and_does_not_stretch_the_axis() -> None:
    sound = [2.0, 1.0, 0.5, 0.25, 0.2]
    lost = [2.0, 1.0, 1e9, 1e12, math.nan]
    curves = [
        Curve("lost", [Trace([record(n, None, loss) for n, loss in enumerate(lost, 1)], 3)]),
        Curve("sound", [Trace([record(n, None, loss) for n, loss in enumerate(sound, 1)])]),
    ]
    figure = pictured(curves, TEST_LOSS)
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert 0.1 < low < 0.2
    assert high < 3
    assert [text.get_text() for text in labels(figure)] == [
        "1 sound  0.2",
        "2 lost  diverged in round 3",
    ]
    (cross,) = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert list(cross.get_xdata()) == [3]
    assert low <= cross.get_ydata()[0] <= high
    assert drawn(figure, "lost")[1][:4] == lost[:4]
    (line,) = [line for line in axes.get_lines() if line.get_label() == "lost"]
    assert line.get_linestyle() == ":"


def test_of_several_seeds_those_that_diverged_are_counted() -> None:
    seeds = [trace([0.5, 0.9]), trace([0.5, 0.1], diverged_at=2)]
    figure = pictured([Curve("half", seeds), Curve("whole", [trace([0.5, 0.3])])])
    written = [" ".join(text.get_text().split()) for text in labels(figure)]
    assert written == ["1 whole 70.0 %", "2 half 50.0 %, 1 of 2 diverged"]


def test_costs_are_those_of_the_round_that_reached_the_target() -> None:
    curves = [
        Curve("quick", [trace([0.5, 0.91, 0.95]), trace([0.5, 0.6, 0.92])]),
        Curve("never", [trace([0.5, 0.6, 0.7])]),
        Curve("at work", [Trace(trace([0.5, 0.6]).rounds, is_finished=False)]),
        Curve("by luck", [trace([0.5, 0.93, 0.6]), trace([0.1, 0.2, 0.3])]),
    ]
    targets = [Target("test_accuracy", 0.9), Target("test_accuracy", 0.99)]
    figure = pictured(curves, targets=targets)
    written = {text.get_text() for text in texts_of(figure)}
    assert "What it costs to reach 90 % accuracy" in written  # which nobody asked of 99 %
    columns = figure.axes[1:]
    assert [axes.get_title(loc="left") for axes in columns] == ["rounds", "MB", "seconds"]
    quick = {"rounds": ([2, 3], 2.5), "MB": ([6, 9], 7.5), "seconds": ([1.0, 1.5], 1.25)}
    for axes, (seeds, mean) in zip(columns, quick.values(), strict=True):
        dots = _dots_in_row(axes, 0)
        assert dots == pytest.approx([*seeds, mean])
    rows = [label.get_text().partition(" ")[2] for label in columns[0].get_yticklabels()]
    assert rows == ["quick", "never", "at work", "by luck"]
    assert _dots_in_row(columns[0], rows.index("never")) == []
    assert _dots_in_row(columns[0], rows.index("by luck")) == [2]  # one seed's, and no mean
    said = {round(text.xy[1]): text.get_text() for text in columns[0].texts}  # type: ignore[attr-defined]
    assert said == {1: "never", 2: "not yet", 3: "only 1 of 2 runs"}


def test_no_dot_stands_beyond_the_last_tick() -> None:
    for last in (1.3, 2.6, 26.0, 110.0):
        rounds = trace([0.5, 0.95], seconds=last / 2).rounds
        figure = pictured([Curve("x", [Trace(rounds)])], targets=[Target("test_accuracy", 0.9)])
        axes = figure.axes[-1]
        low, high = axes.get_xlim()
        assert max(tick for tick in axes.get_xticks() if low <= tick <= high) >= last
        require_inside(figure)


def _dots_in_row(axes: Axes, row: int) -> list[float]:
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    return [float(x) for d in dots for x, y in d.get_xydata() if y == row]  # type: ignore[union-attr]


def test_without_a_target_the_cost_is_of_a_round_number_that_half_of_the_curves_reach() -> None:
    finals = (0.987, 0.973, 0.91, 0.72)
    figure = pictured([Curve(str(end), [trace([0.1, end])]) for end in finals])
    written = {text.get_text() for text in texts_of(figure)}
    assert "What it costs to reach 97 % accuracy" in written
    figure = pictured([Curve(str(end), [trace([0.1, end])]) for end in finals], TEST_LOSS)
    assert "What it costs to reach loss 1" in {text.get_text() for text in texts_of(figure)}


def test_a_metric_that_is_no_accuracy_is_drawn_itself_with_the_axis_where_the_curves_are() -> None:
    def scored(values: Sequence[float]) -> Trace:
        return Trace([RoundRecord(n, test_metrics={"f1": v}) for n, v in enumerate(values, 1)])

    better = scored([0.1] + [0.80 + 0.001 * n for n in range(19)])
    worse = scored([0.1] + [0.78 + 0.001 * n for n in range(19)])
    measure = measure_of(better.rounds, "f1")
    figure = pictured([Curve("worse", [worse]), Curve("better", [better])], measure)
    assert [text.get_text()[:8] for text in labels(figure)] == ["1 better", "2 worse "]
    low, high = figure.axes[0].get_ylim()
    assert 0.77 < low < 0.78
    assert 0.81 < high < 0.83
    assert figure.axes[0].get_yscale() == "linear"
    assert drawn(figure, "better")[1][-1] == pytest.approx(0.818)


def test_a_metric_of_ones_own_is_ranked_by_the_loss_as_its_better_side_is_unknown() -> None:
    def judged(value: float, loss: float) -> Trace:
        return Trace([RoundRecord(1, test_loss=loss, test_metrics={"own": value})])

    curves = [Curve("high", [judged(9.0, 2.0)]), Curve("low", [judged(1.0, 0.5)])]
    measure = measure_of(curves[0].traces[0].rounds, "own")
    assert measure.name == "own"
    assert [curve.name for curve in best_first(curves, measure)] == ["low", "high"]


def test_what_is_measured_falls_back_to_losses() -> None:
    assert measure_of([RoundRecord(1, train_loss=2.0)], "accuracy").name == "train_loss"
    assert measure_of([RoundRecord(1, test_loss=2.0)], "accuracy").name == "test_loss"
    assert measure_of([record(1, 0.5)], "accuracy") == TEST_ERROR


def test_seeds_of_unlike_length_are_averaged_where_all_have_a_value_and_go_on_as_thin_lines() -> (
    None
):
    long, short = trace([0.5, 0.6, 0.7, 0.8]), trace([0.3, 0.4])
    figure = pictured([Curve("rule", [long, short._replace(is_finished=False)])])
    assert drawn(figure, "rule") == ([1, 2], pytest.approx([0.6, 0.5]))
    tails = [tuple(line.get_xdata()) for line in figure.axes[0].get_lines()]
    assert (2, 3, 4) in tails
    (label,) = labels(figure)
    assert label.get_text() == "rule  50.0 %, so far, round 2"


def test_diagnoses_have_panels_of_their_own_where_they_were_recorded() -> None:
    rounds = [record(n, 0.5, gradient_norm=2.0 / n, global_train_loss=3.0 / n) for n in (1, 2)]
    figure = pictured([Curve("rule", [Trace(rounds)]), Curve("other", [trace([0.5, 0.6])])])
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    for title, start in (("Norm of the whole gradient", 2.0), ("Loss over all training data", 3.0)):
        lines = {line.get_label(): line for line in by_title[title].get_lines()}
        assert list(lines["rule"].get_ydata()) == [start, start / 2]
        assert "other" not in lines
    require_inside(figure)


def test_no_error_left_is_drawn_too() -> None:
    """A log axis has no zero: the line leaves the picture at its bottom."""
    figure = pictured([Curve("perfect", [trace([0.5, 0.9, 1.0])]), Curve("x", [trace([0.5, 0.9])])])
    assert drawn(figure, "perfect")[1] == pytest.approx([0.5, 0.1, 0.0])
    assert labels(figure)[0].get_text() == "1 perfect  0 %"
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert 0.05 < axes.get_ylim()[0] < 0.1  # the least error that is more than none
    alone = panels(one_run([record(n, a) for n, a in enumerate([0.5, 0.9, 1.0], 1)]))["Test error"]
    assert alone.get_yscale() == "log"
    assert 0.05 < alone.get_ylim()[0] < 0.1
    only = pictured([Curve("perfect", [trace([1.0, 1.0])])])
    assert only.axes[0].get_ylim()[0] <= 0 <= only.axes[0].get_ylim()[1]


def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    curves = [Curve(f"rule{n}", [trace([0.5, 0.6 + 0.01 * n])]) for n in range(3)]
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for kind, start in starts.items():
        files = [tmp_path / f"{name}.{kind}" for name in ("one", "other")]
        for file in files:
            draw_comparison(curves, TEST_ERROR, DIGITS, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes().startswith(start)


# linear RGB as who lacks a cone sees it: Machado, Oliveira and Fernandes 2009, severity 1
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
TO_XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]
D65 = [0.95047, 1.0, 1.08883]


def seen_as(colour: str, sight: Any) -> np.ndarray:
    """A colour in CIE Lab, as it is seen with that sight."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    light = np.array(TO_XYZ) @ np.clip(np.array(sight) @ linear, 0, 1) / np.array(D65)
    x, y, z = np.where(light > 216 / 24389, np.cbrt(light), (24389 / 27 * light + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", [np.eye(3), DEUTERANOPIA, PROTANOPIA])
def test_any_two_colours_are_told_apart_by_the_colour_blind(sight: Any) -> None:
    def least_distance(colours: Sequence[str]) -> float:
        pairs = itertools.combinations([seen_as(colour, sight) for colour in colours], 2)
        return min(float(np.linalg.norm(one - other)) for one, other in pairs)

    assert least_distance(look.COLOURS) > 15


def test_red_and_green_are_known_to_be_alike() -> None:
    """What the test above says of a palette that is not for everyone."""
    red, green = (seen_as(colour, DEUTERANOPIA) for colour in ("tab:red", "tab:green"))
    assert np.linalg.norm(red - green) < 10


def test_no_picture_has_other_colours() -> None:
    root = Path(look.__file__).parents[3]
    modules = [*root.glob("fedopt_flwr/**/*.py"), *root.glob("benchmarks/*.py")]
    assert len(modules) > 100
    others = re.compile(r"tab10|tab20|colormaps|cmap|prop_cycle|color=\"(C[0-9]|tab:)")
    assert [m.name for m in modules if others.search(m.read_text(encoding="utf-8"))] == []


def test_more_classes_and_curves_than_colours_differ_in_pattern_and_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Figure] = []
    monkeypatch.setattr(look, "save", lambda figure, _: found.append(figure))
    draw_partition(np.ones((3, 20), dtype=int), tmp_path / "p.png", "title")
    bars = found[0].axes[0].containers
    looks = {(to_hex(bar[0].get_facecolor()).upper(), bar[0].get_hatch()) for bar in bars}
    assert len(looks) == 20
    assert {colour for colour, _ in looks} == set(look.COLOURS)
    curves = {f"rule{n}": ([1.0, 2.0], [{"y": n}, {"y": n}]) for n in range(20)}
    draw_sweeps(curves, {}, {"y": lambda row: row["y"]}, tmp_path / "s.png", "title")
    lines = found[1].axes[0].get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20
    assert {line.get_color() for line in lines} == set(look.COLOURS)


def test_a_users_own_style_is_as_it_was_and_changes_nothing(tmp_path: Path) -> None:
    import matplotlib

    curves = [Curve("rule", [trace([0.5, 0.6])])]
    draw_comparison(curves, TEST_ERROR, DIGITS, tmp_path / "plain.png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        draw_comparison(curves, TEST_ERROR, DIGITS, tmp_path / "styled.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


def one_run(rounds: Sequence[RoundRecord], diverged_at: int | None = None) -> Figure:
    config = RunConfig(federation={"num_clients": 6, "clients_per_round": 2})
    with look.drawing():
        figure = run_figure("rule", Trace(rounds, diverged_at), config, "rounds")
        FigureCanvasAgg(figure).draw()
    return figure


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def whole_run(num_rounds: int = 12) -> list[RoundRecord]:
    failure = {"client": 5, "phase": "train", "error": "NaN"}
    late = {"client": 4, "phase": "train", "error": TOO_LATE}
    return [
        RoundRecord(
            number,
            [0, number % 3 + 1],
            failures=2 if number == 7 else 0,
            train_loss=2.0 / number,
            test_loss=2.5 / number,
            test_metric=1 - 0.9 / number,
            test_accuracy=1 - 0.9 / number,
            test_metrics={"accuracy": 1 - 0.9 / number},
            uplink_bytes=10**6,
            downlink_bytes=3 * 10**6,
            seconds=0.5 + 0.01 * number,
            client_seconds=0.2,
            errors=[failure, late] if number == 7 else [],
        )
        for number in range(1, num_rounds + 1)
    ]


def test_one_run_shows_losses_metric_clients_seconds_and_bytes_as_recorded() -> None:
    rounds = whole_run()
    figure = one_run(rounds)
    found = panels(figure)
    assert list(found) == [
        "Losses",
        "Test error",
        "Who took part; orange: 1 reply failed",
        "Seconds of a round, by part",
        "Sent so far: 48 MB",
    ]
    lines = {line.get_label(): list(line.get_ydata()) for line in found["Losses"].get_lines()}
    assert lines["Train loss"] == [r.train_loss for r in rounds]
    assert lines["Test loss"] == [r.test_loss for r in rounds]
    (error,) = found["Test error"].get_lines()
    assert list(error.get_ydata()) == pytest.approx([0.9 / n for n in range(1, 13)])
    own, rest = (_heights(area) for area in found["Seconds of a round, by part"].collections)
    assert own[12] == (0, 0.2)
    assert rest[12] == pytest.approx((0.2, 0.62))
    down, up = (_heights(area) for area in found["Sent so far: 48 MB"].collections)
    assert down[12] == (0, 36)
    assert up[12] == (36, 48)
    require_inside(figure)


def _heights(area: Any) -> dict[int, tuple[float, float]]:
    """From where to where an area reaches, by round."""
    corners = area.get_paths()[0].vertices
    at = {round(x): corners[np.isclose(corners[:, 0], x), 1] for x in corners[:, 0]}
    return {number: (float(y.min()), float(y.max())) for number, y in at.items()}


def test_who_took_part_is_a_row_for_each_client_with_failures_in_orange() -> None:
    figure = one_run(whole_run())
    axes = panels(figure)["Who took part; orange: 1 reply failed"]
    (image,) = axes.get_images()
    cells = np.asarray(image.get_array())[..., :3]
    assert cells.shape == (6, 12, 3)
    ground = cells[4, 0]
    took_part = ~np.isclose(cells, ground).all(axis=-1)
    expected = np.zeros((6, 12), dtype=bool)
    expected[0] = True
    for number in range(1, 13):
        expected[number % 3 + 1, number - 1] = True
    expected[5, 6] = True  # the failure; who was only late is none
    assert (took_part == expected).all()
    assert np.allclose(cells[5, 6], to_rgb(look.ALARM))
    left, right, bottom, top = image.get_extent()
    assert (left, right, bottom, top) == (0.5, 12.5, 5.5, -0.5)


def test_thousands_of_clients_and_rounds_are_blocks_that_add_up_and_are_drawn_quickly(
    tmp_path: Path,
) -> None:
    draw = random.Random(0)
    rounds = []
    for number in range(1, 3001):
        asked = draw.sample(range(5000), 50)
        lost = [{"client": i, "phase": "train", "error": "x"} for i in asked if i == 4321]
        counted = sorted(i for i in asked if i != 4321)
        rounds.append(RoundRecord(number, counted, len(lost), errors=lost, test_loss=1 / number))
    found = participation_of(rounds, 5000)
    assert found is not None
    assert found.counted.shape == (100, 375)
    assert (found.rows_each, found.rounds_each) == (50, 8)
    assert found.counted.sum() == sum(len(r.clients) for r in rounds)
    assert found.failed.sum() == sum(r.failures for r in rounds) > 5
    assert found.failed.any(axis=1).nonzero()[0].tolist() == [4321 // 50]
    in_block = sum(100 <= i < 150 for r in rounds[16:24] for i in r.clients)
    assert found.counted[2, 2] == in_block
    config = RunConfig(federation={"num_clients": 5000, "clients_per_round": 50})
    start = time.process_time()
    draw_run("fedavg", Trace(rounds), config, tmp_path / "big.png")
    assert time.process_time() - start < 10
    assert (tmp_path / "big.png").stat().st_size < 2_000_000


def test_names_of_clients_stand_in_the_rows_as_far_as_they_have_room() -> None:
    few = participation_of([RoundRecord(1, ["north", "south"])], "open")
    assert few is not None
    assert few.clients == ["north", "south"]
    figure = one_run([RoundRecord(1, ["south", "a site with a very long name"], test_loss=1.0)])
    rows = panels(figure)["Who took part; no reply failed"].get_yticklabels()
    assert [row.get_text() for row in rows] == ["a site with a…", "south"]
    require_apart(figure, rows)
    many = one_run([RoundRecord(1, [f"site{n:02}" for n in range(60)], test_loss=1.0)])
    assert panels(many)["Who took part; no reply failed"].get_ylabel() == "60 clients, by name"


def test_what_is_written_in_one_runs_picture_stays_apart() -> None:
    """With all that a run can have: three losses, a norm, failures, a slow round, divergence."""
    rounds = whole_run(60)
    for number, each in enumerate(rounds, 1):
        each.global_train_loss, each.gradient_norm = 3.0 / number, 4.0 / number
    rounds[0].seconds = 500.0
    figure = one_run(rounds, diverged_at=50)
    assert "Norm of the whole gradient" in panels(figure)
    ticks = {t for a in figure.axes for x in (a.xaxis, a.yaxis) for t in x.get_ticklabels()}
    require_apart(figure, [text for text in texts_of(figure) if text not in ticks])
    require_inside(figure)


def test_what_a_run_lacks_has_no_panel() -> None:
    figure = one_run([RoundRecord(1, seconds=1.0, failures=1)])
    assert list(panels(figure)) == ["Seconds of a round, by part"]
    for axes in one_run(whole_run(1)).axes:
        assert axes.get_lines() or axes.collections or axes.get_images()


def test_a_run_that_diverged_says_when_and_keeps_its_axes() -> None:
    rounds = whole_run()
    for late in rounds[8:]:
        late.train_loss = late.test_loss = 1e15
    figure = one_run(rounds, diverged_at=9)
    assert any("diverged in round 9" in text.get_text() for text in texts_of(figure))
    axes = panels(figure)["Losses"]
    assert axes.get_ylim()[1] < 4
    assert any(list(line.get_xdata()) == [9, 9] for line in axes.get_lines())


def test_one_slow_round_is_named_and_does_not_flatten_the_others() -> None:
    rounds = whole_run(200)
    rounds[0].seconds = 500.0
    axes = panels(one_run(rounds))["Seconds of a round, by part"]
    assert axes.get_ylim()[1] < 10
    assert [text.get_text() for text in axes.texts] == ["round 1: 500 s"]


def test_a_run_of_one_round_is_drawn_whole() -> None:
    figure = one_run([record(1, 0.5, seconds=2.0, client_seconds=1.0, clients=[0, 1])])
    areas = panels(figure)["Seconds of a round, by part"].collections
    own, rest = (area.get_paths()[0].get_extents() for area in areas)
    assert (own.height, own.width) == (1.0, 1.0)
    assert rest.ymax == 2.0


def test_seconds_are_drawn_by_all_parts_that_were_recorded() -> None:
    rounds = whole_run()
    for each in rounds[1:]:  # as in a run that an older version began
        each.aggregation_seconds, each.evaluation_seconds = 0.1, 0.3
    figure = one_run(rounds)
    axes = panels(figure)["Seconds of a round, by part"]
    found = {str(area.get_label()): _heights(area)[12] for area in axes.collections}
    assert found == {
        "a client, mean": (0, pytest.approx(0.2)),
        "rest": (pytest.approx(0.2), pytest.approx(0.52)),
        "server": (pytest.approx(0.52), pytest.approx(0.62)),
        "evaluation": (pytest.approx(0.62), pytest.approx(0.92)),
    }
    assert axes.get_ylim()[1] > 0.92
    legend = axes.get_legend()
    assert legend is not None
    require_apart(figure, legend.get_texts())
    box = legend.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    assert box.x1 <= axes.get_window_extent().x1 + 10


def test_names_may_hold_what_mathematics_is_written_in(tmp_path: Path) -> None:
    names = ["$\\frac$", "%$&^_$", "$100"]
    rounds = [record(n, 0.5, clients=names) for n in (1, 2)]
    one_run(rounds).savefig(tmp_path / "run.png")
    figure = pictured([Curve(name, [trace([0.5, 0.6])]) for name in names])
    assert any("$\\frac$" in text.get_text() for text in labels(figure))
    figure.savefig(tmp_path / "all.png")


@pytest.mark.parametrize("losses", [(1e-14, 2e-14), (1e-30, 1e-30), (5e-324, 1.0)])
def test_losses_of_any_size_are_drawn(losses: tuple[float, float]) -> None:
    curves = [
        Curve(name, [Trace([record(n, None, loss) for n in (1, 2)])])
        for name, loss in zip("ab", losses, strict=True)
    ]
    figure = pictured(curves, TEST_LOSS)
    FigureCanvasAgg(figure).draw()
    assert [drawn(figure, name)[1] for name in "ab"] == [[loss] * 2 for loss in losses]


def test_seeds_without_a_round_in_common_are_drawn_as_the_longest() -> None:
    short = Trace([record(2, 0.5)], None, False)
    long = Trace([record(1, 0.4), record(3, 0.6)], None, False)
    figure = pictured([Curve("fedavg", [short, long])])
    assert drawn(figure, "fedavg") == ([1.0, 3.0], [pytest.approx(0.6), pytest.approx(0.4)])
