// Exports: what is in view as PNG, SVG and CSV, called by `App.save`. Numbers in SVG and CSV are asked for as float32
// and written so that they give the same float32 again; only PNG is made of tiles. Texts are escaped for each format.

import type { App } from "./app";
import { Look, cssColour, mapOf, scaleOf, shareOf } from "./colour";
import { isNothing } from "./data";
import { exact, short, svg, visible } from "./dom";
import { Inks, Piece, READABLE, Scene, drawAxis, drawCells } from "./heatmap";
import { Plane } from "./planes";

export const MOST_CELLS = 60_000;
const [LEFT, TOP, BOTTOM, RIGHT] = [230, 40, 140, 16];
const [RAMP, STEPS] = [180, 60]; // the colour bar: its pixels, and of how many rectangles it is made
const LABEL = 11; // pixels between labels of rows

export interface Exported {
  scene: Scene;
  look: Look;
  mean: boolean;
  inks: Inks;
  planes: (name: string) => Plane | null;
  piece: (column: number) => Piece | null;
  title: string;
  axis: string;
  unit: string;
  nothing: string; // what is said of a cell where nothing was measured
  bar: { words: [string, string]; map: string } | null;
  /** The exact values of rows and columns in view. */
  values: (first: number, last: number) => Promise<Map<string, Float32Array>>;
}

const inView = (scene: Scene) => {
  const first = Math.max(0, Math.floor(scene.first));
  const last = Math.min(scene.columns, Math.ceil(scene.first + scene.width / scene.cell));
  const top = Math.floor(scene.top);
  const rows = scene.rows.slice(top, Math.ceil(scene.top + scene.height / scene.rowHeight));
  return { first, last, rows, top };
};

/** Below the axis: what the columns are, and the colour bar with what it stands for. */
function legend(from: Exported, x: number, y: number): { texts: [number, number, string][]; ramp: [number, number, string][] } {
  const texts: [number, number, string][] = [[x, y, `${from.axis}s →`]];
  if (!from.bar) return { texts, ramp: [] };
  const { words, map } = from.bar;
  texts.push([x, y + 20, `${from.unit}: ${words[0]}`]);
  const start = x + 6.2 * (from.unit.length + words[0].length + 3);
  texts.push([start + RAMP + 8, y + 20, words[1]]);
  const ramp = Array.from({ length: STEPS }, (_, i): [number, number, string] => [start + (i * RAMP) / STEPS, y + 11, cssColour(map, i / (STEPS - 1))]);
  return { texts, ramp };
}

export function toPng(from: Exported, ratio = 2): Promise<Blob> {
  const { scene, inks } = from;
  const shown = inView(scene);
  const tall = Math.min(scene.height, shown.rows.length * scene.rowHeight);
  const canvas = document.createElement("canvas");
  canvas.width = (LEFT + scene.width + RIGHT) * ratio;
  canvas.height = (TOP + tall + BOTTOM) * ratio;
  const c = canvas.getContext("2d")!;
  c.fillStyle = inks.back;
  c.fillRect(0, 0, canvas.width, canvas.height);
  const cells = document.createElement("canvas");
  cells.width = scene.width * ratio;
  cells.height = tall * ratio;
  drawCells(cells.getContext("2d")!, { ...scene, height: tall }, from.planes, from.look, from.mean, inks, ratio);
  c.drawImage(cells, LEFT * ratio, TOP * ratio);
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.fillStyle = inks.ink;
  c.font = "600 14px system-ui, sans-serif";
  let title = from.title;
  while (title.length > 20 && c.measureText(title).width > LEFT + scene.width - 12) title = short(title, title.length - 4);
  c.fillText(title, 12, 24);
  const { texts, ramp } = legend(from, LEFT, TOP + tall + BOTTOM - 32);
  c.font = "11px system-ui, sans-serif";
  for (const [x, y, text] of texts) c.fillText(text, x, y);
  for (const [x, y, colour] of ramp) {
    c.fillStyle = colour;
    c.fillRect(x, y, RAMP / STEPS + 0.5, 10);
  }
  c.fillStyle = inks.ink;
  c.font = "11px ui-monospace, monospace";
  c.textAlign = "right";
  c.textBaseline = "middle";
  let last = -99;
  shown.rows.forEach((row, at) => {
    const y = TOP + (at + 0.5 + shown.top - scene.top) * scene.rowHeight;
    if (y - last < LABEL) return;
    last = y;
    c.fillText(row.name.length > 32 ? "…" + row.name.slice(-31) : row.name || "model", LEFT - 8, y);
  });
  c.translate(LEFT, TOP + tall + 2);
  drawAxis(c, scene, from.piece, -1, inks, 92, from.axis !== "step");
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(blob!), "image/png"));
}

/** Cells as rectangles with the colour of the exact value, each with its numbers as a title. */
export async function toSvg(from: Exported): Promise<Blob> {
  const { scene, inks } = from;
  const { first, last, rows } = inView(scene);
  if (rows.length * (last - first) > MOST_CELLS)
    throw new Error(`${(rows.length * (last - first)).toLocaleString("en")} cells are too many for SVG (${MOST_CELLS.toLocaleString("en")}). Zoom in, or take PNG.`);
  const values = await from.values(first, last);
  const cell = Math.max(2, scene.cell);
  const high = Math.max(6, scene.rowHeight);
  const bottom = TOP + rows.length * high;
  const size = { width: Math.max(LEFT + (last - first) * cell + RIGHT, 760), height: bottom + BOTTOM };
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${size.width} ${size.height}`, ...size, "font-family": "system-ui, sans-serif", "font-size": 10 });
  const write = (x: number, y: number, text: string, options: Record<string, unknown> = {}) =>
    root.append(svg("text", { ...(options.transform ? {} : { x, y }), fill: inks.ink, ...options }, document.createTextNode(text)));
  root.append(svg("rect", { ...size, fill: inks.back }));
  write(12, 24, from.title, { "font-size": 14 });
  rows.forEach((row, at) => {
    const y = TOP + at * high;
    write(LEFT - 8, y + high / 2 + 3, row.name || "model", { "text-anchor": "end" });
    const header = from.planes(row.plane)?.header;
    const numbers = values.get(row.name);
    if (!header || !numbers) return;
    const scale = scaleOf(header, from.look.norm, row.index);
    const map = mapOf(header.signed, from.look);
    numbers.forEach((value, i) => {
      const share = shareOf(scale, value);
      const fill = Number.isNaN(share) ? inks.none : cssColour(map, share);
      const title = svg("title", {}, document.createTextNode(`${row.name}, ${first + i}: ${isNothing(numbers, i) ? from.nothing : exact(value)}`));
      root.append(svg("rect", { x: LEFT + i * cell, y, width: cell, height: high, fill }, title));
    });
  });
  if (cell >= READABLE)
    for (let t = first; t < last; t++) {
      const place = `translate(${LEFT + (t - first + 0.5) * cell + 3} ${bottom + 6}) rotate(-90)`;
      write(0, 0, short(visible(from.piece(t)?.text ?? ""), 14), { transform: place, "text-anchor": "end" });
    }
  const { texts, ramp } = legend(from, LEFT, bottom + BOTTOM - 32);
  for (const [x, y, text] of texts) write(x, y, text, { "font-size": 11 });
  for (const [x, y, fill] of ramp) root.append(svg("rect", { x, y, width: RAMP / STEPS + 0.5, height: 10, fill, class: "ramp" }));
  return new Blob([wellFormed(new XMLSerializer().serializeToString(root))], { type: "image/svg+xml" });
}

/** A text without the characters that XML forbids, which the serializer writes as they are. */
const wellFormed = (text: string) =>
  text.replace(/[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, (each) => (each < " " ? String.fromCharCode(0x2400 + each.charCodeAt(0)) : "\ufffd"));

/** One line per token, one column per row of the map, numbers that give the same float32 again. */
export async function toCsv(from: Exported): Promise<Blob> {
  const { first, last, rows } = inView(from.scene);
  const values = await from.values(first, last);
  // A text that begins like a formula would be run by a spreadsheet.
  const field = (text: string) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" + text : text).replace(/"/g, '""')}"`;
  // A token is its number and its text, a step its number, a block its name.
  const isToken = from.axis === "token";
  const place = (t: number, piece: Piece | null) => (isToken ? [t, field(piece?.text ?? "")] : [from.axis === "step" ? piece?.id ?? t : field(piece?.text ?? "")]);
  const lines = [[from.axis, ...(isToken ? ["text"] : []), ...rows.map((row) => field(row.name || "model"))].join(",")];
  for (let t = first; t < last; t++)
    lines.push([...place(t, from.piece(t)), ...rows.map((row) => written(values.get(row.name)!, t - first))].join(","));
  return new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" });
}

/** A number; nothing where nothing was measured. */
const written = (values: Float32Array, at: number) => (isNothing(values, at) ? "" : exact(values[at]));

export async function save(app: App, kind: "png" | "svg" | "csv"): Promise<void> {
  try {
    const blob = await { png: toPng, svg: toSvg, csv: toCsv }[kind](app.exported());
    download(blob, `${app.data.board.title.replace(/[^\w.-]+/g, "_")}-${app.state.metric}.${kind}`);
    app.tell(`Saved as ${kind.toUpperCase()}.`);
  } catch (error) {
    app.tell((error as Error).message);
  }
}

function download(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
