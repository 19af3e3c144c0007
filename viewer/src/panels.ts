// Panels: what other results bring along, such as peaks, attention and lenses. A kind of panel is a function in this
// table; `Panel` in `board.py` says what its data are. Used by `details`. Texts in data are shown as text.

import { cssColour } from "./colour";
import { breakable, h, say, short, svg, visible } from "./dom";

export interface Panel {
  name: string;
  title: string;
  kind: string;
  data: any;
}
export interface PanelHost {
  layers: Set<string>;
  goTo(layer: string | null, column: number | null): void;
}
type Draw = (data: any, host: PanelHost) => Element;

const kinds = new Map<string, Draw>();

/** Make a further kind of panel known. */
export function registerPanel(kind: string, draw: Draw): void {
  kinds.set(kind, draw);
}

export function drawPanel(panel: Panel, host: PanelHost): HTMLElement {
  const draw = kinds.get(panel.kind);
  const content = draw ? draw(panel.data, host) : h("p", {}, `This viewer cannot draw “${panel.kind}”.`);
  if (content.getAttribute("role") === "region") content.setAttribute("aria-label", panel.title);
  return h("section", { class: "panel", "data-panel": panel.name }, h("h2", {}, panel.title), content);
}

registerPanel("text", (data) => h("p", {}, String(data.text)));

/** A number in words of its own, such as "5.1e-13": it is never broken over two lines. */
const FIGURE = /^[-−+]?[\d.,]+(e[-+]?\d+)?$/;

const WHOLE = 18; // characters of a name that are not broken over lines

registerPanel("table", (data, host) => {
  // A short name stays on one line; a long one is broken where its parts begin.
  const link = (text: string, act: () => void) =>
    h("td", {}, h("button", { class: "link", onclick: act }, ...(text.length <= WHOLE ? [h("span", { class: "whole" }, text)] : breakable(text))));
  const leads = (to: any) => typeof to.column === "number" || host.layers.has(to.layer);
  const cell = (value: any) =>
    typeof value === "string" && host.layers.has(value)
      ? link(value, () => host.goTo(value, null))
      : value && typeof value === "object" && !leads(value)
      ? h("td", { class: "whole" }, String(value.text))
      : value && typeof value === "object"
      ? link(String(value.text), () => host.goTo(value.layer ?? null, value.column ?? null))
      : h("td", { class: typeof value === "number" ? "number" : FIGURE.test(value) ? "figure" : "" }, typeof value === "number" ? say(value) : String(value ?? "–"));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {},
      h("thead", {}, h("tr", {}, ...data.columns.map((each: string) => (each ? h("th", { scope: "col" }, each) : h("td", {}))))),
      h("tbody", {}, ...data.rows.map((row: unknown[]) => h("tr", {}, ...row.map(cell))))));
});

registerPanel("bars", (data, host) => {
  const values: number[] = data.values;
  const top = Math.max(...values.map(Math.abs), 1e-30);
  return h("ul", { class: "bars" }, ...values.map((value, i) =>
    h("li", {}, h("button", { onclick: () => host.goTo(null, data.columns[i]), title: data.names[i] },
      h("span", { class: "bar-name", dir: "auto" }, short(visible(data.names[i]), 24)),
      h("span", { class: "bar-box" }, h("i", { style: { width: `${(100 * Math.abs(value)) / top}%` } })),
      h("span", { class: "bar-value" }, say(value))))));
});

registerPanel("lines", (data) => {
  const [wide, tall] = [256, 90];
  const root = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, class: "lines", role: "img", "aria-label": "Curves" });
  const series = Object.entries(data.series) as [string, number[]][];
  const all = series.flatMap(([, values]) => values).filter(Number.isFinite);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  series.forEach(([, values], n) => {
    const place = (y: number, i: number) => `${(i / Math.max(1, values.length - 1)) * wide} ${tall - 4 - ((y - low) / (high - low || 1)) * (tall - 8)}`;
    root.append(svg("polyline", { points: values.map(place).join(","), style: `stroke:${cssColour("viridis", (n + 1) / (series.length + 1))}` }));
  });
  return h("figure", {}, root, h("figcaption", {}, `${series.map(([name]) => name).join(" · ")}; ${say(low)} to ${say(high)}`));
});

registerPanel("matrix", (data, host) => {
  const values: number[][] = data.values;
  const top = Math.max(...values.flat().map(Math.abs).filter(Number.isFinite), 1e-30);
  const size = Math.max(2, Math.min(16, Math.floor(256 / Math.max(1, data.columns.length))));
  const canvas = h("canvas", { width: size * data.columns.length, height: size * data.rows.length, class: "matrix", role: "img", "aria-label": "Matrix" });
  const c = canvas.getContext("2d")!;
  values.forEach((row, y) => row.forEach((value, x) => {
    if (!Number.isFinite(value)) return;
    c.fillStyle = data.signed ? cssColour("vik", 0.5 + value / top / 2) : cssColour("viridis", value / top);
    c.fillRect(x * size, y * size, size, size);
  }));
  if (data.row !== undefined) {
    c.strokeStyle = "#ff7ad9";
    c.lineWidth = 1.5;
    c.strokeRect(0.75, data.row * size + 0.75, canvas.width - 1.5, size - 1.5);
  }
  canvas.addEventListener("mousemove", (event) => {
    const [x, y] = [Math.floor(event.offsetX / size), Math.floor(event.offsetY / size)];
    canvas.title = values[y]?.[x] === undefined ? "" : `${visible(data.rows[y])} → ${visible(data.columns[x])}: ${say(values[y][x])}`;
  });
  canvas.addEventListener("click", (event) => host.goTo(null, Math.floor(event.offsetY / size)));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Matrix" }, canvas);
});
