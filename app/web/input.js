// Real keys on the stage, and on-screen keys for fingers: one set of held keys.
class Keys {
  constructor(stage, pad, onChange, onPress, onEscape) {
    this.stage = stage;
    this.pad = pad;
    this.onChange = onChange;
    this.onPress = onPress;
    this.onEscape = onEscape;
    this.bindings = {};
    this.down = new Map();
    this.tapped = new Set(); // went down since the last snapshot, perhaps up again
    stage.addEventListener("keydown", (event) => this.keydown(event));
    stage.addEventListener("keyup", (event) => this.keyup(event));
    stage.addEventListener("blur", () => this.releaseAll());
    window.addEventListener("blur", () => this.releaseAll());
    document.addEventListener("visibilitychange", () => document.hidden && this.releaseAll());
  }

  held() {
    return [...new Set(this.down.values())].sort();
  }

  // What a snapshot says: a tap that was over before one could be sent is in it once.
  taken() {
    const keys = [...new Set([...this.down.values(), ...this.tapped])].sort();
    this.tapped.clear();
    return keys;
  }

  bind(bindings, legend) {
    this.bindings = bindings;
    const caps = { KeyW: "W", KeyA: "A", KeyS: "S", KeyD: "D", ArrowUp: "\u2191",
      ArrowLeft: "\u2190", ArrowDown: "\u2193", ArrowRight: "\u2192", KeyQ: "Q", KeyE: "E",
      Space: "Space" };
    const clusters = [["KeyW", "KeyA", "KeyS", "KeyD", "KeyQ", "KeyE"],
      ["ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight"], ["Space"]];
    this.pad.replaceChildren(...clusters
      .map((codes) => codes.filter((code) => bindings[code]))
      .filter((codes) => codes.length)
      .map((codes) => make("div", { class: "qwm-cluster" },
        codes.map((code) => this.cap(code, caps[code], legend[bindings[code]])))));
  }

  cap(code, text, words) {
    const button = make("button", { type: "button", class: "qwm-key", "data-code": code,
      "data-key": this.bindings[code], "aria-label": text + ": " + words, title: words },
    [make("b", { textContent: text })]);
    const release = () => this.release("pad-" + code);
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      this.stage.focus({ preventScroll: true });
      this.press("pad-" + code, this.bindings[code]);
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"])
      button.addEventListener(name, release);
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    // Enter, Space or a screen reader: one press and release.
    button.addEventListener("click", (event) => {
      if (event.detail !== 0) return;
      this.press("pad-" + code, this.bindings[code], true);
      release();
    });
    return button;
  }

  keydown(event) {
    if (event.target !== this.stage || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.code === "Escape") {
      this.releaseAll();
      this.onEscape();
      return;
    }
    const key = this.bindings[event.code];
    if (key === undefined) return;
    event.preventDefault();
    if (!event.repeat) this.press(event.code, key);
  }

  keyup(event) {
    if (this.down.has(event.code)) event.preventDefault();
    this.release(event.code);
  }

  press(source, key, single = false) {
    this.down.set(source, key);
    this.tapped.add(key);
    this.light();
    this.onPress(single);
  }

  release(source) {
    if (!this.down.delete(source)) return;
    this.light();
    this.onChange();
  }

  releaseAll() {
    this.tapped.clear();
    if (this.down.size === 0) return;
    this.down.clear();
    this.light();
    this.onChange();
  }

  light() {
    const held = new Set(this.down.values());
    for (const cap of $$(".qwm-key", this.pad)) {
      cap.classList.toggle("qwm-lit", held.has(cap.dataset.key));
    }
  }
}
