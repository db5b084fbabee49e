// The view of one sample: a training group with all its completions, or a held-out sample with its
// variants and its other evaluations.
{
  const {el, isolated, num} = page;
  const MAX_ACROSS = 12;
  const OPEN_TOKENS = 120;

  const section = () => document.getElementById("at-sample");

  // `place`: what to show if the sample was not reached from a list.
  const crumbs = (back, steps, place) => {
    const at = page.order.indexOf(location.hash);
    const [previous, next] = at < 0 ? steps : [page.order[at - 1], page.order[at + 1]];
    page.neighbours = [previous, next];
    return el("p", {class: "crumbs"}, el("a", {href: back[0]}, back[1]),
      previous ? el("a", {href: previous, rel: "prev"}, "← previous") : null,
      next ? el("a", {href: next, rel: "next"}, "next →") : null,
      el("span", {class: "soft"}, at < 0 ? place : `${at + 1} of ${page.order.length}`));
  };

  const title = (text, ...about) => [
    el("h2", {id: "sample-title", tabindex: -1}, isolated(text || "(no instruction)")),
    el("p", {class: "soft"}, ...about)];

  const partsTable = (names, values) => names.length === 0 ? null :
    el("details", {}, el("summary", {}, `${names.length} parts of the reward`),
      el("table", {class: "parts"}, el("tbody", {}, names.map((name, at) =>
        el("tr", {}, el("th", {scope: "row"}, isolated(name)), el("td", {class: "n"}, num(values[at])))))));

  // The reasoning in a judge's reply, if the reply is JSON and has one.
  const reason = (reply) => {
    try { const value = JSON.parse(reply).reasoning; return typeof value === "string" ? value : null; }
    catch { return null; }
  };

  const replies = (byName) => Object.entries(byName ?? {}).filter(([, texts]) => texts.length).map(([name, texts]) =>
    el("div", {}, texts.map(reason).some(Boolean)
      ? el("p", {class: "said"}, el("span", {class: "soft"}, isolated(name), ", reasoning: "),
          isolated([...new Set(texts.map(reason).filter(Boolean))].join(" · "))) : null,
      el("details", {}, el("summary", {}, `${texts.length} raw ${texts.length === 1 ? "reply" : "replies"} of `, isolated(name)),
        texts.map((reply) => page.isolated(reply, "pre")))));

  // A token's colour is the probability that the engine gave to other tokens.
  const tokens = (one) => {
    if (!one.tok) return null;
    const spans = one.tok.map((token, at) => {
      const nats = one.lp[at] ?? null;
      const forced = one.forced?.[at];
      const probability = nats === null ? 1 : Math.min(1, Math.exp(nats));
      const span = el("span", {class: forced ? "forced" : null,
        title: `token ${at + 1}: ${nats === null ? "no log-prob" : `probability ${(100 * probability).toFixed(probability < 0.1 ? 2 : 0)} %, ${num(nats, 2)} nats`}${forced ? ", forced" : ""}`}, token);
      span.style.setProperty("--doubt", (1 - probability).toFixed(2));
      return span;
    });
    return el("details", {open: one.tok.length <= OPEN_TOKENS}, el("summary", {},
      `${one.tok.length}${one.cut ? ` of ${one.tok.length + one.cut}` : ""} tokens by probability` +
      (one.ids ? ", as ids: the tokenizer is not on this machine" : "")),
      el("p", {class: "tokens"}, spans));
  };

  const scale = el("p", {class: "fine scale"}, "Tokens: certain", el("i"), "improbable");

  const thought = (one) => one.think
    ? el("details", {class: "thought"}, el("summary", {}, "Thought"), page.isolated(one.think, "p")) : null;

  const provenance = (one) => el("p", {class: "fine"},
    `${one.st}; noise seed ${one.seed ?? "–"}` + (one.s === null ? "" : `; grade after ${num(one.s, 2)} s`));

  // Equal completions, which share their picture and grade: [{one, times}], in order.
  const distinct = (members) => {
    const kinds = new Map();
    for (const one of members) {
      const key = JSON.stringify([one.text, one.think, one.st, one.r, one.end]);
      if (kinds.has(key)) kinds.get(key).times += 1;
      else kinds.set(key, {one, times: 1});
    }
    return [...kinds.values()];
  };

  const member = ({one, times}, at, group, names, base) => el("article", {class: "member", "aria-label": `completion ${at + 1}`},
    el("h3", {}, times > 1 ? el("span", {title: `${times} equal completions`}, `${times} ×`) : null, page.reward(one), el("span", {class: "soft"}, "advantage ", page.signed(one.adv, 2)),
      one.end && one.end !== "stop" ? el("span", {class: "bad"}, one.end) : null),
    one.img ? page.withRegions(page.figure(page.at("../", one.img), group.say, `completion ${at + 1}`), one.regions) : null,
    thought(one), page.marked(one.text || "(no words)", base),
    one.why ? el("p", {class: "said"}, el("span", {class: "bad"}, `${one.st}: `), isolated(one.why)) : null,
    replies(one.said), partsTable(names, one.parts), tokens(one), provenance(one));

  // The bare variant: the user's own words, rendered under the group's noise; it is not trained on.
  const bareVariant = (one, group, names) => el("article", {class: "member", "aria-label": "the bare variant"},
    el("h3", {}, page.reward(one), el("span", {class: "soft"}, "bare variant, the user's own words")),
    one.img ? page.withRegions(page.figure(page.at("../", one.img), group.say, "picture of the bare variant"), one.regions) : null,
    one.why ? el("p", {class: "said"}, el("span", {class: "bad"}, `${one.st}: `), isolated(one.why)) : null,
    replies(one.said), partsTable(names, one.parts), provenance(one));

  page.group = async (state) => {
    const it = Number(state.it);
    const g = Number(state.g ?? 0);
    const name = `it_${page.padded(it)}`;
    const data = await page.load(name);
    const at = page.facts.iterations.indexOf(it);
    const numGroups = page.facts.groups[at] ?? 0;
    const link = (i, j) => `#it=${i}&g=${j}`;
    const before = g > 0 ? link(it, g - 1)
      : at > 0 ? link(page.facts.iterations[at - 1], page.facts.groups[at - 1] - 1) : null;
    const after = g + 1 < numGroups ? link(it, g + 1)
      : at >= 0 && at + 1 < page.facts.iterations.length ? link(page.facts.iterations[at + 1], 0) : null;
    const top = crumbs(["#training", "All groups"], [before, after], `group ${g + 1} of ${numGroups} of iteration ${it}`);
    const group = data?.rows[g];
    if (!group) {
      section().replaceChildren(top, ...title(`Iteration ${state.it}, group ${state.g}`, "is not on record."));
      return;
    }
    const sources = page.sources("../", group);
    const members = distinct(group.of);
    const commonest = members.reduce((most, each) =>
      (each.times - most.times || each.one.r - most.one.r) > 0 ? each : most);
    const files = [[`../episodes/${name}.rank${group.rank}.jsonl`, "its line in episodes/"],
      ...[...new Set([...sources.length ? [group.src] : [], ...group.of.map((one) => one.img)])].filter(Boolean)
        .map((file) => [`../${file.split("#")[0]}`, file.split("#")[0].split("/").at(-1)]),
      ["../checkpoints/", "checkpoints/"]];
    section().replaceChildren(...[top,
      ...title(group.say, "Sample ", isolated(group.id),
        group.cat ? [", ", isolated(group.cat)] : null, `, ${group.of.length} completions with the same noise`),
      sources.length || group.goal ? el("div", {class: "tops"}, sources,
        group.goal ? page.figure(page.at("../", group.goal), `${group.say} (reference edit)`, "reference edit") : null) : null,
      sources.length || group.goal || group.of.some((one) => one.img) ? null
        : el("p", {class: "fine"}, "No picture of this group is on record (tracking.keep_images_of_last_n_iterations)."),
      el("p", {class: "fine"}, members.length === 1 ? "All completions are equal."
        : "Equal completions are one card. Marked words differ from the most common completion."),
      group.of.some((one) => one.tok) ? scale : null,
      el("div", {class: "members"}, members.map((one, j) => member(one, j, group, data.parts, commonest.one.text)),
        group.bare ? bareVariant(group.bare, group, data.parts) : null),
      page.about(group, data.parts, page.editCommand("../", group, null), [...new Map(files)])].filter(Boolean));
  };

  // At most MAX_ACROSS evaluations, the first and the last included.
  const evenlySpaced = (sets) => {
    if (sets.length <= MAX_ACROSS) return sets;
    const step = (sets.length - 1) / (MAX_ACROSS - 1);
    return Array.from({length: MAX_ACROSS}, (_, at) => sets[Math.round(at * step)]);
  };

  page.heldOutSample = async (state) => {
    const set = page.facts.sets.find((one) => String(one.it) === state.eval);
    const evaluation = set && await page.evaluation(set);
    const index = evaluation ? evaluation.rows.findIndex((one) => one.id === state.id) : -1;
    const row = evaluation?.rows[index];
    const other = page.facts.sets.find((one) => one.page === state.a) ??
      page.facts.sets.find((one) => one !== set);
    const link = (one) => one && page.hash({eval: state.eval, id: one.id, a: state.a});
    const top = crumbs(["#held-out", "All held-out samples"],
      [link(evaluation?.rows[index - 1]), link(evaluation?.rows[index + 1])],
      `${index + 1} of ${evaluation?.rows.length}`);
    if (!row) {
      section().replaceChildren(top, ...title(state.id, "is not on record."));
      return;
    }
    const old = (other && await page.evaluation(other))?.rows.find((one) => one.id === row.id);
    const variant = (file, base, name, reward) => file || reward !== null
      ? page.figure(page.at(base, file), `${row.say} (${name})`, `${name}: ${num(reward, 2)}`) : null;
    const across = el("div", {class: "across", tabindex: 0, role: "group", "aria-label": "the same sample after other iterations"});
    section().replaceChildren(...[top,
      ...title(row.say, `Held-out sample `, isolated(row.id), row.cat ? [", ", isolated(row.cat)] : null,
        ", ", isolated(page.setName(set))),
      el("div", {class: "tops"}, page.sources(set.base, row),
        row.img ? page.withRegions(page.figure(page.at(set.base, row.img), row.say, "now: ", page.reward(row)), row.regions) : null,
        variant(row.bimg, set.base, "bare variant, the user's own words", row.bare),
        variant(row.simg, "../stock/", "stock variant, the untrained system", row.stock)),
      el("div", {class: "halves"}, old && (old.img || row.img) ? el("div", {class: "beside-each"},
        page.slider(page.at(other.base, old.img), page.at(set.base, row.img), row.say,
          [page.setName(other), page.setName(set)])) : null,
      el("div", {}, thought(row),
      el("p", {class: "said"}, el("span", {class: "soft"}, "Words: "), page.marked(row.text || "(no words)", old?.text ?? row.text, "bdi")),
      row.ref ? el("p", {class: "said"}, el("span", {class: "soft"}, "Reference description: "), isolated(row.ref)) : null,
      el("p", {}, "Reward ", page.reward(row), `, ${row.st}`,
        old ? [", ", page.signed(old.r === null || row.r === null ? null : row.r - old.r, 2), " against ", isolated(page.setName(other))] : null),
      row.why ? el("p", {class: "said"}, el("span", {class: "bad"}, "Cause: "), isolated(row.why)) : null,
      ...replies(row.said), partsTable(evaluation.parts, row.parts), tokens(row), row.seed === null ? null : provenance(row),
      page.about(row, evaluation.parts, page.editCommand(set.base, row, set.it), [[`${set.base}records.jsonl`, "its line in records.jsonl"],
        ...[row.src, row.img].filter(Boolean).map((file) => [set.base + file, file]),
        [`../checkpoints/step_${page.padded(set.it)}/`, "checkpoint"]].filter(([path]) =>
          !path.includes("/checkpoints/") || page.facts.checkpoints.includes(set.it))))),
      el("h3", {}, "Across checkpoints"), across].filter(Boolean));
    const sets = evenlySpaced(page.facts.sets);
    for (const one of sets) {
      const sample = (await page.evaluation(one))?.rows.find((other_row) => other_row.id === row.id);
      if (!sample) continue;
      across.append(el("div", {class: "pic"},
        sample.img ? page.image(page.at(one.base, sample.img), `${row.say} (${page.setName(one)})`) : null,
        el("p", {class: "fine"}, el("a", {href: page.hash({eval: one.it, id: row.id, a: state.a})},
          isolated(page.setName(one))), ": ", page.reward(sample)),
        page.isolated(sample.text || "(no words)", "p")));
    }
    if (sets.length < page.facts.sets.length) {
      section().append(el("p", {class: "fine"}, `${sets.length} of ${page.facts.sets.length} evaluations; choose any two under Held-out.`));
    }
  };
}
