// Talking to the server: one snapshot of everything at a time, and a heartbeat.
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

// Until the server has said who this page is; at most a minute, then what is asked says what is wrong.
async function known() {
  for (let wait = 0; state.session === null && state.phase !== "gone" && wait < 1200; wait += 1)
    await new Promise((done) => setTimeout(done, 50));
}

async function send() {
  state.seq += 1;
  const held = keys.taken();
  if (held.length > keys.held().length) again = true; // that a tap is over is news too
  state.lastSent = performance.now();
  try {
    const reply = await server.control({
      sess: state.session, seq: state.seq, keys: held, run: state.run, steps: state.steps,
      resets: state.resets, flushes: state.flushes, prompts: state.prompts, stop: state.stop, ack: state.ack,
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
    state.loading = capital(reply.stage || "");
    state.stages = reply.stages || [];
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
