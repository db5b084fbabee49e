// What every view takes: elements with text (never markup), data pages, pictures, numbers.
// `page.facts` is what `rl/report/page.py` wrote; a data page calls `page.data`.
page.loaded = new Map();
page.pictures = {};

page.data = (name, value) => page.loaded.set(name, value);

// A data page, by a classic script: a page from a disk may neither fetch nor import.
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

// el("p", {class: "soft"}, "words", other, ...): text becomes text, null nothing.
page.el = (tag, attributes, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
};

// Words from outside: kept apart, so that marks of direction in them turn nothing else.
page.words = (text, tag = "bdi") => page.el(tag, {class: "t"}, text);

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

// A picture, or why there is none. Tiny ones keep crisp pixels.
page.image = (src, alt) => {
  if (src === null || src === undefined) return page.el("div", {class: "gone"}, "no picture on record");
  const known = page.facts.alone ? page.pictures[src] : src;
  if (!known) return page.el("div", {class: "gone"}, "left out of this file");
  const image = page.el("img", {loading: "lazy", decoding: "async", alt});
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 256));
  image.addEventListener("error", () => {
    image.replaceWith(page.el("div", {class: "gone"}, "picture is gone"));
  });
  image.src = known;
  return image;
};

page.figure = (src, alt, ...caption) =>
  page.el("figure", {class: "pic"}, page.image(src, alt), page.el("figcaption", {}, ...caption));

page.at = (base, file) => (file ? base + file : null);

// Every source picture of a group or sample, under its number where there are several.
page.sources = (base, row) => {
  const files = [row.src, ...(row.others ?? [])];
  if (!files.some(Boolean)) return [];
  const name = (at) => (files.length > 1 ? `source ${at + 1}` : "source");
  return files.map((file, at) => page.figure(page.at(base, file), `${row.say} (${name(at)})`, name(at)));
};

// Two pictures over each other, and how much of the second is seen.
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
  const show = () => {
    second.style.clipPath = `inset(0 0 0 ${range.value}%)`;
    edge.style.left = `${range.value}%`;
  };
  range.addEventListener("input", show);
  show();
  return page.el("div", {},
    page.el("div", {class: "slide"}, first, second, edge),
    page.el("label", {class: "slider"},
      page.el("span", {}, page.el("span", {}, names[0]), page.el("span", {}, names[1])), range));
};

// `#it=12&g=3` as {it: "12", g: "3"}; `#training` as {view: "training"}.
page.route = () => {
  const hash = location.hash.slice(1);
  if (!hash) return {view: "overview"};
  const found = {};
  for (const word of hash.split("&")) {
    const [name, ...rest] = word.split("=");
    let value = rest.join("=");
    try { value = decodeURIComponent(value); } catch { /* as it stands */ }
    if (rest.length) found[name] = value; else found.view = name;
  }
  return found;
};

page.hash = (words) => "#" + Object.entries(words)
  .filter(([, value]) => value !== "" && value !== null && value !== undefined)
  .map(([name, value]) => (name === "view" ? value : `${name}=${encodeURIComponent(value)}`))
  .join("&");

// All rows of an evaluation, whose page may have been cut in several.
page.evaluation = async (set) => {
  const names = [set.page];
  for (let file = 2; file <= set.files; file += 1) names.push(`${set.page}_${file}`);
  const pages = (await Promise.all(names.map(page.load))).filter((found) => found !== null);
  if (!pages.length) return null;
  return {set, parts: pages[0].parts, cut: pages[0].cut, rows: pages.flatMap((found) => found.rows)};
};

page.setName = (set) => (set.run ? `${set.run}, ` : "") + `${set.it} iterations`;
