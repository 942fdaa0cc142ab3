// The table of runs, kept up to date by polling; filter, sort and selection are in the address of the page.
"use strict";
(() => {
  const POLL_MS = 800;
  const byId = (id) => document.getElementById(id);
  const body = document.querySelector("#runs tbody");
  const params = new URLSearchParams(location.search);
  const state = {
    filter: params.get("filter") || "", sort: params.get("sort") || "started", down: params.get("order") !== "up",
    selected: new Set(params.getAll("run")),
  };
  let rows = [], pending = 0, version = -1, drawn = "", vega = null;

  const percent = (rate) => (rate === null ? "–" : `${(100 * rate).toFixed(1)}\u202f%`);
  const count = (n) => (n === null ? "–" : n.toLocaleString("en"));
  const query = (names) => names.map((name) => `run=${encodeURIComponent(name)}`).join("&");

  const element = (name, content, attributes = {}) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (content !== undefined) node.append(content);
    return node;
  };

  const tone = (verdict) => (verdict === "healthy" ? "good" : ["unfinished", "too_short", "restarted", "calibrated"].includes(verdict) ? "mild" : verdict ? "bad" : "");

  const sparkline = (curve, name) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "spark");
    svg.setAttribute("viewBox", "0 0 120 28");
    if (!curve.length) return svg;
    const last = Math.max(curve[curve.length - 1][0], 1), top = Math.max(...curve.map((p) => p[1]), 0.01);
    const at = ([step, per]) => [2 + (114 * step) / last, 26 - (24 * per) / top];
    const path = document.createElementNS(space, "path");
    path.setAttribute("d", "M" + curve.map((p) => at(p).map((v) => v.toFixed(1)).join(" ")).join("L"));
    const dot = document.createElementNS(space, "circle");
    const [x, y] = at(curve[curve.length - 1]);
    for (const [key, value] of [["cx", x], ["cy", y], ["r", 2.4]]) dot.setAttribute(key, value);
    const title = document.createElementNS(space, "title");
    title.textContent = `${name} ${percent(curve[0][1])} at step ${count(curve[0][0])} to ${percent(curve[curve.length - 1][1])} at step ${count(last)}`;
    svg.append(path, dot, title);
    return svg;
  };

  const address = () => {
    const now = new URLSearchParams();
    if (params.get("token")) now.set("token", params.get("token"));
    if (state.filter) now.set("filter", state.filter);
    if (state.sort !== "started") now.set("sort", state.sort);
    if (!state.down) now.set("order", "up");
    for (const name of state.selected) now.append("run", name);
    const text = now.toString();
    history.replaceState(null, "", text ? `?${text}` : location.pathname);
  };

  const matches = (row) => {
    const text = [row.name, row.verdict, row.state, row.target, row.purpose, row.parent, ...row.changes].join(" ").toLowerCase();
    return state.filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  };

  const mixed = () => rows.some((row) => row.rate_name !== rows[0].rate_name);

  const compareRows = (a, b) => {
    const [x, y] = [a[state.sort], b[state.sort]];
    const empty = (v) => v === null || v === "";
    if (empty(x) || empty(y)) return empty(x) - empty(y) || a.name.localeCompare(b.name);
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return (state.down ? -order : order) || a.name.localeCompare(b.name);
  };

  const tableRow = (row) => {
    const tr = element("tr", undefined, { "data-run": row.name });
    const box = element("input", undefined, { type: "checkbox", "aria-label": `select ${row.name}` });
    box.checked = state.selected.has(row.name);
    box.addEventListener("change", () => {
      if (box.checked) state.selected.add(row.name); else state.selected.delete(row.name);
      address();
      overlay();
    });
    const name = element("th", row.name, { scope: "row", title: row.purpose });
    if (row.simulated && rows.some((other) => !other.simulated)) name.append(element("span", "simulated", { class: "tag" }));
    const verdict = element("td", undefined, { class: "verdict" });
    verdict.append(element("span", row.verdict.replaceAll("_", " ") || "–", { class: tone(row.verdict) }));
    if (row.state && row.state !== "finished") verdict.append(element("span", row.state, { class: `state ${row.state === "training" ? "training" : ""}` }));
    if (row.problems.length) verdict.append(element("span", row.problems.join("; "), { class: "state" }));
    const best = row.best_per !== null && mixed() ? `${row.rate_name} ${percent(row.best_per)}` : percent(row.best_per);
    const steps = row.planned !== null && row.planned !== row.steps ? `${count(row.steps)} of ${count(row.planned)}` : count(row.steps);
    const changes = element("td", undefined, { class: "changes" });
    if (row.parent) {
      const shown = row.changes.slice(0, 3).join(", ") + (row.changes.length > 3 ? ` and ${row.changes.length - 3} more` : "");
      changes.append(`${row.parent}: ${shown || "no change"}`);
      changes.title = row.changes.join("\n");
    }
    const pages = element("td", undefined, { class: "pages" });
    const links = [["report", true], ["doctor", true], ["ablation", row.ablation !== ""]];
    for (const [page, shown] of links) if (shown) pages.append(element("a", page, { href: `${page}?run=${encodeURIComponent(row.name)}` }));
    const spark = element("td", sparkline(row.curve, row.rate_name), { class: "spark" });
    const number = (text, label, title) => element("td", text, { class: label === "WER" ? "number wer" : "number", "data-label": label, title: title || "" });
    tr.append(
      element("td", box), name, verdict, number(best, `best ${row.rate_name}`, row.best_step === null ? "" : `at step ${count(row.best_step)}`),
      number(percent(row.wer), "WER"), element("td", row.target || "–", { "data-label": "target", class: "target" }), spark, number(steps, "steps"),
      element("td", row.started.slice(0, 16).replace("T", " "), { class: "started", "data-label": "started" }), changes, pages,
    );
    return tr;
  };

  const show = () => {
    const shown = rows.filter(matches).sort(compareRows);
    const active = document.activeElement && document.activeElement.closest("#runs tr[data-run]");
    body.replaceChildren(...shown.map(tableRow));
    if (active) {
      const again = [...body.children].find((tr) => tr.dataset.run === active.dataset.run);
      if (again) again.querySelector("input").focus();
    }
    byId("count").textContent = `${shown.length === rows.length ? count(rows.length) : `${count(shown.length)} of ${count(rows.length)}`} ${rows.length === 1 ? "run" : "runs"}` + (pending ? `, ${count(pending)} being read` : "");
    const names = [...new Set(rows.map((row) => row.rate_name))].join(" / ") || "PER";
    document.querySelector("#runs button[data-key=best_per]").textContent = `best ${names}`;
    byId("over-steps").textContent = `${names} over steps`;
    byId("runs").classList.toggle("no-wer", rows.every((row) => row.wer === null)); // columns without a value
    byId("runs").classList.toggle("no-target", rows.every((row) => !row.target));
    byId("empty").hidden = rows.length > 0;
    byId("simulated").hidden = !rows.some((row) => row.simulated);
    for (const button of document.querySelectorAll("#runs thead button")) {
      if (button.dataset.key === state.sort) button.parentNode.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else button.parentNode.removeAttribute("aria-sort");
    }
  };

  const load = () => {
    vega ||= new Promise((resolve, reject) => {
      const script = element("script", undefined, { src: "assets/vega.js" });
      script.onload = resolve;
      script.onerror = reject;
      document.head.append(script);
    });
    return vega;
  };

  const overlay = async () => {
    const names = [...state.selected].filter((name) => rows.some((row) => row.name === name));
    byId("compare").disabled = names.length < 2;
    byId("clear").disabled = names.length === 0;
    byId("overlay").hidden = names.length === 0;
    const key = JSON.stringify([names, names.map((name) => (rows.find((row) => row.name === name) || {}).curve)]);
    if (key === drawn) return;
    drawn = key;
    if (!names.length) return;
    const [response] = await Promise.all([fetch(`api/curves?${query(names)}`), load()]);
    const found = await response.json();
    if (drawn !== key || found.error) return;
    const off = new Set([...byId("charts").querySelectorAll("button.off")].map((button) => button.dataset.series));
    byId("charts").innerHTML = found.html; // escaped by the template
    for (const button of byId("charts").querySelectorAll("button[data-series]")) button.classList.toggle("off", off.has(button.dataset.series));
    setUpPage(byId("charts"));
    await difference(names);
  };

  const difference = async (names) => {
    const place = byId("difference");
    if (names.length < 2) { place.replaceChildren(); return; }
    const found = await (await fetch(`api/compare?${query(names)}`)).json();
    const lines = found.error ? [element("p", found.error, { class: "muted" })]
      : [...found.sentences.map((text) => element("p", text)), ...found.notes.map((text) => element("p", text, { class: "notice" }))];
    place.replaceChildren(...lines);
  };

  const poll = async () => {
    try {
      const response = await fetch(`api/runs?version=${version}`);
      if (!response.ok) throw new Error(`status ${response.status}`);
      const found = await response.json();
      byId("status").textContent = "";
      if (found.runs) {
        ({ version, runs: rows, pending } = found);
        show();
        await overlay();
      }
    } catch (error) {
      byId("status").textContent = "The server does not respond; the table may be out of date.";
    }
    setTimeout(poll, POLL_MS);
  };

  byId("filter").value = state.filter;
  byId("filter").addEventListener("input", (event) => { state.filter = event.target.value; address(); show(); });
  for (const button of document.querySelectorAll("#runs thead button")) {
    button.addEventListener("click", () => {
      if (state.sort === button.dataset.key) state.down = !state.down;
      else { state.sort = button.dataset.key; state.down = ["started", "steps"].includes(state.sort); }
      address();
      show();
    });
  }
  byId("compare").addEventListener("click", () => { location.href = `compare?${query([...state.selected])}`; });
  byId("clear").addEventListener("click", () => { state.selected.clear(); address(); show(); overlay(); });
  poll();
})();
