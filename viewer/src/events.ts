// Mouse, wheel and keys become changes of the state. Called once by `App`; nothing is drawn here.
// Keys that are typed into a field, or belong to the browser (Ctrl, Meta), are left alone.

import type { App } from "./app";
import { KEYS, openFindings, openHelp, openMenu, openPicker, openTable } from "./dialogs";
import { closePopup } from "./popup";
import { find } from "./search";
import { START, fromHash } from "./state";

export function listen(app: App, keys: EventTarget): void {
  onHeat(app);
  onOverview(app);
  onControls(app);
  onPrompt(app);
  keys.addEventListener("keydown", (event) => onKey(app, event as KeyboardEvent));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.screen.repaint());
  if (app.options.owns)
    window.addEventListener("hashchange", () => app.take({ ...START, depth: app.state.depth, metric: app.state.metric, layer: app.state.layer, ...fromHash(location.hash) }));
}

function onHeat(app: App): void {
  const { heat, tree } = app.ui;
  const { viewport } = app;
  let drag: { x: number; y: number; moved: boolean } | null = null;
  heat.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (drag.moved || Math.hypot(dx, dy) > 4) {
        viewport.pan(-dx / app.scene.cell, -dy / app.scene.rowHeight);
        drag = { x: event.clientX, y: event.clientY, moved: true };
      }
    }
    app.hover = app.data.columns ? viewport.cellAt(event) : null;
    app.draw();
  });
  heat.addEventListener("pointerleave", () => {
    app.hover = null;
    app.draw();
  });
  heat.addEventListener("pointerdown", (event) => {
    heat.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, moved: false };
  });
  heat.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved && app.data.columns) {
      const { row, column } = viewport.cellAt(event);
      if (row >= 0) app.set({ layer: app.rows[row].name, column, follow: false });
    }
    drag = null;
  });
  heat.addEventListener("dblclick", () => viewport.expand());
  heat.addEventListener("contextrestored", () => {
    app.data.unpaint();
    app.screen.repaint();
  });
  heat.addEventListener("wheel", (event) => {
    event.preventDefault();
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways) viewport.pan(((event.deltaX || event.deltaY) / app.scene.cell) * 0.5, 0);
    else viewport.zoom(1.0015 ** event.deltaY, app.scene.first + event.offsetX / app.scene.cell);
  }, { passive: false });
  tree.addEventListener("wheel", (event) => {
    event.preventDefault();
    viewport.pan(0, event.deltaY / app.scene.rowHeight / 2);
  }, { passive: false });
}

function onOverview(app: App): void {
  const { ui: { overview }, viewport } = app;
  let from = 0;
  let moved = false;
  let grip: number | null = null; // where the pointer holds the frame; null where it draws another one
  const place = (event: PointerEvent) => viewport.overviewAt(event.offsetX);
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    [from, moved] = [place(event), false];
    grip = viewport.frames(from) ? from - app.scene.first : null;
  });
  overview.addEventListener("pointermove", (event) => {
    if (!event.buttons) return;
    const [to, span] = [place(event), app.scene.width / app.scene.cell];
    moved ||= to !== from;
    if (grip !== null) viewport.show(to - grip, span);
    else viewport.show(Math.min(from, to), Math.abs(to - from));
  });
  overview.addEventListener("pointerup", () => {
    const span = app.scene.width / app.scene.cell;
    if (!moved && grip === null && viewport.zoomed) viewport.show(from - span / 2, span);
  });
}

function onControls(app: App): void {
  const { ui } = app;
  ui.sequence.addEventListener("click", () => openPicker(app));
  ui.exportButton.addEventListener("click", () => openMenu(app));
  ui.tableButton.addEventListener("click", () => openTable(app));
  ui.theme.addEventListener("click", () => app.theme());
  ui.help.addEventListener("click", () => openHelp(app));
  ui.live.addEventListener("click", () => app.viewport.follow());
  ui.allFindings.addEventListener("click", () => openFindings(app));
  ui.notes.addEventListener("click", () => openFindings(app));
  ui.search.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") void find(app, ui.search.value, event.shiftKey ? -1 : 1);
    if (event.key === "Escape") ui.heat.focus();
  });
}

function onPrompt(app: App): void {
  const input = app.ui.prompt.querySelector("textarea")!;
  const fit = () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`; // and its border
  };
  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    app.ui.prompt.requestSubmit();
  });
  app.ui.prompt.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) ask(app, input.value, () => { input.value = ""; fit(); });
  });
}

/** Hand a prompt to the model; whoever asks wants to see the answer. */
export function ask(app: App, prompt: string, taken: () => void = () => undefined): void {
  app.options.transport.prompt!(prompt).then(
    () => {
      taken();
      app.set({ follow: true, sequence: Math.max(0, app.data.board.sequences - 1) }); // from there it goes on to the answer
    },
    (error: Error) => {
      app.ui.doing.hidden = false;
      app.ui.doing.className = "doing problem";
      app.ui.doing.textContent = error.message;
    },
  );
}

function onKey(app: App, event: KeyboardEvent): void {
  const target = event.composedPath()[0] as HTMLElement;
  const typing = target instanceof HTMLInputElement || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement;
  if (event.key === "Escape") closePopup(app);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !app.ready || !app.ui.popup.hidden) return;
  const presses = ["Enter", " "].includes(event.key);
  if (presses && (target instanceof HTMLButtonElement || target.closest?.("aside, .tree button"))) return;
  const act = KEYS.find((each) => each.keys.includes(event.key));
  if (!act) return;
  event.preventDefault();
  app.hover = null; // the details are about the crosshair until the mouse moves again
  act.act(app, event);
}
