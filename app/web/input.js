// Real keys on the stage, on-screen keys for fingers, a mouse that looks around: one set of held keys.
const ENDS = ["pointerup", "pointercancel", "lostpointercapture"];
const DRAG = 24; // pixels from where the button went down until an arrow is held

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
    this.endLook = null; // while a mouse looks around
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
    for (const name of ENDS) button.addEventListener(name, release);
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

  // The mouse, its button down on the pictures: the arrows of where it has gone are held meanwhile.
  look(event) {
    if (event.pointerType === "touch" || event.button !== 0 || this.endLook) return;
    const [x, y] = [event.clientX, event.clientY];
    const move = (now) => {
      if (now.pointerId !== event.pointerId) return;
      // Another button that stays down keeps pointerup from coming.
      if (!(now.buttons & 1)) return end(now);
      this.lean("mouse-x", now.clientX - x, "ArrowLeft", "ArrowRight");
      this.lean("mouse-y", now.clientY - y, "ArrowUp", "ArrowDown");
    };
    const end = (now) => {
      if (now && now.pointerId !== event.pointerId) return;
      this.endLook = null;
      this.stage.removeEventListener("pointermove", move);
      for (const name of ENDS) this.stage.removeEventListener(name, end);
      for (const source of ["mouse-x", "mouse-y"]) this.release(source);
    };
    this.endLook = end;
    this.stage.setPointerCapture(event.pointerId);
    this.stage.addEventListener("pointermove", move);
    for (const name of ENDS) this.stage.addEventListener(name, end);
  }

  lean(source, distance, less, more) {
    const key = Math.abs(distance) < DRAG ? undefined : this.bindings[distance < 0 ? less : more];
    if (this.down.get(source) === key) return;
    this.release(source);
    if (key !== undefined) this.press(source, key);
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
    // Or the next move of a mouse whose button is still down would drive on without the focus.
    if (this.endLook) this.endLook();
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
