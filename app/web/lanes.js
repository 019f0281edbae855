// One panel per cache: its picture and its figures.
const LANE_LOOK = { bf16: "solid", qvg: "stripes", quantwm: "dots", qtc: "grid", kivi: "bars", rtn: "rows",
  "qvg-pro": "slants", "bf16-floor": "hollow" };

class Lanes {
  constructor(holder) {
    this.holder = holder;
    this.choices = {};
    this.names = [];
  }

  describe(choices) {
    this.choices = Object.fromEntries(choices.map((choice) => [choice.name, choice]));
  }

  title(name) {
    return this.choices[name] ? this.choices[name].title : name;
  }

  build(names, size) {
    const shape = names.join() + size.join("x");
    if (shape !== this.shape) {
      this.shape = shape;
      this.names = names;
      this.holder.style.setProperty("--count", names.length);
      this.holder.replaceChildren(...names.map((name) => this.panel(name, size)));
    }
    return $$("canvas", this.holder);
  }

  panel(name, size) {
    const figure = (key, label, more = "") => make("div", { class: "qwm-figure qwm-" + key }, [
      make("dt", { textContent: label }, more ? [make("span", { textContent: more })] : []),
      make("dd", { "data-figure": key, textContent: "\u2013" })]);
    const canvas = make("canvas", { width: size[0], height: size[1], role: "img",
      "aria-label": "Picture with the " + this.title(name) + " cache" });
    // Small pictures keep their pixels; large ones are scaled down smoothly.
    const screen = make("div", { class: size[0] > 320 ? "qwm-screen qwm-fine" : "qwm-screen" }, [canvas]);
    screen.style.setProperty("--aspect", size[0] + " / " + size[1]);
    return make("article", { class: "qwm-lane", "data-lane": name,
      "data-look": LANE_LOOK[name] || "solid" }, [
      make("header", {}, [make("span", { class: "qwm-swatch", "aria-hidden": "true" }),
        make("h3", { textContent: this.title(name) }),
        make("small", { textContent: this.choices[name] ? this.choices[name].note : "" })]),
      screen,
      make("dl", { class: "qwm-figures" }, [
        figure("kv", "KV cache"),
        make("div", { class: "qwm-share", "aria-hidden": "true" }, [make("i")]),
        figure("ratio", "nominal", " ratio"),
        figure("resident", "resident", " ratio"),
        figure("ms", "per chunk"),
        figure("psnr", "PSNR", " to BF16")]),
    ]);
  }

  clear() {
    $$("[data-figure]", this.holder).forEach((node) => (node.textContent = "\u2013"));
    $$(".qwm-share i", this.holder).forEach((bar) => (bar.style.width = "0"));
  }

  update(block) {
    const most = Math.max(...block.lanes.map((lane) => lane.kv), 1);
    for (const lane of block.lanes) {
      const panel = $('[data-lane="' + lane.name + '"]', this.holder);
      if (!panel) continue;
      const put = (key, text) => ($('[data-figure="' + key + '"]', panel).textContent = text);
      put("kv", bytes(lane.kv));
      put("ratio", times(lane.ratio));
      put("resident", times(lane.resident));
      put("ms", block.i === 0 ? "\u2013" : millis(lane.ms));
      put("psnr", lane.psnr === null ? "\u2013" : decibels(lane.psnr));
      $(".qwm-share i", panel).style.width = (100 * lane.kv) / most + "%";
    }
  }
}
