// The skeleton of the page: elements that stay, by name. Made once by `App`; the other files fill them.
// Every element that can be used has a label, and regions have names: axe-core is run on the result.

import { h } from "./dom";

export function layout() {
  const canvas = (name: string, label: string, options: Record<string, unknown> = {}) =>
    h("canvas", { class: name, role: "img", "aria-label": label, ...options });
  const parts = {
    title: h("h1", {}, h("b", {}, "torchfmri")),
    live: h("button", { class: "live", hidden: true, title: "Pause or follow (Space)" }),
    sequence: h("button", { class: "chip", hidden: true, title: "Choose a sequence (s)" }),
    notes: h("button", { class: "chip", hidden: true, title: "What has to be known about this" }),
    search: h("input", { type: "search", "aria-label": "Find", spellcheck: "false" }),
    exportButton: h("button", { class: "tool", title: "Export (e)", "aria-haspopup": "menu" }, "Export"),
    tableButton: h("button", { class: "tool", title: "The same as a table (t)" }, "Table"),
    theme: h("button", { title: "Dark or light (d)", "aria-label": "Dark or light" }, "◐"),
    help: h("button", { class: "tool", title: "Keys (?)", "aria-label": "Keys and help" }, "?"),
    metrics: h("div", { class: "segments", role: "group", "aria-label": "What to show" }),
    meaning: h("p", { class: "meaning" }),
    choiceLabel: h("span", { class: "label", hidden: true }, "threshold"),
    choices: h("div", { class: "segments small", role: "group", "aria-label": "Threshold of the outlines", hidden: true }),
    norms: h("div", { class: "segments small", role: "group", "aria-label": "Colours relative to" }),
    depthLabel: h("span", { class: "label" }, "layers"),
    depths: h("div", { class: "segments small", role: "group", "aria-label": "Layers" }),
    allFindings: h("button", { class: "all", title: "All of them, with what to do (f goes to the next)" }),
    findings: h("div", { class: "findings" }),
    doing: h("div", { class: "doing", role: "status", "aria-live": "polite", hidden: true }),
    banner: h("div", { class: "banner", role: "alert", hidden: true }),
    strip: h("div", { class: "strip", role: "group", "aria-label": "Text", tabindex: 0, dir: "auto" }),
    tree: h("div", { class: "tree", role: "tree", "aria-label": "Layers" }),
    heat: canvas("heat", "Heat map", { tabindex: 0, role: "application", "aria-roledescription": "heat map" }),
    axis: canvas("axis", "Labels of the columns"),
    axisTitle: h("div", { class: "corner axis-title" }),
    tracks: canvas("tracks", "Curves over the same columns"),
    trackNames: h("div", { class: "track-names" }),
    overview: canvas("overview", "Overview of the whole sequence; drag over a part to see it, or drag the frame", {}),
    details: h("aside", { class: "details", "aria-label": "Details at the crosshair", tabindex: 0 }),
    bar: h("div", { class: "bar" }),
    status: h("div", { class: "status", role: "status", "aria-live": "polite" }),
    prompt: h("form", { class: "prompt", hidden: true }, h("textarea", { "aria-label": "Prompt", placeholder: "Type a prompt and watch the model answer…", rows: 1, autocomplete: "off", title: "Enter asks, Shift+Enter begins a line" }), h("button", { class: "primary" }, "Ask")),
    cover: h("div", { class: "cover" }),
    popup: h("div", { class: "popup", hidden: true }),
    hint: h("div", { class: "hint", hidden: true }),
    thumb: h("i", { class: "thumb", hidden: true }),
    shownRows: h("span", {}),
    headline: h("p", { class: "headline" }),
    legend: h("p", { class: "legend" }),
  };
  const health = h("div", { class: "health", role: "region", "aria-label": "Health", hidden: true }, parts.allFindings, parts.findings);
  const answer = h("div", { class: "answer", role: "region", "aria-label": "The answer", hidden: true }, parts.headline, parts.legend);
  const map = h("div", { class: "map" }, parts.heat, parts.hint, parts.thumb);
  const stage = h("div", { class: "stage" },
    parts.tree, map, parts.details,
    parts.axisTitle, parts.axis,
    parts.trackNames, parts.tracks,
    h("div", { class: "corner overview-name" }, "Overview"), parts.overview,
  );
  const body = h("div", { class: "viewer" },
    h("header", {},
      h("span", { class: "brand", "aria-hidden": "true" }, h("i", {}), h("i", {}), h("i", {})),
      parts.title, parts.live, parts.sequence, parts.notes, h("span", { class: "space" }),
      parts.search, parts.tableButton, parts.exportButton, parts.theme, parts.help),
    parts.banner,
    parts.prompt, parts.doing,
    h("div", { class: "work" }, answer, health,
    h("div", { class: "toolbar" }, parts.metrics, parts.meaning, h("span", { class: "space" }),
      parts.choiceLabel, parts.choices, parts.depthLabel, parts.depths, h("span", { class: "label" }, "colours"), parts.norms),
    parts.strip, stage,
    h("footer", {}, parts.bar, parts.status), parts.cover),
    parts.popup);
  return { ...parts, answer, health, stage, map, body };
}
export type Layout = ReturnType<typeof layout>;
