// The ways in: a page with a server, a page in one file, and a notebook's widget (anywidget's shape).

import { App } from "./app";
import { registerPanel } from "./panels";
import { clean } from "./state";
import { FileTransport, KernelModel, KernelTransport, ServerTransport } from "./transport";

function keep(host: HTMLElement, app: App): App {
  (host as any).viewer = app; // for tests and for the curious
  return app;
}

function serve(host: HTMLElement, base: string): App {
  return keep(host, new App(host, { transport: new ServerTransport(base), owns: true }));
}

function open(host: HTMLElement, data: HTMLElement): App {
  const { answers, sequence } = JSON.parse(data.textContent!);
  const transport = new FileTransport(answers);
  return keep(host, new App(host, { transport, state: { sequence }, owns: true }));
}

function render({ model, el }: { model: KernelModel; el: HTMLElement }): void {
  const transport = new KernelTransport(model);
  const state = clean(model.get("state") ?? {});
  const app = keep(el, new App(el, {
    transport, state, owns: false, height: model.get("height"),
    changed: (now) => {
      model.set("state", { ...now });
      model.save_changes();
    },
  }));
  model.on("change:state", () => {
    const given = model.get("state");
    if (JSON.stringify(given) !== JSON.stringify(app.state)) app.set(clean(given));
  });
}

const viewer = { serve, open, render, registerPanel };
(globalThis as any).torchfmriViewer = viewer;
export default viewer;
