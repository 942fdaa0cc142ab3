"""`prepare_board`: a local web page of all runs in a folder, updated while they train."""

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arcuate.config import value_text
from arcuate.errors import UserError
from arcuate.evaluation.metrics import run_rate_name
from arcuate.files import finite_int, finite_number
from arcuate.insight.comparison import compare, comparison_page
from arcuate.insight.ledger import ledger_page, write_ledger
from arcuate.insight.overlay import is_simulated, overlaid_figures
from arcuate.insight.render import environment, render_part, style_sheet, typeset, vega_bundle
from arcuate.insight.report.page import report_page
from arcuate.insight.report.run_data import read_run_data
from arcuate.insight.runs import Diagnose, RunEntry, find_parent, find_runs, missing_folder, read_entry
from arcuate.live.clients import TOKEN_COOKIE, Access, bind, make_access, port_of
from arcuate.progress import logger
from arcuate.run import Run

if TYPE_CHECKING:
    from fastapi import FastAPI

_REFRESH_S = 0.7  # seconds between scans of the folder
_FIRST_S = 0.8  # seconds spent on the first, incomplete rows of a large folder
_PAUSE_S = 0.001  # after each complete row, so that requests are answered while a large folder is read
_ACTIVE_S = 90.0  # a run whose log was written this recently is still training
_CURVE_POINTS = 40  # points in the sparkline of a row
_MAX_SELECTED = 24
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

# Policy of pages stored with runs, which may come from elsewhere: scripts are isolated from the board and load nothing.
_STORED_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MAX_PAGE_BYTES = 2**27

DiagnosisPage = Callable[[Path], str]  # makes the page of the doctor for a run folder


@dataclass(frozen=True)
class BoardRow:
    """One run on the board; `complete` is false until its verdict and parent have been computed."""

    name: str
    started: str = ""
    state: str = ""  # training, finished, or why training did not complete
    verdict: str = ""
    steps: int | None = None
    planned: int | None = None
    rate_name: str = "PER"  # CER for a run on characters
    best_per: float | None = None
    best_step: int | None = None
    wer: float | None = None
    target: str = ""
    purpose: str = ""
    parent: str = ""
    changes: tuple[str, ...] = ()  # relative to the parent
    curve: tuple[tuple[int, float], ...] = ()  # step, error rate
    simulated: bool = False
    ablation: str = ""  # name of the ablation that the run is part of
    problems: tuple[str, ...] = ()
    complete: bool = False


_Signature = tuple[tuple[int, int], ...]


@dataclass
class _CachedRun:
    """The row of one run folder, valid while the signature of its files is unchanged."""

    signature: _Signature
    row: BoardRow
    entry: RunEntry | None = None


@dataclass
class Board:
    """The runs of a folder. A thread keeps the rows up to date; `version` increases with every change."""

    folder: Path
    diagnose: Diagnose | None = field(default=None, repr=False)
    version: int = 0
    _cache: dict[Path, _CachedRun] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _listed: threading.Event = field(default_factory=threading.Event, repr=False)
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def has_failed(self) -> bool:
        """Whether the thread has ended by an error, so that the rows are out of date."""
        return self._thread is not None and not self._thread.is_alive() and not self._stop.is_set()

    def rows(self) -> list[BoardRow]:
        """All rows, latest run first."""
        with self._lock:
            rows = [known.row for known in self._cache.values()]
        return sorted(rows, key=lambda row: (row.started, row.name), reverse=True)

    def wait_until_listed(self) -> None:
        """Return when the first scan has listed all runs, or soon after."""
        self._listed.wait(2 * _FIRST_S)

    def run(self, name: str) -> Run:
        """Look up a run by its name on the board; paths outside the folder cannot be reached."""
        with self._lock:
            found = next((path for path, known in self._cache.items() if known.row.name == name), None)
        if found is None:
            raise UserError(f"the board has no run {name!r:.80}")
        return Run(found)

    def refresh(self, deadline: float | None = None) -> None:
        """Update the rows of new and changed runs: first the parts that can be read quickly, then the rest."""
        paths = self._list()
        changed: list[tuple[Path, _Signature]] = []
        with self._lock:
            gone = self._cache.keys() - set(paths)
            for path in gone:
                del self._cache[path]
            self.version += bool(gone)
        for path in paths:
            signature = _signature(path)
            known = self._cache.get(path)
            if known is not None and known.signature == signature and known.row.complete:
                if known.row.state == "training" and not _is_active(path):
                    changed.append((path, signature))
                continue
            changed.append((path, signature))
        first = time.monotonic() + _FIRST_S
        for path, signature in changed:
            if path not in self._cache or self._cache[path].signature != signature:
                name = self._name(path)
                before = self._cache.get(path)
                row = _quick_row(path, name, before.row if before else None) if time.monotonic() < first else None
                self._put(path, _CachedRun((), row or BoardRow(name)))
        self._listed.set()
        for path, signature in changed:
            if self._stop.wait(_PAUSE_S) or (deadline is not None and time.monotonic() > deadline):
                return
            entry = read_entry(path, self._name(path), self.diagnose)
            self._put(path, _CachedRun(signature, _full_row(entry, self._earlier(entry)), entry))

    def _list(self) -> list[Path]:
        try:
            return find_runs(self.folder)
        except UserError:  # no runs yet
            return []

    def _name(self, path: Path) -> str:
        name = path.resolve().name if path == self.folder else str(path.relative_to(self.folder))
        return name.encode("utf-8", "backslashreplace").decode()  # an address cannot hold other bytes

    def _earlier(self, entry: RunEntry) -> list[RunEntry]:
        others = [known.entry for known in self._cache.values() if known.entry is not None]
        key = lambda e: (not e.started, e.started, e.name)
        return sorted((e for e in others if key(e) < key(entry)), key=key)[-60:]  # the search is quadratic

    def _put(self, path: Path, known: _CachedRun) -> None:
        with self._lock:
            before = self._cache.get(path)
            self._cache[path] = known
            self.version += before is None or before.row != known.row

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except OSError as error:  # a folder removed while it was read
                logger.debug("board: %s", error)
            self._stop.wait(_REFRESH_S)


def _signature(path: Path) -> _Signature:
    """Modification times and sizes of the files that a row is computed from."""
    run = Run(path)
    files = (run.recipe_file, run.environment_file, run.metrics_file, run.incidents_file, run.calibration_file)
    parts = []
    for file in (*files, path / "results", run.checkpoints):
        try:
            found = file.stat()
            parts.append((found.st_mtime_ns, found.st_size))
        except OSError:
            parts.append((0, 0))
    return tuple(parts)


def _is_active(path: Path) -> bool:
    try:
        return time.time() - Run(path).metrics_file.stat().st_mtime < _ACTIVE_S
    except OSError:
        return False


def _quick_row(path: Path, name: str, before: BoardRow | None) -> BoardRow:
    """The row from the log and environment.json alone; verdict and parent are kept from the previous scan."""
    run = Run(path)
    try:
        rows, facts = run.metrics(), run.environment()
    except UserError:
        return before or BoardRow(name)
    curve = _curve([row for row in rows if row.get("split") != "train"])
    steps = [step for row in rows if (step := finite_int(row.get("step"))) is not None]
    best_per, best_step = min(((per, step) for step, per in curve), default=(None, None))
    old = before or BoardRow(name)
    return replace(
        old,
        started=str(facts.get("started") or ""),
        state="training" if _is_active(path) else old.state,
        steps=max(steps, default=None),
        rate_name=run_rate_name(run),
        best_per=best_per,
        best_step=best_step,
        curve=curve,
        simulated=is_simulated(run),
        complete=False,
    )


def _curve(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    points = [
        (step, round(per, 5))
        for row in rows
        if (per := finite_number(row.get("per"))) is not None and (step := finite_int(row.get("step"))) is not None
    ]
    every = max(1, -(-len(points) // _CURVE_POINTS))
    return tuple([*points[::-1][::every]][::-1])


def _full_row(entry: RunEntry, earlier: Sequence[RunEntry]) -> BoardRow:
    parent, path = find_parent(entry, earlier), entry.run.path
    active = entry.unfinished is not None and _is_active(path)
    folder = entry.ablation
    return BoardRow(
        name=entry.name,
        started=entry.started,
        state="training" if active else entry.unfinished or "finished",
        verdict="" if active and entry.verdict in ("too_short", "unfinished") else entry.verdict or "",
        steps=entry.logged.steps,
        planned=entry.planned_steps,
        rate_name=entry.rate_name,
        best_per=entry.logged.best_per,
        best_step=entry.logged.best_step,
        wer=entry.best_wer[0] if entry.best_wer else None,
        target=entry.target.status if entry.target else "",
        purpose=entry.recipe.purpose if entry.recipe else "",
        parent=parent.name if parent else "",
        changes=tuple(f"{c.path} {value_text(c.before)} → {value_text(c.after)}" for c in parent.changes)
        if parent
        else (),
        curve=_curve(entry.logged.validations),
        simulated=is_simulated(entry.run),
        ablation=folder.name if folder and (folder / "ablation.html").is_file() else "",
        problems=entry.problems,
        complete=True,
    )


# --- the server -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PreparedBoard:
    """A board that is ready to be served; `run` blocks until it is interrupted."""

    board: Board
    access: Access
    listener: socket.socket
    diagnosis_page: DiagnosisPage | None = None

    @property
    def url(self) -> str:
        return self.access.page_url(port_of(self.listener))

    def run(self) -> None:
        from arcuate.live.web import bounded_config, run_until_signal

        config = bounded_config(make_app(self.board, self.access, self.diagnosis_page))
        logger.info(f"open {self.url}  (Ctrl-C to stop)")
        run_until_signal(config, self.listener)


def prepare_board(
    folder: str | Path = "runs",
    *,
    host: str = "127.0.0.1",
    port: int = 8766,
    token: str | None = None,
    diagnose: Diagnose | None = None,
    diagnosis_page: DiagnosisPage | None = None,
) -> PreparedBoard:
    """Check the options of the board. The folder may be empty; runs appear when they start.

    The verdicts are those of `diagnose`, and `diagnosis_page` makes the page of one run; without them there are none.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"the board needs {', '.join(missing)}; install with: pip install 'arcuate[live]'")
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(missing_folder(folder))
    access = make_access(host, token)
    return PreparedBoard(Board(folder, diagnose), access, bind(host, port), diagnosis_page)


def make_app(board: Board, access: Access, diagnosis_page: DiagnosisPage | None = None) -> "FastAPI":
    """Create the app: the page, its data, and the pages of single runs, rendered on demand."""
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.responses import HTMLResponse, PlainTextResponse

    from arcuate.live.web import given_tokens, json_response

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        board.start()
        try:
            yield
        finally:
            board.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    rendering = threading.Lock()  # one page at a time

    @app.middleware("http")
    async def authorise(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        headers = request.headers
        if not access.allows_host(headers.get("host")) or not access.allows_origin(
            headers.get("origin"), headers.get("host")
        ):
            return PlainTextResponse("unknown host name or origin", 403)
        if not access.accepts_viewer(*given_tokens(request)):
            return PlainTextResponse("a token is required: open the address that the server printed", 401)
        response = await call_next(request)
        response.headers.update(_HEADERS)
        response.headers.setdefault("Content-Security-Policy", _POLICY)
        if access.token is not None and (given := request.query_params.get("token")) is not None:
            response.set_cookie(TOKEN_COOKIE, given, httponly=True, samesite="strict")
        return response

    @app.exception_handler(UserError)
    async def explain(_: Request, error: UserError) -> Response:
        return json_response({"error": str(error)}, 404)

    def page(make: Callable[[], str]) -> Response:
        with rendering:
            text = make()
        # The pages carry their own policy in a meta tag, which cannot set frame-ancestors.
        return HTMLResponse(text, headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    @app.get("/")
    def index() -> Response:
        name = board.folder.resolve().name
        return HTMLResponse(environment().get_template("board.html").render(name=name))

    @app.get("/assets/{name}")
    def asset(name: str) -> Response:
        kinds = dict.fromkeys(("vega.js", "page.js", "board.js"), "text/javascript") | {"board.css": "text/css"}
        if name not in kinds:
            return PlainTextResponse("not found", 404)
        return Response(_asset(name), media_type=kinds[name])

    @app.get("/api/runs")
    def runs(version: int = -1) -> Response:
        board.wait_until_listed()
        if board.has_failed:
            return json_response({"error": "the board has stopped reading runs; see its output and restart it"}, 503)
        if version == board.version:
            return json_response({"version": board.version})
        return json_response({"version": board.version, "runs": [asdict(row) for row in board.rows()]})

    @app.get("/api/curves")
    def curves(run: list[str] = Query()) -> Response:
        return json_response({"html": overlay(board, run)})

    @app.get("/api/compare")
    def compare_runs(run: list[str] = Query()) -> Response:
        found = compare(*_selected(board, run), evaluate_missing=False)
        return json_response(
            {"sentences": [typeset(d.sentence) for d in found.differences], "notes": list(found.notes)}
        )

    @app.get("/compare")
    def comparison(run: list[str] = Query()) -> Response:
        return page(lambda: comparison_page(compare(*_selected(board, run), evaluate_missing=False)))

    @app.get("/report")
    def report(run: str) -> Response:
        return page(lambda: report_page(read_run_data(board.run(run))))

    @app.get("/doctor")
    def doctor(run: str) -> Response:
        if diagnosis_page is None:
            raise UserError("this board was started without the doctor")
        path = board.run(run).path
        return page(lambda: diagnosis_page(path))

    @app.get("/ablation")
    def ablation(run: str) -> Response:
        file = board.run(run).path.resolve().parent.parent / "ablation.html"
        if not (file.parent / "experiment.json").is_file() or not file.is_file():
            raise UserError(f"{run} is not part of an ablation that has a page")
        if file.stat().st_size > _MAX_PAGE_BYTES:
            raise UserError(f"the page of the ablation of {run} is too large")
        return HTMLResponse(file.read_text("utf-8", "replace"), headers={"Content-Security-Policy": _STORED_POLICY})

    @app.get("/ledger")
    def ledger() -> Response:
        simulated = any(row.simulated for row in board.rows())
        return page(lambda: ledger_page(write_ledger(board.folder, diagnose=board.diagnose), simulated=simulated))

    return app


def overlay(board: Board, names: Sequence[str]) -> str:
    """Overlaid learning curves of runs as a part of the page."""
    runs = _selected(board, names)
    logs = [(name, run.metrics()) for name, run in zip(names, runs, strict=True)]
    return render_part("overlay.html", figures=overlaid_figures(logs, run_rate_name(*runs)))


def _selected(board: Board, names: Sequence[str]) -> list[Run]:
    if len(names) > _MAX_SELECTED:
        raise UserError(f"{len(names)} runs are selected; select at most {_MAX_SELECTED}")
    return [board.run(name) for name in names]


def _asset(name: str) -> str:
    if name == "vega.js":
        return vega_bundle()
    loader = environment().loader
    assert loader is not None
    text = loader.get_source(environment(), name)[0]
    return style_sheet() + text if name == "board.css" else text
