"""The keys of a federation: their use by a TLS client, file permissions, and protection against
overwriting.
"""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedloom.common.errors import DataError, InvalidValue
from fedloom.sites.keys import AUTHORITY_DAYS, SERVER_DAYS, make_keys
from forking_cli import main

TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def shake_hands(folder: Path, host: str, authority: Path | None = None) -> str | None:
    """Return the TLS version of a handshake in memory with strict verification.

    Raises:
        ssl.SSLError: The client does not trust the server.
    """
    client = ssl.create_default_context(cafile=str(authority or folder / "site-0" / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server" / "server.crt", folder / "server" / "server.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=host),
        server.wrap_bio(up, down, server_side=True),
    ]
    for end in ends * 4:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[0].version()


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "fl.example.org", "10.0.0.5", "2001:db8::1"]
)
def test_a_strict_client_that_knows_the_authority_trusts_each_name(
    tmp_path: Path, host: str
) -> None:
    make_keys(tmp_path, 1, ["FL.example.org", "10.0.0.5", "2001:db8::1"])
    assert shake_hands(tmp_path, host) in TLS_VERSIONS


def test_other_names_and_other_authorities_are_not_trusted(tmp_path: Path) -> None:
    make_keys(tmp_path / "ours", 1)
    make_keys(tmp_path / "theirs", 1)
    for host, authority in (
        ("fl.example.org", "ours"),
        ("127.0.0.2", "ours"),
        ("localhost", "theirs"),
    ):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(tmp_path / "ours", host, tmp_path / authority / "server" / "ca.crt")


def test_the_server_can_sign_no_certificate_and_the_authority_is_no_server(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, days=30)
    authority = x509.load_pem_x509_certificate((tmp_path / "server" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server" / "server.crt").read_bytes())
    usage = {
        name: certificate.extensions.get_extension_for_class(x509.KeyUsage)
        for name, certificate in (("a", authority), ("s", server))
    }
    basic = [
        certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        for certificate in (authority, server)
    ]
    assert [extension.value.ca for extension in basic] == [True, False]
    assert basic[0].value.path_length == 0
    assert all(extension.critical for extension in [*usage.values(), *basic])
    assert usage["a"].value.key_cert_sign
    assert not usage["a"].value.digital_signature
    assert usage["s"].value.digital_signature
    assert not usage["s"].value.key_cert_sign
    extended = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(extended) == [ExtendedKeyUsageOID.SERVER_AUTH]
    now = datetime.now(UTC)
    for certificate, days in ((authority, AUTHORITY_DAYS), (server, 30)):
        assert certificate.not_valid_before_utc <= now
        assert abs(certificate.not_valid_after_utc - now - timedelta(days=days)) < timedelta(
            minutes=5
        )


def test_each_site_has_a_pair_of_its_own(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 3)
    pairs = []
    for site in range(3):
        private = load_ssh_private_key((keys.site(site) / "site.key").read_bytes(), password=None)
        public = load_ssh_public_key(keys.public(site).read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        pairs.append(private.private_numbers().private_value)
    assert len(set(pairs)) == 3


def test_private_keys_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    private = {"authority/ca.key", "server/server.key", "site-0/site.key", "site-1/site.key"}
    for name in contents(tmp_path):
        mode = stat.S_IMODE((tmp_path / name).stat().st_mode)
        assert (mode & 0o077 == 0) == (name in private), name
    assert stat.S_IMODE((tmp_path / "server").stat().st_mode) == 0o700


def test_nothing_private_lies_where_it_does_not_belong(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 2)
    names = {
        folder.name: sorted(path.name for path in folder.iterdir())
        for folder in (keys.server, keys.site(0), keys.site(1))
    }
    assert names == {
        "server": ["ca.crt", "server.crt", "server.key", "site-0.pub", "site-1.pub"],
        "site-0": ["ca.crt", "peers.pub", "site.key"],
        "site-1": ["ca.crt", "peers.pub", "site.key"],
    }
    assert sorted(keys.written) == sorted(path for path in tmp_path.rglob("*") if path.is_file())


def test_a_second_call_adds_what_is_missing_and_changes_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path, 2, ["fl.example.org"])
    before = contents(tmp_path)
    assert make_keys(tmp_path, 2).written == []
    extended = make_keys(tmp_path, 3)
    assert {path.name for path in extended.written} == {
        "site.key",
        "ca.crt",
        "site-2.pub",
        "peers.pub",
    }
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {
        "site-0/peers.pub",
        "site-1/peers.pub",
    }


def test_a_site_that_has_taken_its_folder_away_keeps_its_key(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, 2)
    for path in keys.site(0).iterdir():
        path.unlink()
    public = keys.public(0).read_bytes()
    assert make_keys(tmp_path, 2).written == []
    assert keys.public(0).read_bytes() == public


def test_a_certificate_is_renewed_for_more_hosts_with_the_same_key_and_authority(
    tmp_path: Path,
) -> None:
    keys = make_keys(tmp_path, 1)
    with pytest.raises(
        InvalidValue, match=r"server\.crt does not contain 'fl\.example\.org': remove it"
    ):
        make_keys(tmp_path, 1, ["fl.example.org"])
    before = contents(tmp_path)
    (keys.server / "server.crt").unlink()
    assert make_keys(tmp_path, 1, ["fl.example.org"]).written == [keys.server / "server.crt"]
    assert shake_hands(tmp_path, "fl.example.org") in TLS_VERSIONS
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"server/server.crt"}


@pytest.mark.parametrize("lost", ["server/ca.crt", "server/server.key"])
def test_a_lost_half_of_a_pair_is_made_anew_and_sites_still_trust_the_server(
    tmp_path: Path, lost: str
) -> None:
    make_keys(tmp_path, 1)
    (tmp_path / lost).unlink()
    before = contents(tmp_path)
    make_keys(tmp_path, 1)
    assert shake_hands(tmp_path, "localhost") in TLS_VERSIONS
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} <= {"server/server.crt"}


def test_without_the_authority_nothing_is_signed(tmp_path: Path) -> None:
    make_keys(tmp_path, 1)
    (tmp_path / "server" / "server.crt").unlink()
    (tmp_path / "authority" / "ca.key").unlink()
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"ca\.key"):
        make_keys(tmp_path, 2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "damaged", ["server/ca.crt", "server/server.crt", "authority/ca.key", "site-0/site.key"]
)
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str) -> None:
    make_keys(tmp_path, 1)
    (tmp_path / damaged).write_bytes(b"-----BEGIN CERTIFICATE-----\nnothing\n")
    if damaged == "authority/ca.key":
        (tmp_path / "server" / "server.crt").unlink()
    with pytest.raises((DataError, InvalidValue), match=damaged.split("/")[1]):
        make_keys(tmp_path, 1)


def test_a_certificate_that_has_run_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=SERVER_DAYS + 1)

    make_keys(tmp_path, 1)
    monkeypatch.setattr("fedloom.sites.keys.datetime", Later)
    with pytest.raises(InvalidValue, match=r"server\.crt expired on \d{4}-\d\d-\d\d: remove it"):
        make_keys(tmp_path, 1)


def test_the_command_says_what_goes_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["flower", "keys", str(tmp_path / "keys"), "--sites", "3", "--host", "fl.example.org"]
    assert main(command) == 0
    out = capsys.readouterr().out
    for word in (
        "16 files made",
        "authority",
        "server",
        "site-0",
        "site-2",
        "secret",
        "localhost, 127.0.0.1, fl.example.org",
    ):
        assert word in out
    assert main(command) == 0
    assert "0 files made" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["server/ca.crt", "server/site-0.pub", "authority/ca.key"])
def test_a_folder_in_the_place_of_a_key_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    (tmp_path / "server/server.crt").unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be read \(Is a directory\)"):
        make_keys(tmp_path, 2)
