// The layer tree: which rows are in view, and what each of them is. Used by `App` and drawn by `tree_view` and `heatmap`.
// It follows from the state alone, so that a link opens to the same rows.

import { State } from "./state";

export interface Row {
  name: string; // "model.layers.3.mlp", or "model.layers.3.mlp[0:64]"
  label: string; // what is written beside it
  plane: string; // "layers", or the layer whose voxel it is
  index: number; // in its plane
  depth: number;
  folds: boolean; // has layers beneath it
  open: boolean;
  parts: number; // voxels that it can be expanded to
}

/** The layer above each layer: the longest prefix that is a layer itself; -1 for none, or if others stand in between. */
export function parentsOf(layers: string[]): number[] {
  const above: number[] = []; // the layers that the one before lies in, and itself
  return layers.map((name, index) => {
    while (above.length && !(layers[above[above.length - 1]] && name.startsWith(layers[above[above.length - 1]] + "."))) above.pop();
    const parent = above[above.length - 1] ?? -1;
    above.push(index);
    return parent;
  });
}

/** How many segments lie beneath the numbered block of a layer; -1 above and outside of blocks. */
export function beneathBlock(name: string): number {
  const segments = name.split(".");
  const block = segments.findIndex((each) => /^\d+$/.test(each));
  return block < 0 ? -1 : segments.length - 1 - block;
}

export class Tree {
  readonly parents: number[];
  private readonly children: boolean[];
  private readonly hasBlocks: boolean;

  constructor(
    readonly layers: string[],
    private readonly parts: number[],
    private voxelNames: (layer: string) => string[],
  ) {
    this.parents = parentsOf(layers);
    this.children = layers.map(() => false);
    for (const parent of this.parents) if (parent >= 0) this.children[parent] = true;
    this.hasBlocks = layers.some((name) => beneathBlock(name) === 0);
  }

  /** Whether there is anything to fold, and blocks to fold it to. */
  get folds(): boolean {
    return this.hasBlocks && this.children.some(Boolean);
  }

  /** The depth to start with: what fits on a screen and still tells something. */
  startDepth(): State["depth"] {
    return this.hasBlocks && this.layers.length > 24 ? "blocks" : "all";
  }

  private isOpen(index: number, state: State): boolean {
    const name = this.layers[index];
    const beneath = beneathBlock(name);
    const open =
      state.depth === "all" || !this.hasBlocks || beneath < (state.depth === "blocks" ? 0 : 1);
    return open !== state.toggled.includes(name);
  }

  /** The rows in view, without those of hidden layers: what is beneath these stands beneath the layer above them. */
  rows(state: State, hidden: boolean[] = []): Row[] {
    const shown = this.layers.map(() => true);
    const depths = this.layers.map(() => 0);
    const parents = this.parents.map((parent) => {
      while (parent >= 0 && hidden[parent]) parent = this.parents[parent];
      return parent;
    });
    const children = new Set(parents.filter((_, index) => !hidden[index]));
    const found: Row[] = [];
    this.layers.forEach((name, index) => {
      if (hidden[index]) return;
      const parent = parents[index];
      if (parent >= 0) {
        shown[index] = shown[parent] && this.isOpen(parent, state);
        depths[index] = depths[parent] + 1;
      }
      if (!shown[index]) return;
      const label = parent >= 0 ? name.slice(this.layers[parent].length + 1) : name || "model"; // its whole name where no layer is above it
      const [folds, depth] = [children.has(index), depths[index]];
      const open = folds && this.isOpen(index, state);
      found.push({ name, label, plane: "layers", index, depth, folds, open, parts: this.parts[index] });
      if (state.voxels.includes(name)) {
        this.voxelNames(name).forEach((voxel, i) =>
          found.push({
            name: voxel, label: voxel.slice(name.length), plane: name, index: i, depth: depth + 1,
            folds: false, open: false, parts: 0,
          }),
        );
      }
    });
    return found;
  }

  /** The changes that bring a layer, or a voxel of it, into view. */
  reveal(name: string, state: State): Partial<State> {
    const layer = name.split("[")[0];
    const index = this.layers.indexOf(layer);
    const toggled = new Set(state.toggled);
    for (let each = this.parents[index] ?? -1; each >= 0; each = this.parents[each]) {
      const above = this.layers[each];
      if (!this.isOpen(each, { ...state, toggled: [...toggled] })) {
        if (!toggled.delete(above)) toggled.add(above);
      }
    }
    const voxels = name === layer || state.voxels.includes(layer) ? state.voxels : [...state.voxels, layer];
    return { toggled: [...toggled], voxels, layer: name };
  }
}
