"""The allocator setting takes effect on glibc and is ignored elsewhere."""

from __future__ import annotations

import platform

import pytest
import torch

from fedloom.common import device


def test_the_c_library_agrees_where_it_is_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.keep_pages() is (platform.libc_ver()[0] == "glibc")
    assert float(torch.ones(10_000_000).sum()) == 10_000_000
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    assert device.keep_pages() is False
