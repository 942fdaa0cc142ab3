"""Models on the Hugging Face Hub, with the API object of its client replaced by one that holds commits in memory."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arcuate
from arcuate.data.statistics import Statistics
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.push import PushResult, push
from arcuate.hub import RECORD, local_path, parse_name
from support.command import arcuate as command

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
errors = pytest.importorskip("huggingface_hub.errors")
GOLDEN = Path(__file__).parent / "golden"
UPLOADED = ["README.md", "environment.json", "metrics.jsonl", "model.json", "model.safetensors", "recipe.yaml"]
UPLOADED += ["results/val.json", "state.json"]


class Hub:
    """The calls of `HfApi` that this package uses; `fails` raises from the next call."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.private: dict[str, bool] = {}
        self.n_requests = 0
        self.fails: Exception | None = None

    def add(self, repository: str, files: dict[str, bytes]) -> str:
        state = {**self.commits.get(self.branches.get(repository, ""), {}), **files}
        commit = hashlib.sha1(repr(sorted(state.items())).encode()).hexdigest()
        self.commits[commit], self.branches[repository] = state, commit
        self.private.setdefault(repository, False)
        return commit

    def create_repo(self, repository: str, private: bool | None, exist_ok: bool) -> None:
        self.private.setdefault(repository, bool(private))

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        files = {str(p.relative_to(folder_path)): p.read_bytes() for p in folder_path.rglob("*") if p.is_file()}
        return SimpleNamespace(oid=self.add(repo_id, files), commit_url="https://hub/commit")

    def model_info(self, repository: str, revision: str | None = None, files_metadata: bool = False) -> Any:
        self.n_requests += 1
        if self.fails is not None:
            raise self.fails
        sha = revision or self.branches.get(repository, "")
        siblings = [SimpleNamespace(rfilename=n, size=len(v)) for n, v in self.commits.get(sha, {}).items()]
        return SimpleNamespace(sha=sha, siblings=siblings, private=self.private[repository])

    def snapshot_download(self, repository: str, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        self.n_requests += 1
        for name, content in self.commits[revision].items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                path = Path(local_dir, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **options: hub)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return hub


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True)


def test_a_pushed_run_is_loaded_with_equal_outputs(run: Path, hub: Hub) -> None:
    commit = push(run, "lab/t15", licence="cc-by-4.0").commit
    assert commit is not None and sorted(hub.commits[commit]) == UPLOADED
    bins = np.random.default_rng(1).normal(size=(50, 8))
    statistics = Statistics(np.zeros(8, np.float32), np.ones(8, np.float32), 50)
    outputs = [d.log_probs(bins, d.sessions[0], statistics) for d in (arcuate.load(run), arcuate.load("hf:lab/t15"))]
    assert np.array_equal(*outputs)
    folder = local_path(f"hf:lab/t15@{commit}")
    assert json.loads((folder / RECORD).read_text("utf-8"))["commit"] == commit
    assert folder.name == "t15" and "license: cc-by-4.0" in (folder / "MODEL_CARD.md").read_text("utf-8")


def test_a_downloaded_run_is_evaluated_on_a_store(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    found = evaluate("hf:lab/t15", data=GOLDEN / "store")
    assert found.per == pytest.approx(json.loads((run / "results/val.json").read_text("utf-8"))["per"])
    with pytest.raises(UserError, match="does not record where its store is"):
        evaluate("hf:lab/t15")


def test_a_commit_is_downloaded_once_and_only_files_of_a_model_are(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    others = {"training.pkl": b"x", "model.py": b"raise SystemExit", "results/../../b.json": b"{}"}
    commit = hub.add("lab/t15", others)
    folder = local_path(f"hf:lab/t15@{commit}")
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        *(set(UPLOADED) - {"README.md"}),
        *(RECORD, "MODEL_CARD.md"),
    }
    hub.n_requests = 0
    assert local_path(f"hf:lab/t15@{commit}") == folder and hub.n_requests == 0
    newer = hub.add("lab/t15", {"README.md": b"# new"})
    assert local_path("hf:lab/t15").parent.name == newer


def test_nothing_personal_is_uploaded(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    facts = json.loads((run / "environment.json").read_text("utf-8"))
    facts["data"]["path"] = "/home/alice/secret/store"
    facts |= {"parent": "/home/alice/runs/parent@best", "command": ["train", "--data", "/home/alice/secret/store"]}
    (run / "environment.json").write_text(json.dumps(facts), "utf-8")
    recipe = (run / "recipe.yaml").read_text("utf-8").replace("notes: ''", "notes: 'from /home/alice/runs/old run'")
    (run / "recipe.yaml").write_text(recipe, "utf-8")
    files = hub.commits[str(push(run, "lab/t15").commit)]
    assert all(b"alice" not in content and b"secret" not in content for content in files.values())
    assert json.loads(files["environment.json"])["parent"] == "parent@best"
    assert not files.keys() & {"results/val.jsonl", "predictions.jsonl", "incidents.jsonl", "training.safetensors"}


def test_a_repository_is_private_unless_stated(run: Path, hub: Hub) -> None:
    result = arcuate.export(f"{run}@best", "hf:lab/hidden")
    assert isinstance(result, PushResult) and list(result.files) == UPLOADED
    arcuate.export(run, "hf:lab/open", public=True)
    assert hub.private == {"lab/hidden": True, "lab/open": False}
    with pytest.raises(UserError, match="exists and is public"):
        push(run, "lab/open")


@pytest.mark.parametrize("name", ["lab", "lab/..", "../x", "a/b/c", "lab/t15@../x", "lab/t15@", "lab/t15 x"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"not the name of a repository|not a revision"):
        parse_name(f"hf:{name}")


def _response(code: int) -> Any:
    return SimpleNamespace(status_code=code, headers={}, request=None)


def _http_error(kind: str, code: int) -> Exception:
    return getattr(errors, kind)("a token in the answer", response=_response(code))


FAULTS = {
    "request access": _http_error("GatedRepoError", 403),
    "has no revision": _http_error("RevisionNotFoundError", 404),
    "404 Not Found; check the name": _http_error("RepositoryNotFoundError", 404),
    "401 Unauthorized; log in": _http_error("HfHubHTTPError", 401),
    "500 Internal Server Error; try again": _http_error("HfHubHTTPError", 500),
    "cannot reach": errors.OfflineModeIsEnabled("offline"),
    "is incomplete": OSError("consistency check failed"),
    "invalid response": ValueError("not JSON"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_every_fault_of_the_hub_is_one_sentence(message: str, hub: Hub) -> None:
    hub.fails = FAULTS[message]
    with pytest.raises(UserError, match=message) as caught:
        arcuate.load("hf:lab/t15@v1")
    assert "token in" not in str(caught.value)


def test_a_repository_without_a_model_is_refused(hub: Hub) -> None:
    hub.add("lab/other", {"pytorch_model.bin": b"x"})
    with pytest.raises(UserError, match="is not a model of arcuate"):
        arcuate.load("hf:lab/other")


def test_without_the_package(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    actions: tuple[Callable[[], object], ...] = (lambda: arcuate.load("hf:lab/t15"), lambda: push(run, "lab/t15"))
    for action in actions:
        with pytest.raises(UserError, match=r"pip install 'arcuate\[hub\]'"):
            action()


def test_code_in_a_downloaded_model_is_not_imported(run: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('imported').touch()\n", "utf-8")
    push(run, "lab/t15")
    config = json.loads((run / "checkpoints/best/model.json").read_text("utf-8"))
    config["settings"]["encoder"] = {"kind": "evil:Encoder"}
    hub.add("lab/t15", {"model.json": json.dumps(config).encode(), "state.json": b"{}"})
    done = command("evaluate", "hf:lab/t15", "--data", GOLDEN / "store", cwd=tmp_path)
    assert done.returncode == 2 and "--allow-code evil" in done.stderr, done.stderr
    assert not (tmp_path / "imported").exists()
