// Helpers of all views: elements with text (never markup), data pages, pictures, numbers.
page.loaded = new Map();
page.pictures = {};

// Called by each data page. (`page.facts` is in the page itself, from `rl/report/page.py`.)
page.data = (name, value) => page.loaded.set(name, value);

// Loads a data page with a classic script: a page opened from disk can neither fetch nor import.
page.load = (name) => {
  if (page.loaded.has(name)) return Promise.resolve(page.loaded.get(name));
  if (page.facts.alone) return Promise.resolve(null);
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

// A picture, or why there is none. Tiny pictures are enlarged without smoothing.
page.image = (src, alt) => {
  if (src === null || src === undefined) return page.el("div", {class: "gone"}, "no picture on record");
  const url = page.facts.alone ? page.pictures[src] : src;
  if (!url) return page.el("div", {class: "gone"}, "left out of this file");
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
  const image = figure.querySelector("img");
  if (!image || !regions) return figure;
  const shape = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const overlay = shape("svg", {class: "regions", "aria-hidden": "true"});
  image.addEventListener("load", () => {
    const [width, height] = [image.naturalWidth, image.naturalHeight];
    const size = Math.max(width, height) / 12;
    overlay.setAttribute("viewBox", `0 0 ${width} ${height}`); // fits as the picture does
    overlay.replaceChildren(...regions.flatMap(([, left, top, right, bottom], at) => {
      const box = {x: left * width, y: top * height, width: (right - left) * width, height: (bottom - top) * height};
      return [shape("rect", {...box, class: "halo"}), shape("rect", box),
        shape("text", {x: box.x + size / 4, y: box.y + size, "font-size": size}, `${at + 1}`)];
    }));
  });
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

// All rows of an evaluation, whose data may be split into several pages.
page.evaluation = async (set) => {
  const names = [set.page];
  for (let file = 2; file <= set.files; file += 1) names.push(`${set.page}_${file}`);
  const pages = (await Promise.all(names.map(page.load))).filter((data) => data !== null);
  if (!pages.length) return null;
  return {set, parts: pages[0].parts, cut: pages[0].cut, rows: pages.flatMap((data) => data.rows)};
};

page.setName = (set) => (set.run ? `${set.run}, ` : "") + `${set.it} iterations`;
