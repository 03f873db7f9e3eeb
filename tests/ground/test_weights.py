"""Two files of a model: whole, or refused by the name of the file that is at fault."""

import json
import random

import pytest
import torch
from refusals import refused

from gbattn.ground import weights as module
from gbattn.ground.weights import CONFIG, WEIGHTS, check_weights, checksum, read_weights, write_weights

KIND = "a test 1"
CONFIGURED = {"width": 3, "name": "ä"}


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return {"b.weight": draw(3, 2).bfloat16(), "a": draw(4), "empty": draw(0, 3)}


@pytest.fixture
def saved(tmp_path):
    write_weights(tmp_path, KIND, CONFIGURED, drawn())
    return tmp_path


def alike(one, other):
    same = lambda name: one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
    return {*one} == {*other} and all(map(same, one))


def test_what_is_saved_is_loaded(saved):
    entries, config, weights = read_weights(saved, KIND)
    assert entries == config == CONFIGURED and alike(weights, drawn())
    assert sorted(path.name for path in saved.iterdir()) == [CONFIG, WEIGHTS]


def test_equal_weights_give_equal_bytes(tmp_path):
    files = set()
    for order in (1, -1):
        weights = dict([*drawn().items()][::order])
        write_weights(tmp_path, KIND, CONFIGURED, weights)
        files.add((tmp_path / CONFIG).read_bytes() + (tmp_path / WEIGHTS).read_bytes())
    assert len(files) == 1


def test_loaded_weights_do_not_change_with_the_file(saved):
    _, _, weights = read_weights(saved, KIND)
    content = (saved / WEIGHTS).read_bytes()
    with (saved / WEIGHTS).open("r+b") as file:
        file.write(bytes(len(content)))
    assert alike(weights, drawn())


def test_the_checksum_is_of_names_and_bytes():
    one = drawn()
    renamed = {"c" if name == "a" else name: x for name, x in one.items()}
    assert len({checksum(one), checksum(renamed), checksum(drawn(1))}) == 3
    assert checksum(one) == checksum(dict([*one.items()][::-1]))


# ---- faults ----


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with refused(str(saved)) as caught:
        read_weights(saved, KIND)
    assert name in caught.value.got


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("keep", [0, 4, -1])
def test_a_file_cut_off_is_named(saved, name, keep):
    path = saved / name
    path.write_bytes(path.read_bytes()[: keep - (name == CONFIG) if keep < 0 else keep])
    with refused(str(path)):
        read_weights(saved, KIND)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_another_format_is_named(saved, name):
    write_weights(saved / "other", KIND + "1", CONFIGURED, drawn())
    (saved / "other" / name).replace(saved / name)
    with refused(str(saved / name)):
        read_weights(saved, KIND)


@pytest.mark.parametrize("content", ["[1]", "null", "{}", '{"format": [1]}', "[" * 100_000])
def test_a_config_from_elsewhere_is_named(saved, content):
    (saved / CONFIG).write_text(content)
    with refused(str(saved / CONFIG)):
        read_weights(saved, KIND)


@pytest.mark.parametrize(
    "metadata",
    [None, "[" * 100_000, "{", "[]", json.dumps({"format": [KIND]}), json.dumps({"format": KIND, "sha256": 3})],
)
def test_metadata_from_elsewhere_is_named(saved, metadata):
    from safetensors.torch import save_file

    save_file(drawn(), saved / WEIGHTS, metadata=metadata and {"gbattn": metadata})
    with refused(str(saved / WEIGHTS)):
        read_weights(saved, KIND)


def test_a_flipped_bit_of_the_weights_is_found(saved):
    path = saved / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    with refused(str(path)):
        read_weights(saved, KIND)


def test_a_flipped_bit_in_the_header_is_found_or_changed_nothing(saved):
    """A sample, as all of them take long."""
    path = saved / WEIGHTS
    whole, found = path.read_bytes(), 0
    bits = range(8 * (8 + int.from_bytes(whole[:8], "little")))
    for place in random.Random(0).sample(bits, 600):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            _, config, weights = read_weights(saved, KIND)
        except ValueError as error:
            assert error.argument == str(path)
            found += 1
        else:  # that of the config is the caller's to compare
            assert alike(weights, drawn())
    assert found > 300


def test_a_shape_that_torch_cannot_hold(saved):
    path = saved / WEIGHTS
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    header["huge"] = dict(dtype="F32", shape=[0, 2**63], data_offsets=[len(body)] * 2)
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    with refused(str(path)):
        read_weights(saved, KIND)


def test_a_pickle_is_not_read(saved):
    torch.save(drawn(), saved / WEIGHTS)
    with refused(str(saved / WEIGHTS)):
        read_weights(saved, KIND)


def test_a_full_disk_leaves_the_old_files(saved, monkeypatch):
    calls = []

    def full(number):
        calls.append(number)
        raise OSError(28, "no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        write_weights(saved, KIND, CONFIGURED, drawn(1))
    assert calls and sorted(path.name for path in saved.iterdir()) == [CONFIG, WEIGHTS]
    assert alike(read_weights(saved, KIND)[2], drawn())


@pytest.mark.parametrize("fault", ["meta", "shared"])
def test_weights_that_could_not_be_restored_are_not_written(tmp_path, fault):
    weights = drawn()
    weights["again"] = weights["a"].to("meta") if fault == "meta" else weights["a"]
    with refused("model") as caught:
        write_weights(tmp_path / "new", KIND, CONFIGURED, weights)
    assert "again" in caught.value.got and not (tmp_path / "new").exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with refused("folder"):
        write_weights(tmp_path / "file", KIND, CONFIGURED, drawn())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.zeros(5)},
        {"more": torch.zeros(1)},
        {"a": torch.zeros(4, dtype=torch.int64)},
        {"a": torch.zeros(4, dtype=torch.float8_e4m3fn)},
    ],
    ids=str,
)
def test_weights_of_another_plan_are_refused(change):
    plan = {name: x.to("meta") for name, x in drawn().items()}
    check_weights("model", drawn(), plan, "as planned")
    with refused("model") as caught:
        check_weights("model", drawn() | change, plan, "as planned")
    assert next(iter(change)) in caught.value.got
    with refused("model"):
        check_weights("model", {"a": drawn()["a"]}, plan, "as planned")


# ---- new weights ----


class Forgetful(torch.nn.Module):
    """It forgets one of its tensors."""

    def __init__(self, forgets, dtype=torch.float32):
        super().__init__()
        self.forgets = forgets
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("state", torch.ones(2, dtype=dtype))

    @torch.no_grad()
    def reset_parameters(self, seed):
        for name in {"weight", "state"} - {self.forgets}:
            getattr(self, name).fill_(seed)


def test_new_weights_are_all_set():
    model = Forgetful("")
    module.fill_empty(model, 7)
    assert model.weight.tolist() == model.state.tolist() == [7, 7]


@pytest.mark.parametrize("name", ["weight", "state"])
def test_a_tensor_that_is_not_reset_is_named(name):
    with refused(name):
        module.fill_empty(Forgetful(name), 7)


def test_a_tensor_that_cannot_miss_a_value_is_named():
    with refused("state"):
        module.fill_empty(Forgetful("", torch.bool), 7)


def test_the_device_of_new_weights():
    assert module.device_of_weights(None, None).type == "cpu"
    assert module.device_of_weights("meta", torch.float64).type == "meta"
    for argument, device, dtype in [
        ("device", "nowhere", None),
        ("dtype", None, torch.int64),
        ("dtype", None, "float"),
    ]:
        with refused(argument):
            module.device_of_weights(device, dtype)
