// A box over the page, from which the keyboard does not escape until it is closed. Used by `dialogs`.

import type { App } from "./app";
import { h } from "./dom";

export function openPopup(app: App, content: HTMLElement, name: string): void {
  const { popup } = app.ui;
  const close = h("button", { class: "close", "aria-label": "Close", onclick: () => closePopup(app) }, "×");
  const box = h("div", { class: "box", role: "dialog", "aria-modal": "true", "aria-label": name }, close, content);
  popup.replaceChildren(box);
  popup.hidden = false;
  popup.onclick = (event) => event.target === popup && closePopup(app);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Tab") return;
    const stops = [...box.querySelectorAll<HTMLElement>("button, input, [tabindex]")];
    const at = stops.indexOf(app.root.activeElement as HTMLElement);
    event.preventDefault();
    stops[(at + (event.shiftKey ? -1 : 1) + stops.length) % stops.length]?.focus();
  });
  (content.querySelector<HTMLElement>("input, button") ?? close).focus();
}

export function closePopup(app: App): void {
  const { popup, heat } = app.ui;
  if (popup.hidden) return;
  popup.hidden = true;
  popup.replaceChildren();
  heat.focus();
}
