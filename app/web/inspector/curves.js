// Per-frame curves under one playhead: chunk borders, keys, divergence; click or arrow to seek.
import { $, colour, input, make, options, out, title } from "./dom.js";

// name -> [label, unit, what it says, name of the reference's own curve]
export const CURVES = {
  psnr: ["PSNR to the reference", "dB", "Fidelity of every frame; from 60 dB on, equal frames included, on the top line (99 in the CSV: identical). Once free-running lanes have parted, it says that they show different things, not how good they are."],
  ssim: ["SSIM to the reference", "", "11 x 11 Gaussian window, 1 is identical."],
  lpips: ["LPIPS to the reference", "", "A learned distance (AlexNet), 0 is identical: nearer to what people see than PSNR."],
  excess: ["Excess flicker", "levels", "Mean difference between how much the lane changes from one frame to the next and how much the reference does, whichever changes more."],
  temporal: ["Change in time", "levels", "Mean |x(t) - x(t-1)|: motion and flicker together.", "temporal_reference"],
  warping: ["Flow-warping error", "levels", "What stays after the motion is taken out by optical flow, where the flow is sure.", "warping_reference"],
  sharpness: ["Sharpness", "gradient energy", "Mean squared gradient: a lane that blurs sinks.", "sharpness_reference"],
  drift: ["Colour drift", "levels", "Distance of the mean colour from the first frame's.", "drift_reference"],
  colour: ["Colour difference", "levels", "Distance of mean colours, lane to reference."],
};
const STEPS = new Set(["excess", "temporal", "temporal_reference", "warping", "warping_reference"]);
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const PAD = { left: 46, right: 10, top: 8, bottom: 52 };
const HIGH = 240;
const PSNR_TOP = 60; // equal frames have no PSNR; from here on nobody sees a difference

export class Curves {
  constructor(seek) {
    this.canvas = $('[data-plot="curve"]');
    this.seek = seek;
    this.frame = 0;
    this.data = null;
    this.clip = null;
    this.loop = null;
    input("curve").addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointerdown", (event) => this.clicked(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.clicked(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    new MutationObserver(() => this.draw()).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  }

  open(clip) {
    this.clip = clip;
    this.data = null;
    out("csv").href = clip.csv;
    out("parted").textContent = "";
    this.measuring(true, "measuring 0 %");
    this.poll(clip);
  }

  async poll(clip) {
    try {
      while (this.clip === clip) {
        const data = await clip.curves();
        if (this.clip !== clip) return;
        this.data = data;
        this.offer();
        this.draw();
        if (this.data.done) return;
        await new Promise((done) => setTimeout(done, 400));
      }
    } catch (error) {
      if (this.clip === clip) this.measuring(false, error.message);
    }
  }

  // Says how far the measuring is; a screen reader waits with the curves while it goes on.
  measuring(busy, state) {
    this.canvas.setAttribute("aria-busy", String(busy));
    out("curve-state").textContent = state;
  }

  offer() {
    const there = new Set(Object.values(this.data.lanes).flatMap((lane) => Object.keys(lane)));
    options(input("curve"), Object.entries(CURVES).filter(([name]) => there.has(name)).map(([name, [label]]) => [name, label]));
    const share = Math.floor((100 * this.data.frames) / this.clip.frames);
    this.measuring(!this.data.done, this.data.done ? this.data.note : share < 100 ? "measuring " + share + " %" : "measuring LPIPS");
    const parted = Object.entries(this.data.diverged || {}).map(([lane, frame]) => title(lane) + " has parted from "
      + title(this.data.reference) + " at frame " + (this.clip.info.first + frame));
    out("parted").textContent = parted.length ? parted.join("; ") + ": PSNR after that is no measure of quality." : "";
  }

  // Lane -> values by frame; a curve of steps begins one frame later.
  series(name) {
    const spec = CURVES[name];
    const found = [];
    for (const [lane, columns] of Object.entries(this.data.lanes)) {
      if (spec[3] && columns[spec[3]] && !found.some(([n]) => n === 0))
        found.push([0, this.data.reference, this.aligned(spec[3], columns[spec[3]])]);
      if (columns[name]) found.push([this.clip.lanes.indexOf(lane), lane, this.aligned(name, columns[name])]);
    }
    return found;
  }

  aligned(name, values) {
    return STEPS.has(name) ? [null, ...values] : values;
  }

  at(frame, loop) {
    this.frame = frame;
    this.loop = loop;
    this.draw();
  }

  draw() {
    if (!this.data || !this.clip) return;
    const name = input("curve").value;
    const canvas = this.canvas;
    const wide = canvas.clientWidth, high = HIGH;
    canvas.width = wide * devicePixelRatio;
    canvas.height = high * devicePixelRatio;
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = "12px ui-sans-serif, system-ui, sans-serif";
    const series = name ? this.series(name) : [];
    const values = series.flatMap(([, , line]) => line.filter((v) => v !== null));
    const range = this.range(name, values);
    this.x = (t) => PAD.left + ((wide - PAD.left - PAD.right) * (t + 0.5)) / this.clip.frames;
    this.y = (v) => high - PAD.bottom - ((high - PAD.top - PAD.bottom) * (v - range[0])) / (range[1] - range[0]);
    this.axes(context, wide, high, range, name);
    this.seconds(context, wide, high);
    this.keys(context, high);
    for (const [number, , line] of series) this.stroke(context, line, number);
    this.marks(context, high);
    this.words(name, series);
  }

  range(name, values) {
    if (!values.length) return [0, 1, 0.25];
    let low = Math.min(...values), most = Math.max(...values);
    if (name === "psnr") most = Math.min(most, PSNR_TOP);
    else low = name === "ssim" ? low : 0;
    if (low >= most) [low, most] = name === "psnr" ? [most - 10, most] : [low, low + 1];
    const step = round((most - low) / 5);
    return [Math.floor(low / step + 1e-6) * step, Math.ceil(most / step - 1e-6) * step, step];
  }

  axes(context, wide, high, [low, most, step], name) {
    context.strokeStyle = colour("--line");
    context.fillStyle = colour("--soft");
    context.textAlign = "right";
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let i = 0; i <= Math.round((most - low) / step); i += 1) {
      const value = low + step * i, y = this.y(value);
      line(context, PAD.left, y, wide - PAD.right, y);
      const more = name === "psnr" && value >= PSNR_TOP ? "+" : "";
      context.fillText(value.toFixed(digits) + more, PAD.left - 6, y + 4);
    }
    context.strokeStyle = colour("--soft"); // a tick where a chunk begins
    for (const border of this.clip.info.borders) {
      const x = this.x(border - 0.5);
      line(context, x, high - PAD.bottom, x, high - PAD.bottom + 7);
    }
  }

  // Times along the axis, as far apart as they can be read.
  seconds(context, wide, high) {
    const fps = this.clip.info.fps, whole = this.clip.frames / fps;
    const step = round((whole * 64) / (wide - PAD.left - PAD.right));
    context.fillStyle = colour("--soft");
    context.textAlign = "center";
    for (let n = 0; n * step * fps < this.clip.frames - 0.5; n += 1)
      context.fillText(Number((n * step).toFixed(2)) + " s", this.x(n * step * fps), high - PAD.bottom + 20);
  }

  keys(context, high) {
    const keys = this.clip.info.keys;
    context.textAlign = "left";
    let start = 0;
    for (let t = 1; t <= keys.length; t += 1) {
      if (t < keys.length && keys[t].join() === keys[start].join()) continue;
      const text = keys[start].join(" ").toUpperCase(), from = this.x(start - 0.5), to = this.x(t - 1.5 + 1);
      if (text) {
        context.fillStyle = colour("--sunk");
        context.fillRect(from, high - 22, Math.max(to - from - 1, 1), 16);
        context.fillStyle = colour("--soft");
        if (context.measureText(text).width < to - from - 4) context.fillText(text, from + 3, high - 10);
      }
      start = t;
    }
  }

  stroke(context, values, number) {
    context.beginPath();
    context.setLineDash(DASHES[number % DASHES.length]);
    context.strokeStyle = colour("--lane-" + (number % 4));
    context.lineWidth = 1.8;
    let down = false;
    values.forEach((value, t) => {
      if (value === null) { down = false; return; }
      const y = Math.max(this.y(value), PAD.top);
      if (down) context.lineTo(this.x(t), y);
      else context.moveTo(this.x(t), y);
      down = true;
    });
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  marks(context, high) {
    const bottom = high - PAD.bottom;
    if (this.loop) {
      context.fillStyle = colour("--accent") + "22";
      context.fillRect(this.x(this.loop[0] - 0.5), PAD.top, this.x(this.loop[1] + 0.5) - this.x(this.loop[0] - 0.5), bottom - PAD.top);
    }
    for (const [lane, frame] of Object.entries(this.data.diverged || {})) {
      context.strokeStyle = context.fillStyle = colour("--warn");
      context.setLineDash([3, 3]);
      line(context, this.x(frame), PAD.top, this.x(frame), bottom);
      context.setLineDash([]);
      const late = this.x(frame) > this.canvas.clientWidth - 130; // the words stay inside
      context.textAlign = late ? "right" : "left";
      context.fillText(title(lane) + " has parted", this.x(frame) + (late ? -4 : 4), PAD.top + 10 + 13 * this.clip.lanes.indexOf(lane));
    }
    context.strokeStyle = colour("--ink");
    line(context, this.x(this.frame), PAD.top, this.x(this.frame), bottom);
  }

  words(name, series) {
    if (!name) return;
    const [label, unit, help] = CURVES[name];
    out("curve-help").textContent = help + (this.clip.info.borders.length
      ? " Ticks under the curves: a chunk begins; bars: the keys held." : "");
    out("legend").replaceChildren(...series.map(([number, lane]) => make("span", {}, [
      make("span", { class: "swatch", "data-n": number }), title(lane)])));
    const head = make("tr", {}, [make("th", { scope: "col", textContent: "frame " + (this.clip.info.first + this.frame) }),
      ...[this.data.reference, ...Object.keys(this.data.lanes)].map((lane) => make("th", { scope: "col", textContent: title(lane) }))]);
    const lanes = Object.values(this.data.lanes);
    const rows = Object.entries(CURVES).filter(([curve]) => lanes.some((columns) => columns[curve])).map(
      ([curve, [text, measure, , own]]) => make("tr", { class: curve === name ? "chosen" : "" }, [
        make("th", { scope: "row", textContent: text.replace(" to the reference", "") + (measure ? ", " + measure : "") }),
        this.value(own, lanes[0]), ...lanes.map((columns) => this.value(curve, columns))]));
    const table = out("values");
    table.replaceChildren(table.querySelector("caption"), make("thead", {}, [head]), make("tbody", {}, rows));
    this.canvas.setAttribute("aria-valuemin", 0);
    this.canvas.setAttribute("aria-valuemax", this.clip.frames - 1);
    this.canvas.setAttribute("aria-valuenow", this.frame);
    const told = (value) => value === null || value === undefined ? "none" : spoken(name, value);
    this.canvas.setAttribute("aria-valuetext", "frame " + (this.clip.info.first + this.frame) + ", " + label + ": "
      + series.map(([, lane, line]) => title(lane) + " " + told(line[this.frame])).join(", ") + " " + unit);
  }

  value(curve, columns) {
    const value = curve && columns[curve] ? this.aligned(curve, columns[curve])[this.frame] : null;
    return make("td", { textContent: value === null || value === undefined ? "\u2013"
      : spoken(curve, value) });
  }

  clicked(event) {
    if (!this.x) return;
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - PAD.left) / (box.width - PAD.left - PAD.right);
    this.seek(Math.floor(share * this.clip.frames));
  }
}

// A value in words where it stands for more than its number.
function spoken(curve, value) {
  return curve === "psnr" && value >= 99 ? "identical" : short(value);
}

function short(value) {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size < 1 ? value.toFixed(3) : value.toPrecision(3);
}

// The next of 1, 2, 5, 10, ... that is not below a length.
function round(length) {
  const power = 10 ** Math.floor(Math.log10(length));
  return power * [1, 2, 5, 10].find((step) => step * power >= length * (1 - 1e-9));
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
