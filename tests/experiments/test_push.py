"""Upload to and download from a stand-in for the Hugging Face Hub, with the real client."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import arcuate
from arcuate.errors import UserError
from arcuate.evaluation.card import write_card
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.push import plan_push, push, upload
from arcuate.hub import RECORD, download, local_path, parse_name
from arcuate.run import open_run
from support import forking
from support.hub_server import TOKEN, Hub, run_hub

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
GOLDEN = Path(__file__).parents[1] / "golden"
UPLOADED = ["README.md", "environment.json", "metrics.jsonl", "model.json", "model.safetensors", "recipe.yaml"]
UPLOADED += ["results/val.json", "state.json"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with run_hub() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name, value in environment(server, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield server


def environment(server: Hub, folder: Path) -> dict[str, str]:
    values = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200"}
    return {**values, "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True)


def test_a_pushed_run_is_loaded_with_equal_outputs(run: Path, hub: Hub) -> None:
    result = push(run, "lab/t15", licence="cc-by-4.0")
    assert result.commit is not None and sorted(hub.repositories["lab/t15"].commits[result.commit]) == UPLOADED
    bins = np.random.default_rng(1).normal(size=(50, 8))
    expected, found = arcuate.load(run), arcuate.load("hf:lab/t15")
    session, statistics = expected.sessions[0], None
    if expected.model.config.settings.front_end.normalise != "none":
        from arcuate.data.statistics import Statistics

        statistics = Statistics(np.zeros(8, np.float32), np.ones(8, np.float32), 50)
    outputs = [decoder.log_probs(bins, session, statistics) for decoder in (expected, found)]
    assert np.array_equal(*outputs)
    folder = local_path(f"hf:lab/t15@{result.commit}")
    assert json.loads((folder / RECORD).read_text("utf-8"))["commit"] == result.commit
    assert folder.name == "t15" and "license: cc-by-4.0" in (folder / "MODEL_CARD.md").read_text("utf-8")


def test_a_downloaded_run_is_evaluated_on_a_store(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    assert write_card("hf:lab/t15").n_results == 1  # the results of the run are still those of its checkpoint
    found = evaluate("hf:lab/t15", data=GOLDEN / "store")
    assert found.per == pytest.approx(json.loads((run / "results/val.json").read_text("utf-8"))["per"])
    with pytest.raises(UserError, match="does not record where its store is"):
        evaluate("hf:lab/t15")


def test_a_commit_is_downloaded_once_and_then_needs_no_network(run: Path, hub: Hub) -> None:
    commit = push(run, "lab/t15").commit
    first = download(f"hf:lab/t15@{commit}")
    hub.requests.clear()
    assert download(f"hf:lab/t15@{commit}") == first and hub.requests == []
    newer = hub.add("lab/t15", {"README.md": b"# new"})
    assert download("lab/t15").commit == newer and download("lab/t15", revision=commit).commit == commit


def test_what_a_killed_download_left_is_removed_by_the_next(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    folder = local_path("hf:lab/t15")
    shutil.rmtree(folder)
    killed = folder.with_name(".t15.hub.part")
    (killed / ".cache").mkdir(parents=True)
    assert local_path("hf:lab/t15") == folder
    assert [path.name for path in folder.parent.iterdir()] == ["t15"]


def test_only_files_of_a_model_are_downloaded(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    hub.add("lab/t15", {"training.pkl": pickle.dumps({}), "model.py": b"raise SystemExit", "a/../../b.json": b"{}"})
    folder = local_path("hf:lab/t15")
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert names == {*UPLOADED, RECORD, "MODEL_CARD.md"} - {"README.md"}
    assert not any(".pkl" in request or ".py" in request for request in hub.requests)


def test_nothing_personal_is_uploaded(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    environment_file = run / "environment.json"
    facts = json.loads(environment_file.read_text("utf-8"))
    facts["data"]["path"] = "/home/alice/secret/store"
    facts |= {"parent": "/home/alice/runs/parent@best", "command": ["train", "--data", "/home/alice/secret/store"]}
    environment_file.write_text(json.dumps(facts), "utf-8")
    recipe = (run / "recipe.yaml").read_text("utf-8").replace("notes: ''", "notes: 'from /home/alice/runs/old run'")
    (run / "recipe.yaml").write_text(recipe + "compare_with: ../alice/secret/earlier\n", "utf-8")
    commit = push(run, "lab/t15").commit
    files = hub.repositories["lab/t15"].commits[str(commit)]
    assert all(b"alice" not in content and b"secret" not in content for content in files.values())
    assert json.loads(files["environment.json"])["parent"] == "parent@best"
    for private in ("results/val.jsonl", "predictions.jsonl", "incidents.jsonl", "training.safetensors"):
        assert private not in files
    write_card(run)
    with (run / "MODEL_CARD.md").open("a", encoding="utf-8") as card:
        card.write("See /home/alice/notes.txt\n")
    with pytest.raises(UserError, match=r"contains the path '/home/alice/notes\.txt'"):
        push(run, "lab/t15")


def test_a_dry_run_makes_no_request(run: Path, hub: Hub) -> None:
    result = push(run, "lab/t15", dry_run=True)
    assert result.dry_run and hub.requests == [] and [f.name for f in result.plan.files] == UPLOADED


def test_private_repositories(run: Path, hub: Hub) -> None:
    push(run, "lab/hidden", private=True)
    assert hub.repositories["lab/hidden"].private
    push(run, "lab/open")
    with pytest.raises(UserError, match="exists and is public"):
        push(run, "lab/open", private=True)


def test_an_exported_model_is_pushed_with_its_card(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="exporting needs the extra `export`")
    from arcuate.experiments.export import export
    from arcuate.live.load import find_model

    export(GOLDEN / "run", tmp_path / "model.arcx", words=False)
    push(tmp_path / "model.arcx", "lab/arcx")
    path = find_model("hf:lab/arcx")
    assert path.read_bytes() == (tmp_path / "model.arcx").read_bytes()
    assert (path.parent / "MODEL_CARD.md").read_text("utf-8").startswith("---\nlibrary_name: arcuate")
    with pytest.raises(UserError, match="is an exported model"):
        open_run("hf:lab/arcx")


def test_a_card_that_the_user_wrote_is_uploaded_as_it_is(run: Path, hub: Hub) -> None:
    (run / "MODEL_CARD.md").write_text("---\nlicense: mit\n---\n# Mine\n", "utf-8")
    commit = push(run, "lab/t15").commit
    assert hub.repositories["lab/t15"].commits[str(commit)]["README.md"] == b"---\nlicense: mit\n---\n# Mine\n"
    (run / "MODEL_CARD.md").write_text("---\nlicense: [mit]\n---\n# Mine\n", "utf-8")
    with pytest.raises(UserError, match="does not accept the model card"):
        push(run, "lab/t15")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lab", "not the name of a repository"),
        ("lab/..", "not the name of a repository"),
        ("../x", "not the name of a repository"),
        ("a/b/c", "not the name of a repository"),
        ("lab/t15@../x", "not a revision"),
        ("lab/t15@", "not a revision"),
        ("lab/t15 x", "not the name of a repository"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_name(f"hf:{name}")


def test_other_repositories_and_revisions_are_refused_in_one_sentence(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    hub.add("lab/other", {"pytorch_model.bin": b"x"})
    for name, message in {
        "hf:lab/missing": "no repository",
        "hf:lab/t15@v9": "no revision 'v9'",
        "hf:lab/other": "is not a model of arcuate",
    }.items():
        with pytest.raises(UserError, match=message):
            arcuate.load(name)
    with pytest.raises(UserError, match="name different revisions"):
        arcuate.load("hf:lab/t15@main", revision="v1")
    with pytest.raises(UserError, match="not to"):
        arcuate.load(run, revision="v1")


def test_content_that_differs_from_its_hash_is_refused(run: Path, hub: Hub) -> None:
    commit = push(run, "lab/t15").commit
    content = hub.repositories["lab/t15"].commits[str(commit)]
    for part in ("model.safetensors", "model.json"):
        stated = _info_answer(hub, str(commit))
        kept, content[part] = content[part], bytes([content[part][0] ^ 1]) + content[part][1:]
        hub.answers = {f"/api/models/lab/t15/revision/{commit}": stated}
        with pytest.raises(UserError, match="differs from the hash"):
            download(f"hf:lab/t15@{commit}")
        content[part], hub.answers = kept, {}
    assert download(f"hf:lab/t15@{commit}").commit == commit


def _info_answer(hub: Hub, commit: str) -> bytes:
    import urllib.request

    request = urllib.request.Request(f"{hub.url}/api/models/lab/t15/revision/{commit}?blobs=True")
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def test_faulty_servers(run: Path, hub: Hub) -> None:
    push(run, "lab/t15")
    cases = {500: "500 Internal Server Error", 403: "403 Forbidden", b"<html>": "invalid response"}
    for answer, message in cases.items():
        hub.answers = {"/api/models/lab/t15": answer}
        with pytest.raises(UserError, match=message):
            arcuate.load("hf:lab/t15")


def test_without_a_token_or_a_server(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="401 Unauthorized; log in") as caught:
        push(run, "lab/t15")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"cannot reach http://127\.0\.0\.1:1"):
        arcuate.load("hf:lab/t15")


def test_without_the_package(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for action in (lambda: arcuate.load("hf:lab/t15"), lambda: push(run, "lab/t15")):
        with pytest.raises(UserError, match=r"pip install 'arcuate\[hub\]'"):
            action()
    assert push(run, "lab/t15", dry_run=True).dry_run and write_card(run).path.is_file()


def test_code_in_a_downloaded_model_is_not_imported(run: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('imported').touch()\n", "utf-8")
    push(run, "lab/t15")
    config = json.loads((run / "checkpoints/best/model.json").read_text("utf-8"))
    config["settings"]["encoder"] = {"kind": "evil:Encoder"}
    hub.add("lab/t15", {"model.json": json.dumps(config).encode(), "state.json": b"{}"})
    done = arcuate_command(["evaluate", "hf:lab/t15", "--data", str(GOLDEN / "store")], hub, tmp_path)
    assert done.returncode == 2 and "--allow-code evil" in done.stderr, done.stderr
    assert not (tmp_path / "imported").exists()


def test_the_command_asks_and_never_prints_the_token(run: Path, hub: Hub, tmp_path: Path) -> None:
    refused = arcuate_command(["push", str(run), "lab/t15"], hub, tmp_path)
    assert refused.returncode == 2 and "confirm with --yes" in refused.stderr and hub.requests == []
    listed = arcuate_command(["push", str(run), "lab/t15", "--dry-run", "--json"], hub, tmp_path)
    assert [f["name"] for f in json.loads(listed.stdout)["files"]] == UPLOADED and hub.requests == []
    pushed = arcuate_command(["push", str(run), "lab/t15", "--yes", "--private"], hub, tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    commit = hub.repositories["lab/t15"].branches["main"]
    assert f"hf:lab/t15@{commit}" in pushed.stdout
    loaded = arcuate_command(["load", "hf:lab/t15", "--revision", commit, "--to", "copy", "--json"], hub, tmp_path)
    assert json.loads(loaded.stdout)["commit"] == commit and (tmp_path / "copy" / "model.safetensors").is_file()
    again = arcuate_command(["load", "hf:lab/t15", "--to", "copy"], hub, tmp_path)
    assert again.returncode == 2 and "is not empty" in again.stderr
    for done in (refused, listed, pushed, loaded, again):
        assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr


def arcuate_command(words: list[str], hub: Hub, folder: Path) -> "subprocess.CompletedProcess[str]":
    return forking.arcuate(*words, environment={**os.environ, **environment(hub, folder)}, cwd=folder)


def test_a_plan_is_uploaded_once_it_is_confirmed(run: Path, hub: Hub) -> None:
    plan = plan_push(run, "lab/t15")
    assert hub.requests == []
    assert upload(plan).commit in hub.repositories["lab/t15"].commits
