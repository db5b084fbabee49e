// Helpers of all views: elements with text (never markup), data pages, pictures, numbers.
page.loaded = new Map();

// Called by each data page. (`page.facts` is in the page itself, from `rl/tools/page.py`.)
page.data = (name, value) => page.loaded.set(name, value);

// Loads a data page with a classic script: a page opened from disk can neither fetch nor import.
page.load = (name) => {
  if (page.loaded.has(name)) return Promise.resolve(page.loaded.get(name));
  return new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = `data/${name}.js`;
    script.onload = () => resolve(page.loaded.get(name) ?? null);
    script.onerror = () => resolve(null);
    document.head.append(script);
  });
};

page.padded = (number) => String(number).padStart(6, "0");

// el("p", {class: "soft"}, "text", child, ...): strings become text nodes, null is skipped.
page.el = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
};

// svg("rect", {x: 1}, child, ...), likewise.
page.svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat());
  return node;
};

// Text of the run, isolated: direction marks in it do not turn the text around it.
page.isolated = (text, tag = "bdi") => page.el(tag, {class: "t"}, text);

page.num = (value, digits = 3) =>
  value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");

page.signed = (value, digits = 3) => {
  if (value === null || value === undefined) return page.el("span", {}, "–");
  const text = (value > 0 ? "+" : "") + page.num(value, digits);
  return page.el("span", {class: value > 0 ? "up" : value < 0 ? "down" : null}, text);
};

page.reward = (row) =>
  row.r === null || row.r === undefined ? page.el("span", {class: "bad"}, row.st || "not graded")
    : page.el("span", {}, page.num(row.r, 2));

// A part of a picture. The inner svg cuts off what is beside it.
page.part = (url, [x, y, width, height], alt) => {
  const image = page.svg("image", {href: url});
  const part = page.svg("svg", {class: "crop", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": alt},
    page.svg("svg", {width, height, viewBox: `${x} ${y} ${width} ${height}`}, image));
  part.classList.toggle("tiny", Math.max(width, height) <= 64);
  image.addEventListener("error", () => part.replaceWith(page.el("div", {class: "gone"}, "picture is gone")));
  return part;
};

// A picture, or why there is none. `src` may name a part: `file.webp#xywh=0,0,96,64`. Tiny pictures
// are enlarged without smoothing.
page.image = (src, alt) => {
  if (src === null || src === undefined) return page.el("div", {class: "gone"}, "no picture on record");
  const [url, box] = src.split("#xywh=");
  if (box) return page.part(url, box.split(",").map(Number), alt);
  const image = page.el("img", {loading: "lazy", decoding: "async", alt});
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 256));
  image.addEventListener("error", () => {
    image.replaceWith(page.el("div", {class: "gone"}, "picture is gone"));
  });
  image.src = url;
  return image;
};

page.figure = (src, alt, ...caption) =>
  page.el("figure", {class: "pic"}, page.image(src, alt), page.el("figcaption", {}, ...caption));

// Draws numbered boxes over a figure's picture, if there are any, and lists their labels below it.
// `regions`: [label, left, top, right, bottom], in shares of the picture's sides.
page.withRegions = (figure, regions) => {
  const image = figure.querySelector("img, svg.crop");
  if (!image || !regions) return figure;
  const overlay = page.svg("svg", {class: "regions", "aria-hidden": "true"});
  const draw = (width, height) => {
    const size = Math.max(width, height) / 12;
    overlay.setAttribute("viewBox", `0 0 ${width} ${height}`); // fits as the picture does
    overlay.replaceChildren(...regions.flatMap(([, left, top, right, bottom], at) => {
      const box = {x: left * width, y: top * height, width: (right - left) * width, height: (bottom - top) * height};
      return [page.svg("rect", {...box, class: "halo"}), page.svg("rect", box),
        page.svg("text", {x: box.x + size / 4, y: box.y + size, "font-size": size}, `${at + 1}`)];
    }));
  };
  if (image.tagName === "IMG") image.addEventListener("load", () => draw(image.naturalWidth, image.naturalHeight));
  else draw(image.viewBox.baseVal.width, image.viewBox.baseVal.height);
  image.before(page.el("div", {class: "boxed"}));
  figure.querySelector(".boxed").append(image, overlay);
  figure.append(page.el("ol", {class: "regions fine", "aria-label": "regions that the judge named"},
    regions.map(([label]) => page.isolated(label || "(no label)", "li"))));
  return figure;
};

page.at = (base, file) => (file ? base + file : null);

// All source pictures of a group or sample, numbered if there are several.
page.sources = (base, row) => {
  const files = [row.src, ...(row.others ?? [])];
  if (!files.some(Boolean)) return [];
  const name = (i) => (files.length > 1 ? `source ${i + 1}` : "source");
  return files.map((file, i) => page.figure(page.at(base, file), `${row.say} (${name(i)})`, name(i)));
};

// Two overlaid pictures, and a slider that sets how much of the second is visible.
page.slider = (before, after, alt, names) => {
  const first = page.image(before, `${alt} (${names[0]})`);
  const second = page.image(after, `${alt} (${names[1]})`);
  if (first.tagName !== "IMG" || second.tagName !== "IMG") {
    return page.el("div", {class: "row"},
      page.el("figure", {class: "pic"}, first, page.el("figcaption", {}, names[0])),
      page.el("figure", {class: "pic"}, second, page.el("figcaption", {}, names[1])));
  }
  const edge = page.el("i", {"aria-hidden": "true"});
  const range = page.el("input", {type: "range", min: 0, max: 100, value: 50});
  const update = () => {
    second.style.clipPath = `inset(0 0 0 ${range.value}%)`;
    edge.style.left = `${range.value}%`;
  };
  range.addEventListener("input", update);
  update();
  return page.el("div", {},
    page.el("div", {class: "slide"}, first, second, edge),
    page.el("label", {class: "slider"},
      page.el("span", {}, page.el("span", {}, names[0]), page.el("span", {}, names[1])), range));
};

// `#it=12&g=3` as {it: "12", g: "3"}; `#training` as {view: "training"}.
page.route = () => {
  const hash = location.hash.slice(1);
  if (!hash) return {view: "overview"};
  const state = {};
  for (const item of hash.split("&")) {
    const [name, ...values] = item.split("=");
    let value = values.join("=");
    try { value = decodeURIComponent(value); } catch { /* keep it undecoded */ }
    if (values.length) state[name] = value; else state.view = name;
  }
  return state;
};

page.hash = (state) => "#" + Object.entries(state)
  .filter(([, value]) => value !== "" && value !== null && value !== undefined)
  .map(([name, value]) => (name === "view" ? value : `${name}=${encodeURIComponent(value)}`))
  .join("&");

// An evaluation with its rows and the names of the reward's parts.
page.evaluation = async (set) => {
  const data = await page.load(set.page);
  return data && {set, ...data};
};

page.setName = (set) => `${set.it} iterations`;

// `text` with the words marked that a longest common subsequence with `base` lacks.
page.marked = (text, base, tag = "p") => {
  const words = (of) => [...new Intl.Segmenter(undefined, {granularity: "word"}).segment(of)].map((each) => each.segment);
  const [a, b] = [words(text), words(base)];
  if (text === base || a.length * b.length > 250_000) return page.isolated(text, tag);
  const width = b.length + 1;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[i] === b[j] ? 1 + longest[(i + 1) * width + j + 1]
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const parts = [];
  for (let i = 0, j = 0; i < a.length; i += 1) {
    while (j < b.length && a[i] !== b[j] && longest[i * width + j + 1] >= longest[(i + 1) * width + j]) j += 1;
    if (j < b.length && a[i] === b[j]) { parts.push(a[i]); j += 1; }
    else parts.push(a[i].trim() ? page.el("mark", {}, a[i]) : a[i]);
  }
  return page.el(tag, {class: "t"}, parts);
};

// A text with a button that copies it.
page.copyable = (text, tag = "code") => {
  const shown = page.el(tag, {class: "t copyable"}, text);
  const button = page.el("button", {type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(shown); button.textContent = "Selected"; }
  }}, "Copy");
  return page.el("div", {class: "copy"}, shown, button);
};

// The command that edits this sample's picture again. `base`: the folder of its files, seen from
// the page.
page.editCommand = (base, row, checkpoint) => {
  const quoted = (text) => (/^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  const files = [row.src, ...(row.others ?? [])].filter(Boolean)
    .map((file) => (file.includes("#") ? "SOURCE.png" : base.replace("..", page.facts.run) + file));
  const at = page.facts.checkpoints.includes(checkpoint) ? ["--checkpoint", String(checkpoint)] : [];
  return ["rl", "edit", "--run", page.facts.run, ...at, ...files, row.say].map(quoted).join(" ");
};

// A row of a data page under the names of the run's own records. `parts`: names of the reward's parts.
page.record = (row, parts) => Object.fromEntries(Object.entries(row).map(([key, value]) => [
  {say: "instruction", text: "words", think: "thought", end: "finish", st: "status", why: "failure", r: "reward",
    adv: "advantage", seed: "noise_seed", s: "judge_s", said: "replies", src: "source", img: "picture", goal: "target",
    cat: "category", of: "completions", tok: "tokens", lp: "sampler_logprobs", ref: "reference"}[key] ?? key,
  key === "parts" ? Object.fromEntries(parts.map((name, at) => [name, value[at]]))
    : key === "of" ? value.map((one) => page.record(one, parts))
    : value?.parts ? page.record(value, parts) : value]));

// Folded: links to files, the command, the sample as JSON. `files`: [path from the page, name].
page.about = (row, parts, command, files) => {
  const details = page.el("details", {}, page.el("summary", {}, "Files, command, JSON"));
  details.addEventListener("toggle", () => details.append(...[
    page.el("p", {class: "links"}, files.map(([path, name]) => page.el("a", {href: path}, name))),
    command === null ? null : page.copyable(command), page.copyable(JSON.stringify(page.record(row, parts), null, 1), "pre")].filter(Boolean)), {once: true});
  return details;
};
