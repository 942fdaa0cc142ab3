// A scrolling image: columns are bins, rows are channels; the newest column is at the right edge.

const MIDDLE = 0.7; // value that is drawn in the colour of the theme

function colourMap(name) { // 256 colours from the card over a colour of the theme to the ink
  const style = getComputedStyle(document.documentElement);
  const channels = (key) => style.getPropertyValue(`--${key}`).match(/[0-9a-f]{2}/gi).map((hex) => parseInt(hex, 16));
  const [card, colour, ink] = ["card", name, "ink"].map(channels);
  const mix = (a, b, t) => a.map((value, c) => value * (1 - t) + b[c] * t);
  const at = (x) => (x < MIDDLE ? mix(card, colour, x / MIDDLE) : mix(colour, ink, (x - MIDDLE) / (1 - MIDDLE)));
  return Uint8ClampedArray.from(Array.from({ length: 256 }, (_, i) => at(i / 255)).flat());
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
