"""Show the screen for a program that cbtop has started."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from cbtop.client.stream_recorder import save_history
from cbtop.commands.shared.program import Program
from cbtop.commands.shared.show import dress, settle_colours
from cbtop.commands.shared.sort_memory import remember_orders
from cbtop.feeds.feed import Feed, FeedSnapshot
from cbtop.feeds.look_back import look_back


class RunFeed(Feed):
    """A feed of the processes that began with the program or later. Its status says whether the program has ended."""

    def __init__(self, program: Program, name: str) -> None:
        super().__init__()
        self._program, self._name = program, Path(name).name

    def seen(self) -> Mapping[str, FeedSnapshot]:
        seen = super().seen()
        return {
            key: source
            for key, source in seen.items()
            if source.record.hello is not None and source.record.hello.realtime_ns >= self._program.began_ns
        }

    def status(self) -> str:
        code = self._program.exit_code
        return super().status() if code is None else f"{self._name} has ended with exit code {code}"


def watch(program: Program, name: str, options: argparse.Namespace) -> int:
    """Show the screen for the program. After the screen closes, print the program's output until it ends.

    `options` must already be complete (`settle_options`).
    """
    settle_colours(options)
    # Textual reads the environment when it is loaded, so import it after the colour settings.
    from cbtop.tui.run_app import RunApp

    try:
        with RunFeed(program, name) as feed:
            address = feed.links.endpoint
            save = partial(save_history, address, feed.keys.get(address), Path.cwd()) if address else None
            back = partial(look_back, feed) if address else None
            app = RunApp(feed, program, save_history=save, look_back=back)
            dress(app, options)
            app.run()
            remember_orders(app.chosen_orders)
        if app.return_code and app.return_code > 128:
            program.send_signal(app.return_code - 128)
    finally:
        code = program.pass_on()
    return code
