"""Draw the pictures of README and docs, each from tables of docs/.

    python -m extras.pictures --out docs
    python -m extras.pictures --picture overview fit --out FOLDER
    python -m extras.pictures --tables FOLDER --out FOLDER

The first line draws all of them anew. A picture whose table is not there is named and left out. A
folder of your own may have any of the tables, under the names that they have in docs/. What
extras.evaluate wrote belongs into eval-NAME.csv, or with --generate into drift-NAME.csv, for any
NAME.
"""

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch

from calibrate import writable_folder
from compress import (
    Cache,
    HostStore,
    load_artifact,
    replacing_file,
    settings_from,
    skipped_layers,
)
from extras import bench
from extras.bench import FIT_SHAPES, GIGABYTE, tokens_that_fit
from extras.evaluate import TASKS
from generate import Parser, ProgressLine
from model import SHAPES, ModelConfig, UserError, empty_model

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 9.0  # inches of a picture: 1350 pixels at DPI, which a page of GitHub shows as about 900
DPI = 150
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "lines.linewidth": 1.6,
    "lines.markersize": 6.5,
    "text.parse_math": False,  # a method's name may have a dollar sign
}

Table = list[dict[str, str]]

# ------------------------------------------------------------------------------ how methods look

# Okabe and Ito's colours, which those who see few colours can tell apart. (Their yellow is left
# out: it is too pale for lines on white.)
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#8C8C8C"


class Look(NamedTuple):
    """How a method is named and drawn. The marks differ, too, for prints without colours."""

    name: str
    color: str
    mark: str

    def ink(self) -> tuple[float, float, float]:
        """The colour of text: darker, since thin strokes on white need more contrast."""
        from matplotlib.colors import to_rgb

        red, green, blue = to_rgb(self.color)
        return 0.65 * red, 0.65 * green, 0.65 * blue


LOOKS = {
    "dense": Look("dense", BLACK, "s"),
    "sals": Look("SALS", VERMILION, "o"),
    "sals 1024": Look("SALS 1024", VERMILION, "."),  # tokens that a step attends
    "sals 2048": Look("SALS 2048", VERMILION, "x"),
    "lrqk": Look("LRQK", GREEN, "D"),
    "loki": Look("Loki", ORANGE, "^"),
    "elitekv": Look("EliteKV", SKY, "v"),
    "fdc": Look("FDC", BLUE, "P"),
    "kivi": Look("KIVI", PURPLE, "X"),
    "fp8": Look("FP8", GREY, "s"),
    "fp8 centre": Look("FP8 centred", GREY, "."),
    "topk": Look("exact top-k", GREY, "*"),
    "turboquant": Look("TurboQuant", GREY, "p"),
    "sals_cann": Look("SALS as deployed", GREY, "o"),
    "palu": Look("Palu", GREY, "h"),
    "quest": Look("Quest", GREY, "d"),
    "doublesparse": Look("Double Sparsity", GREY, "<"),
    "shadowkv": Look("ShadowKV", GREY, ">"),
    "h2o": Look("H2O", GREY, "8"),
    "snapkv": Look("SnapKV", GREY, "H"),
    "streaming": Look("StreamingLLM", GREY, "x"),
    "random": Look("random", GREY, "+"),
}


def look_of(label: str) -> Look:
    """The look of a row's method, whatever its settings."""
    name = split_label(label)[0]
    return LOOKS.get(name.lower(), Look(name, GREY, "."))


def split_label(label: str) -> tuple[str, list[str]]:
    """A row's label, such as sals:paper,keep=0.125@FOLDER, in parts: sals, [paper, keep=0.125]."""
    method, _, settings = label.partition("@")[0].partition(":")
    return method.strip(), [part.strip() for part in settings.split(",") if part.strip()]


CURVES = ("sals", "kivi", "elitekv")  # methods of which a picture shows several settings
DEFAULTS = {"kivi": "4 bits", "sals:paper": "25 %"}  # settings that labels leave out, as names


def names_of(labels: list[str]) -> dict[str, str]:
    """A short name for each label. The first label of a method has the method's name alone, and
    "centred" with it. Others have the settings, too, that they do not share, and so have all labels
    of CURVES."""
    settings_of = {}  # method, or method:paper -> the settings of each of its labels
    for label in labels:
        variant, settings = split_variant(label)
        settings_of.setdefault(variant, []).append(settings)
    names = {}
    for label in labels:
        variant, settings = split_variant(label)
        others = settings_of[variant]
        method = split_label(label)[0]
        own = []
        if method in CURVES or settings != others[0]:
            for setting in settings:
                if not all(setting in other for other in others):
                    own.append(setting_in_words(setting))
        elif "centre=true" in settings:
            own.append(setting_in_words("centre=true"))
        if not own and variant in DEFAULTS and len(others) > 1:
            own.append(DEFAULTS[variant])
        elif not own and settings != others[0]:
            own.append("default")
        if variant == "sals:paper":
            own = own[:1]  # the rank; its bits follow
        name = look_of(label).name
        if variant.endswith(":paper"):
            name = f"the paper's {name}"
        names[label] = ", ".join([name, *own])
    return names


def split_variant(label: str) -> tuple[str, list[str]]:
    """As split_label, with the paper's variant of a method as one of its own: sals:paper."""
    method, settings = split_label(label)
    if "paper" in settings:
        return f"{method}:paper", [setting for setting in settings if setting != "paper"]
    return method, settings


def setting_in_words(setting: str) -> str:
    """bits=2 -> 2 bits, channels=0.25 -> 1/4 channels, rank=0.125 -> 12.5 %, k=0.5 -> k 1/2."""
    name, _, value = setting.partition("=")
    if name == "centre":
        return "centred"
    if name == "rank" and value:
        return f"{100 * float(value):g} %"
    if name in ("bits", "channels") and value:
        return f"{fraction_in_words(value)} {name}"
    return f"{name} {fraction_in_words(value)}".strip()


def fraction_in_words(value: str) -> str:
    """0.125 -> 1/8. What is no small fraction stays as it is."""
    try:
        exact = Fraction(value)
    except ValueError:
        return value
    if exact.denominator in (2, 4, 8, 16) and exact.numerator == 1:
        return f"1/{exact.denominator}"
    return value


# ------------------------------------------------------------------------------------------ labels


class Label(NamedTuple):
    """A text that belongs to a point of an axis, in the axis' units."""

    text: str
    x: float
    y: float
    color: object = BLACK


GAP = 7  # points between the middle of a mark and its label
MISTAKEN = 2000.0  # what a place costs that is nearer to another mark: as 200 covered pixels do
DISTANCES = (GAP, 12, 18, 25, 33, 42)  # of a label, where it may not stand nearer


def pixels(points: float) -> float:
    return points * DPI / 72


class Place(NamedTuple):
    """Where a label may stand beside its point."""

    cost: float  # of the place itself, without the other labels
    distance: float  # points between the text and the label's point
    left: float  # the text's lower left corner, in pixels from the point
    bottom: float
    box: object  # matplotlib's Bbox of the text, in pixels of the figure


def cheapest_place(places: list[Place], other_boxes: list) -> Place:
    """The place that costs least together with what it covers of the other labels."""

    def total_cost(place: Place) -> float:
        return place.cost + 15 * sum(shared_area(place.box, box) for box in other_boxes)

    return min(places, key=total_cost)


def place_labels(axis, labels: list[Label], avoid: list[tuple[float, float]]) -> None:
    """Writes each label beside its point, where it covers least of other labels and of the points
    of `avoid`. A label that has to stand apart gets a thin line to its point.

    The axis must have its final place and limits."""
    from matplotlib.transforms import Bbox

    renderer = axis.figure.canvas.get_renderer()
    frame = axis.get_window_extent(renderer)
    radius = pixels(4)
    marks = []
    for x, y in axis.transData.transform(avoid):
        marks.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))

    points = axis.transData.transform([(label.x, label.y) for label in labels])

    # 1. The texts, and where each of them may stand.
    texts = []
    places = []
    for label, (x, y) in zip(labels, points, strict=True):
        text = axis.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            color=label.color,
            fontsize=9.5,
            zorder=5,
        )
        texts.append(text)
        size = text.get_window_extent(renderer)
        own_places = []
        for distance in DISTANCES:
            for left, bottom in corners(size.width, size.height, pixels(distance)):
                box = Bbox.from_bounds(x + left, y + bottom, size.width, size.height)
                outside = size.width * size.height - shared_area(box, frame)
                covered = sum(shared_area(box, mark) for mark in marks)
                cost = 20 * outside + 10 * covered + pixels(distance)
                if any(apart(box, point) < apart(box, (x, y)) for point in points):
                    cost += MISTAKEN
                own_places.append(Place(cost, distance, left, bottom, box))
        places.append(own_places)

    # 2. Choose, label after label. Then choose again, as the others now stand.
    chosen = {}
    for _ in range(4):
        for i, own_places in enumerate(places):
            other_boxes = [place.box for j, place in chosen.items() if j != i]
            chosen[i] = cheapest_place(own_places, other_boxes)

    # 3. Move them there.
    for i, label in enumerate(labels):
        place = chosen[i]
        texts[i].set_position((place.left * 72 / DPI, place.bottom * 72 / DPI))
        if place.distance > DISTANCES[1]:
            start = axis.transData.inverted().transform(nearest(place.box, points[i]))
            axis.plot([start[0], label.x], [start[1], label.y], color="0.6", lw=0.5, zorder=1)


def corners(width: float, height: float, distance: float) -> list[tuple[float, float]]:
    """Where the lower left corner of a text may be, seen from its point: right and left of it,
    above and below, and between these."""
    aslant = 0.7 * distance
    return [
        (distance, -height / 2),
        (-distance - width, -height / 2),
        (-width / 2, distance),
        (-width / 2, -distance - height),
        (aslant, aslant),
        (aslant, -aslant - height),
        (-aslant - width, aslant),
        (-aslant - width, -aslant - height),
    ]


def nearest(box, point: tuple[float, float]) -> tuple[float, float]:
    """The place of a box that is nearest to a point."""
    x, y = point
    return min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)


def apart(box, point: tuple[float, float]) -> float:
    return math.dist(nearest(box, point), point)


def shared_area(one, other) -> float:
    """Of two boxes."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0) * max(height, 0)


def label_ends(axis, labels: list[Label]) -> None:
    """Writes each label to the right of its point, the end of a line, and moves labels apart where
    they would touch. The axis must have its final place and limits."""
    height = pixels(11.5)
    heights = [axis.transData.transform((label.x, label.y))[1] for label in labels]
    for label, wanted, y in zip(labels, heights, spread(heights, height), strict=True):
        axis.annotate(
            label.text,
            (label.x, label.y),
            xytext=(GAP, (y - wanted) * 72 / DPI),
            textcoords="offset points",
            va="center",
            color=label.color,
            fontsize=9.5,
        )


def spread(wanted: list[float], gap: float) -> list[float]:
    """Numbers near the wanted ones, in the same order, which are at least `gap` apart."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    clusters = []  # of neighbours that touch: [their indices, their centre]
    for i in order:
        clusters.append([[i], wanted[i]])
        while len(clusters) > 1:
            (below, low), (above, high) = clusters[-2:]
            if high - low >= gap * (len(below) + len(above)) / 2:
                break
            members = below + above
            offsets = [wanted[j] - gap * k for k, j in enumerate(members)]
            centre = sum(offsets) / len(offsets) + gap * (len(members) - 1) / 2
            clusters[-2:] = [[members, centre]]
    placed = [0.0] * len(wanted)
    for members, centre in clusters:
        for k, j in enumerate(members):
            placed[j] = centre + gap * (k - (len(members) - 1) / 2)
    return placed


def settle(figure) -> None:
    """Gives the axes their final places, so that labels can be placed among them."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


# ---------------------------------------------------------------------------- cells of the tables

# As a table's name has it -> as a picture has it.
MODEL_NAMES = {"smollm2": "SmolLM2-135M", "nano": "nano", "qwen": "Qwen2.5-Coder-1.5B"}
SHAPE_NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-2-7b": "Llama-2-7B",
    "qwen2.5-7b": "Qwen2.5-7B",
}


def model_name(stem: str) -> str:
    """eval-qwen -> Qwen2.5-Coder-1.5B."""
    model = stem.partition("-")[2]
    return MODEL_NAMES.get(model, model)


def number(row: dict[str, str], column: str) -> float:
    """A figure that a row must have."""
    return float(row[column])


def optional_number(row: dict[str, str], column: str) -> float | None:
    """None where the row has no figure, or the table no such column."""
    text = row.get(column)
    return float(text) if text else None


def share_of_dense(rows: Table, row: dict[str, str]) -> float:
    """Bytes a token that a row stores on the GPU, in per cent of dense's."""
    return 100 * number(row, "bytes/token") / number(dense_row(rows), "bytes/token")


def dense_row(rows: Table) -> dict[str, str]:
    for row in rows:
        if row["method"] == "dense":
            return row
    raise UserError("the table has no row of dense")


# -------------------------------------------------------------------------------- tokens that fit

FIT_CASES = (
    ("llama-3.1-8b", 24),
    ("llama-3.1-8b", 80),
    ("qwen2.5-7b", 24),
)
FIT_METHODS = ("dense", "fp8", "kivi", "elitekv", "lrqk", "sals")


def draw_fit(figure, tables: dict[str, Table]) -> None:
    """Thousands of tokens that fit beside the weights, by the caches' formulas."""
    figure.set_size_inches(WIDTH, 2.7)
    axes = figure.subplots(1, len(FIT_CASES), sharey=True)
    for axis, (shape, gigabytes) in zip(axes, FIT_CASES, strict=True):
        config = FIT_SHAPES[shape]
        axis.set_title(f"{SHAPE_NAMES[shape]}, {gigabytes} GB")
        for i, method in enumerate(FIT_METHODS):
            if method == "elitekv" and config.qkv_bias:
                axis.text(0, i, " cannot be trained here", va="center", color="0.4")
                continue
            (tokens,) = tokens_that_fit(config, method, [gigabytes * GIGABYTE])
            axis.barh(i, tokens, 0.72, color=LOOKS[method].color)
            axis.text(tokens, i, f" {tokens // 1000:,}K", va="center")
        axis.set_xlim(0, 1.32 * axis.dataLim.x1)
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="y", length=0)
    names = [LOOKS[method].name for method in FIT_METHODS]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()


# ------------------------------------------------------------------------------- bytes of a token

KEYS = "keys, or what stands for them"
VALUES = "values"
BOTH = "keys and values in one"
SCALES = "scales and minima"
EXACT = "recent and fetched tokens in full"
TABLES = "tables"
HOST = "keys and values in host memory"
PART_COLORS = {
    KEYS: BLUE,
    VALUES: ORANGE,
    BOTH: GREEN,
    SCALES: BLACK,
    EXACT: PURPLE,
    TABLES: GREY,
    HOST: "white",
}
BYTES_METHODS = ("dense", "loki", "fp8", "kivi", "elitekv", "lrqk", "sals")
BYTES_SHAPE = "llama-3.1-8b"
BYTES_LENGTH = 32768


def bytes_by_part(config: ModelConfig, method: str, length: int) -> dict[str, float]:
    """Bytes of a token and a layer, by what they are for: the buffers of empty caches for one
    sequence of `length` tokens, in the mean of the layers."""
    model = empty_model(config, torch.bfloat16)
    settings = settings_from(method, {})
    artifact = load_artifact(config, method, model)
    caches = generate.plan_caches(model, method, settings, artifact, length)
    parts = dict.fromkeys(PART_COLORS, 0.0)
    for cache in caches:
        for name, buffer in cache.named_buffers():
            parts[part_of(cache, name)] += buffer.nbytes / length / len(caches)
    return parts


def part_of(cache: Cache, name: str) -> str:
    """What a cache's buffer is for, by its name: that of its store, a point, and its own."""
    store, _, buffer = name.rpartition(".")
    if buffer in ("scale", "min_and_scale"):
        return SCALES
    if store.startswith("exact") or store.endswith("ring") or buffer == "hot_vectors":
        return EXACT
    if store and isinstance(cache.get_submodule(store), HostStore):
        return HOST
    if store == "values":
        return VALUES
    if store == "vectors" or (store == "latents" and not hasattr(cache, "values")):
        return BOTH
    if store in ("keys", "latents") or buffer == "a_k":
        return KEYS
    return TABLES


def draw_bytes(figure, tables: dict[str, Table]) -> None:
    """What each method stores of a token, stacked."""
    figure.set_size_inches(WIDTH, 3.5)
    axis = figure.subplots()
    dense = None
    for i, method in enumerate(BYTES_METHODS):
        parts = bytes_by_part(FIT_SHAPES[BYTES_SHAPE], method, BYTES_LENGTH)
        on_gpu = sum(nbytes for part, nbytes in parts.items() if part != HOST)
        dense = dense or on_gpu
        left = 0.0
        for part, nbytes in parts.items():
            if not nbytes:
                continue
            edge = {"edgecolor": "0.5", "hatch": "////", "lw": 0.6} if part == HOST else {}
            axis.barh(i, nbytes, 0.68, left=left, color=PART_COLORS[part], **edge)
            left += nbytes
        total = f"  {on_gpu:,.0f} ({100 * on_gpu / dense:.0f} %)"
        if parts[HOST]:
            total += f", and {parts[HOST]:,.0f}"
        axis.text(left, i, total, va="center")
    names = [LOOKS[method].name for method in BYTES_METHODS]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set_xlim(0, 6350)
    axis.set_xticks(range(0, 5001, 1000))
    axis.set_xlabel("bytes per token and layer")
    axis.set_title(
        f"{SHAPE_NAMES[BYTES_SHAPE]}, sequences of {BYTES_LENGTH} tokens, mean of the layers",
        pad=42,
    )
    name_parts(axis)


def name_parts(axis) -> None:
    """The names of the parts above the bars, in two lines, each after a square of its colour."""
    for i, (part, color) in enumerate(PART_COLORS.items()):
        x = (0.0, 0.33, 0.54, 0.77)[i % 4]
        y = 1.13 - 0.08 * (i // 4)
        hatch = {"hatch": "//////", "edgecolor": "0.5"} if part == HOST else {"edgecolor": color}
        axis.scatter(
            [x + 0.008],
            [y],
            s=50,
            marker="s",
            color=color,
            lw=0.6,
            clip_on=False,
            transform=axis.transAxes,
            **hatch,
        )
        axis.text(x + 0.022, y - 0.004, part, transform=axis.transAxes, va="center", fontsize=9.5)


# ------------------------------------------------------------------------------------- throughput


def request_rate(row: dict[str, str], n_written: int) -> float:
    """Tokens a second of whole requests that write so many tokens each: all prompts are read, one
    after another, and then all sequences are decoded together."""
    measured = optional_number(row, f"request_rate_{n_written}")
    if measured is not None:
        return measured
    figures = {name: number(row, name) for name in ("batch", "ms", "read_s")}
    return bench.request_rate(figures, n_written)


THROUGHPUT_TICKS = ("1024", "4096", "steps alone")


def draw_throughput(figure, tables: dict[str, Table]) -> None:
    """Tokens a second relative to dense: of whole requests, and of steps alone. A panel for each
    length of prompts."""
    rows = tables["throughput"]
    lengths = sorted({int(row["length"]) for row in rows})
    figure.set_size_inches(WIDTH, 4.0)
    axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    ends = []
    for axis, length in zip(axes, lengths, strict=True):
        own = [row for row in rows if int(row["length"]) == length]
        dense = rates_of(dense_row(own))
        labels = []
        for row in own:
            look = look_of(row["method"])
            times = [a / b for a, b in zip(rates_of(row), dense, strict=True)]
            order = 3 if row["method"] == "sals" else 2
            axis.plot(
                range(3), times, color=look.color, marker=look.mark, zorder=order, clip_on=False
            )
            name = look.name if look.name == "dense" else f"{look.name} {times[-1]:.2g}"
            labels.append(Label(name, 2, times[-1], look.ink()))
        ends.append(labels)
        axis.set_title(f"after {length:,} tokens")
        axis.set_yscale("log", base=2)
        axis.set_xticks(range(3), THROUGHPUT_TICKS)
        axis.set_xlim(-0.15, 3.7)
        axis.grid(axis="y")
    axes[0].set_yticks([0.25, 0.5, 1, 2, 4, 8])
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("tokens a second, times dense")
    figure.supxlabel("tokens that each sequence writes", fontsize=10.5)
    settle(figure)
    for axis, labels in zip(axes, ends, strict=True):
        label_ends(axis, labels)


def rates_of(row: dict[str, str]) -> tuple[float, float, float]:
    """As THROUGHPUT_TICKS has them."""
    return request_rate(row, 1024), request_rate(row, 4096), number(row, "tokens_per_s")


# --------------------------------------------------------------- what an evaluation finds, by bytes

LARGEST_KL = 1.0  # rows above it are left out
KL_COLUMN = "kl wikitext2_4096"


class Mark(NamedTuple):
    """A row as a point: a figure against the bytes that the method stores."""

    label: str
    bytes_share: float  # per cent of dense's
    y: float


def draw_quality(figure, tables: dict[str, Table]) -> None:
    """KL, facts found and, where there is a table of tasks, right tool calls and code: each against
    the bytes that are stored."""
    evaluation, *others = tables.values()
    tasks = others[0] if others else []
    kl_column = KL_COLUMN if KL_COLUMN in evaluation[0] else first_column(evaluation, "kl ")
    rows = shown_rows(evaluation, kl_column)
    names = names_of([row["method"] for row in evaluation])
    task_names = names_of([row["method"] for row in tasks])
    panels = []  # (title, marks, their names)
    if kl_column:
        panels.append((kl_title(kl_column), kl_marks(rows, kl_column), names))
    if fact_columns(rows):
        panels.append(("facts found, % of what dense finds", fact_marks(rows), names))
    for column, title in (("tools", "tool calls"), ("code", "functions")):
        if tasks and column in tasks[0]:
            marks = column_marks(shown_rows(tasks), column)
            panels.append((f"{title} that are right, %", marks, task_names))
    if not panels:
        raise UserError("the table has no KL and no facts")

    n_lines = -(-len(panels) // 2)
    figure.set_size_inches(WIDTH, 4.9 * n_lines)
    axes = figure.subplots(n_lines, min(2, len(panels)), squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    axes = axes[: len(panels)]
    for axis, (title, marks, _) in zip(axes, panels, strict=True):
        axis.set_title(title)
        axis.set_xlabel("bytes on the GPU, % of dense's")
        axis.grid()
        draw_marks(axis, marks)
    if kl_column:
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter("{x:g}")
    settle(figure)
    for axis, (_, marks, panel_names) in zip(axes, panels, strict=True):
        label_marks(axis, marks, panel_names)


def shown_rows(rows: Table, kl_column: str | None = None) -> Table:
    """The first row of each method, and all of CURVES, but none whose KL is too large."""
    shown = []
    seen = set()
    for row in rows:
        method = split_label(row["method"])[0]
        if kl_column and (optional_number(row, kl_column) or 0) > LARGEST_KL:
            continue
        if method in CURVES or method not in seen:
            shown.append(row)
        seen.add(method)
    return shown


def first_column(rows: Table, start: str) -> str | None:
    """The first column whose name begins so."""
    for column in rows[0]:
        if column.startswith(start):
            return column
    return None


def kl_title(column: str) -> str:
    """kl wikitext2_4096 -> KL to dense after 4096 tokens, nats."""
    n_tokens = column.rpartition("_")[2]
    after = f" after {n_tokens} tokens" if n_tokens.isdigit() else ""
    return f"KL to dense{after}, nats"


def kl_marks(rows: Table, column: str) -> list[Mark]:
    """dense, whose KL is 0, has no place on a logarithmic axis."""
    marks = []
    for row in rows:
        kl = optional_number(row, column)
        if kl:
            marks.append(Mark(row["method"], share_of_dense(rows, row), kl))
    return marks


def fact_columns(rows: Table) -> list[str]:
    """Tasks in which dense finds something, in the shortest texts of the table: every row has
    these."""
    dense = dense_row(rows)
    columns = []
    for column in dense:
        if column.startswith(tuple(TASKS)) and (optional_number(dense, column) or 0) > 0:
            columns.append(column)
    # evaluate writes "single 4096"; the tables of docs/ have "single_4096".
    lengths = [int(re.search(r"\d+$", column)[0]) for column in columns]
    return [column for column, n in zip(columns, lengths, strict=True) if n == min(lengths)]


def fact_marks(rows: Table) -> list[Mark]:
    """The mean over the tasks of what is found, in per cent of what dense finds."""
    dense = dense_row(rows)
    marks = []
    for row in rows:
        shares = []
        for column in fact_columns(rows):
            found = optional_number(row, column)
            if found is not None:
                shares.append(100 * found / number(dense, column))
        if shares:
            marks.append(Mark(row["method"], share_of_dense(rows, row), float(np.mean(shares))))
    return marks


def column_marks(rows: Table, column: str) -> list[Mark]:
    marks = []
    for row in rows:
        score = optional_number(row, column)
        if score is not None:
            marks.append(Mark(row["method"], share_of_dense(rows, row), score))
    return marks


def curves_of(marks: list[Mark]) -> list[list[Mark]]:
    """The marks that a line joins, by rising bytes: of one method, and of one variant of it."""
    curves = {}
    for mark in marks:
        if split_label(mark.label)[0] in CURVES:
            curves.setdefault(split_variant(mark.label)[0], []).append(mark)
    return [sorted(curve, key=lambda mark: mark.bytes_share) for curve in curves.values()]


def draw_marks(axis, marks: list[Mark]) -> None:
    """Points, and the lines of curves_of. The mark of a paper's variant is hollow."""
    for curve in curves_of(marks):
        xs = [mark.bytes_share for mark in curve]
        ys = [mark.y for mark in curve]
        axis.plot(xs, ys, color=look_of(curve[0].label).color, lw=1.2, zorder=2)
    for mark in marks:
        look = look_of(mark.label)
        fill = "white" if "paper" in split_label(mark.label)[1] else look.color
        axis.plot(
            mark.bytes_share,
            mark.y,
            look.mark,
            color=look.color,
            markerfacecolor=fill,
            markersize=5 if look.color == GREY else 7.5,
            zorder=2.5 if look.color == GREY else 3,
        )
    axis.set_xscale("log", base=2)
    ticks = [12.5, 25, 50, 100]
    axis.set_xlim(8.5, 165)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.margins(y=0.08)


def label_marks(axis, marks: list[Mark], names: dict[str, str]) -> None:
    """The name of each mark; those of the methods with colours choose their places first."""
    avoid = []
    for curve in [*curves_of(marks), *([mark] for mark in marks)]:
        avoid += points_along(axis, curve)
    labels = []
    for mark in sorted(marks, key=lambda mark: look_of(mark.label).color == GREY):
        look = look_of(mark.label)
        labels.append(Label(names[mark.label], mark.bytes_share, mark.y, look.ink()))
    place_labels(axis, labels, avoid)


def points_along(axis, curve: list[Mark]) -> list[tuple[float, float]]:
    """The curve's marks, and points on the straight lines between them, which labels avoid."""
    to_pixels = axis.transData
    corners = to_pixels.transform([(mark.bytes_share, mark.y) for mark in curve])
    points = [corners[0]]
    for start, stop in zip(corners, corners[1:], strict=False):
        n_parts = max(1, round(math.dist(start, stop) / pixels(6)))
        points += [start + (stop - start) * i / n_parts for i in range(1, n_parts + 1)]
    return [tuple(to_pixels.inverted().transform(point)) for point in points]


# ------------------------------------------------------------------------------------------ steps


def draw_steps(figure, tables: dict[str, Table]) -> None:
    """Milliseconds of a step by the tokens of each sequence, and where SALS becomes the faster: a
    panel for each model and number of sequences of which dense and another method have several
    lengths."""
    panels = {}  # (model, batch) -> method -> length -> ms
    for row in tables["steps"]:
        lines = panels.setdefault((row["model"], int(row["batch"])), {})
        lines.setdefault(row["method"], {})[int(row["length"])] = number(row, "ms")
    for key, lines in list(panels.items()):
        drawn = [method for method, times in lines.items() if len(times) > 1]
        if "dense" not in drawn or len(drawn) < 2:
            del panels[key]
    if not panels:
        raise UserError(
            "the table has no model of which dense and another method have steps at two lengths"
        )

    n_lines = -(-len(panels) // 2)
    figure.set_size_inches(WIDTH if len(panels) > 1 else 0.75 * WIDTH, 4.0 * n_lines)
    axes = figure.subplots(n_lines, min(2, len(panels)), squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    axes = axes[: len(panels)]
    ends = []
    for axis, ((model, batch), lines) in zip(axes, panels.items(), strict=True):
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        axis.set_title(f"{SHAPE_NAMES.get(model, model)}, {sequences}")
        axis.set_ylabel("ms a step")
        ends.append(draw_step_lines(axis, lines))
    settle(figure)
    for axis, labels in zip(axes, ends, strict=True):
        label_ends(axis, labels)


def draw_step_lines(axis, lines: dict[str, dict[int, float]]) -> list[Label]:
    """Draws a line for each method with several lengths. Returns the labels of their ends."""
    labels = []
    lengths = set()
    for times in lines.values():
        lengths.update(times)
    lengths = sorted(lengths)
    for method, times in lines.items():
        if len(times) < 2:
            continue
        look = look_of(method)
        xs = sorted(times)
        axis.plot(xs, [times[x] for x in xs], color=look.color, marker=look.mark)
        labels.append(Label(f"{look.name} {times[xs[-1]]:.1f}", xs[-1], times[xs[-1]], look.ink()))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axis.minorticks_off()
    axis.set_xlim(lengths[0] * 0.85, lengths[-1] * (lengths[-1] / lengths[0]) ** 0.4)
    axis.set_ylim(0, 1.08 * axis.dataLim.y1)
    axis.set_xlabel("tokens of each sequence")
    axis.grid(axis="y")
    length = break_even(lines["dense"], lines.get("sals", {}))
    if length:
        axis.axvline(length, color="0.5", lw=0.8, linestyle=":")
        is_left = length**2 < lengths[0] * lengths[-1]
        text = f" from about {length / 1024:.0f}K tokens \n on, SALS is faster "
        axis.text(
            length,
            0.04 * axis.get_ylim()[1],
            text,
            ha="left" if is_left else "right",
            fontsize=9.5,
            color="0.25",
        )
    return labels


def break_even(dense: dict[int, float], other: dict[int, float]) -> float | None:
    """The length from which on another method's step is shorter than dense's, or None: where the
    lines of the picture cross, between two lengths that were both measured."""
    lengths = sorted(dense.keys() & other.keys())
    for left, right in zip(lengths, lengths[1:], strict=False):
        lead = other[left] - dense[left]
        behind = dense[right] - other[right]
        if lead > 0 and behind > 0:
            part = lead / (lead + behind)
            return left * (right / left) ** part
    return None


# ---------------------------------------------------------------------- where a step's time goes


def draw_operations(figure, tables: dict[str, Table]) -> None:
    """Milliseconds of a step of SALS, where the table of steps has it; then microseconds of each
    operator in a layer's attention, beside those of a copy of as many bytes, for the largest size
    that the table has."""
    rows = [row for row in tables["speed"] if row["method"] == "sals"]
    if not rows:
        raise UserError("the table has no row of sals")
    sizes = [(int(row["batch"]) * int(row["length"]), row["model"], row["batch"]) for row in rows]
    largest = max(sizes)
    rows = [row for row, size in zip(rows, sizes, strict=True) if size == largest]
    shape = rows[0]["model"]
    step_ms = step_ms_of(tables.get("steps", []), rows[0])
    if step_ms is not None and shape in SHAPES:
        figure.set_size_inches(WIDTH, 0.42 * len(rows) + 2.3)
        top, axis = figure.subplots(2, 1, height_ratios=(1, len(rows)))
        draw_step(top, step_ms, number(rows[0], "us"), SHAPES[shape].n_layers)
    else:
        figure.set_size_inches(WIDTH, 0.42 * len(rows) + 1.3)
        axis = figure.subplots()
    names = []
    for i, row in enumerate(rows):
        us = number(row, "us")
        axis.barh(i, us, 0.68, color=SKY if row["operation"] == "attention" else BLUE)
        limit = number(row, "limit_us")
        axis.plot([limit, limit], [i - 0.42, i + 0.42], color=BLACK, lw=1.5)
        axis.text(max(us, limit), i, f"  {us:.1f}", va="center")
        names.append("all together" if row["operation"] == "attention" else row["operation"])
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, 1.12 * axis.dataLim.x1)
    axis.set_xlabel("us a layer (black: a copy of as many bytes)")
    model = SHAPE_NAMES.get(shape, shape)
    tokens = f"{rows[0]['batch']} x {int(rows[0]['length']):,} tokens"
    axis.set_title(f"SALS, one layer's attention: {model}, {tokens}")


def step_ms_of(steps: Table, wanted: dict[str, str]) -> float | None:
    """The milliseconds of a step of the wanted row's method and size; None if it was not timed."""
    for row in steps:
        if all(row[name] == wanted[name] for name in ("method", "model", "batch", "length")):
            return number(row, "ms")
    return None


def draw_step(axis, step_ms: float, layer_us: float, n_layers: int) -> None:
    """A bar of a whole step: the attention of the layers that select, and the rest."""
    n_skipped = len(skipped_layers(settings_from("sals", {}), n_layers))
    selecting_ms = (n_layers - n_skipped) * layer_us / 1000
    parts = (
        (f"{n_layers - n_skipped} layers' attention", selecting_ms, SKY),
        (f"weights, and {n_skipped} layers in other codes", step_ms - selecting_ms, "0.85"),
    )
    left = 0.0
    for name, ms, color in parts:
        axis.barh(0, ms, 0.7, left=left, color=color)
        axis.text(left + ms / 2, 0, f"{name}: {ms:.1f}", ha="center", va="center", fontsize=9.5)
        left += ms
    axis.set_yticks([])
    axis.set_xlim(0, left)
    axis.set_title(f"a step: {step_ms:.1f} ms")


# -------------------------------------------------------------------------------- lines of methods

FEW = ("sals", "lrqk", "loki", "fdc", "kivi", "h2o")  # more lines could not be told apart


def draw_lines(axis, rows: Table, columns: list[str], xs: list[int]) -> list[Label]:
    """A line for each of FEW that has a figure in all these columns: the first such row counts.
    Returns the labels of their ends."""
    labels = []
    drawn = set()
    for row in rows:
        method = split_label(row["method"])[0]
        is_measured = all(row[column] for column in columns)
        if method not in FEW or method in drawn or not is_measured:
            continue
        drawn.add(method)
        look = look_of(row["method"])
        ys = [number(row, column) for column in columns]
        axis.plot(xs, ys, color=look.color, marker=look.mark, markersize=4.5)
        labels.append(Label(look.name, xs[-1], ys[-1], look.ink()))
    return labels


# ---------------------------------------------------------------------------------------- lengths


def draw_lengths(figure, tables: dict[str, Table]) -> None:
    """KL by how many tokens a prompt has: a line for each of FEW."""
    ((stem, rows),) = tables.items()
    places = []
    for column in rows[0]:
        if column.startswith("kl wikitext2_") and not column.endswith("±"):
            places.append(column)
    if not places:
        raise UserError("the table has no KL on wikitext2")
    lengths = [int(column.partition("_")[2]) for column in places]
    figure.set_size_inches(0.62 * WIDTH, 3.8)
    axis = figure.subplots()
    labels = draw_lines(axis, rows, places, lengths)
    axis.set_title(model_name(stem))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(0.9 * lengths[0], 2.1 * lengths[-1])
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y")
    axis.set_ylabel("KL to dense, nats")
    axis.set_xlabel("tokens of the prompt")
    settle(figure)
    label_ends(axis, labels)


# ------------------------------------------------------------------------------------------ drift


def draw_drift(figure, tables: dict[str, Table]) -> None:
    """KL by how many tokens have been written: a panel for each table, a line for each of FEW."""
    figure.set_size_inches(WIDTH, 3.8)
    axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    ends = []
    for axis, (stem, rows) in zip(axes, tables.items(), strict=True):
        places = [column for column in rows[0] if column.startswith("kl@")]
        xs = [int(column.partition("@")[2]) for column in places]
        ends.append(draw_lines(axis, rows, places, xs))
        axis.set_title(model_name(stem))
        axis.set_yscale("log")
        axis.set_xlim(0, 1.33 * xs[-1])
        axis.set_xticks(xs[1::2])
        axis.tick_params(axis="x", labelsize=9.5)
        axis.grid(axis="y")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("KL to dense, nats")
    figure.supxlabel("tokens written", fontsize=10.5)
    settle(figure)
    for axis, labels in zip(axes, ends, strict=True):
        label_ends(axis, labels)


# ------------------------------------------------------------------------------------------ ranks


def draw_ranks(figure, tables: dict[str, Table]) -> None:
    """The dims of each layer's keys that hold 90 % of the energy, before and after RoPE."""
    figure.set_size_inches(0.8 * WIDTH if len(tables) == 1 else WIDTH, 3.2)
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    ends = []
    for axis, (stem, rows) in zip(axes, tables.items(), strict=True):
        layers = [int(row["layer"]) for row in rows]
        labels = []
        for column, name, color, mark in (
            ("post", "after RoPE", VERMILION, "o"),
            ("pre", "before RoPE", BLUE, "s"),
        ):
            ranks = [number(row, column) for row in rows]
            look = Look(name, color, mark)
            axis.plot(layers, ranks, color=color, marker=mark, markersize=4.5)
            labels.append(Label(name, layers[-1], ranks[-1], look.ink()))
        ends.append(labels)
        axis.set_title(model_name(stem))
        axis.set_xlim(-0.5, layers[-1] * (1.2 if len(tables) == 1 else 1.4))
        axis.set_xticks([layer for layer in layers if layer % 5 == 0])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("layer")
        axis.grid(axis="y")
    axes[0].set_ylabel("dims that hold 90 % of the energy")
    settle(figure)
    for axis, labels in zip(axes, ends, strict=True):
        label_ends(axis, labels)


# --------------------------------------------------------------------------------------- overview

OVERVIEW_KL = {"eval-smollm2": "o", "eval-qwen": "D"}  # tables of the right panel, and their marks
OVERVIEW_ORDER = (
    "dense",
    "loki",
    "fp8 centre",
    "palu",
    "fp8",
    "fdc",
    "kivi",
    "elitekv",
    "sals 2048",
    "sals 1024",
    "sals",
)


def draw_overview(figure, tables: dict[str, Table]) -> None:
    """Left tokens a second, with as many sequences as fit. Right the KL of evaluations."""
    figure.set_size_inches(WIDTH, 4.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    draw_rates(left, tables["throughput"])
    draw_models(right, tables)
    settle(figure)
    label_models(right, tables)


def draw_rates(axis, rows: Table) -> None:
    """Tokens a second of steps, relative to dense: a bar for each method, in a group for each
    length."""
    y = 0.0
    ticks = []
    names = []
    for length in sorted({int(row["length"]) for row in rows}):
        own = [row for row in rows if int(row["length"]) == length]
        own.sort(key=lambda row: overview_place(row["method"]))
        dense_rate = number(dense_row(own), "tokens_per_s")
        axis.text(0, y + 0.28, f"{length:,} tokens a sequence", weight="bold", fontsize=9.5)
        for row in own:
            y += 1
            rate = number(row, "tokens_per_s")
            times = rate / dense_rate
            look = look_of(row["method"])
            axis.barh(y, times, 0.78, color=look.color)
            text = f" {times:.2g} \u00d7 ({rate:,.0f})"
            axis.text(times, y, text, va="center", fontsize=9.5)
            ticks.append(y)
            names.append(f"{look.name} \u00d7 {row['batch']}")
        y += 1.5
    axis.set_yticks(ticks, names, fontsize=9.5)
    axis.set_ylim(y - 0.7, -0.5)
    axis.set_xlim(0, 1.5 * axis.dataLim.x1)
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title("tokens a second, times dense")


def overview_place(method: str) -> int:
    """Methods that OVERVIEW_ORDER does not name stand last."""
    if method in OVERVIEW_ORDER:
        return OVERVIEW_ORDER.index(method)
    return len(OVERVIEW_ORDER)


def overview_marks(tables: dict[str, Table]) -> dict[str, list[tuple[str, Mark]]]:
    """The KL of each method's first settings: method -> (its table, the mark)."""
    marks = {}
    for stem in OVERVIEW_KL:
        seen = set()
        for row in tables[stem]:
            method = split_label(row["method"])[0]
            kl = optional_number(row, KL_COLUMN)
            if method not in seen and kl and kl < LARGEST_KL:
                mark = Mark(row["method"], share_of_dense(tables[stem], row), kl)
                marks.setdefault(method, []).append((stem, mark))
            seen.add(method)
    return marks


def draw_models(axis, tables: dict[str, Table]) -> None:
    """KL against bytes: a mark for each table, and a line between a method's marks."""
    for marks in overview_marks(tables).values():
        look = look_of(marks[0][1].label)
        is_grey = look.color == GREY
        xs = [mark.bytes_share for _, mark in marks]
        ys = [mark.y for _, mark in marks]
        if not is_grey:
            axis.plot(xs, ys, color=look.color, zorder=2)
        for stem, mark in marks:
            axis.plot(
                mark.bytes_share,
                mark.y,
                OVERVIEW_KL[stem],
                zorder=2 if is_grey else 3,
                color="0.75" if is_grey else look.color,
                markersize=5 if is_grey else 8,
            )
    axis.set_yscale("log")
    axis.set_ylim(0.0014, 2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlim(0, 130)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel("bytes on the GPU, % of dense's")
    axis.grid()
    axis.set_title("KL to dense, nats")
    axis.axvline(100, 0, 0.9, color=BLACK, lw=0.9, linestyle=":", zorder=1)


def label_models(axis, tables: dict[str, Table]) -> None:
    """The method's name at one of its marks, and the model's at the marks of SALS."""
    marks = overview_marks(tables)
    avoid = []
    labels = []
    for method, found in marks.items():
        avoid += points_along(axis, [mark for _, mark in found])
        look = look_of(method)
        if look.color != GREY:
            name = "LRQK, and host memory" if method == "lrqk" else look.name
            widest = max(found, key=lambda pair: pair[1].bytes_share)[1]
            labels.append(Label(name, widest.bytes_share, widest.y, look.ink()))
    labels.append(Label("dense: KL 0", 100, 0.0016, BLACK))
    avoid += [(100, kl) for kl in np.geomspace(0.002, 1, 60)]  # the dotted line
    place_labels(axis, labels, avoid)
    # The models' names, each after its mark.
    for i, (stem, mark) in enumerate(OVERVIEW_KL.items()):
        name = model_name(stem)
        x = 0.04 + 0.38 * i
        axis.plot(x, 0.965, mark, color="0.25", transform=axis.transAxes, markersize=6)
        axis.text(
            x + 0.03, 0.963, name, transform=axis.transAxes, va="center", fontsize=9.5, color="0.25"
        )


# --------------------------------------------------------------------------------- the command line


class Picture(NamedTuple):
    """A picture, and the tables that it is drawn from, by their names without .csv."""

    name: str
    draw: Callable  # of a figure and the tables, by name
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()  # drawn, too, where they are there


def pictures_of(folder: Path) -> list[Picture]:
    """All pictures, of a folder's tables."""
    pictures = [
        Picture("overview", draw_overview, needs=("throughput", *OVERVIEW_KL)),
        Picture("fit", draw_fit),
        Picture("bytes", draw_bytes),
        Picture("throughput", draw_throughput, needs=("throughput",)),
        Picture("steps", draw_steps, needs=("steps",)),
        Picture("operations", draw_operations, needs=("speed",), takes=("steps",)),
        Picture("lengths", draw_lengths, needs=("lengths-qwen",)),
        Picture("drift", draw_drift, needs=stems(folder, "drift-*")),
        Picture("ranks", draw_ranks, needs=stems(folder, "ranks-*")),
    ]
    for stem in stems(folder, "eval-*"):
        tasks = stem.replace("eval", "tasks", 1)
        pictures.append(Picture(stem, draw_quality, needs=(stem,), takes=(tasks,)))
    return pictures


def stems(folder: Path, pattern: str) -> tuple[str, ...]:
    """Names of a folder's files without their suffix, those of MODEL_NAMES first. If there are
    none, the name without its star."""
    found = sorted(path.stem for path in folder.glob(f"{pattern}.csv"))
    known = [pattern.replace("*", model) for model in MODEL_NAMES]
    ordered = [stem for stem in known if stem in found]
    ordered += [stem for stem in found if stem not in known]
    return tuple(ordered) or (pattern,)


def read_table(path: Path) -> Table:
    rows = list(csv.DictReader(generate.read_text(path).splitlines()))
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def draw_picture(picture: Picture, folder: Path):
    """The picture as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = {}
    for stem in (*picture.needs, *picture.takes):
        path = folder / f"{stem}.csv"
        if stem in picture.needs or path.exists():
            tables[stem] = read_table(path)
    figure = Figure(layout="constrained", dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)  # which says how large a text is
    try:
        picture.draw(figure, tables)
    except (UserError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        names = ", ".join(f"{stem}.csv" for stem in tables) or "no table"
        raise UserError(f"{picture.name}: it cannot be drawn from {names} ({error})") from None
    return figure


def save_figure(figure, path: Path) -> None:
    """Writes a figure as a PNG, in the place of an older one, and prints its path."""
    with replacing_file(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})
    print(path)


def run(args: argparse.Namespace) -> None:
    try:
        from matplotlib import rc_context
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    folder = args.tables or DOCS
    pictures = pictures_of(folder)
    names = [picture.name for picture in pictures]
    for name in args.picture:
        if name not in names:
            raise UserError(f"no picture {name!r}; the pictures are: {', '.join(names)}")
    if args.picture:
        pictures = [picture for picture in pictures if picture.name in args.picture]
    faults = []
    with ProgressLine("pictures", len(pictures)) as progress, rc_context(STYLE):
        for picture in pictures:
            missing = [s for s in picture.needs if not (folder / f"{s}.csv").is_file()]
            progress.clear()
            if missing:
                print(f"{picture.name}: left out, as there is no {missing[0]}.csv", file=sys.stderr)
            else:
                try:
                    figure = draw_picture(picture, folder)
                except UserError as error:  # the others are drawn all the same
                    faults.append(str(error))
                else:
                    save_figure(figure, args.out / f"{picture.name}.png")
            progress.tick()
    if faults:
        raise UserError("; ".join(faults))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.option("--out", writable_folder, ".", "folder of the pictures", metavar="FOLDER")
    about = "folder of the tables (default: docs/)"
    parser.option("--tables", Path, None, about, metavar="FOLDER")
    about = "which pictures, by their names (default: all)"
    parser.option("--picture", str, [], about, nargs="+", metavar="NAME")
    return parser.parse_args(argv)


def main() -> None:
    run(parse_args(sys.argv[1:]))


if __name__ == "__main__":
    generate.run_command(main)
