// Elements without a framework, and how numbers and texts are written. Used everywhere.
// Texts are always set as text, never as markup: tokens, names and notes come from elsewhere and may contain anything.

type Child = Node | string | null | undefined | false;
type Options = Record<string, unknown>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, options: Options = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value as EventListener);
    else if (key === "style") Object.assign(element.style, value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.filter(there));
  return element;
}

const there = (each: Child): each is Node | string => each !== null && each !== undefined && each !== false;

/** Replace what an element holds; whoever was at one of its buttons by keyboard stays there. */
export function refill(parent: HTMLElement, ...children: Child[]): void {
  const buttons = () => [...parent.querySelectorAll<HTMLElement>("button")];
  const focused = (parent.getRootNode() as ShadowRoot).activeElement as HTMLElement;
  const at = buttons().indexOf(focused);
  parent.replaceChildren(...children.filter(there));
  if (at < 0) return;
  const same = buttons().find((each) => each.textContent === focused.textContent);
  (same ?? (parent.tabIndex < 0 ? buttons()[at] : parent))?.focus();
}

export function svg(tag: string, options: Options = {}, ...children: Node[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(options)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

/** A number for people: four significant digits. */
export function say(x: number): string {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "infinite" : "−infinite";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e5 ? String(+x.toPrecision(4)) : x.toExponential(2);
}

/** The shortest text that gives the same float32 again. */
export function exact(x: number): string {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  for (let digits = 1; digits < 9; digits++) {
    const text = x.toPrecision(digits);
    if (Math.fround(+text) === x) return String(+text);
  }
  return String(+x.toPrecision(9));
}

// Joiners are part of how Persian, Hindi and emoji are written; anywhere else they are hidden characters.
const JOINER = /(?<=[\p{L}\p{M}\p{Extended_Pictographic}\p{Emoji_Modifier}])(?<![\p{sc=Latin}\p{sc=Greek}\p{sc=Cyrillic}\u0300-\u036f])[\u200c\u200d](?=[\p{L}\p{M}\p{Extended_Pictographic}])(?![\p{sc=Latin}\p{sc=Greek}\p{sc=Cyrillic}])/gu;
// Tags are invisible letters; they belong to flags such as that of Scotland alone.
const FLAG = /\u{1f3f4}[\u{e0020}-\u{e007e}]+\u{e007f}/gu;
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** A token's text with blanks, line ends and control characters made visible. */
export function visible(piece: string, blanks = true): string {
  if (piece === "") return "·";
  const text = piece.search(HIDDEN) < 0 ? piece : coded(piece); // most have nothing to hide, and this is called often
  return blanks && !text.trim() ? "␣".repeat(Math.min(text.length, 4)) : text;
}

function coded(piece: string): string {
  const joiners = new Set(Array.from(piece.matchAll(JOINER), (found) => found.index));
  const flags = Array.from(piece.matchAll(FLAG), (found) => [found.index, found.index + found[0].length]);
  return piece.replace(HIDDEN, (each, at) => {
    if (joiners.has(at) || flags.some(([from, to]) => from < at && at < to)) return each;
    if (each === "\n") return "↵";
    if (each === "\t") return "⇥";
    const code = each.codePointAt(0)!;
    return code < 32 ? String.fromCharCode(0x2400 + code) : `‹${code.toString(16)}›`;
  });
}

/** A dotted name that may be broken where its parts begin. */
export const breakable = (name: string) => name.split(/(?=[.[])/).flatMap((each) => [h("wbr", {}), each]);

export const short = (text: string, most: number) => {
  const all = Array.from(text);
  return all.length <= most ? text : all.slice(0, most - 1).join("") + "…";
};
export const shortLeft = (text: string, most: number) => (text.length <= most ? text : "…" + text.slice(1 - most));
export const count = (n: number, word: string) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
