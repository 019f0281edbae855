// The page's state: idle, joining, queued, loading, live, ended, gone; and what it tells the server.
const PROTOCOL = 1;
const HEARTBEAT = 500;
const stage = $(".qwm-stage");
const lanes = new Lanes($(".qwm-lanes"));
const gauge = new Gauge(lanes);

const state = {
  phase: "idle", hello: null, session: null, run: false, steps: 0, resets: 0, flushes: 0, stop: false,
  ack: -1, seq: 0, ticket: 0, applied: null, place: null, loading: "", progress: 0, silent: 0,
  ended: "", lastSent: 0, waited: 0, left: null, tokens: 0, frames: 0, rate: [], pressedAt: 0, lastMs: 0,
};

const player = new Player((block, first) => {
  if (first) return showFigures(block);
  state.ack = Math.max(state.ack, block.n);
  sendSoon();
});

const keys = new Keys(stage, $(".qwm-pad"), () => sendSoon(), pressed, () => stage.blur());
const choices = new Choices(choicesChanged, sceneChosen, pictureChosen);

// Talking to the server ------------------------------------------------------------------------
let sending = false;
let again = false;

async function sendSoon() {
  if (state.session === null || state.phase === "gone") return;
  if (sending) {
    again = true;
    return;
  }
  sending = true;
  try {
    do {
      again = false;
      await send();
    } while (again);
  } finally {
    sending = false;
  }
}

async function send() {
  state.seq += 1;
  state.lastSent = performance.now();
  try {
    const reply = await server.control({
      sess: state.session, seq: state.seq, keys: keys.held(), run: state.run, steps: state.steps,
      resets: state.resets, flushes: state.flushes, stop: state.stop, ack: state.ack,
      t: Math.round(performance.now()), settings: state.applied,
    });
    state.silent = 0;
    heard(reply);
  } catch (error) {
    state.silent += 1;
    if (state.silent === 3) complain("The server does not answer. Trying again.");
  }
}

function heard(reply) {
  if (!reply.ok) return refused(reply.error);
  state.place = reply.place;
  state.left = reply.left;
  recording(reply);
  if (state.phase === "queued" && reply.place === 0) enter("loading");
  if (state.phase === "queued" && reply.place > 0) enter("queued");
  if (state.phase === "loading") {
    state.loading = reply.stage || "";
    state.progress = reply.progress || 0;
    veil();
  }
  const expected = state.phase === "queued" || state.phase === "loading" || state.phase === "live";
  if (expected && reply.place === null) {
    state.waited = state.waited || performance.now();
    if (performance.now() - state.waited > 6000) {
      state.waited = 0;
      complain("The server did not keep your place. Press Drive to try again.");
      enter("ended");
    }
  } else state.waited = 0;
}

function refused(error) {
  if (error.includes("session has ended")) {
    enter("gone");
    state.session = null;
  }
  complain(error);
}

setInterval(() => {
  const busy = state.phase === "queued" || state.phase === "loading" || state.run || keys.down.size > 0;
  const pause = busy ? HEARTBEAT : state.phase === "live" ? 5000 : 60000;
  if (performance.now() - state.lastSent >= pause - 20) sendSoon();
}, HEARTBEAT / 2);

function beat(milliseconds) {
  const bar = $(".qwm-beat");
  bar.classList.remove("qwm-on");
  if (milliseconds < 400) return;
  bar.style.animationDuration = Math.round(milliseconds) + "ms";
  requestAnimationFrame(() => bar.classList.add("qwm-on"));
}

// What a visitor does --------------------------------------------------------------------------
async function drive() {
  if (state.phase === "live") return resume();
  if (state.phase !== "idle" && state.phase !== "ended") return;
  stage.focus({ preventScroll: true });
  quiet();
  enter("joining");
  for (let wait = 0; state.session === null && wait < 100; wait += 1)
    await new Promise((done) => setTimeout(done, 50));
  const settings = choices.read();
  try {
    const reply = await server.join({ sess: state.session, settings: settings });
    if (!reply.ok) throw Error(reply.error);
    state.place = reply.place;
  } catch (error) {
    enter("idle");
    return refused(error.message || "The server does not answer. Try again.");
  }
  Object.assign(state, { ack: -1, stop: false, run: false, applied: settings, ticket: state.ticket + 1,
    waited: 0, loading: "", progress: 0 });
  await send();
  if (!element.isConnected) return;
  trigger("drive", { sess: state.session, settings: settings, ticket: state.ticket });
  enter(state.place > 0 ? "queued" : "loading");
}

function resume() {
  if (state.phase !== "live") return;
  stage.focus({ preventScroll: true });
  state.run = !input("stepmode").checked;
  refresh();
  sendSoon();
}

function pause() {
  if (!state.run) return;
  state.run = false;
  refresh();
  sendSoon();
}

function step() {
  if (state.phase !== "live") return drive();
  state.run = false;
  state.steps += 1;
  beat(state.lastMs);
  refresh();
  sendSoon();
}

function pressed(single) {
  state.pressedAt = performance.now();
  if (state.phase === "idle" || state.phase === "ended") return drive();
  if (state.phase !== "live") return;
  if (single || input("stepmode").checked) {
    state.run = false;
    state.steps += 1;
  } else state.run = true;
  refresh();
  sendSoon();
}

async function reset() {
  if (state.phase !== "live") return drive();
  const settings = choices.read();
  const reply = await server.check({ sess: state.session, settings: settings });
  if (!reply.ok) return refused(reply.error);
  quiet();
  state.applied = settings;
  state.resets += 1;
  state.run = false;
  enter("loading");
  sendSoon();
}

function leave() {
  server.leave({ sess: state.session });
  state.stop = true;
  sendSoon();
  enter("idle");
}

async function download() {
  const button = $('[data-do="download"]');
  button.disabled = true;
  pause();
  say("download", "Packing");
  try {
    if (state.phase === "live") {
      state.flushes += 1;
      await sendSoon();
    }
    const reply = await server.download({ sess: state.session, flushes: state.flushes });
    if (!reply.ok) return refused(reply.error);
    const link = make("a", { href: reply.url, download: reply.name });
    document.body.append(link);
    link.click();
    link.remove();
    tell("The session was packed into " + reply.name);
  } catch (error) {
    complain("The session could not be packed. Try again.");
  } finally {
    say("download", "Download session");
    refresh();
  }
}

async function pictureChosen(file) {
  if (file.size > state.hello.limits.upload)
    return complain("The picture is larger than " + bytes(state.hello.limits.upload) + "; choose a smaller one.");
  try {
    const sent = await upload(file);
    const reply = await server.picture({ sess: state.session, path: sent.path });
    if (!reply.ok) return refused(reply.error);
    choices.own(reply.picture, reply.shown);
  } catch (error) {
    complain("The picture could not be sent; use a PNG, JPEG or WebP file.");
  }
}

function sceneChosen(picture) {
  if (state.phase === "live") return reset();
  if (state.phase === "idle" || state.phase === "ended") {
    lanes.clear();
    player.clear();
    player.poster(picture);
  }
}

function choicesChanged() {
  const chosen = choices.read();
  const changed = state.phase === "live" && JSON.stringify(chosen) !== JSON.stringify(state.applied);
  $(".qwm-apply").hidden = !changed;
  if (state.phase === "idle" && chosen.lanes.length) {
    player.show(lanes.build(chosen.lanes, state.hello.world.size));
    poster();
  }
}

const actions = {
  drive: () => (state.run ? pause() : drive()),
  veil: () => (state.phase === "queued" ? leave() : state.phase === "gone" ? location.reload() : drive()),
  step: step,
  reset: reset,
  apply: reset,
  download: download,
  dismiss: quiet,
  dice: () => {
    input("seed").value = Math.floor(Math.random() * 10000);
    choicesChanged();
  },
  theme: () => document.body.classList.toggle("dark"),
};
for (const button of $$("[data-do]")) {
  const action = actions[button.dataset.do];
  // A click must not take the focus from the stage, or Pause would pause twice.
  button.addEventListener("pointerdown", (event) => event.preventDefault());
  button.addEventListener("click", (event) => {
    event.stopPropagation();
    action();
  });
}
stage.addEventListener("pointerdown", (event) => {
  if (event.target.closest("button")) return;
  event.preventDefault();
  drive();
});
stage.addEventListener("keydown", (event) => {
  if (event.target !== stage || event.code !== "Enter") return;
  event.preventDefault();
  drive();
});
stage.addEventListener("blur", pause);
stage.addEventListener("focus", refresh);
stage.addEventListener("blur", refresh);
document.addEventListener("visibilitychange", () => document.hidden && pause());
input("stepmode").checked = calm.matches;
input("stepmode").addEventListener("change", () => pause());

// What the server says -------------------------------------------------------------------------
const speakers = {
  hello: (message) => {
    state.hello = message;
    state.session = message.session;
    if (state.ticket === 0 && lanes.names.length === 0) welcome();
    refresh();
  },
  ready: (message) => {
    player.clear();
    lanes.clear();
    player.show(lanes.build(message.lanes, state.hello.world.size));
    say("kernels", "Kernels: " + message.kernels + ".");
    out("kernels").hidden = false;
    state.ack = Math.max(state.ack, message.n);
    state.frames = 0;
    state.rate = [];
    enter("live");
    if (document.activeElement === stage && !document.hidden) resume();
    sendSoon();
  },
  block: (message) => {
    state.lastMs = message.i === 0 ? 0 : message.ms;
    player.push(message);
    beat(state.run ? state.lastMs : 0);
  },
  error: (message) => {
    complain(message.message);
    enter("ended");
  },
  ended: (message) => {
    if (message.message !== "stopped") tell(message.message);
    enter("ended");
  },
};

function listen() {
  const message = JSON.parse(props.value);
  if (message.v !== PROTOCOL) {
    complain("This page is older than the server; reload it.");
    return enter("gone");
  }
  if (message.drive !== undefined && message.drive !== state.ticket) return;
  speakers[message.kind](message);
}

function welcome() {
  const hello = state.hello;
  lanes.describe(hello.lanes);
  keys.bind(hello.keys, hello.legend);
  choices.fill(hello);
  say("world", hello.world.title);
  say("device", "runs on " + hello.device.toUpperCase());
  say("foot", hello.world.title + " \u00b7 " + hello.world.licence +
    " \u00b7 everything runs on this machine, nothing is sent anywhere");
  player.show(lanes.build(hello.defaults.lanes, hello.world.size));
  poster();
  enter("idle");
}

function poster() {
  const shown = $('.qwm-scene[aria-checked="true"] img');
  if (shown) player.poster(shown.src);
}

// What a visitor sees --------------------------------------------------------------------------
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
  off("download", state.ticket === 0 || busy || state.phase === "gone");
  const focused = document.activeElement === stage;
  $(".qwm-hint").hidden = !live || focused;
  $(".qwm-apply").hidden = !live || JSON.stringify(choices.scene && choices.read()) === JSON.stringify(state.applied);
  veil();
  status();
}

const VEILS = {
  idle: () => ["Walk through a dreamed world", "Hold W A S D or the arrow keys. Every cache gets " +
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
  $('[data-do="veil"]').hidden = button === "";
  const progress = $(".qwm-progress");
  progress.hidden = state.phase !== "loading" && state.phase !== "joining";
  progress.setAttribute("aria-valuenow", Math.round(100 * state.progress));
  progress.firstElementChild.style.width = Math.max(4, 100 * state.progress) + "%";
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
  say("message", text.charAt(0).toUpperCase() + text.slice(1));
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

watch("value", listen);
listen();
