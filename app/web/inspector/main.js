// What a person does in the inspector: sources, views, playing, keys.
import { $, input, make, options, out, paintLanes, segments, title } from "./dom.js";
import { Clip, Server } from "./data.js";
import { Panes } from "./panes.js";
import { listen } from "./keys.js";
import { emptyLoupe, showLoupe } from "./loupe.js";
import { Curves } from "./curves.js";
import { Slices } from "./slices.js";
import { Tokens } from "./tokens.js";
import { change, channels, excess, ramp, signed, wiped } from "./pixels.js";

const VIEWS = [["side", "Side by side"], ["wipe", "Wipe"], ["blink", "Blink"], ["difference", "Difference"], ["change", "Change in time"]];
const TOOLS = [["pan", "Move"], ["slice", "Slice"], ["patch", "Patch"]];
const HELP = {
  side: () => "The same frame of every lane, pixel for pixel as it was made.",
  wipe: () => "Left of the border A, right of it B; drag the border in the picture.",
  blink: () => "A and B take turns in one place once Blink is ticked: what differs moves.",
  difference: () => input("colours").value === "signed"
    ? "Grey: equal. Red: brighter than the reference, blue: darker, full colour at " + (255 / gain()).toFixed(0) + " levels."
    : "Middle grey: equal. Every channel shows its own difference, " + gain() + " times.",
  change: () => state.frame === 0 ? "The first frame: nothing came before it." : "Black: " + (input("change").value === "own" ? "no change since the frame before"
    : "no change that the reference does not have") + "; orange, then white at " + (255 / gain()).toFixed(0) + " levels.",
};
const WITH = { wipe: ["pair", "wipe"], blink: ["pair", "blink"], difference: ["gain", "colours"], change: ["gain", "change"], side: [] };
const asked = new URLSearchParams(location.hash.slice(1));
const server = new Server(asked.get("session") || "");
const state = { clip: null, frame: 0, view: "side", playing: false, loop: null, blinked: 0, cross: null };

const panes = new Panes($(".panes"), {
  pointed: (x, y) => point(x, y),
  lined: (...line) => slice(line),
  picked: (x, y) => tokens.ask(x, y, state.frame),
  dragged: (x) => {
    if (state.view !== "wipe") return;
    input("wipe").value = Math.round((100 * (x + 0.5)) / state.clip.info.size[0]);
    draw();
  },
});
const curves = new Curves((frame) => seek(frame));
const slices = new Slices((frame) => seek(frame));
const tokens = new Tokens(server, panes, async () => {
  const cross = state.cross;
  await open(() => server.post("open", { source: "live" }));
  seek(state.clip.frames - 1);
  if (cross) point(...cross); // the patch that is asked for stays marked
});
const setView = segments("view", VIEWS, (view) => { state.view = view; arrange(); });
const setTool = segments("tool", TOOLS, (tool) => choose(tool));
setView("side");
choose("pan");

function choose(tool) {
  setTool(tool);
  panes.tool = tool;
  panes.draw();
}

// Sources ------------------------------------------------------------------------------------
// ask: asks the server for a clip, once it has said who this page is.
async function open(ask, what = "Opening the frames") {
  complain("");
  busy(what);
  try {
    await begun;
    const reply = await ask();
    state.clip = new Clip(server, reply, () => draw());
    pause();
    // A live run opens where it stands; what was recorded, at its beginning.
    Object.assign(state, { frame: reply.info.live ? reply.info.frames - 1 : 0, loop: null, cross: null });
    panes.forget();
    panes.box = null;
    emptyLoupe();
    $("main").hidden = false;
    out("empty").hidden = true;
    const info = reply.info;
    paintLanes(info.lanes);
    out("title").textContent = out("title").title = info.title + ": " + info.frames + " frames, " + info.size.join(" \u00d7 ") + ", " + info.fps + "/s";
    out("notes").textContent = [...modeNote(info), ...floorNote(info), ...info.notes].join(" ");
    input("frame").max = info.frames - 1;
    options(input("a"), info.lanes.map((lane, n) => [String(n), title(lane)]));
    options(input("b"), info.lanes.map((lane, n) => [String(n), title(lane)]));
    input("a").value = "0";
    input("b").value = String(Math.min(1, info.lanes.length - 1));
    slices.clear();
    slices.open(state.clip);
    curves.open(state.clip);
    tokens.open(state.clip);
    $('label:has(input[value="patch"])').hidden = !info.live; // only a run that goes on has queries
    if (!info.live && panes.tool === "patch") choose("pan");
    arrange();
    seek(state.frame);
    slices.show(slices.typed()).catch((error) => complain(error.message));
    say(info.title + " is open.");
  } catch (error) {
    complain(error.message);
    say("");
  } finally {
    busy("");
  }
}

function floorNote(info) {
  return info.lanes.includes("bf16-floor")
    ? ["The noise floor is BF16 through another attention kernel: what does not stand out from it is no cache's doing."] : [];
}

function modeNote(info) {
  if (info.mode === "teacher")
    return ["Teacher-forced: every cache was given the BF16 lane's past, so what differs is the quantization of the history alone."];
  if (info.mode === "free")
    return ["Free-running: every cache lives with its own past, so lanes part after a while; from there on they show different things."];
  return [];
}

function recorded(name) {
  input("demo").value = name;
  open(() => server.post("open", { source: name }), "Reading the recorded session");
}

// Pictures -----------------------------------------------------------------------------------
function arrange() {
  const clip = state.clip;
  if (!clip) return;
  for (const part of ["pair", "wipe", "blink", "gain", "colours", "change"])
    document.querySelectorAll(".bar ." + part).forEach((node) => { node.hidden = !WITH[state.view].includes(part); });
  const all = clip.lanes.map((lane, n) => [title(lane), "", n]);
  const others = clip.lanes.length > 1 ? all.slice(1) : all;
  const heads = { side: all, change: excessive() ? others : all, wipe: [["", "", null]], blink: [["", "", null]],
    difference: others.map(([text, , n]) => [text, "minus " + title(clip.lanes[0]), n]) };
  panes.build(heads[state.view], clip.info.size);
  draw();
}

const gain = () => 2 ** Number(input("gain").value);
const excessive = () => input("change").value === "excess"; // of which the reference has none

// The colours of the view from left to right, where they stand for numbers.
function scale() {
  const isSigned = state.view === "difference" && input("colours").value === "signed";
  const canvas = out("scale");
  canvas.hidden = !isSigned && state.view !== "change";
  if (!canvas.hidden) canvas.getContext("2d").putImageData(ramp(canvas.width, isSigned), 0, 0);
}

function draw() {
  const clip = state.clip;
  if (!clip) return;
  const t = state.frame;
  const at = (lane, when = t) => clip.frame(lane, Math.max(when, 0));
  panes.frame = t;
  out("gain").textContent = gain() + "\u00d7";
  input("gain").setAttribute("aria-valuetext", gain() + " times");
  out("view-help").textContent = HELP[state.view]();
  scale();
  const a = Number(input("a").value), b = Number(input("b").value);
  const every = clip.lanes.map((_, lane) => at(lane));
  const views = {
    side: () => [every, []],
    wipe: () => {
      const border = Math.round((Number(input("wipe").value) / 100) * clip.info.size[0]);
      panes.border = border;
      return [[every[a] && every[b] && wiped(every[a], every[b], border)], [title(clip.lanes[a]) + " | " + title(clip.lanes[b])]];
    },
    blink: () => {
      const shown = state.blinked % 2 ? b : a;
      return [[every[shown]], ["now " + title(clip.lanes[shown])]];
    },
    difference: () => {
      const paint = input("colours").value === "signed" ? signed : channels;
      const others = clip.lanes.length > 1 ? every.slice(1) : every;
      return [others.map((picture) => picture && every[0] && paint(picture, every[0], gain())), []];
    },
    change: () => {
      const before = clip.lanes.map((_, lane) => at(lane, t - 1));
      const found = every.map((picture, n) => {
        if (!picture || !before[n] || !every[0] || !before[0]) return null;
        return excessive() ? excess(picture, before[n], every[0], before[0], gain()) : change(picture, before[n], gain());
      });
      return [excessive() && found.length > 1 ? found.slice(1) : found, []];
    },
  };
  panes.show(...views[state.view]());
  clip.ahead(t, state.playing ? 3 : 1);
  const place = "frame " + (clip.info.first + t) + ", " + (t / clip.info.fps).toFixed(2) + " s";
  input("frame").value = t;
  input("frame").setAttribute("aria-valuetext", place);
  out("frame").textContent = place + (state.loop ? ", loop " + state.loop.map((end) => clip.info.first + end).join(" to ") : "");
  if (state.cross) showLoupe(clip, every, ...state.cross, clip.info.first + t);
}

function point(x, y) {
  state.cross = panes.cross = [x, y];
  const clip = state.clip;
  showLoupe(clip, clip.lanes.map((_, lane) => clip.frame(lane, state.frame)), x, y, clip.info.first + state.frame);
  panes.draw();
}

function slice(line) {
  panes.line = line;
  panes.draw();
  slices.show(line).catch((error) => complain(error.message));
}

// Playing ------------------------------------------------------------------------------------
function ends() {
  return state.loop || [0, state.clip.frames - 1];
}

function seek(frame) {
  if (!state.clip) return;
  state.frame = Math.min(Math.max(frame, 0), state.clip.frames - 1);
  draw();
  curves.at(state.frame, state.loop);
  slices.at(state.frame);
}

function stepBy(count) {
  pause();
  seek(state.frame + count);
  say("Frame " + (state.clip.info.first + state.frame));
}

let due = 0;
function play() {
  if (!state.clip || state.playing) return;
  state.playing = true;
  $('[data-do="play"]').textContent = "Pause";
  due = performance.now();
  requestAnimationFrame(tick);
}

function pause() {
  state.playing = false;
  $('[data-do="play"]').textContent = "Play";
}

function tick(now) {
  if (!state.playing) return;
  const period = 1000 / (state.clip.info.fps * Number(input("speed").value));
  const [first, last] = ends();
  const next = state.frame >= last || state.frame < first ? first : state.frame + 1;
  if (now >= due && state.clip.has(next)) {
    due = Math.max(due + period, now - period); // a sheet that came late is not caught up with
    seek(next);
  } else if (!state.clip.has(next)) state.clip.ahead(next, 1);
  requestAnimationFrame(tick);
}

// At most 3 changes a second, the limit for flashing pictures (WCAG 2.3.1), and only when asked.
let lastBlink = 0;
setInterval(() => {
  if (state.view !== "blink" || !input("blink").checked || document.hidden) return;
  const now = performance.now();
  if (now - lastBlink < 1000 / Number(input("rate").value)) return;
  lastBlink = now;
  state.blinked += 1;
  draw();
}, 20);

function loop(end) {
  const [first, last] = ends();
  state.loop = end === "in" ? [state.frame, Math.max(last, state.frame)] : [Math.min(first, state.frame), state.frame];
  seek(state.frame);
}

function savePicture() {
  const shown = panes.panes.map((pane) => pane.canvas);
  const width = shown.reduce((sum, canvas) => sum + canvas.width, 0);
  const picture = make("canvas", { width, height: Math.max(...shown.map((canvas) => canvas.height)) });
  let left = 0;
  for (const canvas of shown) {
    picture.getContext("2d").drawImage(canvas, left, 0);
    left += canvas.width;
  }
  const link = make("a", { href: picture.toDataURL("image/png"), download: "quantwm-" + state.view + "-" + (state.clip.info.first + state.frame) + ".png" });
  link.click();
}

function say(text) { out("status").textContent = text; }

// A named bar while something is on its way; share is unknown where it is left out.
function busy(what, share) {
  $(".busy").hidden = !what;
  if (!what) return;
  const bar = $(".busy [role=progressbar]"), percent = Math.round(100 * share);
  const words = what + (share === undefined ? "\u2026" : ", " + percent + " %");
  if (out("busy").textContent.split(",")[0] !== words.split(",")[0]) say(words);
  out("busy").textContent = words;
  bar.setAttribute("aria-label", what);
  bar.classList.toggle("unknown", share === undefined);
  if (share === undefined) bar.removeAttribute("aria-valuenow");
  else bar.setAttribute("aria-valuenow", percent);
  bar.firstElementChild.style.width = share === undefined ? "" : percent + "%";
}

function complain(text) {
  $(".message").textContent = text;
  $(".message").hidden = !text;
}

// Events -------------------------------------------------------------------------------------
const actions = {
  live: () => {
    input("demo").value = "";
    return open(() => server.post("open", { source: "live" }), "Taking the last minute");
  },
  files: () => input("files").click(),
  theme: () => document.body.classList.toggle("dark"),
  back: () => stepBy(-1),
  forward: () => stepBy(1),
  play: () => (state.playing ? pause() : play()),
  in: () => loop("in"),
  out: () => loop("out"),
  whole: () => { state.loop = null; seek(state.frame); },
  larger: () => panes.zoomBy(1.5, ...(state.cross || [])),
  smaller: () => panes.zoomBy(1 / 1.5, ...(state.cross || [])),
  fit: () => panes.zoomBy(1 / 32),
  patch: () => {
    choose("patch");
    seek(Infinity);
    $(".panes").focus();
    $(".panes").scrollIntoView({ block: "nearest" });
    say("Click a patch, or move with the arrow keys and press Enter.");
  },
  save: savePicture,
};
for (const button of document.querySelectorAll("[data-do]"))
  button.addEventListener("click", () => actions[button.dataset.do]());
input("files").addEventListener("change", () => {
  const files = [...input("files").files];
  input("files").value = input("demo").value = "";
  if (files.length) open(() => sent(files), "Sending the files");
});
function sent(files) {
  const large = files.find((file) => file.size > state.most);
  if (large) throw new Error(large.name + " is larger than " + Math.floor(state.most / 2 ** 20) + " MB; cut it shorter.");
  return server.upload(files, (share) => (share < 1 ? busy("Sending the files", share) : busy("Reading the files")));
}
input("demo").addEventListener("change", () => input("demo").value && recorded(input("demo").value));
input("frame").addEventListener("input", () => { pause(); seek(Number(input("frame").value)); });
for (const name of ["a", "b", "wipe", "gain", "colours", "blink"]) input(name).addEventListener("input", draw);
input("change").addEventListener("input", arrange);
for (const name of ["row", "column", "slice-row", "slice-column"])
  input(name).addEventListener("change", () => {
    if (name === "row") input("slice-row").checked = true;
    if (name === "column") input("slice-column").checked = true;
    slice(slices.typed());
  });

listen({ state, actions, panes, tokens, point, slice, stepBy, say,
  view: (name) => { setView(name); state.view = name; arrange(); } });

// Beginning ----------------------------------------------------------------------------------
function follow() {
  const outside = parent !== window ? parent.document.body : null;
  const dark = () => document.body.classList.toggle("dark", outside ? outside.classList.contains("dark")
    : matchMedia("(prefers-color-scheme: dark)").matches);
  dark();
  if (!outside) return;
  new MutationObserver(dark).observe(outside, { attributes: true, attributeFilter: ["class"] });
  $('[data-do="theme"]').hidden = true;
  Object.assign(out("tab"), { href: location.href, hidden: false });
}

async function begin() {
  follow();
  try {
    const offered = await (await server.get("offers")).json();
    server.session = offered.session;
    state.most = offered.upload_bytes;
    $('[data-do="live"]').hidden = !offered.live;
    $(".demo").hidden = offered.demos.length === 0;
    options(input("demo"), [["", "choose\u2026"], ...offered.demos]);
    out("shelf").replaceChildren(...offered.demos.map(([name, label]) => {
      const button = make("button", { type: "button", textContent: label });
      button.addEventListener("click", () => recorded(name));
      return button;
    }));
  } catch (error) {
    complain(error.message);
  }
  if (asked.get("open") === "live") actions.live();
  else if (asked.get("open")) recorded(asked.get("open"));
}
addEventListener("pagehide", () => {
  if (!asked.get("session") && server.session) navigator.sendBeacon(server.address("leave"));
});
const begun = begin();
