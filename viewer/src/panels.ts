// Panels: what other results bring along. A kind of panel is a function in this table.

import { cssColour } from "./colour";
import { h, say, svg } from "./dom";

export interface Panel {
  name: string;
  title: string;
  kind: string;
  data: any;
}
export interface PanelHost {
  layers: Set<string>;
  goTo(layer: string): void;
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
  return h("section", { class: "panel", "data-panel": panel.name }, h("h3", {}, panel.title), content);
}

registerPanel("text", (data) => h("p", {}, String(data.text)));

registerPanel("table", (data, host) => {
  const cell = (value: unknown) =>
    typeof value === "string" && host.layers.has(value)
      ? h("td", {}, h("button", { class: "link", onclick: () => host.goTo(value) }, value))
      : h("td", { class: typeof value === "number" ? "number" : "" }, typeof value === "number" ? say(value) : String(value ?? "–"));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {},
      h("thead", {}, h("tr", {}, ...data.columns.map((each: string) => h("th", { scope: "col" }, each)))),
      h("tbody", {}, ...data.rows.map((row: unknown[]) => h("tr", {}, ...row.map(cell))))));
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

registerPanel("matrix", (data) => {
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
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Matrix" }, canvas);
});
