"""Draws screenshots/*.svg, and the same as *.png, from real runs, recorded or each in a process of its own that the
dashboard watches.

The views are of the recording of a process that is not well (tests/cbtop/imperfect.py), gpu.svg and gpu_graph.svg of
what was recorded on an H100 (tests/cbtop/h100.py), own_kernels.svg of our own kernels on one
(tests/cbtop/h100_own_kernels.py), devices.svg of the demo, and training*.svg of a model that waits for its data while
it trains. run.svg is `cbtop run` on a Hugging Face model, where transformers is installed.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from cbtop.feeds.feed import Feed
from cbtop.feeds.replay import ReplayFeed
from cbtop.tui.app import CbtopApp
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.views import VIEWS

SIZE = (120, 36)
FIRST_STEP_TIMEOUT_S = 180.0  # the first run writes a model and compiles every kernel
STEPS_BEFORE = 20
RECORDED_S = 10.0
CELL_WIDTH = 12.2  # rich.console.Console.export_svg draws 20 px type, 0.61 em wide
BLANK = "&#160;"
PNG_FONT, PNG_WIDTH, MAX_PNG_BYTES = "DejaVu Sans Mono", 1100, 300_000
FONT_FACES = re.compile(r"@font-face \{.*?\}", re.DOTALL)
TEXT = re.compile(
    r'x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)" textLength="(?P<length>[\d.]+)"(?P<rest>[^>]*)>(?P<blanks>(?:&#160;)+)'
)
WHOLE_TEXT = re.compile(
    r'<text (?P<before>[^>]*)x="(?P<x>[\d.]+)" (?P<between>[^>]*)textLength="[\d.]+"(?P<after>[^>]*)>'
    r"(?P<held>[^<]*)</text>"
)
RUN = re.compile(r"(?:[\u2800-\u28ff])+|(?:&[^;]+;|[^\u2800-\u28ff&])+")
CHARACTER = re.compile(r"&[^;]+;|.")
HERE = Path(__file__).parent
RECORDINGS = HERE.parent / "tests" / "cbtop"

CBTOP = [sys.executable, "-m", "cbtop"]
SLOW_DATA = HERE.parent / "tests" / "real" / "scripts" / "slow_data.py"
UNEDITED = [*CBTOP, "run", "--", sys.executable, str(HERE / "generate.py")]


def main() -> int:
    keys = {view.title.lower(): str(number) for number, view in enumerate(VIEWS, 1)}
    views = {key: name for name, key in keys.items() if name != "devices"}
    asyncio.run(draw_recorded("imperfect.cbtop", 20.0, views))
    asyncio.run(draw_recorded("h100.cbtop", 20.0, {keys["roofline"]: "gpu", keys["graph"]: "gpu_graph"}))
    unfolded = f"{keys['graph']} slash G a t e U p enter l escape" + " up" * 12  # its kernel, and the layer around it
    asyncio.run(draw_recorded("h100_own_kernels.cbtop", 3.0, {unfolded: "own_kernels"}))
    draw([*CBTOP, "demo", "--serve-only"], {keys["devices"]: "devices"})
    if find_spec("torch") is None:
        print("training*.svg stay as they are: torch is not installed (make torch)")
    else:
        draw_training({keys["overview"]: "training", keys["bricks"]: "training_bricks"})
    if find_spec("transformers") is None:
        print("run.svg stays as it is: transformers is not installed (make torch)")
    else:
        draw(UNEDITED, {keys["bricks"]: "run"})
    return 0


def draw(command: list[str], names: dict[str, str]) -> None:
    """What the dashboard shows of a command: one picture for each key that opens a view."""
    workload = subprocess.Popen(command)
    try:
        with Feed(selected=[str(workload.pid)]) as feed:
            wait_for_steps(feed, workload)
            asyncio.run(take_pictures(feed, names))
    finally:
        workload.terminate()
        workload.wait(timeout=10)


def wait_for_steps(feed: Feed, workload: subprocess.Popen[bytes]) -> None:
    """Return once the workload decodes; raises RuntimeError when it has ended or takes too long."""
    deadline_s = time.monotonic() + FIRST_STEP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if workload.poll() is not None:
            raise RuntimeError(f"the workload ended with exit code {workload.returncode} before its first step")
        feed.poll()
        view = feed.view(None, "decode")
        if view is not None and view.pid == workload.pid and view.steps and view.steps.count >= STEPS_BEFORE:
            return
        time.sleep(0.1)
    raise RuntimeError(f"no decode step within {FIRST_STEP_TIMEOUT_S:.0f} s")


def draw_training(names: dict[str, str]) -> None:
    """Draw the end of a training run that waits for its data: one picture for each key that opens a view."""
    with tempfile.TemporaryDirectory(prefix="cbtop-pictures-") as folder:
        file = Path(folder, "training.cbtop")
        program = [sys.executable, str(SLOW_DATA), "faulty"]
        subprocess.run([*CBTOP, "run", "--quiet", "--record", str(file), "--", *program], check=True)
        with ReplayFeed(file) as feed:
            ended_s = feed.duration_s
        asyncio.run(draw_recorded(str(file), ended_s, names))


async def draw_recorded(recording: str, at_s: float, names: dict[str, str]) -> None:
    """Draw a moment of a recording: one picture for each key, or several keys with blanks between them.

    `recording` is a name or a whole path.
    """
    with ReplayFeed(RECORDINGS / recording) as feed:
        feed.is_playing = False
        feed.seek(at_s)
        app = ReplayApp(feed)
        app.window = True
        async with app.run_test(size=SIZE) as pilot:
            for key, name in names.items():
                await pilot.press(*key.split())
                await pilot.pause(2 * app.interval_s)
                save(app, name)


async def take_pictures(feed: Feed, names: dict[str, str]) -> None:
    """Watch for a while, then one picture for each key."""
    app = CbtopApp(feed)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(RECORDED_S)
        for key, name in names.items():
            await pilot.press(key)
            await pilot.pause(2 * app.interval_s)
            save(app, name)


def save(app: CbtopApp, name: str) -> None:
    path = HERE / f"{name}.svg"
    svg = without_leading_blanks(app.export_screenshot(title="cbtop"))
    path.write_text(svg, encoding="utf-8")
    print(path.name)
    if find_spec("resvg_py") is None:
        print(f"{name}.png stays as it is: resvg-py is not installed (the extra dev)")
        return
    path = path.with_suffix(".png")
    path.write_bytes(png_of(svg))
    print(path.name)


def png_of(svg: str) -> bytes:
    """The picture in pixels. Where DejaVu Sans Mono is not installed another type takes its place.

    Raises RuntimeError where it is too large to lie beside the others.
    """
    resvg_py = import_module("resvg_py")
    text = FONT_FACES.sub("", svg).replace("Fira Code", PNG_FONT)  # those come from the net, which is not asked here
    text = WHOLE_TEXT.sub(with_braille_apart, text)
    png = bytes(resvg_py.svg_to_bytes(svg_string=text, monospace_family=PNG_FONT, width=PNG_WIDTH))
    if len(png) > MAX_PNG_BYTES:
        raise RuntimeError(f"a picture of {len(png):,} bytes; at most {MAX_PNG_BYTES:,} are kept")
    return png


def with_braille_apart(text: re.Match[str]) -> str:
    """Words and braille as texts of their own: the type that takes over for braille would draw the words, too."""
    x, found = float(text["x"]), []
    for run in RUN.findall(text["held"]):
        length = len(CHARACTER.findall(run)) * CELL_WIDTH
        place = f'x="{x:g}" {text["between"]}textLength="{length:g}"'
        found.append(f"<text {text['before']}{place}{text['after']}>{run}</text>")
        x += length
    return "".join(found)


def without_leading_blanks(svg: str) -> str:
    """Every text moved to its first visible character: some renderers drop the blanks before it, not their room."""

    def moved(text: re.Match[str]) -> str:
        blanks = text["blanks"].count(BLANK)
        x, length = float(text["x"]), float(text["length"])
        cells = length / CELL_WIDTH
        if blanks >= round(cells):
            return text[0]
        x, length = x + blanks * CELL_WIDTH, length - blanks * CELL_WIDTH
        return f'x="{x:g}" y="{text["y"]}" textLength="{length:g}"{text["rest"]}>'

    return TEXT.sub(moved, svg)


if __name__ == "__main__":
    raise SystemExit(main())
