// A scrolling image: columns are bins, rows are channels; the newest column is at the right edge.

const MAPS = { // colours from low to high for the light and the dark theme
  cool: [[[255, 255, 255], [190, 224, 232], [66, 148, 170], [8, 62, 92]], [[23, 27, 30], [16, 66, 82], [44, 150, 170], [190, 244, 250]]],
  warm: [[[255, 255, 255], [250, 226, 190], [226, 142, 60], [140, 58, 10]], [[23, 27, 30], [88, 48, 16], [214, 126, 44], [255, 232, 190]]],
  ink: [[[250, 250, 248], [214, 210, 228], [112, 92, 160], [38, 18, 74]], [[27, 31, 35], [58, 46, 92], [146, 120, 214], [240, 228, 255]]],
};

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function colourMap(name) {
  const stops = MAPS[name][isDark() ? 1 : 0];
  const colours = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1), k = Math.min(Math.floor(at), stops.length - 2), t = at - k;
    for (let c = 0; c < 3; c++) colours[3 * i + c] = stops[k][c] * (1 - t) + stops[k + 1][c] * t;
  }
  return colours;
}

export class Scroll {
  constructor(canvas, columns, rows, map, edges) {
    Object.assign(this, { canvas, columns, rows, map, edges, newest: 0, drawn: -1 });
    this.levels = new Uint8Array(columns * rows); // kept for a change of theme
    this.buffer = document.createElement("canvas");
    this.buffer.width = columns;
    this.buffer.height = rows;
    this.pen = this.buffer.getContext("2d");
    this.column = this.pen.createImageData(1, rows);
    this.recolour();
  }

  put(at, values, level) { // one column; `level` maps a byte to 0 … 1
    if (at < 0) return;
    if (at > this.newest + 1) this.blank(Math.max(this.newest + 1, at - this.columns), at);
    const x = at % this.columns;
    for (let r = 0; r < this.rows; r++)
      this.levels[x * this.rows + r] = Math.max(0, Math.min(255, Math.round(255 * level(values[r]))));
    this.paint(x);
    this.newest = Math.max(this.newest, at);
    this.drawn = -1;
  }

  blank(from, to) {
    for (let at = from; at < to; at++) {
      this.levels.fill(0, (at % this.columns) * this.rows, (at % this.columns + 1) * this.rows);
      this.paint(at % this.columns);
    }
  }

  paint(x) {
    const { data } = this.column, { colours, rows, levels } = this;
    for (let r = 0; r < rows; r++) {
      const c = 3 * levels[x * rows + r];
      data[4 * r] = colours[c]; data[4 * r + 1] = colours[c + 1]; data[4 * r + 2] = colours[c + 2]; data[4 * r + 3] = 255;
    }
    this.pen.putImageData(this.column, x, 0);
  }

  recolour() {
    this.colours = colourMap(this.map);
    for (let x = 0; x < this.columns; x++) this.paint(x);
    this.drawn = -1;
  }

  draw(now) { // `now`: the bin at the right edge
    const { canvas } = this, ratio = window.devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; this.drawn = -1; }
    if (this.drawn === now) return;
    this.drawn = now;
    if (now > this.newest) { this.blank(Math.max(this.newest + 1, now - this.columns + 1), now + 1); this.newest = now; }
    const pen = canvas.getContext("2d"), split = (now + 1) % this.columns, unit = width / this.columns;
    pen.imageSmoothingEnabled = height < this.rows;
    pen.drawImage(this.buffer, split, 0, this.columns - split, this.rows, 0, 0, (this.columns - split) * unit, height);
    if (split) pen.drawImage(this.buffer, 0, 0, split, this.rows, (this.columns - split) * unit, 0, split * unit, height);
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
    for (const edge of this.edges) pen.fillRect(0, Math.round(edge * height) - 1, width, 2);
  }
}
