"""The configuration of a SuperNode by its owner: its identity for other sites, and errors for files
and values that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.errors import DataError, InvalidValue
from fedloom.sites.keys import make_keys
from fedloom.sites.node_config import FEWEST_PEERS, NodeConfig, read_peers


def test_a_list_holds_what_the_keys_are(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 3)
    lists = {(keys.site(number) / "peers.pub").read_bytes() for number in range(3)}
    assert lists == {b"".join(keys.public(number).read_bytes() for number in range(3))}
    extended = make_keys(tmp_path, 4)
    assert sorted(read_peers(extended.site(0) / "peers.pub")) == [0, 1, 2, 3]


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "site-0" / name
        path.write_bytes(change(path.read_bytes()))

    return edit


WRONG: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "no list": (lambda _: None, {"peers": ""}, "set both identity and peers"),
    "no such key": (
        lambda folder: (folder / "site-0" / "site.key").unlink(),
        {},
        "site.key cannot be read",
    ),
    "no key": (edited("site.key", lambda _: b"mine"), {}, "site.key is not a private key"),
    "another's key": (
        lambda folder: (folder / "site-1" / "site.key").replace(folder / "site-0" / "site.key"),
        {},
        "is not the key that .* lists for site-0",
    ),
    "not listed": (
        edited("peers.pub", lambda text: b"".join(text.splitlines(True)[1:])),
        {},
        "lists no site-0",
    ),
    "listed twice": (
        edited("peers.pub", lambda text: text + text.splitlines()[0]),
        {},
        "line 3 repeats site-0 or its key",
    ),
    "one key for two": (
        edited("peers.pub", lambda text: text + text.splitlines()[1].replace(b"site-1", b"site-2")),
        {},
        "line 3 repeats site-2 or its key",
    ),
    "not a line": (
        edited("peers.pub", lambda text: b"hello\n" + text),
        {},
        "line 1 is not a public key followed by",
    ),
    "empty": (edited("peers.pub", lambda _: b"\n"), {}, "lists no public key"),
    "a number": (lambda _: None, {"identity": 3}, "identity must be text, not 3"),
    "too little company": (
        lambda _: None,
        {"fewest-peers": 1},
        "fewest-peers must be at least 2, not 1",
    ),
    "no number": (
        lambda _: None,
        {"partition-id": True},
        "partition-id must be a whole number, not true",
    ),
    "no such choices": (
        lambda _: None,
        {"choices": "open"},
        "choices must be 'secret' or 'rehearsed', not 'open'",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_identity_that_does_not_fit_gets_one_line(kind: str, tmp_path: Path) -> None:
    spoil, changes, message = WRONG[kind]
    make_keys(tmp_path, 2)
    spoil(tmp_path)
    folder = tmp_path / "site-0"
    config = {"identity": str(folder / "site.key"), "peers": str(folder / "peers.pub"), **changes}
    with pytest.raises((InvalidValue, DataError), match=message) as caught:
        NodeConfig.read({"partition-id": 0} | config)
    assert "\n" not in str(caught.value)


def test_a_site_that_names_no_key_has_none() -> None:
    config = NodeConfig.read({"partition-id": 3})
    assert (config.number, config.identity, config.data, config.fewest_peers) == (
        3,
        None,
        None,
        FEWEST_PEERS,
    )
