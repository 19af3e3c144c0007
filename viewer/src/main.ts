// The ways in: a page with a server (`serve`), a page in one file (`open`), and a notebook's widget (`render`, in
// anywidget's shape). The same bundle does all three, so these names are called from `page.py` and by anywidget.

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

const SILENCE = 4000; // milliseconds after which a kernel is taken to be gone

function render({ model, el }: { model: KernelModel; el: HTMLElement }): void {
  const transport = new KernelTransport(model);
  const state = clean(model.get("state") ?? {});
  // A notebook that was exported has nobody to answer: then the picture stands in. It may be in the notebook already.
  const name: string = model.get("still_class") ?? "";
  transport.answers = () => {
    const rule = document.createElement("style");
    rule.textContent = name && `.${name} { display: none; }`;
    document.head.append(rule);
  };
  window.setTimeout(() => {
    if (transport.answered || !model.get("still")) return;
    if (name && document.querySelector(`.${name}`)) return void (el.style.display = "none");
    const picture = document.createElement("img");
    picture.src = `data:image/png;base64,${model.get("still")}`;
    picture.alt = "The heat map of the scan: columns are tokens, rows are layers";
    picture.style.maxWidth = "100%";
    (el.shadowRoot ?? el).replaceChildren(picture);
  }, SILENCE);
  const app = keep(el, new App(el, {
    transport, state, owns: false, height: model.get("height"),
    changed: (now) => {
      model.set("state", { ...now });
      model.save_changes();
    },
  }));
  model.on("change:state", () => {
    const given = model.get("state");
    if (JSON.stringify(given) !== JSON.stringify(app.state)) app.take(clean(given));
  });
}

const viewer = { serve, open, render, registerPanel };
(globalThis as any).torchfmriViewer = viewer;
export default viewer;
