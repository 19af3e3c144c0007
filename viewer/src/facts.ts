// The statistics of a row, and small figures of them, for `details`. They are computed from exact values and kept with
// them: sorting a row of 100,000 values takes longer than a frame.

import { h, say, svg } from "./dom";

export interface RowFacts {
  count: number;
  nonfinite: number;
  zeros: number;
  mean: number;
  std: number;
  min: number;
  median: number;
  max: number;
  sorted: Float32Array;
  bins: Map<boolean, number[]>; // of the histogram, by whether it is logarithmic
}

const known = new WeakMap<Float32Array, RowFacts>();

/** The statistics of a row, computed once: of a long row that takes longer than a frame. */
export function factsOf(values: Float32Array): RowFacts {
  let facts = known.get(values);
  if (!facts) known.set(values, (facts = describe(values)));
  return facts;
}

/** The statistics of the finite values; the standard deviation is that of the population. */
function describe(values: Float32Array): RowFacts {
  const sorted = values.filter((x) => Number.isFinite(x)).sort();
  const n = sorted.length;
  let [sum, zeros] = [0, 0];
  for (const x of sorted) {
    sum += x;
    if (x === 0) zeros++;
  }
  const mean = n ? sum / n : NaN;
  let squares = 0;
  for (const x of sorted) squares += (x - mean) ** 2;
  const at = (n - 1) / 2;
  const median = n ? (sorted[Math.floor(at)] + sorted[Math.ceil(at)]) / 2 : NaN;
  return {
    count: n, nonfinite: values.length - n, zeros, mean, median, std: n ? Math.sqrt(squares / n) : NaN,
    min: n ? sorted[0] : NaN, max: n ? sorted[n - 1] : NaN, sorted, bins: new Map(),
  };
}

/** How many of the sorted values are lower than x, equal to it, and higher. */
export function standing(sorted: Float32Array, x: number): { below: number; equal: number; above: number } {
  const place = (isBefore: (value: number) => boolean) => {
    let [low, high] = [0, sorted.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBefore(sorted[middle])) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const [below, most] = [place((value) => value < x), place((value) => value <= x)];
  return { below, equal: most - below, above: sorted.length - most };
}

/** The row's values as a histogram with the cell's own marked. */
export function histogram(facts: RowFacts, value: number, logarithmic: boolean): Element[] {
  const [bins, wide, tall] = [32, 256, 56];
  const root = svg("svg", { viewBox: `0 0 ${wide} ${tall + 2}`, class: "histogram", role: "img", "aria-label": "Histogram of this row" });
  const positive = facts.sorted.find((x) => x > 0) ?? 1;
  const f = (x: number) => (logarithmic ? Math.log(Math.max(x, positive)) : x);
  const [low, high] = [f(facts.min), f(facts.max)];
  if (!(high > low)) return [];
  let counts = facts.bins.get(logarithmic);
  if (!counts) {
    facts.bins.set(logarithmic, (counts = new Array(bins).fill(0) as number[]));
    for (const x of facts.sorted) counts[Math.min(bins - 1, Math.floor(((f(x) - low) / (high - low)) * bins))]++;
  }
  const most = Math.max(...counts);
  counts.forEach((each, i) => {
    const height = each ? Math.max(1.5, (each / most) * tall) : 0;
    root.append(svg("rect", { x: (i * wide) / bins + 0.5, y: tall - height, width: wide / bins - 1, height, rx: 1 }));
  });
  if (Number.isFinite(value)) {
    const x = ((f(value) - low) / (high - low)) * wide;
    root.append(svg("path", { d: `M${x} 0V${tall + 2}`, class: "now" }));
  }
  const end = (name: string, x: number) => h("span", {}, h("i", {}, name), ` ${say(x)}`);
  return [root, h("div", { class: "ends" }, end("min", facts.min), h("i", {}, logarithmic ? "this row, log" : "this row"), end("max", facts.max))];
}

/** Names with values as bars, the largest first. */
export function bars(names: string[], values: Float32Array, most: number, go: (name: string) => void): HTMLElement {
  const order = [...values.keys()].filter((i) => Number.isFinite(values[i]));
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const top = Math.abs(values[order[0]]) || 1;
  return h("ul", { class: "bars" }, ...order.slice(0, most).map((i) =>
    h("li", {}, h("button", { onclick: () => go(names[i]), title: names[i] },
      h("span", { class: "bar-name" }, names[i].replace(/^.*\[/, "[")),
      h("span", { class: "bar-box" }, h("i", { style: { width: `${(100 * Math.abs(values[i])) / top}%` } })),
      h("span", { class: "bar-value" }, say(values[i])),
    ))));
}
