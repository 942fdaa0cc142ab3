// The live page: shows the events of the server, which keeps the state, so a page opened later shows the same.
import { Scroll } from "./scroll.js";

const byId = (id) => document.getElementById(id);
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const WINDOW = 500; // bins on screen: 10 s
const HISTORY = 200; // sentences that can be scrolled back to
const SPEEDS = [1, 2, 4, 8];
const RASTER_SD = 3.5; // standard deviations above the mean of a channel that are drawn in full colour
const GREY_PER_SD = 28, GREY_MEAN = 128; // bytes of the raster, as in viewers.py
const token = new URLSearchParams(location.search).get("token");
const suffix = token ? `?token=${encodeURIComponent(token)}` : "";

let info = null; // model and source, from /info
let socket = null;
let retry = 500;
let reference = null;
let decoding = "connecting"; // closed (gate), listening, speaking
let replay = null; // {paused, speed}
let connected = false;
let rejection = null;
const options = { reference: false, voice: false }; // reference before the sentence is decoded; speech output
let failure = null; // why decoding or its source has stopped
let rasters = [];
let phonemes = null;
const latencies = []; // [p50, p99] in ms, the last 60

// --- words -----------------------------------------------------------------------------------------------

function wordNode(word, cls, others) {
  const node = make("button", `word ${cls}`, word);
  node.type = "button";
  if (others && others.length) {
    node.classList.add("choice");
    node.dataset.others = JSON.stringify(others);
    node.setAttribute("aria-label", `${word}, or ${others.join(", or ")}`);
  } else node.tabIndex = -1;
  return node;
}

const texts = (event) => (info.words ? event.words : event.tokens); // without words, what the model decodes is shown

function showPartial(event) {
  const box = byId("words");
  const focused = [...box.children].indexOf(document.activeElement);
  const nodes = texts(event).map((word, i) =>
    wordNode(word, i < event.n_settled ? "settled" : "unsettled", event.alternatives?.[i]));
  box.replaceChildren(...nodes);
  box.dataset.kind = "partial";
  if (focused >= 0 && nodes[focused]) nodes[focused].focus();
  refreshTip();
}

function alignedNodes(event) {
  let position = 0;
  return event.alignment.map((part) => {
    if (part.op === "deletion") return make("span", "deletion", part.word);
    const others = event.alternatives?.[position] ?? [];
    const node = doubt(wordNode(part.word, part.op, others), event, position++);
    if (part.reference) detail(node, `reference: ${part.reference}`);
    return node;
  });
}

function finalNodes(event) {
  if (event.alignment) return alignedNodes(event);
  if (event.empty) return [make("span", "hint", info.words ? "no words decoded" : `no ${info.unit}s decoded`)];
  return texts(event).map((word, i) => doubt(wordNode(word, "settled", event.alternatives?.[i]), event, i));
}

function doubt(node, event, i) { // marks a word below the acceptance threshold
  const confidence = event.confidences?.[i];
  if (confidence === undefined) return node;
  node.dataset.confidence = confidence;
  detail(node, `confidence ${Math.round(100 * confidence)} %`);
  if (event.doubtful?.includes(i)) node.classList.add("doubtful");
  return node;
}

function detail(node, text) { // a line of what a click on the word shows
  node.dataset.details = JSON.stringify([...JSON.parse(node.dataset.details ?? "[]"), text]);
  node.setAttribute("aria-label", `${node.getAttribute("aria-label") ?? node.textContent}, ${text}`);
}

let lastFinal = null;
function showFinal(event, silent = false) {
  moveToHistory();
  lastFinal = event;
  byId("words").replaceChildren(...finalNodes(event));
  byId("words").dataset.kind = "final";
  reference = event.reference;
  showReference(event.alignment);
  refreshTip();
  showErrorRate(event.running);
  showEstimate(event.estimate);
  if (silent) return;
  byId("announce").textContent = texts(event).join(" ");
  if (!event.cut) speak(event.text);
}

function showErrorRate(running) { // over all sentences with a reference since the server started
  if (!running?.n_words) return;
  byId("error-rate").hidden = false;
  byId("wer").textContent = `${(100 * running.n_errors / running.n_words).toFixed(1)} %`;
  byId("error-rate").title = `${running.n_errors} errors in ${running.n_words} words of ${running.n_sentences} sentences`;
}

function showFloor(floor) { // of the run, measured by evaluate --floor
  const rate = info.words ? floor?.wer : floor?.per;
  if (rate == null) return;
  byId("floor").hidden = false;
  byId("floor-rate").textContent = `${(100 * rate).toFixed(0)} %`;
  byId("floor").title = `Lowest ${info.words ? "word" : info.unit} error rate of the same recipe trained on input without neural information`;
}

function showEstimate(estimate) { // of the latest sentences, without references
  if (!estimate) return;
  const [rate, low, high] = [estimate.error_rate, estimate.low, estimate.high].map((share) => Math.round(100 * share));
  byId("estimate").hidden = false;
  byId("estimated").textContent = `${rate} % (${low}–${high})`;
  byId("estimate").title = `Estimated from the model's certainty in the last ${estimate.n_trials} sentences, with a 90 % interval; ` +
    `${(100 * estimate.reference.error_rate).toFixed(1)} % on ${estimate.reference.n_trials} labelled trials.`;
}

function moveToHistory() { // moves the last sentence
  if (!lastFinal) return;
  const line = make("li");
  for (const node of finalNodes(lastFinal)) {
    node.tabIndex = -1;
    line.append(node, " ");
  }
  const list = byId("history");
  list.append(line);
  while (list.children.length > HISTORY) list.firstChild.remove();
  showEndOfHistory();
  lastFinal = null;
}

let followsEnd = true; // else someone is reading further up
function showEndOfHistory() {
  const list = byId("history");
  list.classList.toggle("long", list.scrollHeight > list.clientHeight);
  if (followsEnd) list.scrollTop = list.scrollHeight;
}
byId("history").addEventListener("scroll", ({ target: list }) => {
  followsEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
});
new ResizeObserver(showEndOfHistory).observe(byId("history")); // a long sentence leaves it less height

function showReference(alignment) {
  const box = byId("reference");
  box.replaceChildren();
  if (!reference || !(alignment || options.reference)) return; // else it would give the sentence away
  box.append(make("small", "", "reference"), make("b", "", reference));
  if (!alignment) return;
  const n = alignment.filter((part) => part.op !== "correct").length;
  const text = n === 0 ? "no errors" : `${n} word ${n === 1 ? "error" : "errors"}`;
  box.append(make("span", n ? "score some" : "score", text));
}

function showTrial(event) {
  moveToHistory();
  reference = event.reference;
  showReference(null);
  byId("words").replaceChildren(make("span", "hint", "…"));
  refreshTip();
  byId("trial-name").textContent = event.trial ? event.trial.replaceAll("/", " · ") : event.session;
  const [session] = (event.trial ?? "").split("/");
  if (info?.replay && session) {
    if (byId("session").value !== session) { byId("session").value = session; fillTrials(); }
    byId("trial").value = event.trial;
  }
}

// --- confidence and alternatives on hover, click or focus ------------------------------------------------

const EXPLAINED = ".word:is([data-others], [data-details])";
let tipped = null; // word whose alternatives are shown
function tip(node) {
  const box = byId("tip");
  tipped = node;
  if (!node || !node.isConnected) { box.hidden = true; return; }
  const { others = "[]", details = "[]" } = node.dataset, alternatives = JSON.parse(others).map((o) => make("div", "", o));
  box.replaceChildren(...JSON.parse(details).map((text) => make("small", "", text)));
  if (alternatives.length) box.append(make("small", "", "or"), ...alternatives);
  box.hidden = false;
  const at = node.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), innerWidth - box.offsetWidth - 8);
  const below = at.bottom + 8 + box.offsetHeight < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${below ? at.bottom + 8 : at.top - 8 - box.offsetHeight}px`;
}
let pointer = null;
function refreshTip() { // words are redrawn while the pointer rests
  if (!tipped) return;
  const under = pointer ? document.elementFromPoint(...pointer) : document.activeElement;
  tip(under?.closest?.(EXPLAINED) ?? null);
}
for (const kind of ["pointermove", "pointerdown"]) // touch has no pointermove before pointerdown
  document.addEventListener(kind, (e) => {
    pointer = [e.clientX, e.clientY];
    const node = e.target.closest?.(EXPLAINED) ?? null;
    if (node !== tipped) tip(node);
  });
document.addEventListener("focusin", (e) => {
  if (e.target.matches?.(":focus-visible")) pointer = null; // by keyboard: ignore the resting mouse
  tip(e.target.closest?.(EXPLAINED) ?? null);
});
document.addEventListener("scroll", () => tip(null));
document.addEventListener("keydown", (e) => { if (e.key === "Escape") tip(null); });
document.addEventListener("click", (e) => { const n = e.target.closest?.(EXPLAINED); if (n) tip(n); });

// --- state, latency, faults ------------------------------------------------------------------------------

const STATE_TEXT = {
  closed: "not decoding", listening: "listening", speaking: "decoding", paused: "paused",
  connecting: "connecting", stopped: "failed",
};
function showState() {
  const shown = !connected ? "connecting" : failure ? "stopped" : replay?.paused && decoding !== "closed" ? "paused" : decoding;
  byId("state").dataset.state = shown;
  byId("failure").hidden = !failure;
  byId("failure").textContent = failure ?? "";
  byId("state").querySelector("b").textContent = (!connected && rejection) || (STATE_TEXT[shown] ?? shown);
  const lock = byId("lock"), closed = decoding === "closed";
  lock.textContent = closed ? "Start decoding" : "Stop decoding";
  lock.classList.toggle("closed", closed);
  if (!closed || !connected) return;
  byId("words").replaceChildren(make("span", "hint",
    info?.phrase ? "not decoding – start with the phrase or with the key o" : "not decoding – start with the key o"));
  byId("reference").replaceChildren();
  refreshTip();
}

function showRecording(event) {
  const box = byId("recording");
  box.hidden = false;
  box.dataset.state = event.on ? "recording" : "stopped";
  box.querySelector("b").textContent = event.on ? "recording" : "not recording";
  box.title = event.message ?? "Sentences are being recorded";
  if (!event.on) toast(event.message);
}

function showAdaptation(event) {
  const box = byId("adaptation"), n = event.n_sentences;
  const updates = `${event.n_steps} ${event.n_steps === 1 ? "update" : "updates"} after ${n} ${n === 1 ? "sentence" : "sentences"}`;
  box.hidden = false;
  box.dataset.state = event.state;
  box.textContent = event.state === "adapting" ? `adapting, ${event.n_steps} of ${n} used`
    : event.state === "fell back" ? "fell back to the unadapted model" : "adaptation off";
  const initial = event.init_session === event.session ? "its own layer" : `the layer of ${event.init_session}`;
  box.title = [event.reason, `started with ${initial}`, updates,
    event.n_skipped ? `${event.n_skipped} skipped` : ""].filter(Boolean).join("; ");
}

const ms = (value) => (value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`);
function showLatency(event) {
  byId("p50").textContent = ms(event.frame_ms_p50);
  byId("p99").textContent = ms(event.frame_ms_p99);
  byId("missed").textContent = `${event.missed_deadlines} of ${event.n_frames.toLocaleString("en")}`;
  byId("missed").classList.toggle("late", event.missed_deadlines > 0);
  byId("meter").title = `Time from the last bin of a frame to its text; deadline ${event.deadline_ms} ms`;
  if (event.frame_ms_p50 !== null) latencies.push([event.frame_ms_p50, event.frame_ms_p99]);
  while (latencies.length > 60) latencies.shift();
  drawSpark(event.deadline_ms);
}

function drawSpark(deadline) {
  const canvas = byId("spark"), pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const top = Math.max(deadline / 4, ...latencies.map((s) => s[1])) * 1.1;
  const y = (v) => canvas.height - 2 - (v / top) * (canvas.height - 4);
  for (const [k, colour] of [[1, "--line"], [0, "--blue"]]) {
    pen.strokeStyle = style.getPropertyValue(colour);
    pen.lineWidth = 2;
    pen.beginPath();
    latencies.forEach((s, i) => pen.lineTo((i / 59) * canvas.width, y(s[k])));
    pen.stroke();
  }
}

let toastTimer = null;
function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { box.hidden = true; }, 4000);
}
const ACTION_TEXT = { hold: "last values held", zero: "replaced by zeros", reset: "sentence ended", dropped: "dropped" };

// --- neural activity ---------------------------------------------------------------------------------------

function buildPanels() {
  rasters = [];
  byId("rasters").replaceChildren();
  info.features.forEach((feature, k) => {
    const panel = make("figure", "panel raster"), caption = make("figcaption");
    const colour = k ? "orange" : "blue", scale = make("span", "scale"), bar = make("i");
    bar.style.setProperty("--c", `var(--${colour})`);
    scale.append("mean ", bar, ` ${RASTER_SD} SD above`);
    caption.append(make("b", "", feature.name), make("span", "", "one row per electrode, by array"), scale);
    const plot = make("div", "plot"), labels = make("div", "labels"), canvas = make("canvas");
    for (const array of feature.arrays) labels.append(make("span", "", array.name));
    plot.append(labels, canvas);
    panel.append(caption, plot);
    byId("rasters").append(panel);
    const first = feature.arrays[0].first;
    const n = feature.arrays.reduce((sum, array) => sum + array.n, 0);
    const edges = feature.arrays.slice(1).map((array) => (array.first - first) / n);
    rasters.push({ first, n, scroll: new Scroll(canvas, WINDOW, n, colour, edges) });
  });
  buildPhonemes();
  byId("frame-ms").textContent = info.frame_ms;
  for (const node of document.querySelectorAll(".unit")) node.textContent = info.unit;
  const d = info.delay_ms;
  byId("delay").textContent = `model delay ${d.total} ms (smoothing ${d.smoothing}, patches ${d.patch}${d.encoder ? `, encoder ${d.encoder}` : ""})`;
}

function buildPhonemes() { // rows by kind, as in the report
  const rows = info.groups.flatMap((group) => group.rows), edges = [];
  byId("phonemes").replaceChildren(...info.groups.map((group) => {
    edges.push((edges.at(-1) ?? 0) + group.rows.length / rows.length);
    const label = make("span", "", group.name);
    label.style.gridRow = `span ${group.rows.length}`;
    label.title = group.rows.map((row) => info.classes[row].toLowerCase()).join(" ");
    return label;
  }));
  const canvas = byId("posteriors");
  phonemes = new Scroll(canvas, WINDOW, rows.length, "purple", edges.slice(0, -1));
  phonemes.order = rows;
  canvas.onpointermove = (e) => {
    const row = rows[Math.floor((e.offsetY / canvas.clientHeight) * rows.length)];
    canvas.title = row === undefined ? "" : info.classes[row].toLowerCase();
  };
}

function receiveImages(buffer) { // one after another
  for (let at = 0; at < buffer.byteLength;) at += receiveImage(new DataView(buffer, at));
}

function receiveImage(view) {
  const kind = view.getUint8(0), at = view.getUint32(4, true), rows = view.getUint16(8, true), columns = view.getUint16(10, true);
  const data = new Uint8Array(view.buffer, view.byteOffset + 12, rows * columns);
  if (kind === 1) {
    for (const { first, n, scroll } of rasters)
      for (let i = 0; i < rows; i++)
        scroll.put(at + i, data.subarray(i * columns + first, i * columns + first + n), (v) => (v - GREY_MEAN) / (GREY_PER_SD * RASTER_SD));
  } else if (kind === 2 && phonemes) {
    const wide = info.frame_ms / 20;
    for (let i = 0; i < rows; i++) {
      const values = phonemes.order.map((row) => data[i * columns + row]);
      for (let k = 0; k < wide; k++) phonemes.put(at - (rows - i) * wide + k, values, (v) => v / 255);
    }
  }
  return 12 + rows * columns;
}

function draw() {
  const now = Math.max(phonemes?.newest ?? 0, ...rasters.map((r) => r.scroll.newest));
  for (const { scroll } of rasters) scroll.draw(now);
  phonemes?.draw(now);
  requestAnimationFrame(draw);
}

// --- events ----------------------------------------------------------------------------------------------

const HANDLERS = {
  partial: showPartial,
  final: showFinal,
  trial: showTrial,
  latency: showLatency,
  adaptation: showAdaptation,
  recording: showRecording,
  state: (event) => { decoding = event.state; showState(); if (decoding === "listening") showHint(); },
  replay: (event) => { replay = event; showPlayer(); showState(); },
  fault: (event) => toast(`${event.message}: ${ACTION_TEXT[event.action] ?? event.action}`),
  rejected: (event) => toast(event.message),
  error: (event) => { failure = event.message; showState(); },
  snapshot: (event) => {
    byId("history").replaceChildren();
    lastFinal = null;
    failure = null;
    for (const final of event.finals) showFinal(final, true);
    for (const kind of ["state", "replay", "latency", "adaptation", "trial", "partial", "recording", "error"])
      if (event.now[kind]) HANDLERS[kind](event.now[kind]);
  },
};
function showHint() {
  if (!byId("words").children.length) byId("words").replaceChildren(make("span", "hint", "…"));
}

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/events${suffix}`);
  socket.binaryType = "arraybuffer";
  socket.onopen = async () => { retry = 500; connected = true; rejection = null; showState(); };
  socket.onmessage = (message) => {
    if (typeof message.data !== "string") return receiveImages(message.data);
    const event = JSON.parse(message.data);
    HANDLERS[event.type]?.(event);
  };
  socket.onclose = (e) => {
    connected = false;
    rejection = e.code === 1013 ? e.reason : null; // rejected, with the reason
    showState();
    setTimeout(connect, retry);
    retry = Math.min(retry * 2, 8000);
  };
}
const send = (command) => { if (socket?.readyState === 1) socket.send(JSON.stringify(command)); };

// --- controls --------------------------------------------------------------------------------------------

function fillTrials() {
  const trials = info.replay.filter((t) => t.session === byId("session").value);
  byId("trial").replaceChildren(...trials.map((t) => {
    const text = options.reference && t.text ? t.text : `${t.s.toFixed(1)} s`;
    const option = make("option", "", `${t.number} · ${text}`);
    option.value = t.id;
    return option;
  }));
}

function toggle(name) {
  options[name] = !options[name];
  byId(`toggle-${name}`).setAttribute("aria-pressed", String(options[name]));
}

function toggleReference() {
  toggle("reference");
  if (info?.replay) {
    const trial = byId("trial").value;
    fillTrials();
    byId("trial").value = trial;
  }
  showReference(lastFinal?.alignment);
}

function toggleVoice() {
  toggle("voice");
  if (!options.voice) window.speechSynthesis?.cancel();
  else if (!window.speechSynthesis) toast("this browser has no speech output");
}

function speak(text) {
  if (options.voice && text) window.speechSynthesis?.speak(new SpeechSynthesisUtterance(text));
}

function showPlayer() {
  byId("play").setAttribute("aria-label", replay.paused ? "Resume" : "Pause");
  for (const button of byId("speeds").children)
    button.setAttribute("aria-pressed", String(Number(button.dataset.speed) === replay.speed));
}

const ACTIONS = {
  " ": () => replay && send({ type: "pause", paused: !replay.paused }),
  ArrowLeft: () => send({ type: "skip", n: -1 }),
  ArrowRight: () => send({ type: "skip", n: 1 }),
  o: () => send({ type: decoding === "closed" ? "open" : "close" }),
  e: () => send({ type: "end" }),
  r: () => send({ type: "reset_adaptation" }),
  s: toggleReference,
  v: toggleVoice,
  t: () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    recolour();
  },
  f: () => (document.fullscreenElement ? document.exitFullscreen() : document.documentElement.requestFullscreen()),
  "?": () => byId("keys").showModal(),
};
SPEEDS.forEach((speed, i) => { ACTIONS[String(i + 1)] = () => send({ type: "speed", speed }); });

function recolour() {
  for (const { scroll } of rasters) scroll.recolour();
  phonemes?.recolour();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("select, dialog, input")) return;
  if (e.key === " " && e.target.closest("button") && !e.target.closest(".word")) return; // activates that button
  const action = ACTIONS[e.key];
  if (action) { e.preventDefault(); action(); }
});
for (const [id, key] of [["previous", "ArrowLeft"], ["play", " "], ["next", "ArrowRight"], ["lock", "o"], ["toggle-reference", "s"], ["toggle-voice", "v"], ["theme", "t"], ["full", "f"], ["help", "?"]])
  byId(id).addEventListener("click", () => ACTIONS[key]());
byId("session").addEventListener("change", () => { fillTrials(); send({ type: "select", trial: byId("trial").value }); });
byId("trial").addEventListener("change", () => send({ type: "select", trial: byId("trial").value }));
byId("speeds").append(...SPEEDS.map((speed) => {
  const button = make("button", "", `${speed}×`);
  button.dataset.speed = speed;
  button.addEventListener("click", () => send({ type: "speed", speed }));
  return button;
}));

async function start() {
  try {
    const response = await fetch(`info${suffix}`);
    info = await response.json();
  } catch { // the server is unavailable
    setTimeout(start, 2000);
    return;
  }
  buildPanels();
  byId("trial-name").textContent = info.session;
  byId("simulated").hidden = !info.simulated;
  showFloor(info.floor);
  if (info.replay) {
    const sessions = [...new Set(info.replay.map((t) => t.session))];
    byId("session").replaceChildren(...sessions.map((s) => make("option", "", s)));
    fillTrials();
    byId("player").hidden = byId("picker").hidden = false;
  }
  connect();
  requestAnimationFrame(draw);
}
start();
