"""Grapheme-to-phoneme conversion: the network, known stems before it, rules without it."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data import text as g2p
from arcuate.data.alphabet import CLASSES
from arcuate.data.text import pronounce_by_rule
from arcuate.errors import UserError


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Random weights in the shapes of g2p_en's."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in g2p._SHAPES.items()}
    monkeypatch.setattr(g2p, "_load_weights", lambda: weights)
    return weights


def test_the_network_is_a_gru_over_letters(network: dict[str, np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    cells = {side: torch.nn.GRUCell(256, 256) for side in ("enc", "dec")}
    for side, cell in cells.items():
        for ours, theirs in (("w_ih", "weight_ih"), ("w_hh", "weight_hh"), ("b_ih", "bias_ih"), ("b_hh", "bias_hh")):
            getattr(cell, theirs).data = torch.from_numpy(network[f"{side}_{ours}"])
    h = torch.zeros(1, 256)
    for letter in [3 + ord(c) - ord("a") for c in "zq"] + [2]:
        h = cells["enc"](torch.from_numpy(network["enc_emb"][[letter]]), h)
    expected, last = [], 2
    for _ in range(20):
        h = cells["dec"](torch.from_numpy(network["dec_emb"][[last]]), h)
        last = int((torch.from_numpy(network["fc_w"]) @ h[0] + torch.from_numpy(network["fc_b"])).argmax())
        if last == 3:
            break
        expected.append(g2p._OUTPUTS[last].rstrip("012"))
    assert g2p._run_network("zq", network) == tuple(p for p in expected if p in CLASSES)


def test_known_stems_come_before_the_network(network: dict[str, np.ndarray]) -> None:
    assert set(g2p.pronounce_unknown("unplugs")) <= set(CLASSES)
    assert g2p.pronounce_unknown("hello's") == ("HH", "AH", "L", "OW", "Z")
    assert g2p.pronounce_unknown("zqxv") == g2p._run_network("zqxv", network) != pronounce_by_rule("zqxv")
    assert set(g2p.pronounce_unknown("zqxv-vk")) <= set(CLASSES)


def test_rules_replace_a_missing_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(g2p, "_load_weights", lambda: None)
    assert g2p.pronounce_unknown("zorgtown") == ("Z", "AO", "R", "G", "T", "AW", "N") == pronounce_by_rule("zorgtown")


def test_damaged_network_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "checkpoint20.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(UserError, match="g2p_en"):
        g2p._read_weights(tmp_path / "checkpoint20.npz")
    np.savez(tmp_path / "small.npz", **{name: np.zeros(3) for name in g2p._SHAPES})
    with pytest.raises(UserError, match="does not match g2p_en"):
        g2p._read_weights(tmp_path / "small.npz")
