// Decodes a .arcx file with ONNX Runtime Web, as exported/model.py does: the bin graph once per bin, the frame graph
// once per frame, with every state tensor passed in and taken out.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

ort.env.wasm.numThreads = 1; // threads need response headers that a plain file server does not send
ort.env.wasm.wasmPaths = new URL("./node_modules/onnxruntime-web/dist/", import.meta.url).href;

const byId = (id) => document.getElementById(id);
const arrays = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array };
const flag = (value) => new ort.Tensor("bool", Uint8Array.of(value ? 1 : 0), [1, 1]);

// Members of an uncompressed zip archive by name.
export function readArchive(buffer) {
  const view = new DataView(buffer);
  let end = buffer.byteLength - 22;
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end -= 1;
  if (end < 0) throw new Error("this is not an exported model");
  const members = {};
  for (let at = view.getUint32(end + 16, true), left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    const [nName, nExtra, nComment] = [28, 30, 32].map((field) => view.getUint16(at + field, true));
    const header = view.getUint32(at + 42, true);
    const first = header + 30 + view.getUint16(header + 26, true) + view.getUint16(header + 28, true);
    const name = new TextDecoder().decode(new Uint8Array(buffer, at + 46, nName));
    members[name] = buffer.slice(first, first + view.getUint32(at + 24, true));
    at += 46 + nName + nExtra + nComment;
  }
  return members;
}

export async function load(buffer) {
  const members = readArchive(buffer);
  const { model, states, n_session_layers } = JSON.parse(new TextDecoder().decode(members["metadata.json"]));
  if (n_session_layers) throw new Error("export one session with --session; this file has the layers of all");
  const options = { executionProviders: ["wasm"], graphOptimizationLevel: "all" };
  const bin = await ort.InferenceSession.create(members["bin.onnx"], options);
  const frame = await ort.InferenceSession.create(members["frame.onnx"], options);
  const initial = {};
  for (const state of [...states.bin, ...states.frame]) {
    const size = state.shape.reduce((a, b) => a * b, 1);
    const stored = members[`initial.${state.name}`];
    const values = stored ? new arrays[state.dtype](stored) : new arrays[state.dtype](size);
    initial[state.name] = new ort.Tensor(state.dtype, values, state.shape);
  }
  return { model, bin, frame, initial };
}

export class Stream {
  constructor(loaded, statistics) {
    Object.assign(this, loaded);
    this.tensors = { ...loaded.initial };
    this.nBins = 0;
    this.nPushed = 0;
    const n = this.model.n_channels;
    this.constants = {};
    if (this.model.normalise !== "none") {
      const row = (values) => new ort.Tensor("float32", Float32Array.from(values), [1, n]);
      const known = statistics ?? { mean: new Float32Array(n), sd: new Float32Array(n).fill(1), n_bins: 0 };
      const weight = Math.min(known.n_bins, this.model.rolling_bins);
      this.constants.mean = row(known.mean);
      this.constants.sd = row(known.sd);
      this.constants.past_bins = new ort.Tensor("float64", Float64Array.of(weight), [1, 1]);
      this.constants.by_block = flag(this.model.normalise === "block" && statistics != null);
    }
  }

  // Next bin (C values) -> log-probabilities of the frame that it completes, or null.
  async push(values) {
    this.nBins += 1;
    return this.#step(values, true);
  }

  // Frames held back for smoothing or for a complete patch.
  async finish() {
    const { patch_bins, look_ahead, n_channels } = this.model;
    const frames = [];
    for (let left = Math.max(patch_bins - this.nBins, 0) + look_ahead; left > 0; left -= 1) {
      const found = await this.#step(new Float32Array(n_channels), false);
      if (found) frames.push(found);
    }
    return frames;
  }

  async #step(values, isData) {
    const { look_ahead, patch_bins, stride, n_channels } = this.model;
    this.nPushed += 1;
    const nReady = this.nPushed - look_ahead;
    await this.#run(this.bin, {
      bin: new ort.Tensor("float32", values, [1, n_channels]),
      is_data: flag(isData),
      is_ready: flag(nReady > 0),
    });
    const beyond = nReady - patch_bins;
    if (beyond < 0 || beyond % stride) return null;
    return (await this.#run(this.frame, {})).log_probs.data.slice();
  }

  async #run(session, inputs) {
    const given = { ...this.tensors, ...this.constants, ...inputs };
    const feeds = Object.fromEntries(session.inputNames.map((name) => [name, given[name]]));
    const results = await session.run(feeds);
    for (const name of session.outputNames) {
      if (name.endsWith(".next")) this.tensors[name.slice(0, -5)] = results[name];
    }
    return results;
  }
}

// Greedy CTC: the best class of every frame, repeats merged, blanks removed.
export function greedy(frames, classes) {
  const best = frames.map((row) => row.indexOf(Math.max(...row)));
  return best.filter((c, i) => c !== 0 && c !== best[i - 1]).map((c) => classes[c]);
}

export async function decodeBins(loaded, bins, statistics, onFrame) {
  const n = loaded.model.n_channels;
  const stream = new Stream(loaded, statistics);
  const frames = [];
  for (let at = 0; at + n <= bins.length; at += n) {
    const started = performance.now();
    const found = await stream.push(bins.slice(at, at + n));
    if (found) frames.push(found);
    if (onFrame) await onFrame(frames, performance.now() - started, Boolean(found));
  }
  frames.push(...(await stream.finish()));
  return frames;
}

let loaded = null;

byId("model").addEventListener("change", async () => {
  try {
    loaded = await load(await byId("model").files[0].arrayBuffer());
    const { n_channels, sessions, stride } = loaded.model;
    byId("about").textContent = `${n_channels} channels, session ${sessions[0]}, a frame every ${20 * stride} ms`;
    byId("start").disabled = false;
  } catch (error) {
    byId("about").textContent = `The model cannot be loaded: ${error.message ?? error}`;
  }
});

byId("start").addEventListener("click", async () => {
  byId("start").disabled = true;
  try {
    const { model } = loaded;
    const file = byId("file").files[0];
    if (!file) throw new Error("choose a file of bins");
    const bins = new Float32Array(await file.arrayBuffer());
    if (bins.length % model.n_channels) throw new Error(`the file is not a multiple of ${model.n_channels} values`);
    const times = [];
    const frames = await decodeBins(loaded, bins, null, async (found, ms, isFrame) => {
      if (isFrame) times.push(ms);
      byId("phonemes").textContent = greedy(found, model.classes).join(" ");
      if (byId("realtime").checked) await new Promise((done) => setTimeout(done, Math.max(20 - ms, 0)));
    });
    byId("phonemes").textContent = greedy(frames, model.classes).join(" ");
    times.sort((a, b) => a - b);
    const median = times[Math.floor(times.length / 2)] ?? 0;
    byId("status").textContent = `${frames.length} frames, median ${median.toFixed(2)} ms per frame`;
  } catch (error) {
    byId("status").textContent = String(error.message ?? error);
  }
  byId("start").disabled = false;
});

globalThis.arcuate = { load, decodeBins, greedy }; // for the console
