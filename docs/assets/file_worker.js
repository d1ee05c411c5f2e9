// SPDX-License-Identifier: Apache-2.0
// Browsers start no worker for a page that is opened from a disk, and without one the theme hides its search. There, an
// empty frame plays the worker: the script runs in it, and messages are events of its window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (address) => new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: address, onload: done, onerror: failed });
        this.inside.document.body.append(script);
      });
      this.inside.importScripts = (...addresses) => Promise.all(addresses.map(load));
      this.ready = load(new URL(url, document.baseURI).href);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
