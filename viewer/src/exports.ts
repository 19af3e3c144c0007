// Exports: what is in view as PNG, SVG and CSV.

import { scaleOf, shareOf, cssColour, SIGNED_MAPS } from "./colour";
import { exact, visible, svg, short } from "./dom";
import { Inks, Piece, Scene, drawAxis, drawCells } from "./heatmap";
import { Look, Plane } from "./planes";

export const MOST_CELLS = 60_000;
const [LEFT, TOP, BOTTOM] = [230, 40, 96];

export interface Exported {
  scene: Scene;
  look: Look;
  mean: boolean;
  inks: Inks;
  planes: (name: string) => Plane | null;
  piece: (column: number) => Piece | null;
  title: string;
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

export function toPng(from: Exported, ratio = 2): Promise<Blob> {
  const { scene, inks } = from;
  const shown = inView(scene);
  const tall = Math.min(scene.height, shown.rows.length * scene.rowHeight);
  const canvas = document.createElement("canvas");
  canvas.width = (LEFT + scene.width + 16) * ratio;
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
  c.fillText(short(from.title, 160), 12, 24);
  c.font = "11px ui-monospace, monospace";
  c.textAlign = "right";
  c.textBaseline = "middle";
  let last = -99;
  shown.rows.forEach((row, at) => {
    const y = TOP + (at + 0.5 + shown.top - scene.top) * scene.rowHeight;
    if (y - last < 11) return;
    last = y;
    c.fillText(row.name.length > 32 ? "…" + row.name.slice(-31) : row.name || "model", LEFT - 8, y);
  });
  c.translate(LEFT, TOP + tall + 2);
  drawAxis(c, scene, from.piece, -1, inks, BOTTOM);
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(blob!), "image/png"));
}

/** Cells as rectangles with the colour of the exact value, each with its numbers as a title. */
export async function toSvg(from: Exported): Promise<Blob> {
  const { scene, inks, look } = from;
  const { first, last, rows } = inView(scene);
  if (rows.length * (last - first) > MOST_CELLS)
    throw new Error(`${(rows.length * (last - first)).toLocaleString("en")} cells are too many for SVG (${MOST_CELLS.toLocaleString("en")}). Zoom in, or take PNG.`);
  const values = await from.values(first, last);
  const cell = Math.max(2, Math.min(16, scene.cell));
  const high = Math.max(6, Math.min(20, scene.rowHeight));
  const size = { width: LEFT + (last - first) * cell + 16, height: TOP + rows.length * high + BOTTOM };
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${size.width} ${size.height}`, ...size, "font-family": "system-ui, sans-serif", "font-size": 10 });
  root.append(svg("rect", { ...size, fill: inks.back }));
  root.append(svg("text", { x: 12, y: 24, "font-size": 14, fill: inks.ink }, document.createTextNode(from.title)));
  rows.forEach((row, at) => {
    const y = TOP + at * high;
    const header = from.planes(row.plane)?.header;
    root.append(svg("text", { x: LEFT - 8, y: y + high / 2 + 3, "text-anchor": "end", fill: inks.ink }, document.createTextNode(row.name || "model")));
    const numbers = values.get(row.name);
    if (!header || !numbers) return;
    const scale = scaleOf(header, look.norm, row.index);
    const map = header.signed ? SIGNED_MAPS[look.map] : look.map;
    numbers.forEach((value, i) => {
      const share = shareOf(scale, value);
      const fill = Number.isNaN(share) ? inks.none : cssColour(map, share);
      const title = svg("title", {}, document.createTextNode(`${row.name}, ${first + i}: ${exact(value)}`));
      root.append(svg("rect", { x: LEFT + i * cell, y, width: cell, height: high, fill }, title));
    });
  });
  if (cell >= 8)
    for (let t = first; t < last; t++) {
      const [x, y] = [LEFT + (t - first + 0.5) * cell + 3, TOP + rows.length * high + 6];
      const text = short(visible(from.piece(t)?.text ?? ""), 14);
      root.append(svg("text", { transform: `translate(${x} ${y}) rotate(-90)`, "text-anchor": "end", fill: inks.ink }, document.createTextNode(text)));
    }
  return new Blob([new XMLSerializer().serializeToString(root)], { type: "image/svg+xml" });
}

/** One line per row, one column per token, numbers that give the same float32 again. */
export async function toCsv(from: Exported): Promise<Blob> {
  const { first, last, rows } = inView(from.scene);
  const values = await from.values(first, last);
  // A text that begins like a formula would be run by a spreadsheet.
  const field = (text: string) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" + text : text).replace(/"/g, '""')}"`;
  const columns = Array.from({ length: last - first }, (_, i) => first + i);
  const lines = [
    ["layer", ...columns.map(String)].join(","),
    [field("text"), ...columns.map((t) => field(from.piece(t)?.text ?? ""))].join(","),
    ...rows.map((row) => [field(row.name || "model"), ...Array.from(values.get(row.name) ?? [], exact)].join(",")),
  ];
  return new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" });
}

export function download(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
