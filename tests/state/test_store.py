"""The store of client memory, in RAM and in files, against a plain dictionary."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import fedloom.state.store
from fedloom.common.errors import CheckpointError, DamagedCheckpoint, InvalidValue
from fedloom.state.store import VERSIONS, ClientStore, Memory

CLIENTS = 4
NAMES = ("model", "weights", "steps")


def value(number: int) -> Tensor:
    """Return a tensor that is unique to the number, with one of four types."""
    kinds = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    return (torch.arange(8) + number).to(kinds[number % 4]).view(2, 4)


def equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return state.keys() == expected.keys() and all(
        state[name].dtype == expected[name].dtype and torch.equal(state[name], expected[name])
        for name in state
    )


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


WRITE = st.tuples(st.just("write"), st.integers(0, CLIENTS - 1), st.sampled_from(NAMES))
OPERATIONS = st.lists(
    st.one_of(
        WRITE,
        WRITE,
        st.sampled_from([("commit",), ("rollback",), ("checkpoint",), ("fall back",), ("crash",)]),
    ),
    max_size=40,
)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    operations=OPERATIONS,
    budget=st.sampled_from([0, 50, 200, 10_000]),
    inline=st.sampled_from([0, 100, 10_000]),
)
def test_a_store_is_a_dictionary_whatever_its_budget(
    operations: list[tuple], budget: int, inline: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The store equals the dictionary after undone rounds and after a restart.

    The restart uses either of the two newest checkpoints.
    """
    directory = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedloom.state.store, "INLINE", inline)
        store = ClientStore(directory, budget)
        pending: dict[int, dict[str, Tensor]] = {}  # settled and pending writes
        settled: dict[int, dict[str, Tensor]] = {}
        checkpoints: list[tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]] = []
        for number, (operation, *arguments) in enumerate(operations):
            if operation == "write":
                client, name = arguments
                store.write(client, {name: value(number)})
                pending[client] = {**pending.get(client, {}), name: value(number)}
            elif operation == "commit":
                store.commit()
                settled = dict(pending)
            elif operation == "rollback":
                if store.rollback():
                    pending = dict(settled)
                else:
                    # only a round larger than half the budget cannot be undone
                    assert budget < 10_000
                    break
            elif operation == "checkpoint":
                store.commit()
                settled = dict(pending)
                state = {name: tensor.clone() for name, tensor in store.state().items()}
                checkpoints = [*checkpoints, (state, settled)][-2:]
                store.release()
            elif checkpoints:
                index = 0 if operation == "fall back" else -1
                checkpoints = checkpoints[: index + 1] if index == 0 else checkpoints
                store = ClientStore(directory, budget)
                store.restore(checkpoints[index][0])
                settled = checkpoints[index][1]
                pending = dict(settled)
            assert list(store) == sorted(pending)
            for client in range(CLIENTS):
                assert equal(store.read(client), pending.get(client, {}))
                assert store.read(client).keys() == set(pending.get(client, {}))
                for name in NAMES:
                    tensor, expected = (
                        store.read(client).get(name),
                        pending.get(client, {}).get(name),
                    )
                    assert (tensor is None) == (expected is None)
                    assert tensor is None or torch.equal(tensor, expected)
            assert store._undo_bytes + store._memory_bytes <= budget


def test_the_least_recently_used_clients_spill() -> None:
    model = torch.zeros(100)
    store = ClientStore(budget=3 * 400)
    for client in range(3):
        store.write(client, {"model": model + client})
        store.commit()
    folder = store._files().folder
    assert files(folder) == set()
    store.read(0)  # now client 1 has waited for longest
    store.write(3, {"model": model + 3})
    store.commit()
    assert files(folder) == {"client-000001.v1.safetensors"}
    assert torch.equal(load_file(folder / "client-000001.v1.safetensors")["model"], model + 1)
    store.close()
    assert not folder.exists()
    assert list(store) == []


def test_an_unchanged_client_costs_nothing_and_versions_never_change(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients", budget=100)
    for client in range(3):
        store.write(client, {"model": torch.full((50,), float(client))})
    store.commit()
    store.state()
    store.release()
    original = {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in (tmp_path / "clients").iterdir()
    }
    store.write(1, {"model": torch.full((50,), 9.0)})
    store.commit()
    table = store.state()[VERSIONS]
    later_files = {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in (tmp_path / "clients").iterdir()
    }
    assert {
        name: later_files[name] for name in original
    } == original  # client 1's old version serves the checkpoint before
    assert len(later_files) == 4
    store.release()
    assert files(tmp_path / "clients") == set(later_files)
    store.state()
    store.release()  # two newer checkpoints than the one that named it
    current = {f"client-{client:06d}.v{version}.safetensors" for client, version in table.tolist()}
    assert files(tmp_path / "clients") == current


def test_versions_that_no_checkpoint_names_leave_no_file(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget=0)
    for number in range(20):
        store.write(0, {"model": value(number)})
        store.commit()
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_lost_or_shortened_file_is_named(tmp_path: Path, harm: str) -> None:
    store = ClientStore(tmp_path, budget=0)
    store.write(7, {"model": torch.arange(9.0)})
    store.commit()
    state = store.state()
    (path,) = tmp_path.iterdir()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    fresh = ClientStore(tmp_path, budget=0)
    with pytest.raises(DamagedCheckpoint, match=r"client-000007\.v1\.safetensors cannot be read"):
        fresh.restore(state)
    assert list(fresh) == []


def test_half_written_files_of_a_kill_are_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / ".client-000001.v4.safetensors.0123456789abcdef.writing"
    unfinished.mkdir()
    (unfinished / "client-000001.v4.safetensors").write_bytes(b"half")
    (tmp_path / "client-000001.v3.safetensors").write_bytes(
        b"of a checkpoint that was never written"
    )
    store = ClientStore(tmp_path, budget=0)
    assert files(tmp_path) == {"client-000001.v3.safetensors"}
    store.write(1, {"model": value(1)})
    store.commit()
    store.state()
    store.release()
    assert files(tmp_path) == {"client-000001.v4.safetensors"}


def test_a_file_with_code_in_it_is_refused(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget=0)
    store.write(1, {"model": value(1)})
    store.commit()
    (path,) = tmp_path.iterdir()
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        store.read(1)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidValue, match="memory_budget must be at least 0, not -1"):
        ClientStore(budget=-1)


def test_a_cohort_reads_rows_and_writes_on_commit() -> None:
    store = ClientStore(budget=0)
    cohort = Memory(store, [4, 2])
    default = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    assert torch.equal(cohort.get("w", default), default)
    cohort["w"] = torch.tensor([[5.0, 5.0], [6.0, 6.0]])
    assert torch.equal(cohort.get("w", default), torch.tensor([[5.0, 5.0], [6.0, 6.0]]))
    assert "w" not in store.read(4)
    cohort.commit([1])
    assert "w" not in store.read(4)
    same_cohort = Memory(store, [4, 2])
    assert same_cohort.knows("w").tolist() == [False, True]
    assert torch.equal(same_cohort.get("w", default), torch.tensor([[1.0, 1.0], [6.0, 6.0]]))
    assert torch.equal(
        same_cohort.get("w", torch.zeros(1, 2)), torch.tensor([[0.0, 0.0], [6.0, 6.0]])
    )
    store.close()


def test_stored_tensors_share_no_memory_with_writer_or_reader() -> None:
    store = ClientStore()
    rows = torch.zeros(1, 3)
    cohort = Memory(store, [0])
    cohort["w"] = rows
    cohort.commit()
    rows.fill_(7)
    Memory(store, [0]).get("w", torch.zeros(1, 3)).fill_(8)
    assert torch.equal(store.read(0)["w"], torch.zeros(3))


def test_folders_in_place_of_files_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "client-000001.v7.safetensors"
    folder.mkdir()
    store = ClientStore(tmp_path, budget=0)
    for value in (1.0, 2.0, 3.0):
        store.write(1, {"model": torch.full((3,), value)})
        store.commit()
        state = store.state()
        store.release()
    assert folder.is_dir()
    assert state[VERSIONS].tolist() == [[1, 10]]
    with pytest.raises(DamagedCheckpoint, match=r"v7\.safetensors cannot be read"):
        store.restore({VERSIONS: torch.tensor([[1, 7]])})
    (tmp_path / "file").touch()
    store = ClientStore(tmp_path / "file", budget=0)
    with pytest.raises(CheckpointError, match=r"file cannot be made \(File exists\)"):
        store.write(1, {"model": torch.zeros(3)})
