"""Drawings of docs/concepts.md as SVG: a request, a sample, and who waits for whom in each mode.

Colours are those of the site's theme where there is one, and black on white elsewhere. A text that does not fit its
box is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

FOREGROUND = "var(--md-default-fg-color,#222)"
FAINT = "var(--md-default-fg-color--light,#666)"
BACKGROUND = "var(--md-default-bg-color,#fff)"
ROLLOUT, TRAINING, SCHEDULER, NEUTRAL = "#5c6bc0", "#26a69a", "#ef8f1d", "#8a8a8a"
# The mean width of a character of a sans-serif font, relative to its size.
CHARACTER = 0.54


def drawings() -> Mapping[str, str]:
    """Every drawing by its path below docs/."""
    return {
        "drawings/request.svg": draw_request(),
        "drawings/sample.svg": draw_sample(),
        "drawings/modes.svg": draw_modes(),
    }


@dataclass(slots=True)
class Drawing:
    """Parts of an SVG of a size."""

    width: int
    height: int
    label: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        color: str = FOREGROUND,
        at: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text; ``at`` is its anchor."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{at}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, w: float, h: float, color: str, title: str, lines: Sequence[str] = ()) -> None:
        """A box with a title and lines under it, centred."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{color}" fill-opacity=".15" '
            f'stroke="{color}" stroke-width="1.4"/>'
        )
        heights = [18, *(15 for _ in lines)]
        top = y + (h - sum(heights)) / 2 + 13
        self.fit(title, w, 13)
        self.text(x + w / 2, top, title, at="middle", bold=True)
        for number, line in enumerate(lines):
            self.fit(line, w, 11)
            self.text(x + w / 2, top + 17 + 15 * number, line, size=11, color=FAINT, at="middle")

    def fit(self, words: str, width: float, size: int) -> None:
        """Raise if a text is wider than its box."""
        assert len(words) * size * CHARACTER <= width, f"{words!r} does not fit {width:g}"

    def panel(self, x: float, y: float, w: float, h: float, title: str, color: str) -> None:
        """A dashed frame with a title in its upper right corner."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="9" fill="none" stroke="{color}" '
            'stroke-width="1.2" stroke-dasharray="5 4"/>'
        )
        self.text(x + w - 12, y + 18, title, size=12, color=color, at="end", bold=True)

    def arrow(self, points: Sequence[tuple[float, float]], label: str = "", *, dashed: bool = False) -> None:
        """A line through points with a head at its end, and a label above its middle."""
        path = " ".join(f"{'M' if number == 0 else 'L'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{FOREGROUND}" stroke-width="1.3"{dash} marker-end="url(#head)"/>'
        )
        if label:
            (x1, y1), (x2, y2) = points[len(points) // 2 - 1 : len(points) // 2 + 1]
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label, size=11, color=FAINT, at="middle")

    def bar(self, x: float, y: float, w: float, color: str, words: str = "", *, height: float = 20) -> None:
        """A bar of a timeline."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{height:g}" rx="3" fill="{color}" fill-opacity=".75"/>'
        )
        if words:
            self.fit(words, w, 11)
            self.text(x + w / 2, y + 14, words, size=11, color="#fff", at="middle")

    def wait(self, x: float, y: float, w: float, *, height: float = 20) -> None:
        """A hatched bar: waiting."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{height:g}" rx="3" fill="url(#hatch)" stroke="{NEUTRAL}" '
            'stroke-width=".8"/>'
        )

    def render(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(self.label)}</title><defs>'
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{FOREGROUND}"/></marker>'
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="6" height="6" fill="none"/><rect width="1.6" height="6" fill="{NEUTRAL}" fill-opacity=".6"/>'
            "</pattern></defs>"
            f'<rect width="{self.width}" height="{self.height}" fill="{BACKGROUND}"/>'
        )
        return head + "".join(self.parts) + "</svg>\n"


# -- one request ----------------------------------------------------------------------------


def draw_request() -> str:
    """One POST /generate from the client to the engine and back."""
    d = Drawing(920, 330, "The life of a request: client, HTTP server, engine loop, and back")
    d.box(16, 60, 120, 64, NEUTRAL, "client", ["POST /generate"])
    d.panel(160, 20, 372, 150, "server", SCHEDULER)
    d.box(174, 60, 106, 64, SCHEDULER, "application", ["key, origin", "size, route"])
    d.box(294, 60, 106, 64, SCHEDULER, "endpoint", ["validates", "the body"])
    d.box(414, 60, 106, 64, SCHEDULER, "handler", ["tokenizes", "submits"])
    d.panel(556, 20, 348, 292, "engine, once per step", ROLLOUT)
    d.box(572, 60, 140, 64, ROLLOUT, "queue", ["requests that", "fit are admitted"])
    d.box(748, 60, 140, 64, ROLLOUT, "scheduler", ["tokens, pages,", "prefix cache"])
    d.box(748, 160, 140, 64, ROLLOUT, "forward batch", ["eager, or a", "CUDA graph"])
    d.box(572, 160, 140, 64, ROLLOUT, "sampler", ["token, log-prob,", "version, experts"])
    d.box(294, 232, 226, 56, SCHEDULER, "detokenizer", ["text, stop strings, stream"])
    d.arrow([(136, 92), (172, 92)])
    d.arrow([(280, 92), (292, 92)])
    d.arrow([(400, 92), (412, 92)])
    d.arrow([(520, 92), (570, 92)])
    d.arrow([(712, 92), (746, 92)])
    d.arrow([(818, 124), (818, 158)])
    d.arrow([(748, 192), (714, 192)])
    d.arrow([(642, 160), (642, 142), (780, 142), (780, 126)], dashed=True)
    d.text(700, 137, "next token", size=11, color=FAINT, at="middle")
    d.arrow([(642, 224), (642, 260), (522, 260)])
    d.text(604, 254, "new tokens", size=11, color=FAINT, at="middle")
    d.arrow([(294, 260), (76, 260), (76, 126)])
    d.text(184, 254, "reply, or server-sent events", size=11, color=FAINT, at="middle")
    d.text(572, 292, "New weights are committed between two steps:", size=11, color=FAINT)
    d.text(572, 306, "later tokens carry the new version.", size=11, color=FAINT)
    return d.render()


# -- one sample -----------------------------------------------------------------------------


def draw_sample() -> str:
    """One sample from the data set to the weights it changed."""
    d = Drawing(920, 372, "The life of a sample: prompt, trajectory, group, batch, version")
    d.box(16, 52, 120, 64, NEUTRAL, "data set", ["rows, by epoch", "and order"])
    d.panel(160, 14, 744, 124, "rollout plane", ROLLOUT)
    d.box(176, 52, 128, 64, ROLLOUT, "prompt", ["tokens, rendered", "once; a seed"])
    d.box(330, 52, 140, 64, ROLLOUT, "trajectory", ["spans: log-probs,", "versions, experts"])
    d.box(496, 52, 116, 64, ROLLOUT, "reward", ["as soon as", "it has ended"])
    d.box(638, 52, 116, 64, ROLLOUT, "group", ["all of one", "prompt; filter"])
    d.box(780, 52, 112, 64, ROLLOUT, "samples", ["with their", "advantages"])
    d.panel(160, 156, 744, 92, "scheduler", SCHEDULER)
    d.box(176, 182, 176, 52, SCHEDULER, "admission control", ["(k + 1) x batch slots"])
    d.box(590, 182, 136, 52, SCHEDULER, "batch", ["when it is full"])
    d.box(752, 182, 140, 52, SCHEDULER, "reorder buffer", ["order of tickets"])
    d.panel(160, 266, 744, 92, "training plane", TRAINING)
    d.box(590, 294, 136, 52, TRAINING, "micro-batches", ["packed by length"])
    d.box(412, 294, 152, 52, TRAINING, "loss, gradient", ["parity is measured"])
    d.box(280, 294, 106, 52, TRAINING, "optimizer", ["a new version"])
    d.box(176, 294, 84, 52, TRAINING, "publish", ["to engines"])
    for start, end in ((136, 174), (304, 328), (470, 494), (612, 636), (754, 778)):
        d.arrow([(start, 84), (end, 84)])
    d.arrow([(836, 116), (836, 180)])
    d.arrow([(752, 208), (728, 208)])
    d.arrow([(658, 234), (658, 292)])
    d.arrow([(590, 320), (566, 320)])
    d.arrow([(412, 320), (388, 320)])
    d.arrow([(280, 320), (262, 320)])
    d.arrow([(218, 294), (218, 236)])
    d.text(226, 262, "slots are free again", size=11, color=FAINT)
    d.arrow([(240, 182), (240, 118)])
    d.text(250, 153, "a ticket for the next prompt", size=11, color=FAINT)
    return d.render()


# -- who waits for whom ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Track:
    """Bars of one plane: start, length, words; words None is waiting."""

    name: str
    bars: tuple[tuple[float, float, str | None], ...]


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode: its title, its flags, its two tracks and a line about who waits."""

    title: str
    flags: str
    engine: Track
    trainer: Track
    note: str


MODES = (
    Mode(
        "synchronous",
        "the default",
        Track("engine", ((0, 9, "batch 1"), (9, 4, None), (13, 9, "batch 2"), (22, 4, None))),
        Track("trainer", ((0, 9, None), (9, 4, "train 1"), (13, 9, None), (22, 4, "train 2"))),
        "Each waits for the other: on-policy, and a step is as long as its longest trajectory and the update together.",
    ),
    Mode(
        "over-sampling",
        "--over-sampling-batch-size",
        Track("engine", ((0, 6, "batch 1"), (6, 4, None), (10, 6, "batch 2"), (16, 4, None), (20, 6, "batch 3"))),
        Track("trainer", ((0, 6, None), (6, 4, "train 1"), (10, 6, None), (16, 4, "train 2"), (20, 6, None))),
        "More prompts are started than trained on: nobody waits for the slowest. With --partial-rollout their "
        "tokens stay.",
    ),
    Mode(
        "one step off",
        "--max-weight-staleness 1",
        Track("engine", ((0, 9, "batch 1"), (9, 9, "batch 2"), (18, 8, "batch 3"))),
        Track("trainer", ((0, 9, None), (9, 4, "train 1"), (13, 5, None), (18, 4, "train 2"), (22, 4, None))),
        "The engine goes on while the trainer works: the slower of the two sets the pace.",
    ),
    Mode(
        "fully asynchronous",
        "--max-weight-staleness 4 --reorder-window 16",
        Track("engine", ((0, 26, "trajectories of several batches, without a gap"),)),
        Track(
            "trainer",
            (
                (0, 6, None),
                (6, 4, "train 1"),
                (10, 1, None),
                (11, 4, "train 2"),
                (15, 1, None),
                (16, 4, "train 3"),
                (20, 2, None),
                (22, 4, "train 4"),
            ),
        ),
        "The trainer takes groups as they finish, none more than k versions old; admission stops the engine "
        "before that.",
    ),
)


def draw_modes() -> str:
    """A timeline of both planes for each mode, on devices of their own."""
    left, unit, row = 96, 30, 128
    d = Drawing(920, 20 + row * len(MODES) + 26, "Who waits for whom: engine and trainer over time in four modes")
    for number, mode in enumerate(MODES):
        top = 14 + row * number
        d.text(16, top + 12, mode.title, size=14, bold=True)
        d.text(904, top + 12, mode.flags, size=12, color=FAINT, at="end")
        for line, (track, color) in enumerate(((mode.engine, ROLLOUT), (mode.trainer, TRAINING))):
            y = top + 26 + 30 * line
            d.text(left - 10, y + 15, track.name, size=12, at="end")
            for start, length, words in track.bars:
                x, w = left + unit * start, unit * length - 3
                if words is None:
                    d.wait(x, y, w)
                else:
                    d.bar(x, y, w, color, words)
        d.text(left, top + 98, mode.note, size=11, color=FAINT)
    y = 14 + row * len(MODES)
    d.wait(left, y, 40)
    d.text(left + 48, y + 15, "waits", size=12)
    d.text(
        left + 130,
        y + 15,
        "schematic: time runs to the right; a new version is live at the end of each training bar",
        size=12,
        color=FAINT,
    )
    return d.render()
