// Draws the chunks: all lanes of one frame are cut from one picture in one animation frame.
class Player {
  constructor(onDrawn) {
    this.onDrawn = onDrawn;
    this.contexts = [];
    this.queue = [];
    this.decoding = Promise.resolve();
    this.generation = 0;
    this.frame = 0;
    this.due = 0;
    this.interval = 100;
    this.arrived = 0;
    this.tick = this.tick.bind(this);
    requestAnimationFrame(this.tick);
  }

  show(canvases) {
    this.contexts = canvases.map((canvas) => canvas.getContext("2d", { alpha: false }));
  }

  clear() {
    this.generation += 1;
    this.queue.forEach((block) => block.bitmap.close());
    this.queue = [];
    this.frame = 0;
    this.arrived = 0;
  }

  push(block) {
    const generation = this.generation;
    this.decoding = this.decoding.then(async () => {
      const blob = await (await fetch(block.sheet)).blob();
      block.sheet = null;
      block.bitmap = await createImageBitmap(blob);
      if (generation !== this.generation) return block.bitmap.close();
      this.pace(block);
      this.queue.push(block);
    });
  }

  // Time between pictures follows the time between chunks, smoothed; a pause does not count.
  pace(block) {
    const now = performance.now();
    const gap = (now - this.arrived) / block.frames;
    if (block.i === 0) this.interval = 60;
    else if (this.arrived === 0 || gap > 1500) this.interval = Math.min(block.ms / block.frames, 250);
    else this.interval += 0.4 * (Math.max(gap, 4) - this.interval);
    this.arrived = now;
  }

  tick(now) {
    requestAnimationFrame(this.tick);
    const block = this.queue[0];
    if (!block || now < this.due) return;
    if (block.i === 0 && calm.matches) this.frame = block.frames - 1;
    this.draw(block, this.frame);
    const hurry = this.queue.length > 1 ? 0.5 : 1;
    this.due = Math.max(now, this.due + this.interval * hurry);
    if (this.due - now > 400) this.due = now + 400;
    if (this.frame === 0) this.onDrawn(block, true);
    this.frame += 1;
    if (this.frame < block.frames) return;
    this.onDrawn(block, false);
    this.queue.shift();
    block.bitmap.close();
    this.frame = 0;
  }

  draw(block, frame) {
    const [width, height] = block.size;
    this.contexts.forEach((context, lane) => {
      if (context.canvas.width !== width || context.canvas.height !== height) {
        context.canvas.width = width;
        context.canvas.height = height;
      }
      context.drawImage(
        block.bitmap, block.poster ? 0 : lane * width, frame * height, width, height,
        0, 0, width, height,
      );
    });
  }

  // The start scene's picture, in every lane, while nothing is loaded.
  async poster(source) {
    const generation = this.generation;
    const blob = await (await fetch(source)).blob();
    const bitmap = await createImageBitmap(blob);
    if (generation === this.generation && this.queue.length === 0)
      this.draw({ size: [bitmap.width, bitmap.height], bitmap: bitmap, poster: true }, 0);
    bitmap.close();
  }
}
