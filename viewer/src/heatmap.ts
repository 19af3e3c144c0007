// The heat map with its axis, the tracks above it and the overview below: canvases over one x axis. Called by `screen`
// at every frame and by `exports`, so nothing here may ask for anything or read the layout of the page. Where a
// tile is still missing, a coarser one stands in: a column is never blank.

import { Header, Look, NOT_FINITE, NOT_MEASURED, decode } from "./colour";
import { Metric } from "./data";
import { short, visible } from "./dom";
import { Plane } from "./planes";
import { Row } from "./rows";
import { WIDEST } from "./viewport";

/** Where things are, in CSS pixels. */
export interface Scene {
  rows: Row[];
  columns: number;
  first: number; // the column at the left edge
  cell: number; // pixels per column
  top: number; // the row at the upper edge
  rowHeight: number;
  width: number;
  height: number;
}
export interface Inks {
  ink: string;
  soft: string;
  line: string;
  mark: string;
  alarm: string;
  back: string;
  hatch: string;
  none: string;
  other: string; // of curves beside others
  dark: boolean;
}

/** Pixels per column from which texts are written under them. */
export const READABLE = 9;
/** Pixels per column from which they are level. */
const LEVEL = 40;

export interface Drawn {
  missing: number; // tiles that a coarser one stood in for
}

/** Runs of rows in view that belong to one plane and follow each other there. */
interface Run {
  plane: string;
  list: number[]; // the rows of the plane that are in the tree
  from: number; // in that list
  to: number;
  at: number; // in the rows of the scene
}
const runsOf = new WeakMap<Row[], Run[]>();

function runs(rows: Row[]): Run[] {
  let found = runsOf.get(rows);
  if (found) return found;
  const lists = new Map<string, number[]>();
  for (const row of rows) {
    const list = lists.get(row.plane);
    if (list) list.push(row.index);
    else lists.set(row.plane, [row.index]);
  }
  const used = new Map<string, number>();
  found = [];
  rows.forEach((row, at) => {
    const place = used.get(row.plane) ?? 0;
    used.set(row.plane, place + 1);
    const last = found![found!.length - 1];
    if (last && last.plane === row.plane && last.to === place) last.to++;
    else found!.push({ plane: row.plane, list: lists.get(row.plane)!, from: place, to: place + 1, at });
  });
  runsOf.set(rows, found);
  return found;
}

const hatches = new WeakMap<Inks, CanvasPattern>();
function hatch(c: CanvasRenderingContext2D, inks: Inks, ratio: number): CanvasPattern {
  const known = hatches.get(inks);
  if (known) return known;
  const tile = document.createElement("canvas");
  const size = Math.round(6 * ratio);
  tile.width = tile.height = size;
  const t = tile.getContext("2d")!;
  t.fillStyle = inks.none;
  t.fillRect(0, 0, size, size);
  t.strokeStyle = inks.hatch;
  t.lineWidth = ratio;
  t.beginPath();
  for (const shift of [-size, 0, size]) {
    t.moveTo(shift, size);
    t.lineTo(shift + size, 0);
  }
  t.stroke();
  const made = c.createPattern(tile, "repeat")!;
  hatches.set(inks, made);
  return made;
}

/** Draw the cells; what has no value shows the hatching beneath. */
export function drawCells(
  c: CanvasRenderingContext2D, scene: Scene, planes: (name: string) => Plane | null, look: Look, mean: boolean,
  inks: Inks, ratio: number,
): Drawn {
  const right = Math.min((scene.columns - scene.first) * scene.cell, scene.width) * ratio;
  const bottom = Math.min((scene.rows.length - scene.top) * scene.rowHeight, scene.height) * ratio;
  c.fillStyle = inks.back;
  c.fillRect(0, 0, scene.width * ratio, scene.height * ratio);
  if (right <= 0 || bottom <= 0) return { missing: 0 };
  const left = Math.max(0, -scene.first * scene.cell) * ratio;
  if (planes(scene.rows[0].plane)?.header) {
    c.fillStyle = hatch(c, inks, ratio);
    c.fillRect(left, 0, right - left, bottom);
  }
  c.imageSmoothingEnabled = false;
  let missing = 0;
  const end = scene.top + scene.height / scene.rowHeight;
  for (const run of runs(scene.rows)) {
    const [begin, stop] = [Math.max(run.at, Math.floor(scene.top)), Math.min(run.at + run.to - run.from, Math.ceil(end))];
    if (begin >= stop) continue;
    const plane = planes(run.plane);
    if (!plane) continue;
    const y = Math.round((begin - scene.top) * scene.rowHeight * ratio);
    const height = Math.round((stop - scene.top) * scene.rowHeight * ratio) - y;
    const from = run.from + begin - run.at;
    missing += plane.draw(c, run.list, from, from + stop - begin, look, mean, {
      first: scene.first, width: scene.cell * ratio, y, height, right: scene.width * ratio,
    });
  }
  return { missing };
}

/** Over the cells: what is weak fades, what survives is outlined. Only for planes of few columns. */
export function drawOverlay(
  c: CanvasRenderingContext2D, scene: Scene, values: (metric: string, plane: string) => Float32Array | null,
  overlay: { opacity: string; outline: string }, inks: Inks,
): void {
  const from = Math.max(0, Math.floor(scene.top));
  const to = Math.min(scene.rows.length, Math.ceil(scene.top + scene.height / scene.rowHeight));
  const [first, last] = [Math.max(0, Math.floor(scene.first)), Math.min(scene.columns, Math.ceil(scene.first + scene.width / scene.cell))];
  const lines: [number, number][] = [];
  c.fillStyle = inks.back;
  for (let r = from; r < to; r++) {
    const { plane, index } = scene.rows[r];
    const faint = values(overlay.opacity, plane);
    const kept = overlay.outline ? values(overlay.outline, plane) : undefined;
    if (!faint || kept === null) continue;
    for (let t = first; t < last; t++) {
      const [x, y] = [(t - scene.first) * scene.cell, (r - scene.top) * scene.rowHeight];
      const opacity = faint[index * scene.columns + t];
      if (opacity < 1) {
        c.globalAlpha = 1 - opacity;
        c.fillRect(x, y, scene.cell, scene.rowHeight);
      }
      if (kept && kept[index * scene.columns + t] > 0) lines.push([x, y]);
    }
  }
  c.globalAlpha = 1;
  c.strokeStyle = inks.ink;
  c.lineWidth = scene.rowHeight > 8 ? 2 : 1;
  for (const [x, y] of lines) c.strokeRect(x + 1, y + 1, scene.cell - 2, Math.max(1, scene.rowHeight - 2));
}

/** Lines between blocks, markers for rows with holes, and the crosshair. */
export function drawMarks(
  c: CanvasRenderingContext2D, scene: Scene, header: Header | null, row: number, column: number, inks: Inks,
  hover: { row: number; column: number } | null,
): void {
  const right = Math.min((scene.columns - scene.first) * scene.cell, scene.width);
  const bottom = Math.min((scene.rows.length - scene.top) * scene.rowHeight, scene.height);
  if (header) {
    c.fillStyle = inks.mark;
    const from = Math.max(0, Math.floor(scene.top));
    const to = Math.ceil(scene.top + scene.height / scene.rowHeight);
    scene.rows.slice(from, to).forEach((each, i) => {
      const y = (from + i - scene.top) * scene.rowHeight;
      if (each.plane !== "layers") return;
      if (header.nonfinite[each.index]) {
        const middle = y + scene.rowHeight / 2;
        const size = Math.min(4, scene.rowHeight / 2 + 1);
        c.beginPath();
        c.moveTo(right - 1, middle - size);
        c.lineTo(right - 1 - size * 1.5, middle);
        c.lineTo(right - 1, middle + size);
        c.fill();
      }
    });
  }
  const box = (x: number, y: number, w: number, t: number, strong: boolean) => {
    c.lineWidth = strong ? 3 : 2;
    c.strokeStyle = inks.back;
    c.strokeRect(x, y, w, t);
    c.lineWidth = strong ? 1.5 : 1;
    c.strokeStyle = strong ? inks.mark : inks.ink;
    c.strokeRect(x, y, w, t);
  };
  const place = (r: number, t: number) => ({
    x: (t - scene.first) * scene.cell, y: (r - scene.top) * scene.rowHeight, w: Math.max(scene.cell, 2), h: scene.rowHeight,
  });
  if (row >= 0 && column < scene.columns) {
    const at = place(row, column);
    c.save();
    c.globalAlpha = 0.85;
    c.setLineDash([3, 3]);
    c.lineWidth = 1;
    // Dashes in both colours by turns: one of them can be seen on any cell.
    [inks.back, inks.ink].forEach((colour, turn) => {
      c.strokeStyle = colour;
      c.lineDashOffset = 3 * turn;
      c.strokeRect(at.x, -2, at.w, bottom + 2);
      c.strokeRect(-2, at.y, right + 2, at.h);
    });
    c.restore();
    box(at.x, at.y, at.w, at.h, true);
  }
  if (hover && hover.row >= 0 && (hover.row !== row || hover.column !== column)) {
    const at = place(hover.row, hover.column);
    box(at.x, at.y, at.w, at.h, false);
  }
}

/** The texts of the columns below them, or numbers where texts are not wanted or have no room. */
export function drawAxis(
  c: CanvasRenderingContext2D, scene: Scene, piece: (column: number) => Piece | null, column: number, inks: Inks,
  height: number, texts: boolean,
): void {
  c.textBaseline = "middle";
  const from = Math.max(0, Math.floor(scene.first));
  const to = Math.min(scene.columns, Math.ceil(scene.first + scene.width / scene.cell));
  if (texts && scene.cell >= READABLE) {
    c.font = `${Math.min(12, Math.max(9.5, scene.cell - 3))}px system-ui, sans-serif`;
    const label = (t: number) => short(visible(piece(t)?.text.replace(/^ +| +$/g, "") || piece(t)?.text || ""), 14);
    let level = scene.cell >= LEVEL; // all of them, or none
    for (let t = from; t < to && level; t++) level = c.measureText(label(t)).width < scene.cell - 4;
    for (let t = from; t < to; t++) {
      const each = piece(t);
      if (!each) continue;
      c.fillStyle = each.generated ? inks.mark : inks.line;
      c.fillRect((t - scene.first) * scene.cell, 0, Math.max(1, scene.cell - 1), 3);
      c.save();
      c.translate((t + 0.5 - scene.first) * scene.cell, 6);
      c.fillStyle = t === column ? inks.mark : each.special ? inks.soft : inks.ink;
      if (!level) c.rotate(-Math.PI / 2);
      c.textAlign = level ? "center" : "right";
      c.fillText(label(t), 0, level ? 8 : 0, level ? scene.cell : height - 8);
      c.restore();
    }
    return;
  }
  const apart = 80 / scene.cell;
  const power = 10 ** Math.floor(Math.log10(apart));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((m) => m >= apart)!);
  c.font = "11px system-ui, sans-serif";
  c.fillStyle = inks.soft;
  c.textAlign = "center";
  for (let t = Math.ceil(from / step) * step; t < to; t += step) {
    const x = (t + 0.5 - scene.first) * scene.cell;
    c.fillRect(x, 0, 1, 4);
    const label = texts ? t.toLocaleString("en") : (piece(t)?.text.trim() ?? "");
    const half = c.measureText(label).width / 2 + 1;
    c.fillText(label, Math.max(half, Math.min(x, scene.width - half)), 13);
  }
}
export interface Piece {
  text: string;
  id: number;
  generated: boolean;
  special: boolean;
}

/** One band of bars per curve, up to its largest value, with a cross where it is not finite; a curve beside it is a line over the bars. */
export function drawTracks(
  c: CanvasRenderingContext2D, scene: Scene, plane: Plane, tracks: Metric[], column: number, inks: Inks, band: number,
): void {
  const header = plane.header;
  if (!header) return;
  const level = Math.min(Math.max(0, Math.ceil(Math.log2(1 / scene.cell) - 1e-9)), header.levels - 1);
  const wide = scene.cell * 2 ** level;
  const from = Math.max(0, Math.floor(scene.first / 2 ** level));
  const to = Math.ceil(Math.min(scene.columns, scene.first + scene.width / scene.cell) / 2 ** level);
  const walk = (row: number, top: number, see: (tall: number, x: number, at: number, beyond: boolean) => void, broken?: (x: number) => void) => {
    const values = Array.from({ length: 256 }, (_, code) => Math.abs(decode(header, row, code)) / top);
    plane.walk(row, level, from, to, (code, at) => {
      const x = (at * 2 ** level - scene.first) * scene.cell;
      if (code > NOT_MEASURED) see(Math.min(1, values[code]) * (band - 10), x, at, values[code] > BEYOND);
      else if (code === NOT_FINITE) broken?.(x);
    });
  };
  const cross = (x: number, y: number) => {
    c.strokeStyle = inks.alarm;
    c.lineWidth = 2;
    c.beginPath();
    for (const side of [-4, 4]) {
      c.moveTo(x - side, y - 4);
      c.lineTo(x + side, y + 4);
    }
    c.stroke();
  };
  tracks.filter((each) => !each.beside).forEach((track, place) => {
    const top = topOf(header, tracks, track) || 1;
    const bottom = (place + 1) * band - 4;
    c.fillStyle = inks.line;
    c.fillRect(0, bottom, scene.width, 1);
    c.fillStyle = inks.soft;
    walk(tracks.indexOf(track), top, (tall, x, at, beyond) => {
      const now = at === column >> level;
      if (now) c.fillStyle = inks.mark;
      c.fillRect(x, bottom - Math.max(1, tall), Math.max(1, wide - (wide > 4 ? 1 : 0)), Math.max(1, tall));
      if (beyond) c.fillRect(x, bottom - tall - 3, Math.max(1, wide - (wide > 4 ? 1 : 0)), 1.5);
      if (now) c.fillStyle = inks.soft;
    }, (x) => cross(x + wide / 2, bottom - 8));
    c.fillStyle = inks.other;
    tracks.forEach((each, row) => each.beside === track.name && walk(row, top, (tall, x) => c.fillRect(x, bottom - tall - 1, Math.max(2, wide), 2)));
  });
}

const BEYOND = 1.02; // bytes are rounded: a value at the top must not count as one beyond it

/** Where the bars of a curve end: the largest value of it and of those beside it, or what the board says. */
export function topOf(header: Header, tracks: Metric[], track: Metric): number {
  return Math.max(...tracks.map((each, row) => (each === track || each.beside === track.name ? each.top || header.tops[row] || 0 : 0)));
}

/** The whole sequence, small, with the part in view framed. */
export function drawOverview(
  c: CanvasRenderingContext2D, scene: Scene, plane: Plane, look: Look, inks: Inks, height: number, ratio: number,
): void {
  const header = plane.header;
  if (!header || !scene.columns) return;
  const list = overviewRows(header);
  const cell = Math.min(WIDEST, scene.width / scene.columns); // as wide as in the map where all is in view
  c.fillStyle = hatch(c, inks, ratio);
  c.fillRect(0, 0, Math.min(scene.columns * cell, scene.width) * ratio, height * ratio);
  c.imageSmoothingEnabled = cell < 2;
  plane.draw(c, list, 0, list.length, look, false, {
    first: 0, width: cell * ratio, y: 0, height: height * ratio, right: scene.width * ratio,
  });
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  const left = Math.max(0, scene.first) * cell;
  const right = Math.min(scene.columns, scene.first + scene.width / scene.cell) * cell;
  c.fillStyle = inks.back;
  c.globalAlpha = 0.55;
  c.fillRect(0, 0, left, height);
  c.fillRect(right, 0, scene.columns * cell - right, height);
  c.globalAlpha = 1;
  c.strokeStyle = inks.mark;
  c.lineWidth = 2;
  c.strokeRect(left + 1, 1, Math.max(3, right - left - 2), height - 2);
}
const lists = new WeakMap<Header, number[]>();
/** Some of the rows that have values, always the same list for the same plane. */
function overviewRows(header: Header): number[] {
  let list = lists.get(header);
  if (!list) {
    const all = Array.from({ length: header.rows }, (_, i) => i);
    const known = all.filter((row) => header.missing[row] < header.columns);
    const step = Math.max(1, Math.ceil(known.length / 48));
    lists.set(header, (list = (known.length ? known : all).filter((_, i) => i % step === 0)));
  }
  return list;
}
