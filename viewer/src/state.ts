// One state object: the address of the page, `view.state` in Python and "copy Python" are made of it. Names and values
// are those of `state.py`. What comes from an address or from Python passes `clean`, which drops what cannot be shown.

import { MAPS } from "./colour";

export interface State {
  metric: string;
  sequence: number;
  layer: string; // of the crosshair: a layer, or a voxel such as "mlp[0:64]"
  column: number; // of the crosshair
  first: number; // the first column in view
  last: number; // the end of the columns in view; 0 fits all
  top: number; // the first row in view
  norm: "row" | "global";
  map: string;
  depth: "blocks" | "parts" | "all";
  toggled: string[]; // layers that are folded against `depth`
  voxels: string[]; // layers that are expanded to their voxels
  pool: "max" | "mean";
  follow: boolean;
}

export const START: State = {
  metric: "", sequence: 0, layer: "", column: 0, first: 0, last: 0, top: 0, norm: "row",
  map: "viridis", depth: "blocks", toggled: [], voxels: [], pool: "max", follow: true,
};

// What a page may choose for itself when it opens: a link says it always.
const CHOSEN = ["metric", "sequence", "layer", "column", "norm", "depth"];

/** What differs from how the page opens, as the part of an address behind "#"; `told` is what the board opens it with. */
export function toHash(state: State, told: object): string {
  const said = new URLSearchParams();
  for (const key of Object.keys(START) as (keyof State)[]) {
    const value = state[key];
    const text = Array.isArray(value) ? value.join("|") : String(value);
    const start = START[key];
    if (CHOSEN.includes(key) || key in told || text !== (Array.isArray(start) ? start.join("|") : String(start))) said.set(key, text);
  }
  return said.toString();
}

export function fromHash(hash: string): Partial<State> {
  const said: Record<string, unknown> = {};
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const start = START[key as keyof State];
    if (typeof start === "number") said[key] = text === "" ? NaN : +text;
    else if (typeof start === "boolean") said[key] = text === "true";
    else if (Array.isArray(start)) said[key] = text ? text.split("|") : [];
    else said[key] = text;
  }
  return clean(said);
}

const CHOICES: Record<string, string[]> = {
  norm: ["row", "global"], map: MAPS, depth: ["blocks", "parts", "all"], pool: ["max", "mean"],
};
const WHOLE = ["sequence", "column"];

/** A state that came from elsewhere, with only what is known and can be shown. */
export function clean(given: Record<string, unknown> | null | undefined): Partial<State> {
  const found: Record<string, unknown> = {};
  for (const key of Object.keys(START) as (keyof State)[]) {
    const value = given?.[key];
    if (Array.isArray(START[key])) {
      if (Array.isArray(value)) found[key] = value.filter((each) => typeof each === "string").slice(0, 500);
    } else if (typeof value === "number" && typeof START[key] === "number") {
      if (Number.isFinite(value)) found[key] = Math.max(0, WHOLE.includes(key) ? Math.floor(value) : value);
    } else if (typeof value === typeof START[key] && (CHOICES[key]?.includes(value as string) ?? true)) found[key] = value;
  }
  return found as Partial<State>;
}

const quote = (text: string) => JSON.stringify(text);

// What the things that a page shows are called in copied Python.
const NAMES: Record<string, string[]> = { scan: ["scan"], contrast: ["contrast"], run: ["run"], diff: ["before", "after"] };

/** Python that gets the values in view, and the view itself. */
export function toPython(state: State, board: { python: string | string[]; kind: string; axis: string; layers: string[] }): string {
  const start = START as unknown as Record<string, unknown>;
  const said = Object.entries(state)
    .filter(([key, value]) => key === "layer" || key === "column" || JSON.stringify(value) !== JSON.stringify(start[key]))
    .map(([key, value]) => `${quote(key)}: ${typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value)}`);
  const names = NAMES[board.kind];
  // Only what is saved can be read again; whoever made the rest has it in a variable.
  const made = [board.python].flat().map((how, i) =>
    /^\w+$/.test(how) ? `# ${names[i]}: the ${how} that this page shows, which is not saved to a file` : `${names[i]} = ${how}`);
  const [layer, voxel] = state.layer.split("[");
  // The page adds up what the layers inside of a block cost; `scan.values` has the cost of each layer alone.
  const summed = state.metric === "learning_cost" && board.layers.some((each) => each.startsWith(`${layer}.`));
  const native = board.kind !== "scan" || summed ? [] : [
    `names, values = scan.values(${quote(state.metric)}${voxel ? ', by="voxel"' : ""}, pattern=${quote(layer || "*")}, sequence=${state.sequence})`,
    `values[${state.column}]  # ${board.axis} ${state.column}`,
  ];
  return ["import torchfmri", "", ...made, ...native,
    `view = torchfmri.view(${names.join(", ")}, state={${said.join(", ")}})`,
    `print(view.crosshair)  # the numbers at ${board.axis} ${state.column}`, ""].join("\n");
}
