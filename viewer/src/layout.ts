// The skeleton of the page: elements that stay, by name.

import { h } from "./dom";

export function layout(axis: string) {
  const canvas = (name: string, label: string, options: Record<string, unknown> = {}) =>
    h("canvas", { class: name, role: "img", "aria-label": label, ...options });
  const parts = {
    title: h("h1", {}),
    live: h("span", { class: "live", hidden: true }),
    sequence: h("button", { class: "chip", hidden: true, title: "Choose a sequence (s)" }),
    search: h("input", { type: "search", placeholder: `Find ${axis}s or layers  /`, "aria-label": `Find ${axis}s or layers`, spellcheck: "false" }),
    exportButton: h("button", { title: "Export (e)", "aria-haspopup": "menu" }, "Export"),
    tableButton: h("button", { title: "The same as a table (t)" }, "Table"),
    theme: h("button", { title: "Dark or light (d)", "aria-label": "Dark or light" }, "◐"),
    help: h("button", { title: "Keys (?)", "aria-label": "Keys and help" }, "?"),
    metrics: h("div", { class: "segments", role: "group", "aria-label": "What to show" }),
    meaning: h("p", { class: "meaning" }),
    norms: h("div", { class: "segments small", role: "group", "aria-label": "Colours relative to" }),
    depths: h("div", { class: "segments small", role: "group", "aria-label": "Layers" }),
    health: h("div", { class: "health", role: "region", "aria-label": "Health", hidden: true }),
    banner: h("div", { class: "banner", role: "alert", hidden: true }),
    strip: h("div", { class: "strip", role: "group", "aria-label": "Text", tabindex: 0, dir: "auto" }),
    tree: h("div", { class: "tree", role: "tree", "aria-label": "Layers" }),
    heat: canvas("heat", "Heat map", { tabindex: 0, role: "application", "aria-roledescription": "heat map" }),
    axis: canvas("axis", `${axis} labels`),
    tracks: canvas("tracks", "Curves over the same columns"),
    trackNames: h("div", { class: "track-names" }),
    overview: canvas("overview", "Overview of the whole sequence; drag to move", {}),
    details: h("aside", { class: "details", "aria-label": "Details at the crosshair", tabindex: 0 }),
    bar: h("div", { class: "bar" }),
    status: h("div", { class: "status", role: "status", "aria-live": "polite" }),
    prompt: h("form", { class: "prompt", hidden: true }, h("input", { "aria-label": "Prompt", placeholder: "Type a prompt and watch the model answer…", maxlength: 8000, autocomplete: "off" }), h("button", { class: "primary" }, "Ask")),
    cover: h("div", { class: "cover" }),
    popup: h("div", { class: "popup", hidden: true }),
    hint: h("div", { class: "hint", hidden: true }),
  };
  const map = h("div", { class: "map" }, parts.heat, parts.hint);
  const stage = h("div", { class: "stage" },
    parts.tree, map, parts.details,
    h("div", { class: "corner" }), parts.axis,
    parts.trackNames, parts.tracks,
    h("div", { class: "corner overview-name" }, "Overview"), parts.overview,
  );
  const body = h("div", { class: "viewer" },
    h("header", {},
      h("span", { class: "brand", "aria-hidden": "true" }, h("i", {}), h("i", {}), h("i", {})),
      parts.title, parts.live, parts.sequence, h("span", { class: "space" }),
      parts.search, parts.tableButton, parts.exportButton, parts.theme, parts.help),
    parts.banner,
    parts.prompt,
    h("div", { class: "work" }, parts.health,
    h("div", { class: "toolbar" }, parts.metrics, parts.meaning, h("span", { class: "space" }),
      h("span", { class: "label" }, "layers"), parts.depths, h("span", { class: "label" }, "colours"), parts.norms),
    parts.strip, stage,
    h("footer", {}, parts.bar, parts.status), parts.cover),
    parts.popup);
  return { ...parts, stage, map, body };
}
export type Layout = ReturnType<typeof layout>;
