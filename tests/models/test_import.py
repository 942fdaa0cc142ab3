"""Import of official checkpoints: safe unpickling, error messages, and inconsistent model folders."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from arcuate.errors import UserError
from arcuate.models.import_checkpoint import T12_SESSIONS, import_checkpoint
from arcuate.models.io import load_model
from support.official_checkpoints import N_CHANNELS, N_SESSIONS, SESSIONS, write_cffan, write_nejm


def test_nejm_config(tmp_path):
    write_nejm(tmp_path / "in")
    result = import_checkpoint(tmp_path / "in" / "best_checkpoint", tmp_path / "out", "nejm")
    out = result.model
    settings = load_model(out).config.settings
    assert settings.front_end.smoothing.model_dump() == {"sd": 2.0, "taps": 9}
    assert settings.front_end.normalise == "none"
    assert settings.front_end.session_layer.dropout == 0.2
    assert (settings.encoder.dropout, settings.encoder.learned_initial_state, settings.encoder.causal) == (
        0.4,
        True,
        True,
    )
    assert result.to_dict() == {
        "model": str(out),
        "kind": "nejm",
        "checkpoint": "best_checkpoint",
        "n_parameters": sum(p.numel() for p in load_model(out).parameters()),
        "n_channels": N_CHANNELS,
        "sessions": list(SESSIONS),
        "ignored": [],
        "val_per": 0.101,
        "val_loss": 17.5,
    }
    note = json.loads((out / "import.json").read_text())
    assert (note["val_per"], note["val_loss"], note["ignored"]) == (0.101, 17.5, [])


def test_cffan_config_and_unused_layers(tmp_path):
    write_cffan(tmp_path / "in")
    out = import_checkpoint(tmp_path / "in", tmp_path / "out", "cffan").model
    settings = load_model(out).config.settings
    assert settings.front_end.smoothing.taps == 20
    assert settings.front_end.normalise == "block"
    assert (settings.encoder.bidirectional, settings.encoder.learned_initial_state) == (True, False)
    assert len(json.loads((out / "import.json").read_text())["ignored"]) == 2 * N_SESSIONS
    assert (len(T12_SESSIONS), T12_SESSIONS[0], T12_SESSIONS[-1], list(T12_SESSIONS)) == (
        24,
        "t12.2022.04.28",
        "t12.2022.08.25",
        sorted(T12_SESSIONS),
    )


def test_wrong_kind(tmp_path):
    write_nejm(tmp_path / "nejm")
    write_cffan(tmp_path / "cffan")
    with pytest.raises(UserError, match="--kind cffan"):
        import_checkpoint(tmp_path / "cffan" / "modelWeights", tmp_path / "out", "nejm")
    with pytest.raises(UserError, match="--kind nejm"):
        import_checkpoint(tmp_path / "nejm" / "best_checkpoint", tmp_path / "out", "cffan")
    with pytest.raises(UserError, match="use nejm"):
        import_checkpoint(tmp_path / "nejm", tmp_path / "out", "tf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model__n_units": 9}, "model.n_units is 9"),
        ({"model__patch_stride": None}, "patch_stride is None, expected a number"),
        ({"model__patch_stride": 99}, "stride"),
        ({"dataset__sessions": SESSIONS[:2]}, "4 session layers"),
        ({"dataset__sessions": None}, "list them with --sessions"),
        ({"dataset__data_transforms": {"smooth_kernel_std": 1e9}}, "smoothing"),
    ],
)
def test_inconsistent_training_settings(tmp_path, change, match):
    write_nejm(tmp_path / "in", **change)
    with pytest.raises(UserError, match=match):
        import_checkpoint(tmp_path / "in", tmp_path / "out", "nejm")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda s: s.pop("out.bias"), "has no tensor out.bias"),
        (lambda s: s.pop("day_weights.0"), "has no tensor day_weights.0"),
        (lambda s: s.update({"gru.weight_hh_l1": torch.zeros(21, 8)}), "weight_hh_l1"),
        (lambda s: s.update({"h0": torch.full((1, 1, 7), torch.nan)}), "h0 contains non-finite"),
        (lambda s: s.update({"extra.weight": torch.zeros(3)}), "extra.weight"),
        (lambda s: s.update({"module.h0": torch.zeros(1, 1, 7)}), "twice"),
        (lambda s: s.update({"h0": "seven"}), "not a dense floating-point tensor"),
        (lambda s: s.update({"h0": torch.zeros(1).expand(10**9)}), "not a dense floating-point tensor"),
    ],
)
def test_inconsistent_weights(tmp_path, spoil, match):
    state = write_nejm(tmp_path / "in")
    spoil(state)
    torch.save({"model_state_dict": state}, tmp_path / "in" / "best_checkpoint")
    with pytest.raises(UserError, match=match):
        import_checkpoint(tmp_path / "in", tmp_path / "out", "nejm")


def test_invalid_checkpoint_files(tmp_path):
    write_nejm(tmp_path / "in")
    file = tmp_path / "in" / "best_checkpoint"
    valid = file.read_bytes()
    for content in (
        b"",
        b"hello",
        valid[: len(valid) // 2],
        valid[:-30],
        pickle.dumps({"a": 1}),
        os.urandom(400),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError):
            import_checkpoint(tmp_path / "in", tmp_path / "out", "nejm")
    with pytest.raises(UserError, match="nowhere does not exist"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "out", "nejm")
    with pytest.raises(UserError, match="contains no checkpoint"):
        import_checkpoint(tmp_path, tmp_path / "out", "cffan")


def test_training_settings_are_required(tmp_path):
    write_nejm(tmp_path / "nejm")
    write_cffan(tmp_path / "cffan")
    (tmp_path / "nejm" / "args.yaml").unlink()
    (tmp_path / "cffan" / "args").write_bytes(b"not a pickle")
    for kind, match in (("nejm", "args.yaml is missing"), ("cffan", "cannot be read as a pickle")):
        with pytest.raises(UserError, match=match):
            import_checkpoint(tmp_path / kind, tmp_path / "out", kind)
    (tmp_path / "nejm" / "args.yaml").write_text("a: [1")
    with pytest.raises(UserError, match="YAML"):
        import_checkpoint(tmp_path / "nejm", tmp_path / "out", "nejm")


def test_existing_folder_is_not_overwritten(tmp_path):
    write_nejm(tmp_path / "in")
    with pytest.raises(UserError, match="not an empty folder"):
        import_checkpoint(tmp_path / "in", tmp_path / "in", "nejm")


@pytest.fixture
def folder(tmp_path):
    write_nejm(tmp_path / "in")
    return import_checkpoint(tmp_path / "in", tmp_path / "out", "nejm").model


def test_model_folders_round_trip(folder):
    model = load_model(folder)
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    bins, start = torch.randn(1, 30, model.config.n_channels), model.encoder.start(1)
    torch.testing.assert_close(
        model.encoder(bins, None, start), model.encoder._forward_torch(bins, None, start, ())[:2]
    )


def edit_config(change):
    def spoil(folder):
        config = json.loads((folder / "model.json").read_text())
        change(config)
        (folder / "model.json").write_text(json.dumps(config))

    return spoil


def edit_weights(change):
    def spoil(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return spoil


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda f: (f / "model.json").unlink(), "model.json is missing"),
        (lambda f: (f / "model.safetensors").unlink(), "is missing"),
        (lambda f: (f / "model.json").write_text("{"), "not a model config"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "cannot be read"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "cannot be read"),
        (edit_config(lambda c: c.update(n_channels=65536)), "but model.json implies floats"),
        (
            edit_config(lambda c: c["settings"]["encoder"].update(width=8192, depth=64)),
            "does not match model.json",
        ),
        (edit_config(lambda c: c["settings"].update(trap=1)), "settings.trap"),
        (edit_config(lambda c: c.update(sessions=["a", "a"])), "distinct"),
        (edit_weights(lambda w: w.pop("head.bias")), "head.bias is missing"),
        (edit_weights(lambda w: w.update(x=torch.zeros(1))), "x is unexpected"),
        (
            edit_weights(lambda w: w.update({"head.bias": torch.zeros(41, dtype=torch.int32)})),
            "head.bias is I32",
        ),
        (edit_weights(lambda w: w["head.bias"].fill_(torch.nan)), "head.bias contains non-finite"),
    ],
)
def test_inconsistent_model_folders(folder, spoil, match):
    spoil(folder)
    with pytest.raises(UserError, match=match):
        load_model(folder)
