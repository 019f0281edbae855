// What a visitor sees: phases, the card over the pictures, messages, figures.
function enter(phase) {
  state.phase = phase;
  if (phase !== "live") state.run = false;
  refresh();
}

function refresh() {
  root.dataset.phase = state.phase;
  root.dataset.run = state.run ? "yes" : "no";
  const live = state.phase === "live";
  say("drive", state.run ? "Pause" : "Drive");
  const off = (name, value) => ($('[data-do="' + name + '"]').disabled = value);
  const busy = state.phase === "joining" || state.phase === "queued" || state.phase === "loading";
  off("drive", busy || state.phase === "gone");
  off("step", busy || state.phase === "gone");
  off("reset", !live);
  $('[data-do="prompt"]').hidden = !live || !choices.hello || choices.hello.world.name !== state.driven;
  off("download", state.ticket === 0 || busy || state.phase === "gone");
  const focused = document.activeElement === stage;
  $(".qwm-hint").hidden = !live || state.run;
  $(".qwm-hint").classList.toggle("qwm-corner", focused);
  const press = input("stepmode").checked ? "A key makes one chunk" : "Paused, press a key";
  say("hint", focused ? press : "Click to drive");
  $(".qwm-apply").hidden = !live || JSON.stringify(choices.hello && choices.read()) === JSON.stringify(state.applied);
  veil();
  status();
}

// A finger on the pictures scrolls the page.
const DRAGS = matchMedia("(pointer: fine)").matches ? ", or drag to look around" : "";
const VEILS = {
  idle: () => ["Walk through a dreamed world", "Hold W A S D or the arrow keys" + DRAGS + ". Every cache gets " +
    "the same keys and the same noise; what differs is how it remembers.", "Drive"],
  joining: () => ["One moment", "Asking for the world.", ""],
  queued: () => ["You are number " + state.place + " in line",
    "The world serves one visitor at a time. Yours starts by itself when it is free.", "Leave the line"],
  loading: () => [state.loading || "Getting ready", "The first picture comes when this is done.", ""],
  ended: () => [state.ended || "The world is at rest", "Drive again from the chosen start.", "Drive again"],
  gone: () => ["This page has ended", "Reload it to start a new one.", "Reload"],
};

function veil() {
  const words = VEILS[state.phase];
  $(".qwm-veil").hidden = words === undefined;
  if (words === undefined) return;
  const [title, text, button] = words();
  say("veil-title", title);
  say("veil-text", text);
  say("veil-button", button);
  const action = $('[data-do="veil"]');
  action.hidden = button === "";
  action.classList.toggle("qwm-primary", state.phase !== "queued");
  stages();
}

// A named bar for every stage of loading; those that are done stay full above the one at work.
function stages() {
  const list = $(".qwm-stages");
  const busy = state.phase === "loading" || state.phase === "joining";
  list.hidden = !busy;
  if (!busy) return;
  const shown = state.stages.length ? state.stages : [["Asking for the world", 0]];
  while (list.children.length > shown.length) list.lastElementChild.remove();
  while (list.children.length < shown.length)
    list.append(make("li", {}, [make("span"), make("span"), make("div", { class: "qwm-progress",
      role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" }, [make("i")])]));
  shown.forEach(([name, share], index) => {
    const [label, percent, bar] = list.children[index].children;
    const value = Math.round(100 * share);
    const words = capital(name);
    if (label.textContent !== words) label.textContent = words;
    percent.textContent = share >= 1 ? "done" : share > 0 ? value + " %" : "";
    bar.setAttribute("aria-label", words);
    bar.classList.toggle("qwm-unknown", value === 0);
    if (value === 0) bar.removeAttribute("aria-valuenow");
    else bar.setAttribute("aria-valuenow", value);
    bar.firstElementChild.style.width = value === 0 ? "" : value + "%";
  });
}

// One polite sentence a second at most.
let spoken = 0;
let speaking = null;
function status() {
  const words = { idle: "Ready to drive.", joining: "Asking for the world.",
    queued: "You are number " + state.place + " in line.", loading: state.loading || "Loading.",
    live: state.run ? "Driving." : "Paused.", ended: "The world is at rest.", gone: "Reload the page." };
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    spoken = performance.now();
    say("status", words[state.phase]);
  }, Math.max(50, 1000 - (performance.now() - spoken)));
}

function complain(text) {
  const box = $(".qwm-message");
  say("message", capital(text));
  box.classList.remove("qwm-good");
  box.hidden = false;
}

function tell(text) {
  complain(text);
  $(".qwm-message").classList.add("qwm-good");
}

function quiet() {
  $(".qwm-message").hidden = true;
}

function recording(reply) {
  const badge = out("rec");
  badge.hidden = state.phase !== "live";
  badge.classList.toggle("qwm-on", reply.recording === true);
  const left = typeof state.left === "number" ? " \u00b7 " + Math.max(state.left, 0) + " s left, someone waits" : "";
  say("rec", (reply.recording ? "Recording" : reply.unrecorded || "Not recording") + left);
}

function showFigures(block) {
  lanes.update(block);
  gauge.update(block.memory);
  state.frames += block.i === 0 ? 0 : block.frames;
  state.tokens = Math.max(...block.lanes.map((lane) => lane.tokens));
  say("tokens", whole(state.tokens));
  say("frames", whole(state.frames));
  if (block.i === 0) return;
  // Shown: what arrives while driving. Possible: what the engine would make without a speed limit.
  const possible = (1000 * block.frames) / Math.max(block.ms, 0.001);
  const shown = state.run ? Math.min(1000 / player.interval, possible) : possible;
  state.rate = [...state.rate.slice(-3), [shown, possible]];
  const mean = (index) => state.rate.reduce((total, item) => total + item[index], 0) / state.rate.length;
  say("fps", mean(0).toFixed(1));
  say("possible", " / " + mean(1).toFixed(1));
  if (block.seq && state.pressedAt && block.t >= Math.floor(state.pressedAt)) {
    say("latency", millis(performance.now() - state.pressedAt));
    state.pressedAt = 0;
  }
}

function beat(milliseconds) {
  const bar = $(".qwm-beat");
  bar.classList.remove("qwm-on");
  if (milliseconds < 400) return;
  bar.style.animationDuration = Math.round(milliseconds) + "ms";
  requestAnimationFrame(() => bar.classList.add("qwm-on"));
}
