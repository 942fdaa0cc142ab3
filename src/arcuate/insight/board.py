"""`prepare_board`: a local web page of all runs in a folder, updated while they train."""

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arcuate.errors import UserError
from arcuate.files import finite_number
from arcuate.insight.compare import compare, comparison_page
from arcuate.insight.ledger import ledger_page, write_ledger
from arcuate.insight.render import environment, overlaid_figures, render_part, style_sheet, typeset, vega_bundle
from arcuate.insight.report.page import report_page
from arcuate.insight.run_data import Diagnose, Parent, RunData, read_run
from arcuate.insight.runs import changes_text, find_parent, find_runs, run_name, started_order
from arcuate.live.access import TOKEN_COOKIE, Access, bind, make_access, port_of
from arcuate.progress import logger
from arcuate.run import Run

if TYPE_CHECKING:
    from fastapi import FastAPI

_READ_S = 0.5  # seconds spent on reading runs before a request is answered with those read so far
_ACTIVE_S = 90.0  # a run whose log was written this recently is still training
_CURVE_POINTS = 40  # points in the sparkline of a row
_MAX_SELECTED = 24
_MAX_PAGE_BYTES = 2**27
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

DiagnosisPage = Callable[[Path], str]  # makes the page of the doctor for a run folder
_Signature = tuple[object, ...]


@dataclass(frozen=True)
class _Known:
    """A run folder as it was when its files had this signature."""

    signature: _Signature
    data: RunData

    @property
    def identity(self) -> object:
        """What the parent of a run depends on: its recipe and environment, not its log."""
        return self.signature[:2]


@dataclass
class Board:
    """The runs of a folder, read again when their files change; `version` increases with every change of a row."""

    folder: Path
    diagnose: Diagnose | None = field(default=None, repr=False)
    version: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)  # of the runs read so far, latest first
    n_pending: int = 0  # runs that are not read yet
    _known: dict[Path, _Known] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def refresh(self, seconds: float = _READ_S) -> None:
        """Read new and changed runs for a limited time; the next call continues with the others."""
        deadline = time.monotonic() + seconds
        with self._lock:
            before, self._known, paths = self._known, {}, self._list()
            for name, path in paths.items():
                known, signature = before.get(path), _signature(path)
                if (known is None or known.signature != signature) and time.monotonic() < deadline:
                    data = read_run(Run(path), name, self.diagnose)
                    known = _Known(signature, replace(data, parent=known.data.parent if known else None))
                if known is not None:
                    self._known[path] = known
            self.n_pending = len(paths) - len(self._known)
            if not self.n_pending and _identities(before) != _identities(self._known):
                self._find_parents()
            rows = [_board_row(known) for known in self._known.values()]
            rows.sort(key=lambda row: (row["started"], row["name"]), reverse=True)
            self.version += rows != self.rows
            self.rows = rows

    def find(self, *names: str) -> list[Run]:
        """Look up runs by their names on the board; paths outside the folder cannot be reached."""
        paths = self._list()
        if unknown := [name for name in names if name not in paths]:
            raise UserError(f"the board has no run {unknown[0]!r:.80}")
        return [Run(paths[name]) for name in names]

    def _list(self) -> dict[str, Path]:
        """The run folders by their names as in an address."""
        try:
            paths = find_runs(self.folder)
        except UserError:  # no runs yet
            return {}
        return {run_name(path, self.folder).encode("utf-8", "backslashreplace").decode(): path for path in paths}

    def _find_parents(self) -> None:
        runs = sorted((known.data for known in self._known.values()), key=started_order)
        for i, data in enumerate(runs):
            known = self._known[data.run.path]
            self._known[data.run.path] = replace(known, data=replace(data, parent=find_parent(data, runs[:i])))


def _identities(known: dict[Path, _Known]) -> dict[Path, object]:
    return {path: entry.identity for path, entry in known.items()}


def _signature(path: Path) -> _Signature:
    """Modification times and sizes of the files that a row is computed from, and whether the run is active."""
    run = Run(path)
    files = (run.recipe_file, run.environment_file, run.metrics_file, run.incidents_file, run.calibration_file)
    found = []
    for file in (*files, path / "results", run.checkpoints):
        try:
            stat = file.stat()
            found.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((0, 0))
    return (*found, time.time() - found[2][0] / 1e9 < _ACTIVE_S)


def _board_row(known: _Known) -> dict[str, Any]:
    """One run as the page shows it."""
    data = known.data
    active = data.unfinished is not None and bool(known.signature[-1])
    folder, best, parent = data.ablation, data.best, data.parent or Parent("", "", ())
    return {
        "name": data.name,
        "started": data.started,
        "state": "training" if active else data.unfinished or "finished",
        "verdict": "" if active and data.verdict in ("too_short", "unfinished") else data.verdict,
        "steps": data.last_step,
        "planned": data.planned_steps,
        "rate_name": data.rate_name,
        "best_per": best.rate if best else None,
        "best_step": best.step if best else None,
        "wer": data.best_wer[0] if data.best_wer else None,
        "target": data.target.status if data.target else "",
        "purpose": data.recipe.purpose if data.recipe else "",
        "parent": parent.name,
        "changes": [changes_text([change]) for change in parent.changes],
        "curve": _curve(data),
        "simulated": data.simulated,
        "ablation": folder.name if folder and (folder / "ablation.html").is_file() else "",
        "problems": list(data.problems),
    }


def _curve(data: RunData) -> list[tuple[int, float]]:
    """Step and error rate of some validations, the last one included."""
    found = [(int(row["step"]), finite_number(row.get("per"))) for row in data.validations]
    points = [(step, round(rate, 5)) for step, rate in found if rate is not None]
    return points[:: -max(1, -(-len(points) // _CURVE_POINTS))][::-1]


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

    Args:
        folder: Folder that contains runs, at any depth.
        host: Address to listen on; non-loopback addresses require a token.
        port: Port to listen on.
        token: Access token for clients; default: none on loopback, random otherwise.
        diagnose: Makes the verdicts; without it the runs have none.
        diagnosis_page: Makes the page of one run.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"the board needs {', '.join(missing)}; install with: pip install 'arcuate[live]'")
    folder = Path(folder)
    if not folder.is_dir():
        find_runs(folder)  # which says that there is no such folder
    access = make_access(host, token)
    return PreparedBoard(Board(folder, diagnose), access, bind(host, port), diagnosis_page)


def make_app(board: Board, access: Access, diagnosis_page: DiagnosisPage | None = None) -> "FastAPI":
    """Create the app: the page, its data, and the pages of single runs, rendered on demand."""
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.responses import HTMLResponse, PlainTextResponse

    from arcuate.live.web import given_tokens, json_response

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
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

    @app.api_route("/", methods=["GET", "HEAD"])
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
        board.refresh()
        if version == board.version:
            return json_response({"version": board.version})
        return json_response({"version": board.version, "runs": board.rows, "pending": board.n_pending})

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
        return page(lambda: report_page(read_run(board.find(run)[0])))

    @app.get("/doctor")
    def doctor(run: str) -> Response:
        if diagnosis_page is None:
            raise UserError("this board was started without the doctor")
        path = board.find(run)[0].path
        return page(lambda: diagnosis_page(path))

    @app.get("/ablation")
    def ablation(run: str) -> Response:
        file = board.find(run)[0].path.resolve().parent.parent / "ablation.html"
        if not (file.parent / "experiment.json").is_file() or not file.is_file():
            raise UserError(f"{run} is not part of an ablation that has a page")
        if file.stat().st_size > _MAX_PAGE_BYTES:
            raise UserError(f"the page of the ablation of {run} is too large")
        return HTMLResponse(file.read_text("utf-8", "replace"), headers={"Content-Security-Policy": _STORED_POLICY})

    @app.get("/ledger")
    def ledger() -> Response:
        simulated = any(row["simulated"] for row in board.rows)
        return page(lambda: ledger_page(write_ledger(board.folder, diagnose=board.diagnose), simulated=simulated))

    return app


def overlay(board: Board, names: Sequence[str]) -> str:
    """Overlaid learning curves of runs as a part of the page."""
    runs = [(name, read_run(run)) for name, run in zip(names, _selected(board, names), strict=True)]
    rates = " / ".join(dict.fromkeys(data.rate_name for _, data in runs))
    return render_part("overlay.html", figures=overlaid_figures(runs, rates))


def _selected(board: Board, names: Sequence[str]) -> list[Run]:
    if len(names) > _MAX_SELECTED:
        raise UserError(f"{len(names)} runs are selected; select at most {_MAX_SELECTED}")
    return board.find(*names)


def _asset(name: str) -> str:
    if name == "vega.js":
        return vega_bundle()
    loader = environment().loader
    assert loader is not None
    text = loader.get_source(environment(), name)[0]
    return style_sheet() + text if name == "board.css" else text
