// The world picker: a card per world, what is here of it, its licence, and the download.
const POLL = 1000;

class Worlds {
  constructor(onPick) {
    this.onPick = onPick;
    this.holder = $(".qwm-cards");
    this.cards = [];
    this.hellos = {};
    this.chosen = null;
    this.ticket = 0;
    this.wasRunning = null;
    input("agree").addEventListener("change", () => this.explain());
    rove(this.holder);
  }

  // What the server said of a world is kept: the one that is driven may not be the one looked at.
  learn(hello) {
    this.hellos[hello.world.name] ||= hello;
    if (this.chosen === null) this.chosen = hello.world.name;
  }

  card(name = this.chosen) {
    return this.cards.find((card) => card.name === name);
  }

  async refresh() {
    clearTimeout(this.timer);
    if (state.session === null || state.phase === "gone") return;
    try {
      const reply = await server.worlds({ sess: state.session });
      if (!reply.ok) return refused(reply.error);
      if (!element.isConnected) return;
      this.cards = reply.worlds;
      this.transfer = reply.download;
      this.ended();
      this.draw();
    } catch (error) {
      this.timer = setTimeout(() => this.refresh(), 5 * POLL);
      return;
    }
    if (this.transfer.running) this.timer = setTimeout(() => this.refresh(), POLL);
  }

  ended() {
    const now = this.transfer;
    if (this.wasRunning !== null && !now.running) {
      const card = this.card(this.wasRunning);
      if (now.error) complain(now.error);
      else if (card) tell(card.title + " is here now; choose it and press Drive");
    }
    this.wasRunning = now.running ? now.world : null;
  }

  async pick(name) {
    const ticket = (this.ticket += 1);
    if (!this.hellos[name]) {
      const reply = await server.world({ sess: state.session, world: name });
      if (!reply.ok) return refused(reply.error);
      this.learn(reply.hello);
    }
    if (ticket !== this.ticket) return;
    this.chosen = name;
    input("agree").checked = false;
    this.draw();
    this.onPick(this.hellos[name]);
  }

  draw() {
    out("worlds-stage").hidden = this.cards.length > 0;
    if (this.holder.children.length !== this.cards.length)
      this.holder.replaceChildren(...this.cards.map((card) => this.tile(card)));
    this.cards.forEach((card, index) => this.fillTile(this.holder.children[index], card));
    this.explain();
  }

  tile(card) {
    const tile = make("button", { type: "button", class: "qwm-world", role: "radio", "data-world": card.name }, [
      make("span", { class: "qwm-world-top" }, [make("b", { textContent: card.title.replaceAll("-", "\u2011") }),
        make("span", { class: "qwm-badge" })]),
      make("small", { textContent: card.note }),
      make("small", { textContent: card.licence.split(":")[0], title: card.licence }),
      make("small", { class: "qwm-needs" })]);
    tile.addEventListener("click", () => this.pick(card.name));
    return tile;
  }

  fillTile(tile, card) {
    tile.setAttribute("aria-checked", card.name === this.chosen ? "true" : "false");
    const fits = card.lanes.length > 0;
    const badge = $(".qwm-badge", tile);
    badge.textContent = !fits ? "too large" : card.present ? "here" : "to download";
    badge.dataset.state = !fits ? "large" : card.present ? "here" : "away";
    $(".qwm-needs", tile).textContent = bytes(card.weight_bytes) + " of files \u00b7 needs " + bytes(card.needed) +
      (card.capacity ? " of " + bytes(card.capacity) : "") +
      (card.offloads ? " \u00b7 blocks wait on the CPU" : "");
  }

  // Below the cards: what stands between a visitor and the chosen world.
  explain() {
    const card = this.card();
    const moving = this.transfer && this.transfer.running && this.transfer;
    const away = card !== undefined && !card.present;
    $(".qwm-fetch").hidden = !away && !moving;
    out("advice").hidden = !card || !card.advice;
    if (card && card.advice) say("advice", card.advice + ".");
    $(".qwm-fetch-ask").hidden = !away || (moving && moving.world === card.name);
    if (away) this.ask(card, moving);
    const bar = $(".qwm-fetch .qwm-progress");
    bar.hidden = out("fetch-stage").hidden = !moving;
    if (!moving) return;
    const share = Math.round(100 * moving.progress);
    say("fetch-stage", moving.stage + ", " + share + " %");
    bar.setAttribute("aria-valuenow", share);
    bar.firstElementChild.style.width = share + "%";
  }

  ask(card, moving) {
    say("fetch-what", card.title + " is not on this machine (" + card.problem + "). Its files have " +
      bytes(card.weight_bytes) + " and come from the Hugging Face hub (" + card.source + ").");
    say("fetch-terms", "Licence: " + card.licence + ".");
    $(".qwm-agree").hidden = card.terms === "";
    say("fetch", "Download " + bytes(card.weight_bytes));
    $('[data-do="fetch"]').disabled = Boolean(moving) || (card.terms !== "" && !input("agree").checked);
  }

  async fetch() {
    const reply = await server.fetch({ sess: state.session, world: this.chosen, agreed: input("agree").checked });
    if (!reply.ok) return refused(reply.error);
    this.wasRunning = this.chosen;
    this.refresh();
  }
}
