"""A request to the server of the screen needs a name of loopback, no foreign origin, and the token."""

from __future__ import annotations

import pytest

from cbtop.web.access import refusal

TOKEN = "GfZ0gH3mB_i-4xS1"
HERE = "127.0.0.1:8642"


@pytest.mark.parametrize("host", [HERE, "localhost:8642", "LocalHost:9000", "[::1]:8642", "127.0.0.1"])
def test_every_name_of_loopback_is_accepted(host: str) -> None:
    assert refusal([host], [], f"/{TOKEN}/", TOKEN) is None
    assert refusal([host], [f"http://{host}"], f"/{TOKEN}/ws", TOKEN) is None


@pytest.mark.parametrize(
    "hosts",
    [
        [], [""], ["evil.example"], ["evil.example:8642"], ["127.0.0.1.evil.example:8642"],
        ["localhost.evil.example"], ["evil.example@127.0.0.1"],
        ["127.0.0.1:8642 evil.example"], ["127.0.0.1:8642\n"], ["0.0.0.0:8642"],
        ["192.168.1.5:8642"], [HERE, "evil.example"],
    ],
)  # fmt: skip
def test_another_host_name_is_refused_even_with_the_token(hosts: list[str]) -> None:
    assert "127.0.0.1" in (refusal(hosts, [], f"/{TOKEN}/", TOKEN) or "")


@pytest.mark.parametrize(
    "origins",
    [
        ["null"], [""], ["http://evil.example"], ["https://127.0.0.1:8642"], ["http://127.0.0.1:9999"],
        ["http://localhost:8642"], ["http://127.0.0.1:8642.evil.example"], [f"http://{HERE}", "http://evil.example"],
    ],
)  # fmt: skip
def test_a_page_of_another_origin_is_refused_even_with_the_token(origins: list[str]) -> None:
    assert refusal([HERE], origins, f"/{TOKEN}/ws", TOKEN) == "a foreign page asked for this"


@pytest.mark.parametrize(
    "path", ["", "/", "//", "/ws", "/static/js/textual.js", f"/{TOKEN[:-1]}/", f"/{TOKEN}0/", f"/x/{TOKEN}/", "/é/"]
)
def test_a_path_without_the_token_is_refused(path: str) -> None:
    assert "token" in (refusal([HERE], [], path, TOKEN) or "")
