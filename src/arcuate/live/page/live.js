// The live page: draws what the server says. No state but what is on screen; joining late shows everything that is true.
import { Scroll } from "./scroll.js";

const byId = (id) => document.getElementById(id);
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const WINDOW = 500; // bins on screen: 10 s
const SPEEDS = [1, 2, 4, 8];
const token = new URLSearchParams(location.search).get("token");
const suffix = token ? `?token=${encodeURIComponent(token)}` : "";

let about = null;
let socket = null;
let retry = 500;
let reference = null;
let decoding = "connecting"; // closed, listening, speaking
let replay = null; // {paused, speed}
let connected = false;
let refusal = null;
let rasters = [];
let phonemes = null;
const spark = [];

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

function showPartial(event) {
  const box = byId("words");
  const focused = [...box.children].indexOf(document.activeElement);
  const nodes = event.words.map((word, i) =>
    wordNode(word, i < event.n_settled ? "settled" : "unsettled", event.alternatives?.[i]));
  box.replaceChildren(...nodes);
  box.dataset.kind = "partial";
  if (focused >= 0 && nodes[focused]) nodes[focused].focus();
  refreshTip();
}

function comparedNodes(event) {
  let place = 0;
  return event.compared.map((part) => {
    if (part.is === "missing") return make("span", "missing", part.word);
    const others = event.alternatives?.[place++] ?? [];
    const node = wordNode(part.word, part.is, others);
    if (part.meant) node.title = `meant: ${part.meant}`;
    return node;
  });
}

function finalNodes(event) {
  if (event.compared) return comparedNodes(event);
  return event.words.map((word, i) => wordNode(word, "settled", event.alternatives?.[i]));
}

let lastFinal = null;
function showFinal(event, quietly = false) {
  remember();
  lastFinal = event;
  const nodes = finalNodes(event);
  byId("words").replaceChildren(...(nodes.length ? nodes : [make("span", "hint", "nothing was understood")]));
  byId("words").dataset.kind = "final";
  reference = event.reference;
  showReference(event.compared);
  refreshTip();
  if (!quietly) byId("announce").textContent = event.text;
}

function remember() { // the last sentence goes into the history
  if (!lastFinal) return;
  const line = make("li");
  for (const node of finalNodes(lastFinal)) {
    node.tabIndex = -1;
    line.append(node, " ");
  }
  const list = byId("history");
  list.append(line);
  while (list.children.length > 12) list.firstChild.remove();
  lastFinal = null;
}

function showReference(compared) {
  const box = byId("reference");
  box.replaceChildren();
  if (!reference) return;
  box.append(make("small", "", "meant"), make("b", "", reference));
  if (!compared) return;
  const wrong = compared.filter((part) => part.is !== "right").length;
  const say = wrong === 0 ? "all words right" : `${wrong} ${wrong === 1 ? "word" : "words"} wrong`;
  box.append(make("span", wrong ? "score some" : "score", say));
}

function showTrial(event) {
  remember();
  reference = event.reference;
  showReference(null);
  byId("words").replaceChildren(make("span", "hint", "…"));
  refreshTip();
  byId("where").textContent = event.trial ? event.trial.replaceAll("/", " · ") : event.session;
  const [session] = (event.trial ?? "").split("/");
  if (about?.replay && session) {
    if (byId("session").value !== session) { byId("session").value = session; fillTrials(); }
    byId("trial").value = event.trial;
  }
}

// --- other readings on hover -----------------------------------------------------------------------------

let tipped = null;
function tip(node) {
  const box = byId("tip");
  tipped = node;
  if (!node || !node.isConnected) { box.hidden = true; return; }
  box.replaceChildren(make("small", "", "or"), ...JSON.parse(node.dataset.others).map((o) => make("div", "", o)));
  box.hidden = false;
  const at = node.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), innerWidth - box.offsetWidth - 8);
  const below = at.bottom + 8 + box.offsetHeight < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${below ? at.bottom + 8 : at.top - 8 - box.offsetHeight}px`;
}
let pointer = null;
function refreshTip() { // words are drawn anew while the pointer rests
  if (!tipped) return;
  const under = pointer ? document.elementFromPoint(...pointer) : document.activeElement;
  tip(under?.closest?.(".word.choice") ?? null);
}
for (const kind of ["pointermove", "pointerdown"]) // a finger does not move before it touches
  document.addEventListener(kind, (e) => {
    pointer = [e.clientX, e.clientY];
    const node = e.target.closest?.(".word.choice") ?? null;
    if (node !== tipped) tip(node);
  });
document.addEventListener("focusin", (e) => {
  if (e.target.matches?.(":focus-visible")) pointer = null; // by key: the mouse rests somewhere else
  tip(e.target.closest?.(".word.choice") ?? null);
});
document.addEventListener("scroll", () => tip(null));
document.addEventListener("keydown", (e) => { if (e.key === "Escape") tip(null); });
document.addEventListener("click", (e) => { const n = e.target.closest?.(".word.choice"); if (n) tip(n); });

// --- state, latency, faults ------------------------------------------------------------------------------

const SAID = {
  closed: "closed – nothing is decoded", listening: "listening", speaking: "decoding", paused: "paused",
  connecting: "connecting", stopped: "stopped",
};
function showState() {
  const shown = !connected ? "connecting" : replay?.paused && decoding !== "closed" ? "paused" : decoding;
  byId("state").dataset.state = shown;
  byId("state").querySelector("b").textContent = (!connected && refusal) || (SAID[shown] ?? shown);
  const lock = byId("lock"), closed = decoding === "closed";
  lock.textContent = closed ? "Start decoding" : "Stop decoding";
  lock.classList.toggle("closed", closed);
  if (!closed || !connected) return;
  byId("words").replaceChildren(make("span", "hint",
    about?.phrase ? "closed – say the phrase or press o to open" : "closed – press o to open"));
  byId("reference").replaceChildren();
  refreshTip();
}

function showRecording(event) {
  const box = byId("recording");
  box.hidden = false;
  box.dataset.state = event.on ? "recording" : "stopped";
  box.querySelector("b").textContent = event.on ? "recording" : "not recorded";
  box.title = event.what ?? "Sentences are written down";
  if (!event.on) toast(event.what);
}

function showAdaptation(event) {
  const box = byId("adaptation"), n = event.n_sentences;
  const learned = `learned from ${event.n_steps} of ${n} ${n === 1 ? "sentence" : "sentences"}`;
  box.hidden = false;
  box.dataset.state = event.state;
  box.textContent = event.state === "following" ? `following, learned from ${event.n_steps} of ${n}`
    : event.state === "fell back" ? "fell back, reads as before learning" : "not following";
  const began = event.layer_of === event.session ? "its own layer" : `the layer of ${event.layer_of}`;
  box.title = [event.why, `${event.method}, began with ${began}`, learned,
    event.n_skipped ? `${event.n_skipped} came too fast to learn from` : ""].filter(Boolean).join("; ");
}

const ms = (value) => (value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`);
function showLatency(event) {
  byId("p50").textContent = ms(event.frame_ms_p50);
  byId("p99").textContent = ms(event.frame_ms_p99);
  byId("missed").textContent = `${event.missed_deadlines} of ${event.n_frames.toLocaleString("en")}`;
  byId("missed").classList.toggle("late", event.missed_deadlines > 0);
  byId("meter").title = `From the last bin of a frame to its text; a frame is due every ${event.deadline_ms} ms`;
  if (event.frame_ms_p50 !== null) spark.push([event.frame_ms_p50, event.frame_ms_p99]);
  while (spark.length > 60) spark.shift();
  drawSpark(event.deadline_ms);
}

function drawSpark(deadline) {
  const canvas = byId("spark"), pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const top = Math.max(deadline / 4, ...spark.map((s) => s[1])) * 1.1;
  const y = (v) => canvas.height - 2 - (v / top) * (canvas.height - 4);
  for (const [k, colour] of [[1, "--line"], [0, "--accent"]]) {
    pen.strokeStyle = style.getPropertyValue(colour);
    pen.lineWidth = 2;
    pen.beginPath();
    spark.forEach((s, i) => pen.lineTo((i / 59) * canvas.width, y(s[k])));
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
const DONE = { hold: "the last values are held", zero: "filled with zeros", reset: "the sentence was ended", dropped: "left out" };

// --- the recording ---------------------------------------------------------------------------------------

function buildPanels() {
  rasters = [];
  byId("rasters").replaceChildren();
  about.features.forEach((feature, k) => {
    const panel = make("figure", "panel raster"), caption = make("figcaption");
    caption.append(make("b", "", feature.name), make("span", "", "every row an electrode, by array"));
    const plot = make("div", "plot"), labels = make("div", "labels"), canvas = make("canvas");
    for (const array of feature.arrays) labels.append(make("span", "", array.name));
    plot.append(labels, canvas);
    panel.append(caption, plot);
    byId("rasters").append(panel);
    const first = feature.arrays[0].first;
    const n = feature.arrays.reduce((sum, array) => sum + array.n, 0);
    const edges = feature.arrays.slice(1).map((array) => (array.first - first) / n);
    rasters.push({ first, n, scroll: new Scroll(canvas, WINDOW, n, k ? "warm" : "cool", edges) });
  });
  const names = about.classes.map((name) => (name === "BLANK" ? "blank" : name === "SIL" ? "sil" : name.toLowerCase()));
  byId("phonemes").replaceChildren(...names.map((name) => make("span", "", name)));
  phonemes = new Scroll(byId("posteriors"), WINDOW, names.length, "ink", []);
  byId("frame-ms").textContent = about.frame_ms;
  const d = about.delay_ms;
  byId("delay").textContent = `the model listens ${d.total} ms ahead (smoothing ${d.smoothing}, patches ${d.patch}${d.encoder ? `, encoder ${d.encoder}` : ""})`;
}

function takeBytes(buffer) {
  const view = new DataView(buffer);
  const kind = view.getUint8(0), at = view.getUint32(4, true), rows = view.getUint16(8, true), columns = view.getUint16(10, true);
  const data = new Uint8Array(buffer, 12);
  if (kind === 1) {
    for (const { first, n, scroll } of rasters)
      for (let i = 0; i < rows; i++)
        scroll.put(at + i, data.subarray(i * columns + first, i * columns + first + n), (v) => (v - 128) / 100);
  } else if (kind === 2 && phonemes) {
    const wide = about.frame_ms / 20;
    for (let i = 0; i < rows; i++)
      for (let k = 0; k < wide; k++)
        phonemes.put(at - (rows - i) * wide + k, data.subarray(i * columns, (i + 1) * columns), (v) => v / 255);
  }
}

function draw() {
  const now = Math.max(phonemes?.newest ?? 0, ...rasters.map((r) => r.scroll.newest));
  for (const { scroll } of rasters) scroll.draw(now);
  phonemes?.draw(now);
  requestAnimationFrame(draw);
}

// --- events ----------------------------------------------------------------------------------------------

const TAKE = {
  partial: showPartial,
  final: showFinal,
  trial: showTrial,
  latency: showLatency,
  adaptation: showAdaptation,
  recording: showRecording,
  state: (event) => { decoding = event.state; showState(); if (decoding === "listening") settle(); },
  replay: (event) => { replay = event; showPlayer(); showState(); },
  fault: (event) => toast(`${event.what}: ${DONE[event.action] ?? event.action}`),
  refused: (event) => toast(event.what),
  error: (event) => { toast(event.what); decoding = "stopped"; showState(); },
  snapshot: (event) => {
    byId("history").replaceChildren();
    lastFinal = null;
    for (const final of event.finals) showFinal(final, true);
    for (const kind of ["state", "replay", "latency", "adaptation", "trial", "partial", "recording", "error"])
      if (event.now[kind]) TAKE[kind](event.now[kind]);
  },
};
function settle() {
  if (!byId("words").children.length) byId("words").replaceChildren(make("span", "hint", "…"));
}

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/events${suffix}`);
  socket.binaryType = "arraybuffer";
  socket.onopen = async () => { retry = 500; connected = true; refusal = null; showState(); };
  socket.onmessage = (message) => {
    if (typeof message.data !== "string") return takeBytes(message.data);
    const event = JSON.parse(message.data);
    TAKE[event.type]?.(event);
  };
  socket.onclose = (e) => {
    connected = false;
    refusal = e.code === 1013 ? e.reason : null; // turned away, and why
    showState();
    setTimeout(connect, retry);
    retry = Math.min(retry * 2, 8000);
  };
}
const send = (command) => { if (socket?.readyState === 1) socket.send(JSON.stringify(command)); };

// --- controls --------------------------------------------------------------------------------------------

function fillTrials() {
  const mine = about.replay.filter((t) => t.session === byId("session").value);
  byId("trial").replaceChildren(...mine.map((t) => {
    const option = make("option", "", `${t.number} · ${t.text ?? `${t.s.toFixed(1)} s`}`);
    option.value = t.id;
    return option;
  }));
}

function showPlayer() {
  byId("play").textContent = replay.paused ? "▶" : "⏸";
  byId("play").setAttribute("aria-label", replay.paused ? "Go on" : "Pause");
  for (const button of byId("speeds").children)
    button.setAttribute("aria-pressed", String(Number(button.dataset.speed) === replay.speed));
}

const ACTIONS = {
  " ": () => replay && send({ type: "pause", paused: !replay.paused }),
  ArrowLeft: () => send({ type: "skip", n: -1 }),
  ArrowRight: () => send({ type: "skip", n: 1 }),
  o: () => send({ type: decoding === "closed" ? "open" : "close" }),
  e: () => send({ type: "end" }),
  r: () => send({ type: "forget" }),
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
  if (e.key === " " && e.target.closest("button") && !e.target.closest(".word")) return; // presses that button
  const action = ACTIONS[e.key];
  if (action) { e.preventDefault(); action(); }
});
for (const [id, key] of [["previous", "ArrowLeft"], ["play", " "], ["next", "ArrowRight"], ["lock", "o"], ["theme", "t"], ["full", "f"], ["help", "?"]])
  byId(id).addEventListener("click", () => ACTIONS[key]());
byId("session").addEventListener("change", () => { fillTrials(); send({ type: "pick", trial: byId("trial").value }); });
byId("trial").addEventListener("change", () => send({ type: "pick", trial: byId("trial").value }));
byId("speeds").append(...SPEEDS.map((speed) => {
  const button = make("button", "", `${speed}×`);
  button.dataset.speed = speed;
  button.addEventListener("click", () => send({ type: "speed", speed }));
  return button;
}));

async function begin() {
  try {
    const answer = await fetch(`about${suffix}`);
    about = await answer.json();
  } catch { // the server has just gone
    setTimeout(begin, 2000);
    return;
  }
  buildPanels();
  byId("where").textContent = about.session;
  if (about.replay) {
    const sessions = [...new Set(about.replay.map((t) => t.session))];
    byId("session").replaceChildren(...sessions.map((s) => make("option", "", s)));
    fillTrials();
    byId("player").hidden = byId("picker").hidden = false;
  }
  connect();
  requestAnimationFrame(draw);
}
begin();
