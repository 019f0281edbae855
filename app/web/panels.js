// The memory gauge, the figures of the run, and the form of choices.
const OTHERS = "other programs";

class Gauge {
  constructor(lanes) {
    this.lanes = lanes;
    this.bar = $(".qwm-parts");
    this.whole = $(".qwm-whole");
    this.legend = $(".qwm-legend");
  }

  look(name) {
    if (name.startsWith("kv:")) return { lane: name.slice(3), title: "KV " + this.lanes.title(name.slice(3)) };
    const titles = { weights: "Weights", scratch: "Scratch", [OTHERS]: "Other programs", free: "Free",
      "process other": "Rest of program" };
    return { part: ["weights", "scratch", "free"].includes(name) ? name : name === OTHERS ? "used" : "other",
      title: titles[name] || capital(name) };
  }

  update(memory) {
    const parts = memory.parts.filter((part) => part[1] > 0 || part[0].startsWith("kv:"));
    if (!parts.some((part) => part[0] === "free"))
      parts.push(["free", Math.max(memory.total - memory.used, 0)]);
    const free = parts.find((part) => part[0] === "free")[1];
    // Process memory knows of this program alone: the rest of what is in use is named too.
    const others = memory.total - parts.reduce((sum, [, size]) => sum + size, 0);
    if (others > 0.002 * memory.total) parts.splice(-1, 0, [OTHERS, others]);
    if (this.shown !== parts.map((part) => part[0]).join()) this.rebuild(parts);
    parts.forEach(([name, size], index) => {
      // Above: what is in use, part by part. Below it: the whole device, used and free.
      this.bar.children[index].style.flexGrow = name === "free" || name === OTHERS ? 0 : size / memory.used;
      this.legend.children[index].lastElementChild.textContent = bytes(size);
    });
    this.whole.children[0].style.flexGrow = memory.total - free;
    this.whole.children[1].style.flexGrow = free;
    say("memory-source", "from " + memory.source);
    say("memory-used", bytes(memory.total - free) + " in use");
    say("memory-total", "of " + bytes(memory.total));
    this.bar.setAttribute("aria-label", "Memory by part: " +
      parts.map(([name, size]) => this.look(name).title + " " + bytes(size)).join(", "));
  }

  rebuild(parts) {
    this.shown = parts.map((part) => part[0]).join();
    const mark = (tag, name) => {
      const look = this.look(name);
      const data = look.lane ? { "data-lane": look.lane, "data-look": LANE_LOOK[look.lane] || "solid" }
        : { "data-part": look.part };
      return make(tag, { ...data, title: look.title });
    };
    this.bar.replaceChildren(...parts.map(([name]) => mark("i", name)));
    this.legend.replaceChildren(...parts.map(([name]) => make("li", {}, [
      mark("i", name), make("span", { textContent: this.look(name).title }), make("b")])));
  }
}

class Choices {
  constructor(onChange, onScene, onPicture) {
    this.onChange = onChange;
    this.onScene = onScene;
    this.onPicture = onPicture;
    this.scene = null;
    this.picture = null;
    rove($(".qwm-scenes"));
    $(".qwm-settings").addEventListener("submit", (event) => event.preventDefault());
    $(".qwm-settings").addEventListener("input", () => {
      this.explain();
      this.onChange();
    });
    input("script").addEventListener("input", () => {
      // A script starts where it was written for.
      const script = this.hello.scripts.find((one) => one.name === input("script").value);
      const tile = script && $$(".qwm-scene").find((one) => one.dataset.scene === script.scene);
      if (!tile) return;
      this.scene = script.scene;
      this.picture = null;
      this.mark();
      if (state.phase === "idle" || state.phase === "ended") poster();
    });
    input("prompt").addEventListener("input", () => {
      this.count();
      this.onChange();
    });
    input("file").addEventListener("change", (event) => {
      event.stopPropagation();
      const file = event.target.files[0];
      event.target.value = "";
      if (file) this.onPicture(file);
    });
  }

  fill(hello) {
    this.hello = hello;
    this.scene = hello.defaults.scene;
    this.picture = null;
    this.fillPrompt(hello);
    input("script").replaceChildren(make("option", { value: "", textContent: "none, I hold the keys" }),
      ...hello.scripts.map((one) => make("option", { value: one.name, textContent: one.title })));
    $(".qwm-scripts").hidden = hello.scripts.length === 0;
    input("seed").value = hello.defaults.seed;
    input("seed").max = hello.limits.seed;
    input("steps").value = hello.defaults.steps;
    input("steps").max = hello.limits.steps;
    input("speed").value = String(hello.defaults.speed);
    input("speed").options[0].textContent = "natural, " + hello.world.fps + " frames/s";
    input("lanes").replaceChildren(...hello.lanes.map((lane) => make("label", { class: "qwm-check" }, [
      make("input", { type: "checkbox", value: lane.name,
        checked: hello.defaults.lanes.includes(lane.name) }),
      make("span", { class: "qwm-swatch", "data-lane": lane.name, "data-look": LANE_LOOK[lane.name] || "solid",
        "aria-hidden": "true" }),
      make("span", { textContent: lane.title })])));
    input("mode").replaceChildren(...Object.entries(hello.modes).map(([name, words]) => {
      const [title, detail] = words.split(": ");
      return make("label", { title: detail }, [make("input", { type: "radio", name: "qwm-mode",
        value: name, checked: name === hello.defaults.mode }), make("span", { textContent: title })]);
    }));
    const tiles = hello.scenes.map((scene) => this.tile(scene.name, scene.title, scene.picture));
    if (hello.upload) tiles.push(this.ownTile());
    const count = tiles.length;
    $(".qwm-scenes").style.setProperty("--columns", count <= 7 ? count : Math.ceil(count / 2));
    $(".qwm-scenes").style.setProperty("--narrow", count % 3 === 0 ? 3 : 4);
    $(".qwm-scenes").replaceChildren(...tiles);
    $(".qwm-scenes").hidden = count === 0;
    this.mark();
    this.explain();
  }

  fillPrompt(hello) {
    const takes = hello.prompts.length > 0;
    $(".qwm-prompt").hidden = !takes;
    say("start-note", hello.upload ? "a scene, or a picture or video of your own"
      : "from a prompt alone; this world has no start picture");
    if (!takes) return (input("prompt").value = "");
    input("prompt").placeholder = hello.prompts[0];
    input("prompt").value = "";
    $(".qwm-chips").replaceChildren(...hello.prompts.map((text) => {
      const chip = make("button", { type: "button", class: "qwm-chip", textContent: text, title: text });
      chip.addEventListener("click", () => {
        input("prompt").value = text;
        this.count();
        this.onChange();
      });
      return chip;
    }));
    this.count();
  }

  count() {
    const length = input("prompt").value.length, most = this.hello.limits.prompt;
    say("prompt-note", length === 0 ? "Empty: the world's own prompt, the first of these."
      : length + " of " + most + " characters");
  }

  explain() {
    say("mode", this.hello.modes[$("input:checked", input("mode")).value] + ".");
  }

  tile(name, title, picture) {
    const tile = make("button", { type: "button", class: "qwm-scene", "data-scene": name,
      title: title, role: "radio" }, [make("img", { src: picture, alt: "", draggable: false }),
      make("span", { textContent: title })]);
    tile.addEventListener("click", () => {
      this.scene = name;
      this.picture = null;
      this.mark();
      this.onScene(picture);
    });
    return tile;
  }

  ownTile() {
    const tile = make("button", { type: "button", class: "qwm-scene qwm-own", "data-scene": "",
      role: "radio" }, [make("span", { class: "qwm-plus", textContent: "+", "aria-hidden": "true" }),
      make("span", { textContent: "Own picture" })]);
    tile.addEventListener("click", () => input("file").click());
    return tile;
  }

  own(number, shown) {
    this.picture = number;
    const tile = $(".qwm-own");
    tile.firstElementChild.replaceWith(make("img", { src: shown, alt: "", draggable: false }));
    this.mark();
    this.onScene(shown);
  }

  mark() {
    for (const tile of $$(".qwm-scene")) {
      const own = tile.dataset.scene === "";
      const on = this.picture !== null ? own : tile.dataset.scene === this.scene;
      tile.setAttribute("aria-checked", on ? "true" : "false");
    }
  }

  // What Reset would start with. Numbers go as they are typed: the server says what is wrong.
  read() {
    const typed = (name) => {
      const text = input(name).value.trim();
      return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
    };
    return {
      world: this.hello.world.name,
      prompt: input("prompt").value,
      script: input("script").value || null,
      scene: this.scene,
      picture: this.picture,
      seed: typed("seed"),
      steps: typed("steps"),
      speed: Number(input("speed").value),
      mode: $("input:checked", input("mode")).value,
      lanes: $$("input:checked", input("lanes")).map((box) => box.value),
    };
  }
}
